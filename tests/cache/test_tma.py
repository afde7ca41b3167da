"""TMA tiles over the rows of a cache, executed. Rests on NumPy's own indexing, on the canonical K-major image (chunk c
of row r of a 128-byte swizzle stands at chunk c ^ (r % 8), measured on an H100), and on worked numbers of the
specification."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.cache import ContinuousBatchingKVCacheCollection, KVCacheT, PagedKVCache, PagedKVCacheCollection
from kvlab.hardware import TensorMapSwizzle
from kvlab.memory import Memory, bfloat16, float8_e4m3fn

BF16 = np.dtype(np.uint16)  # the bits of bfloat16: every value is its own


def numbered(shape, dtype):
    """Bytes that tell elements apart: uint16 or uint8 counters, never 0, seen as ``dtype``."""
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    most = min(2 ** (8 * bits.itemsize), 65536) - 1
    return (np.arange(np.prod(shape)) % most + 1).astype(bits).view(dtype).reshape(shape)


def paged(page=32, heads=2, D=128, dtype=bfloat16, layers=2):
    blocks = numbered((4, 2, layers, page, heads, D), dtype)
    return PagedKVCacheCollection(blocks, [70], [[2, 0, 3]], 1, 90).get_value_cache(layers - 1)


def image(memory, dtype, rows, width, swizzle):
    """The tile ``[rows, width]`` read back through the swizzle: chunk after chunk of the swizzle's width."""
    mode = TensorMapSwizzle.of(swizzle)
    S = mode.granularity(dtype)
    row, col = np.ogrid[:rows, :width]
    linear = ((col // S) * rows * S + row * S + col % S) * np.dtype(dtype).itemsize
    return memory.load(mode.swizzle()(linear), dtype)[..., 0]


@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("dtype", [bfloat16, np.dtype(np.float32), float8_e4m3fn])
def test_tile_of_a_page(swizzle, dtype):
    cache = paged(dtype=dtype)
    tile, smem = cache.create_tma_tile(swizzle, BN=16), Memory(1 << 16)
    tile.async_copy(smem, 0, (0, 1, cache.row_idx(0, 48)))
    want = cache.load(0, 1, np.arange(48, 64), 0, width=128)
    assert image(smem, dtype, 16, 128, swizzle).tobytes() == want.tobytes()


def test_worked_example_a():
    pool = PagedKVCacheCollection(np.zeros((5, 2, 2, 128, 8, 128), bfloat16), [300], [[3, 0, 4]], 1, 301)
    tile = pool.get_key_cache(1).create_tma_tile("SWIZZLE_128B", BN=64)
    d = tile.descriptor
    assert (d.shape, d.strides, d.box, tile.tile_shape) == ((2176, 8, 128), (1024, 128, 1), (64, 1, 64), (64, 1, 128))
    assert (d.transaction_bytes, len(tile.offsets)) == (8192, 2)


def test_columns_past_the_head_are_zeros():
    """head_size 80: BK 128, two boxes, the second half filled."""
    cache = paged(D=80)
    tile, smem = cache.create_tma_tile("128B", BN=8), Memory(8 * 128 * 2)
    assert tile.tile_shape == (8, 1, 128)
    tile.async_copy(smem, 0, (0, 0, cache.row_idx(0, 0)))
    got = image(smem, bfloat16, 8, 128, "128B").view(BF16)
    assert got[:, :80].tobytes() == cache.load(0, 0, np.arange(8), 0, width=80).tobytes()
    assert not got[:, 80:].any()


def test_sub_tiles_of_small_pages_by_populate():
    """A tile of 64 keys over pages of 16: four copies, at the rows that populate names."""
    blocks = numbered((5, 16, 1, 64), bfloat16)
    cache = PagedKVCache(blocks, [60], [[4, 1, 0, 3] + [5] * 20], 1, 60)
    rows, step = cache.populate(0, 0, BN=64, base_alignment=64, valid=50).k_copies()
    assert (rows.tolist(), step) == ([64, 16, 0, 48], 16)
    tile, smem = cache.create_tma_tile("128B", BN=16), Memory(64 * 128)
    for place, row in enumerate(rows):
        tile.async_copy(smem, place * 16 * 128, (0, 0, int(row)))
    assert image(smem, bfloat16, 64, 64, "128B").tobytes() == cache.load(0, 0, np.arange(64), 0, width=64).tobytes()
    filled, _ = cache.populate(0, 0, BN=64, base_alignment=64, valid=30).k_copies()
    tile.async_copy(smem, 0, (0, 0, int(filled[2])))
    assert not image(smem, bfloat16, 16, 64, "128B").view(BF16).any()


@pytest.mark.parametrize("rows", [0, 1, 10, 16])
def test_ragged_tails_are_clipped(rows):
    cache = paged()
    tile, smem = cache.create_ragged_tma_tile("128B", BN=16), Memory(16 * 256)
    for col in (0, 1):
        tile.async_copy_to_col(col, smem, 0, cache.row_idx(0, 32), rows, 1)
    got = image(smem, bfloat16, 16, 128, "128B").view(BF16)
    assert got[:rows].tobytes() == cache.load(0, 1, 32 + np.arange(rows), 0, width=128).tobytes()
    assert not got[rows:].any()


def test_ragged_store_writes_its_rows_alone():
    cache = paged()
    before = cache.blocks.copy()
    tile, smem = cache.create_ragged_tma_tile("128B", BN=16), Memory(16 * 256)
    smem.store(0, np.full(16 * 128, 7, BF16))
    tile.async_copy_from_col(0, smem, 0, cache.row_idx(0, 40), 5, 1)
    before[0, 8:13, 1, :64].view(BF16)[...] = 7
    assert cache.blocks.tobytes() == before.tobytes()


def rope_cache():
    """Rows of 640 bytes: 512 of content, 64 bfloat16 behind them."""
    return PagedKVCache(numbered((3, 8, 1, 640), float8_e4m3fn), [20], [[2, 0, 1]], 1, 21)


def test_rope_part_at_its_byte_offset():
    cache = rope_cache()
    tile, smem = cache.create_rope_tma_tile("128B", BN=8, BK=64, padded_depth=512), Memory(8 * 128)
    d = tile.descriptor
    assert (d.shape, d.strides, d.box, d.base) == ((24, 1, 320), (320, 320, 1), (8, 1, 64), 512)
    for token in (0, 8, 16):
        tile.async_copy(smem, 0, (0, 0, cache.row_idx(0, token)))
        want = cache.load(0, 0, token + np.arange(8), 512, width=128)
        assert image(smem, bfloat16, 8, 64, "128B").tobytes() == want.tobytes()


@pytest.mark.parametrize(
    "dtype, tma_dtype, width, swizzle, groups",
    [(bfloat16, None, 576, "128B", 9), (float8_e4m3fn, "int64", 72, "none", 1), (float8_e4m3fn, None, 576, "64B", 9)],
    ids=["bf16-128B", "fp8-as-int64", "fp8-64B"],
)
def test_gather4_by_tma_row(dtype, tma_dtype, width, swizzle, groups):
    """The latent cache of 576 values: rows from a sparse index list, layer 1 of 2."""
    blocks = numbered((3, 1, 2, 8, 1, 576), dtype)
    cache = PagedKVCacheCollection(blocks, [20], [[2, 0, 1]], 1, 21).get_key_cache(1)
    tile = cache.create_gather4_tma_tile(tile_width=width, tile_height=8, swizzle_mode=swizzle, tma_dtype=tma_dtype)
    assert tile.column_groups == groups
    encoded = np.array([23, 0, 9, 9, 15, 16, 7, 1])
    smem = Memory(tile.transaction_bytes)
    tile.async_copy_gather4_tile(smem, 0, cache.get_tma_row(encoded))
    got = image(smem, tile.descriptor.dtype, 8, width, swizzle) if swizzle != "none" else smem.image(np.uint8)
    assert got.tobytes() == cache.blocks[encoded // 8, encoded % 8, 0].tobytes()


def test_rope_gather4():
    cache = rope_cache()
    tile = cache.create_rope_gather4_tma_tile(tile_width=320, padded_depth=512, swizzle_mode="128B")
    smem = Memory(4 * 128)
    encoded = np.array([23, 3, 17, 0])
    tile.async_copy_gather4_tile(smem, 0, cache.get_tma_row(encoded))
    assert image(smem, bfloat16, 4, 64, "128B").tobytes() == cache.blocks[encoded // 8, encoded % 8, 0, 512:].tobytes()


def test_continuous():
    blocks = numbered((3, 2, 2, 40, 2, 64), bfloat16)
    cache = ContinuousBatchingKVCacheCollection(blocks, [20], [2], 1, 21).get_key_cache(1)
    assert isinstance(cache, KVCacheT)
    tile, smem = cache.create_tma_tile("128B", BN=32), Memory(32 * 128)
    tile.async_copy(smem, 0, (0, 1, cache.row_idx(0, 5)))
    assert image(smem, bfloat16, 32, 64, "128B").tobytes() == cache.load(0, 1, 5 + np.arange(32), 0, width=64).tobytes()
    assert cache.populate(0, 5, BN=32).rows.tolist() == [cache.row_idx(0, 5)]
    with pytest.raises(ValueError, match="a continuous cache has no rope part"):
        cache.create_rope_tma_tile("128B", BN=8, BK=16, padded_depth=32)
    with pytest.raises(ValueError, match="a continuous cache has no rope part"):
        cache.create_rope_gather4_tma_tile(tile_width=32, padded_depth=32)


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda c: c.create_tma_tile("128B", BN=16, BK=80), "BK is 80: must be a multiple of 64 elements of bfloat16"),
        (lambda c: c.create_ragged_tma_tile("64B", BN=16, BK=48), "BK is 48: must be a multiple of 32"),
        (lambda c: c.create_rope_tma_tile("128B", BN=16, BK=64, padded_depth=128), "rows of 8-bit content and"),
        (lambda c: c.create_gather4_tma_tile(tile_width=128), "tile_stride 128 of bfloat16 is 256 bytes: must be a"),
        (lambda c: c.create_gather4_tma_tile(tile_width=256, tile_height=6), "tile_height is 6"),
    ],
)
def test_errors(act, message):
    with pytest.raises(ValueError, match=message):
        act(paged())


@pytest.mark.parametrize("create", ["create_tma_tile", "create_ragged_tma_tile"])
def test_a_box_does_not_leave_its_page(create):
    """Rows past a page are those of other pages and layers."""
    cache = paged()
    getattr(cache, create)("128B", BN=cache.page_size_)
    with pytest.raises(ValueError, match=f"BN is {cache.page_size_ + 8}: must be at most {cache.page_size_}, the"):
        getattr(cache, create)("128B", BN=cache.page_size_ + 8)
    rope = rope_cache()
    with pytest.raises(ValueError, match="must be at most"):
        rope.create_rope_tma_tile("128B", BN=rope.page_size_ + 8, BK=64, padded_depth=512)


def test_rope_row_must_fit():
    with pytest.raises(ValueError, match=r"padded_depth 512 \+ 2 \* BK 128 must be the row of a head, 640 bytes"):
        rope_cache().create_rope_tma_tile("128B", BN=8, BK=128, padded_depth=512)
    with pytest.raises(ValueError, match="tile_width 64 bfloat16 values must be a row of 640 bytes"):
        rope_cache().create_rope_gather4_tma_tile(tile_width=64, padded_depth=512)
