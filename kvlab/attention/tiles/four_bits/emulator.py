"""Scales of blocks of 4-bit columns, in NumPy: the twins of ``kernel``'s helpers."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.features.rope import split
from kvlab.attention.features.scales import SIDE_BY_SIDE
from kvlab.attention.tiles.masked import load

Array = np.ndarray[Any, Any]


def key_blocks(features: Any, page: Array, slot: Array, kv_head: Array, exists: Array) -> Array:
    """Scales ``[P, BN, D / 16]`` of K's blocks in ``slot`` of ``page``, 0 for keys that do not exist; ``[1]`` where
    there are none. ``features``: Features.
    """
    return block_scales(features.scales.k.blocks, page, slot, kv_head, exists)


def value_blocks(features: Any, page: Array, slot: Array, kv_head: Array, exists: Array) -> Array:
    """The same of V."""
    return block_scales(features.scales.v.blocks, page, slot, kv_head, exists)


def block_scales(scale_array: Array | None, page: Array, slot: Array, kv_head: Array, exists: Array) -> Array:
    """Rows of ``scale_array`` ``[pages, page_size, Hkv, D / 16]`` or, in the 4x4 order, ``[.., page_size / 4, Hkv,
    D / 16, 4]``.

    >>> scales = np.arange(8.0).reshape(1, 2, 1, 4)
    >>> block_scales(scales, np.array([[0, 0]]), np.array([[1, 0]]), np.array([0]), np.array([[True, False]])).tolist()
    [[[4.0, 5.0, 6.0, 7.0], [0.0, 0.0, 0.0, 0.0]]]
    """
    scale = np.ones(1, np.float32)
    if scale_array is not None:
        four, nth = np.divmod(slot[..., None], SIDE_BY_SIDE if scale_array.ndim == 5 else 1)  #- address
        index = page[..., None], four, kv_head[:, None, None], np.arange(scale_array.shape[3]), nth  #- address
        scale = load(scale_array, index[: scale_array.ndim], mask=exists[..., None], other=0.0)
    return scale


def code_of_float(x: Array, MANTISSA: int, BIAS: int) -> Array:
    """Code of the float nearest to ``x``, which is not negative, with so many bits of mantissa and this bias of its
    exponent; ties to the even code. The format has no end: who calls has a least for it.

    >>> code_of_float(np.float32([0.24, 0.26, 1.25, 1.75, 5.0]), 1, 1).tolist()  # e2m1
    [0, 1, 2, 4, 6]
    """
    bits = x.view(np.int32)
    odd = (bits >> (23 - MANTISSA)) & 1
    normal = ((bits + ((1 << (22 - MANTISSA)) - 1) + odd) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    unit = (bits * 0 + ((151 - BIAS - MANTISSA) << 23)).view(np.float32)
    below = (x + unit).view(np.int32) - ((151 - BIAS - MANTISSA) << 23)
    return np.where(bits < ((128 - BIAS) << 23), below, normal)


def number_of_e4m3(code: Array) -> Array:
    """Float32 of the codes of e4m3 that are not negative.

    >>> number_of_e4m3(np.int32([0, 1, 8, 56, 126])).tolist()
    [0.0, 0.001953125, 0.015625, 1.0, 448.0]
    """
    return (code << 20).view(np.float32) * np.float32(1.329227995784916e36)


def code_of_int4(x: Array, limit: float) -> Array:
    """Nearest integer to ``x``, half away from zero, from -limit to limit, in four bits; of NaN 0.

    >>> code_of_int4(np.float32([-9, -2.5, 2.4, np.nan]), 7.0).tolist()
    [9, 13, 2, 0]
    """
    whole = np.minimum(np.floor(np.abs(np.where(x == x, x, 0.0)) + 0.5), limit).astype(np.int32)
    return np.where(x < 0, -whole, whole) & 15


def code_of_uint4(x: Array, limit: float) -> Array:
    """Nearest integer to ``x``, half away from zero, from 0 to limit; of NaN 0.

    >>> code_of_uint4(np.float32([-9, 2.5, 16, np.nan]), 15.0).tolist()
    [0, 3, 15, 0]
    """
    return np.where(x > 0, np.minimum(np.floor(x + 0.5), limit), 0.0).astype(np.int32)


def halves_joined(code: Array) -> Array:
    """Bytes of the codes of neighbouring columns, the first in the low half.

    >>> halves_joined(np.array([[1, 2, 15, 8]])).tolist()
    [[33, 143]]
    """
    low, high = split(code)
    return (low | (high << 4)).astype(np.uint8)
