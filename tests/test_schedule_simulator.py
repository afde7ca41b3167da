"""The simulator of schedules. Rests on work whose time can be told by hand, and on the committed records."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.schedule import (
    Costs,
    Work,
    equal_parts,
    equal_shares,
    equal_tasks,
    fit,
    kernels,
    load,
    predict,
    simulate,
    traffic_tasks,
    walk,
    whole_sequences,
)

COSTS = Costs(fixed=5.0, item=2.0, block=0.5, bandwidth=1e6)


@pytest.mark.parametrize("units, places, block_bytes, us", [
    ([[10, 4]], 1, 1.0, 2 + 5 + 2 + 2),  # one program at its own rate
    ([[10], [10]], 1, 1.0, 2 * (2 + 5)),  # two, one place
    ([[10], [4]], 2, 1.0, 2 + 5),  # two places
    ([[10], [10]], 2, 1e6, 2 + 20),  # one block a us for both together
    ([[10], [4]], 2, 1e6, 2 + 8 + 6),  # the first goes on alone, as fast as the memory
    ([[10], [4]], 2, 4e5, 2 + 3.2 + 3.0),  # and here as fast as it can
    ([], 3, 1.0, 0),
])
def test_work_that_can_be_told_by_hand(units: list[list[int]], places: int, block_bytes: float, us: float) -> None:
    assert simulate(Work(units, places, block_bytes), COSTS) == pytest.approx(us)


def test_a_fit_finds_the_costs_that_made_the_times() -> None:
    rng = np.random.default_rng(0)
    works = [Work([rng.integers(1, 400, k).tolist() for _ in range(8)], 8, size)
             for k, size in ((1, 1e3), (5, 1e3), (30, 2e6), (2, 2e6), (1, 1e5), (60, 1e3))]
    truth = Costs(8.0, 1.2, 0.3, 2.4e6)
    found = fit(works, [predict(work, truth) for work in works], COSTS)
    for work in works:
        assert predict(work, found) == pytest.approx(predict(work, truth), rel=0.01)
    assert [found.block, found.bandwidth] == pytest.approx([truth.block, truth.bandwidth], rel=0.02)


def test_the_walk_is_predicted_within_a_tenth() -> None:
    """Each task from the records of the others: those of the prototype on an H100."""
    tasks = traffic_tasks() | equal_tasks()
    traffic, peers = load()
    (prototype,) = (kernel for kernel in kernels(traffic, peers["tasks"]) if kernel.work is walk)
    found = prototype.predictions(tasks)
    assert set(found) == set(traffic["prototype"])
    for name, (us, fitted) in found.items():
        assert not fitted
        assert us == pytest.approx(prototype.recorded[name], rel=0.1), name


FITTED = {"traffic_mla_b128_h16_lognormal_p64", "traffic_decode_fp8_b128_lognormal_p16", "traffic_draft8_p64"}
FITTED |= {f"traffic_prefill_{name}" for name in (
    "d96_s4k_causal", "d80_s2k_full", "d64_gqa8_s16k_causal", "d256_gqa2_s4k_causal")}
"""Traffic tasks whose own record is among those that their prediction rests on: their kernels have one or two."""


def test_every_traffic_task_is_predicted_within_a_tenth() -> None:
    """Rests on the committed record of an H200; all but FITTED from the records of other tasks."""
    tasks = traffic_tasks() | equal_tasks()
    traffic, peers = load()
    recorded, found = {}, {}
    for kernel in kernels(traffic, peers["tasks"])[1:]:
        found |= {name: us for name, us in kernel.predictions(tasks).items() if name.startswith("traffic")}
        recorded |= kernel.recorded
    assert set(found) == {name for name in peers["tasks"] if name.startswith("traffic")}
    assert {name for name, (_, fitted) in found.items() if fitted} == FITTED
    assert {name: us for name, (us, _) in found.items() if abs(us / recorded[name] - 1) > 0.1} == {}


def test_q_and_o_pass_at_a_place_s_share() -> None:
    """By hand: two places, 4 us for the 2e6 bytes of each unit beside the other's."""
    work = Work([[10], [4]], 2, 1.0, unit_bytes=2e6)
    assert simulate(work, COSTS) == pytest.approx(2 + 4 + 5)


def test_the_work_of_a_schedule_is_all_of_it() -> None:
    task = traffic_tasks()["traffic_draft4_p16"]
    work = walk(task)
    assert len(work.units) == work.places == 49
    assert sum(map(sum, work.units)) == sum(-(-n // 16) for n in task.lens)
    assert work.merges >= 2
    assert work.block_bytes == 16 * 512 * 8


@pytest.mark.parametrize("count", [1, 3, 8, 64])
def test_gpus_have_all_keys_between_them(count: int) -> None:
    lens = traffic_tasks()["traffic_decode_b64_onelong_p16"].lens
    for share in (whole_sequences, equal_parts, equal_shares):
        parts, _ = share(lens, count)
        assert len(parts) == count
        assert sum(map(sum, parts)) == sum(lens)
    most = [max(sum(part) for part in share(lens, count)[0]) for share in (equal_parts, equal_shares)]
    assert most[1] == -(-sum(lens) // count) <= most[0]
