"""MHA prefill on Hopper in Gluon: TMA, mbarriers, asynchronous wgmma, warps specialised as producer and consumers.

One program an SM takes tile after tile. A producer warp brings Q, K and V into shared memory; two or three consumer
warpgroups of 64 query rows each start S = Q K^T of a block and O += P V of the one before it together, so that the
softmax of one group runs beside the products of the others.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvlab.attention.backends import machine
from kvlab.attention.features import Features
from kvlab.attention.online_softmax import LOG2E

from .config import PrefillProblem
from .hopper_config import HopperConfig
from .hopper_roles import consume, produce
from .hopper_steps import BOX_LAYOUT, operand


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


SIZES = [
    "tiles", "row_tiles", "together", "batches", "steps", "heads", "group", "max_q", "max_k", "left", "right", "pages",
    "table_batch", "lse_batch", "lse_head",
]  # fmt: skip


@gluon.jit(do_not_specialize=SIZES)
def attend(
    dq, dk, dv, do, out, lse, cu_q, cu_k, table, lens, sinks, counter, inner, scale, unit, tiles, row_tiles, together,
    batches, steps, heads, group, max_q, max_k, left, right, pages, table_batch, o_batch, o_token, o_head, lse_batch,
    lse_head, lse_token, C: gl.constexpr,
):  # fmt: skip
    """The program of one SM: shared memory, barriers, and its partitions."""
    q_box = gl.allocate_shared_memory(dq.dtype, [C.NQ * C.NC * C.D // 64, 1, C.BM, 1, 64], BOX_LAYOUT)
    k_box = gl.allocate_shared_memory(dq.dtype, [C.NB * C.D // 64 * (C.BN // C.BOX), 1, C.BOX, 1, 64], BOX_LAYOUT)
    v_box = gl.allocate_shared_memory(dq.dtype, [C.NB * C.DV // 64 * (C.BN // C.BOX), 1, C.BOX, 1, 64], BOX_LAYOUT)
    o_box = gl.allocate_shared_memory(dq.dtype, [C.NC * C.DV // C.ROUNDS // 64, 1, C.BM, 1, 64], BOX_LAYOUT)
    words = gl.allocate_shared_memory(gl.int32, [8 * C.NQ, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = (
        barriers(C.NQ * C.NC, 1), barriers(C.NQ * C.NC, 1), barriers(C.NB, 1), barriers(C.NB, C.NC),
        barriers(C.NB, 1), barriers(C.NB, C.NC),
    )  # fmt: skip
    fence_async_shared()  # TMA arrives at these barriers
    q_s = operand(q_box, C.BM, C.D, C.NQ * C.NC * C.D // 64)
    k_s = operand(k_box, C.BN, C.D, C.NB * C.D // 64)
    v_s = operand(v_box, C.BN, C.DV, C.NB * C.DV // 64)
    o_s = operand(o_box, C.BM, C.DV // C.ROUNDS, C.NC * C.DV // C.ROUNDS // 64)
    ours = (q_s, k_s, v_s, o_s, o_box)
    results = (out, lse, sinks, o_batch, o_token, o_head, lse_batch, lse_head, lse_token, inner, scale, unit)
    some = (max_q, max_k, left, right)
    descs = (dq, dk, dv)
    boxes = (q_box, k_box, v_box)
    seqs = (cu_q, cu_k, table, lens, counter)
    sizes = (tiles, row_tiles, together, batches, steps, heads, group, max_q, max_k, left, right, pages, table_batch)
    if C.NC == 2:
        gl.warp_specialize(
            [
                (consume, (gl.constexpr(0), do, ours, words, bars, results, some, gl.constexpr(C))),
                (consume, (gl.constexpr(1), do, ours, words, bars, results, some, gl.constexpr(C))),
                (produce, (descs, boxes, words, bars, seqs, sizes, gl.constexpr(C))),
            ],
            [4, 1],
            [C.REGISTERS, C.PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (gl.constexpr(0), do, ours, words, bars, results, some, gl.constexpr(C))),
                (consume, (gl.constexpr(1), do, ours, words, bars, results, some, gl.constexpr(C))),
                (consume, (gl.constexpr(2), do, ours, words, bars, results, some, gl.constexpr(C))),
                (produce, (descs, boxes, words, bars, seqs, sizes, gl.constexpr(C))),
            ],
            [4, 4, 1],
            [C.REGISTERS, C.REGISTERS, C.PRODUCER],
        )


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None = None,
    cu_k: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    *,
    scale: float,
    problem: PrefillProblem,
    config: HopperConfig,
    features: Features,
    base2: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; arrays as in ``reference``, results as of ``kernel.launch``. The arguments are valid."""
    C, mask, softcap = config.constants, features.mask, features.softcap
    if out is None:
        out = torch.empty((*q.shape[:3], C.DV), dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    absent = out  # stands for a pointer that is not followed
    taken = absent if C.EQUAL else torch.zeros(1, dtype=torch.int32, device=q.device)
    _, processors = machine(q.device)
    inner, outer = (scale / softcap, softcap * LOG2E) if C.CAPPED else (0.0, scale * LOG2E)
    attend[(min(processors, config.tiles),)](
        *(box_descriptor(x, (n, 1), BOX_LAYOUT) for x, n in ((q, C.BM), (k, C.BOX), (v, C.BOX), (out, C.BM))),
        out, lse, *(absent if x is None else x for x in (cu_q, cu_k, table, seq_lens, features.sinks)), taken,
        inner, outer, 1.0 if base2 else 1 / LOG2E, config.tiles, config.row_tiles, config.together, problem.batch,
        problem.batch.bit_length(), problem.q_heads, problem.group, q.shape[1], k.shape[1], mask.left, mask.right,
        k.shape[0], 0 if table is None else table.stride(0), *out.stride()[:3], *lse.stride(), C=C, num_warps=4,
    )  # fmt: skip
    return out, lse


def box_descriptor(x: torch.Tensor, rows: tuple[int, ...], layout: gl.constexpr) -> TensorDescriptor:
    """A TMA descriptor of ``[pages, *of rows, columns]`` for boxes of ``rows`` and one panel of columns."""
    strides = [s if n > 1 else 8 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, *rows, 64], layout.value)
