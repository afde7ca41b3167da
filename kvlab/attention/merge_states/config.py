"""Merging of partial attention: how many parts are taken at a time, and the twins of the operation."""

from __future__ import annotations

from kvlab.mirror.twin import Twin

__all__ = ["CHUNK", "LAUNCH", "MERGE", "TWINS"]

MERGE = Twin(
    "merge",
    kernel="kvlab.attention.merge_states.kernel:merge",
    emulator="kvlab.attention.merge_states.emulator:merge",
)
TWINS = (MERGE,)
LAUNCH = ("kernel:launch", "emulator:launch")

CHUNK = 16
"""Parts of one iteration: loaded side by side, summed, and added with compensation."""
