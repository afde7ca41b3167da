"""Which machine a tile is worked on: the CTA model for an architecture and a storage dtype."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kvlab.cache import PagedKVCache
from kvlab.memory import Memory

from .fma_cta import FmaCTA, FmaShape
from .fragments import Fragments
from .iterator import KVCacheIterator, KVTile
from .mfma_cta import MfmaCTA, MfmaShape
from .mma_sync_cta import MmaSyncCTA, MmaSyncShape
from .traffic import Traffic

__all__ = ["DECODE_ARCHS", "TileCTA", "decode_cta"]

Array = np.ndarray[Any, Any]

DECODE_ARCHS = ("sm_80", "sm_90", "gfx950")


class TileCTA(Protocol):
    """What an attention emulator asks of a machine, for all programs of a launch at once.

    ``active`` ``[programs]`` tells which programs still have keys; only their traffic counts. A program past its range
    gets a tile without valid rows, which changes neither its row state nor its output. After ``follow`` the loads take
    the tiles of these iterators in turn, of K and V for one loop after the other: the machine may fetch ahead.
    """

    def follow(self, *tiles: KVCacheIterator) -> None: ...
    def load_q(self, dram: Memory, offset: Array, valid: Array) -> Any: ...
    def load_k(self, tile: KVTile, active: Array) -> Any: ...
    def scores(self, q: Any, k: Any, active: Array, s: Fragments | None = None) -> Fragments: ...
    def row_max(self, s: Fragments) -> Array: ...
    def row_sum(self, p: Fragments) -> Array: ...
    def load_v(self, tile: KVTile, active: Array) -> Any: ...
    def zeros(self) -> Fragments: ...
    def accumulate(self, p: Fragments, v: Any, o: Fragments, active: Array) -> Fragments: ...


def decode_cta(
    arch: str,
    BM: int,
    BN: int,
    BD: int,
    k_cache: PagedKVCache,
    v_cache: PagedKVCache,
    batch_idx: Array,
    head_idx: Array,
    traffic: Traffic,
    *,
    num_warps: int = 4,
) -> TileCTA:
    """The CTA model of ``arch`` for tiles of BM query rows and BN keys; columns are padded to BD.

    ``batch_idx`` and ``head_idx`` ``[programs]`` are each program's sequence and KV head. gfx950: MAX's streaming
    decode. sm_80, sm_90: what our Triton kernel compiles to; float32 without tensor cores, there ``num_warps`` may be
    other than 4.

    >>> keys = PagedKVCache(np.zeros((1, 64, 1, 64), np.float16), [63], [[0]], max_seq_length=1, max_cache_length=64)
    >>> one = np.zeros(1, np.int64)
    >>> type(decode_cta("sm_90", 16, 64, 64, keys, keys, one, one, Traffic())).__name__
    'MmaSyncCTA'
    """
    dtype, D = k_cache.dtype, k_cache.kv_params.head_size
    if num_warps != 4 and (arch == "gfx950" or dtype.itemsize != 4):
        raise ValueError(f"num_warps {num_warps} with {dtype} on {arch}: must be 4")
    if arch == "gfx950":
        return MfmaCTA(MfmaShape(BM, BN, D, dtype), k_cache, v_cache, batch_idx, head_idx, traffic)
    if arch in ("sm_80", "sm_90"):
        if dtype.itemsize == 4:
            return FmaCTA(FmaShape(BM, BN, D, BD, arch, num_warps), len(batch_idx), traffic)
        return MmaSyncCTA(MmaSyncShape(BM, BN, D, BD, dtype, arch), len(batch_idx), traffic)
    raise ValueError(f"arch {arch!r} is not one of {', '.join(DECODE_ARCHS)}")
