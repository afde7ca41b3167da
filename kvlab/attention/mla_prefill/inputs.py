"""Checks of MLA prefill's arrays, and the one form in which the three siblings take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.attention.call.checks import (
    check_apart,
    check_arrays,
    check_integers,
    check_lengths_and_pages,
    check_strides,
    check_table,
    given,
    known_dtype,
    looks_at_values,
    require,
)
from kvlab.attention.call.latent_rows import check_latent_rows, latent_windows
from kvlab.attention.call.operands import check_dtypes, check_result
from kvlab.attention.call.ragged import check_both_starts, check_offsets, longest, sequence_lengths
from kvlab.attention.features.intervals import host
from kvlab.attention.features.scales import is_fp8
from kvlab.common.arrays import dtype_of
from kvlab.memory import bfloat16, float8_e4m3fn


@dataclass(frozen=True)
class MLAPrefillInputs:
    """Checked arguments, as in ``reference``."""

    q: Any
    k: Any
    v: Any
    k_rope: Any
    cu_q: Any
    cu_k: Any
    table: Any
    seq_lens: Any
    starts: Any
    out: Any
    batch: int
    max_q: int

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The positional arguments of the launch functions."""
        return (
            self.q, self.k, self.v, self.k_rope, self.cu_q, self.cu_k, self.table, self.seq_lens, self.starts
        )


def check_ragged(
    q: Any, k: Any, v: Any, k_rope: Any, cu_q: Any, cu_k: Any, *, max_q: int | None, out: Any
) -> tuple[int, int]:
    """Checks the arguments of ``mla_prefill_ragged``, whatever the arrays' values and places; the sequences and the
    longest of them. ValueError that names argument, value and rule.
    """
    check_arrays({"q": q, "k": k, "v": v, "k_rope": k_rope, **given(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, out=out)})
    batch = _check_rows(q, k, v, cu_q, cu_k, out)
    shape = tuple(k_rope.shape)
    require(k_rope.ndim in (2, 3), f"k_rope has shape {shape}", "[total_k, rope] or [total_k, 1, rope]")
    require(k_rope.ndim == 2 or shape[1] == 1, f"k_rope has {shape[1]} heads", "1: all heads share it")
    expected = k.shape[0], q.shape[2] - k.shape[2]
    require((shape[0], shape[-1]) == expected, f"k_rope has shape {shape}", f"{expected}, what q has beyond k")
    others = (bfloat16,) if is_fp8(q) else (float8_e4m3fn,) if is_fp8(k) else ()
    accepted = ", or ".join([f"that of q, {q.dtype}", *(other.name for other in others)])
    fits = known_dtype(k_rope, "k_rope") in (dtype_of(q, "q"), *others)
    require(fits, f"k_rope has dtype {k_rope.dtype}", accepted)
    check_strides("k_rope", k_rope)
    return batch, longest(max_q, q, cu_q)


def check_ragged_memory(
    q: Any, k: Any, v: Any, k_rope: Any, cu_q: Any, cu_k: Any, *, out: Any, check: bool | None, inputs: MLAPrefillInputs
) -> None:
    """Checks of each call of ``mla_prefill_ragged``: places and values of its arrays."""
    if out is not None:
        check_apart({"q": q, "k": k, "v": v, "k_rope": k_rope, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "out": out})
    if looks_at_values(check, q):
        check_offsets("cu_seqlens_q", cu_q, q, inputs.max_q)
        check_offsets("cu_seqlens_k", cu_k, k, None)


def ragged_inputs(
    q: Any, k: Any, v: Any, k_rope: Any, cu_q: Any, cu_k: Any, *, out: Any, batch: int, max_q: int
) -> MLAPrefillInputs:
    """Arguments of ``mla_prefill_ragged`` that have passed the checks, in the form of the launch functions."""
    k_rope = k_rope[:, 0] if k_rope.ndim == 3 else k_rope
    return MLAPrefillInputs(q, k, v, k_rope, cu_q, cu_k, None, None, None, out, batch, max_q)


def check_paged(
    q: Any, k: Any, v: Any, kv_cache: Any, block_table: Any, seq_lens: Any, cu_q: Any, cu_k: Any, k_starts: Any, *,
    latent_dim: int, kv_layout: str, max_q: int | None, out: Any,
) -> tuple[int, int]:
    """The same for ``mla_prefill_paged``."""
    arrays = {"q": q, "k": k, "v": v, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
    check_arrays(arrays | given(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, k_starts=k_starts, out=out))
    batch = _check_rows(q, k, v, cu_q, cu_k, out)
    whole = isinstance(latent_dim, int) and not isinstance(latent_dim, bool) and 1 <= latent_dim < 1 << 31
    require(whole, f"latent_dim is {latent_dim!r}", "a number of columns")
    check_latent_rows(kv_cache, latent_dim, q.shape[2] - k.shape[2], kv_layout)
    same = is_fp8(kv_cache) or kv_cache.dtype == q.dtype
    other = "" if is_fp8(q) else ", or float8_e4m3fn"
    require(same, f"kv_cache has dtype {kv_cache.dtype}", f"that of q, {q.dtype}{other}")
    narrow = not is_fp8(kv_cache) or dtype_of(q, "q").itemsize < 4
    require(narrow, f"q has dtype {q.dtype} with a cache of {kv_cache.dtype}", "bfloat16 or float16")
    check_strides("kv_cache", kv_cache)
    check_table(block_table, seq_lens, batch)
    check_strides("seq_lens", seq_lens)
    if k_starts is not None:
        require(tuple(k_starts.shape) == (batch,), f"k_starts has shape {tuple(k_starts.shape)}", f"[B = {batch}]")
        check_integers("k_starts", k_starts)
        check_strides("k_starts", k_starts)
    return batch, longest(max_q, q, cu_q)


def check_paged_memory(
    q: Any, k: Any, v: Any, kv_cache: Any, block_table: Any, seq_lens: Any, cu_q: Any, cu_k: Any, k_starts: Any, *,
    out: Any, check: bool | None, inputs: MLAPrefillInputs,
) -> None:
    """The same for ``mla_prefill_paged``."""
    if out is not None:
        arrays = {"q": q, "k": k, "v": v, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
        check_apart(arrays | given(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, k_starts=k_starts, out=out))
    if looks_at_values(check, q):
        check_offsets("cu_seqlens_q", cu_q, q, inputs.max_q)
        check_offsets("cu_seqlens_k", cu_k, k, None)
        check_lengths_and_pages(seq_lens, block_table, *inputs.k_rope.shape[:2])
        _check_held(cu_k, seq_lens, k_starts)


def paged_inputs(
    q: Any, k: Any, v: Any, kv_cache: Any, block_table: Any, seq_lens: Any, cu_q: Any, cu_k: Any, k_starts: Any, *,
    latent_dim: int, kv_layout: str, out: Any, batch: int, max_q: int,
) -> MLAPrefillInputs:
    """The same for ``mla_prefill_paged``."""
    _, k_rope = latent_windows(kv_cache, latent_dim, q.shape[2] - k.shape[2], kv_layout)
    return MLAPrefillInputs(q, k, v, k_rope, cu_q, cu_k, block_table, seq_lens, k_starts, out, batch, max_q)


def _check_rows(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, out: Any) -> int:
    """Dtypes, heads, columns, strides; the sequences."""
    of_q, of_k = check_dtypes(q, "k", k)
    require(known_dtype(v, "v") == of_k, f"v has dtype {v.dtype}", f"that of {'q' if of_k == of_q else 'k'}, {k.dtype}")
    for name, array in {"q": q, "k": k, "v": v}.items():
        require(array.ndim == 3, f"{name} has shape {tuple(array.shape)}", "[total, H, columns]")
        require(array.shape[1] == q.shape[1], f"{name} has {array.shape[1]} heads", f"those of q, {q.shape[1]}")
        check_strides(name, array)
    require(v.shape[0] == k.shape[0], f"v has {v.shape[0]} rows", f"those of k, {k.shape[0]}")
    require(q.shape[1] > 0, "q has no heads", "at least one head")
    unit = 16 if of_k == float8_e4m3fn else 8
    nope, rope, value = k.shape[2], q.shape[2] - k.shape[2], v.shape[2]
    for what, columns, most in (("k", nope, 256), ("q beyond those of k, for rope,", rope, 128), ("v", value, 256)):
        fits = 16 <= columns <= most and columns % unit == 0
        require(fits, f"{columns} columns of {what}", f"a multiple of {unit} from 16 to {most}")
    batch = check_both_starts(cu_q, cu_k)
    if out is not None:
        check_result(out, (int(q.shape[0]), int(q.shape[1]), int(value)), q)
    return batch


def _check_held(cu_k: Any, seq_lens: Any, k_starts: Any) -> None:
    """ValueError where k and v hold keys that a sequence does not have."""
    held, lens = sequence_lengths(cu_k), host(seq_lens).astype(np.int64)
    starts = lens - held if k_starts is None else host(k_starts).astype(np.int64)
    bad = (starts < 0) | (starts > lens - held)
    if bad.any():
        b = int(bad.argmax())
        raise ValueError(
            f"k and v hold {held[b]} keys of sequence {b} from key {starts[b]} on: must be among its {lens[b]} keys"
        )
