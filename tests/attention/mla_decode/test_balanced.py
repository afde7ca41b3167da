"""MLA decode over a schedule. Rests on the float64 reference in the tolerance of yardsticks; on decode without splits,
whose bits a sequence has that is not cut; on the plan of the lengths; on the compilers' artefacts.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from caught import SHARED, Caught, as_launched, as_tensors
from mla_cases import FULL, Case, Inputs
from yardsticks import assert_accurate, bits

from kvlab.attention import explain, mla_decode_paged, plan
from kvlab.attention.attend_paged.latent import emulator
from kvlab.attention.attend_paged.latent.config import LatentWalk, ring_walk, walk_of
from kvlab.attention.mla_decode import call as mla_call
from kvlab.attention.mla_decode import emulator as unsplit
from kvlab.attention.mla_decode.config import MLADecodeProblem, choose_config
from kvlab.attention.mla_decode.hopper_config import shared_bytes, walk_ring
from kvlab.attention.schedule import ScheduleConfig
from kvlab.common.arrays import to_torch
from kvlab.mirror import check, lockstep
from kvlab.staging import Traffic
from kvlab.triton_support.versions import gluon_lacks, holds_wgmma_rows

OP = "kvlab.attention.attend_paged.latent"


def call(x: Inputs, teams: int, arch: str = "sm_90") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arrays and arguments of a launch whose tiles are shared by so many teams."""
    arrays = x.q, *x.windows, x.table, x.lens
    problem = MLADecodeProblem.of(*arrays, x.row_scales)
    heavy = x.features.heavy or problem.fp8
    tiles = choose_config(problem, num_splits=1, arch=arch, emulated=True, heavy=heavy, wgmma=holds_wgmma_rows())
    config = walk_of(tiles, processors=teams * min(tiles.row_tiles, 4), ctas=1)
    named: dict[str, Any] = {"scale": x.scale, "features": x.features, "config": config}
    return arrays, named if x.row_scales is None else named | {"row_scales": x.row_scales}


UNEVEN = [
    (Case((900, 0, 40, 3, 17), H=5, page=5), 3, "sm_90"),
    (Case((700, 33, 64), H=40, columns=FULL, page=64, dtype="fp16", sinks=True), 4, "sm_90"),
    (Case((300, 40), H=20, S=16, columns=(256, 32), softcap=3.0, temperature=True), 3, "sm_80"),
    (Case((500, 30), H=3, S=3, row="rope-aware", k_scale="token", window=90, slopes=True), 5, "sm_90"),
    (Case((400, 9), H=3, columns=FULL, row="scaled"), 3, "sm_90"),
    (Case((0, 0), H=3), 2, "sm_90"),
    (Case((900, 0, 40), H=7), 3, "gfx950"),
]


@pytest.mark.parametrize("case, teams, arch", UNEVEN, ids=str)
def test_emulated(case: Case, teams: int, arch: str) -> None:
    x = case.build()
    arrays, named = call(x, teams, arch)
    assert_accurate(x, *emulator.launch(*arrays, **named, arch=arch))


RINGS = [
    (Case((700, 3, 0, 200), H=16, columns=FULL, page=64), 5),
    (Case((330, 70, 9), H=80, columns=FULL, page=16), 6),
    (Case((300, 50), H=16, S=5, columns=FULL, page=32, dtype="fp16"), 5),
]


@pytest.mark.parametrize("case, programs", RINGS, ids=str)
def test_the_ring_of_hopper(case: Case, programs: int) -> None:
    """One and two tiles of an item side by side, several tokens a tile; sequences that are cut, and one without a key.
    The twin states all accesses to the record of hazards.
    """
    x = case.build()
    arrays = x.q, *x.windows, x.table, x.lens
    problem = MLADecodeProblem.of(*arrays)
    ring = walk_ring(problem)
    assert ring is not None
    config = ring_walk(ring, problem, processors=programs)
    assert_accurate(x, *emulator.launch(*arrays, scale=x.scale, features=x.features, config=config))


def test_rows_that_the_ring_does_not_take() -> None:
    """Tiles of 64 rows, 32 heads for each of two tokens where there are 20, are not those of an item."""
    x = Case((30, 9), H=20, S=2, columns=FULL, page=64).build()
    with pytest.raises(ValueError, match="backend is 'hopper' with balanced=True and 2 new tokens of 20 heads: must"):
        mla_decode_paged(*x.arrays, balanced=True, backend="hopper", **x.options)
    told = explain(mla_decode_paged, *x.with_(q=x.q[:, :1]).arrays, balanced=True, backend="hopper", **x.options)
    assert told.config.ring.WALK


@pytest.mark.interpreter
@pytest.mark.parametrize("case, teams", [
    (Case((150, 0, 20), H=3, S=5, page=5, sinks=True), 3),
    (Case((200, 5), H=3, row="rope-aware", k_scale="token", window=90), 4),
], ids=str)
def test_lockstep(case: Case, teams: int) -> None:
    """Every output of every step of the walk; and the results, which the join completes."""
    x = case.build()
    arrays, named = call(x, teams)
    arrays_by_name = dict(zip(("q", "kv_cache", "k_rope", "block_table", "seq_lens"), arrays, strict=True))
    result = lockstep(OP, arrays_by_name | named)
    assert result.ok, str(result.first_difference)


def test_the_twins_mirror_each_other() -> None:
    assert check(OP).ok


def test_a_sequence_that_is_not_cut_has_the_bits_of_decode() -> None:
    """One team does all sequences one after the other; the same lengths give the same bits."""
    x = Case((300, 0, 17, 129), H=5, S=2).build()
    arrays, named = call(x, 1)
    config: LatentWalk = named.pop("config")
    ours, again = (emulator.launch(*arrays, **named, config=config) for _ in range(2))
    plain = unsplit.launch(*arrays, **named, config=config.tiles)
    assert [bits(a) for a in ours] == [bits(a) for a in plain] == [bits(a) for a in again]


def test_each_row_is_read_once() -> None:
    """Bytes from DRAM: the rows of every key, and q once for each unit of the plan and sequence without a key."""
    x = Case((300, 0, 17, 900, 1), H=8).build()
    (arrays, named), traffic = call(x, 3), Traffic()
    emulator.launch(*arrays, **named, traffic=traffic)
    units = len(plan(x.lens, q_heads=8, kv_heads=1, config=named["config"].schedule).units)
    units += int((x.lens == 0).sum())
    row = 192 * 2
    assert traffic.moved["DRAM->SMEM"] == int(x.lens.sum()) * row + units * 8 * row


def test_the_public_call() -> None:
    x = Case((300, 0, 40), H=5, S=5).build()
    for backend in ("emulator", "reference"):
        out, lse = mla_decode_paged(*x.arrays, balanced=True, backend=backend, return_lse=True, **x.options)
        assert_accurate(x, out, lse)
    told = explain(mla_decode_paged, *x.arrays, balanced=True, **x.options)
    assert told.grid == (told.config.schedule.programs,) == (132,)


def test_where_lengths_must_differ_a_gpu_has_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """By sizes alone: pages of 340 that a table of ten sequences could name; of many heads fewer, by Hopper's kernel
    more.
    """
    monkeypatch.setattr(mla_call, "on_gpu", lambda array: True)
    monkeypatch.setattr(mla_call, "machine_lacks", lambda array: None)

    def over(heads: int, pages: int, ring: bool = False, **options: Any) -> bool:
        q, cache = np.zeros((10, heads, 576), np.float16), np.zeros((pages, 16, 576), np.float16)
        table, lens = np.zeros((10, 34), np.int32), np.ones(10, np.int32)
        made = mla_decode_paged.made(q, cache, table, lens, scale=1.0, **options)
        return bool(made.shares(MLADecodeProblem(10, 1, heads, 512, 64, 2, 16, 34 * 16), ring))

    found = {case: over(*case) for case in ((16, 135), (16, 136), (17, 67), (17, 68))}
    assert found == {(16, 135): True, (16, 136): False, (17, 67): True, (17, 68): False}
    assert [over(heads, pages, True) for heads in (16, 128) for pages in (203, 204)] == [True, False] * 2
    given: tuple[dict[str, Any], ...] = {"balanced": False}, {"num_splits": 2}, {"batch_invariant": True}, {
        "indices": np.zeros((10, 3), np.int32)}
    assert not any(over(16, 70, **fixed) for fixed in given)


def test_a_plan_is_the_list_that_the_call_would_make() -> None:
    """The bits of ``balanced=True``, over tiles of the portable kernel and, of several tokens, of Hopper's."""
    x = Case((300, 0, 40), H=5, S=5, page=64).build()
    columns = x.options["v_dim"]
    sizes = {"q_heads": 5, "kv_heads": 1, "head_dim": x.q.shape[-1], "v_dim": columns, "itemsize": x.q.itemsize}
    made = plan(x.lens, 5, **sizes)
    ours, own = (mla_decode_paged(*x.arrays, return_lse=True, **given, **x.options)
                 for given in ({"plan": made}, {"balanced": True}))
    assert [bits(a) for a in ours] == [bits(a) for a in own]
    assert explain(mla_decode_paged, *x.arrays, plan=made, **x.options).schedule is made

    x = Case((300, 50), H=16, S=5, columns=FULL, page=32, dtype="fp16").build()
    told = explain(mla_decode_paged, *x.arrays, balanced=True, backend="hopper", **x.options)
    made = plan(x.lens, 5, q_heads=16, kv_heads=1, head_dim=576, v_dim=512, config=told.config.schedule)
    ours, own = (mla_decode_paged(*x.arrays, backend="hopper", return_lse=True, **given, **x.options)
                 for given in ({"plan": made}, {"balanced": True}))
    assert [bits(a) for a in ours] == [bits(a) for a in own]


PLANNED = {"q_heads": 16, "kv_heads": 1, "head_dim": 576, "v_dim": 512}


@pytest.mark.parametrize("changed, options, words", [
    ({"config": ScheduleConfig(132, 32, 1, 64)}, {}, "plan has tiles of 32 rows: must be of 16 for this call"),
    ({"config": ScheduleConfig(132, 16, 2, 64)}, {}, "plan has 2 tiles side by side: must be 1 for this call"),
    ({"config": ScheduleConfig(132, 16, 1, 16)}, {}, "plan has key blocks of 16 keys: must be 64 for this call"),
    ({"config": ScheduleConfig(132, 16, 1, 64, unit=32)}, {}, "plan has units of a fixed size"),
    ({"q_heads": 8}, {}, "plan is of 8 query heads to a KV head: must be of the call's, 16"),
    ({"seq_lens": np.array([31, 9])}, {}, r"plan was made of seq_lens\[0\] 31: must be the call's, 30"),
    ({}, {"num_splits": 2}, "num_splits with a plan: must be left out"),
    ({}, {"balanced": False}, "balanced=False with a plan: must be left out"),
    ({}, {"leftpad_k": np.array([1, 0])}, "leftpad_k with a plan: must be left out"),
    ({}, {"plan": 3}, "plan is 3: must be what kvlab.attention.plan gives"),
])
def test_plans_of_other_calls(changed: dict[str, Any], options: dict[str, Any], words: str) -> None:
    x = Case((30, 9), H=16, columns=FULL, page=64).build()
    sizes: dict[str, Any] = {"seq_lens": x.lens, **PLANNED, **changed}
    with pytest.raises(ValueError, match=words):
        mla_decode_paged(*x.arrays, **{"plan": plan(**sizes), **x.options, **options})


@pytest.mark.parametrize("changed, words", [
    ({"kv_heads": 2}, "kv_heads is 2 with v_dim: must be 1"),
    ({"v_dim": 576}, "v_dim is 576 of head_dim 576: must be less"),
    ({"v_dim": 0}, "v_dim is 0: must be an integer above 0"),
    ({"new_tokens": [1, 2]}, "new_tokens of each sequence with v_dim: must be a number"),
    ({"unit": 8}, "unit with v_dim: must be left out"),
    ({"batch_invariant": True}, "batch_invariant with v_dim: must be left out"),
])
def test_plans_that_there_are_not(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan([30, 9], **{**PLANNED, **changed})


@pytest.mark.parametrize("options, words", [
    ({"num_splits": 2}, "num_splits with balanced=True: must be left out"),
    ({"batch_invariant": True}, "batch_invariant with balanced=True"),
    ({"leftpad_k": np.array([1])}, "leftpad_k with balanced=True"),
    ({"q_positions": np.array([9])}, "q_positions with balanced=True"),
    ({"indices": np.zeros((1, 3), int)}, "indices with balanced=True"),
    ({"balanced": 1}, "balanced is 1: must be True, False or None"),
    ({"backend": "hopper"}, r"backend is 'hopper' with 128 \+ 64 columns"),
])
def test_bad_calls(options: dict[str, Any], words: str) -> None:
    x = Case((30,)).build()
    with pytest.raises(ValueError, match=words):
        mla_decode_paged(*x.arrays, **{"balanced": True, **x.options, **options})


@pytest.mark.compile
@pytest.mark.parametrize("H, target", [(16, "sm_90"), (128, "sm_90"), (128, "gfx950")])
def test_walk_compiled(H: int, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What registers do not hold is put aside between units, not in the loop over keys."""
    from kvlab.attention.attend_paged import kernel as every_walk
    from kvlab.attention.attend_paged.latent import kernel

    x = Case((5,), H=H, columns=FULL, page=64).build()
    tensors = [to_torch(a) for a in (x.q, *x.windows, x.table, x.lens)]
    tiles = choose_config(MLADecodeProblem.of(*tensors), num_splits=1, arch=target, wgmma=holds_wgmma_rows())
    caught = Caught(kernel.walk)
    monkeypatch.setattr(kernel, "walk", caught)
    monkeypatch.setattr(every_walk, "join", Caught(every_walk.join))
    monkeypatch.setattr(kernel, "make_list", lambda *args, **named: (torch.zeros(4096, dtype=torch.int32),))
    kernel.launch(*tensors, scale=x.scale, features=as_tensors(x.features), config=walk_of(tiles))
    made = as_launched(caught.fn, caught.arguments, target)
    assert made.shared <= SHARED[target]
    if target.startswith("gfx"):
        assert made.spills == 0
        return
    lines = made.sass.splitlines()
    products = [i for i, line in enumerate(lines) if re.search("HMMA|HGMMA", line)]
    inner = "\n".join(lines[products[0] : products[-1]])
    assert not re.search(r"\b(LDL|STL)\b", inner)


@pytest.mark.compile
@pytest.mark.skipif(gluon_lacks() is not None, reason="a release of Triton for which it is not chosen")
def test_the_ring_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rests on the compiler's counts: the products and boxes of decode without a list, partial output by TMA; it waits
    once for the list and lets the join begin; some registers are put aside.
    """
    from kvlab.attention.attend_paged import kernel as every_walk
    from kvlab.attention.attend_paged.latent import kernel
    from kvlab.attention.mla_decode import hopper

    x = Case((5,), H=128, columns=FULL, page=64).build()
    tensors = [to_torch(a) for a in (x.q, *x.windows, x.table, x.lens)]
    ring = walk_ring(problem := MLADecodeProblem.of(*tensors))
    assert ring is not None
    attend = Caught(hopper.attend)
    of_ring = {f"{kernel.RING}:{n}": getattr(hopper, n) for n in ("pointers_of", "numbers_of")}
    monkeypatch.setattr(kernel, "function_at", (of_ring | {f"{kernel.RING}:attend": attend}).get)
    monkeypatch.setattr(every_walk, "join", Caught(every_walk.join))
    monkeypatch.setattr(kernel, "make_list", lambda *args, **named: (torch.zeros(4096, dtype=torch.int32),))
    kernel.launch(*tensors, scale=x.scale, features=as_tensors(x.features), config=ring_walk(ring, problem))
    made = as_launched(attend.fn, attend.arguments, "sm_90")
    assert (made.instructions["HGMMA"], made.instructions["UTMALDG"], made.instructions["UTMASTG"]) == (88, 18, 2)
    assert (made.instructions["PREEXIT"], made.instructions["ACQBULK"]) == (1, 1)
    assert made.spills <= 24
    assert made.shared <= shared_bytes(ring) <= SHARED["sm_90"]
