"""MLA prefill over a schedule as a portable Triton kernel: programs that walk their units; ``join`` merges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvlab.attention.attend_paged.kernel import WalkSizes, item_of, item_rows, join, launch_join, team_items
from kvlab.attention.call.results import results
from kvlab.attention.features.arguments import feature_arrays, feature_numbers
from kvlab.attention.features.intervals import UNLIMITED
from kvlab.attention.features.kernel import (
    adjust,
    given_positions,
    head_scale,
    hide,
    key_count,
    key_range,
    log_sum,
    nope_scales,
    padding,
    rope_scales,
    row_count,
    row_of,
    row_terms,
    scale_weights,
    start_rows,
    visible_end,
    weigh,
)
from kvlab.attention.features.resolve import Features
from kvlab.attention.mla_prefill.config import MLAPrefillProblem
from kvlab.attention.mla_prefill.kernel import (
    ROPE_HEAD,
    accumulate,
    load_k,
    load_q,
    load_rope,
    load_v,
    rope_pages,
    scores,
)
from kvlab.attention.schedule.config import list_parts
from kvlab.attention.schedule.kernel import item_blocks
from kvlab.attention.tiles.kernel import store_columns
from kvlab.attention.tiles.online_softmax import LOG2E
from kvlab.attention.tiles.pages import Sequences
from kvlab.attention.tiles.strides import RowStrides
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import ExpandedWalk, walked


class ExpandedConstants(NamedTuple):
    """What the walk is compiled for: as ``MLAPrefillConstants``; BLOCK keys of a key block, of which the beginning of a
    unit takes OVERHEAD; ROWS of an item, in TOGETHER tiles.
    """

    PAGE: int
    BOUNDED: bool
    ONE_LOOP: bool
    D: int
    DR: int
    DV: int
    BD: int
    BR: int
    BV: int
    BM: int
    BN: int
    BLOCK: int
    OVERHEAD: int
    ROWS: int
    TOGETHER: int


@triton.jit
def walk(
    q_ptr, k_ptr, v_ptr, rope_ptr, cu_q_ptr, cu_k_ptr, table_ptr, lens_ptr, first_key_ptr, list_ptr, features, o_ptr,
    lse_ptr, part_ptr, part_lse_ptr, scale_log2, v_factor, numbers, problem, q_strides, k_strides, v_strides,
    rope_strides, o_strides, lse_strides, C: tl.constexpr,
):
    """BM query rows of one head of item after item, against the keys of a team's units. K and V hold a sequence's keys
    from ``base`` on. Products are in q's dtype, in bfloat16 for e4m3.
    """
    #: team -> begin, until, first_item, last_item    the places of this team, and the items that lie there
    BM: tl.constexpr = C.BM
    BN: tl.constexpr = C.BN
    BV: tl.constexpr = C.BV
    starts_ptr = list_ptr + problem.starts  #- address
    sequences_ptr = list_ptr + problem.sequences  #- address
    tiles_ptr = list_ptr + problem.tiles  #- address
    firsts_ptr = list_ptr + problem.firsts  #- address
    program = tl.program_id(0)
    team = program // problem.lanes
    begin, until, first_item, last_item = team_items(list_ptr, starts_ptr, firsts_ptr, team, C.OVERHEAD)
    for item in tl.range(first_item, last_item, 1, disable_licm=True):  # what is hoisted takes registers
        #: setup -> q, q_rope, lo, full, hi, first, limit    a unit's rows, the keys they see, the query tiles
        batch, tile = item_of(sequences_ptr, tiles_ptr, item, True)
        q_first, num_q = row_count(cu_q_ptr, batch, 0)
        k_first, num_keys = row_count(cu_k_ptr, batch, 0)
        never = (num_keys == 2147483647).to(tl.int32)  #- instruction: 0; what depends on it is not held between units
        lane = (program + never) % problem.lanes
        nth = tl.arange(0, BM)
        kv_head, row, token, head, is_row = item_rows(lane, tile, nth, num_q, problem, BM, C.TOGETHER)
        total = num_keys
        if lens_ptr is not None:
            total = key_count(tl.load(lens_ptr + batch), problem.max_keys)
        base = total - num_keys
        if first_key_ptr is not None:
            base = tl.load(first_key_ptr + batch).to(tl.int32)
        pad = padding(total, features.leftpad, batch)
        total, base = total - pad, base - pad
        end = visible_end(tl.minimum(base + num_keys, total), features.valid, batch)
        position = token + total - num_q
        top = row + total - num_q  # positions of the tile's rows
        bottom = tl.minimum(row + BM, num_q) - 1 + total - num_q
        q_row = q_first + token
        position, top, bottom = given_positions(
            features.positions, numbers.positions_batch, batch, q_row, is_row, position, top, bottom
        )
        start = tl.load(starts_ptr + item) + C.OVERHEAD
        stop = tl.load(starts_ptr + item + 1)
        origin, _ = item_blocks(
            num_keys, num_q, tile, problem.group, problem.left, problem.right, C.ROWS, C.BLOCK
        )
        opens = (origin + tl.maximum(begin, start) - start) * C.BLOCK
        closes = (origin + tl.minimum(until, stop) - start) * C.BLOCK
        first, limit = key_range(position, end, numbers.left, numbers.right, numbers.chunk)  # [BM]
        top_first, top_limit = key_range(top, end, numbers.left, numbers.right, numbers.chunk)
        _, bottom_limit = key_range(bottom, end, numbers.left, numbers.right, numbers.chunk)
        lo = tl.maximum(tl.maximum(top_first - base, opens), 0)
        hi = tl.where(bottom < top, lo, tl.maximum(tl.minimum(bottom_limit - base, closes), lo))
        full = tl.maximum(tl.minimum((top_limit - base) // BN * BN, hi), lo)
        if C.BOUNDED or C.ONE_LOOP:
            full = lo
        full = tl.where(base < 0, lo, full)  # K may hold more keys than the sequence has
        first, limit = tl.maximum(first, base + lo), tl.minimum(limit, base + hi)
        rows = batch, head, token, is_row, first, limit
        bounds = lo, full, hi
        q, q_rope = load_q(
            q_ptr, q_row * q_strides.token + head * q_strides.head, is_row, C.D, C.DR, C.BD, C.BR
        )  # [BM, BD], [BM, BR]
        k_at = k_ptr + k_first * k_strides.token + kv_head * k_strides.head  #- address
        v_at = v_ptr + k_first * v_strides.token + kv_head * v_strides.head  #- address
        factor, slope = row_terms(scale_log2, features, numbers, batch, kv_head, head)
        if numbers.nope is not None:
            nope = head_scale(
                numbers.nope, features.nope_heads, numbers.nope_scale_batch, numbers.nope_scale_head, batch, kv_head
            )
        if numbers.rope is not None:
            rope = head_scale(
                numbers.rope, features.rope_heads, numbers.rope_scale_batch, numbers.rope_scale_head, batch, ROPE_HEAD
            )
        m, l = start_rows(features.sinks, head, begin <= start)
        o = tl.zeros([BM, BV], tl.float32)
        for MASKED in tl.static_range(2):
            for at in range(bounds[MASKED], bounds[MASKED + 1], BN):
                #: load_k -> k    a K tile, DRAM -> shared memory: those that every row sees, then those seen in part
                held = at + tl.arange(0, BN)  # rows of K
                exists = held < bounds[MASKED + 1]
                k = load_k(
                    k_at, held.to(tl.int64) * k_strides.token, exists, 0, C.D, C.BD, C.D == C.BD, MASKED
                )  # [BN, BD]
                #: load_rope -> k_rope    the rope part of the same keys, from their pages
                key = base + held
                page, slot = row_of(table_ptr, problem.table_batch, batch, k_first, key + pad, exists, C.PAGE, MASKED)
                k_rope = load_rope(
                    rope_ptr, page * rope_strides.page + slot * rope_strides.token, exists, 0, C.DR, C.BR,
                    C.DR == C.BR, MASKED,
                )  # [BN, BR]
                #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
                if numbers.nope is not None:
                    by_key = nope * nope_scales(features, numbers, batch, k_first + held, kv_head, exists)
                if numbers.rope is not None:
                    by_rope = rope * rope_scales(features, numbers, page, slot, ROPE_HEAD, exists)
                s = scores(
                    q, q_rope, k, k_rope, by_key if numbers.nope is not None else None,
                    by_rope if numbers.rope is not None else None,
                )  # [BM, BN]
                s = adjust(s, factor, slope, 1.0, features, numbers, position, key)
                #: mask -> s    keys that a row does not see; the bias of those that it sees
                if MASKED:
                    s = hide(s, rows, key, features, numbers, True)
                #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale; scales of tokens
                p, alpha, m, l = weigh(s, m, l)
                o = o * alpha[:, None]
                p = scale_weights(p, features, numbers, batch, k_first + held, kv_head, exists)
                #: load_v -> v    the V tile of the same keys
                v = load_v(
                    v_at, held.to(tl.int64) * v_strides.token, exists, 0, C.DV, BV, C.DV == BV, MASKED
                )  # [BN, BV]
                #: accumulate -> o    O += P V, P rounded once to the dtype of the product
                o = accumulate(p, v, o, q.dtype)
        #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf
        sees = l != 0
        factor = head_scale(v_factor, features.v_heads, numbers.v_scale_batch, numbers.v_scale_head, batch, kv_head)
        lse = log_sum(m, l, sees)
        o = tl.where(sees[:, None], o * (factor / l)[:, None], 0.0)
        #: store    the result, or a partial one where the item is cut; one without a key is left alone
        whole = (begin <= start) & (stop <= until)
        store_columns(o_ptr, q_row * o_strides.token + head * o_strides.head, is_row & whole, 0, C.DV, o)
        tl.store(lse_ptr + q_row * lse_strides.token + head * lse_strides.head, lse, mask=is_row & whole)
        at_part = (2 * program + (start > begin).to(tl.int32)).to(tl.int64)
        store_columns(part_ptr, (at_part * BM + nth) * C.DV, is_row & sees & ~whole, 0, C.DV, o)
        tl.store(part_lse_ptr + at_part * BM + nth, lse, mask=is_row & ~whole)


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_rope: torch.Tensor, sequences: Sequences, *, scale: float,
    problem: MLAPrefillProblem, config: ExpandedWalk, features: Features, works: Sequence[torch.Tensor],
    out: torch.Tensor | None = None, again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels over the list of a plan, ``works``; the rest as of
    :func:`kvlab.attention.mla_prefill.kernel.launch`.
    """
    out, lse = results(q, out, (*q.shape[:2], problem.value))
    if q.numel() == 0 or problem.batch == 0:
        return out, lse
    (work,), tiles, schedule, sizes = works, config.tiles, config.schedule, walked(problem, q.shape[0])
    places = config.places(sizes)
    part = out.new_empty((places, tiles.BM, problem.value), dtype=torch.float32)
    part_lse = lse.new_empty((places, tiles.BM))
    f, cu_q, cu_k = features.of_parts(), sequences.cu_q, sequences.cu_k
    pointers = q, k, v, k_rope, *sequences, work, feature_arrays(f), out, lse, part, part_lse
    joined = work, part, part_lse, cu_k, cu_q, out, lse
    if relaunched(walk, pointers, again):
        relaunched(join, joined, again)
        return out, lse
    scales, (PAGE, max_k, table_batch, rope_strides) = f.scales, rope_pages(k_rope, sequences)
    items, lanes = config.items(sizes), schedule.lanes(problem.heads)
    left, right = f.mask.by_length if sequences.starts is None else (UNLIMITED, UNLIMITED)
    counts = WalkSizes(1, sizes.tokens, max_k, lanes, table_batch, 1, *list_parts(items), items, left, right)
    constants = ExpandedConstants(
        PAGE, f.mask.bounded, tiles.one_loop, problem.nope, problem.rope, problem.value, tiles.BD, tiles.BR, tiles.BV,
        tiles.BM, tiles.BN, schedule.block, schedule.overhead, schedule.rows, schedule.together,
    )
    o_strides, lse_strides = (RowStrides(0, *x.stride()[:2]) for x in (out, lse))
    first_launch(walk, config.grid(sizes), pointers, again)(
        scale * LOG2E * scales.q.number, scales.v.number, feature_numbers(f), counts,
        *(RowStrides(0, *x.stride()[:2]) for x in (q, k, v)), rope_strides, o_strides, lse_strides,
        C=constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )
    launch_join(config, sizes, counts, (o_strides, lse_strides), joined, again)
    return out, lse
