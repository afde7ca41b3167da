"""The three forms of an MLA row, as a store sees them: latent and rope part are two windows of one cache."""

from __future__ import annotations

from typing import Any

from kvlab.attention.call.latent_rows import scaled_width, uint8, viewed
from kvlab.attention.features.resolve import kv_view
from kvlab.common.arrays import dtype_of
from kvlab.common.checks import require
from kvlab.memory import bfloat16, float8_e4m3fn, float32

from .inputs import LIMITS


def mla_windows(
    latent: Any, k_rope: Any, cache: Any, scale: Any, kv_layout: str = "NHD"
) -> tuple[Any, Any, Any, Any, Any]:
    """``(latent [T, 1, L], rope [T, 1, R], window of the latents, window of the rope part, scale or its window)``.

    See :func:`kvlab.attention.kv_store.mla_store_paged` for the forms.
    """
    for name, array in (("latent", latent), ("k_rope", k_rope)):
        axes = getattr(array, "ndim", 0)
        require(axes == 2, f"{name} has {axes} axes", "[T, dims]")
    with_head = cache if cache.ndim != 3 else cache[:, None] if kv_layout == "HND" else cache[:, :, None]
    rows, scale = kv_view(with_head, kv_layout), kv_view(scale, kv_layout)
    shape = tuple(rows.shape)
    require(len(shape) == 4 and shape[2] == 1, f"cache has shape {shape}", "[pages, page_size, (1,) width]")
    L, R, width = latent.shape[1], k_rope.shape[1], shape[3]
    latent, k_rope = latent[:, None], k_rope[:, None]
    kind = dtype_of(cache, "cache")
    if width == L + R:
        return latent, k_rope, rows[..., :L], rows[..., L:], scale
    scaled = scaled_width(L, R)
    forms = {L + 2 * R: 0, **({} if scaled is None else {scaled: scaled - L - 2 * R})}
    require(
        kind in (*LIMITS, uint8) and width in forms,
        f"cache has dtype {kind} and rows of {width} for {L} latents and {R} rope values",
        f"rows of {L + R}, or of an fp8 format or uint8 and {' or '.join(map(str, forms))} bytes",
    )
    require(not forms[width] or scale is None, "scale of a row with scales", "left out: they are computed")
    behind = viewed(rows[..., L + forms[width] :], bfloat16, "cache")
    if forms[width]:
        scale = viewed(rows[..., L : L + forms[width]], float32, "cache")
    content = viewed(rows[..., :L], float8_e4m3fn, "cache") if kind == uint8 else rows[..., :L]
    return latent, k_rope, content, behind, scale
