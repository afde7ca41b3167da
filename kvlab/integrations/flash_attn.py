"""flash-attention's calls over kvlab's operations: their signatures, their meaning, their layouts.

Positional arguments are those of flash-attention 2; what version 3 adds is given by name. Tensors on a GPU go to the
compiled kernels, and nothing waits for it. What a signature has and kvlab lacks raises NotImplementedError, an argument
that is not right ValueError; both name it. An input that requires grad is refused where grad mode is on.

``backend`` is kvlab's own keyword, as in :func:`kvlab.attention.mha_decode_paged`.
"""

from __future__ import annotations

import math
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from kvlab.attention import Rope, kv_store_paged, mha_decode_paged, mha_prefill, mha_prefill_paged
from kvlab.attention.call.checks import check_dtype
from kvlab.attention.call.ragged import check_offsets
from kvlab.attention.features.heads import check_heads_array
from kvlab.attention.features.scales import is_fp8
from kvlab.attention.masks import NullMask
from kvlab.common.checks import count, require

from .adapting import (
    checked_integers,
    checked_tensors,
    in_names,
    in_sight,
    lacks,
    rows_of_starts,
    sight,
    slots_of,
    window_of,
)

DECODED = 4
"""New tokens a sequence that a decode takes; more are a prefill."""
NO_BACKWARD = "kvlab is for inference, and its forward pass gives the same bits each time"
NO_DROPOUT = "kvlab drops no weights; scale and causal are given by name where version 3 has no dropout_p"
NO_SPLITS = "a prefill shares no keys between programs"
NO_UNITS = "programs share the keys of a call with qv by the lengths"
SCALES = {"q_scale": "q_descale", "k_scale": "k_descale", "v_scale": "v_descale"}
LACKING: dict[str, tuple[str, Any]] = {
    "pack_gqa": ("the query heads of a group are packed in any case", None),
    "sm_margin": ("a launch takes the whole GPU", 0),
    "scheduler_metadata": ("work is shared out on the GPU, see kvlab.attention.plan", None),
    "seqused_q": ("every row of q is computed", None),
}
"""Version 3's keywords that kvlab lacks: why, and the value that leaves each out."""


class Version3Options(TypedDict, total=False):
    """Keywords of version 3, in all three calls, with those of SGLang's (``sinks``, ``ver``) and of vLLM's
    (``s_aux``, ``fa_version``), and kvlab's ``backend``."""

    qv: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    attention_chunk: int
    sinks: Tensor | None
    s_aux: Tensor | None
    ver: int
    fa_version: int
    pack_gqa: None
    sm_margin: int
    backend: Any


class DenseOptions(Version3Options, total=False):
    """Keywords of ``flash_attn_func``."""

    num_splits: int


class RaggedOptions(DenseOptions, total=False):
    """Keywords of ``flash_attn_varlen_func``."""

    seqused_q: None
    seqused_k: Tensor | None
    scheduler_metadata: None
    out: Tensor | None


class CacheOptions(Version3Options, total=False):
    """Keywords of ``flash_attn_with_kvcache``."""

    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k_new: Tensor | None
    max_seqlen_q: int | None
    rotary_seqlens: Tensor | None
    scheduler_metadata: None


@in_names(scale="softmax_scale", k_cache="k", v_cache="v", **SCALES)
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **version_3: Unpack[DenseOptions],
) -> Any:
    """Attention of q ``[B, S, Hq, D]`` to k ``[B, n, Hkv, D]`` and v ``[B, n, Hkv, Dv]``: out ``[B, S, Hq, Dv]``.

    softmax_scale  of the scores, ``1 / sqrt(D)`` if None, ``1 / sqrt(D + Dv)`` with qv
    causal         query i sees the keys up to ``i + n - S``: aligned at the end, bottom right
    window_size    ``(left, right)`` keys beside that of the query; below 0 is no bound
    softcap        0, or c of ``c tanh(scores / c)``
    alibi_slopes   float32 ``[Hq]`` or ``[B, Hq]``: slope times the distance of query and key is subtracted from scores
    q_descale, k_descale, v_descale  float32 ``[B, Hkv]`` that float8_e4m3fn values are to be multiplied by; out is
                   bfloat16 then
    qv             None, or a second query ``[B, S, Hq, Dv]`` of V, as of
                   :func:`~kvlab.attention.mha_decode_paged`
    attention_chunk  0, or keys of a chunk: a query sees those of its own
    sinks, s_aux   None, or ``[Hq]``, by either name: a logit of each head that counts as a key without a value, in lse
                   too
    ver, fa_version  of flash-attention, at least 2: which of its kernels would run; kvlab chooses its own
    return_attn_probs  return ``(out, lse, None)``: lse ``[B, Hq, S]``, float32, natural logarithm, +inf for a row
                   without a key, whose output is 0. Probabilities are not kept

    D and Dv that are no multiples of 8 are filled up with zeros, in copies. NotImplementedError: dropout_p,
    deterministic (of a backward pass), num_splits above 1, pack_gqa, sm_margin.

    >>> q, kv = torch.ones(1, 3, 4, 64), torch.ones(1, 2, 2, 64)
    >>> out, lse, _ = flash_attn_func(q, kv, kv, causal=True, return_attn_probs=True, backend="emulator")
    >>> out[0, :, 0, 0].tolist(), lse[0, 0].exp().log2().tolist()[:1], lse.shape
    ([0.0, 1.0, 1.0], [inf], torch.Size([1, 4, 3]))
    """
    lacks(NO_DROPOUT, 0, dropout_p=dropout_p)
    lacks(NO_BACKWARD, False, deterministic=deterministic)
    _check_version_3(version_3, DenseOptions)
    checked_tensors("q k v", q=q, k=k, v=v, alibi_slopes=alibi_slopes)
    if version_3.get("qv") is not None:  # a sequence is a page
        of_pages: Any = version_3
        found = flash_attn_with_kvcache(
            q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes, return_softmax_lse=True, **of_pages,
        )
        return (*found, None) if return_attn_probs else found[0]
    options = _scores(version_3, softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= _of_heads(version_3, q, k, v)
    out, lse = _with_whole_rows(mha_prefill, (q, k, v), options)
    return (out, _heads_first(lse), None) if return_attn_probs else out


@in_names(scale="softmax_scale", seq_lens="cu_seqlens_k", **SCALES)
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    **version_3: Unpack[RaggedOptions],
) -> Any:
    """Attention of sequences of any lengths one after the other: q ``[total, Hq, D]``, k and v ``[total_k, Hkv, ..]``,
    out ``[total, Hq, Dv]``.

    cu_seqlens_q, cu_seqlens_k  integers ``[B + 1]``: where each sequence starts, and the total
    max_seqlen_q, max_seqlen_k  the longest of each; kvlab needs that of q alone
    block_table    integers ``[B, columns]``: k and v are pages ``[pages, page_size, Hkv, ..]``, of any size, and the
                   keys of a sequence as many as ``cu_seqlens_k`` says, or ``seqused_k`` ``[B]``
    return_attn_probs  return ``(out, lse, None)`` with lse ``[Hq, total]``
    out            None, or where to write the output, as vLLM gives it; of columns that are a multiple of 8

    The rest: as for :func:`flash_attn_func`. NotImplementedError, besides: seqused_q, scheduler_metadata, and without
    block_table qv and seqused_k.

    >>> q, kv, starts = torch.ones(3, 4, 64), torch.ones(5, 2, 64), torch.tensor([0, 1, 3])
    >>> out, lse, _ = flash_attn_varlen_func(
    ...     q, kv, kv, starts, torch.tensor([0, 2, 5]), 2, 3, softmax_scale=0.0, causal=True, return_attn_probs=True,
    ...     backend="emulator")
    >>> out.shape, lse[0].exp().tolist()
    (torch.Size([3, 4, 64]), [2.0, 2.0, 3.0])
    """
    lacks(NO_DROPOUT, 0, dropout_p=dropout_p)
    lacks(NO_BACKWARD, False, deterministic=deterministic)
    _check_version_3(version_3, RaggedOptions)
    seqused_k = version_3.get("seqused_k")
    checked_tensors(
        "q k v cu_seqlens_q", q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        alibi_slopes=alibi_slopes, block_table=block_table, seqused_k=seqused_k, out=version_3.get("out"),
    )
    count("max_seqlen_k", max_seqlen_k)
    options = _scores(version_3, softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= {"max_seqlen_q": max_seqlen_q, "out": version_3.get("out"), **_of_heads(version_3, q, k, v)}
    if block_table is None:
        lacks("keys of a sequence lie one after the other; pages with a block_table may be used in part",
              seqused_k=seqused_k, qv=version_3.get("qv"))
        require(cu_seqlens_k is not None, "cu_seqlens_k is None", "[B + 1], without a block_table")
        for name in options.keys() & {"k_scale", "v_scale"}:  # each token's has the same shape if there are B of them
            if k.shape[0] == options[name].shape[0]:
                options[name] = options[name][rows_of_starts(cu_seqlens_k, int(k.shape[0]))[0]]
        options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        out, lse = _with_whole_rows(mha_prefill, (q, k, v), options)
    else:
        one = (cu_seqlens_k is None) != (seqused_k is None)
        require(one, "of cu_seqlens_k and seqused_k both or none is given", "one, the keys of each sequence")
        lens: Any = cu_seqlens_k.diff() if cu_seqlens_k is not None else seqused_k
        out, lse = mha_prefill_paged(q, k, v, block_table, lens, cu_seqlens_q, qv=version_3.get("qv"), **options)
    return (out, _heads_first(lse), None) if return_attn_probs else out


@in_names(scale="softmax_scale", seq_lens="cache_seqlens", slot_mapping="cache_batch_idx", leftpad_k="cache_leftpad",
          **SCALES)
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, **version_3: Unpack[CacheOptions],
) -> Any:
    """Attention of the new tokens q ``[B, S, Hq, D]`` over a cache, to which k and v may be added in place before.

    k_cache, v_cache  ``[sequences, length, Hkv, ..]``, of which ``cache_batch_idx`` ``[B]`` tells those of the batch
                   (the first B if None); or, with ``block_table`` ``[B, columns]`` (version 3: ``page_table``), pages
                   ``[pages, page_size, Hkv, ..]`` of any size
    k, v           None, or the new keys ``[B, new, Hkv, ..]``, which go behind the first ``cache_seqlens``
    rotary_cos, rotary_sin  ``[positions, R / 2]``: k and q are turned, in float32, in pairs (2j, 2j + 1) if
                   ``rotary_interleaved``, else (j, j + R / 2). Token i of k is at position ``cache_seqlens + i``; of q,
                   too, if causal or with a window, else all of q are at ``cache_seqlens``
    cache_seqlens  keys in the cache, without k: integers ``[B]``, a number for all, or None: the cache is full
    cache_leftpad  None, or integers ``[B]``: keys of the cache before the first valid one
    num_splits     programs that share the keys of a sequence, of up to 4 new tokens; 0: chosen by the sizes
    return_softmax_lse  return ``(out, lse)``: lse ``[B, Hq, S]``, float32, natural logarithm, +inf for a row without a
                   key
    cu_seqlens_q   integers ``[B + 1]``: q is ``[total, Hq, D]``, the longest ``max_seqlen_q``, and lse ``[Hq, total]``
    cu_seqlens_k_new  integers ``[B + 1]``: k and v are ``[total_new, Hkv, ..]``
    rotary_seqlens  integers ``[B]``: positions count from these instead of ``cache_seqlens``

    The rest: as for :func:`flash_attn_func`. Nothing is written before all is checked. On a GPU, where values are not
    looked at, new keys past the cache's end are dropped. NotImplementedError: num_splits above 1 with more than 4 new
    tokens or with qv, pack_gqa, sm_margin, scheduler_metadata, k and v for a cache of fp8.

    >>> q, new, cache = torch.ones(1, 1, 4, 64), torch.ones(1, 1, 2, 64), torch.zeros(2, 1, 32, 2, 64)
    >>> out, lse = flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=3, softmax_scale=0.0, causal=True,
    ...                                    return_softmax_lse=True, backend="emulator")
    >>> out[0, 0, 0, 0].item(), round(lse.exp()[0, 0, 0].item(), 5), cache[0, 0, 3, 0, 0].item()
    (0.25, 4.0, 1.0)
    >>> flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=torch.tensor([32]))
    Traceback (most recent call last):
        ...
    ValueError: cache_seqlens[0] is 32: must be 0 to 31, as a sequence of the cache holds 32 keys, 1 new among them
    """
    _check_version_3(version_3, CacheOptions)
    cu_seqlens_q, cu_seqlens_k_new = version_3.get("cu_seqlens_q"), version_3.get("cu_seqlens_k_new")
    page_table, rotary_seqlens = version_3.get("page_table"), version_3.get("rotary_seqlens")
    qv = version_3.get("qv")
    checked_tensors(
        "q k_cache v_cache", q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        block_table=block_table, page_table=page_table, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens, alibi_slopes=alibi_slopes, qv=qv,
    )
    options = _scores(version_3, softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= {"leftpad_k": cache_leftpad, **_of_heads(version_3, q, k_cache, v_cache)}
    require(page_table is None or block_table is None, "block_table and page_table are given", "one of them")
    _check_axes("q", q, cu_seqlens_q, "cu_seqlens_q")
    batch = int(q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1)
    checked_integers(cu_seqlens_q=cu_seqlens_q)
    checked_integers((batch,), f"[B = {batch}]", cache_batch_idx=cache_batch_idx)
    table = _table_of(k_cache, block_table if page_table is None else page_table, cache_batch_idx, batch)
    lens = _lengths_of(cache_seqlens, table, k_cache)
    if cache_leftpad is not None and cache_leftpad.shape == lens.shape and in_sight(lens):
        inside = ((cache_leftpad >= 0) & (cache_leftpad <= lens)).all()
        require(inside, f"cache_leftpad is {cache_leftpad.tolist()}", f"0 to {lens.tolist()}, the keys in the cache")
    store: dict[str, Any] | None = None
    given = [x is None for x in (k, v, rotary_cos, rotary_sin)]
    require(given[0] == given[1], "one of k and v is None", "given, as the other is, or None")
    require(given[2] == given[3], "one of rotary_cos and rotary_sin is None", "given, as the other is, or None")
    require(given[2] or not given[0], "rotary_cos is given without k", "None: what lies in the cache is turned already")
    if k is not None:
        if is_fp8(k_cache):
            why = "None; kvlab.attention.kv_store_paged quantises new keys on their way into the cache"
            raise NotImplementedError(f"k and v are given with a k_cache of {k_cache.dtype}: must be {why}")
        require(cache_seqlens is not None, "cache_seqlens is None with k", "the keys that lie in the cache before k")
        _check_axes("k", k, cu_seqlens_k_new, "cu_seqlens_k_new")
        _check_axes("v", v, cu_seqlens_k_new, "cu_seqlens_k_new")
        checked_integers((batch + 1,), f"[B + 1 = {batch + 1}]", cu_seqlens_k_new=cu_seqlens_k_new)
        if cu_seqlens_k_new is not None and in_sight(cu_seqlens_k_new):
            check_offsets("cu_seqlens_k_new", cu_seqlens_k_new, k, None)
        new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
        _check_lengths(lens, table, k_cache, new)
        sequence, places = _places(k, cu_seqlens_k_new, lens)
        store = {"slot_mapping": slots_of(table, sequence, places, int(k_cache.shape[1])).flatten(),
                 "backend": "auto" if options["backend"] == "hopper" else options["backend"]}
        if rotary_cos is not None:
            checked_integers((batch,), f"[B = {batch}]", rotary_seqlens=rotary_seqlens)
            start = lens if rotary_seqlens is None else rotary_seqlens
            fits = not in_sight(start) or (start >= 0).all()
            require(fits, f"rotary_seqlens is {start.tolist() if not fits else ''}", "positions, at least 0")
            still = isinstance(options["mask"], NullMask) and options["window"] == (None, None)
            positions = _places(q, cu_seqlens_q, start, still)[1]
            rope = {"rope": Rope(rotary_cos, rotary_sin, rotary_interleaved, first=0),
                    "positions": (places if start is lens else _places(k, cu_seqlens_k_new, start)[1]).flatten()}
            _check_positions(rotary_cos, positions, rope["positions"])
            q = _rotated(q, **{**store, **rope, "positions": positions.flatten()})
            store |= rope
        lens = (lens + new).to(torch.int32)
    else:
        lacks("nothing is turned without rotary_cos", rotary_seqlens=rotary_seqlens)
        _check_lengths(lens, table, k_cache, 0)
    if qv is not None:
        _check_axes("qv", qv, cu_seqlens_q, "cu_seqlens_q")
        lacks(NO_UNITS, 0, 1, num_splits=num_splits)
    if cu_seqlens_q is None and 0 < q.shape[1] <= DECODED:
        operation: Any = mha_decode_paged
        arguments: tuple[Any, ...] = (q, k_cache, v_cache, table, lens)
        options |= {"num_splits": count("num_splits", num_splits) or None} if qv is None else {"qv": qv}
    else:
        lacks(NO_SPLITS, 0, 1, num_splits=num_splits)
        operation, options["qv"] = mha_prefill_paged, qv
        rows, starts, options["max_seqlen_q"] = q, cu_seqlens_q, version_3.get("max_seqlen_q")
        if starts is None:
            options["max_seqlen_q"] = int(q.shape[1])
            starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q.shape[1]
            rows, options["qv"] = q.flatten(0, 1), None if qv is None else qv.flatten(0, 1)
        arguments = (rows, k_cache, v_cache, table, lens, starts)
    if k is not None and v is not None and store is not None:
        if not torch.compiler.is_compiling():
            operation.planned(*arguments, **options)  # what it refuses it refuses before the cache is written
        ragged = cu_seqlens_k_new is not None
        kv_store_paged(k if ragged else k.flatten(0, 1), v if ragged else v.flatten(0, 1), k_cache, v_cache, **store)
    out, lse = operation(*arguments, **options)
    if cu_seqlens_q is None:
        out, lse = out.reshape(*q.shape[:-1], out.shape[-1]), lse.reshape(q.shape[:-1])
    return (out, _heads_first(lse)) if return_softmax_lse else out


def _rotated(q: Tensor, **store: Any) -> Tensor:
    """Queries turned as keys are, by a store into pages of one token."""
    turned, rows = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.flatten(0, -3)
    if not q.numel():
        return turned
    pages = turned.view(-1, 1, *q.shape[-2:])
    store["slot_mapping"] = torch.arange(pages.shape[0], device=q.device)
    kv_store_paged(rows, None, pages, None, **store)
    return turned


def _check_version_3(given: Any, kind: type) -> None:
    """TypeError for keywords that are none of a call, NotImplementedError for what kvlab lacks."""
    known = kind.__annotations__
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"unexpected keyword argument {name!r}: must be one of {', '.join(known)}")
        if name in LACKING:
            why, neutral = LACKING[name]
            lacks(why, neutral, **{name: value})
    for name in ("ver", "fa_version"):
        count(name, given.get(name, 3), 2)
    lacks(NO_SPLITS, 0, 1, num_splits=given.get("num_splits", 1))


def _scores(
    given: Any, scale: float | None, causal: Any, window_size: Any, softcap: float, alibi_slopes: Tensor | None
) -> dict[str, Any]:
    """Keywords of an operation that tell how scores are made and where it runs."""
    chunk = count("attention_chunk", given.get("attention_chunk", 0))
    return {"scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes, "return_lse": True,
            "backend": given.get("backend", "auto"), **sight(causal, window_of(window_size), chunk)}


def _with_whole_rows(operation: Any, arrays: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A call over q, k and v whose columns, where they are no multiple of 8, are filled up with zeros."""
    q, columns = arrays[0], int(arrays[2].shape[-1])
    short = [max(16 - x.shape[-1], -x.shape[-1] % 8) for x in arrays]
    if max(short) > 0:
        lacks("q, k and v are filled up with zeros in copies", out=options.get("out"))
        arrays = tuple(torch.nn.functional.pad(x, (0, max(n, 0))) for x, n in zip(arrays, short, strict=True))
        options["scale"] = q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    out, lse = operation(*arrays, **options)
    return out[..., :columns], lse


def _heads_first(lse: Tensor) -> Tensor:
    """An lse ``[.., S, H]`` of kvlab as flash-attention's ``[.., H, S]``, +inf for a row without a key."""
    return lse.masked_fill(lse == -math.inf, math.inf).transpose(-1, -2).contiguous()


def _of_heads(given: Any, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The keywords of the scales and sinks that are given. ValueError for a scale of what is not fp8."""
    found = {}
    sinks = [name for name in ("sinks", "s_aux") if given.get(name) is not None]
    require(len(sinks) < 2, "sinks and s_aux are given", "one of them")
    for name in sinks:
        found["sinks"] = given[name]
        checked_tensors(**{name: given[name]})
        check_heads_array(name, given[name], q)
        check_dtype(name, given[name])
    for name, array in (("q", q), ("k", k), ("v", v)):
        scale = given.get(f"{name}_descale")
        if scale is not None:
            checked_tensors(**{f"{name}_descale": scale})
            require(is_fp8(array), f"{name}_descale is given, {name} is of {array.dtype}", "None but for float8_e4m3fn")
            found[f"{name}_scale"] = scale
    return found


def _check_axes(name: str, x: Tensor, starts: Tensor | None, starts_name: str) -> None:
    """ValueError unless ``x`` is ``[B, n, H, D]``, or ``[total, H, D]`` with ``starts``."""
    form = "[B, n, H, D]" if starts is None else f"[total, H, D] with {starts_name}"
    require(x.ndim == (4 if starts is None else 3), f"{name} has shape {tuple(x.shape)}", form)


def _places(x: Tensor, starts: Tensor | None, first: Tensor, still: bool = False) -> tuple[Tensor | None, Tensor]:
    """``(None, positions [B, n])`` of tokens ``[B, n, H, D]``, or ``(sequence [total], positions [total])`` of ragged
    ones: counted from ``first`` ``[B]`` of their sequences on, or all of them there if ``still``.
    """
    if starts is None:
        number = torch.arange(int(x.shape[1]), device=x.device)
        return None, first[:, None] + (number * 0 if still else number)
    sequence, number = rows_of_starts(starts, int(x.shape[0]))
    return sequence, first.long()[sequence] + (0 if still else number)


def _table_of(k_cache: Tensor, block_table: Tensor | None, cache_batch_idx: Tensor | None, batch: int) -> Tensor:
    """The pages of each sequence; a sequence of a cache without pages is one page."""
    if block_table is not None:
        checked_integers(block_table=block_table)
        shape = tuple(block_table.shape)
        require(len(shape) == 2 and shape[0] == batch, f"block_table has shape {shape}", f"[B = {batch}, columns]")
        require(cache_batch_idx is None, "cache_batch_idx is given with block_table", "None: a table tells the pages")
        return block_table
    if cache_batch_idx is None:
        require(batch <= k_cache.shape[0], f"q has {batch} sequences", f"at most those of k_cache, {k_cache.shape[0]}")
        return torch.arange(batch, dtype=torch.int32, device=k_cache.device)[:, None]
    sequences = int(k_cache.shape[0])
    if in_sight(cache_batch_idx):
        bad = (cache_batch_idx < 0) | (cache_batch_idx >= sequences)
        require(not bad.any(), f"cache_batch_idx is {cache_batch_idx.tolist()}", f"from 0 to {sequences - 1}")
    return cache_batch_idx[:, None].to(torch.int32)


def _lengths_of(cache_seqlens: Any, table: Tensor, k_cache: Tensor) -> Tensor:
    """Keys of each sequence in the cache."""
    if isinstance(cache_seqlens, Tensor):
        checked_integers(tuple(table.shape[:1]), f"[B = {table.shape[0]}]", cache_seqlens=cache_seqlens)
        return cache_seqlens
    full = int(table.shape[1] * k_cache.shape[1])
    n = full if cache_seqlens is None else count("cache_seqlens", cache_seqlens)
    return torch.full((int(table.shape[0]),), n, dtype=torch.int32, device=k_cache.device)


def _check_lengths(lens: Tensor, table: Tensor, k_cache: Tensor, new: Any) -> None:
    """ValueError for a sequence that holds more than the cache has room for, with ``new`` keys; not on a GPU."""
    if not in_sight(lens):
        return
    held = int(table.shape[1] * k_cache.shape[1])
    most = held - (new if isinstance(new, Tensor) else torch.full_like(lens, new))
    bad = (lens < 0) | (lens > most)
    if bad.any():
        b = int(bad.int().argmax())
        of_new = f", {held - int(most[b])} new among them" if held > most[b] else ""
        why = f"0 to {int(most[b])}, as a sequence of the cache holds {held} keys{of_new}"
        require(False, f"cache_seqlens[{b}] is {int(lens[b])}", why)


def _check_positions(rotary_cos: Tensor, *positions: Tensor) -> None:
    """ValueError for positions without angles; not on a GPU, where such tokens stay as they are."""
    for at in positions:
        if in_sight(at) and at.numel():
            most, rows = int(at.max()), int(rotary_cos.shape[0])
            require(most < rows, f"rotary_cos has {rows} positions", f"of more than {most}, the last token's")
