"""A picture costs what it shows, never what it folds: huge objects of every kind are drawn at once.

Rests on the clock of this process. The bound is 0.2 s; a shared and loaded machine gets five times that, which hides
nothing: what looks at everything that it folds takes minutes here, or more memory than there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import Explanation, plan
from kvlab.cache import ContinuousBatchingKVCacheCollection, PagedKVCache, PagedKVCacheCollection, PagePool
from kvlab.common.drawn import _names
from kvlab.formats import agree, audit, known_format, kv_budget, transfer
from kvlab.hardware import (
    RegTileLoader,
    SmemDescriptor,
    SubTileLoaderLDS,
    SubTileLoaderLDS_st_8x32,
    TmaDescriptor,
    best_padding,
    coalescing,
    create_tensor_tile,
    create_tma_tile_gather4,
    get_atom,
    wavefronts,
)
from kvlab.layout import ComposedLayout, Layout, LinearLayout, Swizzle, TileTensor, zipped_divide
from kvlab.layout.encodings import (
    AMDMFMALayout,
    BlockedLayout,
    NVMMASharedLayout,
    PaddedSharedLayout,
    SwizzledSharedLayout,
)
from kvlab.memory import AddressSpace, Memory, as_dtype
from kvlab.rosetta import recognise
from kvlab.staging import (
    CpAsyncKVBuffer,
    DecodeKVBuffer,
    DecodeKVBufferParams,
    DecodeStreamingKVBuffer,
    FragmentMap,
    Hazards,
    KVBuffer,
    KVBufferParams,
    KVCacheIterator,
    NvidiaKVParams,
    SwizzledTile,
    TiledTensorCore,
    Timeline,
    Traffic,
)
from kvlab.viz import PICTURES, ByteBudget, BytePath, CopyPlan, Pipeline, draw, draw_shared_memory

LIMIT = 0.2 * 5


def seconds(shown: Any, **how: Any) -> float:
    """CPU time of one picture in HTML: the second one, so that no import counts."""
    draw(shown, **how)
    start = time.process_time()
    text = draw(shown, **how).inline
    spent = time.process_time() - start
    assert len(text) < 1_000_000
    return spent


def bits(count: int, first: list[int]) -> list[list[int]]:
    return [[step << bit for step in first] for bit in range(count)]


def tensor() -> TileTensor:
    """2**28 elements that lie over one another, in little memory."""
    return TileTensor(Memory(1 << 16), "bf16", Layout((1 << 14, 1 << 14), (1, 1)))


def dense() -> TileTensor:
    return TileTensor.stack_allocation(Layout.row_major(2048, 8192), "bf16")


def timeline() -> Timeline:
    line = Timeline()
    for k in range(100_000):
        line.add("copy", "k copy", k % 4, (0, 1), 4096)
        line.add("landed", "k copy", k % 4, (0, 1), 4096)
        line.add("read", "k read", k % 4, (0, 1), 4096)
    return line


def pages() -> PagePool:
    found = PagePool(num_pages=1 << 20, page_size=16)
    found.allocate(1 << 22)
    return found


def pipeline() -> Pipeline:
    """A hundred tiles through one stage."""

    def program(memory: Memory, hazards: Hazards) -> None:
        tile = hazards.region(0, 256)
        for _ in range(100):
            hazards.copy_async(tile, "k copy", 0)
            hazards.commit_group()
            hazards.wait_group(0)
            hazards.barrier()
            hazards.read(tile, "k read", 0)
            hazards.barrier()

    return Pipeline(program, nbytes=256, warps=2)


def pool(sequences: int = 1 << 12, columns: int = 32) -> PagedKVCacheCollection:
    table = np.arange(sequences * columns).reshape(sequences, columns)
    blocks = np.zeros((table.size, 2, 1, 16, 1, 1), np.int8)
    return PagedKVCacheCollection(blocks, np.full(sequences, 16 * columns - 12), table, 1, 16 * columns)


def continuous() -> ContinuousBatchingKVCacheCollection:
    sequences = 1 << 14
    blocks = np.zeros((sequences, 2, 1, 16, 1, 1), np.int8)
    return ContinuousBatchingKVCacheCollection(blocks, np.full(sequences, 9), np.arange(sequences), 1, 10)


def counted() -> Traffic:
    found = Traffic()
    found.move("DRAM->SMEM", 1 << 50)
    found.access("K read", wavefronts=1 << 40, ideal=1 << 40, unswizzled=1 << 43)
    return found


def fragments() -> FragmentMap:
    thread, register, element = np.arange(1024)[:, None, None], np.arange(2)[:, None], np.arange(8)
    return FragmentMap((1 << 16, 1 << 16), thread * 4 + register + 0 * element, 0 * thread + register * 8 + element)


def cache(keys: int, depth: int) -> PagedKVCache:
    blocks = np.zeros((keys // 128, 128, 1, depth), as_dtype("bf16"))
    return PagedKVCache(blocks, [keys - 1], [np.arange(keys // 128)], 1, keys)


def kv_params(**more: Any) -> KVBufferParams:
    return KVBufferParams("bf16", (16, 16, 32), None, 128, 32, 32, 256, 256, 1, **more)


def staged_params() -> DecodeKVBufferParams:
    core = TiledTensorCore("fp32", "bf16", (16, 16, 32), 1, transpose_b=True)
    return DecodeKVBufferParams("bf16", Layout.row_major(128, 256), core, None, 128, 32, 32, 256, 256)


def path(size: int) -> BytePath:
    return BytePath(
        name="K", sequence=0, token=17, head=0, element=3, element_bytes=2, page_table=tuple(range(1000)),
        page_size=size, depth=size, dram_byte=4230, tile=(size, size), tile_at=(17, 3), shared_byte=2198,
        plain_byte=2182, warp=2, lane=5, register=1, lanes=size, registers=size, atom="mma", shape=(size, size, size),
        operand="b", operand_at=(3, 1),
    )


def half(tile: TileTensor) -> TileTensor:
    return tile.tile((1024, 4096), (1, 1))


HUGE: dict[str, Callable[[], Any]] = {
    "layout": lambda: Layout((1500, 1500)),
    "layout 1e8": lambda: Layout((10_000, 10_000)),
    "layout 2**31": lambda: Layout(1 << 31),
    "layout 2**62": lambda: Layout(((1 << 20, 1 << 20), (1 << 11, 1 << 10)), ((1 << 20, 1), (1 << 40, 1 << 51))),
    "layout that overlaps": lambda: Layout(((1 << 10, 1 << 10), (1 << 5, 1 << 10)), ((3, 5), (7, 11))),
    "composed": lambda: ComposedLayout(Layout((1 << 20, 1 << 20)), Swizzle(3, 4, 3, "byte")),
    "composed layouts": lambda: ComposedLayout(Layout((1 << 15, 1 << 15)), Layout((1 << 15, 1 << 15), (7, 3)), 5),
    "array": lambda: np.broadcast_to(np.zeros(1, np.int64), (30_000, 30_000)),
    "array of rank 4": lambda: np.broadcast_to(np.zeros(1, np.int8), (300, 300, 300, 300)),
    "swizzle": lambda: Swizzle(20, 4, 20, "byte"),
    "linear, held": lambda: LinearLayout(
        {"register": bits(10, [0, 1]) + bits(10, [1 << 8, 0]), "lane": bits(5, [1, 0]), "warp": bits(3, [1 << 5, 0])},
        (1 << 18, 1 << 10),
    ),
    "linear, stored": lambda: LinearLayout({"offset": bits(12, [0, 1]) + bits(12, [1, 0])}, (1 << 12, 1 << 12)),
    "linear, offsets": lambda: LinearLayout(
        {"dim0": bits(14, [1 << 14]), "dim1": bits(14, [1])}, {"offset": 1 << 28}
    ),
    "blocked": lambda: BlockedLayout([1024, 1024], [8, 4], [4, 8], [1, 0]),
    "mfma": lambda: AMDMFMALayout(4, [32, 32, 16], True, [8, 8]),
    "swizzled shared": lambda: SwizzledSharedLayout(8, 64, 1024, [1, 0]),
    "wgmma shared": lambda: NVMMASharedLayout(128, 16),
    "padded": lambda: PaddedSharedLayout.with_identity_for([[1 << 6, 8]], (256, 256), (1, 0)),
    "tensor": tensor,
    "tile": lambda: half(dense()),
    "vectors of a tile": lambda: half(dense()).vectorize(1, 8),
    "distributed": lambda: dense().vectorize(1, 8).distribute(Layout.row_major(16, 8), np.arange(128)),
    "distributed tile": lambda: half(dense()).distribute(Layout.row_major(8, 4), np.arange(32)),
    "tile that overlaps": lambda: tensor().tile((1 << 13, 1 << 13), (1, 1)),
    "recognised": lambda: recognise("Sw<3,4,3> o (65536,65536):(65536,1)", "bf16"),
    "page pool": pages,
    "pipeline": pipeline,
    "hazards": lambda: Hazards(Memory(4096, space=AddressSpace.SHARED), 4, timeline=timeline()),
    "byte budget": lambda: ByteBudget(1 << 20, 1 << 10, 1 << 10, bandwidth=3.1e12, compute=7.9e14, shared=2.9e13),
    "cure": lambda: best_padding((512, 512), "bf16", "ldmatrix.x4"),
    "wavefronts": lambda: wavefronts("ds_read_b128", np.arange(64) * 4096, arch="gfx950"),
    "coalescing": lambda: coalescing(np.arange(32) * (1 << 40), 4),
    "atom": lambda: get_atom("wgmma.m64n256k16.bf16"),
    "tma": lambda: TmaDescriptor.of(np.zeros((1 << 13, 1 << 12), np.float16), (256, 64), "128B"),
    "tma tile": lambda: create_tensor_tile(np.zeros((1 << 13, 1 << 12), np.float16), (256, 1 << 12), "128B"),
    "tma gather": lambda: create_tma_tile_gather4(np.zeros((4096, 4096), np.float16), 4096, "128B", tile_height=1024),
    "descriptor": lambda: SmemDescriptor(0x4000, 16, 1024, "128B"),
    "loader 8x32": lambda: SubTileLoaderLDS_st_8x32("bf16", BN=1024, depth=1024, BK=32, num_threads=256),
    "copy plan": lambda: CopyPlan(
        "mine", (1 << 20, 1 << 20), "bf16", np.arange(1 << 17).reshape(-1, 64), np.zeros((1 << 11, 64), int), 8,
        16 * np.arange(1 << 17).reshape(-1, 64),
    ),
    "path": lambda: path(1 << 20),
    "pool": pool,
    "pool of very many": lambda: pool(1 << 14, 128),
    "cache": lambda: pool().get_key_cache(0),
    "kv buffer": lambda: KVBuffer(
        kv_params(transpose=False, num_smem_stages=1), cache(1 << 17, 256), 0, 0, end=1 << 17
    ),
    "streaming buffer": lambda: DecodeStreamingKVBuffer(
        kv_params(transpose=False), cache(1 << 17, 256), 0, 0, num_keys=1 << 17
    ),
    "decode buffer": lambda: DecodeKVBuffer(staged_params(), cache(1 << 17, 256), 0, 0, end=1 << 17),
    "cp.async buffer": lambda: CpAsyncKVBuffer(
        NvidiaKVParams("bf16", 256, 128, 1, True), cache(1 << 17, 128), 0, 0, end=1 << 17
    ),
    "fragment map": fragments,
    "kv tile": lambda: KVCacheIterator(cache(1 << 19, 64), 1 << 18, 0, 0, 1 << 19).next_tile(),
    "timeline": timeline,
    "swizzled tile": lambda: SwizzledTile(1 << 40, 1 << 10),
    "KV format": lambda: known_format("max.continuous", pages=1 << 20, page_size=1 << 17),
    "agreement of KV formats": lambda: agree(
        known_format("max.paged", layers=80, pages=1 << 20), known_format("trtllm.pool", layers=80, pages=1 << 20)
    ),
    "transfer": lambda: transfer(
        *[known_format("max.paged", pages=16, page_size=64, heads=128, dim=64)] * 2, degrees=(256, 128)
    ),
    "KV budget": lambda: kv_budget({"num_hidden_layers": 4096, "num_attention_heads": 1 << 9, "head_dim": 1 << 9}),
    "audit": lambda: audit(np.ones((1 << 14, 1 << 8, 1, 1), np.float16), np.arange(1 << 14)[None], [1 << 22]),
    "KV format whose pages lie apart": lambda: known_format("vllm.BHLNC", layers=80, pages=1 << 20, page_size=1 << 10),
    "continuous collection": continuous,
    "continuous cache": lambda: continuous().get_key_cache(0),
    "traffic": counted,
    "explanation": lambda: Explanation("mha_prefill", "triton", "a GPU", None, (1 << 16, 1 << 15, 64)),
    "schedule": lambda: plan(np.arange(4096) * 250, q_heads=64, kv_heads=8, programs=4096),
}
HOW: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "layout with a mark": (lambda: Layout((1 << 30, 1 << 30)), {"mark": (1 << 29, 12345), "element_bytes": 2}),
    "tiles": (lambda: zipped_divide(Layout.row_major(1 << 15, 1 << 15), (1 << 10, 1 << 10)), {"tiles": True}),
    "loader to LDS": (lambda: SubTileLoaderLDS("bf16", Swizzle(3, 0, 4, "vector")), {"shape": (1024, 32)}),
    "loader to registers": (lambda: RegTileLoader("bf16", Layout.col_major(32, 2)), {"shape": (1024, 512)}),
    "a thread": (HUGE["linear, held"], {"thread": 77}),
}
APART = {"kvlab.mirror:Lockstep", "kvlab.viz:ByteScroll"}
"""Their pictures are two source files: there is no large one."""


@pytest.mark.timing
@pytest.mark.parametrize("name", HUGE)
def test_huge_objects_are_drawn_at_once(name: str) -> None:
    assert seconds(HUGE[name]()) < LIMIT


@pytest.mark.timing
@pytest.mark.parametrize("name", HOW)
def test_and_with_options(name: str) -> None:
    make, how = HOW[name]
    assert seconds(make(), **how) < LIMIT


@pytest.mark.timing
def test_a_large_image_of_shared_memory() -> None:
    slots = np.broadcast_to(np.zeros(2, np.int32), (1 << 15, 1 << 15, 2))
    draw_shared_memory(slots[:1, :8])
    start = time.process_time()
    picture = draw_shared_memory(slots, addresses=[1 << 33], lane_bytes=16)
    assert time.process_time() - start < LIMIT
    assert f">{1 << 33}<" in picture.svg


def test_every_kind_that_has_a_picture_is_among_them() -> None:
    made = [type(make()) for make in HUGE.values()] + [type(make()) for make, _ in HOW.values()]
    bases = {base for cls in made for base in cls.__mro__}
    names = [name for _, classes in PICTURES.values() for name in classes.split()]
    without = {name for name in names if not any(_names(name, base) for base in bases)}
    assert without - APART == set()


EXTENTS = st.integers(0, 24).map(lambda bit: 1 << bit) | st.integers(1, 100_000)
MODE = st.tuples(EXTENTS, st.integers(-(1 << 30), 1 << 30))


@pytest.mark.timing
@settings(max_examples=60)
@given(st.lists(MODE, min_size=1, max_size=2), st.lists(MODE, min_size=1, max_size=2), st.sampled_from([None, 2, 4]))
def test_any_layout_is_drawn_at_once(down: list[Any], across: list[Any], element_bytes: int | None) -> None:
    shape, stride = (tuple(tuple(pair[k] for pair in mode) for mode in (down, across)) for k in (0, 1))
    assert seconds(Layout(shape, stride), element_bytes=element_bytes) < LIMIT
