"""Decode over a schedule by Hopper's ring where there is no GPU. Rests on float64 references in the tolerance of
yardsticks; on the definition of mbarriers, TMA and bar.sync (PTX ISA), by the record of hazards; on the compiler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from caught import SHARED, Caught, as_if_on, as_launched, as_tensors
from decode_cases import Case
from feature_cases import FP8, FeatureCase, FeatureInputs
from hazard_mutations import ORDER, WAW, caught_as
from prefill_cases import Case as MixedCase
from seeded_faults import is_found
from simulated import simulated
from turns import ORDERS
from yardsticks import assert_accurate, bits

from kvlab.attention import attend_paged, explain, mha_decode_paged, plan
from kvlab.attention.attend_paged import emulator, hopper_emulator
from kvlab.attention.attend_paged.config import WalkConfig, choose_walks, ragged_problem
from kvlab.attention.attend_paged.hopper_config import room_for, shared_bytes, with_rings
from kvlab.attention.features.resolve import Features
from kvlab.attention.mha_decode.config import DecodeProblem
from kvlab.attention.mha_decode.hopper_cta import HopperDecodeCTA
from kvlab.attention.schedule import ScheduleConfig
from kvlab.staging import Timeline, Traffic
from kvlab.triton_support.versions import gluon_lacks


def launch_form(case: Case | FeatureCase, teams: int, heads: int = 1) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(arrays, arguments) of the launch functions: Hopper's walk by so many teams, programs of ``heads`` KV heads."""
    x = case.build()
    problem = ragged_problem(*x.arrays[:4], None)
    (one,) = choose_walks(problem, problem.tokens).walks
    one = replace(one, schedule=replace(one.schedule, programs=teams * problem.kv_heads, least=5))
    (one,) = with_rings(WalkConfig((one,)), problem, problem.tokens, None).walks
    BT = one.ring.BN // heads
    one = replace(one, ring=one.ring._replace(HEADS=heads, BT=BT, BOX=min(one.ring.BOX, BT)))
    features = x.resolved.features if isinstance(x, FeatureInputs) else Features()
    return x.arrays, {"scale": x.scale, "features": features, "config": WalkConfig((one,))}


CASES: list[tuple[Case | FeatureCase, int, int]] = [
    (Case((200, 0, 65), heads=(32, 8), D=128), 3, 2),
    (Case((1, 0, 15, 16, 17, 64, 65, 700), heads=(4, 2), D=128), 7, 1),
    (Case((129, 3, 2, 1, 0), heads=(8, 8), D=64, page=48, S=4), 5, 1),
    (Case((300, 299), heads=(9, 3), D=64, page=64, dtype="fp16"), 7, 1),
    (Case((257, 64, 63), heads=(16, 1), D=64, page=8), 4, 1),
    (Case((40, 1900, 0, 17), heads=(2, 2), D=64, S=7, page=64, storage="hnd"), 9, 1),
    (Case((200, 0, 65, 5), heads=(8, 2), D=128, S=8), 3, 1),
    (Case((200, 0, 1000, 5), heads=(4, 2), D=64, S=12, page=48, dtype="fp16"), 5, 1),
    (FeatureCase(lens=(150, 0, 17), heads=(8, 4), D=128, kv=FP8, scales="head"), 3, 2),
    (FeatureCase(lens=(300, 5), heads=(6, 3), D=128, S=2, page=32, kv=FP8, scales="number"), 5, 1),
    (FeatureCase(lens=(300, 0, 5), heads=(16, 2), D=64, sinks=True), 5, 1),
    (FeatureCase(lens=(300, 0, 5), heads=(8, 4), D=64, kv=FP8, scales="head", sinks=True), 5, 2),
    (FeatureCase(lens=(200, 1, 65), heads=(16, 2), D=64, S=4, kv=FP8, scales="number", page=64), 4, 1),
    (FeatureCase(lens=(200, 3, 129), heads=(6, 2), D=80, S=2, kv=FP8, storage="hnd"), 5, 1),
    (Case((200, 3, 129), heads=(12, 4), D=112), 5, 4),
    (Case((200, 0, 65, 129), heads=(6, 2), D=80, S=2), 7, 1),
    (Case((300, 3), heads=(8, 2), D=112, S=8, dtype="fp16", storage="hnd"), 5, 1),
    (FeatureCase(lens=(200, 1), heads=(6, 2), D=128, S=2, kv=FP8, scales="head", sinks=True), 3, 2),
    (Case((200, 0, 65, 700), heads=(8, 2), D=256), 5, 1),
    (FeatureCase(lens=(300, 3, 129), heads=(4, 1), D=192, S=2, sinks=True), 4, 1),
    (Case((130, 3, 129), heads=(4, 1), D=192, S=6), 3, 1),
    (Case((70, 130), heads=(6, 2), D=192, dtype="fp16", page=64, storage="hnd"), 3, 1),
]


@pytest.mark.parametrize("case, teams, heads", CASES, ids=str)
def test_emulated(case: Case | FeatureCase, teams: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over poison, without a hazard; nothing follows from the order of the partitions' turns."""
    x, traffic = case.build(), Traffic(timeline=Timeline())
    arrays, named = launch_form(case, teams, heads)
    out = np.full_like(x.q, np.nan)
    found = emulator.launch(*arrays, **named, out=out, traffic=traffic)
    assert_accurate(x, *found)
    before = tuple(map(bits, found))
    monkeypatch.setattr(hopper_emulator, "run_roles", ORDERS["at random"])
    assert tuple(map(bits, emulator.launch(*arrays, **named))) == before


def test_whole_sequences_have_the_bits_of_decode() -> None:
    """Of one split: the walk adds nothing to the sums of a sequence that is not cut, whatever came before it."""
    arrays, named = launch_form(Case((70, 129, 0, 200), heads=(8, 2), D=128), 1, heads=2)
    out, lse = mha_decode_paged(*arrays, backend="hopper", num_splits=1, return_lse=True)
    assert tuple(map(bits, emulator.launch(*arrays, **named))) == (bits(out), bits(lse))


def test_ragged_drafts_and_the_calls_of_both_operations() -> None:
    """None, one and four new tokens: float64; of as many each, the bits of decode, with and without a plan."""
    x = MixedCase(((1, 300), (0, 17), (4, 90), (2, 2), (0, 0)), heads=(8, 2), D=128, form="paged").build()
    _, arrays, options = x.arguments()
    found = attend_paged(*arrays, **options | {"max_seqlen_q": 4, "backend": "hopper"}, return_lse=True)
    assert_accurate(x, *found)
    x = Case((70, 300), heads=(4, 2), D=64, S=3).build()
    starts = np.array([0, 3, 6], np.int32)
    decoded = mha_decode_paged(*x.arrays, balanced=True, backend="hopper")
    rows = x.q.reshape(6, *x.q.shape[2:])
    drafts = attend_paged(rows, *x.arrays[1:], starts, max_seqlen_q=3, backend="hopper")
    assert bits(drafts) == bits(decoded)
    step = plan(x.lens, 3, q_heads=4, kv_heads=2, head_dim=64, programs=264)
    assert bits(mha_decode_paged(*x.arrays, plan=step, backend="hopper")) == bits(decoded)


LONG = Case((130, 20, 70), heads=(8, 4), D=128)


def sums_in_the_ring(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hopper_emulator, "left_bytes", lambda C: 0)


def blocks_counted_anew(patch: pytest.MonkeyPatch) -> None:
    bring = hopper_emulator.bring
    patch.setattr(hopper_emulator, "bring", lambda cta, table, pages, unit, done: bring(cta, table, pages, unit, 0))


def left_without_a_barrier(patch: pytest.MonkeyPatch) -> None:
    meet = HopperDecodeCTA.meet
    calls = []

    def sometimes(cta: Any, me: Any) -> None:
        calls.append(me)
        if cta.leaves:
            meet(cta, me)

    def leave(cta: Any, *parts: Any) -> Any:
        cta.leaves = False
        return kept(cta, *parts)

    kept = HopperDecodeCTA.leave
    patch.setattr(HopperDecodeCTA, "leaves", True, raising=False)
    patch.setattr(HopperDecodeCTA, "leave", leave)
    patch.setattr(HopperDecodeCTA, "meet", sometimes)


MUTANTS: dict[str, tuple[Any, Any, str]] = {
    "sums-in-the-ring": (sums_in_the_ring, WAW, "sums write by warp"),
    "blocks-counted-anew": (blocks_counted_anew, WAW, "k copy by warp 4 of the producer, stage 0"),
    "left-without-a-barrier": (left_without_a_barrier, ORDER, "sums read by warp"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, kind, words = MUTANTS[name]
    arrays, named = launch_form(LONG, 2)
    mutate(monkeypatch)
    caught_as(kind, words, lambda: emulator.launch(*arrays, **named))


@pytest.mark.parametrize("side, before, after", [
    ("kernel", "#: unit -> lo, hi, done ", "#: unit -> lo, done "),
    ("emulator", "    #: find -> batch, num_keys, start, stop, lo, hi ", "    #: find -> batch, num_keys, lo, hi "),
    ("emulator", "        #: unit -> o, top, total, done ", "        #: units -> o, top, total, done "),
])
def test_a_seeded_fault_is_found(side: str, before: str, after: str) -> None:
    assert is_found("attend_paged", "find_unit,produce,consume", side, before, after, ("hopper", "hopper_emulator"))


@pytest.mark.parametrize("changes, options, words", [
    ({}, {"batch_invariant": True}, "batch_invariant=True over a schedule"),
    ({"S": 9}, {}, "9 new tokens of 4 query heads a KV head"),
    ({}, {"window": 20}, "a mask other than the causal one"),
    ({"D": 72}, {}, "head dimensions 72 and 72"),
])
def test_hopper_says_what_it_walks(changes: dict[str, Any], options: dict[str, Any], words: str) -> None:
    x = Case((40, 3), **changes).build()
    with pytest.raises(ValueError, match=f"backend is 'hopper' with {words}.*: must be bf16 or fp16"):
        mha_decode_paged(*x.arrays, balanced=True, backend="hopper", **options)


def test_a_plan_of_other_tiles_is_not_walked() -> None:
    x = Case((40, 3)).build()
    step = plan(x.lens, 1, q_heads=8, kv_heads=2, head_dim=64, config=ScheduleConfig(264, BM=16, block=4))
    with pytest.raises(ValueError, match="backend is 'hopper' with a plan of other tiles"):
        mha_decode_paged(*x.arrays, plan=step, backend="hopper")


@pytest.mark.parametrize("S, options, found", [
    (1, {}, ("hopper", "torch tensors on sm_90", 264)),
    (4, {}, ("hopper", "torch tensors on sm_90", 264)),
    (8, {}, ("hopper", "torch tensors on sm_90", 132)),
    (1, {"softcap": 3.0}, ("triton", "not the Hopper kernel: softcap", 396)),
    (1, {"batch_invariant": True}, ("triton", "not the Hopper kernel: batch_invariant=True", 396)),
])
def test_when_auto_takes_it(
    S: int, options: dict[str, Any], found: tuple[str, str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rests on measured times (benchmarks/NOTES.md): two programs an SM by Hopper's kernel, one of 32 rows, three by
    the portable one.
    """
    as_if_on(monkeypatch, "sm_90")
    x = Case((40, 3), heads=(16, 4), D=128, S=S).build()
    told = explain(mha_decode_paged, *x.torch(), balanced=True, **options)
    assert (told.backend, told.grid) == (found[0], (found[2],))
    assert found[1] in told.reason
    assert (told.config.walks[0].ring is None) == (found[0] == "triton")


@pytest.mark.parametrize("lens, D, options, listed", [
    ((40, 40), 192, {}, True), ((40, 40), 256, {}, True), ((40, 40), 128, {}, False),
    ((40, 40), 192, {"balanced": False}, False), ((40, 40), 256, {"num_splits": 2}, False), ((90,), 192, {}, False),
])
@pytest.mark.parametrize("S, heads, many", [(1, (17, 1), True), (3, (12, 2), True), (4, (8, 2), False)])
def test_rows_that_the_ring_alone_has_go_over_a_schedule(
    lens: tuple[int, ...], D: int, options: dict[str, Any], listed: bool, S: int, heads: tuple[int, int],
    many: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than 16, whatever the lengths of several. Rests on measured times (benchmarks/NOTES.md)."""
    as_if_on(monkeypatch, "sm_90")
    monkeypatch.setattr("kvlab.attention.mha_decode.call.on_gpu", lambda array: True)
    x = Case(lens, heads=heads, D=D, S=S).build()
    told = explain(mha_decode_paged, *x.torch(), **options)
    assert isinstance(told.config, WalkConfig) == (listed and many)
    assert not (listed and many) or told.config.walks[0].ring is not None


@pytest.mark.parametrize("D, size, alone, chosen", [
    (64, 1, True, (1, 128, 4)), (80, 1, True, (1, 64, 4)), (64, 2, True, (1, 64, 4)), (128, 2, True, (1, 64, 2)),
    (80, 2, True, (4, 64, 2)), (112, 2, True, (4, 64, 2)), (112, 2, False, (1, 64, 2)),
])
def test_heads_keys_and_stages_of_a_block(D: int, size: int, alone: bool, chosen: tuple[int, ...]) -> None:
    """Rests on measured times (benchmarks/NOTES.md). Programs of more heads are as many, in more teams."""
    problem = DecodeProblem(96, 1, 32, 8, D, D, size, 16, 32768)
    (one,) = choose_walks(problem, 1).walks
    walks = (one,) if alone else (one, one)
    one, *_ = with_rings(WalkConfig(walks), problem, 1, 132).walks
    assert (one.ring.HEADS, one.ring.BN, one.ring.NB) == chosen
    assert one.grid(problem) == (264,)
    assert one.schedule.teams(8) == 33 * chosen[0]


@pytest.mark.compile
@pytest.mark.skipif(gluon_lacks() is not None, reason="a release of Triton for which it is not chosen")
@pytest.mark.parametrize("case, ragged", [
    (Case((70,) * 3, heads=(32, 8), D=128), True), (Case((70,) * 3, heads=(8, 8), D=64, S=4), False),
    (FeatureCase((70,) * 3, heads=(32, 8), D=128, kv=FP8, scales="head"), False),
    (FeatureCase((70,) * 3, heads=(32, 8), D=64, kv=FP8, scales="head"), False),
    (FeatureCase((70,) * 3, heads=(32, 4), D=112, S=4, kv=FP8), False),
    (Case((70,) * 3, heads=(32, 8), D=128, S=8), False),
    (Case((70,) * 3, heads=(16, 4), D=256), False), (Case((70,) * 3, heads=(16, 4), D=192, page=64), True),
    (Case((70,) * 3, heads=(16, 4), D=192, S=8), False), (Case((70,) * 3, heads=(16, 4), D=256, S=6), False),
], ids=str)
def test_compiled(case: Case | FeatureCase, ragged: bool) -> None:
    """No spills, two CTAs on an SM (one of 32 rows or 256 columns), and the instructions of decode for a block: of each
    16 rows one warp reads 16 bytes once.
    """
    import torch

    from kvlab.attention.attend_paged import hopper, kernel

    arrays, named = launch_form(case, 3)
    if ragged:
        q, starts = arrays[0], np.arange(len(arrays[0]) + 1, dtype=np.int32)
        arrays = q.reshape(1, -1, *q.shape[2:]), *arrays[1:], starts
    caught, joined = Caught(hopper.walk), Caught(kernel.join)
    work = torch.zeros(64, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "walk", caught)
        patch.setattr(kernel, "join", joined)
        features = as_tensors(named["features"])
        kernel.launch(*map(as_tensors, arrays), **named | {"features": features}, works=[work])
    early = {"L": caught.arguments["L"]._replace(EARLY=True)}
    made, C = as_launched(caught.fn, caught.arguments | early, "sm_90"), named["config"].walks[0].ring
    count = made.instructions
    assert (count["PREEXIT"], count["ACQBULK"]) == (1, 1)
    for beside in (False, True):
        merge = as_launched(joined.fn, joined.arguments | {"EARLY": True, "BESIDE": beside}, "sm_90").instructions
        assert (merge["PREEXIT"], merge["ACQBULK"]) == (1, 1)
    assert (made.spills, made.stack) == (0, 0)
    assert made.registers * made.num_warps * room_for(C) <= 2048
    assert made.shared <= shared_bytes(C)
    assert room_for(C) * (shared_bytes(C) + 1024) <= SHARED["sm_90"] + 1024
    sums = 8 if C.W == 32 else 0  # of the warps, which come so where a lane has one column of them
    assert count["LDSM"] == 2 * C.BN // 4 * C.W // 256 + sums
    assert count["HMMA"] == 2 * (2 if C.PAIRS else 1) * C.BN // 4 * C.W // 128
    assert count["UTMALDG"] == 2 * -(-C.W // 64) * (C.BT // C.BOX)


WALKED = [
    (FeatureCase((70, 0, 150), heads=(4, 2), D=80, sinks=True), 3),
    (FeatureCase((70, 0, 150), heads=(4, 2), D=64, kv=FP8, scales="head"), 3),
    (FeatureCase((200, 1, 65), heads=(8, 1), D=80, S=4, kv=FP8, scales="number"), 3),
    (Case((200, 1, 65), heads=(4, 1), D=112, S=8, dtype="fp16", page=64), 3),
    (Case((200, 0, 65), heads=(4, 1), D=256), 3), (Case((130, 7), heads=(4, 1), D=192, S=6, dtype="fp16"), 2),
]


@pytest.mark.compile
@pytest.mark.skipif(gluon_lacks() is not None, reason="a release of Triton for which it is not chosen")
@pytest.mark.parametrize("case, teams", WALKED, ids=str)
def test_the_compiled_walk_attends(case: Case | FeatureCase, teams: int) -> None:
    """Its PTX, run without a GPU, with that of the list and of the join: sequences that teams share, one without a key,
    tiles of 32 rows. Each launch begins before that before it has written anything. No two warps race. Rests on
    float64.
    """
    from kvlab.attention.attend_paged import hopper

    arrays, named = launch_form(case, teams)
    assert_accurate(case.build(), *simulated(hopper, arrays, named, lists=True, races=True))
