"""A user's file with mistakes: mypy --strict finds what the end of each line says, and no more."""

from __future__ import annotations

from typing import Any

from kvlab.attention import kv_store_paged, merge_states, mha_decode, mha_decode_paged, mha_prefill, mla_decode_paged


def wrong(q: Any, k: Any, table: Any, lens: Any, cache: Any) -> None:
    mha_decode_paged(q, k, k, table, lens, backend="cuda")  # Argument "backend"
    mha_decode_paged(q, k, k, table, lens, arch="sm_70")  # Argument "arch"
    mha_decode_paged(q, k, k, table, lens, kv_layout="HDN")  # Argument "kv_layout"
    mha_decode_paged(q, k, k, table, lens, scal=0.5)  # Unexpected keyword argument "scal"
    mha_decode_paged(q, k, k, table)  # Missing positional argument "seq_lens"
    mha_decode_paged([1.0], k, k, table, lens)  # Argument 1
    mha_decode_paged(q, k, k, table, lens, window="causal")  # Argument "window"
    mha_decode(q, cache, arithmetic="bf16")  # Argument "arithmetic"
    mha_prefill(q, k, k, num_splits=2)  # Unexpected keyword argument "num_splits"
    mla_decode_paged(q, k, table, lens, v_scale=2.0)  # Unexpected keyword argument "v_scale"
    merge_states(q, k, backend="hopper")  # Argument "backend"
    kv_store_paged(k, k, k, k, table, check="yes")  # Argument "check"
    k = k + kv_store_paged(k, k, k, k, table).nbytes  # "None" has no attribute "nbytes"
