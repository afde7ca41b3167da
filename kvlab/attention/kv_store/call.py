"""A store: its arguments in one form, which its siblings take, and its choice of tiles."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from kvlab.attention.call.backends import choose_backend, function_at, on_gpu
from kvlab.attention.call.call import Call
from kvlab.attention.call.checks import check_array, check_arrays, check_traffic
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.layers import layer_arrays, scales_of_pages
from kvlab.attention.features.resolve import kv_view
from kvlab.attention.features.rope import Rope
from kvlab.attention.features.scales import is_four_bits
from kvlab.attention.machines.gpu import machine
from kvlab.cache import ContinuousBatchingKVCacheCollection, PagedKVCacheCollection
from kvlab.common.arrays import dtype_of, element_strides
from kvlab.common.checks import require
from kvlab.common.torch_here import is_torch
from kvlab.hardware import get_arch

from .config import (
    FOUR_BITS,
    BlockScales,
    CosSin,
    ScalesAndMinima,
    StoreProblem,
    StoreTables,
    choose_config,
    widest_vector,
)
from .inputs import LIMITS, USUAL, Names, StoreFacts, StoreInputs, store_inputs
from .mla_rows import mla_windows
from .values import check_values

WHERE = {"slots": "slot_mapping", "ragged": "cu_seqlens", "padded": "valid_lengths"}
"""The argument that says where the tokens of each form go."""
PAGED = tuple(f"{x}_{what}" for x in "kv" for what in ("cache", "scale", "block_scale", "min"))
"""Arguments that lie as ``kv_layout`` says."""


class Store(Call[None]):
    """A store of any form; see ``StoreInputs``."""

    operation = "kv_store"
    returns = "None"
    writes = (
        "k_cache", "v_cache", "cache", "k_scale", "v_scale", "k_block_scale", "v_block_scale", "k_min", "v_min",
        "scale", "blocks", "scales",
    )
    title: str = "kv_store"
    names: Names = USUAL
    form: str = "slots"
    rope: Rope | None = None
    rope_on: str = "k"
    k_scale: Any = None
    v_scale: Any = None
    k_block_scale: Any = None
    v_block_scale: Any = None
    k_min: Any = None
    v_min: Any = None
    four_bits: bool = False
    granularity: tuple[int | None, int | None] = (None, None)
    pages: int | None = None
    lens: Any = None
    table: Any = None
    positions: Any = None
    strict: bool = True
    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    where: Any
    inputs: StoreInputs

    def decisive(self) -> tuple[Any, ...]:
        rope = self.rope
        turn = (rope.cos, rope.sin, rope.interleaved, rope.first) if type(rope) is Rope else rope
        return tuple(turn if x is rope else tuple(x) if type(x) is Names else x for x in self.arguments.values())

    def arrange(self) -> None:
        plan = vars(self).get("plan")
        self.inputs = x = store_inputs(self) if plan is None else plan.problem.inputs(self)
        self.arrays = x.k, x.v, x.k_cache, x.v_cache, StoreTables(x.where, x.lens, x.table, x.positions)

    def checked_scale(self) -> float:
        check_traffic(self.traffic)
        return 1.0

    def check_values(self) -> None:
        check_values(self.inputs)

    def choose(self, scale: float) -> tuple[Explanation, Any, str]:
        x = self.inputs
        chosen, reason = choose_backend(x.k, self.backend)
        if chosen == "emulator":
            get_arch(self.arch)
        sides = [(x.k, x.k_cache, x.k_scale), (x.v, x.v_cache, x.v_scale)]
        widths = [int(x.k.shape[3]), 0 if x.no_v else int(x.v.shape[3])]
        blocks = [x.granularity[0], 1 if x.no_v else x.granularity[1]]
        problem = StoreProblem(
            int(x.k.shape[0] * x.k.shape[1]), int(x.k.shape[2]), (widths[0], widths[1]), (blocks[0], blocks[1]),
            (dtype_of(x.k, "k").itemsize, dtype_of(x.v, "v").itemsize),
        )
        rope = {} if x.cos is None else {
            "rope": x.rope, "rope_dim": 2 * int(x.cos.shape[1]), "rope_first": x.rope_first,
            "interleaved": x.interleaved,
        }
        quant = [_quant(scale, cache) for _, cache, scale in sides]
        pack = [1 + (kind in FOUR_BITS) for kind in quant]
        config = choose_config(
            problem, form=x.form, page_size=int(x.k_cache.shape[1]), quant=quant,
            codes=[(n, *_four_bits(scale)) for n, (_, _, scale) in zip(pack, sides, strict=True)],
            limit=[
                FOUR_BITS.get(kind) or LIMITS.get(dtype_of(cache, "cache"), 0.0)
                for (_, cache, _), kind in zip(sides, quant, strict=True)
            ],
            vec_in=[_vector(a, D, G) for (a, _, _), D, G in zip(sides, widths, blocks, strict=True)],
            vec_out=[
                _vector(a, D // n, G // n) for (_, a, _), D, G, n in zip(sides, widths, blocks, pack, strict=True)
            ],
            batch=0 if x.lens is None else int(x.lens.shape[0]),
            processors=machine(x.k.device)[1] if on_gpu(x.k) else 132, **rope,
        )
        emulated = self.arch if chosen == "emulator" else None
        return Explanation(self.title, chosen, reason, config, config.grid(), emulated), StoreFacts.of(x), chosen

    def named(self) -> dict[str, Any]:
        x = self.inputs
        config, turn = self.plan.explanation.config, CosSin(x.cos, x.sin)
        return {"config": config, "pages": x.pages, "cos_sin": turn, "k_scale": x.k_scale, "v_scale": x.v_scale}

    def refer(self, *arrays: Any, **named: Any) -> tuple[Any, ...]:
        return function_at(self.plan.sibling)(*arrays, **named) or ()

    def results(self, *found: Any) -> None:
        return None


def store_of_rows(
    latent: Any, k_rope: Any, cache: Any, slot_mapping: Any, *, scale: Any, kv_layout: str, **more: Any
) -> Store:
    """The store of MLA rows, latent and rope part as K and V."""
    check_arrays({"latent": latent, "k_rope": k_rope, "cache": cache})
    k, v, k_cache, v_cache, k_scale = mla_windows(latent, k_rope, cache, scale, kv_layout)
    names = Names(k="latent", v="k_rope", k_cache="cache", v_cache="cache", k_scale="scale")
    return Store(
        title="mla_store", k=k, v=v, k_cache=k_cache, v_cache=v_cache, where=slot_mapping, k_scale=k_scale, rope_on="v",
        names=names, **more,
    )


def store_of_pages(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, *, kv_layout: str, **more: Any
) -> Store:
    """The store into pages of any layout."""
    more |= {"k_cache": k_cache, "v_cache": v_cache}
    paged = {name: kv_view(x, kv_layout) for name, x in more.items() if name in PAGED}
    return Store(k=k, v=v, where=slot_mapping, four_bits=True, **more | paged)


def store_of_collection(
    k: Any, v: Any, cache: Any, layer: int, *, cu_seqlens: Any, valid_lengths: Any, slot_mapping: Any, k_scale: Any,
    v_scale: Any, rope: Any = None, positions: Any = None, **more: Any,
) -> Store:
    """The store into a layer of a collection."""
    if isinstance(cache, ContinuousBatchingKVCacheCollection):
        require(slot_mapping is None, "slot_mapping with a continuous cache", "cu_seqlens or valid_lengths")
        cache = cache.paged()
    known = isinstance(cache, PagedKVCacheCollection)
    require(known, f"cache is a {type(cache).__name__}", "a paged or continuous collection")
    given = [x is not None for x in (cu_seqlens, valid_lengths, slot_mapping)]
    require(sum(given) <= 1, "cu_seqlens, valid_lengths and slot_mapping", "one of them at most")
    for name, array in (("k", k), *([] if v is None else [("v", v)])):
        check_array(name, array)
    pages, axes, on = layer_arrays(cache, layer), k.ndim, "k"
    form = "padded" if axes == 4 else "slots" if slot_mapping is not None else "ragged"
    require(axes in (3, 4), f"k has shape {tuple(k.shape)}", "[T, H, D] or [B, S, H, D]")
    if v is not None:
        require(v.ndim == axes, f"v has shape {tuple(v.shape)}", f"one with {axes} axes, as k has")
    if form != "padded" and not any(given):  # one token of each sequence
        k, v, form = k[:, None], None if v is None else v[:, None], "padded"
    require(form != "padded" or not (given[0] or given[2]), "k as [B, S, H, D]", "given with valid_lengths alone")
    if form == "padded" and valid_lengths is None:
        full = importlib.import_module("torch").full if is_torch(k) else np.full
        valid_lengths = full((k.shape[0],), k.shape[1], **({"device": k.device} if is_torch(k) else {}))
    (k_cache, v_cache, k_scales, v_scales), n = pages, cache.quantization_granularity
    if not cache.kv_params.is_mla:
        require(v is not None, "v is None", "given, unless the cache is one of MLA")
    elif v is not None:
        k, v, k_cache, v_cache, k_scales = _mla_parts(k, v, k_cache, k_scales)
        on = "v"
    if isinstance(rope, Rope) and cache.kv_params.is_mla and v is None and rope.first is None:
        rope = Rope(rope.cos, rope.sin, rope.interleaved, k.shape[-1] - rope.dim)
    four, blocks = is_four_bits(cache.blocks) and not cache.kv_params.is_mla, {}
    if four:
        require(k_scales is not None, "cache of uint8 has no scales", "one with scales: 4 bits are computed with them")
        made = scales_of_pages(pages)
        k_scales, v_scales = made.get("k_scale"), made.get("v_scale")
        blocks = {name: x for name, x in made.items() if "block" in name}
    for name, scale, own in (("k_scale", k_scale, k_scales), ("v_scale", v_scale, v_scales)):
        require(scale is None or own is None, f"{name} of a quantised cache", "left out: it is computed")
    if getattr(positions, "ndim", 0) == 2:
        positions = positions.reshape(-1)
    where = {"padded": valid_lengths, "ragged": cu_seqlens, "slots": slot_mapping}[form]
    if form != "slots":
        more |= {"lens": cache.cache_lengths, "table": cache.lookup_table}
    return Store(
        k=k, v=v, k_cache=k_cache, v_cache=v_cache, where=where, k_scale=k_scale if k_scales is None else k_scales,
        v_scale=v_scale if v_scales is None else v_scales, form=form, rope=rope, rope_on=on,
        granularity=tuple(None if four or own is None else n for own in (k_scales, v_scales)),
        pages=cache.total_num_pages, four_bits=four, **blocks,
        positions=positions, strict=cache.strict, names=Names(k_cache="cache", v_cache="cache", where=WHERE[form]),
        **more,
    )


def _mla_parts(k: Any, v: Any, cache: Any, scales: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Latent and rope part of a collection's rows; with scales of its own only where the rope part is bfloat16."""
    require(scales is None, "latent and rope part with a quantised collection", "given as one row, v=None")
    T = k.shape[:-2]
    latent, k_rope = (x.reshape(-1, x.shape[-1]) for x in (k, v))
    latent, k_rope, k_window, v_window, scale = mla_windows(latent, k_rope, cache, None)
    latent, k_rope = (x.reshape(*T, 1, x.shape[-1]) for x in (latent, k_rope))
    return latent, k_rope, k_window, v_window, scale


def _quant(scale: Any, cache: Any) -> str:
    if scale is None or isinstance(scale, float):
        return "none" if scale is None else "number"
    if isinstance(scale, BlockScales | ScalesAndMinima):
        return "e2m1" if isinstance(scale, BlockScales) else "uint4"
    return "tensor" if scale.ndim == 1 else "int4" if is_four_bits(cache) else "block"


def _four_bits(scale: Any) -> tuple[bool, bool]:
    """(fours, loads) of ``StoreSide``."""
    blocks = isinstance(scale, BlockScales)
    return blocks and scale.blocks.ndim == 5, blocks and not isinstance(scale.number, float)


def _vector(array: Any, D: int, G: int) -> int:
    """Elements of the widest vector of which every row of ``[.., .., H, D]`` is made."""
    if 0 in array.shape or not D:
        return 1
    pairs = zip(array.shape[:3], element_strides(array)[:3], strict=True)
    return widest_vector(dtype_of(array, "array").itemsize, D, G, *(stride for n, stride in pairs if n > 1))
