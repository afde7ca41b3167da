"""Operations that change a TileTensor's elements as a whole: fills, copies, arithmetic in place."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from kvlab.common.checks import shown
from kvlab.layout.algebra.int_tuple import at_once
from kvlab.layout.algebra.swizzle import VECTOR_BYTES, Swizzle
from kvlab.layout.tensor.access import copied, leading
from kvlab.layout.tensor.tile_base import MOST_BITS, TileBase
from kvlab.memory import AddressSpace


class Fill(enum.Enum):
    """Value that a masked asynchronous copy writes for elements out of bounds: nothing, zeros, or NaNs."""

    NONE = "none"
    ZERO = "zero"
    NAN = "nan"


class TileOps(TileBase):
    """Fills, copies and arithmetic in place (see ``TileTensor``)."""

    __slots__ = ()

    def fill(self, value: Any, *, original: bool = False) -> Self:
        """Write one scalar into every scalar of every element, and return this tensor. ``original=True`` does as MAX's
        TileTensor does, which writes only the first scalar of each vector, and warns."""
        try:
            scalar = np.asarray(value).astype(self.dtype)
        except (OverflowError, TypeError):
            raise ValueError(f"fill of {self!r} with {shown(value)}: must be a number of {self.dtype}") from None
        if original and self.element_size > 1:
            warnings.warn(f"fill writes the first of the {self.element_size} scalars of each vector only", stacklevel=2)
            first = self._view(self.layout, self.offset, 1)
            first.element_layout = None
            first.store(scalar)
        else:
            self.store(scalar)
        return self

    def copy_from(self, source: TileBase, *, order: Literal["colex", "memory"] | None = None) -> Self:
        """Element i of ``source`` (colexicographically, the first mode fastest) to element i of this tensor, cast to
        its dtype. Shapes may differ, counts and vector sizes not. Two dense row-major tensors of scalars are copied in
        memory order instead, as the original does with vector instructions, where these divide the count; ``order``
        asks for one of the two.

        >>> from kvlab.layout import TileTensor
        >>> source = TileTensor.from_numpy(np.arange(12).reshape(2, 6))
        >>> target = TileTensor.from_numpy(np.zeros((3, 4), int))
        >>> [target.copy_from(source, order=order).to_numpy()[0].tolist() for order in ("memory", "colex")]
        [[0, 1, 2, 3], [0, 7, 3, 10]]
        """
        if not isinstance(source, TileBase):
            raise ValueError(f"copy of {source!r} to {self!r}: must be a tensor")
        self._require_static("copy_from")
        source._require_static("copy_from")
        if source.element_size != self.element_size or source.layout.size != self.layout.size:
            raise ValueError(f"copy of {source!r} to {self!r}: must be equal element sizes and element counts")
        value = source.load().astype(self.dtype, copy=False)
        lead = value.shape[: value.ndim - source.rank - 1]
        if len(lead) > np.ndim(self.offset):
            raise ValueError(f"copy of {source!r} to {self!r}: the source has more leading axes")
        width = max(VECTOR_BYTES // max(self.dtype.itemsize, source.dtype.itemsize), 1)
        value = copied(value, source.layout, self.layout, width, order)
        padding = (1,) * (np.ndim(self.offset) - len(lead))
        self.store(value.reshape(*lead, *padding, *self.shape, self.element_size))
        return self

    def copy_from_async(
        self, source: TileBase, *, is_masked: bool = False, swizzle: Swizzle | None = None, fill: Fill = Fill.NONE,
        src_idx_bound: Any = 0, base_offset: Any = 0,
    ) -> None:
        """Copy DRAM to shared memory as cp.async does, element i (of 4, 8 or 16 bytes) to element i.

        The swizzle permutes scalars: element at d goes to ``swizzle(base_offset + d) - base_offset``, where
        ``base_offset`` is how many scalars this fragment starts after the tile that the swizzle counts from. Masked:
        an element is in bounds where its first scalar, counted from the first of ``source``, is below
        ``src_idx_bound``; of the others nothing is written, or zeros, or NaNs (16-byte float elements only).
        ``src_idx_bound`` and ``base_offset`` are ints, or int arrays over the leading axes of the offsets. The copy
        has landed when this returns.

        >>> from kvlab.layout import Layout, TileTensor
        >>> smem = TileTensor.stack_allocation(Layout.row_major(2, 8), "fp32").vectorize(1, 4)
        >>> dram = TileTensor.from_numpy(np.arange(16, dtype=np.float32).reshape(2, 8)).vectorize(1, 4)
        >>> smem.copy_from_async(dram, is_masked=True, src_idx_bound=8, fill=Fill.ZERO)
        >>> smem.load()[:, 1].tolist()
        [[4.0, 5.0, 6.0, 7.0], [0.0, 0.0, 0.0, 0.0]]
        """
        if not isinstance(source, TileBase):
            raise ValueError(f"copy_from_async of {source!r} to {self!r}: must be a tensor")
        for name, value in (("src_idx_bound", src_idx_bound), ("base_offset", base_offset)):
            array = np.asarray(value)
            if array.dtype.kind not in "iu" or (array.size and max(array.max(), -array.min()) >> MOST_BITS > 0):
                raise ValueError(
                    f"{name} {shown(value)} of copy_from_async: must be an int or an int array of {MOST_BITS} bits"
                )
        nbytes = self._async_bytes(source, fill, swizzle)
        element = np.arange(at_once(self.layout.size, "elements"))
        ndim = max(np.ndim(self.offset), np.ndim(source.offset)) + 1
        base = leading(base_offset, ndim)
        from_, to = source.layout(element), self.layout(element)
        if swizzle is not None:
            to = swizzle.apply(base + to, self.dtype.itemsize) - base
        read_at = (leading(source.offset, ndim) + from_) * self.dtype.itemsize + source.memory.base
        write_at = (leading(self.offset, ndim) + to) * self.dtype.itemsize + self.memory.base
        inside = from_ < leading(src_idx_bound, ndim) if is_masked else None
        value = source.memory.load(read_at, self.dtype, self.element_size, mask=inside, alignment=nbytes)
        if inside is not None and fill is not Fill.NONE:
            empty = np.asarray(0 if fill is Fill.ZERO else np.nan).astype(self.dtype)
            value, inside = np.where(inside[..., None], value, empty), None
        shape = np.broadcast_shapes(write_at.shape, value.shape[:-1])
        self.memory.store(np.broadcast_to(write_at, shape), value, mask=inside, alignment=nbytes)

    def _async_bytes(self, source: TileBase, fill: Fill, swizzle: Swizzle | None) -> int:
        """Bytes of an element of a valid asynchronous copy, or ValueError."""
        self._check_mutable()
        self._require_static("copy_from_async")
        what = f"copy_from_async of {source!r} to {self!r}"
        nbytes = self.element_size * self.dtype.itemsize
        if self.memory.space is not AddressSpace.SHARED or source.memory.space in (
            AddressSpace.SHARED,
            AddressSpace.LOCAL,
        ):
            raise ValueError(f"{what}: must be from generic or global to shared memory")
        if (source.dtype, source.element_size, source.layout.size) != (self.dtype, self.element_size, self.layout.size):
            raise ValueError(f"{what}: must be equal dtypes, element sizes and element counts")
        if nbytes not in (4, 8, 16) or self.element_layout is not None or source.element_layout is not None:
            raise ValueError(f"{what}: must be elements of 4, 8 or 16 contiguous bytes, not {nbytes}")
        if self.end is not None or source.end is not None:
            raise ValueError(f"{what}: must be without valid_rows: use is_masked and src_idx_bound")
        if swizzle is not None:
            swizzle.apply(0, nbytes)  # which raises where it would tear an element
        if fill is Fill.NAN and (nbytes != 16 or self.dtype.kind in "iub"):
            raise ValueError(f"{what}: NaNs fill 16-byte float elements only")
        return nbytes

    # Arithmetic in place. The other side has the same shape, or is a scalar, or a rank-1 tensor over the rows.

    def __iadd__(self, other: Any) -> Self:
        return self._update(other, np.add)

    def __isub__(self, other: Any) -> Self:
        return self._update(other, np.subtract)

    def __imul__(self, other: Any) -> Self:
        return self._update(other, np.multiply)

    def __itruediv__(self, other: Any) -> Self:
        self._require_float("/=")
        return self._update(other, np.divide)

    def __ifloordiv__(self, other: Any) -> Self:
        return self._update(other, np.floor_divide)

    def min(self, other: Any) -> Self:
        """Each element, or the other's where that is less; in place."""
        return self._update(other, np.minimum)

    def max(self, other: Any) -> Self:
        """Each element, or the other's where that is more; in place.

        >>> from kvlab.layout import TileTensor
        >>> t = TileTensor.from_numpy(np.array([[1.0, 2.0], [3.0, 4.0]]))
        >>> t += TileTensor.from_numpy(np.array([100.0, 200.0]))  # one for each row
        >>> t.max(102.0).to_numpy().tolist()
        [[102.0, 102.0], [203.0, 204.0]]
        """
        return self._update(other, np.maximum)

    def abs(self) -> Self:
        """Absolute values, in place."""
        return self._map(np.abs)

    def recip(self) -> Self:
        """1 / x, in place."""
        self._require_float("recip")
        return self._map(lambda x: np.divide(1, x, dtype=x.dtype))

    def exp(self, scale: float = 1.0) -> Self:
        """exp(scale * x), in place."""
        self._require_float("exp")
        return self._map(lambda x: np.exp(x * np.asarray(scale, x.dtype)))

    def _map(self, function: Callable[[NDArray[Any]], NDArray[Any]]) -> Self:
        self._require_static("arithmetic in place")
        self.store(function(self.load()).astype(self.dtype, copy=False))
        return self

    def _update(self, other: Any, function: Callable[..., NDArray[Any]]) -> Self:
        if isinstance(other, TileBase):
            row_wise = (self.rank, other.rank) == (2, 1) and other.shape[0] == self.shape[0]
            if not (row_wise or other.shape == self.shape) or other.element_size != self.element_size:
                raise ValueError(f"{function.__name__} of {self!r} and {other!r}: the same shape, or one value a row")
            value = other.load()
            other = value[..., None, :] if row_wise else value
        elif np.ndim(other) == 0:
            other = np.asarray(other).astype(self.dtype)
        else:
            raise ValueError(f"{function.__name__} of {self!r} and {type(other).__name__}: a tensor or a scalar")
        return self._map(lambda x: function(x, other))

    def _require_float(self, what: str) -> None:
        if self.dtype.kind in "iub":
            raise ValueError(f"{what} of {self!r}: must be floats")
