"""What MLA decode asks of its arrays: one library, rows of latent and rope columns, lengths and pages that exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.attention.backends import on_gpu
from kvlab.attention.inputs import DTYPES, check_lengths_and_pages, require
from kvlab.cache.arrays import dtype_of, element_strides, is_torch, same_place

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
    if out is not None:
        arrays["out"] = out
    for name, array in arrays.items():
        known = isinstance(array, np.ndarray) or is_torch(array)
        require(known, f"{name} is a {type(array).__name__}", "a NumPy array or torch tensor")
        require(not getattr(array, "requires_grad", False), f"{name} requires grad", "detached; kvlab is for inference")
    same_place(**arrays)
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
    require(dtype_of(q, "q") in DTYPES, f"q has dtype {q.dtype}", "bfloat16, float16 or float32")
    require(kv_cache.dtype == q.dtype, f"kv_cache has dtype {kv_cache.dtype}", f"that of q, {q.dtype}")
    require(kv_cache.shape[2] == D, f"kv_cache has rows of {kv_cache.shape[2]} columns", f"those of q, {D}")
    require(min(kv_cache.shape[:2]) > 0, f"kv_cache has shape {shape}", "at least one page and one token a page")
    whole = isinstance(v_dim, int) and v_dim % 16 == 0 and 32 <= v_dim <= 512
    require(whole, f"v_dim {v_dim!r}", "a multiple of 16 from 32 to 512")
    rope = D - v_dim
    require(rope % 16 == 0 and 16 <= rope <= 128, f"{D} columns of which {v_dim} are v_dim leave {rope} for rope",
            "a multiple of 16 from 16 to 128")  # fmt: skip
    table = tuple(block_table.shape)
    require(block_table.ndim == 2 and table[0] == batch, f"block_table has shape {table}", f"[B = {batch}, columns]")
    require(tuple(seq_lens.shape) == (batch,), f"seq_lens has shape {tuple(seq_lens.shape)}", f"[B = {batch}]")
    for name in ("block_table", "seq_lens"):
        kind = dtype_of(arrays[name], name)
        require(kind.kind in "iu" and kind.itemsize >= 4, f"{name} has dtype {kind}", "a 32- or 64-bit integer")
    if out is not None:
        expected = (batch, heads, v_dim) if drop_tokens else (batch, tokens, heads, v_dim)
        fits = tuple(out.shape) == (batch, tokens, heads, v_dim)
        require(fits, f"out has shape {tuple(arrays['out'].shape)}", f"{expected}")
        require(out.dtype == q.dtype, f"out has dtype {out.dtype}", f"that of q, {q.dtype}")
        require(is_torch(out) or out.flags.writeable, "out is read-only", "writeable")
    inputs = MLAInputs(q, kv_cache, block_table, seq_lens, out, v_dim, drop_tokens)
    _check_strides(inputs)
    if check or (check is None and not on_gpu(q)):
        check_lengths_and_pages(seq_lens, block_table, *kv_cache.shape[:2])
    return inputs


def _check_strides(inputs: MLAInputs) -> None:
    for name in ("q", "kv_cache", "block_table", "seq_lens", "out"):
        array = getattr(inputs, name)
        if array is None or 0 in array.shape:  # NumPy gives empty arrays any strides
            continue
        strides = element_strides(array, name)
        contiguous = name == "seq_lens" or array.shape[-1] < 2 or strides[-1] == 1
        require(contiguous, f"{name} has strides {strides}", "contiguous in the last dimension")
        require(min(strides) >= 0, f"{name} has strides {strides}", "not negative")
        overlap = name == "out" and any(n > 1 and s == 0 for n, s in zip(array.shape, strides, strict=True))
        require(not overlap, f"out has strides {strides}", "without elements that share memory")
