"""Objects full of arrays, moved to another process of this machine: the arrays' bytes once, through shared memory.

:func:`pack` pickles an object and puts the memory of the NumPy arrays and torch CPU tensors in it into one anonymous
shared-memory file; :func:`unpack` on the other side rebuilds them as views of that file. Strides, offsets, overlaps
between arrays, read-only flags and the address modulo 256 are as they were. Arrays without elements, arrays of objects
and unusual tensors (sparse, quantised) are pickled as usual; tensors without elements by shape, strides and dtype.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import mmap
import os
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlab.common.torch_here import torch_here

_ALIGN = 256


@dataclass(frozen=True)
class _Spec:
    """One array: where its first element lies (an address, later a file offset) and how the others follow."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: np.dtype[Any] | str  # a str names a torch dtype
    itemsize: int
    writeable: bool

    @property
    def extent(self) -> tuple[int, int]:
        """First byte and the byte after the last."""
        steps = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        return self.start + sum(s for s in steps if s < 0), self.start + sum(s for s in steps if s > 0) + self.itemsize

    def bits(self, buffer: Any, origin: int) -> np.ndarray:
        """The elements as raw bits, a view of ``buffer`` whose first byte is at ``origin``."""
        kind = f"u{self.itemsize}" if self.itemsize in (1, 2, 4, 8) else f"V{self.itemsize}"
        return np.ndarray(self.shape, kind, buffer, self.start - origin, self.strides)

    def array(self, buffer: Any) -> Any:
        """The array as a view of ``buffer``; ``start`` counts from the buffer's first byte."""
        if isinstance(self.dtype, str):
            import torch

            first, end = self.extent
            flat = torch.frombuffer(buffer, dtype=torch.uint8, count=end - first, offset=first)
            strides = [s // self.itemsize for s in self.strides]
            return flat.view(getattr(torch, self.dtype)).as_strided(self.shape, strides)
        out: np.ndarray = np.ndarray(self.shape, self.dtype, buffer, self.start, self.strides)
        out.flags.writeable = self.writeable
        return out


def _spec(obj: Any) -> _Spec | None:
    """The description of an array or tensor whose memory can be moved, else None."""
    if type(obj) in (np.ndarray, np.memmap):
        if obj.dtype.hasobject or not obj.size:
            return None
        return _Spec(obj.ctypes.data, obj.shape, obj.strides, obj.dtype, obj.itemsize, obj.flags.writeable)
    torch = torch_here()
    if torch is None or not isinstance(obj, torch.Tensor):
        return None
    if obj.device.type != "cpu":
        raise ValueError(f"tensor on {obj.device}: only CPU tensors can go to the process of the interpreter")
    if obj.layout is not torch.strided or obj.is_quantized or obj.is_conj() or obj.is_neg() or not obj.numel():
        return None
    size = obj.element_size()
    strides = tuple(s * size for s in obj.stride())
    return _Spec(obj.data_ptr(), tuple(obj.shape), strides, str(obj.dtype).removeprefix("torch."), size, True)


def _regions(specs: Iterable[_Spec]) -> list[tuple[int, int]]:
    """The disjoint runs of memory that the arrays span."""
    runs: list[tuple[int, int]] = []
    for first, end in sorted(s.extent for s in specs):
        if runs and first < runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((first, end))
    return runs


def _memory(first: int, end: int) -> Any:
    return (ctypes.c_char * (end - first)).from_address(first)


@dataclass
class Packet:
    """A pickled object and the shared-memory file with its arrays (a descriptor, None when no array needs one)."""

    payload: bytes
    specs: list[_Spec]
    nbytes: int
    file: int | None = None
    arrays: list[Any] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)

    def header(self) -> tuple[bytes, list[_Spec], int]:
        """Data that must travel besides the descriptor."""
        return self.payload, self.specs, self.nbytes

    def copy_back(self) -> None:
        """Write what the other side changed in the file into the arrays that were packed. An array that it left alone
        is not written to: its memory may be mapped for reading only."""
        if self.file is None:
            return
        shared = mmap.mmap(self.file, self.nbytes)
        for spec, address in zip(self.specs, self.origins, strict=True):
            if spec.writeable:
                there = spec.bits(shared, 0)
                here = _Spec(address, spec.shape, spec.strides, spec.dtype, spec.itemsize, True)
                first, end = here.extent
                mine = here.bits(_memory(first, end), first)
                if not np.array_equal(mine, there):
                    mine[...] = there

    def close(self) -> None:
        """Give the descriptor back; views of the file stay valid."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


def pack(obj: Any, known: Callable[[Any], Any] = lambda obj: None) -> Packet:
    """Pickle ``obj``; ``known(part)`` may name a part that the other side has already, None otherwise."""
    arrays: list[Any] = []
    specs: list[_Spec] = []
    index: dict[int, int] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> Any:
            name = known(part)
            if name is not None:
                return "known", name
            if id(part) not in index:
                spec = _spec(part)
                if spec is None:
                    return None
                index[id(part)] = len(arrays)
                arrays.append(part)
                specs.append(spec)
            return "array", index[id(part)]

        def reducer_override(self, part: Any) -> Any:
            torch = torch_here()
            if torch is None or not isinstance(part, torch.Tensor) or part.layout is not torch.strided or part.numel():
                return NotImplemented
            # torch pickles them, too, but does not read those of fp8 and unsigned integers back
            return _empty, (tuple(part.shape), part.stride(), str(part.dtype).removeprefix("torch."))

    stream = io.BytesIO()
    Pickler(stream, protocol=5).dump(obj)
    runs = _regions(specs)
    # every run keeps its address modulo _ALIGN
    sizes = [(first % _ALIGN + end - first + _ALIGN - 1) // _ALIGN * _ALIGN for first, end in runs]
    places = [p + first % _ALIGN for p, (first, _) in zip(itertools.accumulate(sizes, initial=0), runs, strict=False)]
    packet = Packet(stream.getvalue(), [], sum(sizes), arrays=arrays, origins=[s.start for s in specs])
    starts = np.array([first for first, _ in runs], np.uint64)
    for s in specs:
        run = int(np.searchsorted(starts, np.uint64(s.extent[0]), side="right")) - 1
        place = s.start - runs[run][0] + places[run]
        packet.specs.append(_Spec(place, s.shape, s.strides, s.dtype, s.itemsize, s.writeable))
    if runs:
        packet.file = os.memfd_create("kvlab", os.MFD_CLOEXEC)
        os.ftruncate(packet.file, packet.nbytes)
        for (first, end), place in zip(runs, places, strict=True):
            rest = memoryview(_memory(first, end)).cast("B")
            while rest.nbytes:
                done = os.pwrite(packet.file, rest, place)
                rest, place = rest[done:], place + done
    return packet


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
    import torch

    return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype))


def unpack(
    header: tuple[bytes, list[_Spec], int], file: int | None, known: Callable[[Any], Any] | None = None
) -> tuple[Any, list[Any]]:
    """The object of a packet and its arrays in the packet's order; ``known(name)`` gives a part that was only named."""
    payload, specs, nbytes = header
    shared = mmap.mmap(file, nbytes) if file is not None else None
    arrays = [spec.array(shared) for spec in specs]

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            kind, name = pid
            if kind == "known" and known is not None:
                return known(name)
            return arrays[name]

    return Unpickler(io.BytesIO(payload)).load(), arrays
