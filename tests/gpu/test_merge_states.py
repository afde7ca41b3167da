"""Merging of partial attention on a GPU. Rests on float64 by PyTorch."""

from __future__ import annotations

import pytest
import torch

from kvlab.attention import merge_states
from kvlab.attention.masks import CausalPaddingMask
from kvlab.attention.mha_decode import mha_decode_paged

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens, heads", [(4096, 32), (1, 3)], ids=str)
def test_as_many_tokens_and_heads_as_a_prefill_has(tokens: int, heads: int) -> None:
    """131072 of them are more than the second axis of a grid holds."""
    torch.manual_seed(0)
    outs = torch.randn(2, 1, tokens, heads, 64, dtype=torch.bfloat16, device="cuda")
    lses = torch.randn(2, 1, tokens, heads, device="cuda")
    merged, lse = merge_states(outs, lses)
    weights = lses.double().softmax(0)[..., None]
    exact = (outs.double() * weights).sum(0)
    torch.testing.assert_close(merged.double(), exact, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(lse.double(), lses.double().logsumexp(0), rtol=0, atol=1e-5)


def test_valid_lengths_beyond_32_bits() -> None:
    """Rests on the call without padding: as many keys as 64 bits count are all of them."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 4, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(2, 4, 64, dtype=torch.bfloat16, device="cuda")
    table, lens = torch.tensor([[3, 1], [0, 2]], device="cuda"), torch.tensor([20, 7], device="cuda")
    mask = CausalPaddingMask(torch.tensor([1 << 40, (1 << 32) + 3], device="cuda"))
    padded, whole = (mha_decode_paged(q, k, v, table, lens, mask=one) for one in (mask, None))
    torch.testing.assert_close(padded, whole, rtol=2**-7, atol=2**-9)
