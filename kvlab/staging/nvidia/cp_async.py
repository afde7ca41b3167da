"""K and V on sm_80: stages filled by cp.async, swizzled; ldmatrix (K) and ldmatrix.trans (V) to mma.sync fragments."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.layout import TileTensor
from kvlab.staging.max.tiled_mma_op import mma_tiles
from kvlab.staging.tile.copy_plan import TileCopyPlan, copy_plan
from kvlab.staging.tile.fragments import FragmentMap
from kvlab.staging.tile.iterator import valid_keys
from kvlab.staging.tile.shared_access import SharedAccess
from kvlab.staging.tile.smem_image import SmemImage, stage_areas
from kvlab.staging.tile.tile_copies import TileCopies

from .mma_sync_plan import MmaSyncShape
from .nvidia_kv_buffer import NvidiaKVBuffer
from .nvidia_kv_params import WARPS

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


class CpAsyncKVBuffer(NvidiaKVBuffer):
    """The sm_80 counterpart of :class:`~kvlab.staging.KVBuffer`, for all CTAs of a launch; on sm_90 as well.

    A stage holds BN rows of ``padded_depth`` elements as Triton's ``SwizzledSharedLayout`` does. Four warps share the
    keys (K) or the columns (V): warp w has ``32 n + 8 w + 0..7``.

    ``stage_keys`` tells of each loaded stage the first key and the valid rows ``[programs]`` of its tile.

    Parameters
    ----------
    params : the compile-time parameters.
    cache : the K or V cache of a layer.
    batch_idx, head_idx, end : ``[programs]`` or scalars: sequence, KV head, and the exclusive bound of its keys.
    smem, smem_address : shared memory and the byte of the first stage, a multiple of 16; own memory if None.
    traffic : counts what moves.
    hazards : checks the accesses; one of its own if None. Give one that K and V share where they share memory.

    >>> from kvlab.cache import PagedKVCache
    >>> from kvlab.staging import NvidiaKVParams
    >>> params = NvidiaKVParams("bf16", BN=32, depth=64, kv_num_heads=1, transpose=True)
    >>> keys = np.arange(64 * 64).reshape(2, 32, 1, 64).astype(params.dtype)
    >>> cache = PagedKVCache(keys, [63], [[1, 0]], max_seq_length=1, max_cache_length=64)
    >>> k = CpAsyncKVBuffer(params, cache, batch_idx=0, head_idx=0, end=64)
    >>> k.load_from_dram(0)
    >>> k.load_from_dram(1)
    >>> k.wait(1)                                   # the older of the two has landed, in all warps
    >>> k.load_from_shared(0).shape, k.get_mma_tile(3).shape
    ((1, 128, 4, 4), (1, 128, 1, 4))
    >>> bool((k.fragment_map().gather(k.reg_tile)[0] == keys[1, :, 0]).all())
    True
    >>> k.load_from_shared(1)
    Traceback (most recent call last):
        ...
    kvlab.staging.Hazard: shared memory, bytes [4096, 4608): k read by warp 0, stage 1, of what k copy by \
warp 0, stage 1, still brings; cp.async.wait_group in warp 0 leaves 1 in flight, <= 0 needed
    """

    ALIGNMENT, NUM_WARPS = 16, WARPS

    def _begin(self) -> None:
        self._shape, self._active = self.shape(), np.ones(self.programs, np.bool_)
        self.copies = TileCopies(self.smem, self.hazards, self.traffic, self._copied_to)
        self._read = [self._access.footprint(self.hazards, self._moved(s)) for s in range(self.params.num_smem_stages)]
        rows = self.fragment_map().row.shape
        self.reg_tile: Array = np.full((self.programs, *rows[:2], 2 * rows[2]), 0xFF, np.uint8).view(self.params.dtype)

    def shape(self, BM: int = 16) -> MmaSyncShape:
        """The tile of BM query rows whose K or V this is."""
        p = self.params
        return MmaSyncShape(BM, p.BN, p.depth, p.padded_depth, p.dtype, p.arch)

    @property
    def num_mmas(self) -> int:
        """Fragments of a k step that a warp holds: 8 keys (K) or columns (V) each."""
        return (self.params.BN if self.params.transpose else self.params.padded_depth) // (8 * WARPS)

    def fragment_map(self) -> FragmentMap:
        """Contents of the registers: elements of ``[BN, padded_depth]``."""
        return self._shape.fragment_map(self.params.role)

    def operand_map(self, BM: int) -> FragmentMap:
        """The registers of the other operand: Q ``[BM, padded_depth]`` for K, P ``[BM, BN]`` for V."""
        return self.shape(BM).fragment_map("q" if self.params.transpose else "p")

    def output_map(self, BM: int) -> FragmentMap:
        """The accumulator: S ``[BM, BN]`` for K, O ``[BM, padded_depth]`` for V."""
        return self.shape(BM).output_map(self.params.BN if self.params.transpose else self.params.padded_depth)

    def smem_block_tile(self, tile_rows: int, tile_row: int, stage: int) -> TileTensor:
        """Rows ``[tile_row * tile_rows, + tile_rows)`` of a stage as they lie in memory, swizzle and all."""
        return self._block_tile(tile_rows, tile_row, stage, self.params.smem_cols)

    def load_from_dram(self, stage: int, active: Array | None = None) -> None:
        """Begin to bring the next tile of ``kv_cache_iter`` into a stage: one cp.async group, in flight until
        :meth:`wait`. Rows past the last key become zeros. active : ``[programs]`` whose traffic is counted; those with
        a valid row unless given."""
        self.stage_address(stage)
        first_key, tile = self.kv_cache_iter.tile_start_row, self.kv_cache_iter.next_tile()
        keys = valid_keys(tile)
        self._active = keys > 0 if active is None else np.asarray(active, np.bool_)
        self.copies.by_cp_async(self.params.role, tile, stage, str(stage), self._active)
        self.hazards.commit_group()
        self.stage_keys[stage] = first_key, keys

    def wait(self, n: int = 0) -> None:
        """Every warp waits until at most ``n`` groups are in flight (cp.async.wait_group), then all meet (bar.sync)."""
        self.hazards.wait_group(n)
        self.hazards.barrier()

    def release(self) -> None:
        """All warps meet: what they have read may be overwritten."""
        self.hazards.barrier()

    def load_from_shared(self, stage: int) -> Array:
        """Every lane's registers of the tile in a stage: ``[programs, threads, num_mmas * num_k_mmas2, 4]``."""
        p, shift = self.params, self._moved(stage)
        self.hazards.read(self._read[stage], f"{p.role} read", stage)
        self.reg_tile = self._access.load(self.smem, p.dtype, shift).reshape(self.reg_tile.shape)
        self._access.count(self.traffic, f"{p.role} read", int(self._active.sum()))
        return self.reg_tile

    def get_mma_tile(self, k_mma: int) -> Array:
        """The B fragments of a k step: ``[programs, threads, num_mmas, 4]``."""
        return self.reg_tile.reshape(*self.reg_tile.shape[:2], self.num_mmas, -1, 4)[:, :, :, self._step(k_mma)]

    mma_subtile = get_mma_tile

    def mma(self, a: Array, c: Array, k_mma: int) -> Array:
        """``c + a x get_mma_tile(k_mma)``: a ``[programs, threads, (BM/16) * num_k_mmas2, 8]`` by ``operand_map``, c
        float32 by ``output_map``; a new c."""
        threads = a.shape[:2]
        step = a.reshape(*threads, -1, self.params.num_k_mmas2, 8)[:, :, :, k_mma]
        tiles = c.reshape(*threads, step.shape[2], self.num_mmas, 4).swapaxes(2, 3)
        out = mma_tiles(self._shape.atom, step, self.get_mma_tile(k_mma), tiles.reshape(c.shape), swap_a_b=False)
        return out.reshape(*threads, self.num_mmas, -1, 4).swapaxes(2, 3).reshape(c.shape)

    def read_addresses(self, stage: int) -> tuple[str, IntArray]:
        """The instruction that reads a stage, and its byte addresses ``[instructions, warps, lanes]``."""
        return self._access.name, self._moved(stage) + self._access.address

    def smem_image(self, program: int = 0) -> SmemImage:
        """Contents of the stages of one program, as far as this buffer has loaded them."""
        p = self.params
        areas = stage_areas(self.stage_keys, p.num_smem_stages, p.stage_bytes, self.smem_address, program)
        image = SmemImage.empty(self.smem_address, p.num_smem_stages * p.stage_bytes, areas)
        for stage, (_, valid) in self.stage_keys.items():
            plan, address = self._copied_to(str(stage))
            slot, row = (address - self.smem_address) // 16, np.where(plan.inside, plan.row, p.BN)
            image.put(slot, row, plan.byte // 16, int(valid[program]))
        return image

    @property
    def _access(self) -> SharedAccess:
        return self._shape.access(self.params.role)

    def _moved(self, stage: int) -> int:
        """From the tile's place in the decode CTA to the stage."""
        return self.stage_address(stage) - self._shape.place(self.params.role).base

    def _copied_to(self, stage: str) -> tuple[TileCopyPlan, IntArray]:
        """The plan of a stage's tile, and where each of its vectors lands."""
        p, place = self.params, self._shape.place(self.params.role)
        plan = copy_plan(p.BN, place.row_bytes, p.depth * p.dtype.itemsize, WARPS)
        return plan, self._moved(int(stage)) + place.address(plan.row, plan.byte // 16)
