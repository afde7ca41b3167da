"""KV store as mathematics: float64, a page of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.features.rope import rotate_exactly
from kvlab.attention.features.scales import SIDE_BY_SIDE
from kvlab.common.arrays import numbered
from kvlab.formats.codec import joined
from kvlab.formats.stored import STORED
from kvlab.memory import float8_e4m3fn

from .config import NO_ANGLES, SMALLEST, BlockScales, CosSin, ScalesAndMinima, StoreConfig, StoreSide, StoreTables

Array = np.ndarray[Any, Any]
LARGEST = float(np.finfo(np.float32).max)


def reference(
    k: Array, v: Array, k_cache: Array, v_cache: Array, tables: StoreTables, *, config: StoreConfig, pages: int,
    cos_sin: CosSin = NO_ANGLES, k_scale: Array | float | BlockScales | None = None,
    v_scale: Array | float | BlockScales | None = None,
) -> None:
    """Store k, v ``[B, S, H, D]`` into the caches: rotate in float64, divide by the scale, round once."""
    token, page, slot, position = _places(k.shape[:2], tables, config)
    known = (page >= 0) & (page < pages)
    token, page, slot, position = (x[known] for x in (token, page, slot, position))
    sides = (k, k_cache, k_scale, config.k, "k"), (v, v_cache, v_scale, config.v, "v")
    for x, cache, scale, side, name in sides:
        if side.D == 0:  # K alone
            continue
        rows = x.reshape(-1, *x.shape[2:])[token].astype(np.float64)  # [n, H, D]
        if config.rope == name:
            some = (position >= 0) & (position < len(cos_sin.cos))  # without an angle a row stays as it is
            c, s = (angle[position[some]].astype(np.float64) for angle in cos_sin)
            rows[some] = rotate_exactly(rows[some], c, s, config.rope_first, config.interleaved)
        if side.pack == 2:
            by, scale = scale if isinstance(scale, BlockScales) else (1.0, scale)
            if isinstance(scale, ScalesAndMinima):
                scale, least = scale
                cache[page, slot], scale[page, slot], least[page, slot] = _over_minima(rows, side, least.dtype)
                continue
            assert isinstance(scale, np.ndarray)
            cache[page, slot], scales = _in_four_bits(rows / np.asarray(by, np.float64), side)
            if side.fours:
                scale[page, slot // SIDE_BY_SIDE, :, :, slot % SIDE_BY_SIDE] = scales
            else:
                scale[page, slot] = scales
            continue
        if side.quant == "block":
            assert isinstance(scale, np.ndarray)
            rows, scales = _quantised(rows, side, scale.dtype)
            scale[page, slot] = scales
        elif side.quant != "none":
            rows = rows / np.broadcast_to(np.asarray(scale, np.float64), config.heads)[:, None]
        if cache.dtype.itemsize == 1 and side.limit:
            rows = np.clip(rows, -side.limit, side.limit)
        cache[page, slot] = rows.astype(cache.dtype)


def _places(
    shape: tuple[int, ...], tables: StoreTables, config: StoreConfig
) -> tuple[Array, Array, Array, Array]:
    """Token, page, slot and position of all tokens that go anywhere."""
    where, lens, table, positions = tables
    where = where.astype(np.int64)
    if config.form == "slots":
        token = np.nonzero(where >= 0)[0]
        at, page = where[token], where[token] // config.page_size
    else:
        first = where[:-1] if config.form == "ragged" else np.arange(shape[0]) * shape[1]
        count = np.diff(where) if config.form == "ragged" else np.clip(where, 0, shape[1])
        sequence, new = numbered(count)
        token, at = first[sequence] + new, lens.astype(np.int64)[sequence] + new
        inside = (at >= 0) & (at // config.page_size < table.shape[1])  # the others have no page
        sequence, token, at = sequence[inside], token[inside], at[inside]
        page = table.astype(np.int64)[sequence, at // config.page_size]
    position = at if positions is None else positions[token].astype(np.int64)
    return token, page, at % config.page_size, position


def _in_four_bits(x: Array, side: StoreSide) -> tuple[Array, Array]:
    """Bytes of ``[n, H, D]``, and the scales ``[n, H, blocks]``: NaN where a value is one, else of those that are
    finite in float32. Infinities become the largest.
    """
    x = x.reshape(*x.shape[:-1], side.blocks, side.G)
    top = np.where(np.abs(x) <= LARGEST, np.abs(x), 0).max(axis=-1)
    small = side.quant == "e2m1"
    scales = np.clip(top / side.limit, 0, 448).astype(float8_e4m3fn) if small else (top / side.limit).astype("f4")
    step = scales.astype(np.float64)[..., None]
    limited = np.clip(np.nan_to_num(x, posinf=np.inf, neginf=-np.inf), -top[..., None], top[..., None])
    codes = STORED["e2m1" if small else "s4"].codes(limited / np.where(step != 0, step, np.inf))
    scales[np.isnan(x).any(axis=-1)] = np.nan
    return joined(codes.reshape(-1)).reshape(*x.shape[:-2], side.D // 2), scales


def _over_minima(x: Array, side: StoreSide, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """Bytes of ``[n, H, D]``, and the scales and minima ``[n, H, 1]``: NaN where a value is one, else of those that are
    finite in float32. Infinities become the largest or the least.
    """
    some = np.abs(x) <= LARGEST
    low, high = (np.where(some, x, end).min(axis=-1, keepdims=True) * sign for x, end, sign in (
        (x, LARGEST, 1), (-x, LARGEST, -1)))
    low, high = np.where(low <= high, low, 0), np.where(low <= high, high, 0)
    with np.errstate(over="ignore"):
        least = low.astype(dtype)
    over = np.clip(np.nan_to_num(x, posinf=np.inf, neginf=-np.inf), low, high) - least.astype(np.float64)
    step = (np.abs(over).max(axis=-1, keepdims=True) / side.limit).astype(np.float32)
    codes = STORED["u4"].codes(over / np.where(step != 0, step, np.inf))
    scale = step.astype(dtype)
    lost = np.isnan(x).any(axis=-1)
    scale[lost], least[lost] = np.nan, np.nan
    return joined(codes.reshape(-1)).reshape(*x.shape[:-1], side.D // 2), scale, least


def _quantised(x: Array, side: StoreSide, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """``[n, H, D]`` divided by a scale for each G dims, and the scales ``[n, H, blocks]``, those of the values that are
    finite in float32.
    """
    padded = np.zeros((*x.shape[:-1], side.blocks * side.G))
    padded[..., : side.D] = np.where(np.abs(x) <= LARGEST, np.abs(x), 0)
    top = padded.reshape(*x.shape[:-1], side.blocks, side.G).max(axis=-1)
    scales = (np.maximum(top, SMALLEST) / side.limit).astype(dtype)
    return x / np.repeat(scales.astype(np.float64), side.G, axis=-1)[..., : side.D], scales
