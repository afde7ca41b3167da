"""The Hopper decode twin reports nothing; with a statement taken out or replaced it reports what is wrong.

Rests on the definition of the hardware's instructions (PTX ISA: mbarrier, cp.async.bulk.tensor, ldmatrix, bar.sync).
Every mutant runs the whole emulator.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from decode_cases import Case
from mutants import READ, STUCK, WAR, WAW, Mutation, Patch, barrier, caught_as, flipped, method_of, unstated
from test_decode_hopper import launch_arguments

from kvlab.attention.mha_decode import hopper_emulator
from kvlab.attention.mha_decode.hopper_cta import HopperCTA, HopperPlaces
from kvlab.staging import Timeline, Traffic

LONG = Case((130, 20), heads=(16, 4), splits=1)  # nine blocks, then two
SPLIT = Case((100,), heads=(8, 8), S=2, page=8, splits=2)

method = functools.partial(method_of, HopperCTA)


def run(case: Case, traffic: Traffic | None = None) -> None:
    arrays, named = launch_arguments(case)
    hopper_emulator.launch(*arrays, **named, traffic=traffic)


@pytest.mark.parametrize("case", [LONG, SPLIT], ids=str)
def test_nothing_is_reported(case: Case) -> None:
    traffic = Traffic(timeline=Timeline())
    run(case, traffic)
    kinds = {event.kind for event in traffic.trace()}
    assert {"copy", "landed", "read", "wait", "expect", "barrier"} <= kinds


def one_stage(patch: Patch) -> None:
    """All stages stand in one place; each has an mbarrier of its own."""
    original = HopperPlaces.region

    def region(places: HopperPlaces, start: int, nbytes: int, warps: Any) -> Any:
        return original(places, start // (2 * nbytes) * 2 * nbytes, nbytes, warps)

    patch.setattr(HopperPlaces, "region", region)


def without_warp_2(cta: HopperCTA, meet: Any, me: Any) -> None:
    cta.hazards.barrier((0, 1, 3), (0, 1, 3), name=1)


MUTANTS: dict[str, tuple[Mutation, Any, str]] = {
    "nobody-waits": (unstated("full"), READ, "k read by warp 0"),
    "the-other-phase": (flipped("full"), (READ, STUCK), "full[0]"),
    "refilled-without-a-barrier": (method("meet", lambda *_: None), WAR, "k copy by warp 0"),
    "refilled-before-warp-2-is-done": (method("meet", without_warp_2), WAR, "k read by warp 2"),
    "too-many-bytes": (
        barrier("expect_bytes", "full", lambda expect, n, warp: expect(n + 128, warp)), STUCK, "128 bytes pending",
    ),
    "one-stage": (one_stage, (WAW, WAR), "copy by warp 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, monkeypatch: Patch) -> None:
    mutate, kind, words = MUTANTS[name]
    mutate(monkeypatch)
    caught_as(kind, words, lambda: run(LONG))
