"""Pairwise cases of a decode over pages: MHA decode, and its streaming form."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from pairs.calls import CALLS, SCORES, Call, Row, argument, random_scales, rows_of, scale
from pairs.covering import Rule, Table
from pairs.formula import Rows, Scores, attend
from pairs.operands import page_table, placed, poison, vectors
from pairs.sights import MASKS, WINDOWS, sight

import kvlab.attention
from kvlab.memory import as_dtype

FP8 = "float8_e4m3fn"

FACTORS: dict[str, tuple[Any, ...]] = {
    "mask": (*MASKS, "bias of heads", "bool"),
    "window": WINDOWS,
    "dtypes": (("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", FP8),
               ("float16", FP8), (FP8, FP8)),
    "D": ((64, 64), (16, 32), (80, 48), (96, 128), (128, 128), (320, 64), (112, 176)),
    "lens": ((37, 0), (130, 3), (64, 1), (2, 0, 40)),
    "heads": ((3, 1), (2, 2), (6, 2), (9, 1)),
    "S": (1, 2, 4),
    "page": (1, 5, 16, 64),
    "layout": ("NHD", "HND"),
    "splits": (1, 2, 3),
    **SCORES,
    "v_scale": SCORES["k_scale"],
    "scale": (None, 0.3),
    "mask_value": (None, -5e4),
    **CALLS,
    "arch": ("sm_90", "sm_80", "gfx950"),
}


def _emulated(arch: str, dtypes: tuple[str, str], D: tuple[int, int]) -> bool:
    fp8 = dtypes[1] == FP8
    if arch == "gfx950":
        return D[0] == D[1] and D[0] in ((128, 256, 512) if fp8 else (64, 128, 256, 512))
    return arch != "sm_80" or not fp8


SCALES = (
    Rule(("q_scale", "dtypes"), lambda scale, dtypes: not scale or dtypes[0] == FP8),
    Rule(("k_scale", "dtypes"), lambda scale, dtypes: not scale or dtypes[1] == FP8),
    Rule(("v_scale", "dtypes"), lambda scale, dtypes: not scale or dtypes[1] == FP8),
)
DECODE = Table(
    FACTORS, (*SCALES, Rule(("arch", "dtypes", "D"), _emulated)),
    besides=(  # the second piece of K ends past D, where the first of V would not
        {"D": (112, 48), "lens": (130, 3), "heads": (6, 2), "page": 16, "splits": 2},
        {"D": (48, 112), "lens": (130, 3), "heads": (2, 2), "page": 5, "layout": "HND"},
    ),
)
STREAMING = Table(
    FACTORS | {"mask": (*MASKS, "own values", "or"), "D": ((64, 64), (128, 128)), "arch": ("gfx950",)}, SCALES
)


def cases(table: Table, function: str) -> list[Any]:
    """(row, what builds its call), of ``function`` of kvlab.attention."""
    return [(row, functools.partial(call, row, function)) for row in rows_of(table)]


def call(row: Row, function: str) -> Call:
    """A case as a call."""
    c, rng = row, np.random.default_rng(row.number)
    (q_heads, kv_heads), (D, DV), S = c.heads, c.D, c.S
    q_dtype, kv_dtype = (as_dtype(name) for name in c.dtypes)
    lens = np.array(c.lens, np.int64)
    batch, columns = len(lens), -(-lens // c.page)
    pages = int(columns.sum()) + 2
    table = page_table(columns, pages, rng)
    causal = c.mask == "causal" or isinstance(c.window, int)
    seen = sight(c.mask, c.window, causal, np.full(batch, S), lens, q_heads, rng)
    q = placed("q", rng.standard_normal((batch, S, q_heads, D)).astype(q_dtype), unit=c.spread * vectors(q_dtype))
    order, unit = ((0, 1, 2, 3) if c.layout == "NHD" else (0, 2, 1, 3)), c.spread * vectors(kv_dtype)
    slots = pages, c.page, kv_heads
    k, v = (placed(name, np.full((*slots, n), poison(kv_dtype), kv_dtype), unit=unit, order=order)
            for name, n in (("k", D), ("v", DV)))
    by = {name: scale(name, kind, rng, kv_heads, slots, order[:3])
          for name, kind in (("q", c.q_scale), ("k", c.k_scale), ("v", c.v_scale))}
    sinks = rng.standard_normal(q_heads).astype(as_dtype(c.sinks)) if c.sinks else None
    slopes = None
    if c.slopes:
        shape = (batch, q_heads) if c.slopes == "sequence" else (q_heads,)
        slopes = placed("slopes", (rng.random(shape) / 8).astype(np.float32))
    out_dtype = c.dtypes[0] if q_dtype.itemsize > 1 else "bfloat16"
    p_dtype = "float16" if kv_dtype.itemsize == 1 and function == "mha_decode_paged" else out_dtype
    factor, parts = D**-0.5 if c.scale is None else c.scale, []
    by_head = np.broadcast_to(by["q"].at(None), kv_heads).repeat(q_heads // kv_heads)
    for b, n in enumerate(lens):
        first = seen.first_key(b)
        key = np.arange(first, n)
        at = table[b, key // c.page], key % c.page
        for one, its in ((k, by["k"]), (v, by["v"])):
            one.array[at] = rng.standard_normal((len(key), *one.array.shape[2:])).astype(kv_dtype)
            if its.tokens is not None:
                its.tokens.array[at] = random_scales(rng, (len(key), kv_heads))
        true_k, true_v = (x.array[at].astype(np.float64) * np.broadcast_to(s.at(at), (len(key), kv_heads))[..., None]
                          for x, s in ((k, by["k"]), (v, by["v"])))
        scores = Scores(
            factor, seen.visible(b), c.softcap,
            None if slopes is None else np.broadcast_to(slopes.array, (batch, q_heads))[b].astype(np.float64),
            None if sinks is None else sinks.astype(np.float64), seen.added(b),
        )
        parts.append(attend(
            q.array[b].astype(np.float64) * by_head[:, None], true_k, true_v, scores, keys=int(n), first_key=first,
            p_dtype=p_dtype, out_dtype=out_dtype,
        ))
    operands = {"q": q, "k": k, "v": v, "table": placed("table", table.astype(c.ints)),
                "lens": placed("lens", lens.astype(c.ints)[:, None])}
    operands |= {f"{name}_scale": s.operand for name, s in by.items() if s.operand is not None}
    operands |= {name: x for name, x in (("slopes", slopes), ("bias", seen.bias)) if x is not None}
    drop = S == 1 and c.out == "new"
    expected = Rows.stacked(parts)
    expected = expected.without(1) if drop else expected

    def view(x: Any) -> Any:
        return x if c.layout == "NHD" else x.swapaxes(1, 2)

    return Call(
        row, lambda: getattr(kvlab.attention, function),
        [q.array[:, 0] if drop else q.array, view(k.array), view(v.array), operands["table"].array,
         operands["lens"].array[:, 0]],
        {"mask": seen.mask_of_kvlab, "window": c.window, "softcap": c.softcap, "sinks": sinks,
         "alibi_slopes": None if slopes is None else slopes.array, "kv_layout": c.layout, "num_splits": c.splits,
         "base2": c.base2, "scale": c.scale, **({} if c.mask_value is None else {"mask_value": c.mask_value}),
         **{f"{name}_scale": argument(s, view) for name, s in by.items()}},
        operands, expected.in_base2() if c.base2 else expected,
        ((batch, S, q_heads, DV), out_dtype, c.spread * 2) if c.out == "given" else None,
        {"arch": c.arch},
    )


MANY_TILES = Row(len(DECODE.rows()), DECODE.rows()[0] | {
    "mask": "causal", "window": None, "dtypes": ("bfloat16", FP8), "D": (112, 176), "lens": (290, 3), "splits": 1,
    "arch": "sm_90", "q_scale": "",
})
"""Three features at once: pieces of columns, pairs of e4m3, and tiles after one another."""

MHA_DECODE = [*cases(DECODE, "mha_decode_paged"), (MANY_TILES, functools.partial(call, MANY_TILES, "mha_decode_paged"))]
MHA_DECODE_STREAMING = cases(STREAMING, "mha_decode_streaming_paged")
