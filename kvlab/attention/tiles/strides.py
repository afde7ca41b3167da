"""Strides as kernels take them, one argument an array: in elements, of the axes but the last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class RowStrides(NamedTuple):
    """Of q, outputs and lse ``[B, S, H, ..]``."""

    batch: int
    token: int
    head: int


class PageStrides(NamedTuple):
    """Of K and V ``[pages, page_size, H, ..]``."""

    page: int
    token: int
    head: int


class ScaleStrides(NamedTuple):
    """Of scales that are computed, ``[pages, page_size, H, blocks]``."""

    page: int = 0
    token: int = 0
    head: int = 0
    block: int = 0


class AngleStrides(NamedTuple):
    """Of cosines and of sines ``[positions, R / 2]``."""

    cos_row: int = 0
    cos_column: int = 0
    sin_row: int = 0
    sin_column: int = 0


class PartStrides(NamedTuple):
    """Of the partial results of splits ``[splits, B, S, H, ..]``."""

    split: int
    batch: int
    token: int
    head: int


def in_units(*strides: Sequence[int], sees: bool = True) -> tuple[int, list[list[int]]]:
    """Unit in elements of a kernel's strides, and the strides in it: the largest power of two up to 8 that divides them
    all, so that the compiler knows how many bytes lie aligned; 1 where all are multiples of 16, which it ``sees``, 16
    where it does not.

    >>> in_units([528, 264], [0, 4096]), in_units([36], [72]), in_units([33]), in_units([128]), in_units([264, 1 << 31])
    ((8, [[66, 33], [0, 512]]), (4, [[9], [18]]), (1, [[33]]), (1, [[128]]), (1, [[264, 2147483648]]))
    """
    common = math.gcd(*(step for steps in strides for step in steps))
    small = max((step for steps in strides for step in steps), default=0) < 1 << 31  # a unit more has 32 bits, too
    unit = (1 if common % 16 == 0 else math.gcd(common, 8)) if sees else math.gcd(common, 16)
    unit = unit if small else 1
    return unit, [[step // unit for step in steps] for steps in strides]


def leading_strides(array: Any, *, ragged: bool = False) -> list[int]:
    """Strides of the first three axes of a torch tensor; 0 for the first where rows are ``ragged``: one sequence after
    the other, ``[1, total, H, ..]``.
    """
    first, *rest = array.stride()[:3]
    return [0 if ragged else first, *rest]
