"""Dtypes of elements, by the names of NumPy, torch and the field."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from kvlab.common.checks import shown

bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3fn = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
float16 = np.dtype(np.float16)
float32 = np.dtype(np.float32)
invalid = np.dtype("V0")
"""The dtype of what does not exist: no bytes."""

_NAMES: dict[str, np.dtype[Any]] = {
    "bf16": bfloat16,
    "bfloat16": bfloat16,
    "f16": float16,
    "fp16": float16,
    "float16": float16,
    "f32": float32,
    "fp32": float32,
    "float32": float32,
    "f64": np.dtype(np.float64),
    "fp64": np.dtype(np.float64),
    "float64": np.dtype(np.float64),
    "f8E4M3FN": float8_e4m3fn,
    "f8E5M2": float8_e5m2,
    "fp8": float8_e4m3fn,
    "fp8e4m3": float8_e4m3fn,
    "float8_e4m3fn": float8_e4m3fn,
    "fp8e5m2": float8_e5m2,
    "float8_e5m2": float8_e5m2,
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
}


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype for a name (``"bf16"``, ``"float8_e4m3fn"``, ...), a NumPy dtype or a torch dtype.

    >>> as_dtype("bf16")
    dtype(bfloat16)
    >>> as_dtype(np.float32)
    dtype('float32')
    """
    if isinstance(dtype, np.dtype):
        return dtype
    name = dtype.__name__ if isinstance(dtype, type) else shown(dtype).strip("'").removeprefix("torch.")
    if name in _NAMES:
        return _NAMES[name]
    raise ValueError(f"dtype is {shown(dtype)}: must be one of {', '.join(sorted(_NAMES))}")
