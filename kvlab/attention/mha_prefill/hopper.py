"""MHA prefill on Hopper in Gluon: TMA, mbarriers, asynchronous wgmma, warps specialised as producer and consumers.

One program an SM takes tile after tile. A producer warp brings Q, K and V into shared memory; two or three consumer
warpgroups of 64 query rows each start S = Q K^T of a block and O += P V of the one before it together, so that the
softmax of one group runs beside the products of the others.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kvlab.attention.call.results import results
from kvlab.attention.features.arguments import feature_arrays, feature_numbers
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.softcap import cap_terms
from kvlab.attention.hopper.kernel import (
    BOX8_LAYOUT,
    BOX_LAYOUT,
    TILE8_LAYOUT,
    TILE_LAYOUT,
    barriers,
    box_descriptor,
    operand,
)
from kvlab.attention.machines.gpu import machine
from kvlab.attention.tiles.online_softmax import LOG2E
from kvlab.attention.tiles.pages import DENSE, Sequences
from kvlab.attention.tiles.strides import RowStrides
from kvlab.triton_support.dependents import let_next_begin, wait_for_launch_before
from kvlab.triton_support.launching import Again, first_launch, relaunched
from kvlab.triton_support.twins import compiled

from .config import PrefillProblem
from .hopper_config import HopperPrefillConfig
from .hopper_roles import change, consume, produce
from .hopper_steps import in_pairs

globals().update(compiled(gluon.jit, gl, let_next_begin.fn, wait_for_launch_before.fn))
SIZES = [
    "tiles", "row_tiles", "together", "batches", "steps", "heads", "group", "max_q", "max_k", "pages", "table_batch",
    "lse_batch", "lse_token", "room", "lens_batch",
]
"""What differs from call to call: no kernel is compiled for its values, as one is for those in a tuple."""


@gluon.jit(do_not_specialize=SIZES)
def attend(
    dq, dk, dv, do, out, lse, queries, seqs, work, features, factors, numbers, tiles, row_tiles, together, batches,
    steps, heads, group, max_q, max_k, pages, table_batch, lse_batch, lse_token, room, lens_batch, o_strides,
    C: gl.constexpr,
):
    """The program of one SM: shared memory, barriers, and its partitions."""
    COLS: gl.constexpr = 128 // C.ITEM
    HEADS: gl.constexpr = 1 if C.ODD else C.PACK  # of a box
    STORED: gl.constexpr = 128 // C.STORED  # columns of a panel of K and V as they come
    LAYOUT: gl.constexpr = BOX8_LAYOUT if C.ITEM == 1 else BOX_LAYOUT
    KV_LAYOUT: gl.constexpr = BOX8_LAYOUT if C.STORED == 1 else BOX_LAYOUT
    BOXES: gl.constexpr = C.NR * (C.BN // C.BOX)
    q_box = gl.allocate_shared_memory(dq.dtype, [C.NQ * C.NC * C.D // COLS, 1, C.BM // HEADS, HEADS, COLS], LAYOUT)
    k_box = gl.allocate_shared_memory(dk.dtype, [C.D // STORED * BOXES, 1, C.BOX, 1, STORED], KV_LAYOUT)
    v_box = gl.allocate_shared_memory(dv.dtype, [C.DV // STORED * BOXES, 1, C.BOX, 1, STORED], KV_LAYOUT)
    o_box = gl.allocate_shared_memory(
        do.dtype, [C.NC * C.DV // C.ROUNDS // 64, 1, C.BM // HEADS, HEADS, 64], BOX_LAYOUT
    )
    words = gl.allocate_shared_memory(gl.int32, [C.WORDS * C.NQ, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = barriers(C.NQ * C.NC, 1)
    q_free = barriers(C.NQ * C.NC, 2 if C.STORED == 1 else 1)
    k_full = barriers(C.NB, 1)
    k_free = barriers(C.NB, C.NC)
    v_full = barriers(C.NB, 1)
    v_free = barriers(C.NB, C.NC)
    raw_k_full, raw_k_free, raw_full, raw_free = k_full, k_free, v_full, v_free
    if C.STORED < C.ITEM:  # the way of K and V from DRAM ends before the changer
        raw_k_full = barriers(C.NR, 1)
        raw_k_free = barriers(C.NR, 1)
    if C.STORED == 1:
        raw_full = barriers(C.NR, 1)
        raw_free = barriers(C.NR, 1)
    fence_async_shared()  # TMA arrives at these barriers
    wait_for_launch_before(C.TOGETHER > 0)  # the list is made
    let_next_begin(C.TOGETHER > 0)  # as every program has its place
    bars = (q_full, q_free, k_full, k_free, v_full, v_free)
    q_s = operand(q_box, C.BM, C.DEPTH, C.NQ * C.NC * C.D // COLS)
    k_s = operand(k_box, C.BN, C.DEPTH, C.NR * C.D // STORED)
    v_s = operand(v_box, C.BN, C.COLUMNS if C.PRODUCTS > 1 else C.DV, C.NR * C.DV // STORED)
    raw = (k_s, v_s)
    if C.STORED < C.ITEM:
        k_s = gl.allocate_shared_memory(dq.dtype, [C.NB, C.BN, C.D], TILE_LAYOUT)
        v_s = gl.allocate_shared_memory(dq.dtype, [C.NB, C.BN, C.DV], TILE_LAYOUT)
    o_s = operand(o_box, C.BM, C.DV // C.ROUNDS, C.NC * C.DV // C.ROUNDS // 64)
    results = (out, lse, o_strides, lse_batch, lse_token, work)
    terms = (features, factors, numbers, group, queries)
    some = (max_q, max_k, numbers.left, numbers.right)
    where = (seqs, table_batch, pages, work, room, lens_batch)
    sizes = (tiles, row_tiles, together, batches, steps, heads, group) + some
    if C.STORED == 1:
        ours, changed = (q_s, k_s, v_s, o_s, o_box), (k_s, v_s)
        if C.ITEM == 1:
            v_t = gl.allocate_shared_memory(dv.dtype, [C.NB, C.DV, C.BN], TILE8_LAYOUT)
            raw, changed = (k_s, in_pairs(v_box, C.NR, C.BN, C.DV)), (k_s, in_pairs(v_t, C.NB, C.DV, C.BN))
            ours = (q_s, k_s, v_t, o_s, o_box)
        bars_of_producer = (q_full, q_free, raw_k_full, raw_k_free, raw_full, raw_free)
        changed_bars = (k_full, k_free, v_full, v_free)
        gl.warp_specialize(
            [
                (consume, (gl.constexpr(0), do, ours, words, bars, results, terms, some, gl.constexpr(C))),
                (consume, (gl.constexpr(1), do, ours, words, bars, results, terms, some, gl.constexpr(C))),
                (change, (raw, changed, words, bars_of_producer, changed_bars, some, gl.constexpr(C))),
                (produce, (dq, dk, dv, q_box, k_box, v_box, words, bars_of_producer, where, sizes, gl.constexpr(C))),
            ],
            [4, 4, 1],
            [C.REGISTERS, C.CHANGER, C.PRODUCER],
        )
    elif C.NC == 2:
        ours = (q_s, k_s, v_s, o_s, o_box)
        gl.warp_specialize(
            [
                (consume, (gl.constexpr(0), do, ours, words, bars, results, terms, some, gl.constexpr(C))),
                (consume, (gl.constexpr(1), do, ours, words, bars, results, terms, some, gl.constexpr(C))),
                (produce, (dq, dk, dv, q_box, k_box, v_box, words, bars, where, sizes, gl.constexpr(C))),
            ],
            [4, 1],
            [C.REGISTERS, C.PRODUCER],
        )
    else:
        ours = (q_s, k_s, v_s, o_s, o_box)
        gl.warp_specialize(
            [
                (consume, (gl.constexpr(0), do, ours, words, bars, results, terms, some, gl.constexpr(C))),
                (consume, (gl.constexpr(1), do, ours, words, bars, results, terms, some, gl.constexpr(C))),
                (consume, (gl.constexpr(2), do, ours, words, bars, results, terms, some, gl.constexpr(C))),
                (produce, (dq, dk, dv, q_box, k_box, v_box, words, bars, where, sizes, gl.constexpr(C))),
            ],
            [4, 4, 1],
            [C.REGISTERS, C.REGISTERS, C.PRODUCER],
        )


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences = DENSE, *, scale: float,
    problem: PrefillProblem, config: HopperPrefillConfig, features: Features, out: torch.Tensor | None = None,
    again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; arrays as in ``reference``, results as of ``kernel.launch``. The arguments are valid."""
    C, scales = config.constants, features.scales
    batch, tokens, heads, _ = q.shape
    out, lse = results(q, out, (batch, tokens, heads, C.COLUMNS))
    taken = None if C.EQUAL else torch.zeros(1, dtype=torch.int32, device=q.device)
    layout, kv_layout = (BOX8_LAYOUT if size == 1 else BOX_LAYOUT for size in (C.ITEM, C.STORED))
    pointers = (
        box_descriptor(q, (C.BM, 1), layout, "q", again), box_descriptor(k, (C.BOX, 1), kv_layout, "k", again),
        box_descriptor(v, (C.BOX, 1), kv_layout, "v", again), box_descriptor(out, (C.BM, 1), BOX_LAYOUT, "out", again),
        out, lse, None, (*sequences[:4], taken), None, feature_arrays(features),
    )
    if not relaunched(attend, pointers, again):
        _, processors = machine(q.device)
        table = sequences.table
        inner, outer = cap_terms(scale * (scales.q.number * scales.k.number), features.softcap)
        first_launch(attend, (min(processors, config.tiles),), pointers, again)(
            (inner, outer, 1.0 if problem.base2 else 1 / LOG2E, scales.v.number), feature_numbers(features),
            config.tiles, config.row_tiles, config.together, problem.batch, problem.batch.bit_length(),
            problem.q_heads, problem.group, q.shape[1], sequences.most_keys(k), k.shape[0],
            0 if table is None else table.stride(0), *lse.stride()[:2], None, None, RowStrides(*out.stride()[:3]), C=C,
            num_warps=4,
        )
    return out, lse
