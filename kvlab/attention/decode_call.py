"""A paged decode of MHA: its arguments checked and put into the form of the launch functions, its plan, its results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.attention.call.backends import check_arithmetic
from kvlab.attention.call.checks import (
    check_arrays,
    check_lengths_and_pages,
    check_paged_collection,
    check_pages,
    check_strides,
    check_table,
    decode_scale,
    given,
    lengths_with_new,
    looks_at_values,
    require,
)
from kvlab.attention.call.explain import Explanation, arguments_of
from kvlab.attention.call.kinds import Kind, kind_of
from kvlab.attention.call.layers import layer_arrays
from kvlab.attention.call.operands import check_operands, check_result
from kvlab.attention.features.intervals import host, keys_in_table, window_interval
from kvlab.attention.features.masks import Interval, resolve_mask
from kvlab.attention.features.resolve import Features, in_base, kv_view, resolve_features
from kvlab.attention.features.scales import is_fp8
from kvlab.cache import PagedKVCacheCollection
from kvlab.common.arrays import element_strides, is_torch, overlaps

ASKED = ("mask", "window", "softcap", "sinks", "alibi_slopes", "q_scale", "k_scale", "v_scale")
"""The arguments that change scores and values, by name."""
MAX_TOKENS = 4


@dataclass(frozen=True, eq=False)
class DecodeCall:
    """The arguments: q ``[B, S, Hq, D]`` and out ``[B, S, Hq, Dv]`` or None, pages ``[pages, page_size, Hkv, ..]``."""

    q: Any
    k_cache: Any
    v_cache: Any
    block_table: Any
    seq_lens: Any
    out: Any
    features: Features
    drop_tokens: bool
    """q was ``[B, Hq, D]``: results drop the token axis."""

    @property
    def arrays(self) -> tuple[Any, Any, Any, Any, Any]:
        """q, K, V, table, lengths."""
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """Plan of all calls of one kind. features: None where they hold arrays."""

    explanation: Explanation
    features: Features | None
    scale: float


def decode_call(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    out: Any,
    kv_layout: str,
    asked: dict[str, Any],
    *,
    max_tokens: int,
    check: bool | None,
) -> DecodeCall:
    """Check the arguments of ``mha_decode_paged``. ValueError that names argument, value and rule.

    asked : the arguments named in ASKED. check : look at the values of seq_lens and block_table too; None: where that
    needs no synchronisation with a GPU.
    """
    arrays = q, k_cache, v_cache, block_table, seq_lens
    _check_arrays(*arrays, out, kv_layout, max_tokens)
    call = _arranged(*arrays, out, kv_layout, asked, None)
    _check_memory(call, arrays, out, check)
    return call


def prepared(
    plan_of: Callable[..., Explanation], q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, *,
    asked: dict[str, Any], scale: Any, out: Any, kv_layout: str, batch_invariant: bool, backend: str, arch: str,
    num_splits: int | None, mask_value: Any, check: bool | None, traffic: Any,
) -> tuple[DecodeCall, Kind[DecodePlan], dict[str, Any]]:
    """A call, checked: its arrays, its kind, and the named arguments of the launch functions.

    ``plan_of(call, backend, arch, num_splits, batch_invariant)`` is the operation's choice of a configuration.
    """
    arrays = q, k_cache, v_cache, block_table, seq_lens
    call = None

    def prepare() -> DecodePlan:
        nonlocal call
        _check_arrays(*arrays, out, kv_layout, MAX_TOKENS)
        call = _arranged(*arrays, out, kv_layout, asked, None)
        explanation = plan_of(call, backend, arch, num_splits, batch_invariant)
        number = decode_scale(1 / math.sqrt(call.q.shape[-1]) if scale is None else scale, mask_value, traffic)
        return DecodePlan(explanation, None if call.features.arrays else call.features, number)

    options = scale, kv_layout, batch_invariant, backend, arch, num_splits, mask_value, traffic
    kind = kind_of(plan_of, (*arrays, out, *asked.values(), *options), prepare)
    plan = kind.plan
    call = _arranged(*arrays, out, kv_layout, asked, plan.features) if call is None else call
    _check_memory(call, arrays, out, check)
    arguments = {
        "scale": plan.scale, "config": plan.explanation.config, "features": call.features,
        "out": call.out,
    }
    return call, kind, arguments


def _check_arrays(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, out: Any, kv_layout: str, max_tokens: int
) -> None:
    """Checks the arrays, whatever their values and places."""
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    check_arrays(arrays | given(out=out))
    k_cache, v_cache = (kv_view(cache, kv_layout) for cache in (k_cache, v_cache))
    require(q.ndim in (3, 4), f"q has shape {tuple(q.shape)}", "[B, Hq, D] or [B, S, Hq, D]")
    batch, tokens = q.shape[0], 1 if q.ndim == 3 else q.shape[1]
    require(1 <= tokens <= max_tokens, f"q has {tokens} new tokens a sequence", f"1 to {max_tokens}")
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    check_pages(caches)
    check_operands(q, caches)
    check_table(block_table, seq_lens, batch)
    for name, array in {"q": q, **caches}.items():
        check_strides(name, array)
    if is_fp8(k_cache):
        _check_pairs(caches)
    if out is not None:
        check_result(out, (*q.shape[:-1], int(v_cache.shape[3])), q)


def _arranged(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, out: Any, kv_layout: str,
    asked: dict[str, Any], features: Features | None,
) -> DecodeCall:
    """The arguments in the form of the launch functions."""
    k_cache, v_cache = kv_view(k_cache, kv_layout), kv_view(v_cache, kv_layout)
    drop_tokens = q.ndim == 3
    if drop_tokens:
        q, out = q[:, None], None if out is None else out[:, None]
    if features is None:
        features = _features(q, k_cache, v_cache, block_table, seq_lens, kv_layout, dict(asked))
    return DecodeCall(q, k_cache, v_cache, block_table, seq_lens, out, features, drop_tokens)


def _check_memory(call: DecodeCall, arrays: tuple[Any, ...], out: Any, check: bool | None) -> None:
    """Checks of each call: places and values of its arrays."""
    if out is not None:
        _check_apart(out, dict(zip(("q", "k_cache", "v_cache", "block_table", "seq_lens"), arrays, strict=True)))
    if looks_at_values(check, call.q):
        page_size = call.k_cache.shape[1]
        seen = _seen(call.features.mask.interval, call.seq_lens, call.block_table, call.q.shape[1], page_size)
        check_lengths_and_pages(call.seq_lens, seen, call.k_cache.shape[0], page_size)


def explained(
    function: Callable[..., Any], prepare: Callable[..., tuple[Any, Kind[Any], Any]], names: tuple[str, ...] = ASKED
) -> Callable[..., Explanation]:
    """Function that :func:`kvlab.attention.explain` calls for a paged decode ``function``: the same call, up to its
    plan. ``prepare`` takes the call's arguments, those of ``names`` as ``asked``.
    """

    def plan(*args: Any, **kwargs: Any) -> Explanation:
        given = arguments_of(function, *args, **kwargs)
        asked = {name: given.pop(name) for name in names}
        del given["return_lse"], given["base2"]
        arithmetic = given.pop("arithmetic")
        explanation: Explanation = prepare(**given, asked=asked)[1].plan.explanation
        check_arithmetic(explanation, arithmetic)
        return explanation

    return plan


def decode_results(result: Any, lse: Any, out: Any, *, drop_tokens: bool, return_lse: bool, base2: bool) -> Any:
    """Results of a decode, made of results ``[B, S, ..]`` and lse ``[B, S, H]`` of a sibling; ``out`` is the caller's.
    """
    result = out if out is not None else result[:, 0] if drop_tokens else result
    return (result, in_base(lse[:, 0] if drop_tokens else lse, base2)) if return_lse else result


def call_of_collection(q: Any, cache: PagedKVCacheCollection, layer: int) -> tuple[Any, Any, Any, Any, Any]:
    """The array form of a call over a collection: q, K, V, table, lengths."""
    check_paged_collection(cache)
    require(not cache.kv_params.is_mla, "cache is one of MLA, without V", "one of K and V; mla_decode takes it")
    pages = layer_arrays(cache, layer)
    return q, pages.keys, pages.values, cache.lookup_table, lengths_with_new(cache.cache_lengths, q)


def _features(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, kv_layout: str, asked: dict[str, Any]
) -> Features:
    batch, tokens, q_heads = q.shape[:3]
    mask, window = asked.pop("mask"), asked.pop("window")
    for name in ("k_scale", "v_scale"):
        asked[name] = kv_view(asked.get(name), kv_layout)

    def lengths() -> tuple[Any, Any]:
        return np.full(batch, tokens), keys_in_table(seq_lens, block_table, int(k_cache.shape[1]))

    interval = window_interval(mask is None or isinstance(window, int | np.integer), window)
    plan = resolve_mask(mask, interval, heads=q_heads, lengths=lengths, like=q)
    return resolve_features(q, k_cache, v_cache, mask=plan, batch=batch, **asked)


def _seen(interval: Interval, seq_lens: Any, block_table: Any, tokens: int, page_size: int) -> Any:
    """The table with 0 for pages before the first key that a new token sees: they are not read."""
    lens, table = host(seq_lens), host(block_table)
    first, _ = interval.bounds(lens.astype(np.int64) - tokens, lens, np.arange(len(lens)))
    return np.where((np.arange(table.shape[1]) + 1) * page_size <= first[:, None], 0, table)


def _check_pairs(caches: dict[str, Any]) -> None:
    """ValueError for rows of fp8 that do not start at an even byte: columns move in pairs."""
    for name, cache in caches.items():
        strides = element_strides(cache, name)
        even = not any(step % 2 for step in strides[:-1])
        first = cache.data_ptr() if is_torch(cache) else cache.ctypes.data
        require(even and first % 2 == 0, f"{name} of float8_e4m3fn has strides {strides}", "rows at even bytes")


def _check_apart(out: Any, arrays: dict[str, Any]) -> None:
    for name, array in arrays.items():
        apart = name == "out" or (name == "q" and _same_view(out, array)) or not overlaps(out, array)
        require(apart, f"out shares memory with {name}", "memory of its own, or q itself")


def _same_view(a: Any, b: Any) -> bool:
    """Tells whether two arrays are the same elements."""
    if tuple(a.shape) != tuple(b.shape) or a.dtype != b.dtype:
        return False
    first, second = (x.data_ptr() if is_torch(x) else x.ctypes.data for x in (a, b))
    return bool(first == second and element_strides(a) == element_strides(b))
