"""Bad arguments of prefill: a ValueError that repeats the input and says what is accepted, before a byte is written."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from prefill_cases import Case

from kvlab.attention import explain
from kvlab.attention.masks import CausalPaddingMask, MaterializedMask, NullMask
from kvlab.attention.mha_prefill import mha_prefill, mha_prefill_cache, mha_prefill_paged
from kvlab.cache import PagedKVCacheCollection, from_dense
from kvlab.common.arrays import to_torch
from kvlab.memory import bfloat16, float8_e4m3fn
from kvlab.staging import Traffic

E4M3 = float8_e4m3fn
q, kv = np.zeros((2, 4, 4, 64), np.float32), np.zeros((2, 6, 2, 64), np.float32)
E8 = {"q": q.astype(E4M3), "k": kv.astype(E4M3), "v": kv.astype(E4M3)}

DENSE: dict[str, tuple[dict[str, Any], str]] = {
    "q of three axes without cu_seqlens": ({"q": q[0]}, r"q has shape \(4, 4, 64\)"),
    "other batch": ({"k": kv[:1], "v": kv[:1]}, "k has 1 sequences: must be those of q, 2"),
    "other depth": ({"k": kv[..., :32]}, "k has head dimension 32: must be that of q, 64"),
    "v unlike k": ({"v": kv[:, :5]}, r"v has shape \(2, 5, 2, 64\)"),
    "v of another dtype": ({"v": kv.astype(np.float16)}, "v has dtype float16: must be that of k, float32"),
    "dtype": ({"k": kv.astype(np.float16)}, "k has dtype float16: must be that of q"),
    "fp8 keys of float32 queries": ({"k": kv.astype(E4M3), "v": kv.astype(E4M3)}, "k has dtype float8_e4m3fn: must be"),
    "depth past 576": ({"v": np.zeros((2, 6, 2, 584), np.float32)}, "head dimension of v 584: must be a multiple of 8"),
    "alibi of other heads": (
        {"alibi_slopes": np.ones(3, np.float32)},
        r"alibi_slopes has shape \(3,\): must be \[Hq = 4\]",
    ),
    "temperature of other heads": (
        {"temperature": np.ones(2, np.float32)}, r"temperature has shape \(2,\): must be \[Hq = 4\]"
    ),
    "temperature dtype": ({"temperature": np.ones(4)}, "temperature has dtype float64: must be float32"),
    "alibi dtype": ({"alibi_slopes": np.ones(4)}, "alibi_slopes has dtype float64: must be float32"),
    "mask": ({"mask": "causal"}, "mask is 'causal': must be a kvlab.attention.masks.Mask"),
    "mask of other heads": (
        {"mask": MaterializedMask(np.zeros((3, 4, 6)))},
        r"mask has shape \(3, 1, 4, 6\): must be \[2 or 1",
    ),
    "padding of other sequences": ({"mask": CausalPaddingMask(np.ones(3, int))}, "valid_lengths of 3 sequences"),
    "window of a mask": ({"mask": NullMask(), "window": 5}, "window 5 with causal=False"),
    "scale of the wrong heads": (
        E8 | {"k_scale": np.ones(3, np.float32)},
        r"k_scale has shape \(3,\): must be a number",
    ),
    "scale of queries and tokens": (E8 | {"q_scale": np.ones((2, 4, 2), np.float32)}, "q_scale has shape"),
    "scale nan": (E8 | {"v_scale": float("nan")}, "v_scale is nan: must be a finite number"),
    "out of e4m3": (E8 | {"out": np.zeros((2, 4, 4, 64), E4M3)}, "out has dtype float8_e4m3fn: must be bfloat16"),
    "float64": ({"q": q.astype(np.float64)}, "q"),
    "heads": ({"q": q[:, :, :3]}, "q has 3 heads: must be a multiple of the 2 heads of k"),
    "depth 20": ({"q": q[..., :20], "k": kv[..., :20], "v": kv[..., :20]}, "head dimension 20: must be a multiple"),
    "one of cu_seqlens": ({"cu_seqlens_q": np.array([0, 4])}, "only one of cu_seqlens_q and cu_seqlens_k"),
    "max_seqlen_q of dense": ({"max_seqlen_q": 4}, "max_seqlen_q 4 without cu_seqlens_q"),
    "window 0": ({"window": 0}, "window is 0: must be at least 1"),
    "window of full": ({"window": 5, "causal": False}, "window 5 with causal=False"),
    "window words": ({"window": "all"}, "window is 'all': must be None"),
    "softcap": ({"softcap": -1.0}, "softcap is -1.0: must be 0 or more"),
    "scale": ({"scale": float("nan")}, "scale is nan: must be finite in float32"),
    "scale that is a bool": ({"scale": True}, "scale is True: must be finite in float32"),
    "traffic": ({"traffic": 3}, r"traffic is 3: must be a kvlab\.staging\.Traffic or None"),
    "no k": ({"k": None}, "k is a NoneType: must be a NumPy array or torch tensor"),
    "sinks": ({"sinks": np.zeros(3, np.float32)}, r"sinks has shape \(3,\): must be \[Hq = 4\]"),
    "out shape": ({"out": np.zeros((2, 4, 4, 32), np.float32)}, "out has shape"),
    "out over an input": ({"out": q[:]}, "out shares memory with q: must be memory of its own"),
    "backend": ({"backend": "cuda"}, "backend is 'cuda': must be one of"),
    "arch": ({"arch": "sm_70"}, "arch is 'sm_70': must be one of sm_80, sm_90, gfx950"),
    "e4m3 on sm_80": (
        {"k": kv.astype(float8_e4m3fn), "v": kv.astype(float8_e4m3fn), "q": q.astype(bfloat16), "arch": "sm_80"},
        "float8_e4m3fn on sm_80: must be on sm_90 or gfx950",
    ),
    "strided depth": ({"q": np.zeros((2, 4, 4, 128), np.float32)[..., ::2]}, "contiguous in the last dimension"),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str) -> None:
    changes, message = DENSE[name]
    for call in (mha_prefill, functools.partial(explain, mha_prefill)):
        arguments = {"q": q, "k": kv, "v": kv} | changes
        with pytest.raises(ValueError, match=message):
            call(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"cu_q": np.array([0, 5, 4])}, r"cu_seqlens_q is \[0, 5, 4\]: must be numbers from 0 to 7"),
        ({"cu_q": np.array([0, 3, 6])}, r"cu_seqlens_q is \[0, 3, 6\]"),
        ({"cu_k": np.array([0, 9])}, r"cu_seqlens_k has shape \(2,\)"),
        ({"cu_q": np.array([0.0, 3, 7])}, "cu_seqlens_q has dtype float64"),
    ],
)
def test_ragged(changes: dict[str, Any], message: str) -> None:
    x = Case(((3, 4), (4, 5)), form="ragged").build()
    with pytest.raises(ValueError, match=message):
        x.with_(**changes).call()


def test_a_longest_sequence_that_is_not() -> None:
    x = Case(((3, 4), (4, 5)), form="ragged").build()
    with pytest.raises(ValueError, match="max_seqlen_q is 3: must be at least 4"):
        x.call(max_seqlen_q=3)
    assert np.isfinite(x.call(max_seqlen_q=4).astype(float)).all()
    assert x.explain().grid == x.explain(max_seqlen_q=4).grid


def test_more_programs_than_a_grid_holds() -> None:
    """Rests on CUDA's limit, 2^31 - 1 along the first axis of a grid."""
    q = np.broadcast_to(np.zeros((1, 1, 64), np.float32), (2**22, 1, 64))
    starts = np.zeros(2**20 + 1, np.int64)
    starts[-1] = 2**22
    with pytest.raises(ValueError, match=r"programs for 1048576 sequences .*; max_seqlen_q tells the longest"):
        explain(mha_prefill, q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seq_lens": np.array([4, 99], np.int32)}, r"seq_lens\[1\] is 99"),
        ({"seq_lens": np.array([4], np.int32)}, r"seq_lens has shape \(1,\)"),
        ({"table": np.full((2, 3), -1)}, r"block_table\[0, 0\] is -1"),
        ({"table": np.zeros((1, 3), np.int32)}, r"block_table has shape \(1, 3\)"),
        ({"cu_q": None}, "cu_seqlens_q is a NoneType"),
    ],
)
def test_paged(changes: dict[str, Any], message: str) -> None:
    x = Case(((3, 4), (4, 5)), form="paged").build()
    y = x.with_(**changes)
    with pytest.raises(ValueError, match=message):
        mha_prefill_paged(y.q, y.k, y.v, y.table, y.seq_lens, y.cu_q)


def test_nothing_is_written_before_the_checks_pass() -> None:
    out = np.full(q.shape, 7, np.float32)
    with pytest.raises(ValueError, match="window is 0"):
        mha_prefill(q, kv, kv, out=out, window=0)
    assert (out == 7).all()


def test_explain_takes_what_the_call_takes() -> None:
    """Every keyword of the call, and no other; a collection as well."""
    x = Case(((20, 90), (9, 20)), form="paged", kv="fp8", scales="token", alibi="head", sinks=True, hnd=True).build()
    traffic = Traffic()
    options = {"return_lse": True, "scale": 0.1, "base2": True, "traffic": traffic, "batch_invariant": True}
    found = x.explain(**options)
    assert (found.backend, found.config.pack) == ("emulator", 1)
    assert not traffic.moved
    with pytest.raises(ValueError, match="scale is inf"):
        x.explain(scale=float("inf"))
    with pytest.raises(TypeError, match="sclae"):
        x.explain(sclae=0.1)
    cache = from_dense(np.zeros((1, 1, 9, 1, 64)), np.zeros((1, 1, 9, 1, 64)), [9], page_size=4, new_tokens=3)
    q = np.zeros((3, 2, 64))
    with pytest.raises(ValueError, match="q has dtype float64"):
        explain(mha_prefill_cache, q, cache, cu_seqlens_q=np.array([0, 3]))
    with pytest.raises(ValueError, match="cu_seqlens_q of 2 sequences: must be those of the cache, 1"):
        explain(mha_prefill_cache, q, cache, cu_seqlens_q=np.array([0, 1, 3]))


def test_more_keys_than_are_counted_in_32_bits() -> None:
    q = np.zeros((1, 2, 2, 64), np.float32)
    k = np.broadcast_to(q[:, :1, :1], (1, 1 << 31, 1, 64))
    with pytest.raises(ValueError, match="k has 2147483648 rows: must be at most 1073741824"):
        mha_prefill(q, k, k, window=5)


@pytest.mark.parametrize("kind", ["uint32", "uint64"])
def test_unsigned_starts_of_tensors(kind: str) -> None:
    """Rests on the same call with int64; torch does not subtract unsigned integers."""
    rng = np.random.default_rng(0)
    blocks = rng.standard_normal((4, 2, 1, 16, 1, 64), np.float32)
    q, table = rng.standard_normal((4, 2, 64), np.float32), np.array([[2, 0], [3, -1]])
    found = []
    for dtype in (np.dtype(kind), np.dtype(np.int64)):
        cache = PagedKVCacheCollection(blocks, np.array([17, 5], dtype), table, 3, 20).torch()
        starts = to_torch(np.array([0, 3, 4], dtype))
        found.append(mha_prefill_cache(to_torch(q), cache, cu_seqlens_q=starts, backend="reference"))
    assert found[0].equal(found[1])


def test_a_quantised_collection_brings_its_scales() -> None:
    """Rests on the array form with the same scales."""
    rng = np.random.default_rng(0)
    blocks = rng.standard_normal((4, 2, 1, 16, 2, 64)).astype(E4M3)
    scales = rng.uniform(0.5, 2, (4, 2, 1, 16, 2, 1)).astype(np.float32)
    table, lens = np.array([[2, 0], [3, -1]]), np.array([17, 5])
    sizes: dict[str, Any] = {"scales": scales, "quantization_granularity": 64}
    cache = PagedKVCacheCollection(blocks, lens.astype(np.uint32), table, 3, 20, **sizes)
    q, starts = rng.standard_normal((4, 4, 64)).astype(bfloat16), np.array([0, 3, 4])
    out = mha_prefill_cache(q, cache, cu_seqlens_q=starts)
    k, v = (blocks[:, i, 0] for i in (0, 1))
    own = {"k_scale": scales[:, 0, 0, ..., 0], "v_scale": scales[:, 1, 0, ..., 0]}
    expected = mha_prefill_paged(q, k, v, table, lens + [3, 1], starts, **own)
    np.testing.assert_array_equal(out, expected)
    coarse = PagedKVCacheCollection(
        blocks, lens.astype(np.uint32), table, 3, 20, scales=scales.repeat(2, -1), quantization_granularity=32
    )
    with pytest.raises(ValueError, match="a cache with 2 scales a head and token: must be one"):
        mha_prefill_cache(q, coarse, cu_seqlens_q=starts)
