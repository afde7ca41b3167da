"""The Hopper prefill kernel in NumPy: its roles as they meet at mbarriers, byte by byte in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlab.attention.call.operands import result_dtype
from kvlab.attention.features.intervals import key_count, key_range
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import head_scale
from kvlab.attention.features.scores import adjust_by_row, factor_of, hide
from kvlab.attention.features.sinks import add_sink
from kvlab.attention.features.softcap import cap_terms
from kvlab.attention.hopper.emulator import NOTHING, quad_sum, row_max
from kvlab.attention.hopper.turns import Role, Wait, run_roles
from kvlab.attention.machines.rows import per_sequence
from kvlab.attention.schedule.config import list_parts
from kvlab.attention.schedule.emulator import team_items
from kvlab.attention.tiles.masked import load, store
from kvlab.attention.tiles.online_softmax import LOG2E
from kvlab.attention.tiles.pages import DENSE, Sequences
from kvlab.hardware import TmaDescriptor
from kvlab.hardware.chip import divide, exp2, log2, multiply_add
from kvlab.staging import Fragments, Traffic, ceildiv
from kvlab.staging.tile.rows_over_warps import butterfly

from .config import PrefillProblem
from .hopper_config import FIXED_ABOVE, TANH, HopperPrefillConfig, HopperPrefillConstants
from .hopper_cta import HopperPrefillCTA, loaded_roles, places_of

Array = np.ndarray[Any, Any]


@dataclass
class HopperPrefillLaunch:
    """Common part of all programs: sizes, where sequences lie, results, and the number of tiles taken."""

    problem: PrefillProblem
    config: HopperPrefillConfig
    features: Features
    programs: int
    o_array: Array
    lse_array: Array
    inner: np.float32
    scale: np.float32
    unit: np.float32
    v_factor: np.float32
    max_k: int
    cu_q: Array | None = None
    cu_k: Array | None = None
    table: Array | None = None
    lens: Array | None = None
    taken: list[int] = field(default_factory=list)
    work: tuple[Array, Array, Array] | None = None
    room: int = 0
    q_array: Array | None = None

    def program_items(self, program: int) -> tuple[int, int, int, int]:
        """(begin, until, first, last): the places of a program's team in the list, and the items that lie there."""
        assert self.work is not None
        C, (work, _, _) = self.config.constants, self.work
        team = program // (self.problem.kv_heads // C.HEADS * C.TOGETHER)
        starts, _, _, firsts = (work[at:] for at in list_parts(self.room))
        begin, until, first, last = team_items(work, starts, firsts, np.asarray(team), C.OVERHEAD)
        return int(begin), int(until), int(first), int(last)

    def find_unit(self, item: int, begin: int, until: int, program: int) -> tuple[int, ...]:
        """Item of a work list -> as of ``find_tile``, then the key blocks ``lo`` to ``hi - 1`` of what a team with the
        places ``begin ... until`` does of it, one that is masked where its rows see none; and which partial result that
        is, -1: the whole.
        """
        assert self.work is not None
        assert self.cu_q is not None
        assert self.lens is not None
        C, problem, (work, _, _) = self.config.constants, self.problem, self.work
        left, right = self.sizes[2:]
        starts, sequences, tiles, _ = (work[at:] for at in list_parts(self.room))
        rows = C.NC * C.BM
        lane = program % (problem.kv_heads // C.HEADS * C.TOGETHER)
        batch, nth = int(sequences[item]), int(tiles[item])
        tile = nth // C.HEADS
        num_keys = int(key_count(self.lens[batch], self.max_k))
        q_first = int(self.cu_q[batch])
        num_q = int(self.cu_q[batch + 1]) - q_first
        head = (nth % C.HEADS * (problem.kv_heads // C.HEADS) + lane // C.TOGETHER) * problem.group
        row = (tile * C.TOGETHER + lane % C.TOGETHER) * rows
        start = int(starts[item]) + C.OVERHEAD
        stop = int(starts[item + 1])
        top = tile * C.TOGETHER * rows // C.PACK + num_keys - num_q
        origin = max(top - left, 0) // C.LISTED
        first = (origin + max(begin, start) - start) * (C.LISTED // C.BN)
        last = (origin + min(until, stop) - start) * (C.LISTED // C.BN)
        lo, hi = self.key_blocks(row, num_q, num_keys, left, right)
        lo, hi = max(lo, first), min(hi, last)
        if lo >= hi:
            lo, hi = first, first + 1
        whole = begin <= start and stop <= until
        place = 2 * program + int(start > begin)
        part = -1 if whole else 2 * place + int(begin <= start)
        return batch, head, row, q_first, num_q, 0, num_keys, lo, hi, part

    def find_tile(self, t: int) -> tuple[int, int, int, int, int, int, int]:
        """Tile number -> its sequence, query head and first row, and the sequence's offsets and lengths."""
        config, problem, C = self.config, self.problem, self.config.constants
        r = t % (config.together * config.row_tiles)
        head = t // (config.together * config.row_tiles) * config.together + r % config.together
        tile = config.row_tiles - 1 - r // config.together
        batch, q_first, num_q, k_first, num_keys = head // problem.q_heads, 0, problem.max_q, 0, self.max_k
        rows, spare = C.NC * C.BM, 2 if C.ALIGNED else 1
        above, below_end = tile, config.row_tiles - tile
        if self.cu_q is not None:
            starts = self.cu_q[:-1] // rows + spare * np.arange(problem.batch)
            batch = int(np.searchsorted(starts, tile, "right")) - 1
            q_first, num_q = int(self.cu_q[batch]), int(self.cu_q[batch + 1] - self.cu_q[batch])
            above = tile - int(starts[batch])
            below_end = int(self.cu_q[batch + 1]) // rows + batch + 1 - tile
        if self.cu_k is not None:
            k_first, num_keys = int(self.cu_k[batch]), int(self.cu_k[batch + 1] - self.cu_k[batch])
        if self.lens is not None:
            num_keys = int(key_count(self.lens[batch], self.max_k))
        row = above * rows - (num_keys - num_q) % (C.BM if C.SKIP else rows) if C.ALIGNED else num_q - below_end * rows
        return batch, head % problem.q_heads, row, q_first, num_q, k_first, num_keys

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Most query rows and keys of a sequence, and the sides of the window."""
        return self.problem.max_q, self.max_k, self.features.mask.left, self.features.mask.right

    def key_blocks(self, row: int, num_q: int, num_keys: int, left: int, right: int) -> tuple[int, int]:
        """Blocks of BN keys that some row of the tile sees; at least one, which then is masked."""
        C = self.config.constants
        top = row // C.PACK + num_keys - num_q
        bottom = top + C.NC * C.BM // C.PACK - 1
        if C.ODD:
            bottom = (row + C.NC * C.BM - 1) // C.PACK + num_keys - num_q
        hi = max(-(-min(bottom + right + 1, num_keys) // C.BN), 1)
        first = max(top, num_keys - num_q) - left  # rows before the sequence see nothing
        return min(max(first, 0) // C.BN, hi - 1), hi


def produce(cta: HopperPrefillCTA, x: HopperPrefillLaunch, program: int) -> Iterator[Wait]:
    """One warp takes tile after tile, tells the consumers, and brings Q, K and V."""
    #@ producer
    #: begin -> t, it, j    the first tile is the program's own; none loaded yet
    C, me = cta.C, cta.producer  #- launch
    q_full, q_free, k_full, k_free, v_full, v_free = cta.bars_of_producer
    tiles, group, left, right = x.config.tiles, x.problem.group, *x.sizes[2:]  #- launch
    NC = C.NC
    ROWS = NC * C.BM
    it = 0  # K/V blocks so far: stage it % NR, phase it // NR
    j = 0  # tiles so far
    t = program
    if C.TOGETHER:
        begin, until, t, tiles = x.program_items(t)
    while t < tiles:
        #: find -> head, row, lo, hi    the rows of a tile, and the blocks of keys that they see
        if C.TOGETHER:
            batch, head, row, q_first, num_q, k_first, num_keys, lo, hi, part = x.find_unit(t, begin, until, program)
        else:
            batch, head, row, q_first, num_q, k_first, num_keys = x.find_tile(t)
            lo, hi = x.key_blocks(row, num_q, num_keys, left, right)
        q_batch = batch * 0 if C.RAGGED_Q else batch
        k_batch = batch * 0 if C.RAGGED_K else batch
        exists = row + ROWS > 0 and max(row, 0) < num_q * C.PACK
        pages_of = None if x.table is None else x.table[batch]
        if exists:
            #: tell -> slot    the consumers, who are done with the Q before in this buffer, which tile comes
            slot = j % C.NQ
            for w in range(NC):
                yield q_free[slot * NC + w], ((j // C.NQ) & 1) ^ 1
            unit = (lo, hi, part) if C.TOGETHER else ()  #- layout
            cta.tell(slot, batch, head, row, q_first, num_q, num_keys, *unit)
            cta.meet(me)
            #: load_q -> j    DRAM -> shared memory, 64 rows for each consumer
            for w in range(NC):
                u = slot * NC + w
                token = (row + w * C.BM) // C.PACK
                first = min(max(token, 1 - C.BM), num_q - 1)  # a box touches the tensor
                if C.ODD:  # consumers copy their rows
                    q_full[u].arrive(me)
                else:
                    cta.load_rows("q", q_full[u], u, q_batch, q_first + first, head)
            j += 1
            for i in range(hi - lo):
                #: load_k -> b, key    from the last block to the first, as soon as the stage is free
                b = it % C.NR
                key = (hi - 1 - i) * C.BN
                found = cta.find_pages(pages_of, k_batch, key, num_keys)  # before the wait
                yield k_free[b], ((it // C.NR) & 1) ^ 1
                cta.load_rows(cta.loaded[0], k_full[b], b, found, k_first, head // group, key)
                #: load_v -> it    the V tile of the same keys
                yield v_free[b], ((it // C.NR) & 1) ^ 1
                cta.load_rows(cta.loaded[1], v_full[b], b, found, k_first, head // group, key)
                it += 1
        #: take -> t    the next tile that no program has taken; in turn where all take the same time, or of the list
        x.taken.append(program)  #- programs
        if C.TOGETHER:
            t += 1
        elif C.EQUAL:
            t += x.programs
        else:
            t = x.programs + len(x.taken) - 1
    #: end    no more tiles
    slot = j % C.NQ
    for w in range(NC):
        yield q_free[slot * NC + w], ((j // C.NQ) & 1) ^ 1
    cta.send(slot, -1)
    for w in range(NC):
        q_full[slot * NC + w].arrive(me)


def change(cta: HopperPrefillCTA, x: HopperPrefillLaunch) -> Iterator[Wait]:
    """One warpgroup changes tiles of e4m3 on their way to the consumers: widens K and V for a q of 16 bits, or
    transposes V.
    """
    #@ changer
    #: begin -> it, j, batch    the first tile, -1: none
    C, me = cta.C, cta.changer  #- launch
    q_full, q_free, raw_k_full, raw_k_free, raw_full, raw_free = cta.bars_of_producer
    k_full, k_free, v_full, v_free = cta.changed_bars
    max_q, max_k, left, right = x.sizes
    NC = C.NC
    it = 0
    j = 0
    yield q_full[0], 0
    batch = cta.receive(me, 0)
    while batch >= 0:
        #: hear -> slot, lo, hi, first    the tile; its words have been read; the first key that a row sees
        slot = j % C.NQ
        _, tile_row, _, num_q, num_keys = cta.hear(me, slot, max_q, max_k)
        if C.TOGETHER:
            lo, hi, _ = cta.hear_unit(me, slot)
        else:
            lo, hi = x.key_blocks(tile_row, num_q, num_keys, left, right)
        for w in range(NC):
            cta.arrive(me, q_free[slot * NC + w])
        first = num_keys - num_q - left
        for i in range(hi - lo):
            #: change -> r, b, it    as soon as the stage is free; V transposed with zeros where no row sees a key
            r = it % C.NR
            b = it % C.NB
            if C.STORED < C.ITEM:
                yield raw_k_full[r], (it // C.NR) & 1
                yield k_free[b], ((it // C.NB) & 1) ^ 1
                cta.widen_tile(me, "raw k", "k", r, b)
                cta.arrive(me, raw_k_free[r])
                cta.arrive(me, k_full[b])
            yield raw_full[r], (it // C.NR) & 1
            yield v_free[b], ((it // C.NB) & 1) ^ 1
            if C.STORED < C.ITEM:
                cta.widen_tile(me, "raw", "v", r, b)
            else:
                key = (hi - 1 - i) * C.BN
                if (C.WINDOW or C.CLEAN) and (first > key or num_keys < key + C.BN):
                    cta.clean_rows(me, "raw", b, first - key, num_keys - key)
                cta.transpose_tile(me, b)
            cta.arrive(me, raw_free[r])
            cta.arrive(me, v_full[b])
            it += 1
        #: turn -> j, batch    the next tile
        j += 1
        yield q_full[j % C.NQ * C.NC], (j // C.NQ) & 1
        batch = cta.receive(me, j % C.NQ)


def consume(cta: HopperPrefillCTA, x: HopperPrefillLaunch, W: int) -> Iterator[Wait]:
    """One warpgroup: BM rows of every tile. S = Q K^T of a block and O += P V of the one before it run together."""
    #@ consumer
    #: begin -> it, j, batch    the first tile, -1: none
    C, me = cta.C, cta.consumers[W]  #- launch
    BM = C.BM
    BN = C.BN
    DV = C.DV
    NC = C.NC
    SHIFT = np.float32(8 if C.ITEM == 1 else 0)  # e4m3 has weights up to 2^8
    q_full, q_free, k_full, k_free, v_full, v_free = cta.bars
    o_array, lse_array, group = x.o_array, x.lse_array, x.problem.group  #- launch
    features, scales = x.features, x.features.scales  #- launch
    inner, scale, unit, v_factor = x.inner, x.scale, x.unit, x.v_factor  #- launch
    max_q, max_k, left, right = x.sizes
    it = 0
    j = 0
    if DV > C.COLUMNS and C.PRODUCTS > 1:  # what is in O's box behind the last column is stored nowhere
        cta.write(me, cta.places.tiles["o"][W], np.zeros((BM, DV), cta.dtype), "o", W)
    if C.TURNS and W == NC - 1:
        cta.turn[0].arrive(me)
    yield q_full[W], 0
    batch = cta.receive(me, 0)
    while batch >= 0:
        #: hear -> slot, head, row, lo, hi, position, highest, factor    where the tile's rows stand, its head's scale
        slot = j % C.NQ
        u = slot * C.NC + W
        head, tile_row, q_first, num_q, num_keys = cta.hear(me, slot, max_q, max_k)
        if C.TOGETHER:
            lo, hi, part = cta.hear_unit(me, slot)
        else:
            lo, hi = x.key_blocks(tile_row, num_q, num_keys, left, right)
        row = tile_row + W * BM
        position = row // C.PACK + num_keys - num_q
        highest = position + BM // C.PACK - 1
        if C.ODD:
            highest = (row + BM - 1) // C.PACK + num_keys - num_q
        kv_head = head // group
        factor = factor_of(1.0, features, batch, kv_head, np.full((1, BM), head))
        if C.SKIP:  # the last blocks, of which this warpgroup's rows see nothing
            own = max(ceildiv(min(position + BM + right, num_keys), BN), lo + 1)
            for _ in range(hi - own):
                b = it % C.NB
                yield k_full[b], (it // C.NB) & 1
                cta.arrive(me, k_free[b])
                yield v_full[b], (it // C.NB) & 1
                cta.arrive(me, v_free[b])
                if C.TURNS:
                    yield cta.sync(cta.turn[W], (it - j) & 1)
                    cta.turn[(W + 1) % NC].arrive(me)
                it += 1
            hi = own
        b = it % C.NB
        if C.ODD:
            gather_rows(cta, x, me, u, head, row, q_first, num_q)
        q = cta.query(me, u)
        if C.Q_REGISTERS and C.NQ == 1:  # the producer may fetch the next Q
            cta.arrive(me, q_free[u])
        exists = True
        if C.TOGETHER and not C.TURNS:
            exists = row < num_q * C.PACK
        if exists:
            #: scores -> s    S = Q K^T of the last block
            yield k_full[b], (it // C.NB) & 1
            s = cta.scores(me, q, u, b)
            cta.wait_mma(me, 0)
            cta.arrive(me, k_free[b])
            #: mask -> s    the features of scores, keys that a row does not see
            s = adjust_by_row(s, factor, inner, features)
            if C.FIRST:
                s = mask_block(s, row, position, (hi - 1) * BN, num_keys, features, C)
            #: softmax -> p, m, l, alpha, o    row maximum, exponentials, sums of each lane
            m = row_max(s)
            if C.FIXED:  # from here on m is in units of log2
                m = fixed_top(np.maximum(m, np.float32(-1)) * scale, scale)
                e = s.with_values(exp2(multiply_add(s.values, scale, -s.by_row(m[None]))))
            else:
                if C.FIRST:
                    m = np.maximum(m, NOTHING)  # a row may see nothing of this block
                e = s.with_values(exp2(multiply_add(s.values, scale, -s.by_row(multiply_add(m, scale, -SHIFT)[None]))))
            l = quad_sum(e, C.CHAINS)
            p = cta.round_p(e)
            alpha = np.ones(BM, np.float32)
            o = cta.zeros()
            #: clean    V behind the end of the sequence; of an only block both ends together, below
            if C.ITEM == 2 and C.CLEAN and hi * BN > num_keys and (not C.WINDOW or hi - lo > 1):
                yield v_full[b], (it // C.NB) & 1
                cta.clean_rows(me, "v", b, 0, num_keys - (hi - 1) * BN)
            for i in range(1, hi - lo):
                #: apart -> o    O += P V of the block before, which ends before Q K^T of the next begins
                weights = cta.operand_p(p)
                if C.APART:
                    yield v_full[b], (it // C.NB) & 1
                    if C.TURNS:
                        yield cta.sync(cta.turn[W], (it - j) & 1)
                    o = cta.accumulate(me, weights, b, o)
                    cta.wait_mma(me, 0)
                    cta.arrive(me, v_free[b])
                #: scores -> s    S = Q K^T of the next block, started
                it += 1
                b = it % C.NB
                key = (hi - 1 - i) * BN
                yield k_full[b], (it // C.NB) & 1
                if C.TURNS and not C.APART:
                    yield cta.sync(cta.turn[W], (it - j - 1) & 1)
                s = cta.scores(me, q, u, b)
                #: accumulate -> o    O += P V of the block before, started
                vb = (it - 1) % C.NB
                if not C.APART:
                    yield v_full[vb], ((it - 1) // C.NB) & 1
                    if C.EARLY:  # rescale while Q K^T runs
                        cta.wait_mma(me, 1)
                        o = o.times(alpha[None])
                    o = cta.accumulate(me, weights, vb, o)
                if C.TURNS:
                    cta.turn[(W + 1) % NC].arrive(me)
                cta.wait_mma(me, 0 if C.APART else C.PRODUCTS)
                cta.arrive(me, k_free[b])
                #: mask -> s    the features of scores, keys that a row does not see
                if C.FIXED:  # the softmax caps them
                    s = s * s.by_row(factor)
                else:
                    s = adjust_by_row(s, factor, inner, features)
                cut = key + BN > min(position + right + 1, num_keys) or key < highest - left
                if C.MASKED and cut:
                    s = mask_block(s, row, position, key, num_keys, features, C)
                #: softmax -> e, m, l, alpha    online: new row maximum, exponentials, sums of each lane
                if C.FIXED:
                    e = capped_weights(s, m, inner, scale)
                    l += quad_sum(e)
                else:
                    m_new = np.maximum(m, row_max(s))
                    if C.LAZY:
                        m_new = np.where((m_new - m) * scale > 8, m_new, m)  # weights up to 2^8
                    base = m_new * scale
                    alpha = exp2(multiply_add(m, scale, -base))
                    m = m_new
                    if C.HOLD == 1:
                        yield v_full[vb], ((it - 1) // C.NB) & 1
                    if C.ITEM == 1:  #- instruction
                        base = multiply_add(m, scale, -SHIFT)
                    e = s.with_values(exp2(multiply_add(s.values, scale, -s.by_row(base[None]))))
                    lanes = quad_sum(e, C.CHAINS)
                    l = multiply_add(l, alpha[:, None], lanes)
                #: rescale -> p, o    P rounded, O *= alpha; V's stage is free
                if C.HOLD == 2:
                    yield v_full[vb], ((it - 1) // C.NB) & 1
                if not C.APART:
                    cta.wait_mma(me, 0)
                p = cta.round_p(e)
                if not C.APART:
                    cta.arrive(me, v_free[vb])
                if not (C.EARLY or C.FIXED):
                    o = o.times(alpha[None])
            #: clean -> b    V before the first key that a row of the sequence sees
            b = it % C.NB
            first = num_keys - num_q - left - lo * BN
            end = num_keys - lo * BN
            if C.ITEM == 2 and C.WINDOW and (first > 0 or end < BN):
                yield v_full[b], (it // C.NB) & 1
                cta.clean_rows(me, "v", b, first, end)
            #: accumulate -> o    O += P V of the first block
            weights = cta.operand_p(p)
            if not (C.Q_REGISTERS and C.NQ == 1):
                cta.arrive(me, q_free[u])
            yield v_full[b], (it // C.NB) & 1
            if C.EARLY:
                cta.wait_mma(me, 0)
                o = o.times(alpha[None])
            o = cta.accumulate(me, weights, b, o)
            #: normalise -> o, lse    rows without a visible key give 0 and -inf, or the sink's logit
            by = None if C.FIXED or C.ITEM == 1 or features.sinks is not None else (m, scale)  #- instruction
            heads: Any = head
            counts = None
            if C.TOGETHER and features.sinks is not None:
                heads = head + (row + np.arange(BM)) % C.PACK
                counts = (heads * 0 + (part & 1)) > 0
            base = m if C.FIXED else multiply_add(m, scale, -SHIFT)
            lse, inv = row_results(base, l, features.sinks, heads, counts, unit, by)
            if C.STORED == 1:
                v_scale = head_scale(v_factor, scales.v.heads, batch, kv_head)
                inv = inv * v_scale
            cta.wait_mma(me, 0)
            cta.wait_store(me)  # the tile before has left its buffer; the warps meet behind it
            v_free[b].arrive(me[:1])
            o = o.times(inv[None])
            #: store    registers -> shared memory -> DRAM; where rows do not exist straight to DRAM
            if C.TOGETHER:
                store_unit(cta, x, W, o, lse, (batch, head, row, q_first, num_q, part))
            else:
                values = o.tile()[0].astype(o_array.dtype)  #- layout
                rows = row + np.arange(BM)
                store(lse_array, (batch, q_first + rows, head), lse, mask=(rows >= 0) & (rows < num_q))
                if row < 0 or row + BM > num_q:  # TMA stores no part of a box, nor to negative coordinates
                    r = row + np.arange(BM)[:, None]
                    d = np.arange(DV)
                    is_there = (r >= 0) & (r < num_q)
                    if C.COLUMNS < DV:
                        is_there = is_there & (d < C.COLUMNS)
                    store(o_array, (batch, q_first + r, head, d), values, mask=is_there)
                else:
                    o_page = batch * 0 if C.RAGGED_Q else batch
                    cta.store_tile(W, values, o_page, q_first + row, head, me)
            it += 1
        else:
            #: give back -> it    a unit of which this warpgroup has no rows
            if not (C.Q_REGISTERS and C.NQ == 1):
                cta.arrive(me, q_free[u])
            for _ in range(hi - lo):
                b = it % C.NB
                yield k_full[b], (it // C.NB) & 1
                cta.arrive(me, k_free[b])
                yield v_full[b], (it // C.NB) & 1
                cta.arrive(me, v_free[b])
                it += 1
        #: turn -> j, batch    the next tile
        j += 1
        yield q_full[j % C.NQ * C.NC + W], (j // C.NQ) & 1
        batch = cta.receive(me, j % C.NQ)
    #: end    the last tile leaves
    if C.TURNS and W == 0:
        yield cta.sync(cta.turn[0], (it - j) & 1)
    cta.wait_store(me)


def gather_rows(
    cta: HopperPrefillCTA, x: HopperPrefillLaunch, me: tuple[int, ...], u: int, head: int, row: int, q_first: int,
    num_q: int,
) -> None:
    """A consumer's rows of Q into buffer u, panel by panel; 0 where there is none."""
    assert x.q_array is not None
    C, q_array = cta.C, x.q_array
    r, d = row + np.arange(C.BM)[:, None], np.arange(C.D)
    is_there = (r < num_q * C.PACK) & (d < q_array.shape[3])
    values = load(q_array, (0, q_first + r // C.PACK, head + r % C.PACK, d), mask=is_there, other=0.0)
    cta.gather_rows(me, "q", u, values)


def store_unit(
    cta: HopperPrefillCTA, x: HopperPrefillLaunch, W: int, o: Fragments, lse: Array, unit: tuple[int, ...]
) -> None:
    """A consumer's rows of a unit: the result, or a partial one, float32, where the item is cut. Rows that do not exist
    are left alone; TMA stores no part of a box.
    """
    batch, head, row, q_first, num_q, part = unit
    assert x.work is not None
    C, me, (_, part_array, part_lse_array) = cta.C, cta.consumers[W], x.work
    nth = np.arange(C.BM)
    end = num_q * C.PACK - row
    values, d = o.tile()[0], np.arange(C.DV)
    is_there = (nth < end)[:, None] & (d < C.COLUMNS)
    if part < 0:
        token, of_head = (row + nth) // C.PACK, head + (row + nth) % C.PACK
        store(x.lse_array, (batch, q_first + token, of_head), lse, mask=nth < end)
        if C.ODD or end < C.BM:
            at = batch, (q_first + token)[:, None], of_head[:, None], d
            store(x.o_array, at, values.astype(x.o_array.dtype), mask=is_there)
        else:
            rounded = values.astype(x.o_array.dtype)
            cta.store_tile(W, rounded, batch * 0, q_first + row // C.PACK, head, me)
    else:
        place = W * C.BM + nth
        store(part_lse_array, (part >> 1, place), lse, mask=nth < end)
        store(part_array, (part >> 1, place[:, None], d), values, mask=is_there)


def fixed_top(top: Array, scale: np.float32) -> Array:
    """``top``, in units of log2, or so many whole units above it that no score weighs more than 2^56."""
    found: Array = top + np.maximum(np.ceil(scale - np.float32(FIXED_ABOVE) - top), 0)
    return found


def capped_weights(s: Fragments, top: Array, inner: np.float32, scale: np.float32) -> Fragments:
    """``2^(tanh(s * inner) * scale - top)``, by a polynomial where no score of a warp is beyond its limit; 0 of scores
    -inf.
    """
    x, cube = s.values, inner * inner * inner
    powers = inner, cube, cube * inner * inner
    a, b, c = (np.float32(factor) * power * scale for factor, power in zip(TANH, powers, strict=True))
    normal = 2.0**-20 <= inner <= 2.0**20  # of c
    far = (np.abs(x) * inner > 0.5).reshape(4, -1).any(1).repeat(32).reshape(1, 128, 1, 1) | (not normal)
    with np.errstate(over="ignore", invalid="ignore"):  # of scores beyond the limit
        t = x * x
        near = (t * (t * c + b) + a) * x
    power = np.where(far, np.tanh(x * inner) * scale, near) - s.by_row(top[None])
    return s.with_values(exp2(np.where(np.isneginf(x), np.float32(-np.inf), power)))


def mask_block(
    s: Fragments, row: int, position: int, key: int, num_keys: int, features: Features, C: HopperPrefillConstants
) -> Fragments:
    """-inf for the keys that a row does not see; ``position`` of the first one, ``row``."""
    nth = np.arange(C.BM)[None]
    if C.ODD:
        nth = nth + row % C.PACK
    rows = position + nth // C.PACK
    c = key + np.arange(C.BN)[None]
    first, limit = key_range(rows, np.asarray(num_keys), features.mask.left, features.mask.right, 0)
    return hide(s, (rows, rows, rows, rows, first, limit), c, features, C.WINDOW)


def row_results(
    top: Array, l: Array, sinks_array: Array | None, head: Any, counts: Array | None, unit: np.float32,
    by: tuple[Array, np.float32] | None
) -> tuple[Array, Array]:
    """LSE of each row in ``unit``, and what its O is multiplied by. ``top``: the row's maximum in units of log2, ``by``
    the factors that ptxas multiplies in one operation with what is added to it. ``counts``: where rows have their sink;
    None: all.
    """
    total = butterfly(np.add, l)
    own = top, total
    top, total, weight = add_sink(top, total, sinks_array, head)
    if counts is not None:
        top, total = np.where(counts, top, own[0]), np.where(counts, total, own[1])
        weight = np.where(counts, weight, np.float32(1))
    seen = np.where(total == 0, np.float32(1), total)
    lse = top + log2(seen) if by is None else multiply_add(*by, log2(seen))
    lse = np.where(total == 0, np.float32(-np.inf), lse * unit)
    return lse, np.where(total == 0, np.float32(0), divide(weight, seen))


def launch(
    q: Array, k: Array, v: Array, sequences: Sequences = DENSE, *, scale: float, problem: PrefillProblem,
    config: HopperPrefillConfig, features: Features, out: Array | None = None, arch: str = "sm_90",
    traffic: Traffic | None = None, processors: int = 132,
) -> tuple[Array, Array]:
    """Run the twin on ``processors`` SMs; arrays as in ``reference``, results as of ``emulator.launch``. The arguments
    are valid, the arrays such as TMA takes.
    """
    C = config.constants
    out = np.empty((*q.shape[:3], C.COLUMNS), result_dtype(q)) if out is None else out
    lse = np.empty(q.shape[:3], np.float32)
    boxes = boxes_of({"q": (q, (C.BM, 1)), "k": (k, (C.BOX, 1)), "v": (v, (C.BOX, 1)), "o": (out, (C.BM, 1))}, C)
    scales = features.scales
    inner, outer = cap_terms(scale * (scales.q.number * scales.k.number), features.softcap)
    programs = min(processors, config.tiles)
    unit = 1 if problem.base2 else 1 / LOG2E
    numbers = np.float32(inner), np.float32(outer), np.float32(unit), np.float32(scales.v.number)
    o_array, lse_array = (per_sequence(a, sequences.cu_q) for a in (out, lse))
    x = HopperPrefillLaunch(
        problem, config, features, programs, o_array, lse_array, *numbers, sequences.most_keys(k), *sequences[:4]
    )
    traffic = Traffic() if traffic is None else traffic
    with traffic.launch():
        run_programs(x, q.dtype, boxes, traffic)
    return out, lse


def boxes_of(arrays: dict[str, tuple[Array, tuple[int, int]]], C: HopperPrefillConstants) -> dict[str, TmaDescriptor]:
    """Descriptors of what TMA copies, by the role of its buffers. arrays : each with the rows of its boxes."""
    roles = loaded_roles(C)
    arrays = {name: a for name, a in arrays.items() if not (C.ODD and name in "qo")}
    return {
        roles.get(name, name): TmaDescriptor.of(a, (1, *rows, 128 // a.itemsize), "128B")
        for name, (a, rows) in arrays.items()
    }


def run_programs(x: HopperPrefillLaunch, dtype: Any, boxes: dict[str, TmaDescriptor], traffic: Traffic) -> None:
    """The roles of all programs, as they meet."""
    C, busy = x.config.constants, list(range(x.programs))
    if C.TOGETHER:  # the others do nothing
        items = {program: x.program_items(program)[2:] for program in busy}
        busy = [program for program, (first, last) in items.items() if first < last]
    ctas = [HopperPrefillCTA(C, places_of(C), dtype, boxes, traffic, traced=n == 0) for n, _ in enumerate(busy)]
    roles: list[Role] = [(cta.producer, produce(cta, x, n)) for n, cta in zip(busy, ctas, strict=True)]
    roles += [(cta.changer, change(cta, x)) for cta in ctas if C.STORED == 1]
    roles += [(me, consume(cta, x, w)) for cta in ctas for w, me in enumerate(cta.consumers)]
    run_roles(roles)
