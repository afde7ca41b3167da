"""Streaming MHA decode: MAX's decode with one shared-memory buffer, K and V strip by strip."""

from __future__ import annotations

from typing import Unpack

from kvlab.attention.call.operation import PublicOperation
from kvlab.attention.call.options import StreamingOptions
from kvlab.attention.mha_decode.call import arrays_of_collection
from kvlab.cache import PagedKVCacheCollection
from kvlab.common.arrays import Array

from .call import StreamingDecode

__all__ = ["mha_decode_streaming", "mha_decode_streaming_paged"]


@PublicOperation
def mha_decode_streaming(
    q: Array, cache: PagedKVCacheCollection, layer: int = 0, **options: Unpack[StreamingOptions]
) -> StreamingDecode:
    """Attention of the newest tokens over a cache collection, strip by strip: ``softmax(scale Q K^T) V``.

    q, cache, layer as in :func:`~kvlab.attention.mha_decode`; options, what is returned and what raises: as for
    :func:`mha_decode_streaming_paged`.

    >>> import numpy as np
    >>> blocks = np.zeros((3, 2, 1, 16, 1, 64), np.float32)  # [pages, K and V, layers, page_size, heads, D]
    >>> blocks[:, 1] = 7
    >>> table = np.array([[2, 0]])
    >>> cache = PagedKVCacheCollection(blocks, np.array([19]), table, max_seq_length=1, max_cache_length=20)
    >>> mha_decode_streaming(np.ones((1, 2, 64), np.float32), cache)[0, :, :3]
    array([[7., 7., 7.],
           [7., 7., 7.]], dtype=float32)
    """
    return StreamingDecode(**arrays_of_collection(q, cache, layer) | options)


@PublicOperation
def mha_decode_streaming_paged(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, **options: Unpack[StreamingOptions]
) -> StreamingDecode:
    """Computes :func:`~kvlab.attention.mha_decode_paged` by MAX's streaming decode: shared memory holds one strip of K
    (32 columns of a tile) and one of V (32 keys), however deep the heads are, and nothing is fetched ahead.

    q            ``[B, Hq, D]``, or ``[B, S, Hq, D]`` with S of 1 to 4; bfloat16, float16 or float32; e4m3 with K and V
                 of e4m3. D of 64, 128, 256 or 512
    k_cache, v_cache  ``[pages, page_size, Hkv, D]`` of q's dtype, or of float8_e4m3fn with q of 16 bits; converted to
                 16 bits in registers, and so is q of e4m3. A GPU, sm_89 or later, gfx942 or gfx950, has that
    arch         the machine that is emulated: "gfx950"
    arithmetic   of the emulator: "float32"; that of this chip is not known

    The other arguments, the results and the errors are those of :func:`~kvlab.attention.mha_decode_paged`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 4, 16, 1, 64)).astype(np.float32)
    >>> q = rng.standard_normal((2, 3, 64)).astype(np.float32)
    >>> table, lens = np.array([[3, 1], [2, 0]]), np.array([20, 0])
    >>> out = mha_decode_streaming_paged(q, k, v, table, lens)
    >>> exact = mha_decode_streaming_paged(q, k, v, table, lens, backend="reference")
    >>> bool(np.abs(out - exact).max() < 1e-6)
    True
    >>> mha_decode_streaming_paged(q[..., :32], k[..., :32], v[..., :32], table, lens)
    Traceback (most recent call last):
        ...
    ValueError: head dimensions 32 and 32: must be both 64, 128, 256 or 512
    """
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    return StreamingDecode(**arrays, **options)
