"""A prefill of MHA: what it asks of its arguments, the form its siblings take them in, its choice of tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvlab.attention.call.backends import function_at
from kvlab.attention.call.checks import check_lengths_and_pages, check_pages, given
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.layers import kv_pages, scales_of_pages
from kvlab.attention.call.operands import STARTS, STARTS_OF_K, TABLE, Operand, Sizes, check_heads
from kvlab.attention.call.planned import HOME
from kvlab.attention.call.ragged import PrefillCall, check_grid, check_offsets, keys_with_new, longest
from kvlab.attention.features.intervals import keys_in_table
from kvlab.attention.features.resolve import kv_view
from kvlab.attention.features.scales import is_four_bits, is_fp8
from kvlab.attention.hopper.choice import choose_with_hopper, machine_lacks
from kvlab.attention.machines import check_emulated
from kvlab.attention.machines.gpu import check_fp8_gpu, target_of
from kvlab.attention.schedule.config import FEW_ROWS
from kvlab.attention.tiles.pages import Sequences
from kvlab.common.arrays import add_axis, dtype_of, on_gpu
from kvlab.common.checks import is_integer, require

from .config import PrefillInputs, PrefillProblem, choose_config
from .hopper_config import HEAD_DIMS, SUPPORTED, choose_hopper, hopper_declined, hopper_lacks, is_page

SHORT_CHUNK, CHUNK = 512, 2048
"""New tokens of a sequence: of a short chunk, and of one whose list is faster where the cache is much longer."""
LISTED = frozenset(
    ("seq_lens", "causal", "window", "scale", "softcap", "sinks", "return_lse", "base2", "out", "check", "traffic")
)
"""Arguments of calls by tiles over a list, besides the arrays."""


class Prefill(PrefillCall):
    """A prefill; siblings take q and out as ``[B, S, Hq, ..]`` or ``[1, total, Hq, ..]``."""

    operation = "mha_prefill"
    base2_by_siblings = True
    inputs: PrefillInputs

    def choose(self, scale: float) -> tuple[Explanation, Any, str]:
        q, k, v = self.arrays[:3]
        features, fp8, invariant = self.features, is_fp8(q), self.batch_invariant
        problem = PrefillProblem(
            self.batch, self.longest, int(q.shape[2]), int(k.shape[2]), int(q.shape[3]), int(v.shape[3]),
            dtype_of(q, "q").itemsize, dtype_of(k, "k").itemsize, features.heavy, features.mask.bias is not None,
            self.cu_seqlens_q is not None, p_fp8=fp8 and features.scales.v.kind != "token",
            base2=self.base2,
        )
        declined = hopper_declined(problem, features.mask.left, batch_invariant=invariant)
        lacks = hopper_lacks(self.inputs, scale)
        chosen, reason, hopper = choose_with_hopper(q, self.backend, lacks, declined, SUPPORTED)
        emulated = self.arch if chosen == "emulator" else None
        if hopper:
            tiles = choose_hopper(problem, self.inputs)
            machine, sibling = ("sm_90", "hopper_emulator") if emulated else (None, "hopper")
            return Explanation("mha_prefill", chosen, reason, tiles, tiles.grid(problem), machine), problem, sibling
        if is_fp8(k):
            check_fp8_gpu(q, products=fp8)
        if emulated:
            names = ("k", "v") if self.inputs.sequences.table is None else ("k_cache", "v_cache")
            check_emulated("mha_prefill", emulated, q, dict(zip(names, (k, v), strict=True)))
        target = target_of(q, emulated)
        config = choose_config(
            problem, arch=target.arch, shared=target.shared, batch_invariant=invariant, emulated=emulated is not None
        )
        grid = config.grid(problem)
        check_grid(grid, problem.batch, problem.max_q)
        return Explanation("mha_prefill", chosen, reason, config, grid, emulated), problem, chosen


class DensePrefill(Prefill):
    """Of ``mha_prefill``: K and V as q, dense or ragged."""

    operands = (
        Operand("q"), Operand("k"), Operand("v"), replace(STARTS, optional=True), replace(STARTS_OF_K, optional=True),
        Operand("out", strides="", optional=True),
    )
    k: Any
    v: Any

    def check_arguments(self, sizes: Sizes) -> None:
        (q, k, v), (cu_q, cu_k) = (self.q, self.k, self.v), (self.cu_seqlens_q, self.cu_seqlens_k)
        both = (cu_q is None) == (cu_k is None)
        require(both, "only one of cu_seqlens_q and cu_seqlens_k is given", "both or neither")
        ragged = cu_q is not None
        form = "[total, H, D] with cu_seqlens" if ragged else "[B, S, H, D] without cu_seqlens"
        for name, array in (("q", q), ("k", k), ("v", v)):
            require(array.ndim == (3 if ragged else 4), f"{name} has shape {tuple(array.shape)}", form)
        require(ragged or k.shape[0] == q.shape[0], f"k has {k.shape[0]} sequences", f"those of q, {q.shape[0]}")
        check_heads(q, {"k": k, "v": v})
        if ragged:
            longest(self.max_seqlen_q, q, cu_q)
        unasked = ragged or self.max_seqlen_q is None
        require(unasked, f"max_seqlen_q {self.max_seqlen_q!r} without cu_seqlens_q", "None; q tells the length")

    def arrange(self) -> None:
        (q, k, v), (cu_q, cu_k), self.into = (self.q, self.k, self.v), (self.cu_seqlens_q, self.cu_seqlens_k), self.out
        if cu_q is None:
            self.batch, self.longest = int(q.shape[0]), int(q.shape[1])
            self.features = self.resolve(q, k, v, batch=self.batch, lengths=self.lengths)
        else:
            self.count_sequences()
            self.dropped = 0
            self.features = self.resolve(q, k, v, batch=self.batch, lengths=self.lengths).with_leading_axis()
            q, k, v, self.into = (add_axis(x, 0) for x in (q, k, v, self.out))
        self.inputs = PrefillInputs(q, k, v, Sequences(cu_q, cu_k), self.into, self.features)
        self.arrays = self.inputs[:4]

    def lengths(self) -> tuple[Any, Any]:
        if self.cu_seqlens_q is None:
            return np.full(self.batch, self.q.shape[1]), np.full(self.batch, self.k.shape[1])
        return super().lengths()

    def check_values(self) -> None:
        if self.cu_seqlens_q is not None:
            super().check_values()
            check_offsets("cu_seqlens_k", self.cu_seqlens_k, self.k, None)


class PagedPrefill(Prefill):
    """Of ``mha_prefill_paged``: K and V in pages ``[pages, page_size, Hkv, ..]``."""

    operands = (
        Operand("q", "[total, Hq, D]"), Operand("k_cache", "[pages, page_size, Hkv, D]", paged=True),
        Operand("v_cache", "[pages, page_size, Hkv, D]", paged=True),
        STARTS, TABLE, Operand("seq_lens", "[B = {B}]", integers=True),
        Operand("out", strides="", optional=True),
    )
    paged_scales = "k_scale", "v_scale"
    k_cache: Any
    v_cache: Any
    block_table: Any
    seq_lens: Any

    def check_arguments(self, sizes: Sizes) -> None:
        q, caches = self.q, {name: kv_view(getattr(self, name), self.kv_layout) for name in ("k_cache", "v_cache")}
        check_pages(caches)
        check_heads(q, caches)
        longest(self.max_seqlen_q, q, self.cu_seqlens_q)

    def arrange(self) -> None:
        q, cu_q = self.q, self.cu_seqlens_q
        caches = kv_view(self.k_cache, self.kv_layout), kv_view(self.v_cache, self.kv_layout)
        self.count_sequences()
        self.dropped = 0
        self.features = self.resolve(q, *caches, batch=self.batch, lengths=self.lengths)
        self.into = add_axis(self.out, 0)
        sequences = Sequences(cu_q, None, self.block_table, self.seq_lens)
        self.inputs = PrefillInputs(add_axis(q, 0), *caches, sequences, self.into, self.features)
        self.arrays = self.inputs[:4]

    def keys(self) -> Any:
        page_size = kv_view(self.k_cache, self.kv_layout).shape[1]
        return keys_in_table(self.seq_lens, self.block_table, int(page_size))

    def check_values(self) -> None:
        super().check_values()
        pages, page_size = kv_view(self.k_cache, self.kv_layout).shape[:2]
        check_lengths_and_pages(self.seq_lens, self.block_table, pages, page_size, self.arguments.get("leftpad_k"))


def list_is_faster(total: int, batch: int, most: int | None, keys: int) -> bool:
    """Tells whether Hopper's tiles over a work list are faster than those of a head each. They are where chunks are
    short, in the mean or beside their cache, or differ much, as those of mixed batches do; for long prompts they are
    not.

    total : new tokens of all sequences. most : of one, at most; None: that is not known. keys : of a sequence, for
    which tables have room.

    >>> list_is_faster(16 * 128, 16, 128, 30_000), list_is_faster(6 * 1024, 6, 1024, 21_000)
    (True, True)
    >>> list_is_faster(2048 + 120, 121, 2048, 4096), list_is_faster(24 * 1600, 24, 3000, 3000)
    (True, False)
    """
    short = total <= SHORT_CHUNK * batch
    return short or (most is not None and (4 * total <= batch * most or (most <= CHUNK and keys >= 8 * most)))


def takes_list(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, cu_seqlens_q: Any, kv_layout: str = "NHD",
    backend: str = "auto", batch_invariant: bool = False, max_seqlen_q: Any = None, **options: Any,
) -> bool:
    """Tells whether a call on sm_90 is one over a work list that the call makes: of 16 bits, without other features
    than LISTED, where Hopper's tiles walk one, or few rows do.
    """
    plain = all(value is None for name, value in options.items() if name not in LISTED)
    if not (plain and backend == "auto" and not batch_invariant and on_gpu(q) and machine_lacks(q) is None):
        return False
    arrays = q, k_cache, v_cache, block_table, cu_seqlens_q
    if [getattr(one, "ndim", 0) for one in arrays] != [3, 4, 4, 2, 1] or not q.dtype == k_cache.dtype == v_cache.dtype:
        return False
    _, page, kv_heads, _ = map(int, kv_view(k_cache, kv_layout).shape)
    (total, heads, *dims), batch = map(int, (*q.shape, v_cache.shape[3])), len(cu_seqlens_q) - 1
    most = max_seqlen_q if is_integer(max_seqlen_q) else None
    few = most is not None and most * heads <= FEW_ROWS * kv_heads
    faster = list_is_faster(total, batch, most, int(block_table.shape[1]) * page)
    return dtype_of(q, "q").itemsize == 2 and tuple(dims) in HEAD_DIMS and is_page(page) and (few or faster)


def over_pages(plan: Any = None, qv: Any = None, **arguments: Any) -> PagedPrefill:
    """The call over pages: with a ``plan``, a query of V, or K and V of 4 bits, that of ``attend_paged``, which is over
    a schedule; on sm_90 of chunks, too.
    """
    cache = arguments["k_cache"]
    four_bits = getattr(cache, "dtype", None) is not None and is_four_bits(cache)
    if plan is None and qv is None and not (four_bits or takes_list(**arguments)):
        return PagedPrefill(**arguments)
    made: Any = function_at(f"{HOME}.call:AttendPaged")
    listed: PagedPrefill = made(**arguments, **given(plan=plan, qv=qv))
    return listed


def arrays_of_collection(q: Any, cache: Any, layer: int, starts: Any) -> dict[str, Any]:
    """The array form of a prefill over a collection, whose scales are used."""
    pages = kv_pages(cache, layer, "mla_prefill")
    found = {"q": q, "k_cache": pages.keys, "v_cache": pages.values, "block_table": cache.lookup_table,
             "seq_lens": keys_with_new(cache, starts), "cu_seqlens_q": starts}
    return found | scales_of_pages(pages)
