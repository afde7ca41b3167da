"""Every operand and every scale has strides of its own: a kernel that takes one operand's for
another's reads NaN or other scales. And chunks that end inside a tile.

Rests on the float64 reference, which indexes the arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.attention import masks, mha_decode_paged, mha_decode_streaming_paged, mla_prefill_paged, mla_prefill_ragged
from kvlab.memory import float8_e4m3fn

Array = np.ndarray[Any, Any]
PAGE, PAGES, HEADS, KV_HEADS, D = 8, 9, 4, 2, 64
SIBLINGS = [
    pytest.param({"backend": "triton"}, marks=pytest.mark.interpreter, id="triton"),
    pytest.param({}, id="emulator"),
]
DECODES = {"decode": mha_decode_paged, "streaming": mha_decode_streaming_paged}


def padded(x: Array, *more: int) -> Array:
    """``x`` as the first elements of an array that is longer by ``more`` along its axes, full of NaN elsewhere."""
    wide = np.full([n + m for n, m in zip(x.shape, more, strict=True)], np.nan, x.dtype)
    view = wide[tuple(slice(n) for n in x.shape)]
    view[...] = x
    return view


def spread(x: Array, step: int) -> Array:
    """``x`` with ``step`` elements from one of its last axis to the next, NaN between them."""
    wide = np.full((*x.shape[:-1], x.shape[-1] * step), np.nan, x.dtype)
    view = wide[..., ::step]
    view[...] = x
    return view


@pytest.mark.parametrize("sibling", SIBLINGS)
@pytest.mark.parametrize("scales", ["head", "token"])
@pytest.mark.parametrize("op", DECODES)
def test_decode(op: str, scales: str, sibling: dict[str, Any]) -> None:
    """K and V have rows, heads and pages of other distances; q's, K's and V's scales lie 2, 3 and 5 apart."""
    rng = np.random.default_rng(0)
    q = padded(rng.standard_normal((2, HEADS, D)).astype(float8_e4m3fn), 0, 1, 16)
    k, v = (rng.standard_normal((PAGES, PAGE, KV_HEADS, D)).astype(float8_e4m3fn) for _ in "kv")
    k, v = padded(k, 0, 0, 0, 16), padded(v, 0, 1, 1, 48)
    shape = (PAGES, PAGE, KV_HEADS) if scales == "token" else (KV_HEADS,)
    by = {n: rng.uniform(0.5, 2, shape).astype(np.float32) for n in ("k_scale", "v_scale")}
    by["q_scale"] = rng.uniform(0.5, 2, KV_HEADS).astype(np.float32)
    if scales == "token":
        by["v_scale"] = padded(by["v_scale"], 0, 2, 0)
    by = {name: spread(x, {"q": 2, "k": 3, "v": 5}[name[0]]) for name, x in by.items()}
    table = rng.permutation(PAGES)[:8].reshape(2, 4)
    if op == "streaming" and not sibling:
        sibling = {"arch": "gfx950"}
    arguments = q, k, v, table, np.array([29, 3])
    exact = DECODES[op](*arguments, **by, backend="reference", return_lse=True)
    out, lse = DECODES[op](*arguments, **by, **sibling, return_lse=True)
    # P and the output are rounded to bfloat16
    np.testing.assert_allclose(out.astype(np.float64), exact[0].astype(np.float64), rtol=2**-7, atol=2**-7)
    np.testing.assert_allclose(lse, exact[1], rtol=0, atol=2**-10)


@pytest.mark.parametrize("sibling", SIBLINGS)
@pytest.mark.parametrize("paged", [False, True])
def test_chunks_of_mla_prefill(paged: bool, sibling: dict[str, Any]) -> None:
    """Rows of one tile see keys of two chunks: the first row of it sees a whole tile of keys, the others do not."""
    rng = np.random.default_rng(0)
    n, heads, nope, rope, value = 90, 2, 64, 32, 64
    q, k, v, k_rope = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((n, heads, nope + rope), (n, heads, nope), (n, heads, value), (n, rope))
    )
    starts = np.array([0, n])
    options: dict[str, Any] = {
        "cu_seqlens_q": starts, "cu_seqlens_k": starts, "scale": 0.3, "mask": masks.ChunkedCausalMask(40),
        "return_lse": True,
    }
    arguments: tuple[Any, ...] = (q, k, v, k_rope)
    function: Any = mla_prefill_ragged
    if paged:
        pages = np.full((12, PAGE, 128 + rope), np.nan, np.float32)
        table = rng.permutation(12)[None]
        token = np.arange(n)
        pages[table[0, token // PAGE], token % PAGE, 128:] = k_rope
        arguments, function = (q, k, v, pages, table, np.array([n])), mla_prefill_paged
        options["latent_dim"] = 128
    exact = function(*arguments, **options, backend="reference")
    out, lse = function(*arguments, **options, **sibling)
    np.testing.assert_allclose(out, exact[0], rtol=0, atol=5e-6)
    np.testing.assert_allclose(lse, exact[1], rtol=0, atol=5e-6)
