"""Bias: an array that is added to the scores; what masks have no interval for becomes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.attention.call.checks import check_array
from kvlab.attention.tiles.masked import load
from kvlab.attention.tiles.online_softmax import LOG2E, MASK_VALUE
from kvlab.common.arrays import dtype_of, same_place
from kvlab.common.checks import require
from kvlab.staging import Fragments

if TYPE_CHECKING:
    import triton.language as tl

Array = np.ndarray[Any, Any]


def check_bias(bias: Any, q: Any, batch: int) -> None:
    """ValueError unless ``bias`` is None or ``[B or 1, Hq or 1, rows, keys]`` beside q ``[.., Hq, D]``."""
    if bias is None:
        return
    check_array("mask", bias)
    same_place(mask=bias, q=q)
    heads, shape = int(q.shape[-2]), tuple(int(n) for n in bias.shape)
    require(len(shape) == 4, f"mask has shape {shape}", "4 axes")
    fits = shape[0] in (1, batch) and shape[1] in (1, heads)
    require(fits, f"mask has shape {shape}", f"[{batch} or 1, {heads} or 1, S, keys]")
    require(dtype_of(bias, "mask").kind in "fV", f"mask has dtype {bias.dtype}", "a float or bool")


def bias_numbers(bias: Any) -> tuple[int, ...]:
    """Strides of a torch tensor ``[B or 1, H or 1, rows, keys]``, 0 along an axis of one, then rows and keys; 0 for
    None.

    >>> bias_numbers(None)
    (0, 0, 0, 0, 0, 0)
    """
    if bias is None:
        return (0,) * 6
    lead = (0 if n == 1 else step for n, step in zip(bias.shape[:2], bias.stride()[:2], strict=True))
    return (*lead, *bias.stride()[2:], *bias.shape[2:])


def add_bias_exactly(s: Array, visible: Array, bias: Array | None, sequence: int) -> tuple[Array, Array]:
    """(s, visible) of scores ``[Hq, S, n]`` in float64; outside it the bias masks."""
    if bias is None:
        return s, visible
    whole = np.full(s.shape, -np.inf)
    rows, keys = min(s.shape[1], bias.shape[2]), min(s.shape[2], bias.shape[3])
    whole[:, :rows, :keys] = bias[sequence if len(bias) > 1 else 0, :, :rows, :keys].astype(np.float64)
    visible = visible & ~(whole <= MASK_VALUE)  # NaN masks nothing
    return s + np.where(visible, whole, 0), visible


def add_bias(
    s: Fragments, visible: Array, bias_array: Array, batch: Array, head: Array, row: Array, key: Array
) -> tuple[Fragments, Array]:
    """(s, visible) with a bias ``[B or 1, Hq or 1, rows, keys]`` of rows ``row`` of ``head``; outside it masks.

    ``visible`` ``[P, threads, registers, elements]``.
    """
    rows, keys = bias_array.shape[2:]  #- launch
    row, key = s.by_row(row), s.by_column(key)
    batch = batch[:, None, None, None] if len(bias_array) > 1 else np.zeros(1, np.int64)  #- address
    head = s.by_row(head) if bias_array.shape[1] > 1 else np.zeros(1, np.int64)  #- address
    inside = visible & (row < rows) & (key < keys)
    bias = load(bias_array, (batch, head, row, key), mask=inside, other=-np.inf).astype(np.float32)
    visible = visible & ~(bias <= np.float32(MASK_VALUE))  # NaN masks nothing
    return s.with_values(s.values + np.where(visible, bias, np.float32(0)) * np.float32(LOG2E)), visible


def add_bias_kernel(s, visible, bias_ptr, numbers, batch, head, row, key):
    """(s, visible) with a bias of rows ``row`` of ``head``, as of ``add_bias``."""
    at = batch * numbers.bias_batch + head * numbers.bias_head + row.to(tl.int64) * numbers.bias_row  #- address
    at = at[:, None] + key.to(tl.int64)[None, :] * numbers.bias_key  #- address
    inside = visible & (row < numbers.bias_rows)[:, None] & (key < numbers.bias_keys)[None, :]
    bias = tl.load(bias_ptr + at, mask=inside, other=-float("inf")).to(tl.float32)
    visible = visible & ~(bias <= MASK_VALUE)  # NaN masks nothing
    return s + tl.where(visible, bias, 0.0) * LOG2E, visible
