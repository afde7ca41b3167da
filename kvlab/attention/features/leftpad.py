"""Left padding: keys before the first valid one of each sequence, which nobody sees and from which positions count."""

from __future__ import annotations

from typing import Any

from kvlab.attention.call.checks import check_array
from kvlab.common.arrays import dtype_of, element_strides, same_place
from kvlab.common.checks import require

from .intervals import host

DOCUMENTATION = (
    "None, or integers ``[B]``: padding, keys of each sequence before its first valid one, among those that its length "
    "counts. They are hidden and not read; positions, and the keys of masks, count from the first valid key"
)


def check_of_sequences(name: str, array: Any, q: Any, batch: int) -> None:
    """ValueError unless ``array`` is None or contiguous integers ``[B]`` beside q."""
    if array is None:
        return
    check_array(name, array)
    same_place(**{name: array, "q": q})
    require(array.ndim == 1, f"{name} has shape {tuple(array.shape)}", "[B]")
    given = int(array.shape[0])
    require(given == batch, f"{name} of {given} sequences", f"those of the call, {batch}")
    require(dtype_of(array, name).kind in "iu", f"{name} has dtype {array.dtype}", "an integer")
    require(batch < 2 or element_strides(array) == (1,), f"{name} is strided", "contiguous")


def check_padding(leftpad: Any) -> None:
    """ValueError for a padding below 0."""
    bad = () if leftpad is None else host(leftpad) < 0
    if any(bad):
        b = [*bad].index(True)
        raise ValueError(f"leftpad_k[{b}] is {host(leftpad)[b]}: must be a number of keys, at least 0")
