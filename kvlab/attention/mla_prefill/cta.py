"""Which machine a tile of MLA prefill is worked on: the nope, rope and value columns side by side."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.mha_prefill.machine import piece_cta, stages_on_gfx950
from kvlab.attention.scoring.emulator import by_column
from kvlab.cache import PagedKVCache
from kvlab.memory import Memory
from kvlab.staging import Fragments, KVCacheIterator, KVTile, TileCTA, Traffic
from kvlab.staging.nvidia_decode_cta import NvidiaDecodeCTA, operand_p_of
from kvlab.staging.wgmma_cta import WgmmaCTA, end_tiles

from .config import MLAPrefillConfig, MLAPrefillProblem

__all__ = ["MLAPrefillCTA"]

Array = np.ndarray[Any, Any]


class MLAPrefillCTA:
    """The CTAs of one launch, side by side, with a machine for each part: ``nope`` holds Q and K, ``rope`` their rope
    columns, ``value`` V; scores and P stand in the same registers of all three.

    Each is what :func:`~kvlab.attention.mha_prefill.machine.piece_cta` gives; on gfx950 K, its rope part and V have
    KVBuffers of their own. NVIDIA's fetch ahead, after :meth:`follow`: one tile, or ``num_stages - 1`` on sm_90 where
    no numbers of pages have to come first.
    """

    def __init__(
        self, arch: str, config: MLAPrefillConfig, problem: MLAPrefillProblem, dtype: np.dtype[Any], k: Any,
        v: Any, rope: Any, batch_idx: Array, head_idx: Array, traffic: Traffic,
    ) -> None:  # fmt: skip
        """``dtype`` of the products; ``k``, ``v`` and ``rope`` are what the iterators walk over; ``batch_idx`` and
        ``head_idx`` ``[programs]``.
        """
        columns = ((k, config.BD), (v, config.BV), (rope, config.BR))
        row_bytes = sum(n * np.dtype(rows.dtype).itemsize for rows, n in columns)
        stages = stages_on_gfx950(row_bytes, config.BN)

        ahead = 1 if isinstance(rope, PagedKVCache) else config.num_stages - 1

        def machine(
            rows: Any, head: Array, k_columns: tuple[int, int], v_columns: tuple[int, int], beside: bool = True
        ) -> TileCTA:
            sizes, stored = (config.BM, config.BN, config.num_warps), np.dtype(rows.dtype)
            where = rows, rows, batch_idx, head, traffic
            columns, last = (k_columns, v_columns), config.BV
            return piece_cta(
                arch, sizes, *columns, dtype, stored, dtype, *where, last=last, stages=stages, ahead=ahead,
                beside=beside,
            )  # fmt: skip

        self.depth = problem.nope
        none = 0, 0
        self.nope = machine(k, head_idx, (problem.nope, config.BD), none, False)
        self.rope = machine(rope, np.zeros_like(head_idx), (problem.rope, config.BR), none)
        self.value = machine(v, head_idx, none, (problem.value, config.BV))
        machines = self.nope, self.rope, self.value
        self._ahead: list[NvidiaDecodeCTA[Any]] = [x for x in machines if isinstance(x, NvidiaDecodeCTA)]
        self._wgmma = [x for x in machines if isinstance(x, WgmmaCTA)]

    def follow(self, *walks: KVCacheIterator) -> None:
        """Fetch ahead along these iterators, of K, V and the rope part for one loop after the other."""
        roles: list[list[KVCacheIterator | None]] = [[], [], []]  # of the three machines, K and V of each loop
        for k, v, rope in zip(walks[::3], walks[1::3], walks[2::3], strict=True):
            for tiles, pair in zip(roles, ((k, None), (rope, None), (None, v)), strict=True):
                tiles.extend(pair)
        ahead: list[Any] = [*self._ahead, *self._wgmma]
        for machine, tiles in zip(ahead, roles, strict=False):
            machine.follow(*tiles)

    def load_q(self, dram: Memory, offset: Array, valid: Array) -> tuple[Any, Any]:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``: their nope and their rope columns."""
        return self.nope.load_q(dram, offset, valid), self.rope.load_q(dram, offset + self.depth, valid)

    def load_k(self, tile: KVTile, active: Array) -> Any:
        """The K tile of a head."""
        return self.nope.load_k(tile, active)

    def load_rope(self, tile: KVTile, active: Array) -> Any:
        """The rope part of K, from the cache."""
        return self.rope.load_k(tile, active)

    def scores(
        self, q: Any, q_rope: Any, k: Any, k_rope: Any, k_scale: Array | None, rope_scale: Array | None, active: Array
    ) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``: one sum over all columns, times ``k_scale`` ``[programs, BN]`` before those
        for rope are added; two sums where there is a ``rope_scale`` of the rope part.
        """
        s = self.nope.scores(q, k, active)
        if k_scale is not None:
            s = s.with_values(s.values * by_column(s, k_scale))
        if rope_scale is None:
            return self.rope.scores(q_rope, k_rope, active, s)
        rope = self.rope.scores(q_rope, k_rope, active)
        return s.with_values(s.values + rope.values * by_column(s, rope_scale))

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``."""
        return self.nope.row_max(s)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]`` in the order of the hardware."""
        return self.nope.row_sum(p)

    def load_v(self, tile: KVTile, active: Array) -> Any:
        """The V tile of a head."""
        return self.value.load_v(tile, active)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, BV]``."""
        return self.value.zeros()

    def accumulate(self, p: Fragments, v: Any, o: Fragments, active: Array) -> Fragments:
        """O += P V."""
        if self._ahead:
            value = self._ahead[-1]
            return value.add_values(operand_p_of(self._ahead, value, p, active), v, o)
        if self._wgmma:
            o = self._wgmma[-1].add_values(p, v, o, active)
            end_tiles(self._wgmma)
            return o
        return self.value.accumulate(p, v, o, active)
