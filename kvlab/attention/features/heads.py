"""Arrays with a value for each query head: their checks."""

from __future__ import annotations

from typing import Any

from kvlab.attention.call.checks import check_array
from kvlab.common.arrays import dtype_of, element_strides, same_place
from kvlab.common.checks import require
from kvlab.memory import float32


def check_heads_array(name: str, array: Any, q: Any, *, batch: int | None = None) -> None:
    """ValueError unless ``array`` is ``[Hq]``, or with ``batch`` ``[B, Hq]``, beside q ``[.., Hq, D]``."""
    heads = int(q.shape[-2])
    shapes: list[tuple[int, ...]] = [(heads,)]
    forms = f"[Hq = {heads}]"
    if batch is not None:
        shapes, forms = [*shapes, (batch, heads)], f"{forms} or [B = {batch}, {heads}]"
    check_array(name, array)
    same_place(**{name: array, "q": q})
    shape = tuple(int(n) for n in array.shape)
    require(shape in shapes, f"{name} has shape {shape}", forms)
    strides = element_strides(array, name)
    require(0 in shape or shape[-1] < 2 or strides[-1] == 1, f"{name} is strided", "contiguous in its last dimension")


def check_float32(name: str, array: Any) -> None:
    """ValueError unless the elements are float32."""
    require(dtype_of(array, name) == float32, f"{name} has dtype {array.dtype}", "float32")
