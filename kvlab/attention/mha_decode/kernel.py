"""MHA decode as a portable Triton kernel: paged cache, packed query heads, split over the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.attention.features import Features
from kvlab.attention.fp8_pairs.kernel import halves, narrow
from kvlab.attention.merge_states.kernel import merge_partial_results as merge
from kvlab.attention.merge_states.kernel import partial_results, partial_strides
from kvlab.attention.online_softmax import LOG2E
from kvlab.attention.results import results
from kvlab.attention.scoring.kernel import (
    LOWEST,
    add_bias,
    cap,
    distance,
    head_scale,
    key_count,
    key_range,
    sink_alone,
    token_scale,
    visible_end,
)
from kvlab.attention.scoring.launch import bias_arguments, in_units, scale_strides, slopes_batch
from kvlab.cache.arrays import with_addressing_strides
from kvlab.triton_support.interpreter import is_interpreted
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import CLASSES as _CLASSES
from .config import DecodeConfig, problem_of

LN2 = tl.constexpr(0.6931471805599453)
CLASSES = tl.constexpr(_CLASSES)


@triton.jit
def nth_longest(seq_lens_ptr, lens_batch, batches, max_keys, n, BATCH: tl.constexpr):
    """The sequence that is the ``n``-th of those ordered by the class of their length, the longest first, and in a
    class by number. BATCH: a power of two that holds them all.
    """
    at = tl.arange(0, BATCH)
    there = at < batches
    length = key_count(tl.load(seq_lens_ptr + at * lens_batch, mask=there, other=0), max_keys).to(tl.int64)
    longest = tl.maximum(tl.max(length, 0), 1)
    kind = ((longest - length) * (CLASSES - 1) // longest).to(tl.int32)  # 0: the longest
    counts = tl.histogram(kind, CLASSES, mask=there)
    found = tl.sum((tl.cumsum(counts, 0) <= n).to(tl.int32), 0)
    before = tl.sum(tl.where(tl.arange(0, CLASSES) < found, counts, 0), 0)
    member = there & (kind == found)
    place = tl.cumsum(member.to(tl.int32), 0)
    return tl.sum(tl.where(member & (place == n - before + 1), at, 0), 0)


@triton.jit
def load_columns(ptr, at, exists, first, columns, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Columns ``[first, first + WIDTH)`` of the rows at ``ptr + at``, 0 for rows that do not exist and at or past
    ``columns`` (``WHOLE``: there are none).
    """
    column = first + tl.arange(0, WIDTH)
    mask = exists[:, None] if WHOLE else exists[:, None] & (column < columns)[None, :]
    return tl.load(ptr + at[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_q(ptr, at, exists, first, columns, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """(q, q_odd): a piece of the query rows; with ``PAIRS`` its even and its odd columns."""
    column = tl.arange(0, WIDTH)
    if PAIRS:
        inside = exists[:, None] & (first + column < columns)[None, :]
        even = ptr + at[:, None] + 2 * (first + column)[None, :]
        q = tl.load(even, mask=inside, other=0.0)
        q_odd = tl.load(even + 1, mask=inside, other=0.0)
    else:
        q = load_columns(ptr, at, exists, first, columns, WIDTH, False)
        q_odd = q
    return q, q_odd


@triton.jit
def add_scores(q, q_odd, k, s, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """S + Q K^T over the columns of a piece."""
    if PAIRS:
        even, odd = halves(k, PTX)
        s = tl.dot(q, tl.trans(even), s)
        s = tl.dot(q_odd, tl.trans(odd), s)
    else:
        s = tl.dot(q, tl.trans(k), s, input_precision="ieee")
    return s


@triton.jit
def add_values(p, v, o):
    """O + P V of a piece of V's columns; P is rounded once to the dtype of the product."""
    return tl.dot(p.to(v.dtype), v, o, input_precision="ieee")


@triton.jit
def add_pairs(p, v, o, o_odd, PTX: tl.constexpr):
    """:func:`add_values` of pairs, to the even and to the odd columns."""
    even, odd = halves(v, PTX)
    return add_values(p, even, o), add_values(p, odd, o_odd)


@triton.jit
def store_columns(ptr, at, exists, first, columns, o):
    """A piece of the output rows."""
    column = first + tl.arange(0, o.shape[1])
    mask = exists[:, None] & (column < columns)[None, :]
    tl.store(ptr + at[:, None] + column[None, :], o.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, valid_ptr, bias_ptr, sinks_ptr, slopes_ptr,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, o_ptr, lse_ptr,
    scale_log2, v_factor, softcap, left, right, chunk, group, tokens, num_splits, batches, kv_heads,
    max_keys, q_batch, q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, table_batch, lens_batch,
    bias_batch, bias_head, bias_row, bias_key, bias_rows, bias_keys, slopes_batch, q_scale_head,
    k_scale_page, k_scale_token, k_scale_head, v_scale_page, v_scale_token, v_scale_head,
    o_split, o_batch, o_token, o_head, lse_split, lse_batch, lse_token, lse_head,
    PAGE: tl.constexpr, PAIRS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PTX: tl.constexpr,
    BOUNDED: tl.constexpr, CHUNKED: tl.constexpr, VALID: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, SLOPES: tl.constexpr, Q_SCALE: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    LONGEST_FIRST: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """BM query rows (tokens x heads of one KV head) against the keys of one split of one sequence.

    Columns come in pieces of W0 and W1 (V0 and V1 of V) elements of 16 bits or more; with PAIRS an element is two
    neighbouring columns of fp8, and D and DV count such elements. BOUNDED: rows see no keys before some first one.
    K_SCALE and V_SCALE: "number", "head" or "token". PTX: compiled for NVIDIA.
    """
    #: setup -> q, lo, hi, first, limit    this program's rows, the keys they see, its split of them, the query tile
    if UNIT > 1:
        q_batch, q_token, q_head = q_batch * UNIT, q_token * UNIT, q_head * UNIT
        k_page, k_token, k_head = k_page * UNIT, k_token * UNIT, k_head * UNIT
        v_page, v_token, v_head = v_page * UNIT, v_token * UNIT, v_head * UNIT
        o_split, o_batch, o_token, o_head = o_split * UNIT, o_batch * UNIT, o_token * UNIT, o_head * UNIT
    row_tiles = tl.cdiv(group * tokens, BM)
    tile = tl.program_id(0) % (kv_heads * row_tiles)
    split = tl.program_id(1)
    batch = tl.program_id(0) // (kv_heads * row_tiles)
    if LONGEST_FIRST:
        batch = nth_longest(seq_lens_ptr, lens_batch, batches, max_keys, batch, LONGEST_FIRST)
    batch = batch.to(tl.int64)
    kv_head = (tile // row_tiles).to(tl.int64)
    row = tile % row_tiles * BM + tl.arange(0, BM)  # [BM], token-major
    num_keys = key_count(tl.load(seq_lens_ptr + batch * lens_batch), max_keys)
    token = row // group
    head = kv_head * group + row % group
    is_row = row < group * tokens
    position = num_keys - tokens + token  # [BM]
    end = visible_end(num_keys, valid_ptr, batch, VALID)
    first, limit = key_range(position, end, left, right, chunk, CHUNKED)  # [BM]
    begin = 0
    if BOUNDED:
        begin, _ = key_range(num_keys - tokens, end, left, right, chunk, CHUNKED)
    _, stop = key_range(num_keys - 1, end, left, right, chunk, CHUNKED)
    stop = tl.maximum(stop, begin)
    size = tl.cdiv(tl.cdiv(stop - begin, num_splits), BN) * BN
    lo = tl.minimum(begin + split * size, stop)
    hi = tl.minimum(lo + size, stop)
    first = tl.maximum(first, lo)
    limit = tl.minimum(limit, hi)  # a row sees the keys from first to below limit
    q_at = batch * q_batch + token.to(tl.int64) * q_token + head * q_head
    q, q_odd = load_q(q_ptr, q_at, is_row, 0, D, W0, PAIRS)  # [BM, W0]
    if W1:
        q1, q1_odd = load_q(q_ptr, q_at, is_row, W0, D, W1, PAIRS)
    factor = scale_log2 * head_scale(q_scale_ptr, kv_head, q_scale_head, Q_SCALE)
    factor *= head_scale(k_scale_ptr, kv_head, k_scale_head, K_SCALE == "head")
    if PAIRS:
        top = tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), tl.max(tl.abs(q_odd.to(tl.float32)), 1))
        if W1:
            top = tl.maximum(top, tl.max(tl.abs(q1.to(tl.float32)), 1))
            top = tl.maximum(top, tl.max(tl.abs(q1_odd.to(tl.float32)), 1))
            q1, _ = narrow(q1, top)
            q1_odd, _ = narrow(q1_odd, top)
        q, unit = narrow(q, top)
        q_odd, _ = narrow(q_odd, top)
        factor = (factor * unit)[:, None]
    k_base, v_base, pages = k_ptr + kv_head * k_head, v_ptr + kv_head * v_head, table_ptr + batch * table_batch
    m = tl.full([BM], LOWEST, tl.float32)
    l = tl.zeros([BM], tl.float32)
    if SINKS:  # counted once, by the first split
        sink, one = sink_alone(tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634)
        m = tl.where(split == 0, sink, m)
        l = tl.where(split == 0, one, l)
    o = tl.zeros([BM, V0], tl.float32)
    if PAIRS:
        o_odd = tl.zeros([BM, V0], tl.float32)
    if V1:
        o1 = tl.zeros([BM, V1], tl.float32)
        if PAIRS:
            o1_odd = tl.zeros([BM, V1], tl.float32)
    for start in range(lo, hi, BN):
        #: load_k -> k    the K tile of these pages, DRAM -> shared memory
        key = start + tl.arange(0, BN)
        exists = key < hi
        page = tl.load(pages + key // PAGE, mask=exists, other=0).to(tl.int64)
        slot = (key % PAGE).to(tl.int64)
        k_at = page * k_page + slot * k_token
        k = load_columns(k_base, k_at, exists, 0, D, W0, D >= W0)  # [BN, W0]
        if W1:
            k1 = load_columns(k_base, k_at, exists, W0, D, W1, D >= W0 + W1)
        #: scores -> s    S = Q K^T in float32, in units of log2; scales, softcap, ALiBi
        s = add_scores(q, q_odd, k, tl.zeros([BM, BN], tl.float32), PAIRS, PTX)
        if W1:
            s = add_scores(q1, q1_odd, k1, s, PAIRS, PTX)
        s = s * factor  # [BM, BN]
        if K_SCALE == "token":
            scale_at = page * k_scale_page + slot * k_scale_token + kv_head * k_scale_head
            s = s * token_scale(k_scale_ptr, scale_at, exists)[None, :]
        if CAPPED:
            s = cap(s, softcap)
        if SLOPES:
            slope = tl.load(slopes_ptr + batch * slopes_batch + head, mask=is_row, other=0.0)
            s = distance(s, slope, position, key)
        #: mask -> s    keys that a row does not see
        visible = key[None, :] < limit[:, None]
        if BOUNDED:
            visible = visible & (key[None, :] >= first[:, None])
        if BIAS:
            bias_at = batch * bias_batch + head * bias_head
            visible = visible & is_row[:, None]
            s, visible = add_bias(
                s, visible, bias_ptr, bias_at, token, key, bias_rows, bias_keys, bias_row, bias_key
            )
        s = tl.where(visible, s, -float("inf"))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        o = o * alpha[:, None]
        if PAIRS:
            o_odd = o_odd * alpha[:, None]
        if V1:
            o1 = o1 * alpha[:, None]
            if PAIRS:
                o1_odd = o1_odd * alpha[:, None]
        m = m_new
        #: load_v -> v    the V tile of the same pages
        v_at = page * v_page + slot * v_token
        v = load_columns(v_base, v_at, exists, 0, DV, V0, DV >= V0)  # [BN, V0]
        if V1:
            v1 = load_columns(v_base, v_at, exists, V0, DV, V1, DV >= V0 + V1)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product; scales of tokens
        if V_SCALE == "token":
            scale_at = page * v_scale_page + slot * v_scale_token + kv_head * v_scale_head
            p = p * token_scale(v_scale_ptr, scale_at, exists)[None, :]
        if PAIRS:
            o, o_odd = add_pairs(p, v, o, o_odd, PTX)
        else:
            o = add_values(p, v, o)
        if V1:
            if PAIRS:
                o1, o1_odd = add_pairs(p, v1, o1, o1_odd, PTX)
            else:
                o1 = add_values(p, v1, o1)
    #: normalise -> l, lse    rows without a sum have seen no key: 0 and -inf
    sees = l != 0
    if not SINKS:
        sees = sees & (first < limit)  # known before the loop: ptxas then spills nothing
    factor = v_factor * head_scale(v_scale_ptr, kv_head, v_scale_head, V_SCALE == "head")
    lse = tl.where(sees, (m + tl.math.log2(l)) * LN2, -float("inf"))
    l = tl.where(sees, factor / l, 0.0)  # what the sums of a row are multiplied by
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (num_splits == 1))
    o_at = split.to(tl.int64) * o_split + batch * o_batch + token.to(tl.int64) * o_token + head * o_head
    o = tl.where(sees[:, None], o * l[:, None], 0.0)
    if PAIRS:
        o_odd = tl.where(sees[:, None], o_odd * l[:, None], 0.0)
        store_columns(o_ptr, o_at, writes_o, 0, 2 * DV, tl.interleave(o, o_odd))
    else:
        store_columns(o_ptr, o_at, writes_o, 0, DV, o)
    if V1:
        o1 = tl.where(sees[:, None], o1 * l[:, None], 0.0)
        if PAIRS:
            o1_odd = tl.where(sees[:, None], o1_odd * l[:, None], 0.0)
            store_columns(o_ptr, o_at, writes_o, 2 * V0, 2 * DV, tl.interleave(o1, o1_odd))
        else:
            store_columns(o_ptr, o_at, writes_o, V0, DV, o1)
    lse_at = split.to(tl.int64) * lse_split + batch * lse_batch + token * lse_token + head * lse_head
    tl.store(lse_ptr + lse_at, lse, mask=is_row)


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    config: DecodeConfig,
    features: Features | None = None,
    out: torch.Tensor | None = None,
    again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels: out ``[B, S, Hq, Dv]`` and lse ``[B, S, Hq]`` float32. The arguments are valid; ``again`` as of
    :mod:`kvlab.triton_support.launching`.
    """
    f = Features() if features is None else features
    mask, scales = f.mask, f.scales
    batch, tokens, q_heads = q.shape[:3]
    out, lse = results(q, out, (batch, tokens, q_heads, v_cache.shape[3]))
    if out.numel() == 0:
        return out, lse
    splits = config.num_splits
    part, part_lse = partial_results(out, lse, splits)
    pairs = k_cache.element_size() == 1
    k, v = (with_addressing_strides(x).view(torch.int16) for x in (k_cache, v_cache)) if pairs else (k_cache, v_cache)
    absent = q  # stands for a pointer that is not followed
    arrays = mask.valid, mask.bias, f.sinks, f.slopes, *(s.array for s in (scales.q, scales.k, scales.v))
    pointers = q, k, v, block_table, seq_lens, *(absent if x is None else x for x in arrays), part, part_lse

    if not relaunched(attend, pointers, again):
        problem = problem_of(q, k_cache, v_cache, block_table)
        bias_sizes, bias_strides = bias_arguments(mask.bias)
        steps, lse_steps = partial_strides(part, part_lse, splits)
        unit, (of_q, of_k, of_v, of_part) = in_units(*(x.stride()[:-1] for x in (q, k, v)), steps)
        first_launch(attend, config.grid(problem), pointers, again)(
            scale * LOG2E * scales.q.number * scales.k.number, scales.v.number, f.softcap,
            mask.left, mask.right, mask.chunk, problem.group, tokens, splits, batch, problem.kv_heads,
            problem.max_keys,
            *of_q, *of_k, *of_v, block_table.stride(0), seq_lens.stride(0),
            *bias_strides, *bias_sizes, slopes_batch(f.slopes),
            *scale_strides(scales.q, 1), *scale_strides(scales.k, 3), *scale_strides(scales.v, 3), *of_part,
            *lse_steps,
            PAGE=problem.page_size, PAIRS=problem.pairs, D=problem.widths[0], DV=problem.widths[1],
            W0=config.columns[0], W1=config.columns[1], V0=config.v_columns[0], V1=config.v_columns[1],
            BM=config.BM, BN=config.BN, PTX=q.is_cuda and torch.version.hip is None and not is_interpreted(),
            BOUNDED=mask.windowed, CHUNKED=mask.chunk > 0, VALID=mask.valid is not None, BIAS=mask.bias is not None,
            CAPPED=f.softcap > 0, SINKS=f.sinks is not None, SLOPES=f.slopes is not None,
            Q_SCALE=scales.q.array is not None, K_SCALE=scales.k.kind, V_SCALE=scales.v.kind,
            LONGEST_FIRST=config.longest_first, UNIT=unit,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    if splits > 1:
        merge(part, part_lse, out, lse, again)
    return out, lse
