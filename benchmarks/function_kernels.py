"""The functions of kernels, one number a thread."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def each(
    x_ptr, y_ptr, small_ptr, log2_ptr, log_ptr, lg2_ptr, divide_ptr, inverse_ptr, exp2_ptr, exp_ptr, tanh_ptr, n,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    x, y = tl.load(x_ptr + at, mask=there), tl.load(y_ptr + at, mask=there)
    small = tl.load(small_ptr + at, mask=there)
    tl.store(log2_ptr + at, tl.math.log2(x), mask=there)
    tl.store(log_ptr + at, tl.log(x), mask=there)
    lg2 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(lg2_ptr + at, lg2, mask=there)
    tl.store(divide_ptr + at, x / y, mask=there)
    tl.store(inverse_ptr + at, 1.0 / y, mask=there)
    tl.store(exp2_ptr + at, tl.math.exp2(small), mask=there)
    tl.store(exp_ptr + at, tl.exp(small), mask=there)
    tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [small], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(tanh_ptr + at, tanh, mask=there)
