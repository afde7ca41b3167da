"""The buffer of streaming decode on gfx950: a strip of K or V at a time, DRAM -> shared memory -> registers."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np

from kvlab.cache import KVCacheT, MHAOperand, UnsafePointer
from kvlab.common.checks import one_of
from kvlab.common.drawn import Drawn
from kvlab.layout import Layout, TileTensor, TileType
from kvlab.memory import AddressSpace
from kvlab.staging.max import streaming_addresses as addresses
from kvlab.staging.record.hazards import Hazards
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import FragmentMap
from kvlab.staging.tile.iterator import (
    KVCacheIterator,
    buffer_walk,
    fitting_tile,
    integers,
    sub_tiles,
    valid_keys,
)
from kvlab.staging.tile.member import Member
from kvlab.staging.tile.smem_image import SmemImage
from kvlab.staging.tile.smem_place import one_warp, own_or_given, placed, pointed, threads_of

from .kv_mma_op import KVMmaOp, KVMmaOpParams
from .params import KVBufferParams, ceildiv
from .strip_accesses import StripAccesses
from .typed_fields import of_type

Array = np.ndarray[Any, Any]


class DecodeStreamingKVBuffer(Drawn):
    """MAX's ``DecodeStreamingKVBuffer`` for all CTAs of a launch.

    Parameters
    ----------
    params : the compile-time parameters. ``params.transpose`` makes it the buffer of K (strips of BK columns) or of V
        (strips of BK keys).
    cache : the K or V cache of a layer, or another :class:`~kvlab.cache.MHAOperand`.
    batch_idx, head_idx : ``[programs]`` or scalars: sequence and KV head of each CTA.
    smem_ptr : where the strip begins in shared memory with ``programs`` programs, on a multiple of 16 bytes; memory of
        exactly a strip is made if None.
    num_keys : ``[programs]`` or a scalar, keys of each sequence: the bound of :meth:`iterator`.
    warp_id : the warp whose registers :meth:`get_mma_tile` gives, an int; those of all warps if None. All warps load.
    bounded : tiles may have fewer columns than ``depth``, the others are zeros, a kvlab extension.
    traffic : counts what moves.
    hazards : checks the accesses; who owns the buffer states its waits and barriers. None: nothing is checked.

    K of 2 and 4 bytes goes DRAM -> shared memory by DMA, swizzled; K of 1 byte and V through registers. Some
    configurations do not bring the matrix to the lanes (``matrix_order`` is False): MAX's addresses are reproduced, and
    a UserWarning says what works instead. Wavefronts are provisional: no chip has confirmed the AMD rule.

    >>> from kvlab.cache import PagedKVCache
    >>> from kvlab.layout import Swizzle
    >>> params = KVBufferParams("bf16", (16, 16, 32), Swizzle(3, 0, 3, "vector"), BN=128, WN=32, BK=32, num_threads=256,
    ...                         depth=64, kv_num_heads=1, transpose=True)
    >>> keys = np.arange(256 * 64).reshape(2, 128, 1, 64).astype(params.dtype)
    >>> cache = PagedKVCache(keys, [199], [[1, 0]], max_seq_length=1, max_cache_length=200)
    >>> k = DecodeStreamingKVBuffer(params, cache, batch_idx=0, head_idx=0, num_keys=200)
    >>> tile = k.iterator().next_tile()
    >>> k.load_from_dram(1, tile)
    >>> k.load_from_shared().shape, k.get_mma_tile(0)
    ((2, 8), TileTensor(bfloat16, (2,8):(8,1), offset [1, 256], local, 1 programs))
    >>> strip = k.fragment_map().gather(k.load_from_shared())
    >>> bool((strip[0] == keys[1, :, 0, 32:64]).all())
    True
    """

    # MAX's members: those of the parameters, here and below.
    MMA_N = Member[int]()
    MMA_K = Member[int]()
    simd_width = Member[int]()
    input_frag_size = Member[int]()
    num_k_mmas2 = Member[int]()
    warp_tile_rows = Member[int]()
    _num_warps = Member[int]()
    _num_warps_n = Member[int]()

    def __init__(
        self, params: KVBufferParams, cache: KVCacheT | MHAOperand, batch_idx: Any, head_idx: Any,
        smem_ptr: UnsafePointer | None = None, num_keys: Any = None, warp_id: int | None = None, *,
        bounded: bool = False, traffic: Traffic | None = None, hazards: Hazards | None = None,
    ) -> None:
        addresses.check(of_type(params, KVBufferParams))
        size = params.dtype.itemsize
        self.params, self.cache, self.traffic, self.bounded = params, cache, traffic, bounded
        self.num_keys = None if num_keys is None else integers("num_keys", num_keys)
        walk = buffer_walk(params, cache, batch_idx, head_idx, 0 if num_keys is None else self.num_keys, bounded)
        self.batch_idx, self.head_idx = walk.batch_idx, walk.kv_head_idx
        self.programs = self.batch_idx.shape[0]
        self.warp_id = one_warp(warp_id, params.num_warps)
        smem, address = pointed(smem_ptr, params.dtype)
        self.smem = own_or_given(smem, self.strip_bytes, self.programs, "batch_idx and head_idx")
        self.smem_address = placed(self.smem, address, self.strip_bytes, "a strip", "smem_ptr at")
        self.smem_ptr = UnsafePointer(self.smem, (self.smem_address - self.smem.base) // size, params.dtype)
        self._accesses = None if hazards is None else StripAccesses(hazards, params, self.smem_address)
        self.kv_mma_op = KVMmaOp(self.KVMmaOpType, programs=self.programs, num_threads=params.num_threads)
        self._active = np.zeros(self.programs, np.bool_)
        self._held: tuple[int, Array] | None = None
        if not self.matrix_order:
            warnings.warn(
                f"{params.role.upper()} strips with {params.mma_shape}, BK {params.BK}, {params.swizzle}: as in MAX "
                f"the lanes do not get the elements of the matrix; {addresses.what_works(params)}",
                stacklevel=2,
            )

    @property
    def num_mmas(self) -> int:
        """Fragments of a k group."""
        return addresses.num_mmas(self.params)

    @property
    def mma_layout(self) -> Layout:
        """Registers of a lane: row-major ``[num_mmas * num_k_mmas2, input_frag_size]``."""
        return Layout.row_major(self._mma_total_rows, self.input_frag_size)

    @property
    def MMATileType(self) -> TileType:
        """The type of a lane's register tile."""
        return TileType(self.params.dtype, self.mma_layout, AddressSpace.LOCAL)

    @property
    def k_smem_parent_layout(self) -> Layout:
        """The K strip as blocks of BK columns: shape (BN, BK), strides (BK, BN)."""
        return Layout((self.params.BN, self.params.BK), (self.params.BK, self.params.BN))

    @property
    def _mma_total_rows(self) -> int:
        return self.num_mmas * self.num_k_mmas2

    @property
    def _strip_rows(self) -> int:
        return addresses.strip_shape(self.params)[0]

    @property
    def _strip_cols(self) -> int:
        return addresses.strip_shape(self.params)[1]

    @property
    def _num_row_groups(self) -> int:
        return self._strip_rows // self.warp_tile_rows

    @property
    def _num_col_groups(self) -> int:
        return self._strip_cols // self.params.BK

    @property
    def _total_dma_tiles(self) -> int:
        return self._num_row_groups * self._num_col_groups

    @property
    def _tiles_per_warp(self) -> int:
        return ceildiv(self._total_dma_tiles, self._num_warps)

    @property
    def KVMmaOpType(self) -> KVMmaOpParams:
        """The type of ``kv_mma_op``: what is known of it at compile time, a register tile of one strip."""
        return KVMmaOpParams.of(self.params, num_mmas=self.num_mmas, num_k_tiles=1)

    # kvlab's own.

    @property
    def num_strips(self) -> int:
        """Strips of a tile: along the depth (K) or along the keys (V)."""
        p = self.params
        return ceildiv(p.depth, p.BK) if p.transpose else p.BN // p.BK

    @property
    def strip_bytes(self) -> int:
        """Bytes of a strip in shared memory."""
        return self._strip_rows * self._strip_cols * self.params.dtype.itemsize

    @property
    def matrix_order(self) -> bool:
        """Tells whether every register gets the element that the matrix product needs there."""
        return addresses.in_matrix_order(self.params)

    def fragment_map(self) -> FragmentMap:
        """Contents of a strip's registers: elements of ``[BN, BK]`` (K) or ``[BK, depth]`` (V).

        ValueError unless ``matrix_order``."""
        return addresses.fragment_map(self.params)

    def iterator(self) -> KVCacheIterator:
        """The walk over the first ``num_keys`` keys, in tiles of BN rows that fit this buffer."""
        if self.num_keys is None:
            raise ValueError("num_keys None: give the buffer its number of keys to walk over them")
        return buffer_walk(self.params, self.cache, self.batch_idx, self.head_idx, self.num_keys, self.bounded)

    # Data.

    def load_from_dram(self, strip_idx: int, gmem_tile: TileTensor, active: Array | None = None) -> None:
        """Bring a strip of ``gmem_tile`` into shared memory. Rows past its ``valid_rows`` become zeros.

        gmem_tile : ``[programs]`` of ``BN x depth`` in DRAM, such as the iterator gives.
        active : bool ``[programs]``, whose traffic is counted; those with a valid row unless given."""
        p = self.params
        strip_idx = one_of("strip_idx", strip_idx, self.num_strips, "strips of the tile")
        gmem_tile = fitting_tile("gmem_tile", gmem_tile, p, self.programs, self.bounded)
        if self._accesses is not None:
            self._accesses.copy()
        columns = gmem_tile.shape[1] if gmem_tile.shape[1] < p.depth else None
        if addresses.by_dma(p):
            dma = addresses.streaming_dma_plan(p)
            src, known = dma.sources(gmem_tile, strip_idx, columns)
            dma.loader.load(self._dma_places, src, columns=known)
            issued = dma.by_warp(1, p.num_warps)
        else:
            issued = self._through_registers(strip_idx, gmem_tile, columns)
        valid = valid_keys(gmem_tile)
        self._held = strip_idx, valid
        self._active = valid > 0 if active is None else np.asarray(active, np.bool_)
        if self.traffic is not None:
            rows = np.clip(valid - (0 if p.transpose else strip_idx * p.BK), 0, self._strip_rows)[self._active].sum()
            self.traffic.move("DRAM->SMEM", int(rows) * self._strip_cols * p.dtype.itemsize)
            kind = "dma" if addresses.by_dma(p) else "load"
            self.traffic.issue(f"{p.role} {kind}", issued * int(self._active.sum()))

    def _through_registers(self, strip_idx: int, gmem_tile: TileTensor, columns: int | None) -> Array:
        """A strip to shared memory by way of registers. Loads of each warp ``[warps]``."""
        p, plan = self.params, addresses.register_plan(self.params)
        passes, threads = plan.row.shape
        rows, cols = self._strip_rows, self._strip_cols
        number = (0, strip_idx) if p.transpose else (strip_idx, 0)
        src = sub_tiles(gmem_tile, (rows, cols), *number, part=(int(plan.row.max()) + 1, cols))
        registers = TileTensor.stack_allocation(
            Layout.row_major(passes, p.simd_width), p.dtype, AddressSpace.LOCAL, self.programs, threads=threads
        )
        known = columns if columns is None or not p.transpose else columns - strip_idx * p.BK
        plan.loader.load(registers, src, columns=known)
        address = self.smem_address + plan.offset.T[None] * p.dtype.itemsize
        self.smem.store(address, np.asarray(registers))
        return plan.by_warp(p.num_warps)

    def load_from_shared(self, active: Array | None = None) -> TileTensor:
        """The registers of the strip in shared memory: of each thread ``(num_k_mmas2 * num_mmas) x frag``.

        The whole CTA has waited for the copy. active : as in :meth:`load_from_dram`, whose programs are counted unless
        given."""
        if self._accesses is not None:
            self._accesses.read()
        plan = addresses.read_plan(self.params)
        address = self.smem_address + plan.offset[None] * self.params.dtype.itemsize
        registers = self.smem.load(address, self.params.dtype, plan.width)
        self.kv_mma_op.reg_tile.store(registers.reshape(*registers.shape[:3], -1, 1))
        self._count_read(self._active if active is None else np.asarray(active, np.bool_))
        return self.kv_mma_op.reg_tile

    def get_mma_tile(self, k_mma_idx: int) -> TileTensor:
        """The fragments of a k group, in registers: of each thread ``[programs, threads]`` ``num_mmas x frag``; of
        ``warp_id`` 64 threads."""
        return self.kv_mma_op.mma_tile_at(0, k_mma_idx).select(slice(None), threads_of(self.warp_id))

    def k_smem_block_tile(self, tile_rows: int, tile_row: int) -> TileTensor:
        """Rows ``[tile_row * tile_rows, + tile_rows)`` of the K strip in shared memory, row-major, BK wide."""
        p = self.params
        if not p.transpose:
            raise ValueError("k_smem_block_tile of a V buffer: only the K strip is a BN x BK block")
        if tile_rows < 1 or tile_row < 0 or (tile_row + 1) * tile_rows > p.BN:
            raise ValueError(f"k_smem_block_tile({tile_rows}, {tile_row}) reaches past the {p.BN} rows of the strip")
        return self._k_smem_tile.tile((tile_rows, p.BK), (tile_row, 0), stride_layout=(p.BK, 1))

    @functools.cached_property
    def _k_smem_tile(self) -> TileTensor:
        """The K strip, whose tiles :meth:`k_smem_block_tile` gives."""
        return self.smem_ptr.tile_tensor(self.k_smem_parent_layout)

    @functools.cached_property
    def _dma_places(self) -> TileTensor:
        """What each warp tile of the DMA is copied to."""
        return addresses.streaming_dma_plan(self.params).places(self._k_smem_tile)

    def read_addresses(self) -> tuple[str, np.ndarray[Any, np.dtype[np.int64]]]:
        """The instruction that reads shared memory and its byte addresses ``[instructions, warps, lanes]``."""
        plan, size = addresses.read_plan(self.params), self.params.dtype.itemsize
        return plan.instruction(size), self.smem_address + plan.by_instruction() * size

    def smem_image(self, program: int = 0) -> SmemImage:
        """Contents of the strip of one program."""
        held = None if self._held is None else (self._held[0], int(self._held[1][program]))
        return addresses.smem_image(self.params, self.smem_address, held)

    @functools.cached_property
    def _read_costs(self) -> tuple[tuple[Array, Array, Array], Array]:
        """Passes of a read with and without the swizzle."""
        p = self.params
        return addresses.read_passes(p), addresses.read_passes(p.unswizzled())[0]

    def _count_read(self, active: Array) -> None:
        if self.traffic is None:
            return
        p, programs = self.params, int(active.sum())
        (wavefronts, ideal, instructions), unswizzled = self._read_costs
        self.traffic.access(
            f"{p.role} read", wavefronts=wavefronts * programs, ideal=ideal * programs,
            unswizzled=unswizzled * programs, instructions=instructions * programs,
        )
        nbytes = p.num_threads * self._mma_total_rows * p.input_frag_size * p.dtype.itemsize
        self.traffic.move("SMEM->registers", programs * nbytes)
