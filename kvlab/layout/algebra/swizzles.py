"""The swizzles that kernels use, by what they are for. Each says its unit."""

from __future__ import annotations

from typing import Any

from kvlab.common.checks import shown
from kvlab.layout.algebra.int_tuple import as_int
from kvlab.layout.algebra.swizzle import VECTOR_BYTES, Swizzle
from kvlab.memory import as_dtype

TMA_MODES = {"NONE": 0, "32B": 1, "64B": 2, "128B": 3}


def make_swizzle(num_rows: int, row_size: int, access_size: int, unit: Any) -> Swizzle:
    """For accesses of ``access_size`` units down the columns of rows of ``row_size`` units; ``num_rows`` rows get
    different places. ``unit`` is the dtype that all three count (or "byte", "vector").

    ValueError where that is not an involution: when a row holds fewer accesses than there are rows.

    >>> print(make_swizzle(8, 64, 8, "bf16"), make_swizzle(8, 128, 8, "bf16"))
    Sw<3,3,3> (bfloat16) Sw<3,3,4> (bfloat16)
    >>> make_swizzle(8, 32, 8, "bf16")
    Traceback (most recent call last):
        ...
    ValueError: Swizzle(3,3,2): shift 2 < bits 3 is not an involution; use Sw<3,3,3> or Sw<2,3,2>
    """
    sizes = tuple(as_int(value, "make_swizzle:") for value in (num_rows, row_size, access_size))
    if min(sizes) < 1 or row_size <= access_size:
        raise ValueError(
            f"make_swizzle({num_rows}, {row_size}, {access_size}): 1 and more, and rows longer than an access"
        )
    return Swizzle(_log2(num_rows), _log2(access_size), _log2(row_size) - _log2(access_size), unit)


def make_ldmatrix_swizzle(dtype: Any, row_size: int, log2_vector_width: int = 0) -> Swizzle:
    """For ldmatrix on rows of ``row_size`` elements: 8 rows at one column lie in different banks.

    The unit is the 16-byte vector; with ``log2_vector_width`` it is the element, in accesses of that many of them.

    >>> print(make_ldmatrix_swizzle("bf16", 64), make_ldmatrix_swizzle("bf16", 64, 3))
    Sw<3,0,3> (16-byte vector) Sw<3,3,3> (bfloat16)
    >>> print(make_ldmatrix_swizzle("float32", 16), make_ldmatrix_swizzle("fp8", 64))
    Sw<2,0,3> (16-byte vector) Sw<2,0,3> (16-byte vector)
    """
    dtype, _ = as_dtype(dtype), as_int(log2_vector_width, "log2_vector_width", 0)
    row_bytes = as_int(row_size, "row_size") * dtype.itemsize
    if row_bytes < VECTOR_BYTES or (row_bytes % 128 and 128 % row_bytes):
        raise ValueError(
            f"make_ldmatrix_swizzle({dtype}, {row_size}): rows of {row_bytes} bytes; 16, 32, 64 or 128 * n bytes"
        )
    bits = _log2(min(8 * row_bytes // 128, 8))
    shift = _log2(max(row_bytes // VECTOR_BYTES, 8))
    return Swizzle(bits, log2_vector_width, shift, dtype if log2_vector_width else "vector")


def make_tma_swizzle(mode: int | str, unit: Any = "byte") -> Swizzle:
    """Swizzle of the TMA's writes to shared memory in a mode: 0..3, "NONE", "32B", "64B" or "128B" (also
    ``SWIZZLE_128B``). It is ``Sw<mode,4,3>`` on bytes, whatever the dtype; ``unit`` counts it in elements.

    >>> print(make_tma_swizzle("128B"), make_tma_swizzle(3, "bf16"), make_tma_swizzle("64B", "float32"))
    Sw<3,4,3> (byte) Sw<3,3,3> (bfloat16) Sw<2,2,3> (float32)
    """
    bits = TMA_MODES.get(mode.upper().removeprefix("SWIZZLE_"), -1) if isinstance(mode, str) else mode
    if bits not in TMA_MODES.values():
        raise ValueError(f"mode is {shown(mode)}: must be one of {', '.join(TMA_MODES)} or 0..3")
    return Swizzle(bits, 4, 3, "byte").to(unit)


def _log2(n: int) -> int:
    """Rounded down."""
    return int(n).bit_length() - 1
