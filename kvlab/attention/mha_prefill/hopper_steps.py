"""The steps of the Hopper prefill kernel that its partitions call: which tile, which keys, boxes, mask, softmax."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kvlab.attention.hopper.kernel import (
    PANEL,
    TILE_LAYOUT,
    accumulator,
    add_sink,
    hide,
    key_count,
    key_range,
    load_box,
    meet,
    store_box,
    view,
    view_as,
)
from kvlab.attention.schedule.config import HEAD as _HEAD
from kvlab.attention.schedule.kernel import team_items
from kvlab.triton_support.twins import compiled

HEAD = gl.constexpr(_HEAD)
TURN = gl.constexpr((8, 9, 10))  # barriers at which the consumers wait for their turn; Triton's are the first ones
NUMBERS = range(64)  # of a thread: of two rows in turn, two columns each
GROWN = gl.constexpr("\n".join([
    "{ .reg .pred any;", "setp.neu.f32 any, $128, 0f3F800000;", "setp.neu.or.f32 any, $130, 0f3F800000, any;",
    "vote.sync.any.pred any, any, 0xffffffff;", "@!any bra.uni done;",
    *(f"mul.f32 ${i}, ${i}, ${128 + i};" for i in NUMBERS), "done: }",
]))
GROWN_OPERANDS = gl.constexpr(",".join([*("=f" for _ in NUMBERS), *map(str, NUMBERS), *("f" for _ in NUMBERS)]))
globals().update(compiled(gluon.jit, gl, team_items.fn))


@gluon.jit
def in_pairs(smem, n: gl.constexpr, rows: gl.constexpr, cols: gl.constexpr):
    """Buffers ``[rows, cols]`` of 8-bit elements as pairs of them."""
    return view_as(smem, gl.int16, [n, rows, cols // 2], TILE_LAYOUT)


@gluon.jit
def send(words, i, value):
    """A number for the other partitions."""
    words.index(i).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) + value)


@gluon.jit
def receive(words, i):
    """The number that was sent, in every thread."""
    return gl.max(words.index(i).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def tell(words, slot, batch, head, row, q_first, num_q, num_keys, C: gl.constexpr):
    """Tells the tile in ``slot``, for the other partitions; of ragged sequences where it is, too."""
    send(words, slot * C.WORDS, batch)
    send(words, slot * C.WORDS + 1, head)
    send(words, slot * C.WORDS + 2, row)
    if C.RAGGED_Q:
        send(words, slot * C.WORDS + 3, q_first)
        send(words, slot * C.WORDS + 4, num_q)
        send(words, slot * C.WORDS + 5, num_keys)


@gluon.jit
def tell_unit(words, slot, lo, hi, part, C: gl.constexpr):
    """Tells of the unit in ``slot`` its key blocks, and where its partial result goes."""
    send(words, slot * C.WORDS + 6, lo)
    send(words, slot * C.WORDS + 7, hi)
    send(words, slot * C.WORDS + 8, part)


@gluon.jit
def hear_unit(words, slot, C: gl.constexpr):
    """Hears of the unit in ``slot``."""
    lo = receive(words, slot * C.WORDS + 6)
    hi = receive(words, slot * C.WORDS + 7)
    return lo, hi, receive(words, slot * C.WORDS + 8)


@gluon.jit
def hear(words, slot, max_q, max_k, C: gl.constexpr):
    """Hears of the tile in ``slot``: its head, its first row, and where its sequence is."""
    head = receive(words, slot * C.WORDS + 1)
    tile_row = receive(words, slot * C.WORDS + 2)
    q_first = head * 0
    num_q = max_q
    num_keys = max_k
    if C.RAGGED_Q:
        q_first = receive(words, slot * C.WORDS + 3)
        num_q = receive(words, slot * C.WORDS + 4)
        num_keys = receive(words, slot * C.WORDS + 5)
    return head, tile_row, q_first, num_q, num_keys


@gluon.jit
def find_tile(t, seqs, sizes, C: gl.constexpr):
    """Tile number -> its sequence, query head and first row, and the sequence's offsets and lengths.

    Groups of ``together`` heads one after the other; in a group the last rows first, since they see most keys, heads
    innermost. The last tile of a sequence ends with it: the first may begin before it, or be empty. ALIGNED: tiles
    begin at positions that are multiples of their rows (SKIP: of a consumer's), and both ends of a sequence may lie
    inside one.
    Ragged: sequence b owns the tiles from ``cu_q[b] // rows + b`` on, or ``+ 2 b``, where one more may be touched.
    """
    cu_q, cu_k, _, lens, _ = seqs
    _, row_tiles, together, batches, steps, heads, _, max_q, max_k, _, _ = sizes
    ROWS: gl.constexpr = C.NC * C.BM
    SPARE: gl.constexpr = 2 if C.ALIGNED else 1
    r = t % (together * row_tiles)
    head = t // (together * row_tiles) * together + r % together
    tile = row_tiles - 1 - r // together
    batch = head // heads
    q_first = head * 0
    k_first = head * 0
    num_q = max_q
    num_keys = max_k
    above = tile
    below_end = row_tiles - tile
    if C.RAGGED_Q:
        batch = head * 0
        last = batches - 1
        for _ in range(steps):
            middle = (batch + last + 1) // 2
            below = gl.load(cu_q + middle).to(gl.int32) // ROWS + SPARE * middle <= tile
            batch = gl.where(below, middle, batch)
            last = gl.where(below, last, middle - 1)
        q_first = gl.load(cu_q + batch).to(gl.int32)
        end = gl.load(cu_q + batch + 1).to(gl.int32)
        num_q = end - q_first
        above = tile - q_first // ROWS - SPARE * batch
        below_end = end // ROWS + batch + 1 - tile
    if C.RAGGED_K:
        k_first = gl.load(cu_k + batch).to(gl.int32)
        num_keys = gl.load(cu_k + batch + 1).to(gl.int32) - k_first
    if C.PAGE:
        num_keys = key_count(gl.load(lens + batch), max_k)
    row = num_q - below_end * ROWS
    if C.ALIGNED:
        row = above * ROWS - ((num_keys - num_q) & ((C.BM if C.SKIP else ROWS) - 1))
    return batch, head % heads, row, q_first, num_q, k_first, num_keys


@gluon.jit
def program_items(program, work, room, sizes, C: gl.constexpr):
    """(begin, until, first, last): the places of a program's team in the list, and the items that lie there."""
    list_ptr, _, _ = work
    _, _, _, _, _, heads, group, _, _, _, _ = sizes
    team = program // (heads // group // C.HEADS * C.TOGETHER)
    return team_items(list_ptr, list_ptr + HEAD, list_ptr + HEAD + 3 * room + 1, team, C.OVERHEAD)


@gluon.jit
def find_unit(item, begin, until, seqs, work, room, lens_batch, sizes, C: gl.constexpr):
    """Item of a work list -> as of ``find_tile``, then the key blocks ``lo`` to ``hi - 1`` of what a team with the
    places ``begin ... until`` does of it, one that is masked where its rows see none; and which partial result that is,
    times 2 and 1 more where the unit begins at the first key; -1: the whole.
    """
    cu_q, _, _, lens, _ = seqs
    list_ptr, _, _ = work
    _, _, _, _, _, heads, group, _, max_k, left, right = sizes
    ROWS: gl.constexpr = C.NC * C.BM
    program = gl.program_id(0)
    lane = program % (heads // group // C.HEADS * C.TOGETHER)
    starts_ptr = list_ptr + HEAD  #- address
    batch = gl.load(starts_ptr + room + 1 + item)
    nth = gl.load(starts_ptr + 2 * room + 1 + item)
    tile = nth // C.HEADS
    num_keys = key_count(gl.load(lens + batch.to(gl.int64) * lens_batch), max_k)
    q_first = gl.load(cu_q + batch).to(gl.int32)
    num_q = gl.load(cu_q + batch + 1).to(gl.int32) - q_first
    head = (nth % C.HEADS * (heads // group // C.HEADS) + lane // C.TOGETHER) * group
    row = (tile * C.TOGETHER + lane % C.TOGETHER) * ROWS
    start = gl.load(starts_ptr + item) + C.OVERHEAD
    stop = gl.load(starts_ptr + item + 1)
    top = tile * C.TOGETHER * ROWS // C.PACK + num_keys - num_q
    origin = gl.maximum(top - left, 0) // C.LISTED
    first = (origin + gl.maximum(begin, start) - start) * (C.LISTED // C.BN)
    last = (origin + gl.minimum(until, stop) - start) * (C.LISTED // C.BN)
    lo, hi = key_blocks(row, num_q, num_keys, left, right, C)
    lo = gl.maximum(lo, first)
    hi = gl.minimum(hi, last)
    seen = lo < hi
    lo = gl.where(seen, lo, first)
    hi = gl.where(seen, hi, first + 1)
    whole = (begin <= start) & (stop <= until)
    place = 2 * program + (start > begin).to(gl.int32)
    part = gl.where(whole, -1, 2 * place + (begin <= start).to(gl.int32))
    return batch, head, row, q_first, num_q, head * 0, num_keys, lo, hi, part


@gluon.jit
def key_blocks(row, num_q, num_keys, left, right, C: gl.constexpr):
    """Blocks of BN keys that some row of the tile sees, ``lo`` to ``hi - 1``; at least one, which then is masked."""
    top = row // C.PACK + num_keys - num_q
    bottom = top + C.NC * C.BM // C.PACK - 1
    if C.ODD:
        bottom = (row + C.NC * C.BM - 1) // C.PACK + num_keys - num_q
    hi = gl.maximum(gl.cdiv(gl.minimum(bottom + right + 1, num_keys), C.BN), 1)
    first = gl.maximum(top, num_keys - num_q) - left  # rows before the sequence see nothing
    lo = gl.minimum(gl.maximum(first, 0) // C.BN, hi - 1)
    return lo, hi


@gluon.jit
def find_pages(table, batch, key, num_keys, pages, C: gl.constexpr):
    """The page of each box of a block of keys; of those past the end, which are not looked up, ``pages``: none."""
    found = ()
    first = table + key // C.PAGE if C.PAGE else table
    for j in gl.static_range(C.BN // C.BOX):
        page = batch
        if C.PAGE:
            page = gl.load(first + j, mask=key + j * C.BOX < num_keys, other=pages).to(gl.int32)
        found = found + (page,)  # type: ignore[assignment]
    return found


@gluon.jit
def load_rows(
    desc, smem, bar, b, pages, first, head, key, ROWS: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, ITEM: gl.constexpr,
):
    """A tile of ROWS into buffer b: boxes of BOX rows and one panel of columns, all on one mbarrier. What lies outside
    the tensor arrives as zeros.
    """
    PANELS: gl.constexpr = D * ITEM // 128
    mbarrier.expect(bar, ROWS * D * ITEM)
    for j in gl.static_range(ROWS // BOX):
        row = first + key + j * BOX
        if PAGE:
            row = key % PAGE if BOX < PAGE else key * 0  # a box is a page, or as much of it as a tile holds
        for c in gl.static_range(PANELS):
            at = (b * PANELS + c) * (ROWS // BOX) + j
            load_box(desc, [pages[j], row, head, c * (128 // ITEM)], bar, smem.index(at))


@gluon.jit
def clean_rows(v_s, b, first, end, BN: gl.constexpr, D: gl.constexpr, BOX: gl.constexpr):
    """Zero the rows of a V tile but ``first`` to ``end - 1``: what no row sees may be anything, and 0 * NaN is NaN.
    Boxes of BOX rows behind the end have come as zeros.

    Eight rows are read and stored anew. Consumers do it in any order, each before it multiplies: all store the same,
    which they would not if the two ends were cleaned one after the other.
    """
    ATOMS: gl.constexpr = BN // 8
    REGISTERS: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    rows = view(v_s, [v_s.shape[0] * BN * v_s.shape[2] // (8 * PANEL), 8, PANEL], TILE_LAYOUT)
    r = gl.arange(0, 8, layout=gl.SliceLayout(1, REGISTERS))
    before = gl.cdiv(gl.minimum(gl.maximum(first, 0), BN), 8)
    last = gl.minimum(gl.maximum(end, 0), BN)
    behind = last // 8
    for i in range(before + gl.cdiv(last, BOX) * (BOX // 8) - behind):
        atom = gl.where(i < before, i, i - before + behind)
        for c in gl.static_range(D // PANEL):
            one = rows.index((b * (D // PANEL) + c) * ATOMS + atom)
            kept = one.load(REGISTERS)
            seen = (atom * 8 + r >= first) & (atom * 8 + r < end)
            one.store(gl.where(seen[:, None], kept, gl.zeros_like(kept)))
    fence_async_shared()
    meet()


@gluon.jit
def transpose_tile(raw_s, v_s, b, BN: gl.constexpr, D: gl.constexpr):
    """V of buffer b, ``[keys, D]`` of e4m3, to ``[D, keys]``: of 8-bit elements wgmma takes no other.

    Both are seen as pairs of bytes, which ldmatrix transposes: a register then has two columns of two keys. Those of
    keys 2t, 2t + 1 and 8 + 2t, 9 + 2t give four keys of each column, in the order in which a lane has them in P.
    """
    PAIRS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [8, 0], [0, 8], [16, 0], [32, 0], [64, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 16], [0, 32]],
        block_bases=[],
        shape=[BN, D // 2],
    )
    x = gl.inline_asm_elementwise(  # [key, pair of columns] -> the same registers as [pair of keys, column]
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=r,=r,r,r",
        [raw_s.index(b).load(PAIRS)], dtype=gl.int16, is_pure=True, pack=4,
    )
    x = x.reshape([BN // 16, 2, 4, 2, D // 2]).permute((4, 1, 0, 2, 3))  # [pair, column of it, 16 keys, t, half]
    v_s.index(b).store(x.reshape([D, BN // 2]))
    fence_async_shared()
    meet()


@gluon.jit
def widen_tile(raw_s, wide_s, r, b, BN: gl.constexpr, D: gl.constexpr):
    """Buffer r, ``[keys, D]`` of e4m3, to buffer b, in 16 bits: eight columns of a row a lane, so that neither side's
    lanes meet in a bank.
    """
    REGISTERS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    x = raw_s.index(r).load(REGISTERS).to(gl.float16)
    if wide_s.dtype != gl.float16:
        x = x.to(gl.float32).to(wide_s.dtype)  # at once it would be the slow unit's conversion
    wide_s.index(b).store(x)
    fence_async_shared()
    meet()


@gluon.jit
def gather_rows(q_s, u, queries, head, row, q_first, num_q, C: gl.constexpr):
    """A consumer's rows of Q into buffer u, panel by panel; 0 where there is none."""
    q_ptr, strides, columns = queries
    PANELS: gl.constexpr = C.D // PANEL
    BUFFERS: gl.constexpr = C.NQ * C.NC * PANELS
    BM: gl.constexpr = C.BM
    COLS: gl.constexpr = PANEL
    REGISTERS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    panels = view(q_s, [BUFFERS, BM, COLS], TILE_LAYOUT)
    r = row + gl.arange(0, BM, layout=gl.SliceLayout(1, REGISTERS))
    at = (q_first + r // C.PACK).to(gl.int64) * strides.token + (head + r % C.PACK) * strides.head
    exists = r < num_q * C.PACK
    for c in gl.static_range(PANELS):
        d = c * PANEL + gl.arange(0, COLS, layout=gl.SliceLayout(0, REGISTERS))
        is_there = exists[:, None] & (d < columns)[None, :]
        panels.index(u * PANELS + c).store(gl.load(q_ptr + at[:, None] + d[None, :], mask=is_there, other=0.0))
    fence_async_shared()
    meet()


@gluon.jit
def query(q_s, w, S_LAYOUT: gl.constexpr, C: gl.constexpr):
    """Q of buffer w as products take it, panel by panel unless they have a power of two of columns; in registers if it
    is to be there.
    """
    PANELS: gl.constexpr = 1 if C.DEPTH & (C.DEPTH - 1) == 0 else C.D // PANEL
    q = ()
    for c in gl.static_range(PANELS):
        panel = q_s.index(w * PANELS + c)
        if C.Q_REGISTERS:
            panel = panel.load(gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2))
        q = q + (panel,)  # type: ignore[assignment]
    return q


@gluon.jit
def multiply_qk(q, k_s, b, zero, D: gl.constexpr):
    """S = Q K^T of D columns, started, panel by panel of Q."""
    s = zero
    for c in gl.static_range(len(q)):
        part = q[c]
        k = k_s.index(b * len(q) + c)
        if len(q) > 1 and D - c * PANEL < PANEL:
            part = part.slice(0, D - c * PANEL, 1)
            k = k.slice(0, D - c * PANEL, 1)
        s = hopper.warpgroup_mma(part, k.permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def no_columns(COLS: gl.constexpr, C: gl.constexpr):
    """COLS columns of O before the first product."""
    BM: gl.constexpr = C.BM
    zeros = gl.zeros([BM, COLS], gl.float32, layout=accumulator(COLS, 32 // C.ITEM))
    return hopper.warpgroup_mma_init(zeros)


@gluon.jit
def no_output(C: gl.constexpr):
    """O before the first product: as many pieces as P V has products."""
    PRODUCTS: gl.constexpr = C.PRODUCTS
    LAST: gl.constexpr = C.COLUMNS - (PRODUCTS - 1) * PANEL if PRODUCTS > 1 else C.DV
    o = ()
    for _ in gl.static_range(1, PRODUCTS):
        o = o + (no_columns(PANEL, C),)  # type: ignore[assignment]
    return o + (no_columns(LAST, C),)


@gluon.jit
def multiply_pv(p, v_s, b, o, C: gl.constexpr):
    """O += P V, started, piece by piece. V of e4m3 has its keys along the rows."""
    out = ()
    for i in gl.static_range(len(o)):
        v = v_s.index(b * len(o) + i)
        if v_s.dtype.primitive_bitwidth == 8:
            v = v.permute((1, 0))
        if i > 0 and C.COLUMNS - i * PANEL < PANEL:
            v = v.slice(0, C.COLUMNS - i * PANEL, 1)
            p = gl.convert_layout(p, gl.DotOperandLayout(0, accumulator(C.COLUMNS - i * PANEL, 16), 2))
        out = out + (hopper.warpgroup_mma(p, v, o[i], is_async=True),)  # type: ignore[assignment]
    return out


@gluon.jit
def wait_mma(o, n: gl.constexpr):
    """O of the products but the last n."""
    out = hopper.warpgroup_mma_wait(n, deps=o)
    if len(o) == 1:
        out = (out,)
    return out


@gluon.jit
def started(o):
    """O as products go on to change it."""
    out = ()
    for i in gl.static_range(len(o)):
        out = out + (hopper.warpgroup_mma_init(o[i]),)  # type: ignore[assignment]
    return out


@gluon.jit
def times(o, factor, LAZY: gl.constexpr = False):
    """O whose rows are multiplied; LAZY: by warps that have a row whose factor is not 1."""
    out = ()
    for i in gl.static_range(len(o)):
        by = gl.convert_layout(factor, gl.SliceLayout(1, o[i].type.layout))[:, None]
        if LAZY:
            one = gl.inline_asm_elementwise(GROWN, GROWN_OPERANDS, [o[i], by], dtype=gl.float32, is_pure=True, pack=64)
        else:
            one = o[i] * by
        out = out + (one,)  # type: ignore[assignment]
    return out


@gluon.jit
def rounded(o, dtype: gl.constexpr):
    """O in the dtype of the output."""
    out = ()
    for i in gl.static_range(len(o)):
        out = out + (o[i].to(dtype),)  # type: ignore[assignment]
    return out


@gluon.jit
def mask_block(s, row, position, key, num_keys, features, numbers, C: gl.constexpr, S_LAYOUT: gl.constexpr):
    """-inf for the keys that a row does not see; ``position`` of the first one, ``row``."""
    nth = gl.arange(0, C.BM, layout=gl.SliceLayout(1, S_LAYOUT))
    if C.ODD:
        nth += row % C.PACK
    rows = position + nth // C.PACK
    c = key + gl.arange(0, C.BN, layout=gl.SliceLayout(0, S_LAYOUT))
    first, limit = key_range(rows, num_keys, numbers.left, numbers.right, None)
    return hide(s, (None, None, rows, None, first, limit), c, features, numbers, C.WINDOW)


@gluon.jit
def round_p(e, dtype: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """P as the loop carries it: wgmma's operand, or, of e4m3, words of four: as bytes they would be put together anew.

    Of 16 keys a lane holds 2t, 2t + 1, 8 + 2t and 9 + 2t, which lie where wgmma has the keys 4t to 4t + 3; V's lie
    in the same order.
    """
    if dtype.primitive_bitwidth == 16:
        p = gl.convert_layout(e.to(dtype), LAYOUT)
    else:
        even, odd = e.reshape([BM, BN // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).split()
        x0, x2 = even.split()
        x1, x3 = odd.split()
        p = gl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """, "=r,f,f,f,f", [x0, x1, x2, x3], dtype=gl.int32, is_pure=True, pack=1,
        )
    return p


@gluon.jit
def operand_p(p, dtype: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """Result of ``round_p`` as wgmma's operand; no instructions come of it."""
    if dtype.primitive_bitwidth == 8:
        low, high = p.to(gl.int16), (p >> 16).to(gl.int16)
        x0, x1, x2, x3 = low.to(gl.int8), (low >> 8).to(gl.int8), high.to(gl.int8), (high >> 8).to(gl.int8)
        p = gl.join(gl.join(x0, x2), gl.join(x1, x3)).reshape([BM, BN])
        p = gl.convert_layout(p.to(dtype, bitcast=True), LAYOUT)
    return p


@gluon.jit
def row_results(top, l, sinks_ptr, head, counts, unit, S_LAYOUT: gl.constexpr):
    """LSE of each row in ``unit``, and what its O is multiplied by. ``top``: the row's maximum in units of log2.
    ``counts``: where rows have their sink; None: all.
    """
    total = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, S_LAYOUT))
    own = top, total
    top, total, weight = add_sink(top, total, sinks_ptr, head)
    if counts is not None:
        top, total = gl.where(counts, top, own[0]), gl.where(counts, total, own[1])
        weight = gl.where(counts, weight, 1.0)
    lse = gl.where(total == 0, float("-inf"), (top + gl.log2(total)) * unit)
    return lse, gl.where(total == 0, 0.0, weight / total)


@gluon.jit
def store_columns(
    w, values, page, row, head, col: gl.constexpr, desc, o_s, o_box, COLS: gl.constexpr, COLUMNS: gl.constexpr
):
    """Columns ``col`` to ``col + COLS`` of O, as far as there are, through buffer w, which no copy reads any more, to
    DRAM.
    """
    meet()
    if len(values) == 1:
        o_s.index(w).store(values[0])
    else:
        for i in gl.static_range(len(values)):
            o_s.index(w).slice(i * PANEL, values[i].shape[1], 1).store(values[i])
    fence_async_shared()
    for c in gl.static_range((min(COLS, COLUMNS - col) + PANEL - 1) // PANEL):
        store_box(desc, [page, row, head, col + c * PANEL], o_box.index(w * (COLS // PANEL) + c))


@gluon.jit
def store_tile(w, o, page, row, head, desc, o_s, o_box, C: gl.constexpr):
    """O through buffer w to DRAM, in ROUNDS parts."""
    if C.ROUNDS == 1:
        store_columns(w, rounded(o, o_s.dtype), page, row, head, 0, desc, o_s, o_box, C.DV, C.COLUMNS)
    else:
        BM: gl.constexpr = C.BM
        COLS: gl.constexpr = C.DV // C.ROUNDS
        parts = rounded(o, o_s.dtype)
        if len(o) == 1:
            parts = parts[0].reshape([BM, 2, COLS]).permute((0, 2, 1)).split()
        for i in gl.static_range(len(parts)):
            if i > 0:
                tma.store_wait(0)
            store_columns(w, (parts[i],), page, row, head, i * COLS, desc, o_s, o_box, COLS, C.COLUMNS)


@gluon.jit
def store_unit(W: gl.constexpr, o, lse, unit, do, o_s, o_box, results, C: gl.constexpr):
    """A consumer's rows of a unit: the result, or a partial one, float32, where the item is cut. Rows that do not exist
    are left alone; TMA stores no part of a box.
    """
    batch, head, row, q_first, num_q, part = unit
    o_ptr, lse_ptr, o_strides, _, lse_token, work = results
    _, part_ptr, part_lse_ptr = work
    ROWS: gl.constexpr = C.NC * C.BM
    LSE: gl.constexpr = lse.type.layout
    nth = gl.arange(0, C.BM, layout=LSE)
    end = num_q * C.PACK - row
    if part < 0:
        lse_at = lse_ptr + (q_first + (row + nth) // C.PACK) * lse_token + head + (row + nth) % C.PACK
        gl.store(lse_at, lse, mask=nth < end)
        if C.ODD or end < C.BM:
            for i in gl.static_range(len(o)):
                r = gl.arange(0, C.BM, layout=gl.SliceLayout(1, o[i].type.layout))
                d = gl.arange(0, o[i].shape[1], layout=gl.SliceLayout(0, o[i].type.layout)) + i * PANEL
                at = (q_first + (row + r) // C.PACK).to(gl.int64) * o_strides.token
                at += (head + (row + r) % C.PACK) * o_strides.head
                is_there = (r < end)[:, None] & (d < C.COLUMNS)[None, :]
                gl.store(o_ptr + at[:, None] + d[None, :], o[i].to(o_s.dtype), mask=is_there)
        else:
            store_tile(W, o, batch * 0, q_first + row // C.PACK, head, do, o_s, o_box, C)
    else:
        place = (part >> 1).to(gl.int64) * ROWS + W * C.BM
        gl.store(part_lse_ptr + place + nth, lse, mask=nth < end)
        for i in gl.static_range(len(o)):
            r = gl.arange(0, C.BM, layout=gl.SliceLayout(1, o[i].type.layout))
            d = gl.arange(0, o[i].shape[1], layout=gl.SliceLayout(0, o[i].type.layout)) + i * PANEL
            is_there = (r < end)[:, None] & (d < C.COLUMNS)[None, :]
            gl.store(part_ptr + (place + r)[:, None] * C.COLUMNS + d[None, :], o[i], mask=is_there)
