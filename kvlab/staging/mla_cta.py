"""Which machine a tile of MLA decode is worked on: latent and rope columns of K, V in the memory of the latent part."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kvlab.cache import PagedKVCache
from kvlab.memory import Memory
from kvlab.staging.gfx950.mfma_mla_cta import MfmaMLACTA
from kvlab.staging.nvidia.decode_cta import operand_p_of
from kvlab.staging.nvidia.fma_cta import FmaCTA, FmaShape
from kvlab.staging.nvidia.mma_sync_cta import MmaSyncCTA, MmaSyncShape
from kvlab.staging.nvidia.wgmma_mla_cta import ROWS, WgmmaMLACTA, WgmmaMLAShape
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import Fragments
from kvlab.staging.tile.iterator import KVCacheIterator

Array = np.ndarray[Any, Any]

MLA_ARCHS = ("sm_80", "sm_90", "gfx950")


class MLACTA(Protocol):
    """What the MLA decode emulator asks of a machine, for all programs of a launch at once.

    Pairs are (latent, rope). ``start`` ``[programs]`` is the first key of the tile; ``active`` ``[programs]`` tells
    which programs still have keys; only their traffic counts.
    """

    def load_q(self, dram: Memory, offset: Array, valid: Array) -> tuple[Any, Any]: ...
    def load_k(self, start: Array, active: Array) -> tuple[Any, Any]: ...
    def scores(
        self, q: tuple[Any, Any], k: tuple[Any, Any], active: Array, by_key: Array | None = None
    ) -> Fragments: ...
    def row_max(self, s: Fragments) -> Array: ...
    def row_sum(self, p: Fragments) -> Array: ...
    def load_v(self, active: Array) -> Any: ...
    def zeros(self) -> Fragments: ...
    def accumulate(self, p: Fragments, v: Any, o: Fragments, active: Array) -> Fragments: ...


class NvidiaMLACTA:
    """sm_80 and sm_90 as our kernel compiles for tiles of 16 or 32 rows: the latent and the rope tile stand apart in
    shared memory, both products are one accumulator's, and V is the latent tile, read with ldmatrix.trans. float32
    without tensor cores. Tiles that no conversion passes come ahead, as many as there are stages.
    """

    def __init__(
        self, latent: MmaSyncCTA | FmaCTA, rope: MmaSyncCTA | FmaCTA, caches: tuple[PagedKVCache, PagedKVCache],
        batch_idx: Any, end: Any, dtype: np.dtype[Any],
    ) -> None:
        self.latent, self.rope, self.dtype = latent, rope, dtype
        self.tiles = tuple(KVCacheIterator(cache, latent.shape.BN, batch_idx, 0, end) for cache in caches)

    def load_q(self, dram: Memory, offset: Array, valid: Array) -> tuple[Any, Any]:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``; invalid rows are 0."""
        return self.latent.load_q(dram, offset, valid), self.rope.load_q(dram, offset + self.latent.shape.D, valid)

    def load_k(self, start: Array, active: Array) -> tuple[Any, Any]:
        """The tile of these pages into shared memory, then to the operands of S = Q K^T."""
        for cta, tiles in zip((self.latent, self.rope), self.tiles, strict=True):
            tiles.tile_start_row = start
            if not cta.pipeline.following and tiles.cache.dtype == self.dtype:
                cta.follow(tiles, None)
        latent, rope = (tiles.next_tile() for tiles in self.tiles)
        k = self.latent.load_k(latent, active), self.rope.load_k(rope, active)
        latents, ropes = (part.with_values(part.values.astype(self.dtype, copy=False)) for part in k)
        return latents, ropes

    def scores(self, q: tuple[Any, Any], k: tuple[Any, Any], active: Array, by_key: Array | None = None) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``: first the latent columns, times ``by_key`` ``[programs, BN]`` if given,
        then the rope columns.
        """
        s = self.latent.scores(q[0], k[0], active)
        if by_key is not None:
            s = s.with_values(s.values * np.take(by_key, s.map.col, axis=1))
        return self.rope.scores(q[1], k[1], active, s)

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``."""
        return self.latent.row_max(s)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]`` in the order of the hardware."""
        return self.latent.row_sum(p)

    def load_v(self, active: Array) -> Fragments:
        """V from the memory of the latent tile."""
        return self.latent.load_v(None, active)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, BV]``."""
        return self.latent.zeros()

    def accumulate(self, p: Fragments, v: Fragments, o: Fragments, active: Array) -> Fragments:
        """O += P V."""
        return self.latent.add_values(operand_p_of((self.latent, self.rope), self.latent, p, active), v, o)


def mla_cta(
    arch: str,
    BM: int,
    BN: int,
    padded: tuple[int, int],
    latent: PagedKVCache,
    rope: PagedKVCache,
    batch_idx: Array,
    end: Array,
    traffic: Traffic,
    *,
    dtype: Any = None,
    num_warps: int = 4,
    num_stages: int = 1,
) -> MLACTA:
    """The CTA model of ``arch`` for tiles of BM query rows and BN keys; ``latent`` and ``rope`` are the windows of a
    cache with one head, whose columns are ``padded`` in shared memory.

    ``batch_idx`` and ``end`` ``[programs]`` are each program's sequence and the exclusive bound of its keys. ``dtype``
    is that of Q and of the products, the cache's if None; e4m3 latents are converted on their way. gfx950: MAX's decode
    with V in K's memory, without e4m3. sm_80, sm_90: what our Triton kernel compiles to with ``num_warps`` and
    ``num_stages``, of which the numbers of the pages take every second. On sm_90 64 rows with eight warps take wgmma (K
    and Q of one 16-bit dtype).

    >>> rows = np.zeros((1, 64, 1, 192), np.float16)
    >>> windows = [PagedKVCache(x, [63], [[0]], 1, 64) for x in (rows[..., :128], rows[..., 128:])]
    >>> one = np.zeros(1, np.int64)
    >>> mla_cta("sm_70", 16, 32, (128, 64), *windows, one, one + 64, Traffic())
    Traceback (most recent call last):
        ...
    ValueError: arch 'sm_70' is not one of sm_80, sm_90, gfx950
    """
    dtype, programs = np.dtype(latent.dtype if dtype is None else dtype), len(batch_idx)
    if arch not in MLA_ARCHS:
        raise ValueError(f"arch {arch!r} is not one of {', '.join(MLA_ARCHS)}")
    wide = dtype.itemsize == 4
    columns = latent.kv_params.head_size, rope.kv_params.head_size
    if (BM, arch, num_warps) == (ROWS, "sm_90", 8) and latent.dtype == rope.dtype == dtype and not wide:
        shape = WgmmaMLAShape(BN, (columns[0], padded[0]), (columns[1], padded[1]), dtype)
        return WgmmaMLACTA(shape, latent, rope, batch_idx, end, traffic)
    if arch == "gfx950":
        return MfmaMLACTA(BM, BN, columns, _whole_rows(latent, rope), batch_idx, end, traffic)
    ctas: list[Any] = []
    for (D, BD), v in zip(zip(columns, padded, strict=True), (None, (0, 0)), strict=True):
        sizes, beside = (BM, BN, D, BD), v is not None
        if wide:
            fma = FmaShape(*sizes, arch, num_warps, v_in_k=not beside, ahead=num_stages > 1, v_columns=v)
            ctas.append(FmaCTA(fma, programs, traffic, beside=beside))
        else:
            stages = max((num_stages - 1) // 2, 1)
            mma = MmaSyncShape(*sizes, dtype, arch, not beside, v, warps=num_warps, stages=stages)
            ctas.append(MmaSyncCTA(mma, programs, traffic, beside=beside))
    return NvidiaMLACTA(ctas[0], ctas[1], (latent, rope), batch_idx, end, dtype)


def _whole_rows(latent: PagedKVCache, rope: PagedKVCache) -> PagedKVCache:
    """The cache of which these are windows, side by side in memory or brought there."""
    first, second = np.asarray(latent.blocks), np.asarray(rope.blocks)
    D = first.shape[3]
    if second.ctypes.data - first.ctypes.data == D * first.itemsize and first.strides == second.strides:
        rows = np.lib.stride_tricks.as_strided(first, (*first.shape[:3], D + second.shape[3]), first.strides)
    else:
        rows = np.concatenate([first, second], -1)
    return PagedKVCache(
        rows, latent.cache_lengths, latent.lookup_table, latent.max_seq_length, latent.max_cache_length
    )
