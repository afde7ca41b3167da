"""The CTA models of an MLA prefill tile: the nope, rope and value columns side by side."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.cache import PagedKVCache
from kvlab.memory import Memory
from kvlab.staging import Fragments, KVCacheIterator, Traffic, row_offsets
from kvlab.staging.tile.tile_spec import KVRows, TileCTA, TileSpec

from .parts import Parts
from .rows import RowsAt, tile_walk
from .table import choose

if TYPE_CHECKING:
    from kvlab.attention.mla_prefill.config import MLAPrefillConfig, MLAPrefillProblem

Array = np.ndarray[Any, Any]


class MLAPrefillCTA(Parts):
    """The CTAs of one launch, side by side, with a model for each part: ``nope`` holds Q and K, ``rope`` their rope
    columns, ``value`` V; scores and P lie in the same registers of all three.

    On gfx950 K, its rope part and V have KVBuffers of their own. NVIDIA's fetch ahead, after :meth:`follow`: one tile,
    or ``num_stages - 1`` where no numbers of pages have to come first.
    """

    def __init__(
        self, arch: str, config: MLAPrefillConfig, problem: MLAPrefillProblem, dtype: np.dtype[Any], k: Any,
        v: Any, rope: Any, batch_idx: Array, head_idx: Array, traffic: Traffic,
    ) -> None:
        """``dtype`` of the products; ``k``, ``v`` and ``rope`` are what the iterators walk over; ``batch_idx`` and
        ``head_idx`` ``[programs]``.
        """
        columns = ((k, config.BD), (v, config.BV), (rope, config.BR))
        key_bytes = sum(n * np.dtype(rows.dtype).itemsize for rows, n in columns)
        ahead = min(config.num_stages - 1, 1 if isinstance(rope, PagedKVCache) else config.num_stages)

        def part(
            rows: Any, head: Array, k_columns: tuple[int, int], v_columns: tuple[int, int], beside: bool = True
        ) -> TileCTA:
            stored = np.dtype(rows.dtype)
            tile = TileSpec(
                arch=arch, BM=config.BM, BN=config.BN, k=k_columns, v=v_columns, dtype=dtype, stored=stored,
                weights=dtype, warps=config.num_warps, ahead=ahead, along_rows=config.BV <= config.BM,
                key_bytes=key_bytes,
            )
            model = choose(arch, stored, "mla_prefill", rows=config.BM).cta
            return model.of(tile, KVRows(rows, rows, batch_idx, head), traffic, beside=beside)

        self.BN, self.columns = config.BN, {"nope": problem.nope, "rope": problem.rope, "value": problem.value}
        self.k, self.v, self.rope_rows, self.batch_idx, self.head_idx = k, v, rope, batch_idx, head_idx
        self.tiles: list[dict[str, KVCacheIterator]] = []
        none = 0, 0
        self.nope = part(k, head_idx, (problem.nope, config.BD), none, False)
        self.rope = part(rope, np.zeros_like(head_idx), (problem.rope, config.BR), none)
        self.value = part(v, head_idx, none, (problem.value, config.BV))
        super().__init__((self.nope, self.rope, self.value), (self.value,))

    def follow(self, first: Array, base: Array, *bounds: Array) -> None:
        """Loops over the rows of K from one of ``bounds`` to the next, and fetches ahead along them. first : the first
        row of each program's sequence. base : its key there.
        """
        for lo, hi in pairwise(bounds):
            places: dict[str, RowsAt] = {"nope": (self.k, 0, first, self.head_idx)}
            places |= {"rope": (self.rope_rows, self.batch_idx, base, 0), "value": (self.v, 0, first, self.head_idx)}
            self.tiles.append(
                {name: tile_walk(at, self.BN, lo, hi, 0, self.columns[name]) for name, at in places.items()}
            )
        for name in self.columns if self.fetches else ():
            walks = [loop[name] for loop in self.tiles]
            pairs = ((None, tiles) if name == "value" else (tiles, None) for tiles in walks)
            getattr(self, name).follow(*(walk for pair in pairs for walk in pair))

    def load_q(self, array: Array, index: tuple[Array, ...], valid: Array) -> tuple[Any, Any]:
        """The query rows of ``array`` at ``index``, ``[programs, BM]``: their nope and their rope columns."""
        dram, offset = Memory.over(array, name="q"), row_offsets(array, index, valid)
        return self.nope.load_q(dram, offset, valid), self.rope.load_q(dram, offset + self.columns["nope"], valid)

    def load_k(self, loop: int, active: Array) -> Any:
        """The next K tile of a loop."""
        return self.nope.load_k(self.tiles[loop]["nope"].next_tile(), active)

    def load_rope(self, loop: int, active: Array) -> Any:
        """The rope part of the same keys."""
        return self.rope.load_k(self.tiles[loop]["rope"].next_tile(), active)

    def scores(
        self, q: Any, q_rope: Any, k: Any, k_rope: Any, k_scale: Array | None, rope_scale: Array | None, active: Array
    ) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``: one sum over all columns, times ``k_scale`` ``[programs, BN]`` before those
        for rope are added; two sums where there is a ``rope_scale`` of the rope part.
        """
        s = self.nope.scores(q, k, active)
        if k_scale is not None:
            s = s.with_values(s.values * self._by_column(s, k_scale))
        if rope_scale is None:
            return self.rope.scores(q_rope, k_rope, active, s)
        rope = self.rope.scores(q_rope, k_rope, active)
        return s.with_values(s.values + rope.values * self._by_column(s, rope_scale))

    def _by_column(self, s: Fragments, scale: Array) -> Array:
        """Scales ``[programs, BN]``, or one for all keys, as each register element sees its column."""
        return s.by_column(np.broadcast_to(scale, (len(scale), self.BN)))

    def load_v(self, loop: int, active: Array) -> Any:
        """The next V tile of a loop."""
        return self.value.load_v(self.tiles[loop]["value"].next_tile(), active)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, BV]``."""
        return self.value.zeros()

    def accumulate(self, p: Fragments, v: Any, o: Fragments, active: Array) -> Fragments:
        """O += P V."""
        (o,) = self.add_values(p, [(self.value, v, o)], active)
        return o
