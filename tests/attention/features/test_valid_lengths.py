"""Lengths of a padding mask are any integers. Rests on the formula ``k < valid_lengths[batch]`` of unbounded ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.attention import (
    mha_decode_paged,
    mha_decode_streaming_paged,
    mha_prefill_paged,
    mla_decode_paged,
    mla_prefill_paged,
)
from kvlab.attention.masks import CausalPaddingMask, ChunkedMask, SlidingWindowCausalMask

TABLE, LENS, STARTS = np.array([[3, 1], [0, 2], [4, 5]]), np.array([20, 7, 9]), np.array([0, 1, 2, 3])
FAR = np.array([1 << 40, (1 << 32) + 5, 5 - (1 << 32)])  # all keys, all keys, none; modulo 2^32: 0, 5, 5


def call(op: str, backend: str, **options: Any) -> Any:
    """The lse of one new token of each of three sequences, in the order ``[B, H]``."""
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 6, 16, 1, 64), np.float32)
    rows = rng.standard_normal((6, 16, 160), np.float32)
    q = rng.standard_normal((3, 2, 192), np.float32)
    asked = {"backend": backend, "return_lse": True, **options}
    if op == "mha_decode":
        return mha_decode_paged(q[..., :64], k, v, TABLE, LENS, num_splits=2, **asked)[1]
    if op == "mha_decode_streaming":
        return mha_decode_streaming_paged(q[..., :64], k, v, TABLE, LENS, arch="gfx950", **asked)[1]
    if op == "mha_prefill":
        return mha_prefill_paged(q[..., :64], k, v, TABLE, LENS, STARTS, **asked)[1]
    if op == "mla_decode":
        return mla_decode_paged(q[..., :160], rows, TABLE, LENS, v_dim=128, scale=0.1, **asked)[1]
    own = np.concatenate([[0], np.cumsum(LENS)])
    k, v = rng.standard_normal((2, own[-1], 2, 64), np.float32)
    return mla_prefill_paged(q[..., :96], k, v, rows, TABLE, LENS, STARTS, own, latent_dim=128, **asked)[1]


@pytest.mark.parametrize("backend", ["reference", "emulator", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("op", ["mha_decode", "mha_decode_streaming", "mha_prefill", "mla_decode", "mla_prefill"])
def test_lengths_beyond_32_bits(op: str, backend: str) -> None:
    """Too long for a sequence: the causal mask. Less than 0: nothing. Unsigned ones, too."""
    causal = call(op, "reference")
    found = call(op, backend, mask=CausalPaddingMask(FAR))
    np.testing.assert_allclose(found[:2], causal[:2], rtol=0, atol=1e-5)
    assert np.isneginf(found[2]).all()
    found = call(op, backend, mask=CausalPaddingMask(np.full(3, 2**32 - 1, np.uint32)))
    np.testing.assert_allclose(found, causal, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mask", [ChunkedMask(1 << 40), SlidingWindowCausalMask(1 << 40)], ids=str)
def test_chunks_and_windows_longer_than_any_sequence(mask: Any) -> None:
    np.testing.assert_array_equal(call("mha_decode", "emulator", mask=mask), call("mha_decode", "emulator"))


@pytest.mark.parametrize("backend", ["emulator", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("op", ["mha_decode", "mha_decode_streaming", "mha_prefill", "mla_decode", "mla_prefill"])
def test_chunks_of_one_key(op: str, backend: str) -> None:
    """A query sees its own key alone, as the float64 reference has it."""
    exact = call(op, "reference", mask=ChunkedMask(1))
    assert (exact < call(op, "reference") - 0.1).all()
    np.testing.assert_allclose(call(op, backend, mask=ChunkedMask(1)), exact, rtol=0, atol=1e-5)
