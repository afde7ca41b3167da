"""Features as kernels take them: pointers that a launch gives anew, and numbers that all launches of a kind share."""

from __future__ import annotations

from typing import Any, NamedTuple

from .alibi import slopes_stride
from .bias import bias_numbers
from .positions import positions_stride
from .qv import qv_strides
from .resolve import Features
from .scales import block_bytes, block_strides, minima_strides, scale_strides, sequence_stride


class FeatureArrays(NamedTuple):
    """Arrays of a call's features; None where it has none."""

    valid: Any = None
    leftpad: Any = None
    positions: Any = None
    bias: Any = None
    sinks: Any = None
    slopes: Any = None
    temperature: Any = None
    qv: Any = None
    q_heads: Any = None
    k_heads: Any = None
    k_tokens: Any = None
    v_heads: Any = None
    v_tokens: Any = None
    nope_heads: Any = None
    nope_tokens: Any = None
    rope_heads: Any = None
    rope_tokens: Any = None
    k_blocks: Any = None
    v_blocks: Any = None
    k_minima: Any = None
    v_minima: Any = None


class FeatureNumbers(NamedTuple):
    """Bounds of the mask's interval, the softcap, scales of the parts of K, sizes of the bias, and strides of the
    arrays; None or 0 where there are none. Not nested: Triton 3.6 loses constants of tuples within tuples.
    """

    positions_batch: int | None
    left: int
    right: int
    chunk: int | None
    softcap: float | None
    nope: float | None
    rope: float | None
    bias_batch: int
    bias_head: int
    bias_row: int
    bias_key: int
    bias_rows: int
    bias_keys: int
    slopes_batch: int
    q_scale_batch: int | None
    k_scale_batch: int | None
    v_scale_batch: int | None
    nope_scale_batch: int | None
    rope_scale_batch: int | None
    q_scale_head: int
    k_scale_page: int
    k_scale_token: int
    k_scale_head: int
    v_scale_page: int
    v_scale_token: int
    v_scale_head: int
    nope_scale_page: int
    nope_scale_token: int
    nope_scale_head: int
    rope_scale_page: int
    rope_scale_token: int
    rope_scale_head: int
    qv_batch: int | None
    qv_token: int
    qv_head: int
    k_block_page: int | None
    k_block_token: int | None
    k_block_head: int | None
    v_block_page: int | None
    v_block_token: int | None
    v_block_head: int | None
    k_min_page: int | None
    k_min_token: int | None
    k_min_head: int | None
    v_min_page: int | None
    v_min_token: int | None
    v_min_head: int | None


def feature_arrays(features: Features) -> FeatureArrays:
    """The arrays of ``features``."""
    mask, scales = features.mask, features.scales
    return FeatureArrays(
        mask.valid, mask.leftpad, mask.positions, mask.bias, features.sinks, features.slopes, features.temperature,
        features.qv, scales.q.heads, scales.k.heads, scales.k.tokens, scales.v.heads, scales.v.tokens,
        scales.nope.heads, scales.nope.tokens, scales.rope.heads, scales.rope.tokens,
        block_bytes(scales.k), block_bytes(scales.v), scales.k.minima, scales.v.minima,
    )


def feature_numbers(features: Features, *, ragged: bool = False) -> FeatureNumbers:
    """The numbers of ``features``. ragged : K and V are rows one after the other; scales of tokens likewise."""
    mask, scales = features.mask, features.scales
    parts = scales.nope, scales.rope
    numbers: tuple[Any, ...] = (
        positions_stride(mask.positions), mask.left, mask.right, mask.chunk or None, features.softcap or None,
        *(one.number if one.scaled else None for one in parts), *bias_numbers(mask.bias),
        slopes_stride(features.slopes), *(sequence_stride(one) for one in (scales.q, scales.k, scales.v, *parts)),
        scale_strides(scales.q).head,
        *(step for one in (scales.k, scales.v, *parts) for step in scale_strides(one, ragged=ragged)),
        *qv_strides(features.qv),
        *block_strides(scales)[1], *minima_strides(scales),
    )
    return FeatureNumbers(*numbers)
