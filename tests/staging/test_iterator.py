"""KVCacheIterator and its tiles. Rests on values printed by compiled MAX programs (tests/data/kvcache_iterator.json),
and on the law that a tile reads what the page table names, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvlab.cache import PagedKVCache, from_dense
from kvlab.memory import AddressSpace
from kvlab.staging.tile.iterator import KVCacheIterator, key_offsets, keys_and_columns, sub_tiles, valid_keys


def cache_of(i: dict[str, Any]) -> tuple[PagedKVCache, int]:
    """The view of one layer's K or V over storage that counts its elements, and the view's first element."""
    page = i.get("page_size", i.get("max_seq_len"))
    shape = (i["num_blocks"], 2, i["num_layers"], page, i["num_heads"], i["head_size"])
    storage = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    lut = np.reshape(i["lut"], (-1, i.get("lut_width", 1)))
    view = storage[:, i["kv"], i["layer"]]
    cache = PagedKVCache(view, i["cache_lengths"], lut, i["max_seq_length"], i["max_cache_length"])
    return cache, int(view[0, 0, 0, 0])


def test_tiles_equal_compiled_max(golden: Callable[[str], list[dict[str, Any]]]) -> None:
    cases = golden("kvcache_iterator.json")
    for case in cases:
        i = case["inputs"]
        cache, first = cache_of(i)
        iterator = KVCacheIterator(
            cache, i["tile_size"], i["batch"], i["head"], i["end"],
            depth=i["depth"], cache_depth=i["cache_depth"], head_dim_offset=i["head_dim_offset"],
        )
        for expected in case["expected"]["tiles"]:
            tile = iterator.next_tile()
            got = {"valid_rows": tile.valid_rows.tolist(), "offset": (tile.offset + first).tolist()}
            assert got == {"valid_rows": [expected["valid_rows"]], "offset": [expected["offset"]]}, case["id"]
            assert [int(tile.valid_rows[0]), tile.shape[1]] == expected["shape"]
            assert list(tile.layout.stride) == expected["stride"]
            assert tile.memory.space is AddressSpace.GLOBAL
    assert len(cases) == 8


def dense_case(page_size: int, lengths: list[int]) -> tuple[PagedKVCache, np.ndarray[Any, np.dtype[np.float32]]]:
    keys = np.random.default_rng(0).standard_normal((1, len(lengths), max(lengths), 2, 16)).astype(np.float32)
    pool = from_dense(keys, keys, lengths, page_size, shuffle=1, spare_pages=2)
    return pool.get_key_cache(0), keys[0]


@pytest.mark.parametrize("start", [0, 128, 37])
@pytest.mark.parametrize("page_size", [16, 48, 64, 128, 256, 480, 7, 1])
def test_a_tile_over_any_pages_reads_its_rows(page_size: int, start: int) -> None:
    lengths = [300, 1, 129, 290]
    cache, keys = dense_case(page_size, lengths)
    iterator = KVCacheIterator(cache, 128, np.arange(4), 1, lengths)
    iterator.tile_start_row = start
    for first in range(start, 384, 128):
        tile = iterator.next_tile()
        assert keys_and_columns(tile) == (128, 16)
        got = tile.load().reshape(4, 128, 16)
        wanted = np.zeros((4, 128, 16), np.float32)
        for b, length in enumerate(lengths):
            n = max(min(128, length - first), 0)
            wanted[b, :n] = keys[b, first : first + n, 1]
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(valid_keys(tile), np.clip(np.subtract(lengths, first), 0, 128))
        offsets = key_offsets(tile)
        assert ((offsets >= 0) == (np.arange(128) < valid_keys(tile)[:, None])).all()
        values = cache.memory.load(np.maximum(offsets, 0) * 4, np.float32, 16)
        np.testing.assert_array_equal(np.where((offsets >= 0)[..., None], values, 0), wanted)


def test_a_page_that_holds_the_tile_is_one_run() -> None:
    cache, _ = dense_case(256, [300])
    tile = KVCacheIterator(cache, 128, 0, 0, 300).next_tile()
    assert (tile.offset.shape, tile.shape, tile.valid_rows.tolist()) == ((1,), (128, 16), [128])


@pytest.mark.parametrize("page_size,run_rows", [(16, 16), (48, 16), (480, 32), (7, 1)])
def test_runs_are_the_largest_that_cross_no_page(page_size: int, run_rows: int) -> None:
    cache, _ = dense_case(page_size, [300])
    tile = KVCacheIterator(cache, 128, 0, 0, 300).next_tile()
    assert (tile.offset.shape, tile.shape) == ((1, 128 // run_rows), (run_rows, 16))


def test_the_bound_is_linear() -> None:
    """A linear bound: a column past the depth of an earlier row reads the neighbour; of the last valid row, 0."""
    cache, keys = dense_case(128, [100])
    tile = KVCacheIterator(cache, 128, 0, 0, 100, depth=8).next_tile()
    neighbour, last = tile.raw_load(np.array([3, 99]) * tile.layout.stride[0] + 8, 4)[0]
    np.testing.assert_array_equal(neighbour, keys[0, 3, 0, 8:12])
    assert not last.any()


def test_rows_past_the_end_are_never_looked_up() -> None:
    cache, _ = dense_case(16, [40, 300])
    cache.lookup_table[0, 3:] = np.uint32(0xCCCCCCCC)
    iterator = KVCacheIterator(cache, 128, [0, 1], 0, [40, 300])
    for _ in range(4):
        iterator.next_tile()
    with pytest.raises(ValueError, match=r"lookup_table\[0, 3\]"):
        KVCacheIterator(cache, 128, 0, 0, 60).next_tile()


@pytest.mark.parametrize("page_size", [128, 48, 16, 7])
@pytest.mark.parametrize("shape,part", [((32, 8), None), ((64, 16), (48, 8)), ((24, 4), None)])
def test_sub_tiles_are_those_of_the_whole(page_size: int, shape: tuple[int, int], part: Any) -> None:
    """Law: wherever the pages end, tile (r, c) has the rows and columns that it has of the tile in one piece; past the
    keys there are zeros."""
    lengths, (rows, cols) = [300, 1, 205], shape
    cache, keys = dense_case(page_size, lengths)
    walk = KVCacheIterator(cache, 128, np.arange(3), 1, lengths)
    walk.tile_start_row = 128
    tile, whole = walk.next_tile(), np.zeros((3, 192, 16), np.float32)
    whole[0, :128], whole[2, : 205 - 128] = keys[0, 128:256, 1], keys[2, 128:205, 1]
    row, col = np.arange(5) % (192 // rows), np.arange(5) % (16 // cols)
    found = sub_tiles(tile, shape, row, col, part).load().reshape(3, 5, *(part or shape))
    for t, (r, c) in enumerate(zip(row, col, strict=True)):
        wanted = whole[:, r * rows :, c * cols :][:, : (part or shape)[0], : (part or shape)[1]]
        np.testing.assert_array_equal(found[:, t], wanted)


def test_increment_passes_over_a_tile() -> None:
    cache, _ = dense_case(64, [300])
    iterator = KVCacheIterator(cache, 64, 0, 0, 300)
    iterator.increment()
    assert iterator.next_tile().valid_rows.tolist() == [64]
    assert iterator.tile_start_row.tolist() == [128]


def test_bad_input_is_refused() -> None:
    cache, _ = dense_case(64, [300])
    with pytest.raises(ValueError, match="tile_size is 0: must be at least 1"):
        KVCacheIterator(cache, 0, 0, 0, 300)
    with pytest.raises(ValueError, match=r"end is 3.5: must be an integer"):
        KVCacheIterator(cache, 64, 0, 0, 3.5)
    with pytest.raises(ValueError, match="tile_start_row is -1: must not be negative"):
        KVCacheIterator(cache, 64, 0, 0, 300).tile_start_row = -1
    with pytest.raises(ValueError, match=r"must be \[programs\] or scalars"):
        KVCacheIterator(cache, 64, np.zeros((1, 2), int), 0, 300)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tile_size": 0}, "tile_size is 0: must be at least 1"),
        ({"tile_size": 4.0}, r"tile_size is 4\.0: must be an integer"),
        ({"depth": 9}, "depth 9 from head_dim_offset 0 on must end inside the head of 8"),
        ({"head_dim_offset": 4}, "depth 8 from head_dim_offset 4 on must end inside the head of 8"),
        ({"head_dim_offset": -4, "depth": 4}, "head_dim_offset is -4: must be at least 0"),
        ({"depth": 0}, "depth is 0: must be at least 1"),
        ({"cache_depth": 0}, "cache_depth is 0: must be at least 1"),
        ({"end": 1.5}, r"end is 1\.5: must be an integer"),
    ],
)
def test_walks_that_leave_the_head_or_are_none(change: dict[str, Any], message: str) -> None:
    """Law: columns past a head belong to another one, or to the next token: no tile may reach them."""
    cache = PagedKVCache(np.zeros((3, 4, 2, 8), np.float32), [5], [[2, 0]], max_seq_length=1, max_cache_length=6)
    arguments = {"tile_size": 4, "batch_idx": 0, "kv_head_idx": 0, "end": 6} | change
    with pytest.raises(ValueError, match=message):
        KVCacheIterator(cache, **arguments)
