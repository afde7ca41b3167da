"""MLA decode, absorbed: up to sixteen new tokens of each sequence attend to its latent cache, K and V in one."""

from __future__ import annotations

from typing import Unpack

from kvlab.attention.call.operation import PublicOperation
from kvlab.attention.call.options import MLADecodeOptions
from kvlab.cache import PagedKVCacheCollection
from kvlab.common.arrays import Array

from .call import MLADecode, arrays_of_collection

__all__ = ["mla_decode", "mla_decode_paged"]


@PublicOperation
def mla_decode(
    q: Array, cache: PagedKVCacheCollection, layer: int = 0, **options: Unpack[MLADecodeOptions]
) -> MLADecode:
    """Absorbed MLA of the newest tokens over a cache collection: ``softmax(scale Q K^T) V``, V the latent part of K.

    q      ``[B, H, D]``, or ``[B, S, H, D]`` with S of 1 to 16 new tokens
    cache  :class:`~kvlab.cache.PagedKVCacheCollection` for MLA (one head, no V storage) whose pages already hold the
           new tokens; a sequence has ``cache.cache_length(b) + S`` keys
    layer  of the cache
    options  those of :func:`mla_decode_paged`

    Returns and raises what :func:`mla_decode_paged` does.

    >>> import numpy as np
    >>> from kvlab.cache import PagedKVCacheCollection
    >>> blocks = np.full((3, 1, 1, 16, 1, 576), 7, np.float32)  # [pages, K, layers, page_size, head, latent and rope]
    >>> table = np.array([[2, 0]])
    >>> cache = PagedKVCacheCollection(blocks, np.array([19]), table, max_seq_length=1, max_cache_length=20)
    >>> out = mla_decode(np.ones((1, 2, 576), np.float32), cache)
    >>> out.shape, out[0, :, :3].tolist()
    ((1, 2, 512), [[7.0, 7.0, 7.0], [7.0, 7.0, 7.0]])
    """
    return MLADecode(**arrays_of_collection(q, cache, layer), **options)


@PublicOperation
def mla_decode_paged(
    q: Array, kv_cache: Array, block_table: Array | None = None, seq_lens: Array | None = None,
    **options: Unpack[MLADecodeOptions]
) -> MLADecode:
    """Absorbed MLA of the newest tokens over a paged latent cache: ``softmax(scale Q K^T) V``.

    A row of the cache is K of all heads, ``v_dim`` latent columns and then those of rope; its latent columns are V.

    q            ``[B, H, D]``, or ``[B, S, H, D]`` with S of 1 to 16; H of 1 to 128; bfloat16, float16 or float32, or
                 e4m3 with a cache of e4m3 (multiplied in bfloat16). The latent columns are those of the absorbed query
    kv_cache     ``[pages, page_size, D]`` or with an axis of one head (see ``kv_layout``), of q's dtype, or (with q of
                 8 or 16 bits) float8_e4m3fn; or rope-aware rows, e4m3 latents and a bfloat16 rope part (640 bytes for
                 512 + 64), or these with float32 scales of 128 latents each between them (656 bytes), what they are
                 multiplied by before that is rounded to q's dtype (bfloat16 for e4m3); such bytes are of float8_e4m3fn
                 or uint8 (see :func:`kvlab.attention.mla_store_paged`). Any strides with a contiguous last dimension;
                 D = v_dim + 16 to 128 rope columns, both multiples of 16
    block_table  integers ``[B, columns]``: the page of tokens ``c * page_size ...`` of each sequence; entries past the
                 sequence's end are not read
    seq_lens     integers ``[B]``: keys of each sequence, the S new tokens among them; 0 is allowed
    indices      sparse attention: integers ``[B, topk]``, or ``[B, S, topk]`` beside q of four axes, of 32 or 64 bits:
                 the slots, ``page * page_size + slot``, of the rows that each token sees, in any order and place; a
                 slot that is named twice counts twice, -1 names none, and so does, where values are not looked at, any
                 other integer. block_table and seq_lens are not looked at then, and may be None: each token has a list
                 of its own, B (S) may be any number (a prefill, token by token), and mask, window, leftpad_k,
                 q_positions and alibi_slopes, which ask for positions, must be None. On Hopper rows of 512 + 64
                 columns, of 16 bits or with scales, are gathered beside the products
    v_dim        latent columns, 32 to 512
    scale        of the scores. It belongs to the heads before absorption, whose size the cache does not tell: the
                 default is that of DeepSeek-V2 and V3, ``1 / sqrt(128 + 64)``, for rows of 512 + 64 columns only
    mask         None: new token i of S, at position ``seq_len - S + i``, sees the keys up to its own; or a
                 :class:`~kvlab.attention.masks.Mask` in place of that
    window       None; a number of keys, the token's own among them; or ``(left, right)`` keys beside its position, None
                 for no bound, -2 or less for one on its other side. Pages outside it are not read
    {features:13}
    q_scale      of q in e4m3: a number, float32 ``[1]`` or ``[B, 1]``
    k_scale      what e4m3 columns are multiplied by, as K and as V: a number, float32 ``[1]`` or ``[B, 1]``,
                 or each token's ``[pages, page_size, 1]``; left out, or 1, for other caches
    out          where to write the output (``[B, H, v_dim]`` or ``[B, S, H, v_dim]``, q's dtype, bfloat16 for e4m3); a
                 new array by default
    return_lse   return ``(out, lse)`` with lse ``[B, H]`` or ``[B, S, H]``, float32, natural logarithm (``base2``: of
                 base 2)
    kv_layout    of a cache with four axes: "NHD" ``[pages, page_size, 1, D]`` or "HND" ``[pages, 1, page_size, D]``
    balanced     share the rows of all sequences equally, whatever their lengths: a work list of the step is made on the
                 device, which Hopper's kernel walks where it takes the call and S is 1 or H a power of two, otherwise
                 the portable one; the same lengths give the same order of sums. num_splits, batch_invariant, indices,
                 leftpad_k and q_positions must be left out. None: on a GPU, where nothing of these is given and the
                 pool has less than three fifths (by the portable kernel two, with more than 16 heads one) of the pages
                 that the table of several sequences could name
    plan         None, or what :func:`~kvlab.attention.plan` made, with ``v_dim``, of ``seq_lens`` and S: made once a
                 step, it serves all layers; such a call is balanced
    batch_invariant  the same bits for a sequence alone and in any batch: its keys are split by the columns of the
                 table alone
    backend      "auto": the emulator for NumPy arrays, for torch tensors the Gluon kernel for sm_90 where that can do
                 it and otherwise the Triton kernel (interpreted on the CPU); "reference" (float64), "emulator",
                 "triton"; "hopper": the Gluon kernel (its emulator where the arrays are not on a GPU), ValueError for
                 what it cannot do
    arch         the machine that is emulated: "sm_80", "sm_90" (the tiles of the compiled kernel), "gfx950" (MAX's tile
                 of 16 rows and 128 keys; 16 bits, v_dim 128, 256 or 512, 32 or 64 columns of rope); with indices
                 "sm_100", too (rows by TMA gather4; 16 bits, v_dim 128, 256 or 512, 64 or 128 columns of rope)
    arithmetic   of the emulator: "float32", NumPy's; or "chip", an H100's and slower: sums of products, exp2, log2,
                 division, fused operations and the order of sums as compiled, recorded to the bit for plain calls of
                 MHA. What features add goes by the same rules; on "sm_80" provisional
    num_splits   programs that share the keys of a sequence; chosen by the sizes, not the lengths, if None
    mask_value   accepted for callers of MAX, a number below infinity; a masked key has weight 0 whatever it is
    check        look at the values of seq_lens and block_table; None: unless they are on a GPU, which would wait for it
    traffic      a :class:`~kvlab.staging.Traffic` that counts what the emulator moves

    A row without a key gives 0 and lse -inf (the sink's logit with sinks). ValueError on bad arguments, before anything
    is written. Nothing waits for the GPU, unless a mask of one's own has to be evaluated, and the grid does not depend
    on the lengths, so a captured CUDA graph may be replayed with other lengths.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> kv = rng.standard_normal((4, 16, 160)).astype(np.float32)
    >>> q = rng.standard_normal((2, 3, 160)).astype(np.float32)
    >>> table, lens = np.array([[3, 1], [2, 0]]), np.array([20, 0])
    >>> out, lse = mla_decode_paged(q, kv, table, lens, v_dim=128, scale=0.1, return_lse=True)
    >>> out.shape, lse.shape, lse[1].tolist()
    ((2, 3, 128), (2, 3), [-inf, -inf, -inf])
    >>> exact = mla_decode_paged(q, kv, table, lens, v_dim=128, scale=0.1, backend="reference")
    >>> bool(np.abs(out - exact).max() < 1e-6)
    True
    >>> mla_decode_paged(q, kv, table, lens, v_dim=128)
    Traceback (most recent call last):
        ...
    ValueError: scale None with rows of 128 + 32 columns: must be given; only 512 + 64 has a default
    """
    return MLADecode(q=q, kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens, **options)
