"""What all tests of attention measure with: the tolerance, bits, strides that stay, memory that is mostly not there."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from kvlab.attention.features.resolve import Features
from kvlab.common.arrays import to_numpy, to_torch
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
    empty = np.isneginf(exact_lse)  # [B?, S, Hq]
    nothing = empty | (exact == 0).all(-1)  # a row that sees its sink only has an lse
    assert (out[nothing] == 0).all(), "a row without a key must give exactly 0"
    if lse is not None:
        lse = to_numpy(lse)
        assert lse.shape == exact_lse.shape == out.shape[:-1]
        assert lse.dtype == np.float32
        assert (np.isneginf(lse) == empty).all()
        np.testing.assert_allclose(lse[~empty], exact_lse[~empty], rtol=1e-5, atol=1e-5)


def rounded_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: Features, *, scale: float, keys: int, first: int = 0,
    sequence: int = 0, p_fp8: bool = False,
) -> Array:
    """``softmax(scores) v`` of one sequence as PyTorch has it in the dtype of q ``[S, Hq, D]``, every intermediate
    rounded: ``[S, Hq, Dv]`` float64. k ``[n, Hkv, D]`` and v are the keys from ``first`` on of the ``keys`` of the
    sequence, their scales applied. ``p_fp8``: P in e4m3 times 2^8.
    """
    (S, heads, _), (n, kv_heads, _), dtype, mask = q.shape, k.shape, q.dtype, features.mask
    position, key = np.arange(S)[:, None] + keys - S, np.arange(first, first + n)
    lo, limit = mask.interval.bounds(position, keys, sequence)
    visible = torch.from_numpy((key >= lo) & (key < limit))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // kv_heads, 0).masked_fill(~visible.any(0)[:, None], 0) for x in (k, v))
    s = q @ k.transpose(1, 2) * scale
    if features.temperature is not None:
        s = s * torch.from_numpy(features.temperature).to(dtype)[:, None, None]
    if features.softcap:
        s = features.softcap * torch.tanh(s / features.softcap)
    if features.slopes is not None:
        slopes = features.slopes[sequence if len(features.slopes) > 1 else 0]
        s = s - torch.from_numpy(slopes[:, None, None] * np.abs(position - key)).to(dtype)
    s = s.masked_fill(~visible, float("-inf"))
    if mask.bias is not None:
        given = np.asarray(mask.bias)[sequence if len(mask.bias) > 1 else 0, :, :S, first : first + n]
        bias = np.full((len(given), S, n), -np.inf, np.float32)
        bias[:, : given.shape[1], : given.shape[2]] = given
        s = s + torch.from_numpy(bias).to(dtype)
    if features.sinks is not None:
        s = torch.cat([s, torch.from_numpy(features.sinks).to(dtype)[:, None, None].expand(-1, S, 1)], -1)
    p = torch.nan_to_num(torch.softmax(s, -1))
    top = p.max(-1, keepdim=True)[0].clamp(min=1e-30) if p.shape[-1] else 1
    p = p[..., :n]
    if p_fp8:
        p = (256 * p / top).to(torch.float8_e4m3fn).to(dtype) * top / 256
    out: Array = (p @ v).transpose(0, 1).double().numpy()
    return out


def mask_on(mask: Any, device: str) -> Any:
    """A mask whose arrays, where it has some, are torch tensors on a device."""
    arrays = {name: getattr(mask, name) for name in ("array", "valid_lengths") if hasattr(mask, name)}
    return dataclasses.replace(mask, **{n: on(to_torch(a), device) for n, a in arrays.items()}) if arrays else mask


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
