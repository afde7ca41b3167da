"""KVBuffer and WarpSlices. Rest on the gfx950 kernels compiled by MAX and followed lane by lane
(tests/data/kvbuffer_trace_kvbuffer.json.gz, kvbuffer_members.json)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from registers import held

from kvlab.cache import PagedKVCache, from_dense
from kvlab.hardware import buffer_resource
from kvlab.layout import Swizzle, TileTensor
from kvlab.memory import AddressSpace, Memory, OutOfBounds, as_dtype, bfloat16
from kvlab.staging.max.kv_buffer import KVBuffer
from kvlab.staging.max.kv_buffer_addresses import kv_buffer_dma_plan
from kvlab.staging.max.params import KVBufferParams
from kvlab.staging.max.warp_slices import WarpSlices
from kvlab.staging.record.traffic import Traffic

SW304, SW303 = Swizzle(3, 0, 4, "vector"), Swizzle(3, 0, 3, "vector")
OPTIONAL = ("cache_depth", "head_dim_offset", "reg_chunk_depth", "smem_depth", "reg_chunk_keys", "bk_smem")


def params_of(i: dict[str, Any], dtype: Any) -> KVBufferParams:
    """The buffer that moves the tile, from a golden case."""
    sizes = {name: i[name] for name in ("BN", "WN", "BK", "num_threads", "depth", "kv_num_heads")}
    optional = {name: i[name] for name in (*OPTIONAL, "num_smem_stages") if name in i}
    K, full_kv = bool(i["transpose"]), bool(i.get("full_kv", 1))
    if "depth_per_warp" in i:  # the tile is V's own, or K's
        K = bool(i["v_in_k_memory"])
        sizes["WN"] = i["WN"] if K else i["BN"]
        optional |= {"smem_depth": i["depth"], "num_smem_stages": 1}
    return KVBufferParams(dtype, i["mma_shape"], i["swizzle"], **sizes, transpose=K, full_kv=full_kv, **optional)


def quietly(make: Callable[..., KVBuffer], *args: Any, **kwargs: Any) -> KVBuffer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return make(*args, **kwargs)


def run(i: dict[str, Any], params: KVBufferParams, operand: Any) -> tuple[Any, ...]:
    """LDS image, registers ``[threads, *]``, DMA and traffic of a golden case, with one piece of the tags."""
    cache = PagedKVCache(operand, [0], [[0]], 1, i["end"])
    nbytes = params.num_smem_stages * params.smem_stage_size * params.dtype.itemsize
    smem, traffic = Memory(nbytes, space=AddressSpace.SHARED, programs=1, unsafe=True), Traffic()
    place = params.smem_tile(smem)
    buffer = quietly(KVBuffer, params, cache, i["batch"], i["kv_head"], place, end=i["end"], traffic=traffic)
    dma = []
    for stage in range(params.num_smem_stages):
        dma += dma_of(buffer, stage)
        buffer.load_from_dram(stage)
    reader = quietly(WarpSlices, buffer, i["BN"] // i["WN"], i["output_depth"]) if "depth_per_warp" in i else buffer
    registers = []
    for stage in range(reader.params.num_smem_stages) if params.full_kv else ():
        for strip in range(reader.num_k_tiles) if i.get("strip_by_strip") else (None,):
            registers.append(held(reader.load_from_shared(stage, strip))[0])
            if i.get("zero_partial_tile_pad"):
                reader.zero_partial_tile_pad()
                registers[-1] = np.array(reader.kv_mma_op.reg_tile)[0]
    image = smem.image(params.dtype)[0, : nbytes // params.dtype.itemsize]
    shape = (params.num_threads, -1)
    return image, np.stack(registers, axis=1).reshape(shape) if registers else np.zeros(0, params.dtype), dma, traffic


def dma_of(buffer: KVBuffer, stage: int) -> list[tuple[int, ...]]:
    """Wave, LDS base, end of the resource and address of every lane of each instruction of the next load."""
    p, walk = buffer.params, buffer.kv_cache_iter
    start = walk.tile_start_row
    tile, plan = walk.next_tile(), kv_buffer_dma_plan(p)
    walk.tile_start_row = start
    base, voffset, records = buffer_resource(tile, plan.row, plan.col)
    lds = plan.offset * p.dtype.itemsize + buffer.stage_address(stage)
    ends = np.broadcast_to((base + records)[0, :, :1], (len(lds), 1))
    columns = [plan.wave[:, None], lds[:, None], ends, base[0] + voffset]
    return list(map(tuple, np.concatenate(columns, axis=1).tolist()))


def golden_dma(dma: dict[str, np.ndarray[Any, Any]]) -> list[tuple[int, ...]]:
    address = (dma["resource_base"] + dma["soffset"])[:, None] + dma["voffset"]
    ends = dma["resource_base"] + dma["num_records"]
    return list(map(tuple, np.column_stack([dma["wave"], dma["lds_base"], ends, address]).tolist()))


def test_dma_lds_image_and_registers_equal_compiled_max(kvbuffer_trace: dict[str, Any], tags: Any) -> None:
    """Every DMA instruction, byte of shared memory and register of every lane."""
    i, expected = kvbuffer_trace["inputs"], kvbuffer_trace["expected"]
    tag = tags(i["dtype"])
    params = params_of(i, tag.dtype)
    images, registers, dma, traffic = zip(
        *(run(i, params, piece) for piece in tag.operand(i["operand_shape"])), strict=True
    )
    assert sorted(dma[0]) == sorted(golden_dma(expected["dma"]))
    np.testing.assert_array_equal(tag.join(images), tag.unknown(expected["lds_after_load_from_dram"]))
    np.testing.assert_array_equal(tag.join(registers), tag.unknown(expected["regs_per_thread"]))
    issued = traffic[0].per_warp("instructions", f"{params.role} dma")
    assert issued.tolist() == np.bincount(expected["dma"]["wave"], minlength=params.num_warps).tolist()
    if not i["transpose"]:
        assert traffic[0].instructions["v read"] == expected["n_tr16"] + expected["n_tr8"]


def test_members_equal_compiled_max(golden: Callable[[str], list[dict[str, Any]]]) -> None:
    cases = [case for case in golden("kvbuffer_members.json") if case["op"] == "KVBuffer"]
    for case in cases:
        i = dict(case["inputs"])
        assert i.pop("warp_size") == 64
        i["swizzle"] = None if i["swizzle"] is None else Swizzle(*i["swizzle"], "vector")
        params = KVBufferParams(**i)
        cache = PagedKVCache(np.zeros((1, 1, 2, i["depth"]), params.dtype), [0], [[0]], 1, 1)
        buffer = quietly(KVBuffer, params, cache, 0, 0, end=1)
        for name, wanted in case["expected"].items():
            for holder, attribute in ((buffer, name), (params, name.lstrip("_"))):
                got = getattr(holder, attribute)
                if isinstance(wanted, dict):
                    got = {"shape": list(got.shape), "stride": list(got.stride)}
                assert got == (tuple(wanted) if isinstance(wanted, list) else wanted), (case["id"], name)
    assert len(cases) == 16


BASE: dict[str, Any] = {
    "dtype": "bf16", "mma_shape": (32, 32, 16), "swizzle": SW304, "BN": 64, "WN": 64, "BK": 32, "num_threads": 256,
    "depth": 64, "kv_num_heads": 1, "transpose": True, "num_smem_stages": 1,
}


def keys_of(p: KVBufferParams, rows: int = 256) -> np.ndarray[Any, Any]:
    """Small numbers, none of them zero: ``[1, rows, heads, cache_depth]``."""
    shape = (1, rows, p.kv_num_heads, p.cache_depth)
    return (np.random.default_rng(0).integers(1, 9, shape)).astype(p.dtype)


def buffer_of(p: KVBufferParams, end: Any = 256, **kwargs: Any) -> KVBuffer:
    return KVBuffer(p, PagedKVCache(keys_of(p), [0], [[0]], 1, 256), 0, 0, end=end, **kwargs)


@pytest.mark.parametrize("BN,warps,lost", [(64, 8, "block 1"), (32, 4, "block 1"), (64, 2, "rows 32")])
def test_one_tile_a_warp_is_reproduced_and_warned_about(BN: int, warps: int, lost: str) -> None:
    """MAX's warp tiles: depth 64 and BN <= 64 give warp w tile (w // 2, w % 2), however many warps there are."""
    p = KVBufferParams(**{**BASE, "BN": BN, "WN": BN, "num_threads": 64 * warps})
    blocks = Memory(2 * p.smem_stage_size * 2, space=AddressSpace.SHARED, programs=1)
    with pytest.warns(UserWarning, match=f"take exactly {BN // 16} warps"):
        k = buffer_of(p, smem_tile=p.smem_tile(blocks))
    k.load_from_dram(0)
    assert blocks.written is not None
    rows, image = BN * 32, k.smem.image(p.dtype)[0].astype(np.float32)
    if lost == "rows 32":
        assert blocks.written[0].reshape(-1, 64)[: 2 * BN].all(axis=1).tolist() == 2 * ([True] * 32 + [False] * 32)
    else:
        assert (image[:rows] != 0).all()
        assert (image[rows : 2 * rows] == 0).all()  # zeros of rows past the tile
        assert blocks.written[0].sum() > 2 * rows * 2  # and more of them behind the stage
        with pytest.warns(UserWarning, match="take exactly"), pytest.raises(OutOfBounds):
            buffer_of(p).load_from_dram(0)
    with pytest.raises(ValueError, match="does not bring the matrix to the lanes"):
        k.fragment_map()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert buffer_of(replace(p, num_threads=BN * 4)).matrix_order


def test_slices_inside_a_swizzled_block_warn_and_what_they_name_works() -> None:
    """MAX's kernels: in K's memory the swizzle counts from the shifted base."""
    p = KVBufferParams(
        **{**BASE, "mma_shape": (16, 16, 32), "swizzle": SW303, "BN": 128, "WN": 32, "depth": 64, "kv_num_heads": 1}
    )
    k = buffer_of(p)
    with pytest.warns(UserWarning, match="slices of 16 columns need swizzle=None"):
        assert not WarpSlices(k, 4).matrix_order
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert WarpSlices(buffer_of(p.unswizzled()), 4).matrix_order
        assert WarpSlices(k, 2).matrix_order
    with pytest.raises(ValueError, match="moves the tile"):
        WarpSlices(k, 2).load_from_dram(0)
    with pytest.raises(ValueError, match="num_warps_n is 3: must be at most the 4 warps and divide output_depth 64"):
        WarpSlices(k, 3)


@pytest.mark.parametrize(
    "change,says",
    [
        ({"swizzle": SW304, "mma_shape": (16, 16, 32), "WN": 32}, "repeats within the 64 vectors of 16 rows"),
        ({"transpose": False}, "2-byte V of 32x32x16 needs swizzle=None"),
        ({"full_kv": False, "depth": 128}, 'full_kv=True holds all, follows="document" brings block after block'),
    ],
)
def test_what_cannot_be_meant_warns(change: dict[str, Any], says: str) -> None:
    with pytest.warns(UserWarning, match=says):
        buffer_of(KVBufferParams(**{**BASE, **change}))


def test_full_kv_false_moves_the_first_columns_of_tile_after_tile() -> None:
    """MAX's stage: columns [0, bk_smem) of keys 0..63, then of keys 64..127; one strip in a stage."""
    p = KVBufferParams(**{**BASE, "full_kv": False, "depth": 128, "num_smem_stages": 2, "head_dim_offset": 0})
    k = quietly(buffer_of, p)
    for stage in (0, 1):
        k.load_from_dram(stage)
        k.load_from_shared(stage, 0)
        got = k.fragment_map().gather(k.strip_tile(0))[0]
        np.testing.assert_array_equal(got, keys_of(p)[0, stage * 64 :][:64, 0, :32])
    with pytest.raises(ValueError, match="bk_tile is 1: must be one of the 1 strips in a stage"):
        k.load_from_shared(0, 1)
    with pytest.raises(ValueError, match="load them one by one"):
        k.load_from_shared(0)


@pytest.mark.parametrize("num_smem_stages", [1, 2, 3])
def test_the_document_brings_block_after_block(num_smem_stages: int) -> None:
    """Of full_kv=False: all blocks of a key tile, then those of the next one; every strip of K is in its registers."""
    what = {"full_kv": False, "depth": 128, "num_smem_stages": num_smem_stages, "follows": "document"}
    p, traffic = KVBufferParams(**{**BASE, **what}), Traffic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        k = buffer_of(p, end=100, traffic=traffic)
    keys = np.zeros((128, 128), p.dtype)
    keys[:100] = keys_of(p)[0, :100, 0]
    for load in range(8):
        (tile, block), stage = divmod(load, 4), load % num_smem_stages
        k.load_from_dram(stage)
        k.load_from_shared(stage, bk_tile=block)
        part = keys[64 * tile :][:64, 32 * block :][:, :32]
        assert k.fragment_map().gather(k.strip_tile(block))[0].tobytes() == part.tobytes()
        image = k.smem_image().stage(stage)
        rows, columns = image.slots[image.slots[:, 0] >= 0].T
        assert set(columns) == set(range(4 * block, 4 * block + 4))  # vectors of 8 columns
        assert np.unique(rows).size == min(64, 100 - 64 * tile)
        assert f"block {block}: columns {32 * block}–{32 * block + 31}" in k.smem_image().areas[stage].words
        with pytest.raises(ValueError, match=f"bk_tile is {(block + 1) % 4}: must be in stage {stage}: {block}"):
            k.load_from_shared(stage, (block + 1) % 4)
    assert traffic.moved["DRAM->SMEM"] == 100 * 128 * 2


@pytest.mark.parametrize("warps", [4, 5, 8])
@pytest.mark.parametrize("BN,depth", [(32, 128), (64, 576), (128, 576), (128, 128)])
@pytest.mark.parametrize("full_kv", [True, False])
def test_instructions_that_a_wait_counts(BN: int, depth: int, full_kv: bool, warps: int) -> None:
    """The document's formula, and 0 of what compiled kernels do where tiles do not divide evenly."""
    change = {"BN": BN, "WN": BN, "depth": depth, "num_threads": 64 * warps, "full_kv": full_kv}
    p = KVBufferParams(**{**BASE, **change})
    tiles = BN // 32 * (depth // 32 if full_kv else 1)
    assert replace(p, follows="document").vm_instrs_per_load == -(-tiles // warps) * 2
    assert p.vm_instrs_per_load == (-(-tiles // warps) * 2 if tiles % warps == 0 else 0)


def test_what_parameters_may_follow() -> None:
    with pytest.raises(ValueError, match=r"follows is 'MAX': must be 'MAX 26.7' or 'document'"):
        KVBufferParams(**{**BASE, "follows": "MAX"})


def test_slices_of_five_waves() -> None:
    """Wave w takes share w % 4, as everywhere: the fifth holds what the first holds."""
    p = KVBufferParams(
        **{**BASE, "mma_shape": (16, 16, 32), "swizzle": None, "BN": 128, "WN": 128, "depth": 128, "transpose": False,
           "num_threads": 320}
    )
    whole = buffer_of(p)
    v = WarpSlices(whole, 4)
    whole.load_from_dram(0)
    registers = np.asarray(v.load_from_shared(0))
    assert registers[0, 256:].tobytes() == registers[0, :64].tobytes()
    np.testing.assert_array_equal(v.fragment_map().gather(v.strip_tile(1))[0], keys_of(p)[0, 32:64, 0])


def test_full_kv_false_of_v_is_one_block_too() -> None:
    p = KVBufferParams(**{**BASE, "full_kv": False, "transpose": False, "swizzle": None, "depth": 128})
    v = quietly(buffer_of, p)
    v.load_from_dram(0)
    np.testing.assert_array_equal(v.smem_block_tile(64, 0, 0).load()[0, ..., 0], keys_of(p)[0, :64, 0, :32])
    with pytest.raises(ValueError, match="bk_tile is 0: must be one of the 0 strips in a stage"):
        v.load_from_shared(0, 0)


def test_smem_block_tile_is_the_block() -> None:
    k = buffer_of(KVBufferParams(**{**BASE, "swizzle": None, "num_smem_stages": 2}))
    k.load_from_dram(0)
    k.load_from_dram(1)
    for block in range(4):
        tile = k.smem_block_tile(32, 1, block).load()
        wanted = keys_of(k.params)[0, block // 2 * 64 + 32 :][:32, 0, block % 2 * 32 :][:, :32]
        np.testing.assert_array_equal(tile.reshape(32, 32), wanted)
    with pytest.raises(ValueError, match="not in the 4 blocks of 64 rows"):
        k.smem_block_tile(32, 0, 4)


LENGTHS = [300, 1, 128, 290, 0]


@pytest.mark.parametrize("page_size", [16, 32, 64, 512])
@pytest.mark.parametrize("dtype,shape,BK", [("bf16", (16, 16, 32), 32), ("fp8", (16, 16, 128), 128)])
def test_many_programs_at_once_over_any_pages(dtype: str, shape: Any, BK: int, page_size: int) -> None:
    """All sequences and heads in one launch, shuffled poisoned pages, ragged ends: the tiles and nothing else."""
    rng = np.random.default_rng(1)
    dense = rng.standard_normal((1, len(LENGTHS), max(LENGTHS), 2, 128)).astype(as_dtype(dtype))
    pool = from_dense(dense, dense, LENGTHS, page_size, shuffle=3, spare_pages=1)
    batch, head = np.divmod(np.arange(2 * len(LENGTHS)), 2)
    ends, traffic = np.take(LENGTHS, batch), Traffic()
    p = KVBufferParams(dtype, shape, SW303, 128, 32, BK, 256, 128, 2, transpose=True)
    k = KVBuffer(p, pool.get_key_cache(0), batch, head, end=ends, traffic=traffic)
    for tile in range(3):
        k.load_from_dram(tile % 2)
        k.load_from_shared(tile % 2)
        got = np.concatenate([k.fragment_map().gather(k.strip_tile(s)) for s in range(k.num_k_tiles)], axis=2)
        row = np.arange(tile * 128, tile * 128 + 128)
        wanted = dense[0][batch[:, None], np.minimum(row, max(LENGTHS) - 1), head[:, None]]
        np.testing.assert_array_equal(got, np.where((row < ends[:, None])[..., None], wanted, 0))
    live = int(np.ceil(ends / 128).sum())
    size = as_dtype(dtype).itemsize
    assert traffic.moved == {
        "DRAM->SMEM": int(ends.sum()) * 128 * size, "SMEM->registers": live * 128 * 128 * size
    }
    assert traffic.ideal["k read"] == live * 128 * 128 * size // 256
    assert traffic.wavefronts["k read"] == traffic.per_warp("wavefronts", "k read").sum()
    assert traffic.ideal["k read"] <= traffic.wavefronts["k read"] < traffic.unswizzled["k read"]
    assert traffic.instructions["k read"] == live * 128 * 128 * size // 1024


@pytest.mark.parametrize(
    "change,says",
    [
        ({"bk_smem": 16}, "bk_smem is 16: must be 64 or 128 bytes"),
        ({"BN": 48, "WN": 48}, "BN is 48: must be a multiple of 32"),
        ({"depth": 48}, "smem_depth is 48: must be a multiple of bk_smem 32"),
        ({"depth": 80, "smem_depth": 64}, "smem_depth is 64: must be at least depth 80"),
        ({"WN": 16}, "WN is 16: must be a multiple of MMA_N 32"),
        ({"BK": 64, "bk_smem": 32}, "load_prefill_split is for 1-byte K"),
        ({"BK": 64, "depth": 96, "smem_depth": 96, "bk_smem": 32}, "load_prefill_split is for 1-byte K"),
        ({"transpose": False, "swizzle": None, "depth": 48, "smem_depth": 64}, "depth is 48: must be a multiple of"),
        ({"dtype": "fp32", "mma_shape": (16, 16, 4), "BK": 16}, "load_b is for fragments of 16 or 32 bytes"),
        ({"num_smem_stages": 0}, "num_smem_stages is 0: must be at least 1"),
        ({"head_dim_offset": -1}, "head_dim_offset is -1: must be at least 0"),
    ],
)
def test_parameters_that_cannot_be_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        buffer_of(KVBufferParams(**{**BASE, **change}))


def test_bad_calls_are_refused_and_nothing_written() -> None:
    k = buffer_of(KVBufferParams(**{**BASE, "reg_chunk_depth": 32}))
    with pytest.raises(ValueError, match="buffer_idx is 1: must be one of the 1 stages"):
        k.load_from_dram(1)
    assert k.smem.written is not None
    assert not k.smem.written.any()
    assert (k.kv_cache_iter.tile_start_row == 0).all()
    with pytest.raises(ValueError, match="the register tile holds 1, a stage 2"):
        k.load_from_shared(0)
    with pytest.raises(ValueError, match="bk_tile is 2: must be one of the 2 strips"):
        k.load_from_shared(0, 2)
    with pytest.raises(ValueError, match="end is None: must be an integer"):
        buffer_of(k.params, end=None)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'end'"):
        KVBuffer(k.params, k.cache, 0, 0)  # type: ignore[call-arg]
    three = Memory(9000, space=AddressSpace.SHARED, programs=3)
    with pytest.raises(ValueError, match="address is 8: must be a multiple of 16"):
        k.params.smem_tile(three, 8)
    with pytest.raises(ValueError, match="smem_tile has 3 programs"):
        buffer_of(k.params, smem_tile=k.params.smem_tile(three))
    with pytest.raises(TypeError, match=r"smem_tile .* must be a TileTensor"):
        buffer_of(k.params, smem_tile=three)
    generic = Memory(9000, programs=1)
    with pytest.raises(ValueError, match="memory 'memory' is in generic memory: must be in shared memory"):
        k.params.smem_tile(generic)
    for tile in (
        TileTensor(generic, bfloat16, k.params.smem_parent_layout),
        replace(k.params, dtype="fp16").smem_tile(Memory(9000, space=AddressSpace.SHARED, programs=1)),
        replace(k.params, BN=32, WN=32).smem_tile(Memory(9000, space=AddressSpace.SHARED, programs=1)),
    ):
        assert not isinstance(tile, k.SmemParentType)
        with pytest.raises(ValueError, match=r"smem_tile .* must be bfloat16, \(64,64\):\(32,64\), shared"):
            buffer_of(k.params, smem_tile=tile)
    with pytest.raises(ValueError, match="warp_id is 4: must be None or one of the 4 warps"):
        buffer_of(k.params, warp_id=4)
    with pytest.raises(ValueError, match="kv_num_heads 2 differs"):
        KVBuffer(replace(k.params, kv_num_heads=2), k.cache, 0, 0, end=1)
    with pytest.raises(ValueError, match="has another size"):
        KVBuffer(KVBufferParams(**{**BASE, "dtype": "fp8", "mma_shape": (32, 32, 64), "BK": 64}), k.cache, 0, 0, end=1)
    v = buffer_of(KVBufferParams(**{**BASE, "transpose": False, "swizzle": None}))
    with pytest.raises(ValueError, match="zero_partial_tile_pad of a V buffer"):
        v.zero_partial_tile_pad()
    p = KVBufferParams("fp8", (16, 16, 128), SW303, 128, 32, 128, 256, 224, 1, True, smem_depth=256)
    with pytest.raises(ValueError, match="leaves 96 columns, must leave at most BK / 2 = 64"):
        buffer_of(p).zero_partial_tile_pad()
