"""Pools over torch tensors, the same bytes. Rests on torch's own indexing and on its reading of the bits."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.cache import PagedKVCache, PagedKVCacheCollection
from kvlab.memory import bfloat16, float8_e4m3fn, float8_e5m2

torch = pytest.importorskip("torch")


def small_pool(dtype=np.float32):
    blocks = np.random.default_rng(0).standard_normal((5, 2, 3, 4, 2, 8)).astype(dtype)
    return PagedKVCacheCollection(blocks, np.array([5, 3], np.uint32), np.array([[4, 0], [2, 7]], np.int32), 1, 6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16, float8_e4m3fn, float8_e5m2], ids=str)
def test_there_and_back_without_a_copy(dtype):
    pool = small_pool(dtype)
    there = pool.torch()
    assert str(there.blocks.dtype) == f"torch.{np.dtype(dtype).name}"
    assert there.dtype == np.dtype(dtype)
    assert there.torch().blocks is there.blocks
    back = there.numpy()
    assert back.blocks.__array_interface__["data"] == pool.blocks.__array_interface__["data"]
    assert back.blocks.dtype == np.dtype(dtype)
    assert back.blocks.tobytes() == pool.blocks.tobytes()
    there.blocks[4, 1, 2, 0, 0, 0] = 2
    assert pool.blocks[4, 1, 2, 0, 0, 0] == 2
    assert pool.get_value_cache(2).load(0, 0, 0, 0).item() == 2


def test_values_agree():
    """bf16 crosses by its bits: torch reads the numbers that ml_dtypes wrote."""
    pool = small_pool(bfloat16)
    np.testing.assert_array_equal(pool.torch().blocks.float().numpy(), pool.blocks.astype(np.float32))


def test_views_of_a_torch_pool():
    pool, there = small_pool(bfloat16), small_pool(bfloat16).torch()
    v, expected = there.get_value_cache(1), pool.get_value_cache(1)
    assert v.blocks.stride() == expected.strides == v.strides
    np.testing.assert_array_equal(v.load(0, 1, np.arange(8), 0, width=8), expected.load(0, 1, np.arange(8), 0, width=8))
    assert v.numpy().blocks.strides == expected.blocks.strides
    assert expected.torch().blocks.stride() == v.blocks.stride()
    v.store(0, 0, 0, 0, torch.full((8,), 3, dtype=torch.bfloat16))
    assert (there.blocks[4, 1, 1, 0, 0] == 3).all()


def test_tables_keep_their_dtypes():
    there = small_pool().torch()
    assert (there.cache_lengths.dtype, there.lookup_table.dtype) == (torch.uint32, torch.int32)


def test_read_only_array():
    pool = small_pool(bfloat16)
    pool.blocks.flags.writeable = False
    assert pool.torch().blocks.data_ptr() == pool.blocks.__array_interface__["data"][0]


def test_half_and_hnd_tensors():
    """The views that serving stacks hold: [2, pages, page, H, D], and HND."""
    kv = torch.arange(2 * 4 * 3 * 8 * 16.0).reshape(2, 4, 3, 8, 16)
    cache = PagedKVCache(kv[1].transpose(1, 2), torch.tensor([8]), torch.tensor([[2]]), 1, 9)
    assert cache.strides == (384, 16, 128, 1)
    assert cache.load(0, 2, 5, 3).item() == kv[1, 2, 2, 5, 3]


def test_refused():
    pool = small_pool().torch()
    meta = pool.to("meta")
    with pytest.raises(ValueError, match=r"blocks: torch .*, cache_lengths: NumPy"):
        PagedKVCacheCollection(pool.blocks, [5, 3], pool.lookup_table, 1, 6)
    with pytest.raises(ValueError, match="blocks requires grad"):
        PagedKVCacheCollection(pool.blocks.requires_grad_(), pool.cache_lengths, pool.lookup_table, 1, 6)
    with pytest.raises(ValueError, match="blocks is on meta: only CPU memory"):
        meta.numpy()
    with pytest.raises(ValueError, match="cache_lengths is on meta"):
        meta.cache_length(0)
