"""Operands of a call, each in a buffer of its own with strides of its own; poison and canaries around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.memory import as_dtype

Array = np.ndarray[Any, Any]

NUMBERS = {
    "q": 1, "k": 2, "v": 9, "out": 4, "k_scale": 5, "v_scale": 6, "rope": 7, "bias": 8, "slopes": 31, "rope_scale": 10,
    "q_scale": 11, "table": 70, "cos": 13, "sin": 14, "lens": 120, "lses": 16, "k_cache": 17, "v_cache": 24,
    "outs": 21, "latent": 19,
}
"""What is added to the extents of a buffer tells its operand: no two operands of a call have the same strides."""
CANARY = 7
NOWHERE = 2147480000
"""No page and no key."""


@dataclass(frozen=True)
class Operand:
    """An array within a larger buffer: ``array`` has the values, ``buffer`` what stands around them, too."""

    array: Array
    buffer: Array


def placed(name: str, values: Array, *, unit: int = 1, order: tuple[int, ...] | None = None) -> Operand:
    """``values`` within a buffer that is larger along each axis, by how much tells its name. What stands around them is
    poison.

    unit : elements of which the padding of a row, in front and behind, is a multiple. order : axes of the buffer, the
    slowest first.
    """
    number, last = NUMBERS[name], values.ndim - 1
    order = tuple(range(values.ndim)) if order is None else order
    around = {axis: (1, 1 + number % (3 + axis)) for axis in range(last)} | {last: (unit * number, unit)}
    shape = tuple(sum(around[axis]) + values.shape[axis] for axis in order)
    buffer = np.full(shape, poison(values.dtype), values.dtype)
    inner = tuple(slice(around[axis][0], around[axis][0] + n) for axis, n in enumerate(values.shape))
    array = buffer.transpose(np.argsort(order))[inner]
    array[...] = values
    return Operand(array, buffer)


def poison(dtype: np.dtype[Any]) -> Any:
    """What no operation may read: NaN, or the number of no page and of no key."""
    return NOWHERE if np.dtype(dtype).kind in "iub" else np.nan


def vectors(dtype: np.dtype[Any]) -> int:
    """Elements of 16 bytes, what lanes copy at a time."""
    return 16 // np.dtype(dtype).itemsize


def result(name: str, shape: tuple[int, ...], dtype: Any, unit: int) -> Operand:
    """An array to write to, canaries in it and around it."""
    made = placed(name, np.zeros(shape, as_dtype(dtype)), unit=unit)
    made.buffer[...] = CANARY
    return made


def only_within(result: Operand) -> bool:
    """Whether the canaries around a result are there."""
    kept = result.array.copy()
    result.array[...] = CANARY
    intact = bool((result.buffer == CANARY).all())
    result.array[...] = kept
    return intact


def page_table(columns: Array, pages: int, rng: np.random.Generator) -> Array:
    """Pages dealt at random to sequences of ``columns`` pages each, and no pages in the other entries."""
    table = np.empty((len(columns), int(columns.max(initial=0)) + 2), np.int64)
    table[:, ::2], table[:, 1::2] = -1, NOWHERE
    used = np.arange(table.shape[1]) < columns[:, None]
    table[used] = rng.permutation(pages)[: used.sum()]
    return table
