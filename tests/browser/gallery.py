"""Everything that shows itself, by name: what the browser tests look at.

Each entry makes an object that Jupyter can show: a picture, an object that draws itself, a lockstep run. Every public
``draw_...`` of ``kvlab.viz`` and every class that draws itself must be among them (``test_gallery.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvlab import viz
from kvlab.attention import Explanation, explain, mha_decode_paged, plan
from kvlab.attention.mha_decode.config import DecodeConfig
from kvlab.cache import (
    ContinuousBatchingKVCacheCollection,
    KVCacheStaticParams,
    PagedKVCache,
    PagedKVCacheCollection,
    PagePool,
)
from kvlab.data import load_smollm2
from kvlab.demo import pictures
from kvlab.demo.steps import paged_cache
from kvlab.formats import agree, audit, known_format, kv_budget, transfer
from kvlab.hardware import (
    RegTileLoader,
    SmemDescriptor,
    SubTileLoaderLDS,
    SubTileLoaderLDS_st_8x32,
    TmaDescriptor,
    best_padding,
    coalescing,
    create_kv_tile,
    create_tensor_tile,
    create_tma_tile_gather4,
    get_atom,
    wavefronts,
)
from kvlab.layout import ComposedLayout, Layout, LinearLayout, Swizzle, TileTensor, zipped_divide
from kvlab.layout.encodings import (
    AMDMFMALayout,
    BlockedLayout,
    DotOperandLayout,
    NVMMADistributedLayout,
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
    Hazard,
    Hazards,
    KVBuffer,
    KVBufferParams,
    KVCacheIterator,
    NvidiaKVParams,
    SwizzledTile,
    TiledTensorCore,
    Timeline,
    TmaKVBuffer,
    Traffic,
    WarpSlices,
    mfma_atom,
)
from kvlab.viz import BytePath, CopyPlan, RooflinePoint, plots

__all__ = ["GALLERY", "runs"]

LANE = np.arange(32)
WAVE = np.arange(64)
TILE = SwizzledTile(rows=64, row_bytes=128)
READ = TILE.address(LANE % 8, LANE // 8)
PLAIN = TILE.plain().address(LANE % 8, LANE // 8)
VECTORS = Swizzle(3, 0, 4, "vector")
MMA = get_atom("mma.sync.m16n8k16.bf16")
TABLE = [[5, 2, 9, 0], [7, 1, 0, 0]]
CONFIG = DecodeConfig(BM=16, BN=64, columns=(64, 0), v_columns=(64, 0), row_tiles=1, num_splits=1)
PEERS = (("FA3", 4.2e-4), ("vLLM", 5e-4))


def cache_of(depth: int, keys: int = 100) -> PagedKVCache:
    return PagedKVCache(np.ones((2, 128, 1, depth), as_dtype("bf16")), [keys - 1], [[1, 0]], 1, keys)


def k_params(BN: int = 64, depth: int = 128, **more: Any) -> KVBufferParams:
    return KVBufferParams("bf16", (32, 32, 16), VECTORS, BN, BN, 32, 256, depth, 1, True, **more)


def kv_buffer() -> KVBuffer:
    buffer = KVBuffer(k_params(), cache_of(128), 0, 0, end=100)
    buffer.load_from_dram(0)
    buffer.load_from_dram(1)
    return buffer


def v_buffer() -> KVBuffer:
    params = KVBufferParams("bf16", (16, 16, 32), None, 128, 128, 32, 256, 256, 1, False, num_smem_stages=1)
    buffer = KVBuffer(params, cache_of(256), 0, 0, end=100)
    buffer.load_from_dram(0)
    return buffer


def streaming() -> DecodeStreamingKVBuffer:
    params = KVBufferParams("bf16", (16, 16, 32), None, 128, 32, 32, 256, 128, 1, False)
    buffer = DecodeStreamingKVBuffer(params, cache_of(128), 0, 0, num_keys=100)
    buffer.load_from_dram(1, buffer.iterator().next_tile())
    return buffer


def decode_buffer() -> DecodeKVBuffer:
    core = TiledTensorCore("fp32", "bf16", (16, 16, 32), 1, transpose_b=True)
    params = DecodeKVBufferParams("bf16", Layout.row_major(128, 128), core, None, 128, 32, 32, 128, 256)
    buffer = DecodeKVBuffer(params, cache_of(128), 0, 0, end=100)
    buffer.load_from_dram()
    buffer.copy_to_shared()
    return buffer


def cp_async() -> CpAsyncKVBuffer:
    buffer = CpAsyncKVBuffer(NvidiaKVParams("bf16", 64, 128, 1, True), cache_of(128), 0, 0, end=100)
    buffer.load_from_dram(0)
    return buffer


def tma_buffer() -> TmaKVBuffer:
    buffer = TmaKVBuffer(NvidiaKVParams("bf16", 64, 128, 1, True, arch="sm_90"), cache_of(128), 0, 0, end=100)
    buffer.load_from_dram(0)
    return buffer


def traced(careful: bool) -> tuple[KVBuffer, Traffic, Hazard | None]:
    """Two strips of a tile on gfx950; a careless one reads the second without waiting for it."""
    params = k_params(32, num_smem_stages=1)
    smem = Memory(params.smem_stage_size * 2, space=AddressSpace.SHARED, programs=1)
    traffic = Traffic(timeline=Timeline())
    hazards = Hazards(smem, 4, arch="gfx950", timeline=traffic.timeline)
    buffer = KVBuffer(params, cache_of(128), 0, 0, params.smem_tile(smem), end=32, traffic=traffic, hazards=hazards)
    try:
        buffer.load_from_dram(0)
        if careful:
            hazards.wait_group(0)
            hazards.barrier()
        buffer.load_from_shared(0)
    except Hazard as hazard:
        return buffer, traffic, hazard
    return buffer, traffic, None


def timeline() -> Timeline:
    found = traced(True)[1].timeline
    assert found is not None
    return found


def hazard() -> viz.Picture:
    _, traffic, found = traced(False)
    assert found is not None
    return viz.draw_timeline(traffic.trace(), hazard=found)


def tile_film() -> viz.Picture:
    buffer, traffic, _ = traced(True)
    return viz.draw_tile_film(buffer, traffic.trace(), strip=0, thread=20)


def pipeline() -> viz.Pipeline:
    """Four tiles of K through two stages of cp.async."""
    params = NvidiaKVParams("bf16", 32, 64, 1, True)

    def program(memory: Memory, hazards: Hazards) -> None:
        keys = CpAsyncKVBuffer(params, cache_of(64, 128), 0, 0, 128, memory, smem_address=memory.base, hazards=hazards)
        keys.load_from_dram(0)
        for tile in range(4):
            if tile < 3:
                keys.load_from_dram((tile + 1) % 2)
            hazards.wait_group(int(tile < 3))
            hazards.barrier()
            keys.load_from_shared(tile % 2)
            hazards.barrier()

    return viz.Pipeline(program, 12288, 4, "sm_80")


def hazards_record() -> Hazards:
    """The record of two tiles, with its timeline."""
    smem = Memory(4096, space=AddressSpace.SHARED)
    record = Hazards(smem, 4, timeline=Timeline())
    for stage in (0, 1):
        tile = record.region(2048 * stage, 2048)
        record.write(tile, "k write", stage)
        record.barrier()
        record.read(tile, "k read", stage)
    return record


def continuous() -> ContinuousBatchingKVCacheCollection:
    """A whole block for each of two sequences."""
    blocks = np.zeros((4, 2, 3, 32, 2, 64), np.float32)
    return ContinuousBatchingKVCacheCollection(blocks, [20, 3], [3, 1], max_seq_length=1, max_cache_length=21)


def decode_traffic() -> Traffic:
    """What a small decode step moves."""
    traffic, kv = Traffic(), np.ones((4, 16, 2, 64), as_dtype("bf16"))
    mha_decode_paged(kv[:1, :8, 0], kv, kv, np.array([[2, 0, 3, 1]]), np.array([50]), traffic=traffic)
    return traffic


def explanation(lengths: tuple[int, ...]) -> Explanation:
    """The plan of a decode step."""
    kv = np.zeros((4, 16, 2, 64), np.float32)
    table = np.zeros((len(lengths), 4), np.int32)
    return explain(mha_decode_paged, np.zeros((len(lengths), 8, 64), np.float32), kv, kv, table, np.array(lengths))


def page_pool() -> PagePool:
    """A prompt, a branch of it that has written, and a page that somebody gave back."""
    pool = PagePool(num_pages=10, page_size=4)
    prompt, _ = pool.allocate(10)
    other, _ = pool.allocate(3)
    pool.append(pool.fork(prompt), 3)
    pool.free(other)
    return pool


def quantised_page() -> viz.Picture:
    pool = PagedKVCacheCollection.allocate(
        KVCacheStaticParams(2, 128), num_pages=4, page_size=16, num_layers=1, batch_size=1, max_length=40,
        dtype="fp8", scale_dtype="float32", quantization_granularity=64,
    )
    pool.lookup_table[0, :2] = [3, 0]
    cache = pool.with_lengths([27], 0).get_key_cache(0)
    rng, token, head = np.random.default_rng(0), np.arange(27)[:, None], np.arange(2)
    cache.store(0, head, token, 0, rng.uniform(-400, 400, (27, 2, 128)).astype(as_dtype("fp8")))
    cache.store_scale(0, head, token, 0, rng.uniform(0.001, 0.01, (27, 2, 2)).astype(np.float32))
    return viz.draw_quantised_page(cache, page=1, mark=(5, 70))


def kv_format() -> viz.Picture:
    return viz.draw_format(known_format("mla.584", page_size=4))


def kv_format_row() -> viz.Picture:
    return viz.draw(known_format("mla.656"), row=True)


def kv_agreement() -> viz.Picture:
    sizes = {"pages": 2, "page_size": 8, "heads": 2, "dim": 64}
    found = agree(known_format("vllm.blocks_first", **sizes), known_format("vllm.hnd", **sizes))
    assert viz.draw(found)
    return viz.draw_agreement(found)


def kv_transfer() -> viz.Picture:
    nhd, hnd = (known_format(name, pages=4, heads=4, dim=64) for name in ("vllm.blocks_first", "vllm.hnd"))
    plan = transfer(nhd, hnd, degrees=(2, 8), tokens=50)
    assert viz.draw(plan)
    return viz.draw_transfer(plan)


def kv_audit() -> viz.Picture:
    pages = np.ones((8, 16, 2, 8), np.float16)
    pages[5, 3, 1, 6] = np.nan
    found = audit(pages, [[5, 2, 7], [2, 0, -1]], [40, 20])
    assert viz.draw(found)
    return viz.draw_audit(found)


def kv_budgets() -> viz.Picture:
    budget = kv_budget("nemotron-h-8b", uniform_pages=True)
    assert viz.draw(budget)
    return viz.draw_kv_budget(budget, tokens=1000)


def gather4() -> viz.Picture:
    blocks = np.zeros((6, 2, 1, 16, 1, 576), as_dtype("bf16"))
    cache = PagedKVCacheCollection(blocks, [20], [[1, 0]], 1, 21).get_key_cache(0)
    tile = cache.create_gather4_tma_tile(tile_width=576, tile_height=8, swizzle_mode="128B")
    return viz.draw_gather4(cache, tile, [3, 1, 20, 1, 5, 9, 2, 6])


@cache
def followed() -> BytePath:
    capture = load_smollm2()
    pool = paged_cache(capture, page_size=16)
    return pictures.byte_path(capture, pool, pictures.shown_config(capture), 1, 2, 137, element=37)


def pool() -> PagedKVCacheCollection:
    return PagedKVCacheCollection(np.zeros((10, 2, 1, 16, 1, 64), np.float32), [61, 21], TABLE, 1, 62)


POINTS = [
    RooflinePoint("decode, page 16", 4e9, 1e9, 3.6e-4, "decode", peers=PEERS),
    RooflinePoint("prefill, 4096 keys", 5.5e11, 2.7e8, 8e-4, "prefill"),
    RooflinePoint("append of one token", 1e6, 1e6, 2e-6, "append"),
]
ERRORS = [(1e-4 * (1 + n), 1e-3) for n in range(9)]
TASKS = [
    ("prefill, 4096 keys, causal", {"kvlab": 0.8, "FA3": 0.71, "cuDNN": 0.66}),
    ("decode of 64 sequences", {"kvlab": 0.945, "FA3": 0.95}),
    ("append", {"kvlab": 0.5}),
]


def roofline() -> viz.Picture:
    return viz.draw_roofline(POINTS, bandwidth=3.1e12, compute=7.9e14)


def budget() -> viz.ByteBudget:
    points = (RooflinePoint("decode of 64 sequences", 4e9, 1e9, 3.6e-4), RooflinePoint("prefill", 5.5e11, 2.7e8, 8e-4))
    return viz.ByteBudget(32, 8, 128, bandwidth=3.1e12, compute=7.9e14, shared=2.9e13, points=points)


def shares() -> viz.Picture:
    return viz.draw_shares(TASKS)


def toy_case() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, n, 16)).astype(ml_dtypes.bfloat16) for n in (8, 32, 32))
    return {"q": q, "k": k, "v": v, "lengths": np.array([21, 0, 20], np.int32), "scale": 0.25}


def decode_case() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((1, 1, 8, 64)).astype(ml_dtypes.bfloat16)
    k, v = rng.standard_normal((2, 4, 16, 2, 64)).astype(ml_dtypes.bfloat16)
    table, lens = np.array([[2, 0, 3, 1]], np.int32), np.array([50], np.int32)
    operands = {"q": q, "k_cache": k, "v_cache": v, "block_table": table, "seq_lens": lens}
    return {**operands, "scale": 0.125, "config": CONFIG}


@cache
def runs() -> dict[str, Any]:
    """Lockstep runs: of a whole operation, of two small twins, of twins that differ."""
    from kvlab.mirror import lockstep

    fixtures = str(Path(__file__).parents[1] / "mirror" / "fixtures")
    sys.path.insert(0, fixtures)
    try:
        return {
            "lockstep": lockstep("mha_decode", decode_case()),
            "lockstep, two twins": lockstep("mirror_toy", toy_case()),
            "lockstep that differs": lockstep("mirror_toy", toy_case(), programs=0, emulator={"scale": 0.5}),
        }
    finally:
        sys.path.remove(fixtures)


def run(name: str) -> Any:
    return runs()[name]


ENCODINGS = {
    "encoding, blocked": BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0]),
    "encoding, mma": NVMMADistributedLayout([2, 0], [2, 2], [16, 8]),
    "encoding, operand": DotOperandLayout(0, NVMMADistributedLayout([2, 0], [2, 2], [16, 8]), 2),
    "encoding, mfma": AMDMFMALayout(4, [32, 32, 16], True, [2, 1]),
    "encoding, swizzled": SwizzledSharedLayout(8, 1, 8, [1, 0]),
    "encoding, wgmma": NVMMASharedLayout(128, 16),
    "encoding, padded": PaddedSharedLayout.with_identity_for([[64, 8]], (16, 64), (1, 0)),
}
ATOMS = ("mma.sync.m16n8k16.bf16", "wgmma.m64n16k16.bf16")

GALLERY: dict[str, Callable[[], Any]] = {
    # layouts
    "layout": lambda: Layout("(4,8):(8,1)"),
    "layout, tiles": lambda: viz.draw_layout(zipped_divide(Layout.row_major(8, 16), (4, 8)), tiles=True),
    "array": lambda: viz.draw(np.arange(24).reshape(3, 8)),
    "layout, folded": lambda: viz.draw_layout(Layout.row_major(1500, 1500), mark=(700, 701)),
    "layout inside": lambda: viz.draw_layout(np.arange(16).reshape(4, 4), inside=np.arange(16).reshape(4, 4) % 2 == 0),
    "owners": lambda: viz.draw_layout(
        Layout.row_major(8, 16), owner=np.arange(128).reshape(8, 16) // 4, register=np.arange(128).reshape(8, 16) % 4
    ),
    "composed layout": lambda: ComposedLayout(Layout.row_major(8, 64), Swizzle(3, 3, 3, "bf16")),
    "composed layout, fp32": lambda: viz.draw_composed_layout(
        ComposedLayout(Layout.row_major(32, 32), Swizzle(5, 0, 5, "fp32")), element_bytes=4
    ),
    "swizzle": lambda: Swizzle(3, 4, 3, "byte"),
    "swizzle, fp32": lambda: viz.draw_swizzle(Swizzle(5, 0, 5, "fp32")),
    "linear layout": lambda: viz.draw_linear_layout(LinearLayout.from_atom(MMA, "b", warps=(2, 2))),
    "linear layout, thread": lambda: viz.draw_linear_layout(LinearLayout.from_atom(MMA, "c", warps=(2, 2)), thread=127),
    "linear layout, bits": lambda: viz.draw_linear_layout(LinearLayout.from_atom(MMA, "b", warps=(2, 2)), bits=True),
    "linear layout, small": lambda: LinearLayout({"register": [[0, 1]], "lane": [[0, 2], [1, 0]]}, (2, 4)),
    "thread values": lambda: viz.draw_thread_values(Layout("((4,8),(2,2)):((32,1),(16,8))"), (16, 8), thread=5),
    "tile tensor": lambda: TileTensor.stack_allocation(Layout.row_major(8, 16), "fp32").tile((4, 8), (1, 1)),
    "distributed": lambda: viz.draw_tile_tensor(
        TileTensor.stack_allocation(Layout.row_major(128, 64), "bf16")
        .vectorize(1, 8)
        .distribute(Layout.row_major(16, 8), LANE)
    ),
    **{name: (lambda encoding=encoding: encoding) for name, encoding in ENCODINGS.items()},
    "encoding, thread": lambda: viz.draw_encoding(ENCODINGS["encoding, mma"], thread=3),
    # instructions
    **{f"atom {name}": partial(get_atom, name) for name in ATOMS},
    "atom, lane": lambda: viz.draw_atom(MMA, lane=5),
    "atom, lane of a warpgroup": lambda: viz.draw_atom(get_atom("wgmma.m64n16k16.bf16"), lane=37),
    "atom mfma": lambda: viz.draw_atom(mfma_atom((32, 32, 16), "bf16"), lane=37),
    "atom mfma, all": lambda: mfma_atom((16, 16, 32), "bf16"),
    "punch card": lambda: wavefronts("ldmatrix.x4", READ),
    "punch card, conflicts": lambda: viz.draw_punch_card(wavefronts("ldmatrix.x4", PLAIN)),
    "punch card, masked": lambda: wavefronts("ld.shared.b64", LANE * 8, mask=0x55555555),
    "punch card, gfx950": lambda: wavefronts("ds_read_b128", WAVE % 16 * 256 + WAVE // 16 * 16, arch="gfx950"),
    "cure": lambda: viz.draw_cure(
        wavefronts("ldmatrix.x4", PLAIN), wavefronts("ldmatrix.x4", READ), tiles=(TILE.plain(), TILE)
    ),
    "cure, gfx950": lambda: viz.draw_cure(
        wavefronts("ds_read_b128", WAVE % 16 * 256 + WAVE // 16 * 16, arch="gfx950"),
        wavefronts("ds_read_b128", WAVE * 16, arch="gfx950"),
    ),
    "recognised": lambda: viz.draw_recognised(recognise("0x4000004000010400")),
    "recognised, CuTe": lambda: recognise("Sw<3,3,3> o (8,64):(64,1)", "f16"),
    "cure, found": lambda: best_padding((16, 64), "bf16", "ldmatrix.x4"),
    "one diagonal": lambda: viz.draw_one_diagonal(TILE),
    "one diagonal, pieces of 4 bytes": lambda: viz.draw_one_diagonal(Swizzle(5, 0, 5, "fp32")),
    "one diagonal, small": lambda: viz.draw_one_diagonal(TILE, small=True),
    "one diagonal, gfx950": lambda: viz.draw_one_diagonal(Swizzle(3, 0, 4, "vector"), row_bytes=256, arch="gfx950"),
    "tiles beside": lambda: viz.draw_tiles_beside(TILE, TILE.plain(), names=("swizzled", "plain"), rows=8),
    "tiles beside, gfx950": lambda: viz.draw_tiles_beside(
        TILE, np.stack(np.divmod(np.arange(1024), 16), -1)[: 8 * TILE.rows], names=("swizzled", "halves"), banks=64
    ),
    "coalescing": lambda: coalescing(LANE * 4, 4),
    "coalescing, apart": lambda: viz.draw_coalescing(coalescing(LANE * 4096, 4)),
    "shared memory": lambda: viz.draw_shared_memory(TILE, access=wavefronts("ldmatrix.x4", READ)),
    "shared memory, plain": lambda: viz.draw_shared_memory(TILE.plain(), access=wavefronts("ldmatrix.x4", PLAIN)),
    "shared memory, stages": lambda: viz.draw_shared_memory(
        np.stack(np.divmod(np.arange(128), 8), -1), rules={0: "stage 0", 1024: "stage 1"}
    ),
    "swizzled tile": lambda: viz.draw(TILE),
    "copy plan, lds": lambda: viz.draw(SubTileLoaderLDS("bf16", VECTORS), shape=(32, 32)),
    "copy plan, reg": lambda: viz.draw(RegTileLoader("bf16", Layout.col_major(32, 2)), shape=(32, 64)),
    "copy plan, 8x32": lambda: SubTileLoaderLDS_st_8x32("bf16", BN=64, depth=128, BK=32, num_threads=256),
    "copy plan, registers": lambda: viz.draw(CopyPlan.of(RegTileLoader("bf16", Layout.col_major(32, 2)), (32, 64))),
    "copy plan, cp.async": lambda: viz.draw_copy_plan(
        CopyPlan.of_cp_async(LANE[None] // 8, LANE[None] % 8 * 8, READ[None], (64, 64), "bf16")
    ),
    "tma box": lambda: viz.draw_tma_box(TmaDescriptor.of(np.zeros((64, 128), np.float32), (16, 32), "128B"), (56, 96)),
    "tma descriptor": lambda: TmaDescriptor.of(np.zeros((32, 64), np.float16), (16, 64), "128B"),
    "tma tile": lambda: create_tensor_tile(np.zeros((32, 64), np.float16), (16, 64), "128B"),
    "tma kv tile": lambda: viz.draw_tma_box(create_kv_tile(np.zeros((64, 2, 128), np.float16), 16, 128), (32, 1, 0)),
    "tma gather": lambda: create_tma_tile_gather4(np.zeros((64, 64), np.float16), 64, "128B"),
    "descriptor": lambda: viz.draw_descriptor(SmemDescriptor(0x4000, 2048, 1024, "64B", base_offset=5)),
    "descriptor, plain": lambda: SmemDescriptor(0x4020, 16, 1024, "128B"),
    # caches and staging
    "page table": lambda: viz.draw_page_table(TABLE, [62, 22], 16, pages=10, token=(1, 18), names=["prompt", "answer"]),
    "page table of a pool": lambda: viz.draw(pool()),
    "page table of a cache": lambda: viz.draw(pool().get_key_cache(0)),
    "page pool": page_pool,
    "continuous cache": lambda: continuous().get_key_cache(0),
    "continuous collection": continuous,
    "traffic": decode_traffic,
    "traffic, drawn": lambda: viz.draw_traffic(decode_traffic()),
    "explanation": lambda: explanation((40, 50, 9)),
    "explanation, drawn": lambda: viz.draw_explanation(Explanation("merge_states", "triton", "a GPU", None, (700,))),
    "hazards": hazards_record,
    "quantised page": quantised_page,
    "KV format": kv_format,
    "row of a KV format": kv_format_row,
    "two KV formats": kv_agreement,
    "KV transfer": kv_transfer,
    "KV audit": kv_audit,
    "KV budget": kv_budgets,
    "gather4": gather4,
    "kv buffer": kv_buffer,
    "kv buffer, read": lambda: viz.draw_kv_buffer(kv_buffer(), read=(0, 1), stage=0),
    "kv buffer, V": v_buffer,
    "kv buffer, slices": lambda: viz.draw_kv_buffer(WarpSlices(v_buffer(), 4), read=(0, 2), warp=3),
    "kv buffer, streaming": streaming,
    "kv buffer, decode": decode_buffer,
    "kv buffer, cp.async": cp_async,
    "kv buffer, tma": tma_buffer,
    "kv tile": lambda: KVCacheIterator(cache_of(64, 27), 64, 0, 0, 27).next_tile(),
    "kv tile, drawn": lambda: viz.draw_kv_tile(KVCacheIterator(cache_of(64), 64, 0, 0, 100).next_tile()),
    "fragment map": lambda: viz.draw_fragment_map(kv_buffer().fragment_map(), thread=37, axes=("key", "depth")),
    "fragment map, V": lambda: v_buffer().fragment_map(),
    "pipeline": pipeline,
    "pipeline without a wait": lambda: viz.draw_pipeline(pipeline(), without=3),
    "tile film": tile_film,
    "timeline": timeline,
    "timeline, hazard": hazard,
    # the whole way
    "path of a byte": lambda: viz.draw(followed()),
    "path of a byte, drawn": lambda: viz.draw_path_of_a_byte(followed()),
    "roofline": roofline,
    "shares": shares,
    "schedule": lambda: viz.draw_schedule(plan([9000, 300, 0, 700, 1500], q_heads=8, kv_heads=2, programs=40)),
    "schedule of a mixed batch": lambda: plan([9000, 300, 700], [1, 4, 300], q_heads=8, kv_heads=2, programs=40),
    "schedule of many": lambda: plan(range(1, 5000, 3), q_heads=16, kv_heads=1),
    # charts by matplotlib
    "plot, roofline": lambda: plots.plot_roofline(POINTS, bandwidth=3.1e12, compute=7.9e14).picture,
    "plot, ratios": lambda: plots.plot_ratios(TASKS).picture,
    "plot, errors": lambda: plots.plot_errors({"emulator": ERRORS, "Triton": [(5e-3, 1e-3)]}).picture,
    "plot, context": lambda: plots.plot_context(budget()).picture,
    "plot, schedule": lambda: plots.plot_schedule(plan([9000, 300, 700], q_heads=8, kv_heads=2, programs=40)).picture,
    # views of HTML, and a run as a picture
    "byte budget": budget,
    "errors": lambda: viz.draw_errors({"emulator": [(1e-4, 1e-3), (3e-4, 1e-3)], "Triton": [(5e-3, 1e-3)]}),
    "byte budget, plain": lambda: viz.draw_byte_budget(budget(), batch=1, context=1 << 16, swizzled=False),
    "scroll of a byte": lambda: viz.ByteScroll(followed(), np.float16(0.5), run("lockstep")),
    **{name: partial(run, name) for name in ("lockstep", "lockstep, two twins", "lockstep that differs")},
    "lockstep, drawn": lambda: viz.draw_lockstep(run("lockstep that differs")),
}
