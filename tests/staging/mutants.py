"""Mutations of what a machine states to its record of hazards: statements taken out, replaced, or moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvlab.hardware import BarrierDeadlock
from kvlab.staging import Hazard, Hazards, Timeline

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]
READ, ORDER, WAR, WAW = "read in flight", "read not ordered", "overwritten while read", "overwritten while written"
STUCK = BarrierDeadlock
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


def both(*mutations: Mutation) -> Mutation:
    def mutate(patch: Patch) -> None:
        for one in mutations:
            one(patch)

    return mutate


def caught_as(kind: Any, words: str, call: Callable[[], None]) -> None:
    """``call`` is reported, as ``kind``, with the two accesses, their warps, the bytes and ``words``, one of which,
    separated by ``|``, must occur."""
    with pytest.raises((Hazard, BarrierDeadlock)) as caught:
        call()
    if kind is BarrierDeadlock:
        assert isinstance(caught.value, BarrierDeadlock)
    else:
        assert isinstance(caught.value, Hazard)
        assert caught.value.kind == kind, caught.value
        assert caught.value.byte_range is not None
        assert caught.value.earlier.warp is not None
        assert caught.value.later.warp is not None
    assert any(word in str(caught.value) for word in words.split("|")), caught.value
