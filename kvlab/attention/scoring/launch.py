"""Arguments of kernels for a call's features: strides and sizes of arrays that may be absent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvlab.attention.features.scales import Scale


def slopes_batch(slopes: Any) -> int:
    """Elements from a sequence's ALiBi slopes to the next one's, of a torch tensor ``[B or 1, H]`` or None."""
    return 0 if slopes is None or slopes.shape[0] == 1 else int(slopes.stride(0))


def bias_arguments(bias: Any) -> tuple[tuple[int, int], tuple[int, ...]]:
    """(rows and keys, strides) of a torch tensor ``[B or 1, H or 1, rows, keys]`` or None; stride 0 along
    an axis of one.

    >>> bias_arguments(None)
    ((0, 0), (0, 0, 0, 0))
    """
    if bias is None:
        return (0, 0), (0, 0, 0, 0)
    lead = (0 if n == 1 else step for n, step in zip(bias.shape[:2], bias.stride()[:2], strict=True))
    return tuple(bias.shape[2:]), (*lead, *bias.stride()[2:])


def scale_strides(scale: Scale, axes: int) -> tuple[int, ...]:
    """Strides of the scales of tokens, torch tensors of so many axes of which the last is that of heads; 0 for the
    axes that other scales do not have.

    >>> scale_strides(Scale(0.5), 3)
    (0, 0, 0)
    """
    strides = () if scale.array is None else tuple(scale.array.stride())
    return (0,) * (axes - len(strides)) + strides


def in_units(*strides: Sequence[int]) -> tuple[int, list[list[int]]]:
    """Unit in elements of a kernel's strides, and the strides in it: the largest power of two up to 8 that divides them
    all, so that the compiler knows how many bytes lie aligned; 1 where all are multiples of 16, which it sees.

    >>> in_units([528, 264], [0, 4096]), in_units([36], [72]), in_units([33]), in_units([128]), in_units([264, 1 << 31])
    ((8, [[66, 33], [0, 512]]), (4, [[9], [18]]), (1, [[33]]), (1, [[128]]), (1, [[264, 2147483648]]))
    """
    common = math.gcd(*(step for steps in strides for step in steps))
    small = max((step for steps in strides for step in steps), default=0) < 1 << 31  # a unit more has 32 bits, too
    unit = 1 if common % 16 == 0 or not small else math.gcd(common, 8)
    return unit, [[step // unit for step in steps] for steps in strides]
