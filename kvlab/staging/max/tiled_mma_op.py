"""MAX's matrix products of register tiles: fragments from shared memory, and the instructions that multiply them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import flag, shown
from kvlab.hardware import MmaAtom, get_atom
from kvlab.hardware.copies.tile_resource import REGISTERS, check_tile
from kvlab.layout import Swizzle, TileTensor
from kvlab.layout.algebra.int_tuple import flatten
from kvlab.memory import AddressSpace, as_dtype, float32

from .mma_geometry import WARP_SIZE
from .typed_fields import set_typed

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]

_SUFFIX = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8_e4m3fn": "fp8"}
_OUT = ("float32", "bfloat16", "float16")


def get_accum_type(dtype: Any) -> np.dtype[Any]:
    """The dtype in which the matrix instructions for operands of ``dtype`` add up: float32.

    >>> get_accum_type("bf16")
    dtype('float32')
    """
    if as_dtype(dtype).itemsize > 4:
        raise ValueError(f"dtype is {dtype!r}: must be of at most 4 bytes: no matrix instruction takes wider ones")
    return float32


@dataclass(frozen=True)
class TiledMmaOp:
    """MAX's ``TiledMmaOp``: one matrix instruction over all fragments of a warp.

    out_type     of the accumulators: float32, bfloat16 or float16
    in_type      of the operands
    shape        (M, N, K) of the instruction
    transpose_b  True: B lies as N x K in shared memory, as K does; False: as K x N, as V does

    >>> from kvlab.layout import Layout
    >>> op = TiledMmaOp("fp32", "bf16", (16, 16, 32), transpose_b=True)
    >>> a, c = (
    ...     TileTensor.stack_allocation(Layout.row_major(1, n), dtype, AddressSpace.LOCAL, programs=1, threads=64)
    ...     for n, dtype in ((8, op.in_type), (4, op.out_type))
    ... )
    >>> op.mma(a.fill(1), a, c.fill(0))
    >>> op.a_frag_size, op.b_frag_size, op.c_frag_size, np.asarray(c)[0, 0, 0].tolist()
    (8, 8, 4, [32.0, 32.0, 32.0, 32.0])
    """

    out_type: np.dtype[Any]
    in_type: np.dtype[Any]
    shape: tuple[int, int, int]
    transpose_b: bool = False

    def __post_init__(self) -> None:
        set_typed(self)
        if self.out_type.name not in _OUT:
            raise ValueError(f"out_type is {self.out_type}: must be {', '.join(_OUT[:-1])} or {_OUT[-1]}")

    @property
    def a_frag_size(self) -> int:
        """Elements of a fragment of A in a lane."""
        return self.shape[0] * self.shape[2] // WARP_SIZE

    @property
    def b_frag_size(self) -> int:
        """Elements of a fragment of B in a lane."""
        return self.shape[1] * self.shape[2] // WARP_SIZE

    @property
    def c_frag_size(self) -> int:
        """Elements of a fragment of the accumulator in a lane."""
        return self.shape[0] * self.shape[1] // WARP_SIZE

    @property
    def atom(self) -> MmaAtom:
        """The instruction. ValueError where the chip has none."""
        return mfma_atom(self.shape, self.in_type)

    def mma(self, a: TileTensor, b: TileTensor, c: TileTensor, swap_a_b: bool = False) -> None:
        """Add ``a[m] * b[n]`` to ``c[m + n * num_m]`` for the fragments of every warp, where all are in registers: of
        each thread, whose axes ``[programs, threads]`` lead the offsets.

        a : ``num_m x a_frag_size`` of ``in_type``. b : ``num_n x b_frag_size``.
        c : ``(num_m * num_n) x c_frag_size`` of ``out_type``.
        swap_a_b : give the instruction B as its first operand: each tile of the accumulator is transposed."""
        self._check("a", a, self.in_type, None, self.a_frag_size)
        self._check("b", b, self.in_type, None, self.b_frag_size)
        self._check("c", c, self.out_type, a.shape[0] * b.shape[0], self.c_frag_size)
        swap_a_b = flag("swap_a_b", swap_a_b)
        first, second, total = (np.asarray(tile) for tile in (a, b, c))
        for name, values in (("b", second), ("c", total)):
            if values.shape[:-2] != first.shape[:-2]:
                raise ValueError(f"{name} is of {values.shape[:-2]} programs and threads, a of {first.shape[:-2]}")
        out = mma_tiles(self.atom, first, second, total.astype(np.float32, copy=False), swap_a_b)
        c.store(out.astype(self.out_type, copy=False)[..., None])

    def _check(self, name: str, tile: TileTensor, dtype: np.dtype[Any], rows: int | None, frag: int) -> None:
        if not isinstance(tile, TileTensor):
            raise TypeError(f"{name} is {shown(tile)}: must be a TileTensor in local memory")
        check_tile(name, tile, REGISTERS, dtype, (tile.shape[0] if rows is None else rows, frag))
        if tile.dtype != dtype:
            raise ValueError(f"{name} is of {tile.dtype}: must be of {dtype}")

    def load_b(
        self, warp_tile: TileTensor, reg_tile: TileTensor, k_group_idx: int = 0, swizzle: Swizzle | None = None
    ) -> None:
        """Load the fragments of a k group of B from shared memory into registers.

        warp_tile : ``[N * fragments, K * groups]`` in shared memory, or ``[K * groups, N * fragments]`` unless
            ``transpose_b``; its offset ``[1 or programs, warps]``.
        reg_tile : ``[fragments, b_frag_size]`` of registers; its offset ``[programs, threads]``.
        swizzle : counts fragments from the first row of each instruction's tile; ``transpose_b`` alone.

        >>> from kvlab.layout import Layout
        >>> op, keys = TiledMmaOp("fp32", "bf16", (16, 16, 32), True), Layout.row_major(32, 32)
        >>> smem = TileTensor.stack_allocation(keys, op.in_type, programs=1)
        >>> smem.store((np.arange(1024) % 251).reshape(1, 32, 32, 1).astype(op.in_type))
        >>> registers = TileTensor.stack_allocation(Layout.row_major(64, 16), op.in_type, AddressSpace.LOCAL, 1)
        >>> lanes = TileTensor(registers.memory, op.in_type, Layout.row_major(2, 8), 16 * np.arange(64)[None])
        >>> op.load_b(TileTensor(smem.memory, op.in_type, keys, np.zeros((1, 1), int)), lanes)
        >>> lanes.load()[0, 17, 1, :3, 0].astype(int).tolist()  # key 17, dims 8, 9, 10
        [50, 51, 52]
        """
        for name, tile, space in (
            ("warp_tile", warp_tile, AddressSpace.SHARED), ("reg_tile", reg_tile, AddressSpace.LOCAL)
        ):
            if not isinstance(tile, TileTensor):
                raise TypeError(f"{name} is {shown(tile)}: must be a TileTensor")
            if tile.address_space is not space or tile.dtype != self.in_type:
                raise ValueError(f"{name} is {tile!r}: must be of {self.in_type} in {space.value} memory")
        (fragments, frag), (stride, one) = flatten(reg_tile.layout.shape), flatten(warp_tile.layout.stride)
        if frag != self.b_frag_size or one != 1:
            raise ValueError(
                f"reg_tile is {reg_tile!r}: must be fragments of {self.b_frag_size}, columns of warp_tile "
                f"{warp_tile!r} side by side"
            )
        offset, width = self.b_offsets(fragments, stride, k_group_idx, swizzle)
        values = warp_tile.raw_load(offset, width)
        reg_tile.store(values.reshape(len(values), -1, fragments, frag, 1))

    def b_offsets(
        self, fragments: int, row_stride: int, k_group_idx: int = 0, swizzle: Swizzle | None = None
    ) -> tuple[IntArray, int]:
        """Elements of B that the lanes read, in elements from the warp's tile, ``[64, fragments, reads]``, and the
        elements of a read: a fragment is read at once, or column by column unless ``transpose_b``."""
        return _b_offsets(self, fragments, row_stride, k_group_idx, swizzle)


@functools.cache
def _b_offsets(
    op: TiledMmaOp, fragments: int, row_stride: int, k_group_idx: int, swizzle: Swizzle | None
) -> tuple[IntArray, int]:
    (_, N, K), frag = op.shape, op.b_frag_size
    lane, i, e = np.ogrid[:WARP_SIZE, :fragments, :frag]
    if not op.transpose_b:
        if swizzle is not None:
            raise ValueError(f"swizzle is {swizzle}: must be None: B is read column by column unless transpose_b")
        return (k_group_idx * K + lane // N * frag + e) * row_stride + i * N + lane % N, 1
    number = (lane % N * row_stride + lane // N * frag) // frag
    number = number if swizzle is None else swizzle(number)
    return i * N * row_stride + k_group_idx * K + number * frag + 0 * e[..., :1], frag


@dataclass(frozen=True)
class TiledTensorCore:
    """MAX's ``TiledTensorCore``: ``group_size`` matrix instructions one after the other along K, which share fragments.

    Other parameters as of :class:`TiledMmaOp`; ``shape`` is that of one instruction.

    >>> core = TiledTensorCore("fp32", "bf16", (16, 16, 16), group_size=2)
    >>> ones = TileTensor.from_numpy(np.ones((1, 64, 1, 8), core.in_type), space=AddressSpace.LOCAL, batch=2)
    >>> c = np.zeros((1, 64, 1, 4), core.out_type)
    >>> core.mma(ones, ones, TileTensor.from_numpy(c, space=AddressSpace.LOCAL, batch=2))
    >>> c[0, 0, 0].tolist()
    [32.0, 32.0, 32.0, 32.0]
    """

    out_type: np.dtype[Any]
    in_type: np.dtype[Any]
    shape: tuple[int, int, int]
    group_size: int
    transpose_b: bool = False

    def __post_init__(self) -> None:
        set_typed(self)
        TiledMmaOp(self.out_type, self.in_type, self.shape)  # refuses what no instruction adds up in

    @property
    def mma_op(self) -> TiledMmaOp:
        """One of the instructions."""
        return TiledMmaOp(self.out_type, self.in_type, self.shape, self.transpose_b)

    def mma(self, a: TileTensor, b: TileTensor, c: TileTensor, swap_a_b: bool = False) -> None:
        """Add as :meth:`TiledMmaOp.mma`; fragments of A and B are ``group_size`` times as wide, an instruction takes
        its part of them."""
        op = self.mma_op
        for name, tile, frag in (("a", a, op.a_frag_size), ("b", b, op.b_frag_size)):
            if not isinstance(tile, TileTensor):
                raise TypeError(f"{name} is {shown(tile)}: must be a TileTensor in local memory")
            if tile.rank != 2 or tile.shape[1] < self.group_size * frag:
                raise ValueError(f"{name} is {tile.layout}: must be fragments of {self.group_size} x {frag}")
        for g in range(self.group_size):
            a_part, b_part = (slice(g * frag, (g + 1) * frag) for frag in (op.a_frag_size, op.b_frag_size))
            op.mma(a[:, a_part], b[:, b_part], c, swap_a_b)


def mfma_atom(mma_shape: tuple[int, int, int], dtype: Any) -> MmaAtom:
    """The matrix instruction for a shape and a storage dtype.

    >>> mfma_atom((16, 16, 32), "bf16").name
    'mfma.16x16x32.bf16'
    """
    name = as_dtype(dtype).name
    return get_atom(f"mfma.{'x'.join(map(str, mma_shape))}.{_SUFFIX.get(name, name)}")


def mma_tiles(atom: MmaAtom, a: Array, b: Array, c: Array, swap_a_b: bool = False) -> Array:
    """One k group: ``c[m + n * num_m] + a[m] * b[n]`` for the fragments of every warp.

    a ``[programs, threads, num_m, regs]``, b ``[programs, threads, num_n, regs]``, c ``[programs, threads,
    num_m * num_n, regs_c]`` float32; a new c is returned. With ``swap_a_b`` the instruction computes the transposed
    tile, B times A.

    >>> atom = mfma_atom((16, 16, 32), "bf16")
    >>> ones = np.ones((1, 64, 1, 8), atom.dtype)  # one warp, one tile each
    >>> mma_tiles(atom, ones, ones, np.zeros((1, 64, 1, 4), np.float32))[0, 0, 0].tolist()
    [32.0, 32.0, 32.0, 32.0]
    """
    num_m, num_n, lanes = a.shape[2], b.shape[2], atom.warp_size
    if c.shape[2] != num_m * num_n:
        raise ValueError(f"c has {c.shape[2]} registers, must have num_m * num_n = {num_m} * {num_n}")
    by_warp_a = np.swapaxes(a.reshape(len(a), -1, lanes, *a.shape[2:]), 2, 3)[:, :, None]
    by_warp_b = np.swapaxes(b.reshape(len(b), -1, lanes, *b.shape[2:]), 2, 3)[:, :, :, None]
    tiles = c.reshape(len(c), -1, lanes, num_n, num_m, c.shape[-1]).transpose(0, 1, 3, 4, 2, 5)
    # [programs, warps, num_n, num_m, lanes, regs]
    out = atom.mma(by_warp_b, by_warp_a, tiles) if swap_a_b else atom.mma(by_warp_a, by_warp_b, tiles)
    return out.transpose(0, 1, 4, 2, 3, 5).reshape(c.shape)
