"""Calls whose seen keys score far lower than anything that might stand for a hidden one, and softmax over those alone.

Column 0 of q times column 0 of K is the score that all seen keys share, ``-FAR[name]``; hidden keys have as much above
zero. Column 1 tells the keys apart, by whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvlab import attention
from kvlab.attention import masks
from kvlab.memory import bfloat16

Array = np.ndarray[Any, Any]
PAGE, COLUMNS, HEADS, KV_HEADS, LENS = 16, 5, 4, 2, (3, 70, 33)
FAR = {"near": (240.0, 250.0), "below every bias": (2.0**55, 2.0**55)}
"""Factors of column 0. 2^110 leaves no digits to column 1: all seen keys weigh the same. Hopper's kernels, which keep
maxima before they are scaled, tell scores from nothing down to -2^100: there it is 2^98.
"""
SIGHTS = ("causal", "window", "bias")
OPERATIONS = (
    "mha_decode_paged", "mha_decode_streaming_paged", "mla_decode_paged", "mha_prefill dense", "mha_prefill ragged",
    "mha_prefill_paged", "mla_prefill_ragged", "mla_prefill_paged",
)


@dataclass
class HiddenCall:
    """A call of ``op``; ``wide``: of the sizes and the dtype that Hopper's kernels take."""

    op: str
    sight: str = "causal"
    far: str = "near"
    wide: bool = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        name, _, self.form = self.op.partition(" ")
        self.function = getattr(attention, name)
        self.mla, self.decodes = name.startswith("mla"), "decode" in name
        self.lens = (70,) * 3 if self.form == "dense" else LENS
        self.S = 2 if self.decodes else 3
        self.dtype = np.dtype(bfloat16 if self.wide else np.float32)
        self.width, self.rope = (512, 64) if self.wide and self.mla else (128, 32) if self.mla else (64, 0)
        shared = self.mla and self.decodes  # V is the latent part of K
        heads = 1 if shared else HEADS if self.mla else KV_HEADS
        one, other = FAR[self.far]
        if self.wide and one > 2**49:
            one = other = 2.0**49
        self.q = np.zeros((3, self.S, HEADS, self.width + self.rope), self.dtype)
        self.q[..., 0], self.q[..., 1] = -one, 1
        self.bias = np.where(rng.random((HEADS, self.S, max(self.lens))) < 0.4, -np.inf, 0).astype(np.float32)
        self.bias[..., 0] = 0  # no row without a key
        self.k, self.v = [], []
        for b, n in enumerate(self.lens):
            k = np.zeros((n, heads, self.width + self.rope), self.dtype)
            k[..., 1] = rng.integers(0, 3, (n, heads))
            k[..., 0] = np.where(self.visible(b).any((0, 1)), other, -other)[:, None]
            self.k.append(k)
            v = rng.random((n, heads, self.width)).astype(self.dtype)
            if shared:
                k[..., 2 : self.width] = v[..., 2:]
                v = k[..., : self.width]
            self.v.append(v)

    def visible(self, b: int) -> Array:
        """``[S, heads, n]``: what each new token sees."""
        n = self.lens[b]
        p, key = np.arange(self.S)[:, None, None] + n - self.S, np.arange(n)
        seen = np.broadcast_to(key <= p, (self.S, HEADS, n))
        if self.sight == "window":
            seen = seen & (key > p - 20)
        if self.sight == "bias":
            seen = seen & np.isfinite(self.bias[:, :, :n].swapaxes(0, 1))
        return seen

    def exact(self) -> tuple[Array, Array]:
        """Softmax in float64 over the seen keys, each ``[rows, heads, ..]`` as the call's."""
        outs, lses = [], []
        for b in range(3):
            k, v = (np.repeat(x[b].astype(np.float64), HEADS // x[b].shape[1], axis=1) for x in (self.k, self.v))
            s = np.einsum("shd,nhd->shn", self.q[b].astype(np.float64), k)
            s = np.where(self.visible(b), s, -np.inf)
            top = s.max(-1, keepdims=True)
            top = np.where(np.isneginf(top), 0, top)
            p = np.exp(s - top)
            total = p.sum(-1, keepdims=True)
            with np.errstate(divide="ignore"):
                lses.append((top + np.log(total))[..., 0])
            outs.append(np.einsum("shn,nhd->shd", p / np.where(total == 0, 1, total), v))
        return self._rows(np.stack(outs)), self._rows(np.stack(lses))

    def options(self) -> dict[str, Any]:
        """The named arguments that say what is seen."""
        if self.sight == "window":
            return {"window": 20}
        if self.sight == "bias":
            causal = {} if self.decodes else {"causal": False}
            late = np.broadcast_to(np.arange(self.bias.shape[2]), self.bias.shape)
            whole = np.zeros((3, *self.bias.shape), np.float32)
            for b, n in enumerate(self.lens):
                behind = late > np.arange(self.S)[:, None] + n - self.S
                whole[b] = np.where(behind, -np.inf, self.bias)
            return {"mask": masks.MaterializedMask(whole), **causal}
        return {}

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments."""
        named: dict[str, Any] = {"scale": 1.0, "return_lse": True, **self.options()}
        starts = np.concatenate([[0], np.cumsum(self.lens)])
        ragged = {"cu_seqlens_q": np.arange(4) * self.S, "cu_seqlens_k": starts}
        q = self._rows(self.q)
        if self.form == "dense":
            return (q, np.stack(self.k), np.stack(self.v)), named
        if self.form == "ragged":
            return (q, np.concatenate(self.k), np.concatenate(self.v)), named | ragged
        if self.mla and not self.decodes:
            own = [np.concatenate(x) for x in ([k[..., : self.width] for k in self.k], self.v)]
            rope = [k[:, 0, self.width :] for k in self.k]
            if self.op == "mla_prefill_ragged":
                return (q, *own, np.concatenate(rope)), named | ragged
            latents = [np.concatenate([np.full((len(x), 128), np.nan, x.dtype), x], -1)[:, None] for x in rope]
            pages, table = self._paged(latents)
            named |= ragged | {"latent_dim": 128}
            return (q, *own, pages[:, :, 0], table, np.array(self.lens)), named
        k, table = self._paged(self.k)
        if self.mla:
            return (q, k[:, :, 0], table, np.array(self.lens)), named | {"v_dim": self.width}
        v, _ = self._paged(self.v)
        if not self.decodes:
            named["cu_seqlens_q"] = ragged["cu_seqlens_q"]
        return (q, k, v, table, np.array(self.lens)), named

    def _rows(self, array: Array) -> Array:
        """``[B, S, ..]`` as the call takes it."""
        return array if self.decodes or self.form == "dense" else array.reshape(-1, *array.shape[2:])

    def _paged(self, rows: list[Array]) -> tuple[Array, Array]:
        """In pages, and their table; slots that are not used are NaN."""
        table = np.random.default_rng(7).permutation(3 * COLUMNS + 2)[: 3 * COLUMNS].reshape(3, COLUMNS)
        pages = np.full((3 * COLUMNS + 2, PAGE, *rows[0].shape[1:]), np.nan, rows[0].dtype)
        for b, mine in enumerate(rows):
            token = np.arange(len(mine))
            pages[table[b, token // PAGE], token % PAGE] = mine
        return pages, table

    def __call__(self, **options: Any) -> tuple[Any, Any]:
        """Output and lse."""
        args, named = self.arguments()
        return self.function(*args, **named, **options)  # type: ignore[no-any-return]


def assert_seen_alone(call: HiddenCall, out: Any, lse: Any) -> None:
    """Against ``exact``. A score near -60000 has a step of 2^-7 in units of log2, and passes two roundings: weights are
    off by less than 2^-7, outputs (V is below 1) by as much; 16-bit ones round P and themselves, too.
    """
    exact, exact_lse = call.exact()
    first = 2 if call.mla and call.decodes else 0  # V is K: its first columns make the scores
    ours, exact = (np.asarray(x, np.float64)[..., first:] for x in (out, exact))
    np.testing.assert_allclose(ours, exact, rtol=0, atol=2**-6 if call.wide else 2**-7)
    np.testing.assert_allclose(np.asarray(lse, np.float64), exact_lse, rtol=2**-22)


def is_refused(options: dict[str, Any], message: str) -> None:
    """A decode with such options raises before it writes."""
    args, named = HiddenCall("mha_decode_paged", wide=True).arguments()
    out = np.full_like(args[0], 7)
    with pytest.raises(ValueError, match=message):
        attention.mha_decode_paged(*args, **named, out=out, **options)
    assert (out == 7).all()
