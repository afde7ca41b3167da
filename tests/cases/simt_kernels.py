"""Kernels in the style of tutorials, for the machine that runs compiled code."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def unmasked_kernel(x, y, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i), mask=i < n)


@triton.jit
def softmax_kernel(x, out, columns, stride, B: tl.constexpr):
    i = tl.arange(0, B)
    row = tl.load(x + tl.program_id(0) * stride + i, mask=i < columns, other=-float("inf"))
    e = tl.exp(row - tl.max(row, 0))
    tl.store(out + tl.program_id(0) * stride + i, e / tl.sum(e, 0), mask=i < columns)


@triton.jit
def matmul_kernel(a, b, c, N, K, stride_a, stride_b, stride_c, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n, k = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a + m[:, None] * stride_a + (start + k)[None, :], mask=k[None, :] < K - start, other=0.0)
        y = tl.load(b + (start + k)[:, None] * stride_b + n[None, :], mask=k[:, None] < K - start, other=0.0)
        acc = tl.dot(x, y, acc)
    tl.store(c + m[:, None] * stride_c + n[None, :], acc, mask=n[None, :] < N)


@triton.jit
def scan_kernel(x, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.cumsum(tl.load(x + i), 0))


@triton.jit
def gather_kernel(x, index, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.gather(tl.load(x + i), tl.load(index + i), 0))


@triton.jit
def atomics_kernel(x, counts, most, flag, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + i, mask=i < n, other=0)
    tl.atomic_add(counts + value, 1, mask=i < n)
    tl.atomic_max(most, tl.max(value, 0))
    tl.atomic_cas(flag, 7, tl.program_id(0) + 100)


@triton.jit
def halves_kernel(x, total, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.atomic_add(total + i, tl.load(x + tl.program_id(0) * B + i))


@triton.jit
def layer_norm_kernel(x, weight, bias, out, n, eps, B: tl.constexpr):
    row, total = x + tl.program_id(0) * n, tl.zeros([B], tl.float32)
    for start in range(0, n, B):
        i = start + tl.arange(0, B)
        total += tl.load(row + i, mask=i < n, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / n
    square = tl.zeros([B], tl.float32)
    for start in range(0, n, B):
        i = start + tl.arange(0, B)
        apart = tl.where(i < n, tl.load(row + i, mask=i < n, other=0.0).to(tl.float32) - mean, 0.0)
        square += apart * apart
    factor = 1 / tl.sqrt(tl.sum(square, 0) / n + eps)
    for start in range(0, n, B):
        i = start + tl.arange(0, B)
        y = (tl.load(row + i, mask=i < n).to(tl.float32) - mean) * factor
        y = y * tl.load(weight + i, mask=i < n) + tl.load(bias + i, mask=i < n)
        tl.store(out + tl.program_id(0) * n + i, y, mask=i < n)


@triton.jit
def transpose_kernel(x, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i[:, None] * B + i[None, :], tl.trans(tl.load(x + i[:, None] * B + i[None, :])))


@triton.jit
def attention_kernel(q, k, v, out, keys, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    m, n, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    rows = tl.load(q + m[:, None] * D + d[None, :])
    most, total = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for start in range(0, keys, BN):
        kt = tl.load(k + (start + n)[None, :] * D + d[:, None])
        values = tl.load(v + (start + n)[:, None] * D + d[None, :])
        s = tl.dot(rows, kt) * scale
        now = tl.maximum(most, tl.max(s, 1))
        p, factor = tl.exp2(s - now[:, None]), tl.exp2(most - now)
        total = total * factor + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * factor[:, None])
        most = now
    tl.store(out + m[:, None] * D + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty))


@triton.jit
def tiles_kernel(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A product of descriptors that the host made."""
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a.load([m, k]), b.load([k, n]), acc)
    c.store([m, n], acc.to(tl.bfloat16))


@triton.jit
def own_tiles_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A product of descriptors that each program makes."""
    x = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    y = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(x.load([m, k]), y.load([k, n]), acc)
    tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN]).store([m, n], acc.to(tl.bfloat16))


@triton.jit
def functions_kernel(x, out, lock, total, B: tl.constexpr):
    """A function of large arguments, whose code has branches of single lanes and local memory; a bound; and a lock."""
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.device_assert(v < 1e9, "too large")
    tl.store(out + i, tl.sin(v))
    tl.store(out + B + i, tl.clamp(v, -0.5, 0.5))
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total) * 2 + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)
