"""Base of every TileTensor: a memory, a layout, an offset, and the accesses through them."""

from __future__ import annotations

from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlab.common.drawn import Drawn
from kvlab.layout.algebra.int_tuple import IntArray, as_int, as_int_array, flatten
from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.of_layout import OfLayout
from kvlab.layout.algebra.views import gathered
from kvlab.layout.tensor.access import alignment, bound_records, fitting, leading, read, write
from kvlab.memory import AddressSpace, Memory, OutOfBounds, as_dtype

T = TypeVar("T", bound="TileBase")
Even: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""Of evenly spaced elements: bytes from the memory's first to theirs, shape, strides in bytes, alignment."""
UNEVEN: Even = 0, (), (), 1
MOST_BITS = 58
"""Of an offset in scalars: its bytes have no more than 63."""
Known: TypeAlias = tuple[tuple[bool, ...], tuple[bool, ...]]
"""For each leaf of a layout: is its extent static, is its stride?"""


class TileBase(OfLayout, Drawn):
    """Elements of ``memory`` at ``offset + layout(coordinate)``: construction and access (see ``TileTensor``)."""

    __slots__ = (
        "dtype", "element_layout", "element_size", "end", "even", "known", "layout", "memory", "mutable", "offset",
        "parent",
    )

    def __init__(
        self, memory: Memory, dtype: Any, layout: Layout, offset: Any = 0, element_size: int = 1,
        valid_rows: Any = None,
    ) -> None:
        if not isinstance(memory, Memory) or not isinstance(layout, Layout):
            raise ValueError(f"{type(self).__name__} of {memory!r} with {layout!r}: must be a Memory and a Layout")
        as_int(element_size, "element_size", 1)
        self.memory = memory
        self.dtype = as_dtype(dtype)
        self.layout = layout
        if layout.cosize >> MOST_BITS:
            raise ValueError(f"{type(self).__name__} of {layout}: must be offsets of {MOST_BITS} bits")
        self.offset: int | IntArray = as_int_array(offset, "offset", MOST_BITS)
        self.element_size = element_size
        self.element_layout: Layout | None = None
        self.known: Known | None = None  # None: everything is static
        self.mutable = True
        self.parent: Self | None = None  # the tensor that a view was taken from, for pictures
        self.end: int | IntArray | None = None
        self.even: Even | None = None  # filled in where it is first asked for
        if memory.programs is not None:
            self.offset = np.atleast_1d(np.asarray(self.offset, np.int64))
            if self.offset.shape[0] not in (1, memory.programs):
                raise ValueError(
                    f"offset has shape {self.offset.shape} on {memory.name}: must be a leading axis of 1 or "
                    f"{memory.programs} programs"
                )
        if valid_rows is not None:
            self._bound(valid_rows)

    def __repr__(self) -> str:
        offset = self.offset if isinstance(self.offset, int) else list(self.offset.shape)
        vector = f" x{self.element_size}" if self.element_size > 1 else ""
        programs = f", {self.memory.programs} programs" if self.memory.programs is not None else ""
        bound = (", bounded" if self.end is not None else "") + (", runtime extents" if self.known else "")
        space = self.memory.space.value
        return f"{type(self).__name__}({self.dtype}{vector}, {self.layout}, offset {offset}, {space}{programs}{bound})"

    @property
    def address_space(self) -> AddressSpace:
        """Address space of the tensor's memory."""
        return self.memory.space

    @property
    def is_row_major(self) -> bool:
        """Are the elements flat, dense and the last mode the fastest?"""
        return self.layout.is_row_major

    @property
    def valid_rows(self) -> Any:
        """Rows (mode 0) of this view whose first scalar lies inside the bound: an int or an array over the leading
        axes of the offset; None without a bound.

        >>> from kvlab.layout import TileTensor
        >>> t = TileTensor(Memory(1024), "fp32", Layout.row_major(8, 16), valid_rows=5)
        >>> [t.tile((4, 8), (row, 1)).valid_rows for row in (0, 1)]
        [4, 1]
        """
        if self.end is None:
            return None
        first = self.layout.modes[0]
        left = leading(self.end, np.ndim(self.offset)) - self.offset
        rows = np.clip(-(-left // max(flatten(first.stride)[0], 1)), 0, first.size)
        return int(rows) if np.ndim(rows) == 0 else rows

    def with_valid_rows(self, valid_rows: Any) -> Self:
        """View with a bound of its own (see the class); ``None`` removes it."""
        view = self._view(self.layout, self.offset, self.element_size)
        view.end = None
        if valid_rows is not None:
            view._bound(valid_rows)
        return view

    def select(self, *index: Any) -> Self:
        """Some of many tiles: those that NumPy's ``index`` takes from the leading axes of the offset.

        >>> from kvlab.layout import TileTensor
        >>> t = TileTensor(Memory(1024), "fp32", Layout(8), np.arange(6).reshape(2, 3) * 8, valid_rows=5)
        >>> t.select(slice(None), [2, 0]).offset.tolist()
        [[16, 0], [40, 24]]
        """
        many = np.asarray(self.offset)
        if not many.ndim:
            raise ValueError(f"select{index} of {self!r}: must be many tiles, whose offset has axes")
        view = self._view(self.layout, many[index], self.element_size)
        if self.end is not None:
            view.end = np.broadcast_to(leading(self.end, many.ndim), many.shape)[index]
        return view

    # Access

    def load(self) -> NDArray[Any]:
        """All elements: ``[*offset.shape, *shape, element_size]``, the program axis at its full length.

        Raises :class:`~kvlab.memory.OutOfBounds`, :class:`~kvlab.memory.UnwrittenRead`, and ValueError for a vector
        that is not aligned to its own size (at most 16 bytes)."""
        even = self._elements()
        return self._read(self._indices(self.layout.offsets())) if even is None else even.copy()

    def store(self, value: Any) -> None:
        """Write ``value``: of this tensor's dtype and of the shape that :meth:`load` gives (1s are stretched), or
        a scalar."""
        even = self._elements(write=True) if self.mutable else None
        if even is None:
            self._write(self._indices(self.layout.offsets()), value)
        else:
            even[...] = fitting(value, self.dtype, even.shape, self)

    def load_at(self, *coord: Any) -> NDArray[Any]:
        """The elements at a coordinate (:class:`Layout` says which forms are accepted):
        ``[*offset.shape, *coordinate.shape, element_size]``."""
        return self._read(self._indices(self.layout(*coord)))

    def store_at(self, *coord: Any, value: Any) -> None:
        """Write what :meth:`load_at` would read."""
        self._write(self._indices(self.layout(*coord)), value)

    def raw_load(self, offset: Any, width: int = 1) -> NDArray[Any]:
        """``width`` contiguous scalars, ``offset`` (int or int array) scalars from this tensor's first, whatever the
        layout is: ``[*self.offset.shape, *offset.shape, width]``.

        >>> TileBase(Memory.over(np.arange(8)), np.int64, Layout(4), 2).raw_load(2, 2)
        array([4, 5])
        """
        index = self._indices(as_int_array(offset, "offset"))
        return read(self.memory, self.dtype, index, as_int(width, "width", 1), self.end)

    def raw_store(self, offset: Any, value: Any) -> None:
        """Write ``value[..., width]`` where :meth:`raw_load` would read."""
        self._check_mutable()
        index = self._indices(as_int_array(offset, "offset"))
        value = np.atleast_1d(np.asarray(value))
        shape = (*self._full(index.shape), value.shape[-1])
        write(self.memory, index, fitting(value, self.dtype, shape, self), self.end)

    def load_linear(self, *index: Any) -> NDArray[Any]:
        """The elements at one index for each mode of a flat layout, whatever the shape is."""
        self._require_flat("load_linear")
        return self.load_at(*index)

    def store_linear(self, *index: Any, value: Any) -> None:
        """Write what :meth:`load_linear` would read."""
        self._require_flat("store_linear")
        self.store_at(*index, value=value)

    def ptr_at_offset(self, *coord: Any) -> IntArray:
        """The byte address of the element at a coordinate: ``[*offset.shape, *coordinate.shape]``.

        >>> TileBase(Memory(256, base=1024), "bf16", Layout.row_major(4, 8)).ptr_at_offset(2, 3).item()
        1062
        """
        return self._indices(self.layout(*coord)) * self.dtype.itemsize + self.memory.base

    def addresses(self) -> IntArray:
        """The byte address of each element's first scalar: ``[*offset.shape, *shape]``."""
        return self._indices(self.layout.offsets()) * self.dtype.itemsize + self.memory.base

    def to_numpy(self) -> NDArray[Any]:
        """A new array of the logical elements: ``[*offset.shape, *shape]``, for vectors with a last axis of scalars."""
        value = self.load()
        return value[..., 0] if self.element_size == 1 else value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """What :meth:`to_numpy` gives, for NumPy's functions; without a copy where the elements are evenly spaced, as
        those of register tiles are: then it shows what is stored later, and is read-only.

        >>> from kvlab.layout import TileTensor
        >>> from kvlab.memory import AddressSpace
        >>> registers = TileTensor.stack_allocation(Layout.row_major(2, 4), "int32", AddressSpace.LOCAL, threads=64)
        >>> registers.store(np.arange(8, dtype=np.int32).reshape(1, 2, 4, 1))
        >>> np.asarray(registers).shape, np.asarray(registers.tile((1, 4), (1, 0)))[63].tolist()
        ((64, 2, 4), [[4, 5, 6, 7]])
        """
        even = None if copy else self._elements()
        if even is None:
            return self.to_numpy() if dtype is None else self.to_numpy().astype(dtype)
        even.flags.writeable = False
        value = even[..., 0] if self.element_size == 1 else even
        return value if dtype is None else value.astype(dtype, copy=False)

    def __str__(self) -> str:
        """As MAX prints: nested rows for two flat static modes, otherwise all elements, the first mode fastest.

        >>> print(TileBase(Memory.over(np.arange(6.0)), "fp64", Layout.row_major(2, 3)))
        [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        >>> print(TileBase(Memory.over(np.arange(8)), np.int64, Layout.row_major(2, 2, 2)))
        [0, 4, 2, 6, 1, 5, 3, 7]
        """
        if np.ndim(self.offset):
            return repr(self)
        value = self.to_numpy()
        if not self.layout.size:
            return ""
        if self.flat_rank == self.rank == 2 and self.known is None:
            return str(value.tolist())
        lead = value.shape[self.rank :]
        return str(
            value.transpose(*reversed(range(self.rank)), *range(self.rank, value.ndim)).reshape(-1, *lead).tolist()
        )

    # Helpers

    def _as(self, cls: type[T]) -> T:
        """The same view as another class of tensor."""
        view = object.__new__(cls)
        for name in TileBase.__slots__:
            setattr(view, name, getattr(self, name))
        view.parent = None
        return view

    def _view(self, layout: Layout, offset: int | IntArray, element_size: int, known: Known | None = None) -> Self:
        """Another layout over the same memory; ``known`` where a tensor with runtime extents has others static."""
        view = object.__new__(type(self))
        view.memory, view.dtype, view.layout, view.offset = self.memory, self.dtype, layout, offset
        view.element_size, view.end = element_size, self.end
        view.element_layout, view.mutable = self.element_layout, self.mutable
        view.parent = self if self.parent is None else self.parent
        view.known, view.even = known or self.known, None
        if view.known is not None:
            leaves = len(flatten(layout.shape))
            if len(view.known[0]) != leaves:
                view.known = (False,) * leaves, (False,) * leaves
            if all(view.known[0]) and all(view.known[1]):
                view.known = None
        return view

    def _leaves_known(self) -> Known:
        return self.known or ((True,) * self.flat_rank, (True,) * self.flat_rank)

    def _require_static(self, what: str) -> None:
        if self.known is not None and not all(self.known[0]):
            raise ValueError(f"{what} of {self.layout} with runtime extents: must be a static shape")

    def _bound(self, valid_rows: Any) -> None:
        rows = np.asarray(valid_rows)
        if rows.dtype.kind not in "iu":
            raise ValueError(f"valid_rows is {valid_rows!r}: must be an int or an int array")
        ndim = max(rows.ndim, np.ndim(self.offset))
        width = self.element_size if self.element_layout is None else self.element_layout.cosize
        records = bound_records(self.layout, width, rows.astype(np.int64))
        end = leading(self.offset, ndim) + leading(records, ndim)
        if ndim:
            self.offset = np.broadcast_to(leading(self.offset, ndim), end.shape)
        self.end = end if ndim else int(end)

    def _elements(self, write: bool = False) -> NDArray[Any] | None:
        """The elements as an array that shares memory, shaped as :meth:`load` says; None where they are not evenly
        spaced, or an access has to be looked at lane by lane."""
        if self.end is not None:
            return None
        if self.even is None:
            self.even = self._evenly_spaced()
        first, shape, strides, unit = self.even
        if not shape or (first + self.memory.base) % unit:
            return None
        return self.memory.elements(first, shape, strides, self.dtype, write=write)

    def _evenly_spaced(self) -> Even:
        if self.element_layout is not None or not self.layout.is_flat or not self.layout.size:
            return UNEVEN
        lead, size = np.asarray(self.offset), self.dtype.itemsize
        if not lead.size:
            return UNEVEN
        first, steps = int(lead.flat[0]), []
        for axis, n in enumerate(lead.shape):
            steps.append(int(lead[(*(0,) * axis, 1, *(0,) * (lead.ndim - axis - 1))]) - first if n > 1 else 0)
        axes = np.ogrid[tuple(slice(n) for n in lead.shape)] if lead.ndim else ()
        if not np.array_equal(lead, first + sum((step * axis for step, axis in zip(steps, axes, strict=True)), 0)):
            return UNEVEN
        strides = [step * size for step in (*steps, *flatten(self.layout.stride), 1)]
        unit = alignment(self.element_size * size)
        if min(strides) < 0 or any(step % unit for step in strides[:-1]):
            return UNEVEN
        shape = (*lead.shape, *flatten(self.layout.shape), self.element_size)
        return first * size, shape, tuple(strides), unit

    def _indices(self, places: int | IntArray) -> IntArray:
        """Scalars from the memory's first byte to each place of the layout: ``[*offset.shape, *places.shape]``."""
        if np.size(places) and (np.max(places) >> MOST_BITS or -np.min(places) >> MOST_BITS > 0):
            raise OutOfBounds(f"{self.memory.name}: elements {MOST_BITS} bits and more from the first of {self.layout}")
        return np.asarray(leading(self.offset, np.ndim(self.offset) + np.ndim(places)) + places, np.int64)

    def _read(self, index: IntArray) -> NDArray[Any]:
        if self.element_layout is None:
            return read(self.memory, self.dtype, index, self.element_size, self.end)
        return read(self.memory, self.dtype, index[..., None] + gathered(self.element_layout), 1, self.end)[..., 0]

    def _write(self, index: IntArray, value: Any) -> None:
        self._check_mutable()
        value = fitting(value, self.dtype, (*self._full(index.shape), self.element_size), self)
        if self.element_layout is None:
            write(self.memory, index, value, self.end)
        else:
            write(self.memory, index[..., None] + gathered(self.element_layout), value[..., None], self.end)

    def _full(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape with the program axis at its full length."""
        return shape if self.memory.programs is None else (self.memory.programs, *shape[1:])

    def _check_mutable(self) -> None:
        if not self.mutable:
            raise ValueError(f"store into {self!r}, which is immutable: as_immut() or a read-only array made it")

    def _require_flat(self, what: str) -> None:
        if not self.layout.is_flat:
            raise ValueError(f"{what} of {self.layout}: nested modes: must be a layout with one int for each mode")
