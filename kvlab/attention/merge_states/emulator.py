"""Merging of partial attention: the kernel's twin in NumPy, all programs at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.tiles.masked import load, store
from kvlab.hardware.chip import add_products, current_arithmetic, divide, exp, log
from kvlab.staging import Traffic, program_ids
from kvlab.staging.tile.rows_over_warps import butterfly, in_turn

from .config import chunk_of, merge_grid, piece_of

Array = np.ndarray[Any, Any]


@np.errstate(divide="ignore", invalid="ignore")  # of a program whose rows have no key at all
def merge(
    outs: Array, lses: Array, o_array: Array, lse_array: Array, PARTS: int, BD: int, CHUNK: int, traffic: Traffic
) -> None:
    """Put BD columns of the parts of one head of one token together; parts without a key have no share in it."""
    #: setup -> lse_parts    each part's lse; +inf, as some write for no key, is -inf
    num_parts, batches, tokens, heads, D = outs.shape  #- launch
    program, head, piece = program_ids(merge_grid(batches, tokens, heads, D))  # [P]
    batch = program // tokens
    token = program % tokens
    row = batch[:, None], token[:, None], head[:, None]  #- address
    every = np.arange(PARTS)
    lse_parts = load(lses, (every, *row), mask=every < num_parts, other=-np.inf)
    lse_parts = np.where(lse_parts == np.inf, np.float32(-np.inf), lse_parts)
    #: total -> top, total    weights relative to the largest, so that nothing overflows
    top = lse_parts.max(axis=1)
    shift = np.where(top == -np.inf, np.float32(0), top)
    total = lane_sum(exp(lse_parts - shift[:, None]))
    d = piece[:, None] * BD + np.arange(BD)  # [P, BD]
    o = np.zeros((len(batch), BD), np.float32)
    lost = np.zeros((len(batch), BD), np.float32)
    for first in range(0, num_parts, CHUNK):
        #: weights -> w    of the next parts
        n = first + np.arange(CHUNK)
        lse_chunk = load(lses, (n, *row), mask=n < num_parts, other=-np.inf)
        w = np.where(lse_chunk == np.inf, np.float32(0), exp(lse_chunk - shift[:, None]))
        #: load_parts -> parts    those that count; what a part without a key left behind is not read
        has = (w > 0)[:, :, None] & (d < D)[:, None]
        at = *(axis[..., None] for axis in row), d[:, None]  #- address
        parts = load(outs, (n[:, None], *at), mask=has, other=0.0).astype(np.float32)
        traffic.move(
            "DRAM->registers", np.count_nonzero(has) * outs.itemsize + batch.size * int((n < num_parts).sum()) * 4
        )
        #: add -> o, lost    compensated: what the sum could not hold is kept for the next
        term = sum_products(parts, w[:, :, None], lanes_of(CHUNK, BD, outs.itemsize)) - lost
        new = o + term
        lost = (new - o) - term
        o = new
    #: combine -> o, lse    weighted mean; no key at all gives 0 and -inf
    o = np.where((total == 0)[:, None], np.float32(0), divide(o, total[:, None]))
    lse = np.where(total == 0, np.float32(-np.inf), top + log(total))
    #: store
    store(o_array, (*row, d), o, mask=d < D)
    store(lse_array, (batch, token, head), lse, mask=piece == 0)
    traffic.move("registers->DRAM", o_array.nbytes + lse_array.nbytes)


def lane_sum(x: Array) -> Array:
    """Sums of the rows of ``x`` ``[P, n]``, n a power of two: in each lane one after the other, then over the lanes."""
    lanes = min(x.shape[1], 32)
    return butterfly(np.add, in_turn(np.add, x.reshape(len(x), x.shape[1] // lanes, lanes).swapaxes(1, 2)))


def lanes_of(CHUNK: int, BD: int, itemsize: int) -> int:
    """Lanes of a warp that have one column's parts."""
    return min(CHUNK, 32 // min(32, BD // min(BD, 16 // itemsize)))


def sum_products(parts: Array, w: Array, lanes: int) -> Array:
    """Columns ``[P, BD]`` of the parts times their weights: on the chip in each lane one after the other, then over the
    lanes. What is lost depends on the order; in float32 it is that of NumPy, as in the interpreter.
    """
    if not current_arithmetic().exact:
        return np.asarray((parts * w).sum(axis=1))
    parts, w = (x.reshape(len(x), x.shape[1] // lanes, lanes, x.shape[2]).swapaxes(0, 1) for x in (parts, w))
    return butterfly(np.add, np.moveaxis(add_products(parts, w), 1, -1))


def launch(
    outs: Array, lses: Array, *, out: Array | None = None, lse: Array | None = None, traffic: Traffic | None = None
) -> tuple[Array, Array]:
    """Run the twin on outs ``[N, B, S, H, D]`` and lses ``[N, B, S, H]``: out ``[B, S, H, D]``, lse ``[B, S, H]``.

    The arguments are valid.
    """
    num_parts, head_dim = outs.shape[0], outs.shape[-1]
    out = np.empty(outs.shape[1:], outs.dtype) if out is None else out
    lse = np.empty(lses.shape[1:], np.float32) if lse is None else lse
    if lse.size:
        traffic = Traffic() if traffic is None else traffic
        merge(outs, lses, out, lse, _next_power_of_2(num_parts), piece_of(head_dim), chunk_of(num_parts), traffic)
    return out, lse


def partial_results(out: Array, lse: Array, splits: int) -> tuple[Array, Array]:
    """Arrays for the results of so many splits of the keys: out ``[1, B, S, H, D]`` and lse ``[1, B, S, H]`` themselves
    for one, else float32 arrays ``[splits, ..]`` of their own, NaN, to be merged.
    """
    if splits == 1:
        return out[None], lse[None]
    part, part_lse = (np.full((splits, *x.shape), np.nan, np.float32) for x in (out, lse))
    return part, part_lse


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
