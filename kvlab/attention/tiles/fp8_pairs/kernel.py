"""Pairs of fp8 to float16, in Triton. See the package."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.common.arrays import with_addressing_strides
from kvlab.triton_support.interpreter import is_interpreted


def as_pairs(*caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Caches as tensors of pairs, int16, where they are e4m3; others as they are.

    >>> [tuple(x.shape) for x in as_pairs(torch.zeros(3, 16, 2, 64).to(torch.float8_e4m3fn), torch.zeros(3, 16, 2, 64))]
    [(3, 16, 2, 32), (3, 16, 2, 64)]
    """
    return tuple(with_addressing_strides(x).view(torch.int16) if x.element_size() == 1 else x for x in caches)


def compiles_to_ptx(tensor: torch.Tensor) -> int:
    """The architecture, 80 or more, of which a kernel over ``tensor`` is compiled to PTX, 0 where it is not: the
    constant PTX of ``halves``.
    """
    if not tensor.is_cuda or torch.version.hip is not None or is_interpreted():
        return 0
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


@triton.jit
def halves(pairs, PTX: tl.constexpr):
    """(even, odd) columns in float16 of a tile of int16, each two e4m3. ``PTX``: compiled for NVIDIA, where the bytes
    of two elements are sorted and converted in three instructions; what the compiler makes of Triton takes more.
    """
    if PTX:
        even, odd = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 x, y; prmt.b32 t, $2, 0, 0x3120; mov.b32 {x, y}, t; "
            "cvt.rn.f16x2.e4m3x2 $0, x; cvt.rn.f16x2.e4m3x2 $1, y; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )
    else:
        even = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return even, odd


@triton.jit
def narrow(q, top):
    """(q / unit in float16, unit): ``unit`` ``[rows]`` is the power of two at or below ``top``, 2^-126 to 2^126."""
    bits = top.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7E800000)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * inverse[:, None]).to(tl.float16), bits.to(tl.float32, bitcast=True)
