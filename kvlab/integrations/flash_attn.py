"""flash-attention's calls over kvlab's operations: their signatures, their meaning, their layouts.

Positional arguments are those of flash-attention 2; what version 3 adds is given by name. Tensors on a GPU go to the
compiled kernels, and nothing waits for it. What a signature has and kvlab lacks raises NotImplementedError, an argument
that is not right ValueError; both name it. An input that requires grad is refused where grad mode is on.

``backend`` is kvlab's own keyword, as in :func:`kvlab.attention.mha_decode_paged`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvlab.attention import Rope, kv_store_paged, mha_decode_paged, mha_prefill, mha_prefill_paged
from kvlab.attention.features.scales import is_fp8
from kvlab.common.arrays import on_gpu
from kvlab.common.checks import count, require

from .adapting import checked_tensors, in_names, lacks, rows_of_starts, sight, slots_of, window_of

DECODED = 4
"""New tokens a sequence that a decode takes; more are a prefill."""
NO_BACKWARD = "kvlab is for inference, and its forward pass gives the same bits each time"
NO_DROPOUT = "kvlab drops no weights; scale and causal are given by name where version 3 has no dropout_p"
OF_VERSION_3 = {
    "qv": "no operation takes a second query",
    "pack_gqa": "the query heads of a group are packed in any case",
    "scheduler_metadata": "work is shared out on the GPU, see kvlab.attention.plan",
}
SCALES = {"q_scale": "q_descale", "k_scale": "k_descale", "v_scale": "v_descale"}


@in_names(scale="softmax_scale", **SCALES)
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, qv: None = None, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, attention_chunk: int = 0, num_splits: int = 1,
    pack_gqa: None = None, sm_margin: int = 0, backend: Any = "auto",
) -> Any:
    """Attention of q ``[B, S, Hq, D]`` to k ``[B, n, Hkv, D]`` and v ``[B, n, Hkv, Dv]``: out ``[B, S, Hq, Dv]``.

    softmax_scale  of the scores, ``1 / sqrt(D)`` if None
    causal         query i sees the keys up to ``i + n - S``: aligned at the end, bottom right
    window_size    ``(left, right)`` keys beside that of the query; below 0 is no bound
    softcap        0, or c of ``c tanh(scores / c)``
    alibi_slopes   float32 ``[Hq]`` or ``[B, Hq]``: slope times the distance of query and key is subtracted from scores
    q_descale, k_descale, v_descale  float32 ``[B, Hkv]`` that float8_e4m3fn values are to be multiplied by; out is
                   bfloat16 then
    attention_chunk  0, or keys of a chunk: a query sees those of its own
    return_attn_probs  return ``(out, lse, None)``: lse ``[B, Hq, S]``, float32, natural logarithm, +inf for a row
                   without a key, whose output is 0. Probabilities are not kept

    NotImplementedError: dropout_p, deterministic (of a backward pass), qv, num_splits above 1, pack_gqa, sm_margin.

    >>> q, kv = torch.ones(1, 3, 4, 64), torch.ones(1, 2, 2, 64)
    >>> out, lse, _ = flash_attn_func(q, kv, kv, causal=True, return_attn_probs=True, backend="emulator")
    >>> out[0, :, 0, 0].tolist(), lse[0, 0].exp().log2().tolist()[:1], lse.shape
    ([0.0, 1.0, 1.0], [inf], torch.Size([1, 4, 3]))
    """
    lacks(NO_DROPOUT, 0, dropout_p=dropout_p)
    lacks(NO_BACKWARD, False, deterministic=deterministic)
    _lacks_of_version_3(qv=qv, pack_gqa=pack_gqa)
    lacks("a prefill shares no keys between programs", 0, 1, num_splits=num_splits)
    lacks("a launch takes the whole GPU", 0, sm_margin=sm_margin)
    checked_tensors(q=q, k=k, v=v, alibi_slopes=alibi_slopes)
    scales = _scales((q, q_descale), (k, k_descale), (v, v_descale))
    seen = sight(causal, window_of("window_size", window_size), count("attention_chunk", attention_chunk))
    options = {"scale": softmax_scale, "softcap": softcap, "alibi_slopes": alibi_slopes, "backend": backend}
    out, lse = mha_prefill(q, k, v, return_lse=True, **seen, **scales, **options)
    return (out, _heads_first(lse), None) if return_attn_probs else out


@in_names(scale="softmax_scale", seq_lens="cu_seqlens_k", **SCALES)
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None, *,
    seqused_q: None = None, seqused_k: Tensor | None = None, qv: None = None, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, attention_chunk: int = 0, num_splits: int = 1,
    pack_gqa: None = None, sm_margin: int = 0, backend: Any = "auto",
) -> Any:
    """Attention of sequences of any lengths one after the other: q ``[total, Hq, D]``, k and v ``[total_k, Hkv, ..]``,
    out ``[total, Hq, Dv]``.

    cu_seqlens_q, cu_seqlens_k  integers ``[B + 1]``: where each sequence starts, and the total
    max_seqlen_q, max_seqlen_k  the longest of each; kvlab needs that of q alone
    block_table    integers ``[B, columns]``: k and v are pages ``[pages, page_size, Hkv, ..]``, of any size, and the
                   keys of a sequence as many as ``cu_seqlens_k`` says, or ``seqused_k`` ``[B]``
    return_attn_probs  return ``(out, lse, None)`` with lse ``[Hq, total]``

    The rest: as for :func:`flash_attn_func`. NotImplementedError, besides: seqused_q, seqused_k without block_table.

    >>> q, kv, starts = torch.ones(3, 4, 64), torch.ones(5, 2, 64), torch.tensor([0, 1, 3])
    >>> out, lse, _ = flash_attn_varlen_func(
    ...     q, kv, kv, starts, torch.tensor([0, 2, 5]), 2, 3, softmax_scale=0.0, causal=True, return_attn_probs=True,
    ...     backend="emulator")
    >>> out.shape, lse[0].exp().tolist()
    (torch.Size([3, 4, 64]), [2.0, 2.0, 3.0])
    """
    lacks(NO_DROPOUT, 0, dropout_p=dropout_p)
    lacks(NO_BACKWARD, False, deterministic=deterministic)
    _lacks_of_version_3(qv=qv, pack_gqa=pack_gqa)
    lacks("a prefill shares no keys between programs", 0, 1, num_splits=num_splits)
    lacks("a launch takes the whole GPU", 0, sm_margin=sm_margin)
    lacks("every row of q is computed", seqused_q=seqused_q)
    checked_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, alibi_slopes=alibi_slopes,
                    block_table=block_table, seqused_k=seqused_k)
    count("max_seqlen_k", max_seqlen_k)
    scales = _scales((q, q_descale), (k, k_descale), (v, v_descale))
    seen = sight(causal, window_of("window_size", window_size), count("attention_chunk", attention_chunk))
    options: dict[str, Any] = {"scale": softmax_scale, "softcap": softcap, "alibi_slopes": alibi_slopes,
                               "max_seqlen_q": max_seqlen_q, "backend": backend, "return_lse": True}
    if block_table is None:
        for name in scales.keys() & {"k_scale", "v_scale"}:  # each token's has the same shape if there are B of them
            if k.shape[0] == scales[name].shape[0]:
                scales[name] = scales[name][rows_of_starts(cu_seqlens_k, int(k.shape[0]))[0]]
        lacks("keys of a sequence lie one after the other; pages with a block_table may be used in part",
              seqused_k=seqused_k)
        starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        out, lse = mha_prefill(q, k, v, **starts, **seen, **scales, **options)
    else:
        one = (cu_seqlens_k is None) != (seqused_k is None)
        require(one, "of cu_seqlens_k and seqused_k both or none is given", "one, the keys of each sequence")
        lens: Any = cu_seqlens_k.diff() if cu_seqlens_k is not None else seqused_k
        out, lse = mha_prefill_paged(q, k, v, block_table, lens, cu_seqlens_q, **seen, **scales, **options)
    return (out, _heads_first(lse), None) if return_attn_probs else out


@in_names(scale="softmax_scale", seq_lens="cache_seqlens", slot_mapping="cache_batch_idx", leftpad_k="cache_leftpad",
          **SCALES)
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, *, qv: None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, attention_chunk: int = 0, scheduler_metadata: None = None, pack_gqa: None = None,
    sm_margin: int = 0, backend: Any = "auto",
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
    looked at, new keys past the cache's end are dropped. NotImplementedError: qv, num_splits above 1 with more than 4
    new tokens, pack_gqa, sm_margin, scheduler_metadata, k and v for a cache of fp8.

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
    _lacks_of_version_3(qv=qv, pack_gqa=pack_gqa, scheduler_metadata=scheduler_metadata)
    lacks("a launch takes the whole GPU", 0, sm_margin=sm_margin)
    checked_tensors(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table, page_table=page_table,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens,
        alibi_slopes=alibi_slopes,
    )
    window, chunk = window_of("window_size", window_size), count("attention_chunk", attention_chunk)
    options: dict[str, Any] = {
        "scale": softmax_scale, "softcap": softcap, "alibi_slopes": alibi_slopes, "backend": backend,
        "return_lse": True, "leftpad_k": cache_leftpad, **sight(causal, window, chunk),
        **_scales((q, q_descale), (k_cache, k_descale), (v_cache, v_descale)),
    }
    require(page_table is None or block_table is None, "block_table and page_table are given", "one of them")
    queries = _tokens_of("q", q, cu_seqlens_q, "cu_seqlens_q")
    batch = int(q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1)
    table = _table_of(k_cache, block_table if page_table is None else page_table, cache_batch_idx, batch)
    lens = _lengths_of(cache_seqlens, table, k_cache)
    if cache_leftpad is not None and cache_leftpad.shape == lens.shape and not on_gpu(lens):
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
        sequence, number = _tokens_of("k", k, cu_seqlens_k_new, "cu_seqlens_k_new")
        new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
        _check_lengths(lens, table, k_cache, new)
        slots = slots_of(table, sequence, lens.long()[sequence] + number, int(k_cache.shape[1]))
        store = {"slot_mapping": slots}
        if rotary_cos is not None:
            start = (lens if rotary_seqlens is None else rotary_seqlens).long()
            rope = Rope(rotary_cos, rotary_sin, rotary_interleaved, first=0)
            moving = causal or chunk or window != (None, None)
            positions = start[queries[0]] + (queries[1] if moving else 0)
            store |= {"rope": rope, "positions": start[sequence] + number}
            _check_positions(rotary_cos, positions, store["positions"])
            q = rotated(q, rope, positions)
        lens = (lens + new).to(torch.int32)
    else:
        lacks("nothing is turned without rotary_cos", rotary_seqlens=rotary_seqlens)
        _check_lengths(lens, table, k_cache, 0)
    if cu_seqlens_q is None and q.shape[1] <= DECODED:
        operation: Any = mha_decode_paged
        arguments: tuple[Any, ...] = (q, k_cache, v_cache, table, lens)
        options["num_splits"] = count("num_splits", num_splits) or None
    else:
        lacks("a prefill shares no keys between programs", 0, 1, num_splits=num_splits)
        operation = mha_prefill_paged
        rows, starts, options["max_seqlen_q"] = q, cu_seqlens_q, max_seqlen_q
        if starts is None:
            options["max_seqlen_q"] = int(q.shape[1])
            starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q.shape[1]
            rows = q.flatten(0, 1)
        arguments = (rows, k_cache, v_cache, table, lens, starts)
    if k is not None and v is not None and store is not None:
        if not torch.compiler.is_compiling():
            operation.planned(*arguments, **options)  # what it refuses it refuses before the cache is written
        ragged = cu_seqlens_k_new is not None
        kv_store_paged(k if ragged else k.flatten(0, 1), v if ragged else v.flatten(0, 1), k_cache, v_cache, **store)
    out, lse = operation(*arguments, **options)
    if cu_seqlens_q is None:
        out, lse = out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])
    return (out, _heads_first(lse)) if return_softmax_lse else out


def rotated(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Heads ``[.., H, D]``, the first dims turned by the angles of ``positions`` ``[..]``, one after the other, in
    float32; as they are where a position has no angles.

    >>> turn = Rope(torch.zeros(1, 1), torch.ones(1, 1), interleaved=True, first=0)
    >>> rotated(torch.tensor([[[1.0, 2.0, 3.0]]]), turn, torch.tensor([0])).tolist()
    [[[-2.0, 1.0, 3.0]]]
    """
    known = ((positions >= 0) & (positions < rope.cos.shape[0]))[:, None]
    at = positions.clamp(0, rope.cos.shape[0] - 1)
    shape = (*x.shape[:-2], 1, rope.dim // 2)
    cos = rope.cos[at].float().masked_fill(~known, 1).view(shape)
    sin = rope.sin[at].float().masked_fill(~known, 0).view(shape)
    turned, rest = x[..., : rope.dim].float(), x[..., rope.dim :]
    one, two = (turned[..., 0::2], turned[..., 1::2]) if rope.interleaved else turned.chunk(2, -1)
    pair = one * cos - two * sin, two * cos + one * sin
    turned = torch.stack(pair, -1).flatten(-2) if rope.interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _lacks_of_version_3(**given: Any) -> None:
    """NotImplementedError for arguments of version 3 that have to be None."""
    for name, value in given.items():
        lacks(OF_VERSION_3[name], **{name: value})


def _heads_first(lse: Tensor) -> Tensor:
    """An lse ``[.., S, H]`` of kvlab as flash-attention's ``[.., H, S]``, +inf for a row without a key."""
    return lse.masked_fill(lse == -math.inf, math.inf).transpose(-1, -2).contiguous()


def _scales(*pairs: tuple[Tensor, Tensor | None]) -> dict[str, Tensor]:
    """The keywords of the scales that are given, of q, k and v. ValueError for one of what is not fp8."""
    found = {}
    for name, (array, scale) in zip("qkv", pairs, strict=True):
        if scale is not None:
            checked_tensors(**{f"{name}_descale": scale})
            require(is_fp8(array), f"{name}_descale is given, {name} is of {array.dtype}", "None but for float8_e4m3fn")
            found[f"{name}_scale"] = scale
    return found


def _tokens_of(name: str, x: Tensor, starts: Tensor | None, starts_name: str) -> tuple[Tensor, Tensor]:
    """``(sequence, number)`` of the tokens of ``x``: ``[B, n, H, D]``, or ``[total, H, D]`` with ``starts``."""
    form = "[B, n, H, D]" if starts is None else f"[total, H, D] with {starts_name}"
    require(x.ndim == (4 if starts is None else 3), f"{name} has shape {tuple(x.shape)}", form)
    if starts is not None:
        return rows_of_starts(starts, int(x.shape[0]))
    sequence, number = (torch.arange(n, device=x.device) for n in x.shape[:2])
    return sequence.repeat_interleave(x.shape[1]), number.repeat(x.shape[0])


def _table_of(k_cache: Tensor, block_table: Tensor | None, cache_batch_idx: Tensor | None, batch: int) -> Tensor:
    """The pages of each sequence; a sequence of a cache without pages is one page."""
    if block_table is not None:
        require(cache_batch_idx is None, "cache_batch_idx is given with block_table", "None: a table tells the pages")
        return block_table
    if cache_batch_idx is None:
        require(batch <= k_cache.shape[0], f"q has {batch} sequences", f"at most those of k_cache, {k_cache.shape[0]}")
        return torch.arange(batch, dtype=torch.int32, device=k_cache.device)[:, None]
    sequences = int(k_cache.shape[0])
    if not on_gpu(cache_batch_idx):
        bad = (cache_batch_idx < 0) | (cache_batch_idx >= sequences)
        require(not bad.any(), f"cache_batch_idx is {cache_batch_idx.tolist()}", f"from 0 to {sequences - 1}")
    return cache_batch_idx[:, None].to(torch.int32)


def _lengths_of(cache_seqlens: Any, table: Tensor, k_cache: Tensor) -> Tensor:
    """Keys of each sequence in the cache."""
    if isinstance(cache_seqlens, Tensor):
        checked_tensors(cache_seqlens=cache_seqlens)
        require(cache_seqlens.shape == table.shape[:1], f"cache_seqlens has shape {tuple(cache_seqlens.shape)}",
                f"[B = {table.shape[0]}]")
        return cache_seqlens
    full = int(table.shape[1] * k_cache.shape[1])
    n = full if cache_seqlens is None else count("cache_seqlens", cache_seqlens)
    return torch.full((int(table.shape[0]),), n, dtype=torch.int32, device=k_cache.device)


def _check_lengths(lens: Tensor, table: Tensor, k_cache: Tensor, new: Any) -> None:
    """ValueError for a sequence that holds more than the cache has room for, with ``new`` keys; not on a GPU."""
    if on_gpu(lens):
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
        if not on_gpu(at) and at.numel():
            most, rows = int(at.max()), int(rotary_cos.shape[0])
            require(most < rows, f"rotary_cos has {rows} positions", f"of more than {most}, the last token's")
