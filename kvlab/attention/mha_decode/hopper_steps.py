"""The steps of the Hopper decode kernel: which item, its queries, boxes of K and V, products of pairs of e4m3."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kvlab.attention.hopper.kernel import key_count, load_box, split_bounds, view_as
from kvlab.attention.tiles.fp8_pairs.kernel import halves, narrow
from kvlab.triton_support.twins import compiled

from .config import CLASSES as _CLASSES
from .hopper_config import AT_ONCE as _AT_ONCE
from .hopper_config import PANEL as _PANEL

CLASSES, AT_ONCE = gl.constexpr(_CLASSES), gl.constexpr(_AT_ONCE)
globals().update(compiled(gluon.jit, gl, narrow.fn, halves.fn))


@gluon.constexpr_function
def panel(columns):
    """Columns of a box of rows of so many: of the swizzle's width."""
    return min(columns, _PANEL)


@gluon.constexpr_function
def swizzled(columns, rank):
    """Shared memory of boxes (rank 4) or of blocks (3) of rows of so many columns."""
    return gl.NVMMASharedLayout(2 * min(columns, _PANEL), 16, rank=rank)


@gluon.constexpr_function
def products(rows):
    """The registers of products ``[4, ROWS, ..]``: each warp has keys and 16 rows of its own."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, rows // 16, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def operand(index, rows):
    """The registers of the first (0) or second operand of products."""
    return gl.DotOperandLayout(operand_index=index, parent=products(rows), k_width=2)


@gluon.constexpr_function
def rows_layout(rows):
    """The registers of a number for each row of products."""
    return gl.SliceLayout(0, gl.SliceLayout(2, products(rows)))


@gluon.constexpr_function
def results_layout(rows, columns):
    """The registers of results: a warp has whole rows."""
    return gl.BlockedLayout([1, columns // 32], [1, 32], [rows // 4, 1], [1, 0])


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def nth_longest(lens, lens_stride, batches, max_keys, n, BATCH: gl.constexpr):
    """The same as in ``kernel``: the sequence that is the ``n``-th of those ordered by the class of their length."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = gl.arange(0, BATCH, layout=ONE)
    there = at < batches
    length = key_count(gl.load(lens + at * lens_stride, mask=there, other=0), max_keys).to(gl.int64)
    longest = gl.maximum(gl.max(length, 0), 1)
    kind = ((longest - length) * (CLASSES - 1) // longest).to(gl.int32)  # 0: the longest
    counts = gl.histogram(kind, CLASSES, mask=there, layout=ONE)
    upto = gl.associative_scan(counts, 0, add)
    found = gl.sum((upto <= n).to(gl.int32), 0)
    before = gl.sum(gl.where(gl.arange(0, CLASSES, layout=ONE) < found, counts, 0), 0)
    member = there & (kind == found)
    place = gl.associative_scan(member.to(gl.int32), 0, add)
    return gl.sum(gl.where(member & (place == n - before + 1), at, 0), 0)


@gluon.jit
def find_item(program, lens, lens_stride, batches, groups, splits, max_keys, C: gl.constexpr):
    """Program -> its sequence, the first of its KV heads, its split, the split's first key, its end, and all keys.

    The programs of the same keys' heads are neighbours. A split is a number of whole blocks.
    """
    group = program % groups
    split = program // groups % splits
    batch = program // (groups * splits)
    if C.LONGEST_FIRST:
        batch = nth_longest(lens, lens_stride, batches, max_keys, batch, C.LONGEST_FIRST)
    num_keys = key_count(gl.load(lens + batch * lens_stride), max_keys)
    lo, hi = split_bounds(split, splits, num_keys, C.BT)
    return batch.to(gl.int64), group * C.HEADS, split, lo, hi, num_keys


@gluon.jit
def rows_of(r, C: gl.constexpr):
    """Row of the tile -> its KV head (counted from the first), new token, query head of the KV head."""
    ROWS_OF_HEAD: gl.constexpr = C.TOKENS * C.GROUP
    return r // ROWS_OF_HEAD, r % ROWS_OF_HEAD // C.GROUP, r % C.GROUP


@gluon.jit
def load_rows(q, q_strides, batch, kv_head, tokens, odd: gl.constexpr, C: gl.constexpr):
    """Query rows ``[ROWS, W]``, of pairs the even or odd columns; rows that do not exist are 0. ``tokens``: new ones,
    or None for those of C.
    """
    OF_Q: gl.constexpr = gl.SliceLayout(0, operand(0, C.ROWS))
    r = gl.arange(0, C.ROWS, layout=gl.SliceLayout(1, OF_Q))
    c = gl.arange(0, C.W, layout=gl.SliceLayout(0, OF_Q))
    kv, token, head = rows_of(r, C)
    at = batch * q_strides.batch + token * q_strides.token + ((kv_head + kv) * C.GROUP + head) * q_strides.head
    cols = 2 * c + odd if C.PAIRS else c
    is_row = kv < C.HEADS
    if tokens is not None:
        is_row = is_row & (token < tokens)
    inside = is_row[:, None]
    if C.COLUMNS:
        inside = inside & (cols < C.COLUMNS)[None, :]
    return gl.load(q + at[:, None] + cols[None, :], mask=inside, other=0.0)


@gluon.jit
def of_every_warp(q, C: gl.constexpr):
    """The A operand ``[4, ROWS, W]`` that all warps have."""
    R: gl.constexpr = C.ROWS
    W: gl.constexpr = C.W
    return gl.convert_layout(gl.expand_dims(q, 0).broadcast_to([4, R, W]), operand(0, C.ROWS))


@gluon.jit
def load_block(dk, dv, k_box, v_box, bar, b, found, key, kv_head, C: gl.constexpr):
    """A block of K and of V into stage b: boxes of BOX tokens, HEADS heads and one panel, all on one mbarrier."""
    BOXES: gl.constexpr = C.BT // C.BOX
    PANEL: gl.constexpr = panel(C.W)
    PANELS: gl.constexpr = C.W // PANEL
    mbarrier.expect(bar, C.BN * C.W * 4)
    for j in gl.static_range(BOXES):
        row = (key + j * C.BOX) % C.PAGE
        for c in gl.static_range(PANELS):
            at = (b * PANELS + c) * BOXES + j
            load_box(dk, [found[j], row, kv_head, c * PANEL], bar, k_box.index(at))
            load_box(dv, [found[j], row, kv_head, c * PANEL], bar, v_box.index(at))


@gluon.jit
def as_sums(ring, C: gl.constexpr):
    """The beginning of shared memory as sums ``[4, ROWS, W]`` float32, up to AT_ONCE columns: of all warps at once, and
    of each.
    """
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    EACH: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    R: gl.constexpr = C.ROWS
    W: gl.constexpr = min(C.W, AT_ONCE)
    return view_as(ring, gl.float32, [4, R, W], LAYOUT), view_as(ring, gl.float32, [4, R, W], EACH)


@gluon.jit
def as_tops(ring, C: gl.constexpr):
    """The beginning of shared memory as maxima and sums of rows: of all warps at once ``[2, 4, ROWS]``, and of each."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    EACH: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    R: gl.constexpr = C.ROWS
    return view_as(ring, gl.float32, [2, 4, R], LAYOUT), view_as(ring, gl.float32, [8, R], EACH)


@gluon.jit
def column_halves(o, C: gl.constexpr):
    """The first and the second half of the columns of sums ``[4, ROWS, W]``."""
    R: gl.constexpr = C.ROWS
    HALF: gl.constexpr = C.W // 2
    return o.reshape([4, R, 2, HALF]).permute((0, 1, 3, 2)).split()


@gluon.jit
def largest(tops, OUT: gl.constexpr):
    """The largest score ``[ROWS]`` of each row."""
    top = tops.index(0).load(gl.SliceLayout(1, OUT))
    for w in gl.static_range(1, 4):
        top = gl.maximum(top, tops.index(w).load(gl.SliceLayout(1, OUT)))
    return top


@gluon.jit
def add_warps(each, tops, top, C: gl.constexpr, OUT: gl.constexpr):
    """The warps' row sums ``[ROWS]`` and sums ``[ROWS, W]``, put together relative to ``top``."""
    R: gl.constexpr = C.ROWS
    W: gl.constexpr = min(C.W, AT_ONCE)
    total = gl.zeros([R], gl.float32, layout=gl.SliceLayout(1, OUT))
    o = gl.zeros([R, W], gl.float32, layout=OUT)
    for w in gl.static_range(4):
        weight = gl.exp2(tops.index(w).load(gl.SliceLayout(1, OUT)) - top)
        total += weight * tops.index(4 + w).load(gl.SliceLayout(1, OUT))
        o += gl.expand_dims(weight, 1) * each.index(w).load(OUT)
    return total, o


@gluon.jit
def column(layout: gl.constexpr, C: gl.constexpr):
    """The row of the block ``[4, 16]`` that each warp's key is, in a slice of ``layout``."""
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, layout))
    key = gl.arange(0, C.BN // 4, layout=gl.SliceLayout(0, layout))
    return gl.expand_dims(warp, 1) * (C.BN // 4) + gl.expand_dims(key, 0)
