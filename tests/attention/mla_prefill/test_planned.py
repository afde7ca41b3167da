"""MLA prefill over the schedule of a plan. Rests on the float64 reference in the tolerance of yardsticks; on the call
without a plan, whose bits a sequence has that is not cut; on the plan of the lengths; on the compilers' artefacts.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from caught import SHARED, Caught, as_launched, as_tensors
from mla_prefill_cases import Case, Inputs
from yardsticks import assert_accurate, bits

from kvlab.attention import explain, mla_prefill, mla_prefill_paged, plan
from kvlab.attention.attend_paged import kernel as every_walk
from kvlab.attention.attend_paged.expanded import kernel
from kvlab.attention.attend_paged.expanded.config import schedule_of_tiles
from kvlab.attention.masks import ChunkedMask
from kvlab.attention.schedule import Schedule, ScheduleConfig
from kvlab.cache import PagedKVCacheCollection
from kvlab.mirror import check, lockstep
from kvlab.staging import Traffic

OP = "kvlab.attention.attend_paged.expanded"


def step_of(x: Inputs, teams: int | None = 3, **options: Any) -> Schedule:
    """The plan of a call on so many programs of each head."""
    case, (nope, rope, value) = x.case, x.case.columns
    placed = case.starts is not None
    causal = not placed and (case.mask is None if case.causal is None else case.causal)
    sizes: dict[str, Any] = {"q_heads": case.H, "kv_heads": case.H, "head_dim": (max(nope, value), rope)}
    sizes |= {} if teams is None else {"programs": teams * case.H}
    sizes |= {"itemsize": x.k.itemsize, "causal": causal, "window": None if placed else case.window}
    return plan(np.diff(x.cu_k), (x.cu_q, len(x.q)), **sizes | options)


UNEVEN = [
    (Case(((150, 200), (0, 9), (5, 3), (4, 0), (1, 700))), 3),
    (Case(((130, 130), (3, 70)), row="", dtype="fp16", H=3, sinks=True), 7),
    (Case(((60, 400), (9, 30)), starts=(100, 3), held=(300, 20), window=70, H=1), 4),
    (Case(((90, 500), (9, 30)), window=200, mask=ChunkedMask(128), causal=True, softcap=5.0, slopes=True), 4),
    (Case(((90, 900), (3, 100)), window=500, H=1), 4),
    (Case(((20, 400), (3, 20)), kv="fp8", scales="token", row="rope-aware", page=7, strided=True), 3),
    (Case(((40, 90), (0, 0)), kv="fp8", scales="token", row="", dtype="fp8", columns=(192, 64, 144)), 3),
    (Case(((30, 300),), dtype="fp32", columns=(64, 32, 64), H=1), 5),
]


@pytest.mark.parametrize("case, teams", UNEVEN, ids=str)
def test_emulated(case: Case, teams: int) -> None:
    x = case.build()
    assert_accurate(x, *x.call(plan=step_of(x, teams), return_lse=True))


@pytest.mark.interpreter
@pytest.mark.parametrize("case, teams", [
    (Case(((20, 150), (0, 9), (3, 70)), page=5, sinks=True, H=1), 3),
    (Case(((9, 200),), starts=(30,), held=(140,), kv="fp8", scales="token", window=60, H=1), 3),
], ids=str)
def test_lockstep(case: Case, teams: int) -> None:
    """Every output of every step of the walk; and the results, which the join completes."""
    x = case.build()
    names = "q", "k", "v", "cache", "table", "seq_lens", "cu_q", "cu_k"
    options = {"latent_dim": case.latent, "k_starts": x.starts, "sinks": x.sinks, "window": case.window}
    options |= dict(zip(("k_scale", "v_scale"), x.kv_scales, strict=True))
    call = mla_prefill_paged.planned(*(getattr(x, n) for n in names), plan=step_of(x, teams), **options)
    arrays = dict(zip(("q", "k", "v", "k_rope", "sequences"), call.arrays, strict=True))
    result = lockstep(OP, arrays | {n: value for n, value in call.named().items() if n != "out"})
    assert result.ok, str(result.first_difference)


@pytest.mark.interpreter
def test_tensors_and_collections() -> None:
    """The public call over tensors and over a collection, by one plan, give what a call without it does."""
    x = Case(((20, 90), (3, 17))).build()
    step = step_of(x)
    tensors = plan(torch.tensor(np.diff(x.cu_k)), (torch.tensor(x.cu_q), 23), q_heads=2, kv_heads=2,
                   head_dim=(128, 64), programs=6)
    assert_accurate(x, *x.call(plan=tensors, device="cpu", return_lse=True))
    collection = PagedKVCacheCollection(x.cache[:, None, None, :, None], x.seq_lens - np.diff(x.cu_q), x.table, 20, 90)
    out = mla_prefill(x.q, x.k, x.v, collection, cu_seqlens_q=x.cu_q, cu_seqlens_k=x.cu_k, latent_dim=64, plan=step)
    assert bits(out) == bits(x.call(plan=step))


def test_the_twins_mirror_each_other() -> None:
    assert check(OP).ok


def test_a_sequence_that_is_not_cut_has_the_bits_of_the_call_without_a_plan() -> None:
    """One team does all tiles one after the other; the same lengths give the same bits."""
    x = Case(((300, 400), (0, 17), (5, 129)), H=3).build()
    one, plain = (x.call(return_lse=True, **options) for options in ({"plan": step_of(x, 1)}, {}))
    assert [bits(a) for a in one] == [bits(a) for a in plain]
    fewer = x.with_(seq_lens=np.maximum(x.seq_lens - 37, 0))  # than K holds, which nobody looks at
    one, plain_of_fewer = (fewer.call(check=False, **options) for options in ({"plan": step_of(x, 1)}, {}))
    assert bits(one) == bits(plain_of_fewer)
    cut, again = (x.call(plan=step_of(x, 4)) for _ in range(2))
    assert bits(cut) == bits(again) != bits(plain[0])


def test_each_key_is_read_once_by_each_tile() -> None:
    """Bytes from DRAM: K, its rope part and V of the key blocks of each unit, and q once for each unit."""
    x, traffic = Case(((64, 512), (128, 128)), H=2, causal=False).build(), Traffic()
    step = step_of(x, 3)
    x.call(plan=step, traffic=traffic)
    units = step.units
    keys, rows = int((units["last"] - units["first"]).sum()) * 64, np.diff(x.cu_q)[units["sequence"]].sum()
    assert len(units) > 4
    assert traffic.moved["DRAM->SMEM"] == 2 * (keys * (128 + 64 + 128) + int(rows) * (128 + 64))


def test_told_beforehand() -> None:
    x = Case(((150, 200), (5, 30)), H=16).build()
    step = step_of(x, None)
    told = explain(mla_prefill_paged, x.q, x.k, x.v, x.cache, x.table, x.seq_lens, x.cu_q, x.cu_k, latent_dim=64,
                   plan=step)
    assert told.schedule is step
    assert told.grid == (128,) == step.config.grid(16)
    assert (step.config.BM, step.config.block, step.config) == (128, 64, schedule_of_tiles(128))


def test_bad_calls() -> None:
    x = Case(((5, 20), (2, 30)), H=2).build()
    lens, cu = np.diff(x.cu_k), (x.cu_q, 7)
    heads = {"q_heads": 2, "kv_heads": 2}
    good = step_of(x)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"plan": 3}, "plan is 3: must be what kvlab.attention.plan gives, or None"),
        ({"plan": plan(lens, cu, **heads, head_dim=192)}, "plan has tiles of 16 rows: must be of 128 for this call"),
        ({"plan": plan(lens, cu, q_heads=1, kv_heads=1, head_dim=(128, 64))}, "plan is of 1 KV heads: must be of the"),
        ({"plan": plan(lens, cu, **heads, head_dim=(128, 64), window=9)}, "plan is of 8 keys seen before a query's"),
        ({"plan": plan(lens + 1, cu, **heads, head_dim=(128, 64))}, r"plan was made of seq_lens\[0\] 21: must be the"),
        ({"plan": plan(lens, (np.array([0, 4, 7]), 7), **heads, head_dim=(128, 64))}, "made of cu_seqlens_q .0, 4, 7"),
        ({"plan": plan(lens, cu, **heads, config=ScheduleConfig(9, 128, 1, 16))}, "key blocks of 16 keys: must be a"),
        ({"plan": plan(lens, cu, **heads, config=ScheduleConfig(9, 128, unit=4))}, "plan has units of a fixed size"),
        ({"plan": good, "batch_invariant": True}, "batch_invariant with plan: must be left out"),
        ({"plan": good, "arch": "sm_80"}, "plan has tiles of 128 rows: must be of 64 for this call"),
        ({"plan": good, "k_starts": np.zeros(2, np.int32)}, r"plan is of 0 keys seen behind a query's own: must be of"),
    ]
    for options, words in wrong:
        out = np.full((7, 2, 128), 7, x.q.dtype)
        with pytest.raises(ValueError, match=words):
            x.call(out=out, **options)
        assert (out == 7).all()
    for sizes, words in (
        ({**heads, "kv_heads": 1, "head_dim": (128, 64)}, r"kv_heads is 1 with head_dim \(nope, rope\): must be q_hea"),
        ({**heads, "head_dim": (128, 0)}, "rope of head_dim is 0: must be an integer above 0"),
        ({**heads, "head_dim": (128, 64), "batch_invariant": True}, "batch_invariant with head_dim .nope, rope.: must"),
        ({**heads, "head_dim": (128, 64, 3)}, r"head_dim is \(128, 64, 3\): must be an integer above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            plan(lens, cu, **sizes)


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_90", "gfx950"])
def test_compiled(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is put aside in the loops over keys; the loops of the call without a plan."""
    x = Case(((5, 9),), H=16, page=64, latent=512).build()
    step = step_of(x, None)
    call = mla_prefill_paged.planned(x.q, x.k, x.v, x.cache, x.table, x.seq_lens, x.cu_q, x.cu_k, latent_dim=512,
                                     plan=step, arch=target)
    for home, kind in ((kernel, "walk"), (every_walk, "join")):
        monkeypatch.setattr(home, kind, Caught(getattr(home, kind)))
    kernel.launch(*map(as_tensors, call.arrays), **{
        n: as_tensors(value) if n == "features" else value for n, value in call.named().items()
        if n not in ("works", "out")}, works=[torch.zeros(4096, dtype=torch.int32)])
    made = as_launched(kernel.walk.fn, kernel.walk.arguments, target)
    assert made.shared <= SHARED[target]
    if target.startswith("gfx"):
        assert made.spills == 0
        return
    lines = made.sass.splitlines()
    products = [i for i, line in enumerate(lines) if "HGMMA" in line]
    inner = "\n".join(lines[products[0] : products[-1]])
    assert len(products) == 2 * (12 + 4)
    assert not re.search(r"\b(LDL|STL)\b", inner)
