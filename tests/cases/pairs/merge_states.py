"""Pairwise cases of the merge of partial attention."""

from __future__ import annotations

import functools

import numpy as np
from pairs.calls import Call, Row, rows_of
from pairs.covering import Table
from pairs.formula import LEAST, UNIT, Rows
from pairs.operands import placed, vectors

import kvlab.attention
from kvlab.memory import as_dtype

EMPTY = {"none": (), "one sign": (-np.inf,), "both signs": (-np.inf, np.inf)}

MERGE = Table(
    {
        "parts": (1, 2, 5, 16, 17, 40),
        "rows": ((7,), (1, 3), (2, 2), (3, 1)),
        "heads": (1, 3, 4),
        "D": (1, 16, 80, 128, 200),
        "dtype": ("float32", "float16", "bfloat16"),
        "out": ("", "float32", "float16", "bfloat16"),
        "empty": tuple(EMPTY),
        "spread": (1, 4),
        "order": (0, 1),
    }
)
"""rows: [T] or [B, S]; order: of the axes of outs and lses in memory."""


def call(row: Row) -> Call:
    """A case as a call."""
    c, rng = row, np.random.default_rng(row.number)
    dtype, shape = as_dtype(c.dtype), (c.parts, *c.rows, c.heads)
    values, lses = rng.standard_normal((*shape, c.D)).astype(dtype), rng.normal(0, 3, shape).astype(np.float32)
    if c.empty != "none":
        gone = rng.random(shape) < 0.4
        gone[:, 0, ..., 0] = True  # rows that no part has
        lses[gone] = rng.choice(EMPTY[c.empty], int(gone.sum()))
        values[gone] = np.nan  # what an empty part left behind
    axes = tuple(range(len(shape)))
    order = axes if not c.order else (*axes[1:], 0)
    outs = placed("outs", values, unit=c.spread * vectors(dtype), order=(*order, len(shape)))
    given = placed("lses", lses, order=order)
    lse, true = np.where(np.isfinite(lses), lses, -np.inf).astype(np.float64), values.astype(np.float64)
    top = lse.max(0)
    weight = np.exp(lse - np.where(np.isneginf(top), 0, top))
    total = weight.sum(0)
    share = weight / np.where(total == 0, 1, total)
    true = np.where(share[..., None] == 0, 0, true)
    out, size = (share[..., None] * true).sum(0), (share[..., None] * np.abs(true)).sum(0)
    merged = np.where(total == 0, -np.inf, top + np.log(np.where(total == 0, 1, total)))
    # float32: differences of lse, which exp turns into relative errors, and two roundings of a weighted term
    reach = np.where(np.isfinite(lse), np.abs(lse), 0).max(0)
    kind = c.out or c.dtype
    off = 2.0**-22 * (2 * reach + 4)
    slack = off[..., None] * size + UNIT[kind] * np.abs(out) + LEAST[kind] + 1e-9
    expected = Rows(out, merged, slack, off + 2.0**-22 * 4, 0 * out, 0 * off)
    return Call(
        row, lambda: kvlab.attention.merge_states, [outs.array, given.array], {}, {"outs": outs, "lses": given},
        expected, ((*shape[1:], c.D), c.out, c.spread * 2) if c.out else None,
    )


MERGE_STATES = [(row, functools.partial(call, row)) for row in rows_of(MERGE)]
