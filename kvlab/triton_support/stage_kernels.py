"""Two small kernels that stage tiles of K and V: DRAM -> shared memory -> registers. They are here to be compiled and
looked at; :mod:`kvlab.triton_support.staged_tile` does both.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def stage(q_ptr, k_ptr, v_ptr, o_ptr, tiles, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """O += (Q K^T) V over tiles of BN keys: attention without its softmax. The compiler chooses where K and V lie."""
    rows, keys, columns = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + columns[None, :])
    o = tl.zeros([BM, D], tl.float32)
    for tile in range(tiles):
        where = (tile * BN + keys[:, None]) * D + columns[None, :]
        k = tl.load(k_ptr + where)
        s = tl.dot(q, tl.trans(k))
        v = tl.load(v_ptr + where)
        o = tl.dot(s.to(v.dtype), v, o)
    tl.store(o_ptr + rows[:, None] * D + columns[None, :], o)


@gluon.jit
def stage_as(
    tile_ptr, o_ptr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, COPY: gl.constexpr, SHARED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """A tile through shared memory that is laid out as ``SHARED`` says, and into registers as ``REGISTERS`` says."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, COPY))
    shared = gl.allocate_shared_memory(tile_ptr.dtype.element_ty, [ROWS, COLUMNS], SHARED)
    shared.store(gl.load(tile_ptr + row[:, None] * COLUMNS + column[None, :]))
    fragments = shared.load(REGISTERS)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, REGISTERS))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, REGISTERS))
    gl.store(o_ptr + row[:, None] * COLUMNS + column[None, :], fragments)
