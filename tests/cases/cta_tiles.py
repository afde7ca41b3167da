"""Tiles for the CTA models: three programs over a paged cache, one of them with few keys, one with none left."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.cache import PagedKVCache
from kvlab.layout import TileTensor
from kvlab.memory import Memory, as_dtype
from kvlab.staging import KVCacheIterator, Traffic
from kvlab.staging.gfx950.kv_buffer_decode_cta import KVBufferDecodeCTA, KVBufferDecodeShape
from kvlab.staging.gfx950.mfma_cta import MfmaCTA, MfmaShape
from kvlab.staging.nvidia.fma_cta import FmaCTA, FmaShape
from kvlab.staging.nvidia.mma_sync_cta import MmaSyncCTA, MmaSyncShape

Array = np.ndarray[Any, Any]
BATCH, HEAD = np.array([0, 1, 2]), np.array([1, 0, 1])


@dataclass
class Tiles:
    """A CTA model and what it loads: K and V as float arrays ``[programs, BN, D]`` with zeros past ``valid``."""

    cta: Any
    traffic: Traffic
    k: Array
    v: Array
    q: Array  # [programs, BM, D], zeros in rows that do not exist
    k_tile: TileTensor
    v_tile: TileTensor
    q_memory: Memory
    q_offset: Array
    q_valid: Array
    active: Array
    valid: Array

    def load_q(self) -> Any:
        return self.cta.load_q(self.q_memory, self.q_offset, self.q_valid)


def machine(
    kind: str, BM: int, BN: int, BD: int, k: PagedKVCache, v: PagedKVCache, batch: Array, head: Array, traffic: Traffic
) -> Any:
    """A CTA model: "sm_80" and "sm_90" as of decode, "rows" and "columns" of sm_80 as of prefill (along which its eight
    warps stand), "streaming" and "decode" of gfx950.
    """
    D, dtype = k.kv_params.head_size, k.dtype
    if kind == "streaming":
        return MfmaCTA(MfmaShape(BM, BN, D, dtype), k, v, batch, head, traffic)
    if kind == "decode":
        return KVBufferDecodeCTA(KVBufferDecodeShape(D, dtype, dtype), k, v, batch, head, traffic)
    if kind in ("rows", "columns"):
        shape = MmaSyncShape(BM, BN, D, BD, dtype, "sm_80", warps=8, along_rows=kind == "rows")
        return MmaSyncCTA(shape, len(batch), traffic)
    if dtype.itemsize == 4:
        return FmaCTA(FmaShape(BM, BN, D, BD, kind), len(batch), traffic)
    return MmaSyncCTA(MmaSyncShape(BM, BN, D, BD, dtype, kind), len(batch), traffic)


def tiles(arch: str, dtype: str, BM: int, BN: int, D: int, BD: int | None = None, page: int = 16) -> Tiles:
    """One tile of BN keys from key 16 on: all, 5 and none of them exist. One query row in three does not. ``arch`` as
    in :func:`machine`.
    """
    rng, kind = np.random.default_rng(0), as_dtype(dtype)
    columns = -(-(BN + 16) // page)
    table = rng.permutation(3 * columns).reshape(3, columns)
    pools = [rng.standard_normal((3 * columns, page, 2, D)).astype(kind) for _ in range(2)]
    end = np.array([16 + BN, 21, 16])
    caches = [PagedKVCache(pool, [0, 0, 0], table, max_seq_length=1, max_cache_length=16 + BN) for pool in pools]
    iterators = [KVCacheIterator(cache, BN, BATCH, HEAD, end) for cache in caches]
    dense = []
    for iterator, pool in zip(iterators, pools, strict=True):
        iterator.tile_start_row = 16
        key = 16 + np.arange(BN)
        rows = pool[table[:, key // page], key % page, HEAD[:, None]].astype(np.float64)
        dense.append(np.where((key < end[:, None])[..., None], rows, 0))
    q = rng.standard_normal((3, BM, 3, D)).astype(kind)
    valid = np.arange(BM) % 3 < np.array([[3], [2], [2]])
    offset = (np.arange(3)[:, None] * BM + np.arange(BM)) * 3 * D + D
    traffic = Traffic()
    cta = machine(arch, BM, BN, BD or max(D, 32), *caches, BATCH, HEAD, traffic)
    rows = np.where(valid[..., None], q[:, :, 1].astype(np.float64), 0)
    tile_pair = [iterator.next_tile() for iterator in iterators]
    active = np.array([True, True, False])
    return Tiles(cta, traffic, *dense, rows, *tile_pair, Memory.over(q), offset, valid, active, np.array([BN, 5, 0]))


def padded(tile: Array, columns: int) -> Array:
    return np.pad(tile, ((0, 0), (0, 0), (0, columns - tile.shape[2])))


def check_pieces(t: Tiles, columns: int) -> None:
    """Every piece of a CTA against NumPy in float64: the tiles bit for bit, the products to float32 rounding."""
    q, k, v = t.load_q(), t.cta.load_k(t.k_tile, t.active), t.cta.load_v(t.v_tile, t.active)
    for ours, tile in ((q, t.q), (k, t.k), (v, t.v)):
        assert ours.tile().dtype == t.k_tile.dtype
        assert (ours.tile().astype(np.float64) == padded(tile, columns)).all()
    s = t.cta.scores(q, k, t.active)
    exact = t.q @ t.k.swapaxes(1, 2)
    assert s.tile().dtype == np.float32
    np.testing.assert_allclose(s.tile(), exact, rtol=0, atol=1e-4)  # sums of up to 256 terms of size 1
    assert (t.cta.row_max(s) == s.tile().max(2)).all()
    np.testing.assert_allclose(t.cta.row_sum(s), s.tile().astype(np.float64).sum(2), rtol=0, atol=1e-4)
    p = s.with_values(np.exp(s.values / 16))
    start = t.cta.zeros()
    assert (start.tile() == 0).all()
    start = start.with_values(start.values + np.float32(3))
    o = t.cta.accumulate(p, v, start, t.active)
    rounded = p.tile().astype(t.k_tile.dtype).astype(np.float64)
    np.testing.assert_allclose(o.tile(), 3 + rounded @ padded(t.v, columns), rtol=1e-6, atol=1e-3)


def check_conservation(t: Tiles) -> None:
    """Every byte of a key that exists leaves DRAM once, for K and for V, and no other byte."""
    row = t.k.shape[2] * t.k_tile.dtype.itemsize
    for load, tile in ((t.cta.load_k, t.k_tile), (t.cta.load_v, t.v_tile)):
        before = t.traffic.moved["DRAM->SMEM"]
        load(tile, t.active)
        assert t.traffic.moved["DRAM->SMEM"] - before == int(t.valid.sum()) * row


def drive(
    make: Callable[..., Any], dtype: str, BM: int, BN: int, D: int, loops: int = 1, traffic: Any = None, q: str = ""
) -> Any:
    """The loops of an attention kernel on the machine ``make(k_cache, v_cache, batch, head, traffic)``: two sequences
    of five and of one and a half tiles of BN keys, split among ``loops`` loops. A launch: it ends the machine.
    ``q``: the dtype of Q, if another."""
    traffic = Traffic() if traffic is None else traffic
    with traffic.launch():
        return _drive(make, as_dtype(dtype), as_dtype(q or dtype), BM, BN, D, loops, traffic)


def _drive(
    make: Callable[..., Any], kind: Any, q_kind: Any, BM: int, BN: int, D: int, loops: int, traffic: Traffic
) -> Any:
    rng = np.random.default_rng(0)
    lengths = np.array([5 * BN, BN + BN // 2])
    table = rng.permutation(10).reshape(2, 5)
    pools = [(rng.standard_normal((10, BN, 1, D)) / 8).astype(kind) for _ in range(2)]
    caches = [PagedKVCache(pool, [0, 0], table, max_seq_length=1, max_cache_length=5 * BN) for pool in pools]
    cta = make(*caches, np.arange(2), np.zeros(2, np.int64), traffic)
    edges = np.linspace(0, 5, loops + 1).astype(np.int64) * BN
    walks = []
    for first, end in itertools.pairwise(edges):
        pair = [KVCacheIterator(cache, BN, np.arange(2), 0, np.minimum(end, lengths)) for cache in caches]
        for walk in pair:
            walk.tile_start_row = first
        walks.append(pair)
    rows = np.broadcast_to(np.arange(BM) * D, (2, BM))
    q = cta.load_q(Memory.over(rng.standard_normal(BM * D).astype(q_kind)), rows, np.ones((2, BM), np.bool_))
    cta.follow(*itertools.chain.from_iterable(walks))
    o = cta.zeros()
    for k_tiles, v_tiles in walks:
        while (k_tiles.tile_start_row < k_tiles.end).any():
            active = k_tiles.tile_start_row < k_tiles.end
            s = cta.scores(q, cta.load_k(k_tiles.next_tile(), active), active)
            cta.row_max(s)
            cta.row_sum(s)
            o = cta.accumulate(s, cta.load_v(v_tiles.next_tile(), active), o, active)
    return cta
