"""Swizzles: XOR permutations of addresses, each with the unit that it counts in.

The unit is the most repeated confusion about swizzles: the 128-byte mode of the hardware is ``Sw<3,4,3>`` on bytes,
``Sw<3,3,3>`` on 2-byte elements and ``Sw<3,0,3>`` on 16-byte vectors. All three are the same permutation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import numpy as np

from kvlab.common.checks import shown
from kvlab.common.drawn import Drawn
from kvlab.layout.algebra.int_tuple import IntArray, as_int, int_tuple
from kvlab.memory import as_dtype

VECTOR_BYTES = 16
_BITS = 62  # of an address, counted in any unit
Unit: TypeAlias = "str | np.dtype[Any]"


@dataclass(frozen=True, init=False, repr=False, slots=True)
class Swizzle(Drawn):
    """``f(x) = x ^ ((x & yyy) >> shift)``: bits ``[base, base + bits)`` of x are XORed with the bits that lie
    ``shift`` higher (``[base + |shift|, ...)`` with the bits ``|shift|`` lower where the shift is negative).

    Parameters
    ----------
    bits, base, shift : as in CuTe's ``Sw<bits,base,shift>``.
    unit : what x counts: ``"byte"``, ``"vector"`` (16 bytes), or the dtype of an element.

    f is its own inverse, because ``|shift| >= bits`` is required: the source bits are not changed.

    >>> s = Swizzle(3, 3, 3, "bf16")
    >>> print(s, s.in_bytes(), s.to("vector"), sep="; ")
    Sw<3,3,3> (bfloat16); Sw<3,4,3> (byte); Sw<3,0,3> (16-byte vector)
    >>> s.to("vector")(np.arange(8, 16))
    array([ 9,  8, 11, 10, 13, 12, 15, 14])
    >>> Swizzle(3, 0, 2, "vector")
    Traceback (most recent call last):
        ...
    ValueError: Swizzle(3,0,2): shift 2 < bits 3 is not an involution; use Sw<3,0,3> or Sw<2,0,2>
    """

    bits: int
    base: int
    shift: int
    unit: Unit

    def __init__(self, bits: int, base: int, shift: int, unit: Any) -> None:
        triple = tuple(as_int(value, "bits, base, shift") for value in (bits, base, shift))
        name = f"Swizzle({','.join(map(shown, triple))})"
        if bits < 0 or base < 0:
            raise ValueError(f"{name}: bits and base must not be negative")
        if abs(shift) < bits:
            sign = -1 if shift < 0 else 1
            raise ValueError(
                f"{name}: {'-' * (shift < 0)}shift {abs(shift)} < bits {bits} is not an involution; "
                f"use Sw<{bits},{base},{sign * bits}>"
                + (f" or Sw<{abs(shift)},{base},{shift}>" if shift else f" or Sw<0,{base},0>")
            )
        for field, value in zip(("bits", "base", "shift"), triple, strict=True):
            object.__setattr__(self, field, value)
        if bits + base + abs(shift) > _BITS:
            raise ValueError(f"{name[:80]} has bits past {_BITS} of an address: they do not exist")
        object.__setattr__(self, "unit", _as_unit(unit))

    @classmethod
    def identity(cls, unit: Any) -> Swizzle:
        """The swizzle that changes nothing.

        >>> Swizzle.identity("byte")(77)
        77
        """
        return cls(0, 0, 0, unit)

    @classmethod
    def parse(cls, text: str, unit: Any = None) -> Swizzle:
        """The swizzle that ``str`` printed, or bare CuTe text ``Sw<3,4,3>`` with the unit beside it.

        >>> Swizzle.parse("Sw<3,3,3> (bfloat16)") == Swizzle.parse("Sw<3,3,3>", "bf16")
        True
        """
        match = isinstance(text, str) and re.fullmatch(
            r"\s*Sw<\s*(\d+)\s*,\s*(\d+)\s*,\s*(-?\d+)\s*>\s*(?:\((.+)\))?\s*", text
        )
        if not match:
            raise ValueError(f"{shown(text)} is not a swizzle: must be 'Sw<3,4,3>' or 'Sw<3,4,3> (unit)'")
        printed = match[4] and match[4].removeprefix(f"{VECTOR_BYTES}-byte ")
        if unit is None and printed is None:
            raise ValueError(f"{text!r} names no unit; give unit='byte', 'vector' or a dtype")
        if unit is not None and printed is not None and _as_unit(unit) != _as_unit(printed):
            raise ValueError(f"{text!r} names the unit {printed!r}, but unit={unit!r} was given")
        return cls(int(match[1]), int(match[2]), int(match[3]), printed if unit is None else unit)

    def __str__(self) -> str:
        unit = f"{VECTOR_BYTES}-byte vector" if self.unit == "vector" else str(self.unit)
        return f"Sw<{self.bits},{self.base},{self.shift}> ({unit})"

    def __repr__(self) -> str:
        return f"Swizzle({self.bits}, {self.base}, {self.shift}, unit={str(self.unit)!r})"

    @overload
    def __call__(self, x: int) -> int: ...
    @overload
    def __call__(self, x: IntArray) -> IntArray: ...
    def __call__(self, x: int | IntArray) -> int | IntArray:
        """The permuted address, in this swizzle's unit: int to int, int array to int64 array."""
        if isinstance(x, np.ndarray):
            if x.dtype.kind not in "iu":
                raise ValueError(f"{self} of an array of {x.dtype}: must be integers")
            if x.size and x.max() >> 63 > 0:
                raise ValueError(f"{self} of {x.max()}: must have at most 63 bits in an array")
            x = x.astype(np.int64, copy=False)
        else:
            number = int_tuple(x, "address")
            if not isinstance(number, int):
                raise ValueError(f"{self} of {shown(x)}: must be an int or an int array")
            x = number
        moved = x & self.yyy_mask
        if self.shift > 0:
            moved >>= self.shift
        else:
            moved <<= -self.shift
        moved ^= x
        return moved

    @property
    def yyy_mask(self) -> int:
        """The source bits."""
        return ((1 << self.bits) - 1) << (self.base + max(self.shift, 0))

    @property
    def zzz_mask(self) -> int:
        """The bits that change."""
        return ((1 << self.bits) - 1) << (self.base - min(self.shift, 0))

    @property
    def period(self) -> int:
        """In units: ``f(x + period) == f(x) + period``.

        >>> Swizzle(3, 4, 3, "byte").period
        1024
        """
        return 1 << (self.bits + self.base + abs(self.shift))

    @property
    def unit_bytes(self) -> int:
        """The size of one unit in bytes."""
        return _unit_bytes(self.unit)

    def to(self, unit: Any) -> Swizzle:
        """The same permutation counted in another unit. ValueError where none is the same: when a bit below the new
        unit would change.

        >>> print(Swizzle(3, 4, 3, "byte").to("float32"))
        Sw<3,2,3> (float32)
        >>> Swizzle(2, 0, 3, "bf16").to("vector")
        Traceback (most recent call last):
            ...
        ValueError: Sw<2,0,3> (bfloat16) has no form in units of 16 bytes: it moves pieces of 2 bytes (base would be -3)
        """
        unit = _as_unit(unit)
        return Swizzle(self.bits, self._base_in(_unit_bytes(unit)), self.shift, unit)

    def in_bytes(self) -> Swizzle:
        """The same permutation counted in bytes."""
        return self.to("byte")

    def apply(self, x: Any, unit_bytes: int) -> Any:
        """``f`` on addresses counted in units of ``unit_bytes`` bytes, whatever unit the swizzle itself has.

        >>> Swizzle(3, 4, 3, "byte").apply(9, unit_bytes=16)
        8
        """
        return Swizzle(self.bits, self._base_in(unit_bytes), self.shift, "byte")(x)

    def _base_in(self, unit_bytes: int) -> int:
        unit_bytes = as_int(unit_bytes, "unit_bytes")
        base = self.base + self.unit_bytes.bit_length() - unit_bytes.bit_length()
        if unit_bytes < 1 or unit_bytes & (unit_bytes - 1):
            raise ValueError(f"{self} has no form in units of {unit_bytes} bytes: must be a power of two")
        if base < 0 and self.bits:
            moved = self.unit_bytes << self.base
            raise ValueError(
                f"{self} has no form in units of {unit_bytes} bytes: "
                f"it moves pieces of {moved} bytes (base would be {base})"
            )
        return max(base, 0)


def _as_unit(unit: Any) -> Unit:
    if isinstance(unit, str) and unit in ("byte", "vector"):
        return unit
    try:
        dtype = as_dtype(unit)
    except ValueError:
        raise ValueError(f"unit is {shown(unit)}: must be 'byte', 'vector' (16 bytes) or a dtype") from None
    if dtype.itemsize & (dtype.itemsize - 1):
        raise ValueError(f"unit {shown(unit)} has {dtype.itemsize} bytes: must be a power of two")
    return dtype


def _unit_bytes(unit: Unit) -> int:
    if isinstance(unit, np.dtype):
        return unit.itemsize
    return VECTOR_BYTES if unit == "vector" else 1
