"""Pairwise cases of MLA prefill: the rope part of the keys in rows of its own, or in the pages of a latent cache."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from pairs.calls import CALLS, SCORES, Call, Row, argument, random_scales, rows_of, scale
from pairs.covering import Rule, Table
from pairs.formula import Rows, Scores, attend
from pairs.mla_decode import AWARE
from pairs.operands import page_table, placed, poison, vectors
from pairs.paged_decode import FP8, SCALES
from pairs.prefill import LENGTHS
from pairs.sights import MASKS, WINDOWS, sight

import kvlab.attention
from kvlab.memory import as_dtype, bfloat16

FACTORS: dict[str, tuple[Any, ...]] = {
    "form": ("rows", "rows of a head", "pages", "NHD", "HND"),
    "held": ("all", "last", "chunk"),
    "mask": (*MASKS, "bias of heads", "bool", "own values", "or"),
    "window": WINDOWS,
    "dtypes": (("float32",) * 3, ("float16",) * 3, ("bfloat16",) * 3, ("bfloat16", FP8, "bfloat16"),
               ("float16", FP8, FP8), ("bfloat16", "bfloat16", FP8), ("bfloat16", "bfloat16", AWARE), (FP8, FP8, FP8),
               (FP8, FP8, AWARE), ("float16", FP8, AWARE)),
    "columns": ((128, 64, 144), (16, 16, 32), (96, 48, 96), (192, 32, 112), (64, 80, 208)),
    "latent": (32, 48),
    "lengths": LENGTHS,
    "heads": (1, 3, 4),
    "page": (1, 5, 16),
    **SCORES,
    "v_scale": SCORES["k_scale"],
    "rope_scale": SCORES["k_scale"],
    "scale": (None, 0.3),
    **CALLS,
    "most": (False, True),
    "arch": ("sm_90", "sm_80", "gfx950"),
}


def _rows(form: str) -> bool:
    return form.startswith("rows")


def _together(form: str, dtypes: tuple[str, str, str]) -> bool:
    """Whether such a rope part goes with such an operation: rows of a rope part of e4m3 need K of e4m3."""
    q, k, rope = dtypes
    if _rows(form):
        return not (rope == FP8 and k != FP8) and not (rope == AWARE and q != FP8)
    return True


def _emulated(arch: str, dtypes: tuple[str, str, str], columns: tuple[int, int, int]) -> bool:
    if arch == "gfx950":
        return dtypes[2] != FP8 or dtypes[1] == FP8 or columns[1] > 32
    return arch != "sm_80" or FP8 not in dtypes


PREFILL = Table(
    FACTORS,
    (
        Rule(("form", "dtypes"), _together),
        Rule(("form", "held"), lambda form, held: not _rows(form) or held == "all"),
        Rule(("form", "page"), lambda form, page: not _rows(form) or page == 1),
        Rule(("form", "latent"), lambda form, latent: not _rows(form) or latent == 32),
        *SCALES,
        Rule(("rope_scale", "dtypes"), lambda scale, dtypes: not scale or dtypes[2] == FP8),
        Rule(("arch", "dtypes", "columns"), _emulated),
    ),
)


def call(row: Row) -> Call:
    """A case as a call."""
    c, rng = row, np.random.default_rng(row.number)
    heads, (nope, rope, value) = c.heads, c.columns
    aware = c.dtypes[2] == AWARE and not _rows(c.form)
    q_dtype, kv_dtype = (as_dtype(name) for name in c.dtypes[:2])
    rope_dtype = as_dtype(("bfloat16" if _rows(c.form) else FP8) if c.dtypes[2] == AWARE else c.dtypes[2])
    queries, lens = np.array(c.lengths, np.int64).T
    begin, held = np.zeros_like(lens), lens
    if c.held == "last":  # those of the new tokens, and two before them where there are
        held = np.minimum(lens, queries + 2)
        begin = lens - held
    elif c.held == "chunk":
        begin = lens // 3
        held = (lens - begin) * 2 // 3
    batch, causal = len(lens), c.mask == "causal" or isinstance(c.window, int)
    seen = sight(c.mask, c.window, causal, queries, lens, heads, rng)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]) for x in (queries, held))
    unit = c.spread * vectors(kv_dtype)
    q = placed("q", rng.standard_normal((int(cu_q[-1]), heads, nope + rope)).astype(q_dtype),
               unit=c.spread * vectors(q_dtype))
    k, v = (placed(name, np.full((int(cu_k[-1]), heads, n), poison(kv_dtype), kv_dtype), unit=unit)
            for name, n in (("k", nope), ("v", value)))
    columns = -(-lens // c.page)
    pages = int(columns.sum()) + 2
    table = page_table(columns, pages, rng)
    latent = 0 if _rows(c.form) else c.latent
    slots = (int(cu_k[-1]), 1) if _rows(c.form) else (pages, c.page, 1)
    order = (0, 2, 1, 3) if c.form == "HND" else tuple(range(len(slots) + 1))
    width = latent + rope * (2 if aware else 1)
    cache = placed("rope", np.full((*slots, width), poison(rope_dtype), rope_dtype), order=order,
                   unit=c.spread * vectors(rope_dtype))
    turned = cache.array[..., 0, latent:]
    if aware:
        turned = turned.view(bfloat16)
        turned[...] = np.nan
    by = {name: scale(name, kind, rng, heads, (int(cu_k[-1]), heads))
          for name, kind in (("q", c.q_scale), ("k", c.k_scale), ("v", c.v_scale))}
    by["rope"] = scale("rope", c.rope_scale, rng, 1, slots, order[:-1])
    sinks = rng.standard_normal(heads).astype(as_dtype(c.sinks)) if c.sinks else None
    slopes = None
    if c.slopes:
        shape = (batch, heads) if c.slopes == "sequence" else (heads,)
        slopes = placed("slopes", (rng.random(shape) / 8).astype(np.float32))
    out_dtype = c.dtypes[0] if q_dtype.itemsize > 1 else "bfloat16"
    factor, parts = (nope + rope) ** -0.5 if c.scale is None else c.scale, []
    for b, n in enumerate(lens):
        key = np.arange(max(begin[b], seen.first_key(b)), min(begin[b] + held[b], seen.end(b)))
        at = cu_k[b] + key - begin[b]
        where: Any = at if _rows(c.form) else (table[b, key // c.page], key % c.page)
        for one in (k, v):
            one.array[at] = rng.standard_normal((len(key), *one.array.shape[1:])).astype(kv_dtype)
        turned[where] = rng.standard_normal((len(key), rope)).astype(turned.dtype)
        for its, place, of in ((by["k"], at, heads), (by["v"], at, heads), (by["rope"], where, 1)):
            if its.tokens is not None:
                its.tokens.array[place] = random_scales(rng, (len(key), of))
        true_k, true_v = (x.array[at].astype(np.float64) * np.broadcast_to(s.at(at), (len(key), heads))[..., None]
                          for x, s in ((k, by["k"]), (v, by["v"])))
        true_rope = turned[where].astype(np.float64) * np.broadcast_to(by["rope"].at(where), (len(key), 1))
        true_k = np.concatenate([true_k, np.broadcast_to(true_rope[:, None], (len(key), heads, rope))], -1)
        scores = Scores(
            factor, seen.visible(b), c.softcap,
            None if slopes is None else np.broadcast_to(slopes.array, (batch, heads))[b].astype(np.float64),
            None if sinks is None else sinks.astype(np.float64), seen.added(b),
        )
        its_q = q.array[cu_q[b] : cu_q[b + 1]].astype(np.float64)
        parts.append(attend(
            its_q * np.broadcast_to(by["q"].at(None), (heads,))[:, None], true_k, true_v, scores, keys=int(n),
            first_key=int(key[0]) if len(key) else 0, p_dtype=out_dtype, out_dtype=out_dtype,
            score_error=2.0**-11 if aware and out_dtype == "float16" else 2.0**-21,  # bfloat16 rounded to float16
        ))
    operands = {"q": q, "k": k, "v": v, "rope": cache}
    operands |= {f"{name}_scale": s.operand for name, s in by.items() if s.operand is not None}
    operands |= {name: x for name, x in (("slopes", slopes), ("bias", seen.bias)) if x is not None}
    expected = Rows.joined(parts)

    def view(x: Any) -> Any:
        return x.swapaxes(1, 2) if c.form == "HND" else x

    def starts(values: Any) -> Any:
        return placed("lens", values.astype(c.ints)).array

    more: dict[str, Any] = {"max_seqlen_q": int(queries.max()) + 3} if c.most else {}
    by_rope = argument(by["rope"], view)
    if _rows(c.form):
        arrays = [q.array, k.array, v.array, cache.array if c.form == "rows of a head" else cache.array[:, 0],
                  starts(cu_q), starts(cu_k)]
    else:
        operands["table"] = placed("table", table.astype(c.ints))
        arrays = [q.array, k.array, v.array, cache.array[:, :, 0] if c.form == "pages" else view(cache.array),
                  operands["table"].array, starts(lens), starts(cu_q), starts(cu_k)]
        more |= {"latent_dim": latent, "kv_layout": "HND" if c.form == "HND" else "NHD"}
        if c.held == "chunk":
            more["k_starts"] = starts(begin)
    return Call(
        row, lambda: getattr(kvlab.attention, "mla_prefill_ragged" if _rows(c.form) else "mla_prefill_paged"), arrays,
        {"mask": seen.mask_of_kvlab, "causal": causal, "window": c.window, "softcap": c.softcap, "sinks": sinks,
         "alibi_slopes": None if slopes is None else slopes.array, "base2": c.base2, "scale": c.scale, **more,
         **{f"{name}_scale": argument(by[name]) for name in "qkv"}, "rope_scale": by_rope},
        operands, expected.in_base2() if c.base2 else expected,
        ((int(cu_q[-1]), heads, value), out_dtype, c.spread * 2) if c.out == "given" else None, {"arch": c.arch},
    )


MLA_PREFILL = [(row, functools.partial(call, row)) for row in rows_of(PREFILL)]
