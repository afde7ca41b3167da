"""Which element of Q, S, P and O each register of a gfx950 warp holds (spec/kv_cache.md 5.9, 7.2, 7.6).

The products are issued swapped, so that a lane owns one query row: S^T = K Q^T and O^T = V^T P^T. Warps stand
``num_warps_n`` along the keys (S, P) or the depth (O); where there are more, they share out the query rows.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .fragments import FragmentMap
from .params import WARP_SIZE, KVBufferParams

__all__ = ["operand_map", "output_map", "score_map"]

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@functools.cache
def operand_map(params: KVBufferParams, BM: int) -> FragmentMap:
    """The operand that meets K (Q, ``[BM, depth]``) or V (P, ``[BM, BN]``): registers in the order strip, k group, m.

    Its k order is that of the streaming buffer's K or V, so that lane groups meet.

    >>> v = KVBufferParams("bf16", (16, 16, 32), None, BN=128, WN=32, BK=32, num_threads=256, depth=128, kv_num_heads=8,
    ...                    transpose=False)
    >>> m = operand_map(v, BM=16)
    >>> m.shape, m.row[17, 1, :2].tolist(), m.col[17, 1].tolist()  # strip 1, lane 17: row 1, second lane group
    ((16, 128), [1, 1], [40, 41, 42, 43, 44, 45, 46, 47])
    """
    p, frag, M = params, params.input_frag_size, params.MMA_M
    cols = p.depth if p.transpose else p.BN
    if cols % p.BK:
        raise ValueError(f"{'depth' if p.transpose else 'BN'} {cols} must be a multiple of BK {p.BK}")
    warp_row, num_m = _rows_of_a_warp(p, BM)
    warp, lane, kg, m, e = np.ogrid[: p.num_warps, :WARP_SIZE, : cols // p.MMA_K, :num_m, :frag]
    width = min(frag, p.simd_width) if p.transpose else frag
    row = warp_row[warp] + m * M + lane % M + 0 * kg + 0 * e
    col = kg * p.MMA_K + e // width * (p.MMA_K * width // frag) + lane // M * width + e % width + 0 * row
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
    """The accumulator of O = P V, ``[BM, depth]``: a warp holds its share of the depth."""
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
        raise ValueError(f"BM {BM} must be a multiple of {num_warps_m * p.MMA_M}: MMA_M for each warp row")
    WM = BM // num_warps_m
    return np.arange(p.num_warps) // p.num_warps_n * WM, WM // p.MMA_M


def _map(shape: tuple[int, int], p: KVBufferParams, row: IntArray, col: IntArray) -> FragmentMap:
    """From ``[warps, lanes, outer, inner, elements]``."""
    registers = (p.num_threads, -1, row.shape[-1])
    return FragmentMap(shape, row.reshape(registers), col.reshape(registers))
