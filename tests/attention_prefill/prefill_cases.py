"""Cases of prefill with everything poisoned that must not be read, and as PyTorch computes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from yardsticks import on, page_table

from kvlab.attention.mha_prefill import mha_prefill, mha_prefill_paged
from kvlab.attention.mha_prefill.config import UNLIMITED
from kvlab.attention.mha_prefill.reference import reference
from kvlab.cache.arrays import to_torch
from kvlab.memory import as_dtype

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """Sizes of a call. ``lens``: (new tokens, keys) of each sequence; dense calls have the same for all."""

    lens: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (2, 1)
    D: int = 64
    dtype: str = "bf16"
    form: str = "dense"
    page: int = 16
    window: Any = None
    causal: bool = True
    softcap: float = 0.0
    sinks: bool = False
    strided: bool = False
    seed: int = 0

    def __str__(self) -> str:
        lens = "_".join(f"{s}x{n}" for s, n in self.lens) or "none"
        name = f"{self.form}{self.page if self.form == 'paged' else ''}-{lens}-H{self.heads[0]}x{self.heads[1]}"
        name += f"-D{self.D}-{self.dtype}" + ("" if self.causal else "-full")
        name += f"-window{self.window}".replace(" ", "") if self.window is not None else ""
        name += f"-cap{self.softcap:g}" if self.softcap else ""
        return name + ("-sinks" if self.sinks else "") + ("-strided" if self.strided else "")

    def build(self) -> Inputs:
        """Random values where they are used, NaN everywhere else, pages dealt at random, garbage in the table."""
        rng = np.random.default_rng(self.seed)
        dtype, (q_heads, kv_heads), D = as_dtype(self.dtype), self.heads, self.D
        new, keys = (np.array([pair[i] for pair in self.lens], np.int64).reshape(-1) for i in (0, 1))
        batch = len(self.lens)

        def rows(*shape: int) -> Array:
            """Random rows, in part of wider ones full of NaN where the case is strided."""
            extra = (1, 1, D) if self.strided else (0, 0, 0)
            wide = np.full((*shape[:-3], *(n + e for n, e in zip(shape[-3:], extra, strict=True))), np.nan, dtype)
            view = wide[..., extra[0] :, extra[1] :, extra[2] :]
            view[...] = rng.standard_normal(view.shape).astype(dtype)
            return view

        more: dict[str, Any] = {}
        if self.form == "dense":
            q = rows(batch, int(new.max(initial=0)), q_heads, D)
            k, v = (rows(batch, int(keys.max(initial=0)), kv_heads, D) for _ in "kv")
        else:
            q = rows(int(new.sum()), q_heads, D)
            more["cu_q"] = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        if self.form == "ragged":
            k, v = (rows(int(keys.sum()), kv_heads, D) for _ in "kv")
            more["cu_k"] = np.concatenate([[0], np.cumsum(keys)]).astype(np.int32)
        if self.form == "paged":
            columns = -(-keys // self.page)
            pages = int(columns.sum()) + 2
            pair = np.full((2, pages, self.page, kv_heads, D), np.nan, dtype)
            if self.strided:  # halves of one buffer, HND
                pair = np.full((pages, 2, kv_heads, self.page, D), np.nan, dtype).transpose(1, 0, 3, 2, 4)
            k, v = pair
            table = page_table(columns, pages, rng)
            b, key = np.nonzero(np.arange(keys.max(initial=0)) < keys[:, None])
            for cache in (k, v):
                cache[table[b, key // self.page], key % self.page] = rng.standard_normal((len(b), kv_heads, D)).astype(
                    dtype
                )
            more |= {"table": table, "seq_lens": keys.astype(np.int32)}
        if self.sinks:
            more["sinks"] = rng.standard_normal(q_heads).astype(np.float32)
        return Inputs(self, q, k, v, **more)


@dataclass
class Inputs:
    """The arrays of a call."""

    case: Case
    q: Array
    k: Array
    v: Array
    cu_q: Any = None
    cu_k: Any = None
    table: Any = None
    seq_lens: Any = None
    sinks: Any = None

    def with_(self, **changes: Any) -> Inputs:
        return replace(self, **changes)

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.case.causal, "window": self.case.window, "softcap": self.case.softcap}

    @property
    def bounds(self) -> tuple[int, int]:
        """(left, right) by the words of the documentation."""
        window = self.case.window
        left, right = (window - 1, 0) if isinstance(window, int) else window or (None, None)
        left, right = (UNLIMITED if side is None else side for side in (left, right))
        return left, 0 if self.case.causal else right

    def call(self, *, device: str | None = None, **options: Any) -> Any:
        """The public function; with torch tensors on ``device`` if given."""
        names = ("q", "k", "v", "cu_q", "cu_k", "table", "seq_lens", "sinks")
        a = {name: getattr(self, name) for name in names}
        if device is not None:
            a = {name: x if x is None else on(to_torch(x), device) for name, x in a.items()}
        options = self.options | {"sinks": a["sinks"]} | options
        if self.case.form == "paged":
            return mha_prefill_paged(a["q"], a["k"], a["v"], a["table"], a["seq_lens"], a["cu_q"], **options)
        return mha_prefill(a["q"], a["k"], a["v"], cu_seqlens_q=a["cu_q"], cu_seqlens_k=a["cu_k"], **options)

    def launch_form(self) -> tuple[Any, ...]:
        """The positional arguments of the launch functions and the reference."""
        q = self.q if self.cu_q is None else self.q[None]
        k, v = (x[None] if self.cu_k is not None else x for x in (self.k, self.v))
        return q, k, v, self.cu_q, self.cu_k, self.table, self.seq_lens, self.sinks

    def exact(self) -> tuple[Array, Array]:
        """The float64 reference."""
        left, right = self.bounds
        options = {"left": left, "right": right, "softcap": self.case.softcap}
        out, lse = reference(*self.launch_form(), scale=self.case.D**-0.5, **options)
        return (out, lse) if self.cu_q is None else (out[0], lse[0])

    def sequences(self) -> list[tuple[Any, Array, Array, Array]]:
        """(where its rows are in out, q, k, v) of each sequence."""
        found: list[tuple[Any, Array, Array, Array]] = []
        for b in range(len(self.case.lens)):
            at: Any = b if self.cu_q is None else slice(self.cu_q[b], self.cu_q[b + 1])
            where: Any = b
            if self.cu_k is not None:
                where = slice(self.cu_k[b], self.cu_k[b + 1])
            if self.table is not None:
                key = np.arange(self.seq_lens[b])
                where = self.table[b, key // self.case.page], key % self.case.page
            found.append((at, self.q[at], self.k[where], self.v[where]))
        return found

    def plain_torch(self) -> Array:
        """``softmax(q k^T * scale) v`` as PyTorch has it in the storage dtype, every intermediate rounded."""
        out, (left, right) = np.zeros(self.q.shape), self.bounds
        for at, *arrays in self.sequences():
            q, k, v = (to_torch(np.ascontiguousarray(a)).transpose(0, 1) for a in arrays)
            k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
            position = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
            key = torch.arange(k.shape[1])
            s = q @ k.transpose(1, 2) * self.case.D**-0.5
            if self.case.softcap:
                s = self.case.softcap * torch.tanh(s / self.case.softcap)
            s = s.masked_fill((key < position - left) | (key > position + right), float("-inf"))
            if self.sinks is not None:
                extra = torch.from_numpy(self.sinks).to(s.dtype)[:, None, None].expand(-1, s.shape[1], 1)
                s = torch.cat([s, extra], -1)
            p = torch.nan_to_num(torch.softmax(s, -1))[..., : k.shape[1]]
            out[at] = (p @ v).transpose(0, 1).double().numpy()
        return out
