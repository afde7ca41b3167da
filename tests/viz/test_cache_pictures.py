"""Quantised pages and gathers (contents against the cache's own loads and rows)."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.cache import KVCacheStaticParams, PagedKVCache, PagedKVCacheCollection
from kvlab.memory import as_dtype
from kvlab.viz import draw_gather4, draw_quantised_page

SVG = "{http://www.w3.org/2000/svg}"
PAGE, TOKENS = 16, 27


def quantised(granularity: int) -> PagedKVCache:
    pool = PagedKVCacheCollection.allocate(
        KVCacheStaticParams(2, 128), num_pages=4, page_size=PAGE, num_layers=1, batch_size=1, max_length=40,
        dtype="fp8", scale_dtype="float32", quantization_granularity=granularity,
    )
    pool.lookup_table[0, :2] = [3, 0]
    cache = pool.with_lengths([TOKENS], 0).get_key_cache(0)
    rng, token, head = np.random.default_rng(0), np.arange(TOKENS)[:, None], np.arange(2)
    cache.store(0, head, token, 0, rng.uniform(-400, 400, (TOKENS, 2, 128)).astype(as_dtype("fp8")))
    cache.store_scale(0, head, token, 0, rng.uniform(0.001, 0.01, (TOKENS, 2, 128 // granularity)).astype(np.float32))
    return cache


@pytest.mark.parametrize("granularity", [128, 64, 16])
def test_values_and_scales(granularity: int, sound, hovers, overlaps) -> None:
    cache = quantised(granularity)
    picture = draw_quantised_page(cache, page=1, head=1)
    found = hovers(sound(picture))
    stored = cache.load_quantized(0, 1, PAGE + 3, 0, width=128).astype(float)
    scales = cache.load_scale(0, 1, PAGE + 3, 0, width=128 // granularity)
    assert f"slot 3, dim 0\nstored {stored[0]:.3g}" in found
    assert f"slot 3, dim 127\nstored {stored[127]:.3g}" in found
    assert f"slot 3, group 0\nscale {scales[0]:.3g}" in found
    assert f"slot {TOKENS - PAGE}, dim 0\nstored nothing" in found  # the first free slot
    assert picture.title.startswith(f"Page 0: {TOKENS - PAGE} of {PAGE} slots filled; a head of a token takes 128 + ")
    assert picture.title.endswith(f"{4 * 128 // granularity} bytes")
    assert not overlaps(picture)


@pytest.mark.parametrize("mark", [(0, 0), (5, 70), (10, 127)])
@pytest.mark.parametrize("granularity", [128, 16])
def test_the_marked_element_is_the_cache_s_own_value(mark: tuple[int, int], granularity: int, sound, overlaps) -> None:
    cache = quantised(granularity)
    picture = draw_quantised_page(cache, page=1, mark=mark)
    value = cache.load(0, 0, PAGE + mark[0], mark[1], output_dtype="float32").item()
    assert float(picture.title.rpartition("= ")[2]) == pytest.approx(value, rel=1e-3)
    sound(picture)
    assert not overlaps(picture)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"page": 24}, r"page is 24: must be in \[0, 24\)"),
        ({"page": 2}, r"lookup_table\[0, 2\] is 4"),
        ({"head": 2}, r"head is 2: must be in \[0, 2\)"),
        ({"mark": (16, 0)}, r"mark is \(16, 0\): must be an element"),
    ],
)
def test_bad_input_is_refused(kwargs: dict, message: str) -> None:
    cache = quantised(64)
    if kwargs == {"page": 2}:  # the sentinel is the null page, which is memory: one further is not
        cache.lookup_table[0, 2] = 5
        message = message.replace("4", "5")
    with pytest.raises(ValueError, match=message):
        draw_quantised_page(cache, **kwargs)
    plain = PagedKVCache(np.zeros((2, 4, 1, 8), np.float32), [1], [[0]], 1, 2)
    with pytest.raises(ValueError, match="it is not quantised"):
        draw_quantised_page(plain)


def test_a_gather_names_indices_and_rows(sound, overlaps) -> None:
    blocks = np.zeros((6, 2, 1, PAGE, 1, 576), as_dtype("bf16"))
    cache = PagedKVCacheCollection(blocks, [20], [[1, 0]], 1, 21).get_key_cache(0)
    tile = cache.create_gather4_tma_tile(tile_width=576, tile_height=8, swizzle_mode="128B")
    indices = [53, 2, 89, 17, 3, 69, 50, 55]
    picture = draw_gather4(cache, tile, indices)
    root = sound(picture)
    texts = [t.text for t in root.iter(f"{SVG}text")]
    for index in indices:
        row = index // PAGE * (2 * PAGE) + index % PAGE  # a page of K is followed by one of V
        assert f"index {index}" in texts
        assert f"row {row}" in texts
    assert picture.title == "8 tokens from 5 pages: 18 gather4 instructions of 4 rows x 64 columns"
    assert not overlaps(picture)
    with pytest.raises(ValueError, match="the tile has 8 rows"):
        draw_gather4(cache, tile, indices[:4])
