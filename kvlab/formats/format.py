"""Formats of KV caches as data: which byte holds which element."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.common.checks import count, one_index, require, shown
from kvlab.common.drawn import Drawn

from . import codec, text
from .field import AXES, Field, check_chain

MOST_APART = 1 << 26
"""Elements of a field that are looked at one by one."""


class Format(Drawn):
    """Bytes of a KV cache: fields, their types, and the order of the axes, with paddings and alignment.

    A format is made of its text (:meth:`parse`). The text names the axes from the outermost to the innermost and ends
    with a field and its element type::

        page:4 kv:2 slot:16 head:8 dim:128 kv.bf16

    ============================  =====================================================================================
    ``slot:16``                   an axis of 16; axes are ``layer``, ``page``, ``slot`` (of a page), ``head``, ``dim``
    ``kv:2``                      K, then V: the field ``kv`` is ``k``, ``v``; ``scale`` is ``k_scale``, ``v_scale``
    ``copy:2``                    what is inside is stored twice
    ``dim/8:16 slot:16 dim:8``    pieces of an axis: index ``dim // 8``, then the slot, then ``dim % 8``
    ``dim/16:8 kv_scale.e4m3``    no finer piece of ``dim``: 16 neighbours share a scale
    ``-dim:2``                    the index counts down: the first element is the last
    ``slot:4@72``                 72 bytes from one to the next, whatever is inside
    ``(a, b, pad:4)%576``         one after the other, with 4 bytes of padding, rounded up to a multiple of 576 bytes
    ``(a | +64 b)``               both from one start, ``b`` 64 bytes later; they may lie between each other
    ``k.bf16``                    a leaf: field and element type
    ============================  =====================================================================================

    Fields with ``_scale`` and ``_min`` belong to the values of the name before: value = code * scale + min.

    >>> nhd = Format.parse("page:4 kv:2 slot:16 head:8 dim:128 kv.bf16", name="NHD")
    >>> nhd
    Format(NHD: page:4 kv:2 slot:16 head:8 dim:128 kv.bf16)
    >>> nhd.nbytes, nhd.bytes_per_token, nhd.where("v", page=1, slot=2, head=3, dim=4)
    (262144, 4096, 103176)
    >>> Format.parse(nhd.print()) == nhd
    True
    """

    def __init__(self, tree: text.Node, name: str = "") -> None:
        fields, bits = text.place(tree)
        require(bits // 8 <= text.MOST_BYTES, f"format has {bits // 8} bytes", f"at most {text.MOST_BYTES}")
        require(bits % 8 == 0, f"format {str(tree)!r} has {bits} bits", "whole bytes")
        self.name, self._tree, self.nbytes, self.fields = name, tree, bits // 8, tuple(fields)
        for field in fields:
            check_chain(field)
        self._check()

    @classmethod
    def parse(cls, text_of: str, *, name: str = "") -> Format:
        """The format of a text. ValueError that names what cannot be read, or the field that does not tile its axes.

        >>> Format.parse("page:4 slot/8:2 slot:4 k.bf16")
        Traceback (most recent call last):
            ...
        ValueError: k has pieces slot/1:4 and slot/8:2: must be pieces that tile the axis: the second begins at 4
        """
        require(isinstance(text_of, str) and text_of.strip(), f"text is {shown(text_of)}", "the text of a format")
        require(isinstance(name, str), f"name is {shown(name)}", "text")
        return cls(text.parse(text_of), name)

    def print(self) -> str:
        """The text, from which :meth:`parse` makes an equal format."""
        return str(self._tree)

    def __repr__(self) -> str:
        return f"Format({self.name + ': ' if self.name else ''}{self.print()})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Format) and self._tree == other._tree

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._tree)

    def _check(self) -> None:
        names = [field.name for field in self.fields]
        require(names, f"format {self.print()!r} has no field", "at least one leaf")
        twice = {name for name in names if names.count(name) > 1}
        require(not twice, f"format has the field {min(twice, default='')} twice", "fields of different names")
        for field in self.fields:
            require(field.part in names, f"field {field.name} has no values", f"beside a field {field.part}")
            for axis in field.axes:
                mine, whole = field.extent(axis), self.field(field.part).extent(axis)
                if axis != "dim":
                    whole = max(f.extent(axis) for f in self.fields)
                require(mine == whole, f"{axis} of {field.name} is {mine}", f"{whole}, as in the other fields")
            require(
                set(field.axes) <= set(self.field(field.part).axes),
                f"field {field.name} has axes {', '.join(field.axes)}", f"axes of {field.part}",
            )
        if "@" in self.print() or "|" in self.print():
            self._check_apart()

    def _check_apart(self) -> None:
        """ValueError where two elements share a bit: looked for in two pages and layers."""
        large = {axis: 2 for axis in ("page", "layer") if self.sizes.get(axis, 0) > 2}
        if large:
            self.resized(**large)
            return
        most = max(math.prod(field.shape) * field.copies for field in self.fields)
        require(most <= MOST_APART, f"format {self.print()!r} has {most} elements of a field",
                f"at most {MOST_APART} of two pages and layers, where strides are given")  # fmt: skip
        starts = np.concatenate([field.addresses().ravel() for field in self.fields])
        widths = np.concatenate([np.full(field.addresses().size, field.type.bits) for field in self.fields])
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], (starts + widths)[order]
        bad = np.flatnonzero(ends[:-1] > starts[1:])
        if bad.size:
            byte = int(starts[bad[0] + 1]) // 8
            raise ValueError(f"format {self.print()!r} puts two elements at byte {byte}: must be apart")

    def field(self, name: str) -> Field:
        """The field of a name; ValueError that lists the names."""
        found = [field for field in self.fields if field.name == name]
        require(found, f"field is {shown(name)}", f"one of {', '.join(f.name for f in self.fields)}")
        return found[0]

    @cached_property
    def parts(self) -> tuple[Field, ...]:
        """The fields that hold values, in the order of :meth:`encode`: K and V, or latents and rope part."""
        order = {"k": 0, "v": 1}
        return tuple(sorted((f for f in self.fields if f.is_value), key=lambda f: order.get(f.name, 2)))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Extents of the axes but ``dim``, of those that the format has."""
        named = {axis for field in self.fields for axis in field.axes}
        return {a: max(f.extent(a) for f in self.fields) for a in AXES if a in named and a != "dim"}

    def shape(self, part: str) -> tuple[int, ...]:
        """Shape of the values of a part: those of ``[layers, pages, page_size, heads, dims]`` that the format has."""
        return self.field(part).shape

    @property
    def bytes_per_token(self) -> int | float:
        """Bytes of a token in all layers and heads, with scales and padding; a float where pages are padded to no
        multiple of their slots.

        >>> Format.parse("page:1 slot:64 (dim:512 k.e4m3, dim/128:4 k_scale.f32, pad:112)").bytes_per_token
        640
        """
        tokens = self.sizes.get("page", 1) * self.sizes.get("slot", 1)
        return self.nbytes // tokens if self.nbytes % tokens == 0 else self.nbytes / tokens

    def where(self, field: str, *, bits: bool = False, **index: int) -> int:
        """The byte of an element, or its first bit. IndexError, naming the axis, for an index out of range.

        >>> Format.parse("page:2 slot:4 dim/2:4 -dim:2 k.s4").where("k", bits=True, page=1, slot=1, dim=2)
        172
        """
        found = self.field(field)
        for axis, at in index.items():
            require(axis in AXES, f"axis is {shown(axis)}", f"one of {', '.join(AXES)}")
            whole = self.field(found.part).extent(axis) if axis == "dim" else self.sizes.get(axis, 1)
            one_index(axis, at, whole)
        address = int(found.address(**index))
        return address if bits else address // 8

    def at(self, byte: int) -> str:
        """Contents of a byte in words: fields with their indices, or padding. IndexError outside of the format.

        >>> known = Format.parse("page:2 slot:4 (dim/2:4 dim:2 k.s4, k_scale.f32, pad:4)")
        >>> known.at(13), known.at(10)
        ('k page 0, slot 1, dim 2; k page 0, slot 1, dim 3', 'padding')
        """
        byte = one_index("byte", byte, self.nbytes)
        said: list[str] = []
        for field in self.fields:
            for bit in range(8 * byte, 8 * byte + 8, min(field.type.bits, 8)):
                held, index = field.find(bit)
                where = ", ".join(f"{axis} {int(index[axis])}" for axis in field.axes)
                said += [f"{field.name} {where}".strip()] if held else []
        return "; ".join(said) or "padding"

    def resized(self, **sizes: int) -> Format:
        """The format with other extents of ``layer``, ``page``, ``slot`` or ``head``: strides follow.

        ValueError for an extent that the pieces of an axis do not divide.

        >>> Format.parse("page:2 slot/4:4 dim:8 slot:4 v.e4m3").resized(slot=32, page=1)
        Format(page:1 slot/4:8 dim:8 slot:4 v.e4m3)
        """
        tree = self._tree
        for axis, extent in sizes.items():
            require(axis in AXES[:-1], f"axis is {shown(axis)}", f"one of {', '.join(AXES[:-1])}")
            if axis in self.sizes:
                tree = text.resized(tree, axis, count(axis, extent, 1))
        return Format(tree, self.name)

    # Values.

    def encode(self, *values: npt.ArrayLike, tensor_scale: float = 1.0, fill: int = 0) -> codec.Bytes:
        """The bytes of ``values``, one array for each of :attr:`parts`, of the shape that :meth:`shape` says.

        Scales are computed: the largest magnitude of a group becomes the largest of its type. ``tensor_scale`` is a
        number that lies outside the bytes; ``fill`` is what padding holds. Returns uint8 ``[nbytes]``. Values past
        the largest of an 8-bit float become the largest; ValueError for NaN where type or scale have no place for it.

        >>> row = Format.parse("slot:2 dim/32:1 (k_scale.f16, dim:32 k.s8)")
        >>> x = np.stack([np.arange(32) - 16, np.arange(32) / 4]).astype(np.float32)
        >>> stored = row.encode(x)
        >>> stored.size, float(np.abs(row.decode(stored)[0] - x).max()) < 0.1
        (68, True)
        """
        names = [part.name for part in self.parts]
        number = check_tensor_scale(tensor_scale)
        require(len(values) == len(names), f"values are {len(values)} arrays", f"{len(names)}: {', '.join(names)}")
        given: dict[str, np.ndarray[Any, Any]] = {}
        for part, value in zip(self.parts, values, strict=True):
            given_as = codec.numbers(value, part.name)
            require(given_as.dtype.kind != "c", f"{part.name} has dtype {given_as.dtype}", "real numbers")
            with np.errstate(over="ignore"):
                array = np.asarray(given_as, np.float32)
            require(array.shape == part.shape, f"{part.name} has shape {array.shape}", f"{part.shape}: {part.axes}")
            scaled = any(field.name == f"{part.name}_scale" for field in self.fields)
            exact = part.type.bits > 4 and not part.type.whole and not scaled
            require(exact or np.isfinite(array).all(), f"{part.name} has NaN or infinity", f"finite for {part.stored}")
            with np.errstate(over="ignore"):
                over = array / np.float32(number)
            fits = exact or np.isfinite(over).all()
            require(fits, f"tensor_scale is {shown(tensor_scale)}", f"one over which {part.name} is finite in float32")
            given[part.name] = over
        return self.pack(codec.quantise(self.fields, given), fill=fill)

    def decode(self, buffer: Any, *, tensor_scale: float = 1.0) -> tuple[np.ndarray[Any, np.dtype[np.float32]], ...]:
        """The values in ``buffer``, float32, one array for each of :attr:`parts`."""
        number, codes = check_tensor_scale(tensor_scale), self.unpack(buffer)
        return tuple(codec.dequantise(self.fields, part, codes, number) for part in self.parts)

    def pack(self, codes: Mapping[str, npt.ArrayLike], *, fill: int = 0) -> codec.Bytes:
        """The bytes of codes, unsigned integers of each field: uint8 ``[nbytes]``."""
        return codec.pack(self.fields, self.nbytes, codes, fill)

    def unpack(self, buffer: Any) -> dict[str, np.ndarray[Any, Any]]:
        """The codes of each field in ``buffer``, of the first copy where there are several.

        ValueError unless it has :attr:`nbytes` bytes.
        """
        return codec.unpack(self.fields, self.bytes_of(buffer))

    def bytes_of(self, buffer: Any, name: str = "buffer") -> codec.Bytes:
        """A buffer of the format's size as uint8 ``[nbytes]``, shared where that is possible; ValueError for others."""
        flat = codec.as_bytes(buffer, name)
        require(flat.size == self.nbytes, f"{name} has {flat.size} bytes", f"{self.nbytes}, as the format has")
        return flat

    def draw(self, *, row: bool = False, page: int = 0, layer: int = 0) -> Any:
        """A picture of one page of one layer, or, with ``row``, of the bytes of its first slot: see
        :func:`kvlab.viz.draw_format`."""
        import importlib

        return importlib.import_module("kvlab.viz").draw_format(self, row=row, page=page, layer=layer)


def check_tensor_scale(value: Any) -> float:
    """``tensor_scale`` as a number; ValueError for one that is none, or not above 0 in float32."""
    try:
        number = 0.0 if isinstance(value, str | bytes | bool | np.bool_) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = 0.0
    with np.errstate(over="ignore"):
        held = np.float32(number)
    require(0 < held < np.inf, f"tensor_scale is {shown(value)}", "a number above 0, finite in float32")
    return number


def check_formats(**named: Any) -> None:
    """ValueError, naming the argument, for what is no format."""
    for name, made in named.items():
        require(isinstance(made, Format), f"{name} is {shown(made)}", "a Format, as Format.parse makes of its text")
