"""MLA prefill, not absorbed: new tokens attend to K and V of each head, and to K's rope part in the latent cache."""

from __future__ import annotations

from typing import Unpack

from kvlab.attention.call.operation import PublicOperation
from kvlab.attention.call.options import MLAPrefillOptions, PagedMLAPrefillOptions
from kvlab.cache import PagedKVCacheCollection
from kvlab.common.arrays import Array

from .call import PagedMLAPrefill, RaggedMLAPrefill, arrays_of_collection

__all__ = ["mla_prefill", "mla_prefill_paged", "mla_prefill_ragged"]


@PublicOperation
def mla_prefill(
    q: Array, k: Array, v: Array, cache: PagedKVCacheCollection, layer: int = 0, *, cu_seqlens_q: Array,
    cu_seqlens_k: Array, **options: Unpack[PagedMLAPrefillOptions],
) -> PagedMLAPrefill:
    """MLA of the new tokens over a cache collection, whose pages already hold their latent rows.

    cache  :class:`~kvlab.cache.PagedKVCacheCollection` for MLA (one head, no V storage); sequence b has
           ``cache.cache_length(b)`` keys and its new tokens
    layer  of the cache

    The rest, what is returned and what raises: as for :func:`mla_prefill_paged`.

    >>> import numpy as np
    >>> from kvlab.cache import PagedKVCacheCollection
    >>> blocks = np.zeros((3, 1, 1, 16, 1, 576), np.float32)  # [pages, K, layers, page_size, head, latent and rope]
    >>> cache = PagedKVCacheCollection(blocks, np.array([17]), np.array([[2, 0]]), 2, 19)
    >>> q, k, v = (np.ones(shape, np.float32) for shape in ((2, 4, 192), (19, 4, 128), (19, 4, 128)))
    >>> cu_q, cu_k = np.array([0, 2]), np.array([0, 19])
    >>> _, lse = mla_prefill(q, k, v, cache, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, scale=0.0, return_lse=True)
    >>> np.exp(lse[:, 0]).round(3).tolist()
    [18.0, 19.0]
    """
    starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return PagedMLAPrefill(**arrays_of_collection(q, k, v, cache, layer, **starts), **options)


@PublicOperation
def mla_prefill_paged(
    q: Array, k: Array, v: Array, kv_cache: Array, block_table: Array, seq_lens: Array, cu_seqlens_q: Array,
    cu_seqlens_k: Array, **options: Unpack[PagedMLAPrefillOptions],
) -> PagedMLAPrefill:
    """MLA of the new tokens: ``softmax(scale (Q_nope K^T + Q_rope K_rope^T)) V``, K and V of each head given, the rope
    part of K read from the pages of the latent cache, where all heads share it.

    q            ``[total, H, nope + rope]``: the new tokens of all sequences; DeepSeek's models have 128 + 64
    k, v         ``[total_k, H, nope]`` and ``[total_k, H, value]`` of q's dtype (bfloat16, float16 or float32), or of
                 float8_e4m3fn beside a q of 8 or 16 bits (columns in multiples of 16 then; multiplied in q's dtype, in
                 bfloat16 for q of 8), with a contiguous last dimension: what the keys' latent rows were projected to
    kv_cache     ``[pages, page_size, D]`` or with an axis of one head (see ``kv_layout``): rows of latent and rope
                 columns, of q's dtype or float8_e4m3fn; or rope-aware rows, fp8 latents and a bfloat16 rope part, with
                 scales between them or without, bytes of float8_e4m3fn or uint8 (see
                 :func:`kvlab.attention.mla_store_paged`)
    block_table  integers ``[B, columns]``: the page of tokens ``c * page_size ...`` of each sequence; entries past the
                 sequence's end are not read
    seq_lens     integers ``[B]``: keys of each sequence, the new ones among them
    cu_seqlens_q, cu_seqlens_k  integers ``[B + 1]``: where each sequence starts in q, and in k and v, and the total
    k_starts     None: k and v hold the last keys of each sequence (all of them, or those of the new tokens); or
                 integers ``[B]``, the first key that they hold: a chunk of a long prefix, to be merged with the others
                 by :func:`kvlab.attention.merge_states` (give sinks to one of the chunks only)
    latent_dim   latent columns of a cache row, in front of those of rope
    causal       query i of S is at position ``i + n - S`` of n keys and sees those up to it (aligned at the end,
                 bottom right). True unless there is a ``mask``
    scale        of the scores, ``1 / sqrt(nope + rope)`` by default
    max_seqlen_q the longest sequence of q, for a smaller grid; None is that of ``cu_seqlens_q``, on a GPU the total
    plan         None, or what :func:`~kvlab.attention.plan` made of the keys that k and v hold (those between
                 ``cu_seqlens_k``), with ``head_dim=(nope, rope)``: a fixed grid of programs then shares tiles and keys
                 equally, and merges what it cut. With k_starts, leftpad_k or q_positions the list has all keys: a plan
                 is one with ``causal=False`` and no window
    mask         None, or a :class:`~kvlab.attention.masks.Mask`, which tells alone what a query sees; with
                 ``causal=True`` or a window both must show the key
    window       None; with causal a number of keys, the query's own among them; or ``(left, right)`` keys beside that
                 of the query, None for no bound, -2 or less for one on its other side
    {features:13}
    q_scale, k_scale, v_scale  what q, k and v in float8_e4m3fn are multiplied by: a number, float32 ``[H]`` or ``[B,
                 H]``, for k and v also each token's and head's ``[total_k, H]``. Left out, or 1, for other K and V
    rope_scale   of a rope part in float8_e4m3fn: a number, float32 ``[1]`` or ``[B, 1]``, or each token's ``[pages,
                 page_size, 1]``. None: 1, or k_scale where k is not float8_e4m3fn
    return_lse   return ``(out, lse)`` with lse ``[total, H]``, float32, natural logarithm (``base2``: of base 2)
    out          where to write the output ``[total, H, value]`` of q's dtype; a new array by default. For q of
                 float8_e4m3fn bfloat16 by default, float16 and float32 if given
    kv_layout    of a cache with four axes: "NHD" ``[pages, page_size, 1, D]`` or "HND" ``[pages, 1, page_size, D]``
    batch_invariant  the same bits for a sequence alone and in any batch: so it is without a plan, and none is beside it
    backend      "auto": the emulator for NumPy arrays, the Triton kernel for torch tensors (interpreted on the CPU);
                 "reference" (float64), "emulator", "triton"
    arch         the machine that is emulated: "sm_90", "sm_80" (no float8_e4m3fn), or "gfx950" (an e4m3 rope part of
                 more than 32 columns)
    arithmetic   of the emulator: "float32", NumPy's; or "chip", an H100's and slower: sums of products, exp2, log2,
                 division, fused operations and the order of sums as compiled, recorded to the bit for plain calls of
                 MHA. What features add goes by the same rules; on "sm_80" provisional
    check        look at the values of the integers too. None: unless they are on a GPU, which would wait for it
    traffic      a :class:`~kvlab.staging.Traffic` that counts what the emulator moves

    A row without a key gives 0 and lse -inf (the sink's logit with sinks). Tiles that no row sees are not read.
    ValueError on bad arguments, before anything is written. Nothing waits for the GPU, unless a mask of one's own has
    to be evaluated, and the grid does not depend on the lengths of the sequences.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((n, 2, D)).astype(np.float32) for n, D in ((3, 96), (20, 64), (20, 64)))
    >>> kv = rng.standard_normal((4, 16, 160)).astype(np.float32)  # 128 latents and 32 for rope
    >>> table, lens = np.array([[3, 1], [0, 0]]), np.array([20, 0])
    >>> arguments = q, k, v, kv, table, lens, np.array([0, 3, 3]), np.array([0, 20, 20])
    >>> out, lse = mla_prefill_paged(*arguments, latent_dim=128, return_lse=True)
    >>> out.shape, lse.shape
    ((3, 2, 64), (3, 2))
    >>> exact = mla_prefill_paged(*arguments, latent_dim=128, backend="reference")
    >>> bool(np.abs(out - exact).max() < 1e-6)
    True
    >>> from kvlab.attention import plan
    >>> step = plan(lens, (np.array([0, 3, 3]), 3), q_heads=2, kv_heads=2, head_dim=(64, 32), itemsize=4)
    >>> bool(np.abs(mla_prefill_paged(*arguments, latent_dim=128, plan=step) - exact).max() < 1e-6)
    True
    >>> from kvlab.memory import bfloat16, float8_e4m3fn
    >>> fp8 = q.astype(bfloat16), k.astype(float8_e4m3fn), v.astype(float8_e4m3fn), kv.astype(bfloat16), *arguments[4:]
    >>> by = {"k_scale": 0.5, "v_scale": np.full((20, 2), 2, np.float32), "latent_dim": 128}
    >>> out, exact = (mla_prefill_paged(*fp8, **by, backend=name) for name in ("emulator", "reference"))
    >>> bool(np.abs(out.astype(np.float32) - exact.astype(np.float32)).max() < 0.05)
    True
    >>> mla_prefill_paged(*arguments, latent_dim=100)
    Traceback (most recent call last):
        ...
    ValueError: kv_cache has rows of 160 float32: must be 132, or 164 bytes of float8_e4m3fn or uint8
    """
    arrays = {"q": q, "k": k, "v": v, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
    return PagedMLAPrefill(**arrays, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)


@PublicOperation
def mla_prefill_ragged(
    q: Array, k: Array, v: Array, k_rope: Array, cu_seqlens_q: Array, cu_seqlens_k: Array,
    **options: Unpack[MLAPrefillOptions]
) -> RaggedMLAPrefill:
    """The same with the rope part of K in an array ``[total_k, rope]`` or ``[total_k, 1, rope]``, without a cache.

    A sequence has the keys that k, v and k_rope hold. k_rope is of q's dtype; beside k of float8_e4m3fn it may be that,
    with a rope_scale (each token's: ``[total_k, 1]``), and beside q of float8_e4m3fn bfloat16. The rest: as for
    :func:`mla_prefill_paged`.

    >>> import numpy as np
    >>> q, k, v, rope = (np.ones(shape, np.float32) for shape in ((3, 2, 96), (5, 2, 64), (5, 2, 64), (5, 32)))
    >>> starts, starts_k = np.array([0, 1, 3]), np.array([0, 2, 5])
    >>> _, lse = mla_prefill_ragged(q, k, v, rope, starts, starts_k, scale=0.0, return_lse=True)
    >>> np.exp(lse[:, 0]).round(3).tolist()
    [2.0, 2.0, 3.0]
    """
    starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return RaggedMLAPrefill(q=q, k=k, v=v, k_rope=k_rope, **starts, **options)
