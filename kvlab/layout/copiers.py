"""MAX's tile copiers by name: how the threads of a block or a warp move a tile between two address spaces.

A copier is the ``thread_layout`` that deals a tile out and what it does to addresses; ``copy(dst, src)`` moves the
bytes of all its threads at once. Element i of a thread's source fragment goes to element i of its destination fragment,
the first mode fastest. A LOCAL tensor is a thread's own registers: the last axis of its offset counts the threads, or
each thread is a program of its memory. Copies have landed when they return.
"""

from __future__ import annotations

import enum
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvlab.layout.access import read, write
from kvlab.layout.int_tuple import IntArray, as_int_array, flatten
from kvlab.layout.layout import Layout
from kvlab.layout.swizzle import Swizzle
from kvlab.layout.tile_ops import Fill
from kvlab.layout.tile_tensor import TileTensor
from kvlab.memory import AddressSpace

__all__ = [
    "GenericToLocalTileCopier",
    "GenericToSharedAsyncTileCopier",
    "GenericToSharedTileCopier",
    "LocalToGenericTileCopier",
    "LocalToSharedTileCopier",
    "SharedToGenericTileCopier",
    "SharedToLocalTileCopier",
    "ThreadScope",
    "TileCopier",
]

_DRAM = (AddressSpace.GENERIC, AddressSpace.GLOBAL)
_SHARED = (AddressSpace.SHARED,)
_LOCAL = (AddressSpace.LOCAL,)
_LANES = 64  # of the widest warp


class ThreadScope(enum.Enum):
    """Whose threads share the work: those of a block, or the lanes of each warp."""

    BLOCK = "block"
    WARP = "warp"


@dataclass(frozen=True)
class TileCopier:
    """What the seven copiers share.

    thread_layout   a flat layout, one mode for each mode of the tiles: which thread starts at which element
    num_threads     threads there are, ``thread_layout.size`` unless given; where there are more, the rest does nothing
    thread_scope    what a thread's number counts: threads of the block, or lanes of its warp
    """

    thread_layout: Layout
    num_threads: int | None = None
    thread_scope: ThreadScope = ThreadScope.BLOCK

    spaces: ClassVar[tuple[tuple[AddressSpace, ...], tuple[AddressSpace, ...]]] = (_DRAM, _DRAM)

    def __post_init__(self) -> None:
        if not isinstance(self.thread_layout, Layout) or not self.thread_layout.is_flat:
            raise ValueError(
                f"thread_layout {self.thread_layout!r}: a flat Layout is accepted, such as row_major(8, 4)"
            )
        if self.num_threads is None:
            object.__setattr__(self, "num_threads", self.thread_layout.size)
        if self._threads < self.thread_layout.size:
            raise ValueError(
                f"{self._name}: {self.num_threads} threads are fewer than the {self.thread_layout.size} of "
                f"{self.thread_layout}; some elements would belong to nobody"
            )
        if self.thread_scope is ThreadScope.WARP and self._threads > _LANES:
            raise ValueError(f"{self._name}: a warp has no {self.num_threads} lanes; {_LANES} at most are accepted")

    def copy(self, dst: TileTensor, src: TileTensor, worker: Any = None) -> None:
        """Copy the whole tile; or only what the threads ``worker`` move (an int array ``[W]``, by default all).

        ValueError for tensors of other address spaces, dtypes, vectors or sizes, and where the threads do not divide
        a tile.
        """
        worker = self._check(dst, src, worker)
        places = [self._places(tensor, worker) for tensor in (src, dst)]
        _move(self._name, src, places[0], dst, places[1], self._busy(worker))

    @property
    def _threads(self) -> int:
        return self.num_threads or 0

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _swizzle(self, tensor: TileTensor) -> Swizzle | None:
        """The swizzle of the addresses of this side."""
        return None

    def _busy(self, worker: IntArray) -> NDArray[np.bool_] | None:
        """Which threads do something: no guard where there are exactly as many as the layout has."""
        busy = self.thread_layout.size
        return None if self._threads == busy or (worker < busy).all() else worker < busy

    def _places(self, tensor: TileTensor, worker: IntArray) -> IntArray:
        """Scalars from the memory's first to each element of each thread: ``[*offset.shape, W, elements]``."""
        if tensor.memory.space is AddressSpace.LOCAL:
            places = tensor._indices(tensor.layout(np.arange(tensor.layout.size)))
            lanes = tensor._full(places.shape)[:-1]
            if lanes[-1:] != worker.shape:
                raise ValueError(
                    f"{self._name}: registers of {lanes[-1] if lanes else 'no'} threads in {tensor!r}; those of the "
                    f"{worker.size} that copy are accepted"
                )
            return places
        fragment, _, first = tensor.distribute_with_offset(self.thread_layout, worker)
        inside = first[:, None] + fragment.layout(np.arange(fragment.layout.size))
        swizzle = self._swizzle(tensor)
        if swizzle is not None:
            swizzle.apply(0, tensor.element_size * tensor.dtype.itemsize)  # which raises where it would tear an element
            inside = swizzle.apply(inside, tensor.dtype.itemsize)
            if tensor.element_size > 1:
                warnings.warn(
                    f"{self._name} with a swizzle moves every vector; the original moves one of {tensor.element_size}",
                    stacklevel=4,
                )
        return tensor._indices(inside)

    def _check(self, dst: TileTensor, src: TileTensor, worker: Any) -> IntArray:
        what = f"{self._name} of {src!r} to {dst!r}"
        if not isinstance(src, TileTensor) or not isinstance(dst, TileTensor):
            raise ValueError(f"{what}: tensors are accepted")
        for tensor, spaces, side in ((src, self.spaces[0], "source"), (dst, self.spaces[1], "destination")):
            if tensor.memory.space not in spaces:
                names = " or ".join(space.value for space in spaces)
                raise ValueError(f"{what}: a {side} in {names} memory is accepted")
            if tensor.element_layout is not None:
                raise ValueError(f"{what}: vectors of contiguous scalars are accepted")
        if (src.dtype, src.element_size) != (dst.dtype, dst.element_size):
            raise ValueError(f"{what}: equal dtypes and element sizes are accepted")
        dst._check_mutable()
        chosen = np.arange(self._threads) if worker is None else np.asarray(worker)
        numbers: IntArray = np.atleast_1d(as_int_array(chosen, "worker"))
        if numbers.ndim != 1 or (numbers.size and numbers.max() >= self._threads):
            raise ValueError(f"{what}: workers {numbers.tolist()}; an array of 0 to {self._threads - 1} is accepted")
        return numbers


@dataclass(frozen=True)
class GenericToSharedTileCopier(TileCopier):
    """DRAM to shared memory, by loads and stores. The swizzle permutes where a thread's first element goes, counted in
    elements; its other elements follow linearly, right where their distances are multiples of the swizzle's period.

    >>> dram = TileTensor.from_numpy(np.arange(64, dtype=np.float32).reshape(8, 8)).vectorize(1, 4)
    >>> smem = TileTensor.stack_allocation(Layout.row_major(8, 8), "fp32").vectorize(1, 4)
    >>> GenericToSharedTileCopier(Layout.row_major(8, 2), swizzle=Swizzle(1, 0, 1, "vector")).copy(smem, dram)
    >>> smem.load()[:2, :, 0].tolist()
    [[0.0, 4.0], [12.0, 8.0]]
    """

    swizzle: Swizzle | None = None
    spaces: ClassVar = (_DRAM, _SHARED)

    def _places(self, tensor: TileTensor, worker: IntArray) -> IntArray:
        swizzle = self.swizzle if tensor.memory.space is AddressSpace.SHARED else None
        fragment = tensor.distribute(self.thread_layout, worker, swizzle)
        return fragment._indices(fragment.layout(np.arange(fragment.layout.size)))


@dataclass(frozen=True)
class GenericToSharedAsyncTileCopier(TileCopier):
    """DRAM to shared memory by cp.async: elements of 4, 8 or 16 bytes. The swizzle permutes every element's place,
    counted in scalars from the tile's first. ``masked``: elements whose first scalar lies past the valid rows arrive as
    zeros (an element that only ends past them arrives whole; columns are not looked at).

    >>> dram = TileTensor.from_numpy(np.ones((4, 8), np.float32)).vectorize(1, 4)
    >>> smem = TileTensor.stack_allocation(Layout.row_major(4, 8), "fp32").vectorize(1, 4)
    >>> copier = GenericToSharedAsyncTileCopier(Layout.row_major(4, 2), masked=True)
    >>> copier.copy(smem, dram, src_num_valid_rows=3)
    >>> smem.load()[:, 0, 0].tolist()
    [1.0, 1.0, 1.0, 0.0]
    """

    swizzle: Swizzle | None = None
    masked: bool = False
    spaces: ClassVar = (_DRAM, _SHARED)

    def copy(
        self, dst: TileTensor, src: TileTensor, worker: Any = None, *, src_num_valid_rows: int | None = None
    ) -> None:
        """As every copier; ``src_num_valid_rows`` counts the rows that exist, by default all of mode 0."""
        worker = self._check(dst, src, worker)
        if src_num_valid_rows is not None and not self.masked:
            raise ValueError(f"{self._name}: src_num_valid_rows={src_num_valid_rows} is accepted with masked=True only")
        if src.known is not None and not src.known[1][0]:
            raise ValueError(f"{self._name} of {src!r}: a static stride of mode 0 is accepted")
        busy = self._busy(worker)
        worker = worker if busy is None else worker[busy]
        ndim = max(np.ndim(src.offset), np.ndim(dst.offset))
        to, _, first_to = _with_axes(dst, ndim).distribute_with_offset(self.thread_layout, worker)
        from_, _, first_from = _with_axes(src, ndim).distribute_with_offset(self.thread_layout, worker)
        ones = (1,) * ndim
        rows = src.dim(0) if src_num_valid_rows is None else as_int_array(src_num_valid_rows, "src_num_valid_rows")
        to.copy_from_async(
            from_,
            swizzle=self.swizzle,
            base_offset=first_to.reshape(*ones, -1),
            is_masked=self.masked,
            fill=Fill.ZERO,
            src_idx_bound=(rows * flatten(src.layout.stride)[0] - first_from).reshape(*ones, -1),
        )


@dataclass(frozen=True)
class SharedToGenericTileCopier(TileCopier):
    """Shared memory to DRAM. The swizzle, with which the tile was written, permutes every element's place, counted in
    scalars from the tile's first.

    >>> smem = TileTensor.stack_allocation(Layout.row_major(2, 2), "fp32")
    >>> smem.store(np.array([[0, 1], [3, 2]], np.float32)[..., None])
    >>> dram = TileTensor.from_numpy(np.zeros((2, 2), np.float32))
    >>> SharedToGenericTileCopier(Layout.row_major(2, 2), swizzle=Swizzle(1, 0, 1, "fp32")).copy(dram, smem)
    >>> print(dram)
    [[0.0, 1.0], [2.0, 3.0]]
    """

    swizzle: Swizzle | None = None
    spaces: ClassVar = (_SHARED, _DRAM)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.thread_scope is not ThreadScope.BLOCK:
            raise ValueError(f"{self._name}: the threads of a block are accepted, not those of a warp")

    def _swizzle(self, tensor: TileTensor) -> Swizzle | None:
        return self.swizzle if tensor.memory.space is AddressSpace.SHARED else None


@dataclass(frozen=True)
class GenericToLocalTileCopier(TileCopier):
    """DRAM to registers: each thread's tile gets its fragment.

    >>> dram = TileTensor.from_numpy(np.arange(8, dtype=np.float32).reshape(2, 4))
    >>> registers = TileTensor.stack_allocation(Layout.row_major(1, 2), "fp32", AddressSpace.LOCAL, programs=4)
    >>> GenericToLocalTileCopier(Layout.row_major(2, 2)).copy(registers, dram)
    >>> registers.load()[..., 0].reshape(4, 2).tolist()
    [[0.0, 2.0], [1.0, 3.0], [4.0, 6.0], [5.0, 7.0]]
    """

    spaces: ClassVar = (_DRAM, _LOCAL)


@dataclass(frozen=True)
class LocalToGenericTileCopier(TileCopier):
    """Registers to DRAM.

    >>> registers = TileTensor.stack_allocation(Layout.row_major(1, 1), "fp32", AddressSpace.LOCAL, programs=4)
    >>> registers.store(np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1))
    >>> dram = TileTensor.from_numpy(np.zeros((2, 2), np.float32))
    >>> LocalToGenericTileCopier(Layout.col_major(2, 2)).copy(dram, registers)
    >>> print(dram)
    [[0.0, 2.0], [1.0, 3.0]]
    """

    spaces: ClassVar = (_LOCAL, _DRAM)


@dataclass(frozen=True)
class SharedToLocalTileCopier(TileCopier):
    """Shared memory that was written without a swizzle to registers. There is no guard: a thread past the end of the
    thread layout reads what thread ``worker % size`` reads.

    >>> smem = TileTensor.stack_allocation(Layout.row_major(2, 2), "fp32").fill(3)
    >>> registers = TileTensor.stack_allocation(Layout.row_major(1, 1), "fp32", AddressSpace.LOCAL, programs=8)
    >>> SharedToLocalTileCopier(Layout.row_major(2, 2), num_threads=8).copy(registers, smem)
    >>> registers.load().ravel().tolist()
    [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    """

    spaces: ClassVar = (_SHARED, _LOCAL)

    def _busy(self, worker: IntArray) -> NDArray[np.bool_] | None:
        return None


@dataclass(frozen=True)
class LocalToSharedTileCopier(TileCopier):
    """Registers to shared memory. The swizzle permutes every element's place, counted in scalars from the tile's first.

    >>> registers = TileTensor.stack_allocation(Layout.row_major(1, 1), "fp32", AddressSpace.LOCAL, programs=4)
    >>> registers.store(np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1))
    >>> smem = TileTensor.stack_allocation(Layout.row_major(2, 2), "fp32")
    >>> LocalToSharedTileCopier(Layout.row_major(2, 2), swizzle=Swizzle(1, 0, 1, "fp32")).copy(smem, registers)
    >>> print(smem)
    [[0.0, 1.0], [3.0, 2.0]]
    """

    swizzle: Swizzle | None = None
    spaces: ClassVar = (_LOCAL, _SHARED)

    def _swizzle(self, tensor: TileTensor) -> Swizzle | None:
        return self.swizzle if tensor.memory.space is AddressSpace.SHARED else None


def _with_axes(tensor: TileTensor, ndim: int) -> TileTensor:
    """The same view with as many leading axes."""
    offset = np.asarray(tensor.offset)
    return tensor._view(
        tensor.layout, offset.reshape((*offset.shape, *(1,) * (ndim - offset.ndim))), tensor.element_size
    )


def _move(
    name: str, src: TileTensor, read_at: IntArray, dst: TileTensor, write_at: IntArray, busy: NDArray[np.bool_] | None
) -> None:
    """Element by element; the last axes of both sides are ``[threads, elements]``."""
    what = f"{name} of {src!r} to {dst!r}"
    if read_at.shape[-1] != write_at.shape[-1]:
        raise ValueError(
            f"{what}: fragments of {read_at.shape[-1]} and {write_at.shape[-1]} elements; equal counts are accepted"
        )
    ndim = max(read_at.ndim, write_at.ndim)  # leading axes count from the front, the threads are the last one
    read_at, write_at = (
        at.reshape(*at.shape[:-2], *(1,) * (ndim - at.ndim), *at.shape[-2:]) for at in (read_at, write_at)
    )
    shapes = src._full(read_at.shape[:-1]), dst._full(write_at.shape[:-1])
    if any(n not in (1, m) for n, m in zip(*shapes, strict=True)):
        raise ValueError(f"{what}: the threads and tiles {shapes[0]} of the source, {shapes[1]} of the destination")
    mask = None if busy is None else busy[:, None]
    value = read(src.memory, src.dtype, read_at, src.element_size, src.end, mask)
    write(dst.memory, write_at, value, dst.end, mask)
