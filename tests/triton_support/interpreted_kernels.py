"""Small kernels, one idea each, with launchers on torch tensors. They run interpreted and compiled alike."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def cast_kernel(x, y, n, ROUND: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n)
    tl.store(y + i, v.to(y.dtype.element_ty, fp_downcast_rounding=ROUND), mask=i < n)


def cast(x, dtype: str, rounding=None):
    y = torch.empty(x.shape, dtype=getattr(torch, dtype), device=x.device)
    cast_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), rounding, 1024)
    return y


@triton.jit
def binary_kernel(x, y, z, n, OP: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + i, mask=i < n)
    b = tl.load(y + i, mask=i < n)
    if OP == "add":
        c = a + b
    elif OP == "sub":
        c = a - b
    elif OP == "mul":
        c = a * b
    elif OP == "div":
        c = a / b
    elif OP == "neg":
        c = -a
    elif OP == "abs":
        c = tl.abs(a)
    elif OP == "lt":
        c = a < b
    elif OP == "ge":
        c = a >= b
    elif OP == "eq":
        c = a == b
    elif OP == "ne":
        c = a != b
    elif OP == "where":
        c = tl.where(a > b, a, b)
    elif OP == "fmax":
        c = tl.maximum(a, b)
    elif OP == "fmin":
        c = tl.minimum(a, b)
    elif OP == "maximum":
        c = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "minimum":
        c = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "clamp":
        c = tl.clamp(a, b - b + 0.5, b - b + 2.0)
    elif OP == "fma":
        c = tl.fma(a, b, a)
    elif OP == "scale":
        c = a * 0.3
    elif OP == "mask_to_float":
        c = (a < b).to(tl.float32)
    tl.store(z + i, c.to(z.dtype.element_ty), mask=i < n)


def binary(op: str, x, y, dtype=None):
    z = torch.empty(x.shape, dtype=getattr(torch, dtype) if dtype else x.dtype, device=x.device)
    binary_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, z, x.numel(), op, 1024)
    return z


@triton.jit
def reduce_kernel(x, y, OP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    row = tl.arange(0, M)
    v = tl.load(x + row[:, None] * N + tl.arange(0, N)[None, :])
    if OP == "sum":
        r = tl.sum(v, 1)
    elif OP == "max":
        r = tl.max(v, 1)
    elif OP == "min":
        r = tl.min(v, 1)
    elif OP == "argmax":
        r = tl.argmax(v, 1)
    elif OP == "argmin":
        r = tl.argmin(v, 1)
    tl.store(y + row, r.to(y.dtype.element_ty))


def reduce(op: str, x, dtype=None):
    y = torch.empty(x.shape[:1], dtype=getattr(torch, dtype) if dtype else x.dtype, device=x.device)
    reduce_kernel[(1,)](x, y, op, *x.shape)
    return y


@triton.jit
def total_kernel(x, y, N: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, N))))


def total(x):
    """The sum over all elements, a scalar inside the kernel."""
    y = torch.empty((), dtype=x.dtype, device=x.device)
    total_kernel[(1,)](x, y, x.numel())
    return y


@triton.jit
def dot_kernel(a, b, c, OUT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    if OUT == "acc":
        out = tl.dot(x, y, acc=tl.full([M, N], 1.0, tl.float32), input_precision="ieee")
    else:
        out = tl.dot(x, y, input_precision="ieee", out_dtype=c.dtype.element_ty)
    tl.store(c + m[:, None] * N + n[None, :], out)


def dot(a, b, dtype="float32", acc=False):
    c = torch.empty(a.shape[0], b.shape[1], dtype=getattr(torch, dtype), device=a.device)
    dot_kernel[(1,)](a, b, c, "acc" if acc else "dot", a.shape[0], b.shape[1], a.shape[1])
    return c


@triton.jit
def bounds_kernel(lo, hi, out, PLAIN: tl.constexpr):
    first = tl.load(lo + tl.program_id(0))
    last = tl.load(hi + tl.program_id(0))
    total = first * 0
    if PLAIN:
        for j in range(first, last):
            total += j
    else:
        for j in tl.range(first, last, 2):
            total += j
    tl.store(out + tl.program_id(0), total)


def bounds(lo, hi, plain: bool):
    """Sums over ranges whose bounds were loaded: every integer, or every second one."""
    out = torch.zeros_like(lo)
    bounds_kernel[(lo.numel(),)](lo, hi, out, plain)
    return out


@triton.jit
def constants_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.full([N], 0.3, tl.bfloat16))
    tl.store(out + N + i, tl.zeros([N], tl.bfloat16))
    tl.store(out + 2 * N + i, tl.load(x + i, mask=i < 1, other=-1.7))
    tl.store(out + 3 * N + i, tl.load(x) + i * 0)  # a scalar, widened


def constants(x):
    out = torch.full((4, x.numel()), float("nan"), dtype=x.dtype, device=x.device)
    constants_kernel[(1,)](x, out, x.numel())
    return out


@triton.jit
def bitcast_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty, bitcast=True))


def bitcast(x, dtype: str):
    y = torch.empty(x.shape, dtype=getattr(torch, dtype), device=x.device)
    bitcast_kernel[(1,)](x, y, x.numel())
    return y


@triton.jit
def sort_kernel(x, y, z, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + at)
    tl.store(y + at, tl.sort(v))
    tl.store(z + at, tl.cumsum(v, 1).to(z.dtype.element_ty))


def sort_and_cumsum(x):
    y, z = torch.empty_like(x), torch.empty_like(x)
    sort_kernel[(1,)](x, y, z, *x.shape)
    return y, z


@triton.jit
def fail_kernel(x):
    tl.static_assert(tl.load(x) > 100, "the value is small")


def fail(x):
    fail_kernel[(1,)](x)


def version():
    """The Triton that runs here, and whether its interpreter is corrected."""
    from triton.runtime import interpreter

    return triton.__version__, getattr(interpreter, "kvlab_corrected", False)
