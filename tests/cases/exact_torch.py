"""Attention of one sequence in float64 on torch tensors, written for the tests of adapters: no kvlab in it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error of outputs of about 1 in size; of float16 and bfloat16 two of their units in the last place."""


def exact(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    slopes: Tensor | None = None, scale: float | None = None, first: int = 0, chunk: int = 0,
    sinks: Tensor | None = None, seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out [S, Hq, Dv], lse [S, Hq])`` of q ``[S, Hq, D]``, k and v ``[n, Hkv, ..]``; keys before ``first`` are not
    there. ``seen``: bool ``[S, n]``.
    """
    (S, heads, D), n, group = q.shape, k.shape[0], q.shape[1] // k.shape[1]
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("shd,nhd->shn", q, k) * (D**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    position, key = torch.arange(S)[:, None] + n - S, torch.arange(n)[None]
    if slopes is not None:
        s = s - slopes.double().cpu()[None, :, None] * (position - key).abs()[:, None]
    visible = (key >= first).expand(S, n)
    visible = visible & (key <= position) if causal else visible
    visible = visible & (key >= position - window[0]) if window[0] >= 0 else visible
    visible = visible & (key <= position + window[1]) if window[1] >= 0 else visible
    visible = visible & (key // chunk == position // chunk) if chunk else visible
    visible = visible if seen is None else visible & seen.cpu()
    s = s.masked_fill(~visible[:, None], -math.inf)
    if sinks is not None:
        s = torch.cat((s, sinks.double().cpu()[None, :, None].expand(S, heads, 1)), -1)
    weights = torch.softmax(s, -1).nan_to_num()[..., :n]
    return torch.einsum("shn,nhd->shd", weights, v), torch.logsumexp(s, -1)


def close(found: Tensor, expected: Tensor, like: torch.dtype) -> None:
    """Equal shapes, and values within the limit of a dtype; infinities of the same sign."""
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double().cpu(), expected.double(), atol=LIMITS[like], rtol=LIMITS[like])


def randn(*shape: int, **options: Any) -> Tensor:
    """Normal numbers of a generator with a seed of the shape's own."""
    device = options.pop("device", "cpu")
    dtype = options.pop("dtype", torch.float32)
    seed = torch.Generator().manual_seed(hash((*shape, *options.values())) % 2**31)
    return torch.randn(*shape, generator=seed).to(device, dtype)
