"""MHA decode on Hopper in Gluon: a ring of TMA boxes of several KV heads, mma.sync, warps with keys of their own.

A block of 64 rows of K, and of V, holds HEADS neighbouring heads of 64 / HEADS tokens, as a page has them. The 16 query
rows are those of all these heads; a row sees the keys of its own. Each of the four warps does the softmax of 16 rows of
the block by itself; they meet once a block, where its stage is given back, and are put together at the end.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kvlab.attention.call.results import results
from kvlab.attention.features.arguments import feature_arrays, feature_numbers
from kvlab.attention.features.intervals import most_keys
from kvlab.attention.features.resolve import Features
from kvlab.attention.hopper.kernel import barriers, box_descriptor, view
from kvlab.attention.merge_states.kernel import merge_partial_results as merge
from kvlab.attention.merge_states.kernel import partial_results, partial_strides
from kvlab.attention.tiles.fp8_pairs.kernel import as_pairs
from kvlab.attention.tiles.online_softmax import LOG2E
from kvlab.attention.tiles.strides import PartStrides, RowStrides
from kvlab.triton_support.arrivals import arrivals
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .hopper_config import HopperDecodeConfig
from .hopper_roles import consume, produce
from .hopper_steps import find_item, panel, swizzled

SIZES = ["batches", "groups", "splits", "pages", "max_keys", "table_batch", "lens_stride"]
"""What differs from call to call: no kernel is compiled for its values, as one is for those in a tuple."""


@gluon.jit(do_not_specialize=SIZES)
def attend(
    dk, dv, q_ptr, table_ptr, lens, features, part, part_lse, counters, out, lse, scale_log2, v_factor, numbers,
    batches, groups, splits, pages, max_keys, table_batch, lens_stride, q_strides, part_strides, part_lse_strides,
    o_strides, C: gl.constexpr,
):
    """The query rows of HEADS KV heads of one sequence against the keys of one split; the last to arrive joins them."""
    PANEL: gl.constexpr = panel(C.W)
    PANELS: gl.constexpr = C.W // PANEL
    BOXED: gl.constexpr = swizzled(C.W, 4)
    TILE: gl.constexpr = swizzled(C.W, 3)
    BOXES: gl.constexpr = C.BT // C.BOX
    NB: gl.constexpr = C.NB
    KEYS: gl.constexpr = C.BN // 4
    W: gl.constexpr = C.W
    k_box = gl.allocate_shared_memory(dk.dtype, [NB * PANELS * BOXES, 1, C.BOX, C.HEADS, PANEL], BOXED)
    v_box = gl.allocate_shared_memory(dk.dtype, [NB * PANELS * BOXES, 1, C.BOX, C.HEADS, PANEL], BOXED)
    full = barriers(NB, 1)
    free = barriers(NB, 1)
    fence_async_shared()  # TMA arrives at these barriers
    k_s = view(k_box, [NB, 4, KEYS, W], TILE)
    v_s = view(v_box, [NB, 4, KEYS, W], TILE)
    item = find_item(gl.program_id(0), lens, lens_stride, batches, groups, splits, max_keys, C)
    table = table_ptr + item[0] * table_batch
    terms = (features, numbers, scale_log2, v_factor)
    results = (part, part_strides, part_lse, part_lse_strides, splits)
    join = (groups, counters, out, o_strides, lse)
    gl.warp_specialize(
        [
            (consume, (item, (k_s, v_s), full, free, (q_ptr, q_strides), terms, results, join, gl.constexpr(C))),
            (produce, (item, (dk, dv), (k_box, v_box), full, free, table, pages, gl.constexpr(0), gl.constexpr(C))),
        ],
        [1],
        [C.PRODUCER],
    )


def launch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    *, scale: float, config: HopperDecodeConfig, features: Features, out: torch.Tensor | None = None,
    again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels; arguments and results as of ``kernel.launch``, such as ``hopper_lacks`` lets pass."""
    C, splits, scales = config.constants, config.num_splits, features.scales
    batch, tokens, q_heads = q.shape[:3]
    out, lse = results(q, out, (batch, tokens, q_heads, v_cache.shape[3]))
    part, part_lse = partial_results(out, lse, splits)
    counters = arrivals(batch * config.groups, q.device) if C.PARTS else seq_lens
    if counters is None:
        C, counters, again = C._replace(PARTS=0), seq_lens, None
    k, v = as_pairs(k_cache, v_cache)
    layout = gl.constexpr(swizzled(C.W, 4))
    boxes = (box_descriptor(x, (C.BOX, C.HEADS), layout, name, again) for name, x in (("k", k), ("v", v)))
    pointers = (
        *boxes, q, block_table, seq_lens, feature_arrays(features), part, part_lse, counters, out, lse,
    )
    if not relaunched(attend, pointers, again):
        steps, lse_steps = partial_strides(part, part_lse, splits)
        first_launch(attend, config.grid(), pointers, again)(
            scale * LOG2E * scales.k.number, scales.v.number, feature_numbers(features), batch, config.groups, splits,
            k.shape[0], most_keys(block_table.shape[1], k.shape[1]), block_table.stride(0), seq_lens.stride(0),
            RowStrides(*q.stride()[:3]), PartStrides(*steps), PartStrides(*lse_steps), RowStrides(*out.stride()[:3]),
            C=C, num_warps=4, maxnreg=C.REGISTERS,
        )
    if splits > 1 and not C.PARTS:
        merge(part, part_lse, out, lse, again)
    return out, lse
