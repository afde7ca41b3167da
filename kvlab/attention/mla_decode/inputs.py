"""Checks of MLA decode's arrays: one library, rows of latent and rope columns, lengths and pages that exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlab.attention.call.checks import (
    check_apart,
    check_arrays,
    check_dtype,
    check_lengths_and_pages,
    check_strides,
    check_table,
    given,
    looks_at_values,
    require,
)
from kvlab.attention.call.latent_rows import check_latent_rows, latent_windows
from kvlab.attention.call.operands import check_result
from kvlab.attention.features.scales import is_fp8
from kvlab.common.arrays import dtype_of

MAX_TOKENS = 4
MAX_HEADS = 128


@dataclass(frozen=True)
class MLAInputs:
    """The arguments of a call, checked: q and out as ``[B, S, H, ...]``, the cache as its latent and rope windows
    ``[pages, page_size, ...]``.
    """

    q: Any
    kv_cache: Any
    k_rope: Any
    block_table: Any
    seq_lens: Any
    out: Any
    drop_tokens: bool
    """q was ``[B, H, D]``: results drop the token axis."""

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The positional arguments of the launch functions."""
        return self.q, self.kv_cache, self.k_rope, self.block_table, self.seq_lens


def check_mla_arrays(
    q: Any, kv_cache: Any, block_table: Any, seq_lens: Any, out: Any, *, v_dim: int, kv_layout: str
) -> None:
    """Checks the arguments of ``mla_decode_paged``, whatever the arrays' values and places. ValueError that names
    argument, value and rule.
    """
    arrays = {"q": q, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
    check_arrays(arrays | given(out=out))
    require(q.ndim in (3, 4), f"q has shape {tuple(q.shape)}", "[B, H, D] or [B, S, H, D]")
    (batch, *_, heads, D), tokens = q.shape, 1 if q.ndim == 3 else q.shape[1]
    require(1 <= tokens <= MAX_TOKENS, f"q has {tokens} new tokens a sequence", f"1 to {MAX_TOKENS}")
    require(1 <= heads <= MAX_HEADS, f"q has {heads} heads", f"1 to {MAX_HEADS}")
    if not (is_fp8(q) and is_fp8(kv_cache)):
        check_dtype("q", q)
    whole = isinstance(v_dim, int) and v_dim % 16 == 0 and 32 <= v_dim <= 512
    require(whole, f"v_dim is {v_dim!r}", "a multiple of 16 from 32 to 512")
    rope = D - v_dim
    require(rope % 16 == 0 and 16 <= rope <= 128, f"{D} columns of which {v_dim} are v_dim leave {rope} for rope",
            "a multiple of 16 from 16 to 128")
    check_latent_rows(kv_cache, v_dim, rope, kv_layout)
    fp8 = is_fp8(kv_cache)
    require(fp8 or kv_cache.dtype == q.dtype, f"kv_cache has dtype {kv_cache.dtype}", f"that of q, {q.dtype}")
    require(not fp8 or dtype_of(q, "q").itemsize <= 2, f"q has dtype {q.dtype} with a cache of {kv_cache.dtype}",
            "bfloat16, float16 or float8_e4m3fn")
    check_table(block_table, seq_lens, batch)
    check_strides("q", q)
    check_strides("kv_cache", kv_cache)
    if out is not None:
        check_result(out, (*q.shape[:-1], v_dim), q)


def mla_inputs(
    q: Any, kv_cache: Any, block_table: Any, seq_lens: Any, out: Any, *, v_dim: int, kv_layout: str
) -> MLAInputs:
    """Arguments that ``check_mla_arrays`` lets pass, in the form of the launch functions."""
    latent, k_rope = latent_windows(kv_cache, v_dim, q.shape[-1] - v_dim, kv_layout)
    drop_tokens = q.ndim == 3
    if drop_tokens:
        q, out = q[:, None], None if out is None else out[:, None]
    return MLAInputs(q, latent, k_rope, block_table, seq_lens, out, drop_tokens)


def check_mla_memory(
    q: Any, kv_cache: Any, block_table: Any, seq_lens: Any, out: Any, inputs: MLAInputs, check: bool | None
) -> None:
    """Checks of each call: places and values of its arrays.

    check : look at the values of seq_lens and block_table. None: where that needs no synchronisation with a GPU.
    """
    if out is not None:
        arrays = {"q": q, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
        check_apart(arrays | {"out": out})
    if looks_at_values(check, q):
        check_lengths_and_pages(seq_lens, block_table, *inputs.kv_cache.shape[:2])
