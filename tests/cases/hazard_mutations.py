"""Mutations of what a machine states to its record of hazards: statements taken out, replaced, or moved."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from kvlab.attention.hopper.cta import PartitionedCTA
from kvlab.hardware import BarrierDeadlock
from kvlab.staging import AsyncBarrier, Hazard, Hazards, Timeline

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]
READ, ORDER, WAR, WAW = "read in flight", "read not ordered", "overwritten while read", "overwritten while written"
END, STUCK = "in flight at the end", BarrierDeadlock
SOME = (0, 1, 3)


def drop(method: str, after: str = "", instead: Callable[..., Any] | None = None) -> Mutation:
    """Take out the calls of a method of Hazards that follow a statement (``after`` names its kind or what it was), or
    have ``instead(hazards, method)`` in their place."""

    def mutate(patch: Patch) -> None:
        line, add, original = Timeline(), Hazards._event, getattr(Hazards, method)

        def event(h: Hazards, *what: Any) -> None:
            line.add(*what)
            add(h, *what)

        def call(h: Hazards, *args: Any, **more: Any) -> None:
            last = line.events[-1] if line.events else None
            if after and (last is None or after not in (last.kind, last.what)):
                original(h, *args, **more)
            elif instead is not None:
                instead(h, original)

        patch.setattr(Hazards, "_event", event)
        patch.setattr(Hazards, method, call)

    return mutate


def attribute(owner: Any, name: str, value: Any) -> Mutation:
    """Another value, or method, of a module or class."""
    return lambda patch: patch.setattr(owner, name, value)


def method_of(owner: Any, name: str, instead: Callable[..., Any]) -> Mutation:
    """``instead(self, method, *arguments)`` for a method of a class."""

    def mutate(patch: Patch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda self, *args: instead(self, functools.partial(original, self), *args))

    return mutate


def arrival(which: str, instead: Callable[..., Any]) -> Mutation:
    """``instead(cta, arrive, warps, barrier)`` for the arrivals of partitions at mbarriers whose name begins with
    ``which``."""

    def call(cta: PartitionedCTA, arrive: Any, me: Any, bar: AsyncBarrier) -> None:
        if bar.name.startswith(which):
            instead(cta, arrive, me, bar)
        else:
            arrive(me, bar)

    return method_of(PartitionedCTA, "arrive", call)


def both(*mutations: Mutation) -> Mutation:
    def mutate(patch: Patch) -> None:
        for one in mutations:
            one(patch)

    return mutate


def barrier(method: str, which: str, instead: Callable[..., None]) -> Mutation:
    """``instead(method, *arguments)`` for the mbarriers whose name begins with ``which``."""

    def mutate(patch: Patch) -> None:
        original = getattr(AsyncBarrier, method)

        def call(bar: AsyncBarrier, *args: Any) -> Any:
            if bar.name.startswith(which):
                return instead(functools.partial(original, bar), *args)
            return original(bar, *args)

        patch.setattr(AsyncBarrier, method, call)

    return mutate


def unstated(which: str, warps: tuple[int, ...] | None = None) -> Mutation:
    """A wait for these mbarriers is not there (for ``warps``, if given): nobody learns what it tells."""
    return barrier("wait", which, lambda wait, phase, by: None if warps in (None, by) else wait(phase, by))


def flipped(which: str) -> Mutation:
    """Waits for the other phase."""
    flip = barrier("try_wait", which, lambda passes, phase: passes(phase ^ 1))
    return both(flip, barrier("wait", which, lambda wait, phase, by: wait(phase ^ 1, by)))


def arrivals(which: str, change: Callable[[int], int]) -> Mutation:
    """mbarriers made for another number of arrivals."""

    def mutate(patch: Patch) -> None:
        make = Hazards.mbarrier

        def other(h: Hazards, name: str, arrivals: int = 1) -> AsyncBarrier:
            return make(h, name, change(arrivals) if name.startswith(which) else arrivals)

        patch.setattr(Hazards, "mbarrier", other)

    return mutate


def caught_as(kind: Any, words: str, call: Callable[[], None]) -> None:
    """``call`` is reported, as ``kind`` or one of several, with the two accesses, their warps, the bytes and ``words``,
    one of which, separated by ``|``, must occur. The later side of what is in flight at the end is the end; an mbarrier
    that counts wrong has no earlier access."""
    with pytest.raises((Hazard, BarrierDeadlock)) as caught:
        call()
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(caught.value, BarrierDeadlock):
        assert BarrierDeadlock in kinds, caught.value
    else:
        assert isinstance(caught.value, Hazard)
        assert caught.value.kind in kinds, caught.value
        if caught.value.kind != "barrier":
            assert caught.value.byte_range is not None
            assert caught.value.earlier.warp is not None
            assert caught.value.later.warp is not None or caught.value.kind == END
    assert any(word in str(caught.value) for word in words.split("|")), caught.value
