"""Which machine a prefill tile is worked on: the CTA model for an architecture and a storage dtype."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kvlab.memory import Memory
from kvlab.staging import Fragments, KVTile, Traffic
from kvlab.staging.fma_cta import FmaCTA, FmaShape
from kvlab.staging.kv_buffer_cta import KVBufferCTA, KVBufferShape
from kvlab.staging.mfma_cta import MfmaCTA, MfmaShape
from kvlab.staging.wgmma_cta import WgmmaCTA, WgmmaShape

from .config import PrefillConfig

__all__ = ["PREFILL_ARCHS", "PrefillCTA", "prefill_cta"]

Array = np.ndarray[Any, Any]

PREFILL_ARCHS = ("sm_90", "gfx950")


class PrefillCTA(Protocol):
    """What the emulator asks of a machine, for all programs of a launch at once.

    ``active`` ``[programs]`` tells which programs still have keys; only their traffic counts. A program past its range
    gets a tile without valid rows.
    """

    def load_q(self, dram: Memory, offset: Array, valid: Array) -> Any: ...
    def load_k(self, tile: KVTile, active: Array) -> Any: ...
    def scores(self, q: Any, k: Any, active: Array) -> Fragments: ...
    def row_max(self, s: Fragments) -> Array: ...
    def row_sum(self, p: Fragments) -> Array: ...
    def load_v(self, tile: KVTile, active: Array) -> Any: ...
    def zeros(self) -> Fragments: ...
    def accumulate(self, p: Fragments, v: Any, o: Fragments, active: Array) -> Fragments: ...


def prefill_cta(
    arch: str, config: PrefillConfig, k_rows: Any, v_rows: Any, batch_idx: Any, head_idx: Any, traffic: Traffic
) -> PrefillCTA:
    """The CTA model of ``arch`` for the tiles of ``config``. ``k_rows`` and ``v_rows`` are the cache, or what stands
    for one; ``batch_idx`` and ``head_idx`` ``[programs]`` each program's sequence and KV head.

    sm_90: what our Triton kernel compiles to, float32 without tensor cores. gfx950: MAX's prefill through KVBuffer;
    float32, which that buffer does not take, strip by strip with the fp32 MFMA.
    """
    dtype, D = np.dtype(k_rows.dtype), k_rows.kv_params.head_size
    BM, BN, BD = config.BM, config.BN, config.BD
    if arch == "gfx950":
        if dtype.itemsize == 4:
            return MfmaCTA(MfmaShape(BM, BN, D, dtype), k_rows, v_rows, batch_idx, head_idx, traffic)
        return KVBufferCTA(KVBufferShape(BM, BN, D, dtype), k_rows, v_rows, batch_idx, head_idx, traffic)
    if arch != "sm_90":
        raise ValueError(f"arch {arch!r} is not one of {', '.join(PREFILL_ARCHS)}")
    if dtype.itemsize == 4:
        return FmaCTA(FmaShape(BM, BN, D, BD, arch, config.num_warps), len(batch_idx), traffic)
    return WgmmaCTA(WgmmaShape(BM, BN, D, BD, dtype, config.num_warps), len(batch_idx), traffic)
