"""CuTe text: what ``print`` of C++ CuTe, ``str`` of the CuTe DSL and pycute write of layouts, read and written.

C++ marks static ints (``_8``) and writes ``Sw<3,4,3>``; the DSL and pycute write ``8``, the DSL ``S<3,4,3>``. A swizzle
*of a pointer* permutes byte addresses; one *after* a pointer, or without any, permutes offsets in elements."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

import numpy as np

from kvlab.common.checks import shown
from kvlab.layout.algebra.composed import ComposedLayout
from kvlab.layout.algebra.coordinate_layout import CoordinateLayout
from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.swizzle import Swizzle
from kvlab.memory import as_dtype

_NUMBERS = r"Sw?<\s*(?P<bits>\d+)\s*,\s*(?P<base>\d+)\s*,\s*(?P<shift>-?\d+)\s*>?"
_SWIZZLE = re.compile(_NUMBERS)
_POINTERS = (
    re.compile(rf"(?:{_NUMBERS}_)?(?:[a-z]+_)?ptr\[(?P<width>\d+)b\]\((?:0x(?P<address>[0-9a-fA-F]+)|\w*|\(nil\))\)"),
    re.compile(rf"(?:!?cute\.)?ptr<(?P<dtype>\w+)(?:,\s*(?:\w+|align<\d+>))*(?:,\s*{_NUMBERS})?\s*>"),
)
_WIDTHS = {8: "uint8", 16: "uint16", 32: "uint32", 64: "uint64"}
_NAMES = {"tf32": "float32", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64"}
_Numbers = tuple[int, int, int]


class _Pointer(NamedTuple):
    """A pointer's elements (None where they are no whole bytes), its address, the swizzle of its addresses."""

    elements: np.dtype[Any] | None
    address: int
    swizzle: _Numbers | None


def from_cute(
    text: str, dtype: Any = None, *, swizzle_unit: Literal["byte", "element"] | None = None
) -> Layout | ComposedLayout | CoordinateLayout | Swizzle:
    """The layout of CuTe text, as C++ CuTe (``print``), the CuTe DSL (``str``) or pycute wrote it.

    Parameters
    ----------
    text : a layout, a composed layout, a swizzle, or a tensor: a pointer before one of them.
    dtype : of the elements that the layout counts. A swizzle needs it, unless a pointer names their width: then
        unsigned ints of that width stand for it.
    swizzle_unit : what the swizzle counts. None is ``"byte"`` for a pointer's own swizzle, else ``"element"``. The
        layout atoms of the DSL's ``warpgroup`` and ``tcgen05`` are printed without a pointer and count bytes.

    The swizzle of a pointer acts on addresses: the result starts at the address, counted from the last multiple of
    the bytes that the swizzle permutes. Elsewhere the address is left out.

    Steps of coordinates (``1@0``) make a :class:`CoordinateLayout`: a TMA tensor's.

    ValueError for text that is none of these, sizes that are not known (``?``), a swizzle without dtype, a dtype that
    is not as wide as the pointer's.

    >>> from_cute("Sw<3,3,3> o _0 o (_8,_64):(_64,_1)", "f16")
    ComposedLayout("Sw<3,3,3> (float16) o (8,64):(64,1)")
    >>> from_cute("Sw<3,4,3>_smem_ptr[16b](0x7f00000000c0) o (_8,_32):(_64,_1)", "bf16")
    ComposedLayout("Sw<3,3,3> (bfloat16) o 96 o (8,32):(64,1)")
    >>> from_cute("S<3,4,3> o 0 o (8,64):(64,1)", "f16", swizzle_unit="byte")
    ComposedLayout("Sw<3,3,3> (float16) o (8,64):(64,1)")
    >>> from_cute("tensor<ptr<f16, smem, align<128>> o (8,64):(64,1)>")
    Layout("(8,64):(64,1)")
    >>> from_cute("ArithTuple(4,_16) o (_4,_8):(_1@0,_1@1)")
    CoordinateLayout("(4,16) o (4,8):(1@0,1@1)")
    """
    if swizzle_unit not in (None, "byte", "element"):
        raise ValueError(f"swizzle_unit is {shown(swizzle_unit)}: must be 'byte', 'element' or None")
    terms = _parts(text)
    if "@" in text:
        return CoordinateLayout.parse(" o ".join(terms))
    pointer, parts = _split_pointer(terms)
    elements = _elements(text, dtype, pointer)
    numbers, unit = pointer.swizzle if pointer else None, swizzle_unit or "byte"
    if numbers is None:
        numbers, unit = _swizzle(parts[0]) if parts else None, swizzle_unit or "element"
        parts = parts[numbers is not None :]
    if numbers is None:
        found = _composed(text, parts)
        return found.layout if found.outer is None and not found.offset else found
    if elements is None:
        raise ValueError(f"dtype is None: {text!r} has a swizzle over elements: must be their dtype, 'f16' say")
    swizzle = Swizzle(*numbers, "byte" if unit == "byte" else elements).to(elements)
    if not parts:
        return swizzle
    inner = _composed(text, parts)
    if inner.outer is not None:
        raise ValueError(f"{text!r} has two maps after its layout: must have one")
    start = 0
    if pointer and pointer.swizzle:
        start = pointer.address & ((1 << (numbers[1] + abs(numbers[2]) + numbers[0])) - 1)
        if start % elements.itemsize:
            raise ValueError(f"{text!r} has an address that is no multiple of its elements' {elements.itemsize} bytes")
    return ComposedLayout(inner.layout, swizzle, inner.offset + start // elements.itemsize)


def to_cute(
    layout: Layout | ComposedLayout | CoordinateLayout | Swizzle, printer: Literal["c++", "dsl"] = "c++"
) -> str:
    """The text that C++ CuTe or the CuTe DSL prints of a layout: :func:`from_cute` reads it back, given the dtype.

    The C++ text has all ints static. A swizzle counts what it counts in kvlab: the text does not name its unit.
    ValueError for an offset without a map after it: neither prints one.

    >>> tile = ComposedLayout(Layout.row_major(8, 64), Swizzle(3, 3, 3, "bf16"))
    >>> to_cute(tile), to_cute(tile, "dsl")
    ('Sw<3,3,3> o _0 o (_8,_64):(_64,_1)', 'S<3,3,3> o 0 o (8,64):(64,1)')
    """
    if printer not in ("c++", "dsl"):
        raise ValueError(f"printer is {shown(printer)}: must be 'c++' or 'dsl'")
    static = "_" if printer == "c++" else ""
    if isinstance(layout, Swizzle):
        return f"{'Sw' if static else 'S'}<{layout.bits},{layout.base},{layout.shift}>"
    if isinstance(layout, Layout):
        return re.sub(r"-?\d+", rf"{static}\g<0>", str(layout))
    if isinstance(layout, CoordinateLayout):
        *start, steps = re.sub(r"(?<![-\d@])-?\d+", rf"{static}\g<0>", str(layout)).split(" o ")
        if not start:
            return steps
        return f"ArithTuple{start[0]} o {steps}" if static else f"tensor<{start[0]} o {steps}>"
    if not isinstance(layout, ComposedLayout):
        raise ValueError(f"layout is {shown(layout)}: must be a Layout, ComposedLayout, CoordinateLayout or Swizzle")
    if layout.outer is None:
        raise ValueError(f"layout is {layout}: must have a map after its offset, CuTe prints no other")
    return f"{to_cute(layout.outer, printer)} o {static}{layout.offset} o {to_cute(layout.layout, printer)}"


def _parts(text: str) -> list[str]:
    """The terms of a text: what stands between ``o``."""
    if not isinstance(text, str):
        raise ValueError(f"text is {shown(text)}: must be a str of CuTe text")
    if "?" in text:
        raise ValueError(f"{text!r} has sizes that its printer did not know: must have ints in place of '?'")
    whole = re.fullmatch(r"\s*tensor<(.*)>\s*", text, re.DOTALL)
    return [part.strip() for part in re.split(r"\s+o\s+", whole[1] if whole else text)]


def _swizzle(part: str) -> _Numbers | None:
    match = _SWIZZLE.fullmatch(part)
    return None if match is None else (int(match["bits"]), int(match["base"]), int(match["shift"]))


def _split_pointer(parts: list[str]) -> tuple[_Pointer | None, list[str]]:
    """The pointer of a text, with the swizzle before it or of its type, and the terms that follow."""
    before = _swizzle(parts[0]) if len(parts) > 1 else None
    at = 0 if before is None else 1
    for pattern in _POINTERS:
        if match := pattern.fullmatch(parts[at]):
            found = match.groupdict()
            own = (int(match["bits"]), int(match["base"]), int(match["shift"])) if match["bits"] else None
            name = _WIDTHS.get(int(found["width"])) if "width" in found else found["dtype"]
            try:
                elements = None if name is None else as_dtype(_NAMES.get(name, name))
            except ValueError:
                elements = None
            return _Pointer(elements, int(found.get("address") or "0", 16), before or own), parts[at + 1 :]
    return None, parts


def _elements(text: str, dtype: Any, pointer: _Pointer | None) -> np.dtype[Any] | None:
    """The dtype of the elements: the caller's, else the pointer's, None where neither names one."""
    stated = None if pointer is None else pointer.elements
    if dtype is None:
        return stated
    given = as_dtype(dtype)
    if stated is not None and stated.itemsize != given.itemsize:
        raise ValueError(f"dtype is {given}: {text!r} has elements of {stated.itemsize} bytes, must be as wide")
    return given


def _composed(text: str, parts: list[str]) -> ComposedLayout:
    """What is left of a text: ``layout``, ``offset o layout``, ``outer o offset o layout``."""
    try:
        if not parts:
            raise ValueError("a pointer alone")
        *outer, inner = parts
        offset = outer.pop() if outer and ":" not in outer[-1] else "0"
        if not re.fullmatch(r"_?-?[0-9]+", offset):
            raise ValueError(f"{shown(offset)} where an offset is expected")
        if len(outer) > 1:
            raise ValueError(f"{len(outer)} maps after the layout, one is expected")
        last = Layout.parse(outer[0]) if outer else None
        return ComposedLayout(Layout.parse(inner), last, int(offset.removeprefix("_")))
    except ValueError as error:
        raise ValueError(
            f"{shown(text)} is no CuTe text ({error}): must be '(_8,_64):(_64,_1)', 'Sw<3,3,3> o _0 o (8,64):(64,1)', "
            "a pointer like 'smem_ptr[16b](0x..)' before one of these, or 'tensor<ptr<f16, smem> o ..>'"
        ) from None
