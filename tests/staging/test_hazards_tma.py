"""A pipeline of TMA, mbarriers and wgmma, and one of cp.async: as it should be, and with one thing wrong.

Rests on the definition of the hardware's instructions (PTX ISA: mbarrier, cp.async.bulk, wgmma, fence.proxy.async).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nvidia_tiles import buffer

from kvlab.hardware import BarrierDeadlock, PipelineState
from kvlab.staging import AsyncBarrier, CpAsyncKVBuffer, Hazard, Hazards, TmaKVBuffer
from kvlab.staging.nvidia.tma_kv_buffer import CONSUMERS

Patch = pytest.MonkeyPatch
STEPS = 6


def tma_pipeline(step: Callable[[TmaKVBuffer, int], None] | None = None) -> None:
    """Two stages: the producer is a tile ahead; the consumers multiply by V, whose rows past the end they zero."""
    b, _ = buffer(TmaKVBuffer, "bf16", 32, 64, 32, transpose=False)
    p = np.ones((3, 64, 32), b.params.dtype)
    b.load_from_dram(0)
    for tile in range(STEPS):
        stage = tile % 2
        b.load_from_dram(1 - stage)
        if step is not None:
            step(b, stage)
            continue
        b.wait(stage)
        b.zero_rows_past_end(stage)
        b.mma(b.operand(p), b.zeros(), stage)
        b.wait_mma()
        b.release(stage)


def cp_async_pipeline(step: Callable[[CpAsyncKVBuffer, int], None] | None = None) -> None:
    """Three stages, two tiles ahead."""
    b, _ = buffer(CpAsyncKVBuffer, "bf16", 32, 64, 32, transpose=True, stages=3)
    b.load_from_dram(0)
    b.load_from_dram(1)
    for tile in range(STEPS):
        if step is not None:
            step(b, tile)
            continue
        b.wait(1)
        b.load_from_dram((tile + 2) % 3)
        b.load_from_shared(tile % 3)


@pytest.mark.parametrize("pipeline", [tma_pipeline, cp_async_pipeline])
def test_nothing_is_reported(pipeline: Callable[[], None]) -> None:
    pipeline()


def bar(method: str, which: str, instead: Callable[..., None]) -> Callable[[Patch], None]:
    """Another thing instead of a method of the mbarriers whose name contains ``which``."""

    def mutate(patch: Patch) -> None:
        original = getattr(AsyncBarrier, method)

        def call(barrier: AsyncBarrier, *args: Any, **more: Any) -> None:
            if which in barrier.name:
                instead(lambda *a, **k: original(barrier, *a, **k), *args, **more)
            else:
                original(barrier, *args, **more)

        patch.setattr(AsyncBarrier, method, call)

    return mutate


def without(method: str) -> Callable[[Patch], None]:
    """A method of Hazards does nothing."""
    return lambda patch: patch.setattr(Hazards, method, lambda *a, **k: None)


def without_buffer(method: str) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(TmaKVBuffer, method, lambda *a, **k: None)


def arrivals_of_one_warp(patch: Patch) -> None:
    make = Hazards.mbarrier
    patch.setattr(Hazards, "mbarrier", lambda h, name, arrivals=1: make(h, name, 1))


def phase_never_flips(patch: Patch) -> None:
    step = PipelineState.step

    def stuck(state: PipelineState) -> None:
        step(state)
        state.phase = 0

    patch.setattr(PipelineState, "step", stuck)


def release_before_the_product(b: TmaKVBuffer, stage: int) -> None:
    b.wait(stage)
    b.release(stage)
    b.load_from_dram(stage) if b.producer.index == stage else None
    b.mma(b.operand(np.ones((3, 64, 32), b.params.dtype)), b.zeros(), stage)


def product_of_the_other_stage(b: TmaKVBuffer, stage: int) -> None:
    b.wait(stage)
    b.mma(b.operand(np.ones((3, 64, 32), b.params.dtype)), b.zeros(), 1 - stage)


def half_of_the_copy(patch: Patch) -> None:
    copy = Hazards.copy_bulk
    patch.setattr(Hazards, "copy_bulk", lambda h, at, barrier, nbytes, *more: copy(h, at, barrier, nbytes // 2, *more))


PARTIAL = (0, 1, 3)
Mutant = tuple[Callable[[Patch], None], Any, str]
WAR, WAW = "overwritten while read", "overwritten while written"
READ, ORDER, BAR = "read in flight", "read not ordered", "barrier"
TMA: dict[str, Mutant] = {
    "no-wait-for-full": (bar("wait", "full", lambda wait, *a, **k: None), WAW, "v full[0], phase 0"),
    "warp-2-does-not-wait-for-full": (
        bar("wait", "full", lambda wait, phase, warps: wait(phase, warps=PARTIAL)), WAW,
        "a wait of warp 2 for v full[0]",
    ),
    "full-with-the-other-phase": (
        bar("wait", "full", lambda wait, phase, warps: wait(phase ^ 1, warps)), BarrierDeadlock,
        "complete is phase 0",
    ),
    "no-wait-for-empty": (bar("wait", "empty", lambda wait, *a, **k: None), WAR, "v copy by warp 4, stage 0"),
    "empty-with-the-other-phase": (
        bar("wait", "empty", lambda wait, phase, warps: wait(phase ^ 1, warps)), BarrierDeadlock,
        "v empty[0]: warps [4]",
    ),
    "phase-never-flips": (phase_never_flips, None, "v empty[0]"),
    "too-many-bytes-announced": (
        bar("expect_bytes", "full", lambda expect, n, warp: expect(n + 128, warp)), BarrierDeadlock,
        "128 bytes pending",
    ),
    "too-few-bytes-announced": (
        bar("expect_bytes", "full", lambda expect, n, warp: expect(n - 128, warp)), BAR, "4096 bytes of a copy",
    ),
    "half-of-the-boxes": (half_of_the_copy, BarrierDeadlock, "2048 bytes pending"),
    "nothing-announced": (
        bar("expect_bytes", "full", lambda expect, n, warp: None), BarrierDeadlock, "1 of 1 arrivals",
    ),
    "announced-twice": (
        bar("expect_bytes", "full", lambda expect, n, warp: (expect(n, warp), expect(n, warp))), BAR,
        "expect_bytes(4096)",
    ),
    "no-release": (bar("arrive", "empty", lambda arrive, warps: None), BarrierDeadlock, "4 of 4 arrivals pending"),
    "warp-2-does-not-arrive": (
        bar("arrive", "empty", lambda arrive, warps: arrive(PARTIAL)), BarrierDeadlock, "1 of 4 arrivals pending",
    ),
    "warp-2-arrives-twice": (
        bar("arrive", "empty", lambda arrive, warps: (arrive(warps), arrive((2,)))), BAR,
        "arrival of warps [0, 1, 2, 3]",
    ),
    "barrier-made-for-one-arrival": (arrivals_of_one_warp, BAR, "arrive(4): 1 of 1 arrivals are pending"),
    "no-wait-for-wgmma": (without("wait_mma"), WAR, "wgmma.wait_group in warp 0"),
    "wgmma-waits-for-all-but-one": (
        lambda patch: patch.setattr(TmaKVBuffer, "wait_mma", lambda b, n=0: b.hazards.wait_mma(1, CONSUMERS)), WAR,
        "wgmma.wait_group in warp 0",
    ),
    "no-fence-after-the-zeros": (without("fence_async"), ORDER, "fence.proxy.async in warp 0 before the barrier"),
    "no-barrier-after-the-zeros": (
        lambda patch: patch.setattr(Hazards, "barrier", lambda *a, **k: None), ORDER, "a barrier between warp",
    ),
    "warp-2-skips-the-barrier-after-the-zeros": (
        lambda patch: patch.setattr(
            Hazards, "barrier", lambda h, w, e, name, meet=Hazards.barrier: meet(h, PARTIAL, e, name)
        ), BarrierDeadlock, "warps [0, 1, 3] wait at barrier 1 for ever",
    ),
}


def check(caught: Any, kind: Any, words: str) -> None:
    if kind is BarrierDeadlock:
        assert isinstance(caught, BarrierDeadlock)
    elif kind is not None:
        assert isinstance(caught, Hazard)
        assert caught.kind == kind
    assert words in str(caught)


@pytest.mark.parametrize("name", TMA)
def test_mutants_of_the_tma_pipeline_are_caught(name: str, monkeypatch: Patch) -> None:
    mutate, kind, words = TMA[name]
    mutate(monkeypatch)
    with pytest.raises((Hazard, BarrierDeadlock)) as caught:
        tma_pipeline()
    check(caught.value, kind, words)


@pytest.mark.parametrize(
    "step, kind, words",
    [(release_before_the_product, READ, "v wgmma by warp"), (product_of_the_other_stage, READ, "v full[1], phase 0")],
    ids=["released-before-the-product", "product-of-the-other-stage"],
)
def test_stages_used_at_the_wrong_time(step: Callable[[TmaKVBuffer, int], None], kind: str, words: str) -> None:
    with pytest.raises((Hazard, BarrierDeadlock)) as caught:
        tma_pipeline(step)
    check(caught.value, kind, words)


def copy_into_the_stage_that_was_just_read(b: CpAsyncKVBuffer, tile: int) -> None:
    b.wait(1)
    b.load_from_shared(tile % 3)
    b.load_from_dram(tile % 3)


def copy_into_the_stage_in_flight(b: CpAsyncKVBuffer, tile: int) -> None:
    b.load_from_dram(1)


def read_without_a_barrier(b: CpAsyncKVBuffer, tile: int) -> None:
    b.hazards.wait_group(1)
    b.load_from_shared(tile % 3)


def wait_for_too_few(b: CpAsyncKVBuffer, tile: int) -> None:
    b.wait(2)
    b.load_from_shared(tile % 3)


def read_the_next_stage(b: CpAsyncKVBuffer, tile: int) -> None:
    b.wait(1)
    b.load_from_shared((tile + 1) % 3)


@pytest.mark.parametrize(
    "step, kind, words",
    [
        (copy_into_the_stage_that_was_just_read, WAR, "a barrier between warp"),
        (copy_into_the_stage_in_flight, "overwritten while written", "cp.async.wait_group in warp 0"),
        (read_without_a_barrier, READ, "a barrier after cp.async.wait_group"),
        (wait_for_too_few, READ, "cp.async.wait_group in warp"),
        (read_the_next_stage, READ, "k read by warp 0, stage 1"),
    ],
    ids=lambda v: v.__name__ if callable(v) else "",
)
def test_mutants_of_the_cp_async_pipeline_are_caught(
    step: Callable[[CpAsyncKVBuffer, int], None], kind: str, words: str
) -> None:
    with pytest.raises(Hazard) as caught:
        cp_async_pipeline(step)
    check(caught.value, kind, words)
