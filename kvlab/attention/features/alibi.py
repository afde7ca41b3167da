"""ALiBi: a slope times the distance of query and key, subtracted from the scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.attention.tiles.online_softmax import LOG2E
from kvlab.staging import Fragments

from .heads import check_float32, check_heads_array

if TYPE_CHECKING:
    import triton.language as tl

Array = np.ndarray[Any, Any]
DOCUMENTATION = "float32 ``[Hq]`` or ``[B, Hq]``: slope times the distance of query and key is subtracted from scores"


def resolve_slopes(alibi_slopes: Any, q: Any, batch: int) -> Any:
    """``alibi_slopes``, checked against q ``[.., Hq, D]``, as ``[B or 1, Hq]``."""
    if alibi_slopes is not None:
        check_heads_array("alibi_slopes", alibi_slopes, q, batch=batch)
        check_float32("alibi_slopes", alibi_slopes)
    return slopes_by_sequence(alibi_slopes)


def slopes_by_sequence(slopes: Any) -> Any:
    """Slopes ``[Hq]`` or ``[B, Hq]`` as ``[B or 1, Hq]``; None of None."""
    return slopes[None] if slopes is not None and slopes.ndim == 1 else slopes


def slopes_stride(slopes: Any) -> int:
    """Elements from a sequence's slopes to the next one's, of a torch tensor ``[B or 1, Hq]`` or None."""
    return 0 if slopes is None or slopes.shape[0] == 1 else int(slopes.stride(0))


def lower_exactly(s: Array, slopes: Array | None, sequence: int, position: Array, key: Array) -> Array:
    """Scores ``[Hq, S, n]`` of a sequence in float64, lowered by the distance of query and key."""
    if slopes is None:
        return s
    slope = slopes[sequence if len(slopes) > 1 else 0].astype(np.float64)
    return s - slope[:, None, None] * np.abs(position - key)


def slope_of(slopes_array: Array | None, batch: Array, head: Array) -> Array:
    """Slopes of rows ``[P, BM]`` of query heads ``head`` of sequences ``batch`` ``[P]``; 0 where there are none."""
    slope = np.zeros(1, np.float32)
    if slopes_array is not None:
        batch = batch[:, None] if len(slopes_array) > 1 else np.zeros(1, np.int64)  #- address
        slope = slopes_array[batch, head]
    return slope


def lower(s: Fragments, slope: Array, position: Array, key: Array) -> Fragments:
    """Scores in units of log2 of rows at ``position`` ``[P, BM]`` and keys ``[P, BN]``, lowered by their distance."""
    away = np.abs(s.by_row(position) - s.by_column(key)).astype(np.float32)
    return s.with_values(s.values - s.by_row(slope * np.float32(LOG2E)) * away)


def slope_of_kernel(slopes_ptr, slopes_batch, batch, head):
    """Slopes of rows ``[BM]`` as of ``slope_of``."""
    slope = 0.0
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + batch * slopes_batch + head)
    return slope


def lower_kernel(s, slope, position, key):
    """Scores of rows at ``position`` ``[BM]`` and keys ``[BN]``, lowered by their distance."""
    away = tl.abs(position[:, None] - key[None, :]).to(tl.float32)
    return s - (slope * LOG2E)[:, None] * away
