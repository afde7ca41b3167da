"""What all tests of attention measure with: the tolerance, bits, strides that stay, memory that is mostly not there."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from kvlab.cache.arrays import to_numpy
from kvlab.memory import as_dtype

HUGE = 2147480000
"""What the unused entries of a page table may hold, besides -1."""

Array = np.ndarray[Any, Any]


class Call(Protocol):
    """The inputs of a call, and what it should give: float64 ``(out, lse)``, and out as PyTorch rounds it."""

    q: Array

    def exact(self) -> tuple[Array, Array]: ...

    def plain_torch(self) -> Array: ...


def assert_accurate(x: Call, out: Any, lse: Any = None) -> None:
    """The tolerance. fp32: 1e-5. 16 bits: error at most 2x (largest), 1.5x (mean) that of PyTorch, plus 1e-5."""
    out = to_numpy(out).astype(np.float64)
    exact, exact_lse = x.exact()
    assert out.shape == exact.shape
    assert np.isfinite(out).all()
    error = np.abs(out - exact)
    if error.size and x.q.dtype.itemsize == 4:
        assert error.max() <= 1e-5
    elif error.size:
        theirs = np.abs(x.plain_torch() - exact)
        assert error.max() <= 2 * theirs.max() + 1e-5
        assert error.mean() <= 1.5 * theirs.mean() + 1e-5
    empty = np.isneginf(exact_lse)  # [B?, Hq, S]
    nothing = empty | np.moveaxis((exact == 0).all(-1), -1, -2)  # a row that sees its sink only has an lse
    assert (np.moveaxis(out, -2, -3)[nothing] == 0).all(), "a row without a key must give exactly 0"
    if lse is not None:
        lse = to_numpy(lse)
        assert lse.shape == exact_lse.shape
        assert lse.dtype == np.float32
        assert (np.isneginf(lse) == empty).all()
        np.testing.assert_allclose(lse[~empty], exact_lse[~empty], rtol=1e-5, atol=1e-5)


def bits(array: Any) -> bytes:
    """The bytes of an array's elements."""
    return np.ascontiguousarray(to_numpy(array)).tobytes()


def on(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """On a device with the strides that it has (``Tensor.to`` packs a view)."""
    if device == "cpu":
        return tensor
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    flat = tensor.as_strided((extent,), (1,)).to(device)
    return flat.as_strided(tensor.shape, tensor.stride())


def sparse(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Array:
    """Zeros with ``strides`` (elements) in memory of their own, of which only touched pages are real."""
    dtype = as_dtype(dtype)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
    flat = np.frombuffer(mmap.mmap(-1, span * dtype.itemsize, flags=flags), dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, tuple(s * dtype.itemsize for s in strides))


def far_stride(n: int) -> int:
    """Elements, a multiple of 16, such that n rows so far apart span more than 2^31 of them."""
    return -(-(2**31 + 2**20) // (n - 1)) // 16 * 16 + 16


def page_table(columns: Array, pages: int, rng: np.random.Generator) -> Array:
    """Pages dealt at random to sequences of ``columns`` pages each; garbage in the unused entries."""
    table = np.empty((len(columns), int(columns.max(initial=0)) + 2), np.int32)
    table[:, ::2], table[:, 1::2] = -1, HUGE
    used = np.arange(table.shape[1]) < columns[:, None]
    table[used] = rng.permutation(pages)[: used.sum()]
    return table


@contextmanager
def nothing_waits() -> Iterator[None]:
    """An error for every operation that makes the host wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
