"""What attention kernels do to scores, in Triton. See the package for the list."""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.attention.tiles.online_softmax import LOG2E as _LOG2E
from kvlab.attention.tiles.online_softmax import LOWEST as _LOWEST
from kvlab.attention.tiles.online_softmax import MASK_VALUE as _MASK_VALUE

LOG2E = tl.constexpr(_LOG2E)
LOWEST = tl.constexpr(_LOWEST)
MASK_VALUE = tl.constexpr(_MASK_VALUE)
QUARTER_LN2_SQUARED = tl.constexpr(0.25 / _LOG2E**2)


@triton.jit
def key_range(position, end, left, right, chunk, CHUNKED: tl.constexpr):
    """(first, limit): the rows at ``position`` see ``first <= key < limit``; ``end`` keys may be seen at most."""
    first = tl.maximum(position - left, 0)
    limit = tl.minimum(position + right + 1, end)
    if CHUNKED:
        start = tl.maximum(position, 0) // chunk * chunk
        first = tl.maximum(first, start)
        limit = tl.minimum(limit, tl.where(position < 0, 0, start + chunk))
    return first, limit


@triton.jit
def key_count(length, most):
    """Keys of a sequence of this length, any integer: none below 0, and none beyond ``most``."""
    return tl.maximum(tl.minimum(length.to(tl.int64), most), 0).to(tl.int32)


@triton.jit
def visible_end(num_keys, valid_ptr, batch, PRESENT: tl.constexpr):
    """Keys of a sequence that may be seen: all, or the first of them that ``valid`` counts, any integer."""
    end = num_keys
    if PRESENT:
        end = tl.maximum(tl.minimum(tl.load(valid_ptr + batch).to(tl.int64), num_keys), 0).to(tl.int32)
    return end


@triton.jit
def sink_alone(sink):
    """(maximum, sum) of rows that see a sink of this logit, in units of log2, and no key yet; -inf is no sink."""
    none = sink == -float("inf")
    return tl.where(none, LOWEST, sink), tl.where(none, 0.0, 1.0)


@triton.jit
def cap(s, softcap):
    """``softcap * tanh(s / softcap)``; it saturates, it does not overflow. Small scores go by the series of tanh, as 1
    less something near 1 has no digits of them left."""
    x = s * (2.0 / softcap)
    y = x * x * QUARTER_LN2_SQUARED
    inner = -1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0))
    series = s * (1.0 + y * inner)
    small = tl.abs(x) < 0.5  # known before the exponentials: fewer registers
    bounded = softcap * LOG2E * (1.0 - 2.0 / (tl.math.exp2(x) + 1.0))
    return tl.where(small, series, bounded)


@triton.jit
def distance(s, slope, position, key):
    """ALiBi: the rows' ``slope`` (natural units) times the distance of ``position`` and ``key``, subtracted."""
    away = tl.abs(position[:, None] - key[None, :]).to(tl.float32)
    return s - (slope * LOG2E)[:, None] * away


@triton.jit
def add_bias(s, visible, bias_ptr, bias_at, row, key, rows, keys, row_stride, key_stride):
    """(s, visible) with the bias at ``bias_ptr + bias_at`` ``[BM]``, an array of ``rows x keys``; outside it masks."""
    at = bias_at[:, None] + row.to(tl.int64)[:, None] * row_stride + key.to(tl.int64)[None, :] * key_stride  #- address
    inside = visible & (row < rows)[:, None] & (key < keys)[None, :]
    bias = tl.load(bias_ptr + at, mask=inside, other=-float("inf")).to(tl.float32)
    visible = visible & ~(bias <= MASK_VALUE)  # NaN masks nothing
    return s + tl.where(visible, bias, 0.0) * LOG2E, visible


@triton.jit
def head_scale(scale_ptr, kv_head, scale_head, PRESENT: tl.constexpr):
    """The scale of a KV head; 1 where there is none."""
    scale = 1.0
    if PRESENT:
        scale = tl.load(scale_ptr + kv_head * scale_head)
    return scale


@triton.jit
def in_pages(table_ptr, key, exists, PAGE: tl.constexpr):
    """(page, slot) of the keys of a sequence, 64 bits; page 0 of those that do not exist. ``table_ptr``: its row of the
    table.
    """
    page = tl.load(table_ptr + key // PAGE, mask=exists, other=0).to(tl.int64)
    return page, (key % PAGE).to(tl.int64)


@triton.jit
def token_scale(scale_ptr, at, exists):
    """Scales ``[BN]`` of keys at offsets ``at``; 0 for those that do not exist."""
    return tl.load(scale_ptr + at, mask=exists, other=0.0)
