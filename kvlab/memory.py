"""Memories as the hardware has them: bytes at addresses, in an address space, poisoned until written.

A :class:`Memory` is a flat run of bytes. A load or store names a byte *address* for each lane, a dtype and a width in
elements, as an instruction does. Fresh memory is poisoned (every byte ``0xFF``, a NaN in all our float formats); to
read a byte that nobody wrote is an error, and so is every access outside the allocation.

A memory may carry a leading *program axis*: the private shared memory of every CTA of a launch, side by side, so that
one NumPy operation serves all of them.
"""

from __future__ import annotations

import enum
from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    "AddressSpace",
    "Memory",
    "OutOfBounds",
    "UnwrittenRead",
    "as_dtype",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
]

bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3fn = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
float16 = np.dtype(np.float16)
float32 = np.dtype(np.float32)

_NAMES: dict[str, np.dtype[Any]] = {
    "bf16": bfloat16,
    "bfloat16": bfloat16,
    "fp16": float16,
    "float16": float16,
    "fp32": float32,
    "float32": float32,
    "fp64": np.dtype(np.float64),
    "float64": np.dtype(np.float64),
    "fp8": float8_e4m3fn,
    "fp8e4m3": float8_e4m3fn,
    "float8_e4m3fn": float8_e4m3fn,
    "fp8e5m2": float8_e5m2,
    "float8_e5m2": float8_e5m2,
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
}

POISON = 0xFF


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype for a name (``"bf16"``, ``"float8_e4m3fn"``, ...), a NumPy dtype or a torch dtype.

    >>> as_dtype("bf16")
    dtype(bfloat16)
    >>> as_dtype(np.float32)
    dtype('float32')
    """
    if isinstance(dtype, np.dtype):
        return dtype
    name = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else dtype.__name__
    if name in _NAMES:
        return _NAMES[name]
    raise ValueError(f"dtype {dtype!r} is not one of {', '.join(sorted(_NAMES))}")


class AddressSpace(enum.Enum):
    """Where bytes live. GENERIC stands for DRAM in copies, LOCAL for the registers of a thread."""

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
    unsafe : let reads of unwritten bytes return the poison instead of raising.

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
        self,
        nbytes: int,
        *,
        space: AddressSpace = AddressSpace.GENERIC,
        name: str = "memory",
        programs: int | None = None,
        base: int = 0,
        unsafe: bool = False,
    ) -> None:
        if nbytes < 0:
            raise ValueError(f"nbytes {nbytes} is negative")
        self.nbytes, self.space, self.name, self.programs, self.base, self.unsafe = nbytes, space, name, programs, base, unsafe
        shape = (nbytes,) if programs is None else (programs, nbytes)
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.full(shape, POISON, np.uint8)
        self.written: np.ndarray[Any, np.dtype[np.bool_]] | None = np.zeros(shape, np.bool_)

    @classmethod
    def over(cls, array: np.ndarray[Any, Any], *, space: AddressSpace = AddressSpace.GLOBAL, name: str = "array") -> Memory:
        """The memory from the first to the last byte of ``array``, shared with it (no copy). All of it counts as written.

        ``array`` may be strided (K and V as halves of one buffer); its strides must not be negative. Element ``[0, ...]``
        has the address ``base``, which is 0.

        >>> a = np.arange(4, dtype=np.int32)
        >>> m = Memory.over(a[::2])
        >>> m.nbytes, m.load(np.array([8]), np.int32).item()
        (12, 2)
        """
        if any(s < 0 for s in array.strides):
            raise ValueError(f"{name}: strides {array.strides} must not be negative")
        span = sum((n - 1) * s for n, s in zip(array.shape, array.strides)) + array.itemsize if array.size else 0
        self = cls.__new__(cls)
        self.nbytes, self.space, self.name, self.programs, self.base, self.unsafe = span, space, name, None, 0, False
        first = array[(slice(0, 1),) * array.ndim].reshape(-1).view(np.uint8)
        self.bytes = np.lib.stride_tricks.as_strided(first, (span,), (1,))
        self.written = None
        return self

    def load(self, address: Any, dtype: Any, width: int = 1) -> np.ndarray[Any, Any]:
        """``width`` contiguous elements at each byte ``address``: ``[*address.shape, width]`` of ``dtype``.

        The leading axis is the program axis if the memory has one. Raises :class:`OutOfBounds` and
        :class:`UnwrittenRead`, and ValueError when an address is not a multiple of the element's size.
        """
        dtype = as_dtype(dtype)
        nbytes = width * dtype.itemsize
        index = self._checked_index(address, nbytes, dtype)
        self._check_written(index, nbytes)
        return self._gather(self.bytes, index, nbytes).view(dtype)

    def store(self, address: Any, value: Any) -> None:
        """Write ``value[..., width]`` at each byte ``address`` (``[...]``); the value's dtype is what lands in memory.

        Where two lanes write the same byte the later one in C order wins; hardware promises no order.
        """
        value = np.asarray(value)
        index = self._checked_index(address, value.shape[-1] * value.itemsize, value.dtype)
        if self.programs is not None:
            index = np.broadcast_to(index, (self.programs, *index.shape[1:]))
        payload = np.ascontiguousarray(np.broadcast_to(value, (*index.shape, value.shape[-1]))).view(np.uint8)
        self._scatter(self.bytes, index, payload)
        if self.written is not None:
            self._scatter(self.written.view(np.uint8), index, np.ones(payload.shape, np.uint8))

    def image(self, dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
        """The bytes seen as ``dtype``: ``[nbytes // size]``, or ``[programs, nbytes // size]``. Shares memory."""
        return self.bytes.view(as_dtype(dtype))

    def poison(self) -> None:
        """Forget everything: every byte is poison again."""
        self.bytes[...] = POISON
        if self.written is None:
            self.written = np.zeros(self.bytes.shape, np.bool_)
        self.written[...] = False

    # The helpers below move whole vectors; ``index`` is in bytes from the first byte of the memory.

    def _gather(self, source: np.ndarray[Any, Any], index: np.ndarray[Any, Any], nbytes: int) -> np.ndarray[Any, Any]:
        """The bytes at ``index``: ``[(programs,) *index.shape, nbytes]`` of uint8."""
        items, where = self._items(source, index, nbytes)
        if self.programs is None:
            out = np.take(items, where)
        elif where.shape[0] == 1:
            out = np.take(items, where[0], axis=1)
        else:
            out = items[self._program_index(where.ndim), where]
        return np.ascontiguousarray(out).view(np.uint8).reshape(*out.shape[:-1], nbytes)

    def _scatter(self, target: np.ndarray[Any, Any], index: np.ndarray[Any, Any], payload: np.ndarray[Any, Any]) -> None:
        items, where = self._items(target, index, payload.shape[-1])
        values = payload.view(items.dtype)
        if self.programs is None:
            items[where] = values
        else:
            items[self._program_index(where.ndim), where] = values

    def _items(
        self, source: np.ndarray[Any, Any], index: np.ndarray[Any, Any], nbytes: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """``source`` as items of the widest unit (up to 16 bytes) that fits every vector, and the item numbers
        ``[*index.shape, items of a vector]``."""
        bits = 16 | nbytes | self.nbytes | int(np.bitwise_or.reduce(index, axis=None) if index.size else 0)
        unit = bits & -bits
        return source.view(_CARRIER[unit]), (index[..., None] + np.arange(0, nbytes, unit)) // unit

    def _program_index(self, ndim: int) -> np.ndarray[Any, Any]:
        assert self.programs is not None
        return np.arange(self.programs).reshape(-1, *(1,) * (ndim - 1))

    def _checked_index(self, address: Any, nbytes: int, dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Byte offsets of the accesses, in bounds and aligned to the element."""
        index = np.asarray(address, np.int64) - self.base
        if self.programs is not None and (index.ndim == 0 or index.shape[0] not in (1, self.programs)):
            raise ValueError(
                f"{self.name}: addresses of shape {index.shape} need a leading axis of 1 or {self.programs} programs"
            )
        if not index.size:
            return index
        low, high = int(index.min()), int(index.max())
        if low < 0 or high + nbytes > self.nbytes:
            raise OutOfBounds(
                f"{self.name}: access of {nbytes} bytes at address {(low if low < 0 else high) + self.base} "
                f"is outside [{self.base}, {self.base + self.nbytes})"
            )
        if dtype.itemsize > 1 and (index % dtype.itemsize).any():
            bad = int(index[index % dtype.itemsize != 0].flat[0]) + self.base
            raise ValueError(f"{self.name}: address {bad} is not a multiple of {dtype.itemsize}, the size of {dtype}")
        return index

    def _check_written(self, index: np.ndarray[Any, Any], nbytes: int) -> None:
        if self.written is None or self.unsafe:
            return
        known = self._gather(self.written.view(np.uint8), index, nbytes)
        if known.all():
            return
        where = np.unravel_index(int(known.argmin()), known.shape)
        program = f"program {where[0]}, " if self.programs is not None else ""
        at = index[(0 if self.programs and index.shape[0] == 1 else where[0], *where[1:-1])] + self.base
        raise UnwrittenRead(f"{self.name}: read of {nbytes} bytes at {program}address {at}, which nothing has written")


_CARRIER = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8"), 16: np.dtype("V16")}
