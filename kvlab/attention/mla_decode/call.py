"""An absorbed decode of MLA: what it asks of its arguments, the form its siblings take them in, its choice of tiles."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from kvlab.attention.call.backends import function_at
from kvlab.attention.call.checks import check_dtype, check_lengths_and_pages, check_slots, lengths_with_new
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.latent_rows import check_latent_rows, latent_windows, row_scales
from kvlab.attention.call.layers import latent_pages
from kvlab.attention.call.operands import TABLE, Operand, Sizes
from kvlab.attention.call.planned import HOME, PlannedCall, lengths_must_differ
from kvlab.attention.features.intervals import keys_in_table
from kvlab.attention.features.positions import refuse_places
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import is_fp8
from kvlab.attention.hopper.choice import choose_with_hopper, machine_lacks
from kvlab.attention.machines import check_emulated, choose
from kvlab.attention.machines.gpu import check_fp8_gpu, target_of
from kvlab.attention.tiles.online_softmax import MASK_VALUE
from kvlab.common.arrays import add_axis, dtype_of, element_strides, on_gpu
from kvlab.common.checks import require, shown
from kvlab.common.torch_here import is_torch
from kvlab.triton_support.versions import holds_wgmma_rows

from .config import MLADecodeProblem, MLAInputs, choose_config
from .hopper_config import SUPPORTED, choose_hopper, hopper_lacks, walk_ring

LATENT = f"{HOME}.latent"
"""Where latent rows are walked over a schedule."""
MAX_TOKENS = 16
MAX_HEADS = 128
LENGTHS_ALONE = "num_splits", "batch_invariant", "indices", "leftpad_k", "q_positions"
"""What a schedule's units do not follow from."""
FEW_HEADS, MOST_FULL, MOST_FULL_OF_MANY_HEADS, MOST_FULL_ON_HOPPER = 16, 0.4, 0.2, 0.6
"""Pages of a pool for each that its table could name, where a schedule is worth it: on an H200 it costs equal lengths
14 % with 16 heads and 28 % with 64 by Hopper's kernel, twice the time by the portable one with more than 16.
"""


class MLADecode(PlannedCall):
    """Of ``mla_decode_paged``; siblings take q and out as ``[B, S, H, ..]``, latents and rope columns apart."""

    operation = "mla_decode"
    operands = (
        Operand("q", "[B, H, D] or [B, S, H, D]"), Operand("kv_cache"), TABLE,
        Operand("seq_lens", "[B = {B}]", integers=True, strides="any"),
        Operand("indices", integers=True, optional=True), Operand("out", strides="", optional=True),
    )
    paged_scales = ("k_scale",)
    v_dim: int = 512
    indices: Any = None
    balanced: bool | None = None
    num_splits: int | None = None
    mask_value: float = MASK_VALUE
    q: Any
    kv_cache: Any
    block_table: Any
    seq_lens: Any
    inputs: MLAInputs
    row_scales: Any

    def planned(self) -> Self:
        super().planned()
        self.over_schedule = hasattr(self.plan.explanation.config, "schedule")
        return self

    def check_arguments(self, sizes: Sizes) -> None:
        super().check_arguments(sizes)
        q, kv_cache, v_dim, D, tokens = self.q, self.kv_cache, self.v_dim, sizes["D"], sizes.get("S", 1)
        if self.balanced or self.schedule is not None:
            why = "balanced=True" if self.balanced else "a plan"
            given = {name: self.arguments.get(name) for name in LENGTHS_ALONE[:3]}
            fixed = " and ".join(name for name, value in given.items() if value is not None and value is not False)
            require(not fixed, f"{fixed} with {why}", "left out: units follow from the lengths alone")
            refuse_places(self.arguments, why)
            refused = self.balanced is False
            require(not refused, f"balanced=False with {why}", "left out: such a call is over a schedule")
        if self.indices is None:
            require(1 <= tokens <= MAX_TOKENS, f"q has {tokens} new tokens a sequence", f"1 to {MAX_TOKENS}")
        else:
            self.check_indices()
        require(1 <= sizes["H"] <= MAX_HEADS, f"q has {sizes['H']} heads", f"1 to {MAX_HEADS}")
        fp8 = dtype_of(kv_cache, "kv_cache").itemsize == 1
        if not (is_fp8(q) and fp8):
            check_dtype("q", q)
        whole = isinstance(v_dim, int) and v_dim % 16 == 0 and 32 <= v_dim <= 512
        require(whole, f"v_dim is {v_dim!r}", "a multiple of 16 from 32 to 512")
        rope = D - v_dim
        require(rope % 16 == 0 and 16 <= rope <= 128, f"{D} columns of which {v_dim} are v_dim leave {rope} for rope",
                "a multiple of 16 from 16 to 128")
        check_latent_rows(kv_cache, v_dim, rope, self.kv_layout)
        if row_scales(kv_cache, v_dim, rope, self.kv_layout) is not None:
            width, none = kv_cache.shape[-1], self.arguments.get("k_scale") is None
            require(none, f"k_scale is given with rows of {width} bytes", "None: they have their scales")
        require(fp8 or kv_cache.dtype == q.dtype, f"kv_cache has dtype {kv_cache.dtype}", f"that of q, {q.dtype}")
        require(not fp8 or dtype_of(q, "q").itemsize <= 2, f"q has dtype {q.dtype} with a cache of {kv_cache.dtype}",
                "bfloat16, float16 or float8_e4m3fn")

    def result_shape(self) -> tuple[int, ...]:
        return *self.q.shape[:-1], self.v_dim

    def given_operands(self) -> dict[str, Any]:
        if self.indices is None:
            return super().given_operands()
        return {n: a for n, a in super().given_operands().items() if n not in ("block_table", "seq_lens")}

    def check_indices(self) -> None:
        """ValueError for lists of another shape than q's rows, and for features that ask where a key stands."""
        shape, rows = tuple(self.indices.shape), tuple(self.q.shape[:-2])
        require(shape[:-1] == rows and len(shape) > len(rows), f"indices has shape {shape}", f"{(*rows, 'topk')}")
        for name in ("mask", "window", "leftpad_k", "q_positions", "alibi_slopes"):
            asked = self.arguments.get(name)
            require(asked is None, f"{name} is {shown(asked)} beside indices", "None: slots have no positions")

    def default_scale(self) -> float:
        latent, rope = self.v_dim, self.q.shape[-1] - self.v_dim
        known = (latent, rope) == (512, 64)
        require(known, f"scale None with rows of {latent} + {rope} columns", "given; only 512 + 64 has a default")
        return 1 / math.sqrt(128 + 64)

    def is_causal(self, mask: Any, window: Any) -> bool:
        return mask is None or isinstance(window, int | np.integer)

    def arrange(self) -> None:
        q, self.into, rows = self.q, self.out, (self.block_table, self.seq_lens)
        if self.indices is not None:
            rows = _each_token("indices", self.indices, 1), None
        if q.ndim == 4 and self.indices is not None:
            q, self.into = (add_axis(_each_token(n, a, 2), 1) for n, a in (("q", q), ("out", self.into)))
        if q.ndim == 3:
            self.dropped, q, self.into = 1, add_axis(q, 1), add_axis(self.out, 1)
        windows = latent_windows(self.kv_cache, self.v_dim, q.shape[-1] - self.v_dim, self.kv_layout)
        self.inputs = MLAInputs(q, *windows, *rows, self.into)
        self.row_scales = row_scales(self.kv_cache, self.v_dim, q.shape[-1] - self.v_dim, self.kv_layout)
        self.arrays, latent = self.inputs[:5], windows[0][:, :, None]
        self.features = self.resolve(q, latent, latent, batch=q.shape[0], lengths=self.lengths)

    def resolved(self, q: Any, k: Any, v: Any, asked: dict[str, Any], *, batch: int, lengths: Any) -> Features:
        if self.indices is not None and self.q.ndim == 4:
            shape, tokens = (int(self.q.shape[0]), 1), int(self.q.shape[1])
            for name in ("q_scale", "k_scale"):  # of sequences, whose tokens are sequences to the siblings
                scale: Any = asked.get(name)
                if tokens > 1 and tuple(getattr(scale, "shape", ())) == shape:
                    repeat = scale.repeat_interleave if is_torch(scale) else scale.repeat
                    asked[name] = repeat(tokens, 0)
        return super().resolved(q, k, v, asked, batch=batch, lengths=lengths)

    def lengths(self) -> tuple[Any, Any]:
        """New tokens and keys of each sequence."""
        keys = keys_in_table(self.seq_lens, self.block_table, int(self.inputs.kv_cache.shape[1]))
        return np.full(len(keys), self.inputs.q.shape[1]), keys

    def choose(self, scale: float) -> tuple[Explanation, Any, str]:
        inputs, features = self.inputs, self.features
        problem = MLADecodeProblem.of(*inputs[:5], self.row_scales)
        lacks = hopper_lacks(inputs, problem, features, scale)
        ring = None if lacks else walk_ring(problem)
        if balanced := self.schedule is not None or self.shares(problem, ring is not None):
            if ring is None and not lacks:
                few = f"{problem.tokens} new tokens of {problem.heads} heads"
                lacks = f"balanced=True and {'rows of 656 bytes' if problem.scaled else few}"
            if self.schedule is not None:
                sizes = function_at(f"{LATENT}.config:walked")(problem)
                function_at(f"{HOME}.step:check_plan")(self.schedule, sizes, *features.mask.by_length)
                if ring is not None and self.schedule.config.BM != ring.BM:
                    lacks = "a plan of other tiles"
        chosen, reason, hopper = choose_with_hopper(inputs.q, self.backend, lacks, None, SUPPORTED)
        emulated = self.arch if chosen == "emulator" else None
        splits: dict[str, Any] = {"num_splits": self.num_splits, "batch_invariant": self.batch_invariant}
        if hopper:
            processors = target_of(inputs.q, None).processors
            if balanced:
                walk = function_at(f"{LATENT}.config:ring_walk")(ring, problem, processors=processors)
                walk = self.as_planned(walk)
                sibling = f"{LATENT}.{'emulator' if emulated else 'kernel'}"
                machine, grid = "sm_90" if emulated else None, walk.schedule.grid(problem.kv_heads)
                return Explanation("mla_decode", chosen, reason, walk, grid, machine), problem, sibling
            adjacent = element_strides(inputs.kv_cache)[1] == problem.latent + problem.rope
            tiles = choose_hopper(problem, processors=processors, adjacent=adjacent, **splits)
            machine, sibling = ("sm_90", "hopper_emulator") if emulated else (None, "hopper")
            return Explanation("mla_decode", chosen, reason, tiles, tiles.grid(), machine), problem, sibling
        if emulated:
            arrays = {"kv_cache": inputs.kv_cache, "the rope part of kv_cache": inputs.k_rope}
            columns = problem.latent, problem.rope
            check_emulated("mla_decode", emulated, inputs.q, arrays, {"kv_cache": columns}, listed=problem.listed)
            kind = dtype_of(inputs.kv_cache, "kv_cache")
            if choose(emulated, kind, "mla_decode", listed=problem.listed).cta.dense_rows:
                steps, row = element_strides(inputs.kv_cache), sum(columns)
                fits = steps[1] == row and steps[0] % row == 0
                require(fits, f"kv_cache has strides {steps} on {emulated}", f"rows of gather4, {row} elements apart")
        if problem.fp8:
            check_fp8_gpu(inputs.q)
        target = target_of(inputs.q, emulated)
        config = choose_config(
            problem, processors=target.processors, arch=target.arch, emulated=emulated is not None,
            heavy=features.heavy or problem.fp8, wgmma=holds_wgmma_rows(),
            **splits | ({"num_splits": 1} if balanced else {}),
        )
        if balanced:
            walk = self.as_planned(function_at(f"{LATENT}.config:walk_of")(config, processors=target.processors))
            grid = walk.schedule.grid(problem.kv_heads)
            sibling = {"triton": f"{LATENT}.kernel", "emulator": f"{LATENT}.emulator"}.get(chosen, chosen)
            return Explanation("mla_decode", chosen, reason, walk, grid, emulated), problem, sibling
        return Explanation("mla_decode", chosen, reason, config, config.grid(problem), emulated), problem, chosen

    def shares(self, problem: MLADecodeProblem, ring: bool) -> bool:
        """Tells whether the call makes a schedule; ``ring``: Hopper's kernel may walk it."""
        if self.balanced is not None or self.backend != "auto" or not on_gpu(self.q):
            return bool(self.balanced)
        given = [self.arguments.get(name) for name in LENGTHS_ALONE]
        alone = not any(given[:2]) and all(value is None for value in given[2:])
        full = MOST_FULL if problem.heads <= FEW_HEADS else MOST_FULL_OF_MANY_HEADS
        full = MOST_FULL_ON_HOPPER if ring and machine_lacks(self.q) is None else full
        return alone and lengths_must_differ(self.kv_cache, self.block_table, full)

    def as_planned(self, walk: Any) -> Any:
        """A walk with the units of the plan, if one is given."""
        if self.schedule is None:
            return walk
        return function_at(f"{LATENT}.config:walk_of_plan")(walk, self.schedule.walks)

    def scheduled(self, told: Explanation) -> tuple[Any, list[Any]]:
        return function_at(f"{LATENT}.config:walked")(self.plan.problem), [told.config.schedule]

    def listed(self) -> tuple[Any, Any]:
        return self.seq_lens, None

    def named(self) -> dict[str, Any]:
        return super().named() | ({} if self.row_scales is None else {"row_scales": self.row_scales})

    def results(self, *found: Any) -> Any:
        if self.indices is not None and self.q.ndim == 4:
            found = tuple(x.reshape(*self.q.shape[:2], *x.shape[2:]) for x in found)
        return super().results(*found)

    def check_values(self) -> None:
        if self.indices is not None:
            check_slots("indices", self.indices, *self.inputs.kv_cache.shape[:2])
        else:
            pages, page_size = self.inputs.kv_cache.shape[:2]
            check_lengths_and_pages(self.seq_lens, self.block_table, pages, page_size, self.arguments.get("leftpad_k"))
            super().check_values()


def _each_token(name: str, array: Any, behind: int) -> Any:
    """The rows of all tokens in one axis before the ``behind`` last ones, a view; None of None."""
    if array is None or array.ndim == behind + 1:
        return array
    (batch, tokens, *rest), steps = array.shape, element_strides(array, name)
    apart = 0 in array.shape or 1 in (batch, tokens) or steps[0] == tokens * steps[1]
    require(apart, f"{name} has strides {steps} beside indices", "such that token follows token across sequences")
    return array.reshape(batch * tokens, *rest)


def arrays_of_collection(q: Any, cache: Any, layer: int) -> dict[str, Any]:
    """The array form of a call over a collection."""
    rows = latent_pages(cache, layer)
    lens = lengths_with_new(cache.cache_lengths, q)
    return {"q": q, "kv_cache": rows, "block_table": cache.lookup_table, "seq_lens": lens}
