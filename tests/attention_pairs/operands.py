"""Operands of a call, each in a buffer of its own with strides of its own; poison and canaries around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.memory import as_dtype

Array = np.ndarray[Any, Any]

PADS = {
    "q": 1, "k": 2, "v": 3, "out": 4, "k_scale": 5, "v_scale": 6, "rope_scale": 7, "bias": 8, "slopes": 9, "rope": 10,
    "q_scale": 11, "table": 12, "lse": 13, "cos": 14, "sin": 15,
}  # fmt: skip
"""What is added to the extents of a buffer tells its operand: no two operands of a call have the same strides."""
CANARY = 7


@dataclass(frozen=True)
class Operand:
    """An array within a larger buffer. ``array`` has the values, ``buffer`` what stands around them, too."""

    array: Array
    buffer: Array
    before: bytes

    @property
    def untouched(self) -> bool:
        """Whether every byte of the buffer is as it was made."""
        return self.buffer.tobytes() == self.before


def placed(name: str, values: Array, *, columns: int = 0, order: tuple[int, ...] | None = None) -> Operand:
    """``values`` within a buffer that is larger along each axis by what PADS tells. Floats stand among NaN, others among
    numbers that fit nothing.

    columns : along the last axis, elements before and behind it (0: none; rows whose first element must be aligned
    have a multiple of 16 bytes). order : axes of the buffer, the slowest first.
    """
    number = PADS[name]
    order = tuple(range(values.ndim)) if order is None else order
    extents = {axis: (1, 1 + number % (3 + axis)) for axis in range(values.ndim)}
    extents[values.ndim - 1] = (columns, columns)
    shape = tuple(sum(extents[axis]) + values.shape[axis] for axis in order)
    buffer = np.full(shape, poison(values.dtype), values.dtype)
    whole = buffer.transpose(np.argsort(order))
    inner = tuple(slice(extents[axis][0], extents[axis][0] + n) for axis, n in enumerate(values.shape))
    array = whole[inner]
    array[...] = values
    return Operand(array, buffer, buffer.tobytes())


def poison(dtype: np.dtype[Any]) -> Any:
    """What no operation may read: NaN, or the number of no page and of no key."""
    return np.array(2147480000, dtype) if np.dtype(dtype).kind in "iu" else np.array(np.nan, dtype)


def result(name: str, shape: tuple[int, ...], dtype: Any, columns: int) -> tuple[Array, Array]:
    """An array to write to and the buffer around it, whose canaries :func:`only_within` looks at."""
    made = placed(name, np.full(shape, CANARY, as_dtype(dtype)), columns=columns)
    made.buffer[...] = CANARY
    return made.array, made.buffer


def only_within(array: Array, buffer: Array) -> bool:
    """Whether the canaries beside ``array`` are there."""
    kept = array.copy()
    array[...] = CANARY
    intact = bool((buffer == CANARY).all())
    array[...] = kept
    return intact


def page_table(columns: Array, pages: int, rng: np.random.Generator) -> Array:
    """Pages dealt at random to sequences of ``columns`` pages each, and no pages in the other entries, int32."""
    table = np.empty((len(columns), int(columns.max(initial=0)) + 2), np.int32)
    table[:, ::2], table[:, 1::2] = -1, 2147480000
    used = np.arange(table.shape[1]) < columns[:, None]
    table[used] = rng.permutation(pages)[: used.sum()]
    return table
