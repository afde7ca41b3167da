"""Attention of any new tokens over pages as mathematics: float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.features.resolve import Features
from kvlab.attention.mha_prefill.reference import reference as of_prefill
from kvlab.attention.tiles.pages import Sequences

Array = np.ndarray[Any, Any]


def reference(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, cu_seqlens: Array | None = None, *,
    scale: float, features: Features,
) -> tuple[Array, Array]:
    """``softmax(scale Q K^T) V`` of the last tokens of each sequence, as many as it has in q ``[1, total, Hq, D]`` by
    cu_seqlens, or S of q ``[B, S, Hq, D]``: what a prefill gives.
    """
    sequences = Sequences(cu_q=cu_seqlens, table=block_table, seq_lens=seq_lens)
    return of_prefill(q, k_cache, v_cache, sequences, scale=scale, features=features)
