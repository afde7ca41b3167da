"""K and V on sm_80: stages filled by cp.async, swizzled; ldmatrix (K) and ldmatrix.trans (V) to mma.sync fragments."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.cache import PagedKVCache
from kvlab.hardware import cp_async, ldmatrix
from kvlab.layout import Layout, TileTensor
from kvlab.memory import Memory
from kvlab.staging.max.tiled_mma_op import mma_tiles
from kvlab.staging.record.footprint import Footprint
from kvlab.staging.record.hazards import Hazards
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.copy_plan import TileCopyPlan, copy_plan
from kvlab.staging.tile.fragments import FragmentMap
from kvlab.staging.tile.iterator import fitting_operand, valid_keys
from kvlab.staging.tile.smem_image import SmemImage, stage_areas

from .kv_buffer import NvidiaKVBuffer
from .mma_sync_plan import WARPS, MmaSyncShape, SharedAccess
from .params import NvidiaKVParams

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

    def __init__(
        self,
        params: NvidiaKVParams,
        cache: PagedKVCache,
        batch_idx: Any,
        head_idx: Any,
        end: Any,
        smem: Memory | None = None,
        *,
        smem_address: int | None = None,
        traffic: Traffic | None = None,
        hazards: Hazards | None = None,
    ) -> None:
        fitting_operand(params, cache)
        super().__init__(params, cache, batch_idx, head_idx, end, smem, smem_address, traffic)
        nbytes = params.num_smem_stages * params.stage_bytes
        smem = self.smem
        first = self.smem_address - smem.base
        if self.smem_address % 16 or first < 0 or first + nbytes > smem.nbytes:
            raise ValueError(
                f"smem_address {self.smem_address}: {params.num_smem_stages} stages of {params.stage_bytes} bytes on a "
                f"multiple of 16 do not fit in [{smem.base}, {smem.base + smem.nbytes}) of {smem.name}"
            )
        self.hazards = hazards or Hazards(smem, WARPS, arch=params.arch, timeline=self.traffic.timeline)
        self._shape = self.shape()
        self._active: Array = np.ones(self.programs, np.bool_)
        rows = self.fragment_map().row.shape
        self.reg_tile: Array = np.full((self.programs, *rows[:2], 2 * rows[2]), 0xFF, np.uint8).view(params.dtype)

    def shape(self, BM: int = 16) -> MmaSyncShape:
        """The tile of BM query rows whose K or V this is."""
        p = self.params
        return MmaSyncShape(BM, p.BN, p.depth, p.padded_depth, p.dtype, p.arch)

    @property
    def num_mmas(self) -> int:
        """Fragments of a k step that a warp holds: 8 keys (K) or columns (V) each."""
        p = self.params
        return (p.BN if p.transpose else p.padded_depth) // (8 * WARPS)

    def fragment_map(self) -> FragmentMap:
        """What the registers hold: elements of ``[BN, padded_depth]``."""
        return self._shape.fragment_map(self.params.role)

    def operand_map(self, BM: int) -> FragmentMap:
        """The registers of the other operand: Q ``[BM, padded_depth]`` for K, P ``[BM, BN]`` for V."""
        return self.shape(BM).fragment_map("q" if self.params.transpose else "p")

    def output_map(self, BM: int) -> FragmentMap:
        """The accumulator: S ``[BM, BN]`` for K, O ``[BM, padded_depth]`` for V."""
        return self.shape(BM).output_map(self.params.BN if self.params.transpose else self.params.padded_depth)

    def smem_block_tile(self, tile_rows: int, tile_row: int, stage: int) -> TileTensor:
        """Rows ``[tile_row * tile_rows, + tile_rows)`` of a stage as they lie in memory, swizzle and all."""
        p, first = self.params, self.stage_address(stage) - self.smem.base
        if tile_rows < 1 or tile_row < 0 or (tile_row + 1) * tile_rows > p.BN:
            raise ValueError(f"smem_block_tile({tile_rows}, {tile_row}, {stage}) is not in the {p.BN} rows of a stage")
        offset = first // p.dtype.itemsize + tile_row * tile_rows * p.smem_cols
        return TileTensor(self.smem, p.dtype, Layout.row_major(tile_rows, p.smem_cols), offset=offset)

    def load_from_dram(self, stage: int, active: Array | None = None) -> None:
        """Begin to bring the next tile of ``kv_cache_iter`` into a stage: one cp.async group, in flight until
        :meth:`wait`. Rows past the last key become zeros. active : ``[programs]`` whose traffic is counted; those with
        a valid row unless given.
        """
        p, plan, address = self.params, self._plan, self._copied_to(stage)
        first_key = self.kv_cache_iter.tile_start_row
        tile = self.kv_cache_iter.next_tile()
        source, valid = plan.source_of(tile)
        self.hazards.copy_async(self._footprint("copy", stage), f"{p.role} copy", stage)
        cp_async(self.smem, address[None], tile.memory, source, 16, valid)
        self.hazards.commit_group()
        keys = valid_keys(tile)
        self.stage_keys[stage] = first_key, keys
        self._active = keys > 0 if active is None else np.asarray(active, np.bool_)
        self.traffic.move("DRAM->SMEM", plan.bytes_by_warp(valid[self._active]))
        self.traffic.issue(f"{p.role} copy", np.full(WARPS, len(plan.row) // p.num_threads * self._active.sum()))

    def wait(self, n: int = 0) -> None:
        """Every warp waits until at most ``n`` groups are in flight (cp.async.wait_group), then all meet (bar.sync)."""
        self.hazards.wait_group(n)
        self.hazards.barrier()

    def release(self) -> None:
        """All warps meet: what they have read may be overwritten."""
        self.hazards.barrier()

    def load_from_shared(self, stage: int) -> Array:
        """Every lane's registers of the tile in a stage: ``[programs, threads, num_mmas * num_k_mmas2, 4]``."""
        p, access = self.params, self._access
        self.hazards.read(self._footprint("read", stage), f"{p.role} read", stage)
        address = (self._moved(stage) + access.address)[None]
        words = ldmatrix(self.smem, address, 4, trans=not p.transpose, dtype=p.dtype)
        self.reg_tile = np.moveaxis(words, 1, 3).reshape(self.reg_tile.shape)
        programs = int(self._active.sum())
        self.traffic.access(
            f"{p.role} read", wavefronts=access.wavefronts * programs, ideal=access.ideal * programs,
            unswizzled=access.unswizzled * programs, instructions=access.by_warp * programs,
        )
        self.traffic.move("SMEM->registers", access.by_warp * 512 * programs)
        return self.reg_tile

    def get_mma_tile(self, k_mma: int) -> Array:
        """The B fragments of a k step: ``[programs, threads, num_mmas, 4]``."""
        if not 0 <= k_mma < self.params.num_k_mmas2:
            raise ValueError(f"k_mma {k_mma} is not one of the {self.params.num_k_mmas2} k steps")
        return self.reg_tile.reshape(*self.reg_tile.shape[:2], self.num_mmas, -1, 4)[:, :, :, k_mma]

    mma_subtile = get_mma_tile

    def mma(self, a: Array, c: Array, k_mma: int) -> Array:
        """``c + a x get_mma_tile(k_mma)``: a ``[programs, threads, (BM/16) * num_k_mmas2, 8]`` by ``operand_map``, c
        float32 by ``output_map``; a new c.
        """
        threads = a.shape[:2]
        step = a.reshape(*threads, -1, self.params.num_k_mmas2, 8)[:, :, :, k_mma]
        tiles = c.reshape(*threads, step.shape[2], self.num_mmas, 4).swapaxes(2, 3)
        out = mma_tiles(self._shape.atom, step, self.get_mma_tile(k_mma), tiles.reshape(c.shape), swap_a_b=False)
        return out.reshape(*threads, self.num_mmas, -1, 4).swapaxes(2, 3).reshape(c.shape)

    def read_addresses(self, stage: int) -> tuple[str, IntArray]:
        """The instruction that reads a stage, and its byte addresses ``[instructions, warps, lanes]``."""
        return self._access.name, self._moved(stage) + self._access.address

    def smem_image(self, program: int = 0) -> SmemImage:
        """What lies where in the stages of one program, as far as this buffer has loaded them."""
        p, plan = self.params, self._plan
        areas = stage_areas(self.stage_keys, p.num_smem_stages, p.stage_bytes, self.smem_address, program)
        image = SmemImage.empty(self.smem_address, p.num_smem_stages * p.stage_bytes, areas)
        for stage, (_, valid) in self.stage_keys.items():
            slot = (self._copied_to(stage) - self.smem_address) // 16
            image.put(slot, np.where(plan.inside, plan.row, p.BN), plan.byte // 16, int(valid[program]))
        return image

    @property
    def _plan(self) -> TileCopyPlan:
        p, size = self.params, self.params.dtype.itemsize
        return copy_plan(p.BN, p.smem_cols * size, p.depth * size, WARPS)

    @property
    def _access(self) -> SharedAccess:
        return self._shape.access(self.params.role)

    def _moved(self, stage: int) -> int:
        """From the tile's place in the decode CTA to the stage."""
        return self.stage_address(stage) - self._shape.place(self.params.role).base

    def _copied_to(self, stage: int) -> IntArray:
        place, plan = self._shape.place(self.params.role), self._plan
        address: IntArray = self._moved(stage) + place.address(plan.row, plan.byte // 16)
        return address

    @functools.cached_property
    def _footprints(self) -> dict[tuple[str, int], Footprint]:
        return {}

    def _footprint(self, what: str, stage: int) -> Footprint:
        """The bytes of a stage that each warp copies or reads."""
        if (what, stage) not in self._footprints:
            if what == "copy":
                made = self.hazards.footprint(self._copied_to(stage), 16, self._plan.warp)
            else:
                made = self.hazards.footprint(self._moved(stage) + self._access.address, 16)
            self._footprints[what, stage] = made
        return self._footprints[what, stage]
