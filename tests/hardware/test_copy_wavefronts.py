"""Wavefronts of cp.async. Rests on hardware: 832 copies counted on an H100, each by itself (tests/data/hardware).

The rule of ``.ca`` was found on copies of 4 bytes; those of 8 and 16 bytes were held out. That of ``.cg`` is fixed
by the copies of seed 0, as the test of its clauses shows; it predicts those of seed 1.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest

from benchmarks.truth import records
from benchmarks.truth.accesses import SEEDS, START
from benchmarks.truth.cuda_source import SLOTS
from kvlab.hardware import COPIES, copy_unit_passes, copy_wavefronts, count_wavefronts

RECORD = records.read("accesses")["lanes"]
ALONE = [case for case in records.read("accesses_alone")["cases"].values() if case["op"] in COPIES]
LANE = np.arange(32)
CG = "cp.async.cg.16"
CLAUSES = {"first lane", "line", "row", "halves", "exchanged", "parity", "sector once"}


def copies(op: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """Where to and where from ``[SLOTS, 32]``, masks ``[SLOTS]``, and what was counted."""
    case = RECORD[f"{op}, {seed}"]
    to, source = (records.unpack(case[key]).reshape(SLOTS, 32) for key in ("address", "source"))
    return to, START + source, np.array(case["mask"]), case


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("op", COPIES)
def test_copies_take_the_chip_s_wavefronts(op: str, seed: int) -> None:
    to, source, mask, case = copies(op, seed)
    total, least = copy_wavefronts(op, to, source, mask)
    assert total.tolist() == case["wavefronts"]
    assert (total >= least).all()


@pytest.mark.parametrize("case", ALONE, ids=lambda c: f"{c['op']} {c['note']}")
def test_a_copy_launched_alone_with_cold_caches_takes_as_many(case: dict[str, Any]) -> None:
    total, _ = copy_wavefronts(case["op"], case["address"], np.array(case["source"]), case["mask"])
    assert total == case["wavefronts"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("op", COPIES)
def test_what_the_unit_took(op: str, seed: int) -> None:
    """The load and store unit's own passes, in all: as many, and up to 1 % more for lines that are on their way."""
    to, source, mask, case = copies(op, seed)
    ours = int(copy_unit_passes(op, to, source, mask).sum())
    assert ours <= case["lsu"] <= 1.01 * ours


def chain(to: np.ndarray, source: np.ndarray, active: np.ndarray, size: int) -> int:
    """The rule of the unit for one warp, lane by lane."""
    total, together = 0, 128 // size
    for phase in range(0, 32, together):
        depth: list[int] = []
        lanes = [i for i in range(phase, phase + together) if active[i]]
        wants = [(to[i] // size % together, source[i] // size % together) for i in lanes]
        for i, mine in enumerate(wants):
            earlier = zip(wants[:i], depth, strict=True)
            depth.append(1 + max((d for one, d in earlier if one[0] == mine[0] or one[1] == mine[1]), default=0))
        total += max(depth, default=0)
    return total


@pytest.mark.parametrize("op", [op for op in COPIES if op != CG])
def test_the_unit_s_rule_said_lane_by_lane(op: str) -> None:
    """Law; and however lanes are reversed, a chain of rivals is as long."""
    rng, size = np.random.default_rng(5), COPIES[op]
    to, source = (size * rng.integers(0, rng.choice([4, 30, 200], (60, 1)), (60, 32)) for _ in range(2))
    active = rng.random((60, 32)) < rng.choice([0.3, 0.8, 1.0], (60, 1))
    active[0] = False
    found = copy_unit_passes(op, to, source, active)
    assert found.tolist() == [chain(*case, size) for case in zip(to, source, active, strict=True)]
    assert copy_unit_passes(op, *(x[:, ::-1] for x in (to, source, active))).tolist() == found.tolist()


@pytest.mark.parametrize("op", COPIES)
def test_zeros_count_where_a_warp_copies_nothing_else(op: str) -> None:
    """Law: the unit's passes in warps of which no lane reads, nothing beside lanes that do."""
    rng, size = np.random.default_rng(6), COPIES[op]
    to, source = (size * rng.integers(0, 60, (40, 32)) for _ in range(2))
    active, zeros = rng.random((40, 32)) < 0.5, rng.random((40, 32)) < 0.8
    active[::3], zeros[::6] = False, False
    plain, unit = copy_wavefronts(op, to, source, active), copy_unit_passes(op, to, None, zeros)
    for both, alone in zip(copy_wavefronts(op, to, source, active, zeros=zeros), plain, strict=True):
        assert both.tolist() == [unit[n] if n % 3 == 0 else alone[n] for n in range(40)]
    assert unit[3] > 0 == unit[0]


def past_l1(to: np.ndarray, source: np.ndarray, active: np.ndarray, without: str = "") -> int:
    """The rule of ``.cg`` for one warp, said another way; ``without`` one of its :data:`CLAUSES`."""
    won: dict[int, int] = {}
    for slot, origin in zip((to[active] // 16).tolist(), (source[active] // 16).tolist(), strict=True):
        if without == "first lane" or slot not in won:
            won[slot] = origin
    moves: dict[tuple[int, int, int], int] = defaultdict(int)
    for slot, origin in won.items():
        moves[slot // 2, origin // 2, (slot ^ origin) & 1] |= 1 << origin % 2
    groups: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for (row, line, exchanged), halves in moves.items():
        key = {"row": row // 4, "line": line // 4, "exchanged": exchanged, "parity": (row ^ line) & 1, "halves": halves}
        groups[tuple(value for clause, value in key.items() if clause != without)][line] += 1
    return sum(1 if without == "sector once" else max(turns.values()) for turns in groups.values())


def wrong(seed: int, without: str = "") -> int:
    """How many of a seed's copies are counted wrongly."""
    to, source, mask, case = copies(CG, seed)
    active = (mask[:, None] >> LANE & 1).astype(bool)
    found = [past_l1(t, s, a, without) for t, s, a in zip(to, source, active, strict=True)]
    return int((np.array(found) != case["wavefronts"]).sum())


def test_every_clause_is_needed() -> None:
    """Without any one of them some copies of seed 0 are counted wrongly; with all of them none of either seed."""
    assert [wrong(seed) for seed in SEEDS] == [0, 0]
    assert {clause for clause in CLAUSES if wrong(0, clause)} == CLAUSES


def test_random_copies_agree_with_the_rule_said_another_way() -> None:
    rng = np.random.default_rng(7)
    n = 200
    to, source = (16 * rng.integers(0, rng.choice([4, 12, 40, 300], (n, 1)), (n, 32)) for _ in range(2))
    active = rng.random((n, 32)) < rng.choice([0.2, 0.7, 1.0], (n, 1))
    active[0] = False
    total, least = copy_wavefronts(CG, to, source, active)
    assert total.tolist() == [past_l1(*case) for case in zip(to, source, active, strict=True)]
    assert total[0] == least[0] == 0


@pytest.mark.parametrize("op", [op for op in COPIES if op != CG])
def test_copies_from_a_row_in_order_cost_what_the_stores_cost_without_sharing(op: str) -> None:
    """Law: a source without conflicts leaves those of the destination, where equal words are not shared."""
    rng, size = np.random.default_rng(3), COPIES[op]
    to = size * rng.integers(0, 64, (50, 32))
    total, _ = copy_wavefronts(op, to, 4096 + size * LANE)
    group = to // size % (128 // size)
    phases = group.reshape(50, -1, 128 // size)
    assert total.tolist() == [sum(np.bincount(phase).max() for phase in warp) for warp in phases]
    again = copy_wavefronts(op, 4096 + size * LANE, to)  # and the two sides may change places
    np.testing.assert_array_equal(again[0], total)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("cp.async.cg.8", LANE, LANE), "'cp.async.cg.8': must be one of cp.async.ca.4"),
        (("cp.async.ca.4", LANE * 2, LANE * 4), "cp.async.ca.4: address is 2: must be a multiple of 4"),
        ((CG, LANE * 16, LANE * 16 - 32), "source is -32: must be a multiple"),
        ((CG, LANE[:16] * 16, LANE[:16] * 16), r"must be \[..., 32\]"),
        ((CG, LANE * 16, 0), r"must be \[..., 32\]"),
        ((CG, np.zeros((2, 32), int), np.zeros((3, 32), int)), "do not broadcast"),
        ((CG, LANE * 16.0, LANE * 16), "must be integers"),
        ((CG, LANE * 16, LANE * 16, None, "gfx950"), "cp.async.cg.16: gfx950 has no cp.async"),
    ],
)
def test_what_is_not_accepted(args: tuple[Any, ...], words: str) -> None:
    """Both functions say the same, which therefore names neither."""
    for function in (copy_wavefronts, copy_unit_passes):
        with pytest.raises(ValueError, match=rf"(?s)^(?!copy_).*{words}"):
            function(*args)


def test_count_wavefronts_sends_copies_on() -> None:
    with pytest.raises(ValueError, match="copy_wavefronts"):
        count_wavefronts("cp.async.ca.4", LANE * 4)


HELD = records.read("copies")
BY_SEED = [(op, seed) for op in COPIES for seed in (2, 3)]


def held(op: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """Copies from which no rule was made."""
    case = HELD["together"][f"{op}, {seed}"]
    to, source = (records.unpack(case[key]).reshape(SLOTS, 32) for key in ("address", "source"))
    return to, START + source, np.array(case["mask"]), case


@pytest.mark.parametrize(("op", "seed"), BY_SEED)
def test_copies_that_no_rule_was_made_from(op: str, seed: int) -> None:
    to, source, mask, case = held(op, seed)
    assert copy_wavefronts(op, to, source, mask)[0].tolist() == case["wavefronts"]
    ours = int(copy_unit_passes(op, to, source, mask).sum())
    assert ours <= case["lsu"] <= 1.011 * ours


@pytest.mark.parametrize("seed", (2, 3))
@pytest.mark.parametrize("op", ["cp.async.ca.4", "cp.async.cg.16"])
def test_copies_of_zeros(op: str, seed: int) -> None:
    to, _, mask, case = held(op.replace("async", "async.zeros"), seed)
    assert copy_unit_passes(op, to, mask=mask).sum() == case["lsu"]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_unit_took_for_each_copy_alone(seed: int) -> None:
    """Exact for copies from up to three lines; from more, which come at their own times, one pass more at most."""
    to, source, mask, _ = copies("cp.async.ca.4", seed)
    more = np.array(HELD["alone"][f"cp.async.ca.4, {seed}"]) - copy_unit_passes("cp.async.ca.4", to, source, mask)
    active = mask[:, None] >> LANE & 1 == 1
    lines = np.array([np.unique(s[a] // 128).size for s, a in zip(source, active, strict=True)])
    assert not more[lines <= 3].any()
    assert set(more.tolist()) <= {0, 1}


def test_the_record_of_held_out_copies_says_where_it_comes_from() -> None:
    assert "H100" in HELD["card"]
    assert {"command", "driver", "date", "versions"} <= set(HELD)
