"""The forms of an MLA cache row, as attention reads it: the latent and the rope part are two windows of one cache."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kvlab.attention.call.checks import DTYPES
from kvlab.common.arrays import address_of, dtype_of, element_strides, with_addressing_strides
from kvlab.common.checks import require
from kvlab.common.torch_here import is_torch
from kvlab.memory import bfloat16, float8_e4m3fn, float32

BLOCK = 128
"""Latents that share a scale in a row with scales."""
uint8 = np.dtype(np.uint8)


def latent_windows(cache: Any, latent: int, rope: int, kv_layout: str = "NHD") -> tuple[Any, Any]:
    """``([pages, page_size, latent], [pages, page_size, rope])``, views of ``cache``, which ``check_latent_rows`` lets
    pass.

    cache : ``[pages, page_size, width]``, or with an axis of one head behind the tokens ("NHD") or before them ("HND").
        Rows of ``width = latent + rope`` elements of one dtype; of ``latent + 2 rope`` bytes, float8_e4m3fn and behind
        it a rope part of bfloat16 (640 for 512 + 64); or of such bytes with the scales of ``row_scales`` between them
        (656). Bytes are of float8_e4m3fn or uint8.

    >>> import numpy as np
    >>> from kvlab.memory import float8_e4m3fn
    >>> content, rope = latent_windows(np.zeros((3, 16, 640), float8_e4m3fn), 512, 64)
    >>> content.shape, rope.shape, rope.dtype
    ((3, 16, 512), (3, 16, 64), dtype(bfloat16))
    """
    if cache.ndim == 4:
        cache = cache[:, :, 0] if kv_layout == "NHD" else cache[:, 0]
    content, window = cache[..., :latent], cache[..., cache.shape[2] - 2 * rope :]
    if cache.shape[2] == latent + rope:
        return content, cache[..., latent:]
    return viewed(content, float8_e4m3fn, "kv_cache"), viewed(window, bfloat16, "kv_cache")


def row_scales(cache: Any, latent: int, rope: int, kv_layout: str = "NHD") -> Any:
    """The float32 scales that rows of ``latent + 4 latent / 128 + 2 rope`` bytes have behind their latents, one for
    each 128 of them, ``[pages, page_size, latent / 128]``, a view; None for rows of another form.

    >>> row_scales(np.zeros((3, 16, 656), np.uint8), 512, 64).shape, row_scales(np.zeros((3, 16, 576)), 512, 64)
    ((3, 16, 4), None)
    """
    if cache.shape[-1] != scaled_width(latent, rope):
        return None
    if cache.ndim == 4:
        cache = cache[:, :, 0] if kv_layout == "NHD" else cache[:, 0]
    return viewed(cache[..., latent : latent + latent // BLOCK * 4], float32, "kv_cache")


def scaled_width(latent: int, rope: int) -> int | None:
    """Bytes of a row with scales; None where the latents are not whole blocks.

    >>> scaled_width(512, 64), scaled_width(96, 16)
    (656, None)
    """
    return None if latent % BLOCK else latent + latent // BLOCK * 4 + 2 * rope


def check_latent_rows(cache: Any, latent: int, rope: int, kv_layout: str) -> None:
    """ValueError for a cache of other forms than those that ``latent_windows`` tells of.

    >>> check_latent_rows(np.zeros((3, 16, 640), np.float16), 512, 64, "NHD")
    Traceback (most recent call last):
        ...
    ValueError: kv_cache has rows of 640 float16: must be 576, or 640 or 656 bytes of float8_e4m3fn or uint8
    """
    shape = tuple(cache.shape)
    require(kv_layout in ("NHD", "HND"), f"kv_layout is {kv_layout!r}", "'NHD' or 'HND'")
    require(cache.ndim in (3, 4), f"kv_cache has shape {shape}", "[pages, page_size, D] or [pages, page_size, 1, D]")
    tokens = 1
    if cache.ndim == 4:
        head, tokens = (2, 1) if kv_layout == "NHD" else (1, 2)
        require(shape[head] == 1, f"kv_cache has {shape[head]} heads", "1: all heads share the latent rows")
    require(min(shape[0], shape[tokens]) > 0, f"kv_cache has shape {shape}", "at least one page and one token a page")
    width, kind = int(shape[-1]), dtype_of(cache, "kv_cache")
    known = kind in (*DTYPES, float8_e4m3fn, uint8)
    require(known, f"kv_cache has dtype {cache.dtype}", "bfloat16, float16, float32, float8_e4m3fn or uint8")
    scaled = scaled_width(latent, rope)
    forms = [latent + 2 * rope, *([scaled] if scaled else [])]
    require(
        (width == latent + rope and kind != uint8) or (kind.itemsize == 1 and width in forms),
        f"kv_cache has rows of {width} {kind}",
        f"{latent + rope}, or {' or '.join(map(str, forms))} bytes of float8_e4m3fn or uint8",
    )


def viewed(window: Any, dtype: np.dtype[Any], name: str) -> Any:
    """Bytes of the rows of ``name`` as another dtype, the same memory. ValueError where they do not lie as it must."""
    n, strides, window = dtype.itemsize, element_strides(window, name), with_addressing_strides(window)
    first = address_of(window)
    require(
        first % n == 0 and not any(step % n for step in strides[:-1]),
        f"{name} has rows {strides[:-1]} bytes apart, {dtype.name} {first % n} past a multiple of {n}",
        f"multiples of {n}",
    )
    if is_torch(window):
        return window.view(getattr(sys.modules["torch"], dtype.name))
    return window.view(dtype)
