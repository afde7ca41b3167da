"""Prefill of the captured model: every backend gives the model's own attention output of the prompt.

Rests on the capture (kvlab.data): o was computed in float32 for q, k, v before they were rounded to bf16.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from kvlab.attention.features.exact import attention
from kvlab.attention.features.resolve import Features
from kvlab.attention.masks import MaskPlan
from kvlab.attention.mha_prefill import mha_prefill, mha_prefill_cache
from kvlab.cache import from_dense
from kvlab.common.arrays import to_numpy, to_torch
from kvlab.data import load_smollm2

CAPTURE = load_smollm2()
N = CAPTURE.prompt_tokens
BACKENDS = [{"backend": "reference"}, {"backend": "hopper"}, {"arch": "sm_80"}, {"arch": "sm_90"}, {"arch": "gfx950"}]
layers = pytest.mark.parametrize("layer", range(len(CAPTURE.layers)), ids=lambda i: f"layer{CAPTURE.layers[i]}")
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: next(iter(b.values())))


@functools.cache
def exact(layer: int) -> np.ndarray[Any, Any]:
    """What float64 makes of the rounded q, k and v of the prompt."""
    q, k, v = (a[layer, :N] for a in (CAPTURE.q, CAPTURE.k, CAPTURE.v))
    return attention(q, k, v, scale=CAPTURE.scale, features=Features(mask=MaskPlan(right=0)))[0]


def assert_the_models_own(layer: int, out: Any, first: int = 0, heads: int | None = None) -> None:
    """As near to the model's o as float64 comes, and what rounding P and the output to bf16, by 2^-9 at most, adds:
    2^-8 of the largest v plus the largest o.
    """
    v, o = CAPTURE.v[layer, :N], CAPTURE.o[layer, first:N, :heads].astype(np.float32)
    tolerance = 2.0**-8 * sum(float(np.abs(a.astype(np.float32)).max()) for a in (v, o))
    inputs = np.abs(exact(layer)[first:, :heads] - o)  # what rounding q, k and v has done
    assert inputs.max() <= 2.0**-6 * np.abs(v.astype(np.float32)).max()
    assert inputs.mean() <= 2.0**-7 * np.abs(o).mean()
    error = np.abs(to_numpy(out).astype(np.float32) - o)
    assert (error <= inputs + tolerance).all()


@layers
@every_backend
def test_prompt(layer: int, backend: dict[str, Any]) -> None:
    q, k, v = (a[layer, None, :N] for a in (CAPTURE.q, CAPTURE.k, CAPTURE.v))
    assert_the_models_own(layer, mha_prefill(q, k, v, scale=CAPTURE.scale, **backend)[0])


@layers
@every_backend
def test_second_chunk_over_pages(layer: int, backend: dict[str, Any]) -> None:
    """Chunked prefill: the last tokens of the prompt over a paged cache that holds all of it."""
    first = 150
    k, v = ([one[None, :N] for one in values] for values in (CAPTURE.k, CAPTURE.v))
    cache = from_dense(k, v, [N], page_size=16, new_tokens=N - first, shuffle=layer, spare_pages=2)
    starts = np.array([0, N - first])
    q = CAPTURE.q[layer, first:N]
    out = mha_prefill_cache(q, cache, layer, cu_seqlens_q=starts, scale=CAPTURE.scale, **backend)
    assert_the_models_own(layer, out, first)


@pytest.mark.interpreter
def test_interpreted_kernel() -> None:
    """One layer, the heads of one KV head."""
    group = CAPTURE.q.shape[2] // CAPTURE.k.shape[2]
    q = to_torch(np.ascontiguousarray(CAPTURE.q[0, None, :N, :group]))
    k, v = (to_torch(np.ascontiguousarray(a[0, None, :N, :1])) for a in (CAPTURE.k, CAPTURE.v))
    assert_the_models_own(0, mha_prefill(q, k, v, scale=CAPTURE.scale)[0], heads=group)
