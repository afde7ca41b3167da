"""The float64 reference of MLA decode against PyTorch's scaled_dot_product_attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mla_cases import Case

from kvlab.attention import mla_decode_paged, mla_store_paged
from kvlab.memory import bfloat16, float8_e4m3fn


def test_rows_with_scales_are_read_as_they_are_stored() -> None:
    """Rests on the row's layout, worked out by hand: 512 bytes of e4m3, four float32 scales, 64 bfloat16; a query of
    one column alone sees that column, and the output is the latents.
    """
    rng = np.random.default_rng(3)
    latent, turned = rng.standard_normal((1, 512)).astype(np.float32), rng.standard_normal((1, 64)).astype(bfloat16)
    cache = np.zeros((3, 4, 656), np.uint8)
    mla_store_paged(latent, turned.astype(np.float32), cache, np.array([9]))
    row = cache[2, 1]
    scales, codes = row[512:528].view(np.float32), row[:512].view(float8_e4m3fn).astype(np.float32)
    true = (codes * np.repeat(scales, 128)).astype(bfloat16).astype(np.float64)
    q = np.zeros((1, 2, 576), bfloat16)
    q[0, 0, 130], q[0, 1, 512 + 7] = 1, 1
    out, lse = mla_decode_paged(q, cache, indices=np.array([[9]]), scale=1.0, backend="reference", return_lse=True)
    assert (out.astype(np.float64) == true).all()
    np.testing.assert_array_equal(lse[0], [true[130], row[528:].view(bfloat16)[7].astype(np.float32)])
    assert np.abs(true - latent[0]).max() < 0.2


@pytest.mark.parametrize("case", [Case((40, 1, 0), S=1), Case((33, 2), S=3, H=2, dtype="fp32", page=5)], ids=str)
def test_against_torch(case: Case) -> None:
    x = case.build()
    out, lse = x.exact()
    for b, n in enumerate(case.lens):
        token, tokens = np.arange(n), case.S
        k = torch.from_numpy(x.kv[x.table[b, token // case.page], token % case.page].astype(np.float64))
        q = torch.from_numpy(x.q[b].astype(np.float64)).transpose(0, 1)
        for i in range(tokens):
            seen = max(n - tokens + 1 + i, 0)
            if not seen:
                assert (out[b, i] == 0).all()
                assert np.isneginf(lse[b, i]).all()
                continue
            mine = q[:, i : i + 1], k[:seen].expand(case.H, -1, -1)
            theirs = torch.nn.functional.scaled_dot_product_attention(*mine, mine[1], scale=x.scale)
            np.testing.assert_allclose(out[b, i], theirs[:, 0, : x.v_dim], rtol=1e-12, atol=1e-12)
            scores = x.scale * (mine[0] @ mine[1].transpose(1, 2))
            np.testing.assert_allclose(lse[b, i], torch.logsumexp(scores, -1)[:, 0], rtol=1e-12)
