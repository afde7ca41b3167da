"""What MLA decode asks of its arrays: one library, rows of latent and rope columns, lengths and pages that exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlab.attention.inputs import (
    check_apart,
    check_arrays,
    check_dtype,
    check_lengths_and_pages,
    check_out,
    check_strides,
    check_table,
    given,
    looks_at_values,
    require,
)

__all__ = ["MAX_HEADS", "MAX_TOKENS", "MLAInputs", "mla_inputs"]

MAX_TOKENS = 4
MAX_HEADS = 128


@dataclass(frozen=True)
class MLAInputs:
    """The arguments of a call, checked: q and out as ``[B, S, H, ...]``, the cache as ``[pages, page_size, D]``."""

    q: Any
    kv_cache: Any
    block_table: Any
    seq_lens: Any
    out: Any
    v_dim: int
    drop_tokens: bool
    """q was ``[B, H, D]``: results drop the token axis."""


def mla_inputs(
    q: Any, kv_cache: Any, block_table: Any, seq_lens: Any, out: Any, *, v_dim: int, check: bool | None
) -> MLAInputs:
    """Check the arguments of ``mla_decode_paged``. ValueError that names argument, value and rule.

    check : look at the values of seq_lens and block_table too. None: where that needs no synchronisation with a GPU.
    """
    arrays = {"q": q, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
    arrays |= given(out=out)
    check_arrays(arrays)
    require(q.ndim in (3, 4), f"q has shape {tuple(q.shape)}", "[B, H, D] or [B, S, H, D]")
    shape = tuple(kv_cache.shape)
    require(kv_cache.ndim in (3, 4), f"kv_cache has shape {shape}", "[pages, page_size, D] or [pages, page_size, 1, D]")
    if kv_cache.ndim == 4:
        require(shape[2] == 1, f"kv_cache has {shape[2]} heads", "1: all heads share the latent rows")
        kv_cache = kv_cache[:, :, 0]
    drop_tokens = q.ndim == 3
    if drop_tokens:
        q = q[:, None]
        out = out[:, None] if out is not None and out.ndim == 3 else out
    batch, tokens, heads, D = q.shape
    require(1 <= tokens <= MAX_TOKENS, f"q has {tokens} new tokens a sequence", f"1 to {MAX_TOKENS}")
    require(1 <= heads <= MAX_HEADS, f"q has {heads} heads", f"1 to {MAX_HEADS}")
    check_dtype("q", q)
    require(kv_cache.dtype == q.dtype, f"kv_cache has dtype {kv_cache.dtype}", f"that of q, {q.dtype}")
    require(kv_cache.shape[2] == D, f"kv_cache has rows of {kv_cache.shape[2]} columns", f"those of q, {D}")
    require(min(kv_cache.shape[:2]) > 0, f"kv_cache has shape {shape}", "at least one page and one token a page")
    whole = isinstance(v_dim, int) and v_dim % 16 == 0 and 32 <= v_dim <= 512
    require(whole, f"v_dim {v_dim!r}", "a multiple of 16 from 32 to 512")
    rope = D - v_dim
    require(rope % 16 == 0 and 16 <= rope <= 128, f"{D} columns of which {v_dim} are v_dim leave {rope} for rope",
            "a multiple of 16 from 16 to 128")  # fmt: skip
    check_table(block_table, seq_lens, batch)
    check_strides("q", q)
    check_strides("kv_cache", kv_cache)
    if out is not None:
        expected = (batch, heads, v_dim) if drop_tokens else (batch, tokens, heads, v_dim)
        fits = tuple(out.shape) == (batch, tokens, heads, v_dim)
        require(fits, f"out has shape {tuple(arrays['out'].shape)}", f"{expected}")
        check_out(out, q)
        check_apart(arrays)
    if looks_at_values(check, q):
        check_lengths_and_pages(seq_lens, block_table, *kv_cache.shape[:2])
    return MLAInputs(q, kv_cache, block_table, seq_lens, out, v_dim, drop_tokens)
