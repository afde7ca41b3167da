"""Arithmetic of lanes: integers, floats, conversions, moves and predicates, each for all lanes at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.hardware.chip import div_full, ex2_approx, ex2_wide, fma, rcp_approx
from kvlab.memory import bfloat16, float8_e4m3fn, float8_e5m2, float16

from .ptx import PtxInstruction
from .values import BITS, PACKED, TYPES, Array, Mask, Operands, Step

if TYPE_CHECKING:
    from .machine import SimtMachine

Function = Callable[..., Array]
_SMALLEST = np.float32(2.0**-126)
_FLOATS = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")

_FLOAT_WORDS = {"rn", "ftz", "approx", "full", "sat", "relu", "NaN", "xorsign", "abs", "noftz"}
_INTEGER_WORDS = {"lo", "hi", "sat", "relu"}
_CVT_WORDS = {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna", "ftz", "sat", "satfinite", "relu"}


def decode(x: Operands) -> Step | None:
    """The step of an instruction of arithmetic; None for another one."""
    return _FORMS.get(x.op[0], _plain)(x)


def _plain(x: Operands) -> Step | None:
    """A function of operands that are all of the type that the instruction ends with."""
    kind = x.op[-1]
    if kind not in TYPES:
        return None
    strange = set(x.op[1:-1]) - (_FLOAT_WORDS if kind in _FLOATS else _INTEGER_WORDS)
    if strange:
        x.unknown(f".{min(strange)} is not modelled")
    function = _float_function(x) if kind in _FLOATS else _integer_function(x)
    return None if function is None else _elementwise(x, function, kind)


def _elementwise(x: Operands, function: Function, kind: str, result: str | None = None) -> Step:
    reads = [x.read(place, kind) for place in range(1, len(x))]
    write = x.write(0, result or kind)
    if len(reads) == 1:
        (a,) = reads
        return lambda m, mask: write(m, function(a(m)), mask)
    if len(reads) == 2:
        a, b = reads
        return lambda m, mask: write(m, function(a(m), b(m)), mask)
    return lambda m, mask: write(m, function(*(read(m) for read in reads)), mask)


# ---- integers

def _signed(a: Array) -> Array:
    return a.view(f"i{a.itemsize}")


def _shift(function: Function) -> Function:
    """A shift whose count is clamped, not taken modulo the width."""
    def shift(a: Array, count: Array) -> Array:
        most = 8 * a.itemsize - 1
        clamped = function(a, np.minimum(count, count.dtype.type(most)).astype(a.dtype))
        beyond = count > most
        if not np.any(beyond):
            return clamped
        rest = np.where(a < 0, a.dtype.type(-1), a.dtype.type(0)) if a.dtype.kind == "i" else a.dtype.type(0)
        return np.where(beyond, rest, clamped)
    return shift


def _divide(a: Array, b: Array) -> Array:
    """Toward zero; all ones for a divisor of 0."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return np.where(b == 0, ~b.dtype.type(0), a // safe)
    quotient = np.abs(a).astype(f"u{a.itemsize}") // np.abs(safe).astype(f"u{a.itemsize}")
    signed = quotient.view(a.dtype)
    return np.where((a < 0) != (safe < 0), -signed, signed)


def _remainder(a: Array, b: Array) -> Array:
    return a - _divide(a, b) * b


def _wide(a: Array) -> Array:
    return a.astype(f"{a.dtype.kind}{2 * a.itemsize}")


def _high(a: Array, b: Array) -> Array:
    if a.itemsize < 8:
        return (_wide(np.asarray(a)) * _wide(np.asarray(b)) >> 8 * a.itemsize).astype(a.dtype)
    u, v = (np.asarray(x).view(np.uint64) for x in np.broadcast_arrays(a, b))
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    (u0, u1), (v0, v1) = ((x & low, x >> half) for x in (u, v))
    middle = u1 * v0 + (u0 * v0 >> half)
    other = u0 * v1 + (middle & low)
    high = u1 * v1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        high = high - np.where(_signed(u) < 0, v, np.uint64(0)) - np.where(_signed(v) < 0, u, np.uint64(0))
    return high.view(a.dtype)


def _bit_field(a: Array, start: Array, length: Array) -> Array:
    width = 8 * a.itemsize
    bits = BITS[a.itemsize].type
    start, length = (np.minimum(n & 0xFF, 255).astype(np.int64) for n in (start, length))
    end = np.minimum(start + length, width)
    left = np.clip(width - end, 0, width - 1).astype(bits)
    moved = a.view(BITS[a.itemsize]) << left
    down = np.clip(left.astype(np.int64) + start, 0, width - 1)
    field = (moved.view(a.dtype) >> down.astype(a.dtype)) if a.dtype.kind == "i" else moved >> down.astype(bits)
    return np.where((length == 0) | (start >= width), a.dtype.type(0), field)


def _insert(field: Array, a: Array, start: Array, length: Array) -> Array:
    width, bits = 8 * a.itemsize, BITS[a.itemsize].type
    start, length = (np.minimum(n & 0xFF, 255).astype(np.int64) for n in (start, length))
    n = np.clip(np.minimum(length, width - start), 0, width)
    ones = np.where(n == width, ~bits(0), (bits(1) << np.minimum(n, width - 1).astype(bits)) - bits(1))
    at = np.clip(start, 0, width - 1).astype(bits)
    mask = np.where(start < width, ones << at, bits(0))
    return (a & ~mask) | ((field << at) & mask)


def _reverse(a: Array) -> Array:
    order = np.ascontiguousarray(a).view(np.uint8).reshape(*a.shape, a.itemsize)[..., ::-1]
    bits = np.packbits(np.unpackbits(np.ascontiguousarray(order), axis=-1, bitorder="little"), axis=-1, bitorder="big")
    return np.ascontiguousarray(bits).view(a.dtype)[..., 0]


def _population(a: Array) -> Array:
    return np.bitwise_count(a).astype(np.uint32)


def _leading_zeros(a: Array) -> Array:
    for step in (1, 2, 4, 8, 16, 32):
        if step < 8 * a.itemsize:
            a = a | a >> a.dtype.type(step)
    return (8 * a.itemsize - np.bitwise_count(a)).astype(np.uint32)


def _find_leading(a: Array) -> Array:
    value = np.where(a < 0, ~a, a) if a.dtype.kind == "i" else a
    zeros = _leading_zeros(value.view(BITS[a.itemsize]))
    return np.where(zeros == 8 * a.itemsize, np.uint32(0xFFFFFFFF), 8 * a.itemsize - 1 - zeros).astype(np.uint32)


def _saturating(function: Function) -> Function:
    def saturate(a: Array, b: Array) -> Array:
        limits = np.iinfo(a.dtype)
        return np.clip(function(a.astype(np.int64), b.astype(np.int64)), limits.min, limits.max).astype(a.dtype)
    return saturate


_INTEGER: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "neg": np.negative, "abs": np.abs, "div": _divide,
    "rem": _remainder, "mad": lambda a, b, c: a * b + c, "brev": _reverse,
    "cnot": lambda a: (a == 0).astype(a.dtype),
}


def _integer_function(x: Operands) -> Function | None:
    op = x.op
    if op[0] == "mul" and "hi" in op:
        return _high
    if op[0] == "mad" and "hi" in op:
        return lambda a, b, c: _high(a, b) + c
    if "sat" in op and op[0] in ("add", "sub"):
        return _saturating(_INTEGER[op[0]])
    if op[0] in ("min", "max") and "relu" in op:
        base = _INTEGER[op[0]]
        return lambda a, b: np.maximum(base(a, b), a.dtype.type(0))
    if op[0] == "mad" and "sat" in op:
        return None
    return _INTEGER.get(op[0])


def _shifts(x: Operands) -> Step:
    kind = x.op[-1]
    a, count, write = x.read(1, kind), x.read(2, "u32"), x.write(0, kind)
    function = _shift(np.left_shift if x.op[0] == "shl" else np.right_shift)
    return lambda m, mask: write(m, function(a(m), count(m)), mask)


def _funnel(x: Operands) -> Step:
    low, high, count, write = x.read(1, "b32"), x.read(2, "b32"), x.read(3, "u32"), x.write(0, "b32")
    left, wraps = "l" in x.op, "wrap" in x.op

    def step(m: SimtMachine, mask: Mask) -> None:
        n = count(m) & np.uint32(31) if wraps else np.minimum(count(m), np.uint32(32))
        both = high(m).astype(np.uint64) << np.uint64(32) | low(m)
        moved = both << n.astype(np.uint64) >> np.uint64(32) if left else both >> n.astype(np.uint64)
        write(m, moved.astype(np.uint32), mask)

    return step


def _products(x: Operands) -> Step | None:
    """``mul`` and ``mad``, ``.wide`` among them, of integers; floats go the common way."""
    kind = x.op[-1]
    if "cc" in x.op:
        return _carried(x)
    if "wide" not in x.op:
        return _plain(x)
    double = f"{kind[0]}{2 * int(kind[1:])}"
    a, b, write = x.read(1, kind), x.read(2, kind), x.write(0, double)
    if x.op[0] == "mul":
        return lambda m, mask: write(m, _wide(a(m)) * _wide(b(m)), mask)
    c = x.read(3, double)
    return lambda m, mask: write(m, _wide(a(m)) * _wide(b(m)) + c(m), mask)


def _sums(x: Operands) -> Step | None:
    return _carried(x) if "cc" in x.op else _plain(x)


def _carried(x: Operands) -> Step:
    """Sums, differences and products with a carry in (``addc``) or out (``.cc``)."""
    name, kind = x.op[0].rstrip("c"), f"u{x.op[-1][1:]}"
    takes, gives, high = x.op[0].endswith("c"), "cc" in x.op, "hi" in x.op
    reads, write = [x.read(place, kind) for place in range(1, len(x))], x.write(0, kind)

    def step(m: SimtMachine, mask: Mask) -> None:
        a, *rest = (np.broadcast_to(read(m), m.shape) for read in reads)
        if name == "mad":
            a = _high(a, rest[0]) if high else a * rest[0]
        b, more = rest[-1], (m.carry if takes else np.zeros(m.shape, np.bool_)).astype(a.dtype)
        if name == "sub":
            result, out = a - b - more, (a < b) | ((a == b) & (more > 0))
        else:
            first = a + b
            result = first + more
            out = (first < a) | (result < first)
        write(m, result, mask)
        if gives:
            m.carry = out if mask is None else np.where(mask, out, m.carry)

    return step


def _fields(x: Operands) -> Step:
    kind = x.op[-1]
    if x.op[0] == "bfe":
        a, start, length = x.read(1, kind), x.read(2, "u32"), x.read(3, "u32")
        write = x.write(0, kind)
        return lambda m, mask: write(m, _bit_field(a(m), start(m), length(m)), mask)
    a, b, start, length = x.read(1, kind), x.read(2, kind), x.read(3, "u32"), x.read(4, "u32")
    put = x.write(0, kind)
    return lambda m, mask: put(m, _insert(a(m), b(m), start(m), length(m)), mask)


def _counts(x: Operands) -> Step:
    function = {"popc": _population, "clz": _leading_zeros, "bfind": _find_leading}[x.op[0]]
    return _elementwise(x, function, x.op[-1], "u32")


def _lop3(x: Operands) -> Step:
    a, b, c, write = x.read(1, "b32"), x.read(2, "b32"), x.read(3, "b32"), x.write(0, "b32")
    table = x.constant(x.texts[4], 4)

    def step(m: SimtMachine, mask: Mask) -> None:
        u, v, w = a(m), b(m), c(m)
        terms = [
            (u if i & 4 else ~u) & (v if i & 2 else ~v) & (w if i & 1 else ~w) for i in range(8) if table >> i & 1
        ]
        result = np.zeros(m.shape, np.uint32)
        for term in terms:
            result = result | term
        write(m, result, mask)

    return step


def _prmt(x: Operands) -> Step:
    a, b, selector, write = x.read(1, "b32"), x.read(2, "b32"), x.read(3, "b32"), x.write(0, "b32")
    if x.op[-1] != "b32":
        x.unknown("its modes are not modelled")

    def step(m: SimtMachine, mask: Mask) -> None:
        both, chosen = b(m).astype(np.uint64) << np.uint64(32) | a(m), selector(m)
        result = np.zeros(m.shape, np.uint32)
        for i in range(4):
            nibble = chosen >> np.uint32(4 * i) & np.uint32(15)
            byte = (both >> ((nibble & np.uint32(7)) << np.uint32(3)).astype(np.uint64)).astype(np.uint32)
            byte = byte & np.uint32(255)
            if np.any(nibble & 8):  # its sign, eight times
                byte = np.where(nibble & np.uint32(8), np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0)),
                                byte)
            result = result | byte << np.uint32(8 * i)
        write(m, result, mask)

    return step


def _dot_product(x: Operands) -> Step:
    """``dp4a``: four products of bytes and an addend."""
    kinds = x.op[1][0], x.op[2][0]
    a, b = x.read(1, "b32"), x.read(2, "b32")
    kind = "u32" if kinds == ("u", "u") else "s32"
    c, write = x.read(3, kind), x.write(0, kind)

    def step(m: SimtMachine, mask: Mask) -> None:
        parts = [
            np.ascontiguousarray(np.broadcast_to(read(m), m.shape)).view(np.int8 if sign == "s" else np.uint8)
            for read, sign in ((a, kinds[0]), (b, kinds[1]))
        ]
        total = (parts[0].astype(np.int64) * parts[1]).reshape(*m.shape, 4).sum(axis=-1)
        write(m, (total + c(m)).astype(TYPES[kind]), mask)

    return step


# ---- floats

def _flushed(a: Array) -> Array:
    """Subnormal numbers as 0 of their sign."""
    return np.where(np.abs(a) < _SMALLEST, np.copysign(np.float32(0), a), a)


def _extreme(function: Function, both_zero: Function) -> Function:
    """fmin or fmax with -0 below +0."""
    def extreme(a: Array, b: Array) -> Array:
        found = function(a, b)
        zero = found == 0
        if not zero.any():
            return found
        bits = BITS[found.dtype.itemsize]
        sign = both_zero(np.asarray(a).view(bits), np.asarray(b).view(bits)).view(found.dtype)
        return np.where(zero & (np.equal(a, b)), sign, found)
    return extreme


def _widened(function: Function) -> Function:
    """A function of 16-bit floats: computed in float64, rounded once."""
    def wide(*given: Array) -> Array:
        dtype = given[0].dtype
        return function(*(np.asarray(a).astype(np.float64) for a in given)).astype(np.float32).astype(dtype)
    return wide


def _nearest(function: Function) -> Function:
    """A float32 function rounded from its value in float64."""
    return lambda a: function(np.asarray(a).astype(np.float64)).astype(np.float32)


_MIN, _MAX = _extreme(np.fmin, np.bitwise_or), _extreme(np.fmax, np.bitwise_and)
_MIN_NAN, _MAX_NAN = _extreme(np.minimum, np.bitwise_or), _extreme(np.maximum, np.bitwise_and)
_FLOAT: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs, "min": _MIN, "max": _MAX,
    "div": np.divide, "copysign": lambda sign, a: np.copysign(a, sign), "sqrt": np.sqrt,
    "rcp": lambda a: np.divide(a.dtype.type(1), a), "fma": lambda a, b, c: a * b + c, "mad": lambda a, b, c: a * b + c,
}
_APPROXIMATE: dict[str, Function] = {
    "ex2": ex2_wide, "rcp": rcp_approx, "div": div_full, "lg2": _nearest(np.log2), "sin": _nearest(np.sin),
    "cos": _nearest(np.cos), "tanh": _nearest(np.tanh), "sqrt": _nearest(np.sqrt),
    "rsqrt": _nearest(lambda a: 1 / np.sqrt(a)),
}


def _float_function(x: Operands) -> Function | None:
    """The function of floats that an instruction names, None for one that is none."""
    op, kind = x.op, x.op[-1]
    name = op[0]
    if any(word in op for word in ("rm", "rp", "rz")) and name != "cvt":
        x.unknown("its rounding is not modelled")
    if kind not in ("f32", "f64"):
        base = _APPROXIMATE.get(name) if "approx" in op and name != "ex2" else _FLOAT.get(name)
        if name == "ex2":
            base = np.exp2
        if name in ("neg", "abs", "min", "max"):
            base = {"neg": np.negative, "abs": np.abs, "min": np.minimum if "NaN" in op else np.fmin,
                    "max": np.maximum if "NaN" in op else np.fmax}[name]
        return None if base is None else _widened(base)
    if kind == "f64":
        return _FLOAT.get(name)
    if "approx" in op or "full" in op:
        function = _APPROXIMATE.get(name)
        if name == "ex2" and "ftz" in op:
            return ex2_approx
        return None if function is None else _contiguous(function)
    if name in ("fma", "mad"):
        function = fma
    elif name in ("min", "max") and "NaN" in op:
        function = _MIN_NAN if name == "min" else _MAX_NAN
    else:
        function = _FLOAT.get(name)
    if function is None:
        return None
    if "xorsign" in op:
        function = _signed_extreme(function)
    if "relu" in op:
        function = _then(function, lambda a: np.maximum(a, np.float32(0)))
    if "sat" in op:
        function = _then(function, lambda a: np.nan_to_num(np.clip(a, np.float32(0), np.float32(1))))
    if "ftz" in op:
        full = function
        return lambda *given: _flushed(full(*map(_flushed, given)))
    return function


def _signed_extreme(function: Function) -> Function:
    """``.xorsign.abs``: of the magnitudes, with the product's sign."""
    def extreme(a: Array, b: Array) -> Array:
        sign = (np.asarray(a).view(np.uint32) ^ np.asarray(b).view(np.uint32)) & np.uint32(0x80000000)
        return (function(np.abs(a), np.abs(b)).view(np.uint32) | sign).view(np.float32)
    return extreme


def _then(function: Function, last: Function) -> Function:
    return lambda *given: last(function(*given))


def _contiguous(function: Function) -> Function:
    return lambda *given: function(*(np.asarray(a, np.float32) for a in given))


def product_to_add(x: Operands) -> Step:
    """A product that an addition alone uses, which ptxas makes one fused operation: its factors are kept."""
    a, b = x.read(1, "f32"), x.read(2, "f32")

    def step(m: SimtMachine, mask: Mask) -> None:
        factors = tuple(np.broadcast_to(read(m), m.shape) for read in (a, b))
        if mask is not None and x.at in m.products:
            factors = tuple(np.where(mask, new, old) for new, old in zip(factors, m.products[x.at], strict=True))
        m.products[x.at] = factors[0], factors[1]

    return step


def added_product(x: Operands, product: PtxInstruction, at: int) -> Step:
    """The addition to it."""
    first = x.texts[1] == product.operands[0]
    other, write = x.read(2 if first else 1, "f32"), x.write(0, "f32")
    flush: Function = _flushed if "ftz" in x.op else lambda a: a

    def step(m: SimtMachine, mask: Mask) -> None:
        a, b = map(flush, m.products[at])
        c = flush(other(m))
        if x.op[0] == "sub":
            a, c = (a, -c) if first else (-a, c)
        write(m, flush(fma(a, b, c)), mask)

    return step


# ---- predicates, moves, conversions

_COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}


def _comparison(name: str, floating: bool) -> Function:
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name in _UNORDERED:
        base = _COMPARE[_UNORDERED[name]]
        return lambda a, b: base(a, b) | np.isnan(a) | np.isnan(b)
    if name == "ne" and floating:  # ordered
        return lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))
    return _COMPARE[name]


def _setp(x: Operands) -> Step:
    kind, floating = x.op[-1], x.op[-1] in _FLOATS
    if x.op[1] not in (*_COMPARE, *_UNORDERED, "num", "nan") or kind in PACKED:
        x.unknown("its comparison is not modelled")
    compare = _comparison(x.op[1], floating)
    a, b = x.read(1, kind), x.read(2, kind)
    joined = next((word for word in x.op[2:-1] if word in ("and", "or", "xor")), None)
    if set(x.op[2:-1]) - {joined, "ftz"}:
        x.unknown("its comparison is not modelled")
    names = [name.strip() for name in x.texts[0].split("|")]
    writes = [x.write(name, "pred") for name in names]
    third = x.read(3, "pred") if joined else None
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(joined or "")

    def step(m: SimtMachine, mask: Mask) -> None:
        found = compare(a(m), b(m))
        for write, value in zip(writes, (found, ~found), strict=False):
            write(m, join(value, third(m)) if join is not None and third is not None else value, mask)

    return step


def _selp(x: Operands) -> Step:
    kind = x.op[-1]
    a, b, which, write = x.read(1, kind), x.read(2, kind), x.read(3, "pred"), x.write(0, kind)
    return lambda m, mask: write(m, np.where(which(m), a(m), b(m)), mask)


def _logic(x: Operands) -> Step | None:
    """``and``, ``or``, ``xor``, ``not``: of predicates too."""
    if x.op[-1] != "pred":
        return _plain(x)
    function = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}[x.op[0]]
    return _elementwise(x, function, "pred")


def _mov(x: Operands) -> Step:
    kind = x.op[-1]
    if kind == "pred":
        source, write = x.read(1, "pred"), x.write(0, "pred")
        return lambda m, mask: write(m, source(m), mask)
    size = 8 * TYPES[kind].itemsize if kind not in PACKED else 32
    if x.texts[1].startswith("{"):
        parts = x.list(1)
        width = size // len(parts)
        reads = [x.read(name, f"b{width}") for name in parts]
        join = x.write(0, f"b{size}")

        def pack(m: SimtMachine, mask: Mask) -> None:
            value = np.zeros(m.shape, f"u{size // 8}")
            for i, read in enumerate(reads):
                value = value | read(m).astype(value.dtype) << value.dtype.type(i * width)
            join(m, value, mask)

        return pack
    if x.texts[0].startswith("{"):
        parts = x.list(0)
        width = size // len(parts)
        whole = x.read(1, f"b{size}")
        writes = [x.write(name, f"b{width}") for name in parts]

        def unpack(m: SimtMachine, mask: Mask) -> None:
            value = whole(m)
            for i, write in enumerate(writes):
                write(m, (value >> value.dtype.type(i * width)).astype(f"u{width // 8}"), mask)

        return unpack
    read, put = x.read(1, f"b{size}"), x.write(0, f"b{size}")
    return lambda m, mask: put(m, read(m), mask)


_ROUNDINGS = ("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna")
_NARROW = {"e4m3x2": float8_e4m3fn, "e5m2x2": float8_e5m2}


def _cvt(x: Operands) -> Step:
    words = x.op[1:]
    kinds = [word for word in words if word in TYPES or word in _NARROW]
    if len(kinds) != 2 or set(words) - {*kinds} - _CVT_WORDS:
        x.unknown("this conversion is not modelled")
    to, fro = kinds
    if to in _NARROW or fro in _NARROW:
        return _cvt_fp8(x, to, fro)
    if to in PACKED:  # two floats, the first in the upper half
        return _cvt_pair(x, to, fro)
    if "tf32" in kinds:
        a, write = x.read(1, "b32"), x.write(0, "b32")
        if "rna" in words:
            return lambda m, mask: write(m, (a(m) + np.uint32(0x1000)) & np.uint32(0xFFFFE000), mask)
        if "rn" in words:
            return lambda m, mask: write(m, _rounded_to_tf32(a(m)), mask)
        x.unknown("this conversion is not modelled")
    source, target = x.read(1, fro), x.write(0, to)
    function = _conversion(x, to, fro)
    return lambda m, mask: target(m, function(source(m)), mask)


def _rounded_to_tf32(a: Array) -> Array:
    """float32 bits rounded to nearest even, 13 bits shorter."""
    return (a + np.uint32(0xFFF) + (a >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)


def _conversion(x: Operands, to: str, fro: str) -> Function:
    target, source = TYPES[to], TYPES[fro]
    rounding = next((word for word in x.op if word in _ROUNDINGS), "rn")
    floating = to in _FLOATS, fro in _FLOATS
    if floating == (False, False):
        if "sat" in x.op:
            limits = np.iinfo(target)
            return lambda a: np.clip(a, max(limits.min, np.iinfo(a.dtype).min), min(limits.max, np.iinfo(a.dtype).max)
                                     ).astype(target)
        return lambda a: a.astype(target)
    whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    if floating == (False, True):
        limits, rounded = np.iinfo(target), whole.get(rounding, np.trunc)
        least, most = float(limits.min), float(limits.max)

        def to_integer(a: Array) -> Array:
            value = rounded(a.astype(np.float64))
            inside = np.where(np.isnan(value) | (value < least) | (value >= most), 0, value).astype(target)
            inside = np.where(value <= least, target.type(limits.min), inside)
            inside = np.where(value >= most, target.type(limits.max), inside)
            nan = target.type(0) if target.itemsize <= 4 else target.type(limits.min if target.kind == "i" else 1 << 63)
            return np.where(np.isnan(value), nan, inside)

        return to_integer
    if rounding in whole:
        return lambda a: whole[rounding](a).astype(target)
    if rounding in ("rm", "rp") or (rounding == "rz" and target in (bfloat16, float16)):
        return _toward(x, target, rounding)
    if target in (bfloat16, float16) and source.kind in "iu":
        return lambda a: a.astype(np.float64).astype(np.float32).astype(target)
    if "relu" in x.op:
        return lambda a: np.maximum(a, a.dtype.type(0)).astype(target)
    if "sat" in x.op:
        return lambda a: np.clip(a, a.dtype.type(0), a.dtype.type(1)).astype(target)
    if source == np.float32 and target in (bfloat16, float16):
        return lambda a: np.where(np.isnan(a), np.uint16(0x7FFF), a.astype(target).view(np.uint16)).view(target)
    return lambda a: a.astype(target)


def _toward(x: Operands, target: np.dtype[Any], rounding: str) -> Function:
    if rounding != "rz":
        x.unknown("its rounding is not modelled")
    if target == float16:
        def cut(a: Array) -> Array:
            near = a.astype(float16)
            return np.where(np.abs(near.astype(np.float64)) > np.abs(a), np.nextafter(near, float16.type(0)), near)
        return cut
    return lambda a: (np.ascontiguousarray(a).view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(bfloat16)


def _cvt_pair(x: Operands, to: str, fro: str) -> Step:
    high, low, write = x.read(1, fro), x.read(2, fro), x.write(0, "b32")
    function = _conversion(x, to, fro)

    def step(m: SimtMachine, mask: Mask) -> None:
        upper, lower = (np.asarray(function(a(m))).view(np.uint16).astype(np.uint32) for a in (high, low))
        write(m, upper << np.uint32(16) | lower, mask)

    return step


def _cvt_fp8(x: Operands, to: str, fro: str) -> Step:
    """Two numbers at once between 8 bits and float32 or float16; the first is the upper one."""
    if to in _NARROW:
        narrow, write = _NARROW[to], x.write(0, "b16")
        if fro == "f32":
            high, low = x.read(1, "f32"), x.read(2, "f32")

            def squeeze(m: SimtMachine, mask: Mask) -> None:
                upper, lower = (saturated(read(m), narrow).view(np.uint8).astype(np.uint16) for read in (high, low))
                write(m, upper << np.uint16(8) | lower, mask)

            return squeeze
        pair = x.read(1, fro)

        def squeeze_pair(m: SimtMachine, mask: Mask) -> None:
            write(m, saturated(pair(m).astype(np.float32), narrow).view(np.uint16), mask)

        return squeeze_pair
    if to != "f16x2":
        x.unknown("this conversion is not modelled")
    wide, source, put = _NARROW[fro], x.read(1, "b16"), x.write(0, "f16x2")

    def widen(m: SimtMachine, mask: Mask) -> None:
        put(m, np.ascontiguousarray(source(m)).view(wide).astype(float16), mask)

    return widen


def saturated(a: Array, narrow: np.dtype[Any]) -> Array:
    """``cvt.rn.satfinite``: float32 as 8 bits, the largest finite number beyond it; NaN becomes 0x7f.

    >>> saturated(np.float32([500, -0.3, 1e9]), np.dtype(float8_e4m3fn)).astype(np.float32).tolist()
    [448.0, -0.3125, 448.0]
    """
    most, nan = np.float32(448 if narrow == float8_e4m3fn else 57344), np.isnan(a)
    bits = np.clip(np.where(nan, np.float32(0), a), -most, most).astype(narrow).view(np.uint8)
    return np.where(nan, np.uint8(0x7F), bits).view(narrow)


def _slct(x: Operands) -> Step:
    kind, third = x.op[-2], x.op[-1]
    a, b, c, write = x.read(1, kind), x.read(2, kind), x.read(3, third), x.write(0, kind)
    return lambda m, mask: write(m, np.where(c(m) >= 0, a(m), b(m)), mask)


def _test(x: Operands) -> Step:
    """``testp``."""
    kind = x.op[-1]
    functions: dict[str, Function] = {
        "nan": np.isnan, "notanumber": np.isnan, "number": lambda a: ~np.isnan(a), "finite": np.isfinite,
        "infinite": np.isinf,
    }
    if x.op[1] not in functions:
        x.unknown("its test is not modelled")
    a, write = x.read(1, kind), x.write(0, "pred")
    return lambda m, mask: write(m, functions[x.op[1]](a(m)), mask)


def _cvta(x: Operands) -> Step:
    """All address spaces are one here."""
    kind = x.op[-1]
    read, write = x.read(1, kind), x.write(0, kind)
    return lambda m, mask: write(m, read(m), mask)


_FORMS: dict[str, Callable[[Operands], Step | None]] = {
    "mov": _mov, "cvt": _cvt, "setp": _setp, "selp": _selp, "slct": _slct, "testp": _test, "shl": _shifts,
    "shr": _shifts, "shf": _funnel, "mul": _products, "mad": _products, "bfe": _fields, "bfi": _fields, "popc": _counts,
    "clz": _counts, "bfind": _counts, "lop3": _lop3, "prmt": _prmt, "dp4a": _dot_product, "and": _logic, "or": _logic,
    "xor": _logic, "not": _logic, "cvta": _cvta,
    "add": _sums, "sub": _sums, "addc": _carried, "subc": _carried, "madc": _carried,
}
