"""TileTensor: a view of a memory through a layout, for one thread or for all threads of all CTAs at once."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.common.arrays import addressing_strides
from kvlab.layout.algebra.int_tuple import as_int
from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.swizzle import VECTOR_BYTES
from kvlab.layout.tensor.tile_ops import TileOps
from kvlab.layout.tensor.tile_slices import TileSlices
from kvlab.layout.tensor.tile_static import TileStatic
from kvlab.layout.tensor.tile_views import TileViews
from kvlab.memory import AddressSpace, Memory, as_dtype

if TYPE_CHECKING:
    from kvlab.layout.tensor.layout_tensor import LayoutTensor


class TileTensor(TileViews, TileSlices, TileOps, TileStatic):
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

    >>> import numpy as np
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

    __slots__ = ()

    @classmethod
    def from_numpy(
        cls, array: NDArray[Any], *, name: str = "array", space: AddressSpace = AddressSpace.GLOBAL,
        unsafe: bool = False, batch: int = 0,
    ) -> TileTensor:
        """A view of the array's own bytes (no copy), with its shape and strides, which must not be negative where they
        address something; immutable where the array is read-only. The first ``batch`` axes are those of many tiles: of
        programs, of threads.

        >>> import numpy as np
        >>> a = np.zeros((2, 3), np.float32)
        >>> TileTensor.from_numpy(a).store_at(1, 2, value=7)
        >>> a[1, 2].item()
        7.0
        >>> TileTensor.from_numpy(a, space=AddressSpace.LOCAL, batch=1)
        TileTensor(float32, (3):(1), offset [2], local)
        """
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{name} is a {type(array).__name__}: must be a NumPy array")
        strides = addressing_strides(array.shape, array.strides, array.itemsize)
        if any(stride % array.itemsize for stride in strides):
            raise ValueError(
                f"{name}: strides {array.strides} are not multiples of the element's {array.itemsize} bytes"
            )
        stride = tuple(stride // array.itemsize for stride in strides)
        if not 0 <= as_int(batch, "batch") < max(array.ndim, 1):
            raise ValueError(f"batch {batch} of {name} {array.shape}: must be fewer than its {array.ndim} axes")
        shape, lead = array.shape[batch:], np.ogrid[tuple(slice(n) for n in array.shape[:batch])] if batch else ()
        layout = Layout.row_major(*shape) if array.flags.c_contiguous else Layout(shape, stride[batch:])
        offset = sum((axis * step for axis, step in zip(lead, stride, strict=False)), 0)
        tensor = cls(Memory.over(array, space=space, name=name, unsafe=unsafe), array.dtype, layout, offset)
        tensor.mutable = array.flags.writeable
        return tensor

    @classmethod
    def stack_allocation(
        cls, layout: Layout, dtype: Any, space: AddressSpace = AddressSpace.SHARED, programs: int | None = None,
        alignment: int = VECTOR_BYTES, *, threads: int | None = None, base: int = 0, name: str | None = None,
        unsafe: bool = False, original: bool = False,
    ) -> TileTensor:
        """A fresh, poisoned memory of ``layout.cosize`` scalars (``layout.size`` where that is more), at byte address
        ``base``, which must be a multiple of ``alignment`` bytes. ``threads``: one such tile for each thread, side by
        side, as registers. ``original=True`` reserves ``layout.size`` scalars as MAX does, too few for a padded layout,
        and warns then.

        >>> TileTensor.stack_allocation(Layout.row_major(4, 8), "bf16", programs=2)
        TileTensor(bfloat16, (4,8):(8,1), offset [1], shared, 2 programs)
        >>> TileTensor.stack_allocation(Layout.row_major(4, 8), "bf16", AddressSpace.LOCAL, programs=2, threads=256)
        TileTensor(bfloat16, (4,8):(8,1), offset [1, 256], local, 2 programs)
        """
        if not isinstance(layout, Layout) or not isinstance(space, AddressSpace):
            raise ValueError(f"stack_allocation of {layout!r} in {space!r}: must be a Layout and an AddressSpace")
        as_int(base, "base", 0)
        if as_int(alignment, "alignment") < 1 or alignment & (alignment - 1) or base % alignment:
            raise ValueError(f"base {base} with alignment {alignment}: must be a power of two that divides base")
        scalars = max(layout.size, layout.cosize)
        if original and scalars > layout.size:
            warnings.warn(
                f"{layout} reaches {layout.cosize} scalars, but only {layout.size} are reserved", stacklevel=2
            )
            scalars = layout.size
        nbytes = scalars * as_dtype(dtype).itemsize * (1 if threads is None else as_int(threads, "threads", 1))
        name = name or f"{space.value} memory"
        memory = Memory(nbytes, space=space, name=name, programs=programs, base=base, unsafe=unsafe)
        offset = 0 if threads is None else np.arange(threads) * scalars
        return cls(memory, dtype, layout, offset if threads is None or programs is None else np.asarray(offset)[None])

    def to_layout_tensor(self) -> LayoutTensor:
        """The same view with the legacy rules of MAX's :class:`~kvlab.layout.LayoutTensor`."""
        from kvlab.layout.tensor.layout_tensor import LayoutTensor

        return self._as(LayoutTensor)
