"""The float64 attention with every feature, against PyTorch in float64 and against laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvlab.attention.features.exact import attention
from kvlab.attention.features.resolve import Features
from kvlab.attention.masks import MaskPlan

RNG = np.random.default_rng(0)
q, k = RNG.standard_normal((2, 7, 4, 24))
v = RNG.standard_normal((7, 2, 16))
k = k[:, :2]
PLAIN = Features(mask=MaskPlan())


def theirs(bias: Any) -> Any:
    """Rests on torch's scaled_dot_product_attention in float64 with a mask that is added."""
    x, y, z = (torch.from_numpy(np.ascontiguousarray(a)).transpose(0, 1)[None] for a in (q, k, v))
    mask = torch.from_numpy(np.broadcast_to(bias, (4, 7, 7)).copy())
    out = torch.nn.functional.scaled_dot_product_attention(x, y, z, mask, scale=0.2, enable_gqa=True)
    return out[0].transpose(0, 1).numpy()


def test_alibi_and_a_window() -> None:
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    at = np.arange(7)
    far = np.abs(at[:, None] - at)
    bias = np.where((at <= at[:, None]) & (far < 3), -slopes[:, None, None] * far, -np.inf)
    out, _ = attention(q, k, v, scale=0.2, features=Features(mask=MaskPlan(left=2, right=0), slopes=slopes[None]))
    np.testing.assert_allclose(out, theirs(bias), rtol=0, atol=1e-12)


def test_a_bias_of_each_head() -> None:
    bias = RNG.standard_normal((1, 4, 7, 7))
    bias[..., 2] = -np.inf
    out, _ = attention(q, k, v, scale=0.2, features=Features(mask=MaskPlan(bias=bias)))
    np.testing.assert_allclose(out, theirs(bias[0]), rtol=0, atol=1e-12)


def test_scales_are_those_of_what_is_stored() -> None:
    plain, lse = attention(q, k * 0.5, v * [[[3.0], [2.0]]], scale=0.2, features=PLAIN)
    out, same = attention(q, k, v, scale=0.2, features=PLAIN, k_scale=0.5, v_scale=np.array([3.0, 2.0]))
    tokens = {"k_scale": np.full((7, 2), 0.5), "v_scale": np.tile([3.0, 2.0], (7, 1))}
    per_token = attention(q, k, v, scale=0.2, features=PLAIN, **tokens)
    for other in (out, per_token[0]):
        np.testing.assert_allclose(other, plain, rtol=1e-12)
    np.testing.assert_allclose(same, lse, rtol=1e-12)


def test_a_sink_takes_part_without_a_value() -> None:
    """Rests on the definition: one more key with the sink's logit and value 0."""
    sinks = np.array([1.0, -2.0, 0.5, 30.0])
    out, lse = attention(q, k, v, scale=0.2, features=Features(sinks=sinks, mask=MaskPlan()))
    plain, plain_lse = attention(q, k, v, scale=0.2, features=PLAIN)
    np.testing.assert_allclose(lse, np.logaddexp(plain_lse, sinks), rtol=1e-12)
    np.testing.assert_allclose(out, plain * np.exp(plain_lse - lse)[..., None], rtol=1e-12)
    nothing, only = attention(q, k[:0], v[:0], scale=0.2, features=Features(sinks=sinks, mask=MaskPlan()))
    assert (nothing == 0).all()
    assert (only == sinks).all()


def test_softcap_comes_before_alibi() -> None:
    slopes = np.ones(4, np.float32)
    _, lse = attention(1e4 * q, k, v, scale=1.0, features=Features(slopes=slopes[None], softcap=5.0, mask=MaskPlan()))
    s = 5 * np.sign(np.einsum("ihd,nhd->hin", q, np.repeat(k, 2, 1))) - np.abs(np.arange(7)[:, None] - np.arange(7))
    np.testing.assert_allclose(lse, np.log(np.exp(s).sum(-1)).T, rtol=1e-9)
