"""A prefill of MLA: what it asks of its arguments, the form its siblings take them in, its choice of tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvlab.attention.call.backends import choose_backend, function_at
from kvlab.attention.call.checks import check_lengths_and_pages, known_dtype
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.latent_rows import check_latent_rows, latent_windows
from kvlab.attention.call.layers import latent_pages
from kvlab.attention.call.operands import STARTS, STARTS_OF_K, TABLE, Operand, Sizes, check_dtypes
from kvlab.attention.call.planned import HOME, PlannedCall
from kvlab.attention.call.ragged import (
    PrefillCall,
    check_grid,
    check_offsets,
    keys_with_new,
    longest,
    sequence_lengths,
)
from kvlab.attention.features.intervals import UNLIMITED, host, keys_in_table
from kvlab.attention.features.resolve import Features, kv_view
from kvlab.attention.features.scales import is_fp8, resolve_scale
from kvlab.attention.machines import check_emulated
from kvlab.attention.machines.gpu import check_fp8_gpu, target_of
from kvlab.attention.tiles.pages import Sequences
from kvlab.common.arrays import dtype_of
from kvlab.common.checks import require
from kvlab.memory import bfloat16, float8_e4m3fn

from .config import MLAPrefillProblem, choose_config

EXPANDED = f"{HOME}.expanded"
"""Where K and V of each head are walked over a schedule."""
ROWS = (
    Operand("q", "[total, H, columns]"), Operand("k", "[total, H, columns]"), Operand("v", "[total, H, columns]"),
)


class MLAPrefill(PlannedCall, PrefillCall):
    """A prefill of MLA; siblings take its arrays as they are, K's rope part as ``[total_k, rope]`` or in pages."""

    operation = "mla_prefill"
    rope_scale: Any = None
    k_starts: Any = None
    k: Any
    v: Any
    k_rope: Any

    def check_arguments(self, sizes: Sizes) -> None:
        """Dtypes, heads, columns; a plan."""
        super().check_arguments(sizes)
        free = self.schedule is None or not self.batch_invariant
        require(free, "batch_invariant with plan", "left out: units follow from the lengths of all sequences")
        q, k, v = self.q, self.k, self.v
        of_q, of_k = check_dtypes(q, "k", k)
        same = f"that of {'q' if of_k == of_q else 'k'}, {k.dtype}"
        require(known_dtype(v, "v") == of_k, f"v has dtype {v.dtype}", same)
        for name, array in (("k", k), ("v", v)):
            require(array.shape[1] == q.shape[1], f"{name} has {array.shape[1]} heads", f"those of q, {q.shape[1]}")
        require(v.shape[0] == k.shape[0], f"v has {v.shape[0]} rows", f"those of k, {k.shape[0]}")
        require(q.shape[1] > 0, "q has no heads", "at least one head")
        unit = 16 if of_k == float8_e4m3fn else 8
        nope, rope, value = k.shape[2], q.shape[2] - k.shape[2], v.shape[2]
        for what, columns, most in (("k", nope, 256), ("q beyond those of k, for rope,", rope, 128), ("v", value, 256)):
            fits = 16 <= columns <= most and columns % unit == 0
            require(fits, f"{columns} columns of {what}", f"a multiple of {unit} from 16 to {most}")
        longest(self.max_seqlen_q, q, self.cu_seqlens_q)

    def arrange_with(self, k_rope: Any, table: Any = None, seq_lens: Any = None, starts: Any = None) -> None:
        """Set ``arrays`` and ``features``, with K's rope part as siblings take it."""
        q, k, v, cu_q, cu_k = self.q, self.k, self.v, self.cu_seqlens_q, self.cu_seqlens_k
        sequences = Sequences(cu_q, cu_k, table, seq_lens, starts)
        self.arrays, self.into, self.k_rope = (q, k, v, k_rope, sequences), self.out, k_rope
        self.count_sequences()
        self.features = self.resolve(q, k, v, batch=self.batch, lengths=self.lengths)

    def scale_of_rope(self, asked: dict[str, Any]) -> tuple[str, Any]:
        """The scale of K's rope part, and what the caller calls it."""
        return "rope_scale", self.rope_scale

    def resolved(self, q: Any, k: Any, v: Any, asked: dict[str, Any], *, batch: int, lengths: Any) -> Features:
        name, by = self.scale_of_rope(asked)
        of_k = asked | {"k_scale": None} if name == "k_scale" else asked  # of rope alone
        features, rope = super().resolved(q, k, v, of_k, batch=batch, lengths=lengths), self.k_rope[..., None, :]
        rope_scale = resolve_scale(name, by, rope, batch, 1, tuple(int(n) for n in rope.shape[:-1]))
        return replace(features, scales=replace(features.scales, rope=rope_scale))

    def choose(self, scale: float) -> tuple[Explanation, Any, str]:
        q, k, v, features = self.q, self.k, self.v, self.features
        chosen, reason = choose_backend(q, self.backend)
        problem = MLAPrefillProblem(
            self.batch, self.longest, int(q.shape[1]), int(k.shape[2]), int(q.shape[2] - k.shape[2]), int(v.shape[2]),
            max(dtype_of(q, "q").itemsize, 2), features.heavy, is_fp8(k), features.mask.bias is not None,
            self.arrays[4].table is not None,
        )
        emulated = self.arch if chosen == "emulator" else None
        if emulated:
            rope = "k_rope" if self.arrays[4].table is None else "the rope part of kv_cache"
            arrays = {"k": k, "v": v, rope: self.k_rope}
            check_emulated("mla_prefill", emulated, q, arrays, {} if problem.converted else {rope: (problem.rope,)})
        if is_fp8(self.k_rope) or is_fp8(k):
            check_fp8_gpu(q)
        target = target_of(q, emulated)
        config = choose_config(problem, arch=target.arch, shared=target.shared, emulated=emulated is not None)
        if self.schedule is not None:
            sizes = function_at(f"{EXPANDED}.config:walked")(problem, int(q.shape[0]))
            function_at(f"{HOME}.step:check_plan")(self.schedule, sizes, *self.sight())
            walk = function_at(f"{EXPANDED}.config:walk_of")(config, self.schedule.walks)
            sibling = {"triton": f"{EXPANDED}.kernel", "emulator": f"{EXPANDED}.emulator"}.get(chosen, chosen)
            return Explanation("mla_prefill", chosen, reason, walk, walk.grid(sizes), emulated), problem, sibling
        grid = config.grid(problem)
        check_grid(grid, problem.batch, problem.max_q)
        return Explanation("mla_prefill", chosen, reason, config, grid, emulated), problem, chosen

    def sight(self) -> tuple[int, int]:
        """Keys that a query sees before and behind the place that lengths give it, as a plan counts them."""
        return self.features.mask.by_length if self.k_starts is None else (UNLIMITED, UNLIMITED)

    def listed(self) -> tuple[Any, Any]:
        return sequence_lengths(self.cu_seqlens_k), self.cu_seqlens_q

    def explained(self) -> Explanation:
        return replace(self.plan.explanation, schedule=self.schedule)

    def check_values(self) -> None:
        check_offsets("cu_seqlens_q", self.cu_seqlens_q, self.q, self.longest)
        check_offsets("cu_seqlens_k", self.cu_seqlens_k, self.k, None)
        super().check_values()


class PagedMLAPrefill(MLAPrefill):
    """Of ``mla_prefill_paged``: K's rope part in the pages of the latent cache."""

    operands = (
        *ROWS, STARTS, STARTS_OF_K, Operand("kv_cache"), TABLE,
        Operand("seq_lens", "[B = {B}]", integers=True),
        Operand("k_starts", "[B = {B}]", integers=True, optional=True), Operand("out", strides="", optional=True),
    )
    k_starts: Any = None
    latent_dim: int = 512
    kv_cache: Any
    block_table: Any
    seq_lens: Any

    def check_arguments(self, sizes: Sizes) -> None:
        super().check_arguments(sizes)
        q, kv_cache, latent_dim = self.q, self.kv_cache, self.latent_dim
        whole = isinstance(latent_dim, int) and not isinstance(latent_dim, bool) and 1 <= latent_dim < 1 << 31
        require(whole, f"latent_dim is {latent_dim!r}", "a number of columns")
        check_latent_rows(kv_cache, latent_dim, q.shape[2] - self.k.shape[2], self.kv_layout)
        narrow = dtype_of(kv_cache, "kv_cache").itemsize == 1
        same = narrow or kv_cache.dtype == q.dtype
        other = "" if is_fp8(q) else ", or float8_e4m3fn"
        require(same, f"kv_cache has dtype {kv_cache.dtype}", f"that of q, {q.dtype}{other}")
        fits = not narrow or dtype_of(q, "q").itemsize < 4
        require(fits, f"q has dtype {q.dtype} with a cache of {kv_cache.dtype}", "bfloat16 or float16")

    def arrange(self) -> None:
        rope = self.q.shape[2] - self.k.shape[2]
        _, k_rope = latent_windows(self.kv_cache, self.latent_dim, rope, self.kv_layout)
        self.arrange_with(k_rope, self.block_table, self.seq_lens, self.k_starts)

    def keys(self) -> Any:
        return keys_in_table(self.seq_lens, self.block_table, int(self.k_rope.shape[1]))

    def scale_of_rope(self, asked: dict[str, Any]) -> tuple[str, Any]:
        own = self.rope_scale is not None or is_fp8(self.k)
        by = self.rope_scale if own else asked.get("k_scale")
        return "rope_scale" if own else "k_scale", kv_view(by, self.kv_layout)

    def check_values(self) -> None:
        super().check_values()
        pages, page_size = self.k_rope.shape[:2]
        check_lengths_and_pages(self.seq_lens, self.block_table, pages, page_size, self.arguments.get("leftpad_k"))
        held, lens = sequence_lengths(self.cu_seqlens_k), host(self.seq_lens).astype(np.int64)
        starts = lens - held if self.k_starts is None else host(self.k_starts).astype(np.int64)
        bad = (starts < 0) | (starts > lens - held)
        if bad.any():
            b = int(bad.argmax())
            raise ValueError(
                f"k and v hold {held[b]} keys of sequence {b} from key {starts[b]} on: must be among its {lens[b]} keys"
            )


class RaggedMLAPrefill(MLAPrefill):
    """Of ``mla_prefill_ragged``: K's rope part in an array of its own."""

    operands = (
        *ROWS, STARTS, STARTS_OF_K, Operand("k_rope", "[total_k, rope] or [total_k, 1, rope]"),
        Operand("out", strides="", optional=True),
    )

    def check_arguments(self, sizes: Sizes) -> None:
        super().check_arguments(sizes)
        q, k, k_rope = self.q, self.k, self.arguments["k_rope"]
        shape = tuple(k_rope.shape)
        require(k_rope.ndim == 2 or shape[1] == 1, f"k_rope has {shape[1]} heads", "1: all heads share it")
        expected = k.shape[0], q.shape[2] - k.shape[2]
        require((shape[0], shape[-1]) == expected, f"k_rope has shape {shape}", f"{expected}, what q has beyond k")
        others = (bfloat16,) if is_fp8(q) else (float8_e4m3fn,) if is_fp8(k) else ()
        accepted = ", or ".join([f"that of q, {q.dtype}", *(other.name for other in others)])
        fits = known_dtype(k_rope, "k_rope") in (dtype_of(q, "q"), *others)
        require(fits, f"k_rope has dtype {k_rope.dtype}", accepted)

    def arrange(self) -> None:
        k_rope = self.arguments["k_rope"]
        self.arrange_with(k_rope[:, 0] if k_rope.ndim == 3 else k_rope)


def arrays_of_collection(
    q: Any, k: Any, v: Any, cache: Any, layer: int, *, cu_seqlens_q: Any, cu_seqlens_k: Any
) -> dict[str, Any]:
    """The array form of a call over a collection."""
    rows = latent_pages(cache, layer)
    lens = keys_with_new(cache, cu_seqlens_q)
    tables = {"kv_cache": rows, "block_table": cache.lookup_table, "seq_lens": lens}
    return {"q": q, "k": k, "v": v, **tables, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
