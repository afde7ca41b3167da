"""The arrays of a prefill case in the memory of the GPU."""

from __future__ import annotations

import numpy as np
from prefill_cases import Inputs

from kvlab.common.arrays import to_torch


def on_device(x: Inputs) -> Inputs:
    """The arrays as CUDA tensors."""
    given = {n: getattr(x, n) for n in x.NAMES}
    arrays = {n: a for n, a in given.items() if isinstance(a, np.ndarray)}
    return x.with_(**{n: to_torch(np.ascontiguousarray(a)).cuda() for n, a in arrays.items()})
