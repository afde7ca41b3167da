"""Pairwise cases of prefill: dense, ragged and paged keys."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from pairs.calls import CALLS, SCORES, Call, Row, argument, random_scales, rows_of, scale
from pairs.covering import Rule, Table
from pairs.formula import Rows, Scores, attend
from pairs.operands import page_table, placed, poison, vectors
from pairs.paged_decode import FP8, SCALES
from pairs.sights import MASKS, WINDOWS, sight

import kvlab.attention
from kvlab.memory import as_dtype

LENGTHS = (((5, 37), (3, 0)), ((20, 20), (70, 70)), ((1, 9), (33, 129)), ((17, 90), (0, 5), (40, 64)))
"""(queries, keys) of each sequence; dense keys are all of the last one's sizes."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "form": ("dense", "ragged", "NHD", "HND"),
    "mask": (*MASKS, "bias of heads", "bool", "own values", "or"),
    "window": WINDOWS,
    "dtypes": (("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", FP8),
               ("float16", FP8), (FP8, FP8)),
    "D": ((64, 64), (16, 32), (80, 48), (96, 128), (192, 112), (320, 48)),
    "lengths": LENGTHS,
    "heads": ((3, 1), (2, 2), (6, 2), (8, 1)),
    "page": (1, 5, 16),
    **SCORES,
    "v_scale": SCORES["k_scale"],
    "scale": (None, 0.3),
    **CALLS,
    "most": (False, True),
    "arch": ("sm_90", "sm_80", "gfx950"),
}

PREFILL = Table(
    FACTORS,
    (
        *SCALES,
        Rule(("arch", "dtypes"), lambda arch, dtypes: arch != "sm_80" or dtypes[1] != FP8),
        Rule(("form", "page"), lambda form, page: form in ("NHD", "HND") or page == 1),
        Rule(("form", "most"), lambda form, most: form != "dense" or not most),
        Rule(("form", "ints"), lambda form, ints: form != "dense" or ints == "int32"),
    ),
    besides=(
        *(  # two pieces of K and of V in tiles of pages that every row sees
            {"form": form, "dtypes": (d, d), "D": D, "lengths": ((1, 9), (33, 129)), "heads": (6, 2), "page": page}
            for form, page, d, D in (("NHD", 16, "float32", (192, 112)), ("HND", 5, "bfloat16", (96, 80)))
        ),
        {"form": "ragged", "dtypes": ("float16", "float16"), "lengths": ((230, 230), (70, 90))},  # more rows than keys
        {"form": "ragged", "D": (96, 128), "lengths": ((1, 9), (33, 129)), "slopes": "head"},  # fewer, all seen, ALiBi
    ),
)


def call(row: Row) -> Call:
    """A case as a call."""
    c, rng = row, np.random.default_rng(row.number)
    (q_heads, kv_heads), (D, DV) = c.heads, c.D
    q_dtype, kv_dtype = (as_dtype(name) for name in c.dtypes)
    queries, lens = np.array(c.lengths, np.int64).T
    if c.form == "dense":
        queries, lens = np.full_like(queries, queries[-1]), np.full_like(lens, lens[-1])
    batch, paged = len(lens), c.form in ("NHD", "HND")
    causal = c.mask == "causal" or isinstance(c.window, int)
    seen = sight(c.mask, c.window, causal, queries, lens, q_heads, rng)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]) for x in (queries, lens))
    columns = -(-lens // c.page)
    pages = int(columns.sum()) + 2
    table = page_table(columns, pages, rng)
    rows_q = (batch, int(queries[0])) if c.form == "dense" else (int(cu_q[-1]),)
    slots = (batch, int(lens[0])) if c.form == "dense" else (pages, c.page) if paged else (int(cu_k[-1]),)
    slots = *slots, kv_heads
    order = (0, 2, 1, 3) if c.form == "HND" else tuple(range(len(slots) + 1))
    unit = c.spread * vectors(kv_dtype)
    q = placed("q", rng.standard_normal((*rows_q, q_heads, D)).astype(q_dtype), unit=c.spread * vectors(q_dtype))
    k, v = (placed(name, np.full((*slots, n), poison(kv_dtype), kv_dtype), unit=unit, order=order)
            for name, n in (("k", D), ("v", DV)))
    by = {name: scale(name, kind, rng, kv_heads, slots, order[:-1])
          for name, kind in (("q", c.q_scale), ("k", c.k_scale), ("v", c.v_scale))}
    sinks = rng.standard_normal(q_heads).astype(as_dtype(c.sinks)) if c.sinks else None
    slopes = None
    if c.slopes:
        shape = (batch, q_heads) if c.slopes == "sequence" else (q_heads,)
        slopes = placed("slopes", (rng.random(shape) / 8).astype(np.float32))
    out_dtype = c.dtypes[0] if q_dtype.itemsize > 1 else "bfloat16"
    p_dtype = FP8 if q_dtype.itemsize == 1 and c.v_scale != "token" else out_dtype
    factor, parts = D**-0.5 if c.scale is None else c.scale, []
    by_head = np.broadcast_to(by["q"].at(None), kv_heads).repeat(q_heads // kv_heads)
    for b, n in enumerate(lens):
        first, end = seen.first_key(b), seen.end(b)
        key = np.arange(first, max(first, end))
        at: Any = (b, key) if c.form == "dense" else cu_k[b] + key
        if paged:
            at = table[b, key // c.page], key % c.page
        for one, its in ((k, by["k"]), (v, by["v"])):
            one.array[at] = rng.standard_normal((len(key), *one.array.shape[-2:])).astype(kv_dtype)
            if its.tokens is not None:
                its.tokens.array[at] = random_scales(rng, (len(key), kv_heads))
        true_k, true_v = (x.array[at].astype(np.float64) * np.broadcast_to(s.at(at), (len(key), kv_heads))[..., None]
                          for x, s in ((k, by["k"]), (v, by["v"])))
        scores = Scores(
            factor, seen.visible(b), c.softcap,
            None if slopes is None else np.broadcast_to(slopes.array, (batch, q_heads))[b].astype(np.float64),
            None if sinks is None else sinks.astype(np.float64), seen.added(b),
        )
        its_q = q.array[b] if c.form == "dense" else q.array[cu_q[b] : cu_q[b + 1]]
        parts.append(attend(
            its_q.astype(np.float64) * by_head[:, None], true_k, true_v, scores, keys=int(n), first_key=first,
            p_dtype=p_dtype, out_dtype=out_dtype,
        ))
    operands = {"q": q, "k": k, "v": v}
    operands |= {f"{name}_scale": s.operand for name, s in by.items() if s.operand is not None}
    operands |= {name: x for name, x in (("slopes", slopes), ("bias", seen.bias)) if x is not None}
    expected = Rows.stacked(parts) if c.form == "dense" else Rows.joined(parts)

    def view(x: Any) -> Any:
        return x.swapaxes(1, 2) if c.form == "HND" else x

    def starts(name: str, values: Any) -> Any:
        return placed(name, values.astype(c.ints)).array

    arrays = [q.array, view(k.array), view(v.array)]
    more: dict[str, Any] = {"max_seqlen_q": int(queries.max()) + 3} if c.most else {}
    if c.form == "ragged":
        more |= {"cu_seqlens_q": starts("lens", cu_q), "cu_seqlens_k": starts("lens", cu_k)}
    elif paged:
        operands["table"] = placed("table", table.astype(c.ints))
        arrays += [operands["table"].array, starts("lens", lens), starts("lens", cu_q)]
        more["kv_layout"] = c.form
    return Call(
        row, lambda: getattr(kvlab.attention, "mha_prefill_paged" if paged else "mha_prefill"), arrays,
        {"mask": seen.mask_of_kvlab, "causal": causal, "window": c.window, "softcap": c.softcap, "sinks": sinks,
         "alibi_slopes": None if slopes is None else slopes.array, "base2": c.base2, "scale": c.scale, **more,
         **{f"{name}_scale": argument(s, view) for name, s in by.items()}},
        operands, expected.in_base2() if c.base2 else expected,
        ((*rows_q, q_heads, DV), out_dtype, c.spread * 2) if c.out == "given" else None, {"arch": c.arch},
        e4m3=c.dtypes == (FP8, FP8),
    )


MHA_PREFILL = [(row, functools.partial(call, row)) for row in rows_of(PREFILL)]
