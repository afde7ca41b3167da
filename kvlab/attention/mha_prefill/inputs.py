"""Checks of prefill's arrays, and the one form in which the three siblings take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.attention.call.checks import (
    check_apart,
    check_arrays,
    check_lengths_and_pages,
    check_pages,
    check_strides,
    check_table,
    given,
    looks_at_values,
    require,
)
from kvlab.attention.call.operands import check_operands, check_result
from kvlab.attention.call.ragged import check_both_starts, check_offsets, check_starts, longest, sequence_lengths
from kvlab.attention.features.intervals import keys_in_table, window_interval
from kvlab.attention.features.masks import Interval, resolve_mask
from kvlab.attention.features.resolve import Features, resolve_features
from kvlab.staging import Traffic


@dataclass(frozen=True, eq=False)
class Options:
    """The keywords that all forms of prefill share; what they mean is told by ``mha_prefill``."""

    causal: bool | None = None
    scale: float | None = None
    max_seqlen_q: int | None = None
    window: Any = None
    mask: Any = None
    softcap: float = 0.0
    sinks: Any = None
    alibi_slopes: Any = None
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None
    return_lse: bool = False
    base2: bool = False
    out: Any = None
    batch_invariant: bool = False
    backend: str = "auto"
    arch: str = "sm_90"
    arithmetic: str = "float32"
    check: bool | None = None
    traffic: Traffic | None = None

    @property
    def interval(self) -> Interval:
        """Keys that ``causal`` and ``window`` let a query see. A mask stands alone unless they are given with it."""
        causal = self.mask is None if self.causal is None else bool(self.causal)
        return window_interval(causal, self.window)

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays among them."""
        return given(sinks=self.sinks, alibi_slopes=self.alibi_slopes, out=self.out)


@dataclass(frozen=True, eq=False)
class PrefillInputs:
    """Checked arguments: q and out ``[B, S, Hq, ..]`` or ``[1, total, Hq, ..]``; k and v as in ``reference``."""

    q: Any
    k: Any
    v: Any
    cu_q: Any
    cu_k: Any
    table: Any
    seq_lens: Any
    out: Any
    batch: int
    max_q: int
    features: Features

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The positional arguments of the launch functions."""
        return self.q, self.k, self.v, self.cu_q, self.cu_k, self.table, self.seq_lens

    @property
    def ragged(self) -> bool:
        """Results drop the first axis."""
        return self.cu_q is not None


def check_dense(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, options: Options) -> tuple[int, int]:
    """Checks the arguments of ``mha_prefill``, whatever the arrays' values and places; the sequences and the longest of
    them. ValueError that names argument, value and rule.
    """
    require((cu_q is None) == (cu_k is None), "only one of cu_seqlens_q and cu_seqlens_k is given", "both or neither")
    ragged = cu_q is not None
    form = "[total, H, D] with cu_seqlens" if ragged else "[B, S, H, D] without cu_seqlens"
    arrays = {"q": q, "k": k, "v": v, **given(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), **options.arrays}
    check_arrays(arrays)
    for name, array in (("q", q), ("k", k), ("v", v)):
        require(array.ndim == (3 if ragged else 4), f"{name} has shape {tuple(array.shape)}", form)
    if not ragged:
        require(k.shape[0] == q.shape[0], f"k has {k.shape[0]} sequences", f"those of q, {q.shape[0]}")
    _check_rows(q, {"k": k, "v": v}, options.out)
    if ragged:
        batch = check_both_starts(cu_q, cu_k)
        return batch, longest(options.max_seqlen_q, q, cu_q)
    require(options.max_seqlen_q is None, f"max_seqlen_q {options.max_seqlen_q!r} without cu_seqlens_q",
            "None; q tells the length")
    return int(q.shape[0]), int(q.shape[1])


def check_dense_memory(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, options: Options, most: int) -> None:
    """Checks of each call of ``mha_prefill``: places and values of its arrays."""
    if options.out is not None:
        starts = given(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        check_apart({"q": q, "k": k, "v": v, **starts, **options.arrays})
    if cu_q is not None and looks_at_values(options.check, q):
        check_offsets("cu_seqlens_q", cu_q, q, most)
        check_offsets("cu_seqlens_k", cu_k, k, None)


def dense_inputs(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, options: Options, batch: int, most: int, features: Features | None
) -> PrefillInputs:
    """Arguments of ``mha_prefill`` that have passed the checks, in the form of the launch functions."""

    def lengths() -> tuple[Any, Any]:
        if cu_q is not None:
            return sequence_lengths(cu_q), sequence_lengths(cu_k)
        return np.full(batch, q.shape[1]), np.full(batch, k.shape[1])

    ragged, out = cu_q is not None, options.out
    if features is None:
        features = _features(q, k, v, batch, lengths, options)
        features = features.with_leading_axis() if ragged else features
    if ragged:
        q, k, v, out = (x if x is None else x[None] for x in (q, k, v, out))
    return PrefillInputs(q, k, v, cu_q, cu_k, None, None, out, batch, most, features)


def check_paged(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, cu_q: Any, options: Options
) -> tuple[int, int]:
    """The same for ``mha_prefill_paged``, with caches as NHD."""
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    tables = {"block_table": block_table, "seq_lens": seq_lens}
    check_arrays({"q": q, **caches, **tables, **given(cu_seqlens_q=cu_q), **options.arrays})
    require(q.ndim == 3, f"q has shape {tuple(q.shape)}", "[total, Hq, D]")
    check_pages(caches)
    _check_rows(q, caches, options.out)
    batch = check_starts("cu_seqlens_q", cu_q)
    check_table(block_table, seq_lens, batch)
    check_strides("seq_lens", seq_lens)
    return batch, longest(options.max_seqlen_q, q, cu_q)


def check_paged_memory(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, cu_q: Any, options: Options, most: int
) -> None:
    """The same for ``mha_prefill_paged``."""
    if options.out is not None:
        caches = {"k_cache": k_cache, "v_cache": v_cache}
        tables = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_q}
        check_apart({"q": q, **caches, **tables, **options.arrays})
    if looks_at_values(options.check, q):
        check_offsets("cu_seqlens_q", cu_q, q, most)
        check_lengths_and_pages(seq_lens, block_table, k_cache.shape[0], k_cache.shape[1])


def paged_inputs(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, cu_q: Any, options: Options, batch: int,
    most: int, features: Features | None,
) -> PrefillInputs:
    """The same for ``mha_prefill_paged``."""

    def lengths() -> tuple[Any, Any]:
        return sequence_lengths(cu_q), keys_in_table(seq_lens, block_table, int(k_cache.shape[1]))

    features = _features(q, k_cache, v_cache, batch, lengths, options) if features is None else features
    out = None if options.out is None else options.out[None]
    return PrefillInputs(q[None], k_cache, v_cache, cu_q, None, block_table, seq_lens, out, batch, most, features)


def _features(q: Any, k: Any, v: Any, batch: int, lengths: Any, options: Options) -> Features:
    mask = resolve_mask(options.mask, options.interval, heads=int(q.shape[-2]), lengths=lengths, like=q)
    return resolve_features(
        q, k, v, mask=mask, batch=batch, softcap=options.softcap, sinks=options.sinks,
        alibi_slopes=options.alibi_slopes, q_scale=options.q_scale, k_scale=options.k_scale, v_scale=options.v_scale,
    )


def _check_rows(q: Any, kv: dict[str, Any], out: Any) -> None:
    """Dtypes, heads, depths, strides."""
    check_operands(q, kv)
    for name, array in {"q": q, **kv}.items():
        check_strides(name, array)
    if out is not None:
        v = list(kv.values())[1]
        check_result(out, (*(int(n) for n in q.shape[:-1]), int(v.shape[-1])), q)
