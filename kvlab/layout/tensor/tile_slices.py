"""Parts and other shapes of a TileTensor: slices, splits, reshapes, casts. None of them moves data."""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np

from kvlab.common.checks import shown
from kvlab.layout.algebra.int_tuple import as_int, as_int_array, flatten
from kvlab.layout.algebra.layout import Layout
from kvlab.layout.tensor.access import leading
from kvlab.layout.tensor.tile_base import Known, TileBase
from kvlab.memory import AddressSpace, as_dtype


class TileSlices(TileBase):
    """Parts of the same memory, or all of it in another shape (see ``TileTensor``)."""

    __slots__ = ()

    def slice(self, *parts: Any) -> Self:
        """One part for each mode: an int drops the mode (or an int array over the leading axes of the offset),
        ``slice(a, b)`` or ``(a, b)`` keeps a part of it. Bounds must lie inside.

        >>> from kvlab.layout import TileTensor
        >>> from kvlab.memory import Memory
        >>> t = TileTensor(Memory(192), "fp32", Layout.row_major(2, 3, 4, 2))
        >>> t.slice(1, slice(None), 2, slice(None))
        TileTensor(float32, (3,2):(8,1), offset 28, generic)
        """
        if not self.layout.is_flat or len(parts) != self.rank:
            accepted = "must be one part for each mode of a flat layout"
            raise ValueError(f"slice{shown(parts)} of {self.layout}: {accepted}")
        shape, strides, kept, offset = [], [], [], self.offset
        extents = zip(parts, flatten(self.layout.shape), flatten(self.layout.stride), strict=True)
        for mode, (part, extent, stride) in enumerate(extents):
            if isinstance(part, slice):
                if part.step not in (None, 1):
                    raise ValueError(f"slice{parts} of {self.layout}: must be a step of 1, not {part.step}")
                part = (0 if part.start is None else part.start, extent if part.stop is None else part.stop)
            if isinstance(part, tuple):
                start, stop = (as_int_array(bound, "slice bound") for bound in part)
                if not (isinstance(start, int) and isinstance(stop, int) and start <= stop <= extent):
                    raise ValueError(f"slice{parts} of {self.layout}: {start}:{stop} must be in 0:{extent}")
                offset = offset + start * stride
                shape.append(stop - start)
                strides.append(stride)
                kept.append(mode)
                continue
            number = as_int_array(part, "slice index")
            if np.size(number) and (last := int(np.max(number))) >= extent and not self.memory.unsafe:
                raise ValueError(f"slice{parts} of {self.layout}: {last}:{last + 1} must be in 0:{extent}")
            ndim = max(np.ndim(offset), np.ndim(number))
            offset = leading(offset, ndim) + leading(number * stride, ndim)
        return self._view(Layout(tuple(shape), tuple(strides)), offset, self.element_size, self._known_of(kept))

    def __getitem__(self, parts: Any) -> Any:
        """``t[i, j]``: the element there (a vector of ``element_size``, or its scalar). With slices a view, whose
        bounds clip and count from the end as Python's do: ``t[b, :, 2, 0:n]``.

        >>> from kvlab.layout import TileTensor
        >>> t = TileTensor.from_numpy(np.arange(12.0).reshape(3, 4))
        >>> t[1, 2].item(), t[-2:, 1:99].load()[..., 0].tolist()
        (6.0, [[5.0, 6.0, 7.0], [9.0, 10.0, 11.0]])
        """
        parts = parts if isinstance(parts, tuple) else (parts,)
        if any(isinstance(part, slice) for part in parts):
            if len(parts) != self.rank:
                raise ValueError(f"[{parts}] of {self.layout}: must be one part for each mode")
            return self.slice(*(_python_bounds(part, n) for part, n in zip(parts, self.shape, strict=True)))
        value = self.load_at(*parts)
        return value[..., 0] if self.element_size == 1 else value

    def __setitem__(self, parts: Any, value: Any) -> None:
        """Write what ``t[parts]`` names: an element, one index for each leaf; or a whole view."""
        parts = parts if isinstance(parts, tuple) else (parts,)
        if any(isinstance(part, slice) for part in parts):
            view = self[parts]
            if not isinstance(value, TileBase):
                view.store(np.asarray(value, self.dtype) if np.ndim(value) == 0 else np.asarray(value)[..., None])
            elif not value.memory.shares_bytes(self.memory) or not np.array_equal(value.offset, view.offset):
                view.store(value.load())
            return
        if len(parts) != self.flat_rank:
            raise ValueError(
                f"[{parts}] of {self.layout}: must be one index for each of the {self.flat_rank} leaves"
            )
        value = np.asarray(value, self.dtype)
        self.store_at(*parts, value=value[..., None] if self.element_size == 1 and value.ndim else value)

    def split(self, count: int, axis: int = 0, *, index: int | None = None, alignment: int = 1) -> Any:
        """``count`` parts of one mode: a tuple of views, all of one size; or, with ``index``, that part alone, its size
        rounded up to ``alignment`` and the last ones cut where the mode ends.

        >>> from kvlab.layout import TileTensor
        >>> from kvlab.memory import Memory
        >>> t = TileTensor(Memory(128), "fp32", Layout.row_major(4, 8))
        >>> [part.layout.shape for part in t.split(2, 1)]
        [(4, 4), (4, 4)]
        >>> [t.split(3, 1, index=i, alignment=3).shape[1] for i in range(3)]
        [3, 3, 2]
        """
        self._require_flat("split")
        as_int(count, "split: count", 1)
        as_int(alignment, "split: alignment", 1)
        if not 0 <= as_int(axis, "split: axis") < self.rank:
            raise ValueError(f"split of {self.layout} along axis {axis}: must be 0 to {self.rank - 1}")
        if index is None:
            self._require_static("split without an index")
        extent = self.shape[axis]
        if index is not None and not 0 <= as_int(index, "split: index") < count:
            raise ValueError(f"split({count}, index={index}): must be an index in 0:{count}")
        if index is None:
            if extent % count or alignment != 1:
                raise ValueError(
                    f"split({count}, {axis}) of {self.layout}: {count} does not divide {extent}; give index="
                )
            return tuple(self.split(count, axis, index=i) for i in range(count))
        size = (extent + count - 1) // count
        size += -size % alignment
        start = min(index * size, extent)
        parts: list[Any] = [slice(None)] * self.rank
        parts[axis] = (start, min(start + size, extent))
        return self.slice(*parts)

    def reshape(self, *shape: Any) -> Self:
        """Another shape of a dense row-major tensor; or, given a :class:`Layout`, any reinterpretation, unchecked.

        >>> from kvlab.layout import TileTensor
        >>> from kvlab.memory import Memory
        >>> TileTensor(Memory(128), "fp32", Layout.row_major(4, 8)).reshape(2, 16).layout
        Layout("(2,16):(16,1)")
        """
        if len(shape) == 1 and isinstance(shape[0], Layout):
            return self._view(shape[0], self.offset, self.element_size)
        layout = Layout.row_major(*shape)
        if not self.layout.is_row_major or layout.size != self.layout.size or self.element_size != 1:
            raise ValueError(f"reshape{shape} of {self!r}: must be {layout.size} dense row-major scalars")
        return self._view(layout, self.offset, 1, ((True,) * layout.rank, (True,) * layout.rank))

    def transpose(self) -> Self:
        """The modes in reverse order."""
        first = np.cumsum([0, *(len(flatten(mode.shape)) for mode in self.layout.modes)])
        leaves = [leaf for mode in reversed(range(self.rank)) for leaf in range(first[mode], first[mode + 1])]
        return self._view(self.layout.transpose(), self.offset, self.element_size, self._known_of(leaves))

    def coalesce(self) -> Self:
        """A dense row-major tensor as one mode.

        >>> from kvlab.layout import TileTensor
        >>> from kvlab.memory import Memory
        >>> TileTensor(Memory(128), "fp32", Layout.row_major(4, 8)).coalesce().layout
        Layout("32:1")
        """
        self._require_static("coalesce")
        if not self.layout.is_row_major:
            raise ValueError(f"coalesce of {self!r}: must be a dense row-major layout")
        return self._view(Layout(self.layout.size, 1), self.offset, self.element_size)

    as_span = coalesce
    """MAX's name for the elements as one run."""

    def flatten_leading(self) -> Self:
        """``(A, B, C)`` as row-major ``(A * B, C)``. An unsafe memory does not check that the elements lie so.

        >>> from kvlab.layout import TileTensor
        >>> from kvlab.memory import Memory
        >>> TileTensor(Memory(96), "fp32", Layout.row_major(2, 3, 4)).flatten_leading().layout
        Layout("(6,4):(4,1)")
        """
        if self.rank != 3 or not (self.layout.is_row_major or self.memory.unsafe):
            raise ValueError(f"flatten_leading of {self!r}: must be three dense row-major modes")
        a, b, c = self.shape
        return self._view(Layout.row_major(a * b, c), self.offset, self.element_size)

    def bitcast(self, dtype: Any) -> Self:
        """The same bytes as another dtype. The layout stays as it is, so strides count the new scalars: with another
        size that is another place, and a warning says so.

        >>> from kvlab.layout import TileTensor
        >>> t = TileTensor.from_numpy(np.array([1.0, 2.0], np.float32))
        >>> [hex(bits) for bits in t.bitcast("uint32").to_numpy()]
        ['0x3f800000', '0x40000000']
        """
        dtype = as_dtype(dtype)
        old, new = self.dtype.itemsize, dtype.itemsize
        if old != new:
            warnings.warn(f"bitcast of {self!r} to {dtype}: the strides now count {new} bytes each", stacklevel=2)
        if ((np.asarray(self.offset) * old) % new).any():
            raise ValueError(f"bitcast of {self!r} to {dtype}: it starts inside a scalar of {new} bytes")
        view = self._view(self.layout, self.offset * old // new, self.element_size)
        view.dtype, view.end = dtype, None if self.end is None else self.end * old // new
        return view

    def address_space_cast(self, space: AddressSpace) -> Self:
        """The same bytes, said to be of another address space. Copies and loads ask for it; GENERIC may become any
        other space and any other GENERIC. Between two others it is no cast but a copy: ValueError, unless the memory
        is unsafe.

        >>> from kvlab.layout import TileTensor
        >>> t = TileTensor.from_numpy(np.zeros((2, 4), np.float32)).address_space_cast(AddressSpace.GENERIC)
        >>> t
        TileTensor(float32, (2,4):(4,1), offset 0, generic)
        >>> t.address_space_cast(AddressSpace.SHARED).address_space_cast(AddressSpace.LOCAL)
        Traceback (most recent call last):
            ...
        ValueError: address_space_cast of TileTensor(float32, (2,4):(4,1), offset 0, shared) to local: \
must be from or to generic; data moves from shared to local by a copy
        """
        if not isinstance(space, AddressSpace):
            raise ValueError(f"address_space_cast of {self!r} to {space!r}: must be a kvlab.memory.AddressSpace")
        old = self.memory.space
        if space is not old and AddressSpace.GENERIC not in (space, old) and not self.memory.unsafe:
            raise ValueError(
                f"address_space_cast of {self!r} to {space.value}: must be from or to generic; data moves from "
                f"{old.value} to {space.value} by a copy"
            )
        view = self._view(self.layout, self.offset, self.element_size)
        view.memory = self.memory.in_space(space)
        return view

    def _known_of(self, leaves: Any) -> Known | None:
        """What is static of these leaves, None where all is."""
        if self.known is None:
            return None
        shape, stride = self.known
        return tuple(shape[leaf] for leaf in leaves), tuple(stride[leaf] for leaf in leaves)

    def as_immut(self) -> Self:
        """The same view, which refuses stores."""
        view = self._view(self.layout, self.offset, self.element_size)
        view.mutable = False
        return view


def _python_bounds(part: Any, extent: int) -> Any:
    """A slice with clipped bounds from 0 on; everything else as it is."""
    if not isinstance(part, slice):
        return part
    start, stop, step = part.indices(extent)
    return slice(start, max(start, stop), step)
