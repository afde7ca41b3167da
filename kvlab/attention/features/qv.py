"""qv: a second query, of V, as absorbed MLA over a cache whose rope and latent columns lie apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.common.arrays import add_axis, dtype_of
from kvlab.common.checks import require
from kvlab.staging import Fragments

Array = np.ndarray[Any, Any]
DOCUMENTATION = (
    "None, or a second query ``[.., Hq, Dv]`` of V, in q's dtype, as flash-attention's: scores are ``scale (Q "
    "K^T + Qv V^T)``, the scale ``1 / sqrt(D + Dv)`` by default. Dv of 256 to 512, D + Dv of up to 576, q of 16 bits "
    "or more beside K and V of its dtype or of e4m3, which have their scales in both products. The "
    "call goes over a schedule, by the portable kernel; a plan is one with ``head_dim=D + Dv``"
)
FEWEST, MOST, MOST_TOGETHER = 256, 512, 576
"""Columns of V, and of K and V together: a row of both is one of MLA's."""


def check_qv(qv: Any, q: Any, v: Any) -> None:
    """ValueError unless ``qv`` is None or a query of V ``[.., Hkv, Dv]`` beside q ``[.., Hq, D]``."""
    if qv is None:
        return
    shape, expected = tuple(map(int, qv.shape)), (*map(int, q.shape[:-1]), int(v.shape[-1]))
    require(shape == expected, f"qv has shape {shape}", f"{expected}, that of q with V's columns")
    require(qv.dtype == q.dtype, f"qv has dtype {qv.dtype}", f"that of q, {q.dtype}")
    four = dtype_of(v, "v_cache") == np.uint8
    require(not four, f"qv beside a v_cache of {v.dtype}", "None; 4 bits are not read as K and as V")
    require(dtype_of(q, "q").itemsize > 1, f"qv beside q of {q.dtype}", "None, or of 16 bits: q_scale is of q alone")
    D, DV = int(q.shape[-1]), int(v.shape[-1])
    fits = FEWEST <= DV <= MOST and D + DV <= MOST_TOGETHER
    accepted = f"{FEWEST} to {MOST} of V, {MOST_TOGETHER} together"
    require(fits, f"qv beside head dimensions {D} of K and {DV} of V", accepted)


def check_emulated_qv(qv: Any, arch: str) -> None:
    """ValueError for a machine without models of a tile that is read as K and as V of several heads."""
    require(qv is None or arch.startswith("sm_"), f"qv on {arch}", "None, or on sm_80 or sm_90")


def qv_of_rows(qv: Any, q: Any) -> Any:
    """``qv``, which ``check_qv`` lets pass, as ``[B, S, Hq, Dv]``, or ``[1, total, ..]``; None of None."""
    return qv if qv is None or qv.ndim == 4 else add_axis(qv, 0 if q.ndim == 3 else 1)


def qv_strides(qv: Any) -> tuple[int | None, int, int]:
    """Elements from a sequence to the next, from token to token and from head to head of a torch tensor ``[B, S, ..]``,
    ``[1, total, ..]``.
    """
    if qv is None:
        return None, 0, 0
    batch, token, head = qv.stride()[:3]
    return 0 if qv.shape[0] == 1 else batch, token, head


def query_values_exactly(qv: Any, v: Array, sequence: int, rows: slice | None) -> Any:
    """Qv V^T ``[Hq, S, n]`` in float64 of the queries ``rows`` of all, or (None) of a sequence; 0 without ``qv``.

    v : ``[n, Hq, Dv]``.
    """
    if qv is None:
        return 0.0
    own = qv[sequence] if rows is None else qv[0, rows]
    return np.einsum("ihd,nhd->hin", own.astype(np.float64), v)


def add_values_scores(
    s: Fragments, second: Fragments, unit: Array, second_unit: Array, by_key: Array, by_value: Array
) -> Fragments:
    """Products of Q and K and ``second`` ones of Qv and V as one sum: rows times the units ``[P, BM]`` of their
    queries, columns times the scales ``[P, BN]`` or ``[P, 1]`` of their keys and values.
    """
    by_key, by_value = (np.broadcast_to(by, (len(unit), s.shape[1])) for by in (by_key, by_value))  #- layout
    return s.with_values(
        s.values * s.by_row(unit) * s.by_column(by_key)
        + second.values * s.by_row(second_unit) * s.by_column(by_value)
    )


def add_values_scores_kernel(s, second, unit, second_unit, by_key, by_value):
    """S ``[BM, BN]`` as of ``add_values_scores``; units ``[BM]``, scales ``[BN]`` or one number."""
    return s * unit[:, None] * by_key + second * second_unit[:, None] * by_value
