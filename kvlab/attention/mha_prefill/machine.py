"""Which machine a prefill tile is worked on: the CTA model for an architecture and a storage dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.staging import TileCTA, Traffic
from kvlab.staging.fma_cta import FmaCTA, FmaShape
from kvlab.staging.kv_buffer_cta import KVBufferCTA, KVBufferShape
from kvlab.staging.mfma_cta import MfmaCTA, MfmaShape
from kvlab.staging.wgmma_cta import WgmmaCTA, WgmmaShape

from .config import PrefillConfig

__all__ = ["PREFILL_ARCHS", "prefill_cta"]

PREFILL_ARCHS = ("sm_90", "gfx950")


def prefill_cta(
    arch: str, config: PrefillConfig, k_rows: Any, v_rows: Any, batch_idx: Any, head_idx: Any, traffic: Traffic
) -> TileCTA:
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
        return FmaCTA(FmaShape(BM, BN, D, BD, arch, config.num_warps, ahead=False), len(batch_idx), traffic)
    return WgmmaCTA(WgmmaShape(BM, BN, D, BD, dtype, config.num_warps), len(batch_idx), traffic)
