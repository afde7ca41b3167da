"""Instructions that decide where a lane goes on: branches, returns, barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .values import Array, Mask, Operands

if TYPE_CHECKING:
    from .machine import SimtMachine

ENDED = np.iinfo(np.int32).max
"""Where lanes are that have returned."""
Control = Callable[["SimtMachine", Mask, Array], None]
"""A step that sets where lanes go on: the lanes that are here, and those of them whose guard holds."""


class DeviceAssertion(AssertionError):
    """An assertion of the kernel that failed, or a trap."""

    __module__ = "kvlab.simt"


def decode(x: Operands) -> Control | None:
    """The control step of an instruction; None for one after which all lanes go on with the next."""
    name = x.op[0]
    if name == "bra":
        return _bra(x)
    if name == "brx":
        return _brx(x)
    if name in ("ret", "exit"):
        return _ret
    if name in ("bar", "barrier"):
        return _bar(x)
    if name in ("trap", "brkpt"):
        return _raises("the kernel traps")
    if name == "call" and any("vprintf" in text for text in x.texts):
        return lambda m, here, on: None  # nothing is printed
    if name == "call":
        return _raises("an assertion of the kernel failed" if any("assertfail" in t for t in x.texts) else
                       "calls of functions are not modelled")
    return None


def _ret(m: SimtMachine, here: Mask, on: Array) -> None:
    if m.order is not None:
        m.order.check_ends(np.asarray(on.any(axis=1)))
    m.go(on, ENDED)


def _target(x: Operands, name: str) -> int:
    at = x.program.label(x.instruction.scope, name)
    if at is None:
        x.unknown(f"{name!r} is no label")
    return at


def _bra(x: Operands) -> Control:
    target = _target(x, x.texts[0])
    return lambda m, here, on: m.go(on, target)


def _brx(x: Operands) -> Control:
    names = next((x.program.tables[s, x.texts[1]] for s in x.program.scopes(x.instruction.scope)
                  if (s, x.texts[1]) in x.program.tables), None)
    if names is None:
        x.unknown(f"{x.texts[1]!r} is no table of targets")
    targets, index = np.array([_target(x, name) for name in names], np.int32), x.read(0, "u32")
    return lambda m, here, on: m.go(on, targets[np.minimum(np.broadcast_to(index(m), m.shape), len(targets) - 1)])


def _raises(why: str) -> Control:
    def control(m: SimtMachine, here: Mask, on: Array) -> None:
        raise DeviceAssertion(why)
    return control


def _bar(x: Operands) -> Control | None:
    if "warp" in x.op:
        return lambda m, here, on: None
    if "red" in x.op:
        x.unknown("a barrier that reduces is not modelled")
    number = x.read(0, "u32") if x.texts else (lambda m: np.zeros(m.shape, np.uint32))
    threads = x.read(1, "u32") if len(x) > 1 else None
    waits = "arrive" not in x.op

    def control(m: SimtMachine, here: Mask, on: Array) -> None:
        warps = np.asarray(on.any(axis=1))
        name = np.broadcast_to(number(m), m.shape)[:, 0].astype(np.int64)
        needed = np.zeros(m.shape[0], np.int64)
        if threads is not None:
            needed = np.broadcast_to(threads(m), m.shape)[:, 0].astype(np.int64) // 32
        m.arrive(warps, name, needed, waits)

    return control
