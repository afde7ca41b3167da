"""Twins, checked against each other step for step and line for line.

:func:`check` proves statically that a Triton kernel and its NumPy emulator have the same structure: the same steps in
the same order, under the same loops and branches, with the same outputs, all of which a step binds. Twins that declare
``synonyms`` are compared statement by statement, too: counterparts bind the same names in the same order, under the
same conditions, and use the same names, operators, comparisons, constants and mathematical functions
(:mod:`kvlab.mirror.quantities` says what counts and what is plumbing). Helpers of one name on both sides are compared
in the same way. A statement that one side alone has says why in a comment behind it, ``#- class``
(:data:`kvlab.mirror.statements.CLASSES`). :func:`coverage` tells how many statements of a kernel have a counterpart.

What the check does not see: which stride or axis of programs goes with which index, what indexes an array of which the
other side has the address in a line of its own, casts, axes and shapes, flags and constants that a helper is given, and
what only one side has: pointers and walks over tiles, a machine's loads and products. These :func:`lockstep` sees,
which runs both sides and compares all listed outputs at the end of every step, for the arguments that it is given.
Hopper's kernels are compared by steps, waits and arrivals: their fragments, boxes and descriptors have no
counterpart in an emulator of whole tiles; :func:`coverage` counts the statements that have one all the same.
A kernel and a twin without markers are compared by :func:`lockstep_kernel`, where both bind the same names in the same
order; it explains the first difference, checks each access to memory, and proposes the markers.
``from kvlab.mirror import Twin`` needs neither NumPy nor Triton: an operation's ``config.py`` may declare its twins.

A step opens with a marker, a comment on its own line, with the same text in both twins, and runs to the next marker or
dedent::

    #: softmax -> p, m, l, o    what the step binds, then a few words
    #: store                    a step may list nothing

Every statement of the function belongs to a step, except the loops and branches that enclose markers; their headers are
the same in both twins (``range``, ``tl.range``, ``tl.static_range`` and ``ragged_range`` count as one, compiler hints
as nothing). ``#@ role`` says to which partition of a warp-specialised kernel the markers after it belong; the order is
then checked role by role. Partitions wait for each other: the waits and arrivals of a step are the same in both twins,
too (:mod:`kvlab.mirror.meetings`). ``python -m kvlab.mirror`` prints the coverage of all operations."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvlab.mirror.twin import Operation, Twin

if TYPE_CHECKING:
    from kvlab.mirror.any_kernel import KernelLockstep, assert_lockstep, lockstep_kernel
    from kvlab.mirror.lockstep_result import Difference, Lockstep
    from kvlab.mirror.lockstep_run import lockstep, lockstep_pair
    from kvlab.mirror.patterns import Pattern, pattern_of
    from kvlab.mirror.report import MirrorError, Report, Violation, check, check_sources, compare

_HOME = {
    "Coverage": "covered",
    "coverage": "covered",
    "check": "report",
    "check_sources": "report",
    "compare": "report",
    "MirrorError": "report",
    "Report": "report",
    "Violation": "report",
    "lockstep": "lockstep_run",
    "lockstep_pair": "lockstep_run",
    "assert_lockstep": "any_kernel",
    "lockstep_kernel": "any_kernel",
    "KernelLockstep": "any_kernel",
    "Pattern": "patterns",
    "pattern_of": "patterns",
    "Lockstep": "lockstep_result",
    "Difference": "lockstep_result",
}

__all__ = [
    "Coverage", "Difference", "KernelLockstep", "Lockstep", "MirrorError", "Operation", "Pattern", "Report", "Twin",
    "Violation", "assert_lockstep", "check", "check_sources", "compare", "coverage", "lockstep", "lockstep_kernel",
    "lockstep_pair", "pattern_of",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"kvlab.mirror.{_HOME[name]}"), name)
    raise AttributeError(f"module 'kvlab.mirror' has no attribute {name!r}")
