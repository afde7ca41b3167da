"""KV store: K and V of the new tokens into a paged or continuous cache, rotated and quantised on the way."""

from __future__ import annotations

from typing import Unpack

from kvlab.attention.call.operation import PublicOperation
from kvlab.attention.call.options import KVLayout, PagedStoreOptions, StoreOptions
from kvlab.cache import ContinuousBatchingKVCacheCollection, PagedKVCacheCollection
from kvlab.common.arrays import Array

from .call import Store, store_of_collection, store_of_pages, store_of_rows

__all__ = ["kv_store", "kv_store_paged", "mla_store_paged"]


@PublicOperation
def kv_store_paged(
    k: Array, v: Array | None, k_cache: Array, v_cache: Array | None, slot_mapping: Array, *,
    k_scale: Array | float | None = None, v_scale: Array | float | None = None, k_granularity: int | None = None,
    v_granularity: int | None = None, kv_layout: KVLayout = "NHD", **options: Unpack[PagedStoreOptions],
) -> Store:
    """Write K and V of T tokens into the slots of a paged cache, in place, in one launch.

    k, v          ``[T, H, D]`` (D may differ between them), bfloat16, float16 or float32, any strides with a contiguous
                  last dimension. ``v=None`` stores K alone (``v_cache=None``)
    k_cache, v_cache  ``[pages, page_size, H, D]``, any strides with a contiguous last dimension (halves of one buffer;
                  see ``kv_layout``): of k's dtype (copied bit for bit), of another float format (rounded once),
                  or float8_e4m3fn, float8_e5m2 (rounded once, saturated); or of 4 bits, uint8 ``[.., D / 2]``, the
                  first of two dims in the low half of a byte, as ``mha_decode_paged`` reads them
    slot_mapping  32- or 64-bit integers ``[T]``: ``page * page_size + slot`` of each token, negative to skip it
    k_scale, v_scale  for fp8 caches: what is stored is ``x * (1 / scale)``, the reciprocal rounded to float32.
                  A number, ``[1]`` (per tensor) or ``[H]`` (per head): given. ``[pages, page_size, H, n]`` (or without
                  n), float32 or bfloat16: computed as the largest finite magnitude of each block over that of the
                  format, and written with the token. n = 1: a scale for each token and head. NaN stays NaN, infinities
                  become the largest of the format, with every kind of scale and without
    k_granularity, v_granularity  dims of a block, ``ceil(D / n)`` if None
    k_block_scale, v_block_scale  of caches of 4 bits in e2m1 (NVFP4): float8_e4m3fn ``[pages, page_size, H, D / 16]``,
                  computed of 16 dims each, largest finite magnitude / 6, of what k_scale or v_scale, a number, float32
                  ``[1]`` or None for 1, divides; and written. ``[pages, page_size / 4, H, D / 16, 4]``: those of four
                  slots side by side, the 4x4 order of ``flashinfer.nvfp4``. Without them 4 bits are integers from -7
                  to 7, rounded half away from zero, and k_scale or v_scale is float32 ``[pages, page_size, H]``,
                  computed as the largest finite magnitude of the token's head / 7, and written. The bytes are those
                  of the formats ``kvlab.nvfp4`` and ``kvlab.int4``. Infinities become the largest of the format. A
                  NaN is a ValueError (see ``check``); what nobody looks at gets a scale that is NaN
    k_min, v_min  of caches of 4 bits: as k_scale and v_scale, float32 or float16, all computed and written: the least
                  of the token's head and its reach over that / 15; codes are integers from 0 to 15, as those of
                  ``kvlab.uint4`` and ``lmdeploy.int4``
    rope          :class:`~kvlab.attention.Rope` that turns K on its way, in float32; with ``positions`` ``[T]``
    kv_layout     "NHD", or "HND": pages (and scales of tokens) have the heads before the tokens of a page
    backend       "auto": the emulator for NumPy arrays, the Triton kernel for torch tensors (interpreted on the CPU);
                  "reference" (float64), "emulator", "triton"
    arch          the machine that is emulated
    check         look at slots, positions and given scales: out of range or given twice is a ValueError, and a scale
                  that is not positive and finite; and for NaN where caches have 4 bits. None: unless they are on a
                  GPU, which would wait for it; there such tokens are dropped (or left unrotated), the scales believed
    traffic       a :class:`~kvlab.staging.Traffic` that counts what the emulator moves

    Nothing but the slots named and their scales is written. ValueError on bad arguments, before anything is written.
    Nothing waits for the GPU, so the call may be captured in a CUDA graph.

    >>> import numpy as np
    >>> k = np.arange(6, dtype=np.float32).reshape(3, 1, 2)
    >>> cache = np.zeros((2, 2, 4, 1, 2), np.float32)  # K and V, pages, page_size, heads, D
    >>> kv_store_paged(k, -k, cache[0], cache[1], np.array([5, -1, 0]))
    >>> cache[0, 1, 1, 0].tolist(), cache[1, 0, 0, 0].tolist(), int((cache != 0).sum())
    ([0.0, 1.0], [-4.0, -5.0], 6)
    >>> kv_store_paged(k, -k, cache[0], cache[1], np.array([5, 8, 0]))
    Traceback (most recent call last):
        ...
    ValueError: slot_mapping[1] is 8: must be below 8, the slots of 2 pages of 4, or negative to skip the token

    Integers of 4 bits, the dims 0 and 1 in one byte, and the scale of the token's head:

    >>> four, scale = np.zeros((2, 2, 4, 1, 1), np.uint8), np.zeros((2, 2, 4, 1), np.float32)
    >>> kv_store_paged(k, -k, four[0], four[1], np.array([5, -1, 0]), k_scale=scale[0], v_scale=scale[1])
    >>> hex(four[0, 0, 0, 0, 0]), round(float(scale[0, 0, 0, 0]) * 7, 4)
    ('0x76', 5.0)
    """
    return store_of_pages(
        k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale, kv_layout=kv_layout,
        granularity=(k_granularity, v_granularity), **options,
    )


@PublicOperation
def kv_store(
    k: Array, v: Array | None, cache: PagedKVCacheCollection | ContinuousBatchingKVCacheCollection, layer: int = 0, *,
    cu_seqlens: Array | None = None, valid_lengths: Array | None = None, slot_mapping: Array | None = None,
    k_scale: Array | float | None = None, v_scale: Array | float | None = None, **options: Unpack[StoreOptions],
) -> Store:
    """Write K and V of the new tokens of every sequence into one layer of a cache, in place, in one launch.

    k, v    ``[T, H, D]`` with ``cu_seqlens`` ``[B + 1]``: the tokens of sequence b are ``cu_seqlens[b]`` to
            ``cu_seqlens[b + 1]``; or ``[B, S, H, D]``, of which the first ``valid_lengths`` ``[B]`` tokens of each
            sequence exist (all S if None); or ``[T, H, D]`` with ``slot_mapping`` ``[T]`` (paged caches); or
            ``[B, H, D]``, one token each. New token i of sequence b gets position ``cache.cache_length(b) + i``;
            ``cache_lengths`` is not changed. MLA: k is the whole row ``[.., 1, head_size]`` and v None, or k the latent
            ``[.., 1, 512]`` and v the rope part ``[.., 1, 64]`` behind it
    cache   :class:`~kvlab.cache.PagedKVCacheCollection` or :class:`~kvlab.cache.ContinuousBatchingKVCacheCollection`.
            Where it is quantised its scales are computed and written too; of 4 bits as ``mha_decode`` reads them
    rope    turns K (MLA: the rope part, the last dims of a row) by the angles of its position
    k_scale, v_scale  given scales of an fp8 cache without scales of its own, or numbers beside e4m3 ones of 16 dims
    positions  ``[T]`` or ``[B, S]``, where they are not those in the cache

    Other arguments as for :func:`kv_store_paged`. A token whose table entry is no page raises (``cache.strict``) or is
    dropped; on a GPU it is dropped, unless ``check=True``.

    >>> import numpy as np
    >>> from kvlab.cache import KVCacheStaticParams, PagedKVCacheCollection
    >>> pool = PagedKVCacheCollection.allocate(
    ...     KVCacheStaticParams(1, 2), num_pages=3, page_size=4, num_layers=1, batch_size=2, max_length=8, dtype="fp32"
    ... )
    >>> pool.lookup_table[:, :2] = [[2, 0], [1, 3]]
    >>> step = pool.with_lengths(np.array([3, 0]), 2)
    >>> k = np.arange(6, dtype=np.float32).reshape(3, 1, 2)
    >>> kv_store(k, -k, step, cu_seqlens=np.array([0, 2, 3]))
    >>> step.get_key_cache(0).load(0, 0, np.array([3, 4]), 0, width=2).tolist()
    [[0.0, 1.0], [2.0, 3.0]]
    >>> step.get_value_cache(0).load(1, 0, 0, 0, width=2).tolist()
    [-4.0, -5.0]
    """
    return store_of_collection(
        k, v, cache, layer, cu_seqlens=cu_seqlens, valid_lengths=valid_lengths, slot_mapping=slot_mapping,
        k_scale=k_scale, v_scale=v_scale, **options,
    )


@PublicOperation
def mla_store_paged(
    latent: Array, k_rope: Array, cache: Array, slot_mapping: Array, *, scale: Array | float | None = None,
    kv_layout: KVLayout = "NHD", **options: Unpack[StoreOptions],
) -> Store:
    """Write the MLA rows of T tokens, latent and rope part, into the slots of a paged cache, in place, in one launch.

    latent   ``[T, L]``; k_rope ``[T, R]``; bfloat16, float16 or float32
    cache    ``[pages, page_size, width]``, or with an axis of one head (see ``kv_layout``), one of
             * width L + R, of one dtype: latent and rope part, one after the other
             * fp8, width L + 2 R bytes: the latent in fp8 (``scale`` as for ``kv_store_paged``), the rope part in
               bfloat16: the rope-aware row, 640 bytes for 512 + 64
             * fp8, width L + 4 L / 128 + 2 R bytes: a computed float32 scale for each 128 latents between them, 656
               bytes for 512 + 64

             Of the latter two it may be of uint8, too: the latent is then in e4m3
    rope     turns the rope part
    kv_layout  of a cache with four axes: "NHD", or "HND" ``[pages, 1, page_size, width]``

    Other arguments as for :func:`kv_store_paged`.

    >>> import numpy as np
    >>> from kvlab.memory import bfloat16, float8_e4m3fn
    >>> cache = np.zeros((1, 4, 640), float8_e4m3fn)
    >>> mla_store_paged(np.ones((1, 512), np.float32), np.full((1, 64), 3.0, np.float32), cache, np.array([2]))
    >>> float(cache[0, 2, 0]), cache[0, 2, 512:].view(bfloat16)[:2].tolist(), int(cache.view("u1").any(-1).sum())
    (1.0, [3.0, 3.0], 1)
    """
    return store_of_rows(latent, k_rope, cache, slot_mapping, scale=scale, kv_layout=kv_layout, **options)
