"""Rows as tuples of one or two pieces of columns, powers of two, in Triton: loaded, accumulated, stored."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_columns(
    ptr, at, exists, first, columns, WIDTH: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr = True,
    TURNED: tl.constexpr = False,
):
    """Columns ``[first, first + WIDTH)`` of the rows at ``ptr + at``, 0 at or past ``columns`` (``WHOLE``: there are
    none) and for rows that do not exist (not ``MASKED``: all do). ``TURNED``: loaded as ``[WIDTH, rows]``, for a
    product that takes the columns as its rows.
    """
    column = first + tl.arange(0, WIDTH)
    if TURNED:
        mask = exists[None, :] if WHOLE else exists[None, :] & (column < columns)[:, None]
        return tl.trans(tl.load(ptr + at[None, :] + column[:, None], mask=mask, other=0.0))
    tile = ptr + at[:, None] + column[None, :]
    if MASKED:
        mask = exists[:, None] if WHOLE else exists[:, None] & (column < columns)[None, :]
        return tl.load(tile, mask=mask, other=0.0)
    if WHOLE:
        return tl.load(tile)
    return tl.load(tile, mask=(column < columns)[None, :], other=0.0)


@triton.jit
def load_tile(
    ptr, at, exists, COLUMNS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, MASKED: tl.constexpr = True,
    TURNED: tl.constexpr = False,
):
    """Rows in pieces of FIRST and, unless it is 0, REST columns."""
    first = load_columns(ptr, at, exists, 0, COLUMNS, FIRST, COLUMNS >= FIRST, MASKED, TURNED)
    if REST:
        return first, load_columns(ptr, at, exists, FIRST, COLUMNS, REST, COLUMNS >= FIRST + REST, MASKED, TURNED)
    else:
        return (first,)


@triton.jit
def load_parts(ptr, at, exists, D: tl.constexpr, DR: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """Columns of latents, or nope columns, and rope columns behind them of query rows, ``[BM, BD]`` and ``[BM, BR]``;
    e4m3 as bfloat16.
    """
    q = load_columns(ptr, at, exists, 0, D, BD, D == BD)
    q_rope = load_columns(ptr, at, exists, D, D + DR, BR, DR == BR)
    if q.dtype == tl.float8e4nv:
        q, q_rope = q.to(tl.bfloat16), q_rope.to(tl.bfloat16)
    return q, q_rope


@triton.jit
def zeros(BM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, EACH: tl.constexpr = 1, BLOCKS: tl.constexpr = 0):
    """The output accumulators: of each piece of V's columns, by their number in elements of EACH columns; where BLOCKS
    is -1, one more, ``[BM, 1]``, of what all columns get.
    """
    part = tl.zeros([BM, V0], tl.float32)
    o = (part, part, part, part)[:EACH]
    if V1:
        part = tl.zeros([BM, V1], tl.float32)
        o = o + (part, part, part, part)[:EACH]
    if BLOCKS < 0:
        o = o + (tl.zeros([BM, 1], tl.float32),)
    return o


@triton.jit
def rescale(o, factor):
    """Rows multiplied by ``factor``."""
    parts = o[:0]
    for i in tl.static_range(len(o)):
        parts = parts + (o[i] * factor[:, None],)
    return parts


@triton.jit
def normalise(o, factor, sees, BLOCKS: tl.constexpr = 0):
    """Rows multiplied by ``factor``, 0 where not ``sees``; where BLOCKS is -1, with what all columns get."""
    parts = o[:0]
    if BLOCKS < 0:
        columns: tl.constexpr = len(o) - 1
        for i in tl.static_range(columns):
            parts = parts + (tl.where(sees[:, None], (o[i] + o[columns]) * factor[:, None], 0.0),)
    else:
        for i in tl.static_range(len(o)):
            parts = parts + (tl.where(sees[:, None], o[i] * factor[:, None], 0.0),)
    return parts


@triton.jit
def store_columns(ptr, at, exists, first, columns, o):
    """A piece of the output rows."""
    column = first + tl.arange(0, o.shape[1])
    mask = exists[:, None] & (column < columns)[None, :]
    tl.store(ptr + at[:, None] + column[None, :], o.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_rows(ptr, at, exists, o, COLUMNS: tl.constexpr, EACH: tl.constexpr = 1):
    """The output rows; their columns are EACH times COLUMNS."""
    if EACH == 2:
        for i in tl.static_range(len(o) // 2):
            store_columns(ptr, at, exists, 2 * i * o[0].shape[1], 2 * COLUMNS, tl.interleave(o[2 * i], o[2 * i + 1]))
    elif EACH == 4:
        for i in tl.static_range(len(o) // 4):
            even, odd = tl.interleave(o[4 * i], o[4 * i + 2]), tl.interleave(o[4 * i + 1], o[4 * i + 3])
            store_columns(ptr, at, exists, 4 * i * o[0].shape[1], 4 * COLUMNS, tl.interleave(even, odd))
    else:
        for i in tl.static_range(len(o)):
            store_columns(ptr, at, exists, i * o[0].shape[1], COLUMNS, o[i])
