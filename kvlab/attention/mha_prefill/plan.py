"""Plan of a call of prefill: its arguments checked, a backend, a configuration, and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvlab.attention.call.backends import check_arithmetic
from kvlab.attention.call.checks import check_paged_collection, check_traffic, finite_number, require
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.kinds import Kind, kind_of
from kvlab.attention.call.layers import layer_arrays
from kvlab.attention.call.ragged import check_grid, check_starts_of_cache, keys_with_new
from kvlab.attention.features.resolve import Features, kv_view
from kvlab.attention.features.scales import is_fp8
from kvlab.attention.hopper.choice import choose_with_hopper
from kvlab.attention.machines import check_emulated
from kvlab.attention.machines.gpu import check_fp8_gpu, target_of
from kvlab.common.arrays import dtype_of, on_gpu

from .config import PrefillProblem, choose_config
from .hopper_config import SUPPORTED, choose_hopper, hopper_declined, hopper_lacks
from .inputs import (
    Options,
    PrefillInputs,
    check_dense,
    check_dense_memory,
    check_paged,
    check_paged_memory,
    dense_inputs,
    paged_inputs,
)


@dataclass(frozen=True, eq=False)
class Plan:
    """A call that has passed all checks; ``again``: what is kept of the launches of its kind."""

    explanation: Explanation
    inputs: PrefillInputs
    options: Options
    problem: PrefillProblem
    scale: float
    again: dict[Any, Any] | None = None


@dataclass(frozen=True, eq=False)
class _Common:
    """Plan of all calls of one kind. features: None where they hold arrays."""

    explanation: Explanation
    problem: PrefillProblem
    scale: float
    features: Features | None


class _Form(NamedTuple):
    """A form of prefill: the checks of its arrays, of their values and memory, and what makes them inputs."""

    check: Callable[..., tuple[int, int]]
    check_memory: Callable[..., None]
    inputs: Callable[..., PrefillInputs]


_DENSE = _Form(check_dense, check_dense_memory, dense_inputs)
_PAGED = _Form(check_paged, check_paged_memory, paged_inputs)


def plan_dense(q: Any, k: Any, v: Any, options: Options, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None) -> Plan:
    """Of ``mha_prefill``."""
    return _planned(_DENSE, (q, k, v, cu_seqlens_q, cu_seqlens_k), options, ragged=cu_seqlens_q is not None)


def plan_paged(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, cu_seqlens_q: Any, options: Options,
    kv_layout: str = "NHD",
) -> Plan:
    """Of ``mha_prefill_paged``."""
    caches = kv_view(k_cache, kv_layout), kv_view(v_cache, kv_layout)
    if kv_layout != "NHD":
        scales = {name: kv_view(getattr(options, name), kv_layout) for name in ("k_scale", "v_scale")}
        options = replace(options, **scales)
    return _planned(_PAGED, (q, *caches, block_table, seq_lens, cu_seqlens_q), options, ragged=True)


def _planned(form: _Form, arrays: tuple[Any, ...], options: Options, *, ragged: bool) -> Plan:
    inputs = None

    def prepare() -> _Common:
        nonlocal inputs
        batch, most = form.check(*arrays, options)
        form.check_memory(*arrays, options, most)
        inputs = form.inputs(*arrays, options, batch, most, None)
        return _common(inputs, options)

    if ragged and options.max_seqlen_q is None and not on_gpu(arrays[0]):  # the starts tell the longest
        kind = Kind(prepare(), None)
    else:
        kind = kind_of(form.check, (*arrays, *vars(options).values()), prepare)
    plan = kind.plan
    if inputs is None:
        batch, most = plan.problem.batch, plan.problem.max_q
        form.check_memory(*arrays, options, most)
        inputs = form.inputs(*arrays, options, batch, most, plan.features)
    return Plan(plan.explanation, inputs, options, plan.problem, plan.scale, kind.launches)


def plan_cache(q: Any, cache: Any, layer: int, cu_seqlens_q: Any, options: dict[str, Any]) -> Plan:
    """Of ``mha_prefill_cache``."""
    check_paged_collection(cache)
    require(not cache.kv_params.is_mla, "cache is one of MLA, without V", "one of K and V; mla_prefill takes it")
    pages, starts = layer_arrays(cache, layer), cu_seqlens_q
    check_starts_of_cache(starts, cache)
    if pages.key_scales is not None:
        granules = int(pages.key_scales.shape[-1])
        require(granules == 1, f"a cache with {granules} scales a head and token", "one; granularity head_size")
        options = {"k_scale": pages.key_scales[..., 0], "v_scale": pages.value_scales[..., 0]} | options
    seq_lens = keys_with_new(cache.cache_lengths, starts)
    return plan_paged(q, pages.keys, pages.values, cache.lookup_table, seq_lens, starts, Options(**options))


def _common(inputs: PrefillInputs, options: Options) -> _Common:
    check_traffic(options.traffic)
    _, _, q_heads, head_dim = inputs.q.shape
    wanted = 1 / math.sqrt(head_dim) if options.scale is None else options.scale
    scale = finite_number(wanted, "scale", "a finite number that float32 holds")
    features, fp8 = inputs.features, is_fp8(inputs.q)
    kept = None if features.arrays else features
    problem = PrefillProblem(
        inputs.batch, inputs.max_q, int(q_heads), int(inputs.k.shape[2]), int(head_dim), int(inputs.v.shape[3]),
        dtype_of(inputs.q, "q").itemsize, dtype_of(inputs.k, "k").itemsize, features.heavy,
        features.mask.bias is not None, inputs.ragged,
        p_fp8=fp8 and features.scales.v.kind != "token",
    )
    lacks, invariant = hopper_lacks(inputs, scale), bool(options.batch_invariant)
    declined = hopper_declined(problem, features.mask.left, batch_invariant=invariant)
    chosen, reason, hopper = choose_with_hopper(inputs.q, options.backend, lacks, declined, SUPPORTED)
    if hopper:
        tiles, where = choose_hopper(problem, inputs), "sm_90" if chosen == "emulator" else None
        explanation = Explanation("mha_prefill", chosen, reason, tiles, tiles.grid(problem), where)
        check_arithmetic(explanation, options.arithmetic)
        return _Common(explanation, problem, scale, kept)
    if is_fp8(inputs.k):
        check_fp8_gpu(inputs.q, products=fp8)
    emulated = options.arch if chosen == "emulator" else None
    if emulated is not None:
        k, v = ("k", "v") if inputs.table is None else ("k_cache", "v_cache")
        check_emulated("mha_prefill", emulated, inputs.q, {k: inputs.k, v: inputs.v})
    target = target_of(inputs.q, emulated)
    config = choose_config(
        problem, arch=target.arch, shared=target.shared, batch_invariant=invariant, emulated=emulated is not None
    )
    check_grid(config.grid(problem), problem.batch, problem.max_q)
    explanation = Explanation("mha_prefill", chosen, reason, config, config.grid(problem), emulated)
    check_arithmetic(explanation, options.arithmetic)
    return _Common(explanation, problem, scale, kept)
