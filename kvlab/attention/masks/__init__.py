"""Masks of attention calls: MAX's by name, and the protocol for masks of one's own. The public face of
:mod:`kvlab.attention.features.masks`.

>>> from kvlab.attention.masks import CausalMask, SlidingWindowCausalMask
>>> bool(CausalMask().visible(0, 0, 3, 4)), bool(SlidingWindowCausalMask(2).visible(0, 0, 3, 2))
(False, True)
"""

from kvlab.attention.features.intervals import UNLIMITED, Interval, window_interval
from kvlab.attention.features.masks import (
    AndMask,
    BandMask,
    CausalMask,
    CausalPaddingMask,
    ChunkedCausalMask,
    ChunkedMask,
    Mask,
    MaskPlan,
    MaterializedMask,
    NullMask,
    OrMask,
    SlidingWindowCausalMask,
    SlidingWindowNonCausalMask,
    TileStatus,
    resolve_mask,
)

__all__ = [
    "UNLIMITED",
    "AndMask",
    "BandMask",
    "CausalMask",
    "CausalPaddingMask",
    "ChunkedCausalMask",
    "ChunkedMask",
    "Interval",
    "Mask",
    "MaskPlan",
    "MaterializedMask",
    "NullMask",
    "OrMask",
    "SlidingWindowCausalMask",
    "SlidingWindowNonCausalMask",
    "TileStatus",
    "resolve_mask",
    "window_interval",
]
