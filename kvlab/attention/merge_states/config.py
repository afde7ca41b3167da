"""Merging of partial attention: how many parts and columns are taken at a time, and the twins of the operation."""

from __future__ import annotations

from kvlab.mirror.twin import Twin

MERGE = Twin(
    "merge",
    kernel="kvlab.attention.merge_states.kernel:merge",
    emulator="kvlab.attention.merge_states.emulator:merge",
    synonyms={"outs": "part_ptr", "lses": "part_lse_ptr", "lane_sum": "sum"},
)
TWINS = (MERGE,)
LAUNCH = ("kernel:launch", "emulator:launch")


def chunk_of(num_parts: int) -> int:
    """Parts of one iteration: loaded side by side, summed, and added with compensation.

    >>> chunk_of(2), chunk_of(17)
    (16, 32)
    """
    return 16 if num_parts <= 16 else 32


def piece_of(head_dim: int) -> int:
    """Columns that a program merges: a power of two, at most 128. The programs of an SM hide each other's waiting.

    >>> piece_of(512), piece_of(96), piece_of(64)
    (128, 128, 64)
    """
    return min(128, 1 << (head_dim - 1).bit_length())


def merge_grid(batch: int, tokens: int, heads: int, head_dim: int) -> tuple[int, int, int]:
    """Programs (token of a sequence, head, piece of columns): a GPU has 2^31 - 1 places for the first, and 65535 for
    each of the others.

    >>> merge_grid(2, 4096, 32, 512)
    (8192, 32, 4)
    """
    return batch * tokens, heads, -(-head_dim // piece_of(head_dim))
