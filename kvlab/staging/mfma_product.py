"""Several k groups of matrix instructions: one matrix product a warp, or step after step as the hardware does."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.hardware import MmaAtom

from .kv_mma_op import mma_tiles

__all__ = ["mma_step_by_step", "mma_steps"]

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


def mma_steps(atom: MmaAtom, a: Array, b: Array, c: Array) -> Array:
    """``c[m + n * num_m] + sum over steps of a[step, m] * b[step, n]``, issued swapped as by
    :func:`~kvlab.staging.mma_tiles`.

    a ``[programs, threads, steps, num_m, regs]``, b ``[programs, threads, steps, num_n, regs]``, c ``[programs,
    threads, num_m * num_n, regs_c]`` float32. The sums over all steps are those of one float32 matrix product, in its
    order; hardware goes step by step, as :func:`mma_step_by_step` does.

    >>> from kvlab.hardware import get_atom
    >>> atom, ones = get_atom("mfma.16x16x4.f32"), np.ones((1, 64, 5, 1, 1), np.float32)
    >>> mma_steps(atom, ones, ones, np.ones((1, 64, 1, 4), np.float32)).max()  # 1 + 5 steps of 4
    np.float32(21.0)
    """
    steps, num_m, num_n = a.shape[2], a.shape[3], b.shape[3]
    home_a, home_b, registers = _positions(atom, steps, num_m, num_n)
    rows, inner = num_n * atom.shape[0], steps * atom.shape[2]
    warps = a.shape[1] // atom.warp_size
    first = _matrix(b, warps, home_b).reshape(len(b), warps, rows, inner)
    second = _matrix(a, warps, home_a).reshape(len(a), warps, inner, -1)
    product = np.matmul(first, second).reshape(len(a), warps, -1)
    out: Array = c + np.take(product, registers, axis=2).reshape(c.shape)
    return out


def mma_step_by_step(atom: MmaAtom, a: Array, b: Array, c: Array) -> Array:
    """:func:`mma_steps` in the order of the hardware: each step is added to the sum of those before it.

    >>> from kvlab.hardware import get_atom
    >>> atom, ones = get_atom("mfma.16x16x4.f32"), np.ones((1, 64, 5, 1, 1), np.float32)
    >>> mma_step_by_step(atom, ones, ones, np.ones((1, 64, 1, 4), np.float32)).max()
    np.float32(21.0)
    """
    for step in range(a.shape[2]):
        c = mma_tiles(atom, a[:, :, step], b[:, :, step], c)
    return c


def _matrix(fragments: Array, warps: int, home: IntArray) -> Array:
    flat = fragments.reshape(len(fragments), warps, -1)
    return np.take(flat, home, axis=2).astype(np.float32, copy=False)


@functools.cache
def _positions(atom: MmaAtom, steps: int, num_m: int, num_n: int) -> tuple[IntArray, IntArray, IntArray]:
    """Which register of a warp holds each element of the two factors, and which element of the product each register
    of C; all flat. B is the instruction's first operand.
    """
    (rows, cols, _), lanes = atom.shape, atom.warp_size

    def numbers(tiles: int, regs: int) -> IntArray:
        """Of the registers ``[lanes, steps, tiles, regs]``, as ``[steps, tiles, lanes, regs]``."""
        index = np.arange(lanes * steps * tiles * regs).reshape(lanes, steps, tiles, regs)
        return index.transpose(1, 2, 0, 3)

    home_b = atom.tile_a(numbers(num_n, atom.regs_a)).transpose(1, 2, 0, 3)  # [n, row, step, k]
    home_a = atom.tile_b(numbers(num_m, atom.regs_b)).transpose(0, 2, 1, 3)  # [step, k, m, column]
    product = np.arange(num_n * rows * num_m * cols).reshape(num_n, rows, num_m, cols)
    registers = atom.fragment_c(product.transpose(0, 2, 1, 3)).transpose(2, 0, 1, 3)  # [lanes, n, m, regs]
    return home_a.reshape(-1), home_b.reshape(-1), registers.reshape(-1)
