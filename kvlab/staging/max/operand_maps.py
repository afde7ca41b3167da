"""Elements of Q, S, P and O in each register of a gfx950 warp.

The products are issued swapped, so that a lane owns one query row: S^T = K Q^T and O^T = V^T P^T. Warps lie
``num_warps_n`` along the keys (S, P) or the depth (O); where there are more, they share out the query rows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.common.checks import require
from kvlab.staging.tile.fragments import FragmentMap

from .params import WARP_SIZE, KVBufferParams

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@functools.cache
def operand_map(params: KVBufferParams, BM: int) -> FragmentMap:
    """The operand beside K (Q, ``[BM, depth]``) or V (P, ``[BM, BN]``): registers in the order strip, k group, m.

    Its k order is that of the streaming buffer's K or V, so that lane groups meet.

    >>> v = KVBufferParams("bf16", (16, 16, 32), None, BN=128, WN=32, BK=32, num_threads=256, depth=128, kv_num_heads=8,
    ...                    transpose=False)
    >>> m = operand_map(v, BM=16)
    >>> m.shape, m.row[17, 1, :2].tolist(), m.col[17, 1].tolist()  # strip 1, lane 17: row 1, second lane group
    ((16, 128), [1, 1], [40, 41, 42, 43, 44, 45, 46, 47])
    """
    p = params
    cols = p.depth if p.transpose else p.BN
    if cols % p.BK:
        raise ValueError(f"{'depth' if p.transpose else 'BN'} {cols} must be a multiple of BK {p.BK}")
    width = min(p.input_frag_size, p.simd_width) if p.transpose else p.input_frag_size
    return _operand(p, BM, cols, _consecutive(p, width))


@functools.cache
def kv_buffer_operand_map(params: KVBufferParams, BM: int) -> FragmentMap:
    """The operand that multiplies the K (Q) or V (P) of ``KVBuffer``: registers in the order strip, k group, m.

    Q is ``[BM, num_k_tiles * BK]``: where the depth ends inside a strip, the columns past it are to be zeros. P is
    ``[BM, BN]``; its keys are in the order of :func:`v_keys`, which needs no exchange between lanes if all keys are of
    one warp.

    >>> v = KVBufferParams("bf16", (32, 32, 16), None, BN=64, WN=64, BK=32, num_threads=256, depth=128, kv_num_heads=8,
    ...                    transpose=False)
    >>> kv_buffer_operand_map(v, BM=128).col[33, 1].tolist()  # lane 33, second k group
    [20, 21, 22, 23, 28, 29, 30, 31]
    """
    p = params
    if p.transpose:
        return _operand(p, BM, p.num_k_tiles * p.BK, _consecutive(p, p.simd_width))
    require(p.BN % p.BK == 0, f"BN is {p.BN}", f"a multiple of BK {p.BK}")
    return _operand(p, BM, p.BN, v_keys(p))


@functools.cache
def v_keys(params: KVBufferParams) -> IntArray:
    """The key of a strip that each element of V's fragments holds in ``KVBuffer``: ``[lanes, k groups, elements]``.

    2-byte elements and 32x32x64: the order in which the accumulators of the scores hold the keys; 16x16x128:
    consecutive keys.

    >>> v = KVBufferParams("fp8", (32, 32, 64), None, BN=64, WN=64, BK=64, num_threads=256, depth=128, kv_num_heads=8,
    ...                    transpose=False)
    >>> v_keys(v)[32, 0, :12].tolist()
    [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]
    """
    p = params
    if p.dtype.itemsize == 1 and p.MMA_M == 16:
        return _consecutive(p, p.input_frag_size)
    lane, kg, e = np.ogrid[:WARP_SIZE, : p.num_k_mmas2, : p.input_frag_size]
    step = p.MMA_K // 2 if p.dtype.itemsize == 2 else 8
    return kg * p.MMA_K + e // 4 * step + lane // p.MMA_M * 4 + e % 4


def _consecutive(p: KVBufferParams, width: int) -> IntArray:
    """``width`` consecutive k for each lane group, part after part of the k group: ``[lanes, k groups, elements]``."""
    lane, kg, e = np.ogrid[:WARP_SIZE, : p.num_k_mmas2, : p.input_frag_size]
    part = p.MMA_K * width // p.input_frag_size
    return kg * p.MMA_K + e // width * part + lane // p.MMA_M * width + e % width


def _operand(p: KVBufferParams, BM: int, cols: int, k: IntArray) -> FragmentMap:
    """``k``: of a strip ``[lanes, k groups, elements]``."""
    warp_row, num_m = _rows_of_a_warp(p, BM)
    warp, lane, strip, kg, m, e = np.ogrid[
        : p.num_warps, :WARP_SIZE, : cols // p.BK, : p.num_k_mmas2, :num_m, : p.input_frag_size
    ]
    col = strip * p.BK + k[lane, kg, e] + 0 * m + 0 * warp
    row = warp_row[warp] + m * p.MMA_M + lane % p.MMA_M + 0 * col
    return _map((BM, cols), p, row, col)


@functools.cache
def score_map(params: KVBufferParams, BM: int) -> FragmentMap:
    """The accumulator of S = Q K^T, ``[BM, BN]``: register ``m + n * num_m`` is query tile m, key tile n of the warp.

    >>> k = KVBufferParams("bf16", (16, 16, 32), None, BN=128, WN=32, BK=32, num_threads=256, depth=128, kv_num_heads=8,
    ...                    transpose=True)
    >>> s = score_map(k, BM=16)
    >>> s.row[64 + 17, 1].tolist(), s.col[64 + 17, 1].tolist()  # warp 1, lane 17, key tile 1
    ([1, 1, 1, 1], [52, 53, 54, 55])
    """
    return _accumulator(params, BM, params.BN, params.WN)


@functools.cache
def output_map(params: KVBufferParams, BM: int) -> FragmentMap:
    """The accumulator of O = P V, ``[BM, depth]``: a warp holds its share of the depth.

    >>> v = KVBufferParams("bf16", (16, 16, 32), None, BN=128, WN=32, BK=32, num_threads=256, depth=256, kv_num_heads=8,
    ...                    transpose=False)
    >>> o = output_map(v, BM=16)
    >>> o.row[64 + 17, 1].tolist(), o.col[64 + 17, 1].tolist()  # warp 1, lane 17, the second 16 of its 64 columns
    ([1, 1, 1, 1], [84, 85, 86, 87])
    """
    return _accumulator(params, BM, params.depth, params.depth // params.num_warps_n)


def _accumulator(p: KVBufferParams, BM: int, cols: int, warp_cols: int) -> FragmentMap:
    M, N = p.MMA_M, p.MMA_N
    if warp_cols % N:
        raise ValueError(f"{warp_cols} columns of a warp must be a multiple of MMA_N {N}")
    warp_row, num_m = _rows_of_a_warp(p, BM)
    regs = M * N // WARP_SIZE
    warp, lane, n, m, e = np.ogrid[: p.num_warps, :WARP_SIZE, : warp_cols // N, :num_m, :regs]
    row = warp_row[warp] + m * M + lane % N + 0 * n + 0 * e
    within = 4 * (lane // N) + e // 4 * 4 * (WARP_SIZE // N) + e % 4
    return _map((BM, cols), p, row, p.warp_col()[warp] * warp_cols + n * N + within + 0 * row)


def _rows_of_a_warp(p: KVBufferParams, BM: int) -> tuple[IntArray, int]:
    """First query row of each warp ``[warps]``, and the query tiles of a warp."""
    p.require_whole_warp_rows()
    num_warps_m = p.num_warps // p.num_warps_n
    if BM % (num_warps_m * p.MMA_M):
        raise ValueError(f"BM is {BM}: must be a multiple of {num_warps_m * p.MMA_M}: MMA_M for each warp row")
    WM = BM // num_warps_m
    return np.arange(p.num_warps) // p.num_warps_n * WM, WM // p.MMA_M


def _map(shape: tuple[int, int], p: KVBufferParams, row: IntArray, col: IntArray) -> FragmentMap:
    """From ``[warps, lanes, ..., elements]``."""
    registers = (p.num_threads, -1, row.shape[-1])
    return FragmentMap(shape, row.reshape(registers), col.reshape(registers))
