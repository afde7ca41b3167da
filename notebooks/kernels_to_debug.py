"""Wrong kernels, their NumPy twins, and slow kernels with their cures: what notebooks 14 and 15 look at."""

import numpy as np
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def softmax_rows(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0)
    largest = tl.max(x, 0)
    e = tl.exp(x - largest)
    total = tl.sum(e, 0)
    out = e / total
    tl.store(out_ptr + row * columns + column, out, mask=inside)


def softmax_twin(x_ptr, out_ptr, columns, BLOCK, pid):
    row = pid
    column = np.arange(BLOCK)
    inside = column < columns
    x = np.where(inside, x_ptr.ravel()[np.minimum(row * columns + column, x_ptr.size - 1)], -np.inf)
    largest = np.max(x)
    e = np.exp(x - largest)
    total = np.sum(e)
    out = e / total
    out_ptr.ravel()[row * columns + column[inside]] = out[inside]


@triton.jit
def cured_softmax(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=float("-inf"))
    largest = tl.max(x, 0)
    e = tl.exp(x - largest)
    total = tl.sum(e, 0)
    out = e / total
    tl.store(out_ptr + row * columns + column, out, mask=inside)


@triton.jit
def scaled_rows(x_ptr, scale_ptr, out_ptr, columns, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0)
    scale = tl.load(scale_ptr + row * (columns // GROUP) + column // GROUP, mask=inside, other=0.0)
    out = x * scale
    tl.store(out_ptr + row * columns + column, out, mask=inside)


def scaled_twin(x_ptr, scale_ptr, out_ptr, columns, GROUP, BLOCK, pid):
    row = pid
    column = np.arange(BLOCK)
    inside = column < columns
    x = np.where(inside, x_ptr.ravel()[np.minimum(row * columns + column, x_ptr.size - 1)], 0)
    scale = np.where(inside, np.repeat(scale_ptr[row], GROUP)[:BLOCK], 0)
    out = x * scale
    out_ptr.ravel()[row * columns + column[inside]] = out[inside]


@triton.jit
def every_fourth(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i * 4))


@gluon.jit
def through_shared(
    x_ptr, out_ptr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, COPY: gl.constexpr, SHARED: gl.constexpr,
    READ: gl.constexpr,
):
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, COPY)), gl.arange(0, COLUMNS, gl.SliceLayout(0, COPY))
    shared = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROWS, COLUMNS], SHARED)
    shared.store(gl.load(x_ptr + row[:, None] * COLUMNS + column[None, :]))
    tile = shared.load(READ)
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, READ)), gl.arange(0, COLUMNS, gl.SliceLayout(0, READ))
    gl.store(out_ptr + row[:, None] * COLUMNS + column[None, :], tile)
