"""The pairwise tables with few levels and small sizes, for lockstep: every two features of an operation meet.

What a public function hands to its emulator is what lockstep hands to both sides.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from four_bit_stores import FourBitStore
from pairs import kv_store, merge_states, mla_decode, mla_prefill, paged_decode, prefill
from pairs.calls import rows_of
from pairs.covering import Row, Table
from pairs.paged_decode import FP8

from kvlab.attention.call.backends import function_at

MASKS = ("causal", "chunked", "sliding", "padding", "bias")
SEEN: dict[str, tuple[Any, ...]] = {
    "mask": MASKS, "window": (None, 9), "heads": ((2, 1),), "page": (5,), "softcap": (0.0, 2.5),
    "sinks": ("", "float32"), "slopes": ("", "sequence"), "ints": ("int32",), "spread": (1, 4), "out": ("new",),
    "scale": (0.3,),
}
DECODE = SEEN | {
    "dtypes": (("bfloat16", "bfloat16"), ("float16", FP8), (FP8, FP8)), "lens": ((37, 0),), "S": (1, 2),
    "splits": (1, 2), "mask_value": (None,), "layout": ("NHD", "HND"),
}
LENGTHS = (((5, 37), (3, 0)), ((33, 129), (7, 70)))
TABLES: dict[str, tuple[Table, dict[str, tuple[Any, ...]], Callable[..., Any]]] = {
    "mha_decode": (
        paged_decode.DECODE, DECODE | {"D": ((16, 32), (96, 80))},
        functools.partial(paged_decode.call, function="mha_decode_paged"),
    ),
    "mha_decode_streaming": (
        paged_decode.STREAMING, DECODE | {"D": ((64, 64),)},
        functools.partial(paged_decode.call, function="mha_decode_streaming_paged"),
    ),
    "mha_prefill": (
        prefill.PREFILL,
        SEEN | {"dtypes": DECODE["dtypes"], "D": ((16, 32), (96, 80)), "lengths": LENGTHS, "most": (False,),
                "page": (1, 5)},
        prefill.call,
    ),
    "mla_decode": (
        mla_decode.DECODE,
        DECODE | {"dtypes": (("bfloat16", "bfloat16"), ("float16", FP8), (FP8, mla_decode.AWARE)), "heads": (3,),
                  "columns": ((32, 16),), "layout": ("none", "HND")},
        mla_decode.call,
    ),
    "mla_prefill": (
        mla_prefill.PREFILL,
        SEEN | {"dtypes": (("bfloat16",) * 3, ("float16", FP8, FP8), (FP8, FP8, mla_prefill.AWARE)), "heads": (1,),
                "columns": ((16, 16, 32),), "latent": (32,), "lengths": LENGTHS, "most": (False,), "page": (1, 5)},
        mla_prefill.call,
    ),
    "merge_states": (
        merge_states.MERGE,
        {"parts": (2, 17), "rows": ((1, 3),), "heads": (3,), "D": (16, 200), "dtype": ("float32", "bfloat16"),
         "out": ("",), "spread": (1,)},
        merge_states.call,
    ),
    "kv_store": (
        kv_store.STORE,
        {"form": ("NHD", "ragged", "padded"), "dtypes": (("bfloat16", "bfloat16"), ("float32", FP8)), "heads": (2,),
         "D": ((24, 24),), "page": (4,), "k_scale": ("", "number", "tensor", "own"), "rope": (0, 8), "ints": ("int32",),
         "v_scale": ("", "number", "tensor", "own"), "scale_dtype": ("float32",), "angles": ("float32",),
         "spread": (1,)},
        kv_store.store,
    ),
}
"""A table, the levels of it that are kept, and what makes a call of a row."""
FURTHER: dict[str, tuple[Row, ...]] = {
    "mha_prefill": ({"mask": "causal", "softcap": 2.5, "slopes": "sequence", "lengths": LENGTHS[1]},),
    "mla_prefill": (
        {"mask": "causal", "softcap": 2.5, "slopes": "sequence", "lengths": LENGTHS[1]},
        {"mask": "causal", "lengths": LENGTHS[1], "dtypes": ("float16", FP8, FP8), "k_scale": "token",
         "rope_scale": "token"},
    ),
}
"""Levels of further rows: features of tiles that every row sees."""


class _Caught(Exception):
    """The emulator has been called."""


def arguments_of(op: str, call: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the emulator of an operation is launched with in a call; what both sides get, and what it alone gets."""
    launch = importlib.import_module(f"kvlab.attention.{op}.emulator").launch
    found: dict[str, Any] = {}

    def caught(*args: Any, **more: Any) -> Any:
        bound = inspect.signature(launch).bind_partial(*args)
        found.update(bound.arguments | more)
        raise _Caught

    def launcher(path: str) -> Any:
        return caught if path.endswith(".emulator:launch") else function_at(path)

    with mock.patch("kvlab.attention.call.call.function_at", launcher), suppress(_Caught):
        call.check("emulator")
    for name in ("traffic", "out"):
        found.pop(name, None)
    return found, {name: found.pop(name) for name in ("arch",) if name in found}


def listed(case: dict[str, Any]) -> dict[str, Any]:
    """The first token of each sequence of a decode of MLA, over lists of the slots of its first keys."""
    key, (_, page_size, _) = np.arange(-3, 30), case["kv_cache"].shape
    slots = case["block_table"][:1, np.maximum(key, 0) // page_size] * page_size + key % page_size
    lists = np.repeat(np.where(key < 0, -1, slots), len(case["q"]), 0)
    return {"q": case["q"][:, :1], "block_table": lists, "seq_lens": None}


def small_table(op: str) -> Table:
    """The table of an operation with the levels that are kept."""
    table, kept, _ = TABLES[op]
    factors = {name: kept.get(name, levels) for name, levels in table.factors.items()}
    return Table(factors, table.rules, FURTHER.get(op, ()))


def cases(op: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(row, arguments of both sides, those of the emulator) of each row of the small table."""
    for row in rows_of(small_table(op)):
        case, emulator = arguments_of(op, TABLES[op][2](row))
        yield str(row), case, emulator
        if row.number == 0 and op == "mha_decode":  # asked for by many sequences only
            yield f"{row} longest first", case | {"config": replace(case["config"], longest_first=2)}, emulator
        if row.number == 0 and op == "mla_decode":
            yield f"{row} indices", case | listed(case), emulator
    if op == "kv_store":  # V is the roped side of latent rows
        call = next(kv_store.latent(row) for row in rows_of(kv_store.LATENT) if row.rope)
        yield f"latent {call.row}", *arguments_of(op, call)
        for kind in ("e2m1", "words", "int4", "uint4"):
            yield f"4 bits, {kind}", *arguments_of(op, FourBitStore(kind))
