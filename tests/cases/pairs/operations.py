"""The pairwise cases of all operations."""

from __future__ import annotations

from typing import Any

from pairs import kv_store, merge_states, mla_decode, mla_prefill, paged_decode, prefill

CASES: dict[str, list[Any]] = {
    "mha_decode": paged_decode.MHA_DECODE,
    "mha_decode_streaming": paged_decode.MHA_DECODE_STREAMING,
    "mha_prefill": prefill.MHA_PREFILL,
    "mla_decode": mla_decode.MLA_DECODE,
    "mla_prefill": mla_prefill.MLA_PREFILL,
    "merge_states": merge_states.MERGE_STATES,
    "kv_store": kv_store.KV_STORE,
    "mla_store": kv_store.MLA_STORE,
}
"""(row, what builds its call) of each operation."""
TABLES = {
    "mha_decode": paged_decode.DECODE,
    "mha_decode_streaming": paged_decode.STREAMING,
    "mha_prefill": prefill.PREFILL,
    "mla_decode": mla_decode.DECODE,
    "mla_prefill": mla_prefill.PREFILL,
    "merge_states": merge_states.MERGE,
    "kv_store": kv_store.STORE,
    "mla_store": kv_store.LATENT,
}
