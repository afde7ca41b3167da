"""The CTA models of a decode tile: one or two of K's and of V's columns, powers of two.

Each piece is a CTA model of its own with its own shared memory; they are the same threads, and P goes through the
first. S is the sum over K's pieces, O has V's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.attention.features.scales import weighted_minima
from kvlab.cache import PagedKVCache
from kvlab.memory import Memory, float16
from kvlab.staging import Fragments, KVCacheIterator, Traffic
from kvlab.staging.nvidia.mma_sync_plan import Q_ROLES
from kvlab.staging.nvidia.wgmma_cta import WgmmaCTA
from kvlab.staging.tile.pairs import halves, quarters
from kvlab.staging.tile.shared_tile import TileView
from kvlab.staging.tile.tile_spec import KVRows, TileSpec

from .parts import Accumulator, Parts, PieceColumns, piece_columns
from .rows import tile_walk
from .table import choose

if TYPE_CHECKING:
    from kvlab.attention.mha_decode.config import DecodeConfig

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
NO_BLOCKS = np.ones(1, np.float32)
"""Scales of blocks where there are none."""


class PieceRows:
    """Models ``ctas`` of pieces of rows of K, in the order of ``k``: what takes Q, and gives S.

    over_minima : codes of 4 bits are integers from 0 to 15, of which products take those less 8.
    """

    over_minima = False

    def __init__(self, ctas: list[Any], k: list[PieceColumns]) -> None:
        self.ctas, self.k, self.each = ctas, k, k[0].each

    @property
    def q_columns(self) -> IntArray | None:
        """The order in which they take the columns of Q, None for their own: with elements of several columns the
        first, then the second ones and so on of each piece.
        """
        if self.each == 1:
            return None
        parts = [piece.positions(half) for piece in self.k for half in range(self.each)]
        return np.concatenate([part[part >= 0] for part in parts])

    def load_q(self, dram: Memory, offset: IntArray, valid: Array) -> tuple[Any, ...]:
        """Q rows, elements ``offset[programs, BM]`` of ``dram`` with their columns in the order of ``q_columns``; rows
        that are not valid are 0.
        """
        loaded, first = [], 0
        for cta, piece in zip(self.ctas, self.k, strict=False):
            for half in range(self.each):
                loaded.append(cta.load_q(dram, offset + first, valid, **_role(half)))
                first += piece.inside
        return tuple(loaded)

    def scores(self, q: tuple[Any, ...], k: tuple[Any, ...], active: Array, blocks: Array = NO_BLOCKS) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``: piece after piece, even before odd columns. ``blocks``: scales of K."""
        s: Fragments | None = None
        for i, (cta, operand) in enumerate(zip(self.ctas, k, strict=False)):
            for half, factor in enumerate(self._factors(operand, self.k[i], blocks)):
                s = cta.scores(q[i * self.each + half], factor, active, s, **_role(half))
        assert s is not None
        return s

    def _factors(self, operand: Any, piece: PieceColumns, blocks: Array) -> tuple[Any, ...]:
        """What the products take of an operand's registers: as many as its elements have columns. ``blocks``
        ``[programs, BN, D / 16]``: scales of four elements each.
        """
        if self.each == 1:
            return (operand,)
        if self.each == 2:
            return tuple(operand.with_values(half) for half in halves(operand.values))
        scale = None
        if blocks.ndim > 1:
            column = np.minimum((piece.first + operand.map.col) // 4, blocks.shape[2] - 1)  # padding holds zeros
            scale = blocks[:, operand.map.row, column].astype(np.float32)
        every = quarters(operand.values, scale, unsigned=self.over_minima)
        return tuple(operand.with_values(quarter) for quarter in every)


class DecodeCTA(PieceRows, Parts):
    """The CTAs of one launch, side by side. It walks over its tiles of K and V itself, from the key where the programs'
    ranges start. Q, K and V are tuples of pieces, as in the kernel.

    ctas : of each piece. k, v : the pieces of K's and V's columns. tiles : (K, V) iterators of each CTA, None where it
    has none.
    """

    def __init__(
        self, ctas: list[Any], k: list[PieceColumns], v: list[PieceColumns],
        tiles: list[tuple[KVCacheIterator | None, KVCacheIterator | None]],
    ) -> None:
        PieceRows.__init__(self, ctas, k)
        Parts.__init__(self, ctas, ctas[: len(v)])
        self.v, self.tiles = v, tiles
        for cta, pair in zip(ctas, tiles, strict=True):
            cta.follow(*pair)

    def load_k(self, active: Array) -> tuple[Any, ...]:
        """The next K tile into shared memory, then to the operands of S = Q K^T."""
        both = zip(self.ctas, self.tiles, strict=True)
        return tuple(cta.load_k(tiles.next_tile(), active) for cta, (tiles, _) in both if tiles is not None)

    def load_v(self, active: Array) -> tuple[Any, ...]:
        """The next V tile into shared memory, then to the operands of O += P V."""
        both = zip(self.ctas, self.tiles, strict=True)
        return tuple(cta.load_v(tiles.next_tile(), active) for cta, (_, tiles) in both if tiles is not None)

    def zeros(self) -> Accumulator:
        """The output accumulator."""
        parts, columns = [], []
        for cta, piece in zip(self.of_v, self.v, strict=True):
            for half in range(self.each):
                parts.append(cta.zeros())
                columns.append(piece.positions(half))
        beside = np.zeros((len(parts[0].values), parts[0].shape[0]), np.float32) if self.over_minima else None
        return Accumulator(tuple(parts), tuple(columns), beside=beside)

    def row_sums(self, q: tuple[Any, ...]) -> Array:
        """Sums of the rows of Q, ``[programs, BM]``; 0 where K has no minima."""
        if not self.over_minima:
            return np.zeros((1, 1), np.float32)
        return np.sum([part.tile().astype(np.float32).sum(axis=2) for part in q], axis=0)

    def add_minima(
        self, p: Fragments, o: Accumulator, features: Any, page: Array, slot: Array, kv_head: Array, exists: Array
    ) -> Accumulator:
        """O, and beside it the weighted minima of V's tokens, where it has some."""
        if not self.over_minima:
            return o
        return o.with_beside(o.beside + self.row_sum(weighted_minima(p, features, page, slot, kv_head, exists)))

    def accumulate(
        self, p: Fragments, v: tuple[Any, ...], o: Accumulator, active: Array, blocks: Array = NO_BLOCKS
    ) -> Accumulator:
        """O += P V. ``blocks``: scales of V."""
        operands = zip(self.of_v, v, self.v, strict=True)
        factors = [(cta, b) for cta, operand, piece in operands for b in self._factors(operand, piece, blocks)]
        values = [(*both, part) for both, part in zip(factors, o.parts, strict=True)]
        return o.with_parts(self.add_values(p, values, active))


class WholeRowsCTA(DecodeCTA):
    """A model that takes rows of e4m3 as they are, where the kernel has the even columns of Q and O apart, and those of
    K and V in pairs.
    """

    def load_q(self, dram: Memory, offset: IntArray, valid: Array) -> tuple[TileView, ...]:
        """See :meth:`DecodeCTA.load_q`: once, and its even and its odd columns."""
        (q,) = super().load_q(dram, offset, valid)
        return TileView(q, _even), TileView(q, _odd)

    def load_k(self, active: Array) -> tuple[TileView]:
        """See :meth:`DecodeCTA.load_k`."""
        (k,) = super().load_k(active)
        return (TileView(k, _pairs),)

    def load_v(self, active: Array) -> tuple[TileView]:
        """See :meth:`DecodeCTA.load_v`."""
        (v,) = super().load_v(active)
        return (TileView(v, _pairs),)

    def scores(
        self, q: tuple[TileView, ...], k: tuple[TileView, ...], active: Array, blocks: Array = NO_BLOCKS
    ) -> Fragments:
        """See :meth:`DecodeCTA.scores`."""
        return super().scores((q[0].value,), (k[0].value,), active)

    def zeros(self) -> Accumulator:
        """See :meth:`DecodeCTA.zeros`."""
        o = super().zeros()
        return Accumulator(o.parts, o.columns, 2)

    def accumulate(
        self, p: Fragments, v: tuple[TileView, ...], o: Accumulator, active: Array, blocks: Array = NO_BLOCKS
    ) -> Accumulator:
        """See :meth:`DecodeCTA.accumulate`."""
        return super().accumulate(p, (v[0].value,), o, active)


class QueriedValuesCTA(DecodeCTA):
    """Models of V's columns, whose tiles lie where K's do and are read twice, before those of K's own: rows of both
    are as long as one of K that has V in it.

    keys, values : the models of the columns of either, which take rows of Q and of Qv.
    """

    def __init__(
        self, ctas: list[Any], k: list[PieceColumns], v: list[PieceColumns],
        tiles: list[tuple[KVCacheIterator | None, KVCacheIterator | None]],
    ) -> None:
        super().__init__(ctas, k, v, tiles)
        n = len(v)
        self.values, self.keys = PieceRows(ctas[:n], v), PieceRows(ctas[n:], k[n:])

    @property
    def q_columns(self) -> IntArray | None:
        """See :meth:`DecodeCTA.q_columns`."""
        return self.keys.q_columns

    def load_q(self, dram: Memory, offset: IntArray, valid: Array) -> tuple[Any, ...]:
        """See :meth:`DecodeCTA.load_q`: by the models of K."""
        return self.keys.load_q(dram, offset, valid)

    def scores(self, q: tuple[Any, ...], k: tuple[Any, ...], active: Array, blocks: Array = NO_BLOCKS) -> Fragments:
        """See :meth:`DecodeCTA.scores`; of K alone, or of V alone, by their models."""
        alone = len(k) < len(self.ctas)
        rows = self.keys if alone and k[0] is not self._values[0] else self.values if alone else self
        return rows.scores(q, k, active, blocks) if alone else super().scores(q, k, active, blocks)

    def load_k(self, active: Array) -> tuple[Any, ...]:
        """See :meth:`DecodeCTA.load_k`; V's tile comes first, which ``load_v`` gives."""
        every = super().load_k(active)
        self._values = every[: len(self.v)]
        return every[len(self.v) :]

    def load_v(self, active: Array) -> tuple[Any, ...]:
        """V's tile as operands of S += Qv V^T."""
        return self._values

    def accumulate(
        self, p: Fragments, v: tuple[Any, ...], o: Accumulator, active: Array, blocks: Array = NO_BLOCKS
    ) -> Accumulator:
        """O += P V, V from the memory where it lies."""
        models: list[Any] = self.of_v
        return super().accumulate(p, tuple(cta.load_v(None, active) for cta in models), o, active)


def _role(half: int) -> dict[str, str]:
    return {"role": Q_ROLES[half]} if half else {}


def _even(tile: Array) -> Array:
    return tile[..., ::2]


def _odd(tile: Array) -> Array:
    return tile[..., 1::2]


def _pairs(tile: Array) -> Array:
    return np.ascontiguousarray(tile).view(np.int16)


def decode_cta(
    arch: str, config: DecodeConfig, k_cache: PagedKVCache, v_cache: PagedKVCache, batch_idx: Array, head_idx: Array,
    keys: tuple[Array, Array], traffic: Traffic, *, qv: bool = False, minima: bool = False,
) -> DecodeCTA:
    """The CTA models of ``arch`` for the tiles of ``config``.

    ``batch_idx`` and ``head_idx`` ``[programs]`` are each program's sequence and KV head, ``keys`` the first and the
    end of its keys. gfx950: MAX's decode through KVBuffer; float32, which that buffer does not take, strip by strip.
    sm_80, sm_90: what our Triton kernel compiles to; float32 without tensor cores. There warps may be other than 4;
    they lie along the rows where these are as many as the last piece of V is wide; K and V come ahead unless there is
    one stage. ``qv``: V has a query, too. ``minima``: K and V have minima.
    """
    BM, BN, stored = config.BM, config.BN, k_cache.dtype
    model = choose(arch, stored, "mha_decode", rows=BM).cta
    four, narrow = stored == np.uint8, stored.itemsize == 1
    whole = narrow and not four and (model.whole_rows or model is WgmmaCTA)
    each = 1 if whole or not narrow else 4 if four else 2
    step = 2 if narrow and not whole else 1  # what the cache counts in an element
    depths = k_cache.kv_params.head_size << four, v_cache.kv_params.head_size << four
    k, v = (
        piece_columns((w[0] << whole, w[1] << whole), depth, each)
        for w, depth in zip((config.columns, config.v_columns), depths, strict=True)
    )
    rows, product = KVRows(k_cache, v_cache, batch_idx, head_idx), np.dtype(float16) if narrow else stored

    def walk(cache: PagedKVCache, piece: PieceColumns) -> KVCacheIterator:
        at = cache, batch_idx, np.zeros_like(batch_idx), head_idx
        return tile_walk(at, BN, *keys, piece.first * step, piece.inside * step)

    tiles: list[tuple[KVCacheIterator | None, KVCacheIterator | None]] = []
    if qv:
        pieces, n = [*v, *k], len(v)
        models = []
        for i, piece in enumerate(pieces):
            cache, columns = v_cache if i < n else k_cache, (piece.inside, piece.width)
            tile = TileSpec(
                arch=arch, BM=BM, BN=BN, k=columns, v=columns if i < n else (0, 0), dtype=product, stored=stored,
                weights=product, warps=config.num_warps, ahead=config.num_stages // 2, v_in_k=i < n, rope=i >= n,
                each=each,
            )
            models.append(model.of(tile, KVRows(cache, cache, batch_idx, head_idx), traffic, beside=i > 0))
            tiles.append((walk(cache, piece), None))
        return QueriedValuesCTA(models, pieces, v, tiles)
    ctas: list[Any] = []
    for i in range(max(len(k), len(v))):
        of_k, of_v = ((p[i].inside, p[i].width) if i < len(p) else (0, 0) for p in (k, v))
        tile = TileSpec(
            arch=arch, BM=BM, BN=BN, k=of_k, v=of_v, dtype=product, stored=stored, weights=product,
            warps=config.num_warps, ahead=min(config.num_stages - 1, 1), each=each, along_rows=v[-1].width <= BM,
        )
        ctas.append(model.of(tile, rows, traffic, beside=i > 0))
        tiles.append((walk(k_cache, k[i]) if i < len(k) else None, walk(v_cache, v[i]) if i < len(v) else None))
    cta = (WholeRowsCTA if whole else DecodeCTA)(ctas, k, v, tiles)
    cta.over_minima = minima
    return cta
