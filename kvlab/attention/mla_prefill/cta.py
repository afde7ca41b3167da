"""Which machine a tile of MLA prefill is worked on: the nope, rope and value columns side by side."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.mha_prefill.machine import piece_cta, stages_on_gfx950
from kvlab.attention.mha_prefill.rows import RowsAt, tile_walk
from kvlab.attention.scoring.emulator import by_column
from kvlab.cache import PagedKVCache
from kvlab.memory import Memory
from kvlab.staging import Fragments, KVCacheIterator, TileCTA, Traffic, row_offsets
from kvlab.staging.nvidia.decode_cta import NvidiaDecodeCTA, operand_p_of
from kvlab.staging.nvidia.wgmma_cta import WgmmaCTA, end_tiles

from .config import MLAPrefillConfig, MLAPrefillProblem

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
    ) -> None:
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
            )

        self.BN, self.columns = config.BN, {"nope": problem.nope, "rope": problem.rope, "value": problem.value}
        none = 0, 0
        self.nope = machine(k, head_idx, (problem.nope, config.BD), none, False)
        self.rope = machine(rope, np.zeros_like(head_idx), (problem.rope, config.BR), none)
        self.value = machine(v, head_idx, none, (problem.value, config.BV))
        machines = self.nope, self.rope, self.value
        self._ahead: list[NvidiaDecodeCTA[Any]] = [x for x in machines if isinstance(x, NvidiaDecodeCTA)]
        self._wgmma = [x for x in machines if isinstance(x, WgmmaCTA)]

    def follow(self, k: RowsAt, v: RowsAt, rope: RowsAt, lo: Array, full: Array, hi: Array) -> None:
        """Fetch ahead along the tiles of K, V and the rope part from ``lo`` to ``full`` and on to ``hi``."""
        ahead: list[Any] = [*self._ahead, *self._wgmma]
        roles = (k, "nope"), (rope, "rope"), (v, "value")
        for machine, (at, part) in zip(ahead, roles, strict=False):
            walks = [self._walk(part, at, *bounds) for bounds in ((lo, full), (full, hi))]
            machine.follow(*(walk for tiles in walks for walk in ((None, tiles) if part == "value" else (tiles, None))))

    def _walk(self, part: str, at: RowsAt, start: Array, end: Array) -> KVCacheIterator:
        return tile_walk(at, self.BN, start, end, 0, self.columns[part])

    def load_q(self, array: Array, index: tuple[Array, ...], valid: Array) -> tuple[Any, Any]:
        """The query rows of ``array`` at ``index``, ``[programs, BM]``: their nope and their rope columns."""
        dram, offset = Memory.over(array, name="q"), row_offsets(array, index, valid)
        return self.nope.load_q(dram, offset, valid), self.rope.load_q(dram, offset + self.columns["nope"], valid)

    def load_k(self, at: RowsAt, key: Array, end: Array, active: Array) -> Any:
        """The K tile of a head, of the keys ``[programs, BN]`` below ``end``."""
        return self.nope.load_k(self._walk("nope", at, key[:, 0], end).next_tile(), active)

    def load_rope(self, at: RowsAt, key: Array, end: Array, active: Array) -> Any:
        """The rope part of K, from the cache."""
        return self.rope.load_k(self._walk("rope", at, key[:, 0], end).next_tile(), active)

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

    def load_v(self, at: RowsAt, key: Array, end: Array, active: Array) -> Any:
        """The V tile of a head."""
        return self.value.load_v(self._walk("value", at, key[:, 0], end).next_tile(), active)

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
