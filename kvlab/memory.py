"""Memories as the hardware has them: bytes at addresses, in an address space, poisoned until written.

A :class:`Memory` is a flat run of bytes. A load or store names a byte *address* for each lane, a dtype and a width in
elements, as an instruction does. Fresh memory is poisoned (every byte ``0xFF``, a NaN in all our float formats); to
read a byte that nobody wrote is an error, and so is every access outside the allocation.

A memory may carry a leading *program axis*: the private shared memory of every CTA of a launch, side by side, so that
one NumPy operation serves all of them."""

from __future__ import annotations

import copy
import enum
from typing import Any, TypeAlias

import numpy as np

from kvlab.common.checks import shown
from kvlab.common.dtypes import as_dtype as as_dtype
from kvlab.common.dtypes import bfloat16 as bfloat16
from kvlab.common.dtypes import float8_e4m3fn as float8_e4m3fn
from kvlab.common.dtypes import float8_e5m2 as float8_e5m2
from kvlab.common.dtypes import float16 as float16
from kvlab.common.dtypes import float32 as float32
from kvlab.common.dtypes import invalid as invalid

POISON = 0xFF
MOST_BYTES = 1 << 36
"""Of a memory with all its programs."""
MOST_BITS = 60
"""Of the address of a memory's first byte: those of the others, and sums with offsets, have no more than 63."""

_Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
_Index: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
_Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


class AddressSpace(enum.Enum):
    """Memory in which bytes live. GENERIC stands for DRAM in copies, LOCAL for the registers of a thread."""

    GENERIC = "generic"
    GLOBAL = "global"
    SHARED = "shared"
    LOCAL = "local"
    CONSTANT = "constant"


class OutOfBounds(IndexError):
    """An access outside an allocation."""


class UnwrittenRead(ValueError):
    """A read of bytes that nothing has written."""


class Memory:
    """``nbytes`` bytes whose first has the address ``base``.

    Parameters
    ----------
    nbytes : size in bytes.
    space : an :class:`AddressSpace`.
    name : used in messages.
    programs : number of CTAs that each own such a memory, or None for one memory that all share. With a program axis
        every address array has a leading axis of length ``programs`` (or 1, when all use the same addresses) and every
        loaded value a leading axis of length ``programs``.
    base : byte address of the first byte. Hardware swizzles read absolute address bits, so it matters.
    unsafe : undefined behaviour instead of errors: reads of unwritten bytes and outside the allocation return the
        poison, stores outside are dropped, alignment is not checked.

    >>> m = Memory(64, name="smem", space=AddressSpace.SHARED)
    >>> m.store(np.array([0, 8]), np.array([[1, 2], [3, 4]], np.float32))
    >>> m.load(np.array([4, 8]), np.float32)
    array([[2.],
           [3.]], dtype=float32)
    >>> m.load(np.array([32]), np.float32)
    Traceback (most recent call last):
        ...
    kvlab.memory.UnwrittenRead: smem: read of 4 bytes at address 32, which nothing has written
    >>> m.load(np.array([64]), np.float32)
    Traceback (most recent call last):
        ...
    kvlab.memory.OutOfBounds: smem: access of 4 bytes at address 64 is outside [0, 64)
    """

    def __init__(
        self, nbytes: int, *, space: AddressSpace = AddressSpace.GENERIC, name: str = "memory",
        programs: int | None = None, base: int = 0, unsafe: bool = False,
    ) -> None:
        given = {"nbytes": nbytes, "base": base, "programs": 0 if programs is None else programs}
        if any(not isinstance(size, int | np.integer) or size < 0 for size in given.values()):
            said = ", ".join(f"{what} {shown(size)}" for what, size in given.items())
            raise ValueError(f"{name}: {said}: must be integers from 0")
        nbytes, base, programs = int(nbytes), int(base), None if programs is None else int(programs)
        if nbytes * (1 if programs is None else programs) > MOST_BYTES or base >> MOST_BITS:
            raise ValueError(
                f"{name}: must be at most {MOST_BYTES} bytes in all, at a base of at most {MOST_BITS} bits"
            )
        self.nbytes, self.space, self.name, self.programs = nbytes, space, name, programs
        self.base, self.unsafe = base, unsafe
        self._pitch = -(-nbytes // 16) * 16
        self._gaps = False
        shape = (self._pitch,) if programs is None else (programs, self._pitch)
        self._storage: _Bytes = np.full(shape, POISON, np.uint8)
        self._known: _Bytes | None = np.zeros(shape, np.uint8)

    @classmethod
    def over(
        cls, array: np.ndarray[Any, Any], *, space: AddressSpace = AddressSpace.GLOBAL, name: str = "array",
        unsafe: bool = False,
    ) -> Memory:
        """The memory from the first to the last byte of ``array``, shared with it (no copy). All of it counts as
        written.

        ``array`` may be strided (K and V as halves of one buffer); the strides of axes with more than one element must
        not be negative. Element ``[0, ...]`` has the address ``base``, which is 0.

        >>> a = np.arange(4, dtype=np.int32)
        >>> m = Memory.over(a[::2])
        >>> m.nbytes, m.load(np.array([8]), np.int32).item()
        (12, 2)
        """
        if array.dtype.kind in "OUSMm":
            raise ValueError(f"{name}: an array of {array.dtype}: must be numbers")
        if any(s < 0 and n > 1 for n, s in zip(array.shape, array.strides, strict=True)):
            raise ValueError(f"{name}: strides {array.strides} must not be negative")
        span = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) + array.itemsize
        span = span if array.size else 0
        self = cls(0, space=space, name=name, unsafe=unsafe)
        first = array[(Ellipsis, *(slice(0, 1),) * array.ndim)].reshape(-1).view(np.uint8)  # type: ignore[arg-type]
        self.nbytes = self._pitch = span
        self._gaps = span > array.size * array.itemsize
        self._storage = np.lib.stride_tricks.as_strided(first, (span,), (1,))
        self._known = None
        return self

    @property
    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes themselves: ``[nbytes]`` or ``[programs, nbytes]``. Shares memory."""
        return self._storage[..., : self.nbytes]

    @property
    def written(self) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Mask of the bytes that have been written, shaped as :attr:`bytes`; None where all are, as in the memory of an
        array."""
        return None if self._known is None else self._known[..., : self.nbytes].view(np.bool_)

    def load(
        self, address: Any, dtype: Any, width: int = 1, *, mask: Any = None, alignment: int | None = None
    ) -> np.ndarray[Any, Any]:
        """``width`` contiguous elements at each byte ``address``: ``[*address.shape, width]`` of ``dtype``.

        The leading axis is the program axis if the memory has one. Where ``mask`` (broadcast with the addresses) is
        False nothing is read and zeros are returned. Raises :class:`OutOfBounds`, :class:`UnwrittenRead`, and
        ValueError when an address is not a multiple of ``alignment``, by default the element's size."""
        dtype = as_dtype(dtype)
        if not isinstance(width, int | np.integer) or width >> MOST_BITS > 0:
            raise ValueError(f"{self.name}: width {shown(width)}: must be an integer of {MOST_BITS} bits")
        nbytes = int(width) * dtype.itemsize
        index, on, outside = self._lanes(address, mask, nbytes)
        if on is not None:
            if not on.any():
                return self._masked(np.zeros((*index.shape, nbytes), np.uint8), on, outside, 1).view(dtype)
            # Lanes that are off read again what the first lane that is on reads.
            first = int(on.argmax())
            index = np.where(on, index, index.flat[first])
        unit = self._check(index, nbytes, alignment or dtype.itemsize)
        same = on is None and self.programs is not None and index.size and not index.strides[0]
        if same and (self._known is None or self.unsafe or _gather_same(self._known, index[0], nbytes, unit).all()):
            return _gather_same(self._storage, index[0], nbytes, unit).view(dtype)
        flat = self._flat(index)
        if on is not None and self.programs is not None:
            flat = np.where(on, flat, flat.flat[first])
        if self._known is not None and not self.unsafe:
            known = _gather(self._known, flat, nbytes, unit)
            if not known.all():
                self._raise_unwritten(known, flat, nbytes)
        out = _gather(self._storage, flat, nbytes, unit)
        return (out if on is None else self._masked(out, on, outside, unit)).view(dtype)

    def store(self, address: Any, value: Any, *, mask: Any = None, alignment: int | None = None) -> None:
        """Write ``value[..., width]`` at each byte ``address`` (``[...]``); the value's dtype is what lands in memory.

        Where ``mask`` is False nothing is written. Where two lanes write the same byte the later one in C order wins;
        hardware promises no order."""
        value = np.asarray(value)
        if value.ndim == 0:
            raise ValueError(f"{self.name}: a value without axes: must be value[..., width]")
        nbytes = value.shape[-1] * value.itemsize
        index, on, _ = self._lanes(address, mask, nbytes)
        value = np.broadcast_to(value, (*index.shape, value.shape[-1]))
        chosen = index if on is None else index[on]
        unit = self._check(chosen, nbytes, alignment or value.itemsize)
        flat = self._flat(index) if on is None else self._flat(index)[on]
        value = np.ascontiguousarray(value) if on is None else value[on]
        items, number = _items(self._storage, flat, nbytes, unit, _SCATTER[unit])
        items[number] = value.view(np.uint8).view(items.dtype)
        if self._known is not None:
            items, number = _items(self._known, flat, nbytes, unit, _SCATTER[unit])
            items[number] = np.ones(unit, np.uint8).view(items.dtype)

    def elements(
        self, first: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], *, write: bool = False
    ) -> np.ndarray[Any, Any] | None:
        """Evenly spaced elements as an array ``shape`` that shares memory; ``first`` counts bytes from the first byte,
        the strides, none negative, are in bytes. The leading axis is that of the programs (or 1, where all have the
        same elements, with stride 0), if there are such. With
        ``write`` for a caller that assigns all of them: they count as written. None where an element lies outside or is
        not aligned; for reading where one has not been written, for writing where two overlap; also of ``unsafe``
        memory.

        >>> m = Memory(16)
        >>> m.elements(0, (2, 2), (8, 2), np.dtype(np.int16), write=True)[...] = 7
        >>> m.elements(0, (2,), (8,), np.dtype(np.int16)), m.elements(4, (2,), (2,), np.dtype(np.int16))
        (array([7, 7], dtype=int16), None)
        """
        axes = list(zip(shape, strides, strict=True))
        last = first + sum((n - 1) * step for n, step in axes) + dtype.itemsize
        even = (first + self.base) % dtype.itemsize == 0 and all(step % dtype.itemsize == 0 for step in strides)
        if self.unsafe or first < 0 or last > self.nbytes or not even or 0 in shape:
            return None
        span, inner = dtype.itemsize, axes if self.programs is None else axes[1:]
        for step, n in sorted((step, n) for n, step in inner if n > 1) if write else ():
            if step < span:
                return None
            span += (n - 1) * step
        if self.programs is not None:
            shape, strides = (self.programs, *shape[1:]), (self._pitch + strides[0], *strides[1:])
        if self._known is not None:
            known = np.ndarray((*shape, dtype.itemsize), np.uint8, self._known, first, (*strides, 1))
            if write:
                known[...] = 1
                if self.space is AddressSpace.LOCAL and self._known[..., : self.nbytes].all():
                    self._known = None  # registers that have all been loaded: from now on there is nothing to look for
            elif not known.all():
                return None
        return np.ndarray(shape, dtype, self._storage, first, strides)

    def in_space(self, space: AddressSpace) -> Memory:
        """The same bytes (no copy) as a memory of another address space.

        >>> smem = Memory(4).in_space(AddressSpace.SHARED)
        >>> smem.space, smem.nbytes
        (<AddressSpace.SHARED: 'shared'>, 4)
        """
        other = copy.copy(self)
        other.space = space
        return other

    def shares_bytes(self, other: Memory) -> bool:
        """Are the bytes of ``other`` the very same ones?"""
        return self._storage is other._storage

    def image(self, dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
        """The bytes seen as ``dtype``: ``[nbytes // size]``, or ``[programs, nbytes // size]``. Shares memory."""
        return self.bytes.view(as_dtype(dtype))

    def poison(self) -> None:
        """Forget everything: every byte is poison again. ValueError for a strided array, between whose elements lie
        the bytes of others."""
        if self._gaps:
            raise ValueError(
                f"{self.name}: a strided array is not poisoned, the bytes between its elements are not its own"
            )
        self._storage[...] = POISON
        if self._known is None:
            self._known = np.zeros(self._storage.shape, np.uint8)
        self._known[...] = 0

    # Below, ``index`` counts bytes from the first byte of a program's memory and ``flat`` from the very first one.

    def _lanes(self, address: Any, mask: Any, nbytes: int) -> tuple[_Index, _Mask | None, _Mask | None]:
        """Byte offsets ``[...]`` with the program axis at its full length; which lanes access memory (None: all); and
        in an unsafe memory which of the others fall outside."""
        index = np.asarray(address)
        if index.dtype.kind not in "iu" and index.size:
            raise ValueError(f"{self.name}: addresses of {index.dtype}: must be integers")
        if index.dtype == np.uint64 and index.size and index.max() >> 63:
            raise OutOfBounds(f"{self.name}: address {index.max()} is outside [{self.base}, {self.base + self.nbytes})")
        index = index.astype(np.int64, copy=False)
        index = index - self.base if self.base else index
        on = None
        if mask is not None:
            index, on = np.broadcast_arrays(index, np.asarray(mask, np.bool_))
            on = None if on.all() else on
        if self.programs is not None:
            if index.ndim == 0 or index.shape[0] not in (1, self.programs):
                raise ValueError(
                    f"{self.name}: addresses of shape {index.shape} need a leading axis of 1 or "
                    f"{self.programs} programs"
                )
            shape = (self.programs, *index.shape[1:])
            index = np.broadcast_to(index, shape)
            on = None if on is None else np.broadcast_to(on, shape)
        if not self.unsafe:
            return index, on, None
        inside = (index >= 0) & (index <= self.nbytes - nbytes)
        if inside.all():
            return index, on, None
        return (index, inside, ~inside) if on is None else (index, on & inside, on & ~inside)

    def _check(self, index: _Index, nbytes: int, alignment: int) -> int:
        """Bounds and alignment of the accesses; returns the widest unit (up to 16 bytes) that divides them all."""
        if nbytes < 1:
            raise ValueError(f"{self.name}: an access of {nbytes} bytes")
        if not isinstance(alignment, int | np.integer) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{self.name}: alignment {shown(alignment)}: must be a power of two")
        if not index.size:
            return 1
        if index.ndim and not index.strides[0]:
            index = index[:1]  # all programs use the same addresses
        low, high = int(index.min()), int(index.max())
        if low < 0 or high + nbytes > self.nbytes:
            raise OutOfBounds(
                f"{self.name}: access of {nbytes} bytes at address {(low if low < 0 else high) + self.base} "
                f"is outside [{self.base}, {self.base + self.nbytes})"
            )
        bits = int(np.bitwise_or.reduce(index, axis=None))
        if alignment > 1 and not self.unsafe and (bits | self.base) % alignment:
            at = index + self.base
            if (at % alignment).any():
                bad = int(at[at % alignment != 0].flat[0])
                raise ValueError(f"{self.name}: address {bad} of {nbytes} bytes is not a multiple of {alignment}")
        bits |= 16 | nbytes
        return bits & -bits

    def _flat(self, index: _Index) -> _Index:
        if self.programs is None:
            return index
        return index + np.arange(self.programs).reshape(-1, *(1,) * (index.ndim - 1)) * self._pitch

    def _masked(self, out: _Bytes, on: _Mask, outside: _Mask | None, unit: int) -> _Bytes:
        """``out`` with zeros where nothing was read, and poison in lanes outside."""
        np.copyto(out.view(_SCATTER[unit]), 0, where=~on[..., None])
        if outside is not None:
            np.copyto(out, POISON, where=outside[..., None])
        return out

    def _raise_unwritten(self, known: _Bytes, flat: _Index, nbytes: int) -> None:
        program, index = divmod(int(flat[~known.all(axis=-1)].flat[0]), self._pitch)
        where = f"program {program}, " if self.programs is not None else ""
        raise UnwrittenRead(
            f"{self.name}: read of {nbytes} bytes at {where}address {index + self.base}, which nothing has written"
        )


# One item of ``unit`` bytes moves at once. NumPy gathers 16-byte voids and scatters complex numbers fastest.
_GATHER = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}
_SCATTER = {**_GATHER, 16: "c16"}


def _items(source: _Bytes, flat: _Index, nbytes: int, unit: int, carrier: str) -> tuple[np.ndarray[Any, Any], _Index]:
    """``source`` as items of ``unit`` bytes, and the item numbers ``[*flat.shape, nbytes // unit]``."""
    source = source.reshape(-1)
    number = flat[..., None] >> (unit.bit_length() - 1)
    if nbytes > unit:
        number = number + np.arange(nbytes // unit)
    return source[: source.size // unit * unit].view(carrier), number


def _gather(source: _Bytes, flat: _Index, nbytes: int, unit: int) -> _Bytes:
    """The bytes at ``flat``: ``[*flat.shape, nbytes]``."""
    items, number = _items(source, flat, nbytes, unit, _GATHER[unit])
    return items[number].view(np.uint8).reshape(*flat.shape, nbytes)


def _gather_same(source: _Bytes, index: _Index, nbytes: int, unit: int) -> _Bytes:
    """The bytes at ``index`` of every program of ``source``: ``[programs, *index.shape, nbytes]``."""
    number = index[..., None] >> (unit.bit_length() - 1)
    if nbytes > unit:
        number = number + np.arange(nbytes // unit)
    items = source.view(_GATHER[unit])
    return np.take(items, number, axis=1).view(np.uint8).reshape(len(source), *index.shape, nbytes)
