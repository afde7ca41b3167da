"""Several k groups of matrix instructions, step after step as the hardware does."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.common.regroup import Regroup
from kvlab.hardware import MmaAtom

Array = np.ndarray[Any, Any]


def mma_step_by_step(atom: MmaAtom, a: Array, b: Array, c: Array) -> Array:
    """``c[m + n * num_m] + a[step, m] * b[step, n]``, a step after the other, issued as by
    :meth:`~kvlab.staging.TiledMmaOp.mma` with ``swap_a_b``: each step is added to the sum of those before it.

    a ``[programs, threads, steps, num_m, regs]``, b ``[programs, threads, steps, num_n, regs]``, c ``[programs,
    threads, num_m * num_n, regs_c]`` float32.

    >>> from kvlab.hardware import get_atom
    >>> atom, ones = get_atom("mfma.16x16x4.f32"), np.ones((1, 64, 5, 1, 1), np.float32)
    >>> mma_step_by_step(atom, ones, ones, np.ones((1, 64, 1, 4), np.float32)).max()  # 1 + 5 steps of 4
    np.float32(21.0)
    """
    steps, num_m, num_n = a.shape[2], a.shape[3], b.shape[3]
    by_col, by_row, together, apart = _orders(atom, steps, num_m, num_n)
    programs, warps = len(a), a.shape[1] // atom.warp_size
    flat = programs, warps, -1
    first = by_col(a.reshape(flat)).astype(np.float32, copy=False)  # [programs, warps, steps, columns, k]
    second = by_row(b.reshape(flat)).astype(np.float32, copy=False)  # [programs, warps, steps, rows, k]
    products = np.matmul(first, second.swapaxes(-1, -2))  # [programs, warps, steps, columns, rows]
    total = together(c.reshape(flat))
    for step in range(steps):
        total = total + products[:, :, step]
    return apart(total.reshape(flat)).reshape(c.shape)


@functools.cache
def _orders(atom: MmaAtom, steps: int, num_m: int, num_n: int) -> tuple[Regroup, Regroup, Regroup, Regroup]:
    """From the registers of a warp to A by columns and B by rows, ``[steps, columns or rows, k]``; from those of C to
    ``[columns, rows]`` and back. B is the instruction's first operand."""
    (rows, cols, _), lanes = atom.shape, atom.warp_size

    def numbers(tiles: int, regs: int) -> Array:
        """Of the registers ``[lanes, steps, tiles, regs]``, as ``[steps, tiles, lanes, regs]``."""
        index = np.arange(lanes * steps * tiles * regs).reshape(lanes, steps, tiles, regs)
        return index.transpose(1, 2, 0, 3)

    second = atom.tile_a(numbers(num_n, atom.regs_a)).reshape(steps, num_n * rows, -1)
    first = atom.tile_b(numbers(num_m, atom.regs_b)).swapaxes(-1, -2).reshape(steps, num_m * cols, -1)
    product = np.arange(num_m * cols * num_n * rows).reshape(num_m, cols, num_n, rows)
    registers = atom.fragment_c(product.transpose(2, 0, 3, 1)).transpose(2, 0, 1, 3)  # [lanes, n, m, regs]
    home = np.empty(product.size, np.int64)
    home[registers.reshape(-1)] = np.arange(product.size)
    return (
        Regroup(first), Regroup(second), Regroup(home.reshape(num_m * cols, -1)),
        Regroup(registers.reshape(-1, registers.shape[-1])),
    )
