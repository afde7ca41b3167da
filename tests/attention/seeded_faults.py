"""Faults seeded in the twins of an operation, which the static check must find."""

from __future__ import annotations

from pathlib import Path

import kvlab.attention
from kvlab.mirror import check_sources


def sources_of(op: str) -> dict[str, str]:
    """The text of ``kernel`` and ``emulator`` of an operation."""
    folder = Path(kvlab.attention.__file__).parent / op
    return {name: (folder / f"{name}.py").read_text() for name in ("kernel", "emulator")}


def is_found(op: str, twin: str, side: str, old: str, new: str) -> bool:
    """Whether the check of a twin fails when the one place that reads ``old`` on a side of it reads ``new``."""
    sources = sources_of(op)
    assert sources[side].count(old) == 1, f"{old!r} occurs {sources[side].count(old)} times in {side}.py"
    sources[side] = sources[side].replace(old, new)
    return not check_sources(sources["kernel"], sources["emulator"], twin, twin).ok
