"""The roles of the Hopper prefill kernel: a producer warp that brings tiles, a warpgroup that changes those of e4m3,
consumer warpgroups that multiply them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kvlab.attention.hopper.kernel import (
    NOTHING,
    PANEL,
    accumulator,
    adjust_by_row,
    factor_of,
    head_scale,
    meet,
    named_barrier,
    quad_sum,
    row_max,
)

from .hopper_capped import capped_weights, fixed_top
from .hopper_steps import (
    TURN,
    clean_rows,
    find_pages,
    find_tile,
    find_unit,
    gather_rows,
    hear,
    hear_unit,
    key_blocks,
    load_rows,
    mask_block,
    multiply_pv,
    multiply_qk,
    no_output,
    operand_p,
    program_items,
    query,
    receive,
    round_p,
    row_results,
    send,
    started,
    store_tile,
    store_unit,
    tell,
    tell_unit,
    times,
    transpose_tile,
    wait_mma,
    widen_tile,
)


@gluon.jit
def produce(dq, dk, dv, q_s, k_s, v_s, words, bars, where, sizes, C: gl.constexpr):
    """One warp takes tile after tile, tells the consumers, and brings Q, K and V."""
    #@ producer
    #: begin -> t, it, j    the first tile is the program's own; none loaded yet
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    seqs, table_batch, pages, work, room, lens_batch = where  #- launch
    _, _, table, _, taken = seqs  #- launch
    tiles, _, _, _, _, _, group, _, _, left, right = sizes  #- launch
    NC: gl.constexpr = C.NC
    ROWS: gl.constexpr = NC * C.BM
    it = 0  # K/V blocks so far: stage it % NR, phase it // NR
    j = 0  # tiles so far
    t = gl.program_id(0)
    if C.TOGETHER:
        begin, until, t, tiles = program_items(t, work, room, sizes, C)
    while t < tiles:
        #: find -> head, row, lo, hi    the rows of a tile, and the blocks of keys that they see
        if C.TOGETHER:
            batch, head, row, q_first, num_q, k_first, num_keys, lo, hi, part = find_unit(
                t, begin, until, seqs, work, room, lens_batch, sizes, C
            )
        else:
            batch, head, row, q_first, num_q, k_first, num_keys = find_tile(t, seqs, sizes, C)
            lo, hi = key_blocks(row, num_q, num_keys, left, right, C)
        q_batch = batch * 0 if C.RAGGED_Q else batch
        k_batch = batch * 0 if C.RAGGED_K else batch
        exists = (row + ROWS > 0) & (gl.maximum(row, 0) < num_q * C.PACK)
        pages_of = table + batch.to(gl.int64) * table_batch if C.PAGE else None
        if exists:
            #: tell -> slot    the consumers, who are done with the Q before in this buffer, which tile comes
            slot = j % C.NQ
            for w in gl.static_range(NC):
                mbarrier.wait(q_free.index(slot * NC + w), ((j // C.NQ) & 1) ^ 1)
            tell(words, slot, batch, head, row, q_first, num_q, num_keys, C)
            if C.TOGETHER:
                tell_unit(words, slot, lo, hi, part, C)
            meet()  # every lane has stored before one of them arrives at the barriers
            #: load_q -> j    DRAM -> shared memory, 64 rows for each consumer
            for w in gl.static_range(NC):
                u = slot * NC + w
                token = (row + w * C.BM) // C.PACK
                first = gl.minimum(gl.maximum(token, 1 - C.BM), num_q - 1)  # a box touches the tensor
                if C.ODD:  # consumers copy their rows
                    mbarrier.arrive(q_full.index(u), count=1)
                else:
                    load_rows(
                        dq, q_s, q_full.index(u), u, (q_batch,), q_first + first, head, 0, C.BM, C.BM, C.D, 0, C.ITEM
                    )
            j += 1
            for i in range(hi - lo):
                #: load_k -> b, key    from the last block to the first, as soon as the stage is free
                b = it % C.NR
                key = (hi - 1 - i) * C.BN
                found = find_pages(pages_of, k_batch, key, num_keys, pages, C)  # before the wait
                mbarrier.wait(k_free.index(b), ((it // C.NR) & 1) ^ 1)
                load_rows(
                    dk, k_s, k_full.index(b), b, found, k_first, head // group, key, C.BN, C.BOX, C.D, C.PAGE, C.STORED
                )
                #: load_v -> it    the V tile of the same keys
                mbarrier.wait(v_free.index(b), ((it // C.NR) & 1) ^ 1)
                load_rows(
                    dv, v_s, v_full.index(b), b, found, k_first, head // group, key, C.BN, C.BOX, C.DV, C.PAGE, C.STORED
                )
                it += 1
        #: take -> t    the next tile that no program has taken; in turn where all take the same time, or of the list
        if C.TOGETHER:
            t += 1
        elif C.EQUAL:
            t += gl.num_programs(0)
        else:
            t = gl.num_programs(0) + gl.atomic_add(taken, 1, sem="relaxed")
    #: end    no more tiles
    slot = j % C.NQ
    for w in gl.static_range(NC):
        mbarrier.wait(q_free.index(slot * NC + w), ((j // C.NQ) & 1) ^ 1)
    send(words, slot * C.WORDS, -1)
    for w in gl.static_range(NC):
        mbarrier.arrive(q_full.index(slot * NC + w), count=1)


@gluon.jit
def change(raw, changed, words, bars, changed_bars, sizes, C: gl.constexpr):
    """One warpgroup changes tiles of e4m3 on their way to the consumers: widens K and V for a q of 16 bits, or
    transposes V.
    """
    #@ changer
    #: begin -> it, j, batch    the first tile, -1: none
    raw_k, raw_v = raw  #- launch
    k_s, v_s = changed  #- launch
    q_full, q_free, raw_k_full, raw_k_free, raw_full, raw_free = bars
    k_full, k_free, v_full, v_free = changed_bars
    max_q, max_k, left, right = sizes
    NC: gl.constexpr = C.NC
    it = 0
    j = 0
    mbarrier.wait(q_full.index(0), 0)
    batch = receive(words, 0)
    while batch >= 0:
        #: hear -> slot, lo, hi, first    the tile; its words have been read; the first key that a row sees
        slot = j % C.NQ
        _, tile_row, _, num_q, num_keys = hear(words, slot, max_q, max_k, C)
        if C.TOGETHER:
            lo, hi, _ = hear_unit(words, slot, C)
        else:
            lo, hi = key_blocks(tile_row, num_q, num_keys, left, right, C)
        for w in gl.static_range(NC):
            mbarrier.arrive(q_free.index(slot * NC + w), count=1)
        first = num_keys - num_q - left
        for i in range(hi - lo):
            #: change -> r, b, it    as soon as the stage is free; V transposed with zeros where no row sees a key
            r = it % C.NR
            b = it % C.NB
            if C.STORED < C.ITEM:
                mbarrier.wait(raw_k_full.index(r), (it // C.NR) & 1)
                mbarrier.wait(k_free.index(b), ((it // C.NB) & 1) ^ 1)
                widen_tile(raw_k, k_s, r, b, C.BN, C.D)
                mbarrier.arrive(raw_k_free.index(r), count=1)
                mbarrier.arrive(k_full.index(b), count=1)
            mbarrier.wait(raw_full.index(r), (it // C.NR) & 1)
            mbarrier.wait(v_free.index(b), ((it // C.NB) & 1) ^ 1)
            if C.STORED < C.ITEM:
                widen_tile(raw_v, v_s, r, b, C.BN, C.DV)
            else:
                key = (hi - 1 - i) * C.BN
                if (C.WINDOW or C.CLEAN) and (first > key or num_keys < key + C.BN):
                    clean_rows(raw_v, b, first - key, num_keys - key, C.BN, C.DV // 2, C.BOX)
                transpose_tile(raw_v, v_s, b, C.BN, C.DV)
            mbarrier.arrive(raw_free.index(r), count=1)
            mbarrier.arrive(v_full.index(b), count=1)
            it += 1
        #: turn -> j, batch    the next tile
        j += 1
        mbarrier.wait(q_full.index(j % C.NQ * C.NC), (j // C.NQ) & 1)
        batch = receive(words, j % C.NQ * C.WORDS)


@gluon.jit
def consume(W: gl.constexpr, do, smem, words, bars, results, terms, sizes, C: gl.constexpr):
    """One warpgroup: BM rows of every tile. S = Q K^T of a block and O += P V of the one before it run together."""
    #@ consumer
    #: begin -> it, j, batch    the first tile, -1: none
    BM: gl.constexpr = C.BM
    BN: gl.constexpr = C.BN
    DV: gl.constexpr = C.DV
    NC: gl.constexpr = C.NC
    S_LAYOUT: gl.constexpr = accumulator(BN, 32 // C.ITEM)  #- layout
    O_LAYOUT: gl.constexpr = accumulator(PANEL if C.PRODUCTS > 1 else DV, 32 // C.ITEM)  #- layout
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=4 // C.ITEM)  #- layout
    SHIFT: gl.constexpr = 8.0 if C.ITEM == 1 else 0.0  # e4m3 has weights up to 2^8
    q_s, k_s, v_s, o_s, o_box = smem  #- launch
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    o_ptr, lse_ptr, o_strides, lse_batch, lse_token, _work = results  #- launch
    features, factors, numbers, group, queries = terms  #- launch
    inner, scale, unit, v_factor = factors  #- launch
    max_q, max_k, left, right = sizes
    it = 0
    j = 0
    if DV > C.COLUMNS and C.PRODUCTS > 1:  # what is in O's box behind the last column is stored nowhere
        o_s.index(W).store(gl.zeros([BM, DV], o_s.dtype, layout=accumulator(DV, 16)))
    if C.TURNS and W == NC - 1:
        named_barrier("arrive", TURN[0], 256)
    mbarrier.wait(q_full.index(W), 0)
    batch = receive(words, 0)
    while batch >= 0:
        #: hear -> slot, head, row, lo, hi, position, highest, factor    where the tile's rows stand, its head's scale
        slot = j % C.NQ
        u = slot * C.NC + W
        head, tile_row, q_first, num_q, num_keys = hear(words, slot, max_q, max_k, C)
        if C.TOGETHER:
            lo, hi, part = hear_unit(words, slot, C)
        else:
            lo, hi = key_blocks(tile_row, num_q, num_keys, left, right, C)
        row = tile_row + W * BM
        position = row // C.PACK + num_keys - num_q
        highest = position + BM // C.PACK - 1
        if C.ODD:
            highest = (row + BM - 1) // C.PACK + num_keys - num_q
        kv_head = head // group
        factor = factor_of(1.0, features, numbers, batch, kv_head, head)
        if C.SKIP:  # the last blocks, of which this warpgroup's rows see nothing
            own = gl.maximum(gl.cdiv(gl.minimum(position + BM + right, num_keys), BN), lo + 1)
            for _ in range(hi - own):
                b = it % C.NB
                mbarrier.wait(k_full.index(b), (it // C.NB) & 1)
                mbarrier.arrive(k_free.index(b), count=1)
                mbarrier.wait(v_full.index(b), (it // C.NB) & 1)
                mbarrier.arrive(v_free.index(b), count=1)
                if C.TURNS:
                    named_barrier("sync", TURN[W], 256)
                    named_barrier("arrive", TURN[(W + 1) % NC], 256)
                it += 1
            hi = own
        b = it % C.NB
        zero = gl.zeros([BM, BN], gl.float32, layout=S_LAYOUT)  #- layout; never read (use_acc=False)
        if C.ODD:
            gather_rows(q_s, u, queries, head, row, q_first, num_q, C)
        q = query(q_s, u, S_LAYOUT, C)
        if C.Q_REGISTERS and C.NQ == 1:  # the producer may fetch the next Q
            mbarrier.arrive(q_free.index(u), count=1)
        exists = True
        if C.TOGETHER and not C.TURNS:
            exists = row < num_q * C.PACK
        if exists:
            #: scores -> s    S = Q K^T of the last block
            mbarrier.wait(k_full.index(b), (it // C.NB) & 1)
            s = multiply_qk(q, k_s, b, zero, C.DEPTH)
            s = hopper.warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(k_free.index(b), count=1)
            #: mask -> s    the features of scores, keys that a row does not see
            s = adjust_by_row(s, factor, inner, numbers)
            if C.FIRST:
                s = mask_block(s, row, position, (hi - 1) * BN, num_keys, features, numbers, C, S_LAYOUT)
            #: softmax -> p, m, l, alpha, o    row maximum, exponentials, sums of each lane
            m = row_max(s, BM, BN, C.CHAINS)
            if C.FIXED:  # from here on m is in units of log2
                m = fixed_top(gl.maximum(m, -1.0) * scale, scale)
                e = gl.exp2(s * scale - m[:, None])
            else:
                if C.FIRST:
                    m = gl.maximum(m, NOTHING)  # a row may see nothing of this block: keep -inf - -inf away
                e = gl.exp2(s * scale - (m * scale - SHIFT)[:, None])  # scale holds log2(e)
            l = quad_sum(e, BM, BN, C.CHAINS)
            p = round_p(e, v_s.dtype, BM, BN, P_LAYOUT)
            alpha = gl.full([BM], 1.0, gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
            o = no_output(C)
            #: clean    V behind the end of the sequence; of an only block both ends together, below
            if C.ITEM == 2 and C.CLEAN and hi * BN > num_keys and (not C.WINDOW or hi - lo > 1):
                mbarrier.wait(v_full.index(b), (it // C.NB) & 1)
                clean_rows(v_s, b, 0, num_keys - (hi - 1) * BN, BN, DV, C.BOX)
            for i in range(1, hi - lo):
                #: apart -> o    O += P V of the block before, which ends before Q K^T of the next begins
                weights = operand_p(p, v_s.dtype, BM, BN, P_LAYOUT)  # before a product has started
                if C.APART:
                    mbarrier.wait(v_full.index(b), (it // C.NB) & 1)
                    if C.TURNS:
                        named_barrier("sync", TURN[W], 256)
                    o = multiply_pv(weights, v_s, b, o, C)
                    o = wait_mma(o, 0)
                    mbarrier.arrive(v_free.index(b), count=1)
                #: scores -> s    S = Q K^T of the next block, started
                it += 1
                b = it % C.NB
                key = (hi - 1 - i) * BN
                mbarrier.wait(k_full.index(b), (it // C.NB) & 1)
                if C.TURNS and not C.APART:
                    named_barrier("sync", TURN[W], 256)
                s = multiply_qk(q, k_s, b, zero, C.DEPTH)
                #: accumulate -> o    O += P V of the block before, started
                vb = (it - 1) % C.NB
                if not C.APART:
                    mbarrier.wait(v_full.index(vb), ((it - 1) // C.NB) & 1)
                    if C.EARLY:  # rescale while Q K^T runs
                        o = wait_mma(o, 1)
                        o = times(o, alpha)
                    o = multiply_pv(weights, v_s, vb, o, C)
                if C.TURNS:
                    named_barrier("arrive", TURN[(W + 1) % NC], 256)
                s = hopper.warpgroup_mma_wait(0 if C.APART else C.PRODUCTS, deps=(s,))
                mbarrier.arrive(k_free.index(b), count=1)
                #: mask -> s    the features of scores, keys that a row does not see
                if C.FIXED:  # the softmax caps them
                    s = s * factor
                else:
                    s = adjust_by_row(s, factor, inner, numbers)
                cut = (key + BN > gl.minimum(position + right + 1, num_keys)) | (key < highest - left)
                if C.MASKED and cut:
                    s = mask_block(s, row, position, key, num_keys, features, numbers, C, S_LAYOUT)
                #: softmax -> e, m, l, alpha    online: new row maximum, exponentials, sums of each lane
                if C.FIXED:
                    e = capped_weights(s, m, inner, scale)
                    l += quad_sum(e, BM, BN)
                else:
                    m_new = gl.maximum(m, row_max(s, BM, BN, C.CHAINS))
                    if C.LAZY:
                        m_new = gl.where((m_new - m) * scale > 8.0, m_new, m)  # weights up to 2^8
                    base = m_new * scale
                    alpha = gl.exp2(m * scale - base)
                    m = m_new
                    if C.HOLD == 1:
                        # True already. Its branch ends the basic block: ptxas moves the wait below up to it.
                        mbarrier.wait(v_full.index(vb), ((it - 1) // C.NB) & 1)
                    e = gl.exp2(s * scale - (base - SHIFT)[:, None])
                    lanes = quad_sum(e, BM, BN, C.CHAINS)
                    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, lanes.type.layout))[:, None] + lanes
                #: rescale -> p, o    P rounded, O *= alpha; V's stage is free
                if C.HOLD == 2:
                    # True already. Its branch ends the basic block: without it ptxas moves the wait below above the
                    # exponentials, and the softmax no longer overlaps with this warpgroup's own P V.
                    mbarrier.wait(v_full.index(vb), ((it - 1) // C.NB) & 1)
                if not C.APART:
                    o = wait_mma(o, 0)
                p = round_p(e, v_s.dtype, BM, BN, P_LAYOUT)  # where no product reads the registers
                if not C.APART:
                    mbarrier.arrive(v_free.index(vb), count=1)
                if not (C.EARLY or C.FIXED):
                    o = times(o, alpha, C.LAZY)
                o = started(o)  #- wait
            #: clean -> b    V before the first key that a row of the sequence sees
            b = it % C.NB
            first = num_keys - num_q - left - lo * BN
            end = num_keys - lo * BN
            if C.ITEM == 2 and C.WINDOW and (first > 0 or end < BN):
                mbarrier.wait(v_full.index(b), (it // C.NB) & 1)
                clean_rows(v_s, b, first, end, BN, DV, C.BOX)
            #: accumulate -> o    O += P V of the first block
            weights = operand_p(p, v_s.dtype, BM, BN, P_LAYOUT)
            if not (C.Q_REGISTERS and C.NQ == 1):
                mbarrier.arrive(q_free.index(u), count=1)
            mbarrier.wait(v_full.index(b), (it // C.NB) & 1)
            if C.EARLY:
                o = wait_mma(o, 0)
                o = times(o, alpha)
            o = multiply_pv(weights, v_s, b, o, C)
            #: normalise -> o, lse    rows without a visible key give 0 and -inf, or the sink's logit
            heads = head
            counts = None
            if C.TOGETHER and features.sinks is not None:
                heads = head + (row + gl.arange(0, BM, layout=gl.SliceLayout(1, S_LAYOUT))) % C.PACK
                counts = (heads * 0 + (part & 1)) > 0
            base = m if C.FIXED else m * scale - SHIFT
            lse, inv = row_results(base, l, features.sinks, heads, counts, unit, S_LAYOUT)
            if C.STORED == 1:
                v_scale = head_scale(
                    v_factor, features.v_heads, numbers.v_scale_batch, numbers.v_scale_head, batch, kv_head
                )
                inv = inv * v_scale
            o = wait_mma(o, 0)
            tma.store_wait(0)  # the tile before has left its buffer; the warps meet behind it
            mbarrier.arrive(v_free.index(b), count=1)
            o = times(o, inv)
            #: store    registers -> shared memory -> DRAM; where rows do not exist straight to DRAM
            if C.TOGETHER:
                store_unit(W, o, lse, (batch, head, row, q_first, num_q, part), do, o_s, o_box, results, C)
            else:
                rows = row + gl.arange(0, BM, layout=gl.SliceLayout(1, S_LAYOUT))
                lse_at = lse_ptr + batch.to(gl.int64) * lse_batch * (1 - C.RAGGED_Q) + head  #- address
                # 32 bits hold these offsets: 2^31 rows of O take 256 GiB.
                gl.store(lse_at + (q_first + rows) * lse_token, lse, mask=(rows >= 0) & (rows < num_q))
                if (row < 0) | (row + BM > num_q):  # TMA stores no part of a box, nor to negative coordinates
                    o_at = o_ptr + batch.to(gl.int64) * o_strides.batch * (1 - C.RAGGED_Q)  #- address
                    o_at += head * o_strides.head  #- address
                    for c in gl.static_range(len(o)):
                        r = row + gl.arange(0, BM, layout=gl.SliceLayout(1, o[c].type.layout))
                        d = gl.arange(0, o[c].shape[1], layout=gl.SliceLayout(0, o[c].type.layout)) + c * PANEL
                        at = (q_first + r).to(gl.int64)[:, None] * o_strides.token + d[None, :]  #- address
                        is_there = ((r >= 0) & (r < num_q))[:, None]
                        if C.COLUMNS < DV:
                            is_there = is_there & (d < C.COLUMNS)[None, :]
                        gl.store(o_at + at, o[c].to(o_s.dtype), mask=is_there)
                else:
                    o_page = batch * 0 if C.RAGGED_Q else batch
                    store_tile(W, o, o_page, q_first + row, head, do, o_s, o_box, C)
            it += 1
        else:
            #: give back -> it    a unit of which this warpgroup has no rows
            if not (C.Q_REGISTERS and C.NQ == 1):
                mbarrier.arrive(q_free.index(u), count=1)
            for _ in range(hi - lo):
                b = it % C.NB
                mbarrier.wait(k_full.index(b), (it // C.NB) & 1)
                mbarrier.arrive(k_free.index(b), count=1)
                mbarrier.wait(v_full.index(b), (it // C.NB) & 1)
                mbarrier.arrive(v_free.index(b), count=1)
                it += 1
        #: turn -> j, batch    the next tile
        j += 1
        mbarrier.wait(q_full.index(j % C.NQ * C.NC + W), (j // C.NQ) & 1)
        batch = receive(words, j % C.NQ * C.WORDS)
    #: end    the last tile leaves
    if C.TURNS and W == 0:
        named_barrier("sync", TURN[0], 256)
    tma.store_wait(0)
