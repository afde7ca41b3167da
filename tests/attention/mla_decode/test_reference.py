"""The float64 reference of MLA decode against PyTorch's scaled_dot_product_attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mla_cases import Case


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
