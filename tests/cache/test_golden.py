"""Rests on values printed by programs compiled with Mojo 1.2.0 / MAX 26.7 (tests/data/kvcache_paged.json)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvlab.cache import KVCacheStaticParams, PagedKVCacheCollection, kv_num_sub_tiles, kv_sub_tile_rows

CASES = json.loads((Path(__file__).parents[1] / "data" / "kvcache_paged.json").read_text())["cases"]


def cases(op):
    return [pytest.param(c["inputs"], c["expected"], id=f"{op}-{c['id']}") for c in CASES if c["op"] == op]


def cache_of(i):
    """The pool of a case, every element holding its own index, and the view asked for."""
    shape = (i["num_blocks"], 2, i["num_layers"], i["page_size"], i["num_heads"], i["head_size"])
    blocks = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    pool = PagedKVCacheCollection(
        blocks,
        np.array(i["cache_lengths"], np.uint32),
        np.array(i["lut"], np.uint32).reshape(-1, i["lut_width"]),
        i["max_seq_length"],
        i["max_cache_length"],
        KVCacheStaticParams(i["num_heads"], i["head_size"]),
    )
    return (pool.get_key_cache, pool.get_value_cache)[i["kv"]](i["layer"])


@pytest.mark.parametrize("inputs, expected", cases("cache_scalars"))
def test_scalars(inputs, expected):
    cache = cache_of(inputs)
    assert cache.num_kv_rows() == expected["num_kv_rows"]
    assert [cache.cache_length(b) for b in range(2)] == expected["cache_length"]
    assert cache.cache_lengths_nd().load()[:, 0].tolist() == expected["cache_length"]
    assert cache.max_prompt_length() == expected["max_prompt_length"]
    assert cache.max_context_length() == expected["max_context_length"]
    assert cache.empty_cache() == bool(expected["empty_cache"])
    assert cache.max_tile_size() == expected["max_tile_size"]
    assert cache.page_size_ == expected["page_size_"]


@pytest.mark.parametrize("inputs, expected", cases("row_idx"))
def test_row_idx(inputs, expected):
    rows = np.array(expected["rows"])
    batch, token = np.indices(rows.shape)
    cache = cache_of(inputs)
    np.testing.assert_array_equal(cache.row_idx(batch, token), rows)
    np.testing.assert_array_equal(cache.row_idx32(batch, token), rows)
    assert cache.row_idx(1, 5) == rows[1, 5]


@pytest.mark.parametrize("inputs, expected", cases("load"))
def test_load(inputs, expected):
    batch, head, token, dim, offset = np.array(expected["bs,head,tok,dim,offset"]).T
    np.testing.assert_array_equal(cache_of(inputs).load(batch, head, token, dim)[:, 0], offset)


@pytest.mark.parametrize("inputs, expected", cases("block_paged_ptr"))
def test_block_paged_ptr(inputs, expected):
    batch, token, head, dim, offset = np.array(expected["batch,tok,head,dim,offset"]).T
    cache = cache_of(inputs)
    pointer = cache.block_paged_ptr(batch, token, head, dim)
    np.testing.assert_array_equal(pointer.load()[:, 0], offset)
    np.testing.assert_array_equal(cache.row_offsets(batch, token[:, None], head, dim)[:, 0], pointer.offset)


@pytest.mark.parametrize("inputs, expected", cases("get_tma_row"))
def test_get_tma_row(inputs, expected):
    rows = expected["encoded 0..n-1"]
    np.testing.assert_array_equal(cache_of(inputs).get_tma_row(np.arange(len(rows))), rows)


@pytest.mark.parametrize("inputs, expected", cases("populate"))
def test_populate(inputs, expected):
    BN = inputs["BN"]
    tile = cache_of(inputs).populate(
        inputs["batch"], inputs["base_kv_row"], BN=BN, base_alignment=inputs["base_alignment"]
    )
    assert (tile.eff_page, tile.num_pages) == (expected["eff_page"], expected["num_pages"])
    assert tile.rows.tolist() == expected["rows"]
    assert tile.get_row(np.arange(BN)).tolist() == expected["get_row[0..BN-1]"]


@pytest.mark.parametrize("inputs, expected", cases("kv_sub_tiles"))
def test_sub_tiles(inputs, expected):
    for BN, page_size, rows, tiles in expected["table"]:
        assert (kv_sub_tile_rows(BN, page_size), kv_num_sub_tiles(BN, page_size)) == (rows, tiles)
