"""The float64 reference of decode, against another formulation: PyTorch's own attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decode_cases import Case, dense

from kvlab.attention.mha_decode.reference import reference

CASES = [
    Case((1,), D=64),
    Case((1000, 0, 17), heads=(9, 3), D=64),
    Case((37, 3, 1, 2, 0), heads=(6, 6), D=80, page=5, dtype="fp32", S=4),
    Case((128, 129, 127), heads=(16, 2), D=128, page=128, S=2),
    Case((33,), heads=(48, 1), D=256, page=1, dtype="fp16", S=3),
    Case((5,), heads=(2, 2), D=16, page=480, dtype="fp32"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch_sdpa_in_float64(case: Case) -> None:
    """Rests on torch.nn.functional.scaled_dot_product_attention; both sides in float64, so only rounding differs."""
    x = case.build()
    out, lse = x.exact()
    for b, n in enumerate(case.lens):
        q, k, v, visible = dense(x, torch.float64, b)
        some = visible.any(1).numpy() if n else np.zeros(case.S, bool)
        assert (out[b, ~some] == 0).all()
        assert np.isneginf(lse[b, ~some]).all()
        if n:
            theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=x.scale)
            np.testing.assert_allclose(out[b, some], theirs.transpose(0, 1).numpy()[some], rtol=0, atol=1e-13)
            s = (q @ k.transpose(1, 2) * x.scale).masked_fill(~visible, float("-inf"))
            np.testing.assert_allclose(lse[b, some], torch.logsumexp(s, -1).numpy().T[some], rtol=0, atol=1e-13)


def test_worked_by_hand() -> None:
    """Rests on arithmetic: two keys whose scores are log 1 and log 3, values 0 and 1."""
    k = np.zeros((1, 2, 1, 16))
    k[0, 1, 0, 0] = np.log(3)
    v = np.zeros_like(k)
    v[0, 1] = 1
    q = np.zeros((1, 2, 1, 16))
    q[..., 0] = 2
    out, lse = reference(q, k, v, np.array([[0]]), np.array([2]), scale=0.5)
    np.testing.assert_allclose(out[0, :, 0, 0], [0, 0.75])  # token 0 sees key 0 only
    np.testing.assert_allclose(lse[0, :, 0], [0, np.log(4)], atol=1e-15)
