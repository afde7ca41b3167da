"""MLA decode over a schedule as a portable Triton kernel: programs that walk their units; ``join`` merges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvlab.attention.attend_paged.config import schedule_problem
from kvlab.attention.attend_paged.kernel import WalkSizes, item_of, item_rows, join, launch_join, team_items, unit_keys
from kvlab.attention.call.backends import function_at
from kvlab.attention.call.results import results
from kvlab.attention.features.arguments import feature_arrays, feature_numbers
from kvlab.attention.features.kernel import (
    adjust,
    head_scale,
    hide,
    key_count,
    key_range,
    log_sum,
    row_terms,
    start_rows,
    value_scales,
    visible_end,
    weigh,
)
from kvlab.attention.features.resolve import Features
from kvlab.attention.mla_decode.config import MLADecodeProblem
from kvlab.attention.mla_decode.kernel import accumulate, load_k, load_v, place, scores
from kvlab.attention.schedule.config import list_parts
from kvlab.attention.schedule.kernel import launch as make_list
from kvlab.attention.tiles.kernel import load_parts as load_q
from kvlab.attention.tiles.kernel import store_columns
from kvlab.attention.tiles.strides import PageStrides, RowStrides
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import LatentWalk, walked

RING = "kvlab.attention.mla_decode.hopper"
"""Where the kernel is that walks a list on Hopper."""


class LatentConstants(NamedTuple):
    """What the walk is compiled for: as ``MLAConstants``; BLOCK keys of a key block, of which the beginning of a unit
    takes OVERHEAD; ROWS of an item, in TOGETHER tiles. LISTED: items are others than the sequences, one each.
    """

    PAGE: int
    ONE: bool
    DV: int
    DR: int
    BV: int
    BR: int
    BM: int
    BN: int
    BOUNDED: bool
    BLOCK: int
    OVERHEAD: int
    ROWS: int
    TOGETHER: int
    LISTED: bool


@triton.jit
def walk(
    q_ptr, kv_ptr, rope_ptr, by_block_ptr, table_ptr, seq_lens_ptr, list_ptr, features, o_ptr, lse_ptr, part_ptr,
    part_lse_ptr, scale_log2, v_factor, numbers, problem, q_strides, kv_strides, rope_strides, by_block_strides,
    o_strides, lse_strides, C: tl.constexpr,
):
    """BM query rows (tokens x heads) of item after item, against the keys of a team's units. Products are in q's dtype,
    in bfloat16 for e4m3.
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
        #: setup -> q, q_rope, lo, hi, first, limit    a unit's rows, their keys, those of the unit, the query tile
        batch, tile = item_of(sequences_ptr, tiles_ptr, item, C.LISTED)
        num_keys = key_count(tl.load(seq_lens_ptr + batch * problem.seq_lens_batch), problem.max_keys)
        tokens = problem.tokens
        never = (num_keys == 2147483647).to(tl.int32)  #- instruction: 0; what depends on it is not held between units
        lane = (program + never) % problem.lanes
        nth = tl.arange(0, BM)
        kv_head, row, token, head, is_row = item_rows(lane, tile, nth, tokens, problem, BM, C.TOGETHER)
        position = num_keys - tokens + token  # [BM]
        end = visible_end(num_keys, features.valid, batch)
        start = tl.load(starts_ptr + item) + C.OVERHEAD
        stop = tl.load(starts_ptr + item + 1)
        lo, hi = unit_keys(
            num_keys, tokens, tile, row, end, begin, until, start, stop, numbers, problem, BM, C.BLOCK, C.ROWS,
            C.BOUNDED,
        )
        first, limit = key_range(position, end, numbers.left, numbers.right, numbers.chunk)
        first, limit = tl.maximum(first, lo), tl.minimum(limit, hi)
        rows = batch, head, token, is_row, first, limit
        q, q_rope = load_q(
            q_ptr, batch * q_strides.batch + token.to(tl.int64) * q_strides.token + head * q_strides.head, is_row,
            C.DV, C.DR, BV, C.BR,
        )  # [BM, BV], [BM, BR]
        factor, slope = row_terms(scale_log2, features, numbers, batch, kv_head, head)
        latent = head_scale(v_factor, features.v_heads, numbers.v_scale_batch, numbers.v_scale_head, batch, kv_head)
        m, l = start_rows(features.sinks, head, begin <= start)
        o = tl.zeros([BM, BV], tl.float32)
        for at in range(lo, hi, BN):
            #: load_k -> k, k_rope    the tile of these pages, latent and rope columns, DRAM -> shared memory
            key = at + tl.arange(0, BN)
            exists = key < hi
            page, slot, key, exists = place(
                table_ptr + batch * problem.table_batch, at, key, 0, exists, None, C.PAGE, BN, C.ONE
            )
            k, k_rope = load_k(
                kv_ptr, rope_ptr, by_block_ptr, page * kv_strides.page + slot * kv_strides.token,
                page * rope_strides.page + slot * rope_strides.token,
                page * by_block_strides.page + slot * by_block_strides.token, exists, q.dtype, C.DV, C.DR, BV, C.BR,
            )
            #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
            scale = value_scales(features, numbers, page, slot, kv_head, exists)
            by_key = latent * scale
            s = scores(q, q_rope, k, k_rope, by_key if numbers.nope is not None else None)  # [BM, BN]
            s = adjust(s, factor, slope, scale, features, numbers, position, key)
            #: mask -> s    keys that a row does not see
            s = hide(s, rows, key, features, numbers, C.BOUNDED)
            #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
            p, alpha, m, l = weigh(s, m, l)
            o = o * alpha[:, None]
            #: load_v -> v    V is the latent part of the K tile: nothing moves from DRAM
            v = load_v(k)  # [BN, BV]
            #: accumulate -> o    O += P V, P rounded once to the dtype of the product; scales of tokens
            if features.v_tokens is not None:
                p = p * scale[None, :]
            o = accumulate(p, v, o)
        #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf
        sees = l != 0
        if features.sinks is None:
            sees = sees & (first < limit)
        lse = log_sum(m, l, sees)
        o = tl.where(sees[:, None], o * (latent / l)[:, None], 0.0)
        #: store    the result, or a partial one where the item is cut; one without a key is left alone
        whole = (begin <= start) & (stop <= until)
        store_columns(
            o_ptr, batch * o_strides.batch + token.to(tl.int64) * o_strides.token + head * o_strides.head,
            is_row & whole, 0, C.DV, o,
        )
        tl.store(
            lse_ptr + batch * lse_strides.batch + token * lse_strides.token + head * lse_strides.head, lse,
            mask=is_row & whole,
        )
        at_part = (2 * program + (start > begin).to(tl.int32)).to(tl.int64)
        store_columns(part_ptr, (at_part * BM + nth) * C.DV, is_row & sees & ~whole, 0, C.DV, o)
        tl.store(part_lse_ptr + at_part * BM + nth, lse, mask=is_row & ~whole)


def launch(
    q: torch.Tensor, kv_cache: torch.Tensor, k_rope: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    *, scale: float, features: Features, config: LatentWalk, row_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None, works: Sequence[torch.Tensor] | None = None, again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels; arguments and results as of :func:`kvlab.attention.mla_decode.kernel.launch`. works : the list,
    made here if None.
    """
    out, lse = results(q, out, (*q.shape[:3], kv_cache.shape[2]))
    if q.numel() == 0:
        return out, lse
    f, tiles, schedule = features.of_latents(k_rope.dtype == kv_cache.dtype), config.tiles, config.schedule
    problem = MLADecodeProblem.of(q, kv_cache, k_rope, block_table, seq_lens, row_scales)
    sizes = walked(problem)
    items = schedule_problem(sizes, f.mask.left, f.mask.right)
    early = config.ring is not None
    (work,) = works or make_list(seq_lens, problem=items, config=schedule, early=early, again=again)
    places = 2 * config.grid(sizes)[0]
    part = out.new_empty((places, tiles.BM, problem.latent), dtype=torch.float32)
    part_lse = lse.new_empty((places, tiles.BM))
    arrays, lists, into = (q, kv_cache, k_rope), (block_table, seq_lens, work), (out, lse, part, part_lse)
    joined, kernel = (work, part, part_lse, seq_lens, None, out, lse), walk
    if config.ring is None:
        pointers = *arrays, row_scales, *lists, feature_arrays(f), *into
    else:
        kernel = function_at(f"{RING}:attend")
        pointers = function_at(f"{RING}:pointers_of")(config.ring, arrays, lists, into, f, again)
    if relaunched(kernel, pointers, again):
        relaunched(join, joined, again)
        return out, lse
    counts = WalkSizes(
        problem.heads, problem.tokens, problem.max_keys, schedule.lanes(1), block_table.stride(0), seq_lens.stride(0),
        *list_parts(schedule.most_items(items)), schedule.most_items(items), f.mask.left, f.mask.right,
    )
    o_strides, lse_strides = (RowStrides(*x.stride()[:3]) for x in (out, lse))
    if config.ring is None:
        constants = LatentConstants(
            problem.page_size, tiles.one_page and not f.mask.windowed, problem.latent, problem.rope, tiles.BV, tiles.BR,
            tiles.BM, tiles.BN, f.mask.windowed, schedule.block, schedule.overhead, schedule.rows, schedule.together,
            config.lists_items(sizes),
        )
        first_launch(kernel, config.grid(sizes), pointers, again)(
            f.scales.factor_log2(scale), f.scales.v.number, feature_numbers(f), counts, RowStrides(*q.stride()[:3]),
            *(PageStrides(*[*((0, 0) if x is None else x.stride()[:2]), 0]) for x in (kv_cache, k_rope, row_scales)),
            o_strides, lse_strides, C=constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )
    else:
        numbers = function_at(f"{RING}:numbers_of")(arrays, lists, into, counts, f, scale)
        first_launch(kernel, config.grid(sizes), pointers, again)(*numbers, C=config.ring, num_warps=4, launch_pdl=True)
    launch_join(config, sizes, counts, (o_strides, lse_strides), joined, again, early=early)
    return out, lse
