"""TileTensor: a view of a memory through a layout, for one thread or for all threads of all CTAs at once."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.layout import views
from kvlab.layout.access import bound_records, copied, fitting, leading, read, write
from kvlab.layout.int_tuple import IntArray, IntTuple, as_int_array, flatten, int_tuple
from kvlab.layout.layout import Layout
from kvlab.layout.swizzle import VECTOR_BYTES, Swizzle
from kvlab.memory import AddressSpace, Memory, as_dtype

__all__ = ["TileTensor"]


class TileTensor:
    """Elements of ``memory`` at ``offset + layout(coordinate)``, counted in scalars from the memory's first byte.

    Parameters
    ----------
    memory : the bytes. Views share them; nothing but a store changes them.
    dtype : of a scalar.
    layout : offsets of the logical elements, in scalars.
    offset : an int, or an int64 array: many tiles at once, whose axes lead every loaded value. On a memory with a
        program axis the offset has a leading axis of 1 or P (an int becomes ``[1]``).
    element_size : contiguous scalars of a logical element (a vector).
    valid_rows : how many rows (mode 0) exist; an int or an array over the leading axes of ``offset``. It acts as the
        bound of an AMD buffer resource does, linearly: scalars past the end of row ``valid_rows - 1`` read as 0 and are
        not stored (with 0 rows or less: all of them). The bound stays with every view of this tensor.

    A memory made with ``unsafe=True`` turns the errors of views and accesses into the undefined behaviour that a kernel
    would have: pieces that do not divide are cut or overhang, tiles may lie outside.

    >>> t = TileTensor.from_numpy(np.arange(128, dtype=np.float32).reshape(8, 16))
    >>> t.tile((4, 8), (1, 1)).vectorize(1, 4).load()[0, 1]
    array([76., 77., 78., 79.], dtype=float32)
    >>> lanes = t.vectorize(1, 4).distribute(Layout.row_major(4, 4), np.arange(16))
    >>> lanes.load().shape                                                    # [lanes, rows, columns, element]
    (16, 2, 1, 4)
    >>> lanes.load()[5, :, 0]
    array([[20., 21., 22., 23.],
           [84., 85., 86., 87.]], dtype=float32)
    """

    __slots__ = ("dtype", "element_size", "end", "layout", "memory", "offset")

    def __init__(
        self,
        memory: Memory,
        dtype: Any,
        layout: Layout,
        offset: Any = 0,
        element_size: int = 1,
        valid_rows: Any = None,
    ) -> None:
        self.memory = memory
        self.dtype = as_dtype(dtype)
        self.layout = layout
        self.offset: int | IntArray = as_int_array(offset, "offset")
        self.element_size = element_size
        self.end: int | IntArray | None = None
        if memory.programs is not None:
            self.offset = np.atleast_1d(np.asarray(self.offset, np.int64))
            if self.offset.shape[0] not in (1, memory.programs):
                raise ValueError(
                    f"offset of shape {self.offset.shape} on {memory.name}: a leading axis of 1 or "
                    f"{memory.programs} programs is accepted"
                )
        if valid_rows is not None:
            self._bound(valid_rows)

    @classmethod
    def from_numpy(cls, array: NDArray[Any], *, name: str = "array", unsafe: bool = False) -> TileTensor:
        """A view of the array's own bytes (no copy), with its shape and strides (which must not be negative).

        >>> a = np.zeros((2, 3), np.float32)
        >>> TileTensor.from_numpy(a).store_at(1, 2, value=7)
        >>> a[1, 2].item()
        7.0
        """
        if any(stride % array.itemsize for stride in array.strides):
            raise ValueError(
                f"{name}: strides {array.strides} are not multiples of the element's {array.itemsize} bytes"
            )
        stride = tuple(stride // array.itemsize for stride in array.strides)
        layout = Layout.row_major(*array.shape) if array.flags.c_contiguous else Layout(array.shape, stride)
        return cls(Memory.over(array, name=name, unsafe=unsafe), array.dtype, layout)

    @classmethod
    def stack_allocation(
        cls,
        layout: Layout,
        dtype: Any,
        space: AddressSpace = AddressSpace.SHARED,
        programs: int | None = None,
        alignment: int = VECTOR_BYTES,
        *,
        base: int = 0,
        name: str | None = None,
        unsafe: bool = False,
    ) -> TileTensor:
        """A fresh, poisoned memory of ``layout.cosize`` scalars (``layout.size`` where that is more), at byte address
        ``base``, which must be a multiple of ``alignment`` bytes.

        >>> TileTensor.stack_allocation(Layout.row_major(4, 8), "bf16", programs=2)
        TileTensor(bfloat16, (4,8):(8,1), offset [1], shared, 2 programs)
        """
        if alignment < 1 or alignment & (alignment - 1) or base % alignment:
            raise ValueError(f"base {base} with alignment {alignment}: a power of two that divides base is accepted")
        nbytes = max(layout.size, layout.cosize) * as_dtype(dtype).itemsize
        name = name or f"{space.value} memory"
        return cls(Memory(nbytes, space=space, name=name, programs=programs, base=base, unsafe=unsafe), dtype, layout)

    def __repr__(self) -> str:
        offset = self.offset if isinstance(self.offset, int) else list(self.offset.shape)
        vector = f" x{self.element_size}" if self.element_size > 1 else ""
        programs = f", {self.memory.programs} programs" if self.memory.programs is not None else ""
        bound = ", bounded" if self.end is not None else ""
        space = self.memory.space.value
        return f"TileTensor({self.dtype}{vector}, {self.layout}, offset {offset}, {space}{programs}{bound})"

    def _repr_svg_(self) -> str:
        """The layout in banks, at the address of the first tile."""
        from kvlab import viz

        first = int(np.ravel(self.offset)[0]) * self.dtype.itemsize + self.memory.base
        return viz.draw_layout(self.layout, element_bytes=self.dtype.itemsize, base=first).svg

    @property
    def rank(self) -> int:
        """Number of modes."""
        return self.layout.rank

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical elements of each mode."""
        return tuple(mode.size for mode in self.layout.modes)

    @property
    def valid_rows(self) -> Any:
        """Rows (mode 0) of this view whose first scalar lies inside the bound: an int or an array over the leading
        axes of the offset; None without a bound.

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

    def with_valid_rows(self, valid_rows: Any) -> TileTensor:
        """This view with a bound of its own (see the class); ``None`` removes it."""
        view = self._view(self.layout, self.offset, self.element_size)
        view.end = None
        if valid_rows is not None:
            view._bound(valid_rows)
        return view

    # Views

    def tile(self, tile_shape: Any, coord: Any, *, stride_layout: Any = None) -> TileTensor:
        """The tile number ``coord`` of shape ``tile_shape``; one size and one coordinate for each mode.

        Coordinates may be int arrays over the leading axes of the offset. ``stride_layout`` overrides the strides of
        the result only. A tensor with ``valid_rows`` may be tiled past its end: the bound decides what is there.

        >>> t = TileTensor(Memory(512), "fp32", Layout.row_major(8, 16))
        >>> t.tile((4, 8), (1, 1))
        TileTensor(float32, (4,8):(16,1), offset 72, generic)
        >>> t.tile((4, 8), (np.arange(2), 0)).offset
        array([ 0, 64])
        >>> t.tile((4, 8), (2, 0))
        Traceback (most recent call last):
            ...
        ValueError: tile(4, 8) number (2, 0) of (8,16):(16,1): mode 0 has 2 tiles
        """
        tile, strict = _extents(tile_shape, "tile"), self.end is None and not self.memory.unsafe
        strides = None if stride_layout is None else _extents(stride_layout, "stride_layout")
        layout, steps, counts = views.tiled(self.layout, tile, strides, strict)
        coord = coord if isinstance(coord, tuple | list) else (coord,)
        if len(coord) != self.rank:
            raise ValueError(f"tile{tile} number {coord!r} of {self.layout}: one coordinate for each mode is accepted")
        offset = self.offset
        for mode, (item, step, count) in enumerate(zip(coord, steps, counts, strict=True)):
            number = as_int_array(item, "tile coordinate")
            if strict and np.size(number) and np.max(number) >= count:
                raise ValueError(f"tile{tile} number {tuple(coord)} of {self.layout}: mode {mode} has {count} tiles")
            ndim = max(np.ndim(offset), np.ndim(number))
            offset = leading(offset, ndim) + leading(number * step, ndim)
        return self._view(layout, offset, self.element_size)

    def vectorize(self, *vector: int) -> TileTensor:
        """The same elements as vectors of ``vector`` scalars; without arguments 16 bytes of the last mode.

        An access moves contiguous scalars from a vector's first one whatever the vector's shape is; where its scalars
        do not stand side by side that is rarely meant, and a warning says so.

        >>> TileTensor(Memory(512), "fp32", Layout.row_major(8, 16)).vectorize(1, 4)
        TileTensor(float32 x4, (8,4):(16,4), offset 0, generic)
        """
        if not vector:
            vector = (*(1,) * (self.rank - 1), max(VECTOR_BYTES // self.dtype.itemsize, 1))
        sizes = _extents(vector, "vector")
        if self.element_size != 1:
            raise ValueError(f"vectorize{sizes} of vectors of {self.element_size}: a tensor of scalars is accepted")
        layout = views.vectorized(self.layout, sizes, not self.memory.unsafe)
        if not views.contiguous_vectors(self.layout, sizes):
            warnings.warn(
                f"vectorize{sizes} of {self.layout}: accesses move contiguous scalars, not the strided vector",
                stacklevel=2,
            )
        return self._view(layout, self.offset, int(np.prod(sizes)))

    def distribute(self, threads: Layout, lane: Any, swizzle: Swizzle | None = None) -> TileTensor:
        """The elements that thread ``lane`` owns when ``threads`` are dealt out cyclically over each mode.

        A scalar lane gives that thread's fragment; an array of lanes appends its axes to the offset. The swizzle
        permutes the offset of a thread's first element from the tile's first, counted in logical elements (its unit is
        converted); the other elements follow linearly: right where the fragment's strides are multiples of its period.

        >>> t = TileTensor(Memory(512), "fp32", Layout.row_major(8, 16)).vectorize(1, 4)
        >>> t.distribute(Layout.row_major(4, 4), 5)
        TileTensor(float32 x4, (2,1):(64,16), offset 20, generic)
        >>> t.distribute(Layout.row_major(8, 4), np.arange(8), Swizzle(2, 0, 2, "vector")).offset
        array([ 0,  4,  8, 12, 20, 16, 28, 24])
        """
        unchecked = self.memory.unsafe
        layout = views.distributed(self.layout, threads, not unchecked)
        table = views.thread_offsets(
            flatten(self.layout.stride), threads, swizzle, self.element_size, self.dtype.itemsize, not unchecked
        )
        lane = as_int_array(lane, "lane")
        first = table[lane % table.size]
        offset = leading(self.offset, np.ndim(self.offset) + np.ndim(lane)) + first
        return self._view(layout, int(offset) if np.ndim(offset) == 0 else offset, self.element_size)

    def slice(self, *parts: Any) -> TileTensor:
        """One part for each mode: an int drops the mode, ``slice(a, b)`` or ``(a, b)`` keeps a part of it.

        >>> t = TileTensor(Memory(192), "fp32", Layout.row_major(2, 3, 4, 2))
        >>> t.slice(1, slice(None), 2, slice(None))
        TileTensor(float32, (3,2):(8,1), offset 28, generic)
        """
        if not self.layout.is_flat or len(parts) != self.rank:
            raise ValueError(f"slice{parts} of {self.layout}: one part for each mode of a flat layout is accepted")
        shape, strides, offset = [], [], self.offset
        for part, extent, stride in zip(parts, flatten(self.layout.shape), flatten(self.layout.stride), strict=True):
            if isinstance(part, slice):
                if part.step not in (None, 1):
                    raise ValueError(f"slice{parts} of {self.layout}: a step of 1 is accepted, not {part.step}")
                part = (0 if part.start is None else part.start, extent if part.stop is None else part.stop)
            start, stop = part if isinstance(part, tuple) else (part, part + 1)
            if not 0 <= start <= stop <= extent:
                raise ValueError(f"slice{parts} of {self.layout}: {start}:{stop} is outside 0:{extent}")
            offset = offset + start * stride
            if isinstance(part, tuple):
                shape.append(stop - start)
                strides.append(stride)
        return self._view(Layout(tuple(shape), tuple(strides)), offset, self.element_size)

    def reshape(self, *shape: Any) -> TileTensor:
        """Another shape of a dense row-major tensor; or, given a :class:`Layout`, any reinterpretation, unchecked.

        >>> TileTensor(Memory(128), "fp32", Layout.row_major(4, 8)).reshape(2, 16).layout
        Layout("(2,16):(16,1)")
        """
        if len(shape) == 1 and isinstance(shape[0], Layout):
            return self._view(shape[0], self.offset, self.element_size)
        layout = Layout.row_major(*shape)
        if not self.layout.is_row_major or layout.size != self.layout.size or self.element_size != 1:
            raise ValueError(f"reshape{shape} of {self!r}: {layout.size} dense row-major scalars are accepted")
        return self._view(layout, self.offset, 1)

    def transpose(self) -> TileTensor:
        """The modes in reverse order."""
        return self._view(self.layout.transpose(), self.offset, self.element_size)

    # Access

    def load(self) -> NDArray[Any]:
        """All elements: ``[*offset.shape, *shape, element_size]``, the program axis at its full length.

        Raises :class:`~kvlab.memory.OutOfBounds`, :class:`~kvlab.memory.UnwrittenRead`, and ValueError for a vector
        that is not aligned to its own size (at most 16 bytes).
        """
        return self._read(self._indices(self.layout.offsets()))

    def store(self, value: Any) -> None:
        """Write ``value``: of this tensor's dtype and of the shape that :meth:`load` gives (1s are stretched), or
        a scalar."""
        self._write(self._indices(self.layout.offsets()), value)

    def load_at(self, *coord: Any) -> NDArray[Any]:
        """The elements at a coordinate (:class:`Layout` says which forms are accepted):
        ``[*offset.shape, *coordinate.shape, element_size]``."""
        return self._read(self._indices(self.layout(*coord)))

    def store_at(self, *coord: Any, value: Any) -> None:
        """Write what :meth:`load_at` would read."""
        self._write(self._indices(self.layout(*coord)), value)

    def fill(self, value: Any) -> TileTensor:
        """Write one scalar into every scalar of every element, and return this tensor."""
        self.store(np.asarray(value).astype(self.dtype))
        return self

    def copy_from(self, source: TileTensor) -> TileTensor:
        """Element i of ``source`` (colexicographically, the first mode fastest) to element i of this tensor, cast to
        its dtype. Shapes may differ, counts and vector sizes not. Two dense row-major tensors of scalars are copied in
        memory order instead, as the original does with vector instructions, where these divide the count.
        """
        if source.element_size != self.element_size or source.layout.size != self.layout.size:
            raise ValueError(f"copy of {source!r} to {self!r}: equal element sizes and element counts are accepted")
        value = source.load().astype(self.dtype, copy=False)
        lead = value.shape[: value.ndim - source.rank - 1]
        if len(lead) > np.ndim(self.offset):
            raise ValueError(f"copy of {source!r} to {self!r}: the source has more leading axes")
        width = max(VECTOR_BYTES // max(self.dtype.itemsize, source.dtype.itemsize), 1)
        value = copied(value, source.layout, self.layout, width)
        padding = (1,) * (np.ndim(self.offset) - len(lead))
        self.store(value.reshape(*lead, *padding, *self.shape, self.element_size))
        return self

    def addresses(self) -> IntArray:
        """The byte address of each element's first scalar: ``[*offset.shape, *shape]``."""
        return self._indices(self.layout.offsets()) * self.dtype.itemsize + self.memory.base

    def to_numpy(self) -> NDArray[Any]:
        """A new array of the logical elements: ``[*offset.shape, *shape]``, for vectors with a last axis of scalars."""
        value = self.load()
        return value[..., 0] if self.element_size == 1 else value

    # Helpers

    def _view(self, layout: Layout, offset: int | IntArray, element_size: int) -> TileTensor:
        view = TileTensor.__new__(TileTensor)
        view.memory, view.dtype, view.layout, view.offset = self.memory, self.dtype, layout, offset
        view.element_size, view.end = element_size, self.end
        return view

    def _bound(self, valid_rows: Any) -> None:
        rows = np.asarray(valid_rows)
        if rows.dtype.kind not in "iu":
            raise ValueError(f"valid_rows {valid_rows!r} must be an int or an int array")
        ndim = max(rows.ndim, np.ndim(self.offset))
        records = bound_records(self.layout, self.element_size, rows.astype(np.int64))
        end = leading(self.offset, ndim) + leading(records, ndim)
        if ndim:
            self.offset = np.broadcast_to(leading(self.offset, ndim), end.shape)
        self.end = end if ndim else int(end)

    def _indices(self, places: int | IntArray) -> IntArray:
        """Scalars from the memory's first byte to each place of the layout: ``[*offset.shape, *places.shape]``."""
        return np.asarray(leading(self.offset, np.ndim(self.offset) + np.ndim(places)) + places, np.int64)

    def _read(self, index: IntArray) -> NDArray[Any]:
        return read(self.memory, self.dtype, index, self.element_size, self.end)

    def _write(self, index: IntArray, value: Any) -> None:
        shape = (*index.shape, self.element_size)
        if self.memory.programs is not None:
            shape = (self.memory.programs, *shape[1:])
        write(self.memory, index, fitting(value, self.dtype, shape, self), self.end)


def _extents(sizes: Any, what: str) -> tuple[int, ...]:
    tree: IntTuple = int_tuple(sizes, what)
    if isinstance(tree, int):
        return (tree,)
    if any(not isinstance(item, int) for item in tree):
        raise ValueError(f"{what} {sizes!r} is nested; one int for each mode is accepted")
    return flatten(tree)
