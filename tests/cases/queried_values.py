"""Queries of V over caches whose V is the last columns of K; caches of e4m3 with the same values in q's dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
from prefill_cases import Inputs

from kvlab.memory import float8_e4m3fn


def queried(x: Inputs, D: int, device: str | None = None) -> tuple[tuple[Any, ...], Any]:
    """(arrays with K and V apart, qv) of a case whose V is then the columns of K behind ``D``; torch tensors on
    ``device`` if given.
    """
    x.v = x.k[..., D:]
    _, (q, k, _, *rest), _ = x.arguments(device)
    first = q[..., :D].contiguous() if device else np.ascontiguousarray(q[..., :D])
    return (first, k[..., :D], k[..., D:], *rest), q[..., D:]


def narrowed(
    x: Inputs, arrays: tuple[Any, ...], D: int, scales: str, seed: int = 1
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(arrays with K and V of e4m3, their scales): powers of two, so that ``x`` has the same K and V in q's dtype."""
    q, k, v, *rest = arrays
    rng = np.random.default_rng(seed)
    shape = {"head": (k.shape[2],), "token": k.shape[:3], "sequence": (len(rest[1]), k.shape[2])}.get(scales, ())
    same = scales == "sequence"  # of sequences, whose pages differ: one number in all
    by = [np.exp2(np.full(shape, n) if same else rng.integers(-4, 5, shape)).astype(np.float32) for n in (2, -3)]
    of_rows = [b[:1] if same else b for b in by]
    small = [(a.astype(np.float32) / b[..., None]).astype(float8_e4m3fn) for a, b in zip((k, v), of_rows, strict=True)]
    x.k[..., :D], x.k[..., D:] = (a.astype(np.float32) * b[..., None] for a, b in zip(small, of_rows, strict=True))
    named = dict(zip(("k_scale", "v_scale"), (float(b) if b.shape == () else b for b in by), strict=True))
    return (q, *small, *rest), named
