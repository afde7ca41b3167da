"""Cases of paged decode with everything poisoned that must not be read, and as PyTorch computes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from yardsticks import far_stride, on, page_table, rounded_attention, sparse

from kvlab.attention.features.resolve import Features
from kvlab.attention.mha_decode.reference import reference
from kvlab.common.arrays import to_torch
from kvlab.memory import as_dtype

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
        table = page_table(columns, pages, rng)
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
        return tuple(on(to_torch(a), device) for a in self.arrays)

    def exact(self) -> tuple[Array, Array]:
        """The float64 reference."""
        return reference(*self.arrays, scale=self.scale)

    def plain_torch(self) -> Array:
        """``softmax(q k^T * scale) v`` as PyTorch has it in the storage dtype, every intermediate rounded."""
        out = np.zeros(self.q.shape)
        for b in range(len(self.lens)):
            q, k, v = (x.transpose(0, 1) for x in dense(self, getattr(torch, self.q.dtype.name), b)[:3])
            out[b] = rounded_attention(q, k, v, Features(), scale=self.scale, keys=int(self.lens[b]))
        return out

    def with_(self, **changes: Any) -> Inputs:
        return replace(self, **changes)


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


def spread_out(x: Inputs, axis: str) -> tuple[Inputs, Array]:
    """The same call with K, V, q and an ``out`` whose pages, slots or heads span more than 2^31 elements."""
    D = x.q.shape[3]
    last_page = int(x.table[(x.table >= 0) & (x.table < len(x.k))].max())  # of those that are read

    def far(array: Array, dimension: int, last: int | None = None) -> Array:
        last = array.shape[dimension] - 1 if last is None else last
        inner = list(np.cumprod([1, *array.shape[:0:-1]])[::-1])
        inner[dimension] = far_stride(last + 1)
        return sparse(array.shape, tuple(int(s) for s in inner), array.dtype)

    last = last_page if axis == "page" else None
    k, v = (far(c, {"page": 0, "slot": 1, "head": 2}[axis], last) for c in (x.k, x.v))
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
