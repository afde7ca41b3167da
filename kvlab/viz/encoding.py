"""Triton's encodings: what each makes of a tensor, drawn as the linear layout that it is there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .linear_layout import BELOW, held, padded, stored, with_bases
from .picture import Picture

__all__ = ["draw_encoding"]

MOST = 1 << 18


def draw_encoding(
    encoding: Any,
    shape: Sequence[int] | None = None,
    *,
    triton_version: str | None = None,
    element_bytes: int | None = None,
    banks: int = 32,
    thread: int | None = None,
    title: str | None = None,
    caption: str | None = None,
) -> Picture:
    """A Triton encoding on a tensor of ``shape``, by default the smallest that shows its pattern.

    - of registers: which thread and register hold each element; ``thread`` (warp * lanes + lane) can be picked out
    - of shared memory: what lies where, in elements of ``element_bytes`` (2, or what the encoding says), over ``banks``
      of 4 bytes (32, or 64 on gfx950); places that no element has (padding) are hatched

    Raises ValueError where the encoding does not fit the shape, and for a thread that it does not have.

    >>> from kvlab.layout.encodings import BlockedLayout, PaddedSharedLayout
    >>> draw_encoding(BlockedLayout([1, 4], [8, 4], [2, 1], [1, 0])).title
    'BlockedLayout on 16 x 16: 64 threads hold 4 each, every element once'
    >>> draw_encoding(PaddedSharedLayout.with_identity_for([[64, 8]], (8, 64), (1, 0))).title
    'PaddedSharedLayout on 8 x 64: vector 0 of its first 8 rows lies in 8 bank groups'
    """
    if not isinstance(shape, tuple | list | None):
        raise ValueError(f"shape {shape!r} of {encoding}: a tuple of ints is accepted")
    shape = encoding.pattern_shape() if shape is None else tuple(shape)
    version = {} if triton_version is None else {"triton_version": triton_version}
    layout = encoding.to_linear_layout(shape, **version)
    if hasattr(encoding, "offsets"):
        size = element_bytes or getattr(encoding, "element_bitwidth", 16) // 8
        if hasattr(encoding, "interval_padding_pairs") or getattr(encoding, "fp4_padded", False):
            if math.prod(shape) > MOST:
                raise ValueError(f"shape {shape} of {encoding}: up to {MOST} padded elements can be drawn")
            top, found, told = padded(shape, np.asarray(encoding.offsets(shape, **version)), size, banks)
        else:
            top, found, told = stored(layout if "offset" in layout.in_dims else layout.invert(), size, banks)
        found = f"{'its transpose, ' * ('transposed' in found)}{found.rpartition(': ')[2]}"
    else:
        top, found, told = held(layout, thread)
    below = BELOW if not hasattr(encoding, "interval_padding_pairs") else f"{BELOW[:-1]}, before the padding."
    name = f"{type(encoding).__name__} on {' x '.join(map(str, shape))}"
    return with_bases(top, layout, title or f"{name}: {found}", caption or f"{told} {below}")
