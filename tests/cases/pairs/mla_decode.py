"""Pairwise cases of absorbed MLA decode over a paged latent cache."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from pairs.calls import CALLS, SCORES, Call, Row, argument, random_scales, rows_of, scale
from pairs.covering import Rule, Table
from pairs.formula import Rows, Scores, attend
from pairs.operands import page_table, placed, poison, vectors
from pairs.paged_decode import FP8
from pairs.sights import MASKS, WINDOWS, sight

import kvlab.attention
from kvlab.memory import as_dtype, bfloat16

AWARE = "rope-aware"
"""Rows of e4m3 latents and a rope part of bfloat16."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "mask": (*MASKS, "bias of heads", "bool", "own values", "or"),
    "window": WINDOWS,
    "dtypes": (("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", FP8),
               ("float16", FP8), (FP8, FP8), ("bfloat16", AWARE), ("float16", AWARE), (FP8, AWARE)),
    "columns": ((128, 64), (32, 16), (80, 48), (256, 32), (160, 96)),
    "lens": ((37, 0), (130, 3), (64, 1), (2, 0, 40)),
    "heads": (1, 3, 16, 21),
    "S": (1, 2, 4),
    "page": (1, 5, 16, 64),
    "layout": ("none", "NHD", "HND"),
    "splits": (1, 2, 3),
    **SCORES,
    "scale": (0.125, 0.3),
    "mask_value": (None, -5e4),
    **CALLS,
    "arch": ("sm_90", "sm_80", "gfx950"),
}


def _emulated(arch: str, dtypes: tuple[str, str], columns: tuple[int, int]) -> bool:
    if arch == "gfx950":
        return dtypes[1] in ("float16", "bfloat16") and columns in ((128, 64), (256, 32))
    return arch == "sm_90" or dtypes[1] not in (FP8, AWARE)


DECODE = Table(
    FACTORS,
    (
        Rule(("q_scale", "dtypes"), lambda scale, dtypes: not scale or dtypes[0] == FP8),
        Rule(("k_scale", "dtypes"), lambda scale, dtypes: not scale or dtypes[1] in (FP8, AWARE)),
        Rule(("arch", "dtypes", "columns"), _emulated),
    ),
)


def call(row: Row) -> Call:
    """A case as a call."""
    c, rng = row, np.random.default_rng(row.number)
    heads, (latent, rope), S = c.heads, c.columns, c.S
    aware = c.dtypes[1] == AWARE
    q_dtype, kv_dtype = as_dtype(c.dtypes[0]), as_dtype(FP8 if aware else c.dtypes[1])
    lens = np.array(c.lens, np.int64)
    batch, columns = len(lens), -(-lens // c.page)
    pages = int(columns.sum()) + 2
    table = page_table(columns, pages, rng)
    causal = c.mask == "causal" or isinstance(c.window, int)
    seen = sight(c.mask, c.window, causal, np.full(batch, S), lens, heads, rng)
    q = placed("q", rng.standard_normal((batch, S, heads, latent + rope)).astype(q_dtype),
               unit=c.spread * vectors(q_dtype))
    order = (0, 1, 2, 3) if c.layout == "NHD" else (0, 2, 1, 3) if c.layout == "HND" else (0, 1, 2, 3)
    width = latent + rope * (2 if aware else 1)
    unit = c.spread * vectors(kv_dtype)
    rows = placed("k_cache", np.full((pages, c.page, 1, width), poison(kv_dtype), kv_dtype), unit=unit, order=order)
    content, turned = rows.array[:, :, 0, :latent], rows.array[:, :, 0, latent:]
    if aware:
        turned = turned.view(bfloat16)
        turned[...] = np.nan
    q_scale = scale("q", c.q_scale, rng, 1)
    k_scale = scale("k", c.k_scale, rng, 1, (pages, c.page, 1), order[:3])
    sinks = rng.standard_normal(heads).astype(as_dtype(c.sinks)) if c.sinks else None
    slopes = None
    if c.slopes:
        shape = (batch, heads) if c.slopes == "sequence" else (heads,)
        slopes = placed("slopes", (rng.random(shape) / 8).astype(np.float32))
    out_dtype, parts = c.dtypes[0] if q_dtype.itemsize > 1 else "bfloat16", []
    for b, n in enumerate(lens):
        first = seen.first_key(b)
        key = np.arange(first, n)
        at = table[b, key // c.page], key % c.page
        content[at] = rng.standard_normal((len(key), latent)).astype(kv_dtype)
        turned[at] = rng.standard_normal((len(key), rope)).astype(turned.dtype)
        if k_scale.tokens is not None:
            k_scale.tokens.array[at] = random_scales(rng, (len(key), 1))
        by = np.broadcast_to(k_scale.at(at), (len(key), 1))
        true_v = content[at].astype(np.float64) * by
        true_rope = turned[at].astype(np.float64) * (1 if aware else by)
        true_k = np.concatenate([true_v, true_rope], -1)
        scores = Scores(
            c.scale, seen.visible(b), c.softcap,
            None if slopes is None else np.broadcast_to(slopes.array, (batch, heads))[b].astype(np.float64),
            None if sinks is None else sinks.astype(np.float64), seen.added(b),
        )
        parts.append(attend(
            q.array[b].astype(np.float64) * q_scale.at(None), true_k[:, None], true_v[:, None], scores, keys=int(n),
            first_key=first, p_dtype=out_dtype, out_dtype=out_dtype,
            score_error=2.0**-11 if aware and out_dtype == "float16" else 2.0**-21,  # bfloat16 rounded to float16
        ))
    operands = {"q": q, "k_cache": rows, "table": placed("table", table.astype(c.ints)),
                "lens": placed("lens", lens.astype(c.ints)[:, None])}
    operands |= {f"{name}_scale": s.operand for name, s in (("q", q_scale), ("k", k_scale)) if s.operand is not None}
    operands |= {name: x for name, x in (("slopes", slopes), ("bias", seen.bias)) if x is not None}
    drop = S == 1 and c.out == "new"
    expected = Rows.stacked(parts)
    expected = expected.without(1) if drop else expected

    def view(x: Any) -> Any:
        return x.swapaxes(1, 2) if c.layout == "HND" else x

    return Call(
        row, lambda: kvlab.attention.mla_decode_paged,
        [q.array[:, 0] if drop else q.array, rows.array[:, :, 0] if c.layout == "none" else view(rows.array),
         operands["table"].array, operands["lens"].array[:, 0]],
        {"v_dim": latent, "mask": seen.mask_of_kvlab, "window": c.window, "softcap": c.softcap, "sinks": sinks,
         "alibi_slopes": None if slopes is None else slopes.array,
         "kv_layout": "NHD" if c.layout == "none" else c.layout, "num_splits": c.splits, "base2": c.base2,
         "scale": c.scale, **({} if c.mask_value is None else {"mask_value": c.mask_value}),
         "q_scale": argument(q_scale), "k_scale": argument(k_scale, view)},
        operands, expected.in_base2() if c.base2 else expected,
        ((batch, S, heads, latent), out_dtype, c.spread * 2) if c.out == "given" else None, {"arch": c.arch},
    )


MLA_DECODE = [(row, functools.partial(call, row)) for row in rows_of(DECODE)]
