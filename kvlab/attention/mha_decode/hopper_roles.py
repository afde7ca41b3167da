"""The roles of the Hopper decode kernel: a producer warp that keeps a ring of blocks full, and four consumer warps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2

from kvlab.attention.hopper.kernel import (
    LN2,
    LOG2E,
    LOWEST,
    adjust_by_row,
    factor_of,
    find_pages,
    head_scale,
    log_sum,
    meet,
)

from .hopper_steps import (
    AT_ONCE,
    add_warps,
    as_sums,
    as_tops,
    column,
    column_halves,
    halves,
    largest,
    load_block,
    load_rows,
    narrow,
    of_every_warp,
    operand,
    products,
    results_layout,
    rows_layout,
    rows_of,
)


@gluon.jit
def produce(item, descs, boxes, full, free, table, pages, done, C: gl.constexpr):
    """One warp brings block after block of K and V, ``done`` of which came before."""
    #@ producer
    #: begin -> blocks, found    how many; the pages of the first
    _, kv_head, _, lo, hi, _ = item
    dk, dv = descs  #- launch
    k_box, v_box = boxes  #- launch
    blocks = gl.cdiv(hi - lo, C.BT)
    found = find_pages(table, lo, hi, pages, C.BT, C.BOX, C.PAGE)
    for i in range(blocks):
        #: load -> b, key, found    a block, once its stage is free; the pages of the next
        b = (done + i) % C.NB
        key = lo + i * C.BT
        following = find_pages(table, key + C.BT, hi, pages, C.BT, C.BOX, C.PAGE)
        mbarrier.wait(free.index(b), (((done + i) // C.NB) & 1) ^ 1)  #- wait
        load_block(dk, dv, k_box, v_box, full.index(b), b, found, key, kv_head, C)
        found = following


@gluon.jit
def attend_keys(unit, tokens, smem, bars, queries, terms, done, C: gl.constexpr):
    """(o, o_odd, top, total): sums ``[ROWS, W]`` of the rows over a unit's keys, whose blocks come after ``done``
    others, of pairs the odd columns as each warp has them, of more than 128 columns the second half; the rows' maxima,
    and what the weights add up to.

    unit : sequence, first KV head, the first key and the one behind the last, keys of the sequence. tokens : new ones
    of it; None: those of C, and units end with a block or the sequence. smem : K's and V's ring, and where the warps
    leave their sums and maxima.
    """
    #@ consumer
    #: begin -> blocks, limit    how many; the rows, the keys that they see, what their scores are multiplied by
    batch, kv_head, lo, hi, num_keys = unit
    blocks = gl.cdiv(hi - lo, C.BT)
    k_s, v_s, left, tops_left = smem  #- launch
    full, free = bars  #- launch
    q_ptr, q_strides = queries  #- launch
    features, numbers, scale_log2, _ = terms  #- launch
    R: gl.constexpr = C.ROWS
    W: gl.constexpr = C.W
    MMA: gl.constexpr = products(R)
    B: gl.constexpr = operand(1, R)
    ROWS: gl.constexpr = rows_layout(R)
    KEYS: gl.constexpr = C.BN // 4
    q = load_rows(q_ptr, q_strides, batch, kv_head, tokens, 0, C)
    kv, token, head = rows_of(gl.arange(0, R, layout=ROWS), C)
    seen = num_keys - (C.TOKENS if tokens is None else tokens) + 1  # by all rows
    limit = seen + token  # keys from here on a row does not see
    if tokens is not None:  # and units may end within a block
        seen, limit = gl.minimum(seen, hi), gl.minimum(limit, hi)
    factor = gl.full([R], 1.0, gl.float32, layout=ROWS) * scale_log2
    of_row = kv_head + gl.minimum(kv, C.HEADS - 1)  # rows that do not exist are as those of the last head
    factor = factor_of(factor, features, numbers, batch, of_row, of_row * C.GROUP + head)
    if C.PAIRS:
        odd = load_rows(q_ptr, q_strides, batch, kv_head, tokens, 1, C)
        top = gl.maximum(gl.max(gl.abs(q.to(gl.float32)), 1), gl.max(gl.abs(odd.to(gl.float32)), 1))
        q, unit_of_q = narrow(q, top)
        odd, _ = narrow(odd, top)
        q_odd = of_every_warp(odd, C)
        factor = factor * gl.convert_layout(unit_of_q, ROWS)
    q = of_every_warp(q, C)
    col = gl.expand_dims(column(gl.SliceLayout(1, MMA), C), 1)  # [4, 1, 16]
    own = col % C.HEADS == gl.expand_dims(gl.expand_dims(kv, 0), 2)
    limits = gl.expand_dims(gl.expand_dims(limit, 0), 2)
    factor = gl.expand_dims(gl.expand_dims(factor, 0), 2)
    m = gl.full([4, R], LOWEST, gl.float32, layout=gl.SliceLayout(2, MMA))
    l = gl.zeros([4, R], gl.float32, layout=gl.SliceLayout(2, MMA))
    o = gl.zeros([4, R, W], gl.float32, layout=MMA)
    o_odd = o
    for i in range(blocks):
        #: load_k -> b, key    the block has arrived in its stage
        b = (done + i) % C.NB
        key = lo + i * C.BT
        mbarrier.wait(full.index(b), ((done + i) // C.NB) & 1)  #- wait
        k = k_s.index(b).permute((0, 2, 1)).load(B)
        #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
        s = gl.zeros([4, R, KEYS], gl.float32, layout=MMA)
        if C.PAIRS:
            k_even, k_odd = halves(k, True)
            s = mma_v2(q, k_even, s)
            s = mma_v2(q_odd, k_odd, s)
        else:
            s = mma_v2(q, k, s)
        s = adjust_by_row(s, factor, 0.0, numbers)
        #: load_v -> v    and the stage is free; rows that do not exist may be anything, and 0 * NaN is NaN
        v = v_s.index(b).load(B)
        if C.W <= AT_ONCE:
            mbarrier.arrive(free.index(b), count=1)
        if C.W > AT_ONCE or key + C.BT > hi:
            there = gl.expand_dims(key + column(gl.SliceLayout(2, B), C) // C.HEADS < hi, 2)
            v = gl.where(there, v, gl.zeros_like(v))
        #: mask -> s    other heads' keys, and keys that a row does not see
        if C.HEADS > 1:
            s = gl.where(own, s, float("-inf"))
        if key + C.BT > seen:
            s = gl.where(key + col // C.HEADS < limits, s, float("-inf"))
        #: softmax -> p, m, l, o    online, every warp for itself: row maximum, exponentials, row sum, rescale
        m_new = gl.maximum(m, gl.max(s, 2))
        p = gl.exp2(s - gl.expand_dims(m_new, 2))
        alpha = gl.exp2(m - m_new)
        l = l * alpha + gl.sum(p, 2)
        m = m_new
        o = o * gl.expand_dims(alpha, 2)
        if C.PAIRS:
            o_odd = o_odd * gl.expand_dims(alpha, 2)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product
        if C.PAIRS:
            weights = gl.convert_layout(p.to(gl.float16), operand(0, R))
            v_even, v_odd = halves(v, True)
            o = mma_v2(weights, v_even, o)
            o_odd = mma_v2(weights, v_odd, o_odd)
        else:
            o = mma_v2(gl.convert_layout(p.to(v.dtype), operand(0, R)), v, o)
        if C.W > AT_ONCE:  # registers hold a part of V at a time
            mbarrier.arrive(free.index(b), count=1)
    #: together -> top, total    the warps' maxima and sums, through shared memory that nobody reads any more
    OUT: gl.constexpr = results_layout(C.ROWS, min(C.W, AT_ONCE))
    sums, each = as_sums(left, C)
    tops, top_of = as_tops(tops_left, C)
    if C.W > AT_ONCE:
        o, o_odd = column_halves(o, C)
    meet()
    sums.store(o)
    tops.index(0).store(m)
    tops.index(1).store(l)
    meet()
    top = largest(top_of, OUT)
    total, o = add_warps(each, top_of, top, C, OUT)
    return o, o_odd, top, total


@gluon.jit
def other_columns(o_odd, smem, top, C: gl.constexpr):
    """The odd columns of the sums ``[ROWS, W]``, where the even ones have been, or the second half where the first has:
    rows' maxima and sums are there.
    """
    #@ consumer
    #: other_columns -> o_odd    put together as those before
    _, _, left, tops_left = smem  #- launch
    sums, each = as_sums(left, C)
    _, top_of = as_tops(tops_left, C)
    meet()
    sums.store(o_odd)
    meet()
    _, o_odd = add_warps(each, top_of, top, C, results_layout(C.ROWS, min(C.W, AT_ONCE)))
    return o_odd


@gluon.jit
def normalise(top, total, batch, kv_head, kv, terms, C: gl.constexpr):
    """(some, lse, l): whether a row has seen a key, and its lse; what its sums are multiplied by."""
    #@ consumer
    #: normalise -> lse, l    rows without a sum have seen no key: 0 and -inf
    features, numbers, _, v_factor = terms  #- launch
    R: gl.constexpr = C.ROWS
    some = total != 0
    lse = log_sum(top, total, some)
    factor = gl.full([R], 1.0, gl.float32, layout=total.type.layout) * v_factor
    of_row = kv_head + gl.minimum(kv, C.HEADS - 1)
    factor = head_scale(factor, features.v_heads, numbers.v_scale_batch, numbers.v_scale_head, batch, of_row)
    l = gl.where(some, factor / total, 0.0)
    return some, lse, l


@gluon.jit
def consume(item, smem, full, free, queries, terms, results, joined, C: gl.constexpr):
    """Warps, each with 16 keys of a block of its own: scores, softmax, output."""
    #@ consumer
    #: split -> o, top, total    its keys; the ring, which nobody reads any more, has room for the warps' sums
    batch, kv_head, split, lo, hi, num_keys = item
    out, o_strides, lse_out, lse_strides, splits = results  #- launch
    k_s, v_s = smem  #- launch
    places = k_s, v_s, k_s, v_s  #- launch
    unit = batch, kv_head, lo, hi, num_keys
    o, o_odd, top, total = attend_keys(unit, None, places, (full, free), queries, terms, 0, C)
    #: store    an empty split leaves its partial output alone
    COLS: gl.constexpr = min(C.W, AT_ONCE)
    NEXT: gl.constexpr = 1 if C.PAIRS else COLS  # columns until those that are put together next
    OUT: gl.constexpr = results_layout(C.ROWS, COLS)
    kv, token, head = rows_of(gl.arange(0, C.ROWS, layout=gl.SliceLayout(1, OUT)), C)
    sees = num_keys - C.TOKENS + 1 + token > lo
    some, lse, l = normalise(top, total, batch, kv_head, kv, terms, C)
    heads = (kv_head + kv) * C.GROUP + head
    at = lse_out + split.to(gl.int64) * lse_strides.split + batch * lse_strides.batch
    gl.store(at + token * lse_strides.token + heads * lse_strides.head, lse, mask=kv < C.HEADS)
    rows = out + split.to(gl.int64) * o_strides.split + batch * o_strides.batch
    rows = rows + token * o_strides.token + heads * o_strides.head
    writes = (kv < C.HEADS) & (sees | (splits == 1))
    cols = gl.arange(0, COLS, layout=gl.SliceLayout(0, OUT)) * (2 if C.PAIRS else 1)
    o = gl.where(some[:, None], o * l[:, None], 0.0)
    inside = writes[:, None]
    if C.COLUMNS:
        inside = inside & (cols < C.COLUMNS)[None, :]
    gl.store(rows[:, None] + cols[None, :], o.to(out.dtype.element_ty), mask=inside)
    if C.PAIRS or C.W > AT_ONCE:
        o_odd = other_columns(o_odd, places, top, C)
        o_odd = gl.where(some[:, None], o_odd * l[:, None], 0.0)
        cols += NEXT
        inside = writes[:, None]
        if C.COLUMNS:
            inside = inside & (cols < C.COLUMNS)[None, :]
        gl.store(rows[:, None] + cols[None, :], o_odd.to(out.dtype.element_ty), mask=inside)
    if C.PARTS:
        #: join    the splits, where the program is the last to arrive
        groups, counters, j_out, j_strides, j_lse = joined
        join(
            item, groups, splits, counters, (j_out, j_strides, j_lse), (out, o_strides, lse_out, lse_strides), C
        )


@gluon.jit
def join(item, groups, splits, counters, results, part_of, C: gl.constexpr):
    """The last program to arrive of those that share a sequence's keys takes all parts, in the order of the keys."""
    #@ joiner
    #: arrive -> last    behind all that the program has stored; the counter is 0 for the next launch
    batch, kv_head, _, _, _, num_keys = item
    out, o_strides, lse_out = results
    part, p_strides, part_lse, lse_strides = part_of
    PARTS: gl.constexpr = C.PARTS
    SEEN: gl.constexpr = C.HEADS * C.TOKENS * C.GROUP
    R: gl.constexpr = 4 if SEEN <= 4 else 8 if SEEN <= 8 else 16
    D: gl.constexpr = 2 * C.W if C.PAIRS else C.W
    TILE: gl.constexpr = gl.BlockedLayout([PARTS, 1, D // 32], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    WEIGHTS: gl.constexpr = gl.SliceLayout(2, TILE)  # [PARTS, R]
    SUMS: gl.constexpr = gl.SliceLayout(0, TILE)  # [R, D]
    counter = counters + batch * groups + kv_head // C.HEADS
    meet()
    last = gl.atomic_add(counter, 1, sem="acq_rel") == splits - 1
    if last:
        #: begin -> limit, top, total, o    the rows, and the keys that they see
        gl.store(counter, 0)
        kv, token, head = rows_of(gl.arange(0, R, layout=gl.SliceLayout(0, WEIGHTS)), C)
        there = kv < C.HEADS
        heads = (kv_head + kv) * C.GROUP + head
        limit = num_keys - C.TOKENS + 1 + token
        size = gl.cdiv(gl.cdiv(num_keys, splits), C.BT) * C.BT  # keys of a split
        part_rows = part + batch * p_strides.batch + token * p_strides.token + heads * p_strides.head
        lse_rows = batch * lse_strides.batch + token * lse_strides.token + heads * lse_strides.head
        n = gl.arange(0, PARTS, layout=gl.SliceLayout(1, WEIGHTS))
        cols = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
        top = gl.full([R], float("-inf"), gl.float32, layout=gl.SliceLayout(0, WEIGHTS))
        total = gl.zeros([R], gl.float32, layout=gl.SliceLayout(0, WEIGHTS))
        o = gl.zeros([R, D], gl.float32, layout=SUMS)
        for first in range(0, splits, C.PARTS):
            #: load_parts -> w, parts    of rows that see a key of the split; what others left behind is not read
            split = first + n
            has = (split[:, None] * size < limit[None, :]) & (split < splits)[:, None] & there[None, :]
            at = split.to(gl.int64)[:, None]
            w = gl.load((part_lse + lse_rows)[None, :] + at * lse_strides.split, mask=has, other=float("-inf"))
            rows = gl.expand_dims(part_rows[None, :] + at * p_strides.split, 2)
            inside = gl.expand_dims(has, 2)
            if C.COLUMNS:
                inside = inside & gl.expand_dims((cols < C.COLUMNS)[None, :], 0)
            parts = gl.load(rows + gl.expand_dims(cols[None, :], 0), mask=inside, other=0.0)
            #: add -> top, total, o    weights relative to the largest so far
            new = gl.maximum(top, gl.max(w, 0))
            shift = gl.where(new == float("-inf"), 0.0, new)
            w = gl.exp2((w - shift[None, :]) * LOG2E)
            alpha = gl.exp2((top - shift) * LOG2E)
            total = total * alpha + gl.sum(w, 0)
            alpha = gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))
            o = o * alpha[:, None] + gl.sum(parts * gl.expand_dims(w, 2), 0)
            top = new
        #: combine -> lse, o    weighted mean; rows without a sum have seen no key: 0 and -inf
        some = total != 0
        lse = gl.where(some, top + gl.log2(total) * LN2, float("-inf"))
        factor = gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))
        seen = gl.convert_layout(some, gl.SliceLayout(1, SUMS))
        o = gl.where(seen[:, None], o * factor[:, None], 0.0)
        #: store
        gl.store(lse_out + lse_rows, lse, mask=there)
        rows = out + batch * o_strides.batch + token * o_strides.token + heads * o_strides.head
        rows = gl.convert_layout(rows, gl.SliceLayout(1, SUMS))
        writes = gl.convert_layout(there, gl.SliceLayout(1, SUMS))[:, None]
        if C.COLUMNS:
            writes = writes & (cols < C.COLUMNS)[None, :]
        gl.store(rows[:, None] + cols[None, :], o.to(out.dtype.element_ty), mask=writes)
