"""MAX's KVBuffer on gfx950: stages of whole tiles of K or V, DRAM -> shared memory by DMA -> registers.

MAX's module of this name has the other structures of its KV buffers, too."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np

from kvlab.cache import KVCacheT, MHAOperand, UnsafePointer
from kvlab.common.checks import one_of
from kvlab.common.drawn import Drawn
from kvlab.layout import TileTensor
from kvlab.staging.max import kv_buffer_addresses as addresses
from kvlab.staging.record.hazards import Hazards
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import FragmentMap
from kvlab.staging.tile.iterator import GivenTile, KVCacheIterator, buffer_walk, fitting_tile, valid_keys
from kvlab.staging.tile.member import KVBufferMembers
from kvlab.staging.tile.smem_image import SmemImage
from kvlab.staging.tile.smem_place import one_warp, own_or_given, shared_tile, threads_of

# What MAX's module of this name holds besides, under its names.
from .buffer_config import KBufferConfig as KBufferConfig
from .buffer_config import KVBufferConfig as KVBufferConfig
from .buffer_config import VBufferConfig as VBufferConfig
from .decode_kv_buffer import DecodeKVBuffer as DecodeKVBuffer
from .decode_kv_buffer import KBuffer as KBuffer
from .decode_kv_buffer import VBuffer as VBuffer
from .decode_streaming import DecodeStreamingKVBuffer as DecodeStreamingKVBuffer
from .kv_buffer_addresses import Window
from .kv_mma_op import KVMmaOp, KVMmaOpParams
from .params import KVBufferParams
from .stage_accesses import StageAccesses
from .typed_fields import of_type

Array = np.ndarray[Any, Any]


class KVBuffer(KVBufferMembers, Drawn):
    """MAX's ``KVBuffer`` for all CTAs of a launch: prefill, and decode of MHA and MLA.

    Parameters
    ----------
    params : the compile-time parameters. Their derived members are the buffer's, too.
    k_cache : the K or V cache of a layer, or another :class:`~kvlab.cache.MHAOperand`.
    batch_idx, head_idx, end : ``[programs]`` or scalars: sequence, KV head, and the exclusive bound of its keys.
    smem_tile : the stages, ``params.smem_tile(memory, address)`` in shared memory with ``programs`` programs; memory of
        exactly all stages is made if None.
    warp_id : the warp whose registers :meth:`get_mma_tile` gives, an int; those of all warps if None. All warps load.
    traffic : counts what moves: bytes, instructions, wavefronts; of each warp and in all.
    bounded : columns past the cache's head are zeros, a kvlab extension; ValueError otherwise if ``depth`` is more.
    hazards : checks the accesses; who owns the buffer states its waits and barriers. None: nothing is checked.

    ``kv_cache_iter`` walks over the keys; every load takes its next tile. ``stage_keys`` tells of each loaded stage the
    first key and the valid rows ``[programs]`` of its tile. Some configurations do not bring the matrix to the lanes
    (``matrix_order`` is False): MAX's addresses are reproduced, and a UserWarning says what works instead.
    Wavefronts are provisional: no chip has confirmed the AMD rule.

    >>> from kvlab.cache import PagedKVCache
    >>> from kvlab.layout import Swizzle
    >>> params = KVBufferParams("bf16", (32, 32, 16), Swizzle(3, 0, 4, "vector"), BN=64, WN=64, BK=32, num_threads=256,
    ...                         depth=128, kv_num_heads=1, transpose=True)
    >>> keys = np.arange(2 * 64 * 128).reshape(2, 64, 1, 128).astype(params.dtype)
    >>> cache = PagedKVCache(keys, [99], [[1, 0]], max_seq_length=1, max_cache_length=100)
    >>> k = KVBuffer(params, cache, batch_idx=0, head_idx=0, end=100)
    >>> k.load_from_dram(0)
    >>> k.load_from_dram(1)
    >>> k.load_from_shared(0)  # registers
    TileTensor(bfloat16, (16,8):(8,1), offset [1, 256], local, 1 programs)
    >>> k.get_mma_tile(1, bk_tile_idx=2)  # of one k group
    TileTensor(bfloat16, (2,8):(8,1), offset [1, 256], local, 1 programs)
    >>> strip = k.fragment_map().gather(k.strip_tile(2))
    >>> bool((strip[0] == keys[1, :, 0, 64:96]).all())
    True
    """

    def __init__(
        self, params: KVBufferParams, k_cache: KVCacheT | MHAOperand, batch_idx: Any, head_idx: Any,
        smem_tile: TileTensor | None = None, *, end: Any, warp_id: int | None = None, traffic: Traffic | None = None,
        hazards: Hazards | None = None, bounded: bool = False,
    ) -> None:
        addresses.check(of_type(params, KVBufferParams))
        walk = buffer_walk(params, k_cache, batch_idx, head_idx, end, bounded)
        self.params, self.cache, self.traffic, self.bounded = params, k_cache, traffic, bounded
        self.warp_id = one_warp(warp_id, params.num_warps)
        self.kv_cache_iter: KVCacheIterator | GivenTile = walk
        self.batch_idx, self.head_idx, self.end = walk.batch_idx, walk.kv_head_idx, walk.end
        self.programs = self.batch_idx.shape[0]
        nbytes = params.num_smem_stages * params.smem_stage_size * params.dtype.itemsize
        if smem_tile is None:
            smem_tile = params.smem_tile(own_or_given(None, nbytes, self.programs, "batch_idx, head_idx and end"))
        self.smem, self.smem_address = shared_tile(smem_tile, params, self.programs)
        self.smem_tile = smem_tile
        self.kv_mma_op = KVMmaOp(self.KVMmaOpType, programs=self.programs, num_threads=params.num_threads)
        self._active: Array = np.ones(self.programs, np.bool_)
        self.stage_keys: dict[int, tuple[Array, Array]] = {}
        self._blocks: dict[int, int] = {}  # the block in each stage, of loads block by block
        self._tile: Any = None  # which they bring
        self._next_block = 0
        self._columns: int | None = None  # of the tiles, where those past them are zeros
        self.hazards = hazards
        self._warn()

    def _warn(self) -> None:
        p = self.params
        what = f"{p.role.upper()} buffer with {p.mma_shape}, BN {p.BN}, BK {p.BK}, depth {p.depth}, {p.swizzle}"
        if not p.full_kv and not p.block_by_block and p.smem_depth > p.bk_smem:
            warnings.warn(
                f"{what}: as in MAX a stage of full_kv=False holds columns [0, {p.bk_smem}) only, of one key tile "
                f'after the other; full_kv=True holds all, follows="document" brings block after block',
                stacklevel=4,
            )
        if not self.matrix_order:
            warnings.warn(
                f"{what}: as in MAX the lanes do not get the elements of the matrix; "
                f"{addresses.what_works(p, self._window.source)}",
                stacklevel=4,
            )

    @property
    def KVMmaOpType(self) -> KVMmaOpParams:
        """The type of ``kv_mma_op``: what is known of it at compile time."""
        return KVMmaOpParams.of(self.params)

    # kvlab's own.

    @property
    def matrix_order(self) -> bool:
        """Tells whether every register gets the element that the matrix product needs there. Elements past ``depth`` in
        the last strip of K do not count: :meth:`zero_partial_tile_pad` makes them zeros."""
        return addresses.in_matrix_order(self.params, self._window)

    def fragment_map(self) -> FragmentMap:
        """Contents of any strip's registers: elements of ``[BN, BK]`` (K) or ``[BK, depth]`` (V).

        ValueError unless ``matrix_order``."""
        if not self.matrix_order:
            works = addresses.what_works(self.params, self._window.source)
            raise ValueError(f"{self.params} does not bring the matrix to the lanes; {works}")
        return addresses.fragment_map(self.params, self._window)

    @functools.cached_property
    def _accesses(self) -> StageAccesses | None:
        if self.hazards is None:
            return None
        return StageAccesses(self.hazards, self.params, self._window, self.smem_address, self._first_stage)

    _first_stage = 0  # what messages call stage 0

    @property
    def _window(self) -> Window:
        """What the warps read: all of a stage that this buffer has loaded."""
        none = (0,) * self.params.num_warps
        return Window(self.params, none, none)

    # Data.

    def load_from_dram(self, buffer_idx: int, active: Array | None = None) -> None:
        """Bring the next tile of ``kv_cache_iter`` into stage ``buffer_idx``. Rows past the last key become zeros.

        Of ``params.block_by_block`` its next block, and the next tile after the last one.

        active : bool ``[programs]``, whose traffic is counted; those with a valid row unless given."""
        p, dma = self.params, addresses.kv_buffer_dma_plan(self.params)
        buffer_idx = one_of("buffer_idx", buffer_idx, p.num_smem_stages, "stages")
        if not self._next_block:
            first_key, tile = self.kv_cache_iter.tile_start_row, self.kv_cache_iter.next_tile()
            tile = fitting_tile("the tile of kv_cache_iter", tile, p, self.programs, self.bounded)
            self._tile = first_key, tile
        (first_key, gmem_tile), block = self._tile, self._next_block
        self._next_block = (block + 1) % p.num_repeats if p.block_by_block else 0
        self._blocks[buffer_idx] = block
        self._columns = gmem_tile.shape[1] if self.bounded else None
        if self._accesses is not None:
            self._accesses.copy(buffer_idx)
        dst, (src, columns) = self._dma_places[buffer_idx], dma.sources(gmem_tile, block, self._columns)
        dma.loader.load(dst, src, columns=columns)
        self.stage_keys.pop(buffer_idx, None)  # the last load stands last
        keys = valid_keys(gmem_tile)
        self.stage_keys[buffer_idx] = first_key, keys
        self._active = keys > 0 if active is None else np.asarray(active, np.bool_)
        if self.traffic is not None:
            fetched = 16 * dma.loader.arrives(dst, src, columns=columns)[self._active].sum(axis=(0, 3)).reshape(-1)
            self.traffic.move("DRAM->SMEM", dma.by_warp(fetched, p.num_warps))
            self.traffic.issue(f"{p.role} dma", dma.by_warp(int(self._active.sum()), p.num_warps))

    def load_from_shared(self, buffer: int, bk_tile: int | None = None, active: Array | None = None) -> TileTensor:
        """The register tile, of each thread ``mma_total_rows x frag``, after loading from stage ``buffer``.

        All strips, which the register tile has to hold (ValueError); or one, ``bk_tile``, into slot
        ``bk_tile % reg_num_k_tiles``: the others keep what they held. The whole CTA has waited for the copy. active :
        as in :meth:`load_from_dram`, whose programs are counted unless given."""
        p, held = self.params, addresses.strips(self.params)
        buffer = one_of("buffer", buffer, p.num_smem_stages, "stages")
        first = self.stage_address(buffer)
        if bk_tile is None and (p.reg_num_k_tiles != p.num_k_tiles or held != p.num_k_tiles):
            raise ValueError(
                f"load_from_shared of all {p.num_k_tiles} strips: the register tile holds {p.reg_num_k_tiles}, a stage "
                f"{held}; load them one by one with bk_tile="
            )
        place = None if bk_tile is None else self._place(buffer, bk_tile)
        if self._accesses is not None:
            self._accesses.read(buffer, place)
        if bk_tile is not None and place is not None:
            self._load_strip(buffer, bk_tile, place)
        else:
            for strip in range(p.num_k_tiles):
                self._load_strip(buffer, strip, strip)
        if self.traffic is not None:
            self._count_read(place, first, self._active if active is None else np.asarray(active, np.bool_))
        return self.kv_mma_op.reg_tile

    def _place(self, buffer: int, bk_tile: int) -> int:
        """Which strip of a stage is strip ``bk_tile`` of the tile; ValueError if none."""
        held = addresses.strips(self.params)
        if self.params.block_by_block and self.params.transpose and held:
            if self._blocks.get(buffer) != bk_tile:
                raise ValueError(f"bk_tile is {bk_tile}: must be in stage {buffer}: {self._blocks.get(buffer)}")
            return 0
        return one_of("bk_tile", bk_tile, held, "strips in a stage")

    def _load_strip(self, buffer: int, bk_tile: int, place: int) -> None:
        """``place``: which strip of the stage it is."""
        p, op = self.params, self.kv_mma_op
        if not p.transpose:
            stage = (self.stage_address(buffer) - self.smem.base) // p.dtype.itemsize
            smem_base = UnsafePointer(self.smem, stage + np.array(self._window.shift), p.dtype)
            (op.load_v_bf16 if p.dtype.itemsize == 2 else op.load_v_fp8_strip)(bk_tile, smem_base)
            return
        blocks = self._k_tiles[buffer * p.blocks_per_stage :]
        if not addresses.is_split(p):
            op.load_prefill(bk_tile, warp_smem=blocks[place])
            return
        lo, has_hi = 2 * place, not addresses.lacks_upper_half(p, place)
        op.load_prefill_split(bk_tile, blocks[lo], blocks[lo + 1 if has_hi else lo], has_hi)

    def zero_partial_tile_pad(self) -> None:
        """Zero the elements past ``depth`` in the last strip of K, in every lane, if ``BK`` does not divide it.

        Needed where the block is as wide as the strip: its columns past ``depth`` are what follows in DRAM. ValueError
        if they are less than half a strip, and unless ``matrix_order``."""
        p = self.params
        if not p.transpose:
            raise ValueError("zero_partial_tile_pad of a V buffer: only strips of K end inside the depth")
        valid_cols = p.depth % p.BK
        if valid_cols > p.BK // 2:
            raise ValueError(f"depth {p.depth} leaves {valid_cols} columns, must leave at most BK / 2 = {p.BK // 2}")
        if valid_cols:
            strip = self.kv_mma_op.strip_tile(p.num_k_tiles - 1)
            registers = np.array(strip)
            registers[:, self.fragment_map().col >= valid_cols] = 0
            strip.store(registers[..., None])

    def get_mma_tile(self, k_mma_tile_idx: int, bk_tile_idx: int) -> TileTensor:
        """The fragments of a k group of a strip, in registers: of each thread ``[programs, threads]`` ``num_mmas x
        frag``; of ``warp_id`` 64 threads. ValueError for a strip or a k group that the tile has not."""
        strip = one_of("bk_tile_idx", bk_tile_idx, self.params.num_k_tiles, "strips of the tile")
        tile = self.kv_mma_op.mma_tile_at(strip, k_mma_tile_idx)
        return tile.select(slice(None), threads_of(self.warp_id))

    mma_subtile = get_mma_tile

    def strip_tile(self, bk_tile: int) -> TileTensor:
        """All fragments of a strip: of each thread ``(num_k_mmas2 * num_mmas) x frag``."""
        return self.kv_mma_op.strip_tile(bk_tile)

    def smem_block_tile(self, tile_rows: int, tile_row: int, block_col: int) -> TileTensor:
        """Rows ``[tile_row * tile_rows, + tile_rows)`` of block ``block_col``, row-major, ``bk_smem`` wide.

        Blocks are counted over all stages."""
        p = self.params
        blocks = p.num_smem_stages * p.blocks_per_stage
        if tile_rows < 1 or tile_row < 0 or (tile_row + 1) * tile_rows > p.BN or not 0 <= block_col < blocks:
            raise ValueError(
                f"smem_block_tile({tile_rows}, {tile_row}, {block_col}) is not in the {blocks} blocks of {p.BN} rows"
            )
        return self._block_tile(tile_rows, tile_row, block_col)

    def _block_tile(self, tile_rows: int, tile_row: Any, block_col: Any) -> TileTensor:
        """A view of ``smem_tile``; the coordinates are ints, or int arrays over the leading axes of the offset."""
        p = self.params
        strides = p.smem_tile_strides
        return self.smem_tile.tile((tile_rows, p.bk_smem), (tile_row, block_col), stride_layout=strides)

    @functools.cached_property
    def _k_tiles(self) -> list[TileTensor]:
        """Of each block of all stages what each warp reads of K, its WN keys: ``[1, warps]``."""
        p, warp = self.params, self.params.warp_col()[None]
        return [self._block_tile(p.WN, warp, block) for block in range(p.num_smem_stages * p.blocks_per_stage)]

    @functools.cached_property
    def _dma_places(self) -> list[TileTensor]:
        """Of each stage what each warp tile of the DMA is copied to."""
        p, dma = self.params, addresses.kv_buffer_dma_plan(self.params)
        return [dma.places(self.smem_tile, stage * p.blocks_per_stage) for stage in range(p.num_smem_stages)]

    def stage_address(self, stage: int) -> int:
        """Byte address of a stage."""
        p = self.params
        stage = one_of("stage", stage, p.num_smem_stages, "stages")
        return self.smem_address + stage * p.smem_stage_size * p.dtype.itemsize

    def read_addresses(self, buffer: int, bk_tile: int) -> tuple[str, np.ndarray[Any, np.dtype[np.int64]]]:
        """The instruction that reads a strip of a stage, and its byte addresses ``[instructions, warps, lanes]``."""
        size, first = self.params.dtype.itemsize, self.stage_address(buffer)
        parts = addresses.reads(self.params, self._place(buffer, bk_tile), self._window.shift)
        where = [first + (part.offset[:, None] + part.base[:, None]) * size for part in parts]
        return parts[0].instruction, np.concatenate(where)

    def smem_image(self, program: int = 0) -> SmemImage:
        """Contents of the stages of one program, as far as this buffer has loaded them."""
        p, first = self.params, {stage: block * self.params.bk_smem for stage, block in self._blocks.items()}
        return addresses.smem_image(p, self.smem_address, self.stage_keys, program, self._columns, first)

    def _count_read(self, strip: int | None, first: int, active: Array) -> None:
        assert self.traffic is not None
        p, programs = self.params, int(active.sum())
        if (strip, first) not in self._read_costs:
            self._read_costs[strip, first] = self._read_cost(strip, first)
        wavefronts, ideal, unswizzled, instructions = self._read_costs[strip, first] * programs
        self.traffic.access(
            f"{p.role} read", wavefronts=wavefronts, ideal=ideal, unswizzled=unswizzled, instructions=instructions
        )
        self.traffic.move("SMEM->registers", 64 * (16 if p.transpose else 8) * instructions)

    @functools.cached_property
    def _read_costs(self) -> dict[tuple[int | None, int], Array]:
        return {}

    def _read_cost(self, strip: int | None, first: int) -> Array:
        """Wavefronts, ideal, those without the swizzle, and instructions: ``[4, warps]``, of a strip or of all."""
        p, total = self.params, np.zeros((4, self.params.num_warps), np.int64)
        base = tuple(first + shift * p.dtype.itemsize for shift in self._window.shift)
        for one in range(p.num_k_tiles) if strip is None else (strip,):
            wavefronts, ideal, instructions = addresses.read_passes(p, one, base)
            unswizzled, _, _ = addresses.read_passes(p.unswizzled(), one, base)
            total += np.stack([wavefronts, ideal, unswizzled, instructions])
        return total
