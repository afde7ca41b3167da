"""The roles of the Hopper MLA decode kernel: a producer warp, or two producers of four warps where rows have scales, a
leader and a follower of one warpgroup each.

The output of 64 rows x 512 columns fills 128 registers of every thread of two warpgroups. The leader multiplies Q K^T
and does the softmax; both multiply P by their half of V.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kvlab.attention.hopper.kernel import (
    LN2,
    NOTHING,
    PANEL,
    accumulator,
    adjust_by_row,
    factor_of,
    find_pages,
    named_barrier,
    operand,
    quad_sum,
    softmax,
)

from .hopper_steps import (
    AHEAD,
    GATHER,
    LATENTS,
    P_FULL,
    PARTS,
    ROPE,
    S_DONE,
    clean_rows,
    expect_keys,
    expect_pages,
    expect_rows,
    find_item,
    find_items,
    find_keys,
    find_place,
    find_rows,
    find_slots,
    gather,
    load_keys,
    load_latents,
    load_queries,
    mask_absent,
    mask_rows,
    pairs,
    put_latents,
    rope_of,
    send,
    start_scores,
    store_half,
    store_lse,
    tell,
)


@gluon.jit
def produce(brings, C: gl.constexpr):
    """One warp brings Q and the latent rows of item after item; four warps those of a list."""
    #@ producer
    #: begin -> it, turn    nothing loaded yet
    descs, boxes, bars, cache, entries, items, keys = brings  #- launch
    first, last, step = find_items(items, keys, C)  #- launch
    dq, dk, dk_rope = descs  #- launch
    q_box, q_rope_box, k_box, k_rope_box = boxes  #- launch
    q_full, q_free, l_full, l_free, r_full, r_free = bars  #- launch
    HALF: gl.constexpr = C.DV // 2 // PANEL  #- address
    if C.LISTED:
        k_s = operand(k_box, C.BN, C.DV // 2, C.NB * 2)  #- address
        k_rope_s = operand(k_rope_box, C.BN, C.DR, C.NB)  #- address
    else:
        kv, kv_page = cache  #- launch
    table, table_batch, columns, pages = entries  #- launch
    it = 0  # blocks so far: stage it % NB, phase it // NB
    turn = 0  # parity of the items so far
    for t in range(first, last, step):
        #: find -> batch, split, token, head, length    the rows of an item; its length and pages are on their way
        batch, split, token, head, length = find_place(t, keys, C)
        pages_of = table + batch.to(gl.int64) * table_batch  #- address
        expect_pages(pages_of, columns)  #- instruction
        #: load_q -> turn    DRAM -> shared memory
        mbarrier.wait(q_free, turn ^ 1)
        load_queries(dq, q_box, q_rope_box, q_full, batch, token, head, C)
        turn ^= 1
        #: keys -> lo, num_keys, blocks    once the length is here
        lo, num_keys, blocks = find_keys(split, length, keys, C)
        for i in range(blocks):
            #: load_left -> b, key    columns of the leader's half of V, and those of rope
            b = it % C.NB
            key = lo + i * C.BN
            row = key % C.PAGE if C.BOX == C.BN else 0
            if C.LISTED:
                place = key + gl.arange(0, C.BN, layout=gl.SliceLayout(1, GATHER))  #- address
                rows, there = find_rows(cache, find_slots(pages_of, place, num_keys, C), pages, C)
                mbarrier.wait(l_free.index(b), ((it // C.NB) & 1) ^ 1)
                gather(k_s.index(2 * b), rows, there, 0)
                gather(k_rope_s.index(b), rows, there, C.DV)
                tell(cache, b, there)
                async_copy.mbarrier_arrive(l_full.index(b), increment_count=False)
                mbarrier.arrive(l_full.index(b), count=1)
            else:
                found = find_pages(pages_of, key, num_keys, pages, C.BN, C.BOX, C.PAGE)
                mbarrier.wait(l_free.index(b), ((it // C.NB) & 1) ^ 1)
                mbarrier.expect(l_full.index(b), C.BN * (C.DV // 2 + C.DR) * 2)
                load_keys(dk, k_box, l_full.index(b), b * 2 * HALF, 0, found, row, HALF, C)
                load_keys(dk_rope, k_rope_box, l_full.index(b), b, 0, found, row, 1, C)
            #: load_right -> it    columns of the follower's half
            mbarrier.wait(r_free.index(b), ((it // C.NB) & 1) ^ 1)
            if C.LISTED:
                gather(k_s.index(2 * b + 1), rows, there, C.DV // 2)
                async_copy.mbarrier_arrive(r_full.index(b), increment_count=False)
            else:
                mbarrier.expect(r_full.index(b), C.BN * (C.DV // 2) * 2)
                load_keys(dk, k_box, r_full.index(b), (b * 2 + 1) * HALF, C.DV // 2, found, row, HALF, C)
                if C.LATE and i + 1 < blocks:
                    expect_keys(kv, kv_page, pages_of, key + C.BN, num_keys, C)  #- instruction
            it += 1


@gluon.jit
def produce_half(brings, half: gl.constexpr, C: gl.constexpr):
    """Four warps bring half the latents of rows with scales, multiplied out; those of the left half Q and rope too."""
    #@ half
    #: begin -> it, turn    nothing loaded yet
    descs, boxes, bars, cache, entries, items, keys = brings  #- launch
    first, last, step = find_items(items, keys, C)  #- launch
    dq, _, _ = descs  #- launch
    q_box, q_rope_box, k_box, k_rope_box = boxes  #- launch
    q_full, q_free, l_full, l_free, r_full, r_free = bars  #- launch
    k_rope_s = operand(k_rope_box, C.BN, C.DR, C.NB)  #- address
    table, table_batch, columns, pages = entries  #- launch
    LAYOUT: gl.constexpr = LATENTS if half else ROPE  #- layout
    if half:
        full = r_full  #- launch
        free = r_free  #- launch
    else:
        full = l_full  #- launch
        free = l_free  #- launch
    it = 0
    turn = 0
    for t in range(first, last, step):
        #: find -> batch, split, token, head, length    the rows of an item; its length is on its way
        batch, split, token, head, length = find_place(t, keys, C)
        pages_of = table + batch.to(gl.int64) * table_batch  #- address
        #: load_q -> turn    DRAM -> shared memory
        if not half:
            expect_pages(pages_of, columns)  #- instruction
            mbarrier.wait(q_free, turn ^ 1)
            load_queries(dq, q_box, q_rope_box, q_full, batch, token, head, C)
        turn ^= 1
        #: keys -> lo, num_keys, blocks, rows, there    once the length is here; the first rows
        lo, num_keys, blocks = find_keys(split, length, keys, C)
        of_block = gl.arange(0, C.BN, layout=gl.SliceLayout(1, LAYOUT))  #- address
        rows, there = find_rows(cache, find_slots(pages_of, lo + of_block, num_keys, C), pages, C)
        for i in range(blocks):
            #: load -> b, slot, one, other    half a block into registers; where the next one lies
            b = it % C.NB
            slot = find_slots(pages_of, lo + (i + 1) * C.BN + of_block, num_keys, C)
            one = load_latents(rows, there, 2 * half, C)
            other = load_latents(rows, there, 2 * half + 1, C)
            #: put -> rows, there, it    multiplied out, once the stage is free
            mbarrier.wait(free.index(b), ((it // C.NB) & 1) ^ 1)
            if not half:
                gather(k_rope_s.index(b), rope_of(rows, k_rope_s.dtype, C), there, 0)
                if C.LISTED:
                    tell(cache, b, there)
            put_latents(k_box, 4 * b + 2 * half, one, C)
            rows, there = find_rows(cache, slot, pages, C)
            put_latents(k_box, 4 * b + 2 * half + 1, other, C)
            if not half:
                async_copy.mbarrier_arrive(full.index(b), increment_count=False)
            mbarrier.arrive(full.index(b), count=1)
            it += 1


@gluon.jit
def lead(smem, bars, outputs, results, terms, items, keys, C: gl.constexpr):
    """One warpgroup: scores, softmax, and the left half of the output."""
    #@ leader
    #: begin -> it, turn    the first item
    first, last, step = find_items(items, keys, C)  #- launch
    BM: gl.constexpr = C.BM
    BN: gl.constexpr = C.BN
    COLS: gl.constexpr = C.DV // 2  #- layout
    S_LAYOUT: gl.constexpr = accumulator(BN, 16)  #- layout
    O_LAYOUT: gl.constexpr = accumulator(C.COLUMNS, 16)  #- layout
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)  #- layout
    q_s, q_rope_s, k_s, k_rope_s, p_s, rows_s, k_box = smem  #- launch
    q_full, q_free, l_full, l_free, r_full, r_free = bars  #- launch
    _, _, _, heads, tokens = results  #- launch
    features, numbers, scale = terms  #- launch
    DTYPE: gl.constexpr = q_s.dtype  #- launch
    it = 0
    turn = 0
    for t in range(first, last, step):
        #: find -> batch, split, token, head, lo, blocks, limit, factor    rows, keys, how many the first token sees
        batch, split, token, head, lo, num_keys, blocks = find_item(t, keys, C)
        limit = num_keys - tokens + 1
        row = gl.arange(0, BM, layout=gl.SliceLayout(1, S_LAYOUT))
        factor = factor_of(1.0, features, numbers, batch, 0, gl.minimum(head + row % C.HB, heads - 1)[:, None])
        #: scores -> s    S = Q K^T of the first block
        zero = gl.zeros([BM, BN], gl.float32, layout=S_LAYOUT)  # never read (use_acc=False)  #- instruction
        mbarrier.wait(q_full, turn)
        s = start_scores(q_s, q_rope_s, k_s, k_rope_s, l_full, r_full, it % C.NB, (it // C.NB) & 1, zero, C)
        m = gl.full([BM], NOTHING, gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        l = quad_sum(zero, BM, BN)
        o = gl.zeros([BM, COLS], gl.float32, layout=O_LAYOUT)
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
        for i in range(blocks - 1):
            #: mask -> s    the features of scores, keys that a row does not see
            key = lo + i * BN
            s = adjust_by_row(s, factor, 0.0, numbers)
            if C.LISTED:
                s = mask_absent(s, rows_s, it % C.NB)
            elif C.MASKED and key + BN > limit:
                s = mask_rows(s, token, key, limit, tokens, features, numbers, C, S_LAYOUT)
            #: softmax -> p, m, l, alpha    online: new row maximum, exponentials, sums of each lane
            e, m, l, alpha = softmax(s, m, l, scale, BM, BN)
            p = e.to(DTYPE)
            #: accumulate -> o    O = alpha O + P V, started
            o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            b = it % C.NB
            o = hopper.warpgroup_mma(gl.convert_layout(p, P_LAYOUT), k_s.index(2 * b), o, is_async=True)
            #: send    P and alpha to the follower, who is done with those of the block before
            before = it + C.NB - 1
            mbarrier.wait(r_free.index(before % C.NB), ((before // C.NB) & 1) ^ 1)
            send(p_s, rows_s, p, alpha)
            #: scores -> s, it    S = Q K^T of the next block runs behind it
            if C.SCALED:  # whose producers wait for nothing but free stages
                o = hopper.warpgroup_mma_wait(0, deps=(o,))
                mbarrier.arrive(l_free.index(b), count=1)
            it += 1
            s = start_scores(q_s, q_rope_s, k_s, k_rope_s, l_full, r_full, it % C.NB, (it // C.NB) & 1, zero, C)
            if not C.SCALED:
                o = hopper.warpgroup_mma_wait(PARTS, deps=(o,))
                mbarrier.arrive(l_free.index(b), count=1)
            s = hopper.warpgroup_mma_wait(0, deps=(s,))
            if C.LATE:
                named_barrier("arrive", S_DONE, 256)
        #: last    no more Q K^T: the producer may fetch the next Q
        mbarrier.arrive(q_free, count=1)
        #: mask -> s    the features of scores, keys that a row does not see
        key = lo + (blocks - 1) * BN
        s = adjust_by_row(s, factor, 0.0, numbers)
        if C.LISTED:
            s = mask_absent(s, rows_s, it % C.NB)
        elif key + BN > limit:
            s = mask_rows(s, token, key, limit, tokens, features, numbers, C, S_LAYOUT)
        #: softmax -> p, m, l, alpha, total, inv    of the last block; a row that saw no key gives 0
        e, m, l, alpha = softmax(s, m, l, scale, BM, BN)
        p = e.to(DTYPE)
        total = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, S_LAYOUT))
        inv = gl.where(total == 0, 0.0, 1.0 / total)
        #: accumulate -> o    O = alpha O + P V of the last block, started
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        b = it % C.NB
        if key + BN > num_keys:
            clean_rows(k_s, 2 * b, gl.maximum(num_keys - key, 0), C)
        o = hopper.warpgroup_mma(gl.convert_layout(p, P_LAYOUT), k_s.index(2 * b), o, is_async=True)
        #: send    P, alpha and 1 / l to the follower
        before = it + C.NB - 1
        mbarrier.wait(r_free.index(before % C.NB), ((before // C.NB) & 1) ^ 1)
        rows_s.index(1).store(inv)
        send(p_s, rows_s, p, alpha)
        #: normalise -> o, lse    natural logarithm
        lse = gl.where(total == 0, float("-inf"), (m * scale + gl.log2(total)) * LN2)
        o = hopper.warpgroup_mma_wait(0, deps=(o,))
        o = o * gl.convert_layout(inv, gl.SliceLayout(1, O_LAYOUT))[:, None]
        #: store    registers -> DRAM; an empty split leaves its partial output alone
        store_lse(results, lse, split, batch, token, head, keys, C)
        store_half(outputs, o, k_box, b, 0, split, batch, token, head, lo < num_keys, keys, C)
        mbarrier.arrive(l_free.index(b), count=1)
        #: next -> it, turn    the next item
        it += 1
        turn ^= 1


@gluon.jit
def follow(smem, r_full, r_free, outputs, cache, entries, items, keys, C: gl.constexpr):
    """The other warpgroup: the right half of the output, with P, alpha and 1 / l from the leader. It brings rows with
    scales, those of blocks to come, into L2.
    """
    #@ follower
    #: begin -> it    the first item
    first, last, step = find_items(items, keys, C)  #- launch
    BM: gl.constexpr = C.BM
    COLS: gl.constexpr = C.DV // 2  #- layout
    O_LAYOUT: gl.constexpr = accumulator(C.COLUMNS, 16)  #- layout
    k_s, p_s, rows_s, k_box = smem  #- launch
    table, table_batch, _, pages = entries  #- launch
    it = 0
    for t in range(first, last, step):
        #: find -> batch, split, token, head, lo, blocks, o    rows and keys
        batch, split, token, head, lo, num_keys, blocks = find_item(t, keys, C)
        o = gl.zeros([BM, COLS], gl.float32, layout=O_LAYOUT)
        if C.SCALED:
            pages_of = table + batch.to(gl.int64) * table_batch  #- address
            far = lo + C.BN + pairs(C)  #- address
            for _ in gl.static_range(1, AHEAD):  #- instruction
                expect_rows(cache, find_slots(pages_of, far, num_keys, C), pages, C)  #- instruction
                far += C.BN  #- instruction
        for _ in range(blocks - 1):
            #: receive -> b, alpha    P and alpha of the next block
            b = it % C.NB
            if C.SCALED:
                slot = find_slots(pages_of, far, num_keys, C)  #- instruction
                far += C.BN  #- instruction
            named_barrier("sync", P_FULL, 256)
            alpha = rows_s.index(0).load(gl.SliceLayout(1, O_LAYOUT))
            #: accumulate -> o, it    O = alpha O + P V, P from shared memory; late: beside the leader's softmax
            o = o * alpha[:, None]
            mbarrier.wait(r_full.index(b), (it // C.NB) & 1)
            if C.RIGHT_COPIES > 0:
                fence_async_shared()
            if C.LATE:
                named_barrier("sync", S_DONE, 256)
            o = hopper.warpgroup_mma(p_s, k_s.index(2 * b + 1), o, is_async=True)
            o = hopper.warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(r_free.index(b), count=1)
            if C.SCALED:
                expect_rows(cache, slot, pages, C)  #- instruction
            it += 1
        #: receive -> b, alpha, inv    of the last block, and 1 / l
        b = it % C.NB
        named_barrier("sync", P_FULL, 256)
        alpha = rows_s.index(0).load(gl.SliceLayout(1, O_LAYOUT))
        inv = rows_s.index(1).load(gl.SliceLayout(1, O_LAYOUT))
        #: accumulate -> o    O = alpha O + P V of the last block
        o = o * alpha[:, None]
        mbarrier.wait(r_full.index(b), (it // C.NB) & 1)
        if C.RIGHT_COPIES > 0:
            fence_async_shared()
        key = lo + (blocks - 1) * C.BN
        if key + C.BN > num_keys:
            clean_rows(k_s, 2 * b + 1, gl.maximum(num_keys - key, 0), C)
        o = hopper.warpgroup_mma(p_s, k_s.index(2 * b + 1), o, is_async=True)
        o = hopper.warpgroup_mma_wait(0, deps=(o,))
        o = o * inv[:, None]
        #: store    registers -> DRAM; an empty split leaves its partial output alone
        store_half(outputs, o, k_box, b, 1, split, batch, token, head, lo < num_keys, keys, C)
        mbarrier.arrive(r_free.index(b), count=1)
        #: next -> it    the next item
        it += 1
