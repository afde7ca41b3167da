"""MLA decode on Hopper in Gluon: TMA, mbarriers, asynchronous wgmma, warps specialised as producer, leader, follower.

64 query rows (tokens x heads) lie in shared memory, 64 latent rows pass through it at a time, in two stages, once for
Q K^T and for P V. The output of 64 x 512 columns stays in the registers of two warpgroups.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvlab.attention.call.results import results
from kvlab.attention.features.arguments import feature_arrays, feature_numbers
from kvlab.attention.features.intervals import most_keys
from kvlab.attention.features.resolve import Features
from kvlab.attention.hopper.kernel import BOX_LAYOUT, PANEL, TILE_LAYOUT, barriers, box_descriptor, operand
from kvlab.attention.merge_states.kernel import merge_partial_results as merge
from kvlab.attention.merge_states.kernel import partial_results, partial_strides
from kvlab.attention.tiles.online_softmax import LOG2E
from kvlab.attention.tiles.strides import PartStrides, RowStrides
from kvlab.triton_support.dependents import let_next_begin, wait_for_launch_before
from kvlab.triton_support.launching import Again, first_launch, relaunched
from kvlab.triton_support.twins import compiled

from .hopper_config import HopperMLAConfig, HopperMLAConstants
from .hopper_roles import follow, lead, produce, produce_half
from .hopper_steps import K_LAYOUT, ROWS_LAYOUT

globals().update(compiled(gluon.jit, gl, let_next_begin.fn, wait_for_launch_before.fn))
SIZES = [
    "items", "row_tiles", "head_tiles", "splits", "batches", "heads", "tokens", "pages", "max_keys", "table_batch",
    "columns", "lens_stride",
]
"""What differs from call to call: no kernel is compiled for its values, as one is for those in a tuple."""


@gluon.jit(do_not_specialize=SIZES)
def attend(
    dq, dk, dk_rope, do, kv, out, lse, part_lse, table, lens, work, features, kv_page, kv_token, scale, numbers, items,
    row_tiles, head_tiles, splits, batches, heads, tokens, pages, max_keys, table_batch, columns, lens_stride,
    o_strides, lse_strides, sizes, C: gl.constexpr,
):
    """A program: shared memory, barriers, and its partitions."""
    BOXES: gl.constexpr = C.BN // C.BOX
    PANELS: gl.constexpr = C.DV // PANEL
    NUMBERS: gl.constexpr = 2 + C.NB if C.LISTED else 2
    q_box = gl.allocate_shared_memory(dq.dtype, [PANELS, 1, C.TB, C.HB, PANEL], BOX_LAYOUT)
    q_rope_box = gl.allocate_shared_memory(dq.dtype, [1, 1, C.TB, C.HB, PANEL], BOX_LAYOUT)
    k_box = gl.allocate_shared_memory(dq.dtype, [C.NB * PANELS * BOXES, 1, C.BOX, PANEL], K_LAYOUT)
    k_rope_box = gl.allocate_shared_memory(dq.dtype, [C.NB * BOXES, 1, C.BOX, PANEL], K_LAYOUT)
    p_s = gl.allocate_shared_memory(dq.dtype, [C.BM, C.BN], TILE_LAYOUT)
    rows_s = gl.allocate_shared_memory(gl.float32, [NUMBERS, C.BM], ROWS_LAYOUT)
    q_full = barriers(1, 1).index(0)
    q_free = barriers(1, 1).index(0)
    l_full = barriers(C.NB, C.LEFT_COPIES + 1)
    l_free = barriers(C.NB, 1)
    r_full = barriers(C.NB, C.RIGHT_COPIES if C.RIGHT_COPIES > 0 else 1)
    r_free = barriers(C.NB, 1)
    fence_async_shared()  # TMA arrives at these barriers
    wait_for_launch_before(C.WALK)
    let_next_begin(C.WALK)  # the join may read the list, too
    q_s = operand(q_box, C.BM, C.DV // 2, PANELS)
    q_rope_s = operand(q_rope_box, C.BM, C.DR, 1)
    k_s = operand(k_box, C.BN, C.DV // 2, C.NB * PANELS)
    k_rope_s = operand(k_rope_box, C.BN, C.DR, C.NB)
    if C.WALK:
        keys = (lens, lens_stride, work, sizes, max_keys, heads)
    else:
        keys = (lens, lens_stride, row_tiles, head_tiles, splits, max_keys)
    outputs = (do, out, o_strides, heads, tokens, batches, splits)
    results = (lse, lse_strides, part_lse, heads, tokens)
    terms = (features, numbers, scale)
    entries = (table, table_batch, columns, pages)
    descs = (dq, dk, dk_rope)
    boxes = (q_box, q_rope_box, k_box, k_rope_box)
    cache = (kv, kv_page, kv_token, rows_s) if C.GATHERED else (kv, kv_page)
    bars = (q_full, q_free, l_full, l_free, r_full, r_free)
    smem = (q_s, q_rope_s, k_s, k_rope_s, p_s, rows_s, k_box)
    brings = (descs, boxes, bars, cache, entries, items, keys)
    v_smem = (k_s, p_s, rows_s, k_box)
    if C.SCALED:
        gl.warp_specialize(
            [
                (lead, (smem, bars, outputs, results, terms, items, keys, gl.constexpr(C))),
                (follow, (v_smem, r_full, r_free, outputs, cache, entries, items, keys, gl.constexpr(C))),
                (produce_half, (brings, gl.constexpr(0), gl.constexpr(C))),
                (produce_half, (brings, gl.constexpr(1), gl.constexpr(C))),
            ],
            [4, C.WARPS, C.WARPS],
            [C.FOLLOWER, C.PRODUCER, C.PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (lead, (smem, bars, outputs, results, terms, items, keys, gl.constexpr(C))),
                (follow, (v_smem, r_full, r_free, outputs, cache, entries, items, keys, gl.constexpr(C))),
                (produce, (brings, gl.constexpr(C))),
            ],
            [4, C.WARPS],
            [C.FOLLOWER, C.PRODUCER],
        )


def launch(
    q: torch.Tensor, kv_cache: torch.Tensor, k_rope: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor | None, *, scale: float, features: Features, config: HopperMLAConfig,
    row_scales: torch.Tensor | None = None, out: torch.Tensor | None = None, again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels; arguments and results as of ``kernel.launch``, such as ``hopper_lacks`` lets pass. row_scales
    are read where they lie, between the latents of a row and its rope part.
    """
    C, splits = config.constants, config.num_splits
    batch, tokens, heads, _ = q.shape
    out, lse = results(q, out, (batch, tokens, heads, C.DV))
    part, part_lse = partial_results(out, lse, splits)
    pointers = (
        box_descriptor(q, (C.TB, C.HB), BOX_LAYOUT, "q", again),
        None if C.GATHERED else box_descriptor(kv_cache, (C.BOX,), K_LAYOUT, "kv_cache", again),
        None if C.GATHERED else box_descriptor(k_rope, (C.BOX,), K_LAYOUT, "k_rope", again),
        _output_boxes(part, (C.TB, C.HB), again) if C.BOXED else part, kv_cache, part, part_lse, None,
        block_table, seq_lens, None, feature_arrays(features),
    )
    if not relaunched(attend, pointers, again):
        steps, lse_steps = partial_strides(part, part_lse, splits)
        first_launch(attend, config.grid(), pointers, again)(
            kv_cache.stride(0), kv_cache.stride(1) if C.GATHERED else None, scale * LOG2E, feature_numbers(features),
            config.items, config.row_tiles, config.head_tiles, splits, batch, heads, tokens, kv_cache.shape[0],
            most_keys(block_table.shape[1], 1 if C.LISTED else kv_cache.shape[1]), block_table.stride(0),
            block_table.shape[1], 0 if seq_lens is None else seq_lens.stride(0), PartStrides(*steps),
            PartStrides(*lse_steps), None, C=C, num_warps=4,
        )
    if splits > 1:
        merge(part, part_lse, out, lse, again)
    return out, lse


def pointers_of(
    C: HopperMLAConstants, arrays: tuple[torch.Tensor, ...], lists: tuple[torch.Tensor, ...],
    results: tuple[torch.Tensor, ...], features: Features, again: Again,
) -> tuple[Any, ...]:
    """The pointers of a launch over a work list. arrays : q and the windows of the cache; lists : the table, the
    lengths and the list; results : out, lse, and the partial ones.
    """
    (q, kv_cache, k_rope), (out, lse, part, part_lse) = arrays, results
    return (
        box_descriptor(q, (C.TB, C.HB), BOX_LAYOUT, "q", again),
        box_descriptor(kv_cache, (C.BOX,), K_LAYOUT, "kv_cache", again),
        box_descriptor(k_rope, (C.BOX,), K_LAYOUT, "k_rope", again),
        _output_boxes(part.view(-1, C.TB, C.HB, C.DV), (C.TB, C.HB), again) if C.BOXED else part, kv_cache, out, lse,
        part_lse, *lists, feature_arrays(features),
    )


def numbers_of(
    arrays: tuple[torch.Tensor, ...], lists: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...], sizes: Any,
    features: Features, scale: float,
) -> tuple[Any, ...]:
    """The arguments behind the pointers of such a launch, without the constants."""
    (q, kv_cache, _), (table, lens, _), (out, lse, *_) = arrays, lists, results
    batch, tokens, heads, _ = q.shape
    return (
        kv_cache.stride(0), None, scale * LOG2E, feature_numbers(features), 0, 0, 0, 1, batch, heads, tokens,
        kv_cache.shape[0], sizes.max_keys, table.stride(0), table.shape[1], lens.stride(0),
        *(RowStrides(*x.stride()[:3]) for x in (out, lse)), sizes,
    )


def _output_boxes(x: torch.Tensor, rows: tuple[int, ...], again: Again) -> TensorDescriptor:
    """A TMA descriptor of results ``[.., tokens, heads, columns]`` as ``[pages, panels, tokens, heads, columns of a
    panel]``, for boxes of ``rows`` and four panels of 128 bytes a row.
    """
    layout = gl.constexpr(gl.NVMMASharedLayout(128, 8 * x.element_size(), rank=5))
    if again is None or "out" not in again:
        x = x.flatten(0, -4).unflatten(3, (-1, 128 // x.element_size())).movedim(3, 1)
    return box_descriptor(x, (4, *rows), layout, "out", again)
