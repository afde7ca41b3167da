"""Register maps (contents against the FragmentMap itself) and DRAM tiles (against its row offsets)."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvlab.cache import PagedKVCache
from kvlab.layout import Swizzle
from kvlab.staging import FragmentMap, KVBuffer, KVBufferParams, KVCacheIterator
from kvlab.staging.tile.iterator import key_offsets, valid_keys
from kvlab.viz import draw, draw_fragment_map, draw_kv_tile

HELD = re.compile(r"row (\d+), column (\d+)\nthread (\d+), its element (\d+)\nwarp (\d+), lane (\d+), register (\d+), ")


def fragments(k: bool, mma=(16, 16, 32), BN: int = 128) -> FragmentMap:
    swizzle = Swizzle(3, 0, 3 if mma[0] == 16 else 4, "vector") if k else None
    params = KVBufferParams("bf16", mma, swizzle, BN, 32 if k else BN, 32, 256, 128, 1, k)
    cache = PagedKVCache(np.zeros((2, 128, 1, 128), params.dtype), [99], [[1, 0]], 1, 100)
    return KVBuffer(params, cache, 0, 0, end=100).fragment_map()


@pytest.mark.parametrize("k", [True, False], ids=["k", "v"])
@pytest.mark.parametrize("thread", [None, 81], ids=["all", "one thread"])
def test_every_element_tells_a_holder(k: bool, thread: int | None, sound, hovers, overlaps) -> None:
    m = fragments(k)
    picture = draw_fragment_map(m, thread=thread, fold=False)
    found = hovers(sound(picture))
    assert len(found) == m.shape[0] * m.shape[1]
    for text in found[::37]:
        row, col, who, element, warp, lane, register = map(int, HELD.match(text).groups())
        assert (m.row[who].flat[element], m.col[who].flat[element]) == (row, col)
        assert (64 * warp + lane, element // 8) == (who, register)
    if thread is not None:
        held = sum(f"\nthread {thread}," in text for text in found)
        assert held == m.row[thread].size
    assert not overlaps(draw_fragment_map(m, thread=thread))


def test_titles_say_who_holds_what() -> None:
    k = draw_fragment_map(fragments(True), thread=81, axes=("key", "depth"))
    assert k.title == "Warp 1, lane 17 holds 16 elements: key 33, 49; depth 8–15"
    v = fragments(False)
    assert draw_fragment_map(v).title == "32 x 128 elements in 256 threads, 64 in each; every element in 4 threads"
    assert draw(v).title == draw_fragment_map(v).title


@pytest.mark.parametrize("thread", [0, 17, 200, 255])
def test_a_fold_keeps_the_thread(thread: int, sound, hovers) -> None:
    m = fragments(True)
    found = hovers(sound(draw_fragment_map(m, thread=thread)))
    assert len(found) < m.shape[0] * m.shape[1] / 2
    assert sum(f"\nthread {thread}," in text for text in found) == m.row[thread].size
    v = hovers(sound(draw_fragment_map(fragments(False, (32, 32, 16), 64), thread=thread)))
    assert any(f"\nthread {thread}," in text for text in v)


def test_a_thread_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="thread is 256: must be one of the 256 threads"):
        draw_fragment_map(fragments(True), thread=256)


@pytest.mark.parametrize(("page", "end"), [(128, 100), (16, 27), (16, 64)], ids=["one run", "small pages", "whole"])
def test_a_tile_tells_its_addresses(page: int, end: int, sound, hovers, overlaps) -> None:
    blocks = np.zeros((8, page, 2, 64), np.float16)
    cache = PagedKVCache(blocks, [end], [[5, 2, 7, 0]], 1, end)
    tile = KVCacheIterator(cache, 64, 0, 1, end).next_tile()
    picture = draw_kv_tile(tile, fold=False)
    found = hovers(sound(picture))
    assert len(found) == 64 * 8
    valid, offset = int(valid_keys(tile)[0]), key_offsets(tile)[0]
    for row in range(0, 64, 5):
        expected = f"byte {2 * offset[row] + 48}" if row < valid else "does not exist: read as zeros"
        assert found[8 * row + 3] == f"row {row}, columns 24..31\n{expected}"
    assert f"{valid} exist" in picture.title
    folded = draw_kv_tile(tile)
    sound(folded)
    assert not overlaps(folded)
    with pytest.raises(ValueError, match="program is 1: must be one of the 1 programs"):
        draw_kv_tile(tile, program=1)
