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


def both(*mutations: Mutation) -> Mutation:
    def mutate(patch: Patch) -> None:
        for one in mutations:
            one(patch)

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
