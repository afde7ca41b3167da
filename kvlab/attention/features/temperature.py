"""Temperature: a factor of the scores of each query head, before softcap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .heads import check_float32, check_heads_array

if TYPE_CHECKING:
    import triton.language as tl

Array = np.ndarray[Any, Any]
DOCUMENTATION = "float32 ``[Hq]``: what the scores of each query head are multiplied by, before softcap"


def resolve_temperature(temperature: Any, q: Any) -> Any:
    """``temperature``, checked against q ``[.., Hq, D]``."""
    if temperature is not None:
        check_heads_array("temperature", temperature, q)
        check_float32("temperature", temperature)
    return temperature


def heat_exactly(s: Array, temperature: Array | None) -> Array:
    """Scores ``[Hq, S, n]`` in float64, each head's times its temperature."""
    return s if temperature is None else s * temperature.astype(np.float64)[:, None, None]


def heat(factor: Array, temperature_array: Array | None, head: Array) -> Array:
    """The factor of the scores of rows ``[P, BM]``, that of their query heads ``head`` included."""
    if temperature_array is not None:
        factor = factor * temperature_array[head]
    return factor


def heat_kernel(factor, temperature_ptr, head):
    """The factor of the scores of query heads ``head``, their temperature included."""
    if temperature_ptr is not None:
        factor = factor * tl.load(temperature_ptr + head)
    return factor
