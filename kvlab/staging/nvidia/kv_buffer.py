"""What the buffers of K and V on NVIDIA share: the walk over the keys, and the stages in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.cache import PagedKVCache
from kvlab.cache.checks import one_of
from kvlab.common.drawn import Drawn
from kvlab.memory import AddressSpace, Memory
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.iterator import KVCacheIterator
from kvlab.staging.tile.member import Member

from .params import NvidiaKVParams

Array = np.ndarray[Any, Any]


class NvidiaKVBuffer(Drawn):
    """A buffer of ``params.num_smem_stages`` stages, in memory of its own if ``smem`` is None.

    A subclass checks its parameters, its cache, and that the stages fit at ``smem_address``.
    """

    # Members with the names of MAX's KVBuffer: those of the parameters.
    MMA_K = Member[int]()
    num_k_mmas2 = Member[int]()
    simd_width = Member[int]()
    smem_cols = Member[int]()
    smem_stage_size = Member[int]()

    def __init__(
        self,
        params: NvidiaKVParams,
        cache: PagedKVCache,
        batch_idx: Any,
        head_idx: Any,
        end: Any,
        smem: Memory | None,
        smem_address: int | None,
        traffic: Traffic | None,
    ) -> None:
        self.params, self.cache = params, cache
        self.traffic = Traffic() if traffic is None else traffic
        self.kv_cache_iter = KVCacheIterator(cache, params.BN, batch_idx, head_idx, end, depth=params.depth)
        self.programs = len(self.kv_cache_iter.batch_idx)
        if smem is None:
            nbytes = params.num_smem_stages * params.stage_bytes
            smem = Memory(nbytes, space=AddressSpace.SHARED, name="shared memory", programs=self.programs)
        self.smem, self.smem_address = smem, smem.base if smem_address is None else smem_address
        self.stage_keys: dict[int, tuple[Array, Array]] = {}

    def stage_address(self, stage: int) -> int:
        """Byte address of a stage."""
        stage = one_of("stage", stage, self.params.num_smem_stages, "stages")
        return self.smem_address + stage * self.params.stage_bytes
