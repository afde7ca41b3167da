"""MHA decode as a portable Triton kernel: paged cache, packed query heads, split over the keys."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvlab.attention.call.results import results
from kvlab.attention.features.resolve import Features
from kvlab.attention.merge_states.kernel import merge_partial_results as merge
from kvlab.attention.merge_states.kernel import partial_results, partial_strides
from kvlab.attention.scoring.kernel import (
    LOG2E,
    LOWEST,
    add_bias,
    cap,
    distance,
    head_scale,
    in_pages,
    key_count,
    key_range,
    sink_alone,
    token_scale,
    visible_end,
)
from kvlab.attention.scoring.launch import bias_arguments, in_units, scale_strides, slopes_batch
from kvlab.attention.tiles.fp8_pairs.kernel import halves, narrow
from kvlab.attention.tiles.online_softmax import LOG2E as _LOG2E
from kvlab.common.arrays import with_addressing_strides
from kvlab.triton_support.interpreter import is_interpreted
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import CLASSES as _CLASSES
from .config import DecodeConfig, DecodeProblem, problem_of

LN2 = tl.constexpr(0.6931471805599453)
CLASSES = tl.constexpr(_CLASSES)


@triton.jit
def nth_longest(seq_lens_ptr, seq_lens_batch, batches, max_keys, n, BATCH: tl.constexpr):
    """The sequence that is the ``n``-th of those ordered by the class of their length, the longest first, and in a
    class by number; both 64 bits. BATCH: a power of two that holds them all.
    """
    at = tl.arange(0, BATCH)
    there = at < batches  #- launch
    length = key_count(tl.load(seq_lens_ptr + at * seq_lens_batch, mask=there, other=0), max_keys).to(tl.int64)
    longest = tl.maximum(tl.max(length, 0), 1)
    kind = ((longest - length) * (CLASSES - 1) // longest).to(tl.int32)  # 0: the longest
    counts = tl.histogram(kind, CLASSES, mask=there)
    found = tl.sum((tl.cumsum(counts, 0) <= n.to(tl.int32)).to(tl.int32), 0)
    before = tl.sum(tl.where(tl.arange(0, CLASSES) < found, counts, 0), 0)
    member = there & (kind == found)
    place = tl.cumsum(member.to(tl.int32), 0)
    return tl.sum(tl.where(member & (place == n - before + 1), at, 0), 0).to(tl.int64)


@triton.jit
def split_keys(
    position, num_keys, tokens, end, split, num_splits, left, right, chunk,
    BN: tl.constexpr, BOUNDED: tl.constexpr, CHUNKED: tl.constexpr,
):
    """(lo, hi, first, limit): the keys ``lo ... hi`` of a split, whole tiles of those that the last ``tokens``
    positions see; of these a row at ``position`` sees the keys from ``first`` to below ``limit``.
    """
    begin = 0
    if BOUNDED:
        begin, _ = key_range(num_keys - tokens, end, left, right, chunk, CHUNKED)
    _, stop = key_range(num_keys - 1, end, left, right, chunk, CHUNKED)
    stop = tl.maximum(stop, begin)
    size = tl.cdiv(tl.cdiv(stop - begin, num_splits), BN) * BN
    lo = tl.minimum(begin + split * size, stop)
    hi = tl.minimum(lo + size, stop)
    first, limit = key_range(position, end, left, right, chunk, CHUNKED)
    return lo, hi, tl.maximum(first, lo), tl.minimum(limit, hi)


@triton.jit
def start_rows(sinks_ptr, head, split, BM: tl.constexpr, SINKS: tl.constexpr):
    """(m, l): maximum and sum of rows that see no key yet; a sink is counted once, by the first split."""
    m = tl.full([BM], LOWEST, tl.float32)
    l = tl.zeros([BM], tl.float32)
    if SINKS:
        sink, one = sink_alone(tl.load(sinks_ptr + head).to(tl.float32) * LOG2E)
        m = tl.where(split == 0, sink, m)
        l = tl.where(split == 0, one, l)
    return m, l


@triton.jit
def load_columns(ptr, at, exists, first, columns, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Columns ``[first, first + WIDTH)`` of the rows at ``ptr + at``, 0 for rows that do not exist and at or past
    ``columns`` (``WHOLE``: there are none).
    """
    column = first + tl.arange(0, WIDTH)
    mask = exists[:, None] if WHOLE else exists[:, None] & (column < columns)[None, :]
    return tl.load(ptr + at[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_tile(ptr, at, exists, COLUMNS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr):
    """Rows in pieces of FIRST and, unless it is 0, REST columns."""
    first = load_columns(ptr, at, exists, 0, COLUMNS, FIRST, COLUMNS >= FIRST)
    if REST:
        return first, load_columns(ptr, at, exists, FIRST, COLUMNS, REST, COLUMNS >= FIRST + REST)
    else:
        return (first,)


load_k = load_v = load_tile


@triton.jit
def load_halves(ptr, at, exists, first, columns, WIDTH: tl.constexpr):
    """The even and the odd columns of a piece of pairs, which counts its columns in pairs."""
    column = first + tl.arange(0, WIDTH)
    inside = exists[:, None] & (column < columns)[None, :]
    even = ptr + at[:, None] + 2 * column[None, :]
    return tl.load(even, mask=inside, other=0.0), tl.load(even + 1, mask=inside, other=0.0)


@triton.jit
def load_q(ptr, at, is_row, COLUMNS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, PAIRS: tl.constexpr):
    """(q, unit): the query rows in pieces as those of K; with PAIRS the even and the odd columns of each, in float16
    and divided by ``unit``, a power of two for each row.
    """
    if PAIRS:
        q = load_halves(ptr, at, is_row, 0, COLUMNS, FIRST)
        if REST:
            q = q + load_halves(ptr, at, is_row, FIRST, COLUMNS, REST)
        return narrow_all(q)
    else:
        return load_tile(ptr, at, is_row, COLUMNS, FIRST, REST), 1.0


@triton.jit
def narrow_all(q):
    """(q / unit in float16, unit): as of ``narrow``, all tiles of the rows by one ``unit``."""
    top = tl.max(tl.abs(q[0].to(tl.float32)), 1)
    for i in tl.static_range(1, len(q)):
        top = tl.maximum(top, tl.max(tl.abs(q[i].to(tl.float32)), 1))
    tiles = q[:0]
    for i in tl.static_range(len(q)):
        tile, unit = narrow(q[i], top)
        tiles = tiles + (tile,)
    return tiles, unit


@triton.jit
def scores(q, k, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """S = Q K^T in float32: the sum over the pieces."""
    s = tl.zeros([q[0].shape[0], k[0].shape[0]], tl.float32)
    for i in tl.static_range(len(k)):
        if PAIRS:
            even, odd = halves(k[i], PTX)
            s = tl.dot(q[2 * i], tl.trans(even), s)
            s = tl.dot(q[2 * i + 1], tl.trans(odd), s)
        else:
            s = tl.dot(q[i], tl.trans(k[i]), s, input_precision="ieee")
    return s


@triton.jit
def zeros(BM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, PAIRS: tl.constexpr):
    """The output accumulators: of each piece of V's columns, with PAIRS of the even and of the odd ones."""
    part = tl.zeros([BM, V0], tl.float32)
    o = (part, part) if PAIRS else (part,)
    if V1:
        part = tl.zeros([BM, V1], tl.float32)
        o = o + ((part, part) if PAIRS else (part,))
    return o


@triton.jit
def rescale(o, factor):
    """Rows multiplied by ``factor``."""
    parts = o[:0]
    for i in tl.static_range(len(o)):
        parts = parts + (o[i] * factor[:, None],)
    return parts


@triton.jit
def add_values(p, v, o):
    """O + P V of a piece of V's columns; P is rounded once to the dtype of the product."""
    return tl.dot(p.to(v.dtype), v, o, input_precision="ieee")


@triton.jit
def accumulate(p, v, o, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """O + P V, piece by piece."""
    parts = o[:0]
    for i in tl.static_range(len(v)):
        if PAIRS:
            even, odd = halves(v[i], PTX)
            parts = parts + (add_values(p, even, o[2 * i]), add_values(p, odd, o[2 * i + 1]))
        else:
            parts = parts + (add_values(p, v[i], o[i]),)
    return parts


@triton.jit
def normalise(o, factor, sees):
    """Rows multiplied by ``factor``, 0 where not ``sees``."""
    parts = o[:0]
    for i in tl.static_range(len(o)):
        parts = parts + (tl.where(sees[:, None], o[i] * factor[:, None], 0.0),)
    return parts


@triton.jit
def store_columns(ptr, at, exists, first, columns, o):
    """A piece of the output rows."""
    column = first + tl.arange(0, o.shape[1])
    mask = exists[:, None] & (column < columns)[None, :]
    tl.store(ptr + at[:, None] + column[None, :], o.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_rows(ptr, at, exists, o, COLUMNS: tl.constexpr, PAIRS: tl.constexpr):
    """The output rows; with PAIRS their columns are twice COLUMNS."""
    if PAIRS:
        for i in tl.static_range(len(o) // 2):
            store_columns(ptr, at, exists, 2 * i * o[0].shape[1], 2 * COLUMNS, tl.interleave(o[2 * i], o[2 * i + 1]))
    else:
        for i in tl.static_range(len(o)):
            store_columns(ptr, at, exists, i * o[0].shape[1], COLUMNS, o[i])


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, valid_ptr, bias_ptr, sinks_ptr, slopes_ptr,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, o_ptr, lse_ptr,
    scale_log2, v_factor, softcap, left, right, chunk, group, tokens, num_splits, max_keys,
    q_batch, q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, table_batch, seq_lens_batch,
    bias_batch, bias_head, bias_row, bias_key, bias_rows, bias_keys, slopes_batch, q_scale_head,
    k_scale_page, k_scale_token, k_scale_head, v_scale_page, v_scale_token, v_scale_head,
    o_split, o_batch, o_token, o_head, lse_split, lse_batch, lse_token, lse_head, batches, kv_heads,
    PAGE: tl.constexpr, PAIRS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PTX: tl.constexpr,
    BOUNDED: tl.constexpr, CHUNKED: tl.constexpr, VALID: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, SLOPES: tl.constexpr, Q_SCALE: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    LONGEST_FIRST: tl.constexpr, UNIT: tl.constexpr,
):
    """BM query rows (tokens x heads of one KV head) against the keys of one split of one sequence.

    Columns come in pieces of W0 and W1 (V0 and V1 of V) elements of 16 bits or more; with PAIRS an element is two
    neighbouring columns of fp8, and D and DV count such elements. BOUNDED: rows see no keys before some first one.
    K_SCALE and V_SCALE: "number", "head" or "token". PTX: compiled for NVIDIA. Strides of q, K, V and the output count
    UNIT elements as one.
    """
    #: setup -> q, lo, hi, first, limit    this program's rows, the keys they see, its split of them, the query tile
    program, split = tl.program_id(0), tl.program_id(1)
    row_tiles = tl.cdiv(group * tokens, BM)
    tile, batch = program % (kv_heads * row_tiles), (program // (kv_heads * row_tiles)).to(tl.int64)
    if LONGEST_FIRST:
        batch = nth_longest(seq_lens_ptr, seq_lens_batch, batches, max_keys, batch, LONGEST_FIRST)
    kv_head = (tile // row_tiles).to(tl.int64)
    row = tile % row_tiles * BM + tl.arange(0, BM)  # [BM], token-major
    num_keys = key_count(tl.load(seq_lens_ptr + batch * seq_lens_batch), max_keys)
    token = row // group
    head = kv_head * group + row % group
    is_row = row < group * tokens
    position = num_keys - tokens + token  # [BM]
    end = visible_end(num_keys, valid_ptr, batch, VALID)
    lo, hi, first, limit = split_keys(
        position, num_keys, tokens, end, split, num_splits, left, right, chunk, BN, BOUNDED, CHUNKED
    )
    q, unit = load_q(
        q_ptr, (batch * q_batch + token.to(tl.int64) * q_token + head * q_head) * UNIT, is_row, D, W0, W1, PAIRS
    )  # pieces [BM, W0] and [BM, W1]
    factor = scale_log2 * head_scale(q_scale_ptr, kv_head, q_scale_head, Q_SCALE)
    factor = factor * head_scale(k_scale_ptr, kv_head, k_scale_head, K_SCALE == "head")
    if PAIRS:
        factor = (factor * unit)[:, None]
    m, l = start_rows(sinks_ptr, head, split, BM, SINKS)
    o = zeros(BM, V0, V1, PAIRS)
    for start in range(lo, hi, BN):
        #: load_k -> k    the K tile of these pages, DRAM -> shared memory
        key = start + tl.arange(0, BN)
        exists = key < hi
        page, slot = in_pages(table_ptr + batch * table_batch, key, exists, PAGE)
        k = load_k(k_ptr + kv_head * k_head * UNIT, (page * k_page + slot * k_token) * UNIT, exists, D, W0, W1)
        #: scores -> s    S = Q K^T in float32, in units of log2; scales, softcap, ALiBi
        s = scores(q, k, PAIRS, PTX)  # [BM, BN]
        s = s * factor
        if K_SCALE == "token":
            scale = token_scale(
                k_scale_ptr, page * k_scale_page + slot * k_scale_token + kv_head * k_scale_head, exists
            )
            s = s * scale[None, :]
        if CAPPED:
            s = cap(s, softcap)
        if SLOPES:
            slope = tl.load(slopes_ptr + batch * slopes_batch + head)
            s = distance(s, slope, position, key)
        #: mask -> s    keys that a row does not see
        visible = key[None, :] < limit[:, None]
        if BOUNDED:
            visible = visible & (key[None, :] >= first[:, None])
        if BIAS:
            visible = visible & is_row[:, None]
            s, visible = add_bias(
                s, visible, bias_ptr, batch * bias_batch + head * bias_head, token, key, bias_rows, bias_keys,
                bias_row, bias_key,
            )
        s = tl.where(visible, s, -float("inf"))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        o = rescale(o, alpha)
        m = m_new
        #: load_v -> v    the V tile of the same pages
        v = load_v(v_ptr + kv_head * v_head * UNIT, (page * v_page + slot * v_token) * UNIT, exists, DV, V0, V1)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product; scales of tokens
        if V_SCALE == "token":
            scale = token_scale(
                v_scale_ptr, page * v_scale_page + slot * v_scale_token + kv_head * v_scale_head, exists
            )
            p = p * scale[None, :]
        o = accumulate(p, v, o, PAIRS, PTX)
    #: normalise -> l, lse    rows without a sum have seen no key: 0 and -inf
    sees = l != 0
    if not SINKS:
        sees = sees & (first < limit)  # known before the loop: ptxas then spills nothing
    factor = v_factor * head_scale(v_scale_ptr, kv_head, v_scale_head, V_SCALE == "head")
    lse = tl.where(sees, (m + tl.math.log2(l)) * LN2, -float("inf"))
    l = tl.where(sees, factor / l, 0.0)  # what the sums of a row are multiplied by
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (num_splits == 1))
    o = normalise(o, l, sees)
    split = split.to(tl.int64)
    store_rows(
        o_ptr, (split * o_split + batch * o_batch + token.to(tl.int64) * o_token + head * o_head) * UNIT, writes_o, o,
        DV, PAIRS,
    )
    tl.store(lse_ptr + split * lse_split + batch * lse_batch + token * lse_token + head * lse_head, lse, mask=is_row)


def followed(f: Features, absent: torch.Tensor) -> list[torch.Tensor]:
    """The arrays of a call's features, as decode kernels take them; ``absent`` stands for a pointer that is not
    followed.
    """
    mask, scales = f.mask, f.scales
    arrays = mask.valid, mask.bias, f.sinks, f.slopes, scales.q.array, scales.k.array, scales.v.array
    return [absent if x is None else x for x in arrays]


def launch_first(
    kernel: Any, pointers: tuple[torch.Tensor, ...], again: Again, problem: DecodeProblem, config: Any, f: Features,
    scale: float, *own: int, **constants: Any,
) -> None:
    """Launch a decode kernel for the first time. ``own``: its numbers behind those of all decode kernels."""
    (q, k, v, block_table, seq_lens), (part, part_lse) = pointers[:5], pointers[-2:]
    mask, scales, splits = f.mask, f.scales, config.num_splits
    bias_sizes, bias_strides = bias_arguments(mask.bias)
    steps, lse_steps = partial_strides(part, part_lse, splits)
    unit, (of_q, of_k, of_v, of_part) = in_units(*(x.stride()[:-1] for x in (q, k, v)), steps)
    first_launch(kernel, config.grid(problem), pointers, again)(
        scale * _LOG2E * scales.q.number * scales.k.number, scales.v.number, f.softcap,
        mask.left, mask.right, mask.chunk, problem.group, problem.tokens, splits, problem.max_keys,
        *of_q, *of_k, *of_v, block_table.stride(0), seq_lens.stride(0),
        *bias_strides, *bias_sizes, slopes_batch(f.slopes),
        *scale_strides(scales.q, 1), *scale_strides(scales.k, 3), *scale_strides(scales.v, 3), *of_part, *lse_steps,
        *own, PAGE=problem.page_size, BM=config.BM, BN=config.BN, UNIT=unit,
        BOUNDED=mask.windowed, CHUNKED=mask.chunk > 0, VALID=mask.valid is not None, BIAS=mask.bias is not None,
        CAPPED=f.softcap > 0, SINKS=f.sinks is not None, SLOPES=f.slopes is not None,
        Q_SCALE=scales.q.array is not None, K_SCALE=scales.k.kind, V_SCALE=scales.v.kind,
        **constants, num_warps=config.num_warps, num_stages=config.num_stages,
    )


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
    out, lse = results(q, out, (*q.shape[:3], v_cache.shape[3]))
    if out.numel() == 0:
        return out, lse
    part, part_lse = partial_results(out, lse, config.num_splits)
    pairs = k_cache.element_size() == 1
    k, v = (with_addressing_strides(x).view(torch.int16) for x in (k_cache, v_cache)) if pairs else (k_cache, v_cache)
    pointers = q, k, v, block_table, seq_lens, *followed(f, q), part, part_lse
    if not relaunched(attend, pointers, again):
        problem = problem_of(q, k_cache, v_cache, block_table)
        launch_first(
            attend, pointers, again, problem, config, f, scale, problem.batch, problem.kv_heads,
            PAIRS=problem.pairs, D=problem.widths[0], DV=problem.widths[1],
            W0=config.columns[0], W1=config.columns[1], V0=config.v_columns[0], V1=config.v_columns[1],
            PTX=q.is_cuda and torch.version.hip is None and not is_interpreted(), LONGEST_FIRST=config.longest_first,
        )
    if config.num_splits > 1:
        merge(part, part_lse, out, lse, again)
    return out, lse
