"""Checks of q, k, v and out: dtypes that go together, heads and depths that fit.

``check_operands(q, kv)`` for the inputs (``check_dtypes`` for q and K alone) and ``check_result(out, ...)`` for a
caller's out; strides and what shares memory are in :mod:`kvlab.attention.call.checks`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.call.checks import DTYPES, check_strides, check_writeable, known_dtype, require
from kvlab.attention.features.intervals import UNLIMITED
from kvlab.attention.tiles.pieces import MAX_DEPTH
from kvlab.common.arrays import dtype_of
from kvlab.memory import bfloat16, float8_e4m3fn, float16


def check_dtypes(q: Any, k_name: str, k: Any) -> tuple[Any, Any]:
    """The dtypes of q and K. ValueError unless q is bfloat16, float16 or float32 and K the same, or q is bfloat16,
    float16 or e4m3 and K is e4m3.
    """
    of_q, of_k = known_dtype(q, "q"), known_dtype(k, k_name)
    known = of_q in (*DTYPES, float8_e4m3fn)
    require(known, f"q has dtype {q.dtype}", "bfloat16, float16, float32 or float8_e4m3fn")
    narrow = of_q in (bfloat16, float16)
    accepted = f"that of q, {q.dtype}" + (", or float8_e4m3fn" if narrow else "")
    require(of_k == of_q or (of_k == float8_e4m3fn and narrow), f"{k_name} has dtype {k.dtype}", accepted)
    return of_q, of_k


def check_operands(q: Any, kv: dict[str, Any]) -> None:
    """ValueError unless q ``[.., Hq, D]`` fits K ``[.., Hkv, D]`` and V ``[.., Hkv, Dv]``, in this order in ``kv``.

    q is bfloat16, float16 or float32 and K and V the same, or q is bfloat16, float16 or e4m3 and K and V are e4m3. D
    and Dv are multiples of 8 from 16 to 576 (of 16 with e4m3).
    """
    (k_name, k), (v_name, v) = kv.items()
    _, of_k = check_dtypes(q, k_name, k)
    require(known_dtype(v, v_name) == of_k, f"{v_name} has dtype {v.dtype}", f"that of {k_name}, {k.dtype}")
    (q_heads, D), shape = q.shape[-2:], tuple(int(n) for n in k.shape)
    require(shape[-1] == D, f"{k_name} has head dimension {shape[-1]}", f"that of q, {D}")
    require(
        tuple(v.shape[:-1]) == shape[:-1],
        f"{v_name} has shape {tuple(v.shape)}",
        f"that of {k_name}, {shape}, but for the last axis",
    )
    require(shape[-3] <= UNLIMITED, f"{k_name} has {shape[-3]} rows", f"at most {UNLIMITED}, as keys have 32 bits")
    kv_heads, unit = shape[-2], 16 if of_k == float8_e4m3fn else 8
    fits = kv_heads > 0 and q_heads > 0 and q_heads % kv_heads == 0
    require(fits, f"q has {q_heads} heads", f"a multiple of the {kv_heads} heads of {k_name}")
    for what, depth in (("head dimension", D), (f"head dimension of {v_name}", int(v.shape[-1]))):
        good = 16 <= depth <= MAX_DEPTH and depth % unit == 0
        require(good, f"{what} {depth}", f"a multiple of {unit} from 16 to {MAX_DEPTH}")


def result_dtype(q: Any) -> np.dtype[Any]:
    """The dtype of the output of a call without ``out``: that of q, bfloat16 for e4m3."""
    dtype = dtype_of(q, "q")
    return bfloat16 if dtype == float8_e4m3fn else dtype


def check_result(out: Any, shape: tuple[int, ...], q: Any) -> None:
    """ValueError unless ``out`` has ``shape`` and q's dtype (bfloat16, float16 or float32 for q of e4m3)."""
    require(tuple(out.shape) == shape, f"out has shape {tuple(out.shape)}", f"{shape}")
    dtype = dtype_of(q, "q")
    if dtype == float8_e4m3fn:
        require(known_dtype(out, "out") in DTYPES, f"out has dtype {out.dtype}", "bfloat16, float16 or float32")
    else:
        require(known_dtype(out, "out") == dtype, f"out has dtype {out.dtype}", f"that of q, {q.dtype}")
    check_strides("out", out)
    check_writeable("out", out)
