"""kvlab's own stores write the formats that bear their names.

Rests on the emulated stores of kvlab (`kvlab.attention`), which the formats do not know, and on the formats' decoders.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.attention import kv_store, kv_store_paged, mla_store_paged
from kvlab.cache import KVCacheStaticParams, PagedKVCacheCollection
from kvlab.common.dtypes import as_dtype
from kvlab.formats import Format, audit, identify, known_format, markers

PAGES, SIZE, HEADS, DIM = 3, 8, 2, 16
TOKENS = PAGES * SIZE


def stored(pages: Any) -> Any:
    """Values of pages as bfloat16 rows of tokens."""
    return pages.reshape(TOKENS, HEADS, DIM).astype(as_dtype("bf16"))


def test_a_pool_of_max_is_identified() -> None:
    params = KVCacheStaticParams(HEADS, DIM)
    pool = PagedKVCacheCollection.allocate(
        params, num_pages=PAGES, page_size=SIZE, num_layers=2, batch_size=1, max_length=TOKENS
    )
    pool.lookup_table[0, :PAGES] = [0, 1, 2]
    step = pool.with_lengths(np.array([0]), TOKENS)
    shape = (2, PAGES + 1, SIZE, HEADS, DIM)
    for layer in range(2):
        k, v = (stored(markers(shape, part)[layer, :PAGES]) for part in (0, 1))
        kv_store(k, v, step, layer, cu_seqlens=np.array([0, TOKENS]))
    blocks = pool.blocks
    for part in (0, 1):  # the null page, which no token reaches
        blocks[PAGES, part] = markers(shape, part)[:, PAGES]
    found = identify(blocks, layers=2, pages=PAGES + 1, page_size=SIZE, heads=HEADS, dim=DIM)
    (group,) = found.matches
    assert [one.name for one in group] == ["max.paged", "max.continuous", "lmcache.kv_2ltd"]


@pytest.mark.parametrize(("layout", "name"), [("NHD", "vllm.kv_first"), ("HND", "hnd")])
def test_paged_caches_of_both_layouts_are_identified(layout: str, name: str) -> None:
    kv_first = known_format("vllm.kv_first", pages=PAGES, page_size=SIZE, heads=HEADS, dim=DIM)
    hnd = Format.parse(kv_first.print().replace(f"slot:{SIZE} head:{HEADS}", f"head:{HEADS} slot:{SIZE}"), name="hnd")
    shape = (2, PAGES, SIZE, HEADS, DIM) if layout == "NHD" else (2, PAGES, HEADS, SIZE, DIM)
    cache = np.zeros(shape, as_dtype("bf16"))
    k, v = (stored(markers((1, PAGES, SIZE, HEADS, DIM), part)) for part in (0, 1))
    kv_store_paged(k, v, cache[0], cache[1], np.arange(TOKENS), kv_layout=layout)
    found = identify(cache, candidates=[kv_first, hnd])
    assert [[one.name for one in group] for group in found.matches] == [[name]]
    assert audit(cache, [[2, 0, 1]], [TOKENS], format=found.matches[0][0])


@pytest.mark.parametrize(("name", "width", "dtype"), [
    ("mla.bf16", 576, "bf16"), ("mla.640", 640, "fp8"), ("mla.656", 656, "uint8"),
])
def test_latent_rows_are_those_of_the_format(name: str, width: int, dtype: str) -> None:
    row = known_format(name, pages=PAGES, page_size=SIZE)
    cache = np.zeros((PAGES, SIZE, width), as_dtype(dtype))
    latent, rope = markers((1, PAGES, SIZE, 512)), markers((1, PAGES, SIZE, 64), 1)
    mla_store_paged(latent.reshape(-1, 512), rope.reshape(-1, 64), cache, np.arange(TOKENS))
    found = identify(cache, pages=PAGES, page_size=SIZE)
    assert [[one.name for one in group] for group in found.matches] == [[name]]
    assert np.array_equal(row.decode(cache)[1], rope)
    if name == "mla.656":  # the scales, too, are the same numbers
        codes, ours = row.unpack(cache), row.unpack(row.encode(latent, rope))
        assert np.array_equal(codes["latent_scale"].view(np.float32), ours["latent_scale"].view(np.float32))
