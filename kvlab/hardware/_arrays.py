"""Small helpers on index arrays that the files of this room share."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from kvlab.memory import Memory

Array: TypeAlias = np.ndarray[Any, Any]
IntArray: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
BoolArray: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


def frozen(array: Array) -> IntArray:
    """``array`` as int64 that nobody can write to: fit for a cache."""
    out = np.array(array, np.int64)
    out.flags.writeable = False
    return out


def memory_of(value: Any, what: str) -> Memory:
    """``value``, which must be a :class:`~kvlab.memory.Memory`, or ValueError."""
    if not isinstance(value, Memory):
        raise ValueError(f"{what} is {value!r}: must be a kvlab.memory.Memory")
    return value


def mask_lanes(mask: Any, shape: tuple[int, ...]) -> BoolArray:
    """The active lanes ``[..., lanes]``, from booleans, from bit masks ``[...]`` (bit l = lane l), or None = all."""
    if mask is None:
        return np.broadcast_to(np.True_, shape)
    bits = np.asarray(mask)
    if bits.dtype == np.bool_:
        active = bits
    elif bits.dtype.kind in "iu" and (bits >= 0).all():
        lanes = np.arange(shape[-1], dtype=np.uint64)
        if shape[-1] < 64 and (bits.astype(np.uint64) >> np.uint64(shape[-1])).any():
            raise ValueError(f"mask {mask!r} has bits past lane {shape[-1] - 1}")
        active = (bits.astype(np.uint64)[..., None] >> lanes & np.uint64(1)).astype(np.bool_)
    else:
        raise ValueError(f"mask {mask!r} is neither booleans [..., {shape[-1]}] nor non-negative bit masks")
    try:
        return np.broadcast_to(active, shape)
    except ValueError:
        raise ValueError(f"mask of lanes {active.shape} does not fit addresses of shape {shape}") from None
