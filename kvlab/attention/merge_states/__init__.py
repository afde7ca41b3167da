"""Merging of partial attention: outputs over disjoint keys, put together by their lse."""

from __future__ import annotations

from typing import Unpack

from kvlab.attention.call.operation import PublicOperation
from kvlab.attention.call.options import MergeOptions
from kvlab.common.arrays import Array

from .call import MergeStates

__all__ = ["merge_states"]


@PublicOperation
def merge_states(outs: Array, lses: Array, **options: Unpack[MergeOptions]) -> MergeStates:
    """The attention over all keys, from N outputs over disjoint sets of them (split keys, cascade, context
    parallelism).

    outs   ``[N, T, H, D]``, or ``[N, B, S, H, D]`` as N calls of ``mha_decode`` give; bfloat16, float16 or float32
    lses   ``[N, T, H]``, or ``[N, B, S, H]``: natural log, float32. -inf (or +inf, as some libraries write) tells that
           a part saw no key; its output is not read and may be anything
    out    where to write, bfloat16, float16 or float32, memory of its own; a new array of outs' dtype by default
    return_lse  return ``(out, lse)`` with lse ``[T, H]`` or ``[B, S, H]``; otherwise out alone
    backend, arithmetic  as in ``mha_decode_paged``

    Weights are relative to the largest lse; sums are compensated. No key in any part gives 0 and -inf; an lse that is
    NaN gives NaN. ValueError on bad arguments, before anything is written.

    >>> import numpy as np
    >>> outs = np.array([1, 3, np.nan], np.float32).reshape(3, 1, 1, 1)  # three parts of one token, one head, D 1
    >>> lses = np.array([np.log(1), np.log(3), -np.inf], np.float32).reshape(3, 1, 1)
    >>> merged, lse = merge_states(outs, lses)
    >>> round(merged.item(), 5), round(float(np.exp(lse.item())), 5)
    (2.5, 4.0)
    """
    return MergeStates(outs=outs, lses=lses, **options)
