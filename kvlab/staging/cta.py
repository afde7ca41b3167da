"""Which machine a tile is worked on: the CTA model for an architecture and a storage dtype."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kvlab.cache import PagedKVCache
from kvlab.layout import TileTensor
from kvlab.memory import Memory
from kvlab.staging.gfx950.kv_buffer_decode_cta import KVBufferDecodeCTA, KVBufferDecodeShape
from kvlab.staging.gfx950.mfma_cta import MfmaCTA, MfmaShape
from kvlab.staging.gfx950.whole_cta import WholeCTA
from kvlab.staging.nvidia.fma_cta import FmaCTA, FmaShape
from kvlab.staging.nvidia.mma_sync_cta import MmaSyncCTA, MmaSyncShape
from kvlab.staging.nvidia.pieces_cta import Accumulator, PiecesCTA, piece_columns
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import Fragments
from kvlab.staging.tile.iterator import KVCacheIterator

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
    def load_k(self, tile: TileTensor, active: Array) -> Any: ...
    def scores(self, q: Any, k: Any, active: Array, s: Fragments | None = None) -> Fragments: ...
    def row_max(self, s: Fragments) -> Array: ...
    def row_sum(self, p: Fragments) -> Array: ...
    def load_v(self, tile: TileTensor, active: Array) -> Any: ...
    def zeros(self) -> Fragments: ...
    def accumulate(self, p: Fragments, v: Any, o: Fragments, active: Array) -> Fragments: ...


class DecodeCTA(Protocol):
    """What the decode emulator asks of a machine: it walks over its tiles of K and V itself, from the key where the
    programs' ranges start. ``q_columns`` is the order in which it takes the columns of Q, None for their own. Q, K and
    V are tuples of pieces, as in the kernel.
    """

    @property
    def q_columns(self) -> Array | None: ...
    def load_q(self, dram: Memory, offset: Array, valid: Array) -> tuple[Any, ...]: ...
    def load_k(self, active: Array) -> tuple[Any, ...]: ...
    def scores(self, q: Any, k: Any, active: Array) -> Fragments: ...
    def row_max(self, s: Fragments) -> Array: ...
    def row_sum(self, p: Fragments) -> Array: ...
    def load_v(self, active: Array) -> tuple[Any, ...]: ...
    def zeros(self) -> Accumulator: ...
    def accumulate(self, p: Fragments, v: Any, o: Accumulator, active: Array) -> Accumulator: ...


def decode_cta(
    arch: str,
    BM: int,
    BN: int,
    columns: tuple[int, int],
    v_columns: tuple[int, int],
    k_cache: PagedKVCache,
    v_cache: PagedKVCache,
    batch_idx: Array,
    head_idx: Array,
    keys: tuple[Array, Array],
    traffic: Traffic,
    *,
    num_warps: int = 4,
    num_stages: int = 2,
) -> DecodeCTA:
    """The CTA model of ``arch`` for tiles of BM query rows and BN keys.

    ``columns`` and ``v_columns``: the pieces of K's and V's columns, in elements (pairs of fp8). ``batch_idx`` and
    ``head_idx`` ``[programs]`` are each program's sequence and KV head, ``keys`` the first and the end of its keys.
    gfx950: MAX's decode through KVBuffer; float32, which that buffer does not take, strip by strip. sm_80, sm_90: what
    our Triton kernel compiles to; float32 without tensor cores. There ``num_warps`` may be other than 4; the warps
    stand along the rows where these are as many as the last piece of V is wide; K and V come ahead unless
    ``num_stages`` is 1.

    >>> cache = PagedKVCache(np.zeros((1, 64, 1, 64), np.float16), [63], [[0]], max_seq_length=1, max_cache_length=64)
    >>> one = np.zeros(1, np.int64)
    >>> decode_cta("sm_70", 16, 64, (64, 0), (64, 0), cache, cache, one, one, (one, one + 64), Traffic())
    Traceback (most recent call last):
        ...
    ValueError: arch 'sm_70' is not one of sm_80, sm_90, gfx950
    """
    if arch not in DECODE_ARCHS:
        raise ValueError(f"arch {arch!r} is not one of {', '.join(DECODE_ARCHS)}")
    dtype, programs = k_cache.dtype, len(batch_idx)
    if num_warps != 4 and arch == "gfx950":
        raise ValueError(f"num_warps {num_warps} on {arch}: must be 4")

    def walk(cache: PagedKVCache, first: int = 0, depth: int | None = None) -> KVCacheIterator:
        tiles = KVCacheIterator(cache, BN, batch_idx, head_idx, keys[1], depth=depth, head_dim_offset=first)
        tiles.tile_start_row = keys[0]
        return tiles

    depths = k_cache.kv_params.head_size, v_cache.kv_params.head_size
    if arch == "gfx950":
        return _on_gfx950(
            BM, BN, depths, k_cache, v_cache, (walk(k_cache), walk(v_cache)), batch_idx, head_idx, traffic
        )
    pairs = dtype.itemsize == 1
    each = 2 if pairs else 1
    k, v = (piece_columns(w, depth, each) for w, depth in zip((columns, v_columns), depths, strict=True))
    ctas: list[MmaSyncCTA | FmaCTA] = []
    tiles: list[tuple[KVCacheIterator | None, KVCacheIterator | None]] = []
    for i in range(max(len(k), len(v))):
        sizes = [(p[i].inside, p[i].width) if i < len(p) else (0, 0) for p in (k, v)]
        if dtype.itemsize == 4:
            fma = FmaShape(BM, BN, *sizes[0], arch, num_warps, v_columns=sizes[1])
            ctas.append(FmaCTA(fma, programs, traffic, beside=i > 0))
        else:
            product = np.dtype(np.float16) if pairs else dtype
            mma = MmaSyncShape(
                BM, BN, *sizes[0], product, arch, v_columns=sizes[1], pairs=pairs, warps=num_warps,
                along_rows=BM >= v[-1].width,
            )
            ctas.append(MmaSyncCTA(mma, programs, traffic, beside=i > 0))
        k_tiles, v_tiles = (
            walk(cache, p[i].first * each, p[i].inside * each) if i < len(p) else None
            for cache, p in ((k_cache, k), (v_cache, v))
        )
        tiles.append((k_tiles, v_tiles))
    return PiecesCTA(ctas, k, v, tiles, ahead=num_stages > 1)


def _on_gfx950(
    BM: int, BN: int, depths: tuple[int, int], k_cache: PagedKVCache, v_cache: PagedKVCache,
    tiles: tuple[KVCacheIterator, KVCacheIterator], batch_idx: Array, head_idx: Array, traffic: Traffic,
) -> DecodeCTA:
    dtype, D = k_cache.dtype, depths[0]
    cta: Any
    if depths[0] != depths[1]:
        raise ValueError(f"depths {depths} of K and V on gfx950: must be the same")
    if dtype.itemsize == 4:
        cta = MfmaCTA(MfmaShape(BM, BN, D, dtype), k_cache, v_cache, batch_idx, head_idx, traffic)
    else:
        if (BM, BN) != (16, 128):
            raise ValueError(f"BM {BM}, BN {BN} on gfx950: must be 16 and 128")
        product = np.dtype(np.float16) if dtype.itemsize == 1 else dtype
        shape = KVBufferDecodeShape(D, dtype, product)
        cta = KVBufferDecodeCTA(shape, k_cache, v_cache, batch_idx, head_idx, traffic)
    return WholeCTA(cta, tiles, 2 if dtype.itemsize == 1 else 1)
