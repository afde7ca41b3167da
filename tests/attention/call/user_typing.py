"""A user's file: every operation, with names that type checkers know; mypy --strict finds nothing in it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvlab.attention.mha_decode.kernel
import kvlab.attention.mla_decode.config as config
from kvlab.attention import (
    Rope,
    Schedule,
    attend_paged,
    explain,
    kv_store,
    kv_store_paged,
    merge_states,
    mha_decode,
    mha_decode_paged,
    mha_decode_streaming,
    mha_decode_streaming_paged,
    mha_prefill,
    mha_prefill_cache,
    mha_prefill_paged,
    mla_decode,
    mla_decode_paged,
    mla_prefill,
    mla_prefill_paged,
    mla_prefill_ragged,
    mla_store_paged,
    plan,
)
from kvlab.attention.call.options import Backend, DecodeOptions
from kvlab.attention.kv_store import emulator
from kvlab.attention.masks import CausalMask
from kvlab.cache import PagedKVCacheCollection
from kvlab.staging import Traffic

Array = NDArray[np.float32]
launch = kvlab.attention.mha_decode.kernel.launch
chosen = config.choose_config
emulate = emulator.launch


def decodes(q: Array, k: Array, v: Array, table: Array, lens: Array, cache: PagedKVCacheCollection) -> list[Array]:
    out, lse = mha_decode_paged(q, k, v, table, lens, scale=0.5, return_lse=True, kv_layout="HND", num_splits=2)
    both: Array = merge_states(out[None], lse[None], return_lse=False, backend="emulator", arithmetic="chip")
    backend: Backend = "hopper" if q.shape[-1] == 128 else "auto"
    told = explain(mha_decode_paged, q, k, v, table, lens)
    streamed = mha_decode_streaming_paged(q, k, v, table, lens, arch="gfx950", traffic=Traffic())
    latent = mla_decode_paged(q, k, table, lens, v_dim=128, scale=0.1, backend=backend, check=False)
    shared: DecodeOptions = {"window": 128, "softcap": 30.0, "backend": backend, "arch": "sm_80"}
    shared |= {"mask": CausalMask(), "k_scale": lens}
    return [
        both, streamed, latent, mha_decode(q, cache, 0, **shared), mla_decode(q, cache, batch_invariant=True),
        mha_decode_streaming(q, cache, sinks=q[0, :, 0], base2=True, arithmetic="float32"),
        np.zeros(told.grid, np.float32),
    ]


def prefills(q: Array, k: Array, table: Array, lens: Array, starts: Array, cache: PagedKVCacheCollection) -> list[Any]:
    return [
        mha_prefill(q, k, k, causal=False, window=(4, None), cu_seqlens_q=starts, cu_seqlens_k=starts),
        mha_prefill_paged(q, k, k, table, lens, starts, max_seqlen_q=7, kv_layout="NHD", k_scale=0.5),
        mha_prefill_cache(q, cache, cu_seqlens_q=starts, backend="reference"),
        mla_prefill(q, k, k, cache, 1, cu_seqlens_q=starts, cu_seqlens_k=starts, latent_dim=512, rope_scale=2.0),
        mla_prefill_paged(q, k, k, k, table, lens, starts, starts, k_starts=lens, out=q, arch="sm_90"),
        mla_prefill_ragged(q, k, k, k, starts, starts, alibi_slopes=q[0, :, 0]),
    ]


def steps(q: Array, k: Array, table: Array, lens: Array, starts: Array) -> list[Array]:
    step: Schedule = plan(lens, (starts, 9), q_heads=8, kv_heads=2, head_dim=64, window=(4, 0))
    latent = plan((lens, 4096), q_heads=16, kv_heads=1, head_dim=576, v_dim=512)
    return [
        attend_paged(q, k, k, table, lens, starts, plan=step, window=(4, 0), backend="hopper"),
        mha_prefill_paged(q, k, k, table, lens, starts, plan=step), mla_decode_paged(q, k, table, lens, plan=latent),
    ]


def stores(k: Array, slots: Array, cos: Array, cache: PagedKVCacheCollection) -> None:
    kv_store_paged(k, None, k, None, slots)
    kv_store(k, -k, cache, cu_seqlens=slots, rope=Rope(cos, cos), positions=slots)
    kv_store_paged(k, -k, k, k, slots, k_granularity=64, kv_layout="HND", backend="triton", arch="gfx942")
    mla_store_paged(k, k, k, slots, scale=0.5, check=True)
