"""Merging of partial attention as mathematics, float64."""

from __future__ import annotations

from typing import Any

import numpy as np


def reference(
    outs: np.ndarray[Any, Any], lses: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The attention over the union of the parts' keys, from each part's output and lse.

    outs ``[N, B, S, H, D]``, lses ``[N, B, S, H]`` (natural log; -inf or +inf: the part saw no key, its output is not
    read). Returns out ``[B, S, H, D]`` and lse ``[B, S, H]``, float64; no key in any part gives 0 and -inf.
    """
    lse = np.where(np.isposinf(lses), -np.inf, lses.astype(np.float64))
    top = lse.max(axis=0, initial=-np.inf)
    w = np.exp(lse - np.where(np.isneginf(top), 0, top))
    total = w.sum(axis=0)
    seen = np.where(w[..., None] > 0, outs.astype(np.float64), 0)
    some = np.where(total == 0, 1, total)
    out = (w[..., None] * seen).sum(axis=0) / some[..., None]
    return out, np.where(total == 0, -np.inf, top + np.log(some))
