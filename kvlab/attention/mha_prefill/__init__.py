"""MHA prefill: many new tokens of each sequence attend to dense, ragged or paged keys."""

from __future__ import annotations

from typing import Unpack

from kvlab.attention.call.operation import PublicOperation
from kvlab.attention.call.options import PagedPrefillOptions, PrefillOptions
from kvlab.cache import PagedKVCacheCollection
from kvlab.common.arrays import Array

from .call import DensePrefill, PagedPrefill, arrays_of_collection, over_pages

__all__ = ["mha_prefill", "mha_prefill_cache", "mha_prefill_paged"]


@PublicOperation
def mha_prefill(
    q: Array, k: Array, v: Array, *, cu_seqlens_q: Array | None = None, cu_seqlens_k: Array | None = None,
    **options: Unpack[PrefillOptions]
) -> DensePrefill:
    """Attention of all queries: ``softmax(scale Q K^T) V``.

    q       ``[B, S, Hq, D]``, or ``[total, Hq, D]`` of sequences of any lengths one after the other; bfloat16, float16,
            float32 or float8_e4m3fn; D a multiple of 8 from 16 to 576, any strides with a contiguous last dimension
    k, v    ``[B, n, Hkv, D]`` and ``[B, n, Hkv, Dv]``, or ``[total_k, Hkv, ..]``; Hq is a multiple of Hkv. q's dtype,
            or float8_e4m3fn where q is bfloat16 or float16: converted in registers. Dimensions are multiples of 16 then
    causal  query i of S is at position ``p = i + n - S`` and sees the keys up to p (aligned at the end, bottom
            right). True unless there is a ``mask``
    scale   of the scores, ``1 / sqrt(D)`` by default
    cu_seqlens_q, cu_seqlens_k  integers ``[B + 1]``: where each sequence starts, and the total
    max_seqlen_q  the longest sequence of q, for a smaller grid; None is that of ``cu_seqlens_q``, on a GPU the total
    window  None; with causal a number of keys, the query's own among them; or ``(left, right)`` keys beside that of the
            query: None is no bound, one of -2 or less is on the query's other side (``(-2, 9)`` begins 2 keys behind
            it); with causal none behind the query is seen
    mask    None, or a mask of :mod:`kvlab.attention.masks` or of your own, which tells alone what a query sees; with
            ``causal=True`` or a window both must show the key. One of your own over ragged or paged tensors on a GPU
            reads the lengths, which waits for the GPU
    {features:8}
    q_scale, k_scale, v_scale  None, a number, or float32 ``[Hkv]`` or ``[B, Hkv]`` that float8_e4m3fn values are to be
            multiplied by; for K and V also one for each token and head, of their shape without the last axis (which a
            shape that could be ``[B, Hkv]``, too, is taken for). Left out, or 1, for K and V of other dtypes
    return_lse  return ``(out, lse)`` with lse ``[B, S, Hq]`` or ``[total, Hq]``, natural log, float32
    base2   lse in base 2
    out     where to write the output, ``[.., Hq, Dv]`` of q's dtype; a new array by default. For q of float8_e4m3fn
            bfloat16 by default, float16 and float32 if given
    batch_invariant  the tiles do not depend on the batch: a sequence has the same bits alone and among others
    backend  "auto": the emulator for NumPy arrays, the Triton kernel for torch tensors (interpreted on the CPU), on an
             sm_90 GPU the kernel written for it where it applies;
             "reference" (float64), "emulator", "triton", "hopper" (sm_90; its emulator for arrays on no GPU)
    arch    the machine that is emulated: "sm_90", "sm_80" (no float8_e4m3fn), or "gfx950"
    arithmetic  of the emulator: "float32", NumPy's; or "chip", an H100's and slower: sums of products (14 digits with
            float8_e4m3fn), exp2, log2, division, fused operations and the order of sums as compiled, recorded to the
            bit for plain calls. What features add goes by the same rules; on "sm_80" provisional
    check   look at the values of cu_seqlens too. None: unless they are on a GPU, which would wait for it
    traffic  a :class:`~kvlab.staging.Traffic` that counts what the emulator moves

    A row without a key gives 0 and lse -inf (the sink's logit with sinks). Keys before the first and behind the last
    that a row of their sequence sees may hold anything. float8_e4m3fn needs sm_89 or later, or gfx950 (K and V alone,
    gfx942, too). P V of such a q runs in it as well, P times 2^8 rounded to it (in bfloat16 where V has scales of
    tokens, which may be of any size).
    ValueError on bad arguments, before anything is written. Nothing waits for the GPU, and the grid does not depend on
    the lengths of the sequences.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 5, 4, 64)).astype(np.float32)
    >>> k, v = rng.standard_normal((2, 1, 9, 2, 64)).astype(np.float32)
    >>> out, lse = mha_prefill(q, k, v, return_lse=True)
    >>> out.shape, lse.shape
    ((1, 5, 4, 64), (1, 5, 4))
    >>> exact = mha_prefill(q, k, v, backend="reference")
    >>> bool(np.abs(out - exact).max() < 1e-6)
    True
    >>> starts, starts_k = np.array([0, 2, 5]), np.array([0, 6, 9])
    >>> mha_prefill(q[0], k[0], v[0], cu_seqlens_q=starts, cu_seqlens_k=starts_k).shape
    (5, 4, 64)
    >>> mha_prefill(q, k[..., :32], v)
    Traceback (most recent call last):
        ...
    ValueError: k has head dimension 32: must be that of q, 64
    """
    return DensePrefill(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)


@PublicOperation
def mha_prefill_paged(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, cu_seqlens_q: Array,
    **options: Unpack[PagedPrefillOptions],
) -> PagedPrefill:
    """Attention of the new tokens over a paged cache that already holds them: chunked prefill, prefix hits.

    q            ``[total, Hq, D]``: the new tokens of all sequences
    k_cache, v_cache  ``[pages, page_size, Hkv, D or Dv]``, any strides with a contiguous last dimension; those of uint8
                 are of 4 bits, as of ``mha_decode_paged``: the call then is one of ``attend_paged``
    block_table  integers ``[B, columns]``: the page of tokens ``c * page_size ...`` of each sequence; entries past the
                 sequence's end are not read
    seq_lens     integers ``[B]``: keys of each sequence, the new ones among them
    cu_seqlens_q  integers ``[B + 1]``: where each sequence's new tokens start in q, and the total
    kv_layout    "NHD", or "HND": pages (and scales of tokens) are ``[pages, Hkv, page_size, ..]``
    check        look at the values of seq_lens, block_table and cu_seqlens_q too; None: unless they are on a GPU
    plan         None, or what :func:`~kvlab.attention.plan` made of these lengths: the call then is one of
                 :func:`~kvlab.attention.attend_paged`, over the schedule of the plan. On sm_90 "auto" makes one for
                 chunks, drafts and mixed batches
    {features:13}

    The rest, what is returned and what raises: as for :func:`mha_prefill`.

    >>> import numpy as np
    >>> cache = np.ones((4, 16, 1, 64), np.float32)
    >>> q = np.ones((3, 2, 64), np.float32)
    >>> table, lens, starts = np.array([[3, 1], [0, 0]]), np.array([20, 0]), np.array([0, 3, 3])
    >>> out, lse = mha_prefill_paged(q, cache, cache, table, lens, starts, scale=0.0, return_lse=True)
    >>> out[:, 0, 0].tolist(), np.exp(lse[:, 0]).round(3).tolist()
    ([1.0, 1.0, 1.0], [18.0, 19.0, 20.0])
    """
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    return over_pages(**arrays, cu_seqlens_q=cu_seqlens_q, **options)


@PublicOperation
def mha_prefill_cache(
    q: Array, cache: PagedKVCacheCollection, layer: int = 0, *, cu_seqlens_q: Array, **options: Unpack[PrefillOptions]
) -> PagedPrefill:
    """:func:`mha_prefill_paged` over one layer of a collection, in which the new tokens are already stored.

    q            ``[total, Hq, D]``: the new tokens of all sequences
    cache        :class:`~kvlab.cache.PagedKVCacheCollection`; its ``cache_lengths`` are those before the new tokens.
                 The scales of a quantised collection are used: one for each token and head, or of 4 bits as of
                 :func:`mha_decode`
    cu_seqlens_q  integers ``[B + 1]``: where each sequence's new tokens start in q, and the total
    options      as of :func:`mha_prefill_paged`

    >>> import numpy as np
    >>> from kvlab.cache import from_dense
    >>> keys = np.random.default_rng(0).standard_normal((1, 1, 9, 1, 64)).astype(np.float32)
    >>> cache = from_dense(keys, keys, [9], page_size=4, new_tokens=3)
    >>> mha_prefill_cache(np.ones((3, 2, 64), np.float32), cache, cu_seqlens_q=np.array([0, 3])).shape
    (3, 2, 64)
    """
    return over_pages(**arrays_of_collection(q, cache, layer, cu_seqlens_q) | options)
