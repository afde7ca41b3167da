"""Merging of partial attention: how many parts are taken at a time, and the twins of the operation."""

from __future__ import annotations

from kvlab.mirror.twin import Twin

__all__ = ["CHUNK", "LAUNCH", "MERGE", "TWINS", "merge_grid"]

MERGE = Twin(
    "merge",
    kernel="kvlab.attention.merge_states.kernel:merge",
    emulator="kvlab.attention.merge_states.emulator:merge",
)
TWINS = (MERGE,)
LAUNCH = ("kernel:launch", "emulator:launch")

CHUNK = 16
"""Parts of one iteration: loaded side by side, summed, and added with compensation."""


def merge_grid(batch: int, tokens: int, heads: int) -> tuple[int, int]:
    """Programs (token of a sequence, head): a GPU has 2^31 - 1 places for the first, and 65535 for the others.

    >>> merge_grid(2, 4096, 32)
    (8192, 32)
    """
    return batch * tokens, heads
