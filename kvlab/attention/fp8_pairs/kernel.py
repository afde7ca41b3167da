"""Pairs of fp8 to float16, in Triton. See the package."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halves(pairs):
    """(even, odd) columns in float16 of a tile of int16, each two e4m3."""
    even = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    odd = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return even, odd


@triton.jit
def narrow(q, top):
    """(q / unit in float16, unit): ``unit`` ``[rows]`` is the power of two at or below ``top``, from 2^-126 to 2^126."""
    bits = top.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7E800000)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * inverse[:, None]).to(tl.float16), bits.to(tl.float32, bitcast=True)
