"""What a call of prefill gets: its arguments checked, a backend, a configuration, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from kvlab.attention.backends import check_fp8_gpu, target_of
from kvlab.attention.explain import Explanation
from kvlab.attention.features import kv_view
from kvlab.attention.hopper_choice import choose_with_hopper
from kvlab.attention.inputs import check_lane_copies, check_paged_collection, check_traffic, finite_number, require
from kvlab.attention.ragged import check_grid, keys_with_new
from kvlab.attention.scales import is_fp8
from kvlab.cache.arrays import dtype_of

from .config import PrefillProblem, choose_config
from .hopper_config import SUPPORTED, choose_hopper, hopper_declined, hopper_lacks
from .inputs import Options, PrefillInputs, dense_inputs, paged_inputs
from .machine import check_arch, check_machine

__all__ = ["Plan", "plan_cache", "plan_dense", "plan_paged"]


@dataclass(frozen=True)
class Plan:
    """A call that has passed all checks."""

    explanation: Explanation
    inputs: PrefillInputs
    options: Options
    problem: PrefillProblem
    scale: float


def plan_dense(q: Any, k: Any, v: Any, options: Options, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None) -> Plan:
    """Of ``mha_prefill``."""
    return _plan(dense_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, options), options)


def plan_paged(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, cu_seqlens_q: Any, options: Options,
    kv_layout: str = "NHD",
) -> Plan:  # fmt: skip
    """Of ``mha_prefill_paged``."""
    caches = kv_view(k_cache, kv_layout), kv_view(v_cache, kv_layout)
    scales = {name: kv_view(getattr(options, name), kv_layout) for name in ("k_scale", "v_scale")}
    options = replace(options, **scales)
    return _plan(paged_inputs(q, *caches, block_table, seq_lens, cu_seqlens_q, options), options)


def plan_cache(q: Any, cache: Any, layer: int, cu_seqlens_q: Any, options: dict[str, Any]) -> Plan:
    """Of ``mha_prefill_cache``."""
    check_paged_collection(cache)
    keys, values = cache.get_key_cache(layer), cache.get_value_cache(layer)
    starts = cu_seqlens_q
    require(starts is not None and getattr(starts, "ndim", 0) == 1, f"cu_seqlens_q {starts!r}", "[B + 1]")
    batch = (int(keys.cache_lengths.shape[0]), int(starts.shape[0]) - 1)
    require(batch[0] == batch[1], f"cu_seqlens_q of {batch[1]} sequences", f"those of the cache, {batch[0]}")
    if keys.scales is not None:
        granules = int(keys.scales.shape[-1])
        require(granules == 1, f"a cache with {granules} scales a head and token", "one; granularity head_size")
        options = {"k_scale": keys.scales[..., 0], "v_scale": values.scales[..., 0]} | options
    seq_lens = keys_with_new(keys.cache_lengths, starts)
    return plan_paged(q, keys.blocks, values.blocks, keys.lookup_table, seq_lens, starts, Options(**options))


def _plan(inputs: PrefillInputs, options: Options) -> Plan:
    check_traffic(options.traffic)
    _, _, q_heads, head_dim = inputs.q.shape
    wanted = 1 / math.sqrt(head_dim) if options.scale is None else options.scale
    accepted = "a finite number that float32 holds"
    require(not isinstance(wanted, bool), f"scale {wanted!r}", accepted)
    scale = finite_number(wanted, "scale", accepted)
    features, fp8 = inputs.features, is_fp8(inputs.q)
    problem = PrefillProblem(
        inputs.batch, inputs.max_q, int(q_heads), int(inputs.k.shape[2]), int(head_dim), int(inputs.v.shape[3]),
        dtype_of(inputs.q, "q").itemsize, dtype_of(inputs.k, "k").itemsize, features.heavy,
        features.mask.bias is not None, inputs.ragged,
        p_fp8=fp8 and features.scales.v.kind != "token",
    )  # fmt: skip
    lacks, invariant = hopper_lacks(inputs, scale), bool(options.batch_invariant)
    declined = hopper_declined(problem, features.mask.left, batch_invariant=invariant)
    chosen, reason, hopper = choose_with_hopper(inputs.q, options.backend, lacks, declined, SUPPORTED)
    if hopper:
        tiles, where = choose_hopper(problem, inputs), "sm_90" if chosen == "emulator" else None
        explanation = Explanation("mha_prefill", chosen, reason, tiles, tiles.grid(problem), where)
        return Plan(explanation, inputs, options, problem, scale)
    if is_fp8(inputs.k):
        check_fp8_gpu(inputs.q, products=fp8)
    emulated = options.arch if chosen == "emulator" else None
    if emulated is not None:
        _check_emulated(inputs, problem, emulated)
    target = target_of(inputs.q, emulated)
    config = choose_config(
        problem, arch=target.arch, shared=target.shared, batch_invariant=invariant, emulated=emulated is not None
    )  # fmt: skip
    check_grid(config.grid(problem), problem.batch, problem.max_q)
    explanation = Explanation("mha_prefill", chosen, reason, config, config.grid(problem), emulated)
    return Plan(explanation, inputs, options, problem, scale)


def _check_emulated(inputs: PrefillInputs, problem: PrefillProblem, arch: str) -> None:
    check_arch(arch)
    check_machine(arch, problem)
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    check_lane_copies({name: array for name, array in arrays.items() if 0 not in array.shape})
