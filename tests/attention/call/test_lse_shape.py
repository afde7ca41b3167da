"""An lse has the shape of its output without the last axis, in every operation, so that ``merge_states`` takes both.

Rests on softmax in float64, written here, and on its law: over keys cut in two it is the merge of both halves. There
are as many tokens as heads, so that an lse in another order would fit by shape and give wrong numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab import attention
from kvlab.attention import explain, masks, merge_states
from kvlab.cache import PagedKVCacheCollection
from kvlab.common.arrays import to_numpy, to_torch
from kvlab.common.torch_here import is_torch
from kvlab.memory import bfloat16

Array = np.ndarray[Any, Any]
B, HEADS, LENS, PAGE, CUT, D, SCALE = 2, 4, (41, 37), 16, 23, 64, 0.11
LATENT, ROPE, HOPPER_LATENT, HOPPER_ROPE = 128, 32, 512, 64
DECODES = ("mha_decode_paged", "mha_decode", "mha_decode_streaming_paged", "mha_decode_streaming", "mla_decode_paged",
           "mla_decode")
OPERATIONS = (*DECODES, "mha_prefill dense", "mha_prefill ragged", "mha_prefill_paged", "mha_prefill_cache",
              "mla_prefill_paged", "mla_prefill", "mla_prefill_ragged")
"""All that return an lse, but ``merge_states`` itself."""
BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"backend": "reference"}, "emulator": {}, "gfx950": {"arch": "gfx950"},
    "triton": {"backend": "triton"}, "hopper": {"backend": "hopper"},
}


def has(op: str, backend: str) -> bool:
    if backend == "hopper":
        return "streaming" not in op and not op.startswith("mla_prefill")
    return backend != "gfx950" or not op.startswith("mla_decode")  # of 16 bits only


PAIRS = [
    pytest.param(op, backend, marks=[pytest.mark.interpreter] if backend == "triton" else [], id=f"{op}-{backend}")
    for op in OPERATIONS for backend in BACKENDS if has(op, backend)
]


class Call:
    """An operation over keys of its own; every query sees all of them, on Hopper, whose decodes mask, up to its own."""

    def __init__(self, op: str, backend: str) -> None:
        rng = np.random.default_rng(3)
        self.name, _, self.form = op.partition(" ")
        self.options, self.causal = BACKENDS[backend], backend == "hopper"
        self.decodes, self.mla = op in DECODES, op.startswith("mla")
        dtype = bfloat16 if backend == "hopper" else np.float32
        self.latent, rope = (HOPPER_LATENT, HOPPER_ROPE) if backend == "hopper" else (LATENT, ROPE)
        self.S = HEADS if self.decodes or self.form == "dense" else HEADS // B
        rope = rope if self.mla else 0
        heads, width = (1, self.latent) if self.mla and self.decodes else (HEADS, D) if self.mla else (2, D)
        self.q = (2 * rng.standard_normal((B, self.S, HEADS, width + rope))).astype(dtype)
        lens = LENS[:1] * B if self.form == "dense" else LENS
        shapes = (heads, width), (heads, width), (rope,)
        self.k, v, self.rope = ([rng.standard_normal((n, *row)).astype(dtype) for n in lens] for row in shapes)
        self.v = self.k if self.mla and self.decodes else v

    def exact(self) -> tuple[Array, Array]:
        """Output and lse in the shape of the call's, float64."""
        out, lse = [], []
        for q, *rows, rope in zip(self.q, self.k, self.v, self.rope, strict=True):
            k, v = (np.repeat(x.astype(np.float64), HEADS // x.shape[1], axis=1) for x in rows)
            k = np.concatenate([k, np.repeat(rope[:, None].astype(np.float64), HEADS, axis=1)], -1)
            s = SCALE * np.einsum("shd,nhd->shn", q.astype(np.float64), k)
            late = np.arange(len(k)) > np.arange(self.S)[:, None] + len(k) - self.S
            s[np.repeat((late & self.causal)[:, None], HEADS, axis=1)] = -np.inf
            lse.append(np.log(np.exp(s).sum(-1)))
            out.append(np.einsum("shn,nhd->shd", np.exp(s - lse[-1][..., None]), v))
        return self._rows(np.stack(out)), self._rows(np.stack(lse))

    def __call__(self, lo: int = 0, hi: int | None = None, like: Any = lambda array: array) -> tuple[Any, Any]:
        """Output and lse over the keys from ``lo`` to ``hi`` of each sequence, of arrays ``like`` those here."""
        function, S = getattr(attention, self.name), self.S
        k, v, rope = ([x[lo:hi] for x in rows] for rows in (self.k, self.v, self.rope))
        lens = np.array([len(x) for x in k])
        named: dict[str, Any] = {"scale": SCALE, "return_lse": True, **self.options}
        if self.decodes:
            named |= {"mask": None if self.causal else masks.NullMask()}
        else:
            named |= {"causal": self.causal}
        ragged = {name: like(_starts(x)) for name, x in (("cu_seqlens_q", [S] * B), ("cu_seqlens_k", lens))}
        q = like(self._rows(self.q))
        if self.form == "dense":
            return function(q, like(np.stack(k)), like(np.stack(v)), **named)  # type: ignore[no-any-return]
        if self.form == "ragged":
            return self._run(function, q, _flat(k, like), _flat(v, like), **ragged, **named)
        if self.name == "mla_prefill_ragged":
            return self._run(function, q, _flat(k, like), _flat(v, like), _flat(rope, like), **ragged, **named)
        if self.mla:
            latents = [x[:, 0] if self.decodes else np.ones((len(x), self.latent), x.dtype) for x in k]
            blocks, table = _paged([np.concatenate(x, -1)[:, None, None] for x in zip(latents, rope, strict=True)])
            named |= {"v_dim" if self.decodes else "latent_dim": self.latent}
        else:
            blocks, table = _paged([np.stack(x, 1) for x in zip(k, v, strict=True)])
        blocks, table = like(blocks.swapaxes(1, 2)), like(table)  # [pages, K and V, PAGE, heads, ..]
        own = () if self.decodes or not self.mla else (_flat(k, like), _flat(v, like))
        if not self.decodes:
            named |= ragged if self.mla else {"cu_seqlens_q": ragged["cu_seqlens_q"]}
        if self.name.endswith("paged"):
            caches = (blocks[:, 0, :, 0],) if self.mla else (blocks[:, 0], blocks[:, 1])
            return self._run(function, q, *own, *caches, table, like(lens), **named)
        cache = PagedKVCacheCollection(blocks[:, :, None], like(lens - S), table, S, int(lens.max()))
        return self._run(function, q, *own, cache, **named)

    def _run(self, function: Any, *args: Any, **named: Any) -> tuple[Any, Any]:
        backend = explain(function, *args, **{n: x for n, x in named.items() if n != "return_lse"}).backend
        asked = self.options.get("backend")
        assert backend == (asked if asked in ("reference", "triton") else "emulator")
        return function(*args, **named)  # type: ignore[no-any-return]

    def _rows(self, array: Array) -> Array:
        """``[B, S, ..]`` as the call takes it."""
        return array if self.decodes or self.form == "dense" else array.reshape(B * self.S, *array.shape[2:])


def _flat(rows: list[Array], like: Any) -> Any:
    return like(np.concatenate(rows))


def _starts(lengths: Any) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)])


def _paged(rows: list[Array]) -> tuple[Array, Array]:
    """Rows ``[n, ..]`` of sequences in pages ``[pages, PAGE, ..]``, and the table. Slots that are not used are NaN."""
    columns = -(-max(map(len, rows)) // PAGE)
    table = np.random.default_rng(7).permutation(B * columns + 3)[: B * columns].reshape(B, columns)
    pages = np.full((B * columns + 3, PAGE, *rows[0].shape[1:]), np.nan, rows[0].dtype)
    for b, mine in enumerate(rows):
        token = np.arange(len(mine))
        pages[table[b, token // PAGE], token % PAGE] = mine
    return pages, table


def assert_right(call: Call, out: Any, lse: Any) -> None:
    assert tuple(lse.shape) == tuple(out.shape)[:-1]
    exact, exact_lse = call.exact()
    np.testing.assert_allclose(to_numpy(out).astype(np.float64), exact, rtol=0, atol=2**-6 if call.causal else 2e-6)
    np.testing.assert_allclose(to_numpy(lse), exact_lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_it_has_the_shape_of_out_without_its_last_axis(op: str, backend: str) -> None:
    call = Call(op, backend)
    assert_right(call, *call())


@pytest.mark.parametrize("op", OPERATIONS)
def test_so_it_has_as_a_torch_tensor(op: str) -> None:
    call = Call(op, "emulator")
    call.options = {"backend": "emulator"}
    out, lse = call(like=to_torch)
    assert is_torch(lse)
    assert lse.is_contiguous()
    assert_right(call, out, lse)


@pytest.mark.parametrize("op", [op for op in OPERATIONS if op in DECODES])
def test_so_it_has_without_the_token_axis(op: str) -> None:
    call = Call(op, "emulator")
    call.q, call.S = call.q[:, :1], 1
    exact, exact_lse = call.exact()
    call._rows = lambda array: array[:, 0]  # type: ignore[method-assign]
    out, lse = call()
    assert (out.shape, lse.shape) == (exact[:, 0].shape, exact_lse[:, 0].shape)
    np.testing.assert_allclose(lse, exact_lse[:, 0], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("op", "backend"), [pair for pair in PAIRS if "hopper" not in str(pair.id)])
def test_halves_of_the_keys_merge_to_the_whole(op: str, backend: str) -> None:
    call = Call(op, backend)
    parts = call(0, CUT), call(CUT, None)
    which = {"reference": "reference", "triton": "triton"}.get(backend, "auto")
    out, lse = merge_states(*(np.stack([part[i] for part in parts]) for i in (0, 1)), backend=which)
    assert_right(call, out, lse)
