"""Common part of NVIDIA's buffers of K and V: the walk over the keys, and the stages in shared memory."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from kvlab.cache import PagedKVCache
from kvlab.common.checks import one_of
from kvlab.common.drawn import Drawn
from kvlab.layout import Layout, TileTensor
from kvlab.memory import AddressSpace, Memory
from kvlab.staging.record.hazards import Hazards
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.iterator import KVCacheIterator, fitting_operand
from kvlab.staging.tile.member import Member

from .nvidia_kv_params import NvidiaKVParams

Array = np.ndarray[Any, Any]


class NvidiaKVBuffer(Drawn):
    """A buffer of ``params.num_smem_stages`` stages, in memory of its own if ``smem`` is None."""

    ALIGNMENT: ClassVar[int]
    """Of the stages, in bytes."""
    NUM_WARPS: ClassVar[int]

    # Members with the names of MAX's KVBuffer: those of the parameters.
    MMA_K = Member[int]()
    num_k_mmas2 = Member[int]()
    simd_width = Member[int]()
    smem_cols = Member[int]()
    smem_stage_size = Member[int]()

    def __init__(
        self, params: NvidiaKVParams, cache: PagedKVCache, batch_idx: Any, head_idx: Any, end: Any,
        smem: Memory | None = None, *, smem_address: int | None = None, traffic: Traffic | None = None,
        hazards: Hazards | None = None,
    ) -> None:
        fitting_operand(params, cache)
        self.params, self.cache = params, cache
        self.traffic = Traffic() if traffic is None else traffic
        self.kv_cache_iter = KVCacheIterator(cache, params.BN, batch_idx, head_idx, end, depth=params.depth)
        self.programs, nbytes = len(self.kv_cache_iter.batch_idx), params.num_smem_stages * params.stage_bytes
        if smem is None:
            smem = Memory(nbytes, space=AddressSpace.SHARED, name="shared memory", programs=self.programs)
        self.smem, self.smem_address = smem, smem.base if smem_address is None else smem_address
        first = self.smem_address - smem.base
        if self.smem_address % self.ALIGNMENT or first < 0 or first + nbytes > smem.nbytes:
            raise ValueError(
                f"smem_address {self.smem_address}: {params.num_smem_stages} stages of {params.stage_bytes} bytes on a "
                f"multiple of {self.ALIGNMENT} do not fit in [{smem.base}, {smem.base + smem.nbytes}) of {smem.name}"
            )
        self.hazards = hazards or Hazards(smem, self.NUM_WARPS, arch=params.arch, timeline=self.traffic.timeline)
        self.stage_keys: dict[int, tuple[Array, Array]] = {}
        self._begin()

    def _begin(self) -> None:
        """Begins the parts that a kind of buffer has besides."""
        raise NotImplementedError

    def stage_address(self, stage: int) -> int:
        """Byte address of a stage."""
        stage = one_of("stage", stage, self.params.num_smem_stages, "stages")
        return self.smem_address + stage * self.params.stage_bytes

    def _block_tile(self, tile_rows: int, tile_row: int, block: int, width: int) -> TileTensor:
        """Rows ``[tile_row * tile_rows, + tile_rows)`` of a block of ``width`` columns, counted over all stages."""
        p = self.params
        blocks = p.num_smem_stages * p.smem_cols // width
        if tile_rows < 1 or tile_row < 0 or (tile_row + 1) * tile_rows > p.BN or not 0 <= block < blocks:
            raise ValueError(
                f"smem_block_tile({tile_rows}, {tile_row}, {block}) is not in the {blocks} blocks of {p.BN} rows"
            )
        offset = (self.smem_address - self.smem.base) // p.dtype.itemsize
        offset += (block * p.BN + tile_row * tile_rows) * width
        return TileTensor(self.smem, p.dtype, Layout.row_major(tile_rows, width), offset=offset)

    def _step(self, k_mma: int) -> int:
        """``k_mma``, or ValueError unless it is a k step."""
        return one_of("k_mma", k_mma, self.params.num_k_mmas2, "k steps")
