"""Cases of MLA decode over lists of slots, and the same as a dense decode over pages of one token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mla_cases
import numpy as np

Array = np.ndarray[Any, Any]


class Listed:
    """A case of ``mla_cases`` whose tokens see ``topk`` places: slots of keys of any sequence, some twice, and places
    that name none, -1, in between. The last token but one has none at all.
    """

    def __init__(self, case: mla_cases.Case, topk: int) -> None:
        self.x = x = case.build()
        rng, size = np.random.default_rng(topk), case.page
        b, key = np.nonzero(np.arange(max(x.lens)) < x.lens[:, None])
        used = x.table[b, key // size].astype(np.int64) * size + key % size
        tokens = len(x.lens) * case.S
        self.indices = rng.choice(used, (tokens, topk)).astype(np.int32)
        self.indices[rng.random((tokens, topk)) < 0.3] = -1
        self.indices[tokens - 1, topk // 4 : topk // 2] = -1
        self.indices[max(tokens - 2, 0), :] = -1

    @property
    def q(self) -> Array:
        """``[T, H, D]``"""
        return self.x.q.reshape(-1, *self.x.q.shape[2:])

    @property
    def dense(self) -> mla_cases.Inputs:
        """The same call without lists: a page for each slot, and each token a sequence of the slots that it sees."""
        valid = self.indices >= 0
        table = np.take_along_axis(self.indices, np.argsort(~valid, axis=1, kind="stable"), 1)
        rows = np.ascontiguousarray(self.x.rows)
        rows = rows.reshape(-1, 1, rows.shape[-1])
        asked = {n: a.reshape(-1, 1, 1) if n == "k_scale" and np.ndim(a) == 3 else a for n, a in self.x.asked.items()}
        lens = valid.sum(1).astype(np.int32)
        return replace(self.x, q=self.q[:, None], kv=rows, table=table, lens=lens, asked=asked)
