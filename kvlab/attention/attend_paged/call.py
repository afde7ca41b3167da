"""A call over any new tokens of sequences in pages: what it asks of its arguments, and the walks that it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvlab.attention.call.checks import check_lengths_and_pages, check_pages, given
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.operands import STARTS, TABLE, Operand, Sizes, check_heads
from kvlab.attention.call.planned import PlannedCall
from kvlab.attention.call.ragged import PrefillCall, check_offsets, longest
from kvlab.attention.features.intervals import keys_in_table
from kvlab.attention.features.qv import check_emulated_qv, check_qv
from kvlab.attention.features.resolve import kv_view
from kvlab.attention.features.scales import is_scaled
from kvlab.attention.hopper.choice import choose_with_hopper
from kvlab.attention.machines import check_emulated
from kvlab.attention.mha_decode.call import check_narrow_gpu, check_pairs
from kvlab.attention.mha_decode.hopper_config import SUPPORTED, hopper_declined, hopper_lacks
from kvlab.attention.mha_prefill.config import PrefillInputs
from kvlab.attention.mha_prefill.hopper_config import LIST_SUPPORTED, list_lacks
from kvlab.attention.schedule.config import FEW_ROWS
from kvlab.attention.tiles.pages import Sequences
from kvlab.common.arrays import add_axis, dtype_of

from .config import ragged_problem
from .hopper_config import tiles_walk, with_tiles


class AttendPaged(PlannedCall, PrefillCall):
    """Of ``attend_paged``; siblings take q and out as ``[1, total, Hq, ..]``."""

    operation = "attend_paged"
    operands = (
        Operand("q", "[total, Hq, D]"), Operand("k_cache", "[pages, page_size, Hkv, D]", paged=True),
        Operand("v_cache", "[pages, page_size, Hkv, D]", paged=True),
        STARTS, TABLE, Operand("seq_lens", "[B = {B}]", integers=True, strides="any"),
        Operand("qv", optional=True),
        Operand("out", strides="", optional=True),
    )
    paged_scales = "k_scale", "v_scale", "k_block_scale", "v_block_scale", "k_min", "v_min"
    out_may_be = "q"
    over_schedule = True
    q: Any
    k_cache: Any
    v_cache: Any
    block_table: Any
    seq_lens: Any

    def check_arguments(self, sizes: Sizes) -> None:
        super().check_arguments(sizes)
        caches = {name: kv_view(getattr(self, name), self.kv_layout) for name in ("k_cache", "v_cache")}
        check_pages(caches)
        check_heads(self.q, caches, four_bits=True)
        if is_scaled(self.k_cache):
            check_pairs(caches)
        check_qv(self.arguments.get("qv"), self.q, self.v_cache)
        longest(self.max_seqlen_q, self.q, self.cu_seqlens_q)

    def arrange(self) -> None:
        caches = kv_view(self.k_cache, self.kv_layout), kv_view(self.v_cache, self.kv_layout)
        self.count_sequences()
        self.dropped = 0
        self.features = self.resolve(self.q, *caches, batch=self.batch, lengths=self.lengths)
        self.into = add_axis(self.out, 0)
        self.arrays = add_axis(self.q, 0), *caches, self.block_table, self.seq_lens, self.cu_seqlens_q

    def choose(self, scale: float) -> tuple[Explanation, Any, str]:
        q, k_cache, v_cache, table, _, starts = self.arrays
        problem, emulated = ragged_problem(q, k_cache, v_cache, table, starts), None
        few = replace(problem, tokens=min(self.longest, max(1, FEW_ROWS // problem.group)))  # of the first walk
        ring = hopper_lacks(q, k_cache, v_cache, few, self.features, FEW_ROWS) or self.lacks_ring()
        many, declined = self.longest * problem.group > FEW_ROWS, hopper_declined(few)
        inputs = PrefillInputs(q, k_cache, v_cache, Sequences(starts, None, table), self.into, self.features)
        tiles = (list_lacks(inputs, scale) or self.lacks_tiles()) if many else "no more rows than small tiles have"
        lacks, supported = (tiles, LIST_SUPPORTED) if many and (tiles is None or ring) else (ring, SUPPORTED)
        reasons = lacks, None if tiles is None else declined and (tiles if many else declined)
        chosen, reason, hopper = choose_with_hopper(q, self.backend, *reasons, supported)
        if chosen == "emulator" and hopper:
            emulated = "sm_90"
        elif chosen == "emulator":
            emulated, depths = self.arch, (problem.head_dim, problem.v_dim)
            check_emulated_qv(self.features.qv, emulated)
            caches = {"k_cache": k_cache, "v_cache": v_cache} | given(qv=self.features.qv)
            check_emulated("mha_decode", emulated, q, caches, {"k_cache": depths})
        check_narrow_gpu(q, problem)
        rings = ring is None and (self.backend == "hopper" or declined is None)
        wide = hopper and tiles is None
        config = self.walks(problem, self.longest, emulated, hopper=hopper and rings, tiles=wide)
        config = with_tiles(config, problem, self.features, dtype_of(q, "q").itemsize) if wide else config
        told = Explanation("attend_paged", chosen, reason, config, config.grid(problem), emulated)
        return told, problem, "triton" if chosen == "hopper" else chosen

    def lacks_tiles(self) -> str | None:
        """Feature of a schedule that Hopper's prefill tiles lack, None if they walk a list of it."""
        if self.batch_invariant:
            return "batch_invariant=True over a schedule"
        lists = [True] if self.schedule is None else [tiles_walk(one.config) for one in self.schedule.walks]
        return None if any(lists) else "a plan of other tiles"

    def listed(self) -> tuple[Any, Any]:
        return self.seq_lens, self.cu_seqlens_q

    def keys(self) -> Any:
        page_size = kv_view(self.k_cache, self.kv_layout).shape[1]
        return keys_in_table(self.seq_lens, self.block_table, int(page_size))

    def check_values(self) -> None:
        check_offsets("cu_seqlens_q", self.cu_seqlens_q, self.q, self.longest)
        pages, page_size = kv_view(self.k_cache, self.kv_layout).shape[:2]
        check_lengths_and_pages(self.seq_lens, self.block_table, pages, page_size, self.arguments.get("leftpad_k"))
        super().check_values()

    def named(self) -> dict[str, Any]:
        return {name: value for name, value in super().named().items() if name != "problem"}
