"""A captured graph of decode, replayed with other lengths."""

from __future__ import annotations

import numpy as np
import torch
from decode_cases import Inputs
from yardsticks import assert_accurate


def assert_replayed(
    x: Inputs, graph: torch.cuda.CUDAGraph, lens: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Of the five sequences of ``x``, whose lengths are in ``lens``: ``out`` and ``lse`` are written anew over NaN,
    accurate and with the same bits again, also of sequences without a key.
    """
    for new in ((0, 0, 0, 0, 0), (900, 1, 70, 0, 16), (1, 4000, 0, 2500, 3), (900, 4000, 70, 2500, 16)):
        lens.copy_(torch.tensor(new, dtype=lens.dtype))
        seen = []
        for _ in range(2):
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
            graph.replay()
            seen.append(out.clone())
        assert torch.equal(*seen)
        assert_accurate(x.with_(lens=np.array(new, np.int32)), out.cpu(), lse.cpu())
