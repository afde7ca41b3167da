"""MAX's loader of B fragments from shared memory, executed for all lanes of all warps."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import ds_read_tr8_b64, ds_read_tr16_b64
from kvlab.layout import Swizzle
from kvlab.layout.algebra.swizzle import VECTOR_BYTES
from kvlab.memory import Memory, as_dtype

from .params import WARP_SIZE

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class TiledMmaLoader:
    """Fragments of the operand that multiplies Q or P: K as it lies, V by transposing reads.

    Offsets are in elements. In the loads ``base`` is an element offset from the first byte of ``smem``, an int or one
    for each warp; the swizzles count 16-byte vectors from what is said with each load. Registers are
    ``[programs, threads, registers, elements]`` with 64 threads for each warp of ``base``.

    A swizzle that moves less than 16 bytes (MAX's *element-space*, for decode) counts elements, of K from the warp's
    tile. A read takes as many elements as it keeps together; fragments may be smaller than 16 bytes.

    >>> loader = TiledMmaLoader("bf16", (16, 16, 32), Swizzle(3, 0, 3, "vector"))
    >>> keys = np.arange(32 * 32).reshape(32, 32) % 251  # two fragments of 16 keys
    >>> vector = np.arange(32 * 4)
    >>> swizzled = keys.reshape(-1, 8)[loader.swizzle(vector)].astype(loader.dtype)
    >>> registers = loader.load_b(Memory.over(swizzled), 0, num_mmas=2, BK=32)
    >>> registers.shape, registers[0, 17, 1, :3].astype(int).tolist(), keys[17, 8:11].tolist()
    ((1, 64, 2, 8), [50, 51, 52], [50, 51, 52])
    """

    dtype: np.dtype[Any]
    mma_shape: tuple[int, int, int]
    swizzle: Swizzle | None = None
    swizzle2: Swizzle | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        object.__setattr__(self, "mma_shape", tuple(self.mma_shape))
        for name in ("swizzle", "swizzle2"):
            object.__setattr__(self, name, counted(getattr(self, name), self.dtype))

    @property
    def simd_width(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.dtype.itemsize

    @property
    def input_frag_size(self) -> int:
        """Elements of a fragment in a lane."""
        return self.mma_shape[0] * self.mma_shape[2] // WARP_SIZE

    @property
    def kept_together(self) -> int:
        """Neighbouring elements that the swizzles leave so, 16 bytes at most."""
        in_elements = [s for s in (self.swizzle, self.swizzle2) if s is not None and s.unit == self.dtype]
        return min([self.simd_width, *(1 << s.base for s in in_elements)])

    def swizzled(self, offset: IntArray) -> IntArray:
        """An element offset after the swizzles, of its 16-byte vector or of itself."""
        for swizzle in (self.swizzle, self.swizzle2):
            if swizzle is not None and swizzle.unit == self.dtype:
                offset = swizzle(offset)
            elif swizzle is not None:
                vector, inside = np.divmod(offset, self.simd_width)
                offset = swizzle(vector) * self.simd_width + inside
        return offset

    def transposed(self, offset: IntArray) -> IntArray:
        """:meth:`swizzled`, of transposing reads. ValueError where the swizzles do not keep their 8 bytes together."""
        nbytes = self.kept_together * self.dtype.itemsize
        if nbytes < 8:
            raise ValueError(f"swizzle {self.swizzle} moves pieces of {nbytes} bytes: a transposing read takes 8")
        return self.swizzled(offset)

    # What is read: element offsets.

    def b_offsets(self, num_mmas: int, BK: int, row_stride: int | None = None) -> IntArray:
        """``load_b``: the first element of each read ``[lanes, registers, reads]``, registers ordered k group, tile."""
        return _b_offsets(self, num_mmas, BK, BK if row_stride is None else row_stride)

    def b_tr_offsets(self, row_stride: int) -> IntArray:
        """``load_b_tr``: what the lanes address in the two transposing reads of a tile, unswizzled ``[2, lanes]``."""
        return _b_tr_offsets(self, row_stride)

    def fp8_strip_offsets(self, block_width: int, bk_tile: int = 0) -> IntArray:
        """``load_v_fp8_strip``: what the lanes address in the four transposing reads of depth tile 0, unswizzled, from
        the first element of its block of ``block_width`` columns ``[4, lanes]``."""
        return _fp8_strip_offsets(self, block_width, bk_tile)

    # The reads.

    def load_b(self, smem: Memory, base: Any, num_mmas: int, BK: int, row_stride: int | None = None) -> Array:
        """K: ``num_mmas`` fragments side by side of each k group of the ``rows x BK`` tile at ``base``.

        A fragment of 32 bytes is two halves of the k group, one after the other: the k order of the f8f6f4
        instructions. The swizzle counts from the first of the MMA_M rows of a fragment."""
        offset = self.b_offsets(num_mmas, BK, row_stride)
        width = self.input_frag_size // offset.shape[2]
        values = smem.load(_addresses(self, smem, base, offset), self.dtype, width)
        return values.reshape(len(values), -1, offset.shape[1], self.input_frag_size)

    def load_b_tr(self, smem: Memory, base: Any, row_stride: int, tile: Any = 0) -> Array:
        """V of 2 bytes: the fragments of ``MMA_K x MMA_M`` tiles, ``tile`` (an int or ``[registers]``) elements from
        ``base``, from which the swizzle counts.

        Element e of lane l holds key ``e // 4 * (MMA_K / 2) + l // MMA_M * 4 + e % 4`` of column ``l % MMA_M``, in the
        order of the score accumulator."""
        offset = self.transposed(np.atleast_1d(tile)[:, None, None] + self.b_tr_offsets(row_stride))
        return _transposed(ds_read_tr16_b64(smem, _addresses(self, smem, base, offset), self.dtype))

    def load_v_fp8_strip(
        self, smem: Memory, base: Any, *, BN: int, BK: int, bk_tile: int = 0, dt: Any = 0, lanes: Any = None
    ) -> Array:
        """V of 1 byte: MMA_K keys from ``bk_tile * MMA_K`` on of the depth tiles ``dt`` (an int or ``[registers]``), in
        blocks of ``BN x BK``. The swizzle counts from the block. 16x16x128 is MAX's ``load_v_fp8_strip_16``, which has
        no ``bk_tile``. ``lanes``: constants in place of :func:`fp8_lanes`."""
        M = self.mma_shape[0]
        if BK % M:
            raise ValueError(f"BK {BK}, the width of a block, must be a multiple of MMA_M {M}")
        block, column = np.divmod(np.atleast_1d(dt)[:, None, None], BK // M)
        inside = self.fp8_strip_offsets(BK, bk_tile) if lanes is None else _strip32(self, BK, bk_tile, *lanes)
        offset = self.transposed(column * M + inside) + block * BN * BK
        return _transposed(ds_read_tr8_b64(smem, _addresses(self, smem, base, offset), self.dtype))


def fp8_lanes() -> tuple[IntArray, IntArray, IntArray]:
    """MAX's lane constants of the 32x32x64 strip: ``rel_key``, ``hw_key_shift``, ``depth_base``, each ``[64]``.

    >>> rel_key, hw_key_shift, depth_base = fp8_lanes()
    >>> rel_key[:16:2].tolist(), hw_key_shift[[0, 32]].tolist(), depth_base[[0, 1, 16, 17]].tolist()
    ([0, 1, 2, 3, 8, 9, 10, 11], [0, 4], [0, 8, 16, 24])
    """
    lane = np.arange(WARP_SIZE)
    pair, odd = lane % 16 // 2, lane % 2
    return pair % 4 + pair // 4 * 8, lane // 32 * 4, lane // 16 % 2 * 16 + odd * 8


def counted(swizzle: Swizzle | None, dtype: np.dtype[Any]) -> Swizzle | None:
    """``swizzle`` in what it counts: 16-byte vectors or, if it moves less than that, elements of ``dtype``."""
    if swizzle is None:
        return None
    whole = not swizzle.bits or swizzle.unit_bytes << swizzle.base >= VECTOR_BYTES
    return swizzle.to("vector" if whole else dtype)


def _addresses(loader: TiledMmaLoader, smem: Memory, base: Any, offset: IntArray) -> IntArray:
    """Byte addresses ``[1, warps, *offset.shape]``."""
    bases = np.atleast_1d(np.asarray(base, np.int64))
    elements = bases.reshape(-1, *(1,) * offset.ndim) + offset
    return smem.base + elements[None] * loader.dtype.itemsize


def _transposed(values: Array) -> Array:
    """``[programs, warps, registers, reads, lanes, n]`` -> ``[programs, threads, registers, reads * n]``."""
    programs, warps, registers, reads, lanes, _ = values.shape
    pieces = np.ascontiguousarray(values).view(np.uint64)[..., 0]  # the 8 bytes of a read stay together
    moved = np.ascontiguousarray(pieces.transpose(0, 1, 4, 2, 3))
    return moved.reshape(programs, warps * lanes, registers, reads).view(values.dtype)


@functools.cache
def _b_offsets(loader: TiledMmaLoader, num_mmas: int, BK: int, row_stride: int) -> IntArray:
    (M, _, K), frag, vector = loader.mma_shape, loader.input_frag_size, loader.simd_width
    in_elements = any(s is not None and s.unit == loader.dtype for s in (loader.swizzle, loader.swizzle2))
    halves = max(frag // vector, 1)
    if (frag % vector and not in_elements) or halves > 2 or BK % K:
        raise ValueError(
            f"load_b is for fragments of 16 or 32 bytes (or less, of an element-space swizzle) and BK a multiple of "
            f"MMA_K, not {loader}, BK {BK}"
        )
    part = frag // halves  # elements of a half
    lane, kg, i, e = np.ogrid[:WARP_SIZE, : BK // K, :num_mmas, : frag : min(part, loader.kept_together)]
    column = kg * K + e // part * (K // halves) + lane // M * part + e % part
    offset, tile = lane % M * row_stride + column, i * M * row_stride
    offset = loader.swizzled(offset + tile) if in_elements else loader.swizzled(offset) + tile
    return offset.reshape(WARP_SIZE, BK // K * num_mmas, -1)


@functools.cache
def _b_tr_offsets(loader: TiledMmaLoader, row_stride: int) -> IntArray:
    """The rows of 16 lanes take 4 x 16 pieces of K/2 keys x M columns: side by side first if M is 32, save in MAX's
    swizzled form, which has the 16-row geometry for every shape."""
    M, _, K = loader.mma_shape
    if loader.dtype.itemsize != 2 or (M, K) not in ((32, 16), (16, 32)):
        raise ValueError(f"load_b_tr is for 2-byte V with mma_shape (32, 32, 16) or (16, 16, 32), not {loader}")
    half, lane = np.ogrid[:2, :WARP_SIZE]
    row, across = lane // 16, M // 16 if loader.swizzle is None else 1
    key = half * (K // 2) + row // across * 4 + lane % 16 // 4
    return key * row_stride + row % across * 16 + lane % 4 * 4


@functools.cache
def _fp8_strip_offsets(loader: TiledMmaLoader, block_width: int, bk_tile: int) -> IntArray:
    M, _, K = loader.mma_shape
    if loader.dtype.itemsize != 1 or (M, K) not in ((32, 64), (16, 128)):
        raise ValueError(f"load_v_fp8_strip is for 1-byte V with mma_shape (32, 32, 64) or (16, 16, 128), not {loader}")
    if M == 32:
        return _strip32(loader, block_width, bk_tile, *fp8_lanes())
    step, lane = np.ogrid[:4, :WARP_SIZE]
    key, column = 32 * (lane // 16) + 8 * step + lane % 16 // 2, 8 * (lane % 2)
    return (bk_tile * K + key) * block_width + column


def _strip32(
    loader: TiledMmaLoader, block_width: int, bk_tile: int, rel_key: Any, hw_key_shift: Any, depth_base: Any
) -> IntArray:
    """The four reads of a 32x32x64 strip: 16 keys each."""
    key = bk_tile * loader.mma_shape[2] + 16 * np.arange(4)[:, None] + rel_key + hw_key_shift
    return key * block_width + depth_base
