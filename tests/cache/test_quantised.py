"""Quantised caches, operands and the trait. Rests on arithmetic by hand and on NumPy's own indexing."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from kvlab.cache import (
    ContinuousBatchingKVCache,
    KVCacheMHAOperand,
    KVCacheScalesMHAOperand,
    KVCacheStaticParams,
    KVCacheT,
    PagedKVCache,
    PagedKVCacheCollection,
    RaggedMHAOperand,
    TileTensorMHAOperand,
)
from kvlab.layout import Layout
from kvlab.memory import Memory, OutOfBounds, bfloat16, float8_e4m3fn, invalid


def quantised(granularity=64, D=128):
    pool = PagedKVCacheCollection.allocate(
        KVCacheStaticParams(2, D), num_pages=4, page_size=8, num_layers=3, batch_size=2, max_length=16, dtype="fp8",
        scale_dtype="fp32", quantization_granularity=granularity,
    )
    rng = np.random.default_rng(0)
    pool.blocks[...] = rng.standard_normal(pool.blocks.shape).astype(float8_e4m3fn)
    pool.scales[...] = rng.uniform(0.5, 2, pool.scales.shape).astype(pool.scales.dtype)
    pool.lookup_table[:, :2] = [[2, 0], [3, 1]]
    return pool.with_lengths(np.array([9, 5]), 1)


def test_every_method_and_member_of_the_trait_is_there():
    names = {name for name in vars(KVCacheT) if not name.startswith("_")} | set(KVCacheT.__annotations__)
    expected = {
        "cache_lengths_nd", "cache_length", "load", "store", "store_scale", "load_scale", "load_quantized",
        "empty_cache", "max_prompt_length", "max_context_length", "block_paged_ptr", "scales_block_paged_ptr",
        "scales_raw_ptr", "max_tile_size", "num_kv_rows", "row_idx", "get_tma_row", "create_tma_tile",
        "create_ragged_tma_tile", "create_rope_tma_tile", "create_gather4_tma_tile", "create_rope_gather4_tma_tile",
        "get_type_name", "populate", "copy", "dtype", "kv_params", "page_size_", "quantization_enabled",
        "quantization_granularity", "scale_dtype", "device_type",
    }
    assert names == expected
    for kind in (PagedKVCache, ContinuousBatchingKVCache):
        for name in names:
            theirs, ours = getattr(KVCacheT, name, None), getattr(kind, name, None)
            if inspect.isfunction(theirs):
                assert len(inspect.signature(theirs).parameters.keys() - inspect.signature(ours).parameters.keys()) == 0
    assert isinstance(quantised().get_key_cache(0), KVCacheT)


def test_load_multiplies_by_the_scale_of_the_first_element():
    pool = quantised()
    cache = pool.get_value_cache(2)
    b, h, t = np.array([0, 1])[:, None, None], np.arange(2)[:, None], np.arange(5)
    page, slot = np.array([[2, 0], [3, 1]])[b, t // 8], t % 8
    for d in (0, 48, 64, 112):
        got = cache.load(b, h, t, d, width=16, output_dtype="fp32")
        q = pool.blocks[page, 1, 2, slot, h, d : d + 16].astype(np.float32)
        np.testing.assert_array_equal(got, q * pool.scales[page, 1, 2, slot, h, d // 64][..., None])
        assert cache.load_quantized(b, h, t, d, width=16).tobytes() == q.astype(float8_e4m3fn).tobytes()
    assert cache.load_scale(0, 1, 3, 63)[0] == pool.scales[2, 1, 2, 3, 1, 0]
    assert cache.load_scale(0, 1, 3, 64)[0] == pool.scales[2, 1, 2, 3, 1, 1]
    assert cache.load_scale(0, 1, 3, 0, width=2).tolist() == pool.scales[2, 1, 2, 3, 1].tolist()


def test_scales_of_k_and_v_do_not_alias():
    """The stride of the scales' view spans K and V of all layers, as that of the blocks does."""
    pool = quantised()
    k, v = pool.get_key_cache(1), pool.get_value_cache(1)
    assert k.scale_storage.strides == (2 * 3 * 8 * 2 * 2, 4, 2, 1)
    before = pool.scales.copy()
    v.store_scale(0, 1, 9, 64, np.float32(3))
    before[0, 1, 1, 1, 1, 1] = 3
    np.testing.assert_array_equal(pool.scales, before)
    assert v.scales_block_paged_ptr(0, 9, 1, 64).load()[0] == 3
    assert v.scales_raw_ptr().load()[0] == pool.scales[0, 1, 1, 0, 0, 0]


def test_store_leaves_the_scales_alone():
    pool = quantised()
    before = pool.scales.copy()
    pool.get_key_cache(0).store(0, 0, 0, 0, np.ones(128, float8_e4m3fn))
    np.testing.assert_array_equal(pool.scales, before)


@pytest.mark.parametrize("granularity, scales", [(1, 80), (64, 2), (80, 1), (128, 1), (48, 2)])
def test_scales_of_a_head(granularity, scales):
    cache = quantised(granularity, D=80).get_key_cache(0)
    assert cache.head_dim_granularity == scales
    assert cache.scales.shape == (5, 8, 2, scales)
    assert (cache.quantization_enabled, cache.scale_dtype) == (True, np.float32)


def test_bytes_of_a_token():
    """128 dims in blocks of 64, 8 heads, float32: 1024 bytes of fp8 and 64 of scales."""
    pool = PagedKVCacheCollection.allocate(
        KVCacheStaticParams(8, 128), num_pages=1, page_size=1, num_layers=1, batch_size=1, max_length=1, dtype="fp8",
        scale_dtype="fp32", quantization_granularity=64,
    )
    assert (pool.blocks[0, 0].nbytes, pool.scales[0, 0].nbytes) == (1024, 64)


class TestErrors:
    @pytest.mark.parametrize(
        "act, kind, message",
        [
            (lambda c: c.load(0, 0, 0, 0), ValueError, "output_dtype None of a cache quantised"),
            (lambda c: c.load(0, 0, 0, 0, output_dtype="fp8"), ValueError, "output_dtype fp8"),
            (lambda c: c.load(0, 0, 0, 60, width=8, output_dtype="fp32"), ValueError, "crosses a multiple of"),
            (lambda c: c.load_scale(0, 0, 0, 128), IndexError, r"head_dim_idx is 128: must be in \[0, 128\)"),
            (lambda c: c.load_scale(0, 0, 0, 64, width=2), IndexError, "must end inside the head of 2"),
            (lambda c: c.load_scale(0, 2, 0, 0), IndexError, r"head_idx is 2: must be in"),
            (lambda c: c.load_scale(0, 0, 16, 0), ValueError, "which is none of the pages"),
            (lambda c: c.store_scale(0, 0, 0, 0, np.float64(1)), ValueError, "val has dtype float64, the scales"),
        ],
    )
    def test_quantised(self, act, kind, message):
        with pytest.raises(kind, match=message):
            act(quantised().get_key_cache(0))

    def test_plain_cache_has_no_scales(self):
        cache = PagedKVCache(np.zeros((2, 4, 1, 8), np.float32), [0], [[0]], 1, 1)
        for act in (
            lambda: cache.load_scale(0, 0, 0, 0), lambda: cache.store_scale(0, 0, 0, 0, np.float32(1)),
            lambda: cache.load_quantized(0, 0, 0, 0), lambda: cache.scales_block_paged_ptr(0, 0, 0),
        ):
            with pytest.raises(ValueError, match="has no scales"):
                act()
        assert (cache.quantization_enabled, cache.quantization_granularity, cache.scale_dtype) == (False, 1, invalid)
        assert not cache.scales_raw_ptr()
        with pytest.raises(OutOfBounds):
            cache.scales_raw_ptr().load()

    def test_shape_of_the_scales(self):
        with pytest.raises(ValueError, match=r"scales has shape \(2, 4, 1, 1\): must be \(2, 4, 1, 2\)"):
            PagedKVCache(
                np.zeros((2, 4, 1, 8), np.float32), [0], [[0]], 1, 1, scales=np.ones((2, 4, 1, 1), np.float32),
                quantization_granularity=4,
            )


def test_continuous_answers_without_scales():
    cache = ContinuousBatchingKVCache(np.zeros((2, 4, 1, 8), bfloat16), [0], [1], 1, 1)
    assert cache.load_scale(0, 0, np.arange(3), 0, width=2).tolist() == [[0.0, 0.0]] * 3
    assert cache.load_quantized(0, 0, 0, 0, width=2).dtype == bfloat16
    assert cache.store_scale(0, 0, 0, 0, np.float32(1)) is None
    for pointer in (cache.scales_raw_ptr(), cache.scales_block_paged_ptr(0, 0, 0)):
        with pytest.raises(OutOfBounds):
            pointer.load()


def test_views_survive_their_library():
    torch = pytest.importorskip("torch")
    pool = quantised().torch()
    assert pool.scales.dtype == torch.float32
    back = pool.numpy().get_value_cache(1)
    assert back.load(0, 0, 0, 0, width=8, output_dtype="fp32").tobytes() == (
        quantised().get_value_cache(1).load(0, 0, 0, 0, width=8, output_dtype="fp32").tobytes()
    )
    assert np.shares_memory(back.copy().scales, back.scales)


class TestOperands:
    def test_cache(self):
        cache = quantised().get_key_cache(1)
        keys = KVCacheMHAOperand(cache)
        assert (keys.page_size, keys.cache_length(0), keys.num_kv_rows()) == (8, 9, cache.num_kv_rows())
        assert (keys.dtype, keys.scale_dtype, keys.quantization_granularity) == (cache.dtype, np.float32, 64)
        assert keys.load_scale(0, 3, 1, 64)[0] == cache.load_scale(0, 1, 3, 64)[0]  # token before head
        tile = keys.block_paged_tile(0, 4, 1, Layout((4, 128), (256, 1)), tile_size=4)
        assert tile.load()[..., 0].tobytes() == cache.load_quantized(0, 1, np.arange(4, 8), 0, width=128).tobytes()
        assert keys.populate(0, 8, BN=8, base_alignment=8).rows.tolist() == [0]
        assert keys.create_tma_tile("128B", BN=8).descriptor.shape == (cache.num_kv_rows(), 2, 128)

    def test_scales(self):
        cache = quantised().get_key_cache(1)
        scales = KVCacheScalesMHAOperand(cache)
        assert scales.block_paged_ptr(0, 3, 1, 64).load()[0] == cache.load_scale(0, 1, 3, 64)[0]
        assert (scales.dtype, scales.cache_length(1), scales.row_idx(0, 3)) == (np.float32, 5, cache.row_idx(0, 3))
        with pytest.raises(ValueError, match="KVCacheScalesMHAOperand has no tma_tile"):
            scales.create_tma_tile("128B", BN=8)
        with pytest.raises(ValueError, match="has no scales"):
            KVCacheScalesMHAOperand(ContinuousBatchingKVCache(np.zeros((2, 4, 1, 8)), [0], [1], 1, 1))

    def test_dense(self):
        values = np.arange(2 * 5 * 3 * 8, dtype=np.float32).reshape(2, 5, 3, 8)
        scales = np.arange(2 * 5 * 3 * 3, dtype=np.float32).reshape(2, 5, 3, 3)
        keys = TileTensorMHAOperand(values, scales)
        assert (keys.quantization_enabled, keys.quantization_granularity) == (True, 3)
        b, t, h = np.array([0, 1]), np.array([4, 2]), np.array([2, 0])
        assert keys.block_paged_ptr(b, t, h, 5).load()[:, 0].tolist() == values[b, t, h, 5].tolist()
        assert keys.load_scale(b, t, h, 5)[:, 0].tolist() == scales[b, t, h, 1].tolist()
        assert (keys.cache_length(1), keys.row_idx(1, 2), keys.num_kv_rows(), keys.page_size) == (5, 7, 10, 0)
        assert keys.populate(1, 1, BN=4).get_row(np.arange(4)).tolist() == [6, 7, 8, 9]
        assert TileTensorMHAOperand(values).load_scale(0, 0, 0, 0)[0] == 0
        tile, smem = keys.create_tma_tile("32B", BN=4), Memory(4 * 32)
        tile.async_copy(smem, 0, (0, 2, keys.row_idx(1, 1)))
        assert sorted(smem.image(np.float32)) == sorted(values[1, 1:5, 2].reshape(-1))

    def test_ragged(self):
        values = np.arange(8 * 2 * 8, dtype=np.float32).reshape(8, 2, 8)
        keys = RaggedMHAOperand(values, np.array([0, 3, 3, 8], np.uint32), scales=values[:, :1, 0].copy())
        assert [keys.cache_length(b) for b in range(3)] == [3, 0, 5]
        assert keys.block_paged_ptr(2, 4, 1, 3).load()[0] == values[7, 1, 3]
        assert (keys.row_idx(2, 0), keys.num_kv_rows(), keys.load_scale(0, 0, 0, 0)[0]) == (3, 8, 0)
        with pytest.raises(IndexError, match=r"start_tok_idx is 0: must be in \[0, 0\)"):
            keys.row_idx(1, 0)
        with pytest.raises(ValueError, match="does not know its longest sequence"):
            keys.max_context_length()
        tile, smem = keys.create_scale_tma_tile(4), Memory(128)
        assert tile.tile_shape == (1, 4)
        tile.async_copy(smem, 0, (4, 0))
        assert smem.image(np.float32)[:4].tolist() == values[4:8, 0, 0].tolist()
        by_head = RaggedMHAOperand(values, [0, 8], scales=np.zeros((2, 8, 1), np.float32))
        assert by_head.create_scale_tma_tile(8).descriptor.shape == (2, 8)
        with pytest.raises(ValueError, match="6 scales: must be a multiple of 4"):
            RaggedMHAOperand(values, [0, 6], scales=np.zeros((6, 1), np.float32)).create_scale_tma_tile(4)
        with pytest.raises(ValueError, match="cache_row_offsets"):
            RaggedMHAOperand(values, [0, 9])
