"""A second query, of V. Rests on float64 references, in the tolerance of yardsticks, of the same attention over
K with V's columns behind its own, which knows no second query; on the compilers' artefacts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import queried_values
import torch
from caught import Caught, as_if_on, as_launched, ptx_of
from prefill_cases import Case, Inputs
from queried_values import narrowed
from yardsticks import assert_accurate, bits

from kvlab.attention import attend_paged, explain, mha_decode_paged, mha_prefill_paged, plan
from kvlab.attention.attend_paged import kernel
from kvlab.attention.attend_paged.config import WalkConfig, choose_walks, ragged_problem
from kvlab.attention.call.backends import _each
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scores import beyond_rows
from kvlab.attention.mha_decode import call as decode_call
from kvlab.common.arrays import to_torch
from kvlab.memory import float8_e4m3fn
from kvlab.mirror import lockstep


def queried(lens: tuple[tuple[int, int], ...], D: int, DV: int, **sizes: Any) -> tuple[Inputs, tuple[Any, ...], Any]:
    """(inputs whose V is the last columns of K, the call's arrays with K and V apart, qv)."""
    x = Case(lens, form="paged", D=D + DV, DV=DV, **sizes).build()
    return x, *queried_values.queried(x, D)


CASES = [
    (((1, 130), (0, 9), (9, 40), (3, 0), (20, 20)), 64, 512, {"heads": (4, 2), "dtype": "bf16"}, "sm_90"),
    (((1, 70), (6, 33)), 48, 320, {"heads": (6, 2), "dtype": "fp16", "page": 5}, "sm_80"),
    (((2, 90), (7, 30)), 16, 256, {"heads": (2, 1), "dtype": "fp32", "window": 20, "softcap": 3.0, "sinks": True},
     "sm_90"),
]


@pytest.mark.parametrize("lens, D, DV, sizes, arch", CASES, ids=lambda value: str(value)[:20])
def test_emulated(lens: Any, D: int, DV: int, sizes: dict[str, Any], arch: str) -> None:
    """NaN lies where no sequence has a key; with a plan of the step, the bits of the call."""
    x, arrays, qv = queried(lens, D, DV, **sizes)
    options = {n: o for n, o in x.arguments()[2].items() if n in ("window", "softcap", "sinks")} | {"qv": qv}
    options |= {"arch": arch, "return_lse": True}
    out, lse = attend_paged(*arrays, **options)
    assert_accurate(x, out, lse)
    assert_accurate(x, *attend_paged(*arrays, **options | {"backend": "reference"}))
    step = plan(arrays[4], (arrays[5], len(qv)), q_heads=sizes["heads"][0], kv_heads=sizes["heads"][1],
                head_dim=D + DV, itemsize=qv.itemsize, window=sizes.get("window"))
    planned = mha_prefill_paged(*arrays, **options, plan=step)
    assert [bits(a) for a in planned] == [bits(a) for a in (out, lse)]


E4M3 = [
    (((1, 130), (0, 9), (9, 40), (3, 0)), 64, 512, {"heads": (4, 2)}, "token"),
    (((1, 70), (6, 33)), 48, 320, {"heads": (6, 2), "dtype": "fp16", "page": 5, "sinks": True}, "head"),
    (((2, 90), (7, 30)), 16, 256, {"heads": (2, 1), "window": 20, "softcap": 3.0}, "sequence"),
    (((2, 90), (1, 30)), 64, 512, {"heads": (8, 1)}, "number"),
]


@pytest.mark.parametrize("lens, D, DV, sizes, scales", E4M3, ids=lambda value: str(value)[:20])
def test_e4m3(lens: Any, D: int, DV: int, sizes: dict[str, Any], scales: str) -> None:
    """K and V of e4m3 with scales of their own: both products have them."""
    x, arrays, qv = queried(lens, D, DV, **sizes)
    options = {n: o for n, o in x.arguments()[2].items() if n in ("window", "softcap", "sinks")} | {"qv": qv}
    arrays, by = narrowed(x, arrays, D, scales)
    options |= by | {"return_lse": True}
    out, lse = attend_paged(*arrays, **options)
    assert_accurate(x, out, lse)
    assert_accurate(x, *attend_paged(*arrays, **options | {"backend": "reference"}))
    step = plan(arrays[4], (arrays[5], len(qv)), q_heads=sizes["heads"][0], kv_heads=sizes["heads"][1],
                head_dim=D + DV, itemsize=1, window=sizes.get("window"))
    planned = attend_paged(*arrays, **options, plan=step)
    assert [bits(a) for a in planned] == [bits(a) for a in (out, lse)]


def test_decode_and_padding() -> None:
    """``mha_decode_paged``, drafts of more than 4 tokens among them; keys before the first valid one are NaN."""
    x, (q, k, v, table, lens, starts), qv = queried(((6, 40), (6, 25)), 16, 256, heads=(4, 2), dtype="fp32")
    shape = 2, 6, 4, -1
    out = mha_decode_paged(q.reshape(shape), k, v, table, lens, qv=qv.reshape(shape))
    assert_accurate(x, out.reshape(12, 4, -1))
    assert bits(out.reshape(12, 4, -1)) == bits(attend_paged(q, k, v, table, lens, starts, qv=qv))
    pad = np.array([16, 16], np.int32)
    padded = attend_paged(q, k, v, table, lens, starts, qv=qv, leftpad_k=pad)
    shorter = attend_paged(q, k, v, table[:, 1:], lens - 16, starts, qv=qv)
    assert np.abs(padded - shorter).max() < 1e-6
    assert np.abs(padded - out.reshape(padded.shape)).max() > 1e-3


@pytest.mark.interpreter
def test_lockstep() -> None:
    """Every output of every step, over K and V of strides of their own; a sequence is cut in parts."""
    _, arrays, qv = queried(((1, 50), (0, 3)), 16, 256, heads=(2, 1), dtype="fp32")
    call = attend_paged.planned(*arrays, qv=qv, backend="reference")
    config = choose_walks(ragged_problem(*call.arrays[:4], call.arrays[5]), 1, qv=True, processors=2)
    names = "q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens"
    named = {"scale": call.plan.scale, "features": call.features, "config": config}
    result = lockstep("attend_paged", dict(zip(names, call.arrays, strict=True)) | named)
    assert result.ok, str(result.first_difference)


@pytest.mark.interpreter
def test_lockstep_of_e4m3() -> None:
    """Every output of every step with scales of tokens."""
    x, arrays, qv = queried(((1, 50), (0, 3)), 16, 256, heads=(2, 1))
    arrays, by = narrowed(x, arrays, 16, "token")
    call = attend_paged.planned(*arrays, qv=qv, **by, backend="reference")
    config = choose_walks(ragged_problem(*call.arrays[:4], call.arrays[5]), 1, qv=True, processors=2)
    names = "q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens"
    named = {"scale": call.plan.scale, "features": call.features, "config": config}
    result = lockstep("attend_paged", dict(zip(names, call.arrays, strict=True)) | named)
    assert result.ok, str(result.first_difference)


@pytest.mark.compile
@pytest.mark.parametrize("target, most, scales", [
    ("sm_90", 170_000, ""), ("sm_80", 96 << 10, ""), ("gfx950", 64 << 10, ""), ("sm_90", 170_000, "token"),
    ("sm_89", 100 << 10, "head"), ("gfx950", 64 << 10, "token"),
])
def test_compiled(target: str, most: int, scales: str) -> None:
    """Registers hold all; a tile of V is in shared memory once, for both products: two stages have no room twice."""
    x, arrays, qv = queried(((1, 5), (3, 3)), 64, 512, heads=(8, 2))
    arrays, by = narrowed(x, arrays, 64, scales) if scales else (arrays, {})
    call = attend_paged.planned(*arrays, qv=qv, **by, backend="reference")
    config = choose_walks(ragged_problem(*call.arrays[:4], call.arrays[5]), 3, qv=True, arch=target)
    stub = Caught(kernel.walk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "walk", stub)
        patch.setattr(kernel, "join", Caught(kernel.join))
        patch.setattr(kernel, "make_list", lambda *args, **more: (torch.zeros(4096, dtype=torch.int32),))
        features = _each(to_torch, (call.features,), {})[0][0]
        kernel.launch(*map(to_torch, call.arrays), scale=0.1, config=WalkConfig(config.walks[:1]), features=features)
    arguments = stub.calls[-1][1]
    arguments["C"] = arguments["C"]._replace(PTX=ptx_of(target))
    made = as_launched(stub.fn, arguments, target)
    assert made.spills == 0
    assert made.shared <= most


def test_decode_on_a_gpu_is_over_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: whatever the pool and ``balanced``, as no other kernel looks at ``qv``."""
    monkeypatch.setattr(decode_call, "on_gpu", lambda array: True)
    _, (q, *rest, _), qv = queried(((1, 40), (1, 33)), 16, 256, heads=(2, 1))
    for balanced in (None, False, True):
        assert mha_decode_paged.made(q, *rest, qv=qv, balanced=balanced).over_schedule
    assert not mha_decode_paged.made(q, *rest).over_schedule


@pytest.mark.parametrize("D, DV", [(16, 256), (48, 320), (64, 512)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_plan_of_all_columns_fits(D: int, DV: int, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: it is made without ``qv``, so that the tiles of a call follow from D + Dv columns alone."""
    as_if_on(monkeypatch, arch)
    _, arrays, qv = queried(((1, 40), (90, 300), (9, 33)), D, DV, heads=(4, 2))
    arrays = tuple(map(to_torch, arrays))
    step = plan(arrays[4], (arrays[5], len(qv)), q_heads=4, kv_heads=2, head_dim=D + DV)
    for given in ({}, {"plan": step}):
        config = explain(attend_paged, *arrays, qv=to_torch(qv), **given).config
        assert [walk.tiles.BM for walk in config.walks] == [walk.config.BM for walk in step.walks]


def test_told_beforehand() -> None:
    x, arrays, qv = queried(((1, 40), (9, 33)), 64, 512, heads=(4, 2))
    told = explain(mha_prefill_paged, *arrays, qv=qv)
    assert told.operation == "attend_paged"
    assert told.schedule.programs == 132
    assert told.config.walks[0].tiles.v_columns == (512, 0)
    call = attend_paged.planned(*arrays, qv=qv)
    assert call.plan.scale == pytest.approx(576**-0.5)
    assert x.case.D == 576


def test_bad_calls() -> None:
    _, arrays, qv = queried(((1, 40), (3, 33)), 64, 512, heads=(4, 2))
    q, k, v, *rest = arrays
    step = plan(rest[1], (rest[2], 4, 90), q_heads=4, kv_heads=2, head_dim=64)
    narrow = {"k_cache": k.astype(float8_e4m3fn), "v_cache": v.astype(float8_e4m3fn)}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"qv": qv[:3]}, r"qv has shape \(3, 4, 512\): must be \(4, 4, 512\), that of q with V's columns"),
        ({"qv": qv.astype(np.float32)}, "qv has dtype float32: must be that of q, bfloat16"),
        ({"qv": qv[..., :128], "v_cache": v[..., :128]}, "qv beside head dimensions 64 of K and 128 of V: must be 256"),
        ({"qv": qv, "backend": "hopper"}, "backend is 'hopper' with head dimensions 64"),
        ({"qv": qv, "arch": "gfx950"}, "qv on gfx950: must be None, or on sm_80 or sm_90"),
        ({"qv": qv, "plan": step}, "plan has tiles of 32 rows: must be of 16"),
        ({"qv": qv[..., ::-1]}, "qv"),
        ({"qv": qv, **narrow, "q": q.astype(float8_e4m3fn)}, "qv has dtype bfloat16: must be that of q, float8"),
        ({"qv": qv.astype(float8_e4m3fn), **narrow, "q": q.astype(float8_e4m3fn)}, "qv beside q of float8_e4m3fn: mu"),
    ]
    for options, words in wrong:
        given = [options.pop(name, value) for name, value in (("q", q), ("k_cache", k), ("v_cache", v))]
        out = np.full((*q.shape[:2], given[2].shape[3]), 7, q.dtype)
        with pytest.raises(ValueError, match=words):
            attend_paged(*given, *rest, out=out, **options)
        assert (out == 7).all()
    assert beyond_rows(Features(qv=qv)) == "qv"  # of Hopper's kernels
    with pytest.raises(ValueError, match="num_splits with qv: must be left out"):
        mha_decode_paged(q[:2], k, v, *rest[:2], qv=qv[:2], num_splits=2)
    with pytest.raises(ValueError, match="balanced=False with qv: must be left out"):
        mha_decode_paged(q[:2], k, v, *rest[:2], qv=qv[:2], balanced=False)
