"""The Hopper twin reports nothing; with a statement taken out, moved or replaced it reports what is wrong.

Rests on the definition of the hardware's instructions (PTX ISA: mbarrier, cp.async.bulk.tensor, wgmma,
fence.proxy.async, bar.sync). Every mutant runs the whole emulator, one program that takes all tiles.
"""

from __future__ import annotations

import functools
import itertools
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
from hopper_launches import prefill_arguments
from prefill_cases import Case
from turns import ORDERS

from kvlab.attention.hopper.cta import Places
from kvlab.attention.mha_prefill import hopper_emulator
from kvlab.attention.mha_prefill.hopper_cta import HopperPrefillCTA
from kvlab.attention.mha_prefill.hopper_emulator import HopperPrefillLaunch
from kvlab.staging import Timeline, Traffic

method = functools.partial(method_of, HopperPrefillCTA)
CASES = {
    "two": Case(((256, 640),), heads=(4, 2), D=128),  # two consumers, two buffers of Q
    "few": Case(((256, 384),), heads=(4, 2), D=128),  # blocks of 64 keys, over the last of which a consumer passes
    "three": Case(((384, 500),), heads=(3, 1), D=64, causal=False),  # three consumers, three stages
    "halves": Case(((130, 200),), heads=(2, 1), D=192, DV=128),  # O in two parts, one buffer of Q
    "paged": Case(((130, 200), (70, 70)), heads=(2, 1), D=128, form="paged"),  # V is cleaned
    "registers": Case(((256, 384),), heads=(4, 2), D=64, window=300),  # Q is taken to registers, EARLY
    "turns": Case(((384, 384),), heads=(4, 2), D=64),  # three consumers, each from its own last block
    "apart": Case(((2048, 300),), heads=(1, 1), D=96, causal=False),  # P V ends before Q K^T begins, one buffer of Q
    "block": Case(((64, 64),), heads=(1, 1), D=128),  # one tile of one block
    "widened": Case(((256, 384),), heads=(4, 2), D=128, kv="fp8"),  # K and V come as e4m3
}
DENSE, RAGGED = ((200, 300),) * 2, ((0, 5), (70, 200), (3, 0), (65, 130))
SHAPES = [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)]
SILENT = [
    *(Case(DENSE, heads=(2, 1), D=D, DV=DV, causal=causal) for D, DV in SHAPES for causal in (False, True)),
    *(Case(RAGGED, heads=(4, 2), D=D, DV=DV, form="ragged") for D, DV in SHAPES),
    *(Case(RAGGED, heads=(4, 2), D=128, form="paged", page=page, window=50) for page in (16, 128)),
]


@functools.cache
def launched(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return prefill_arguments(case)


def run(case: Case, traffic: Traffic | None = None, processors: int = 1) -> None:
    arrays, numbers = launched(case)
    hopper_emulator.launch(*arrays, **numbers, traffic=traffic, processors=processors)


@pytest.mark.parametrize("case", SILENT, ids=str)
def test_nothing_is_reported(case: Case) -> None:
    traffic = Traffic(timeline=Timeline())
    run(case, traffic, processors=3)
    kinds = {event.kind for event in traffic.trace()}
    assert {"copy", "landed", "write", "read", "read in flight", "wait", "arrive", "expect", "barrier"} <= kinds


def released_before_the_product() -> Mutation:
    """V is given back when P V starts instead of when it is done."""

    def early(cta: HopperPrefillCTA, accumulate: Any, me: Any, p: Any, b: int, o: Any) -> Any:
        o = accumulate(me, p, b, o)
        cta.meet(me)
        cta.v_free[b].arrive(me[:1], 1)
        return o

    others = barrier("arrive", "v free", lambda arrive, by, *each: arrive(by, *each) if each else None)
    return both(method("accumulate", early), others)


def one_buffer(role: str) -> Mutation:
    """All stages of K or V, or all buffers of Q of a consumer, stand in one place; each has mbarriers of its own."""

    def mutate(patch: Patch) -> None:
        original = Places.whole

        def whole(places: Places, which: str, i: int, warps: Any) -> Any:
            different = sum("consumer" in name for name in places.partitions) if role == "q" else 1
            return original(places, which, i % different if which == role else i, warps)

        patch.setattr(Places, "whole", whole)

    return mutate


def other_stage(cta: HopperPrefillCTA, scores: Any, me: Any, q: Any, u: int, b: int) -> Any:
    return scores(me, q, u, (b + 1) % cta.C.NB)


def only_consumer_0_cleans(cta: HopperPrefillCTA, clean: Any, me: Any, *args: Any) -> None:
    if me[0] == 0:
        clean(me, *args)


def one_block_more(patch: Patch) -> None:
    """The producer brings a block of K and V that nobody waits for."""
    blocks, made = HopperPrefillLaunch.key_blocks, []

    def key_blocks(x: HopperPrefillLaunch, *args: Any) -> tuple[int, int]:
        lo, hi = blocks(x, *args)
        made.append(0)
        return (lo, hi + 1) if len(made) == 1 else (lo, hi)  # the producer asks first

    patch.setattr(HopperPrefillLaunch, "key_blocks", key_blocks)


BYTES = "cp.async.bulk.wait_group.read in warp 0"
# name: cases, mutation, what is reported, what must be in the message
MUTANTS: dict[str, tuple[str, Mutation, Any, str]] = {
    "q-is-not-waited-for": ("two three registers", unstated("q full"), ORDER, "words read by warp 0 of consumer 0"),
    "k-is-not-waited-for": ("two three halves", unstated("k full"), READ, "a wait of warp 0 for k full[0], phase 0"),
    "v-is-not-waited-for": ("two halves block", unstated("v full"), READ, "v wgmma by warp 0 of consumer 0, stage 0"),
    "consumer-1-does-not-wait-for-k": (
        "two three", unstated("k full", (4, 5, 6, 7)), READ, "a wait of warp 4 for k full[0], phase 0",
    ),
    "q-is-refilled-without-a-wait": (
        "halves apart", unstated("q free"), WAR, "words write by warp 8 of|q copy by warp 12 of the producer",
    ),
    "k-is-refilled-without-a-wait": ("two few three", unstated("k free"), WAR, "k copy by warp"),
    "v-is-refilled-without-a-wait": (
        "two three halves apart", unstated("v free"), WAR, "v wgmma by warp 0 of consumer 0",
    ),
    "k-full-with-the-other-phase": ("two three", flipped("k full"), (READ, STUCK), "k full[0]"),
    "v-full-with-the-other-phase": ("two", flipped("v full"), (READ, STUCK), "v full[0]"),
    "k-free-with-the-other-phase": ("two block", flipped("k free"), STUCK, "k free[0]: warps [8] wait for phase 1"),
    "q-free-with-the-other-phase": ("two", flipped("q free"), STUCK, "q free[0]: warps [8] wait for phase 1"),
    "phase-of-k-free-never-flips": (
        "two three", both(barrier("try_wait", "k free", lambda passes, phase: True),
                          barrier("wait", "k free", lambda wait, phase, by: None)), (WAR, WAW), "k copy by warp",
    ),
    "too-many-bytes-of-k": (
        "two", barrier("expect_bytes", "k full", lambda expect, n, warp: expect(n + 128, warp)), STUCK,
        "k full[0]: warps [0, 1, 2, 3] wait for phase 0 for ever: 128 bytes pending",
    ),
    "too-few-bytes-of-q": (
        "two", barrier("expect_bytes", "q full", lambda expect, n, warp: expect(n - 8192, warp)), "barrier",
        "q full[0]: 16384 bytes of a copy",
    ),
    "no-bytes-of-v": (
        "two", barrier("expect_bytes", "v full", lambda expect, n, warp: None), STUCK, "1 of 1 arrivals",
    ),
    "bytes-of-v-announced-twice": (
        "two", barrier("expect_bytes", "v full", lambda expect, n, warp: (expect(n, warp), expect(n, warp))),
        "barrier", "v full[0]: expect_bytes(32768) by warp 8",
    ),
    "k-free-made-for-one-arrival": ("two three", arrivals("k free", lambda n: 1), (WAR, "barrier", STUCK), "k "),
    "v-free-made-for-one-arrival-more": ("two", arrivals("v free", lambda n: n + 1), STUCK, "1 of 3 arrivals pending"),
    "consumer-1-never-gives-k-back": (
        "two", arrival("k free", lambda cta, arrive, me, bar: arrive(me, bar) if me[0] == 0 else None), STUCK,
        "k free[0]: warps [8] wait for phase 0 for ever: 1 of 2 arrivals pending",
    ),
    "consumer-1-arrives-twice": (
        "two", arrival("q free", lambda cta, arrive, me, bar: (arrive(me, bar), arrive(me, bar))),
        ("barrier", WAR, STUCK), "q free[|words write",
    ),
    "all-warps-arrive": (
        "two", arrival("k free", lambda cta, arrive, me, bar: bar.arrive(me)), "barrier",
        "arrival of warps [0, 1, 2, 3]",
    ),
    "no-wait-for-wgmma": (
        "two three halves apart", method("wait_mma", lambda *a: None), WAR, "wgmma.wait_group in warp 0",
    ),
    "wgmma-waits-for-all-but-one": (
        "two", method("wait_mma", lambda cta, wait, me, n: wait(me, n + 1)), WAR, "wgmma.wait_group in warp 0",
    ),
    "v-given-back-before-the-product": ("two apart", released_before_the_product(), WAR, "v copy by warp"),
    "k-given-back-without-a-barrier": (
        "two three", arrival("k free", lambda cta, arrive, me, bar: bar.arrive(me[:1])), WAR,
        "a barrier after wgmma.wait_group in warp 1",
    ),
    "no-barrier-behind-the-last-waits": (
        "two three", method("wait_store", lambda cta, wait, me: cta.hazards.wait_store(0, me)), WAR,
        "a barrier after wgmma.wait_group in warp 1",
    ),
    "stage-of-the-next-block": (
        "two three turns", method("scores", other_stage), READ, "k wgmma by warp 0 of|k wgmma by warp 4 of",
    ),
    "k-in-one-place": ("two few three halves turns", one_buffer("k"), (WAW, WAR), "k copy by warp"),
    "v-in-one-place": ("two few three turns apart", one_buffer("v"), (WAW, WAR), "v copy by warp"),
    "q-in-one-place": ("two registers", one_buffer("q"), (WAW, WAR, READ), "q copy by warp 8"),
    "o-not-waited-for": ("two three halves", drop("wait_store"), WAR, f"o write by warp 0 of consumer 0|{BYTES}"),
    "o-waits-for-all-but-one": ("two halves", drop("wait_store", instead=lambda h, wait: wait(h, 1)), WAR, BYTES),
    "o-written-without-a-barrier-behind-the-wait": (
        "halves", drop("barrier", "cp.async.bulk.wait_group.read(0)"), WAR, f"a barrier after {BYTES}",
    ),
    "no-fence-between-o-and-its-store": (
        "two three halves block", drop("fence_async", "o write"), ORDER, "missing: fence.proxy.async in warp",
    ),
    "no-barrier-between-o-and-its-store": (
        "two three halves block", drop("barrier", "fence.proxy.async"), ORDER, "a barrier between warp",
    ),
    "no-fence-behind-the-zeros": ("paged", drop("fence_async", "v zeros"), ORDER, "v wgmma by warp 0 of consumer 0"),
    "no-barrier-behind-the-zeros": (
        "paged", drop("barrier", "fence.proxy.async"), ORDER, "a barrier between warp 0 and warp 1",
    ),
    "v-cleaned-before-it-came": ("paged", unstated("v full"), WAW, "v zeros by warp 0 of consumer 0, stage 0"),
    "v-cleaned-by-consumer-1-before-it-came": (
        "paged", unstated("v full", (4, 5, 6, 7)), (WAW, READ), "by warp 4 of consumer 1|by warp 5 of consumer 1",
    ),
    "only-consumer-0-cleans-v": (
        "paged", method("clean_rows", only_consumer_0_cleans), (ORDER, WAR), "v zeros by warp",
    ),
    "numbers-read-before-q-is-full": ("block", unstated("q full"), ORDER, "words write by warp 8 of the producer"),
    "last-store-of-o-in-flight": ("block", drop("wait_store"), END, "cp.async.bulk.wait_group.read in warp"),
    "last-product-in-flight": ("block", method("wait_mma", lambda *a: None), END, "wgmma.wait_group in warp 0"),
    "raw-k-is-not-waited-for": ("widened", unstated("raw k full"), READ, "raw k read by warp 8 of the changer"),
    "raw-v-is-not-waited-for": ("widened", unstated("raw full"), READ, "raw read by warp 8 of the changer"),
    "raw-k-is-refilled-without-a-wait": ("widened", unstated("raw k free"), WAR, "raw k read by warp 8 of the changer"),
    "k-is-widened-without-a-wait": ("widened", unstated("k free"), WAR, "k write by warp 8 of the changer"),
    "v-is-widened-without-a-wait": ("widened", unstated("v free"), WAR, "v write by warp 8 of the changer"),
    "widened-k-is-not-waited-for": ("widened", unstated("k full"), ORDER, "k wgmma by warp 0 of consumer 0"),
    "no-fence-behind-what-is-widened": ("widened", drop("fence_async", "v write"), ORDER, "fence.proxy.async in warp"),
    "a-block-that-nobody-waits-for": (
        "block", one_block_more, END, "a wait for k full[1], phase 0|a wait for v full[1], phase 0",
    ),
}
LIST = [(name, case) for name, (cases, *_) in MUTANTS.items() for case in cases.split()]


@pytest.mark.parametrize("name, case", LIST, ids=lambda v: v)
def test_mutants_are_caught(name: str, case: str, monkeypatch: Patch) -> None:
    _, mutate, kind, words = MUTANTS[name]
    mutate(monkeypatch)
    caught_as(kind, words, lambda: run(CASES[case]))


def fits(row: dict[str, Any]) -> bool:
    e4m3, number = row["dims"][3] == "fp8", isinstance(row["window"], int)
    return (e4m3 or not row["scales"]) and (row["causal"] or not number)


GRID = all_pairs(
    fits,
    form=(("dense", 16), ("ragged", 16), ("paged", 16), ("paged", 64), ("paged", 128)),
    dims=((64, 64, "bf16", None), (128, 128, "fp16", None), (192, 128, "bf16", None), (192, 192, "bf16", None),
          (256, 256, "bf16", None), (128, 128, "fp8", "fp8"), (128, 128, "bf16", "fp8")),
    window=(None, 1, 2, 7, (0, 3), (5, None), 130),
    softcap=(0.0, 20.0), sinks=(False, True), scales=("", "head"), causal=(True, False), order=tuple(ORDERS),
    processors=(1, 3),
)
LENS = tuple(itertools.product((1, 2, 9, 64, 70), (1, 3, 23, 64, 65, 129)))


@pytest.mark.parametrize("row", GRID, ids=lambda row: "-".join(map(str, row.values())).replace(" ", ""))
def test_a_grid_of_small_calls(row: dict[str, Any], monkeypatch: Patch) -> None:
    """Nothing is reported, in whatever order the partitions get their turns, and no NaN of what no row sees arrives."""
    row, lens = dict(row), LENS
    order, processors, (form, page), (D, DV, dtype, kv) = (row.pop(n) for n in ("order", "processors", "form", "dims"))
    monkeypatch.setattr(hopper_emulator, "run_roles", ORDERS[order])
    for lens in [LENS] if form != "dense" else [((1, 23),), ((2, 200),), ((70, 65),), ((130, 8),)]:
        x = Case(lens, heads=(2, 1), D=D, DV=DV, dtype=dtype, kv=kv, form=form, page=page, **row).build()
        x.poison_before_window()
        arrays, numbers = prefill_arguments(x)
        out, _ = hopper_emulator.launch(*arrays, **numbers, processors=processors)
        assert not np.isnan(out.astype(np.float32)).any()


def one_end_after_the_other(
    cta: HopperPrefillCTA, clean: Any, me: Any, role: str, b: int, first: int, end: int
) -> None:
    """What a second consumer reads before the first has cleaned the other end, it stores again behind it."""
    clean(me, role, b, 0, end)
    clean(me, role, b, first, cta.C.BN)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("lens", [(1, 23), (1, 3), (2, 70)], ids=str)
def test_ends_cleaned_one_after_the_other_are_found(
    lens: tuple[int, int], D: int, order: str, monkeypatch: Patch
) -> None:
    """Seen on an H100: NaN of rows that no row sees, where the first block of a tile is the last and both ends lie in
    the same eight rows, which are read and stored anew.
    """
    monkeypatch.setattr(hopper_emulator, "run_roles", ORDERS[order])
    method("clean_rows", one_end_after_the_other)(monkeypatch)
    again = {"at random": "by warp"}.get(order, "by warp 4 of consumer 1" if order == "forwards" else "by warp 0")
    caught_as(WAW, again, lambda: run(Case((lens,), heads=(1, 1), D=D, form="ragged", window=1)))
