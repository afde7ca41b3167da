"""What KV store asks of its arguments; nothing is written before it is satisfied."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvlab.attention.rope import Rope
from kvlab.cache.arrays import dtype_of, element_strides, is_torch, same_place, to_numpy, to_torch
from kvlab.memory import bfloat16, float8_e4m3fn, float8_e5m2, float16, float32

__all__ = ["LIMITS", "StoreInputs", "check_values", "require", "store_inputs"]

SOURCES = (bfloat16, float16, float32)
LIMITS = {float8_e4m3fn: 448.0, float8_e5m2: 57344.0}
SCALES = (float32, bfloat16)
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

    @property
    def is_torch(self) -> bool:
        return is_torch(self.k)

    @property
    def on_gpu(self) -> bool:
        return self.is_torch and self.k.device.type == "cuda"

    def arrays(self) -> dict[str, Any]:
        """The arguments that are arrays."""
        found = {name: getattr(self, name) for name in ARRAYS}
        return {name: a for name, a in found.items() if a is not None and not isinstance(a, float)}

    def numpy(self) -> StoreInputs:
        """The same over NumPy views of CPU memory."""
        views: dict[str, Any] = {name: to_numpy(array, name) for name, array in self.arrays().items()}
        return replace(self, **views)

    def torch(self) -> StoreInputs:
        """The same over torch tensors."""
        views: dict[str, Any] = {name: to_torch(array, name) for name, array in self.arrays().items()}
        return replace(self, **views)


def require(fulfilled: Any, what: str, accepted: str) -> None:
    """ValueError unless fulfilled: ``what`` was given, ``accepted`` is."""
    if not fulfilled:
        raise ValueError(f"{what}: must be {accepted}")


def store_inputs(
    k: Any, v: Any, k_cache: Any, v_cache: Any, where: Any, *, form: str, rope: Rope | None, rope_on: str,
    k_scale: Any, v_scale: Any, granularity: tuple[int | None, int | None], check: bool | None,
    pages: int | None = None, lens: Any = None, table: Any = None, positions: Any = None, strict: bool = True,
) -> StoreInputs:  # fmt: skip
    """Check the arguments of a store. ValueError that names argument, value and rule.

    check : look at the values of slots, lengths and tables too. None: where that needs no synchronisation with a GPU.
    """
    no_v = v is None
    if no_v:
        v, v_cache, v_scale = k, k_cache, None
    for name, array in (("k", k), ("v", v)):
        axes = "[B, S, H, D]" if form == "padded" else "[T, H, D]"
        _is_array(name, array)
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
    for name, array in x.arrays().items():
        _is_array(name, array)
    same_place(**x.arrays())
    for name, source, cache in (("k", k, k_cache), ("v", v, v_cache)):
        _check_side(name, source, cache, shape)
    n_k = _granularity("k_scale", k_scale, k_given, k_cache, granularity[0])
    n_v = _granularity("v_scale", v_scale, v_given, v_cache, granularity[1])
    x = replace(x, granularity=(n_k, n_v))
    _check_where(x, B, S)
    if rope is not None:
        _check_rope(x, rope, k if rope_on == "k" else v)
    require(B * S * H * max(k.shape[3], v.shape[3], 1) < 2**40, f"k has shape {tuple(k.shape)}", "of fewer tokens")
    if check or (check is None and not x.on_gpu):
        check_values(x)
    return x


def check_values(x: StoreInputs) -> None:
    """ValueError unless every token that is stored has a slot of its own, and a known angle."""
    arrays = {name: a.cpu() if is_torch(a) else a for name, a in x.arrays().items() if name in _VALUES}
    where, lens, table, positions = (
        to_numpy(arrays[name], name).astype(np.int64) if name in arrays else None for name in _VALUES
    )
    assert where is not None
    B, S, page_size = x.k.shape[0], x.k.shape[1], x.k_cache.shape[1]
    if x.form == "slots":
        bad = where >= x.pages * page_size
        if bad.any():
            t = int(bad.argmax())
            raise ValueError(
                f"slot_mapping[{t}] is {where[t]}: must be below {x.pages * page_size}, the slots of {x.pages} pages "
                f"of {page_size}, or negative to skip the token"
            )
        token, slot = np.nonzero(where >= 0)[0], where[where >= 0]
        position = slot
    else:
        assert lens is not None
        assert table is not None
        token, slot, position = _through_table(x, where, lens, table, B, S, page_size)
    order = np.argsort(slot, kind="stable")
    twice = np.nonzero(np.diff(slot[order]) == 0)[0]
    if twice.size:
        one, two = token[order[twice[0]]], token[order[twice[0] + 1]]
        raise ValueError(f"tokens {one} and {two} have the same slot {slot[order[twice[0]]]}: each needs its own")
    if x.cos is not None:
        at = position if positions is None else positions.reshape(-1)[token]
        bad = (at < 0) | (at >= x.cos.shape[0])
        if bad.any():
            raise ValueError(f"position {at[bad][0]}: must be 0 to {x.cos.shape[0] - 1}, the rows of cos and sin")


_VALUES = ("where", "lens", "table", "positions")


def _through_table(
    x: StoreInputs, where: Any, lens: Any, table: Any, B: int, S: int, page_size: int
) -> tuple[Any, Any, Any]:
    """Token, slot and position of all tokens whose page exists. ValueError for the others, unless not strict."""
    if x.form == "ragged":
        if where[0] < 0 or (np.diff(where) < 0).any() or where[-1] > S:
            raise ValueError(
                f"row_offsets {where.tolist()}: must rise from 0 to at most {S}, the tokens of k, and never fall"
            )
        first, count = where[:-1], np.diff(where)
    else:
        bad = (where < 0) | (where > S)
        if bad.any():
            raise ValueError(f"valid_lengths[{int(bad.argmax())}] is {where[bad][0]}: must be 0 to {S}")
        first, count = np.arange(B) * S, where
    sequence = np.repeat(np.arange(len(lens)), count)
    new = np.arange(sequence.size) - np.repeat(np.cumsum(count) - count, count)
    position = lens[sequence] + new
    outside = (position < 0) | (position >= table.shape[1] * page_size)
    if outside.any():
        b = sequence[outside][0]
        raise ValueError(
            f"token {position[outside][0]} of sequence {b}: its lookup table holds {table.shape[1] * page_size} "
            f"tokens, {table.shape[1]} pages of {page_size}"
        )
    page = table[sequence, position // page_size]
    known = (page >= 0) & (page < x.pages)
    if x.strict and not known.all():
        b, t = sequence[~known][0], position[~known][0]
        raise ValueError(
            f"lookup_table[{b}, {t // page_size}] is {page[~known][0]}, which is none of the pages [0, {x.pages}): "
            f"token {t} of sequence {b} has no page"
        )
    slot = page * page_size + position % page_size
    return (first[sequence] + new)[known], slot[known], position[known]


def _is_array(name: str, array: Any) -> None:
    ok = isinstance(array, np.ndarray) or is_torch(array)
    require(ok, f"{name} is a {type(array).__name__}", "a NumPy array or torch tensor")
    require(not getattr(array, "requires_grad", False), f"{name} requires grad", "detached; kvlab is for inference")


def _check_side(name: str, source: Any, cache: Any, k_shape: tuple[int, ...]) -> None:
    shape, H, D = tuple(cache.shape), source.shape[2], source.shape[3]
    require(len(shape) == 4, f"{name}_cache has shape {shape}", "[pages, page_size, H, D]")
    require(shape[2:] == (H, D), f"{name}_cache has shape {shape}", f"of the {H} heads of {D} that {name} has")
    require(shape[:2] == k_shape[:2], f"{name}_cache has shape {shape}", f"of as many pages as k_cache, {k_shape}")
    require(min(shape) > 0, f"{name}_cache has shape {shape}", "without an empty axis")
    kind, stored = dtype_of(source, name), dtype_of(cache, f"{name}_cache")
    require(
        kind in (*SOURCES, *LIMITS), f"{name} has dtype {kind}", "bfloat16, float16, float32 or an fp8 format"
    )  # fmt: skip
    require(
        stored in (*SOURCES, *LIMITS),
        f"{name}_cache has dtype {stored}",
        "bfloat16, float16, float32 or an fp8 format; bytes that hold fp8 are passed as .view(float8_e4m3fn)",
    )
    require(
        kind in SOURCES or kind == stored, f"{name} has dtype {kind}, {name}_cache {stored}", "equal for an fp8 source"
    )
    for label, array in ((name, source), (f"{name}_cache", cache)):
        if 0 in array.shape:
            continue
        strides = element_strides(array, label)
        require(array.shape[-1] < 2 or strides[-1] == 1, f"{label} has strides {strides}", "contiguous in the last one")
        require(min(strides) >= 0, f"{label} has strides {strides}", "not negative")
    _is_writable(f"{name}_cache", cache)


def _is_writable(name: str, array: Any) -> None:
    strides = element_strides(array, name)
    overlap = any(n > 1 and s == 0 for n, s in zip(array.shape, strides, strict=True))
    require(not overlap, f"{name} has strides {strides}", "without elements that share memory")
    require(is_torch(array) or array.flags.writeable, f"{name} is read-only", "writeable")


def _scale(name: str, scale: Any, heads: int) -> tuple[Any, bool]:
    """The scale in one of its forms, and whether it is a given one."""
    if scale is None:
        return None, False
    if isinstance(scale, int | float | np.floating) and not isinstance(scale, bool):
        require(0 < float(scale) < float("inf"), f"{name} {scale}", "positive and finite")
        return float(scale), True
    _is_array(name, scale)
    if scale.ndim == 0:
        scale = scale.reshape(1)
    if scale.ndim == 1:
        require(scale.shape[0] in (1, heads), f"{name} has shape {tuple(scale.shape)}", f"[1] or [H = {heads}]")
        return scale, True
    return (scale[..., None] if scale.ndim == 3 else scale), False


def _granularity(name: str, scale: Any, given: bool, cache: Any, granularity: int | None) -> int:
    """Dims that share a scale: the whole head unless scales are computed."""
    D = int(cache.shape[3])
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
    _is_writable(name, scale)
    return G


def _check_where(x: StoreInputs, B: int, S: int) -> None:
    names = {"slots": "slot_mapping", "ragged": "row_offsets", "padded": "valid_lengths"}
    batch = None if x.lens is None else int(x.lens.shape[0])
    length = {"slots": S, "ragged": (batch or 0) + 1, "padded": B}[x.form]
    expected: list[tuple[str, Any, tuple[Any, ...]]] = [(names[x.form], x.where, (length,))]
    if x.lens is not None:
        sequences = B if x.form == "padded" else batch
        expected += [("cache_lengths", x.lens, (sequences,)), ("lookup_table", x.table, (sequences, x.table.shape[-1]))]
    if x.positions is not None:
        expected.append(("positions", x.positions, (B * S,)))
    for name, array, shape in expected:
        require(tuple(array.shape) == shape, f"{name} has shape {tuple(array.shape)}", f"{list(shape)}")
        kind = dtype_of(array, name)
        require(kind.kind in "iu" and kind.itemsize >= 4, f"{name} has dtype {kind}", "a 32- or 64-bit integer")
        strides = element_strides(array, name)
        contiguous = array.ndim == 1 or array.shape[-1] < 2 or strides[-1] == 1
        require(contiguous, f"{name} has strides {strides}", "contiguous in the last dimension")


def _check_rope(x: StoreInputs, rope: Rope, source: Any) -> None:
    D, first = source.shape[3], x.rope_first
    for name, array in (("cos", x.cos), ("sin", x.sin)):
        require(
            array.ndim == 2 and tuple(array.shape) == tuple(x.cos.shape) and min(array.shape) > 0,
            f"{name} has shape {tuple(array.shape)}",
            "[positions, R / 2], cos and sin alike",
        )
        require(dtype_of(array, name) in SOURCES, f"{name} has dtype {array.dtype}", "bfloat16, float16 or float32")
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
    require(kind in SOURCES, f"{x.rope} has dtype {kind}", "bfloat16, float16 or float32 to be rotated")
