"""What bad arguments get: a ValueError naming the argument, its value and what is accepted, with nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bad_arguments import Change, change, in_use
from decode_cases import Case
from yardsticks import bits

from kvlab.attention import explain, mha_decode, mha_decode_paged
from kvlab.cache import from_dense
from kvlab.common.arrays import to_torch

NAMES = ("q", "k_cache", "v_cache", "block_table", "seq_lens")


def arguments() -> dict[str, Any]:
    """A good call: B 2, S 1, Hq 4, Hkv 2, D 64, 3 columns of pages of 16, 6 pages, an out full of sevens."""
    x = Case((20, 17), heads=(4, 2), dtype="fp32").build()
    return dict(zip(NAMES, x.arrays, strict=True)) | {"out": np.full(x.q.shape, 7, np.float32)}


def option(name: str, value: Any) -> Change:
    return lambda a: a.update({name: value})


def both(name: str, other: str, new: Callable[[Any], Any]) -> Change:
    return lambda a: a.update({name: new(a[name]), other: new(a[other])})


def all_of(dtype: Any) -> Change:
    return lambda a: a.update(
        {name: np.nan_to_num(a[name]).astype(dtype) for name in ("q", "k_cache", "v_cache", "out")}
    )


CASES: dict[str, tuple[Change, str]] = {
    "q is a list": (change("q", lambda q: q.tolist()), "q is a list: must be a NumPy array or torch tensor"),
    "no lengths": (option("seq_lens", None), "seq_lens is a NoneType: must be a NumPy array or torch tensor"),
    "q of rank 2": (change("q", lambda q: q[0, 0]), r"q has shape \(4, 64\): must be \[B, Hq, D\] or \[B, S, Hq, D\]"),
    "five tokens": (both("q", "out", lambda a: a.repeat(5, 1)), "q has 5 new tokens a sequence: must be 1 to 4"),
    "no token": (both("q", "out", lambda a: a[:, :0]), "q has 0 new tokens a sequence: must be 1 to 4"),
    "float64": (all_of(np.float64), "q has dtype float64: must be bfloat16, float16, float32 or float8_e4m3fn"),
    "integers": (all_of(np.int32), "q has dtype int32: must be bfloat16, float16, float32 or float8"),
    "k of rank 5": (change("k_cache", lambda k: k[None]), r"k_cache has shape \(1, 6, .*: must be \[pages, page_size"),
    "k of another dtype": (
        change("k_cache", lambda k: k.astype(np.float16)),
        "k_cache has dtype float16: must be that",
    ),
    "v of another dtype": (
        change("v_cache", lambda v: v.astype(np.float16)),
        "v_cache has dtype float16: must be that",
    ),
    "k of another depth": (
        change("k_cache", lambda k: k[..., :32]),
        "k_cache has head dimension 32: must be that of q",
    ),
    "v of another depth": (
        change("v_cache", lambda v: v[..., :12]),
        "head dimension of v_cache 12: must be a multiple of 8 from 16 to 576",
    ),
    "v of fewer pages": (change("v_cache", lambda v: v[:5]), r"v_cache has shape \(5, 16, 2, 64\): must be that of k"),
    "no page": (both("k_cache", "v_cache", lambda a: a[:0]), r"k_cache has shape \(0, 16, 2, 64\): must be at least"),
    "pages of 0": (both("k_cache", "v_cache", lambda a: a[:, :0]), r"\(6, 0, 2, 64\): must be at least one page, one"),
    "no KV head": (both("k_cache", "v_cache", lambda a: a[:, :, :0]), r"\(6, 16, 0, 64\): must be at least one"),
    "3 heads over 2": (both("q", "out", lambda a: a[:, :, :3]), "q has 3 heads: must be a multiple of the 2 heads of"),
    "table of rank 1": (change("block_table", lambda t: t[0]), r"block_table has shape \(4,\): must be \[B = 2, col"),
    "table of 1 row": (change("block_table", lambda t: t[:1]), r"block_table has shape \(1, 4\): must be \[B = 2, col"),
    "float table": (
        change("block_table", lambda t: t.astype(float)),
        "block_table has dtype float64: must be a 32- or",
    ),
    "int16 table": (change("block_table", lambda t: t.astype(np.int16)), "block_table has dtype int16: must be a 32-"),
    "3 lengths": (change("seq_lens", lambda t: np.append(t, 1)), r"seq_lens has shape \(3,\): must be \[B = 2\]"),
    "float lengths": (
        change("seq_lens", lambda t: t.astype(float)),
        "seq_lens has dtype float64: must be a 32- or 64-",
    ),
    "length -1": (change("seq_lens", lambda t: t - 18), r"seq_lens\[1\] is -1: must be 0 to 64, what the 4 columns"),
    "length 65": (change("seq_lens", lambda t: t + 45), r"seq_lens\[0\] is 65: must be 0 to 64, what the 4 columns"),
    "page 6": (
        change("block_table", lambda t: in_use(t, 6)),
        r"block_table\[1, 0\] is 6: a page in use must be 0 to 5",
    ),
    "page -1": (change("block_table", lambda t: in_use(t, -1)), r"block_table\[1, 0\] is -1: a page in use must be 0"),
    "out of another shape": (
        change("out", lambda o: o[:, :, :2]),
        r"out has shape \(2, 1, 2, 64\): must be \(2, 1, 4, 64\)",
    ),
    "out of another dtype": (change("out", lambda o: o.astype(np.float16)), "out has dtype float16: must be that of q"),
    "q of stride 2": (change("q", lambda q: q.repeat(2, 3)[..., ::2]), r"q has strides .*: must be contiguous in the"),
    "k of stride 2": (
        change("k_cache", lambda k: k.repeat(2, 3)[..., ::2]),
        "k_cache has strides .*: must be contiguous",
    ),
    "table of stride 2": (
        change("block_table", lambda t: t.repeat(2, 1)[:, ::2]),
        "block_table has strides .*: must be",
    ),
    "q backwards": (change("q", lambda q: q[::-1]), "q has strides .*: must be not negative"),
    "lengths backwards": (change("seq_lens", lambda t: t[::-1]), r"seq_lens has strides \(-1,\): must be not negative"),
    "scale": (option("scale", float("nan")), "scale is nan: must be finite"),
    "mask_value": (option("mask_value", float("nan")), "mask_value is nan: must be less than infinity"),
    "backend": (option("backend", "cuda"), "backend is 'cuda': must be one of auto, reference, emulator, triton"),
    "arch": (option("arch", "sm_70"), "arch is 'sm_70': must be one of sm_80, sm_90, gfx950"),
    "0 splits": (option("num_splits", 0), "num_splits is 0: must be an integer from 1 to 64"),
    "65 splits": (option("num_splits", 65), "num_splits is 65: must be an integer from 1 to 64"),
    "half a split": (option("num_splits", 1.5), "num_splits is 1.5: must be an integer from 1 to 64"),
    "a split that is a bool": (option("num_splits", True), "num_splits is True: must be an integer from 1 to 64"),
    "a split that is a float": (option("num_splits", 2.0), r"num_splits is 2\.0: must be an integer from 1 to 64"),
    "scale beyond float32": (option("scale", 1e39), r"scale is 1e\+39: must be finite in float32"),
    "scales": (option("scale", np.ones(2)), r"scale is array\(\[1\., 1\.\]\): must be finite in float32"),
    "scale of text": (option("scale", "0.1"), "scale is '0.1': must be finite in float32"),
    "scale beyond float64": (option("scale", 10**400), "scale is 10{400}: must be finite in float32"),
    "no mask_value": (option("mask_value", None), "mask_value is None: must be less than infinity"),
    "mask_value beyond float32": (option("mask_value", 1e39), r"mask_value is 1e\+39: must be less than infinity"),
    "traffic": (option("traffic", 3), r"traffic is 3: must be a kvlab\.staging\.Traffic or None"),
    "complex": (change("q", lambda q: q.astype(complex)), "q has dtype complex128: must be bfloat16, float16, float32"),
    "bool table": (change("block_table", lambda t: t > 0), "block_table has dtype bool: must be a 32- or 64-bit int"),
    "other byte order": (all_of(">f4"), "q has dtype >f4, another byte order than this machine's: convert it with"),
    "k in another byte order": (change("k_cache", lambda k: k.astype(">f4")), "k_cache has dtype >f4, another byte"),
    "masked table": (change("block_table", np.ma.masked_array), "block_table is a MaskedArray: must be a plain array"),
    "matrix": (change("block_table", lambda t: t.view(np.matrix)), "block_table is a matrix: must be a plain array"),
    "length 2**64 - 1": (
        change("seq_lens", lambda t: np.array([2**64 - 1, 3], np.uint64)),
        r"seq_lens\[0\] is 18446744073709551615: must be 0 to 64",
    ),
    "torch and NumPy": (change("q", lambda q: torch.from_numpy(q)), r"q: torch \(cpu\), k_cache: NumPy.*one library"),
}


@pytest.mark.parametrize("case", CASES)
def test_error(case: str) -> None:
    apply, message = CASES[case]
    a = arguments()
    canary = a["out"]
    apply(a)
    with pytest.raises(ValueError, match=message):
        mha_decode_paged(**a)
    with pytest.raises(ValueError, match=message):
        explain(mha_decode_paged, **a)
    assert (canary == 7).all()


@pytest.mark.parametrize("depth", [8, 584, 60])
def test_head_dimension(depth: int) -> None:
    q, kv = np.zeros((1, 1, depth), np.float32), np.zeros((1, 16, 1, depth), np.float32)
    with pytest.raises(ValueError, match=f"head dimension {depth}: must be a multiple of 8 from 16 to 576"):
        mha_decode_paged(q, kv, kv, np.zeros((1, 1), np.int32), np.array([1]))


def test_head_dimension_of_max_s_decode() -> None:
    q, kv = np.zeros((1, 1, 96), np.float32), np.zeros((1, 16, 1, 96), np.float32)
    with pytest.raises(ValueError, match="head dimensions 96 and 96 on gfx950: must be both 64, 128, 256 or 512"):
        mha_decode_paged(q, kv, kv, np.zeros((1, 1), np.int32), np.array([1]), arch="gfx950")


def test_read_only_out() -> None:
    a = arguments()
    a["out"].flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only: must be writeable"):
        mha_decode_paged(**a)


def test_rows_that_no_lane_can_copy() -> None:
    a = arguments()
    a["k_cache"] = np.zeros((6, 16, 2, 65), np.float32)[..., :64]
    with pytest.raises(ValueError, match=r"k_cache has strides of .* bytes: must be multiples of 16"):
        mha_decode_paged(**a)
    assert (a["out"] == 7).all()
    assert mha_decode_paged(**a, backend="reference") is a["out"]


def test_rows_of_fp8_at_odd_bytes() -> None:
    """Columns of fp8 move in pairs."""
    kv = torch.zeros(2 * 4001).to(torch.float8_e4m3fn).as_strided((2, 16, 2, 64), (4001, 128, 64, 1))
    q, table, lens = torch.zeros(1, 2, 64, dtype=torch.bfloat16), torch.tensor([[0]]), torch.tensor([9])
    with pytest.raises(
        ValueError, match=r"k_cache of float8_e4m3fn has strides \(4001, .*: must be rows at even bytes"
    ):
        mha_decode_paged(q, kv, kv, table, lens)


def test_more_keys_than_are_counted_in_32_bits() -> None:
    """Rests on the kernels' 32-bit keys: a page of a table names 1024 keys that all lie in one place."""
    kv = np.broadcast_to(np.zeros((1, 1, 1, 64), np.float32), (1, 1024, 1, 64))
    table = np.zeros((1, 1 << 21), np.int32)
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 2147483649: must be 0 to 1073741824"):
        mha_decode_paged(np.zeros((1, 2, 64), np.float32), kv, kv, table, np.array([(1 << 31) + 1]), window=5)


def tensors() -> dict[str, Any]:
    return {name: to_torch(array) for name, array in arguments().items()}


TENSORS: dict[str, tuple[Change, str]] = {
    "two devices": (change("seq_lens", lambda t: t.to("meta")), r"seq_lens: torch \(meta\).*one device"),
    "grad": (change("q", lambda q: q.clone().requires_grad_()), "q requires grad: must be detached"),
    "grad of out": (change("out", lambda o: o.clone().requires_grad_()), "out requires grad: must be detached"),
    "complex": (change("q", lambda q: q.to(torch.complex64)), "q has dtype torch.complex64: must be bfloat16"),
    "bool lengths": (change("seq_lens", lambda t: t.bool()), "seq_lens has dtype torch.bool: must be a 32- or"),
    "out of one row": (
        change("out", lambda o: o[:1].expand(2, 1, 4, 64)),
        "out has strides .*: must be without elements",
    ),
    "backend": (option("backend", "emulate"), "backend is 'emulate': must be one of"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_error_of_tensors(case: str) -> None:
    apply, message = TENSORS[case]
    a = tensors()
    canary = a["out"]
    apply(a)
    with pytest.raises(ValueError, match=message):
        mha_decode_paged(**a)
    assert (canary == 7).all()


def test_tensors_without_memory_a_kernel_can_read() -> None:
    meta = {name: tensor.to("meta") for name, tensor in tensors().items()}
    with pytest.raises(ValueError, match="q is on meta: must be in CPU memory or on a GPU"):
        mha_decode_paged(**meta)
    for change_q, message in (
        (lambda q: q.to_sparse(), r"q has the layout torch\.sparse_coo: must be a dense tensor"),
        (torch._neg_view, "q is a lazy negative or conjugate: must be"),
    ):
        a = tensors()
        with pytest.raises(ValueError, match=message):
            mha_decode_paged(**a | {"q": change_q(a["q"])})
        assert (a["out"] == 7).all()


@pytest.mark.parametrize("make", [lambda a: a, to_torch], ids=["NumPy", "torch"])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "block_table", "seq_lens"])
def test_out_over_an_input(name: str, make: Callable[[Any], Any]) -> None:
    a = arguments()
    out = a["out"]
    memory = np.zeros(a[name].nbytes + out.nbytes, np.uint8)
    a[name], given = memory[: a[name].nbytes].view(a[name].dtype).reshape(a[name].shape), a[name]
    a[name][...] = given
    start = a[name].nbytes - 4  # bytes: the last of the input are the first of out
    a["out"] = memory[start : start + out.nbytes].view(out.dtype).reshape(out.shape)
    before = memory.copy()
    with pytest.raises(ValueError, match=f"out shares memory with {name}: must be memory of its own, or q itself"):
        mha_decode_paged(**{key: make(value) for key, value in a.items()})
    np.testing.assert_array_equal(memory, before)


def test_out_may_be_q_and_lie_beside_it() -> None:
    a = arguments()
    expected = mha_decode_paged(**a).copy()
    both = np.stack([a["q"], np.zeros_like(a["q"])], axis=2)  # [B, S, 2, Hq, D]: interleaved, nothing in common
    a["q"], a["out"] = both[:, :, 0], both[:, :, 1]
    np.testing.assert_array_equal(mha_decode_paged(**a), expected)
    a["out"] = a["q"]
    assert mha_decode_paged(**a) is a["q"]
    np.testing.assert_array_equal(a["q"], expected)


def test_integers_of_numpy_and_parameters_of_torch_are_taken() -> None:
    a = arguments()
    expected = mha_decode_paged(**a).copy()
    np.testing.assert_array_equal(mha_decode_paged(**a, num_splits=np.int64(1), scale=np.float32(0.125)), expected)
    t = tensors()
    t["q"] = torch.nn.Parameter(t["q"], requires_grad=False)
    np.testing.assert_array_equal(mha_decode_paged(**t, backend="emulator").numpy(), expected)


def test_explain_takes_the_options_of_the_call() -> None:
    a = arguments()
    assert explain(mha_decode_paged, **a, return_lse=True, scale=0.1).backend == "emulator"
    with pytest.raises(TypeError, match="sacle"):
        explain(mha_decode_paged, **a, sacle=1)


def test_cache_of_another_kind() -> None:
    with pytest.raises(ValueError, match="cache is a list: must be a PagedKVCacheCollection"):
        mha_decode(np.zeros((1, 1, 64), np.float32), [])  # type: ignore[arg-type]


def test_layer_that_is_not_there() -> None:
    k = np.zeros((2, 1, 5, 1, 16), np.float32)
    cache = from_dense(k, k, [5], page_size=4, new_tokens=1)
    with pytest.raises(IndexError, match=r"layer is 2: must be in \[0, 2\)"):
        mha_decode(np.zeros((1, 1, 16), np.float32), cache, layer=2)


def test_explain_needs_a_public_function() -> None:
    with pytest.raises(ValueError, match="cannot be explained"):
        explain(bits)
