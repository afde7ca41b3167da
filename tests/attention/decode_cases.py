"""Cases of paged decode with everything poisoned that must not be read, and the yardsticks they are measured with."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvlab.attention.mha_decode.reference import reference
from kvlab.cache.arrays import to_numpy, to_torch
from kvlab.memory import as_dtype

HUGE = 2147480000
"""What the unused entries of a page table may hold, besides -1."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """Sizes of a call; ``build`` makes its arrays. ``lens`` count the S new tokens."""

    lens: tuple[int, ...]
    heads: tuple[int, int] = (8, 2)
    D: int = 64
    page: int = 16
    dtype: str = "bf16"
    S: int = 1
    splits: int | None = None
    storage: str = "apart"
    seed: int = 0

    def __str__(self) -> str:
        longest = max(self.lens, default=0)
        name = f"B{len(self.lens)}-H{self.heads[0]}x{self.heads[1]}-D{self.D}-page{self.page}-ctx{longest}-{self.dtype}"
        name += f"-S{self.S}" if self.S > 1 else ""
        name += f"-splits{self.splits}" if self.splits is not None else ""
        return name + (f"-{self.storage}" if self.storage != "apart" else "")

    def build(self) -> Inputs:
        """Random values in the slots that are used, NaN in all others; pages dealt at random; garbage in the table."""
        rng = np.random.default_rng(self.seed)
        dtype, (q_heads, kv_heads) = as_dtype(self.dtype), self.heads
        lens = np.array(self.lens, np.int32)
        batch, columns = len(lens), -(-lens // self.page)
        pages = int(columns.sum()) + 2
        k, v = storage(self.storage, (pages, self.page, kv_heads, self.D), dtype)
        table = np.empty((batch, max(columns, default=0) + 2), np.int32)
        table[:, ::2], table[:, 1::2] = -1, HUGE
        used = np.arange(table.shape[1]) < columns[:, None]
        table[used] = rng.permutation(pages)[: used.sum()]
        b, token = np.nonzero(np.arange(max(self.lens, default=0)) < lens[:, None])
        at = table[b, token // self.page], token % self.page
        for cache in (k, v):
            cache[at] = rng.standard_normal((len(b), kv_heads, self.D)).astype(dtype)
        q = rng.standard_normal((batch, self.S, q_heads, self.D)).astype(dtype)
        return Inputs(q, k, v, table, lens)


def storage(kind: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """K and V ``[pages, page_size, heads, D]``, all NaN: apart, halves of one buffer, HND, or columns of wider rows."""
    pages, page, heads, D = shape
    if kind == "apart":
        pair = np.empty((2, *shape), dtype)
    elif kind == "halves":
        pair = np.empty((pages, 2, page, heads, D), dtype).swapaxes(0, 1)
    elif kind == "hnd":
        pair = np.empty((2, pages, heads, page, D), dtype).swapaxes(2, 3)
    elif kind == "wide":
        pair = np.empty((2, pages + 1, page, heads + 1, 2 * D), dtype)[:, 1:, :, 1:, D:]
    elif kind == "head-major":
        pair = np.empty((heads, 2, pages, page, D), dtype).transpose(1, 2, 3, 0, 4)
    else:
        raise ValueError(kind)
    base = pair
    while base.base is not None:
        base = base.base
    base[...] = np.nan
    return pair[0], pair[1]


@dataclass
class Inputs:
    """The arrays of a call; q is ``[B, S, Hq, D]``."""

    q: Array
    k: Array
    v: Array
    table: Array
    lens: Array

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.q, self.k, self.v, self.table, self.lens

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1]) ** -0.5

    def torch(self, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        return tuple(_on(to_torch(a), device) for a in self.arrays)

    def exact(self) -> tuple[Array, Array]:
        """The float64 reference."""
        return reference(*self.arrays, scale=self.scale)

    def with_(self, **changes: Any) -> Inputs:
        return replace(self, **changes)


def _on(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """On a device with the strides that it has (``Tensor.to`` packs a view)."""
    if device == "cpu":
        return tensor
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    flat = tensor.as_strided((extent,), (1,)).to(device)
    return flat.as_strided(tensor.shape, tensor.stride())


def dense(x: Inputs, dtype: torch.dtype, b: int) -> tuple[torch.Tensor, ...]:
    """q ``[Hq, S, D]``, k and v ``[Hq, n, D]`` and what each query sees ``[S, n]``, of one sequence."""
    n, S, q_heads = int(x.lens[b]), x.q.shape[1], x.q.shape[2]
    token = np.arange(n)
    at = x.table[b, token // x.k.shape[1]], token % x.k.shape[1]
    q = to_torch(np.ascontiguousarray(x.q[b])).to(dtype).transpose(0, 1)
    k, v = (to_torch(np.ascontiguousarray(c[at])).to(dtype).transpose(0, 1) for c in (x.k, x.v))
    k, v = (t.repeat_interleave(q_heads // t.shape[0], 0) for t in (k, v))
    visible = torch.ones(S, n, dtype=torch.bool).tril(n - S)
    return q, k, v, visible


def plain_torch(x: Inputs, dtype: torch.dtype) -> Array:
    """``softmax(q k^T * scale) v`` as PyTorch has it in ``dtype``, every intermediate rounded: ``[B, S, Hq, D]``."""
    out = np.zeros(x.q.shape)
    for b in range(len(x.lens)):
        q, k, v, visible = dense(x, dtype, b)
        s = (q @ k.transpose(1, 2) * x.scale).masked_fill(~visible, float("-inf"))
        o = torch.nan_to_num(torch.softmax(s, -1)) @ v
        out[b] = o.transpose(0, 1).double().numpy()
    return out


def assert_accurate(x: Inputs, out: Any, lse: Any = None) -> None:
    """DESIGN's tolerance. fp32: 1e-5. 16 bits: error at most 2x (largest), 1.5x (mean) that of PyTorch, plus 1e-5."""
    out = to_numpy(out).reshape(x.q.shape).astype(np.float64)
    exact, exact_lse = x.exact()
    assert np.isfinite(out).all()
    error = np.abs(out - exact)
    if error.size:
        if x.q.dtype.itemsize == 4:
            assert error.max() <= 1e-5
        else:
            theirs = np.abs(plain_torch(x, getattr(torch, x.q.dtype.name)) - exact)
            assert error.max() <= 2 * theirs.max() + 1e-5
            assert error.mean() <= 1.5 * theirs.mean() + 1e-5
    empty = np.isneginf(exact_lse)  # [B, Hq, S]
    assert (out.transpose(0, 2, 1, 3)[empty] == 0).all(), "a row without a key must give exactly 0"
    if lse is not None:
        lse = to_numpy(lse).reshape(exact_lse.shape)
        assert lse.dtype == np.float32
        assert (np.isneginf(lse) == empty).all()
        np.testing.assert_allclose(lse[~empty], exact_lse[~empty], rtol=1e-5, atol=1e-5)


def sparse(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Array:
    """Zeros with ``strides`` (elements) in memory of their own, of which only touched pages are real."""
    dtype = as_dtype(dtype)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
    flat = np.frombuffer(mmap.mmap(-1, span * dtype.itemsize, flags=flags), dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, tuple(s * dtype.itemsize for s in strides))


def spread_out(x: Inputs, axis: str) -> tuple[Inputs, Array]:
    """The same call with K, V, q and an ``out`` whose pages, slots or heads span more than 2^31 elements."""
    D = x.q.shape[3]

    def far(array: Array, dimension: int) -> Array:
        inner = list(np.cumprod([1, *array.shape[:0:-1]])[::-1])
        big = -(-(2**31 + 2**20) // (array.shape[dimension] - 1)) // 16 * 16 + 16
        inner[dimension] = big
        return sparse(array.shape, tuple(int(s) for s in inner), array.dtype)

    k, v = (far(c, {"page": 0, "slot": 1, "head": 2}[axis]) for c in (x.k, x.v))
    k[...], v[...] = x.k, x.v
    q, out = (far(x.q, {"page": 0, "slot": 1, "head": 2}[axis]) for _ in range(2))
    q[...] = x.q
    out[...] = np.nan
    assert q.shape[3] == D
    return x.with_(q=q, k=k, v=v), out


def decode_far_apart(case: Case, axis: str) -> tuple[Array, Array]:
    """Interpreted kernel on such a call and on its dense copy: both outputs. Runs where Triton is interpreted."""
    from kvlab.attention import mha_decode_paged

    x = case.build()
    far, out = spread_out(x, axis)
    options = {"num_splits": case.splits, "backend": "triton"}
    mha_decode_paged(*far.arrays, out=out, **options)
    return out.copy(), mha_decode_paged(*x.arrays, **options)


def bits(array: Any) -> bytes:
    """The bytes of an array's elements."""
    return np.ascontiguousarray(to_numpy(array)).tobytes()
