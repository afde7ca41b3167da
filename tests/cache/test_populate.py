"""``populate`` for every tile, page, alignment and pair of CTAs. Rests on ``row_idx``, key by key, and on the
configurations of MAX's own tests (null block sentinel, load boundary)."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.cache import PagedKVCache, PagedRowIndices, kv_num_sub_tiles

PAGES = [16, 32, 64, 128, 256]


def cache_of(page, columns=24, fill=None):
    pages = 40
    table = np.random.default_rng(page).permutation(pages)[:columns].astype(np.uint32)[None]
    table = table if fill is None else np.full_like(table, fill)
    blocks = np.zeros((pages + 1, 2, 1, page, 1, 8), np.uint8)[:, 0, 0]
    return PagedKVCache(blocks, [page * columns], table, 1, page * columns, total_num_pages=pages)


@pytest.mark.parametrize("BN", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("page", PAGES)
def test_rows_of_every_key(BN, page):
    cache = cache_of(page)
    several = BN > page
    for alignment in {1, 2, 16, page // 2, page, 2 * page, BN, 2 * BN}:
        for base in {0, alignment, 3 * alignment, BN}:
            if base % alignment or base + BN > 24 * page or alignment < 1:
                continue
            if several and alignment < page:
                with pytest.raises(ValueError, match="must be multiples of the page size"):
                    cache.populate(0, base, BN=BN, base_alignment=alignment)
                continue
            if not several and base % page + BN > page:  # known by its first row only
                assert cache.populate(0, base, BN=BN, base_alignment=alignment).rows[0] == cache.row_idx(0, base)
                continue
            tile = cache.populate(0, base, BN=BN, base_alignment=alignment)
            np.testing.assert_array_equal(tile.get_row(np.arange(BN)), cache.row_idx(0, base + np.arange(BN)))
            pair = [
                cache.populate(0, base, BN=BN, base_alignment=alignment, pair_cta=True, is_leader=leader)
                for leader in (True, False)
            ]
            halves = [(rows[:, None] + np.arange(step)).reshape(-1) for rows, step in (p.k_copies() for p in pair)]
            np.testing.assert_array_equal(np.concatenate(halves), tile.get_row(np.arange(BN)))
            assert [p.cta_group for p in (tile, *pair)] == [1, 2, 2]


@pytest.mark.parametrize("page, BN, alignment", [(128, 128, 128), (128, 256, 128), (64, 64, 64), (64, 128, 64)])
def test_null_block_sentinel(page, BN, alignment):
    """A table filled with the sentinel N: every row is N * stride, inside the allocation of N + 1 pages."""
    tile = cache_of(page, fill=40).populate(0, 0, BN=BN, base_alignment=alignment)
    assert tile.rows.tolist() == [40 * 2 * page] * kv_num_sub_tiles(BN, page)


def test_vectors_of_entries_need_whole_columns():
    cache = cache_of(16, columns=23)
    with pytest.raises(ValueError, match="lookup_table has 23 columns, which vectors of 4 entries do not divide"):
        cache.populate(0, 0, BN=64, base_alignment=64)
    assert cache.populate(0, 0, BN=64, base_alignment=16).num_pages == 4


def test_tiles_past_the_table():
    with pytest.raises(IndexError, match="tok_idx"):
        cache_of(16, columns=8).populate(0, 96, BN=64, base_alignment=32)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("page", [16, 32, 256])
def test_parts_of_v(page, parts):
    cache = cache_of(page)
    tile = cache.populate(0, 0, BN=128, base_alignment=max(16, page))
    rows = np.concatenate(
        [
            (first[:, None] + np.arange(step)).reshape(-1)
            for first, step in (tile.v_copies(s, parts) for s in range(parts))
        ]
    )
    np.testing.assert_array_equal(rows, tile.get_row(np.arange(128)))


def test_partial_tiles():
    tile = PagedRowIndices(BN=64, page_size=16, rows=np.array([96, 24, 48, 0]))
    assert tile.k_copies(2)[0].tolist() == [96, 24]
    assert tile.k_copies(2, oob_fill=True)[0].tolist() == [96, 24, 2**30, 2**30]
    with pytest.raises(ValueError, match="valid_pages is 5: must be 1 to 4"):
        tile.k_copies(5)
    with pytest.raises(ValueError, match="num_v_sub_tiles is 3: must divide BN 64"):
        tile.v_copies(0, 3)
    with pytest.raises(IndexError, match=r"slot is 2: must be in \[0, 2\)"):
        tile.v_copies(2, 2)
