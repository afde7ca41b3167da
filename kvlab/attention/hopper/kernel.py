"""Common part of Hopper's Gluon kernels: boxes of TMA in shared memory, barriers, operands of wgmma, sums of rows."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvlab.attention.features.intervals import key_count_kernel as key_count
from kvlab.attention.features.intervals import key_range_kernel as key_range
from kvlab.attention.features.scales import head_scale_kernel as head_scale
from kvlab.attention.features.scores import adjust_by_row_kernel as adjust_by_row
from kvlab.attention.features.scores import factor_of_kernel as factor_of
from kvlab.attention.features.scores import hide_kernel as hide
from kvlab.attention.features.sinks import add_sink_kernel as add_sink
from kvlab.attention.tiles.online_softmax import LN2 as _LN2
from kvlab.attention.tiles.online_softmax import LOG2E as _LOG2E
from kvlab.attention.tiles.online_softmax import LOWEST as _LOWEST
from kvlab.attention.tiles.online_softmax import log_sum_kernel as log_sum
from kvlab.triton_support.launching import Again
from kvlab.triton_support.twins import compiled
from kvlab.triton_support.versions import has_smem_reinterpret

BOX_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=4))
BOX8_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 8, rank=4))  # e4m3
TILE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
TILE8_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 8, rank=2))
REINTERPRETS = gl.constexpr(has_smem_reinterpret())
PANEL = gl.constexpr(64)  # columns of 16 bits in a row of 128 bytes, the widest swizzle; 128 of 8 bits
LN2, LOG2E, LOWEST = gl.constexpr(_LN2), gl.constexpr(_LOG2E), gl.constexpr(_LOWEST)
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
meet = getattr(gl, "barrier", None) or gl.thread_barrier
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# A power of two: times the scale it is exact, so that m * scale - m * scale is 0 in a fused multiply-add, too.
NOTHING = gl.constexpr(-(2.0**100))
globals().update(compiled(
    gluon.jit, gl, add_sink, adjust_by_row, factor_of, head_scale, hide, key_count, key_range, log_sum,
))


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.constexpr_function
def accumulator(columns, depth):
    """The registers of a product of a warpgroup with ``columns`` columns, ``depth`` deep an instruction."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, depth])


@gluon.jit
def view_as(smem, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same bytes of shared memory as elements of another type, with another shape and layout."""
    if REINTERPRETS:
        seen = smem.reinterpret(dtype, shape, layout)
    else:
        seen = smem._reinterpret(dtype, shape, layout)
    return seen


@gluon.jit
def view(smem, shape: gl.constexpr, layout: gl.constexpr):
    """The same bytes of shared memory with another shape and layout."""
    return view_as(smem, smem.dtype, shape, layout)


@gluon.jit
def operand(boxes, rows: gl.constexpr, depth: gl.constexpr, panels: gl.constexpr):
    """Buffers as operands of wgmma: ``[rows, depth]`` each, or panels of it where depth is no power of two."""
    EIGHT: gl.constexpr = boxes.dtype.primitive_bitwidth == 8
    WIDTH: gl.constexpr = 2 * PANEL if EIGHT else PANEL
    COLS: gl.constexpr = depth if depth & (depth - 1) == 0 else WIDTH
    return view(boxes, [panels * WIDTH // COLS, rows, COLS], TILE8_LAYOUT if EIGHT else TILE_LAYOUT)


@gluon.jit
def named_barrier(verb: gl.constexpr, number: gl.constexpr, threads: gl.constexpr):
    """The hardware's barrier ``number`` of so many threads: "arrive", or "sync" and wait. What a thread has stored
    before it arrives, those that wait may read. Whoever arrives again has heard that they have read it.
    """
    WARPS: gl.constexpr = gl.num_warps()
    thread = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.inline_asm_elementwise(
        f"bar.{verb} {number}, {threads}; mov.b32 $0, $1;", "=r,r,~{memory}", [thread], dtype=gl.int32, is_pure=False,
        pack=1,
    )


@gluon.jit
def split_bounds(split, splits, num_keys, BLOCK: gl.constexpr):
    """The first key of a split and its end. A split is a number of whole blocks."""
    size = gl.cdiv(gl.cdiv(num_keys, splits), BLOCK) * BLOCK
    lo = gl.minimum(split * size, num_keys)
    return lo, gl.minimum(lo + size, num_keys)


@gluon.jit
def find_pages(table, key, end, none, KEYS: gl.constexpr, BOX: gl.constexpr, PAGE: gl.constexpr):
    """The pages of the boxes of KEYS keys from ``key`` on; those past ``end`` are not looked up: ``none``, which TMA
    reads as zeros.
    """
    found = ()
    for j in gl.static_range(KEYS // BOX):
        token = key + j * BOX
        page = gl.load(table + token // PAGE, mask=token < end, other=none).to(gl.int32)
        found = found + (page,)  # type: ignore[assignment]
    return found


@gluon.jit
def quad_sum(p, BM: gl.constexpr, BN: gl.constexpr, CHAINS: gl.constexpr = False):
    """Row sums [BM, 4], one for each lane of the quad that holds a row: additions inside a thread, no shuffles. CHAINS:
    of its even and of its odd columns, then of both; else of pairs of columns, each of which waits for the last one.
    """
    columns = p.reshape([BM, BN // 8, 4, 2])
    if CHAINS:
        return gl.sum(gl.sum(columns, 1), 2)
    else:
        return gl.sum(gl.sum(columns, 3), 1)


@gluon.jit
def row_max(s, BM: gl.constexpr, BN: gl.constexpr, CHAINS: gl.constexpr):
    """Row maxima. CHAINS: a thread finds its own of a row in four registers; in one, each comparison waits for the
    last one.
    """
    if CHAINS:
        most = gl.max(gl.max(s.reshape([BM, BN // 16, 16]), 1), 1)
        return gl.convert_layout(most, gl.SliceLayout(1, s.type.layout))
    else:
        return gl.max(s, 1)


@gluon.jit
def softmax(s, m, l, scale, BM: gl.constexpr, BN: gl.constexpr):
    """(exponentials of scores, row maxima, sums of each lane, what comes before them is multiplied by), from the maxima
    and sums before; ``scale`` is above 0 and holds log2(e).
    """
    m_new = gl.maximum(m, gl.max(s, 1))
    base = m_new * scale
    alpha = gl.exp2(m * scale - base)
    e = gl.exp2(s * scale - base[:, None])
    lanes = quad_sum(e, BM, BN)
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, lanes.type.layout))[:, None] + lanes
    return e, m_new, l, alpha


def box_descriptor(
    x: torch.Tensor, rows: tuple[int, ...], layout: gl.constexpr, name: str = "", again: Again = None
) -> TensorDescriptor:
    """A TMA descriptor of ``[pages, *of rows, columns]`` for boxes of ``rows`` and the columns of the swizzle.

    again : where the descriptor is kept for calls of one kind, without its memory, by the ``name`` of x.
    """
    kept = None if again is None else again.get(name)
    if kept is None:
        size = x.element_size()
        strides = [s if n > 1 else 16 // size for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True)]
        box = [1, *rows, layout.value.swizzle_byte_width // size]
        made = TensorDescriptor(x, list(x.shape), [*strides, 1], box, layout.value)
        if again is not None:
            again[name] = {**vars(made), "base": None}
        return made
    same = object.__new__(TensorDescriptor)
    vars(same).update(kept, base=x)
    return same
