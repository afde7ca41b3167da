"""Quads of 4-bit codes to float16, in Triton. See the package."""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.attention.features.kernel import weighted_minima
from kvlab.attention.features.scales import SIDE_BY_SIDE as _SIDE_BY_SIDE
from kvlab.attention.tiles.kernel import load_tile

SIDE_BY_SIDE = tl.constexpr(_SIDE_BY_SIDE)
INT4 = tl.constexpr(
    "{ .reg .b32 t, eight, many, less, part; mov.b32 eight, 0x64086408; mov.b32 many, 0xE408E408; "
    "mov.b32 part, 0x2C002C00; mov.b32 less, 0xD480D480; "
    "lop3.b32 $0, $4, 0x000F000F, eight, 0x6A; mov.b32 t, 0x64806480; lop3.b32 $1, $4, 0x00F000F0, t, 0x6A; "
    "shr.b32 $3, $4, 8; lop3.b32 $2, $3, 0x000F000F, eight, 0x6A; lop3.b32 $3, $3, 0x00F000F0, t, 0x6A; "
    "add.rn.f16x2 $0, $0, many; fma.rn.f16x2 $1, $1, part, less; add.rn.f16x2 $2, $2, many; "
    "fma.rn.f16x2 $3, $3, part, less; }"
)
"""One more than 1024 by 8 and the integer is the float16 of their bits."""
UINT4 = tl.constexpr(INT4.value.replace("0x64086408", "0x64006400").replace("0x64806480", "0x64006400"))
"""The same of integers from 0 to 15, less 8."""


@triton.jit
def key_blocks(features, numbers, page, slot, kv_head, exists, C: tl.constexpr):
    """Bytes of the e4m3 scales of K's blocks in pieces, of four elements of C.D, C.W0 and C.W1 each; 0 for keys that
    do not exist. Of others 1.
    """
    return block_scales(
        features.k_blocks, page, slot, kv_head, exists, numbers.k_block_page, numbers.k_block_token,
        numbers.k_block_head, C.D, C.W0, C.W1, C.BLOCKS, False,
    )


@triton.jit
def value_blocks(features, numbers, page, slot, kv_head, exists, C: tl.constexpr):
    """The same of V."""
    return block_scales(
        features.v_blocks, page, slot, kv_head, exists, numbers.v_block_page, numbers.v_block_token,
        numbers.v_block_head, C.DV, C.V0, C.V1, C.BLOCKS, C.BM < 16,
    )


@triton.jit
def block_scales(
    scale_ptr, page, slot, kv_head, exists, of_page, of_token, of_head,
    D: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, UNIT: tl.constexpr, TURNED: tl.constexpr,
):
    """Scales of blocks at ``scale_ptr``, whose strides count UNIT as one: bytes, words of two blocks, or words of four
    slots' bytes. TURNED: as of ``load_columns``.
    """
    scale = 1.0
    if scale_ptr is not None:
        fours: tl.constexpr = scale_ptr.dtype.element_ty == tl.int32  #- address
        each: tl.constexpr = 8 if scale_ptr.dtype.element_ty == tl.int16 else 4  #- address
        at = slot // SIDE_BY_SIDE if fours else slot  #- address
        first, row = kv_head * of_head * UNIT, (page * of_page + at * of_token) * UNIT  #- address
        scale = load_tile(scale_ptr + first, row, exists, D // each, FIRST // each, REST // each, True, TURNED)
        if fours:
            scale = bytes_of_words(scale, (slot % SIDE_BY_SIDE).to(tl.int32) * 8)  #- address
    return scale


@triton.jit
def byte_numbers(ptr, split, BLOCKS: tl.constexpr):
    """0 and 1, the bytes of a word of two scales, where BLOCKS is more than 0. They seem to be loaded, which never
    happens, as ``split`` is not negative: the compiler converts a tile in the layout of products where all that is
    beside it was loaded, otherwise before shared memory.
    """
    nth = 0
    if BLOCKS > 0:
        number = tl.arange(0, 2)
        nth = tl.load(ptr + number, mask=number + split < 0, other=number)
    return nth


@triton.jit
def row_at(page, slot, strides, EACH: tl.constexpr, PTX: tl.constexpr):
    """Offsets of rows in pages; of 4 bits by products of 32 bits, as the compiler, which widens strides before loops,
    takes four instructions for one of 64: strides then count the launch's unit.
    """
    if EACH == 4 and PTX:
        of_page, of_token = tl.zeros([], tl.int32) + strides.page, tl.zeros([], tl.int32) + strides.token
        if of_page.dtype == tl.int32 and of_token.dtype == tl.int32:
            return tl.inline_asm_elementwise(
                "{ .reg .s64 t; mul.wide.s32 t, $1, $2; mad.wide.s32 $0, $3, $4, t; }", "=l,r,r,r,r",
                [page.to(tl.int32), of_page, slot.to(tl.int32), of_token], dtype=tl.int64, is_pure=True, pack=1,
            )
        else:
            return page * strides.page + slot * strides.token
    else:
        return page * strides.page + slot * strides.token


@triton.jit
def bytes_of_words(words, shift):
    """The byte at ``shift`` bits ``[BN]`` of each word of a row, in pieces."""
    found = words[:0]
    for i in tl.static_range(len(words)):
        found = found + ((words[i] >> shift[:, None]) & 255,)
    return found


@triton.jit
def row_sums(q, BLOCKS: tl.constexpr):
    """Sums of the rows of q, ``[BM]``, where BLOCKS is -1: K has minima."""
    total = 0.0
    if BLOCKS < 0:
        total = tl.sum(q[0].to(tl.float32), 1)
        for i in tl.static_range(1, len(q)):
            total = total + tl.sum(q[i].to(tl.float32), 1)
    return total


@triton.jit
def add_minima(p, o, features, numbers, page, slot, kv_head, exists):
    """The last accumulator and the weighted minima of V's tokens."""
    if features.v_minima is not None:
        last: tl.constexpr = len(o) - 1
        more = tl.sum(weighted_minima(p, features, numbers, page, slot, kv_head, exists), 1)
        return o[:last] + (o[last] + more[:, None],)
    else:
        return o


@triton.jit
def of_elements(blocks, nth, WIDTH: tl.constexpr, PTX: tl.constexpr, TURNED: tl.constexpr = False):
    """The e4m3 scale of each of WIDTH elements in float16, from bytes ``[BN, WIDTH / 4]`` or words of two
    ``[BN, WIDTH / 8]``, whose bytes are ``nth``: ``[BN, WIDTH]`` or, TURNED, ``[WIDTH, BN]``. Of words a lane has two
    neighbouring elements, as mma takes them.
    """
    BN: tl.constexpr = blocks.shape[0]
    EACH: tl.constexpr = WIDTH // (4 * blocks.shape[1])
    FEW: tl.constexpr = WIDTH // (4 * EACH)
    AXIS: tl.constexpr = 1 if TURNED else 2
    SHAPE: tl.constexpr = (FEW, EACH, BN) if TURNED else (BN, FEW, EACH)
    words = tl.trans(blocks) if TURNED else blocks
    words = tl.broadcast_to(tl.expand_dims(words.to(tl.int16), AXIS), SHAPE)
    if EACH == 2:
        nth = tl.broadcast_to(nth[None, :, None] if TURNED else nth[None, None, :], SHAPE)
    else:
        nth = tl.zeros(SHAPE, tl.int32)
    if PTX >= 89:
        scale = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 x, y; shl.b32 t, $3, 4; lop3.b32 t, t, $2, 0x20, 0xFE; "
            "prmt.b32 t, $1, 0, t; mov.b32 {x, y}, t; cvt.rn.f16x2.e4m3x2 $0, x; }", "=r,r,r,r",
            [words, nth], dtype=tl.float16, is_pure=True, pack=2,
        )
    else:
        bits = ((words.to(tl.int32) >> (8 * nth)) & 255) << 7
        bits = bits | ((bits + 128) & 16384)  # a code's exponent and mantissa are a float16's; of NaN the bit more
        scale = bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    scale = tl.expand_dims(tl.reshape(scale, (WIDTH // 4, BN) if TURNED else (BN, WIDTH // 4)), AXIS)
    scale = tl.broadcast_to(scale, (WIDTH // 4, 4, BN) if TURNED else (BN, WIDTH // 4, 4))
    return tl.reshape(scale, (WIDTH, BN) if TURNED else (BN, WIDTH))


@triton.jit
def quarters_of_e2m1(quads, scale, PTX: tl.constexpr):
    """The columns 4 n, 4 n + 1, 4 n + 2 and 4 n + 3 of a tile of int16 in float16, each four e2m1, times 2^-14
    ``scale``: exponent and mantissa of a code are those of a float16. On NVIDIA masks come last, one for sign and
    number together, and shifts to the left, which are products, do what permutes could: its integer unit is the one
    that has most to do.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, o, e; "
            "shr.b32 t, $4, 3; lop3.b32 o, $4, t, 0x80808080, 0xE4; and.b32 $3, o, 0x8E008E00; "
            "shl.b32 t, o, 8; and.b32 $1, t, 0x8E008E00; "
            "shl.b32 t, $4, 1; shl.b32 e, $4, 4; lop3.b32 e, e, t, 0x80808080, 0xE4; and.b32 $2, e, 0x8E008E00; "
            "shl.b32 t, e, 8; and.b32 $0, t, 0x8E008E00; mul.rn.f16x2 $0, $0, $5; mul.rn.f16x2 $1, $1, $5; "
            "mul.rn.f16x2 $2, $2, $5; mul.rn.f16x2 $3, $3, $5; }",
            "=&r,=&r,=&r,=&r,r,r", [quads, scale], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )
    else:
        one = e2m1(quads) * scale
        two = e2m1(quads >> 4) * scale
        three = e2m1(quads >> 8) * scale
        four = e2m1(quads >> 12) * scale
        return one, two, three, four


@triton.jit
def e2m1(codes):
    """2^-14 times the e2m1 in the lowest four bits."""
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def quarters_of_int4(quads, PTX: tl.constexpr, UNSIGNED: tl.constexpr = False):
    """The same of signed integers, or of UNSIGNED ones less 8."""
    if PTX:
        return tl.inline_asm_elementwise(
            UINT4 if UNSIGNED else INT4, "=&r,=&r,=&r,=&r,r", [quads],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )
    else:
        flip: tl.constexpr = 0 if UNSIGNED else 8
        return int4(quads, flip), int4(quads >> 4, flip), int4(quads >> 8, flip), int4(quads >> 12, flip)


@triton.jit
def int4(codes, flip: tl.constexpr):
    """The integer of the lowest four bits, the bits of ``flip`` turned, less 8."""
    return (((codes & 15) ^ flip) - 8).to(tl.float16)


@triton.jit
def code_of_float(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Code of the float nearest to ``x``, which is not negative, with so many bits of mantissa and this bias of its
    exponent; ties to the even code. The format has no end: who calls has a least for it.
    """
    bits = x.to(tl.int32, bitcast=True)
    odd = (bits >> (23 - MANTISSA)) & 1
    normal = ((bits + ((1 << (22 - MANTISSA)) - 1) + odd) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    unit = (bits * 0 + ((151 - BIAS - MANTISSA) << 23)).to(tl.float32, bitcast=True)  # 1 in its last place: a code
    below = (x + unit).to(tl.int32, bitcast=True) - ((151 - BIAS - MANTISSA) << 23)
    return tl.where(bits < ((128 - BIAS) << 23), below, normal)


@triton.jit
def number_of_e4m3(code):
    """Float32 of the codes of e4m3 that are not negative."""
    return (code << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: exponents of float32 and e4m3


@triton.jit
def code_of_int4(x, limit: tl.constexpr):
    """Nearest integer to ``x``, half away from zero, from -limit to limit, in four bits; of NaN 0."""
    whole = tl.minimum(tl.floor(tl.abs(tl.where(x == x, x, 0.0)) + 0.5), limit).to(tl.int32)
    return tl.where(x < 0, -whole, whole) & 15


@triton.jit
def code_of_uint4(x, limit: tl.constexpr):
    """Nearest integer to ``x``, half away from zero, from 0 to limit; of NaN 0."""
    return tl.where(x > 0, tl.minimum(tl.floor(x + 0.5), limit), 0.0).to(tl.int32)


@triton.jit
def halves_joined(code):
    """Bytes of the codes of neighbouring columns, the first in the low half."""
    low, high = tl.split(tl.reshape(code, (code.shape[0], code.shape[1] // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)
