"""Checks of KV store's arguments; nothing is written before it is satisfied."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvlab.attention.call.checks import (
    DTYPES,
    check_array,
    check_arrays,
    check_integers,
    check_writeable,
    finite_number,
)
from kvlab.attention.features.rope import Rope, check_rope
from kvlab.attention.features.scales import BLOCK, check_blocks_of_rows, columns_of, is_four_bits
from kvlab.common.arrays import dtype_of, element_strides
from kvlab.common.checks import count, require
from kvlab.common.torch_here import is_torch
from kvlab.memory import bfloat16, float8_e4m3fn, float8_e5m2, float16, float32

from .config import BlockScales, ScalesAndMinima

LIMITS = {float8_e4m3fn: 448.0, float8_e5m2: 57344.0}
SCALES = (float32, bfloat16)
SMALLEST_SCALE = 2.0**-126  # 1 / scale is what is multiplied by: of a smaller one float32 does not hold it
NORMAL = "positive and finite, a normal number of float32"
COMPUTED = "a number, [1], [H], or [pages, page_size, H] and perhaps the scales of a head"
MOST_ROWS = 2**31 - 2**16
"""A program counts its rows, blocks of heads of tokens, in 32 bits."""


class Names(NamedTuple):
    """The caller's names of the arguments, for messages."""

    k: str = "k"
    v: str = "v"
    k_cache: str = "k_cache"
    v_cache: str = "v_cache"
    where: str = "slot_mapping"
    lens: str = "cache_lengths"
    table: str = "lookup_table"
    positions: str = "positions"
    cos: str = "rope.cos"
    sin: str = "rope.sin"
    k_scale: str = "k_scale"
    v_scale: str = "v_scale"
    k_block_scale: str = "k_block_scale"
    v_block_scale: str = "v_block_scale"
    k_min: str = "k_min"
    v_min: str = "v_min"


USUAL = Names()


@dataclass(frozen=True)
class StoreInputs:
    """The arguments, checked. k, v ``[B, S, H, D]`` (``[1, T, H, D]`` unless padded); v is k where ``no_v``.

    where: slots ``[T]``, row offsets ``[B + 1]`` or valid lengths ``[B]``, as ``form`` says; lens and table with the
    latter two. k_scale, v_scale: None, a float, an array ``[1]`` or ``[H]`` (given scales),
    ``[pages, page_size, H, n]`` (scales that are computed, one for each ``granularity`` dims), ``BlockScales`` or
    ``ScalesAndMinima``, the latter ``[pages, page_size, H, 1]`` both.
    """

    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    where: Any
    form: str
    pages: int
    lens: Any = None
    table: Any = None
    positions: Any = None
    cos: Any = None
    sin: Any = None
    k_scale: Any = None
    v_scale: Any = None
    granularity: tuple[int, int] = (0, 0)
    rope: str = "none"
    rope_first: int = 0
    interleaved: bool = False
    no_v: bool = False
    strict: bool = True
    names: Names = USUAL

    @property
    def k_block_scale(self) -> Any:
        """Computed scales of K's blocks of e2m1."""
        return self.k_scale.blocks if isinstance(self.k_scale, BlockScales) else None

    @property
    def v_block_scale(self) -> Any:
        """Computed scales of V's blocks of e2m1."""
        return self.v_scale.blocks if isinstance(self.v_scale, BlockScales) else None

    @property
    def k_min(self) -> Any:
        """Computed minima of K's tokens."""
        return self.k_scale.minima if isinstance(self.k_scale, ScalesAndMinima) else None

    @property
    def v_min(self) -> Any:
        """Computed minima of V's tokens."""
        return self.v_scale.minima if isinstance(self.v_scale, ScalesAndMinima) else None

    def arrays(self) -> dict[str, Any]:
        """The arguments that are arrays."""
        found = {name: getattr(self, name) for name in Names._fields}
        for name in ("k_scale", "v_scale"):
            if isinstance(found[name], BlockScales | ScalesAndMinima):
                found[name] = found[name][0]
        return {name: a for name, a in found.items() if a is not None and not isinstance(a, float)}


class StoreFacts(NamedTuple):
    """The fields of ``StoreInputs`` without arrays: calls share them that differ in addresses and values alone."""

    form: str
    pages: int
    granularity: tuple[int, int]
    rope: str
    rope_first: int
    interleaved: bool
    no_v: bool
    strict: bool
    names: Names

    @classmethod
    def of(cls, x: StoreInputs) -> StoreFacts:
        """Facts of a call that has passed the checks."""
        return cls(*(getattr(x, name) for name in cls._fields))

    def inputs(self, call: StoreArguments) -> StoreInputs:
        """The arguments of another such call, as ``store_inputs`` puts them."""
        k, v, k_cache, v_cache, v_scale = call.k, call.v, call.k_cache, call.v_cache, call.v_scale
        (k_blocks, v_blocks), (k_min, v_min) = (call.k_block_scale, call.v_block_scale), (call.k_min, call.v_min)
        if self.no_v:
            v, v_cache, v_scale, v_blocks, v_min = k, k_cache, None, None, None
        if self.form != "padded":
            k, v = k[None], v[None]
        cos, sin = (None, None) if call.rope is None else (call.rope.cos, call.rope.sin)
        return StoreInputs(
            k, v, k_cache, v_cache, call.where, lens=call.lens, table=call.table, positions=call.positions, cos=cos,
            sin=sin, k_scale=_of_codes(_scale("", call.k_scale, k.shape[2])[0], k_blocks, k_min),
            v_scale=_of_codes(_scale("", v_scale, k.shape[2])[0], v_blocks, v_min), **self._asdict(),
        )


class StoreArguments(Protocol):
    """The arguments of a store, fields as in :class:`StoreInputs`; ``rope_on``: the side that is turned, ``four_bits``:
    caches of uint8 are of 4 bits.
    """

    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    where: Any
    form: str
    rope: Rope | None
    rope_on: str
    k_scale: Any
    v_scale: Any
    k_block_scale: Any
    v_block_scale: Any
    k_min: Any
    v_min: Any
    four_bits: bool
    granularity: tuple[int | None, int | None]
    pages: int | None
    lens: Any
    table: Any
    positions: Any
    strict: bool
    names: Names


def store_inputs(call: StoreArguments) -> StoreInputs:
    """Check the arguments of a store, all but their values. ValueError that names argument, value and rule."""
    k, v, k_cache, v_cache, v_scale, rope = call.k, call.v, call.k_cache, call.v_cache, call.v_scale, call.rope
    names, form, on_k = call.names, call.form, call.rope_on == "k"
    (k_blocks, v_blocks), (k_min, v_min) = (call.k_block_scale, call.v_block_scale), (call.k_min, call.v_min)
    if v is None:
        v, v_cache, v_scale, v_blocks, v_min = k, k_cache, None, None, None
    require(rope is None or isinstance(rope, Rope), f"rope is a {type(rope).__name__}", "a kvlab.attention.Rope")
    for name, array in ((names.k_cache, k_cache), (names.v_cache, v_cache), (names.where, call.where)):
        check_array(name, array)
    if call.positions is not None:
        check_array(names.positions, call.positions)
    axes = "[B, S, H, D]" if form == "padded" else "[T, H, D]"
    for name, array in ((names.k, k), (names.v, v)):
        check_array(name, array)
        require(array.ndim == len(axes.split(",")), f"{name} has shape {tuple(array.shape)}", axes)
    for name, cache in ((names.k_cache, k_cache), (names.v_cache, v_cache)):
        require(cache.ndim == 4, f"{name} has shape {tuple(cache.shape)}", "[pages, page_size, H, D]")
    if form != "padded":
        k, v = k[None], v[None]
    (B, S, H), shape = k.shape[:3], tuple(k_cache.shape)
    alike = f"of as many tokens and heads as {names.k}, {tuple(k.shape)}"
    require(v.shape[:3] == k.shape[:3], f"{names.v} has shape {tuple(v.shape)}", alike)
    k_scale, k_given = _scale(names.k_scale, call.k_scale, H)
    v_scale, v_given = _scale(names.v_scale, v_scale, H)
    computed = (names.k_block_scale, k_blocks), (names.v_block_scale, v_blocks), (names.k_min, k_min)
    for name, array in (*computed, (names.v_min, v_min)):
        if array is not None:
            check_array(name, array)
    x = StoreInputs(
        k, v, k_cache, v_cache, call.where, form, shape[0] if call.pages is None else call.pages, call.lens, call.table,
        call.positions, k_scale=_of_codes(k_scale, k_blocks, k_min), v_scale=_of_codes(v_scale, v_blocks, v_min),
        no_v=call.v is None, strict=call.strict, names=names,
    )
    if rope is not None:
        first = rope.first_dim((k if on_k else v).shape[3])
        x = replace(
            x, cos=rope.cos, sin=rope.sin, rope=call.rope_on, rope_first=first, interleaved=rope.interleaved
        )
    check_arrays({getattr(names, name): array for name, array in x.arrays().items()})
    _check_side(names.k, names.k_cache, k, k_cache, call.four_bits, names.k_cache, shape)
    _check_side(names.v, names.v_cache, v, v_cache, call.four_bits, names.k_cache, shape)
    sides = (names.k_scale, "k_granularity", k_scale, k_given, k_cache, call.granularity[0], k_blocks, k_min), (
        names.v_scale, "v_granularity", v_scale, v_given, v_cache, call.granularity[1], v_blocks, v_min)
    n_k = _granularity(*sides[0])
    n_v = n_k if call.v is None else _granularity(*sides[1])
    x = replace(x, granularity=(n_k, n_v))
    _check_where(x, B, S)
    if rope is not None:
        _check_rope(x, rope, k if on_k else v)
    rows = B * S * H * max(-(-side.shape[3] // n) for side, n in ((k, n_k), (v, n_v)))
    require(rows < MOST_ROWS, f"{names.k} has {B * S} tokens: {rows} rows", f"fewer than {MOST_ROWS} rows in one call")
    return x


def _check_side(
    name: str, cache_name: str, source: Any, cache: Any, four_bits: bool, k_cache_name: str, k_shape: tuple[int, ...]
) -> None:
    shape, H, D = tuple(cache.shape), source.shape[2], source.shape[3]
    if four_bits and is_four_bits(cache):
        require(D % 2 == 0, f"{name} has heads of {D}, {cache_name} dtype uint8", "even: two dims share a byte")
        require(
            shape[2:] == (H, D // 2), f"{cache_name} of uint8 has shape {shape}",
            f"of the {H} heads of {D // 2} bytes, two dims each, that {name} has; bytes that hold fp8 are passed as "
            ".view(float8_e4m3fn)",
        )
    else:
        require(shape[2:] == (H, D), f"{cache_name} has shape {shape}", f"of the {H} heads of {D} that {name} has")
    alike = f"of as many pages as {k_cache_name}, {k_shape}"
    require(shape[:2] == k_shape[:2], f"{cache_name} has shape {shape}", alike)
    require(min(shape) > 0, f"{cache_name} has shape {shape}", "without an empty axis")
    kind, stored = dtype_of(source, name), dtype_of(cache, cache_name)
    require(
        kind in (*DTYPES, *LIMITS), f"{name} has dtype {kind}", "bfloat16, float16, float32 or an fp8 format"
    )
    require(
        stored in (*DTYPES, *LIMITS) or (four_bits and is_four_bits(cache)),
        f"{cache_name} has dtype {stored}",
        "bfloat16, float16, float32 or an fp8 format; bytes that hold fp8 are passed as .view(float8_e4m3fn)",
    )
    require(
        kind in DTYPES or kind == stored, f"{name} has dtype {kind}, {cache_name} {stored}", "equal for an fp8 source"
    )
    for label, array in ((name, source), (cache_name, cache)):
        if 0 in array.shape:
            continue
        strides = element_strides(array, label)
        require(strides[-1] == 1, f"{label} has strides {strides}", "contiguous in the last one")
        require(min(strides) >= 0, f"{label} has strides {strides}", "not negative")
    check_writeable(cache_name, cache)


def _scale(name: str, scale: Any, heads: int) -> tuple[Any, bool]:
    """The scale in one of its forms, and whether it is a given one."""
    if scale is None:
        return None, False
    if not isinstance(scale, np.ndarray) and not is_torch(scale):
        return finite_number(scale, name, f"{NORMAL}, or an array", lowest=SMALLEST_SCALE), True
    check_array(name, scale)
    if scale.ndim == 0:
        scale = scale.reshape(1)
    if scale.ndim == 1:
        require(scale.shape[0] in (1, heads), f"{name} has shape {tuple(scale.shape)}", f"[1] or [H = {heads}]")
        return scale, True
    require(scale.ndim in (3, 4), f"{name} has shape {tuple(scale.shape)}", COMPUTED)
    return (scale[..., None] if scale.ndim == 3 else scale), False


def _of_codes(scale: Any, blocks: Any, minima: Any) -> Any:
    """The scale of a side: of e2m1 the number, 1 if there is none, and the scales of blocks; or with minima."""
    if minima is not None:
        return ScalesAndMinima(scale, minima[..., None] if minima.ndim == 3 else minima)
    return scale if blocks is None else BlockScales(1.0 if scale is None else scale, blocks)


def _four_bit_granularity(name: str, scale: Any, given: bool, cache: Any, blocks: Any, minima: Any) -> int:
    """Dims that share a computed scale of a cache of 4 bits."""
    rows, D = tuple(cache.shape[:3]), columns_of(cache)
    found = "None" if scale is None else f"a number, {scale}" if isinstance(scale, float) else f"of {scale.dtype}"
    label, least = name.replace("scale", "block_scale"), name.replace("scale", "min")
    if blocks is None:
        kinds = (float32,) if minima is None else (float32, float16)
        fits = scale is not None and not given and tuple(scale.shape) == (*rows, 1) and dtype_of(scale, name) in kinds
        more = "" if scale is None or isinstance(scale, float) else f" and shape {tuple(scale.shape)}"
        beside = f"float32 {rows}, computed for each token and head of integers of 4 bits, or beside {label}"
        require(
            fits, f"{name} is {found}{more}",
            beside if minima is None else f"float32 or float16 {rows}, computed for each token and head, as {least}",
        )
        check_writeable(name, scale)
        if minima is not None:
            shape = tuple(minima.shape)
            require(shape in (rows, (*rows, 1)), f"{least} has shape {shape}", f"{rows}, computed as {name} is")
            alike = dtype_of(minima, least) == dtype_of(scale, name)
            require(alike, f"{least} has dtype {minima.dtype}", f"that of {name}, {scale.dtype}")
            check_writeable(least, minima)
        return D
    require(minima is None, f"{least} with {label}", "one of them: e2m1 has no minimum")
    one = scale is None or isinstance(scale, float) or (tuple(scale.shape) == (1,) and dtype_of(scale, name) == float32)
    require(one, f"{name} is {found}", f"a number, float32 [1] or None, beside {label}")
    require(D % BLOCK == 0, f"{label} with heads of {D}", f"of a multiple of {BLOCK} dims")
    require(dtype_of(blocks, label) == float8_e4m3fn, f"{label} has dtype {blocks.dtype}", "float8_e4m3fn")
    check_blocks_of_rows(label, blocks, tuple(map(int, rows)), D // BLOCK, f"one of each {BLOCK} dims")
    check_writeable(label, blocks)
    return BLOCK


def _granularity(
    name: str, label: str, scale: Any, given: bool, cache: Any, granularity: int | None, blocks: Any, minima: Any
) -> int:
    """Dims that share a scale: the whole head unless scales are computed."""
    D, bits = int(cache.shape[3]), dtype_of(cache, "cache")
    if bits == np.uint8:
        require(granularity is None, f"{label} {granularity}", "left out: the format says it")
        return _four_bit_granularity(name, scale, given, cache, blocks, minima)
    for other, array in (("block_scale", blocks), ("min", minima)):
        of_codes = f"{name.replace('scale', other)} with a cache of {cache.dtype}"
        require(array is None, of_codes, f"left out: of uint8, two {'e2m1' if other != 'min' else 'codes'} a byte")
    computed = scale is not None and not given
    require(computed or granularity is None, f"{label} {granularity}", f"left out, unless {name} is computed")
    granularity = None if granularity is None else count(label, granularity, least=1)
    if scale is None:
        return D
    require(dtype_of(cache, "cache") in LIMITS, f"{name} with a cache of {cache.dtype}", "left out: it is not fp8")
    if isinstance(scale, float):
        return D
    kind = dtype_of(scale, name)
    require(kind in SCALES, f"{name} has dtype {kind}", "float32 or bfloat16")
    if given:
        return D
    shape = tuple(scale.shape)
    require(
        len(shape) == 4 and shape[:3] == tuple(cache.shape[:3]),
        f"{name} has shape {shape}",
        f"a number, [1], [H], or {tuple(cache.shape[:3])} and the scales of a head",
    )
    G = -(-D // shape[3]) if granularity is None else min(granularity, D)
    require(-(-D // max(G, 1)) == shape[3], f"{name} has shape {shape}", f"{-(-D // max(G, 1))} scales of {G} dims")
    check_writeable(name, scale)
    return G


def _check_where(x: StoreInputs, B: int, S: int) -> None:
    batch = None if x.lens is None else int(x.lens.shape[0])
    length = {"slots": S, "ragged": (batch or 0) + 1, "padded": B}[x.form]
    expected: list[tuple[str, Any, tuple[Any, ...]]] = [(x.names.where, x.where, (length,))]
    if x.lens is not None:
        sequences = B if x.form == "padded" else batch
        expected += [(x.names.lens, x.lens, (sequences,)), (x.names.table, x.table, (sequences, x.table.shape[-1]))]
    if x.positions is not None:
        expected.append((x.names.positions, x.positions, (B * S,)))
    for name, array, shape in expected:
        require(tuple(array.shape) == shape, f"{name} has shape {tuple(array.shape)}", f"{list(shape)}")
        check_integers(name, array)
        strides = element_strides(array, name)
        contiguous = array.ndim == 1 or array.shape[-1] < 2 or strides[-1] == 1
        require(contiguous, f"{name} has strides {strides}", "contiguous in the last dimension")


def _check_rope(x: StoreInputs, rope: Rope, source: Any) -> None:
    """ValueError for a rope that does not fit the roped side, ``source``, its blocks or its form."""
    check_rope(rope, x.names.k if x.rope == "k" else x.names.v, source, x.names.cos, x.names.sin)
    require(x.form != "slots" or x.positions is not None, "rope with slot_mapping", "given with positions= [T]")
    G = x.granularity[0 if x.rope == "k" else 1]
    require(
        not rope.interleaved or G % 2 == 0, f"interleaved rope and scales of {G} dims", "scales of an even number"
    )
