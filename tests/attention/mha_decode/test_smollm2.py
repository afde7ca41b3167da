"""Decode of the captured model: every backend gives the model's own attention output of the eight decode steps.

Rests on the capture (kvlab.data): o was computed in float32 for q, k, v before they were rounded to bf16.
"""

from __future__ import annotations

import numpy as np
import pytest
from yardsticks import bits

from kvlab.attention import mha_decode, mha_decode_streaming
from kvlab.cache import PagedKVCacheCollection, from_dense
from kvlab.data import load_smollm2

CAPTURE = load_smollm2()
STEPS = range(CAPTURE.decode_steps)


def cache_at(step: int, tokens: int = 1) -> PagedKVCacheCollection:
    """The layers' pages, shuffled, with ``tokens`` new ones of which the last is that of ``step``."""
    length = CAPTURE.prompt_tokens + step + 1
    k, v = ([layer[None, :length] for layer in values] for values in (CAPTURE.k, CAPTURE.v))
    return from_dense(k, v, [length], page_size=16, new_tokens=tokens, shuffle=step, spare_pages=2)


def tolerance(layer: int, at: slice | int) -> float:
    """Inputs, P and the output were each rounded to bf16, by 2^-9 at most: 2^-8 of the largest v plus the largest o."""
    return 2.0**-8 * sum(float(np.abs(a.astype(np.float32)).max()) for a in (CAPTURE.v[layer], CAPTURE.o[layer, at]))


@pytest.mark.parametrize(
    "backend", [{"backend": "reference"}, {"arch": "sm_80"}, {"arch": "sm_90"}, {"arch": "gfx950"}]
)
@pytest.mark.parametrize("layer", range(len(CAPTURE.layers)), ids=lambda i: f"layer{CAPTURE.layers[i]}")
def test_decode_steps(layer: int, backend: dict[str, str]) -> None:
    for step in STEPS:
        at = CAPTURE.prompt_tokens + step
        out = mha_decode(CAPTURE.q[layer, at][None], cache_at(step), layer, scale=CAPTURE.scale, **backend)
        error = np.abs(out[0].astype(np.float32) - CAPTURE.o[layer, at].astype(np.float32))
        assert error.max() <= tolerance(layer, at)


@pytest.mark.parametrize("layer", range(len(CAPTURE.layers)), ids=lambda i: f"layer{CAPTURE.layers[i]}")
def test_four_steps_at_once_are_four_steps(layer: int) -> None:
    """Rests on a law: token i of S sees what it saw when it was the newest."""
    at = CAPTURE.prompt_tokens + 4
    out = mha_decode(CAPTURE.q[layer, at : at + 4][None], cache_at(7, tokens=4), layer, scale=CAPTURE.scale)
    for i in range(4):
        one = mha_decode(CAPTURE.q[layer, at + i][None], cache_at(4 + i), layer, scale=CAPTURE.scale)
        np.testing.assert_allclose(out[0, i].astype(float), one[0].astype(float), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("layer", range(len(CAPTURE.layers)), ids=lambda i: f"layer{CAPTURE.layers[i]}")
def test_streaming(layer: int) -> None:
    for step in STEPS:
        at = CAPTURE.prompt_tokens + step
        out = mha_decode_streaming(CAPTURE.q[layer, at][None], cache_at(step), layer, scale=CAPTURE.scale)
        error = np.abs(out[0].astype(np.float32) - CAPTURE.o[layer, at].astype(np.float32))
        assert error.max() <= tolerance(layer, at)


@pytest.mark.interpreter
@pytest.mark.parametrize("layer", range(len(CAPTURE.layers)), ids=lambda i: f"layer{CAPTURE.layers[i]}")
def test_interpreted_kernel(layer: int) -> None:
    """The last step, three programs; the four newest tokens at once would be the same three."""
    at = CAPTURE.tokens - 1
    q, cache = CAPTURE.q[layer, at - 3 :][None], cache_at(CAPTURE.decode_steps - 1, tokens=4)
    out = mha_decode(q, cache, layer, scale=CAPTURE.scale, num_splits=1, backend="triton")
    error = np.abs(out[0].astype(np.float32) - CAPTURE.o[layer, at - 3 :].astype(np.float32))
    assert error.max() <= tolerance(layer, slice(at - 3, None))
    emulated = mha_decode(q, cache, layer, scale=CAPTURE.scale, num_splits=1)
    assert np.mean(np.frombuffer(bits(out), np.uint16) == np.frombuffer(bits(emulated), np.uint16)) > 0.9
