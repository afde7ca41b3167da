"""Cases of MLA decode with everything poisoned that must not be read, and as PyTorch computes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from yardsticks import far_stride, on, page_table, sparse

from kvlab.attention.mla_decode.reference import reference
from kvlab.cache.arrays import to_torch
from kvlab.memory import as_dtype

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """Sizes of a call; ``build`` makes its arrays. ``lens`` count the S new tokens."""

    lens: tuple[int, ...]
    H: int = 4
    columns: tuple[int, int] = (128, 64)
    page: int = 16
    dtype: str = "bf16"
    S: int = 1
    splits: int | None = None
    storage: str = "dense"
    seed: int = 0

    def __str__(self) -> str:
        latent, rope = self.columns
        name = (
            f"B{len(self.lens)}-H{self.H}-{latent}+{rope}-page{self.page}-ctx{max(self.lens, default=0)}-{self.dtype}"
        )
        name += f"-S{self.S}" if self.S > 1 else ""
        name += f"-splits{self.splits}" if self.splits is not None else ""
        return name + (f"-{self.storage}" if self.storage != "dense" else "")

    def build(self) -> Inputs:
        """Random values in the slots that are used, NaN in all others; pages dealt at random; garbage in the table."""
        rng = np.random.default_rng(self.seed)
        dtype, D = as_dtype(self.dtype), sum(self.columns)
        lens = np.array(self.lens, np.int32)
        batch, columns = len(lens), -(-lens // self.page)
        pages = int(columns.sum()) + 2
        kv = storage(self.storage, (pages, self.page, D), dtype)
        table = page_table(columns, pages, rng)
        b, token = np.nonzero(np.arange(max(self.lens, default=0)) < lens[:, None])
        rows = kv[:, :, 0] if kv.ndim == 4 else kv
        rows[table[b, token // self.page], token % self.page] = rng.standard_normal((len(b), D)).astype(dtype)
        q = rng.standard_normal((batch, self.S, self.H, D)).astype(dtype)
        return Inputs(q, kv, table, lens, self.columns[0])


def storage(kind: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A cache ``[pages, page_size, D]``, all NaN: dense, with its axis of one head, one layer of several, or columns of
    wider rows.
    """
    pages, page, D = shape
    if kind == "dense":
        whole = cache = np.empty(shape, dtype)
    elif kind == "head":
        whole = cache = np.empty((pages, page, 1, D), dtype)
    elif kind == "layers":
        whole = np.empty((pages, 1, 3, page, 1, D), dtype)
        cache = whole[:, 0, 1, :, 0]
    elif kind == "wide":
        whole = np.empty((pages + 1, page, 2 * D), dtype)
        cache = whole[1:, :, D:]
    else:
        raise ValueError(kind)
    whole[...] = np.nan
    return cache


@dataclass
class Inputs:
    """The arrays of a call; q is ``[B, S, H, D]``."""

    q: Array
    kv: Array
    table: Array
    lens: Array
    v_dim: int

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.q, self.kv, self.table, self.lens

    @property
    def rows(self) -> Array:
        """The cache ``[pages, page_size, D]``."""
        return self.kv[:, :, 0] if self.kv.ndim == 4 else self.kv

    @property
    def options(self) -> dict[str, Any]:
        return {"v_dim": self.v_dim, "scale": self.scale}

    @property
    def scale(self) -> float:
        """Of heads of 128 + 64 before absorption."""
        return 192**-0.5

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        return *self.q.shape[:3], self.v_dim

    def torch(self, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        return tuple(on(to_torch(a), device) for a in self.arrays)

    def exact(self) -> tuple[Array, Array]:
        """The float64 reference."""
        return reference(self.q, self.rows, self.table, self.lens, **self.options)

    def plain_torch(self) -> Array:
        """``softmax(q k^T * scale) v`` as PyTorch has it in the storage dtype, every intermediate rounded."""
        out, S, page = np.zeros(self.shape), self.q.shape[1], self.rows.shape[1]
        for b in range(len(self.lens)):
            n = int(self.lens[b])
            token = np.arange(n)
            k = to_torch(np.ascontiguousarray(self.rows[self.table[b, token // page], token % page]))
            q = to_torch(np.ascontiguousarray(self.q[b])).transpose(0, 1)  # [H, S, D]
            visible = torch.ones(S, n, dtype=torch.bool).tril(n - S)
            s = (q @ k.T * self.scale).masked_fill(~visible, float("-inf"))
            o = torch.nan_to_num(torch.softmax(s, -1)) @ k[:, : self.v_dim]
            out[b] = o.transpose(0, 1).double().numpy()
        return out

    def with_(self, **changes: Any) -> Inputs:
        return replace(self, **changes)


def decode_far_apart(case: Case) -> tuple[Array, Array]:
    """Interpreted kernel with pages, and with heads of q and out, that span more than 2^31 elements, and on the dense
    copy: both outputs. Runs where Triton is interpreted.
    """
    from kvlab.attention import mla_decode_paged

    x = case.build()
    pages, _, D = x.kv.shape
    kv = sparse(x.kv.shape, (far_stride(pages), D, 1), x.kv.dtype)
    kv[...] = x.kv
    far = far_stride(case.H)
    one = (case.H * far, case.H * far, far, 1)
    q, out = (sparse((1, 1, case.H, n), one, x.q.dtype) for n in (D, x.v_dim))
    q[...] = x.q
    out[...] = np.nan
    options = {"num_splits": case.splits, "backend": "triton", **x.options}
    mla_decode_paged(*x.with_(q=q, kv=kv).arrays, out=out, **options)
    return out.copy(), mla_decode_paged(*x.arrays, **options)
