"""Where an element lies. Rests on the worked example of the specification, on NumPy's own indexing, and on 64-bit
arithmetic done by hand for pools beyond the 32-bit range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cache import PagedKVCache, PagedKVCacheCollection
from kvlab.memory import bfloat16


def numbered(*shape, dtype=np.float32):
    return np.arange(np.prod(shape)).astype(dtype).reshape(shape)


def huge(*shape):
    """An array of that shape and its dense strides over 2 bytes: to compute addresses in, never to be followed."""
    dense = np.cumprod((1, *shape[:0:-1]))[::-1] * 2
    return np.lib.stride_tricks.as_strided(np.zeros(1, bfloat16), shape, dense, writeable=False)


class TestWorkedExampleA:
    """Page 128, 8 heads of 128, 2 layers, K and V, 5 pages, bf16; token 300 of a sequence in pages 3, 0, 4."""

    pool = PagedKVCacheCollection(np.zeros((5, 2, 2, 128, 8, 128), bfloat16), [300], [[3, 0, 4, -1]], 1, 301)

    def test_views(self):
        base = self.pool.blocks.__array_interface__["data"][0]
        k, v = self.pool.get_key_cache(1), self.pool.get_value_cache(1)
        assert k.strides == (524288, 1024, 128, 1)
        assert [c.blocks.__array_interface__["data"][0] - base for c in (k, v)] == [262144, 786432]

    def test_rows(self):
        k = self.pool.get_key_cache(1)
        assert (k.page_stride, k.row_idx(0, 300), k.num_kv_rows(), k.get_tma_row(556)) == (512, 2092, 2176, 2092)

    def test_element(self):
        k = self.pool.get_key_cache(1)
        pointer = k.block_paged_ptr(0, 300, 5, 10)
        assert pointer.offset == 2142858
        assert 262144 + pointer.byte_address == 4547860
        k.store(0, 5, 300, 10, bfloat16.type(3))
        assert self.pool.blocks.reshape(-1)[4547860 // 2] == 3


def test_mla_rows():
    """Worked example B: one layer of K alone, so rows are dense."""
    k = PagedKVCacheCollection(numbered(4, 1, 1, 8, 1, 16), [9], [[2, 1]], 1, 10).get_key_cache(0)
    assert k.page_stride == 8
    assert k.get_tma_row(np.arange(32)).tolist() == list(range(32))
    assert k.num_kv_rows() == 32


LAYOUTS = {
    "dense": lambda a: a(6, 4, 3, 8),
    "K-half-page-first": lambda a: a(6, 2, 4, 3, 8)[:, 0],
    "V-half-page-first": lambda a: a(6, 2, 4, 3, 8)[:, 1],
    "V-half-half-first": lambda a: a(2, 6, 4, 3, 8)[1],
    "HND": lambda a: a(6, 3, 4, 8).transpose(0, 2, 1, 3),
    "V-half-HND": lambda a: a(6, 2, 3, 4, 8)[:, 1].transpose(0, 2, 1, 3),
    "padded-heads": lambda a: a(6, 4, 3, 16)[..., 4:12],
    "every-second-page": lambda a: a(12, 4, 3, 8)[::2],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_blocks_equal_their_contiguous_copy(name):
    """Case kv-halves-of-one-buffer, and the other ways in which a page can lie in memory."""
    view = LAYOUTS[name](numbered)
    tables = ([10, 3], [[4, 0, 5, 2], [1, 3, -1, 2147480000]], 1, 11)
    strided, dense = PagedKVCache(view, *tables), PagedKVCache(np.ascontiguousarray(view), *tables)
    token, head = np.arange(8)[:, None], np.arange(3)
    for b in range(2):
        expected = view[np.array(tables[1])[b, token // 4], token % 4, head]
        np.testing.assert_array_equal(strided.load(b, head, token, 0, width=8), expected)
        np.testing.assert_array_equal(dense.load(b, head, token, 0, width=8), expected)
        np.testing.assert_array_equal(strided.block_paged_ptr(b, token, head, 2).load(4), expected[..., 2:6])
    strided.store(0, 2, 9, 4, np.full(2, -1, np.float32))
    assert (view[5, 1, 2, 4:6] == -1).all()
    assert (view == -1).sum() == 2
    assert (view.base == -1).sum() == 2 if view.base is not None else True


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_only_where_rows_are_dense(name):
    view = LAYOUTS[name](numbered)
    cache = PagedKVCache(view, [8], [[4, 0]], 1, 9)
    if name in ("HND", "V-half-HND", "padded-heads"):
        with pytest.raises(ValueError, match="blocks has strides"):
            cache.row_idx(0, 1)
    else:
        first = view[0, 0, 0, 0]
        rows = cache.row_idx(0, np.arange(8))
        np.testing.assert_array_equal(first + rows * 24, cache.load(0, 0, np.arange(8), 0)[:, 0])


def test_tile_of_a_pointer_is_the_page_window():
    from kvlab.layout import Layout

    view = numbered(6, 2, 8, 3, 16)[:, 1]
    cache = PagedKVCache(view, [12, 8], [[4, 0], [2, -1]], 1, 13)
    batch, start, head, valid = np.array([0, 0, 1]), np.array([4, 8, 8]), np.array([0, 2, 1]), np.array([4, 3, 0])
    pointer = cache.block_paged_ptr(batch, start, head, 8, tile_size=4, valid=valid)
    tile = pointer.tile_tensor(Layout((4, 8), (cache.token_stride, 1)), valid_rows=valid).load()[..., 0]
    np.testing.assert_array_equal(tile[0], view[4, 4:8, 0, 8:])
    np.testing.assert_array_equal(tile[1, :3], view[0, 0:3, 2, 8:])
    assert (tile[1, 3] == 0).all()
    assert (tile[2] == 0).all()


@given(data=st.data())
def test_load_is_indexing(data):
    """Law: for any shape and any table, load(b, h, t, d) is blocks[table[b, t // page], t % page, h, d]."""
    pages, page_size, heads, size, batch, columns = (data.draw(st.integers(1, 5)) for _ in range(6))
    blocks = numbered(pages, page_size, heads, size, dtype=np.int32)
    entries = st.lists(st.integers(0, pages - 1), min_size=columns, max_size=columns)
    table = np.array(data.draw(st.lists(entries, min_size=batch, max_size=batch)), data.draw(st.sampled_from("BHIqi")))
    cache = PagedKVCache(blocks, np.zeros(batch, np.uint32), table, 0, 0)
    b, t, h, d = np.ix_(*(np.arange(n) for n in (batch, columns * page_size, heads, size)))
    expected = blocks[table[b, t // page_size], t % page_size, h, d]
    np.testing.assert_array_equal(cache.load(b, h, t, d)[..., 0], expected)
    np.testing.assert_array_equal(cache.load(b, h, t, 0, width=size)[:, :, :, 0], expected)


class TestBeyond32Bits:
    def test_first_overflowing_page(self):
        """Case page-offset-int32-first-page."""
        cache = PagedKVCache(huge(7769, 480, 1, 576), [960], np.array([[7767, 7768]], np.int32), 1, 961)
        assert cache.block_paged_ptr(0, np.array([0, 480]), 0).offset.tolist() == [2147420160, 2147696640]
        assert 2147420160 < 2**31 <= 2147696640

    def test_offsets_of_a_large_gqa_pool(self):
        """Case gqa-decode-high-block-ids: 880 x 4 x 256 elements a block; the table is 32-bit as users have it."""
        pages = np.arange(2577, 2600, dtype=np.int32)
        cache = PagedKVCache(huge(2600, 880, 4, 256), [20000], pages[None], 1, 20001)
        tokens = np.arange(20000)
        expected = [((2577 + t // 880) * 880 + t % 880) * 1024 + 3 * 256 for t in range(20000)]
        assert cache.row_offsets(0, tokens, 3).tolist() == expected
        assert min(expected) > 2**31

    @pytest.mark.parametrize("table_dtype", [np.int32, np.uint32, np.int64, np.uint64])
    def test_row_beyond_32_bits(self, table_dtype):
        """11 layers of 128-token pages: past 2**31 rows, the note of the specification (1.5)."""
        pool = PagedKVCacheCollection(
            huge(1_840_000, 2, 11, 128, 1, 64), [128], np.array([[762_600, 762_601]], table_dtype), 1, 129
        )
        cache = pool.get_key_cache(0)
        assert cache.row_idx32(0, 0) == cache.row_idx(0, 0) == 762_600 * 2816
        assert cache.row_idx(0, 128) == 2_147_484_416 > 2**31
        with pytest.raises(OverflowError, match="2147484416"):
            cache.row_idx32(0, 128)
        assert cache.get_tma_row(762_601 * 128 + 5) == 2_147_484_421

    def test_bytes_beyond_4_gib(self, tmp_path):
        """Case mla-decode-high-page-ids: tokens in high pages equal the same tokens in low pages (a sparse file)."""
        file = np.memmap(tmp_path / "pool", np.uint16, "w+", shape=(7790, 480, 1, 576))
        token = np.random.default_rng(0).standard_normal((960, 576)).astype(bfloat16)
        blocks = file.view(bfloat16)
        high = PagedKVCache(blocks, [960], [[7789, 7768]], 1, 961)
        low = PagedKVCache(blocks, [960], [[1, 0]], 1, 961)
        for cache in (high, low):
            cache.store(0, 0, np.arange(960), 0, token)
        assert high.block_paged_ptr(0, 0, 0).byte_address > 2**32
        for cache in (high, low):
            got = cache.load(0, 0, np.arange(960), 0, width=576)
            np.testing.assert_array_equal(got.view(np.uint16), token.view(np.uint16))
        np.testing.assert_array_equal(file[7768], file[0])
        np.testing.assert_array_equal(file[7789], file[1])
