"""MAX's operands as the iterator sees them: the same rows as through a cache (a law), refusals by name."""

import numpy as np
import pytest

from kvlab.cache import (
    ContinuousBatchingKVCache,
    KVCacheMHAOperand,
    KVCacheScalesMHAOperand,
    KVCacheT,
    MHAOperand,
    PagedKVCache,
    RaggedMHAOperand,
    TileTensorMHAOperand,
    UnsafePointer,
    as_operand,
)
from kvlab.memory import Memory, bfloat16, invalid
from kvlab.staging import KVCacheIterator

LENGTHS, HEADS, DEPTH, PAGE = (37, 64, 1), 3, 16, 8
RNG = np.random.default_rng(7)
DENSE = RNG.integers(-99, 99, (3, 64, HEADS, DEPTH)).astype(bfloat16)


def paged():
    """DENSE in shuffled pages of eight tokens; what is past a length is poison."""
    columns = 64 // PAGE
    table = RNG.permutation(3 * columns).reshape(3, columns)
    blocks = np.full((3 * columns, PAGE, HEADS, DEPTH), np.nan, bfloat16)
    for sequence, length in enumerate(LENGTHS):
        for token in range(length):
            blocks[table[sequence, token // PAGE], token % PAGE] = DENSE[sequence, token]
    return PagedKVCache(blocks, np.array(LENGTHS, np.uint32), table, 1, 65)


def scales():
    """A cache whose scales are DENSE, one a dim."""
    table = np.arange(24).reshape(3, 8)
    blocks = DENSE.reshape(24, PAGE, HEADS, DEPTH)
    return PagedKVCache(np.zeros(blocks.shape, np.int8), LENGTHS, table, 1, 65, scales=blocks)


def operands():
    ragged = np.concatenate([DENSE[b, :n] for b, n in enumerate(LENGTHS)])
    return {
        "paged": paged(),
        "continuous": ContinuousBatchingKVCache(DENSE[[1, 2, 0]], LENGTHS, [2, 0, 1], 1, 65),
        "cache operand": KVCacheMHAOperand(paged()),
        "dense": TileTensorMHAOperand(DENSE),
        "ragged": RaggedMHAOperand(ragged, np.cumsum([0, *LENGTHS])),
        "scales": KVCacheScalesMHAOperand(scales()),
    }


@pytest.mark.parametrize("name", operands())
def test_the_iterator_walks_over_every_operand(name):
    sequence, head = np.array([0, 1, 2, 1, 0]), np.array([0, 2, 1, 1, 2])
    walk = KVCacheIterator(operands()[name], 24, sequence, head, np.array(LENGTHS)[sequence])
    for first in range(0, 72, 24):
        tile = walk.next_tile()
        for program, (b, h) in enumerate(zip(sequence, head, strict=True)):
            valid = tile.valid_rows.reshape(len(sequence), -1).sum(axis=1)[program]
            assert valid == np.clip(LENGTHS[b] - first, 0, 24)
            got = tile.load()[program].reshape(24, DEPTH)
            np.testing.assert_array_equal(got[:valid], DENSE[b, first : first + valid, h])
            assert not got[valid:].any()


@pytest.mark.parametrize("name", operands())
def test_each_is_an_operand_and_has_no_other_members(name):
    operand = as_operand(operands()[name])
    assert isinstance(operand, MHAOperand)
    assert (operand.kv_params.num_heads, operand.kv_params.head_size) == (HEADS, DEPTH)
    pointer = operand.block_paged_ptr(0, 2, 1, 3)
    assert isinstance(pointer, UnsafePointer)
    assert pointer.load()[0] == DENSE[0, 2, 1, 3]
    if not operand.quantization_enabled:
        assert operand.scale_dtype == invalid
        assert not operand.scales_raw_ptr()


class TestRefused:
    def test_what_is_no_operand(self):
        class Keys:
            dtype, page_size = np.dtype(bfloat16), 0

        with pytest.raises(TypeError, match="Keys is no KV cache and no MHAOperand: it has no block_paged_ptr, kv_par"):
            KVCacheIterator(Keys(), 16, 0, 0, 5)

    @pytest.mark.parametrize("name", ["dense", "ragged"])
    def test_rows_past_the_sequence(self, name):
        walk = KVCacheIterator(operands()[name], 48, 0, 0, 65)  # the second tile begins inside the dense sequence
        with pytest.raises(IndexError, match=r"start_tok_idx is (47|64): must be in"):
            walk.next_tile(), walk.next_tile()

    @pytest.mark.parametrize("tile", ["create_ragged_tma_tile", "create_rope_tma_tile", "create_gather4_tma_tile"])
    def test_tiles_that_only_caches_have(self, tile):
        parameters = {
            "create_ragged_tma_tile": {"swizzle_mode": "128B", "BN": 8},
            "create_rope_tma_tile": {"swizzle_mode": "128B", "BN": 8, "BK": 8, "padded_depth": 8},
            "create_gather4_tma_tile": {"tile_width": 8},
        }[tile]
        with pytest.raises(ValueError, match="TileTensorMHAOperand has no"):
            getattr(operands()["dense"], tile)(**parameters)

    def test_scales_of_a_cache_without(self):
        with pytest.raises(ValueError, match="has no scales"):
            KVCacheScalesMHAOperand(paged())


class TestTheTrait:
    def test_the_device_gets_the_view(self):
        assert paged().device_type is PagedKVCache

    def test_lengths_are_a_tile_tensor(self):
        lengths = paged().cache_lengths_nd()
        assert lengths.dtype == np.uint32
        assert lengths.load()[:, 0].tolist() == list(LENGTHS)

    def test_empty_is_about_lengths(self):
        blocks = np.zeros((2, 4, 1, 8), np.float32)
        prompt = PagedKVCache(blocks, [0, 0], [[0], [1]], max_seq_length=4, max_cache_length=4)
        assert prompt.empty_cache()
        assert not PagedKVCache(blocks, [0, 1], [[0], [1]], 0, 0).empty_cache()

    def test_max_tile_size_is_static(self):
        assert ContinuousBatchingKVCache.max_tile_size() == -1
        assert PagedKVCache[PAGE].max_tile_size() == paged().max_tile_size() == PAGE
        with pytest.raises(ValueError, match="PagedKVCache has no page size: ask a cache, or"):
            PagedKVCache.max_tile_size()

    def test_a_class_with_a_page_size_takes_no_other(self):
        blocks = np.zeros((2, 4, 1, 8), np.float32)
        assert isinstance(PagedKVCache[4](blocks, [0], [[0]], 1, 1), KVCacheT)
        with pytest.raises(ValueError, match=r"pages of 4 tokens, not those of PagedKVCache\[8\]"):
            PagedKVCache[8](blocks, [0], [[0]], 1, 1)

    def test_a_gather_of_a_part_of_the_row(self):
        """128 of 576 columns in boxes of 64, which come as they stand; of 96 the last box would hang over."""
        blocks = RNG.integers(-99, 99, (4, 4, 1, 576)).astype(bfloat16)
        cache = PagedKVCache(blocks, [9], [[0, 1, 2]], 1, 9)
        tile = cache.create_gather4_tma_tile(tile_width=128, tile_stride=576, swizzle_mode="128B")
        assert tile.tile_shape == (4, 64)
        assert tile.descriptor.shape == (16, 128)  # [num_kv_rows, tile_width]
        smem = Memory(2 * 4 * 128)
        tile.async_copy_gather4_tile(smem, 0, [3, 0, 9, 5])
        second = smem.load(4 * 128 + np.arange(0, 512, 2), bfloat16, 1)[:, 0]
        want = blocks.reshape(16, 576)[[3, 0, 9, 5], 64:128]
        chunk = np.arange(32).reshape(4, 8) ^ (4 + np.arange(4))[:, None]  # 128-byte swizzle, rows 4 to 7 of its atom
        got = second.reshape(32, 8)[chunk].reshape(4, 64)
        np.testing.assert_array_equal(got, want)
        with pytest.raises(ValueError, match=r"tile_width 96: rows of 96\*2 = 192 B are not a multiple of 128 B"):
            cache.create_gather4_tma_tile(tile_width=96, tile_stride=576, swizzle_mode="128B")
        with pytest.raises(ValueError, match="tile_stride 128 of bfloat16 is 256 bytes: must be a row of the cache"):
            cache.create_gather4_tma_tile(tile_width=128, swizzle_mode="128B")
