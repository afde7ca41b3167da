"""MAX's tile copiers by name; what they share is :class:`~kvlab.layout.tensor.copier.TileCopier`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvlab.layout.algebra.int_tuple import IntArray, as_int_array, at_once, flatten
from kvlab.layout.algebra.swizzle import Swizzle
from kvlab.layout.algebra.views import check_linear
from kvlab.layout.tensor.copier import DRAM, LOCAL, SHARED, ThreadScope, TileCopier
from kvlab.layout.tensor.tile_ops import Fill
from kvlab.layout.tensor.tile_tensor import TileTensor
from kvlab.memory import AddressSpace


@dataclass(frozen=True)
class GenericToSharedTileCopier(TileCopier):
    """DRAM to shared memory, by loads and stores. The swizzle permutes where a thread's first element goes, counted in
    elements; its other elements follow linearly. ValueError where that is not where the swizzle puts them: their
    distances must be multiples of its period (:class:`GenericToSharedAsyncTileCopier` permutes each element's place).

    >>> from kvlab.layout import Layout
    >>> dram = TileTensor.from_numpy(np.arange(64, dtype=np.float32).reshape(8, 8)).vectorize(1, 4)
    >>> smem = TileTensor.stack_allocation(Layout.row_major(8, 8), "fp32").vectorize(1, 4)
    >>> GenericToSharedTileCopier(Layout.row_major(8, 2), swizzle=Swizzle(1, 0, 1, "vector")).copy(smem, dram)
    >>> smem.load()[:2, :, 0].tolist()
    [[0.0, 4.0], [12.0, 8.0]]
    """

    swizzle: Swizzle | None = None
    spaces: ClassVar = (DRAM, SHARED)

    def _places(self, tensor: TileTensor, worker: IntArray) -> IntArray:
        swizzle = self.swizzle if tensor.memory.space is AddressSpace.SHARED else None
        fragment = tensor.distribute(self.thread_layout, worker, swizzle)
        if swizzle is not None and not tensor.memory.unsafe:
            scalars = tensor.element_size, tensor.dtype.itemsize
            check_linear(fragment.layout, flatten(tensor.layout.stride), self.thread_layout, swizzle, *scalars)
        return fragment._indices(fragment.layout(np.arange(at_once(fragment.layout.size, "elements"))))


@dataclass(frozen=True)
class GenericToSharedAsyncTileCopier(TileCopier):
    """DRAM to shared memory by cp.async: elements of 4, 8 or 16 bytes. The swizzle permutes every element's place,
    counted in scalars from the tile's first. ``masked``: elements whose first scalar lies past the valid rows arrive as
    zeros (an element that only ends past them arrives whole; columns are not looked at). ValueError unless the rows of
    the source follow one another, as valid rows are told by their distance from the first.

    >>> from kvlab.layout import Layout
    >>> dram = TileTensor.from_numpy(np.ones((4, 8), np.float32)).vectorize(1, 4)
    >>> smem = TileTensor.stack_allocation(Layout.row_major(4, 8), "fp32").vectorize(1, 4)
    >>> copier = GenericToSharedAsyncTileCopier(Layout.row_major(4, 2), masked=True)
    >>> copier.copy(smem, dram, src_num_valid_rows=3)
    >>> smem.load()[:, 0, 0].tolist()
    [1.0, 1.0, 1.0, 0.0]
    """

    swizzle: Swizzle | None = None
    masked: bool = False
    spaces: ClassVar = (DRAM, SHARED)

    def copy(
        self, dst: TileTensor, src: TileTensor, worker: Any = None, *, src_num_valid_rows: int | None = None
    ) -> None:
        """Copies as every copier; ``src_num_valid_rows`` counts the rows that exist, by default all of mode 0, as are
        those of more."""
        worker = self._check(dst, src, worker)
        if src_num_valid_rows is not None and not self.masked:
            raise ValueError(f"{self._name}: src_num_valid_rows is {src_num_valid_rows}: must be None if not masked")
        if src.known is not None and not src.known[1][0]:
            raise ValueError(f"{self._name} of {src!r}: must be a static stride of mode 0")
        if self.masked and not _rows_follow(src):
            raise ValueError(f"{self._name} of {src!r}: must be masked, rows that follow one another")
        busy = self._busy(worker)
        worker = worker if busy is None else worker[busy]
        ndim = max(np.ndim(src.offset), np.ndim(dst.offset))
        to, _, first_to = _with_axes(dst, ndim).distribute_with_offset(self.thread_layout, worker)
        from_, _, first_from = _with_axes(src, ndim).distribute_with_offset(self.thread_layout, worker)
        ones = (1,) * ndim
        rows: Any = src.dim(0)
        if src_num_valid_rows is not None:
            rows = np.minimum(as_int_array(src_num_valid_rows, "src_num_valid_rows"), rows)
        to.copy_from_async(
            from_, swizzle=self.swizzle, base_offset=first_to.reshape(*ones, -1), is_masked=self.masked, fill=Fill.ZERO,
            src_idx_bound=(rows * flatten(src.layout.stride)[0] - first_from).reshape(*ones, -1),
        )


@dataclass(frozen=True)
class _Swizzled(TileCopier):
    """A copier whose swizzle permutes every element's place in shared memory."""

    swizzle: Swizzle | None = None
    original: bool = False

    def _step(self, element_size: int) -> int:
        return element_size if self.original and self.swizzle is not None else 1

    def _swizzle(self, tensor: TileTensor) -> Swizzle | None:
        return self.swizzle if tensor.memory.space is AddressSpace.SHARED else None


@dataclass(frozen=True)
class SharedToGenericTileCopier(_Swizzled):
    """Shared memory to DRAM. The swizzle, with which the tile was written, permutes every element's place, counted in
    scalars from the tile's first.

    Of vectors of n scalars the original moves every n-th only, where there is a swizzle; ``original=True`` does so too.

    >>> from kvlab.layout import Layout
    >>> smem = TileTensor.stack_allocation(Layout.row_major(2, 2), "fp32")
    >>> smem.store(np.array([[0, 1], [3, 2]], np.float32)[..., None])
    >>> dram = TileTensor.from_numpy(np.zeros((2, 2), np.float32))
    >>> SharedToGenericTileCopier(Layout.row_major(2, 2), swizzle=Swizzle(1, 0, 1, "fp32")).copy(dram, smem)
    >>> print(dram)
    [[0.0, 1.0], [2.0, 3.0]]
    """

    spaces: ClassVar = (SHARED, DRAM)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.thread_scope is not ThreadScope.BLOCK:
            raise ValueError(f"{self._name}: must be the threads of a block, not those of a warp")


@dataclass(frozen=True)
class GenericToLocalTileCopier(TileCopier):
    """DRAM to registers: each thread's tile gets its fragment.

    >>> from kvlab.layout import Layout
    >>> dram = TileTensor.from_numpy(np.arange(8, dtype=np.float32).reshape(2, 4))
    >>> registers = TileTensor.stack_allocation(Layout.row_major(1, 2), "fp32", AddressSpace.LOCAL, programs=4)
    >>> GenericToLocalTileCopier(Layout.row_major(2, 2)).copy(registers, dram)
    >>> registers.load()[..., 0].reshape(4, 2).tolist()
    [[0.0, 2.0], [1.0, 3.0], [4.0, 6.0], [5.0, 7.0]]
    """

    spaces: ClassVar = (DRAM, LOCAL)


@dataclass(frozen=True)
class LocalToGenericTileCopier(TileCopier):
    """Registers to DRAM.

    >>> from kvlab.layout import Layout
    >>> registers = TileTensor.stack_allocation(Layout.row_major(1, 1), "fp32", AddressSpace.LOCAL, programs=4)
    >>> registers.store(np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1))
    >>> dram = TileTensor.from_numpy(np.zeros((2, 2), np.float32))
    >>> LocalToGenericTileCopier(Layout.col_major(2, 2)).copy(dram, registers)
    >>> print(dram)
    [[0.0, 2.0], [1.0, 3.0]]
    """

    spaces: ClassVar = (LOCAL, DRAM)


@dataclass(frozen=True)
class SharedToLocalTileCopier(TileCopier):
    """Shared memory that was written without a swizzle to registers. There is no guard: a thread past the end of the
    thread layout reads what thread ``worker % size`` reads.

    >>> from kvlab.layout import Layout
    >>> smem = TileTensor.stack_allocation(Layout.row_major(2, 2), "fp32").fill(3)
    >>> registers = TileTensor.stack_allocation(Layout.row_major(1, 1), "fp32", AddressSpace.LOCAL, programs=8)
    >>> SharedToLocalTileCopier(Layout.row_major(2, 2), num_threads=8).copy(registers, smem)
    >>> registers.load().ravel().tolist()
    [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    """

    spaces: ClassVar = (SHARED, LOCAL)

    def _busy(self, worker: IntArray) -> NDArray[np.bool_] | None:
        return None


@dataclass(frozen=True)
class LocalToSharedTileCopier(_Swizzled):
    """Registers to shared memory. The swizzle permutes every element's place, counted in scalars from the tile's first.

    Of vectors of n scalars the original moves every n-th only, where there is a swizzle; ``original=True`` does so too.

    >>> from kvlab.layout import Layout
    >>> registers = TileTensor.stack_allocation(Layout.row_major(1, 1), "fp32", AddressSpace.LOCAL, programs=4)
    >>> registers.store(np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1))
    >>> smem = TileTensor.stack_allocation(Layout.row_major(2, 2), "fp32")
    >>> LocalToSharedTileCopier(Layout.row_major(2, 2), swizzle=Swizzle(1, 0, 1, "fp32")).copy(smem, registers)
    >>> print(smem)
    [[0.0, 1.0], [3.0, 2.0]]
    """

    spaces: ClassVar = (LOCAL, SHARED)


def _rows_follow(tensor: TileTensor) -> bool:
    """Tells whether each row (of mode 0) starts past the last element of the one before."""
    first, *others = tensor.layout.modes
    return first.size < 2 or flatten(first.stride)[0] > sum(mode.cosize - 1 for mode in others)


def _with_axes(tensor: TileTensor, ndim: int) -> TileTensor:
    """The same view with as many leading axes."""
    offset = np.asarray(tensor.offset)
    return tensor._view(
        tensor.layout, offset.reshape((*offset.shape, *(1,) * (ndim - offset.ndim))), tensor.element_size
    )
