"""The shipped decode emulators report nothing; with a statement taken out or moved they report what is wrong.

Rests on the definition of the hardware's instructions: each mutant lacks one of them, or issues it at another place, so
that some access is not ordered any more. Every mutant runs the whole emulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cta_tiles import drive, machine
from hazard_mutations import END, ORDER, READ, SOME, STUCK, WAR, WAW, Patch, attribute, caught_as, drop

from kvlab.attention.mha_decode import emulator
from kvlab.attention.mha_decode.config import DecodeConfig
from kvlab.cache import PagedKVCache
from kvlab.memory import as_dtype
from kvlab.staging import Hazards, KVCacheIterator, Timeline, Traffic
from kvlab.staging.gfx950.mfma_cta import MfmaCTA, MfmaShape
from kvlab.staging.tile.tile_pipeline import TilePipeline

MACHINES = {
    "mma": ("sm_80", "bf16"),
    "stmatrix": ("sm_90", "fp16"),
    "fma": ("sm_90", "fp32"),
    "gfx": ("gfx950", "bf16"),
}


def run(machine: str, traffic: Traffic | None = None) -> None:
    """Decode of three sequences, several tiles, one of them ragged, one empty."""
    arch, dtype = MACHINES[machine]
    if arch == "gfx950":
        shape = MfmaShape(16, 128, 64, as_dtype(dtype))
        drive(lambda *where: MfmaCTA(shape, *where), dtype, 16, 128, 64, traffic=traffic)
        return
    rng, kind = np.random.default_rng(0), as_dtype(dtype)
    BN = 32 if dtype == "fp32" else 64
    k, v = (rng.standard_normal((18, 32, 2, 64)).astype(kind) for _ in range(2))
    q = rng.standard_normal((3, 1, 4, 64)).astype(kind)
    table, lens = rng.permutation(18).reshape(3, 6), np.array([192, 70, 0], np.int32)
    config = DecodeConfig(16, BN, (64, 0), (64, 0), 1, 1, num_warps=4)
    emulator.launch(q, k, v, table, lens, scale=0.125, config=config, arch=arch, traffic=traffic)


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_is_reported(machine: str) -> None:
    traffic = Traffic(timeline=Timeline())
    run(machine, traffic)
    kinds = {event.kind for event in traffic.trace()}
    assert {"read", "write", "copy", "landed", "wait", "barrier"} <= kinds


def test_order_of_the_compiled_loop() -> None:
    """Rests on the compiler's TTGIR and PTX (test_compile): the order of the statements of one iteration."""
    traffic = Traffic(timeline=Timeline())
    run("stmatrix", traffic)
    events = [event for event in traffic.trace() if event.kind not in ("landed", "commit")]
    at = [i for i, event in enumerate(events) if event.what == "k read"]
    loop = [event.what if event.kind in ("copy", "read", "write") else event.kind for event in events[at[0] : at[1]]]
    rows = ["barrier"] * 4  # of the row maximum and the row sum
    assert loop == [
        "k read", "q read", *rows, "barrier", "p write", "barrier", "p read", "v read",
        "k copy", "barrier", "v copy", "wait", "barrier",
    ]


def refill_before_it_is_read(refilled: str) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        load = TilePipeline.load

        def early(pipeline: TilePipeline, role: str, tile: Any) -> None:
            load(pipeline, role, tile)
            if role == refilled:
                pipeline._fetch(role)

        patch.setattr(TilePipeline, "load", early)

    return mutate


def refill_twice(patch: Patch) -> None:
    fetch = TilePipeline._fetch
    patch.setattr(TilePipeline, "_fetch", lambda p, role: (fetch(p, role), fetch(p, role)))


def v_of_the_next_tile_with_k(patch: Patch) -> None:
    """The refill moved up: V is copied before the barrier instead of after it."""

    def refill(pipeline: TilePipeline, role: str) -> None:
        pipeline._fetch(role)
        if role == "v":
            pipeline.hazards.barrier()

    patch.setattr(TilePipeline, "refill", refill)


def wait_behind_the_barrier(patch: Patch) -> None:
    def load(pipeline: TilePipeline, role: str, tile: Any) -> None:
        if role == "k":
            pipeline.hazards.barrier()
            pipeline.hazards.wait_group(0)

    patch.setattr(TilePipeline, "load", load)


def p_read_before_it_is_written(patch: Patch) -> None:
    """The warps read P of the tile before, then write theirs, then meet: the barrier moved behind the reads."""
    write = Hazards.write

    def moved(h: Hazards, at: Any, what: str, stage: int | None = None) -> None:
        write(h, at, what, stage)
        if what == "p write":
            h.barrier = lambda *a, **k: vars(h).pop("barrier")  # type: ignore[method-assign]

    patch.setattr(Hazards, "write", moved)


def strip_loaded_while_another_is_in_flight(patch: Patch) -> None:
    def load(cta: MfmaCTA, buffer: Any, tile: Any, active: Any, axis: int) -> None:
        buffer.load_from_dram(0, tile, active)
        buffer.load_from_dram(1, tile, active)

    patch.setattr(MfmaCTA, "_load", load)


def a_strip_more(patch: Patch) -> None:
    """The first strip of a tile that nobody reads is loaded behind the loop."""

    def drain(cta: MfmaCTA) -> None:
        cta.hazards.barrier()
        cta.k._accesses.copy()  # type: ignore[union-attr]

    patch.setattr(MfmaCTA, "drain", drain)


# name: machines, mutation, what is reported, what must be in the message
MUTANTS: dict[str, tuple[str, Callable[[Patch], None], Any, str]] = {
    "no-wait": ("mma stmatrix fma", drop("wait_group"), READ, "missing: cp.async.wait_group in warp"),
    "waits-for-all-but-one": (
        "mma stmatrix fma", drop("wait_group", instead=lambda h, wait: wait(h, 1)), READ, "v read by warp",
    ),
    "no-commit": ("mma fma", drop("commit_group"), READ, "cp.async.commit_group, then cp.async.wait_group in warp 0"),
    "warp-2-does-not-wait": (
        "mma stmatrix fma", drop("wait_group", instead=lambda h, wait: wait(h, 0, SOME)), READ, "wait_group in warp 2",
    ),
    "warp-2-does-not-commit": (
        "mma fma", drop("commit_group", instead=lambda h, commit: commit(h, SOME)), READ, "commit_group",
    ),
    "no-barrier-after-the-wait": ("mma fma", drop("barrier", "wait"), READ, "a barrier after cp.async.wait_group"),
    "wait-behind-the-barrier": ("mma fma", wait_behind_the_barrier, READ, "barrier"),
    "no-barrier-between-p-and-its-reads": ("mma stmatrix fma", drop("barrier", "p write"), ORDER, "p read by warp"),
    "barrier-behind-the-reads-of-p": ("mma stmatrix fma gfx", p_read_before_it_is_written, ORDER, "p read by warp"),
    "no-barrier-before-v-is-refilled": (
        "mma stmatrix fma", drop("barrier", "commit"), WAR, "v copy by warp 0, stage 0, may come before v read",
    ),
    "v-refilled-before-the-barrier": ("mma fma", v_of_the_next_tile_with_k, WAR, "a barrier between warp"),
    "warp-2-skips-every-barrier": (
        "mma fma gfx", drop("barrier", instead=lambda h, meet: meet(h, SOME)), STUCK, "warps [2] do not arrive",
    ),
    "warp-2-skips-the-barrier-before-v": (
        "mma fma", drop("barrier", "commit", lambda h, meet: meet(h, SOME)), STUCK, "warps [0, 1, 3] wait at barrier 0",
    ),
    "k-refilled-before-it-is-read": ("mma stmatrix fma", refill_before_it_is_read("k"), READ, "k read by warp"),
    "v-refilled-before-it-is-read": ("mma stmatrix fma", refill_before_it_is_read("v"), READ, "v read by warp"),
    "refilled-twice": ("mma fma", refill_twice, WAW, "k copy by warp 0, stage 0, may come before k copy"),
    "no-vmcnt": ("gfx", drop("wait_group"), READ, "missing: s_waitcnt vmcnt in warp"),
    "vmcnt-1": (
        "gfx", drop("wait_group", instead=lambda h, wait: wait(h, 1)), READ,
        "s_waitcnt vmcnt in warp 0 leaves 1 in flight, <= 0 needed",
    ),
    "wave-2-does-not-wait": (
        "gfx", drop("wait_group", instead=lambda h, wait: wait(h, 0, SOME)), READ, "s_waitcnt vmcnt in warp 2",
    ),
    "no-barrier-after-the-dma": ("gfx", drop("barrier", "wait"), ORDER, "a barrier"),
    "no-barrier-after-the-reads-of-v": ("gfx", drop("barrier", "v read"), WAR, "v copy by warp"),
    "no-barrier-between-p-and-its-reads-in-lds": ("gfx", drop("barrier", "p write"), ORDER, "p read by warp"),
    "not-drained": (
        "mma stmatrix fma", attribute(TilePipeline, "drain", lambda pipeline: None), END,
        " copy by warp 0, stage 0, is in flight at the end of the CTA; missing: cp.async.wait_group in warp 0",
    ),
    "drained-but-for-one-group": (
        "mma fma", attribute(TilePipeline, "drain", lambda pipeline: pipeline.hazards.wait_group(1)), END,
        "v copy by warp 0, stage 0, is in flight at the end",
    ),
    "warp-2-is-not-drained": (
        "mma fma", attribute(TilePipeline, "drain", lambda pipeline: pipeline.hazards.wait_group(0, SOME)), END,
        "cp.async.wait_group in warp 2",
    ),
    "a-strip-in-flight-at-the-end": ("gfx", a_strip_more, END, "s_waitcnt vmcnt in warp 0"),
    "strip-loaded-while-another-is-in-flight": ("gfx", strip_loaded_while_another_is_in_flight, WAW, "vmcnt"),
}
CASES = [(name, machine) for name, (machines, *_) in MUTANTS.items() for machine in machines.split()]


@pytest.mark.parametrize("name, machine", CASES, ids=lambda v: v)
def test_mutants_are_caught(name: str, machine: str, monkeypatch: Patch) -> None:
    _, mutate, kind, words = MUTANTS[name]
    mutate(monkeypatch)
    caught_as(kind, words, lambda: run(machine))


def test_a_wave_reads_the_rows_of_k_that_it_brings(monkeypatch: Patch) -> None:
    """Rests on MAX's lane formulas: wave w loads rows 32 w to 32 w + 31 of K and reads the same ones, so that between
    them its own wait orders all; V's barrier is needed."""
    drop("barrier", "k read")(monkeypatch)
    run("gfx")


def test_a_tile_that_was_not_fetched_ahead() -> None:
    """Loads take the tiles of the iterators in turn: another one is refused."""
    blocks = np.zeros((4, 64, 1, 64), as_dtype("bf16"))
    cache = PagedKVCache(blocks, [255], [[0, 1, 2, 3]], max_seq_length=1, max_cache_length=256)
    k, v = (KVCacheIterator(cache, 64, 0, 0, 256) for _ in range(2))
    cta = machine("sm_90", 16, 64, 64, cache, cache, np.zeros(1, int), np.zeros(1, int), Traffic())
    cta.follow(k, v)
    cta.load_k(k.next_tile(), np.ones(1, bool))
    v.next_tile()
    with pytest.raises(ValueError, match="the V tile is not the one that was fetched ahead: the next of its iterator"):
        cta.load_v(v.next_tile(), np.ones(1, bool))
