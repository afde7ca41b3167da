"""MAX's DecodeKVBuffer on gfx950: tiles of K or V from DRAM through registers to shared memory, and to fragments."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from kvlab.cache import KVCacheT, MHAOperand, as_operand
from kvlab.common.checks import one_of
from kvlab.common.drawn import Drawn
from kvlab.layout import Layout, TileTensor
from kvlab.memory import AddressSpace, Memory
from kvlab.staging.max import decode_kv_addresses as addresses
from kvlab.staging.record.footprint import Footprint
from kvlab.staging.record.hazards import Hazards
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import FragmentMap
from kvlab.staging.tile.iterator import KVCacheIterator, sub_tiles, valid_keys
from kvlab.staging.tile.member import Member
from kvlab.staging.tile.smem_image import SmemImage
from kvlab.staging.tile.smem_place import own_or_given, placed

from .buffer_config import KVBufferConfig
from .decode_kv_params import DecodeKVBufferParams
from .typed_fields import of_type

Array = np.ndarray[Any, Any]


class DecodeKVBuffer(Drawn):
    """MAX's ``DecodeKVBuffer`` for all CTAs of a launch.

    Parameters
    ----------
    params : the compile-time parameters. Their derived members are the buffer's, too.
    cache : the K or V cache of a layer, or another :class:`~kvlab.cache.MHAOperand`.
    batch_idx, head_idx, end : ``[programs]`` or scalars: sequence, KV head, and the exclusive bound of its keys.
    smem : shared memory with ``programs`` programs; one of exactly a block tile is made if None.
    start : first key of the window, ``[programs]`` or a scalar.
    smem_address : byte address of the block tile, a multiple of 16; the memory's first byte unless given.
    traffic : counts what moves: bytes, instructions, wavefronts; of each warp and in all.
    hazards : checks the accesses to shared memory; who owns the buffer states its barriers. None: nothing is checked.

    The window in DRAM, ``BN x depth`` keys from ``start`` on, is fixed. A load takes its next block tile, strips of BK
    columns (K) or BK keys (V), into the next stage of the register ring ``load_tile``, ``load_rows x simd_width``
    registers of each thread; what was never loaded cannot be read. Some configurations do not bring the matrix to the
    lanes (``matrix_order`` is False): MAX's addresses are reproduced, and a UserWarning says what works instead.
    Wavefronts are provisional: no chip has confirmed the AMD rule.

    >>> from kvlab.cache import PagedKVCache
    >>> from kvlab.staging import TiledTensorCore
    >>> core = TiledTensorCore("fp32", "bf16", (16, 16, 32), group_size=1, transpose_b=True)
    >>> params = DecodeKVBufferParams("bf16", Layout.row_major(128, 64), core, None, BN=128, WN=32, BK=32, depth=64,
    ...                               num_threads=256, num_stages=2)
    >>> keys = np.arange(128 * 64).reshape(1, 128, 1, 64).astype(params.dtype)
    >>> k = KBuffer(params, PagedKVCache(keys, [99], [[0]], 1, 100), batch_idx=0, head_idx=0, end=100)
    >>> k.load_from_dram()
    >>> k.load_from_dram()
    >>> k.copy_to_shared(1)
    >>> k.load_from_shared(0)  # mma_tile
    TileTensor(bfloat16, (2,8):(8,1), offset [1, 256], local, 1 programs)
    >>> strip = k.fragment_map().gather(k.mma_tile)
    >>> bool((strip[0, :100] == keys[0, :100, 0, 32:]).all()), bool((strip[0, 100:] == 0).all())
    (True, True)
    """

    # MAX's members: those of the parameters.
    MMA_N = Member[int]()
    MMA_K = Member[int]()
    num_warps_n = Member[int]()
    num_mmas = Member[int]()
    num_k_tiles = Member[int]()
    simd_width = Member[int]()
    _rows_per_stage = Member[int]()
    _load_rows = Member[int]()
    load_layout = Member[Layout]()
    mma_layout = Member[Layout]()
    smem_layout = Member[Layout]()
    wtile_dim0 = Member[int]("config")
    wtile_dim1 = Member[int]("config")
    wsize = Member[int]("config")
    iterator_axis = Member[int]("config")
    _btile_dim0 = Member[int]("config")
    _btile_dim1 = Member[int]("config")

    def __init__(
        self, params: DecodeKVBufferParams, cache: KVCacheT | MHAOperand, batch_idx: Any, head_idx: Any,
        smem: Memory | None = None, end: Any = None, *, start: Any = 0, smem_address: int | None = None,
        traffic: Traffic | None = None, hazards: Hazards | None = None,
    ) -> None:
        p = of_type(params, DecodeKVBufferParams)
        operand = as_operand(cache)
        if operand.dtype.itemsize != p.dtype.itemsize:
            raise ValueError(f"dtype {p.dtype} has another size than the cache's {operand.dtype}")
        if end is None:
            raise ValueError("end None: give the buffer the number of keys, the bound of its window")
        self.params, self.traffic, self.hazards = p, traffic, hazards
        self._footprints: dict[int | None, Footprint] = {}
        walk = KVCacheIterator(
            operand, p.BN, batch_idx, head_idx, end, depth=p.depth, head_dim_offset=p.head_dim_offset
        )
        if walk.row_stride != p.kv_tile_layout.stride[0]:
            raise ValueError(
                f"kv_tile_layout {p.kv_tile_layout} has rows {p.kv_tile_layout.stride[0]} elements apart, the cache "
                f"{walk.row_stride}"
            )
        walk.tile_start_row = start
        self.gmem_tile = walk.next_tile()
        self._valid = valid_keys(self.gmem_tile)
        self.programs = len(self._valid)
        nbytes = int(np.prod(p.btile)) * p.dtype.itemsize
        self.smem = own_or_given(smem, nbytes, self.programs, "batch_idx, head_idx and end")
        self.smem_address = placed(self.smem, smem_address, nbytes, "a tile")
        first = (self.smem_address - self.smem.base) // p.dtype.itemsize
        self.smem_tile = TileTensor(self.smem, p.dtype, p.smem_layout, first)
        self.load_tile, self.mma_tile = (
            TileTensor.stack_allocation(layout, p.dtype, AddressSpace.LOCAL, self.programs, threads=p.num_threads)
            for layout in (p.load_layout, p.mma_layout)
        )
        self.tile_idx = self.load_tile_id = 0
        self._ring: dict[int, int] = {}  # stage of the register ring -> block tile
        self._held: int | None = None  # block tile in shared memory
        self._active = self._valid > 0
        if not self.matrix_order:
            warnings.warn(
                f"{p.role.upper()} buffer with {p.mma_shape}, group_size {p.group_size}, BK {p.BK}, {p.swizzle}, "
                f"{p.num_threads} threads: as in MAX the lanes do not get the elements of the matrix; "
                f"{addresses.what_works(p)}",
                stacklevel=2 if type(self) is DecodeKVBuffer else 3,
            )

    @property
    def config(self) -> KVBufferConfig:
        """Sizes that the role decides."""
        return self.params.role_config

    @property
    def _thread_rows(self) -> int:
        return self.params.thread_grid[0]

    @property
    def _thread_cols(self) -> int:
        return self.params.thread_grid[1]

    # kvlab's own.

    @property
    def num_tiles(self) -> int:
        """Block tiles in the window."""
        p = self.params
        return -(-(p.depth if self.iterator_axis else p.BN) // p.BK)

    @property
    def matrix_order(self) -> bool:
        """Tells whether every register gets the element that the matrix product needs there."""
        return addresses.in_matrix_order(self.params)

    def fragment_map(self) -> FragmentMap:
        """Contents of ``mma_tile`` after each k group, one after the other along the registers: elements of ``[BN,
        BK]`` (K) or ``[BK, depth]`` (V). ValueError unless ``matrix_order``."""
        if not self.matrix_order:
            raise ValueError(
                f"{self.params} does not bring the matrix to the lanes; {addresses.what_works(self.params)}"
            )
        return addresses.fragment_map(self.params)

    # Data.

    def load_from_dram(self) -> None:
        """Bring block tile ``tile_idx`` of the window into stage ``load_tile_id`` of the register ring; both move on.

        Keys that do not exist are zeros. Past the window V is zeros, K goes on into what follows in DRAM."""
        p = self.params
        number = (0, self.tile_idx) if self.iterator_axis else (self.tile_idx, 0)
        dst = self._copied_by_threads(self.load_tile_id)
        if p.vectors_per_stage:
            src = sub_tiles(self.gmem_tile, p.btile, *number, part=p.copied)
            p.loader.load(dst, src)
        self._ring[self.load_tile_id] = self.tile_idx
        self.tile_idx += 1
        self.load_tile_id = (self.load_tile_id + 1) % p.num_stages
        if self.traffic is not None and p.vectors_per_stage:
            arrived = p.loader.arrives(dst, src)[self._active].sum(axis=(0, 2))  # [threads of the grid]
            fetched = np.zeros(p.num_threads, np.int64)
            fetched[: len(arrived)] = 16 * arrived
            self.traffic.move("DRAM->registers", fetched.reshape(p.num_warps, -1).sum(axis=1))
            waves = np.arange(p.num_warps) * 64 < len(arrived)
            self.traffic.issue(f"{p.role} load", waves * p.vectors_per_stage * int(self._active.sum()))

    def _copied_by_threads(self, stage: int) -> TileTensor:
        """The registers of a stage that a load fills, of the threads of the grid."""
        p, first = self.params, stage * self.params.rows_per_stage
        threads = self.load_tile.select(slice(None), slice(int(np.prod(p.thread_grid))))
        registers: TileTensor = threads[first : first + p.vectors_per_stage, :]
        return registers

    def copy_to_shared(self, stage: int = 0) -> None:
        """Write a stage of the register ring to the block tile in shared memory."""
        p = self.params
        stage = one_of("stage", stage, p.num_stages, "stages of the register ring")
        if p.vectors_per_stage:
            if self.hazards is not None:
                self.hazards.write(self._footprint(None), f"{p.role} write", 0)
            rows, cols = p.copied
            p.writer.store(self.smem_tile[:rows, :cols], self._copied_by_threads(stage))
        self._held = self._ring.get(stage)
        if self.traffic is not None:
            self._count("write", addresses.write_passes, ())
            moved = addresses.written_offsets(p).size * 16
            self.traffic.move("registers->SMEM", moved * int(self._active.sum()))

    def load_from_shared(self, k_mma_idx: int) -> TileTensor:
        """``mma_tile`` after loading a k group of the tile in shared memory. The whole CTA has waited for the copy.
        Elements past a fragment of K keep what they held."""
        p = self.params
        k_mma_idx = one_of("k_mma_idx", k_mma_idx, p.num_k_tiles, "k groups of a strip")
        offset, width = addresses.read_offsets(p, k_mma_idx), p.elements if p.transpose else 1
        address = self.smem_address + offset[None, ..., ::width] * p.dtype.itemsize
        if self.hazards is not None:
            self.hazards.read(self._footprint(k_mma_idx), f"{p.role} read", 0)
        values = self.smem.load(address, p.dtype, width)
        self.mma_tile[:, : p.elements].store(values.reshape(*values.shape[:3], -1, 1))
        if self.traffic is not None:
            self._count("read", addresses.read_passes, (k_mma_idx,))
            self.traffic.move("SMEM->registers", offset.size * p.dtype.itemsize * int(self._active.sum()))
        return self.mma_tile

    def read_addresses(self, k_mma: int) -> tuple[str, np.ndarray[Any, np.dtype[np.int64]]]:
        """The instruction that reads a k group, and its byte addresses ``[instructions, warps, lanes]``."""
        p, width = self.params, self.params.elements if self.params.transpose else 1
        offset = addresses.read_offsets(p, k_mma)[..., ::width].reshape(p.num_warps, 64, -1)
        nbytes = width * p.dtype.itemsize
        name = f"ds_read_u{8 * nbytes}" if nbytes < 4 else f"ds_read_b{8 * nbytes}"
        return name, self.smem_address + np.moveaxis(offset, 2, 0) * p.dtype.itemsize

    def smem_image(self, program: int = 0) -> SmemImage:
        """Contents of the block tile of one program."""
        valid = int(self._valid[program])
        return addresses.smem_image(self.params, self.smem_address, self._held, valid)

    def mma(self, a: TileTensor, c: TileTensor, swap_a_b: bool = False) -> None:
        """Add ``A[m] * B[n]`` to ``c[m + n * num_m_mmas]``, with B = ``mma_tile``, as :meth:`KVMmaOp.mma`.

        a : ``num_m_mmas x (group_size * frag)`` in registers: ``group_size`` instructions take their parts of it."""
        self.params.tensor_core_mma.mma(a, self.mma_tile, c, swap_a_b)

    def _footprint(self, k_mma: int | None) -> Footprint:
        """The bytes that each warp reads of a k group, or writes (None)."""
        if k_mma not in self._footprints:
            assert self.hazards is not None
            p, width = self.params, 16
            if k_mma is None:
                offset = addresses.written_offsets(p)
            else:
                elements = p.elements if p.transpose else 1
                offset, width = addresses.read_offsets(p, k_mma)[..., ::elements], elements * p.dtype.itemsize
            address = self.smem_address + offset * p.dtype.itemsize
            warp = np.arange(len(offset)).reshape(-1, *[1] * (offset.ndim - 1)) // 64
            self._footprints[k_mma] = self.hazards.footprint_inside(address, width, warp)
        return self._footprints[k_mma]

    def _count(self, what: str, passes: Any, where: tuple[int, ...]) -> None:
        assert self.traffic is not None
        p, programs = self.params, int(self._active.sum())
        wavefronts, ideal, instructions = passes(p, *where, self.smem_address)
        unswizzled, _, _ = passes(p.unswizzled(), *where, self.smem_address)
        self.traffic.access(
            f"{p.role} {what}", wavefronts=wavefronts * programs, ideal=ideal * programs,
            unswizzled=unswizzled * programs, instructions=instructions * programs,
        )


class KBuffer(DecodeKVBuffer):
    """``DecodeKVBuffer`` in the role of K: strips of BK columns, a warp reads its WN keys.

    >>> issubclass(KBuffer, DecodeKVBuffer)
    True
    """

    def __init__(self, params: DecodeKVBufferParams, *args: Any, **kwargs: Any) -> None:
        if not of_type(params, DecodeKVBufferParams).transpose:
            raise ValueError("KBuffer: tensor_core_mma with transpose_b False is V; use VBuffer")
        super().__init__(params, *args, **kwargs)


class VBuffer(DecodeKVBuffer):
    """``DecodeKVBuffer`` in the role of V: strips of BK keys, a warp reads its share of the depth.

    >>> issubclass(VBuffer, DecodeKVBuffer)
    True
    """

    def __init__(self, params: DecodeKVBufferParams, *args: Any, **kwargs: Any) -> None:
        if of_type(params, DecodeKVBufferParams).transpose:
            raise ValueError("VBuffer: tensor_core_mma with transpose_b True is K; use KBuffer")
        super().__init__(params, *args, **kwargs)
