"""The matrix-product operator of the KV buffers: the register tile, its loads from shared memory, and the product."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.cache import UnsafePointer
from kvlab.common.checks import count, one_of, shown
from kvlab.layout import Layout, TileTensor
from kvlab.memory import AddressSpace, Memory
from kvlab.staging.max import mma_op_addresses as addresses
from kvlab.staging.tile.member import Member

from .mma_op_addresses import KVMmaOpParams
from .params import WARP_SIZE
from .tiled_mma_loader import fp8_lanes
from .typed_fields import of_type

Array = np.ndarray[Any, Any]


class KVMmaOp:
    """The fragments of K or V that the warps of a CTA hold, for all CTAs of a launch.

    ``reg_tile`` is a tile tensor in registers, of each thread ``[programs, threads]`` the fragments ``(num_k_tiles *
    num_k_mmas * num_mmas) x input_frag_size``, ordered strip, k group, fragment; strip s lies in slot ``s %
    num_k_tiles``. ``numpy.asarray`` shows it without a copy; what was never loaded cannot be read. The loads take
    shared memory as tiles and pointers: one for all warps, or with an offset ``[warps]`` one for each.

    >>> params = KVMmaOpParams("bf16", (16, 16, 32), num_mmas=2, num_k_mmas=1, num_k_tiles=1, BN=32, BK=32)
    >>> op = KVMmaOp(params, num_threads=64)
    >>> keys = np.arange(32 * 32).reshape(32, 32) % 251
    >>> smem = Memory(32 * 32 * 2, space=AddressSpace.SHARED)
    >>> smem.store(0, keys.astype(params.in_type).reshape(-1))
    >>> op.load_prefill(0, warp_smem=TileTensor(smem, "bf16", Layout.row_major(32, 32)))
    >>> op.reg_tile
    TileTensor(bfloat16, (2,8):(8,1), offset [1, 64], local, 1 programs)
    >>> np.asarray(op.reg_tile)[0, 17, 1, :3].astype(int).tolist(), keys[17, 8:11].tolist()
    ([50, 51, 52], [50, 51, 52])
    """

    in_type = Member[np.dtype[Any]]()
    out_type = Member[np.dtype[Any]]()
    input_frag_size = Member[int]()
    MMA_M = Member[int]()
    MMA_N = Member[int]()
    MMA_K = Member[int]()

    def __init__(self, params: KVMmaOpParams, *, programs: int = 1, num_threads: int = 256) -> None:
        of_type(params, KVMmaOpParams)
        if num_threads < 1 or num_threads % WARP_SIZE:
            raise ValueError(f"num_threads is {num_threads}: must be a positive multiple of {WARP_SIZE}")
        self.params, self.programs, self.num_warps = params, programs, num_threads // WARP_SIZE
        layout = Layout.row_major(params.num_k_tiles * params.rows_per_strip, params.input_frag_size)
        self.reg_tile = TileTensor.stack_allocation(
            layout, params.in_type, AddressSpace.LOCAL, programs, threads=num_threads, name="registers"
        )

    @functools.cached_property
    def _strips(self) -> list[TileTensor]:
        shape = self.params.rows_per_strip, self.params.input_frag_size
        return [self.reg_tile.tile(shape, (slot, 0)) for slot in range(self.params.num_k_tiles)]

    def mma_tile_at(self, bk_tile: int, kg: int) -> TileTensor:
        """The fragments of k group ``kg`` of a strip: of each thread ``num_mmas x frag``."""
        p = self.params
        kg = one_of("kg", kg, p.num_k_mmas, "k groups of a strip")
        return self.reg_tile.tile((p.num_mmas, p.input_frag_size), (self._slot(bk_tile) * p.num_k_mmas + kg, 0))

    def strip_tile(self, bk_tile: int) -> TileTensor:
        """All fragments of a strip, k group after k group: of each thread ``(num_k_mmas * num_mmas) x frag``."""
        return self._strips[self._slot(bk_tile)]

    def _slot(self, bk_tile: int) -> int:
        """Where the register tile holds a strip. ValueError unless it is an integer from 0 on."""
        return count("bk_tile", bk_tile) % self.params.num_k_tiles

    def load_prefill(self, bk_tile: int, warp_smem: TileTensor) -> None:
        """K: the strip from the warp's ``WN x BK`` tile.

        Fragments of 32 bytes are two halves of the k group."""
        addresses.prefill_offsets(self.params)  # refuses what it is not for
        p, (smem, base) = self.params, self._tile("warp_smem", warp_smem, self.params.BK)
        self._set(bk_tile, p.loader.load_b(smem, base, p.num_mmas, p.BK))

    def load_prefill_split(
        self, bk_tile: int, warp_smem_lo: TileTensor, warp_smem_hi: TileTensor, has_hi: bool = True
    ) -> None:
        """K: the strip from two ``WN x 64`` tiles, its lower and upper half; without the upper one it is zeros."""
        addresses.split_offsets(self.params)
        p, (smem, lo) = self.params, self._tile("warp_smem_lo", warp_smem_lo, self.params.bk_smem)
        halves = [p.half_loader.load_b(smem, lo, p.num_mmas, p.bk_smem)]
        if has_hi:
            smem, hi = self._tile("warp_smem_hi", warp_smem_hi, p.bk_smem)
            halves.append(p.half_loader.load_b(smem, hi, p.num_mmas, p.bk_smem))
        else:
            halves.append(np.zeros_like(halves[0]))
        self._set(bk_tile, np.concatenate(halves, axis=-1))

    def load_v_bf16(self, bk_tile: int, smem_base: UnsafePointer) -> None:
        """V of 2 bytes: BK keys from the stage at ``smem_base``, by transposing reads.

        The order of the keys is that of the score accumulator."""
        tiles = addresses.v_bf16_tiles(self.params, bk_tile)
        smem, base = self._pointer(smem_base)
        self._set(bk_tile, self.params.loader.load_b_tr(smem, base, self.params.BK, tiles))

    def load_v_fp8_strip(
        self, bk_tile: int, smem_base: UnsafePointer, rel_key: Any = None, hw_key_shift: Any = None,
        depth_base: Any = None,
    ) -> None:
        """V of 1 byte: MMA_K keys from the stage at ``smem_base``, by transposing reads.

        rel_key, hw_key_shift, depth_base : what MAX's caller works out once for its lane, of 32x32x64; here for all
            lanes, ``[64]`` each, those of :func:`fp8_lanes` unless given."""
        addresses.v_fp8_offsets(self.params, bk_tile)
        p, tiles = self.params, np.arange(self.params.num_mmas)
        smem, base = self._pointer(smem_base)
        lanes = _lanes(p, rel_key=rel_key, hw_key_shift=hw_key_shift, depth_base=depth_base)
        self._set(
            bk_tile,
            p.loader.load_v_fp8_strip(smem, base, BN=p.BN, BK=p.bk_smem, bk_tile=bk_tile, dt=tiles, lanes=lanes),
        )

    def mma(self, a: TileTensor, c: TileTensor, bk_tile: int, kg: int, swap_a_b: bool = False) -> None:
        """Add ``A[m] * B[n]`` to ``c[m + n * num_m_mmas]``, with B = ``mma_tile_at(bk_tile, kg)``.

        a : in registers, of each thread ``[programs, threads]`` ``num_m_mmas x frag``.
        c : in registers, ``(num_m_mmas * num_mmas) x c_frag`` of ``out_type``.
        swap_a_b : give the instruction B as its first operand, so that the accumulator tile is transposed and a lane
            owns one query row, as MAX's attention does. The order of C stays."""
        self.params.tiled_mma_op.mma(a, self.mma_tile_at(bk_tile, kg), c, swap_a_b)

    def _tile(self, name: str, tile: TileTensor, columns: int) -> tuple[Memory, Array]:
        """The memory of a warp's tile, and where it begins for each warp."""
        if not isinstance(tile, TileTensor):
            raise TypeError(f"{name} is {shown(tile)}: must be a TileTensor in shared memory")
        p, place = self.params, self._place(name, tile.memory, tile.offset)
        rows = p.num_mmas * p.MMA_M
        if not tile.layout.is_row_major or tile.shape != (rows, columns) or tile.dtype != p.in_type:
            raise ValueError(f"{name} is {tile!r}: must be {rows} x {columns} of {p.in_type}, row-major")
        return place

    def _pointer(self, pointer: UnsafePointer) -> tuple[Memory, Array]:
        if not isinstance(pointer, UnsafePointer):
            raise TypeError(f"smem_base is {shown(pointer)}: must be an UnsafePointer into shared memory")
        if pointer.dtype != self.in_type:
            raise ValueError(f"smem_base points to {pointer.dtype}: must point to {self.in_type}")
        return self._place("smem_base", pointer.memory, pointer.offset)

    def _place(self, name: str, memory: Memory, offset: Any) -> tuple[Memory, Array]:
        if memory.space is not AddressSpace.SHARED:
            raise ValueError(f"{name} is in {memory.space.value} memory: must be in shared memory")
        first = np.asarray(offset, np.int64)
        if first.ndim == 2:  # [1, warps]: the same in every program
            first = first[0]
        return memory, np.broadcast_to(first, (self.num_warps,))

    def _set(self, strip: int, registers: Array) -> None:
        self.strip_tile(strip).store(registers[..., None])


def _lanes(p: KVMmaOpParams, **given: Any) -> tuple[Array, ...] | None:
    """The lane constants of a strip of 1-byte V, where some are given."""
    if all(x is None for x in given.values()):
        return None
    if p.MMA_M != 32:
        raise ValueError(f"{', '.join(given)} are of mma_shape (32, 32, 64), not of {p.mma_shape}")
    out = tuple(own if x is None else np.asarray(x) for x, own in zip(given.values(), fp8_lanes(), strict=True))
    for name, x in zip(given, out, strict=True):
        if x.shape != (WARP_SIZE,) or x.dtype.kind not in "iu":
            raise ValueError(f"{name} of shape {x.shape} and {x.dtype} must be integers [{WARP_SIZE}], one for a lane")
    return out
