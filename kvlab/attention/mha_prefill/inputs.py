"""What prefill asks of its arrays, and the one form in which the three siblings take them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.attention.backends import on_gpu
from kvlab.attention.inputs import check_lengths_and_pages, require
from kvlab.cache.arrays import dtype_of, element_strides, is_torch, overlaps, same_place, to_numpy
from kvlab.memory import bfloat16, float16, float32

from .config import UNLIMITED

__all__ = ["PrefillInputs", "dense_inputs", "finite", "mask_bounds", "paged_inputs"]

DTYPES = (bfloat16, float16, float32)


@dataclass(frozen=True)
class PrefillInputs:
    """Checked arguments: q and out ``[B, S, Hq, D]`` or ``[1, total, Hq, D]``; k and v as in ``reference``."""

    q: Any
    k: Any
    v: Any
    cu_q: Any
    cu_k: Any
    table: Any
    seq_lens: Any
    sinks: Any
    out: Any
    batch: int
    max_q: int

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The positional arguments of the launch functions."""
        return self.q, self.k, self.v, self.cu_q, self.cu_k, self.table, self.seq_lens, self.sinks

    @property
    def ragged(self) -> bool:
        """Results drop the first axis."""
        return self.cu_q is not None


def dense_inputs(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int | None, sinks: Any, out: Any, check: bool | None
) -> PrefillInputs:
    """Arguments of ``mha_prefill``. ValueError that names argument, value and rule."""
    require((cu_q is None) == (cu_k is None), "only one of cu_seqlens_q and cu_seqlens_k is given", "both or neither")
    ragged = cu_q is not None
    form = "[total, H, D] with cu_seqlens" if ragged else "[B, S, H, D] without cu_seqlens"
    _check_arrays({"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "sinks": sinks, "out": out})
    for name, array in (("q", q), ("k", k), ("v", v)):
        require(array.ndim == (3 if ragged else 4), f"{name} has shape {tuple(array.shape)}", form)
    if not ragged:
        require(k.shape[0] == q.shape[0], f"k has {k.shape[0]} sequences", f"those of q, {q.shape[0]}")
    _check_heads(q, {"k": k, "v": v}, sinks, out)
    batch, longest = (q.shape[0], q.shape[1])
    if ragged:
        batch = _check_starts("cu_seqlens_q", cu_q)
        require(
            _check_starts("cu_seqlens_k", cu_k) == batch,
            f"cu_seqlens_k has shape {tuple(cu_k.shape)}",
            f"that of cu_seqlens_q, {tuple(cu_q.shape)}",
        )
        longest = _longest(max_q, q)
        if check or (check is None and not on_gpu(q)):
            _check_offsets("cu_seqlens_q", cu_q, q, longest)
            _check_offsets("cu_seqlens_k", cu_k, k, None)
        q, k, v, out = (x if x is None else x[None] for x in (q, k, v, out))
    else:
        require(max_q is None, f"max_seqlen_q {max_q!r} without cu_seqlens_q", "None; q tells the length")
    return PrefillInputs(q, k, v, cu_q, cu_k, None, None, sinks, out, batch, longest)


def paged_inputs(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, cu_q: Any, max_q: int | None, sinks: Any,
    out: Any, check: bool | None,
) -> PrefillInputs:  # fmt: skip
    """Arguments of ``mha_prefill_paged``. ValueError that names argument, value and rule."""
    _check_arrays(
        {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens,
         "cu_seqlens_q": cu_q, "sinks": sinks, "out": out}
    )  # fmt: skip
    require(q.ndim == 3, f"q has shape {tuple(q.shape)}", "[total, Hq, D]")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        shape = tuple(cache.shape)
        require(cache.ndim == 4, f"{name} has shape {shape}", "[pages, page_size, Hkv, D]")
        require(min(shape) > 0, f"{name} has shape {shape}", "at least one page, one token a page and one head")
    _check_heads(q, {"k_cache": k_cache, "v_cache": v_cache}, sinks, out)
    batch = _check_starts("cu_seqlens_q", cu_q)
    shape = tuple(block_table.shape)
    require(block_table.ndim == 2 and shape[0] == batch, f"block_table has shape {shape}", f"[B = {batch}, columns]")
    require(tuple(seq_lens.shape) == (batch,), f"seq_lens has shape {tuple(seq_lens.shape)}", f"[B = {batch}]")
    for name, array in (("block_table", block_table), ("seq_lens", seq_lens)):
        _check_integers(name, array)
    longest = _longest(max_q, q)
    if check or (check is None and not on_gpu(q)):
        _check_offsets("cu_seqlens_q", cu_q, q, longest)
        check_lengths_and_pages(seq_lens, block_table, k_cache.shape[0], k_cache.shape[1])
    q, out = q[None], None if out is None else out[None]
    return PrefillInputs(q, k_cache, v_cache, cu_q, None, block_table, seq_lens, sinks, out, batch, longest)


def mask_bounds(causal: bool, window: Any) -> tuple[int, int]:
    """(left, right): a query at position p sees the keys from ``p - left`` to ``p + right``.

    >>> mask_bounds(True, None) == (UNLIMITED, 0)
    True
    >>> mask_bounds(True, 128), mask_bounds(False, (128, 16))
    ((127, 0), (128, 16))
    """
    left = right = UNLIMITED
    if isinstance(window, int | np.integer) and not isinstance(window, bool):
        require(window >= 1, f"window {window}", "at least 1, the keys that a query sees, itself among them")
        require(causal, f"window {window} with causal=False", "a pair (left, right)")
        left = int(window) - 1
    elif window is not None:
        pair = isinstance(window, tuple | list) and len(window) == 2
        sides = [UNLIMITED if side is None else side for side in window] if pair else [None]
        valid = all(isinstance(side, int | np.integer) and side >= 0 for side in sides)
        require(valid, f"window {window!r}", "None, a number of keys, or a pair (left, right) of numbers or None")
        left, right = (min(int(side), UNLIMITED) for side in sides)  # type: ignore[arg-type, unused-ignore]
    return left, 0 if causal else right


def _check_arrays(given: dict[str, Any]) -> None:
    arrays = {name: array for name, array in given.items() if array is not None}
    for name, array in arrays.items():
        known = isinstance(array, np.ndarray) or is_torch(array)
        require(known, f"{name} is a {type(array).__name__}", "a NumPy array or torch tensor")
        require(not getattr(array, "requires_grad", False), f"{name} requires grad", "detached; kvlab is for inference")
    same_place(**arrays)
    where = arrays["q"].device.type if is_torch(arrays["q"]) else "cpu"
    require(where in ("cpu", "cuda"), f"q is on {where}", "in CPU memory or on a GPU")
    out = arrays.get("out")
    for name, array in arrays.items():
        apart = out is None or name == "out" or not overlaps(out, array)
        require(apart, f"out shares memory with {name}", "memory of its own")


def _check_heads(q: Any, kv: dict[str, Any], sinks: Any, out: Any) -> None:
    """Dtypes, heads, depth, strides."""
    require(dtype_of(q, "q") in DTYPES, f"q has dtype {q.dtype}", "bfloat16, float16 or float32")
    (first, k), head_dim = next(iter(kv.items())), int(q.shape[-1])
    for name, array in kv.items():
        shape = tuple(array.shape)
        require(array.dtype == q.dtype, f"{name} has dtype {array.dtype}", f"that of q, {q.dtype}")
        require(shape[-1] == head_dim, f"{name} has head dimension {shape[-1]}", f"that of q, {head_dim}")
        require(shape == tuple(k.shape), f"{name} has shape {shape}", f"that of {first}, {tuple(k.shape)}")
    q_heads, kv_heads = int(q.shape[-2]), int(k.shape[-2])
    fits = kv_heads > 0 and q_heads % kv_heads == 0
    require(fits, f"q has {q_heads} heads", f"a multiple of the {kv_heads} heads of {first}")
    require(16 <= head_dim <= 256 and head_dim % 8 == 0, f"head dimension {head_dim}", "a multiple of 8 from 16 to 256")
    if sinks is not None:
        require(tuple(sinks.shape) == (q_heads,), f"sinks has shape {tuple(sinks.shape)}", f"[Hq = {q_heads}]")
        require(dtype_of(sinks, "sinks") in DTYPES, f"sinks has dtype {sinks.dtype}", "bfloat16, float16 or float32")
        require(q_heads < 2 or element_strides(sinks, "sinks") == (1,), "sinks is strided", "contiguous")
    rows = {"q": q, **kv}
    if out is not None:
        rows["out"] = out
        require(tuple(out.shape) == tuple(q.shape), f"out has shape {tuple(out.shape)}", f"that of q, {tuple(q.shape)}")
        require(out.dtype == q.dtype, f"out has dtype {out.dtype}", f"that of q, {q.dtype}")
        require(is_torch(out) or out.flags.writeable, "out is read-only", "writeable")
    for name, array in rows.items():
        if 0 in array.shape:  # NumPy gives such arrays any strides
            continue
        strides = element_strides(array, name)
        require(strides[-1] == 1, f"{name} has strides {strides}", "contiguous in the last dimension")
        require(min(strides) >= 0, f"{name} has strides {strides}", "not negative")
        overlap = name == "out" and any(n > 1 and s == 0 for n, s in zip(array.shape, strides, strict=True))
        require(not overlap, f"out has strides {strides}", "without elements that share memory")


def _check_integers(name: str, array: Any) -> None:
    kind = dtype_of(array, name)
    require(kind.kind in "iu" and kind.itemsize >= 4, f"{name} has dtype {kind}", "a 32- or 64-bit integer")
    if 0 not in array.shape:
        strides = element_strides(array, name)
        fits = min(strides) >= 0 and (array.shape[-1] < 2 or strides[-1] == 1)
        require(fits, f"{name} has strides {strides}", "contiguous in the last dimension, none negative")


def _check_starts(name: str, starts: Any) -> int:
    """The sequences that ``cu_seqlens`` tells of."""
    fits = starts is not None and starts.ndim == 1 and starts.shape[0] >= 1
    require(fits, f"{name} has shape {None if starts is None else tuple(starts.shape)}", "[B + 1]")
    _check_integers(name, starts)
    return int(starts.shape[0]) - 1


def _check_offsets(name: str, starts: Any, rows: Any, longest: int | None) -> None:
    o = to_numpy(starts.cpu() if is_torch(starts) else starts).astype(np.int64)
    total, lengths = int(rows.shape[0]), np.diff(o)
    good = o[0] == 0 and (lengths >= 0).all() and o[-1] == total
    require(good, f"{name} {o.tolist()}", f"numbers from 0 to {total}, the rows, none less than the one before")
    if longest is not None and lengths.size:
        most = int(lengths.max())
        require(most <= longest, f"max_seqlen_q {longest}", f"at least {most}, the longest sequence of {name}")


def _longest(max_q: int | None, q: Any) -> int:
    if max_q is None:
        return int(q.shape[0])
    require(isinstance(max_q, int) and max_q >= 0, f"max_seqlen_q {max_q!r}", "a number of tokens")
    return min(max_q, int(q.shape[0]))


def finite(name: str, value: float) -> float:
    """``value`` as a float that float32 holds; ValueError otherwise."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    fits = number and math.isfinite(value) and abs(value) <= float(np.finfo(np.float32).max)
    require(fits, f"{name} {value!r}", "a finite number that float32 holds")
    return float(value)
