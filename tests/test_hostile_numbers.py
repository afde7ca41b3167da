"""Numbers that no machine has, and tuples in tuples without end: a clear ValueError or IndexError, never another
exception, a number that has wrapped around, or memory that runs out.

Rests on Python's own integers, which do not wrap around.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import attention, cache, hardware, layout
from kvlab.attention import mha_decode_paged, mla_prefill_paged
from kvlab.layout import ComposedLayout, Layout, LinearLayout, Swizzle, TileTensor
from kvlab.layout.algebra import int_tuple, tree_ops
from kvlab.layout.encodings import BlockedLayout, PaddedSharedLayout, SwizzledSharedLayout
from kvlab.memory import AddressSpace, Memory


def deep(levels: int) -> Any:
    tree: Any = 1
    for _ in range(levels):
        tree = (tree,)
    return tree


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
NUMBERS: dict[str, Any] = {
    "-1": -1, "2^40": 1 << 40, "2^62": 1 << 62, "2^63-1": (1 << 63) - 1, "2^63": 1 << 63, "2^70": 1 << 70,
    "10^400": 10**400, "10^5000": 10**5000, "-2^63": -(1 << 63), "-2^70": -(1 << 70), "deep": deep(3000),
    "deeper than 64": deep(90), "endless": ENDLESS, "deep list": [deep(3000)], "uint64": np.uint64(1 << 63),
    "uint64s": np.array([(1 << 63) + 5, 1], np.uint64), "int64s": np.array([1 << 62, (1 << 62) + 1]),
    "ends": np.array([(1 << 63) - 1, -(1 << 63)]), "objects": np.array([1 << 70]), "inf": float("inf"),
    "pair": (1 << 62, 1 << 62), "pairs": ((1 << 62, 3), (5, 1 << 70)),
}
TILE, LANE, FOUR = Layout.row_major(4, 8), np.arange(32), np.arange(4)
BLOCKED = BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
SHARED = SwizzledSharedLayout(8, 1, 8, [1, 0])
DRAM = Memory.over(np.arange(64, dtype=np.int32))
HALF, ROWS = np.zeros((64, 64), np.float16), np.zeros((4, 16), np.int32)
GATHER = hardware.create_tma_tile_gather4(HALF, 64)
BOX = hardware.create_tma_tile(HALF, (16, 64))
RAGGED = hardware.RaggedTensorMap.of(HALF, 16, 64, 128)
LOADER = hardware.RegTileLoader("int32", Layout.row_major(2, 2))
WRITER = hardware.RegTileWriterLDS("int32", Layout.row_major(4, 2))
DMA = hardware.SubTileLoaderLDS("int16")
POOL = cache.PagedKVCacheCollection(np.zeros((5, 2, 3, 16, 2, 64), np.float32), [20], [[3, 0]], 1, 21)
KEYS, PARAMS = POOL.get_key_cache(0), cache.KVCacheStaticParams(2, 64)
DENSE = np.zeros((2, 8, 1, 16), np.float32)


def registers(threads: Any = 4) -> TileTensor:
    return TileTensor.stack_allocation(Layout(16), "int32", AddressSpace.LOCAL, threads=threads)


def tile() -> TileTensor:
    return TileTensor.from_numpy(np.zeros((8, 16), np.float32))


def shared() -> TileTensor:
    return TileTensor.stack_allocation(Layout.row_major(8, 16), "fp32")


def allocate(**sizes: Any) -> Any:
    given = {"num_pages": 1, "page_size": 16, "num_layers": 1, "batch_size": 1, "max_length": 16, "dtype": "fp32"}
    return cache.PagedKVCacheCollection.allocate(PARAMS, **given | sizes)


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda x: Layout(x),
    "stride": lambda x: Layout((4, 8), x),
    "of arrays, extent": lambda x: Layout((4, x), (1, 4))(FOUR, 3),
    "of arrays": lambda x: Layout((4, 8), (x, 1))(FOUR),
    "of arrays, by mode": lambda x: Layout((4, 8), (x, 1))(FOUR, 0),
    "coordinate": lambda x: TILE(x),
    "coordinates": lambda x: TILE(x, x),
    "offsets": lambda x: Layout((4, 8), (1, x)).offsets(),
    "offsets of so many": lambda x: Layout((4, x)).offsets(),
    "idx2crd": lambda x: TILE.idx2crd(x),
    "idx2crd of arrays": lambda x: Layout((4, 8), (1, x)).idx2crd(FOUR),
    "idx2crd of arrays, extent": lambda x: Layout((x, 8), (1, 4)).idx2crd(FOUR),
    "slice": lambda x: TILE[x, :],
    "point": lambda x: TILE[x],
    "part": lambda x: TILE[0:x, :],
    "row_major": lambda x: Layout.row_major(4, x),
    "parse": lambda x: Layout.parse(x),
    "repr": lambda x: repr(Layout(x)),
    "text": lambda x: Layout("(" * 3000),
    "coalesce": lambda x: layout.coalesce(Layout((4, x))),
    "complement": lambda x: layout.complement(TILE, x),
    "composition": lambda x: layout.composition(TILE, Layout(4, x)),
    "logical_divide": lambda x: layout.logical_divide(TILE, x),
    "zipped_divide": lambda x: layout.zipped_divide(TILE, x),
    "logical_product": lambda x: layout.logical_product(TILE, x),
    "tile_to_shape": lambda x: layout.tile_to_shape(TILE, x),
    "blocked_product": lambda x: layout.blocked_product(TILE, Layout((x, 2))),
    "upcast": lambda x: layout.upcast(TILE, x),
    "right_inverse": lambda x: layout.right_inverse(Layout((4, 8), (x, 1))),
    "left_inverse": lambda x: layout.left_inverse(Layout((4, x))),
    "make_layout": lambda x: layout.make_layout(x),
    "make_ordered_layout": lambda x: layout.make_ordered_layout((4, 8), x),
    "zip_modes": lambda x: layout.zip_modes(TILE, x),
    "format_layout": lambda x: layout.format_layout(Layout((4, x))),
    "local_tile": lambda x: layout.local_tile(TILE, x, (0, 0)),
    "slice_and_offset": lambda x: layout.slice_and_offset((None, x), TILE),
    "composed": lambda x: ComposedLayout(TILE, None, x)(FOUR),
    "composed, coordinate": lambda x: ComposedLayout(TILE, None, 3)(x),
    "swizzle, bits": lambda x: Swizzle(x, 0, 3, "byte")(FOUR),
    "swizzle, base": lambda x: Swizzle(1, x, 3, "byte")(5),
    "swizzle, shift": lambda x: Swizzle(1, 0, x, "byte")(FOUR),
    "swizzle, period": lambda x: Swizzle(1, x, 3, "byte").period,
    "swizzle of": lambda x: Swizzle(1, 4, 3, "byte")(x),
    "swizzle, unit": lambda x: Swizzle(1, 4, 3, "byte").apply(FOUR, x),
    "make_swizzle": lambda x: layout.make_swizzle(8, x, 8, "bf16"),
    "swizzle mode": lambda x: layout.make_tma_swizzle(x),
    "ldmatrix swizzle": lambda x: layout.make_ldmatrix_swizzle("bf16", x),
    "linear": lambda x: LinearLayout.from_layout(Layout(x)),
    "linear, basis": lambda x: LinearLayout({"lane": [[x]]}, {"dim0": 4}),
    "linear, bases": lambda x: LinearLayout({"lane": x}, {"dim0": 4}),
    "linear, size": lambda x: LinearLayout({"lane": [[1], [2]]}, {"dim0": x}),
    "blocked": lambda x: BlockedLayout([1, x], [4, 8], [4, 1], [1, 0]),
    "blocked, shape": lambda x: BLOCKED.to_linear_layout((8, x)),
    "shared, offsets": lambda x: SHARED.offsets((64, x)),
    "padded": lambda x: PaddedSharedLayout.with_identity_for([[64, x]], (64, 64), (1, 0)),
    "tensor, offset": lambda x: TileTensor(Memory(64), "fp32", Layout(4), x).load(),
    "tensor, stride": lambda x: TileTensor(Memory(64), "fp32", Layout(4, x)).load(),
    "tensor, extent": lambda x: TileTensor(Memory(64), "fp32", Layout(x)).load(),
    "tile": lambda x: tile().tile((4, x), (0, 0)),
    "tile, number": lambda x: tile().tile((4, 4), (0, x)),
    "vectorize": lambda x: tile().vectorize(1, x),
    "distribute": lambda x: tile().distribute(Layout((2, 2), (x, 1)), FOUR),
    "lane": lambda x: tile().distribute(TILE, x),
    "load_at": lambda x: tile().load_at(x, 0),
    "store_at": lambda x: tile().store_at(0, x, value=1),
    "ptr_at_offset": lambda x: tile().ptr_at_offset(x, 0),
    "raw_load": lambda x: tile().raw_load(0, x),
    "split": lambda x: tile().split(x),
    "valid_rows": lambda x: tile().with_valid_rows(x).load(),
    "dim": lambda x: tile().dim(x),
    "fill": lambda x: tile().fill(x),
    "stack_allocation": lambda x: TileTensor.stack_allocation(Layout(x), "fp32"),
    "programs": lambda x: TileTensor.stack_allocation(Layout(4), "fp32", programs=x),
    "base": lambda x: TileTensor.stack_allocation(Layout(4), "fp32", base=x),
    "copier": lambda x: layout.copy_dram_to_sram(shared(), tile(), Layout.row_major(4, 4), num_threads=x),
    "copier, rows": lambda x: layout.copy_dram_to_sram_async(
        shared(), tile(), Layout.row_major(4, 4), masked=True, src_num_valid_rows=x
    ),
    "copy, bound": lambda x: shared().copy_from_async(tile(), is_masked=True, src_idx_bound=x),
    "copy, base": lambda x: shared().copy_from_async(tile(), base_offset=x, swizzle=Swizzle(1, 0, 3, "fp32")),
    "memory": lambda x: Memory(x),
    "memory, programs": lambda x: Memory(16, programs=x),
    "memory, base": lambda x: Memory(16, base=x),
    "load": lambda x: DRAM.load(x, "int32"),
    "load, width": lambda x: DRAM.load(0, "int32", x),
    "load, alignment": lambda x: DRAM.load(0, "int32", 1, alignment=x),
    "store": lambda x: Memory(64).store(x, np.zeros(1, np.int32)),
    "crd2idx": lambda x: int_tuple.crd2idx(FOUR, (x, 4), (8, 1)),
    "crd2idx, stride": lambda x: int_tuple.crd2idx(FOUR, (4, 8), (x, 1)),
    "crd2idx of": lambda x: int_tuple.crd2idx(x, (4, 8), (8, 1)),
    "crd2idx, legacy": lambda x: int_tuple.crd2idx(FOUR, (x, 4), (8, 1), rule="legacy"),
    "free idx2crd": lambda x: int_tuple.idx2crd(FOUR, (4, x)),
    "flatten": lambda x: int_tuple.flatten(x),
    "product": lambda x: int_tuple.product(x),
    "congruent": lambda x: int_tuple.congruent(x, x),
    "prefix_product": lambda x: int_tuple.prefix_product(x),
    "format_tree": lambda x: int_tuple.format_tree(x),
    "parse_tree": lambda x: int_tuple.parse_tree(x),
    "depth": lambda x: tree_ops.depth(x),
    "reverse": lambda x: tree_ops.reverse(x),
    "mul": lambda x: tree_ops.mul(x, 2),
    "compatible": lambda x: tree_ops.compatible(x, x),
    "shape_div": lambda x: tree_ops.shape_div((4, 8), x),
    "compact_order": lambda x: tree_ops.compact_order((4, 8), x),
}
HARDWARE: dict[str, Callable[[Any], Any]] = {
    "buffer_load, base": lambda x: hardware.buffer_load(DRAM, x, LANE * 4, 4, 256),
    "buffer_load": lambda x: hardware.buffer_load(DRAM, 0, x, 4, 256),
    "nbytes": lambda x: hardware.buffer_load(DRAM, 0, LANE, x, 256),
    "buffer_load, records": lambda x: hardware.buffer_load(DRAM, 0, LANE * 4, 4, x),
    "buffer_load, soffset": lambda x: hardware.buffer_load(DRAM, 0, LANE * 4, 4, 256, x),
    "buffer_load_lds": lambda x: hardware.buffer_load_lds(Memory(256), x, DRAM, 0, LANE * 4, 4, 256),
    "sectors": lambda x: hardware.sectors(x, 4),
    "sectors, nbytes": lambda x: hardware.sectors(LANE, x),
    "wavefronts": lambda x: hardware.wavefronts("ld.shared.b32", x),
    "mask": lambda x: hardware.wavefronts("ld.shared.b32", LANE, mask=x),
    "bank_conflicts": lambda x: hardware.bank_conflicts(BLOCKED, SHARED, (64, x), 16),
    "arch": lambda x: hardware.get_arch(x),
    "cp_async": lambda x: hardware.cp_async(Memory(256), x, DRAM, 0, 16),
    "atom": lambda x: hardware.get_atom(x),
    "cp_async, source": lambda x: hardware.cp_async(Memory(256), 0, DRAM, x, 16),
    "ldmatrix": lambda x: hardware.ldmatrix(DRAM, x, 4),
    "ldmatrix, num": lambda x: hardware.ldmatrix(DRAM, LANE * 0, x),
    "ds_read_tr": lambda x: hardware.ds_read_tr16_b64(DRAM, x),
    "kv tile, BN": lambda x: hardware.create_kv_tile(np.zeros((64, 2, 64), np.float16), x, 64),
    "kv tile, BK": lambda x: hardware.create_kv_tile(np.zeros((64, 2, 64), np.float16), 16, x),
    "tensor tile": lambda x: hardware.create_tensor_tile(HALF, (16, x), "128B"),
    "tma tile": lambda x: hardware.create_tma_tile(HALF, (x, 64)),
    "gather4": lambda x: hardware.create_tma_tile_gather4(HALF, x),
    "gather4, rows": lambda x: GATHER.async_copy_gather4_tile(Memory(4096), 0, [x, 0, 0, 0]),
    "box, column": lambda x: BOX.async_copy(Memory(4096), 0, (x, 0)),
    "box, row": lambda x: BOX.async_copy(Memory(4096), 0, (0, x)),
    "box, address": lambda x: BOX.async_copy(Memory(4096), x, (0, 0)),
    "image": lambda x: BOX.descriptor.image(x),
    "fold, BN": lambda x: hardware.fold_kv_descriptor(np.zeros((64, 2, 128), np.float16), x, 128),
    "fold, BK": lambda x: hardware.fold_kv_descriptor(np.zeros((64, 2, 128), np.float16), 32, x),
    "descriptor, shape": lambda x: hardware.TmaDescriptor(DRAM, "fp32", (x, 4), (4, 1), (1, 4)),
    "descriptor, stride": lambda x: hardware.TmaDescriptor(DRAM, "fp32", (4, 4), (x, 1), (1, 4)),
    "descriptor, base": lambda x: hardware.TmaDescriptor(DRAM, "fp32", (4, 4), (4, 1), (1, 4), base=x),
    "ragged tile": lambda x: hardware.RaggedTMA3DTile.of(np.zeros((64, 2, 64), np.float16), x, 64),
    "ragged tile, group": lambda x: hardware.RaggedTMA3DTile.of(np.zeros((64, 2, 64), np.float16), 16, 64, group=x),
    "ragged": lambda x: hardware.RaggedTensorMap.of(HALF, x, 64, 128),
    "ragged, longest": lambda x: hardware.RaggedTensorMap.of(HALF, 16, 64, x),
    "ragged, address": lambda x: RAGGED.store_ragged_tile(Memory(1 << 15), x, 0, 0, 4),
    "ragged, before": lambda x: RAGGED.store_ragged_tile(Memory(1 << 15), 0, 0, x, 4),
    "ragged, length": lambda x: RAGGED.store_ragged_tile(Memory(1 << 15), 0, 0, 0, x),
    "internal_k_major": lambda x: hardware.internal_k_major("bf16", x, 64, 128),
    "k_major": lambda x: hardware.tile_layout_k_major("bf16", 64, x, "128B"),
    "mn_major": lambda x: hardware.tile_layout_mn_major("bf16", x, 64, "128B"),
    "smem descriptor": lambda x: hardware.SmemDescriptor(x, 16, 1024, "128B"),
    "decode": lambda x: hardware.SmemDescriptor.decode(x),
    "advance": lambda x: hardware.SmemDescriptor(0, 16, 1024, "128B").advance(x),
    "addresses": lambda x: hardware.SmemDescriptor(0, 16, 1024, "128B").addresses(x, 16, "bf16"),
    "tmem address": lambda x: hardware.tmem_address(x, 0),
    "tmem": lambda x: hardware.TensorMemory(x),
    "tmem, column": lambda x: hardware.TensorMemory(64).load(0, x, 1),
    "tmem, repeat": lambda x: hardware.TensorMemory(64).load(0, 0, x),
    "loader, shape": lambda x: LOADER.vectors((x, 32)),
    "loader, columns": lambda x: LOADER.load(registers(), TileTensor.from_numpy(ROWS), columns=x),
    "loader, threads": lambda x: registers(x),
    "resource, row": lambda x: hardware.buffer_resource(tile(), x, 0),
    "resource, col": lambda x: hardware.buffer_resource(tile(), 0, x),
    "resource, columns": lambda x: hardware.buffer_resource(tile(), 0, 0, columns=x),
    "writer, row_stride": lambda x: WRITER.offsets((4, 8), x),
    "writer, shape": lambda x: WRITER.offsets((4, x)),
    "dma, M": lambda x: DMA.plan(x, 32),
    "dma, N": lambda x: DMA.plan(32, x),
    "dma, base": lambda x: DMA.plan(32, 32, x),
    "st_8x32": lambda x: hardware.SubTileLoaderLDS_st_8x32("bf16", x, 128, 32, 256),
    "barrier": lambda x: hardware.SharedMemBarrier(x),
    "arrive": lambda x: hardware.SharedMemBarrier(1).arrive(x),
    "expect": lambda x: hardware.SharedMemBarrier(1).expect_bytes(x),
    "tf32": lambda x: hardware.round_tf32(x),
}
CACHES: dict[str, Callable[[Any], Any]] = {
    "params": lambda x: cache.KVCacheStaticParams(x, 64),
    "pool": lambda x: cache.PagePool(x, 16),
    "pool, allocate": lambda x: cache.PagePool(4, 16).allocate(x),
    "columns": lambda x: cache.lookup_table_columns(x),
    "padded_depth": lambda x: cache.padded_depth("bf16", "128B", x),
    "sub tiles": lambda x: cache.kv_num_sub_tiles(64, x),
    "from_dense, lengths": lambda x: cache.from_dense([DENSE], [DENSE], [3, x], page_size=4),
    "from_dense, pages": lambda x: cache.from_dense([DENSE], [DENSE], [3, 4], page_size=4, spare_pages=x),
    "from_dense, tokens": lambda x: cache.from_dense([DENSE], [DENSE], [3, 4], page_size=4, new_tokens=x),
    "pages": lambda x: allocate(num_pages=x),
    "page size": lambda x: allocate(page_size=x),
    "layers": lambda x: allocate(num_layers=x),
    "batch": lambda x: allocate(batch_size=x),
    "length": lambda x: allocate(max_length=x),
    "lengths": lambda x: cache.PagedKVCacheCollection(POOL.blocks, [x], [[3, 0]], 1, 21).cache_length(0),
    "longest": lambda x: cache.PagedKVCacheCollection(POOL.blocks, [20], [[3, 0]], 1, x),
    "layer": lambda x: POOL.get_key_cache(x),
    "batch_idx": lambda x: KEYS.load(x, 0, 0, 0),
    "head": lambda x: KEYS.load(0, x, 0, 0),
    "token": lambda x: KEYS.load(0, 0, x, 0),
    "dim": lambda x: KEYS.load(0, 0, 0, x),
    "width": lambda x: KEYS.load(0, 0, 0, 0, width=x),
    "row": lambda x: KEYS.row_idx(0, x),
    "tma row": lambda x: KEYS.get_tma_row(x),
    "pointer": lambda x: KEYS.block_paged_ptr(0, x, 0),
    "populate": lambda x: KEYS.populate(0, x, BN=16, base_alignment=16),
    "populate, BN": lambda x: KEYS.populate(0, 0, BN=x, base_alignment=16),
    "populate, alignment": lambda x: KEYS.populate(0, 0, BN=16, base_alignment=x),
    "tma, BN": lambda x: KEYS.create_tma_tile("128B", BN=x),
    "gather4": lambda x: KEYS.create_gather4_tma_tile(tile_width=128, tile_height=x),
    "dense": lambda x: cache.TileTensorMHAOperand(np.zeros((2, 5, 1, 8), np.float32)).row_idx(0, x),
    "ragged": lambda x: cache.RaggedMHAOperand(np.zeros((7, 1, 8), np.float32), [0, 3, x]),
    "ragged, token": lambda x: cache.RaggedMHAOperand(np.zeros((7, 1, 8), np.float32), [0, 3, 7]).row_idx(0, x),
}


@pytest.mark.parametrize("rooms", [LAYOUTS, HARDWARE, CACHES], ids=["layout", "hardware", "cache"])
@pytest.mark.parametrize("number", NUMBERS)
def test_documented_exceptions_alone(number: str, rooms: dict[str, Callable[[Any], Any]]) -> None:
    failed = []
    for name, call in rooms.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call(NUMBERS[number])
            except (ValueError, IndexError, cache.OutOfPages) as error:
                if not str(error):
                    failed.append(f"{name}: no message")
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


sizes = st.one_of(st.integers(1, 9), st.sampled_from([(1 << 31) - 1, 1 << 32, 1 << 61, 1 << 63, 1 << 70]))
strides = st.one_of(st.integers(-9, 9), st.sampled_from([1 << 31, -(1 << 33), 1 << 62, -(1 << 62), 1 << 63, 1 << 70]))
coordinates = st.lists(st.one_of(st.integers(0, 40), st.integers(0, (1 << 63) - 1)), min_size=1, max_size=4)


@settings(derandomize=True, max_examples=300)
@given(st.lists(st.tuples(sizes, strides), min_size=1, max_size=3), coordinates)
def test_arrays_give_what_ints_do_or_nothing(modes: list[tuple[int, int]], crd: list[int]) -> None:
    """Offsets and coordinates of arrays equal Python's own of each, which have any number of bits."""
    some, rest = Layout(tuple(n for n, _ in modes), tuple(d for _, d in modes)), (0,) * (len(modes) - 1)
    most = len(modes) * max([n for n, _ in modes] + [abs(c * d) for c in crd for _, d in modes])
    for call in (some, some.idx2crd, lambda x: some(x, *rest)):
        exact = [call(c) for c in crd]
        try:
            got = call(np.array(crd))
        except ValueError as refused:
            if "63 bits" in str(refused) and most >> 63:
                continue
            raise
        parts = got if isinstance(got, tuple) else (got,)
        assert list(zip(*(part.tolist() for part in parts), strict=True)) == [
            c if isinstance(got, tuple) else (c,) for c in exact
        ]


def test_a_tile_that_would_wrap_around_is_refused() -> None:
    """2^62 tiles of four rows of 64 bytes come to 2^70 bytes, 0 where 64 bits are kept."""
    memory = Memory.over(np.arange(128, dtype=np.float32), unsafe=True)
    tensor = TileTensor(memory, "fp32", Layout.row_major(8, 16))
    with pytest.raises(ValueError, match="58 bits from its first"):
        tensor.tile((4, 16), (np.array([1 << 62]), 0))
    with pytest.raises(IndexError, match="58 bits and more"):
        tensor.load_at(np.array([1 << 55]), 0)
    with pytest.raises(ValueError, match="offsets up to 13835058055282163712 of an array"):
        Layout((4, 8), (1 << 62, 1))(FOUR, 0)
    assert Layout((4, 8), (1 << 62, 1))(np.arange(2), 0).tolist() == [0, 1 << 62]
    assert Layout((4, 8), (1 << 62, 1))(3, 0) == 3 << 62


@pytest.mark.parametrize("number", [1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -(1 << 63)])
@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_lengths_and_tables_of_attention(number: int, backend: str) -> None:
    k, v = np.zeros((2, 8, 16, 2, 64), np.float32)
    q, table, lens = np.ones((1, 8, 64), np.float32), np.array([[5, 2, 7]]), np.array([40])
    bad = np.array([number], np.uint64 if number >> 63 > 0 else np.int64)
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is"):
        mha_decode_paged(q, k, v, table, bad, backend=backend)
    with pytest.raises(ValueError, match=r"block_table\[0, 0\] is"):
        mha_decode_paged(q, k, v, np.concatenate([bad, np.array([2, 7], bad.dtype)])[None], lens, backend=backend)
    starts = np.array([0, 4])
    rows = np.ones((4, 2, 192), np.float32), *np.ones((2, 4, 2, 128), np.float32)
    with pytest.raises(ValueError, match="k and v hold 4 keys of sequence 0 from key"):
        mla_prefill_paged(
            *rows, np.zeros((8, 16, 576), np.float32), np.array([[5]]), np.array([4]), starts, starts, k_starts=bad,
            backend=backend,
        )


@pytest.mark.parametrize("number", ["deep", "endless", "10^5000"])
def test_numbers_of_attention(number: str) -> None:
    k, v = np.zeros((2, 8, 16, 2, 64), np.float32)
    call: dict[str, Any] = dict.fromkeys(("scale", "softcap", "mask_value", "num_splits", "window"), NUMBERS[number])
    for name, value in call.items():
        if (name, number) == ("window", "10^5000"):  # a window that sees all
            continue
        with pytest.raises(ValueError, match=name):
            attention.mha_decode_paged(
                np.ones((1, 8, 64), np.float32), k, v, np.array([[5, 2, 7]]), np.array([40]), **{name: value}
            )


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize("value", [np.inf, np.nan, 6e4])
def test_values_without_an_end_give_no_warnings(value: float, backend: Any) -> None:
    """Rests on IEEE 754: sums of infinities are results, as on a GPU; callers turn warnings into errors."""
    q, kv, table = np.ones((2, 2, 16), "f2"), np.ones((4, 4, 1, 16), "f2"), np.arange(4).reshape(2, 2)
    kv[0, 1, :, ::2], kv[0, 2, :, 1:] = value, -value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = mha_decode_paged(q, kv, kv, table, np.array([8, 5]), backend=backend)
    assert np.array_equal(out[1], np.ones((2, 16)))  # the sequence without such keys
    assert np.isfinite(out[0]).all() == np.isfinite(value)
