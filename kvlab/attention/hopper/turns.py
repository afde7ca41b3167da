"""The partitions of emulated CTAs take turns, each until it waits at an mbarrier."""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.hardware import BarrierDeadlock
from kvlab.staging import AsyncBarrier

Wait = tuple[AsyncBarrier, int]
"""A barrier and the parity of the phase that a role waits for."""
Role = tuple[tuple[int, ...], Iterator[Wait]]
"""The warps of a partition, and what they do."""


def run_roles(roles: list[Role]) -> None:
    """Run the roles of all CTAs, each until it waits, in turn until all have ended. BarrierDeadlock if none can go on.

    >>> from kvlab.memory import Memory
    >>> from kvlab.staging import Hazards
    >>> bar = Hazards(Memory(64), warps=2).mbarrier("full[0]")
    >>> def waits(phase):
    ...     yield bar, phase
    ...     print("woken")
    >>> def arrives():
    ...     print("arrives")
    ...     bar.arrive((1,))
    ...     yield from ()
    >>> run_roles([((0,), waits(0)), ((1,), arrives())])
    arrives
    woken
    >>> run_roles([((0,), waits(1))])
    Traceback (most recent call last):
        ...
    kvlab.hardware.BarrierDeadlock: all 1 roles wait: full[0]: warps [0] wait for phase 1 for ever: \
1 of 1 arrivals pending; complete is phase 0
    """
    waiting: list[tuple[Role, Wait | None]] = [(role, None) for role in roles]
    while waiting:
        still: list[tuple[Role, Wait | None]] = []
        moved = False
        for role, wait in waiting:
            warps, steps = role
            while wait is None or wait[0].try_wait(wait[1]):
                if wait is not None:
                    wait[0].wait(wait[1], warps)
                moved = True
                try:
                    wait = next(steps)
                except StopIteration:
                    break
            else:
                still.append((role, wait))
        if not moved:
            reasons = [_why(role[0], wait) for role, wait in still]
            raise BarrierDeadlock(f"all {len(still)} roles wait: {'; '.join(reasons[:8])}")
        waiting = still


def _why(warps: tuple[int, ...], wait: Wait | None) -> str:
    """Reason why a role waits."""
    assert wait is not None
    return wait[0].why(wait[1], warps)
