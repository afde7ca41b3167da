"""The Hopper decode twin reports nothing; with a statement taken out or replaced it reports what is wrong.

Rests on the definition of the hardware's instructions (PTX ISA: mbarrier, cp.async.bulk.tensor, ldmatrix, bar.sync).
Every mutant runs the whole emulator.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from all_pairs import all_pairs
from decode_cases import Case
from feature_cases import FeatureCase
from hazard_mutations import (
    ORDER,
    READ,
    STUCK,
    WAR,
    WAW,
    Mutation,
    Patch,
    arrival,
    arrivals,
    barrier,
    caught_as,
    flipped,
    method_of,
    unstated,
)
from hopper_launches import decode_arguments
from turns import ORDERS

from kvlab.attention.hopper.cta import Places
from kvlab.attention.mha_decode import hopper_emulator
from kvlab.attention.mha_decode.hopper_cta import HopperDecodeCTA
from kvlab.staging import Timeline, Traffic

LONG = Case((130, 20), heads=(16, 4), splits=1)  # nine blocks, then two
SPLIT = Case((100,), heads=(8, 8), S=2, page=8, splits=2)

method = functools.partial(method_of, HopperDecodeCTA)


def run(case: Case, traffic: Traffic | None = None) -> None:
    arrays, named = decode_arguments(case)
    hopper_emulator.launch(*arrays, **named, traffic=traffic)


@pytest.mark.parametrize("case", [LONG, SPLIT], ids=str)
def test_nothing_is_reported(case: Case) -> None:
    traffic = Traffic(timeline=Timeline())
    run(case, traffic)
    kinds = {event.kind for event in traffic.trace()}
    assert {"copy", "landed", "read", "wait", "arrive", "expect", "barrier"} <= kinds


def one_stage(patch: Patch) -> None:
    """All stages stand in one place; each has an mbarrier of its own."""
    original = Places.region

    def region(places: Places, start: int, nbytes: int, warps: Any) -> Any:
        return original(places, start // (2 * nbytes) * 2 * nbytes, nbytes, warps)

    patch.setattr(Places, "region", region)


def given_back_without_a_barrier(cta: HopperDecodeCTA, arrive: Any, me: Any, bar: Any) -> None:
    bar.arrive(me[:1])


def no_barriers_at_the_end(cta: HopperDecodeCTA, leave: Any, *parts: Any) -> Any:
    leave(*parts)
    meet = cta.meet

    def again(me: Any) -> None:
        cta.meet = meet  # type: ignore[method-assign]

    cta.meet = again  # type: ignore[method-assign]


CONSUMERS = (0, 1, 2, 3)
MUTANTS: dict[str, tuple[Mutation, Any, str]] = {
    "the-consumers-do-not-wait": (unstated("full", CONSUMERS), READ, "k read by warp 0 of the consumers"),
    "the-producer-does-not-wait": (unstated("free"), WAR, "k copy by warp 4 of the producer"),
    "the-other-phase": (flipped("full"), (READ, STUCK), "full[0]"),
    "given-back-without-a-barrier": (arrival("free", given_back_without_a_barrier), WAR, "read by warp 1"),
    "never-given-back": (arrival("free", lambda *_: None), STUCK, "free[0]"),
    "two-arrivals-for-a-stage": (arrivals("free", lambda n: n + 1), STUCK, "1 of 2 arrivals"),
    "too-many-bytes": (
        barrier("expect_bytes", "full", lambda expect, n, warp: expect(n + 128, warp)), STUCK, "128 bytes pending",
    ),
    "no-barriers-at-the-end": (method("leave", no_barriers_at_the_end), ORDER, "sums read by warp"),
    "one-stage": (one_stage, (WAW, WAR), "copy by warp 4"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, monkeypatch: Patch) -> None:
    mutate, kind, words = MUTANTS[name]
    mutate(monkeypatch)
    caught_as(kind, words, lambda: run(LONG))


GRID = all_pairs(
    lambda row: row["heads"][0] // row["heads"][1] * row["S"] <= 16 and (row["D"] == 128 or row["kv"] is None),
    heads=((4, 4), (6, 2), (16, 1)), D=(64, 128), S=(1, 2, 4), page=(8, 16, 24, 64), dtype=("bf16", "fp16"),
    kv=(None, "fp8"), splits=(1, 2, 3), storage=("apart", "hnd"), order=tuple(ORDERS),
)


@pytest.mark.parametrize("row", GRID, ids=lambda row: "-".join(map(str, row.values())).replace(" ", ""))
def test_a_grid_of_small_calls(row: dict[str, Any], monkeypatch: Patch) -> None:
    """Nothing is reported, in whatever order the partitions get their turns."""
    row = dict(row)
    monkeypatch.setattr(hopper_emulator, "run_roles", ORDERS[row.pop("order")])
    kv = row.pop("kv")
    case = FeatureCase(lens=(0, 4, 15, 63, 64, 65, 129), kv=kv, scales="head" if kv else "", **row)
    arrays, named = decode_arguments(case)
    out, _ = hopper_emulator.launch(*arrays, **named)
    assert not np.isnan(out.astype(np.float32)).any()
