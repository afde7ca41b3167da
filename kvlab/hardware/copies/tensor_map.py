"""TMA descriptors: what the hardware is told about a tensor, a box of it, and the image of that box in shared memory.

Facts: the swizzle XORs absolute shared-memory address bits, a box narrower than the swizzle has rows a swizzle width
apart, and the two alignments of a copy were measured on an H100 (tests/data/h100_tma.json.gz), so was how far a store
writes (tests/data/h100_tma_store.json); the limits of a descriptor are those of the CUDA driver API,
cuTensorMapEncodeTiled."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from kvlab.common.checks import count, integers, shown
from kvlab.common.drawn import Drawn
from kvlab.hardware._arrays import IntArray, frozen
from kvlab.hardware.arch import get_arch
from kvlab.layout import Swizzle
from kvlab.memory import Memory, as_dtype


class TensorMapSwizzle(enum.IntEnum):
    """The four swizzle modes of TMA and wgmma: 16-byte chunk bits ``[4, 4 + mode)`` are XORed with address bits
    ``[7, 7 + mode)``.

    >>> mode = TensorMapSwizzle.of("128B")
    >>> mode.bytes, mode.alignment, str(mode.swizzle()), str(mode.swizzle("bf16"))
    (128, 1024, 'Sw<3,4,3> (byte)', 'Sw<3,3,3> (bfloat16)')
    """

    SWIZZLE_NONE = 0
    SWIZZLE_32B = 1
    SWIZZLE_64B = 2
    SWIZZLE_128B = 3

    @classmethod
    def of(cls, mode: Any) -> TensorMapSwizzle:
        """From a mode, its number, its width in bytes as text, or its name: ``0``, ``"none"``, ``"64B"``, ...

        >>> TensorMapSwizzle.of("64B") is TensorMapSwizzle.of(2) is TensorMapSwizzle.of("SWIZZLE_64B")
        True
        >>> TensorMapSwizzle.of("96B")
        Traceback (most recent call last):
            ...
        ValueError: swizzle is '96B': must be none, 32B, 64B or 128B
        """
        if isinstance(mode, str):
            name = f"SWIZZLE_{mode.upper().removeprefix('SWIZZLE_')}"
            if name in cls.__members__:
                return cls[name]
        elif mode is None:
            return cls.SWIZZLE_NONE
        elif not isinstance(mode, bool) and mode in tuple(cls):
            return cls(mode)
        raise ValueError(f"swizzle is {shown(mode)}: must be none, 32B, 64B or 128B")

    @property
    def label(self) -> str:
        """``none``, ``32B``, ``64B`` or ``128B``."""
        return "none" if self is TensorMapSwizzle.SWIZZLE_NONE else f"{self.bytes}B"

    @property
    def bytes(self) -> int:
        """Width of the swizzle in bytes; 16 without one: the granularity in which K-major tiles are cut."""
        return 16 << self.value

    @property
    def alignment(self) -> int:
        """A base that is a multiple of this sees the pattern from its start: 128, 256, 512, 1024 bytes."""
        return 128 << self.value

    def granularity(self, dtype: Any) -> int:
        """:attr:`bytes` in elements.

        >>> [TensorMapSwizzle(mode).granularity("bf16") for mode in range(4)]
        [8, 16, 32, 64]
        """
        width: int = self.bytes // as_dtype(dtype).itemsize
        return width

    def swizzle(self, unit: Any = "byte") -> Swizzle:
        """The mode as a :class:`~kvlab.layout.Swizzle` in the unit asked for."""
        return Swizzle(self.value, 4, 3, "byte").to(unit)


class TensorMapL2Promotion(enum.IntEnum):
    """Least number of bytes that L2 fetches on a miss; what arrives in shared memory is the same.

    >>> TensorMapL2Promotion.of("L2_128B").bytes, TensorMapL2Promotion.of("none").bytes
    (128, 32)
    """

    NONE = 0
    L2_64B = 1
    L2_128B = 2
    L2_256B = 3

    @classmethod
    def of(cls, promotion: Any) -> TensorMapL2Promotion:
        """From a promotion, its number, its name, or its width in bytes as text: ``0``, ``"L2_64B"``, ``"64B"``.

        >>> TensorMapL2Promotion.of("512B")
        Traceback (most recent call last):
            ...
        ValueError: l2_promotion is '512B': must be NONE, L2_64B, L2_128B or L2_256B
        """
        if isinstance(promotion, str):
            name = promotion.upper()
            for known in (name, f"L2_{name}"):
                if known in cls.__members__:
                    return cls[known]
        elif not isinstance(promotion, bool) and promotion in tuple(cls):
            return cls(promotion)
        raise ValueError(f"l2_promotion is {promotion!r}: must be NONE, L2_64B, L2_128B or L2_256B")

    @property
    def bytes(self) -> int:
        """Bytes of a fetch: a sector of 32 without promotion."""
        return 32 << self.value


@dataclass(frozen=True, eq=False)
class TmaDescriptor(Drawn):
    """A tensor in DRAM and the box that one TMA instruction moves. All tuples are slowest dimension first.

    source           the :class:`~kvlab.memory.Memory` of DRAM
    dtype            of an element, 1, 2, 4 or 8 bytes
    shape            of the tensor: what lies outside reads as zeros and is not written, but see ``stored_extent``
    strides          in elements; the last is 1
    box              elements of each dimension, 1 to 256
    swizzle          a :class:`TensorMapSwizzle` or what names one
    base             byte address of element (0, ..., 0) in ``source``
    element_strides  every n-th element of a dimension: the box then holds ``ceil(box / n)`` of them
    l2_promotion     a :class:`TensorMapL2Promotion` or what names one

    ValueError with every rule that is broken.

    >>> TmaDescriptor.of(np.zeros((64, 128), np.float16), (16, 64), "128B")
    TmaDescriptor(box 16 x 64 of 64 x 128 float16, swizzle 128B)
    >>> TmaDescriptor.of(np.zeros((64, 128), np.float16), (16, 48), "32B")
    Traceback (most recent call last):
        ...
    ValueError: TMA descriptor: the box's rows have 48*2 = 96 B > 32 B, the span of swizzle 32B; use 128B or rows of \
16 elements
    """

    source: Memory
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: TensorMapSwizzle = TensorMapSwizzle.SWIZZLE_NONE
    base: int = 0
    element_strides: tuple[int, ...] = ()
    l2_promotion: TensorMapL2Promotion = TensorMapL2Promotion.NONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        object.__setattr__(self, "swizzle", TensorMapSwizzle.of(self.swizzle))
        object.__setattr__(self, "l2_promotion", TensorMapL2Promotion.of(self.l2_promotion))
        for name in ("shape", "strides", "box", "element_strides"):
            given = getattr(self, name)
            sizes = integers(f"TMA descriptor: {name}", given if isinstance(given, tuple | list | np.ndarray) else None)
            object.__setattr__(self, name, tuple(sizes.reshape(-1).tolist()))
        base = integers("TMA descriptor: base", self.base)
        if base.ndim:
            raise ValueError(f"TMA descriptor: base is {shown(self.base)}: must be an integer")
        object.__setattr__(self, "base", int(base))
        object.__setattr__(self, "element_strides", self.element_strides or (1,) * self.rank)
        problems = list(_problems(self))
        if problems:
            raise ValueError(f"TMA descriptor: {'; '.join(problems)}")

    @classmethod
    def of(cls, array: Any, box: tuple[int, ...], swizzle: Any = "none", **more: Any) -> TmaDescriptor:
        """The descriptor of a NumPy array (shared, strided allowed) with a ``box`` of it. Its ``source`` reaches as
        far as a store writes, where the array is a part of another one that does. The strides of dimensions of extent 1
        address nothing: the descriptor gets such as the hardware takes.

        >>> TmaDescriptor.of(np.zeros((64, 128), np.float16)[:, None, ::2][:, ::-1, :1], (16, 1, 8)).strides
        (128, 8, 1)
        """
        array = np.asarray(array)
        if array.dtype.kind in "OUS":
            raise ValueError(f"TMA descriptor of an array of {array.dtype}: must be numbers of 1, 2, 4 or 8 bytes")
        strides = descriptor_strides(array)
        return cls(Memory.over(_with_row_ends(array)), array.dtype, array.shape, strides, box, swizzle, **more)

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def smem_box(self) -> tuple[int, ...]:
        """Elements of the box in shared memory: ``ceil(box / element_strides)``."""
        return tuple(-(-n // step) for n, step in zip(self.box, self.element_strides, strict=True))

    @property
    def stored_extent(self) -> int:
        """Elements of a row of the tensor that a store may write: the innermost extent, rounded up to 16 bytes.

        >>> TmaDescriptor.of(np.zeros((4, 128), np.float16)[:, :61], (4, 64), "128B").stored_extent
        64
        """
        return _whole_chunks(self.shape[-1], self.dtype.itemsize)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the box: its innermost dimension."""
        return self.box[-1] * self.dtype.itemsize

    @property
    def pitch(self) -> int:
        """Bytes between rows in shared memory: their own, or the swizzle's width where that is more (measured)."""
        return self.row_bytes if self.swizzle is TensorMapSwizzle.SWIZZLE_NONE else self.swizzle.bytes

    @property
    def transaction_bytes(self) -> int:
        """Summand of one copy in the mbarrier's count: the full box, even where it lies outside (measured)."""
        return math.prod(self.smem_box) * self.dtype.itemsize

    @property
    def image_bytes(self) -> int:
        """Bytes of shared memory from the box's first to past its last row."""
        return math.prod(self.smem_box[:-1]) * self.pitch

    def image(self, address: int = 0) -> IntArray:
        """Byte address in shared memory of every element of a box that is copied to ``address``: ``[*smem_box]``.

        >>> d = TmaDescriptor.of(np.zeros((64, 128), np.float16), (16, 64), "128B")
        >>> (d.image(0)[1, ::8] // 16).tolist()  # row 1: 16-byte chunks 0, 1, 2, ...
        [9, 8, 11, 10, 13, 12, 15, 14]
        """
        return _image(self.smem_box, self.pitch, self.dtype.itemsize, self.swizzle, count("address", address))

    def explain(self, address: int = 0) -> str:
        """In words: the box, its image at ``address``, what the barrier counts, and what is unusual.

        >>> print(TmaDescriptor.of(np.zeros((64, 128), np.float16), (16, 16), "64B").explain(128))
        One copy moves a box of 16 x 16 float16 out of a tensor of 64 x 128: 512 bytes, which the mbarrier counts \
in full, also where the box lies outside the tensor (there: zeros).
        In shared memory its 16 rows of 32 bytes are 64 bytes apart, 1024 bytes in all. The row is narrower than the \
swizzle: the other 32 bytes of each row stay untouched. That is legal, though rarely what is meant.
        Swizzle 64B: address bits 4-5 are XORed with address bits 7-8.
        Address 128 is not a multiple of 512: 32 of 32 chunks stand elsewhere than in a box at a multiple of 512. \
The XOR reads absolute address bits.
        """
        from .tma_explain import explain

        return explain(self, address)

    def __repr__(self) -> str:
        return f"TmaDescriptor(box {_by(self.box)} of {_by(self.shape)} {self.dtype}, swizzle {self.swizzle.label})"


def descriptor_strides(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """The strides of an array in elements, -1 for those of no whole number of them; 16 bytes, the least, for dimensions
    of extent 1, and one element for the innermost."""
    size = array.itemsize
    alone = [max(16 // size, 1)] * (array.ndim - 1) + [1]
    strides = zip(array.shape, array.strides, alone, strict=True)
    return tuple(one if n == 1 else s // size if s % size == 0 else -1 for n, s, one in strides)


def _whole_chunks(extent: int, size: int) -> int:
    """Elements of ``size`` bytes, rounded up to 16 bytes."""
    return -(-extent * size // 16) * 16 // size


def _with_row_ends(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``array`` with rows of whole chunks of 16 bytes, if the array that it is a part of has these bytes."""
    if not array.ndim or array.itemsize not in (1, 2, 4, 8) or array.shape[-1] * array.itemsize % 16 == 0:
        return array
    words, shape = array.view(f"u{array.itemsize}"), (*array.shape[:-1], _whole_chunks(array.shape[-1], array.itemsize))
    wide = np.lib.stride_tricks.as_strided(words, shape, words.strides)
    whole, base = array, array.base
    while base is not None:  # what the last array is made of may be no array
        whole, base = (base if isinstance(base, np.ndarray) else whole), getattr(base, "base", None)
    return wide if byte_bounds(wide)[1] <= byte_bounds(whole)[1] else array


def _by(extents: tuple[int, ...]) -> str:
    return " x ".join(map(str, extents))


def _problems(d: TmaDescriptor) -> Iterator[str]:
    """Every rule of the hardware that ``d`` breaks, in words."""
    size = d.dtype.itemsize
    if not 1 <= d.rank <= 5:
        yield f"rank {d.rank} is not 1 to 5"
        return
    lengths = {len(x) for x in (d.shape, d.strides, d.box, d.element_strides)}
    if lengths != {d.rank}:
        yield f"shape {d.shape}, strides {d.strides}, box {d.box}, element_strides {d.element_strides} differ in rank"
        return
    if size not in (1, 2, 4, 8):
        yield f"elements of {size} bytes ({d.dtype}) are not of 1, 2, 4 or 8"
        return
    if not all(1 <= n <= 2**32 for n in d.shape):
        yield f"shape {d.shape} has an extent outside 1 to 2^32"
    if d.base % 16:
        yield f"base address {d.base} is not a multiple of 16 bytes"
    if d.strides[-1] != 1:
        yield f"strides {d.strides}: the innermost must be 1 element, the tensor contiguous along its last dimension"
    for stride in d.strides[:-1]:
        if stride < 0 or stride * size % 16 or stride * size >= 2**40:
            yield f"stride {stride}*{size} = {stride * size} B is not a multiple of 16 bytes from 0 to 2^40"
    if not all(1 <= n <= 256 for n in d.box):
        yield f"box {d.box} has an extent outside 1 to 256"
        return
    if d.row_bytes % 16:
        yield f"the box's rows have {d.box[-1]}*{size} = {d.row_bytes} B, not a multiple of 16 bytes"
    if d.swizzle and d.row_bytes > d.swizzle.bytes:
        wider = next((mode.label for mode in TensorMapSwizzle if mode and mode.bytes >= d.row_bytes), None)
        fit = f"rows of {d.swizzle.granularity(d.dtype)} elements"
        yield (
            f"the box's rows have {d.box[-1]}*{size} = {d.row_bytes} B > {d.swizzle.bytes} B, the span of swizzle "
            f"{d.swizzle.label}; use {f'{wider} or {fit}' if wider else fit}"
        )
    if not all(1 <= n <= 8 for n in d.element_strides) or d.element_strides[-1] != 1:
        yield f"element_strides {d.element_strides} are not 1 to 8 with 1 innermost, where the hardware ignores them"
        return
    if d.image_bytes > (most := get_arch("sm_90").shared_bytes):
        yield f"the box takes {d.image_bytes} bytes of shared memory, more than the {most} of a CTA"


@functools.lru_cache(maxsize=256)
def _image(smem_box: tuple[int, ...], pitch: int, size: int, swizzle: TensorMapSwizzle, address: int) -> IntArray:
    rows = math.prod(smem_box[:-1])
    linear = address + pitch * np.arange(rows)[:, None] + size * np.arange(smem_box[-1])
    return frozen(swizzle.swizzle()(linear).reshape(smem_box))
