"""Hopper's prefill tiles over a work list where there is no GPU. Rests on float64 references in the tolerance of
yardsticks, on the portable walk of the same list, and on what the compiler makes of the kernel.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from caught import SHARED, Caught, as_if_on, as_launched, as_tensors
from prefill_cases import Case
from simulated import simulated
from yardsticks import assert_accurate

from kvlab.attention import attend_paged, explain, plan
from kvlab.attention.attend_paged import emulator
from kvlab.attention.attend_paged.config import AttendProblem, WalkConfig, choose_walks, ragged_problem
from kvlab.attention.attend_paged.hopper_config import on_hopper, tiles_walk, with_tiles
from kvlab.attention.call.operands import result_dtype
from kvlab.attention.mha_prefill.config import PrefillProblem
from kvlab.attention.mha_prefill.hopper_config import FP8_DIMS, HEAD_DIMS, listed_constants, shared_bytes
from kvlab.attention.mha_prefill.hopper_cta import HopperPrefillCTA
from kvlab.common.arrays import to_torch
from kvlab.mirror import lockstep
from kvlab.triton_support.versions import gluon_lacks


def paged(*lens: tuple[int, int], **sizes: Any) -> Case:
    """(new tokens, keys) of each sequence."""
    return Case(lens, form="paged", **sizes)


def by_tiles(case: Case, programs: int, longest: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(arrays, arguments) of the launch functions, by so many programs; NaN in keys that no row sees."""
    x = case.build()
    x.poison_before_window()
    _, arrays, options = x.arguments()
    call = attend_paged.planned(*arrays, **options, backend="reference")
    problem = ragged_problem(*call.arrays[:4], call.arrays[5])
    config = choose_walks(problem, call.longest if longest is None else longest, processors=programs)
    config = with_tiles(config, problem, call.features, call.arrays[0].itemsize)
    assert config.walks[-1].wide is not None
    return call.arrays, {"scale": call.plan.scale, "features": call.features, "config": config}


def at_once(case: Case, processors: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same of the walks that a call takes on so many processors."""
    arrays, named = by_tiles(case, processors)
    problem, longest = ragged_problem(*arrays[:4], arrays[5]), max(new for new, _ in case.lens)
    walks = choose_walks(problem, longest, processors=processors, tiles=True, beside=True)
    config = with_tiles(on_hopper(walks, problem, longest, processors, tiles=True), problem, named["features"],
                        arrays[0].itemsize)
    return arrays, named | {"config": config}


CASES = [
    (paged((130, 300), (2, 2), (0, 17), (40, 64), (34, 1100), (9, 9), heads=(8, 2), D=128), 16),  # parts of five teams
    (paged((33, 33), (70, 700), (100, 600), heads=(2, 2), page=64, dtype="fp16"), 6),
    (paged((200, 1000), (90, 300), (64, 70), heads=(4, 1), window=70), 40),  # units of which some tiles see nothing
    (paged((70, 400), (90, 30), (40, 0), heads=(4, 1), D=128, causal=False, page=32, strided=True), 3),
    (paged((100, 900), heads=(4, 1), D=128, DV=64, softcap=20.0, page=128), 12),
    (paged((130, 700), (40, 0), (70, 200), heads=(4, 2), D=80, sinks=True), 14),
    (paged((100, 600), (40, 90), heads=(2, 1), D=112, dtype="fp16", window=90, page=32), 5),
    (paged((130, 400), (20, 20), (40, 700), heads=(8, 2), D=128, kv="fp8", scales="head"), 16),
    (paged((70, 300), (90, 200), heads=(4, 1), D=128, dtype="fp16", kv="fp8", scales="number", window=70, page=32), 9),
    (paged((130, 400), (33, 90), heads=(8, 1), D=128, dtype="fp8", kv="fp8", scales="head", page=64), 7),
    (paged((100, 500), heads=(4, 1), D=128, dtype="fp8", kv="fp8", window=150), 6),
    (paged((130, 300), (2, 2), (40, 64), (34, 700), heads=(6, 2), D=128, sinks=True), 16),
    (paged((170, 900), (90, 30), heads=(5, 1), D=112, dtype="fp16", window=200, page=32), 9),
    (paged((90, 300), (40, 40), heads=(14, 2), kv="fp8", D=128, scales="head"), 8),
    (paged((130, 500), (2, 2), (0, 17), (40, 64), (34, 700), heads=(8, 2), D=192), 16),
    (paged((130, 400), (40, 190), (9, 9), heads=(4, 1), D=256, dtype="fp16", page=64, sinks=True), 9),
    (paged((100, 600), (70, 90), heads=(3, 1), D=256, causal=False, softcap=20.0, page=32), 7),
    (paged((130, 300), (40, 700), heads=(4, 2), D=192, DV=128), 10),
    (paged((70, 400), (90, 300), heads=(3, 1), D=192, page=64, sinks=True), 9),
]


@pytest.mark.parametrize("case, programs", CASES, ids=str)
def test_emulated(case: Case, programs: int) -> None:
    """Over NaN; shared memory and partial results that nobody wrote are NaN, too."""
    arrays, named = by_tiles(case, programs)
    out = np.full((*arrays[0].shape[:3], arrays[2].shape[3]), np.nan, result_dtype(arrays[0]))
    made, lse = emulator.launch(*arrays, **named, out=out)
    assert_accurate(case.build(), made[0], lse[0])


def test_programs_and_tiles_side_by_side_change_no_more_than_the_order_of_sums() -> None:
    """Law: of one program a KV head every result is whole; the portable walk of the list is as near."""
    case = paged((130, 500), (20, 300), heads=(4, 1))
    x = case.build()
    for programs, longest in ((1, 32), (2, 64), (12, 130)):
        arrays, named = by_tiles(case, programs, longest)
        assert named["config"].walks[-1].schedule.together == min(4, -(-longest * 4 // 128), programs)
        portable = choose_walks(ragged_problem(*arrays[:4], arrays[5]), longest, processors=programs)
        for walks in (named["config"], portable):
            out, lse = emulator.launch(*arrays, **named | {"config": walks})
            assert_accurate(x, out[0], lse[0])


@pytest.mark.parametrize("D, idle", [(128, True), (80, False)])
def test_a_warpgroup_without_rows_multiplies_nothing(D: int, idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where the warpgroups take turns; the result of the other is right."""
    multiplied: list[int] = []
    scores = HopperPrefillCTA.scores

    def counted(cta: HopperPrefillCTA, me: Any, *args: Any) -> Any:
        multiplied.append(cta.consumers.index(me))
        return scores(cta, me, *args)

    monkeypatch.setattr(HopperPrefillCTA, "scores", counted)
    case = paged((12, 500), (16, 16), heads=(4, 1), D=D)  # up to 64 rows
    arrays, named = by_tiles(case, 2, 40)
    out, lse = emulator.launch(*arrays, **named)
    assert_accurate(case.build(), out[0], lse[0])
    assert set(multiplied) == ({0} if idle else {0, 1})


APART = [
    (paged((40, 700), (40, 40), (40, 300), heads=(8, 2), D=128), 7, 2, 3),
    (paged((90, 500), (90, 1100), (90, 90), heads=(6, 3), page=64, dtype="fp16", sinks=True), 23, 3, 11),
    (paged((40, 700), (40, 90), heads=(16, 2), D=128, kv="fp8", scales="head"), 11, 2, 3),
    (paged((40, 300), (40, 90), heads=(8, 2), D=192), 7, 2, 7),
    (paged((90, 500), (90, 1100), heads=(8, 4)), 12, 2, 3),
    (paged((40, 700), (40, 90), (40, 40), heads=(8, 4), D=128), 6, 2, 3),
]


@pytest.mark.parametrize("case, processors, groups, teams", APART, ids=str)
def test_groups_of_kv_heads_have_items_of_their_own(case: Case, processors: int, groups: int, teams: int) -> None:
    """Where more programs have a place so; by Hopper's tiles and by the portable walk of the list, over NaN."""
    arrays, named = at_once(case, processors)
    (one,) = named["config"].walks
    assert (one.schedule.heads, one.schedule.teams(case.heads[1])) == (groups, teams)
    for walk in (one, replace(one, wide=None)):
        out = np.full((*arrays[0].shape[:3], arrays[2].shape[3]), np.nan, result_dtype(arrays[0]))
        made, lse = emulator.launch(*arrays, **named | {"config": WalkConfig((walk,))}, out=out)
        assert_accurate(case.build(), made[0], lse[0])


@pytest.mark.interpreter
def test_heads_apart_in_lockstep() -> None:
    """Every output of every step of the portable walk and of the join."""
    arrays, named = at_once(*APART[-1][:2])
    named["config"] = WalkConfig(tuple(replace(one, wide=None) for one in named["config"].walks))
    names = "q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens"
    found = lockstep("attend_paged", dict(zip(names, arrays, strict=True)) | named)
    assert found.ok, str(found.first_difference)


RING = "the ring alone"


@pytest.mark.parametrize("changes, words", [
    ({}, None),
    ({"heads": (6, 2)}, None),
    ({"heads": (6, 2), "dtype": "fp8", "D": 128}, "q of e4m3 and 3 query heads to a KV head"),
    ({"D": 96, "sinks": True}, None),
    ({"D": 192}, None),
    ({"D": 256, "window": 90}, "a window with heads of 256"),
    ({"D": 72}, "head dimensions 72 of q and 72 of v"),
    ({"temperature": True}, RING),
    ({"kv": "fp8", "D": 128}, None),
    ({"kv": "fp8", "D": 128, "scales": "token"}, "scales of tokens"),
    ({"kv": "fp8", "D": 64}, RING),
    ({"page": 48}, RING),
    ({"alibi": "head"}, "features that differ"),
    ({"batch_invariant": True}, "batch_invariant=True"),
])
def test_when_it_is_taken(changes: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {name: changes.pop(name) for name in ["batch_invariant"] if name in (changes := dict(changes))}
    x = Case(**{"lens": ((90, 2100), (1, 40)), "form": "paged", "heads": (8, 2)} | changes).build()
    _, arrays, options = x.arguments("cpu")
    as_if_on(monkeypatch, "sm_90")
    found = explain(attend_paged, *arrays, **options | more, max_seqlen_q=max(n for n, _ in x.case.lens))
    taken = words in (None, RING)
    assert found.backend == ("hopper" if taken else "triton")
    assert ("torch tensors on sm_90" if taken else words or "") in found.reason
    assert (found.config.walks[0].ring is not None) == taken
    assert any(walk.wide for walk in found.config.walks) == found.config.beside == (words is None)


def test_tiles_of_short_sequences_are_not_walked_side_by_side() -> None:
    """Law: a plan that knows as much has the tiles of the call."""
    for keys, longest, together in ((300, 300, 1), (30_000, 300, 4), (30_000, 64, 2)):
        problem = AttendProblem(64, 4096, 32, 8, 128, 128, 2, 16, keys, ragged=True)
        own = [walk.schedule for walk in choose_walks(problem, longest).walks]
        assert own[-1].together == together
        starts = np.array([0, *range(64, 4096, 64), 4096])
        step = plan((np.full(64, min(keys, 300)), keys), (starts, 4096, longest), q_heads=32, kv_heads=8)
        assert [one.config for one in step.walks] == own
        assert list(map(tiles_walk, own)) == [False, True][-len(own) :]


@pytest.mark.parametrize("tokens, longest, keys, together, walks", [
    (8700, 2000, 2000, 1, 1),  # 201 prompts, short but for one
    (8700, 2000, 30_000, 4, 3),  # in tables of more keys than stay in L2
    (700, 500, 2000, 4, 3),  # mostly decodes
    (201 * 64, 64, 2000, 2, 1),  # chunks of one length, all of two tiles
])
def test_prompts_of_few_keys_have_one_walk(tokens: int, longest: int, keys: int, together: int, walks: int) -> None:
    problem = AttendProblem(201, tokens, 32, 8, 128, 128, 2, 16, keys, ragged=True)
    own = choose_walks(problem, longest, tiles=True, beside=True).walks
    assert (len(own), own[-1].schedule.together) == (walks, together)
    portable = choose_walks(problem, longest).walks
    assert len(portable) == (1 if tokens == 201 * longest else 2)


@pytest.mark.parametrize("heads, batch, apart, teams", [
    ((32, 4), 102, 4, 33), ((16, 16), 43, 16, 132), ((32, 8), 900, 1, 8),
])
def test_kv_heads_are_apart_beside_the_ring(heads: tuple[int, int], batch: int, apart: int, teams: int) -> None:
    """Where the list is made in little time: teams are as small as the tiles side by side."""
    problem = AttendProblem(batch, batch + 2048, *heads, 128, 128, 2, 16, 8192, ragged=True)
    found = on_hopper(choose_walks(problem, 1024, tiles=True, beside=True), problem, 1024, 132, tiles=True)
    assert found.beside
    schedule = found.walks[-1].schedule
    assert (schedule.heads, schedule.teams(heads[1])) == (apart, teams)
    assert schedule.sharing is not None
    assert schedule.sharing.wide_lanes == schedule.lanes(heads[1])


MIXED = paged((40, 300), (1, 2100), (0, 17), (4, 70), (5, 40), (1, 0), (12, 12), (200, 260), heads=(8, 2), D=128)


def test_mixed_batches_share_the_processors() -> None:
    """Up to 32 rows by the ring, the others by tiles, over NaN, by programs that find room at once."""
    x = MIXED.build()
    _, arrays, options = x.arguments()
    told = explain(attend_paged, *arrays, **options, backend="hopper")
    few, between, many = told.config.walks
    assert told.config.beside
    assert (few.ring.ROWS, few.schedule.most, between.ring.ROWS) == (16, 4, 32)
    assert (many.wide.PACK, many.schedule.fewest) == (4, 9)
    busy = [len(np.unique(one.units["program"])) for one in told.schedule.walks]
    assert busy[0] / 2 + busy[2] <= 132
    out = np.full_like(arrays[0], np.nan)
    assert_accurate(x, *attend_paged(*arrays, **options, backend="hopper", out=out, return_lse=True))


@pytest.mark.parametrize("tokens, rows", [(8, 32), (9, 128), (16, 128), (128, 128)])
def test_chunks_of_one_length_have_one_walk(tokens: int, rows: int) -> None:
    """Law: no sequence is left for another list, nor where there are few keys."""
    problem = AttendProblem(16, 16 * tokens, 32, 8, 128, 128, 2, 16, 8192, ragged=True)
    mixed = replace(problem, tokens=16 * tokens - 1)
    others = [] if tokens == 8 else [16, 32]
    for sizes, expected in ((problem, [rows]), (mixed, [*others, rows]), (replace(mixed, max_keys=512), [rows])):
        found = choose_walks(sizes, tokens, tiles=True, beside=True).walks
        assert [one.tiles.BM for one in found] == expected
        covered = [n for one in found for n in (one.schedule.fewest, one.schedule.most)]
        assert covered[0] == 1
        assert [n + 1 for n in covered[1:-1:2]] == covered[2::2]


MATRIX = [
    paged((150, 200), (3, 90), heads=(8, 2), D=128),
    paged((150, 200), (3, 90), heads=(8, 2), D=80, page=64, window=100, sinks=True),
    paged((150, 200), (3, 90), heads=(16, 2), page=64, softcap=20.0),
    paged((150, 200), (3, 90), heads=(8, 2), D=128, kv="fp8", scales="head"),
    paged((150, 200), (3, 90), heads=(8, 1), D=128, dtype="fp16", kv="fp8", page=64, window=100, softcap=20.0),
    paged((150, 200), (3, 90), heads=(8, 1), D=128, dtype="fp8", kv="fp8", page=64, window=100),
    paged((150, 200), (3, 90), heads=(14, 2), D=128, sinks=True, window=100),
    paged((150, 200), (3, 90), heads=(6, 2), D=128, kv="fp8"),
    paged((150, 200), (3, 90), heads=(8, 2), D=192),
    paged((150, 200), (3, 90), heads=(6, 2), D=192, page=64, sinks=True),
    paged((150, 200), (3, 90), heads=(8, 2), D=192, DV=128, sinks=True),
    paged((150, 200), (3, 90), heads=(8, 2), D=256, page=64),
    paged((150, 200), (3, 90), heads=(6, 2), D=256, causal=False, softcap=20.0),
]


@pytest.mark.compile
@pytest.mark.skipif(gluon_lacks() is not None, reason="a release of Triton for which it is not chosen")
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_compiled(case: Case) -> None:
    """No spills, in the loops over keys where O has 256 columns; shared memory that a CTA has, and wgmma that runs
    beside other work.
    """
    from kvlab.attention.attend_paged import kernel
    from kvlab.attention.attend_paged.wide import hopper

    arrays, named = by_tiles(case, 132)
    caught = Caught(hopper.walk)
    tensors = [to_torch(np.ascontiguousarray(array)) for array in arrays]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "walk", caught)
        for name in ("walk", "join"):
            patch.setattr(kernel, name, Caught(getattr(kernel, name)))
        kernel.launch(*tensors, **named | {"features": as_tensors(named["features"])}, works=2 * [tensors[4]])
    made, C = as_launched(caught.fn, caught.arguments, "sm_90"), named["config"].walks[-1].wide
    assert made.spills <= (80 if C.DV == 256 else 0)
    lines = made.sass.splitlines()
    at = [i for i, line in enumerate(lines) if "GMMA" in line]
    first, each = C.DEPTH * C.ITEM // 32, len(at) // C.NC  # products before the loop, and of a consumer
    for w in range(C.NC):
        inner = "\n".join(lines[at[w * each + first] : at[(w + 1) * each - 1]])
        assert not re.search(r"\b(LDL|STL)\b", inner)
    assert made.shared <= shared_bytes(C) <= SHARED["sm_90"]
    products = made.instructions["HGMMA"] + made.instructions["QGMMA"]
    steps = (C.DEPTH + C.PRODUCTS * C.BN) * C.ITEM // 32
    assert products == 2 * steps * C.NC  # in the loop and around it
    assert made.instructions["PREEXIT"] == made.instructions["ACQBULK"] == 1  # behind the list; the ring may begin
    assert made.instructions["WARPGROUP"] <= (8 + 2 * C.D // 64 + 2 * C.PRODUCTS) * C.NC
    assert made.instructions["F2F"] == 0  # e4m3 is widened by the fast units


def test_every_configuration_has_room() -> None:
    """Law."""
    features = attend_paged.planned(*CASES[0][0].build().arguments()[1], backend="reference").features
    for D, DV in HEAD_DIMS:
        for page in (16, 64, 256):
            for itemsizes in {(2, 2)} | ({(2, 1), (1, 1)} if (D, DV) in FP8_DIMS else set()):
                problem = PrefillProblem(1, 1, 4, 1, D, DV, *itemsizes)
                C = listed_constants(problem, page, features, together=4, overhead=1)
                assert shared_bytes(C) <= SHARED["sm_90"]


RINGS = ["ring", "ring", "tiles"]
NONE_NEW = ((0, 17),) * 9  # most sequences are no prompts, so that others have walks of their own
AT_ONCE = [
    (paged((70, 300), (2, 20), (1, 600), (6, 40), *NONE_NEW, heads=(8, 2), D=80, sinks=True), RINGS),
    (paged((130, 300), (1, 480), (0, 17), (1, 1), (9, 128), heads=(8, 2), D=128, dtype="fp16"), ["tiles"]),
    (paged((70, 300), (1, 600), (6, 40), *NONE_NEW, heads=(8, 2), D=128, kv="fp8", scales="head"), RINGS),
    (paged((70, 400), (9, 128), heads=(5, 1), dtype="fp16", D=128, kv="fp8", scales="number", window=90), ["tiles"]),
    (paged((70, 300), (1, 480), (9, 128), heads=(8, 2), D=128, dtype="fp8", kv="fp8", scales="head"), ["tiles"]),
    (paged((70, 300), (1, 90), (20, 20), heads=(6, 2), D=80, sinks=True), ["tiles"]),
    (paged((70, 300), (1, 90), (20, 20), heads=(4, 1), D=192), ["tiles"]),
    (paged((70, 300), (1, 600), (6, 40), *NONE_NEW, heads=(8, 2), D=192), RINGS),
    (paged((70, 300), (1, 90), (20, 20), heads=(3, 1), D=256, dtype="fp16"), ["tiles"]),
]


@pytest.mark.compile
@pytest.mark.skipif(gluon_lacks() is not None, reason="a release of Triton for which it is not chosen")
@pytest.mark.parametrize("case, walks", AT_ONCE, ids=str)
def test_the_compiled_walks_attend(case: Case, walks: list[str]) -> None:
    """Their PTX, run without a GPU, with that of the lists and of the joins; rings run before the tiles beside which
    they are launched, and end behind them. Rests on float64.
    """
    from kvlab.attention.attend_paged import hopper

    arrays, named = at_once(case, 12)
    config = named["config"]
    assert [{"hopper": "ring", "wide.hopper": "tiles"}[str(one.module)] for one in config.walks] == walks
    assert config.beside == (len(walks) > 1)
    out = to_torch(np.full((*arrays[0].shape[:3], arrays[2].shape[3]), np.nan, result_dtype(arrays[0])))
    made, lse = simulated(hopper, arrays, named | {"out": out}, lists=True)
    assert_accurate(case.build(), made[0], lse[0])
