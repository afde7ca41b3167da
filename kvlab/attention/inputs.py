"""What every attention operation asks of its arrays: one library, shapes that fit, lengths and pages that exist."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.attention.backends import on_gpu
from kvlab.cache import PagedKVCacheCollection
from kvlab.cache.arrays import dtype_of, element_strides, is_torch, overlaps, same_place, to_numpy
from kvlab.memory import bfloat16, float16, float32

__all__ = [
    "PagedInputs",
    "check_lane_copies",
    "check_lengths_and_pages",
    "check_paged_collection",
    "finite_number",
    "lengths_with_new",
    "paged_inputs",
    "require",
]

DTYPES = (bfloat16, float16, float32)
FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class PagedInputs:
    """The arguments of a paged decode, checked: q and out as ``[B, S, Hq, D]``."""

    q: Any
    k_cache: Any
    v_cache: Any
    block_table: Any
    seq_lens: Any
    out: Any
    drop_tokens: bool
    """q was ``[B, Hq, D]``: results drop the token axis."""


def paged_inputs(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    out: Any,
    *,
    max_tokens: int,
    check: bool | None,
) -> PagedInputs:
    """Check the arguments of a paged decode (see ``mha_decode_paged``). ValueError that names argument, value, rule.

    check : look at the values of seq_lens and block_table too. None: where that needs no synchronisation with a GPU.
    """
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    if out is not None:
        arrays["out"] = out
    for name, array in arrays.items():
        require(
            isinstance(array, np.ndarray) or is_torch(array),
            f"{name} is a {type(array).__name__}",
            "a NumPy array or torch tensor",
        )
        require(not getattr(array, "requires_grad", False), f"{name} requires grad", "detached; kvlab is for inference")
    same_place(**arrays)
    on = q.device.type if is_torch(q) else "cpu"
    require(on in ("cpu", "cuda"), f"q is on {on}", "in CPU memory or on a GPU")
    require(q.ndim in (3, 4), f"q has shape {tuple(q.shape)}", "[B, Hq, D] or [B, S, Hq, D]")
    drop_tokens = q.ndim == 3
    if drop_tokens:
        q = q[:, None]
        out = out[:, None] if out is not None and out.ndim == 3 else out
    batch, tokens, q_heads, head_dim = q.shape
    require(1 <= tokens <= max_tokens, f"q has {tokens} new tokens a sequence", f"1 to {max_tokens}")
    require(_known_dtype(q, "q") in DTYPES, f"q has dtype {q.dtype}", "bfloat16, float16 or float32")
    for name in ("k_cache", "v_cache"):
        cache = arrays[name]
        shape = tuple(cache.shape)
        require(cache.ndim == 4, f"{name} has shape {shape}", "[pages, page_size, Hkv, D]")
        require(cache.dtype == q.dtype, f"{name} has dtype {cache.dtype}", f"that of q, {q.dtype}")
        require(shape[3] == head_dim, f"{name} has head dimension {shape[3]}", f"that of q, {head_dim}")
        require(shape == tuple(k_cache.shape), f"{name} has shape {shape}", f"that of k_cache, {tuple(k_cache.shape)}")
        require(min(shape[:3]) > 0, f"{name} has shape {shape}", "at least one page, one token a page and one head")
    kv_heads = k_cache.shape[2]
    require(q_heads % kv_heads == 0, f"q has {q_heads} heads", f"a multiple of the {kv_heads} heads of k_cache")
    require(16 <= head_dim <= 256 and head_dim % 8 == 0, f"head dimension {head_dim}", "a multiple of 8 from 16 to 256")
    shape = tuple(block_table.shape)
    require(block_table.ndim == 2 and shape[0] == batch, f"block_table has shape {shape}", f"[B = {batch}, columns]")
    require(tuple(seq_lens.shape) == (batch,), f"seq_lens has shape {tuple(seq_lens.shape)}", f"[B = {batch}]")
    for name in ("block_table", "seq_lens"):
        kind = _known_dtype(arrays[name], name)
        wide = kind is not None and kind.kind in "iu" and kind.itemsize >= 4
        require(wide, f"{name} has dtype {arrays[name].dtype}", "a 32- or 64-bit integer")
    if out is not None:
        require(
            tuple(out.shape) == tuple(q.shape),
            f"out has shape {tuple(arrays['out'].shape)}",
            f"that of q, {tuple(arrays['q'].shape)}",
        )
        require(out.dtype == q.dtype, f"out has dtype {out.dtype}", f"that of q, {q.dtype}")
        require(is_torch(out) or out.flags.writeable, "out is read-only", "writeable")
    rows = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **({} if out is None else {"out": out})}
    for name, array in {**rows, "block_table": block_table, "seq_lens": seq_lens}.items():
        if 0 in array.shape:  # NumPy gives such arrays any strides
            continue
        strides = element_strides(array, name)
        require(
            name == "seq_lens" or array.shape[-1] < 2 or strides[-1] == 1,
            f"{name} has strides {strides}",
            "contiguous in the last dimension",
        )
        require(min(strides) >= 0, f"{name} has strides {strides}", "not negative")
        overlap = name == "out" and any(n > 1 and s == 0 for n, s in zip(array.shape, strides, strict=True))
        require(not overlap, f"out has strides {strides}", "without elements that share memory")
    if out is not None:
        in_place = _same_view(out, q)
        for name, array in arrays.items():
            apart = name == "out" or (name == "q" and in_place) or not overlaps(out, array)
            require(apart, f"out shares memory with {name}", "memory of its own, or q itself")
    inputs = PagedInputs(q, k_cache, v_cache, block_table, seq_lens, out, drop_tokens)
    if check or (check is None and not on_gpu(q)):
        check_lengths_and_pages(seq_lens, block_table, k_cache.shape[0], k_cache.shape[1])
    return inputs


def check_lengths_and_pages(seq_lens: Any, block_table: Any, pages: int, page_size: int) -> None:
    """ValueError unless every length fits its row of the table, and every page in use is in the pool."""
    lengths, table = (to_numpy(a.cpu() if is_torch(a) else a) for a in (seq_lens, block_table))
    if not lengths.size:
        return
    most = table.shape[1] * page_size
    bad = (lengths < 0) | (lengths > most)
    if bad.any():
        b = int(bad.argmax())
        raise ValueError(
            f"seq_lens[{b}] is {lengths[b]}: must be 0 to {most}, what the {table.shape[1]} columns of block_table "
            f"hold in pages of {page_size}"
        )
    used = np.arange(table.shape[1]) * page_size < lengths[:, None]
    outside = used & ((table < 0) | (table >= pages))
    if outside.any():
        b, column = np.argwhere(outside)[0]
        raise ValueError(f"block_table[{b}, {column}] is {table[b, column]}: a page in use must be 0 to {pages - 1}")


def check_lane_copies(arrays: dict[str, Any]) -> None:
    """ValueError for arrays ``[.., D]`` in CPU memory whose rows the emulated lanes cannot copy."""
    for name, array in arrays.items():
        strides = to_numpy(array, name).strides
        require(
            not any(stride % 16 for stride, n in zip(strides[:-1], array.shape, strict=False) if n > 1),
            f"{name} has strides of {strides} bytes",
            "multiples of 16, what a lane copies at a time, to be emulated; the triton and reference backends take any",
        )


def check_paged_collection(cache: Any) -> None:
    """ValueError for a cache of another kind."""
    require(isinstance(cache, PagedKVCacheCollection), f"cache is a {type(cache).__name__}", "a PagedKVCacheCollection")


def lengths_with_new(cache_lengths: Any, q: Any) -> Any:
    """Keys of each sequence, the new tokens of q ``[B, H, D]`` or ``[B, S, H, D]`` among them."""
    lengths = cache_lengths.long() if is_torch(cache_lengths) else cache_lengths.astype(np.int64)
    return lengths + (q.shape[1] if getattr(q, "ndim", 0) == 4 else 1)


def _same_view(a: Any, b: Any) -> bool:
    """Whether two arrays of one shape and dtype are the same elements."""
    if is_torch(a):
        return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return a.ctypes.data == b.ctypes.data and a.strides == b.strides


def _known_dtype(array: Any, name: str) -> np.dtype[Any] | None:
    """The dtype; None for one that kvlab does not know."""
    try:
        return dtype_of(array, name)
    except ValueError:
        return None


def finite_number(value: Any, name: str, accepted: str, *, lowest: float = -FLOAT32_MAX) -> float:
    """``value`` as a float from ``lowest`` to the largest float32; ValueError otherwise."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    require(lowest <= number <= FLOAT32_MAX, f"{name} {value!r}", accepted)
    return number


def require(fulfilled: Any, what: str, accepted: str) -> None:
    """ValueError "what: must be accepted" unless fulfilled."""
    if not fulfilled:
        raise ValueError(f"{what}: must be {accepted}")
