"""MHA decode: one to four new tokens of each sequence attend to its whole KV cache."""

from __future__ import annotations

from typing import Unpack

from kvlab.attention.call.operation import PublicOperation
from kvlab.attention.call.options import DecodeOptions
from kvlab.cache import PagedKVCacheCollection
from kvlab.common.arrays import Array

from .call import MHADecode, arrays_of_collection

__all__ = ["mha_decode", "mha_decode_paged"]


@PublicOperation
def mha_decode(q: Array, cache: PagedKVCacheCollection, layer: int = 0, **options: Unpack[DecodeOptions]) -> MHADecode:
    """Attention of the newest tokens over a cache collection: ``softmax(scale Q K^T) V``.

    q      ``[B, Hq, D]``, or ``[B, S, Hq, D]`` with S of 1 to 4 new tokens
    cache  :class:`~kvlab.cache.PagedKVCacheCollection` whose pages already hold the new tokens; a sequence has
           ``cache.cache_length(b) + S`` keys. The scales of a quantised collection are used: one for each token and
           head; of 4 bits, blocks of uint8 ``[.., D / 2]``, those, or e4m3 of 16 dims each (NVFP4, granularity 8, with
           k_scale and v_scale as numbers)
    layer  of the cache
    options  those of :func:`mha_decode_paged`

    Returns and raises what :func:`mha_decode_paged` does.

    >>> import numpy as np
    >>> from kvlab.cache import PagedKVCacheCollection
    >>> blocks = np.zeros((3, 2, 1, 16, 1, 64), np.float32)  # [pages, K and V, layers, page_size, heads, D]
    >>> blocks[:, 1] = 7
    >>> table = np.array([[2, 0]])
    >>> cache = PagedKVCacheCollection(blocks, np.array([19]), table, max_seq_length=1, max_cache_length=20)
    >>> mha_decode(np.ones((1, 2, 64), np.float32), cache)[0, :, :3]
    array([[7., 7., 7.],
           [7., 7., 7.]], dtype=float32)
    """
    return MHADecode(**arrays_of_collection(q, cache, layer) | options)


@PublicOperation
def mha_decode_paged(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, **options: Unpack[DecodeOptions]
) -> MHADecode:
    """Attention of the newest tokens over paged K and V: ``softmax(scale Q K^T) V``.

    q            ``[B, Hq, D]``, or ``[B, S, Hq, D]`` with S of 1 to 4; bfloat16, float16 or float32; e4m3 with K and V
                 of e4m3. D and Dv are multiples of 8 (of 16 with e4m3) from 16 to 576
    k_cache, v_cache  ``[pages, page_size, Hkv, D]`` and ``[.., Dv]`` of q's dtype, or of float8_e4m3fn with q of 16
                 bits, or of uint8 with as many, ``[.., D / 2]``: two columns of 4 bits a byte, the first in the low
                 half, D and Dv multiples of 32 (see k_block_scale, k_min); any strides whose last is 1 (the halves of
                 one buffer). Hq is a multiple of Hkv
    block_table  integers ``[B, columns]``: the page of tokens ``c * page_size ...`` of each sequence; entries past the
                 sequence's end, or before what a window shows, are not read
    seq_lens     integers ``[B]``: keys of each sequence, the S new tokens among them; 0 is allowed
    scale        of the scores, ``1 / sqrt(D)`` by default, ``1 / sqrt(D + Dv)`` with qv
    mask         None: new token i of S sees the keys below ``seq_len - S + 1 + i`` (causal, aligned at the end); or a
                 mask of :mod:`kvlab.attention.masks`
    window       with mask None or besides it: a number of keys, the query's own among them, or ``(left, right)`` keys
                 beside it: None is no bound, one of -2 or less is on the query's other side (``(100, -2)`` ends 2 keys
                 before it); with mask None no key behind the query is seen
    {features:13}
    return_lse   return ``(out, lse)`` with lse ``[B, Hq]`` or ``[B, S, Hq]``, natural log (base2: that of 2), float32
    out          where to write the output ``[.., Hq, Dv]`` of q's dtype (bfloat16 for e4m3); a new array by default. It
                 may be q itself, and shares no memory with anything else
    kv_layout    "NHD", or "HND": pages (and scales of tokens) have the heads before the tokens of a page
    batch_invariant  the splits depend on the columns of the table alone: the same bits for a sequence in any batch, on
                 any device of one architecture
    backend      "auto": the emulator for NumPy arrays, the Triton kernel for torch tensors (interpreted on the CPU), on
                 sm_90 the Gluon kernel for what it can do; "reference" (float64), "emulator", "triton"; "hopper": the
                 Gluon kernel (its emulator where the arrays are not on a GPU), ValueError for what it cannot do
    arch         the machine that is emulated: "sm_80", "sm_90"; "gfx950" with D = Dv of 64, 128, 256 or 512 (MAX's
                 decode through KVBuffer). e4m3 needs sm_90 or gfx950 (and D of 128, 256 or 512); a GPU, sm_89 or later
    arithmetic   of the emulator: "float32", NumPy's; or "chip", an H100's and slower: sums of products, exp2, log2,
                 division, fused operations and the order of sums as compiled, recorded to the bit for plain calls of
                 MHA. What features add goes by the same rules; on "sm_80" provisional
    num_splits   programs that share the keys of a sequence; chosen by the sizes, not the lengths, if None
    balanced     share the keys of all sequences equally, whatever their lengths: a work list of the step is made on the
                 device; S of up to 16; the kernels of :func:`~kvlab.attention.attend_paged`; the same lengths give the
                 same order of sums. With ``batch_invariant`` units have 2048 keys, or as many times 64 as an
                 item has rows, so that a sequence has the same bits in any batch. num_splits must
                 be left out; with leftpad_k or q_positions the list has all keys of a sequence. None: on a GPU, where
                 the pool has less than two fifths of the pages that the table of several sequences could name, and
                 neither num_splits nor batch_invariant is given
    plan         None, or what :func:`~kvlab.attention.plan` made of ``seq_lens`` and S: made once a step, it serves all
                 layers; ``balanced`` then, without a list of the call's own
    mask_value   accepted for callers of MAX, a number below infinity; a masked key has weight 0 whatever it is
    check        look at the values of seq_lens and block_table; None: unless they are on a GPU, which would wait for it
    traffic      a :class:`~kvlab.staging.Traffic` that counts what the emulator moves

    Scores are, in this order, scaled, capped, lowered by ALiBi and masked. A row without a key gives 0 and lse -inf
    (the sink's logit with sinks). ValueError on bad arguments, before anything is written. Nothing waits for the GPU
    (but for a mask of one's own, which is materialised) and the grid does not depend on the lengths, so a captured CUDA
    graph may be replayed with other lengths.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 4, 16, 1, 64)).astype(np.float32)
    >>> q = rng.standard_normal((2, 3, 64)).astype(np.float32)
    >>> table, lens = np.array([[3, 1], [2, 0]]), np.array([20, 0])
    >>> out, lse = mha_decode_paged(q, k, v, table, lens, return_lse=True)
    >>> out.shape, lse.shape, lse[1].tolist()
    ((2, 3, 64), (2, 3), [-inf, -inf, -inf])
    >>> exact = mha_decode_paged(q, k, v, table, lens, backend="reference")
    >>> bool(np.abs(out - exact).max() < 1e-6)
    True
    >>> k[3], v[3] = np.nan, np.nan  # a window reads the pages that it sees
    >>> bool(np.isfinite(mha_decode_paged(q, k, v, table, lens, window=4)).all())
    True
    >>> mha_decode_paged(q, k, v, table, np.array([20, 33]))
    Traceback (most recent call last):
        ...
    ValueError: seq_lens[1] is 33: must be 0 to 32, what the 2 columns of block_table hold in pages of 16
    """
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    return MHADecode(**arrays, **options)
