"""What the page table may hold and what must never be followed. Rests on the cases about tables, sentinels and unread
slots asked for in practice (unused-table-entries-huge, negative-page-ids, page-table-one-page-too-many), and on the
specification 1.6 and 1.7."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.cache import PagedKVCache, PageTable, lookup_table_columns

GARBAGE = [
    pytest.param(-1, np.int32, id="-1-int32"),
    pytest.param(-1, np.int64, id="-1-int64"),
    pytest.param(2147480000, np.int32, id="huge-int32"),
    pytest.param(2147480000, np.uint32, id="huge-uint32"),
    pytest.param(0xCCCCCCCC, np.uint32, id="0xCCCCCCCC-uint32"),
    pytest.param(2**32 + 1, np.int64, id="page-1-in-32-bits"),
    pytest.param(2**64 - 1, np.uint64, id="max-uint64"),
    pytest.param(6, np.uint8, id="sentinel-uint8"),
]


def cache_with(tail, dtype=np.int64, strict=True):
    """6 pages of 16. Sequence 0 has 17 tokens in pages 5 and 2, sequence 1 none; the rest of the table is ``tail``."""
    blocks = np.full((6, 2, 16, 2, 8), np.nan, np.float32)
    blocks[5, 0], blocks[2, 0, :1] = 1, 2
    table = np.full((2, 4), tail, dtype)
    table[0, :2] = 5, 2
    return PagedKVCache(blocks[:, 0], np.array([16, 0], np.uint32), table, 1, 17, strict=strict), blocks


@pytest.mark.parametrize("tail, dtype", GARBAGE)
class TestUnusedEntries:
    def test_are_not_followed_inside_the_sequence(self, tail, dtype):
        cache, _ = cache_with(tail, dtype)
        value = cache.load(0, np.arange(2)[:, None], np.arange(17), 0, width=8)
        assert (value[:, :16] == 1).all()
        assert (value[:, 16] == 2).all()

    def test_raise_outside(self, tail, dtype):
        cache, _ = cache_with(tail, dtype)
        for look in (
            lambda: cache.load(0, 0, 32, 0),
            lambda: cache.row_idx(0, np.arange(33)),
            lambda: cache.block_paged_ptr(1, 0, 0),
            lambda: cache.row_offsets(np.array([0, 1]), np.arange(16)[None], 0),
        ):
            with pytest.raises(ValueError, match=rf"lookup_table\[[01], [02]\] is {tail}, .* \[0, 6\)"):
                look()

    def test_are_not_followed_by_programs_that_are_done(self, tail, dtype):
        """Ragged tiles of 16 keys: program 0 whole, 1 with one row, 2 past the end, 3 of an empty sequence."""
        cache, _ = cache_with(tail, dtype)
        batch, start, valid = np.array([0, 0, 0, 1]), np.array([0, 16, 32, 0]), np.array([16, 1, -15, 0])
        pointer = cache.block_paged_ptr(batch, start, 1, tile_size=16, valid=valid)
        assert pointer.offset.tolist() == [5 * 512 + 8, 2 * 512 + 8, 0, 0]
        offsets = cache.row_offsets(batch, start[:, None] + np.arange(16), 1, valid=valid)
        expected = np.full((4, 16), -1)
        expected[0], expected[1, 0] = 5 * 512 + 8 + 16 * np.arange(16), 2 * 512 + 8
        np.testing.assert_array_equal(offsets, expected)

    def test_store_raises_and_writes_nothing(self, tail, dtype):
        cache, blocks = cache_with(tail, dtype)
        before = blocks.copy()
        with pytest.raises(ValueError, match="lookup_table"):
            cache.store(0, 0, np.array([17, 32]), 0, np.zeros((2, 8), np.float32))
        np.testing.assert_array_equal(blocks, before)

    def test_store_not_strict_drops(self, tail, dtype):
        cache, blocks = cache_with(tail, dtype, strict=False)
        expected = blocks.copy()
        expected[2, 0, 1, 1] = 7
        cache.store(np.array([0, 0, 1]), 1, np.array([32, 17, 0]), 0, np.full((3, 8), [[8], [7], [9]], np.float32))
        np.testing.assert_array_equal(blocks, expected)
        with pytest.raises(ValueError, match="lookup_table"):
            cache.load(0, 0, 32, 0)

    def test_populate_with_valid_keys(self, tail, dtype):
        cache, _ = cache_with(tail, dtype)
        tile = cache.populate([0, 1], [0, 0], BN=64, base_alignment=64, valid=[17, 0])
        assert tile.rows.tolist() == [[160, 64, 2**30, 2**30], [2**30] * 4]


def test_tokens_past_the_columns():
    cache, _ = cache_with(-1, strict=False)
    for token in (64, -1):
        for look in (
            lambda t: cache.load(0, 0, t, 0),
            lambda t: cache.store(0, 0, t, 0, np.float32(0)),
            lambda t: cache.row_idx(0, t),
            lambda t: cache.block_paged_ptr(0, t, 0),
        ):
            with pytest.raises(IndexError, match=rf"tok_idx is {token}: must be in \[0, 64\)"):
                look(token)
    assert cache.row_offsets(0, [16, 64, -1], 0, valid=1).tolist() == [1024, -1, -1]


def test_null_page():
    """A pool of N pages and one for the sentinel N (1.6): no token has its page there, but its rows are in the pool."""
    blocks = np.zeros((5, 4, 2, 8), np.float32)
    cache = PagedKVCache(blocks, [6], [[2, 0, 4, 4]], 1, 7, total_num_pages=4)
    with pytest.raises(ValueError, match=r"lookup_table\[0, 2\] is 4, .* \[0, 4\)"):
        cache.load(0, 0, 8, 0)
    with pytest.raises(ValueError, match=r"lookup_table\[0, 2\] is 4"):
        cache.store(0, 0, 8, 0, np.float32(1))
    assert cache.populate(0, 0, BN=16, base_alignment=16).rows.tolist() == [8, 0, 16, 16]
    assert cache.num_kv_rows() == 20


def test_one_page_too_many():
    """The length counts, not the number of pages in the table: 32 tokens in 3 pages of 16 are 32 tokens."""
    cache = PagedKVCache(np.zeros((3, 16, 1, 8), np.float32), [32], [[0, 1, 2]], 0, 32)
    assert cache.cache_length(0) == 32


def test_table_is_shared_not_copied():
    table, lengths = np.array([[0, 1]]), np.array([3])
    cache = PagedKVCache(np.zeros((2, 4, 1, 8), np.float32), lengths, table, 1, 4)
    assert cache.row_idx(0, 0) == 0
    table[0, 0], lengths[0] = 1, 4
    assert cache.row_idx(0, 0) == 4
    assert cache.cache_length([0]).tolist() == [4]
    assert cache.copy().lookup_table is table


@pytest.mark.parametrize("pages, columns", [(0, 16), (1, 24), (5, 24), (8, 24), (9, 32)])
def test_columns(pages, columns):
    assert lookup_table_columns(pages) == columns


def test_page_table_alone():
    table = PageTable(np.array([[2, 0, -1], [1, 9, 9]], np.int32), page_size=4, pages=3)
    assert table.has_page(np.array([[0], [1]]), np.array([0, 4, 8])).tolist() == [
        [True, True, False],
        [True, False, False],
    ]
    page, slot = table.find(1, np.array([3, 7, 99]), np.array([True, False, False]))
    assert (page.tolist(), slot.tolist()) == ([1, 0, 0], [3, 0, 0])


class TestTilesOverSmallPages:
    """Rests on the sub-tiles being what row_idx gives token by token (law), and on the numbers of 1.10."""

    def test_numbers_of_the_specification(self):
        blocks = np.zeros((10, 2, 64, 1, 8), np.float32)
        cache = PagedKVCache(blocks[:, 0], [256], [[7, 2, 9, 4, 0, 0, 0, 0]], 0, 256)
        for alignment in (256, 64):
            assert cache.populate(0, 0, BN=256, base_alignment=alignment).rows.tolist() == [896, 256, 1152, 512]

    def test_rows_equal_row_idx(self):
        rng = np.random.default_rng(0)
        blocks = np.zeros((40, 2, 8, 1, 8), np.float32)
        cache = PagedKVCache(blocks[:, 1], [128, 128], rng.permutation(40)[:32].reshape(2, 16), 0, 128)
        tile = cache.populate([0, 1], [32, 64], BN=32, base_alignment=32)
        assert tile.rows.shape == (2, 4)
        expected = cache.row_idx([[0], [1]], np.array([[32], [64]]) + np.arange(32))
        np.testing.assert_array_equal(tile.get_row(np.arange(32)), expected)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (
                {"base_kv_row": 8, "BN": 16, "base_alignment": 16},
                "base_kv_row is 8: must be a multiple of base_alignment 16",
            ),
            ({"base_kv_row": 4, "BN": 16, "base_alignment": 4}, "base_alignment 4 and base_kv_row 4 must be multiples"),
            ({"base_kv_row": 0, "BN": 12, "base_alignment": 8}, "page_size is 8: must divide BN 12"),
            ({"base_kv_row": 0, "BN": 32, "base_alignment": 32}, "lookup_table has 5 columns"),
        ],
    )
    def test_refused(self, arguments, message):
        cache = PagedKVCache(np.zeros((6, 8, 1, 8), np.float32), [40], [[0, 1, 2, 3, 4]], 0, 40)
        with pytest.raises(ValueError, match=message):
            cache.populate(0, **arguments)
