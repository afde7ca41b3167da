"""Kernels whose machine code is known in outline: a copy, a matrix product, one that needs too many registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def matmul_kernel(a, b, c, K, stride, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a + m[:, None] * stride + (start + k)[None, :])
        y = tl.load(b + (start + k)[:, None] * stride + n[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + m[:, None] * stride + n[None, :], acc.to(c.dtype.element_ty))


@triton.jit
def widen_kernel(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16))


@triton.jit
def refused_kernel(x, B: tl.constexpr):
    tl.static_assert(B == 0, "B is not 0")
