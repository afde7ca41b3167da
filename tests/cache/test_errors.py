"""Bad input: an error that names the argument, its value and what is accepted, and nothing written. Rests on the rules
of the specification (1.7)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.cache import KVCacheStaticParams, PagedKVCache, PagedKVCacheCollection, UnsafePointer, from_dense
from kvlab.memory import Memory, OutOfBounds, bfloat16

GOOD = {
    "blocks": np.zeros((3, 4, 2, 8), np.float32),
    "cache_lengths": np.array([5, 0], np.uint32),
    "lookup_table": np.array([[2, 0], [1, -1]], np.int32),
    "max_seq_length": 1,
    "max_cache_length": 6,
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"blocks": np.zeros((3, 4, 8), np.float32)}, r"blocks has shape \(3, 4, 8\): must be 4 axes"),
        ({"blocks": np.zeros((3, 0, 2, 8), np.float32)}, "none of them empty"),
        ({"blocks": np.zeros((3, 4, 2, 16), np.float32)[..., ::2]}, r"blocks has strides .* last axis must be contig"),
        ({"blocks": np.zeros((3, 4, 2, 8), np.float32)[::-1]}, "none negative"),
        ({"blocks": np.zeros((3, 4, 2, 8), complex)}, "blocks: dtype is 'complex128': must be one of"),
        ({"cache_lengths": np.zeros((2, 1), int)}, r"cache_lengths has shape \(2, 1\): must be \[batch\]"),
        ({"cache_lengths": np.zeros(2)}, "cache_lengths has dtype float64: must be integers"),
        ({"cache_lengths": [5, 0, 0]}, "lookup_table has 2 rows, cache_lengths 3 entries"),
        ({"cache_lengths": [5, 9]}, r"cache_lengths\[1\] is 9: must be in \[0, 8\]"),
        ({"cache_lengths": [5, -1]}, r"cache_lengths\[1\] is -1: must be in \[0, 8\]"),
        ({"lookup_table": np.array([2, 0])}, r"lookup_table has shape \(2,\): must be \[batch, columns\]"),
        ({"lookup_table": np.zeros((2, 2))}, "lookup_table has dtype float64: must be integers"),
        ({"max_seq_length": 1.0}, r"max_seq_length is 1\.0: must be an integer of at least 0"),
        ({"blocks": np.zeros((3, 4, 2, 8), ">f4")}, "blocks has dtype >f4, another byte order than this machine's"),
        ({"blocks": np.ma.zeros((3, 4, 2, 8), "f4")}, "blocks is a MaskedArray: must be a plain array"),
        ({"cache_lengths": np.array([5, 0], ">u4")}, "cache_lengths has dtype >u4, another byte order"),
        ({"lookup_table": np.ma.masked_array([[2, 0], [1, -1]])}, "lookup_table is a MaskedArray: must be a plain"),
        ({"max_seq_length": -1}, "max_seq_length is -1: must be at least 0"),
        ({"max_cache_length": -1}, "max_cache_length is -1: must be at least 0"),
        ({"total_num_pages": 4}, "total_num_pages 4 exceeds the 3 pages"),
        ({"kv_params": KVCacheStaticParams(4, 8)}, r"kv_params .*num_heads=4.* does not fit blocks of shape"),
    ],
)
def test_cache_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        PagedKVCache(**(GOOD | change))


@pytest.mark.parametrize(
    "blocks, kv_params, message",
    [
        (np.zeros((3, 4, 2, 8), np.float32), None, "must be 6 axes"),
        (np.zeros((3, 3, 1, 4, 2, 8), np.float32), None, "KV 1 or 2"),
        (np.zeros((3, 2, 1, 4, 2, 8), np.float32), KVCacheStaticParams(2, 8, is_mla=True), "does not fit blocks"),
        (np.zeros((3, 2, 1, 4, 2, 8), np.float32), KVCacheStaticParams(2, 16), "does not fit blocks"),
        (np.zeros((3, 2, 1, 4, 2, 8), np.float32)[..., ::2], None, "last axis must be contiguous"),
    ],
)
def test_collection_refuses(blocks, kv_params, message):
    with pytest.raises(ValueError, match=message):
        PagedKVCacheCollection(blocks, [5], [[2, 0]], 1, 6, kv_params)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("bs", {"bs": 2}, r"batch_idx is 2: must be in \[0, 2\)"),
        ("bs", {"bs": -1}, r"batch_idx is -1: must be in"),
        ("head", {"head_idx": [0, 2]}, r"head_idx is 2: must be in \[0, 2\)"),
        ("dim", {"head_dim_idx": 8}, "must end inside the head of 8"),
        ("dim", {"head_dim_idx": -1}, r"head_dim_idx is -1: must be in \[0, 8\)"),
        ("width", {"head_dim_idx": 6, "width": 4}, "width 4 from head_dim_idx 6 must end inside the head of 8"),
        ("width", {"width": 0}, "width 0"),
    ],
)
def test_indices_out_of_range(name, change, message):
    cache = PagedKVCache(**GOOD)
    where = {"bs": 0, "head_idx": 0, "tok_idx": 0, "head_dim_idx": 0} | change
    with pytest.raises(IndexError, match=message):
        cache.load(**where)
    width = where.pop("width", 1)
    if width:
        before = GOOD["blocks"].copy()
        with pytest.raises(IndexError, match=message):
            cache.store(**where, val=np.ones(width, np.float32))
        np.testing.assert_array_equal(GOOD["blocks"], before)


def test_indices_must_be_integers():
    with pytest.raises(ValueError, match="tok_idx has dtype float64: must be integers"):
        PagedKVCache(**GOOD).load(0, 0, 1.5, 0)


SIZES = {
    "width": lambda c, n: c.load(0, 0, 0, 0, width=n),
    "tile_size": lambda c, n: c.block_paged_ptr(0, 0, 0, tile_size=n),
    "BN": lambda c, n: c.populate(0, 0, BN=n, base_alignment=4),
    "base_alignment": lambda c, n: c.populate(0, 0, BN=4, base_alignment=n),
    "BK": lambda c, n: c.create_tma_tile("32B", BN=4, BK=n),
    "tile_width": lambda c, n: c.create_gather4_tma_tile(tile_width=n),
    "tile_height": lambda c, n: c.create_gather4_tma_tile(tile_width=16, tile_height=n),
}


@pytest.mark.parametrize("size", ["4", 4.0, [4], float("nan"), np.zeros(2, int)], ids=repr)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_must_be_integers(name, size):
    with pytest.raises(ValueError, match=f"^{name} .* must be an integer of at least"):
        SIZES[name](PagedKVCache(**GOOD), size)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_positive(name):
    for size in (0, -4):
        with pytest.raises((ValueError, IndexError), match=f"{name} (is )?{size}"):
            SIZES[name](PagedKVCache(**GOOD), size)


def test_other_indices():
    cache = PagedKVCache(**GOOD)
    for look, message in (
        (lambda: cache.get_tma_row(12), r"encoded_index is 12: must be in \[0, 12\)"),
        (lambda: cache.get_tma_row(-1), r"encoded_index is -1"),
        (lambda: cache.cache_length(2), r"batch_idx is 2: must be in"),
        (lambda: cache.populate(0, 0, BN=4, base_alignment=4).get_row(4), r"offset is 4: must be in \[0, 4\)"),
    ):
        with pytest.raises(IndexError, match=message):
            look()


class TestTiles:
    @pytest.mark.parametrize("tile", [0, 3, 8])
    def test_must_divide_the_page(self, tile):
        with pytest.raises(ValueError, match=f"tile_size is {tile}: must divide the page size 4; .* row_offsets"):
            PagedKVCache(**GOOD).block_paged_ptr(0, 0, 0, tile_size=tile)

    def test_must_stay_in_the_page(self):
        cache = PagedKVCache(**GOOD)
        with pytest.raises(ValueError, match="start_tok_idx 3: a tile of 2 rows"):
            cache.block_paged_ptr(0, np.array([0, 3]), 0, tile_size=2)
        assert cache.block_paged_ptr(0, 3, 0, tile_size=2, valid=1).offset == 2 * 64 + 3 * 16

    def test_keys_left_may_exceed_the_tile(self):
        offsets = (
            PagedKVCache(**GOOD)
            .block_paged_ptr(0, np.array([0, 2, 4]), 0, tile_size=2, valid=np.array([5, 3, 1]))
            .offset
        )
        assert offsets.tolist() == [2 * 64, 2 * 64 + 2 * 16, 0]

    def test_row_offsets_need_a_row_axis(self):
        with pytest.raises(ValueError, match="tokens 3 has no axis"):
            PagedKVCache(**GOOD).row_offsets(0, 3, 0)


class TestStore:
    def test_dtype(self):
        with pytest.raises(ValueError, match="val has dtype bfloat16, the cache float32"):
            PagedKVCache(**GOOD).store(0, 0, 0, 0, np.zeros(8, bfloat16))

    def test_shape(self):
        with pytest.raises(ValueError, match="broadcast"):
            PagedKVCache(**GOOD).store(0, 0, np.arange(3), 0, np.zeros((2, 8), np.float32))

    def test_read_only_array_is_for_reading(self):
        blocks = np.ones((3, 2, 4, 2, 8), np.float32)[:, 1]
        blocks.flags.writeable = False
        cache = PagedKVCache(**(GOOD | {"blocks": blocks}))
        assert (cache.load(0, 1, np.arange(5), 0, width=8) == 1).all()
        with pytest.raises(ValueError, match="blocks is read-only"):
            cache.store(0, 0, 0, 0, np.float32(0))


class TestPointer:
    memory = Memory(64, name="dram")

    def test_stays_in_its_allocation(self):
        assert (UnsafePointer(self.memory, 16, np.float32)).byte_address == 64
        for offset in (-1, 17, np.array([0, 17])):
            with pytest.raises(OutOfBounds, match=r"dram: pointer to element (-1|17) \(float32\) is outside \[0, 16\]"):
                UnsafePointer(self.memory, offset, np.float32)
        with pytest.raises(OutOfBounds):
            UnsafePointer(self.memory, 14, np.float32).store(np.zeros(4, np.float32))

    def test_load_and_store(self):
        UnsafePointer(self.memory, np.array([1, 3]), "bf16").store(np.array([[1, 2], [3, 4]], bfloat16))
        assert UnsafePointer(self.memory, 2, bfloat16).load(3).tolist() == [2, 3, 4]
        assert UnsafePointer(self.memory, np.int32(2), bfloat16).offset == 2

    def test_refuses(self):
        with pytest.raises(ValueError, match="value has dtype float32, the pointer bfloat16"):
            UnsafePointer(self.memory, 0, bfloat16).store(np.zeros(1, np.float32))
        with pytest.raises(ValueError, match=r"offset is 0\.5: must be an integer"):
            UnsafePointer(self.memory, 0.5, bfloat16)


def test_masked_values_are_not_stored():
    cache = PagedKVCache(**GOOD | {"blocks": np.zeros((3, 4, 2, 8), np.float32)})
    with pytest.raises(ValueError, match="val is a MaskedArray: must be a plain array"):
        cache.store(0, 0, 0, 0, np.ma.masked_array(np.ones(8, np.float32), True))
    assert not cache.blocks.any()


@pytest.mark.parametrize("heads", [2.5, "2", None])
def test_params_take_integers(heads):
    with pytest.raises(ValueError, match=f"num_heads is {heads!r}: must be an integer of at least 1"):
        KVCacheStaticParams(heads, 16)


@pytest.mark.parametrize("bad", [np.zeros(()), np.float32(1), 3, object()], ids=["no axis", "scalar", "3", "object"])
@pytest.mark.parametrize("name", ["k", "v"])
def test_from_dense_of_what_has_no_layers(name: str, bad: Any) -> None:
    good = np.zeros((1, 1, 5, 1, 16), np.float32)
    with pytest.raises(ValueError, match=rf"^{name} is a .*: must be \[batch, tokens, heads, head_size\] for each"):
        from_dense(**{"k": good, "v": good, name: bad}, lengths=[5], page_size=4)


@pytest.mark.parametrize("bad", ["no", 1, None, np.ones(2)], ids=["no", "1", "None", "array"])
def test_flags_are_bools(bad: Any) -> None:
    keys, blocks = np.zeros((1, 1, 5, 1, 16), np.float32), np.zeros((3, 2, 1, 4, 1, 16), np.float32)
    with pytest.raises(ValueError, match=r"^poison .*: must be True or False"):
        from_dense(keys, keys, [5], page_size=4, poison=bad)
    with pytest.raises(ValueError, match=r"^strict .*: must be True or False"):
        PagedKVCacheCollection(blocks, np.array([3]), np.array([[0]]), 1, 4, strict=bad)
