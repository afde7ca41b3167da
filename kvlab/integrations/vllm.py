"""vLLM's calls over kvlab's operations: stores into the caches of its workers, and attention over them.

Caches are vLLM's tensors as they are: pages ``[blocks, block_size, Hkv, D]`` by any strides (so lie NHD and HND), of
uint8 with the ``kv_cache_dtype`` that tells their format. Keys that are split into pieces of x columns (five axes)
raise NotImplementedError, as does all that a signature has and kvlab lacks; an argument that is not right raises
ValueError. Nothing waits for the GPU.

``backend`` and ``kv_layout`` are kvlab's own keywords, as in :func:`kvlab.attention.mha_decode_paged`.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from kvlab.attention import (
    attend_paged,
    kv_store_paged,
    merge_states,
    mha_decode_paged,
    mha_prefill_paged,
    mla_store_paged,
)
from kvlab.attention.features.scales import is_fp8
from kvlab.common.checks import count, require, shown

from . import flash_attn
from .adapting import checked_tensors, in_names, in_sight, lacks, sight, window_of

DRAFTS = 16
"""New tokens of the longest sequence up to which the keys of all sequences are shared out equally between programs."""
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
       "fp8_ds_mla": torch.float8_e4m3fn}
"""Values of ``kv_cache_dtype`` that tell the format of bytes."""
PLAIN = ("auto", "bfloat16", "float16", "float32")
"""Those that leave it to the tensor."""
SCRATCH = frozenset({"seq_threshold_3D", "num_par_softmax_segments", "softmax_segm_output", "softmax_segm_max",
                     "softmax_segm_expsum"})
"""Keywords of where another kernel keeps its partial results: taken and not used."""
LACKING = {
    "output_scale": "outputs are not quantised",
    "qq_bias": "masks of kvlab.attention.masks are added to scores",
    "mm_prefix_range": "masks of kvlab.attention.masks tell what a query sees",
    "prefix_lens": "masks of kvlab.attention.masks tell what a query sees",
    "use_alibi_sqrt": "distances count as they are",
    "softmax_threshold": "every key is counted",
    "kv_quant_mode": "caches are of 16 bits or fp8",
    "k_scale_cache": "kvlab.attention.mha_decode_paged takes scales of tokens",
    "v_scale_cache": "kvlab.attention.mha_decode_paged takes scales of tokens",
}
"""Keyword -> why kvlab lacks it."""


class UnifiedOptions(TypedDict, total=False):
    """Keywords of ``unified_attention``: vLLM's, and the last three, kvlab's own. Those of ``LACKING`` besides."""

    alibi_slopes: Tensor | None
    sinks: Tensor | None
    kv_cache_dtype: str
    kv_layout: Any
    backend: Any


class FlashOptions(TypedDict, total=False):
    """Keywords of ``flash_attn_varlen_func``: vLLM's, and the last, kvlab's own."""

    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    num_splits: int
    fa_version: int
    s_aux: Tensor | None
    cp_world_size: int
    cp_rank: int
    cp_tot_seqused_k: None
    backend: Any


STORED = {"k": "key", "v": "value", "k_cache": "key_cache", "v_cache": "value_cache"}


@in_names(**STORED)
def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str,
    k_scale: Any, v_scale: Any, *, kv_layout: Any = "NHD", backend: Any = "auto",
) -> None:
    """Write K and V of new tokens ``[tokens, Hkv, D]`` into the slots of a cache, in place.

    key, value     may have more tokens than slot_mapping, which are padding
    key_cache, value_cache  ``[blocks, block_size, Hkv, D]`` of key's dtype, or uint8 or fp8 with that kv_cache_dtype
    slot_mapping   integers ``[tokens]``: ``block * block_size + slot``, -1 to skip a token
    kv_cache_dtype  "auto", or "fp8" ("fp8_e4m3"), "fp8_e5m2": what is stored is the value over its scale
    k_scale, v_scale  numbers or float32 ``[]``, ``[1]``, ``[Hkv]``; not read but for fp8

    >>> caches = torch.zeros(2, 4, 16, 2, 64, dtype=torch.uint8)
    >>> new, one = torch.full((1, 2, 64), 3.0), torch.tensor(0.5)
    >>> reshape_and_cache_flash(new, new, *caches, torch.tensor([17]), "fp8", one, one, backend="emulator")
    >>> caches.view(torch.float8_e4m3fn)[0, 1, 1, 0, 0].item()
    6.0
    """
    checked_tensors("key value key_cache value_cache slot_mapping", key=key, value=value, key_cache=key_cache,
                    value_cache=value_cache, slot_mapping=slot_mapping)  # fmt: skip
    key_cache = _viewed("key_cache", key_cache, kv_cache_dtype)
    value_cache = _viewed("value_cache", value_cache, kv_cache_dtype)
    tokens = int(slot_mapping.shape[0])
    require(tokens <= key.shape[0], f"key has {key.shape[0]} tokens", f"at least {tokens}, those of slot_mapping")
    scales = {"k_scale": _given(k_scale), "v_scale": _given(v_scale)} if kv_cache_dtype in FP8 else {}
    kv_store_paged(key[:tokens], value[:tokens], key_cache, value_cache, slot_mapping, kv_layout=kv_layout,
                   backend=backend, **scales)


def reshape_and_cache(*args: Any, **kwargs: Any) -> None:
    """Refusal: the cache of this call has keys ``[blocks, Hkv, D / x, block_size, x]``. NotImplementedError."""
    raise NotImplementedError(
        "reshape_and_cache stores keys split by x columns [blocks, Hkv, D / x, block_size, x]: must be "
        "reshape_and_cache_flash, whose caches are [blocks, block_size, Hkv, D]"
    )


@in_names(latent="kv_c", k_rope="k_pe", cache="kv_cache")
def concat_and_cache_mla(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, scale: Any, *,
    backend: Any = "auto",
) -> None:
    """Write latents ``[tokens, L]`` and rope parts ``[tokens, R]`` into the slots of a cache of MLA, in place.

    kv_cache       ``[blocks, block_size, width]`` of width L + R, of kv_c's dtype or, with kv_cache_dtype "fp8", uint8;
                   with "fp8_ds_mla" rows of bytes, L of fp8, their computed scales and the rope part in bfloat16
    scale          a number or float32 ``[]``, ``[1]``, of "fp8" alone

    The rest: as for :func:`reshape_and_cache_flash`.

    >>> cache, new = torch.zeros(2, 8, 80), (torch.ones(1, 64), torch.full((1, 16), 2.0))
    >>> concat_and_cache_mla(*new, cache, torch.tensor([9]), "auto", torch.tensor(1.0), backend="emulator")
    >>> cache[1, 1, 62:66].tolist(), cache.count_nonzero().item()
    ([1.0, 1.0, 2.0, 2.0], 80)
    """
    checked_tensors("kv_c k_pe kv_cache slot_mapping", kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache,
                    slot_mapping=slot_mapping)  # fmt: skip
    tokens = int(slot_mapping.shape[0])
    require(tokens <= kv_c.shape[0], f"kv_c has {kv_c.shape[0]} tokens", f"at least {tokens}, those of slot_mapping")
    scales = {"scale": _given(scale)} if kv_cache_dtype in ("fp8", "fp8_e4m3") else {}
    cache = _viewed("kv_cache", kv_cache, kv_cache_dtype)
    mla_store_paged(kv_c[:tokens], k_pe[:tokens], cache, slot_mapping, backend=backend, **scales)


@in_names(scale="softmax_scale", seq_lens="seqused_k", k_cache="k", v_cache="v", q_scale="q_descale",
          k_scale="k_descale", v_scale="v_descale")
def unified_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_k: Tensor,
    max_seqlen_k: int, softmax_scale: float | None, causal: bool, window_size: Any, block_table: Tensor,
    softcap: float | None, q_descale: Tensor | None, k_descale: Any, v_descale: Any, *others: Any,
    **more: Unpack[UnifiedOptions],
) -> None:
    """Attention of the new tokens q ``[total, Hq, D]`` of a batch, decodes and prefills, over a cache that holds them:
    into ``out`` ``[total, Hq, Dv]``.

    k, v           ``[blocks, block_size, Hkv, ..]`` of q's dtype or float8_e4m3fn; uint8 with kv_cache_dtype "fp8"
    cu_seqlens_q   integers ``[B + 1]``: where each sequence's new tokens start in q, the longest ``max_seqlen_q``; rows
                   of q and out behind the last are padding, in which out may hold anything
    seqused_k      integers ``[B]``: keys of each, the new ones among them; ``max_seqlen_k``, the most, is not needed
    window_size    ``(left, right)`` keys beside that of the query, below 0 for no bound
    block_table    integers ``[B, columns]``
    k_descale, v_descale  of fp8: float32 ``[B, Hkv]``, numbers or None; for other caches 1, which is not looked at on a
                   GPU
    kv_cache_dtype  kvlab's own keyword: what bytes of uint8 are
    sinks          ``[Hq]``: a logit of each head that counts as a key without a value

    What is behind ``v_descale`` is given by name (TypeError): releases of vLLM have it in different orders. With up to
    16 new tokens a sequence the keys are shared between programs, else each query has one.
    NotImplementedError: output_scale, qq_bias, mm_prefix_range, use_alibi_sqrt, caches of other formats, keys split by
    x.

    >>> q, cache, table = torch.ones(3, 4, 64), torch.ones(2, 4, 16, 2, 64), torch.tensor([[3, 1], [0, 2]])
    >>> out = torch.empty_like(q)
    >>> unified_attention(q, *cache, out, torch.tensor([0, 1, 3]), 2, torch.tensor([20, 5]), 20, None, True, (-1, -1),
    ...                   table, 0.0, None, None, None, backend="emulator")
    >>> out.unique().tolist()
    [1.0]
    """
    if others:
        raise TypeError(
            f"unified_attention has {16 + len(others)} positional arguments: must be 16, to v_descale; what is behind "
            "it is given by name, as releases of vLLM have it in different orders"
        )
    for name, value in more.items():
        if name in LACKING:
            lacks(LACKING[name], None, False, **{name: value})
        elif name not in SCRATCH and name not in UnifiedOptions.__annotations__:
            known = ", ".join((*UnifiedOptions.__annotations__, *LACKING))
            raise TypeError(f"unexpected keyword argument {name!r}: must be one of {known}")
    alibi_slopes, sinks = more.get("alibi_slopes"), more.get("sinks")
    checked_tensors(
        "q k v cu_seqlens_q seqused_k block_table", q=q, k=k, v=v, out=out, cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k, block_table=block_table, alibi_slopes=alibi_slopes, sinks=sinks,
    )
    count("max_seqlen_k", max_seqlen_k)
    most = count("max_seqlen_q", max_seqlen_q)
    k, v = (_viewed(name, cache, more.get("kv_cache_dtype", "auto")) for name, cache in (("k", k), ("v", v)))
    if k.dtype == torch.float8_e5m2:
        raise NotImplementedError(f"k is of {k.dtype}: must be float8_e4m3fn to be attended to; e5m2 can be stored")
    descales = _of_fp8(q=(q, q_descale), k=(k, k_descale), v=(v, v_descale))
    scales = {f"{name}_scale": _given(scale) for name, scale in descales.items()}
    if in_sight(cu_seqlens_q) and cu_seqlens_q.ndim == 1 and cu_seqlens_q.numel() and out.shape[:1] == q.shape[:1]:
        q, out = (rows[: max(int(cu_seqlens_q[-1]), 0)] for rows in (q, out))
    options: dict[str, Any] = {
        "scale": softmax_scale, "softcap": softcap or 0.0, "alibi_slopes": alibi_slopes, "sinks": sinks, "out": out,
        "kv_layout": more.get("kv_layout", "NHD"), "backend": more.get("backend", "auto"), **scales,
        **sight(causal, window_of(window_size)),
    }
    batch = int(seqused_k.shape[0])
    if most == 1 and q.shape[0] == batch:
        if in_sight(cu_seqlens_q):
            starts = cu_seqlens_q.tolist()
            one = starts == list(range(batch + 1))
            require(one, f"cu_seqlens_q is {starts}", "one token apart, as max_seqlen_q is 1")
        mha_decode_paged(q, k, v, block_table, seqused_k, **options)
    else:
        operation: Any = attend_paged if most <= DRAFTS else mha_prefill_paged
        operation(q, k, v, block_table, seqused_k, cu_seqlens_q, max_seqlen_q=most, **options)


@in_names(qv="q_v")
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Tensor, max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None, seqused_k: Tensor | None = None, q_v: Tensor | None = None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = None, softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None, return_softmax_lse: bool = False,
    out: Tensor | None = None, scheduler_metadata: None = None, **more: Unpack[FlashOptions],
) -> Any:
    """:func:`kvlab.integrations.flash_attn.flash_attn_varlen_func` with the arguments of vLLM's build of
    flash-attention, in its order: out ``[total, Hq, Dv]``, written to ``out`` if that is given.

    window_size    None, or ``(left, right)``
    q_v            what flash-attention calls ``qv``
    q_descale, k_descale, v_descale  ``[B, Hkv]``, as of :func:`unified_attention`
    return_softmax_lse  return ``(out, lse)``: lse ``[Hq, total]``, +inf for a row without a key

    NotImplementedError, besides: return_attn_probs; cp_world_size, cp_rank and cp_tot_seqused_k of several ranks.

    >>> q, cache, out = torch.ones(3, 4, 64), torch.ones(4, 16, 2, 64), torch.empty(3, 4, 64)
    >>> _, lse = flash_attn_varlen_func(
    ...     q, cache, cache, 2, torch.tensor([0, 1, 3]), 20, seqused_k=torch.tensor([20, 5]), softmax_scale=0.0,
    ...     causal=True, block_table=torch.tensor([[3, 1], [0, 2]]), return_softmax_lse=True, out=out,
    ...     backend="emulator")
    >>> out.unique().tolist(), lse[0].exp().round().tolist()
    ([1.0], [20.0, 4.0, 5.0])
    """
    lacks("probabilities are not kept; return_softmax_lse gives the lse", False, return_attn_probs=return_attn_probs)
    options: Any = dict(more)
    for name, one in (("cp_world_size", 1), ("cp_rank", 0), ("cp_tot_seqused_k", None)):
        lacks("kvlab.integrations.distributed shares keys between ranks", one, **{name: options.pop(name, one)})
    scales = _of_fp8(**{name: (x, options.pop(f"{name}_descale", None)) for name, x in (("q", q), ("k", k), ("v", v))})
    found = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        (-1, -1) if window_size is None else window_size, softcap, alibi_slopes, deterministic, True, block_table,
        seqused_k=seqused_k, qv=q_v, out=out, scheduler_metadata=scheduler_metadata,
        **{f"{name}_descale": scale for name, scale in scales.items()}, **options,
    )
    return found[:2] if return_softmax_lse else found[0]


@in_names(out="output", outs="prefix_output and suffix_output", lses="prefix_lse and suffix_lse")
def merge_attn_states(
    output: Tensor, prefix_output: Tensor, prefix_lse: Tensor, suffix_output: Tensor, suffix_lse: Tensor,
    output_lse: Tensor | None = None, prefill_tokens_with_context: int | None = None, output_scale: None = None, *,
    backend: Any = "auto",
) -> None:
    """Merge outputs ``[tokens, H, D]`` over disjoint keys by their lse ``[H, tokens]``, natural logarithm, into
    ``output`` and, if given, ``output_lse``. Of tokens from ``prefill_tokens_with_context`` on the suffix is all.

    >>> parts = torch.tensor([1.0, 4.0]).view(2, 1, 1, 1), torch.tensor([2.0, 1.0]).log().view(2, 1, 1)
    >>> out = torch.empty(1, 1, 1)
    >>> merge_attn_states(out, parts[0][0], parts[1][0], parts[0][1], parts[1][1], backend="emulator")
    >>> round(out.item(), 5)
    2.0
    """
    lacks(LACKING["output_scale"], output_scale=output_scale)
    given = {"prefix_output": prefix_output, "prefix_lse": prefix_lse, "suffix_output": suffix_output,
             "suffix_lse": suffix_lse, "output_lse": output_lse}
    checked_tensors(output=output, **given)
    tokens, heads = (int(n) for n in suffix_output.shape[:2])
    for name, tensor in given.items():
        shape = (heads, tokens) if name.endswith("lse") else tuple(suffix_output.shape)
        fits = tensor is None or tuple(tensor.shape) == shape
        require(fits, f"{name} has shape {None if tensor is None else tuple(tensor.shape)}", f"{shape}")
    if prefill_tokens_with_context is not None:
        n = count("prefill_tokens_with_context", prefill_tokens_with_context)
        prefix_lse = prefix_lse.index_fill(1, torch.arange(n, max(n, tokens), device=output.device), float("-inf"))
    lses = torch.stack((prefix_lse, suffix_lse)).transpose(1, 2)
    outs = torch.stack((prefix_output, suffix_output))
    _, lse = merge_states(outs, lses, out=output, return_lse=True, backend=backend)
    if output_lse is not None:
        output_lse.copy_(lse.T)


def _viewed(name: str, cache: Tensor, kv_cache_dtype: Any) -> Tensor:
    """A cache with the dtype of its values. NotImplementedError for keys split by x."""
    if cache.ndim == 5:
        raise NotImplementedError(
            f"{name} has shape {tuple(cache.shape)}, keys split by x columns: must be [blocks, block_size, Hkv, D]"
        )
    known = isinstance(kv_cache_dtype, str) and kv_cache_dtype in (*PLAIN, *FP8)
    require(known, f"kv_cache_dtype is {shown(kv_cache_dtype)}", f"one of {', '.join((*PLAIN, *FP8))}")
    found: torch.dtype | None = FP8.get(kv_cache_dtype)
    if found is None:
        told = cache.dtype != torch.uint8
        require(told, f"{name} is of uint8 with kv_cache_dtype {kv_cache_dtype!r}", f"told, one of {', '.join(FP8)}")
        if kv_cache_dtype != "auto":
            found = getattr(torch, kv_cache_dtype)
            require(cache.dtype == found, f"{name} has dtype {cache.dtype}", f"kv_cache_dtype, {kv_cache_dtype}")
        return cache
    require(cache.dtype in (torch.uint8, found), f"{name} has dtype {cache.dtype}",
            f"uint8 or {found}, as kv_cache_dtype is {kv_cache_dtype!r}")
    return cache.view(found)


def _of_fp8(**given: tuple[Tensor, Any]) -> dict[str, Any]:
    """The descales of arrays of fp8 among ``(array, descale)``. ValueError for others than 1, if they are in sight."""
    found = {}
    for name, (array, scale) in given.items():
        if is_fp8(array) and scale is not None:
            found[name] = scale
        elif scale is not None and (not isinstance(scale, Tensor) or in_sight(scale)):
            one = isinstance(scale, Tensor | int | float) and bool(torch.as_tensor(scale).eq(1).all())
            require(one, f"{name}_descale is {shown(scale)}, {name} is of {array.dtype}", "1 but for fp8")
    return found


def _given(scale: Any) -> Any:
    """A scale as kvlab takes it: one number in memory has one axis."""
    return scale.view(1) if isinstance(scale, Tensor) and scale.ndim == 0 else scale
