"""Kernels of the helpers that convert 4 bits, alone."""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.attention.tiles.four_bits.kernel import byte_numbers, of_elements, quarters_of_e2m1, quarters_of_int4


@triton.jit
def convert_e2m1(quads_ptr, scale_ptr, out_ptr, n, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """A row of WIDTH elements, and the scales of each four: bytes, or words of two."""
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    at = row * WIDTH + column[None, :]
    SCALES: tl.constexpr = WIDTH // 8 if scale_ptr.dtype.element_ty == tl.int16 else WIDTH // 4
    blocks = tl.load(scale_ptr + row * SCALES + tl.arange(0, SCALES)[None, :])
    scales = of_elements(blocks, byte_numbers(out_ptr.to(tl.pointer_type(tl.int32)), row, 1), WIDTH, PTX)
    parts = quarters_of_e2m1(tl.load(quads_ptr + at), scales, PTX)
    for i in tl.static_range(4):
        tl.store(out_ptr + i * n + at, parts[i])


@triton.jit
def convert_int4(quads_ptr, out_ptr, n, WIDTH: tl.constexpr, UNSIGNED: tl.constexpr):
    """A row of WIDTH elements."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    parts = quarters_of_int4(tl.load(quads_ptr + at), True, UNSIGNED)
    for i in tl.static_range(4):
        tl.store(out_ptr + i * n + at, parts[i])
