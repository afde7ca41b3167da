"""Common part of the emulators of Hopper's kernels: the twins of ``kernel``."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.hardware.chip import exp2, multiply_add
from kvlab.staging import Fragments, ceildiv
from kvlab.staging.tile.rows_over_warps import in_turn

Array = np.ndarray[Any, Any]
NOTHING = np.float32(-(2.0**100))


def quad_sum(e: Fragments, chains: bool = False) -> Array:
    """Row sums ``[BM, 4]``, one for each lane of the quad that holds a row; ``chains``: of its even and of its odd
    columns, then of both, else of pairs of columns.
    """
    tile = e.tile()[0]
    columns = np.moveaxis(tile.reshape(len(tile), -1, 4, 2), 1, 3)
    return in_turn(np.add, columns).sum(2) if chains else in_turn(np.add, columns.sum(2))


def row_max(s: Fragments) -> Array:
    """Row maxima ``[BM]``."""
    return s.tile()[0].max(1)


def softmax(s: Fragments, m: Array, l: Array, scale: np.float32) -> tuple[Fragments, Array, Array, Array]:
    """(exponentials of scores, row maxima, sums of each lane, what comes before them is multiplied by), from the maxima
    and sums before; ``scale`` is above 0 and holds log2(e).
    """
    m_new = np.maximum(m, s.tile().max((0, 2)))
    base = m_new * scale
    alpha = exp2(multiply_add(m, scale, -base))
    e = s.with_values(exp2(multiply_add(s.values, scale, -s.by_row(base[None]))))
    lanes = quad_sum(e)
    return e, m_new, multiply_add(l, alpha[:, None], lanes), alpha


def find_pages(row: Array, key: int, end: int, none: int, keys: int, box: int, page: int) -> Array:
    """The page of each box of ``keys`` keys from ``key`` on, ``row`` of the table; those past ``end`` are not looked
    up: ``none`` stands for them.
    """
    token = key + np.arange(0, keys, box)
    named = row[np.minimum(token // page, len(row) - 1)].astype(np.int64)
    return np.where(token < end, named, none)


def split_bounds(split: int, splits: int, num_keys: int, block: int) -> tuple[int, int]:
    """The first key of a split and its end. A split is a number of whole blocks."""
    size = ceildiv(ceildiv(num_keys, splits), block) * block
    lo = min(split * size, num_keys)
    return lo, min(lo + size, num_keys)
