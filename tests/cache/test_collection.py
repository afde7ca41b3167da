"""Pools: views of the six-dimensional storage, construction, poison. Rests on NumPy's own indexing and on the law that
what was put in comes back bit for bit."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cache import KVCacheStaticParams, PagedKVCacheCollection, from_dense
from kvlab.memory import bfloat16


def small_pool(dtype=np.float32):
    blocks = np.random.default_rng(0).standard_normal((5, 2, 3, 4, 2, 8)).astype(dtype)
    return PagedKVCacheCollection(blocks, np.array([5, 3], np.uint32), np.array([[4, 0], [2, 7]], np.int32), 1, 6)


class TestViews:
    def test_share_memory_with_the_pool(self):
        pool = small_pool()
        for kv, get in enumerate((pool.get_key_cache, pool.get_value_cache)):
            for layer in range(3):
                view = get(layer)
                assert view.blocks.base is pool.blocks
                np.testing.assert_array_equal(view.blocks, pool.blocks[:, kv, layer])
                view.store(1, 1, 2, 3, np.float32(100 * kv + layer))
                assert pool.blocks[2, kv, layer, 2, 1, 3] == 100 * kv + layer

    def test_store_touches_nothing_else(self):
        pool = small_pool()
        before = pool.blocks.copy()
        pool.get_value_cache(1).store(0, np.arange(2), 5, 0, np.zeros((2, 8), np.float32))
        before[0, 1, 1, 1] = 0
        np.testing.assert_array_equal(pool.blocks, before)

    def test_facts(self):
        pool = small_pool()
        assert (pool.num_layers, pool.page_size, pool.batch_size) == (3, 4, 2)
        assert (pool.cache_length(1), pool.cache_length([0, 1]).tolist()) == (3, [5, 3])
        assert pool.get_key_cache(0).kv_params is pool.kv_params == KVCacheStaticParams(2, 8)
        assert pool.get_key_cache(0).get_type_name() == "PagedKVCache"

    def test_mla_has_no_values(self):
        pool = PagedKVCacheCollection(np.zeros((2, 1, 1, 4, 1, 8), np.float32), [1], [[0]], 1, 2)
        assert pool.kv_params.is_mla
        with pytest.raises(ValueError, match="MLA"):
            pool.get_value_cache(0)

    @pytest.mark.parametrize("layer", [-1, 3])
    def test_layer_out_of_range(self, layer):
        with pytest.raises(IndexError, match=rf"layer_idx is {layer}: must be in \[0, 3\)"):
            small_pool().get_key_cache(layer)

    def test_empty_cache_is_about_the_batch(self):
        params = KVCacheStaticParams(2, 8)
        pool = PagedKVCacheCollection.allocate(
            params, num_pages=4, page_size=4, num_layers=1, batch_size=2, max_length=8
        )
        assert pool.get_key_cache(0).empty_cache()
        assert not pool.with_lengths([0, 1], 0).get_key_cache(0).empty_cache()


class TestAllocate:
    pool = PagedKVCacheCollection.allocate(
        KVCacheStaticParams(2, 8), num_pages=6, page_size=16, num_layers=2, batch_size=3, max_length=70, dtype="bf16"
    )

    def test_poisoned_with_a_null_page(self):
        assert self.pool.blocks.shape == (7, 2, 2, 16, 2, 8)
        assert self.pool.dtype == bfloat16
        assert np.isnan(self.pool.blocks).all()

    def test_table_of_sentinels(self):
        assert self.pool.lookup_table.shape == (3, 24)
        assert (self.pool.lookup_table == 6).all()
        with pytest.raises(ValueError, match=r"lookup_table\[1, 0\] is 6"):
            self.pool.get_key_cache(1).load(1, 0, 0, 0)


class TestFromDense:
    @given(data=st.data())
    def test_every_token_comes_back_and_the_rest_is_poison(self, data):
        """Law: load gives the dense bits back; NaN are exactly the slots that no sequence uses."""
        batch, layers, heads, page_size = (data.draw(st.integers(1, 3)) for _ in range(4))
        lengths = data.draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
        k, v = np.random.default_rng(0).standard_normal((2, layers, batch, 9, heads, 4)).astype(bfloat16)
        spare, seed = data.draw(st.integers(0, 2)), data.draw(st.none() | st.integers(0, 9))
        pool = from_dense(k, v, lengths, page_size, shuffle=seed, spare_pages=spare)
        for layer in range(layers):
            for cache, dense in ((pool.get_key_cache(layer), k[layer]), (pool.get_value_cache(layer), v[layer])):
                for b, length in enumerate(lengths):
                    got = cache.load(b, np.arange(heads), np.arange(length)[:, None], 0, width=4)
                    assert got.tobytes() == dense[b, :length].tobytes()
                assert np.isnan(cache.blocks).sum() == cache.blocks.size - sum(lengths) * heads * 4
        table = pool.lookup_table
        used = [page for b, length in enumerate(lengths) for page in table[b, : -(-length // page_size)]]
        assert len(set(used)) == len(used) == pool.total_num_pages - spare == pool.blocks.shape[0] - 1 - spare
        assert (table == pool.total_num_pages).sum() == table.size - len(used)

    def test_tail_of_the_last_page(self):
        """Case nan-tail-of-last-page: page 16, 17 tokens, slots 1 to 15 of the second page hold NaN."""
        k = np.ones((1, 1, 17, 2, 8), np.float32)
        pool = from_dense(k, k, [17], 16)
        for half in range(2):
            assert (pool.blocks[0, half] == 1).all()
            assert (pool.blocks[1, half, 0, :1] == 1).all()
            assert np.isnan(pool.blocks[1, half, 0, 1:]).all()

    def test_shuffle_and_no_poison(self):
        k = np.ones((1, 1, 64, 1, 8), np.float32)
        ordered, shuffled = (from_dense(k, k, [64], 4, shuffle=s, spare_pages=2, poison=False) for s in (None, 5))
        assert ordered.lookup_table[0, :16].tolist() == list(range(16))
        assert sorted(shuffled.lookup_table[0, :16]) != list(shuffled.lookup_table[0, :16])
        assert (ordered.blocks[16:] == 0).all()

    def test_new_tokens_are_stored_but_not_yet_counted(self):
        k = np.zeros((1, 3, 9, 1, 8), np.float32)
        pool = from_dense(k, None, [9, 1, 0], 4, new_tokens=1)
        assert pool.cache_lengths.tolist() == [8, 0, 0]
        assert (pool.max_seq_length, pool.max_cache_length, pool.kv_params.is_mla) == (1, 9, True)

    @pytest.mark.parametrize(
        "change, message",
        [
            ({"lengths": [3]}, r"lengths is \[3\]: must be 2 numbers in \[0, 9\]"),
            ({"lengths": [3, 10]}, r"lengths is \[3, 10\]: must be 2 numbers"),
            ({"page_size": 0}, "page_size is 0: must be at least 1"),
            ({"v": np.zeros((1, 2, 9, 1, 8), np.float16)}, r"v\[0\] is .* float16"),
            ({"v": np.zeros((2, 2, 9, 1, 8), np.float32)}, "v has 2 layers, k 1"),
            ({"k": np.zeros((1, 2, 9, 8), np.float32)}, "must be at least one of"),
            ({"k": []}, "k has 0 layers"),
        ],
    )
    def test_refused(self, change, message):
        k = np.zeros((1, 2, 9, 1, 8), np.float32)
        with pytest.raises(ValueError, match=message):
            from_dense(**({"k": k, "v": k, "lengths": [3, 9], "page_size": 4} | change))


def test_torch_is_not_imported():
    code = "import sys, kvlab.cache; print(sorted({'torch', 'triton'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
