"""The work list that a kernel makes. Rests on its NumPy twin, to the bit, which the laws of ``test_plan`` hold; on the
compilers' artefacts; on the mirror.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from caught import Caught, as_launched
from seeded_faults import is_found

from kvlab.attention import plan
from kvlab.attention.features.intervals import UNLIMITED
from kvlab.attention.schedule import ScheduleConfig, ScheduleProblem, emulator
from kvlab.attention.schedule.config import Sharing
from kvlab.common.arrays import to_torch
from kvlab.mirror import check
from kvlab.triton_support import child


def test_the_twins_mirror_each_other() -> None:
    report = check("schedule")
    assert report.ok
    ((_, kernel, _),) = report.twins
    steps = "setup clear begin sequences at_work zero items share begins before teams first_item"
    assert [step.marker.name for step in kernel.steps] == steps.split()


@pytest.mark.parametrize("fault", [
    ("kernel", "tl.maximum(tl.cdiv(total, at_work), least)", "tl.maximum(tl.cdiv(total, least), at_work)"),
    ("emulator", "np.cumsum(count) + items", "np.cumsum(count) - items"),
    ("kernel", "index - tl.cumsum(counts, 0) - passed", "index - tl.cumsum(counts, 0) - ended"),
    ("kernel", "(team * share < start)", "(team * share <= start)"),
    ("emulator", "row + ROWS, tokens * group) - 1", "row + ROWS, tokens * group)"),
    ("kernel", "sharing.room // sharing.lanes", "sharing.lanes // sharing.room"),
    ("emulator", "new <= sharing.few", "new < sharing.few"),
    ("kernel", "new, item // HEADS", "new, item // ROWS"),
], ids=["share", "end", "number", "first", "last row", "teams beside others", "work of few", "tile of a head"])
def test_a_seeded_fault_is_found(fault: tuple[str, str, str]) -> None:
    assert is_found("schedule", "work_list", *fault)


def case(seed: int) -> tuple[np.ndarray, np.ndarray | None, ScheduleProblem, ScheduleConfig]:
    """Lengths, new tokens of each sequence or None, and sizes of one call."""
    rnd = random.Random(seed)
    batch = rnd.choice([1, 5, 30, 200, 1100])
    lens = np.array([rnd.choice([0, 1, 15, 16, 17, rnd.randint(0, 500), rnd.randint(0, 9000)]) for _ in range(batch)])
    new = np.array([rnd.choice([0, 1, 1, rnd.randint(0, 60), rnd.randint(0, 200)]) for _ in lens])
    cumulative, kv_heads = rnd.random() < 0.5, rnd.choice([1, 2, 4])
    tokens = int(np.minimum(new, lens).sum()) if cumulative else rnd.randint(1, 40)
    cu_seqlens = np.concatenate([[0], np.cumsum(np.minimum(new, lens))]).astype(np.int32) if cumulative else None
    most, left, right = rnd.choice([4096, UNLIMITED]), rnd.choice([UNLIMITED, 100]), rnd.choice([0, 7])
    problem = ScheduleProblem(batch, tokens, rnd.choice([1, 3, 8]), kv_heads, most, cumulative, left, right)
    sizes = (
        rnd.randint(1, 3000), rnd.choice([16, 128]), rnd.choice([1, 3]), rnd.choice([16, 64]), rnd.randint(0, 5),
        rnd.randint(1, 30), rnd.choice([0, 2, 50]), *rnd.choice([(1, UNLIMITED), (2, 40)]),
    )
    lanes, wide = kv_heads, rnd.choice([1, 4]) * kv_heads
    ratio, room = rnd.choice([1, 14, 56]), rnd.choice([1, 2])
    sharing = Sharing(rnd.choice([5, 132]), 4, 9, 128, 16, 128, 4, 1, ratio, lanes, wide, room)
    groups = rnd.choice([1, kv_heads, -(-kv_heads // 2)])
    config = ScheduleConfig(*sizes, sharing=rnd.choice([None, sharing]), heads=groups)
    return lens.astype(rnd.choice([np.int32, np.int64])), cu_seqlens, problem, config


KERNEL = "kvlab.attention.schedule.kernel:launch"


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(24))
def test_the_kernel_makes_the_list_of_its_twin(seed: int) -> None:
    """Every number of it, into memory that held others; nothing is written behind the last item's end."""
    lens, cu_seqlens, problem, config = case(seed)
    (expected,) = emulator.launch(lens, cu_seqlens, problem=problem, config=config)
    before = to_torch(np.full(config.list_size(problem), 7, np.int32))
    tensors = [None if array is None else to_torch(array) for array in (lens, cu_seqlens)]
    (made,) = child.run(KERNEL, *tensors, problem=problem, config=config, out=before)
    items, most, teams = int(expected[2]), config.most_items(problem), config.teams(problem.kv_heads)
    assert items <= most
    parts = np.split(np.arange(len(expected)), [4, 5 + most, 5 + 2 * most, 5 + 3 * most])
    used = [*parts[0], *parts[1][: items + 1], *parts[2][:items], *parts[3][:items], *parts[4]]
    assert len(parts[4]) == teams + 1
    assert np.array_equal(made.numpy()[used], expected[used])
    assert (made.numpy()[parts[1][items + 1 :]] == 7).all()


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 16, 32])
def test_two_lists_share_the_processors(kv_heads: int) -> None:
    """Laws: programs with work find room on the processors at once; the parts are as the work is, up to a team and what
    tiles do not see; a list that has all the work has all the processors.
    """
    rnd = random.Random(kv_heads)
    problem = ScheduleProblem(40, 0, 4, kv_heads, cumulative=True)
    lanes, wide = kv_heads, kv_heads * (2 if kv_heads <= 8 else 1)
    sharing = Sharing(132, 4, 5, 128 * wide // lanes, 16, 128, 4, 1, 14 * wide // lanes, lanes, wide, 2)
    configs = (
        ScheduleConfig(264, most=4, sharing=sharing),
        ScheduleConfig(132, 128, wide // lanes, 128, 1, 2, fewest=5, sharing=sharing),
    )
    for chunks in (0, 1, 2, 9, 39, 40):
        new = np.array([rnd.randint(100, 900)] * chunks + [1] * (40 - chunks))
        lens = new + np.array([rnd.randint(0, 9000) for _ in new])
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        sizes = replace(problem, tokens=int(new.sum()))
        lists = [emulator.launch(lens, starts, problem=sizes, config=config)[0] for config in configs]
        few, many = (-(-int(made[1]) // int(made[0])) for made in lists)
        assert -(-few * lanes // 2) + many * wide <= 132
        if chunks in (0, 40):
            made, config = lists[chunks > 0], configs[chunks > 0]
            assert made[0] == max(-(-int(made[1]) // config.teams(kv_heads)), config.least)
            continue
        work = [int(made[1]) * times for made, times in zip(lists, (1, sharing.ratio), strict=True)]
        assert abs(many * wide - 132 * work[1] / sum(work)) <= wide + 6 or many in (1, sharing.most)


def test_each_team_begins_where_its_first_unit_is() -> None:
    """Law: the first item of a team is the one in which its share begins."""
    made = plan([3000, 0, 17, 900, 4, 4, 4], q_heads=4, kv_heads=1, programs=23)
    first = made.list[-made.teams - 1 :]
    units = made.units
    for team in range(made.teams):
        own = units[units["program"] == team]
        if len(own):
            assert made.sequences[first[team]] <= own["sequence"][0]
            assert made.starts[first[team]] <= team * made.share < made.starts[first[team] + 1]
        else:
            assert first[team] == len(made.item)


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx950"])
@pytest.mark.parametrize("seed", [1, 3])
def test_compiled(seed: int, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program, without spills. On sm_90 the launch behind it begins meanwhile, and of several lists each waits for
    the one before.
    """
    from kvlab.attention.schedule import kernel

    lens, cu_seqlens, problem, config = case(seed)
    caught, hopper = Caught(kernel.work_list), target == "sm_90"
    monkeypatch.setattr(kernel, "work_list", caught)
    tensors: list[Any] = [None if array is None else to_torch(array) for array in (lens, cu_seqlens)]
    kernel.launch(*tensors, problem=problem, config=config, early=hopper, beside=hopper)
    ((grid, arguments),) = caught.calls
    assert arguments.pop("launch_pdl", False) == hopper
    made = as_launched(caught.fn, arguments, target)
    assert grid == (1,)
    assert made.spills == 0
    assert made.shared <= 1024
    assert made.instructions["PREEXIT"] == made.instructions["ACQBULK"] == hopper
