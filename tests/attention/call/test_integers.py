"""Integers of every dtype that is taken, in every argument and on every backend that needs no child process.

Rests on the call with int64, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from operation_calls import OPERATIONS, call_of

from kvlab import attention
from kvlab.cache import PagedKVCacheCollection

INTEGERS = ("block_table", "seq_lens", "cu_seqlens_q", "cu_seqlens_k", "k_starts", "slot_mapping", "positions",
            "cu_seqlens")


def outcome(operation: str, dtype: str, backend: str) -> bytes:
    """The result of a call whose integers are of ``dtype``, or what a store wrote."""
    a = call_of(operation)
    if "slot_mapping" in a:
        a["slot_mapping"] = np.abs(a["slot_mapping"])
    a |= {name: a[name].astype(dtype) for name in INTEGERS if name in a}
    cache = a.get("cache")
    if isinstance(cache, PagedKVCacheCollection):
        lengths, table = cache.cache_lengths.astype(dtype), cache.lookup_table.astype(dtype)
        a["cache"] = PagedKVCacheCollection(cache.blocks, lengths, table, cache.max_seq_length, cache.max_cache_length)
    result: Any = getattr(attention, operation)(**a, backend=backend)
    if result is None:
        kept = a["cache"] if "cache" in a else a["k_cache"]
        result = kept if isinstance(kept, np.ndarray) else kept.blocks
    return bytes(np.asarray(result).tobytes())


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "uint64"])
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "merge_states"])
def test_equal_to_int64(operation: str, dtype: str, backend: str) -> None:
    assert outcome(operation, dtype, backend) == outcome(operation, "int64", backend)
