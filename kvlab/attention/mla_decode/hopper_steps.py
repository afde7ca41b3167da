"""The steps of the Hopper MLA decode kernel that its partitions call: which keys, boxes, products, mask, results."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kvlab.attention.hopper.kernel import (
    PANEL,
    hide,
    key_count,
    load_box,
    meet,
    named_barrier,
    operand,
    split_bounds,
    store_box,
    view_as,
)
from kvlab.attention.schedule.kernel import team_items
from kvlab.triton_support.twins import compiled

globals().update(compiled(gluon.jit, gl, team_items.fn))
K_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
PARTS = gl.constexpr(3)  # products of Q K^T
S_DONE = gl.constexpr(9)  # that at which it waits for the end of the next Q K^T, where it is late
GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes a thread of its four rows
# As bits of register, lane and warp: four lanes have 64 latents of a row, 16 each, so that a thread has two rows and
# stores to swizzled panels meet in no bank. [keys, words of four latents of a scale], [keys, columns of rope].
LATENTS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [0, 16], [32, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [64, 32],
))
ROPE = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [0, 4], [0, 32], [32, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [],
    [64, 64],
))
WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))  # two values of 16 bits each
AHEAD = gl.constexpr(4)  # blocks from that which the follower is done with to that whose rows it brings into L2
P_FULL = gl.constexpr(8)  # the barrier at which the follower waits for the leader's P; Triton's are the first ones
ROWS_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def find_team(keys, C: gl.constexpr):
    """Places of this program's team in a work list, and the items that lie there."""
    _, _, work, sizes, _, _ = keys
    team = gl.program_id(0) // sizes.lanes
    return team_items(work, work + sizes.starts, work + sizes.firsts, team, C.OVERHEAD)


@gluon.jit
def find_items(items, keys, C: gl.constexpr):
    """First item of this program, the end of its items, and from one to the next."""
    if C.WALK:
        _, _, first, last = find_team(keys, C)
        step = 1
    else:
        first = gl.program_id(0)
        last = items
        step = gl.num_programs(0)
    return first, last, step


@gluon.jit
def find_part(t, keys, C: gl.constexpr):
    """Tell whether all of an item of a work list is this program's, and where its partial results go otherwise."""
    _, _, work, sizes, _, _ = keys
    begin, until, _, _ = find_team(keys, C)
    start = gl.load(work + sizes.starts + t) + C.OVERHEAD
    stop = gl.load(work + sizes.starts + t + 1)
    place = 2 * gl.program_id(0) + (start > begin).to(gl.int32)
    return (begin <= start) & (stop <= until), place.to(gl.int64) * C.BM


@gluon.jit
def find_item(t, keys, C: gl.constexpr):
    """Item number -> its sequence and split, first token and head of its rows, first key, all keys, blocks of keys."""
    batch, split, token, head, length = find_place(t, keys, C)
    lo, num_keys, blocks = find_keys(split, length, keys, C)
    return batch, split, token, head, lo, num_keys, blocks


@gluon.jit
def find_place(t, keys, C: gl.constexpr):
    """Item number -> its sequence and split, first token and head of its rows; and the sequence's length, on its way.

    The row tiles of a sequence are neighbours: they read the same keys. In a work list the split is the item's number.
    """
    if C.WALK:
        lens, lens_stride, work, sizes, _, heads = keys
        batch = gl.load(work + sizes.sequences + t)
        row = (gl.load(work + sizes.tiles + t) * sizes.lanes + gl.program_id(0) % sizes.lanes) * C.BM
        split = t
        token = row // heads
        head = row % heads
    else:
        lens, lens_stride, row_tiles, head_tiles, splits, max_keys = keys
        tile = t % row_tiles
        split = t // row_tiles % splits
        batch = t // (row_tiles * splits)
        token = tile // head_tiles * C.TB
        head = tile % head_tiles * C.HB
    if C.LISTED:
        length = max_keys
    else:
        length = gl.load(lens + batch * lens_stride)
    return batch, split, token, head, length


@gluon.jit
def find_keys(split, length, keys, C: gl.constexpr):
    """First key of a split, all keys, and blocks of keys. A split is a number of whole blocks. Without keys there is
    one block, of which no row sees anything.
    """
    if C.WALK:
        _, _, work, sizes, max_keys, _ = keys
        begin, until, _, _ = find_team(keys, C)
        start = gl.load(work + sizes.starts + split) + C.OVERHEAD
        stop = gl.load(work + sizes.starts + split + 1)
        num_keys = key_count(length, max_keys)
        lo = (gl.maximum(begin, start) - start) * C.BN
        hi = gl.maximum(gl.minimum((gl.minimum(until, stop) - start) * C.BN, num_keys), lo)
    else:
        _, _, _, _, splits, max_keys = keys
        num_keys = key_count(length, max_keys)
        lo, hi = split_bounds(split, splits, num_keys, C.BN)
    return lo, num_keys, gl.maximum(gl.cdiv(hi - lo, C.BN), 1)


@gluon.jit
def expect_pages(table, columns):
    """Bring the numbers of a sequence's first pages, 128 bytes of them a lane, into L2."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    STEP: gl.constexpr = 1024 // table.dtype.element_ty.primitive_bitwidth
    at = table + gl.minimum(lane * STEP, columns - 1)
    gl.inline_asm_elementwise(
        "{.reg .pred p; setp.gt.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0;}", "=r,l,r,~{memory}",
        [at, lane * 0 + columns], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def load_queries(dq, q_box, q_rope_box, bar, batch, token, head, C: gl.constexpr):
    """The rows of an item: TB tokens x HB heads, panel by panel, all on one mbarrier. Absent ones arrive as zeros."""
    mbarrier.expect(bar, C.BM * (C.DV + C.DR) * 2)
    for c in gl.static_range(C.DV // PANEL):
        load_box(dq, [batch, token, head, c * PANEL], bar, q_box.index(c))
    load_box(dq, [batch, token, head, C.DV], bar, q_rope_box.index(0))


@gluon.jit
def load_keys(desc, boxes, bar, at, col, pages, row, PANELS: gl.constexpr, C: gl.constexpr):
    """Columns from ``col`` on of a block's keys: boxes of BOX keys and one panel, to the panels from ``at`` on."""
    BOXES: gl.constexpr = C.BN // C.BOX
    for j in gl.static_range(BOXES):
        for c in gl.static_range(PANELS):
            load_box(desc, [pages[j], row, col + c * PANEL], bar, boxes.index((at + c) * BOXES + j))


@gluon.jit
def expect_keys(kv, kv_page, table, key, num_keys, C: gl.constexpr):
    """Bring the rows of a block, which lie one after the other in a page, into L2: a lane for each box."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    token = key + lane * C.BOX
    there = (lane < C.BN // C.BOX) & (token < num_keys)
    page = gl.load(table + token // C.PAGE, mask=there, other=0).to(gl.int64)
    at = kv + page * kv_page + token % C.PAGE * (C.DV + C.DR)
    gl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0;}",
        "=r,l,r,r", [at, there.to(gl.int32), gl.full_like(lane, C.BOX * (C.DV + C.DR) * 2)], dtype=gl.int32,
        is_pure=False, pack=1,
    )


@gluon.jit
def find_slots(table, place, num_keys, C: gl.constexpr):
    """The slots of the cache that a list names at its places, or where the keys of a sequence are; behind them -1."""
    inside = place < num_keys
    if C.LISTED:
        slot = gl.load(table + place, mask=inside, other=-1)
    else:
        page = gl.load(table + place // C.PAGE, mask=inside, other=0).to(gl.int64)
        slot = gl.where(inside, page * C.PAGE + place % C.PAGE, -1)
    return slot


@gluon.jit
def find_rows(cache, slot, pages, C: gl.constexpr):
    """Addresses of the rows in these slots, and whether there are such.

    ``cache``: its address, and the elements between pages and between tokens, multiples of 16 bytes.
    """
    kv, kv_page, kv_token, _ = cache
    there = (slot >= 0) & (slot < pages.to(gl.int64) * C.PAGE)
    page = (slot // C.PAGE).to(gl.int64)
    token = (slot % C.PAGE).to(gl.int64)
    VECTOR: gl.constexpr = 128 // kv.dtype.element_ty.primitive_bitwidth
    return kv + gl.multiple_of(page * kv_page + token * kv_token, [VECTOR]), there


@gluon.jit
def gather(tile, rows, there, col):
    """Columns from ``col`` on of a block's rows, 16 bytes a thread and copy. Absent ones arrive as zeros."""
    c = col + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, there.type.layout.parent))
    async_copy.async_copy_global_to_shared(tile, rows[:, None] + c[None, :], mask=there[:, None])


@gluon.jit
def load_latents(rows, there, n: gl.constexpr, C: gl.constexpr):
    """The ``n``-th 128 latents of a block's rows, e4m3, as words of four ``[BN, 32]``, and what they are multiplied by.
    Absent ones are zeros.
    """
    FLAT: gl.constexpr = gl.SliceLayout(1, LATENTS)  # the same registers
    rows = gl.convert_layout(rows, FLAT)
    there = gl.convert_layout(there, FLAT)
    scales = (rows + C.DV).to(gl.pointer_type(gl.float32), bitcast=True)
    by_row = gl.load(scales + n, mask=there, other=0.0)
    words = (rows + n * 128).to(gl.pointer_type(gl.int32), bitcast=True)
    c = gl.arange(0, 32, layout=gl.SliceLayout(0, LATENTS))
    return gl.load(words[:, None] + c[None, :], mask=there[:, None], other=0), by_row


@gluon.jit
def put_latents(k_box, n, latents, C: gl.constexpr):
    """Latents times what they are multiplied by, bfloat16, to the ``n``-th 128 columns of the stages, where wgmma reads
    them. A word stays one register until it is changed.
    """
    words, by_row = latents
    low, high = gl.inline_asm_elementwise(
        "{.reg .b16 l, h, a, b, c, d; .reg .b32 x, y; .reg .f32 p, q, r, s; mov.b32 {l, h}, $2; "
        "cvt.rn.f16x2.e4m3x2 x, l; cvt.rn.f16x2.e4m3x2 y, h; mov.b32 {a, b}, x; mov.b32 {c, d}, y; "
        "cvt.f32.f16 p, a; cvt.f32.f16 q, b; cvt.f32.f16 r, c; cvt.f32.f16 s, d; "
        "mul.f32 p, p, $3; mul.f32 q, q, $3; mul.f32 r, r, $3; mul.f32 s, s, $3; "
        "cvt.rn.bf16x2.f32 $0, q, p; cvt.rn.bf16x2.f32 $1, s, r;}", "=r,=r,r,r",
        [words, by_row[:, None].to(gl.int32, bitcast=True)], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )
    SHAPE: gl.constexpr = [4 * C.NB, C.BN, 64]
    tile = view_as(k_box, gl.int32, SHAPE, WORDS).index(n)
    tile.store(gl.join(low, high).reshape([C.BN, 64]))
    fence_async_shared()


@gluon.jit
def rope_of(rows, dtype: gl.constexpr, C: gl.constexpr):
    """Addresses of the rope parts of rows with scales."""
    SKIP: gl.constexpr = C.DV + C.DV // 32
    return (rows + SKIP).to(gl.pointer_type(dtype), bitcast=True)


@gluon.jit
def pairs(C: gl.constexpr):
    """A number for each key of a block, two lanes a key."""
    return gl.arange(0, 2 * C.BN, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) // 2


@gluon.jit
def expect_rows(cache, slot, pages, C: gl.constexpr):
    """Bring the rows of these slots, two lanes a slot, into L2: lines of 128 bytes, with the last 16 bytes of a row."""
    row, there = find_rows(cache, slot, pages, C)
    lane = gl.arange(0, 2 * C.BN, layout=slot.type.layout)
    gl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; @p prefetch.global.L2 [$1 + 128]; "
        "@p prefetch.global.L2 [$1 + 256]; mov.b32 $0, 0;}", "=r,l,r,~{memory}",
        [row + lane % 2 * 384, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def tell(cache, b, there):
    """Tell the leader which rows of stage b are there."""
    _, _, _, rows_s = cache
    rows_s.index(2 + b).store(there.to(gl.float32))


@gluon.jit
def start_scores(q_s, q_rope_s, k_s, k_rope_s, l_full, r_full, b, phase, zero, C: gl.constexpr):
    """S = Q K^T of stage b, started in PARTS as they arrive: left half, rope, right half."""
    mbarrier.wait(l_full.index(b), phase)
    if C.LEFT_COPIES > 0:
        fence_async_shared()  # rows come by ordinary copies
    s = hopper.warpgroup_mma(q_s.index(0), k_s.index(2 * b).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = hopper.warpgroup_mma(q_rope_s.index(0), k_rope_s.index(b).permute((1, 0)), s, is_async=True)
    mbarrier.wait(r_full.index(b), phase)
    if C.RIGHT_COPIES > 0:
        fence_async_shared()
    return hopper.warpgroup_mma(q_s.index(1), k_s.index(2 * b + 1).permute((1, 0)), s, is_async=True)


@gluon.jit
def mask_rows(s, token, key, first_limit, tokens, features, numbers, C: gl.constexpr, S_LAYOUT: gl.constexpr):
    """-inf for the keys that a row does not see. Row r is token ``token + r // HB``; token 0 sees ``first_limit``."""
    r = token + gl.arange(0, C.BM, layout=gl.SliceLayout(1, S_LAYOUT)) // C.HB
    c = key + gl.arange(0, C.BN, layout=gl.SliceLayout(0, S_LAYOUT))
    limit = first_limit + gl.minimum(r, tokens - 1)
    return hide(s, (None, None, r, None, None, limit), c, features, numbers, False)


@gluon.jit
def mask_absent(s, rows_s, b):
    """-inf for the keys of stage b that no slot is named for."""
    there = rows_s.index(2 + b).load(gl.SliceLayout(0, s.type.layout))
    return gl.where(there[None, :] != 0, s, float("-inf"))


@gluon.jit
def clean_rows(k_s, half, end, C: gl.constexpr):
    """Zero the rows of half a V tile from ``end`` on: what lies behind a sequence may be anything; 0 * NaN is NaN."""
    PANELS: gl.constexpr = C.DV // 2 // PANEL
    REGISTERS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    panels = operand(k_s, C.BN, PANEL, k_s.shape[0] * PANELS)
    r = gl.arange(0, C.BN, layout=gl.SliceLayout(1, REGISTERS))
    for c in range(PANELS):
        one = panels.index(half * PANELS + c)
        kept = one.load(REGISTERS)
        one.store(gl.where((r < end)[:, None], kept, gl.zeros_like(kept)))
    fence_async_shared()
    meet()


@gluon.jit
def send(p_s, rows_s, p, alpha):
    """P and what O is multiplied by, for the other warpgroup: ordinary stores that its wgmma may then read."""
    p_s.store(p)
    rows_s.index(0).store(alpha)
    fence_async_shared()
    named_barrier("arrive", P_FULL, 256)


@gluon.jit
def store_lse(results, lse, split, batch, token, head, keys, C: gl.constexpr):
    """The logarithm of the sum of each row that exists, of an item or of its part."""
    out, strides, part, heads, tokens = results
    r = gl.arange(0, C.BM, layout=lse.type.layout)
    there = (token + r // C.HB < tokens) & (head + r % C.HB < heads)
    rows = (token + r // C.HB) * strides.token + (head + r % C.HB) * strides.head
    if C.WALK:
        whole, place = find_part(split, keys, C)
        gl.store(out + batch.to(gl.int64) * strides.batch + rows, lse, mask=there & whole)
        gl.store(part + place + r, lse, mask=there & (whole == 0))
    else:
        at = out + split.to(gl.int64) * strides.split + batch.to(gl.int64) * strides.batch
        gl.store(at + rows, lse, mask=there)


@gluon.jit
def store_half(outputs, o, k_box, b, half: gl.constexpr, split, batch, token, head, some, keys, C: gl.constexpr):
    """Half the columns of the output, registers -> DRAM: rows that exist, of a split with some keys or the only one.

    BOXED: float32 or all of them pass through the place of that half of V in stage b, float32 in two pieces, and leave
    as whole rows by TMA, which leaves absent ones alone; those of an item of a work list that is whole do not.
    """
    do, out, o_strides, heads, tokens, batches, splits = outputs
    if C.WALK:
        whole, place_of = find_part(split, keys, C)
    else:
        some = some | (splits == 1)
    if C.BOXED:
        BITS: gl.constexpr = do.dtype.primitive_bitwidth
        PANELS: gl.constexpr = do.block_shape[1]
        WIDTH: gl.constexpr = do.block_shape[4]
        SHAPE: gl.constexpr = [2 * C.NB, C.BM, PANELS * WIDTH]
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, BITS, rank=2)
        BOX_SHAPE: gl.constexpr = [2 * C.NB, 1, PANELS, C.TB, C.HB, WIDTH]
        BOX_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, BITS, rank=5)
        place = view_as(k_box, do.dtype, SHAPE, LAYOUT).index(2 * b + half)
        box = view_as(k_box, do.dtype, BOX_SHAPE, BOX_LAYOUT).index(2 * b + half)
        pieces = (o, o) if BITS == 16 else o.reshape([C.BM, 2, PANELS * WIDTH]).permute((0, 2, 1)).split()
        col = gl.where(some, 0, WIDTH)  # behind the end of a panel there is nothing to be written
        if C.WALK:
            at_box = (place_of // C.BM).to(gl.int32), 0, 0
            count = gl.where(whole, 0, 2)
        else:
            at_box = split * batches + batch, token, head
            count = gl.minimum(splits, BITS // 16)  # float32 are those of several splits
        page, first_token, first_head = at_box
        for c in range(count):
            meet()  # no warp reads V any more, nor the piece before
            place.store(gl.where(c == 0, pieces[0], pieces[1]).to(do.dtype))
            fence_async_shared()
            store_box(do, [page, (half * (BITS // 16) + c) * PANELS, first_token, first_head, col], box)
            tma.store_wait(0)
    if C.WALK or not C.BOXED:
        O_LAYOUT: gl.constexpr = o.type.layout
        r = gl.arange(0, C.BM, layout=gl.SliceLayout(1, O_LAYOUT))
        d = half * (C.DV // 2) + gl.arange(0, C.DV // 2, layout=gl.SliceLayout(0, O_LAYOUT))
        t = token + r // C.HB
        h = head + r % C.HB
        rows = t.to(gl.int64) * o_strides.token + h.to(gl.int64) * o_strides.head
        there = (t < tokens) & (h < heads)
        at = out + batch.to(gl.int64) * o_strides.batch
        if C.WALK:
            if not C.BOXED:
                cut = there & some & (whole == 0)
                gl.store(do + (place_of + r)[:, None] * C.DV + d[None, :], o, mask=cut[:, None])
            there = there & whole
        else:
            there = there & some
            at = at + split.to(gl.int64) * o_strides.split
        gl.store(at + rows[:, None] + d[None, :], o.to(out.dtype.element_ty), mask=there[:, None])
