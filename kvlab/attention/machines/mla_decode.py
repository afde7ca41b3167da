"""The CTA models of an MLA decode tile: latent and rope columns of K, V in the memory of the latent part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvlab.attention.tiles.pages import paged
from kvlab.cache import PagedKVCache
from kvlab.memory import Memory
from kvlab.staging import Fragments, KVCacheIterator, Traffic
from kvlab.staging.tile.iterator import SlotIterator, key_offsets
from kvlab.staging.tile.tile_spec import KVRows, TileSpec

from .parts import Parts
from .table import choose

Array = np.ndarray[Any, Any]


class LatentCaches(NamedTuple):
    """The windows of a cache with one head: latents, rope columns, and, or None, scales of the latents; its ``slots``
    where its table lists them.
    """

    latent: PagedKVCache
    rope: PagedKVCache
    by_block: PagedKVCache | None = None
    slots: int | None = None

    @classmethod
    def of(
        cls, windows: tuple[Array, Array, Array | None], block_table: Array, num_keys: Array | None, problem: Any
    ) -> LatentCaches:
        """The windows ``[pages, page_size, ..]`` and the table of a call; without keys of each sequence, the table is
        one of lists. problem : MLADecodeProblem.
        """
        keys = np.zeros(problem.batch, np.int32) if num_keys is None else num_keys
        arrays = tuple(window[:, :, None] for window in windows if window is not None)
        slots = None if num_keys is not None else windows[0].shape[0] * windows[0].shape[1]
        latent, rope, *scales = paged(arrays, block_table, keys, problem.tokens, problem.max_keys)
        return cls(latent, rope, scales[0] if scales else None, slots)


class LatentAndRopeCTA(Parts):
    """The latent and the rope tile lie apart in shared memory, both products are one accumulator's, and V is the
    latent tile. Tiles that no conversion passes come ahead, as many as there are stages.

    Pairs are (latent, rope): the models ``ctas``, the iterators ``tiles`` over their columns, and operands. ``start``
    ``[programs]`` is the first key of a tile; ``active`` ``[programs]`` tells which programs still have keys; only
    their traffic counts.
    """

    def __init__(
        self, ctas: Sequence[Any], tiles: Sequence[KVCacheIterator], by_block: KVCacheIterator | None = None
    ) -> None:
        super().__init__(ctas, ctas[:1])
        self.latent, self.rope, self.tiles, self.by_block = ctas[0], ctas[-1], tiles, by_block
        self._followed = False

    def load_q(self, dram: Memory, offset: Array, valid: Array) -> tuple[Any, Any]:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``; invalid rows are 0."""
        return self.latent.load_q(dram, offset, valid), self.rope.load_q(dram, offset + self.tiles[0].depth, valid)

    def load_k(self, start: Array, active: Array) -> tuple[Any, Any]:
        """The tile of these pages into shared memory, then to the operands of S = Q K^T."""
        self._walk_from(start)
        of_latents = () if self.by_block is None else (self._scales_at(self.by_block, start),)
        latent = self.latent.load_k(self.tiles[0].next_tile(), active, *of_latents)
        return latent, self.rope.load_k(self.tiles[1].next_tile(), active)

    def _scales_at(self, tiles: KVCacheIterator, start: Array) -> Array:
        """The scales of the latents of the keys from ``start`` on, ``[programs, BN, blocks]``, in registers."""
        tiles.tile_start_row = start
        tile = tiles.next_tile()
        at = key_offsets(tile)
        size = tile.dtype.itemsize
        self.latent.traffic.move("DRAM->registers", int((at >= 0).sum()) * tiles.depth * size)
        found: Array = tile.memory.load(np.maximum(at, 0) * size, tile.dtype, tiles.depth, mask=at >= 0)
        return found

    def _walk_from(self, start: Array) -> None:
        """The tile at ``start`` is the next; from the first on they are fetched ahead."""
        for cta, tiles in zip(self.ctas, self.tiles, strict=True):
            tiles.tile_start_row = start
            if not self._followed:
                cta.follow(tiles, None)
        self._followed = True

    def scores(self, q: tuple[Any, Any], k: tuple[Any, Any], active: Array, by_key: Array | None = None) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``: first the latent columns, times ``by_key`` ``[programs, BN]`` if given,
        then the rope columns.
        """
        s: Fragments = self.latent.scores(q[0], k[0], active)
        if by_key is not None:
            s = s.with_values(s.values * s.by_column(by_key))
        s = self.rope.scores(q[1], k[1], active, s)
        return s

    def load_v(self, active: Array) -> Any:
        """V from the memory of the latent tile."""
        return self.latent.load_v(None, active)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, BV]``."""
        o: Fragments = self.latent.zeros()
        return o

    def accumulate(self, p: Fragments, v: Any, o: Fragments, active: Array) -> Fragments:
        """O += P V."""
        (o,) = self.add_values(p, [(self.latent, v, o)], active)
        return o


class WholeLatentsCTA(LatentAndRopeCTA):
    """One model of all columns, whose windows are copied side by side unless they lie so."""

    def load_q(self, dram: Memory, offset: Array, valid: Array) -> tuple[Any, Any]:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``; invalid rows are 0."""
        q: tuple[Any, Any] = self.latent.split_q(self.latent.load_q(dram, offset, valid))
        return q

    def load_k(self, start: Array, active: Array) -> tuple[Any, Any]:
        """The tile of these pages into shared memory, then to the operands of S = Q K^T."""
        self._walk_from(start)
        k: tuple[Any, Any] = self.latent.split_k(self.latent.load_k(self.tiles[0].next_tile(), active))
        return k


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


def mla_cta(
    arch: str, BM: int, BN: int, padded: tuple[int, int], caches: LatentCaches, batch_idx: Array, end: Array,
    traffic: Traffic, *, dtype: Any = None, num_warps: int = 4, num_stages: int = 1,
) -> LatentAndRopeCTA:
    """The CTA models of ``arch`` for tiles of BM query rows and BN keys of ``caches``, whose latent and rope columns
    are ``padded`` in shared memory.

    ``batch_idx`` and ``end`` ``[programs]`` are each program's sequence and the exclusive bound of its keys. ``dtype``
    is that of Q and of the products, the cache's if None; e4m3 latents are converted on their way. gfx950: MAX's decode
    with V in K's memory. sm_80, sm_90: what our Triton kernel compiles to with ``num_warps`` and ``num_stages``, of
    which the numbers of the pages take every second; float32 without tensor cores.
    """
    latent, rope, row_scales, slots = caches
    listed = slots is not None
    dtype, stored = np.dtype(latent.dtype if dtype is None else dtype), (latent.dtype, rope.dtype)
    columns = list(zip((latent.kv_params.head_size, rope.kv_params.head_size), padded, strict=True))
    model = choose(arch, latent.dtype, "mla_decode", rows=BM, listed=listed).cta

    def part(i: int, v: tuple[int, int]) -> TileSpec:
        ahead = max((num_stages - 1) // 2, 1) if num_stages > 1 else 0
        return TileSpec(
            arch=arch, BM=BM, BN=BN, k=columns[i], v=v, dtype=dtype, stored=stored[i], weights=dtype, warps=num_warps,
            ahead=ahead, v_in_k=i == 0, rope=i == 1,
        )

    def walk(cache: PagedKVCache) -> KVCacheIterator:
        return (SlotIterator if listed else KVCacheIterator)(cache, BN, batch_idx, 0, end)

    head = np.zeros_like(batch_idx)
    if model.whole_rows:
        cache, D = _whole_rows(latent, rope), columns[0][0] + columns[1][0]
        tile = replace(part(0, columns[0]), k=(D, D), v=(columns[0][0],) * 2)
        return WholeLatentsCTA([model.of(tile, KVRows(cache, cache, batch_idx, head), traffic)], [walk(cache)])
    first = model.of(part(0, columns[0]), KVRows(latent, latent, batch_idx, head), traffic)
    other = model.of(part(1, (0, 0)), KVRows(rope, rope, batch_idx, head), traffic, beside=True)
    by_block = None if row_scales is None else walk(row_scales)
    return LatentAndRopeCTA([first, other], [walk(latent), walk(rope)], by_block)
