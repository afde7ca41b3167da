"""mbarriers and pipeline states. Rests on the specification's arithmetic and on an H100's completions (test_tma.py)."""

from __future__ import annotations

import pytest

from kvlab.hardware import BarrierDeadlock, PipelineState, SharedMemBarrier


def test_a_phase_needs_all_arrivals_and_all_bytes() -> None:
    barrier = SharedMemBarrier(3)
    barrier.arrive(2)
    assert not barrier.try_wait(0)
    barrier.expect_bytes(100)
    assert not barrier.try_wait(0)
    barrier.complete_tx(60)
    with pytest.raises(BarrierDeadlock, match=r"wait\(0\): phase 0 has not completed: 40 bytes pending"):
        barrier.wait(0)
    barrier.complete_tx(40)
    barrier.wait(0)
    assert (barrier.phase, barrier.pending_arrivals, barrier.pending_tx) == (1, 3, 0)


def test_waiting_for_the_phase_before_the_first_returns_at_once() -> None:
    """Producers start by waiting for parity 1: the buffer is free."""
    barrier = SharedMemBarrier()
    barrier.wait(1)
    with pytest.raises(BarrierDeadlock, match="1 of 1 arrivals pending"):
        barrier.wait(0)


def test_bytes_may_come_before_they_are_announced() -> None:
    barrier = SharedMemBarrier()
    barrier.complete_tx(64)
    assert barrier.pending_tx == -64
    barrier.expect_bytes(64)
    barrier.wait(0)


def test_too_much_of_anything() -> None:
    barrier = SharedMemBarrier()
    barrier.expect_bytes(64)
    with pytest.raises(ValueError, match=r"complete_tx\(128\): 64 bytes are pending in phase 0"):
        barrier.complete_tx(128)
    with pytest.raises(ValueError, match=r"arrive\(1\): 0 of 1 arrivals are pending"):
        barrier.arrive()
    with pytest.raises(ValueError, match=r"arrive\(1\)"):
        barrier.expect_bytes(5)
    assert barrier.pending_tx == 64
    with pytest.raises(ValueError, match="a phase counts 0 to 1048575 bytes"):
        SharedMemBarrier().expect_bytes(1 << 20)
    most = SharedMemBarrier()
    most.expect_bytes((1 << 20) - 1)  # 2^20 - 1, the limit of the PTX ISA, is within it
    assert most.pending_tx == (1 << 20) - 1
    with pytest.raises(ValueError, match="arrivals is 0: must be 1 to 1048575"):
        SharedMemBarrier(0)
    with pytest.raises(ValueError, match="phase is 2: must be a parity"):
        SharedMemBarrier().try_wait(2)
    early = SharedMemBarrier()
    early.complete_tx(10)
    with pytest.raises(ValueError, match="10 bytes came that phase 0 never announced"):
        early.arrive()


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (0, [(0, 0, 0)] * 4),
        (1, [(0, 0, 0), (0, 1, 1), (0, 0, 2), (0, 1, 3)]),
        (3, [(0, 0, 0), (1, 0, 1), (2, 0, 2), (0, 1, 3)]),
    ],
)
def test_pipeline_state(stages: int, expected: list[tuple[int, int, int]]) -> None:
    state, seen = PipelineState(stages), []
    for _ in range(4):
        seen.append((state.index, state.phase, state.count))
        state.step()
    assert seen == expected


def test_a_producer_and_a_consumer_follow_the_parities() -> None:
    """Law: with full and empty barriers of each stage, 10 tiles pass through 3 stages without a deadlock."""
    full, empty = [SharedMemBarrier() for _ in range(3)], [SharedMemBarrier() for _ in range(3)]
    produced, consumed = PipelineState(3), PipelineState(3)
    while consumed.count < 10:
        while produced.count < 10 and empty[produced.index].try_wait(produced.phase ^ 1):
            full[produced.index].expect_bytes(256)
            full[produced.index].complete_tx(256)
            produced.step()
        full[consumed.index].wait(consumed.phase)
        empty[consumed.index].arrive()
        consumed.step()
        assert produced.count - consumed.count <= 3
    with pytest.raises(ValueError, match="num_stages is -1: must not be negative"):
        PipelineState(-1)
