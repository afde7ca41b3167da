"""ldmatrix and stmatrix, executed: 8x8 matrices of 16-bit units between shared memory and the lanes of a warp.

Matrix m takes the addresses of its 8 rows (16 bytes each) from lanes 8m .. 8m+7. Lane L holds in register m the two
units (row L//4, columns 2(L%4) and 2(L%4)+1) of matrix m; with ``.trans`` those of the transposed matrix: (rows
2(L%4) and 2(L%4)+1, column L//4). Source: PTX ISA, ldmatrix and stmatrix."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.common.checks import integers, shown
from kvlab.common.regroup import Regroup
from kvlab.hardware._arrays import Array, IntArray, frozen, memory_of
from kvlab.memory import Memory, as_dtype, bfloat16


def ldmatrix(memory: Memory, row_address: Any, num: int, trans: bool = False, dtype: Any = bfloat16) -> Array:
    """Load ``num`` (1, 2 or 4) 8x8 matrices: registers ``[..., 32, 2*num]`` of a 16-bit ``dtype``.

    ``row_address`` ``[..., 32]`` is in bytes, a multiple of 16; lanes past ``8*num`` are ignored. Over a memory with
    programs its leading axis is 1 or P. A ``dtype`` of 8 or 32 bits sees the same registers in its own elements
    (``[..., 32, 4*num]`` or ``[..., 32, num]``); ``.trans`` moves 16-bit units whatever the dtype.

    >>> memory = Memory(128)
    >>> memory.store(np.arange(0, 128, 16), np.arange(64, dtype=np.int16).reshape(8, 8))
    >>> rows = 16 * (np.arange(32) % 8)
    >>> ldmatrix(memory, rows, 1, dtype=np.int16)[[0, 1, 5]].tolist()
    [[0, 1], [2, 3], [10, 11]]
    >>> ldmatrix(memory, rows, 1, trans=True, dtype=np.int16)[[0, 1, 5]].tolist()
    [[0, 8], [16, 24], [17, 25]]
    """
    rows = _row_addresses("ldmatrix", row_address, num)
    units = memory_of(memory, "ldmatrix: memory").load(rows, np.uint16, 8, alignment=16)  # [..., 8*num, 8]
    flat = units.reshape(*units.shape[:-2], 64 * num)
    return unit_of_register(num, trans)(flat).view(as_dtype(dtype))


def stmatrix(memory: Memory, row_address: Any, registers: Any, num: int, trans: bool = False) -> None:
    """Store the 8x8 matrices that ``registers`` ``[..., 32, 2*num]`` hold: the inverse of :func:`ldmatrix`.

    >>> memory, rows = Memory(128), 16 * (np.arange(32) % 8)
    >>> stmatrix(memory, rows, np.arange(64, dtype=np.int16).reshape(32, 2), 1, trans=True)
    >>> ldmatrix(memory, rows, 1, trans=True, dtype=np.int16)[31].tolist()
    [62, 63]
    """
    rows = _row_addresses("stmatrix", row_address, num)
    values = np.ascontiguousarray(registers)
    if values.dtype.kind == "O" or 2 * num * 2 % values.itemsize:
        raise ValueError(f"stmatrix.x{num}: registers of {values.dtype} are not [..., 32, {2 * num}] of 16 bits")
    units = values.view(np.uint16)
    if units.ndim < 2 or units.shape[-2:] != (32, 2 * num):
        raise ValueError(f"stmatrix.x{num}: registers {np.shape(registers)} are not [..., 32, {2 * num}] of 16 bits")
    flat = units.reshape(*units.shape[:-2], 64 * num)
    matrices = register_of_unit(num, trans)(flat)
    memory_of(memory, "stmatrix: memory").store(rows, matrices.reshape(*flat.shape[:-1], 8 * num, 8), alignment=16)


def _row_addresses(name: str, row_address: Any, num: int) -> IntArray:
    if num not in (1, 2, 4) or not isinstance(num, int | np.integer):
        raise ValueError(f"{name}: num is {shown(num)}: must be 1, 2 or 4")
    rows = integers(f"{name}: row_address", row_address)
    if rows.ndim < 1 or rows.shape[-1] != 32:
        raise ValueError(f"{name}: row_address has shape {rows.shape}: must be [..., 32], one for each lane")
    return rows[..., : 8 * num]


@functools.cache
def unit_of_register(num: int, trans: bool) -> Regroup:
    """Units, of ``64*num``, that each register half holds: ``[32, 2*num]``."""
    lane, half = np.arange(32)[:, None], np.arange(2 * num)
    outer, inner = lane // 4, 2 * (lane % 4) + half % 2
    row, col = (inner, outer) if trans else (outer, inner)
    return Regroup(frozen(64 * (half // 2) + 8 * row + col))


@functools.cache
def register_of_unit(num: int, trans: bool) -> Regroup:
    """Inverse of :func:`unit_of_register`: the register half, of ``32*2*num``, that holds each unit: ``[64*num]``."""
    return Regroup(frozen(np.argsort(unit_of_register(num, trans).index, axis=None)))
