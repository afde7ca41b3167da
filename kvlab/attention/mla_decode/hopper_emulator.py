"""The Hopper MLA decode kernel in NumPy: its roles as they meet at mbarriers, byte by byte in shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvlab.attention.features.intervals import key_count, most_keys
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scores import adjust_by_row, factor_of, hide
from kvlab.attention.hopper.emulator import NOTHING, find_pages, softmax, split_bounds
from kvlab.attention.hopper.turns import Role, Wait, run_roles
from kvlab.attention.merge_states.emulator import launch as merge
from kvlab.attention.merge_states.emulator import partial_results
from kvlab.attention.schedule.emulator import team_items
from kvlab.attention.tiles.online_softmax import LN2, LOG2E
from kvlab.hardware import TmaDescriptor
from kvlab.hardware.chip import divide, log2, multiply_add
from kvlab.staging import Fragments, Traffic, ceildiv
from kvlab.staging.tile.rows_over_warps import butterfly

from .hopper_config import HopperMLAConfig, HopperMLAConstants
from .hopper_cta import HALVES, HopperMLACTA, Warps, places_of

Array = np.ndarray[Any, Any]
PARTS = 3  # products of Q K^T


@dataclass
class HopperMLALaunch:
    """Common part of all programs: sizes, where sequences lie, and the results."""

    config: HopperMLAConfig
    heads: int
    tokens: int
    pages: int
    max_keys: int
    table: Array
    lens: Array | None
    kv: Array
    k_rope: Array
    out: Array
    lse: Array
    scale: np.float32
    features: Features
    row_scales: Array | None

    @property
    def C(self) -> HopperMLAConstants:
        """The constants of the kernel."""
        return self.config.constants

    def find_items(self, program: int) -> tuple[int, int, int]:
        """First item of a program, the end of its items, and from one to the next."""
        return program, self.config.items, self.config.programs

    def find_item(self, t: int) -> tuple[int, int, int, int, int, int, int]:
        """Item number -> its sequence and split, first token and head of its rows, first key, all keys, and blocks."""
        batch, split, token, head, length = self.find_place(t)
        return batch, split, token, head, *self.find_keys(split, length)

    def find_place(self, t: int) -> tuple[int, int, int, int, int]:
        """Item number -> its sequence and split, first token and head of its rows; and the sequence's length."""
        config, C = self.config, self.C
        tile, split = t % config.row_tiles, t // config.row_tiles % config.num_splits
        batch = t // (config.row_tiles * config.num_splits)
        token, head = tile // config.head_tiles * C.TB, tile % config.head_tiles * C.HB
        length = self.max_keys if self.lens is None else int(self.lens[batch])
        return batch, split, token, head, length

    def find_keys(self, split: int, length: int) -> tuple[int, int, int]:
        """First key of a split, all keys, and blocks of keys."""
        config, C = self.config, self.C
        num_keys = int(key_count(np.asarray(length), self.max_keys))
        lo, hi = split_bounds(split, config.num_splits, num_keys, C.BN)
        return lo, num_keys, max(ceildiv(hi - lo, C.BN), 1)

    def find_pages(self, batch: int, key: int, num_keys: int) -> Array:
        """The pages of a block's boxes; past the end none."""
        C = self.C
        return find_pages(self.table[batch], key, num_keys, self.pages, C.BN, C.BOX, C.PAGE)

    def find_slots(self, batch: int, key: int, num_keys: int) -> Array:
        """The slots of the cache that a list names at its places from ``key`` on, or where the keys of a sequence are;
        behind them -1.
        """
        C = self.C
        place = key + np.arange(C.BN)
        inside, slot = place < num_keys, np.full(C.BN, -1, np.int64)
        if C.LISTED:
            slot[inside] = self.table[batch, place[inside]]
        else:
            page = self.table[batch, place[inside] // C.PAGE].astype(np.int64)
            slot[inside] = page * C.PAGE + place[inside] % C.PAGE
        return slot

    def find_rows(self, slot: Array) -> tuple[dict[str, Array], Array]:
        """The parts of the rows in these slots, and whether there are such. Absent ones are zeros."""
        C = self.C
        there = (slot >= 0) & (slot < self.pages * C.PAGE)
        page, token = np.where(there, slot, 0) // C.PAGE, np.where(there, slot, 0) % C.PAGE
        parts = {"left": self.kv[..., : C.DV // 2], "right": self.kv[..., C.DV // 2 :], "rope": self.k_rope}
        if self.row_scales is not None:
            parts |= {"latents": self.kv, "scales": self.row_scales}
        return {part: np.where(there[:, None], a[page, token], a.dtype.type(0)) for part, a in parts.items()}, there

    def rows(self, token: int, head: int) -> tuple[Array, Array, Array]:
        """Token and head of each row of a tile, and whether they exist."""
        C = self.C
        r = np.arange(C.BM)
        t, h = token + r // C.HB, head + r % C.HB
        return t, h, (t < self.tokens) & (h < self.heads)

    def store_half(
        self, cta: HopperMLACTA, me: Warps, o: Fragments, b: int, half: str, split: int, batch: int, token: int,
        head: int, some: bool,
    ) -> None:
        """Half the columns of the output, registers -> DRAM: rows that exist, of a split with some keys or the only
        one. BOXED: as whole rows through shared memory.
        """
        C, some = self.C, some or self.config.num_splits == 1
        values = o.tile()[0].astype(self.out.dtype)
        if C.BOXED:
            cta.store_half(me, values, b, half, split * self.out.shape[1] + batch, token, head, some)
        else:
            t, h, there = self.rows(token, head)
            r, first = np.nonzero(there & some)[0], HALVES.index(half) * C.DV // 2
            self.out[split, batch, t[r], h[r], first : first + C.DV // 2] = values[r]

    def store_lse(self, lse: Array, split: int, batch: int, token: int, head: int) -> None:
        """The logarithm of the sum of each row that exists."""
        token_of, head_of, there = self.rows(token, head)
        self.lse[split, batch, token_of[there], head_of[there]] = lse[there]


@dataclass
class HopperMLAWalk(HopperMLALaunch):
    """One program of a launch over a work list: a split is the number of an item, of which it may have a part."""

    config: Any
    work: Array
    part: Array
    part_lse: Array
    places: tuple[int, int, int, int]
    program: int = 0

    @property
    def C(self) -> HopperMLAConstants:
        """The constants of the kernel."""
        ring: HopperMLAConstants = self.config.ring
        return ring

    def find_team(self) -> tuple[int, int, int, int]:
        """Places of this program's team in a work list, and the items that lie there."""
        starts, _, _, firsts = (self.work[at:] for at in self.places)
        team = np.array(self.program // self.config.schedule.lanes(1))
        begin, until, first, last = map(int, team_items(self.work, starts, firsts, team, self.C.OVERHEAD))
        return begin, until, first, last

    def find_items(self, program: int) -> tuple[int, int, int]:
        """First item of this program, the end of its items, and from one to the next."""
        _, _, first, last = self.find_team()
        return first, last, 1

    def find_blocks(self, t: int) -> tuple[int, int]:
        """Places of an item's key blocks."""
        return int(self.work[self.places[0] + t]) + self.C.OVERHEAD, int(self.work[self.places[0] + t + 1])

    def find_part(self, t: int) -> tuple[bool, int]:
        """Tells whether all of an item is this program's, and where its partial results go otherwise."""
        begin, until, _, _ = self.find_team()
        start, stop = self.find_blocks(t)
        return begin <= start and stop <= until, 2 * self.program + int(start > begin)

    def find_place(self, t: int) -> tuple[int, int, int, int, int]:
        """Item number -> its sequence and itself, first token and head of its rows; and the sequence's length."""
        _, sequences, tiles, _ = (self.work[at:] for at in self.places)
        batch, lanes = int(sequences[t]), self.config.schedule.lanes(1)
        row = (int(tiles[t]) * lanes + self.program % lanes) * self.C.BM
        return batch, t, row // self.heads, row % self.heads, int(np.asarray(self.lens)[batch])

    def find_keys(self, split: int, length: int) -> tuple[int, int, int]:
        """First key of a unit, all keys, and blocks of keys."""
        BN, num_keys = self.C.BN, int(key_count(np.asarray(length), self.max_keys))
        begin, until, _, _ = self.find_team()
        start, stop = self.find_blocks(split)
        lo = (max(begin, start) - start) * BN
        hi = max(min((min(until, stop) - start) * BN, num_keys), lo)
        return lo, num_keys, max(ceildiv(hi - lo, BN), 1)

    def store_lse(self, lse: Array, split: int, batch: int, token: int, head: int) -> None:
        """The logarithm of the sum of each row that exists, of an item or of its part."""
        (t, h, there), (whole, place) = self.rows(token, head), self.find_part(split)
        if whole:
            self.lse[batch, t[there], h[there]] = lse[there]
        else:
            self.part_lse[place, there] = lse[there]

    def store_half(
        self, cta: HopperMLACTA, me: Warps, o: Fragments, b: int, half: str, split: int, batch: int, token: int,
        head: int, some: bool,
    ) -> None:
        """Half the columns of the output, registers -> DRAM: rows that exist, of an item or a part with some keys."""
        (t, h, there), (whole, place) = self.rows(token, head), self.find_part(split)
        first, values = HALVES.index(half) * self.C.DV // 2, o.tile()[0]
        columns = slice(first, first + self.C.DV // 2)
        if whole:
            self.out[batch, t[there], h[there], columns] = values[there].astype(self.out.dtype)
        elif self.C.BOXED:
            cta.store_half(me, values, b, half, place, 0, 0, some)
        elif some:
            self.part[place, there, columns] = values[there]


def produce(cta: HopperMLACTA, x: HopperMLALaunch, program: int) -> Iterator[Wait]:
    """One warp brings Q and the latent rows of item after item; four warps those of a list."""
    #@ producer
    #: begin -> it, turn    nothing loaded yet
    C = cta.C  #- launch
    first, last, step = x.find_items(program)  #- launch
    it, turn = 0, 0
    for t in range(first, last, step):
        #: find -> batch, split, token, head, length    the rows of an item; its length and pages are on their way
        batch, split, token, head, length = x.find_place(t)
        #: load_q -> turn    DRAM -> shared memory
        yield cta.q_free, turn ^ 1
        cta.load_queries(batch, token, head)
        turn ^= 1
        #: keys -> lo, num_keys, blocks    once the length is here
        lo, num_keys, blocks = x.find_keys(split, length)
        for i in range(blocks):
            #: load_left -> b, key    columns of the leader's half of V, and those of rope
            b, key = it % C.NB, lo + i * C.BN
            row = key % C.PAGE if C.BOX == C.BN else 0
            if C.LISTED:
                rows, there = x.find_rows(x.find_slots(batch, key, num_keys))
                yield cta.l_free[b], ((it // C.NB) & 1) ^ 1
                cta.gather("left", b, rows["left"], there)
                cta.gather("rope", b, rows["rope"], there)
                cta.tell(b, there)
                cta.l_full[b].arrive_copied(cta.producer)
                cta.arrive(cta.producer, cta.l_full[b])
            else:
                found = x.find_pages(batch, key, num_keys)
                yield cta.l_free[b], ((it // C.NB) & 1) ^ 1
                cta.l_full[b].expect_bytes(C.BN * (C.DV // 2 + C.DR) * 2, cta.producer[0])
                cta.load_keys("left", b, cta.l_full[b], found, row)
                cta.load_keys("rope", b, cta.l_full[b], found, row)
            #: load_right -> it    columns of the follower's half
            yield cta.r_free[b], ((it // C.NB) & 1) ^ 1
            if C.LISTED:
                cta.gather("right", b, rows["right"], there)
                cta.r_full[b].arrive_copied(cta.producer)
            else:
                cta.r_full[b].expect_bytes(C.BN * (C.DV // 2) * 2, cta.producer[0])
                cta.load_keys("right", b, cta.r_full[b], found, row)
            it += 1


def produce_half(cta: HopperMLACTA, x: HopperMLALaunch, program: int, half: int) -> Iterator[Wait]:
    """Four warps bring half the latents of rows with scales, multiplied out; those of the left half Q and rope too."""
    #@ half
    #: begin -> it, turn    nothing loaded yet
    C = cta.C  #- launch
    me, full, free = cta.producers[half], (cta.l_full, cta.r_full)[half], (cta.l_free, cta.r_free)[half]  #- programs
    first, last, step = x.find_items(program)  #- launch
    it, turn = 0, 0
    for t in range(first, last, step):
        #: find -> batch, split, token, head, length    the rows of an item; its length is on its way
        batch, split, token, head, length = x.find_place(t)
        #: load_q -> turn    DRAM -> shared memory
        if not half:
            yield cta.q_free, turn ^ 1
            cta.load_queries(batch, token, head)
        turn ^= 1
        #: keys -> lo, num_keys, blocks, rows, there    once the length is here; the first rows
        lo, num_keys, blocks = x.find_keys(split, length)
        rows, there = x.find_rows(x.find_slots(batch, lo, num_keys))
        for i in range(blocks):
            #: load -> b, slot, one, other    half a block into registers; where the next one lies
            b = it % C.NB
            slot = x.find_slots(batch, lo + (i + 1) * C.BN, num_keys)
            one = cta.load_latents(rows, there, 2 * half)
            other = cta.load_latents(rows, there, 2 * half + 1)
            #: put -> rows, there, it    multiplied out, once the stage is free
            yield free[b], ((it // C.NB) & 1) ^ 1
            if not half:
                cta.gather("rope", b, rows["rope"], there)
                if C.LISTED:
                    cta.tell(b, there)
            cta.put_latents(me, b, 2 * half, one)
            rows, there = x.find_rows(slot)
            cta.put_latents(me, b, 2 * half + 1, other)
            if not half:
                full[b].arrive_copied(me)
            cta.arrive(me, full[b])
            it += 1


def lead(cta: HopperMLACTA, x: HopperMLALaunch, program: int) -> Iterator[Wait]:
    """One warpgroup: scores, softmax, and the left half of the output."""
    #@ leader
    #: begin -> it, turn    the first item
    C, scale, tokens = cta.C, x.scale, x.tokens  #- launch
    first, last, step = x.find_items(program)  #- launch
    me, features = cta.leader, x.features  #- programs
    BN = C.BN
    it, turn = 0, 0
    for t in range(first, last, step):
        #: find -> batch, split, token, head, lo, blocks, limit, factor    rows, keys, how many the first token sees
        batch, split, token, head, lo, num_keys, blocks = x.find_item(t)
        limit = num_keys - tokens + 1
        row = np.arange(C.BM)
        factor = factor_of(1.0, features, batch, 0, np.minimum(head + row % C.HB, x.heads - 1)[None])
        #: scores -> s    S = Q K^T of the first block
        yield cta.q_full, turn
        s = yield from cta.start_scores(me, it % C.NB, (it // C.NB) & 1)
        m = np.full(C.BM, NOTHING)
        l = np.zeros((C.BM, 4), np.float32)
        o = cta.zeros()
        cta.wait_mma(me, 0)
        for i in range(blocks - 1):
            #: mask -> s    the features of scores, keys that a row does not see
            key = lo + i * BN
            s = adjust_by_row(s, factor, 0.0, features)
            if C.LISTED:
                s = cta.mask_absent(me, s, it % C.NB)
            elif C.MASKED and key + BN > limit:
                s = mask_rows(s, token, key, limit, tokens, features, C)
            #: softmax -> p, m, l, alpha    online: new row maximum, exponentials, sums of each lane
            e, m, l, alpha = softmax(s, m, l, scale)
            p = e.with_values(e.values.astype(cta.dtype))
            #: accumulate -> o    O = alpha O + P V, started
            o = o.times(alpha[None])
            b = it % C.NB
            o = cta.accumulate(me, p, b, "left", o)
            #: send    P and alpha to the follower, who is done with those of the block before
            before = it + C.NB - 1
            yield cta.r_free[before % C.NB], ((before // C.NB) & 1) ^ 1
            cta.send(me, p, alpha)
            #: scores -> s, it    S = Q K^T of the next block runs behind it
            if C.SCALED:  # whose producers wait for nothing but free stages
                cta.wait_mma(me, 0)
                cta.arrive(me, cta.l_free[b])
            it += 1
            s = yield from cta.start_scores(me, it % C.NB, (it // C.NB) & 1)
            if not C.SCALED:
                cta.wait_mma(me, PARTS)
                cta.arrive(me, cta.l_free[b])
            cta.wait_mma(me, 0)
            if C.LATE:
                cta.s_done.arrive(me)
        #: last    no more Q K^T: the producer may fetch the next Q
        cta.arrive(me, cta.q_free)
        #: mask -> s    the features of scores, keys that a row does not see
        key = lo + (blocks - 1) * BN
        s = adjust_by_row(s, factor, 0.0, features)
        if C.LISTED:
            s = cta.mask_absent(me, s, it % C.NB)
        elif key + BN > limit:
            s = mask_rows(s, token, key, limit, tokens, features, C)
        #: softmax -> p, m, l, alpha, total, inv    of the last block; a row that saw no key gives 0
        e, m, l, alpha = softmax(s, m, l, scale)
        p = e.with_values(e.values.astype(cta.dtype))
        total = butterfly(np.add, l)
        with np.errstate(divide="ignore"):  # where the kernel has infinities, too
            inv = np.where(total == 0, np.float32(0), divide(np.float32(1), total))
        #: accumulate -> o    O = alpha O + P V of the last block, started
        o = o.times(alpha[None])
        b = it % C.NB
        if key + BN > num_keys:
            cta.clean_rows(me, b, "left", max(num_keys - key, 0))
        o = cta.accumulate(me, p, b, "left", o)
        #: send    P, alpha and 1 / l to the follower
        before = it + C.NB - 1
        yield cta.r_free[before % C.NB], ((before // C.NB) & 1) ^ 1
        cta.put(me, 1, inv)
        cta.send(me, p, alpha)
        #: normalise -> o, lse    natural logarithm
        with np.errstate(divide="ignore", invalid="ignore"):
            lse = np.where(total == 0, np.float32(-np.inf), multiply_add(m, scale, log2(total)) * np.float32(LN2))
        cta.wait_mma(me, 0)
        o = o.times(inv[None])
        #: store    registers -> DRAM; an empty split leaves its partial output alone
        x.store_lse(lse, split, batch, token, head)
        x.store_half(cta, me, o, b, "left", split, batch, token, head, lo < num_keys)
        cta.arrive(me, cta.l_free[b])
        #: next -> it, turn    the next item
        it += 1
        turn ^= 1


def follow(cta: HopperMLACTA, x: HopperMLALaunch, program: int) -> Iterator[Wait]:
    """The other warpgroup: the right half of the output, with P, alpha and 1 / l from the leader."""
    #@ follower
    #: begin -> it    the first item
    C, me = cta.C, cta.follower  #- launch
    first, last, step = x.find_items(program)  #- launch
    it, late = 0, 0
    for t in range(first, last, step):
        #: find -> batch, split, token, head, lo, blocks, o    rows and keys
        batch, split, token, head, lo, num_keys, blocks = x.find_item(t)
        o = cta.zeros()
        for _ in range(blocks - 1):
            #: receive -> b, alpha    P and alpha of the next block
            b = it % C.NB
            yield cta.sync(cta.p_full, it & 1)
            alpha = cta.get(me, 0)
            #: accumulate -> o, it    O = alpha O + P V, P from shared memory; late: beside the leader's softmax
            o = o.times(alpha[None])
            yield cta.r_full[b], (it // C.NB) & 1
            if C.RIGHT_COPIES > 0:
                cta.hazards.fence_async(me)
            if C.LATE:
                yield cta.sync(cta.s_done, late)
                late ^= 1
            o = cta.accumulate(me, None, b, "right", o)
            cta.wait_mma(me, 0)
            cta.arrive(me, cta.r_free[b])
            it += 1
        #: receive -> b, alpha, inv    of the last block, and 1 / l
        b = it % C.NB
        yield cta.sync(cta.p_full, it & 1)
        alpha = cta.get(me, 0)
        inv = cta.get(me, 1)
        #: accumulate -> o    O = alpha O + P V of the last block
        o = o.times(alpha[None])
        yield cta.r_full[b], (it // C.NB) & 1
        if C.RIGHT_COPIES > 0:
            cta.hazards.fence_async(me)
        key = lo + (blocks - 1) * C.BN
        if key + C.BN > num_keys:
            cta.clean_rows(me, b, "right", max(num_keys - key, 0))
        o = cta.accumulate(me, None, b, "right", o)
        cta.wait_mma(me, 0)
        o = o.times(inv[None])
        #: store    registers -> DRAM; an empty split leaves its partial output alone
        x.store_half(cta, me, o, b, "right", split, batch, token, head, lo < num_keys)
        cta.arrive(me, cta.r_free[b])
        #: next -> it    the next item
        it += 1


def mask_rows(
    s: Fragments, token: int, key: int, first_limit: int, tokens: int, features: Features, C: Any
) -> Fragments:
    """-inf for the keys that a row does not see. Row r is token ``token + r // HB``; token 0 sees ``first_limit``."""
    r = token + np.arange(C.BM)[None] // C.HB
    c = key + np.arange(C.BN)[None]
    limit = first_limit + np.minimum(r, tokens - 1)
    return hide(s, (r, r, r, r, r, limit), c, features, False)


def launch(
    q: Array, kv_cache: Array, k_rope: Array, block_table: Array, seq_lens: Array | None, *, scale: float,
    features: Features, config: HopperMLAConfig, row_scales: Array | None = None, out: Array | None = None,
    arch: str = "sm_90", traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twins; arguments and results as of ``emulator.launch``, such as ``hopper_lacks`` lets pass."""
    C, splits = config.constants, config.num_splits
    batch, tokens, heads, _ = q.shape
    traffic = Traffic() if traffic is None else traffic
    out = np.empty((batch, tokens, heads, C.DV), q.dtype) if out is None else out
    lse = np.empty((batch, tokens, heads), np.float32)
    part, part_lse = partial_results(out, lse, splits)
    boxes = boxes_of(C, q, kv_cache, k_rope)
    boxes["o"] = box_of_output(C, part.reshape(splits * batch, tokens, heads, C.DV))
    max_keys = most_keys(block_table.shape[1], 1 if C.LISTED else kv_cache.shape[1])
    scale_log2 = np.float32(scale * LOG2E)
    x = HopperMLALaunch(
        config, heads, tokens, len(kv_cache), max_keys, block_table, seq_lens, kv_cache, k_rope, part, part_lse,
        scale_log2, features, row_scales,
    )
    run_programs(C, q.dtype, boxes, [x] * config.programs, traffic)
    if splits > 1:
        merge(part, part_lse, out=out, lse=lse, traffic=traffic)
    return out, lse


def walk(
    arrays: tuple[Array, Array, Array], lists: tuple[Array, Array, Array], results: tuple[Array, ...],
    scale_log2: float, features: Features, config: Any, places: tuple[int, int, int, int], programs: int,
    traffic: Traffic,
) -> None:
    """All programs of a launch over a work list. arrays : q and the windows of the cache; lists : the table, the
    lengths and the list, whose parts begin at ``places``; results : out, lse, and the partial ones.
    """
    (q, kv, k_rope), (table, lens, work), (out, lse, part, part_lse), C = arrays, lists, results, config.ring
    max_keys = most_keys(table.shape[1], kv.shape[1])
    x = HopperMLAWalk(
        config, q.shape[2], q.shape[1], len(kv), max_keys, table, lens, kv, k_rope, out, lse, np.float32(scale_log2),
        features, None, work, part, part_lse, places,
    )
    boxes = boxes_of(C, q, kv, k_rope) | {"o": box_of_output(C, part.reshape(-1, C.TB, C.HB, C.DV))}
    run_programs(C, q.dtype, boxes, [replace(x, program=n) for n in range(programs)], traffic)


def boxes_of(C: HopperMLAConstants, q: Array, kv_cache: Array, k_rope: Array) -> dict[str, TmaDescriptor]:
    """Descriptors of what TMA loads."""
    rows: dict[str, tuple[Array, tuple[int, ...]]] = {"q": (q, (C.TB, C.HB))}
    if not C.GATHERED:
        rows |= {"k": (kv_cache, (C.BOX,)), "rope": (k_rope, (C.BOX,))}
    return {name: TmaDescriptor.of(a, (1, *n, 64), "128B") for name, (a, n) in rows.items()}


def box_of_output(C: HopperMLAConstants, rows: Array) -> TmaDescriptor:
    """The descriptor of results ``[pages, tokens, heads, columns]``."""
    width = 128 // rows.itemsize
    by_panels = np.moveaxis(rows.reshape(*rows.shape[:3], -1, width), 3, 1)
    return TmaDescriptor.of(by_panels, (1, 4, C.TB, C.HB, width), "128B")


def run_programs(
    C: HopperMLAConstants, dtype: np.dtype[Any], boxes: dict[str, TmaDescriptor], programs: Sequence[HopperMLALaunch],
    traffic: Traffic,
) -> None:
    """Run the roles of all programs, each of which has what the launch tells it."""
    with traffic.launch():
        roles: list[Role] = []
        for n, x in enumerate(programs):
            cta = HopperMLACTA(C, places_of(C), dtype, boxes, traffic, traced=n == 0)
            if C.SCALED:
                roles += [(me, produce_half(cta, x, n, half)) for half, me in enumerate(cta.producers)]
            else:
                roles.append((cta.producer, produce(cta, x, n)))
            roles += [(cta.leader, lead(cta, x, n)), (cta.follower, follow(cta, x, n))]
        run_roles(roles)
