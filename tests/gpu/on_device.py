"""The arrays of a prefill case in the memory of the GPU."""

from __future__ import annotations

import numpy as np
from prefill_cases import Inputs

from kvlab.cache.arrays import to_torch


def on_device(x: Inputs) -> Inputs:
    """The arrays as CUDA tensors."""
    names = ("q", "k", "v", "cu_q", "cu_k", "table", "seq_lens", "sinks")
    tensors = {
        n: None if getattr(x, n) is None else to_torch(np.ascontiguousarray(getattr(x, n))).cuda() for n in names
    }
    return x.with_(**tensors)
