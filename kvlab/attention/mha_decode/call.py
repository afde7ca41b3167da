"""A paged decode of MHA: what it asks of its arguments, the form its siblings take them in, its choice of tiles."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from kvlab.attention.call.checks import check_lengths_and_pages, check_pages, given, lengths_with_new
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.layers import kv_pages, scales_of_pages
from kvlab.attention.call.operands import TABLE, Operand, Sizes, check_heads
from kvlab.attention.call.planned import HOME, PlannedCall, lengths_must_differ
from kvlab.attention.features.intervals import host, keys_in_table
from kvlab.attention.features.qv import check_emulated_qv, check_qv
from kvlab.attention.features.resolve import kv_view
from kvlab.attention.features.scales import is_scaled
from kvlab.attention.hopper.choice import choose_with_hopper, machine_lacks
from kvlab.attention.machines import check_emulated
from kvlab.attention.machines.gpu import check_fp8_gpu, target_of, traits
from kvlab.attention.tiles.online_softmax import MASK_VALUE
from kvlab.common.arrays import add_axis, address_of, dtype_of, element_strides, on_gpu
from kvlab.common.checks import require

from .config import MAX_ROWS, choose_config, problem_of
from .hopper_config import ROWS, SUPPORTED, WIDE_DEPTHS, choose_hopper, hopper_declined, hopper_lacks

MAX_TOKENS, MAX_TOKENS_BALANCED = 4, 16
MOST_FULL = 0.4
"""Pages of a pool for each that its table could name: a schedule costs equal lengths 4 % on an H200, which is what it
gains where sequences are half as long as the longest one."""


class PagedDecode(PlannedCall):
    """A decode over pages of K and V ``[pages, page_size, Hkv, ..]``; siblings take q and out as ``[B, S, Hq, ..]``."""

    operands = (
        Operand("q", "[B, Hq, D] or [B, S, Hq, D]"),
        Operand("k_cache", "[pages, page_size, Hkv, D]", paged=True),
        Operand("v_cache", "[pages, page_size, Hkv, D]", paged=True),
        TABLE,
        Operand("seq_lens", "[B = {B}]", integers=True, strides="any"),
        Operand("qv", optional=True),
        Operand("out", strides="", optional=True),
    )
    paged_scales = "k_scale", "v_scale", "k_block_scale", "v_block_scale", "k_min", "v_min"
    out_may_be = "q"
    four_bits: ClassVar[bool] = False
    """Tells whether K and V may be of 4 bits."""
    num_splits: int | None = None
    mask_value: float = MASK_VALUE
    balanced: bool | None = None
    q: Any
    k_cache: Any
    v_cache: Any
    block_table: Any
    seq_lens: Any

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.over_schedule = self.balanced or self.schedule is not None or arguments.get("qv") is not None

    def check_arguments(self, sizes: Sizes) -> None:
        super().check_arguments(sizes)
        q, tokens, balanced = self.q, sizes.get("S", 1), self.over_schedule
        fixed = balanced and self.num_splits is not None
        require(not fixed, f"num_splits with {self.why_scheduled()}", "left out: units follow from the lengths")
        refused = balanced and self.balanced is False
        require(not refused, f"balanced=False with {self.why_scheduled()}", "left out: such a call is over a schedule")
        most = MAX_TOKENS_BALANCED if balanced else MAX_TOKENS
        require(1 <= tokens <= most, f"q has {tokens} new tokens a sequence", f"1 to {most}")
        caches = {name: kv_view(getattr(self, name), self.kv_layout) for name in ("k_cache", "v_cache")}
        check_pages(caches)
        check_heads(q, caches, four_bits=self.four_bits)
        if is_scaled(self.k_cache):
            check_pairs(caches)
        check_qv(self.arguments.get("qv"), q, self.v_cache)

    def why_scheduled(self) -> str:
        """The argument that asks for a schedule."""
        return "qv" if self.arguments.get("qv") is not None else "balanced=True" if self.balanced else "a plan"

    def arrange(self) -> None:
        q, self.into = self.q, self.out
        if q.ndim == 3:
            self.dropped, q, self.into = 1, add_axis(q, 1), add_axis(self.out, 1)
        caches = kv_view(self.k_cache, self.kv_layout), kv_view(self.v_cache, self.kv_layout)
        self.arrays = q, *caches, self.block_table, self.seq_lens
        self.features = self.resolve(q, *caches, batch=q.shape[0], lengths=self.lengths)

    def is_causal(self, mask: Any, window: Any) -> bool:
        return mask is None or isinstance(window, int | np.integer)

    def lengths(self) -> tuple[Any, Any]:
        """New tokens and keys of each sequence."""
        q, cache, *_ = self.arrays
        return np.full(q.shape[0], q.shape[1]), keys_in_table(self.seq_lens, self.block_table, int(cache.shape[1]))

    def choose(self, scale: float) -> tuple[Explanation, Any, str]:
        (q, k_cache, v_cache, table, _), features = self.arrays, self.features
        problem = problem_of(q, k_cache, v_cache, table)
        if self.over_schedule:
            lacks = hopper_lacks(q, k_cache, v_cache, problem, features, MAX_ROWS) or self.lacks_ring()
        else:
            lacks = hopper_lacks(q, k_cache, v_cache, problem, features)
        chosen, reason, hopper = choose_with_hopper(q, self.backend, lacks, hopper_declined(problem), SUPPORTED)
        emulated = self.arch if chosen == "emulator" else None
        splits: dict[str, Any] = {"num_splits": self.num_splits, "batch_invariant": self.batch_invariant}
        if hopper and not self.over_schedule:
            tiles = choose_hopper(problem, processors=target_of(q, None).processors, **splits)
            machine, sibling = ("sm_90", "hopper_emulator") if emulated else (None, "hopper")
            return Explanation("mha_decode", chosen, reason, tiles, tiles.grid(), machine), problem, sibling
        if emulated and not hopper:
            depths = problem.head_dim, problem.v_dim
            check_emulated_qv(features.qv, emulated)
            caches = {"k_cache": k_cache, "v_cache": v_cache} | given(qv=features.qv)
            check_emulated("mha_decode", emulated, q, caches, {"k_cache": depths})
        check_narrow_gpu(q, problem)
        if self.over_schedule:
            emulated = "sm_90" if emulated and hopper else emulated
            walks = self.walks(problem, problem.tokens, emulated, hopper=hopper)
            modules = {"triton": f"{HOME}.kernel", "hopper": f"{HOME}.kernel", "emulator": f"{HOME}.emulator"}
            told = Explanation("mha_decode", chosen, reason, walks, walks.grid(problem), emulated)
            return told, problem, modules.get(chosen, chosen)
        target = target_of(q, emulated)
        config = choose_config(
            problem, processors=target.processors, arch=target.arch, shared=target.shared, heavy=features.heavy,
            biased=features.mask.bias is not None, **splits,
        )
        return Explanation("mha_decode", chosen, reason, config, config.grid(problem), emulated), problem, chosen

    def listed(self) -> tuple[Any, Any]:
        return self.seq_lens, None

    def check_values(self) -> None:
        (q, cache, _, table, lens), mask = self.arrays, self.features.mask
        pad = 0 if mask.leftpad is None else host(mask.leftpad)
        lengths = host(lens).astype(np.int64) - pad
        lowest = lengths - q.shape[1] if mask.positions is None else host(mask.positions).min(1)
        first, _ = mask.interval.bounds(lowest, lengths, np.arange(len(lengths)))
        check_lengths_and_pages(lens, table, cache.shape[0], cache.shape[1], first + pad)
        super().check_values()


class MHADecode(PagedDecode):
    """Of ``mha_decode_paged``."""

    operation = "mha_decode"
    four_bits = True

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        free = self.balanced is None and not self.over_schedule
        if free and self.backend == "auto" and on_gpu(self.q):
            pool, table = (arguments.get(name) for name in ("k_cache", "block_table"))
            fixed = self.batch_invariant or self.num_splits is not None
            self.over_schedule = not fixed and (lengths_must_differ(pool, table, MOST_FULL) or self.walked_alone(pool))

    def walked_alone(self, pool: Any) -> bool:
        """Tells whether Hopper's kernel has the rows of several sequences over a schedule alone."""
        q = self.q
        deep = q.ndim > 2 and len(q) > 1 and q.shape[-1] in WIDE_DEPTHS and getattr(pool, "dtype", None) == q.dtype
        many = deep and math.prod(q.shape[1:-1]) > ROWS * kv_view(pool, self.kv_layout).shape[2]
        return many and machine_lacks(q) is None


def arrays_of_collection(q: Any, cache: Any, layer: int) -> dict[str, Any]:
    """The array form of a call over a collection, whose scales are used."""
    pages = kv_pages(cache, layer, "mla_decode")
    table = {"block_table": cache.lookup_table, "seq_lens": lengths_with_new(cache.cache_lengths, q)}
    return {"q": q, "k_cache": pages.keys, "v_cache": pages.values, **table, **scales_of_pages(pages)}


def check_pairs(caches: dict[str, Any]) -> None:
    """ValueError for rows of fp8 or 4 bits that do not start at an even byte: columns move in elements of 16 bits."""
    for name, cache in caches.items():
        strides = element_strides(cache, name)
        even = address_of(cache) % 2 == 0 and not any(step % 2 for step in strides[:-1])
        require(even, f"{name} of {dtype_of(cache, name)} has strides {strides}", "rows at even bytes")


def check_narrow_gpu(q: Any, problem: Any) -> None:
    """ValueError where q is on a GPU that does not convert the problem's K and V."""
    if problem.pairs:
        check_fp8_gpu(q)
    elif problem.each == 4 and on_gpu(q):
        arch = target_of(q, None).arch
        require(not traits(arch).amd, f"K and V of 4 bits on {arch}", "on NVIDIA, sm_80 or later")
