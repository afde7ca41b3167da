"""Faults seeded in the twins of an operation, which the static check must find."""

from __future__ import annotations

from pathlib import Path

import kvlab.attention
from kvlab.mirror import Operation, check_sources

HOPPER = "hopper_roles", "hopper_emulator"
"""The files of Hopper's twins."""


def sources_of(op: str, files: tuple[str, str] = ("kernel", "emulator")) -> dict[str, str]:
    """The text of ``kernel`` and ``emulator`` of an operation, which stand in ``files``."""
    folder = Path(kvlab.attention.__file__).parent / op
    return {side: (folder / f"{file}.py").read_text() for side, file in zip(("kernel", "emulator"), files, strict=True)}


def is_found(
    op: str, twin: str, side: str, old: str, new: str, files: tuple[str, str] = ("kernel", "emulator")
) -> bool:
    """Whether the check of a twin fails when the one place that reads ``old`` on a side of it reads ``new``."""
    sources = sources_of(op, files)
    assert sources[side].count(old) == 1, f"{old!r} occurs {sources[side].count(old)} times in the {side}"
    sources[side] = sources[side].replace(old, new)
    declared = next(one for one in Operation.load(op).twins if one.kernel == f"{files[0]}:{twin}")
    folder = Path(kvlab.attention.__file__).parent / op
    paths = {f"{side}_path": str(folder / f"{file}.py") for side, file in zip(sources, files, strict=True)}
    given = sources["kernel"], sources["emulator"], twin, twin
    return not check_sources(*given, **paths, synonyms=declared.synonyms, held=declared.held).ok
