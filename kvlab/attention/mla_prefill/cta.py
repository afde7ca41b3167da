"""Which machine a tile of MLA prefill is worked on: the nope, rope and value columns side by side."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.memory import Memory
from kvlab.staging import Fragments, KVTile, TileCTA, Traffic
from kvlab.staging.fma_cta import FmaCTA, FmaShape
from kvlab.staging.kv_buffer_cta import KVBufferCTA, KVBufferShape
from kvlab.staging.mfma_cta import MfmaCTA, MfmaShape
from kvlab.staging.wgmma_cta import WgmmaCTA, WgmmaShape

from .config import MLAPrefillConfig, MLAPrefillProblem

__all__ = ["PREFILL_ARCHS", "MLAPrefillCTA"]

Array = np.ndarray[Any, Any]

PREFILL_ARCHS = ("sm_90", "gfx950")


class MLAPrefillCTA:
    """The CTAs of one launch, side by side, with a machine for each part: ``nope`` holds Q and K, ``rope`` their rope
    columns, ``value`` V; scores and P stand in the same registers of all three.

    sm_90: what our Triton kernel compiles to, float32 without tensor cores. gfx950: MAX's data path, K, its rope part
    and V through KVBuffers of their own; float32, which those do not take, strip by strip with the fp32 MFMA.
    """

    def __init__(
        self, arch: str, config: MLAPrefillConfig, problem: MLAPrefillProblem, k: Any, v: Any, rope: Any,
        batch_idx: Array, head_idx: Array, traffic: Traffic,
    ) -> None:  # fmt: skip
        """``k``, ``v`` and ``rope`` are what the iterators walk over; ``batch_idx`` and ``head_idx`` ``[programs]``."""

        def machine(rows: Any, head: Array, D: int, BD: int) -> TileCTA:
            BM, BN, dtype, stored = config.BM, config.BN, np.dtype(k.dtype), np.dtype(rows.dtype)
            if arch == "gfx950":
                if dtype.itemsize == 4:
                    return MfmaCTA(MfmaShape(BM, BN, D, dtype), rows, rows, batch_idx, head, traffic)
                return KVBufferCTA(KVBufferShape(BM, BN, D, dtype, stored=stored), rows, rows, batch_idx, head, traffic)
            if arch != "sm_90":
                raise ValueError(f"arch {arch!r} is not one of {', '.join(PREFILL_ARCHS)}")
            if dtype.itemsize == 4:
                return FmaCTA(FmaShape(BM, BN, D, BD, arch, config.num_warps), len(batch_idx), traffic)
            return WgmmaCTA(WgmmaShape(BM, BN, D, BD, dtype, config.num_warps, stored=stored), len(batch_idx), traffic)

        self.depth = problem.nope
        self.nope = machine(k, head_idx, problem.nope, config.BD)
        self.rope = machine(rope, np.zeros_like(head_idx), problem.rope, config.BR)
        self.value = machine(v, head_idx, problem.value, config.BV)

    def load_q(self, dram: Memory, offset: Array, valid: Array) -> tuple[Any, Any]:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``: their nope and their rope columns."""
        return self.nope.load_q(dram, offset, valid), self.rope.load_q(dram, offset + self.depth, valid)

    def load_k(self, tile: KVTile, active: Array) -> Any:
        """The K tile of a head."""
        return self.nope.load_k(tile, active)

    def load_rope(self, tile: KVTile, active: Array) -> Any:
        """The rope part of K, from the cache."""
        return self.rope.load_k(tile, active)

    def scores(self, q: Any, q_rope: Any, k: Any, k_rope: Any, rope_scale: Array | None, active: Array) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``: one sum over all columns, but for ``rope_scale`` ``[programs, BN]`` of the
        rope part: two then.
        """
        s = self.nope.scores(q, k, active)
        if rope_scale is None:
            return self.rope.scores(q_rope, k_rope, active, s)
        rope = self.rope.scores(q_rope, k_rope, active)
        return s.with_values(s.values + rope.values * np.take(rope_scale, s.map.col, axis=1))

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
        return self.value.accumulate(p, v, o, active)
