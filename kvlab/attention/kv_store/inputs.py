"""What KV store asks of its arguments; nothing is written before it is satisfied."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kvlab.attention.inputs import (
    DTYPES,
    FLOAT32_MAX,
    check_array,
    check_arrays,
    check_dtype,
    check_integers,
    check_writeable,
    given,
    require,
)
from kvlab.attention.rope import Rope
from kvlab.cache.arrays import dtype_of, element_strides
from kvlab.cache.checks import count
from kvlab.memory import bfloat16, float8_e4m3fn, float8_e5m2, float32

__all__ = ["LIMITS", "NORMAL", "SMALLEST_SCALE", "StoreFacts", "StoreInputs", "store_inputs"]

LIMITS = {float8_e4m3fn: 448.0, float8_e5m2: 57344.0}
SCALES = (float32, bfloat16)
SMALLEST_SCALE = 2.0**-126  # 1 / scale is what is multiplied by: of a smaller one float32 does not hold it
NORMAL = "positive and finite, a normal number of float32"
WHERE = {"slots": "slot_mapping", "ragged": "row_offsets", "padded": "valid_lengths"}
"""The argument that says where the tokens of each form go."""
MOST_ROWS = 2**31 - 2**16
"""A program counts its rows, blocks of heads of tokens, in 32 bits."""
ARRAYS = ("k", "v", "k_cache", "v_cache", "where", "lens", "table", "positions", "cos", "sin", "k_scale", "v_scale")


@dataclass(frozen=True)
class StoreInputs:
    """The arguments, checked. k, v ``[B, S, H, D]`` (``[1, T, H, D]`` unless padded); v is k where ``no_v``.

    where: slots ``[T]``, row offsets ``[B + 1]`` or valid lengths ``[B]``, as ``form`` says; lens and table with the
    latter two. k_scale, v_scale: None, a float, an array ``[1]`` or ``[H]`` (given scales), or
    ``[pages, page_size, H, n]`` (scales that are computed, one for each ``granularity`` dims).
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

    def arrays(self) -> dict[str, Any]:
        """The arguments that are arrays."""
        found = {name: getattr(self, name) for name in ARRAYS}
        return {name: a for name, a in found.items() if a is not None and not isinstance(a, float)}


class StoreFacts(NamedTuple):
    """What the arguments of all calls of a kind have in common; see ``StoreInputs``."""

    form: str
    pages: int
    granularity: tuple[int, int]
    rope: str
    rope_first: int
    interleaved: bool
    no_v: bool
    strict: bool

    @classmethod
    def of(cls, x: StoreInputs) -> StoreFacts:
        return cls(*(getattr(x, name) for name in cls._fields))

    def inputs(
        self, k: Any, v: Any, k_cache: Any, v_cache: Any, where: Any, lens: Any, table: Any, positions: Any, *,
        cos: Any, sin: Any, k_scale: Any, v_scale: Any,
    ) -> StoreInputs:  # fmt: skip
        """The arguments of another call of the kind, as ``store_inputs`` puts them."""
        if self.no_v:
            v, v_cache, v_scale = k, k_cache, None
        if self.form != "padded":
            k, v = k[None], v[None]
        k_scale, v_scale = (_scale(n, x, k.shape[2])[0] for n, x in (("k_scale", k_scale), ("v_scale", v_scale)))
        return StoreInputs(
            k, v, k_cache, v_cache, where, lens=lens, table=table, positions=positions, cos=cos, sin=sin,
            k_scale=k_scale, v_scale=v_scale, **self._asdict(),
        )  # fmt: skip


def store_inputs(
    k: Any, v: Any, k_cache: Any, v_cache: Any, where: Any, *, form: str, rope: Rope | None, rope_on: str,
    k_scale: Any, v_scale: Any, granularity: tuple[int | None, int | None],
    pages: int | None = None, lens: Any = None, table: Any = None, positions: Any = None, strict: bool = True,
) -> StoreInputs:  # fmt: skip
    """Check the arguments of a store, all but their values. ValueError that names argument, value and rule."""
    no_v = v is None
    if no_v:
        v, v_cache, v_scale = k, k_cache, None
    require(rope is None or isinstance(rope, Rope), f"rope is a {type(rope).__name__}", "a kvlab.attention.Rope")
    arrays = {"k_cache": k_cache, "v_cache": v_cache, WHERE[form]: where}
    for name, array in (arrays | given(positions=positions)).items():
        check_array(name, array)
    for name, array in (("k", k), ("v", v)):
        axes = "[B, S, H, D]" if form == "padded" else "[T, H, D]"
        check_array(name, array)
        require(array.ndim == len(axes.split(",")), f"{name} has shape {tuple(array.shape)}", axes)
    if form != "padded":
        k, v = k[None], v[None]
    (B, S, H), shape = k.shape[:3], tuple(k_cache.shape)
    require(v.shape[:3] == k.shape[:3], f"v has shape {tuple(v.shape)}", f"of as many tokens and heads as k, {k.shape}")
    k_scale, k_given = _scale("k_scale", k_scale, H)
    v_scale, v_given = _scale("v_scale", v_scale, H)
    x = StoreInputs(
        k, v, k_cache, v_cache, where, form, shape[0] if pages is None else pages, lens, table, positions,
        k_scale=k_scale, v_scale=v_scale, no_v=no_v, strict=strict,
    )  # fmt: skip
    if rope is not None:
        side = k if rope_on == "k" else v
        first = rope.first_dim(side.shape[3])
        x = replace(
            x, cos=rope.cos, sin=rope.sin, rope=rope_on, rope_first=first, interleaved=rope.interleaved
        )  # fmt: skip
    check_arrays(x.arrays())
    for name, source, cache in (("k", k, k_cache), ("v", v, v_cache)):
        _check_side(name, source, cache, shape)
    n_k = _granularity("k_scale", k_scale, k_given, k_cache, granularity[0])
    n_v = _granularity("v_scale", v_scale, v_given, v_cache, granularity[1])
    x = replace(x, granularity=(n_k, n_v))
    _check_where(x, B, S)
    if rope is not None:
        _check_rope(x, rope, k if rope_on == "k" else v)
    rows = B * S * H * max(-(-side.shape[3] // n) for side, n in ((k, n_k), (v, n_v)))
    require(rows < MOST_ROWS, f"k has {B * S} tokens: {rows} rows", f"fewer than {MOST_ROWS} rows in one call")
    return x


def _check_side(name: str, source: Any, cache: Any, k_shape: tuple[int, ...]) -> None:
    shape, H, D = tuple(cache.shape), source.shape[2], source.shape[3]
    require(len(shape) == 4, f"{name}_cache has shape {shape}", "[pages, page_size, H, D]")
    require(shape[2:] == (H, D), f"{name}_cache has shape {shape}", f"of the {H} heads of {D} that {name} has")
    require(shape[:2] == k_shape[:2], f"{name}_cache has shape {shape}", f"of as many pages as k_cache, {k_shape}")
    require(min(shape) > 0, f"{name}_cache has shape {shape}", "without an empty axis")
    kind, stored = dtype_of(source, name), dtype_of(cache, f"{name}_cache")
    require(
        kind in (*DTYPES, *LIMITS), f"{name} has dtype {kind}", "bfloat16, float16, float32 or an fp8 format"
    )  # fmt: skip
    require(
        stored in (*DTYPES, *LIMITS),
        f"{name}_cache has dtype {stored}",
        "bfloat16, float16, float32 or an fp8 format; bytes that hold fp8 are passed as .view(float8_e4m3fn)",
    )
    require(
        kind in DTYPES or kind == stored, f"{name} has dtype {kind}, {name}_cache {stored}", "equal for an fp8 source"
    )
    for label, array in ((name, source), (f"{name}_cache", cache)):
        if 0 in array.shape:
            continue
        strides = element_strides(array, label)
        require(strides[-1] == 1, f"{label} has strides {strides}", "contiguous in the last one")
        require(min(strides) >= 0, f"{label} has strides {strides}", "not negative")
    check_writeable(f"{name}_cache", cache)


def _scale(name: str, scale: Any, heads: int) -> tuple[Any, bool]:
    """The scale in one of its forms, and whether it is a given one."""
    if scale is None:
        return None, False
    if isinstance(scale, int | float | np.floating) and not isinstance(scale, bool):
        require(SMALLEST_SCALE <= float(scale) <= FLOAT32_MAX, f"{name} {scale}", NORMAL)
        return float(scale), True
    check_array(name, scale)
    if scale.ndim == 0:
        scale = scale.reshape(1)
    if scale.ndim == 1:
        require(scale.shape[0] in (1, heads), f"{name} has shape {tuple(scale.shape)}", f"[1] or [H = {heads}]")
        return scale, True
    return (scale[..., None] if scale.ndim == 3 else scale), False


def _granularity(name: str, scale: Any, given: bool, cache: Any, granularity: int | None) -> int:
    """Dims that share a scale: the whole head unless scales are computed."""
    D = int(cache.shape[3])
    computed = scale is not None and not given
    label = f"{name[0]}_granularity"
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
    expected: list[tuple[str, Any, tuple[Any, ...]]] = [(WHERE[x.form], x.where, (length,))]
    if x.lens is not None:
        sequences = B if x.form == "padded" else batch
        expected += [("cache_lengths", x.lens, (sequences,)), ("lookup_table", x.table, (sequences, x.table.shape[-1]))]
    if x.positions is not None:
        expected.append(("positions", x.positions, (B * S,)))
    for name, array, shape in expected:
        require(tuple(array.shape) == shape, f"{name} has shape {tuple(array.shape)}", f"{list(shape)}")
        check_integers(name, array)
        strides = element_strides(array, name)
        contiguous = array.ndim == 1 or array.shape[-1] < 2 or strides[-1] == 1
        require(contiguous, f"{name} has strides {strides}", "contiguous in the last dimension")


def _check_rope(x: StoreInputs, rope: Rope, source: Any) -> None:
    D, first = source.shape[3], x.rope_first
    for name, array in (("cos", x.cos), ("sin", x.sin)):
        check_array(name, array)
        require(
            array.ndim == 2 and tuple(array.shape) == tuple(x.cos.shape) and min(array.shape) > 0,
            f"{name} has shape {tuple(array.shape)}",
            "[positions, R / 2], cos and sin alike",
        )
        check_dtype(name, array)
    require(
        0 <= first and first + rope.dim <= D, f"rope of {rope.dim} dims from {first} on", f"inside the head of {D}"
    )  # fmt: skip
    require(
        not rope.interleaved or first % 2 == 0, f"interleaved rope from dim {first} on", "from an even one: pairs"
    )  # fmt: skip
    require(x.form != "slots" or x.positions is not None, "rope with slot_mapping", "given with positions= [T]")
    G = x.granularity[0 if x.rope == "k" else 1]
    require(
        not rope.interleaved or G % 2 == 0, f"interleaved rope and scales of {G} dims", "scales of an even number"
    )  # fmt: skip
    kind = dtype_of(source, x.rope)
    require(kind in DTYPES, f"{x.rope} has dtype {kind}", "bfloat16, float16 or float32 to be rotated")
