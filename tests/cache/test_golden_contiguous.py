"""The continuous cache and the padded depth. Rests on values printed by programs compiled with Mojo 1.2.0 / MAX 26.7
(tests/data/kvcache_contiguous.json)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvlab.cache import ContinuousBatchingKVCacheCollection, KVCacheStaticParams, padded_depth
from kvlab.hardware import TensorMapSwizzle

CASES = json.loads((Path(__file__).parents[1] / "data" / "kvcache_contiguous.json").read_text())["cases"]


def case(op):
    (found,) = (c for c in CASES if c["op"] == op)
    return found["inputs"], found["expected"]


def cache_of(i):
    """Storage in which every element holds its own index, and the view asked for."""
    shape = (i["num_blocks"], 2, i["num_layers"], i["max_seq_len"], i["num_heads"], i["head_size"])
    pool = ContinuousBatchingKVCacheCollection(
        np.arange(np.prod(shape), dtype=np.int32).reshape(shape),
        np.array(i["cache_lengths"], np.uint32),
        np.array(i["lut"], np.uint32),
        i["max_seq_length"],
        i["max_cache_length"],
        KVCacheStaticParams(i["num_heads"], i["head_size"]),
    )
    return (pool.get_key_cache, pool.get_value_cache)[i["kv"]](i["layer"])


def test_scalars():
    inputs, expected = case("cache_scalars")
    cache = cache_of(inputs)
    got = {name: getattr(cache, name)() for name in expected if name not in ("cache_length", "page_size_")}
    got |= {"page_size_": cache.page_size_, "cache_length": [cache.cache_length(b) for b in range(cache.batch_size)]}
    assert got == expected


def test_row_idx():
    inputs, expected = case("row_idx")
    rows = np.array(expected["rows"])
    cache = cache_of(inputs)
    np.testing.assert_array_equal(cache.row_idx(*np.indices(rows.shape)), rows)
    slot, block = cache.kv_tma_coords(*np.indices(rows.shape))
    np.testing.assert_array_equal(block * cache.page_stride + slot, rows)


@pytest.mark.parametrize("paged", [False, True], ids=["continuous", "as-pages"])
def test_elements(paged):
    for op, names in (("load", "bs,head,tok,dim,offset"), ("block_paged_ptr", "batch,tok,head,dim,offset")):
        inputs, expected = case(op)
        cache = cache_of(inputs).paged() if paged else cache_of(inputs)
        *where, offset = np.array(expected[names]).T
        got = cache.load(*where) if op == "load" else cache.block_paged_ptr(*where).load()
        np.testing.assert_array_equal(got[:, 0], offset)


def test_get_tma_row():
    inputs, expected = case("get_tma_row")
    rows = expected["encoded 0..n-1"]
    np.testing.assert_array_equal(cache_of(inputs).get_tma_row(np.arange(len(rows))), rows)


def test_populate():
    inputs, expected = case("populate")
    BN = inputs["BN"]
    tile = cache_of(inputs).populate(
        inputs["batch"], inputs["base_kv_row"], BN=BN, base_alignment=inputs["base_alignment"]
    )
    assert (tile.eff_page, tile.num_pages, tile.rows.tolist()) == (
        expected["eff_page"], expected["num_pages"], expected["rows"],
    )
    assert tile.get_row(np.arange(BN)).tolist() == expected["get_row[0..BN-1]"]


@pytest.mark.parametrize("number", range(3))
def test_padded_depth(number):
    found = [c for c in CASES if c["op"] == "padded_depth"][number]
    dtype, swizzle = found["inputs"]["dtype"], found["inputs"]["swizzle"]
    assert TensorMapSwizzle.of(swizzle).granularity(dtype) == found["expected"]["swizzle_granularity"]
    for depth, padded in found["expected"]["depth,padded"]:
        assert padded_depth(dtype, swizzle, depth) == padded


def test_iterator():
    """Tiles of a continuous cache, from the same programs (tests/data/kvcache_iterator.json)."""
    from kvlab.staging import KVCacheIterator

    path = Path(__file__).parents[1] / "data" / "kvcache_iterator.json"
    (found,) = (c for c in json.loads(path.read_text())["cases"] if c["inputs"]["kind"] == "contiguous")
    i = found["inputs"]
    cache = cache_of(i)
    base = int(cache.blocks[0, 0, 0, 0])
    walk = KVCacheIterator(
        cache, i["tile_size"], i["batch"], i["head"], i["end"], depth=i["depth"], cache_depth=i["cache_depth"],
        head_dim_offset=i["head_dim_offset"],
    )
    for expected in found["expected"]["tiles"]:
        tile = walk.next_tile()
        got = [int(tile.valid_rows[0]), int(tile.offset[0]) + base, list(tile.layout.stride), tile.shape[1]]
        assert got == [expected["valid_rows"], expected["offset"], expected["stride"], expected["shape"][1]]
    anywhere = KVCacheIterator(cache, 5, 0, 1, 8)
    anywhere.tile_start_row = 3
    tile = anywhere.next_tile()
    assert (np.shape(tile.offset), tile.valid_rows.tolist()) == ((1,), [5])
    assert tile.load()[0, :, 0, 0].tolist() == cache.load(0, 1, np.arange(3, 8), 0)[:, 0].tolist()
