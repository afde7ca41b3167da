"""Twins, checked against each other line for line.

:func:`check` proves statically that a Triton kernel and its NumPy emulator have the same steps; :func:`lockstep` runs
both and compares every listed output at the end of every step. ``from kvlab.mirror import Twin`` needs neither NumPy
nor Triton, so that an operation's ``config.py`` may declare its twins.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvlab.mirror.twin import Operation, Twin

if TYPE_CHECKING:
    from kvlab.mirror.lockstep_result import Difference, Lockstep
    from kvlab.mirror.lockstep_run import lockstep, lockstep_pair
    from kvlab.mirror.report import MirrorError, Report, Violation, check, check_sources, compare

_HOME = {
    "check": "report",
    "check_sources": "report",
    "compare": "report",
    "MirrorError": "report",
    "Report": "report",
    "Violation": "report",
    "lockstep": "lockstep_run",
    "lockstep_pair": "lockstep_run",
    "Lockstep": "lockstep_result",
    "Difference": "lockstep_result",
}

__all__ = [
    "Difference",
    "Lockstep",
    "MirrorError",
    "Operation",
    "Report",
    "Twin",
    "Violation",
    "check",
    "check_sources",
    "compare",
    "lockstep",
    "lockstep_pair",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"kvlab.mirror.{_HOME[name]}"), name)
    raise AttributeError(f"module 'kvlab.mirror' has no attribute {name!r}")
