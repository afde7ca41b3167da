"""The Hopper twin reports nothing; with a statement taken out, moved or replaced it reports what is wrong.

Rests on the definition of the hardware's instructions (PTX ISA: mbarrier, cp.async.bulk.tensor, wgmma,
fence.proxy.async, bar.sync). Every mutant runs the whole emulator, one program that takes all items.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from all_pairs import all_pairs
from hazard_mutations import (
    END,
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
    both,
    caught_as,
    drop,
    flipped,
    method_of,
    unstated,
)
from hopper_launches import listed_arguments, mla_arguments
from mla_cases import FULL, Case
from turns import ORDERS

from kvlab.attention.hopper.cta import Places
from kvlab.attention.mla_decode import hopper_emulator
from kvlab.attention.mla_decode.hopper_cta import HopperMLACTA
from kvlab.staging import AsyncBarrier, Timeline, Traffic

method = functools.partial(method_of, HopperMLACTA)
LONG = Case((330, 70), H=16, S=2, columns=FULL, page=64, splits=1)  # six blocks, then two, whose last are cleaned
LATE = replace(LONG, H=80, S=1)
BLOCK = Case((50, 64), H=3, columns=FULL, page=16, splits=1)  # two items of one block
BOXED = replace(BLOCK, H=40)  # O leaves by TMA
LISTED = Case((50, 64, 9), H=40, columns=FULL, page=5, splits=1)  # lists of 150 slots, three blocks
SCALED = replace(LONG, row="scaled")
SCALED_LIST = replace(LISTED, row="scaled")
CASES = {
    "scaled": SCALED, "scaled-list": SCALED_LIST,
    "long": LONG, "late": LATE, "block": BLOCK, "boxed": BOXED, "split": replace(BOXED, splits=2), "listed": LISTED,
}


def run(case: Case, traffic: Traffic | None = None, programs: int = 1) -> None:
    arrays, named = listed_arguments(case, 150) if case in (LISTED, SCALED_LIST) else mla_arguments(case)
    config = replace(named.pop("config"), programs=programs)
    hopper_emulator.launch(*arrays, **named, config=config, traffic=traffic)


ALL = [LONG, LATE, BLOCK, BOXED, LISTED, SCALED, SCALED_LIST, replace(LONG, H=128, splits=3)]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_nothing_is_reported(case: Case) -> None:
    traffic = Traffic(timeline=Timeline())
    run(case, traffic, programs=2)
    kinds = {event.kind for event in traffic.trace()}
    assert {"copy", "landed", "write", "read", "read in flight", "wait", "arrive", "expect", "barrier"} <= kinds


def freed_before_the_product(which: str, half: str) -> Mutation:
    """V is given back when P V starts instead of when it is done."""

    def early(cta: HopperMLACTA, accumulate: Any, me: Any, p: Any, b: int, which_half: str, o: Any) -> Any:
        o = accumulate(me, p, b, which_half, o)
        if which_half == half:
            cta.meet(me)
            (cta.l_free if half == "left" else cta.r_free)[b].arrive(me[:1], 1)
        return o

    others = barrier("arrive", which, lambda arrive, by, *each: arrive(by, *each) if each else None)
    return both(method("accumulate", early), others)


def one_stage(patch: Patch) -> None:
    """Both stages stand in one place; each has mbarriers of its own."""
    original = Places.whole

    def whole(places: Places, role: str, i: int, warps: Any) -> Any:
        return original(places, role, 0, warps)

    patch.setattr(Places, "whole", whole)


def leader_fences_nothing(cta: HopperMLACTA, send: Any, me: Any, p: Any, alpha: Any) -> None:
    fence, cta.hazards.fence_async = cta.hazards.fence_async, lambda *_: None  # type: ignore[method-assign]
    send(me, p, alpha)
    cta.hazards.fence_async = fence  # type: ignore[method-assign]


def told_at_once(bar: AsyncBarrier, arrive: Any, warps: Any) -> None:
    """Ordinary arrivals instead of those of the copies."""
    bar.arrive(warps, 32)


def leader_reads_rows_unfenced(cta: HopperMLACTA, start: Any, *args: Any) -> Any:
    fence, cta.hazards.fence_async = cta.hazards.fence_async, lambda *_: None  # type: ignore[method-assign]
    s = yield from start(*args)
    cta.hazards.fence_async = fence  # type: ignore[method-assign]
    return s


def latents_unfenced(cta: HopperMLACTA, put: Any, *args: Any) -> None:
    fence, cta.hazards.fence_async = cta.hazards.fence_async, lambda *_: None  # type: ignore[method-assign]
    put(*args)
    cta.hazards.fence_async = fence  # type: ignore[method-assign]


def cleaned_without_a_barrier(cta: HopperMLACTA, clean: Any, *args: Any) -> None:
    cta.meet = lambda me: None  # type: ignore[method-assign]
    clean(*args)
    del cta.meet


def o_written_without_a_barrier(cta: HopperMLACTA, store: Any, *args: Any) -> None:
    meet = cta.meet
    cta.meet = lambda me: setattr(cta, "meet", meet)  # type: ignore[method-assign]
    store(*args)
    del cta.meet


LEADER, PRODUCER, OTHER = (0, 1, 2, 3), (8, 9, 10, 11), (12, 13, 14, 15)
method_of_barrier = functools.partial(method_of, AsyncBarrier)
# name: cases, mutation, what is reported, what must be in the message
MUTANTS: dict[str, tuple[str, Mutation, Any, str]] = {
    "q-is-not-waited-for": ("long block", unstated("q full"), READ, "q wgmma by warp 0 of the leader"),
    "q-is-refilled-without-a-wait": ("long block", unstated("q free"), WAR, "q copy by warp 8 of the producer"),
    "the-left-half-is-not-waited-for": ("long block", unstated("left full"), READ, "a wait of warp 0 for left full[0]"),
    "the-right-half-is-not-waited-for": ("long", unstated("right full", LEADER), READ, "k right wgmma by warp 0"),
    "the-left-half-is-refilled-without-a-wait": ("long", unstated("left free"), WAR, "k copy by warp 8"),
    "the-right-half-is-refilled-without-a-wait": ("long", unstated("right free", (8,)), WAR, "k copy by warp 8"),
    "p-is-not-waited-for": ("long block", unstated("p full"), ORDER, "rows read by warp 4 of the follower"),
    "p-is-overwritten-without-a-wait": ("long", unstated("right free", LEADER), WAR, "p write by warp 0 of the leader"),
    "the-other-phase-of-p": ("long block", flipped("p full"), (ORDER, STUCK), "p full|rows read"),
    "the-other-phase-of-the-left-half": ("long", flipped("left full"), (READ, STUCK), "left full[0]"),
    "too-many-bytes": (
        "long", barrier("expect_bytes", "left full", lambda expect, n, warp: expect(n + 128, warp)), STUCK,
        "left full[0]: warps [0, 1, 2, 3] wait for phase 0 for ever: 128 bytes pending",
    ),
    "two-arrivals-for-a-free-half": ("long", arrivals("right free", lambda n: n + 1), STUCK, "1 of 2 arrivals"),
    "the-left-half-given-back-before-the-product": (
        "long", freed_before_the_product("left free", "left"), WAR, "k copy by warp 8 of the producer",
    ),
    "the-right-half-given-back-before-the-product": (
        "long", freed_before_the_product("right free", "right"), WAR, "k copy by warp 8 of the producer|p write",
    ),
    "the-follower-never-gives-back": ("long", arrival("right free", lambda *a: None), STUCK, "right free[0]"),
    "the-leader-never-says-that-s-is-done": ("late", barrier("arrive", "s done", lambda *a: None), STUCK, "s done"),
    "given-back-without-a-barrier": (
        "long", arrival("left free", lambda cta, arrive, me, bar: bar.arrive(me[:1])), WAR,
        "a barrier after wgmma.wait_group in warp 1",
    ),
    "no-wait-for-wgmma": ("long block", method("wait_mma", lambda *a: None), (WAR, END), "wgmma.wait_group in warp"),
    "one-product-less-is-waited-for": (
        "long", method("wait_mma", lambda cta, wait, me, n: wait(me, n + 1)), WAR, "wgmma.wait_group in warp",
    ),
    "no-fence-behind-p": ("long block", method("send", leader_fences_nothing), ORDER, "fence.proxy.async in warp 0"),
    "no-fence-behind-the-zeros": ("long", drop("fence_async", "v clean"), ORDER, "v left wgmma|v right wgmma"),
    "no-barrier-behind-the-zeros": (
        "block", method("clean_rows", cleaned_without_a_barrier), ORDER, "a barrier between warp",
    ),
    "no-fence-behind-o": ("late split", drop("fence_async", "o write"), ORDER, "missing: fence.proxy.async in warp"),
    "o-has-not-left-when-v-is-given-back": ("late", drop("wait_store"), WAR, "k copy by warp 8 of the producer"),
    "the-second-piece-of-o-written-over-the-first": ("split", drop("wait_store"), WAR, "o write by warp"),
    "o-in-flight-at-the-end": ("boxed", drop("wait_store"), (WAR, END), "cp.async.bulk.wait_group.read in warp"),
    "o-written-before-all-warps-have-read-v": (
        "boxed", method("store_half", o_written_without_a_barrier), WAR, "a barrier after wgmma.wait_group in warp",
    ),
    "rows-are-told-of-before-they-land": (
        "listed", method_of_barrier("arrive_copied", told_at_once), READ, "of what k copy by warp 8",
    ),
    "rows-are-not-waited-for": ("listed", unstated("left full"), READ, "of what k copy by warp 8"),
    "rows-are-refilled-without-a-wait": ("listed", unstated("left free", PRODUCER), WAR, "k copy by warp"),
    "right-rows-are-refilled-without-a-wait": ("listed", unstated("right free", PRODUCER), WAR, "k copy by warp"),
    "no-fence-before-rows-are-multiplied": (
        "listed", method("start_scores", leader_reads_rows_unfenced), READ,
        "missing: fence.proxy.async in warp 0 after the wait",
    ),
    "which-rows-are-there-is-not-told": (
        "listed", barrier("arrive", "left full", lambda *a: None), STUCK, "left full[0]",
    ),
    "latents-are-overwritten-without-a-wait": (
        "scaled scaled-list", unstated("left free", PRODUCER), WAR, "k write by warp|k copy by warp",
    ),
    "right-latents-are-overwritten-without-a-wait": (
        "scaled scaled-list", unstated("right free", OTHER), WAR, "k write by warp",
    ),
    "left-latents-are-not-told-of": ("scaled", arrival("left full", lambda *a: None), STUCK, "left full[0]"),
    "left-latents-given-back-before-the-product": (
        "scaled scaled-list", freed_before_the_product("left free", "left"), WAR, "k write by warp|k copy by warp",
    ),
    "right-latents-given-back-before-the-product": (
        "scaled", freed_before_the_product("right free", "right"), WAR, "k write by warp|p write",
    ),
    "latents-are-not-waited-for": ("scaled", unstated("right full", LEADER), (READ, ORDER), "k right wgmma by warp 0"),
    "no-fence-behind-latents": (
        "scaled scaled-list", method("put_latents", latents_unfenced), ORDER, "missing: fence.proxy.async in warp",
    ),
    "right-latents-are-not-told-of": ("scaled", arrival("right full", lambda *a: None), STUCK, "right full[0]"),
    "one-stage": ("long", one_stage, (WAW, WAR), "k copy by warp 8"),
}
LIST = [(name, case) for name, (cases, *_) in MUTANTS.items() for case in cases.split()]


@pytest.mark.parametrize("name, case", LIST, ids=lambda v: v)
def test_mutants_are_caught(name: str, case: str, monkeypatch: Patch) -> None:
    _, mutate, kind, words = MUTANTS[name]
    mutate(monkeypatch)
    caught_as(kind, words, lambda: run(CASES[case]))


GRID = all_pairs(
    H=(1, 16, 40, 128), S=(1, 2, 4), page=(16, 32, 64, 192), dtype=("bf16", "fp16"), splits=(1, 2, 3),
    storage=("dense", "wide"), row=("plain", "scaled"), programs=(1, 3), order=tuple(ORDERS),
)


@pytest.mark.parametrize("row", GRID, ids=lambda row: "-".join(map(str, row.values())))
def test_a_grid_of_small_calls(row: dict[str, Any], monkeypatch: Patch) -> None:
    """Nothing is reported, in whatever order the partitions get their turns, and no NaN behind the end arrives."""
    row = dict(row)
    if row["row"] == "scaled":
        row["dtype"] = "bf16"
    monkeypatch.setattr(hopper_emulator, "run_roles", ORDERS[row.pop("order")])
    programs = row.pop("programs")
    arrays, named = mla_arguments(Case((0, 4, 65, 129), columns=FULL, **row))
    config = named.pop("config")
    out, _ = hopper_emulator.launch(*arrays, **named, config=replace(config, programs=min(programs, config.items)))
    assert not np.isnan(out.astype(np.float32)).any()
