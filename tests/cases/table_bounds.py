"""Calls whose lengths do not fit the page table: more keys than a row's columns hold, and fewer than none.

The row of the next sequence stands behind a row of the table, and names pages full of NaN; so do the columns in front
of the table's first row. What a row holds are random values, and what it holds is all that a call may read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.attention import (
    mha_decode_paged,
    mha_decode_streaming_paged,
    mha_prefill_paged,
    mla_decode_paged,
    mla_prefill_paged,
)
from kvlab.memory import bfloat16

Array = np.ndarray[Any, Any]
PAGE, COLUMNS, HEADS, KV_HEADS = 16, 4, 4, 2
MOST = PAGE * COLUMNS
LENGTHS = (MOST + 1, 1, -5, 10 * MOST, 37, 0)
"""As the caller gives them: a key and many keys too many, less than none."""
HELD = tuple(min(max(n, 0), MOST) for n in LENGTHS)
OPERATIONS = ("mha_decode_paged", "mha_decode_streaming_paged", "mha_prefill_paged", "mla_decode_paged",
              "mla_prefill_paged")
FUNCTIONS = {
    f.__name__: f
    for f in (mha_decode_paged, mha_decode_streaming_paged, mha_prefill_paged, mla_decode_paged, mla_prefill_paged)
}


@dataclass
class TableCall:
    """A call of ``op`` over sequences of LENGTHS, ``new`` tokens each; ``hopper``: of the sizes that Hopper's kernels
    take, in bfloat16.
    """

    op: str
    hopper: bool = False
    new: int = 1

    def __post_init__(self) -> None:
        rng = np.random.default_rng(11)
        self.function = FUNCTIONS[self.op]
        self.mla, decodes = self.op.startswith("mla"), "decode" in self.op
        self.decodes = decodes
        self.dtype = np.dtype(bfloat16 if self.hopper else np.float32)
        self.width, rope = (512, 64) if self.hopper and self.mla else (128, 32) if self.mla else (64, 0)
        self.rope = rope
        B = len(LENGTHS)
        heads = 1 if self.mla else KV_HEADS
        self.q = self._rows(rng, B, self.new, HEADS, self.width + rope)
        wide = np.full((B + 2, COLUMNS), -1)  # rows of the caller's table, and one before and behind
        self.pages = 1 + B * COLUMNS
        wide[:] = self.pages - 1  # a page of NaN
        used = rng.permutation(self.pages - 1)
        at = 0
        self.k = np.full((self.pages, PAGE, heads, self.width + rope), np.nan, self.dtype)
        self.v = np.full((self.pages, PAGE, heads, self.width), np.nan, self.dtype)
        self.own: list[tuple[Array, Array]] = []
        for b, n in enumerate(HELD):
            k, v = self._rows(rng, n, heads, self.width + rope), self._rows(rng, n, heads, self.width)
            columns = -(-n // PAGE)
            wide[b + 1, :columns] = used[at : at + columns]
            at += columns
            token = np.arange(n)
            where = wide[b + 1, token // PAGE], token % PAGE
            self.k[where], self.v[where] = k, v
            self.own.append((k, v))
        self.wide = wide
        self.lens = np.array(LENGTHS, np.int32)
        if self.mla and not decodes:  # K and V of every head, of all keys that are held; only the rope part is in pages
            self.heads_k = [self._rows(rng, n, HEADS, self.width) for n in HELD]
            self.heads_v = [self._rows(rng, n, HEADS, self.width) for n in HELD]
            self.k[..., : self.width] = np.nan

    def _rows(self, rng: Any, *shape: int) -> Array:
        return rng.standard_normal(shape).astype(self.dtype)  # type: ignore[no-any-return]

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return 0.11

    def arguments(self) -> tuple[list[Array], Array, Array, dict[str, Any]]:
        """(arrays before the table, the table with a row before and one behind, lengths, named arguments)."""
        starts = np.arange(len(LENGTHS) + 1) * self.new
        named: dict[str, Any] = {"scale": self.scale, "return_lse": True, "check": False}
        if self.decodes and self.mla:
            return [self.q, self.k[:, :, 0]], self.wide, self.lens, named | {"v_dim": self.width}
        if self.decodes:
            return [self.q, self.k, self.v], self.wide, self.lens, named
        q = self.q.reshape(-1, *self.q.shape[2:])
        named["cu_seqlens_q"] = starts
        if not self.mla:
            return [q, self.k, self.v], self.wide, self.lens, named
        named |= {"cu_seqlens_k": np.concatenate([[0], np.cumsum(HELD)]), "latent_dim": self.width}
        own = [np.concatenate(x) for x in (self.heads_k, self.heads_v)]
        return [q, *own, self.k[:, :, 0]], self.wide, self.lens, named

    def __call__(self, **options: Any) -> tuple[Any, Any]:
        """Output and lse."""
        arrays, wide, lens, named = self.arguments()
        return self.function(*arrays, wide[1:-1], lens, **named, **options)  # type: ignore[no-any-return, operator]

    def exact(self) -> tuple[Array, Array]:
        """Softmax in float64 over the keys that the rows hold; the last of them is the last new token's own."""
        out = np.zeros((len(LENGTHS), self.new, HEADS, self.width))
        lse = np.full(out.shape[:-1], -np.inf)
        for b, n in enumerate(HELD):
            k, v = self.own[b]
            if self.mla and self.decodes:
                v = k[..., : self.width]
            if self.mla and not self.decodes:
                rope = np.repeat(k[..., self.width :], HEADS, axis=1)
                k, v = np.concatenate([self.heads_k[b], rope], -1), self.heads_v[b]
            k, v = (np.repeat(x.astype(np.float64), HEADS // x.shape[1], axis=1) for x in (k, v))
            for i in range(self.new):
                seen = n - self.new + i + 1
                if seen < 1:
                    continue
                s = self.scale * np.einsum("hd,nhd->hn", self.q[b, i].astype(np.float64), k[:seen])
                top = s.max(-1, keepdims=True)
                p = np.exp(s - top)
                lse[b, i] = top[:, 0] + np.log(p.sum(-1))
                out[b, i] = np.einsum("hn,nhd->hd", p / p.sum(-1, keepdims=True), v[:seen])
        if not self.decodes:
            return out.reshape(-1, *out.shape[2:]), lse.reshape(-1, HEADS)
        return out, lse


def assert_held(call: TableCall, out: Any, lse: Any, *, atol: float = 2e-6) -> None:
    """Against ``exact``: float32 within ``atol`` (its sums, and the chip's exponentials, 2^-22), bfloat16 by the
    rounding of P and of the output.
    """
    exact, exact_lse = call.exact()
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=0, atol=2**-6 if call.hopper else atol)
    np.testing.assert_allclose(np.asarray(lse, np.float64), exact_lse, rtol=0, atol=2e-5)
