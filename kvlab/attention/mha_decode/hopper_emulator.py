"""The Hopper decode kernel in NumPy: its roles as they meet at mbarriers, byte by byte in shared memory."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.attention.features.intervals import key_count, most_keys
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import head_scale
from kvlab.attention.features.scores import adjust_by_row, factor_of
from kvlab.attention.hopper.emulator import find_pages, split_bounds
from kvlab.attention.hopper.turns import Role, Wait, run_roles
from kvlab.attention.merge_states.emulator import launch as merge
from kvlab.attention.merge_states.emulator import partial_results
from kvlab.attention.tiles.fp8_pairs.emulator import narrow
from kvlab.attention.tiles.masked import load, store
from kvlab.attention.tiles.online_softmax import LN2, LOG2E, LOWEST, log_sum
from kvlab.hardware.chip import add_products, divide, exp2, log2, multiply_add
from kvlab.staging import Fragments, Traffic, ceildiv
from kvlab.staging.tile.pairs import halves

from .emulator import nth_longest
from .hopper_config import AT_ONCE, HopperDecodeConfig, HopperDecodeConstants
from .hopper_cta import HopperDecodeCTA, accumulator, boxes_of, places_of

Array = np.ndarray[Any, Any]
Item = tuple[int, int, int, int, int, int]


@dataclass
class HopperDecodeLaunch:
    """Common part of all programs: sizes, where sequences lie, and the results."""

    config: HopperDecodeConfig
    pages: int
    max_keys: int
    q: Array
    table: Array
    lens: Array
    features: Features
    out: Array
    lse: Array
    counters: Array
    joined: Array
    joined_lse: Array
    scale_log2: np.float32

    def find_item(self, program: int) -> Item:
        """Program -> its sequence, the first of its KV heads, its split, the split's first key, its end, all keys."""
        C, groups, splits = self.config.constants, self.config.groups, self.config.num_splits
        group, split, batch = program % groups, program // groups % splits, program // (groups * splits)
        if C.LONGEST_FIRST:
            batch = int(nth_longest(self.lens, self.max_keys, np.array([batch]))[0])
        num_keys = int(key_count(self.lens[batch], self.max_keys))
        lo, hi = split_bounds(split, splits, num_keys, C.BT)
        return batch, group * C.HEADS, split, lo, hi, num_keys



def rows_of(r: Array, C: HopperDecodeConstants) -> tuple[Array, Array, Array]:
    """Row of the tile -> its KV head (counted from the first), new token, query head of the KV head."""
    return r // (C.TOKENS * C.GROUP), r % (C.TOKENS * C.GROUP) // C.GROUP, r % C.GROUP


def load_rows(q: Array, kv_head: int, tokens: int | None, odd: int, C: HopperDecodeConstants) -> Array:
    """Query rows ``[ROWS, W]`` of a sequence ``[S, Hq, D]``, of pairs the even or odd columns; rows that do not exist
    are 0. ``tokens``: new ones, or None for those of C.
    """
    kv, token, head = rows_of(np.arange(C.ROWS)[:, None], C)
    cols = 2 * np.arange(C.W) + odd if C.PAIRS else np.arange(C.W)
    is_row = kv < C.HEADS
    if tokens is not None:
        is_row = is_row & (token < tokens)
    inside = is_row
    if C.COLUMNS:
        inside = inside & (cols < C.COLUMNS)
    return load(q, (token, (kv_head + kv) * C.GROUP + head, cols), mask=inside)


def produce(cta: HopperDecodeCTA, table: Array, pages: int, item: Item, done: int) -> Iterator[Wait]:
    """One warp brings block after block of K and V, ``done`` of which came before; ``table``: the sequence's row."""
    #@ producer
    #: begin -> blocks, found    how many; the pages of the first
    C = cta.C  #- launch
    _, kv_head, _, lo, hi, _ = item
    blocks = ceildiv(hi - lo, C.BT)
    found = find_pages(table, lo, hi, pages, C.BT, C.BOX, C.PAGE)
    for i in range(blocks):
        #: load -> b, key, found    a block, once its stage is free; the pages of the next
        b = (done + i) % C.NB
        key = lo + i * C.BT
        following = find_pages(table, key + C.BT, hi, pages, C.BT, C.BOX, C.PAGE)
        yield cta.free[b], (((done + i) // C.NB) & 1) ^ 1  #- wait
        cta.load_block(b, found, key, kv_head)
        found = following


def attend_keys(
    cta: HopperDecodeCTA, unit: tuple[int, int, int, int, int], tokens: int | None, q_array: Array,
    features: Features, scale_log2: np.float32, done: int,
) -> Generator[Wait, None, tuple[Array, Any, Array, Array]]:
    """(o, o_odd, top, total): sums ``[ROWS, W]`` of the rows over a unit's keys, whose blocks come after ``done``
    others, of pairs the odd columns as each warp has them, of more than 128 columns the second half; the rows' maxima,
    and what the weights add up to.

    unit : sequence, first KV head, the first key and the one behind the last, keys of the sequence. tokens : new ones
    of it; None: those of C, and units end with a block or the sequence. q_array : the sequence's ``[S, Hq, D]``.
    """
    #@ consumer
    #: begin -> blocks, limit    how many; the rows, the keys that they see, what their scores are multiplied by
    C = cta.C  #- launch
    batch, kv_head, lo, hi, num_keys = unit
    blocks = ceildiv(hi - lo, C.BT)
    R = C.ROWS
    W = C.W
    KEYS = C.BN // 4
    q = load_rows(q_array, kv_head, tokens, 0, C)
    kv, token, head = rows_of(np.arange(R), C)
    seen = num_keys - (C.TOKENS if tokens is None else tokens) + 1  # by all rows
    limit = seen + token  # keys from here on a row does not see
    if tokens is not None:  # and units may end within a block
        seen, limit = min(seen, hi), np.minimum(limit, hi)
    factor = np.full(R, scale_log2)
    of_row = kv_head + np.minimum(kv, C.HEADS - 1)  # rows that do not exist are as those of the last head
    factor = factor_of(factor, features, batch, of_row, of_row * C.GROUP + head)
    if C.PAIRS:
        odd = load_rows(q_array, kv_head, tokens, 1, C)
        top = np.maximum(np.max(np.abs(q.astype(np.float32)), 1), np.max(np.abs(odd.astype(np.float32)), 1))
        q, unit_of_q = narrow(q, top)
        odd, _ = narrow(odd, top)
        q_odd = of_every_warp(odd)
        factor = factor * unit_of_q
    q = of_every_warp(q)
    scores = cta.zeros(KEYS).map  #- programs
    col = scores.row // R * KEYS + scores.col  # of the block
    own = col % C.HEADS == kv[scores.row % R]
    limits = limit[scores.row % R]
    factor = np.tile(factor, (1, 4))
    m = np.full((1, 4 * R), LOWEST, np.float32)
    l = np.zeros((1, 4 * R), np.float32)
    o: Any = cta.zeros(W)
    o_odd: Any = o
    for i in range(blocks):
        #: load_k -> b, key    the block has arrived in its stage
        b = (done + i) % C.NB
        key = lo + i * C.BT
        yield cta.full[b], ((done + i) // C.NB) & 1  #- wait
        k = cta.read("k", b)
        #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
        s = cta.zeros(KEYS)
        if C.PAIRS:
            k_even, k_odd = _halves(k)
            s = cta.multiply_rows(q, k_even, s)
            s = cta.multiply_rows(q_odd, k_odd, s)
        else:
            s = cta.multiply_rows(q, k, s)
        s = adjust_by_row(s, factor, 0.0, features)
        #: load_v -> v    and the stage is free; rows that do not exist may be anything, and 0 * NaN is NaN
        v = cta.read("v", b)
        if C.W <= AT_ONCE:
            cta.arrive(cta.consumers, cta.free[b])
        if C.W > AT_ONCE or key + C.BT > hi:
            there = key + v.map.row // C.HEADS < hi
            v = v.with_values(np.where(there, v.values, np.zeros_like(v.values)))
        #: mask -> s    other heads' keys, and keys that a row does not see
        if C.HEADS > 1:
            s = s.with_values(np.where(own, s.values, np.float32(-np.inf)))
        if key + C.BT > seen:
            s = s.with_values(np.where(key + col // C.HEADS < limits, s.values, np.float32(-np.inf)))
        #: softmax -> p, m, l, o    online, every warp for itself: row maximum, exponentials, row sum, rescale
        m_new = np.maximum(m, s.tile().max(2))
        p = s.with_values(exp2(s.values - s.by_row(m_new)))
        alpha = exp2(m - m_new)
        l = multiply_add(l, alpha, cta.row_sum(p))
        m = m_new
        o = o.times(alpha)
        if C.PAIRS:
            o_odd = o_odd.times(alpha)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product
        if C.PAIRS:
            weights = p.with_values(p.values.astype(np.float16))
            v_even, v_odd = _halves(v)
            o = cta.accumulate(weights, v_even, o)
            o_odd = cta.accumulate(weights, v_odd, o_odd)
        else:
            o = cta.accumulate(p, v, o)
        if C.W > AT_ONCE:  # registers hold a part of V at a time
            cta.arrive(cta.consumers, cta.free[b])
    #: together -> top, total    the warps' maxima and sums, through shared memory that nobody reads any more
    if C.W > AT_ONCE:
        o, o_odd = column_halves(o, C)
    cta.meet(cta.consumers)
    cta.leave(o, m, l)
    cta.meet(cta.consumers)
    each, tops, totals = cta.left(2)
    top = tops.max(0)
    total, o = add_warps(each, tops, totals, top)
    return o, o_odd, top, total


def other_columns(cta: HopperDecodeCTA, o_odd: Any, top: Array) -> Array:
    """The odd columns of the sums ``[ROWS, W]``, where the even ones have been, or the second half where the first has:
    rows' maxima and sums are there.
    """
    #@ consumer
    #: other_columns -> o_odd    put together as those before
    cta.meet(cta.consumers)
    cta.leave(o_odd)
    cta.meet(cta.consumers)
    each, tops, totals = cta.left(2)
    _, o_odd = add_warps(each, tops, totals, top)
    return o_odd


def normalise(
    top: Array, total: Array, batch: int, kv_head: int, kv: Array, features: Features, C: HopperDecodeConstants
) -> tuple[Array, Array, Array]:
    """(some, lse, l): whether a row has seen a key, and its lse; what its sums are multiplied by."""
    #@ consumer
    #: normalise -> lse, l    rows without a sum have seen no key: 0 and -inf
    scales = features.scales  #- launch
    some = total != 0
    with np.errstate(divide="ignore", invalid="ignore"):  # where the kernel has infinities, too
        lse = log_sum(top, total, some)
        factor = np.full(C.ROWS, np.float32(scales.v.number))
        of_row = kv_head + np.minimum(kv, C.HEADS - 1)
        factor = head_scale(factor, scales.v.heads, batch, of_row)
        l = np.where(some, divide(factor, total), np.float32(0))
    return some, lse, l


def consume(cta: HopperDecodeCTA, x: HopperDecodeLaunch, item: Item) -> Iterator[Wait]:
    """Warps, each with 16 keys of a block of its own: scores, softmax, output."""
    #@ consumer
    #: split -> o, top, total    its keys; the ring, which nobody reads any more, has room for the warps' sums
    C, splits, out, lse_out, features = cta.C, x.config.num_splits, x.out, x.lse, x.features  #- launch
    batch, kv_head, split, lo, hi, num_keys = item
    unit = batch, kv_head, lo, hi, num_keys
    o, o_odd, top, total = yield from attend_keys(cta, unit, None, x.q[batch], features, x.scale_log2, 0)
    #: store    an empty split leaves its partial output alone
    COLS = min(C.W, AT_ONCE)
    NEXT = 1 if C.PAIRS else COLS  # columns until those that are put together next
    kv, token, head = rows_of(np.arange(C.ROWS), C)
    sees = num_keys - C.TOKENS + 1 + token > lo
    some, lse, l = normalise(top, total, batch, kv_head, kv, features, C)
    heads = (kv_head + kv) * C.GROUP + head
    store(lse_out, (split, batch, token, heads), lse, mask=kv < C.HEADS)
    rows = split, batch, token[:, None], heads[:, None]
    writes = (kv < C.HEADS) & (sees | (splits == 1))
    cols = np.arange(COLS) * (2 if C.PAIRS else 1)
    o = np.where(some[:, None], o * l[:, None], np.float32(0))
    inside = writes[:, None]
    if C.COLUMNS:
        inside = inside & (cols < C.COLUMNS)
    store(out, (*rows, cols), o, mask=inside)
    if C.PAIRS or C.W > AT_ONCE:
        o_odd = other_columns(cta, o_odd, top)
        o_odd = np.where(some[:, None], o_odd * l[:, None], np.float32(0))
        cols = cols + NEXT
        inside = writes[:, None]
        if C.COLUMNS:
            inside = inside & (cols < C.COLUMNS)
        store(out, (*rows, cols), o_odd, mask=inside)
    written = int(writes.sum()) * out[0, 0, 0, 0].nbytes + int((kv < C.HEADS).sum()) * lse.itemsize
    cta.traffic.move("registers->DRAM", written)
    if C.PARTS:
        #: join    the splits, where the program is the last to arrive
        join(cta, x, item)


def join(cta: HopperDecodeCTA, x: HopperDecodeLaunch, item: Item) -> None:
    """The last program to arrive of those that share a sequence's keys takes all parts, in the order of the keys."""
    #@ joiner
    #: arrive -> last    behind all that the program has stored; the counter is 0 for the next launch
    C, splits, part, part_lse = cta.C, x.config.num_splits, x.out, x.lse  #- launch
    out, lse_out = x.joined, x.joined_lse  #- launch
    batch, kv_head, _, _, _, num_keys = item
    PARTS = C.PARTS
    SEEN = C.HEADS * C.TOKENS * C.GROUP
    R = 4 if SEEN <= 4 else 8 if SEEN <= 8 else 16
    D = 2 * C.W if C.PAIRS else C.W
    counter = batch, kv_head // C.HEADS
    cta.meet(cta.consumers)
    last = x.counters[counter] == splits - 1
    x.counters[counter] += 1
    if last:
        #: begin -> limit, top, total, o    the rows, and the keys that they see
        x.counters[counter] = 0
        kv, token, head = rows_of(np.arange(R), C)
        there = kv < C.HEADS
        heads = (kv_head + kv) * C.GROUP + head
        limit = num_keys - C.TOKENS + 1 + token
        size = ceildiv(ceildiv(num_keys, splits), C.BT) * C.BT  # keys of a split
        n = np.arange(PARTS)
        cols = np.arange(D)
        top = np.full(R, -np.inf, np.float32)
        total = np.zeros(R, np.float32)
        o = np.zeros((R, D), np.float32)
        for first in range(0, splits, C.PARTS):
            #: load_parts -> w, parts    of rows that see a key of the split; what others left behind is not read
            split = first + n
            has = (split[:, None] * size < limit) & (split < splits)[:, None] & there  # [PARTS, R]
            at = split[:, None]
            w = load(part_lse, (at, batch, token, heads), mask=has, other=-np.inf)
            rows: tuple[Any, ...] = at[..., None], batch, token[:, None], heads[:, None]
            inside = has[..., None]
            if C.COLUMNS:
                inside = inside & (cols < C.COLUMNS)
            parts = load(part, (*rows, cols), mask=inside)
            cta.traffic.move("DRAM->registers", int(has.sum()) * (part.shape[-1] + 1) * 4)
            #: add -> top, total, o    weights relative to the largest so far
            new = np.maximum(top, w.max(0))
            shift = np.where(np.isneginf(new), np.float32(0), new)
            w = exp2((w - shift) * np.float32(LOG2E))
            alpha = exp2((top - shift) * np.float32(LOG2E))
            total = multiply_add(total, alpha, w.sum(0))
            o = multiply_add(o, alpha[:, None], add_products(parts, w[:, :, None]))
            top = new
        #: combine -> lse, o    weighted mean; rows without a sum have seen no key: 0 and -inf
        some = total != 0
        with np.errstate(divide="ignore", invalid="ignore"):  # where the kernel has infinities, too
            lse = np.where(some, multiply_add(log2(total), np.float32(LN2), top), np.float32(-np.inf))
            factor = divide(np.float32(1), total)
            o = np.where(some[:, None], o * factor[:, None], np.float32(0))
        #: store
        store(lse_out, (batch, token, heads), lse, mask=there)
        rows = batch, token[:, None], heads[:, None]
        writes = there[:, None]
        if C.COLUMNS:
            writes = writes & (cols < C.COLUMNS)
        store(out, (*rows, cols), o, mask=writes)
        cta.traffic.move("registers->DRAM", int(there.sum()) * (out.shape[-1] * out.itemsize + 4))


def of_every_warp(q: Array) -> Array:
    """The A operand ``[4, ROWS, W]`` that all warps have."""
    return np.broadcast_to(q, (4, *q.shape))


def column_halves(o: Fragments, C: HopperDecodeConstants) -> list[Fragments]:
    """The first and the second half of the columns of sums ``[4, ROWS, W]``."""
    half = accumulator(C.W // 2, C.ROWS)
    return [Fragments(half.spread(part), half) for part in np.split(o.tile(), 2, axis=2)]


def add_warps(each: Array, tops: Array, totals: Array, top: Array) -> tuple[Array, Array]:
    """The warps' row sums ``[ROWS]`` and sums ``[ROWS, W]``, put together relative to ``top``."""
    weight = exp2(tops - top)
    total = add_products(weight, totals)
    o = add_products(weight[:, :, None], each)
    return total, o


def _halves(x: Fragments) -> tuple[Fragments, Fragments]:
    """(even, odd) columns of fragments of pairs."""
    even, odd = halves(x.values)
    return x.with_values(even), x.with_values(odd)


def launch(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, *, scale: float,
    config: HopperDecodeConfig, features: Features, out: Array | None = None, arch: str = "sm_90",
    traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twins; arguments and results as of ``emulator.launch``, such as ``hopper_lacks`` lets pass."""
    C, scales = config.constants, features.scales
    batch, tokens, q_heads = q.shape[:3]
    traffic = Traffic() if traffic is None else traffic
    out = np.empty((*q.shape[:3], v_cache.shape[3]), q.dtype) if out is None else out
    lse = np.empty((batch, tokens, q_heads), np.float32)
    part, part_lse = partial_results(out, lse, config.num_splits)
    boxes = boxes_of(k_cache, v_cache, C)
    counters = np.zeros((batch, config.groups), np.int32)
    scale_log2 = np.float32(scale * LOG2E * scales.k.number)
    max_keys = most_keys(block_table.shape[1], k_cache.shape[1])
    x = HopperDecodeLaunch(
        config, len(k_cache), max_keys, q, block_table, seq_lens, features, part, part_lse, counters, out, lse,
        scale_log2,
    )
    dtype = np.dtype(np.float16) if C.PAIRS else q.dtype
    with traffic.launch():
        roles: list[Role] = []
        for program in range(*config.grid()):
            cta = HopperDecodeCTA(C, places_of(C), dtype, boxes, traffic, traced=program == 0)
            item = x.find_item(program)
            roles += [(cta.producer, produce(cta, x.table[item[0]], x.pages, item, 0))]
            roles += [(cta.consumers, consume(cta, x, item))]
        run_roles(roles)
    if config.num_splits > 1 and not C.PARTS:
        merge(part, part_lse, out=out, lse=lse, traffic=traffic)
    return out, lse
