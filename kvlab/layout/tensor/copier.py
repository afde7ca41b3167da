"""Common part of MAX's tile copiers: how the threads of a block or a warp move a tile between two address spaces.

A copier is the ``thread_layout`` that deals a tile out and what it does to addresses; ``copy(dst, src)`` moves the
bytes of all its threads at once. Element i of a thread's source fragment goes to element i of its destination fragment,
the first mode fastest. A LOCAL tensor is a thread's own registers: the last axis of its offset counts the threads, or
each thread is a program of its memory. Copies have landed when they return."""

from __future__ import annotations

import enum
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvlab.layout.algebra.int_tuple import IntArray, as_int, as_int_array, at_once
from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.swizzle import Swizzle
from kvlab.layout.tensor.access import read, write
from kvlab.layout.tensor.tile_tensor import TileTensor
from kvlab.memory import AddressSpace

DRAM = (AddressSpace.GENERIC, AddressSpace.GLOBAL)
SHARED = (AddressSpace.SHARED,)
LOCAL = (AddressSpace.LOCAL,)
_LANES = 64  # of the widest warp


class ThreadScope(enum.Enum):
    """Whose threads share the work: those of a block, or the lanes of each warp."""

    BLOCK = "block"
    WARP = "warp"


@dataclass(frozen=True)
class TileCopier:
    """Common part of the seven copiers.

    thread_layout   a flat layout, one mode for each mode of the tiles: which thread starts at which element; its
                    threads are 0 to its size less 1, each once
    num_threads     threads there are, ``thread_layout.size`` unless given; where there are more, the rest does nothing
    thread_scope    what a thread's number counts: threads of the block, or lanes of its warp"""

    thread_layout: Layout
    num_threads: int | None = None
    thread_scope: ThreadScope = ThreadScope.BLOCK

    spaces: ClassVar[tuple[tuple[AddressSpace, ...], tuple[AddressSpace, ...]]] = (DRAM, DRAM)

    def __post_init__(self) -> None:
        if not isinstance(self.thread_layout, Layout) or not self.thread_layout.is_flat:
            raise ValueError(
                f"thread_layout is {self.thread_layout!r}: must be a flat Layout, such as row_major(8, 4)"
            )
        if not self.thread_layout.is_dense:
            raise ValueError(
                f"{self._name}: thread_layout {self.thread_layout} does not give each of the threads 0 to "
                f"{self.thread_layout.size - 1} a place of its own: some elements would belong to nobody"
            )
        if self.num_threads is None:
            object.__setattr__(self, "num_threads", self.thread_layout.size)
        as_int(self.num_threads, "num_threads")
        if self._threads < self.thread_layout.size:
            raise ValueError(
                f"{self._name}: {self.num_threads} threads are fewer than the {self.thread_layout.size} of "
                f"{self.thread_layout}; some elements would belong to nobody"
            )
        if self.thread_scope is ThreadScope.WARP and self._threads > _LANES:
            raise ValueError(f"{self._name}: a warp has no {self.num_threads} lanes: must be at most {_LANES}")

    def copy(self, dst: TileTensor, src: TileTensor, worker: Any = None) -> None:
        """Copy the whole tile; or only what the threads ``worker`` move (an int array ``[W]``, by default all).

        ValueError for tensors of other address spaces, dtypes, vectors or sizes, and where the threads do not divide
        a tile."""
        worker = self._check(dst, src, worker)
        places = [self._places(tensor, worker) for tensor in (src, dst)]
        if (step := self._step(src.element_size)) > 1:
            places = [place[..., : place.shape[-1] // step * step : step] for place in places]
        _move(self._name, src, places[0], dst, places[1], self._busy(worker))

    @property
    def _threads(self) -> int:
        return self.num_threads or 0

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _step(self, element_size: int) -> int:
        """Of every how many elements one is moved."""
        return 1

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
            places = tensor._indices(tensor.layout(np.arange(at_once(tensor.layout.size, "elements"))))
            lanes = tensor._full(places.shape)[:-1]
            if lanes[-1:] != worker.shape:
                raise ValueError(
                    f"{self._name}: registers of {lanes[-1] if lanes else 'no'} threads in {tensor!r}: must be those "
                    f"of the {worker.size} that copy"
                )
            return places
        fragment, _, first = tensor.distribute_with_offset(self.thread_layout, worker)
        inside = first[:, None] + fragment.layout(np.arange(at_once(fragment.layout.size, "elements")))
        swizzle = self._swizzle(tensor)
        if swizzle is not None:
            swizzle.apply(0, tensor.element_size * tensor.dtype.itemsize)  # which raises where it would tear an element
            inside = swizzle.apply(inside, tensor.dtype.itemsize)
            if tensor.element_size > 1:
                n = tensor.element_size
                moves = f"one of {n} vectors" if self._step(n) > 1 else "every vector"
                warnings.warn(f"{self._name} with a swizzle moves {moves}; the original moves one of {n}", stacklevel=4)
        return tensor._indices(inside)

    def _check(self, dst: TileTensor, src: TileTensor, worker: Any) -> IntArray:
        what = f"{self._name} of {src!r} to {dst!r}"
        if not isinstance(src, TileTensor) or not isinstance(dst, TileTensor):
            raise ValueError(f"{what}: must be tensors")
        for tensor, spaces, side in ((src, self.spaces[0], "source"), (dst, self.spaces[1], "destination")):
            if tensor.memory.space not in spaces:
                names = " or ".join(space.value for space in spaces)
                raise ValueError(f"{what}: must be a {side} in {names} memory")
            if tensor.element_layout is not None:
                raise ValueError(f"{what}: must be vectors of contiguous scalars")
        if (src.dtype, src.element_size) != (dst.dtype, dst.element_size):
            raise ValueError(f"{what}: must be equal dtypes and element sizes")
        dst._check_mutable()
        chosen = np.arange(at_once(self._threads, "threads")) if worker is None else np.asarray(worker)
        numbers: IntArray = np.atleast_1d(as_int_array(chosen, "worker"))
        if numbers.ndim != 1 or (numbers.size and numbers.max() >= self._threads):
            raise ValueError(f"{what}: workers {numbers.tolist()}: must be an array of 0 to {self._threads - 1}")
        return numbers


def _move(
    name: str, src: TileTensor, read_at: IntArray, dst: TileTensor, write_at: IntArray, busy: NDArray[np.bool_] | None
) -> None:
    """Element by element; the last axes of both sides are ``[threads, elements]``."""
    what = f"{name} of {src!r} to {dst!r}"
    if read_at.shape[-1] != write_at.shape[-1]:
        raise ValueError(
            f"{what}: fragments of {read_at.shape[-1]} and {write_at.shape[-1]} elements: must be equal counts"
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
