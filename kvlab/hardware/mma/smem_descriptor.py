"""The 64-bit words by which wgmma and tcgen05 find an operand in shared memory: encode, decode, explain, follow.

Sources: PTX ISA, matrix descriptors of wgmma and of tcgen05; the meaning of the two strides as in CUTLASS's canonical
layouts. Where wgmma finds an operand was read back from an H100, for every swizzle, both majors and all base offsets
(tests/data/hardware/h100_wgmma_descriptors.json.gz); no chip has confirmed tcgen05."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvlab.common.checks import count, shown
from kvlab.common.drawn import Drawn
from kvlab.hardware._arrays import IntArray, frozen
from kvlab.hardware.copies.tensor_map import TensorMapSwizzle
from kvlab.layout import Layout
from kvlab.layout.algebra.int_tuple import at_once, flatten
from kvlab.memory import as_dtype

_NONE, _32B, _64B, _128B = TensorMapSwizzle
_MODES = {
    "sm_90": {_NONE: 0, _128B: 1, _64B: 2, _32B: 3},
    "sm_100": {_NONE: 0, _128B: 2, _64B: 4, _32B: 6},
}
_MODE_BIT = {"sm_90": 62, "sm_100": 61}
_VERSION = {"sm_90": 0, "sm_100": 0b001 << 46}  # bits 46-48 hold a constant
_FIELDS = {"start_address": 0, "leading_bytes": 16, "stride_bytes": 32}
_LIMIT = 1 << 18  # 14 bits, in units of 16 bytes


@dataclass(frozen=True)
class SmemDescriptor(Drawn):
    """One operand of one instruction in shared memory.

    start_address   byte address of its first element
    leading_bytes   LBO. K-major: to the next 16 bytes of K; without a swizzle only, else ignored (written as 16).
                    MN-major: to the next swizzle width along MN; without one: to the next 8 of K
    stride_bytes    SBO. K-major: to the next 8 rows. MN-major: to the next 8 of K; without a swizzle: to the next 16
                    bytes along MN
    swizzle         a :class:`TensorMapSwizzle`
    base_offset     ``(address >> 7) & 7`` of where the swizzle pattern starts, if that is not a multiple of its own
                    period (1024, 512, 256 bytes); else 0, as for every tile that TMA wrote. Ignored without a swizzle
    arch            ``sm_90`` (wgmma) or ``sm_100`` (tcgen05): the words differ

    >>> d = SmemDescriptor(0x4000, 16, 1024, "128B")
    >>> hex(d.encode())
    '0x4000004000010400'
    >>> SmemDescriptor.decode(0x4000004000010400) == d
    True
    >>> SmemDescriptor(0x4008, 16, 1024, "128B")
    Traceback (most recent call last):
        ...
    ValueError: start_address is 16392: must be a multiple of 16 below 262144
    """

    start_address: int
    leading_bytes: int
    stride_bytes: int
    swizzle: TensorMapSwizzle = _NONE
    base_offset: int = 0
    arch: str = "sm_90"

    def __post_init__(self) -> None:
        object.__setattr__(self, "swizzle", TensorMapSwizzle.of(self.swizzle))
        if not isinstance(self.arch, str) or self.arch not in _MODES:
            raise ValueError(f"arch {self.arch!r} has no matrix descriptors; {' and '.join(_MODES)} have")
        for name in (*_FIELDS, "base_offset"):
            if not isinstance(getattr(self, name), int | np.integer):
                raise ValueError(f"{name} is {shown(getattr(self, name))}: must be an integer")
        for name in _FIELDS:
            value = getattr(self, name)
            if value % 16 or not 0 <= value < _LIMIT:
                raise ValueError(f"{name} is {value}: must be a multiple of 16 below {_LIMIT}")
        if not 0 <= self.base_offset < 8:
            raise ValueError(f"base_offset is {self.base_offset}: must be 0 to 7")

    def encode(self) -> int:
        """The 64-bit word: addresses in units of 16 bytes, 14 bits each."""
        word: int = sum(getattr(self, name) >> 4 << bit for name, bit in _FIELDS.items())
        mode = _MODES[self.arch][self.swizzle] << _MODE_BIT[self.arch]
        return word | self.base_offset << 49 | mode | _VERSION[self.arch]

    @classmethod
    def decode(cls, word: int, arch: str = "sm_90") -> SmemDescriptor:
        """The fields of a 64-bit word. ValueError for bits that must be 0 and for modes that are not modelled."""
        if not isinstance(arch, str) or arch not in _MODES:
            raise ValueError(f"arch {arch!r} has no matrix descriptors; {' and '.join(_MODES)} have")
        if not isinstance(word, int | np.integer) or not 0 <= word < 1 << 64:
            raise ValueError(f"word is {shown(word)}: must be an unsigned 64-bit integer")
        fields = {name: (word >> bit & 0x3FFF) << 4 for name, bit in _FIELDS.items()}
        code = word >> _MODE_BIT[arch]
        modes = {number: mode for mode, number in _MODES[arch].items()}
        if code not in modes:
            raise ValueError(f"word {word:#018x}: swizzle code {code} of {arch} is not modelled; {sorted(modes)} are")
        found = cls(**fields, swizzle=modes[code], base_offset=word >> 49 & 7, arch=arch)
        if found.encode() != word:
            other = found.encode() ^ word
            raise ValueError(f"word {word:#018x}: bits {other:#018x} are not those of a {arch} descriptor")
        return found

    def advance(self, nbytes: int) -> SmemDescriptor:
        """The same operand ``nbytes`` further: the next step along K (32 bytes inside a swizzled row)."""
        return replace(self, start_address=self.start_address + count("advance: nbytes", nbytes, -_LIMIT))

    def addresses(self, mn: int, k: int, dtype: Any, major: str = "K") -> IntArray:
        """Byte address of every element ``[mn, k]`` as the instruction finds it, swizzle included.

        ``major`` is ``"K"`` or ``"MN"``: which of the two is contiguous.

        >>> SmemDescriptor(0, 16, 1024, "128B").addresses(64, 16, "bf16")[[0, 1, 8], 0]
        array([   0,  144, 1024])

        A pattern that starts at byte 128 (base offset 1): its first row is not permuted.

        >>> SmemDescriptor(128, 16, 1024, "128B", base_offset=1).addresses(64, 16, "bf16")[[0, 1, 8], 0]
        array([ 128,  272, 1152])
        """
        dtype = as_dtype(dtype)
        self._check(mn, k, dtype, major)
        return _addresses(self, mn, k, dtype.itemsize, major)

    def _check(self, mn: int, k: int, dtype: np.dtype[Any], major: str) -> None:
        if major not in ("K", "MN"):
            raise ValueError(f"major is {major!r}: must be 'K' or 'MN'")
        if major == "MN" and self.arch == "sm_90" and dtype.itemsize != 2:
            raise ValueError(f"{dtype} must be K-major: wgmma transposes 16-bit elements only")
        count("mn", mn)
        count("k", k)
        at_once(mn * k, "elements")
        contiguous = k if major == "K" else mn
        if mn < 8 or mn % 8 or k < 1 or contiguous * dtype.itemsize % 16:
            raise ValueError(f"an operand of {mn} x {k} {dtype} is not whole core matrices of 8 rows of 16 bytes")

    def explain(self, major: str = "K") -> str:
        """In words: every field, what it means for an operand of this ``major``, and what is suspicious.

        >>> print(SmemDescriptor(0x4020, 16, 1024, "128B").explain())
        sm_90 descriptor 0x4000004000010402: K-major, swizzle 128B.
        Start address 16416 (encoded 0x402): 32 bytes into its row, a step along K.
        LBO 16 bytes (encoded 1): ignored, a swizzled K-major operand has no other 16 bytes to find.
        SBO 1024 bytes (encoded 64): to the next 8 rows.
        Base offset 0: the pattern starts at a multiple of 1024 bytes.
        """
        from .smem_explain import explain

        return explain(self, major)


@functools.lru_cache(maxsize=256)
def _addresses(d: SmemDescriptor, mn: int, k: int, size: int, major: str) -> IntArray:
    width = d.swizzle.bytes
    if major == "K":
        row, byte = np.arange(mn)[:, None], np.arange(k) * size
        linear = row // 8 * d.stride_bytes + row % 8 * width
        linear = linear + (byte if d.swizzle else byte // 16 * d.leading_bytes + byte % 16)
    else:
        byte, row = np.arange(mn)[:, None] * size, np.arange(k)
        along_mn, along_k = (d.leading_bytes, d.stride_bytes) if d.swizzle else (d.stride_bytes, d.leading_bytes)
        linear = byte // width * along_mn + byte % width + row % 8 * width + row // 8 * along_k
    address = d.start_address + linear
    row = (address >> 7) - d.base_offset  # of the pattern, in rows of 128 bytes
    return frozen(address ^ (row & (1 << d.swizzle.value) - 1) << 4)


def tile_to_descriptor(
    layout: Layout, dtype: Any, swizzle: Any = "none", start_address: int = 0, major: str = "K", arch: str = "sm_90", *,
    pattern_start: int = 0,
) -> SmemDescriptor:
    """The descriptor of a canonical tile (:func:`tile_layout_k_major`, :func:`tile_layout_mn_major`).

    For the step at k elements along K: ``.advance(layout(0, k) * size)``. ``pattern_start`` is a byte address, a
    multiple of 128, where the swizzle's pattern starts: 0 where it was made of absolute address bits (TMA, or any tile
    at a multiple of the pattern's period), else the tile's own first byte; it gives the base offset of the PTX ISA,
    ``(pattern_start >> 7) & 7``, 0 for a multiple of the period.

    >>> from kvlab.hardware import tile_layout_k_major
    >>> tile_to_descriptor(tile_layout_k_major("bf16", 64, 64, "128B"), "bf16", "128B").stride_bytes
    1024
    >>> own = tile_layout_k_major("bf16", 64, 64, "128B")
    >>> tile_to_descriptor(own, "bf16", "128B", 4480, pattern_start=4480).base_offset
    3
    """
    mode, size = TensorMapSwizzle.of(swizzle), as_dtype(dtype).itemsize
    if not isinstance(layout, Layout):
        raise ValueError(f"tile_to_descriptor of {layout!r}: must be a Layout")
    if major not in ("K", "MN"):
        raise ValueError(f"major is {major!r}: must be 'K' or 'MN'")
    if count("pattern_start", pattern_start) % 128:
        raise ValueError(f"pattern_start is {pattern_start}: must be a multiple of 128, the rows of patterns")
    base_offset = pattern_start >> 7 & 7 if pattern_start % mode.alignment else 0
    (inner, outer), (inner_stride, outer_stride) = _two_by_two(layout)
    S = mode.bytes // size
    mn, k = (0, 1) if major == "K" else (1, 0)  # which mode has the 8 rows, which the S contiguous elements
    if (inner[mn], inner[k], inner_stride[mn], inner_stride[k]) != (8, S, S, 1):
        raise ValueError(
            f"layout {layout} is not canonical {major}-major for swizzle {mode.label} and elements of {size} bytes: "
            f"8 rows of {S} elements"
        )
    if major == "K" and not mode and outer[k] % 2:
        raise ValueError(f"layout {layout}: {outer[k]} columns of 16 bytes are an odd number, a K step takes two")
    rows, chunks = outer_stride[mn] * size, outer_stride[k] * size
    if major == "K":
        leading, stride = (16 if mode else chunks), rows
    else:
        leading, stride = (chunks, rows) if mode else (rows, chunks)
    return SmemDescriptor(start_address, leading, stride, mode, base_offset, arch)


def _two_by_two(layout: Layout) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
    shape, stride = flatten(layout.shape), flatten(layout.stride)
    if layout.rank != 2 or len(shape) != 4:
        raise ValueError(f"layout is {layout}: must be of the form ((8,m),(S,c)) or ((S,m),(8,c))")
    return ([shape[0], shape[2]], [shape[1], shape[3]]), ([stride[0], stride[2]], [stride[1], stride[3]])
