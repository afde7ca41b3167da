"""kvlab's public functions as the side-by-side benchmark of attention kernels calls them.

All tensors are on the GPU, their last dimension contiguous:
  q, k, v          [B, S, H, D]           dense prefill, k/v may have fewer heads
  q (paged)        [T, Hq, D]             tokens of all sequences, one after the other
  k_cache, v_cache [pages, page_size, Hkv, D]
  block_table      int32 [B, columns]     page numbers, unused entries arbitrary
  cu_seqlens_q     int32 [B + 1]
  seq_lens         int32 [B]              keys, the new ones included
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvlab.attention import (
    Schedule,
    kv_store_paged,
    mha_decode_paged,
    mha_prefill,
    mha_prefill_paged,
    mla_decode_paged,
    plan,
)

__all__ = [
    "NotAvailable", "decode_paged", "kv_append", "mla_decode", "mla_sparse", "prefill", "prefill_paged", "with_plan",
]


class NotAvailable(RuntimeError):
    """The operation cannot take these inputs."""


_plans: list[Schedule] | None = None
"""The plan of the call that runs, made where there is none; None: the call makes its list itself."""


def with_plan(call: Callable[[], Any]) -> Callable[[], Any]:
    """One of the calls below with its plan made before, as the layers of a step share it, and as the peers' metadata
    is; NotAvailable for one that goes over no schedule.
    """
    own: list[Schedule] = []

    def planned() -> Any:
        global _plans
        _plans = own
        try:
            return call()
        finally:
            _plans = None

    planned()
    return planned


def prefill(q: Any, k: Any, v: Any, causal: bool = True, window: Any = None, scale: float | None = None) -> Any:
    """Dense prefill; ``window`` = (left, right) or None.  -> [B, S, Hq, Dv]"""
    return _call(mha_prefill, q, k, v, causal=causal, window=window, scale=scale)


def prefill_paged(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, cu_seqlens_q: Any, seq_lens: Any, max_seqlen_q: int,
    max_seqlen_k: int, causal: bool = True, window: Any = None, scale: float | None = None,
) -> Any:
    """Prefill of sequences of any lengths over a paged cache that already holds the new keys.  -> [T, Hq, D]

    A few tokens each, as many of all, are a decode.
    """
    arrays = q, k_cache, v_cache, block_table, seq_lens
    batch = seq_lens.shape[0]
    if causal and q.shape[0] == batch * max_seqlen_q and max_seqlen_q <= 4:
        drafts = q.unflatten(0, (batch, max_seqlen_q))
        return _call(mha_decode_paged, drafts, *arrays[1:], window=window, scale=scale).flatten(0, 1)
    seen = {"max_seqlen_q": max_seqlen_q, "causal": causal, "window": window, "scale": scale}
    return _call(mha_prefill_paged, *arrays, cu_seqlens_q, **seen)


def decode_paged(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, scale: float | None = None,
    max_seqlen_k: int | None = None, k_scale: Any = None, v_scale: Any = None,
) -> Any:
    """One query token a sequence, q [B, Hq, D]; the cache may be float8_e4m3fn.  -> [B, Hq, D]"""
    scales = {name: x for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None}
    return _call(mha_decode_paged, q, k_cache, v_cache, block_table, seq_lens, scale=scale, **scales)


def mla_decode(
    q: Any, kv_cache: Any, block_table: Any, seq_lens: Any, scale: float, max_seqlen_k: int | None = None
) -> Any:
    """Absorbed MLA decode, q [B, H, 576], kv_cache [pages, page_size, 576].  -> [B, H, 512]"""
    return _call(mla_decode_paged, q, kv_cache, block_table, seq_lens, scale=scale)


def mla_sparse(q: Any, pool: Any, indices: Any, scale: float) -> Any:
    """Absorbed MLA of tokens that see the slots in ``indices`` [B, topk] of pool [pages, page_size, 576 or 656 bytes].
    -> [B, H, 512]
    """
    return _call(mla_decode_paged, q, pool, indices=indices, scale=scale)


def kv_append(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, k_scale: Any = None, v_scale: Any = None
) -> None:
    """Write k, v [T, Hkv, D] to the slots slot_mapping (int64 [T], -1 = skip), in place."""
    _call(kv_store_paged, k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def _call(function: Any, *args: Any, **options: Any) -> Any:
    """``function``'s result; NotAvailable for what it refuses."""
    try:
        if _plans is not None:
            _plans[:] = _plans or [_plan_of(function, *args, **options)]
            options["plan"] = _plans[0]
        return function(*args, **options)
    except (TypeError, ValueError) as reason:
        raise NotAvailable(f"{function.__name__}: {reason}") from reason


def _plan_of(function: Any, q: Any, k_cache: Any, *args: Any, **options: Any) -> Any:
    """The plan of a call; NotAvailable of one that takes none."""
    call = function.planned(q, k_cache, *args, **options)
    known = mha_decode_paged, mha_prefill_paged, mla_decode_paged
    if not getattr(call, "over_schedule", False) or function not in known:
        raise NotAvailable(f"{function.__name__}: no plan goes with this call")
    if function is mla_decode_paged:
        (block_table, seq_lens), (heads, columns) = args, q.shape[-2:]
        most = block_table.shape[1] * k_cache.shape[1]
        return plan((seq_lens, most), q_heads=heads, kv_heads=1, head_dim=columns, v_dim=512)
    _, block_table, seq_lens, *starts = args
    new = (*starts, q.shape[0], options["max_seqlen_q"]) if starts else q.shape[1] if q.ndim == 4 else 1
    heads = {"q_heads": q.shape[-2], "kv_heads": k_cache.shape[2]}
    rows = {"head_dim": q.shape[-1], "itemsize": k_cache.dtype.itemsize}
    most = block_table.shape[1] * k_cache.shape[1]
    seen = {name: options[name] for name in ("causal", "window") if name in options}
    return plan((seq_lens, most), new, **heads, **rows, **seen)
