"""Checks of the arrays of every attention operation: one library, shapes that fit, lengths and pages that exist."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from kvlab.attention.features.intervals import UNLIMITED, host
from kvlab.cache import PagedKVCacheCollection
from kvlab.common.arrays import (
    INFERENCE,
    address_of,
    dtype_of,
    element_strides,
    on_gpu,
    overlaps,
    same_place,
    to_numpy,
    wants_grad,
)
from kvlab.common.checks import require, shown
from kvlab.common.torch_here import is_torch
from kvlab.memory import bfloat16, float16, float32
from kvlab.staging import Traffic

DTYPES = (bfloat16, float16, float32)
FLOAT32_MAX = float(np.finfo(np.float32).max)


def given(**optional: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {name: value for name, value in optional.items() if value is not None}


def check_arrays(arrays: dict[str, Any]) -> None:
    """ValueError unless these are arrays without gradients, of one library, in one memory that can be read."""
    for name, array in arrays.items():
        check_array(name, array)
    same_place(**arrays)
    name, first = next(iter(arrays.items()))
    on = first.device.type if is_torch(first) else "cpu"
    require(on in ("cpu", "cuda"), f"{name} is on {on}", "in CPU memory or on a GPU")


def check_array(name: str, array: Any) -> None:
    """ValueError for what is no array, and for one that requires grad where grad mode is on."""
    known = isinstance(array, np.ndarray) or is_torch(array)
    require(known, f"{name} is a {type(array).__name__}", "a NumPy array or torch tensor")
    require(not wants_grad(array), f"{name} requires grad", INFERENCE)
    nested = is_torch(array) and array.is_nested
    require(not nested, f"{name} is a nested tensor", "a dense one, of ragged rows with their offsets")
    mapped = is_torch(array) and sys.modules["torch"]._C._functorch.is_functorch_wrapped_tensor(array)
    require(not mapped, f"{name} is a tensor within torch.func (vmap, jvp, ...)", "plain: calls take whole batches")


def check_dtype(name: str, array: Any) -> None:
    """ValueError for another dtype than those of DTYPES."""
    require(known_dtype(array, name) in DTYPES, f"{name} has dtype {array.dtype}", "bfloat16, float16 or float32")


def check_integers(name: str, array: Any) -> None:
    """ValueError for another dtype than an integer of 32 or 64 bits."""
    kind = known_dtype(array, name)
    wide = kind is not None and kind.kind in "iu" and kind.itemsize >= 4
    require(wide, f"{name} has dtype {array.dtype}", "a 32- or 64-bit integer")


def check_strides(name: str, array: Any, *, contiguous: bool = True) -> None:
    """ValueError for negative strides and, if ``contiguous``, for elements of a row that lie apart."""
    if 0 in array.shape:  # NumPy gives such arrays any strides
        return
    strides = element_strides(array, name)
    require(not contiguous or strides[-1] == 1, f"{name} has strides {strides}", "contiguous in the last dimension")
    require(min(strides) >= 0, f"{name} has strides {strides}", "not negative")


def check_writeable(name: str, array: Any) -> None:
    """ValueError unless each element can be written, to memory of its own."""
    if 0 not in array.shape:
        strides = element_strides(array, name)
        span = 1  # elements from the first to the last of the axes so far, the closest first
        for stride, n in sorted((abs(s), n) for s, n in zip(strides, array.shape, strict=True) if n > 1):
            apart = stride >= span
            require(apart, f"{name} has strides {strides}", "without elements that share memory")
            span += (n - 1) * stride
    require(is_torch(array) or array.flags.writeable, f"{name} is read-only", "writeable")


def check_pages(caches: dict[str, Any]) -> None:
    """ValueError unless these are ``[pages, page_size, Hkv, D]``, and hold something."""
    for name, cache in caches.items():
        shape = tuple(cache.shape)
        require(cache.ndim == 4, f"{name} has shape {shape}", "[pages, page_size, Hkv, D]")
        require(min(shape[:3]) > 0, f"{name} has shape {shape}", "at least one page, one token a page and one head")


def looks_at_values(check: bool | None, array: Any) -> bool:
    """Tells whether a call looks at the values of its arguments. None: where that needs no synchronisation with a GPU.
    """
    return bool(check) or (check is None and not on_gpu(array))


def check_lengths_and_pages(seq_lens: Any, block_table: Any, pages: int, page_size: int, first: Any = None) -> None:
    """ValueError unless every length fits its row of the table, and every page in use is in the pool. first : keys
    ``[B]`` before which those of a sequence are not read; None reads all.
    """
    lengths, table = host(seq_lens), host(block_table)
    if not lengths.size:
        return
    columns = int(table.shape[1])
    most, why = columns * page_size, f"what the {columns} columns of block_table hold in pages of {page_size}"
    most, why = (most, why) if most <= UNLIMITED else (UNLIMITED, "as keys have 32 bits")
    bad = (lengths < 0) | (lengths > most)
    if bad.any():
        b = int(bad.argmax())
        raise ValueError(f"seq_lens[{b}] is {lengths[b]}: must be 0 to {most}, {why}")
    end = (np.arange(columns) + 1) * page_size
    used = (end - page_size < lengths[:, None]) & (end > host(0 if first is None else first).reshape(-1, 1))
    outside = used & ((table < 0) | (table >= pages))
    if outside.any():
        b, column = np.argwhere(outside)[0]
        raise ValueError(f"block_table[{b}, {column}] is {table[b, column]}: a page in use must be 0 to {pages - 1}")


def check_slots(name: str, indices: Any, pages: int, page_size: int) -> None:
    """ValueError for integers that are neither a slot of the pool nor -1."""
    slots, most = host(indices), pages * page_size
    outside = (slots < -1) | (slots >= most)
    if outside.any():
        at = np.argwhere(outside)[0]
        raise ValueError(f"{name}{at.tolist()} is {slots[tuple(at)]}: must be a slot, 0 to {most - 1}, or -1 for none")


def check_apart(out: Any, arrays: dict[str, Any], *, unless: str = "") -> None:
    """ValueError where ``out`` shares memory with another array; it may be the one called ``unless`` itself."""
    accepted = f"memory of its own, or {unless} itself" if unless else "memory of its own"
    for name, array in arrays.items():
        apart = (name == unless and _same_view(out, array)) or not overlaps(out, array)
        require(apart, f"out shares memory with {name}", accepted)


def _same_view(a: Any, b: Any) -> bool:
    """True where two arrays are the same elements."""
    if tuple(a.shape) != tuple(b.shape) or a.dtype != b.dtype:
        return False
    return address_of(a) == address_of(b) and element_strides(a) == element_strides(b)


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
    return countable(cache_lengths) + (q.shape[1] if getattr(q, "ndim", 0) == 4 else 1)


def countable(array: Any) -> Any:
    """Integers of either library to count with: as int64, so that sums whose values are checked do not wrap; on a GPU,
    where 32 bits hold all lengths, as they are unless torch cannot add them.
    """
    if on_gpu(array) and known_dtype(array, "lengths") in (np.int32, np.int64):
        return array
    return array.long() if is_torch(array) else array.astype(np.int64)


def known_dtype(array: Any, name: str) -> np.dtype[Any] | None:
    """The dtype; None for one that kvlab does not know."""
    try:
        return dtype_of(array, name)
    except ValueError:
        return None


def finite_number(value: Any, name: str, accepted: str, *, lowest: float = -FLOAT32_MAX) -> float:
    """``float(value)`` of a number, no text or bool, from ``lowest`` to the largest float32; or ValueError."""
    try:
        number = math.nan if isinstance(value, str | bytes | bool | np.bool_) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    require(lowest <= number <= FLOAT32_MAX, f"{name} is {shown(value)}", accepted)
    return number


def check_traffic(traffic: Any) -> None:
    """ValueError for a traffic that counts nothing."""
    require(isinstance(traffic, Traffic | None), f"traffic is {shown(traffic)}", "a kvlab.staging.Traffic or None")


def check_layout_of_scale(name: str, scale: Any, cache: Any) -> None:
    """ValueError for a scale of tokens or blocks whose axes are not those of pages as "HND", ``cache``.

    >>> check_layout_of_scale("k_scale", np.ones((4, 16, 2), np.float32), np.ones((4, 2, 16, 64)))
    Traceback (most recent call last):
        ...
    ValueError: k_scale has shape (4, 16, 2): must be (4, 2, 16), ..., as kv_layout 'HND' has k_cache
    """
    if min(getattr(scale, "ndim", 0), getattr(cache, "ndim", 0)) > 2:
        shape, pages = tuple(map(int, scale.shape)), tuple(map(int, cache.shape[:3]))
        accepted = f"{shown(pages)}, ..., as kv_layout 'HND' has {name[0]}_cache"
        if len(shape) == 5:  # the 4x4 order of scales of blocks
            pages = *pages[:2], pages[2] // 4
            accepted = f"{shown(pages)}, ..., four slots of k_cache side by side".replace("k_", f"{name[0]}_")
        require(shape[:3] == pages, f"{name} has shape {shape}", accepted)
