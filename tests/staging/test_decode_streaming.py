"""DecodeStreamingKVBuffer. Rests on the gfx950 kernels compiled by MAX and followed lane by lane
(tests/data/kvbuffer_trace_streaming.json.gz, kvbuffer_members_streaming.json), and on float64 products."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from registers import in_registers

from kvlab.cache import PagedKVCache, UnsafePointer, from_dense
from kvlab.hardware import buffer_resource, count_wavefronts
from kvlab.layout import Swizzle, TileTensor
from kvlab.memory import AddressSpace, Memory, OutOfBounds, as_dtype, bfloat16
from kvlab.staging.max.decode_streaming import DecodeStreamingKVBuffer
from kvlab.staging.max.operand_maps import operand_map, output_map, score_map
from kvlab.staging.max.p_buffer import PRegisterBuffer
from kvlab.staging.max.params import KVBufferParams
from kvlab.staging.max.streaming_addresses import register_plan, streaming_dma_plan
from kvlab.staging.record.traffic import Traffic

SIZES = ("BN", "WN", "BK", "num_threads", "depth", "kv_num_heads")
SW303 = Swizzle(3, 0, 3, "vector")


def params_of(i: dict[str, Any], dtype: Any, swizzle: Swizzle | None) -> KVBufferParams:
    sizes = {name: i[name] for name in SIZES}
    return KVBufferParams(dtype, i["mma_shape"], swizzle, **sizes, transpose=bool(i["transpose"]))


def quietly(*args: Any, **kwargs: Any) -> DecodeStreamingKVBuffer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return DecodeStreamingKVBuffer(*args, **kwargs)


def test_lds_image_and_registers_equal_compiled_max(streaming_trace: dict[str, Any], tags: Any) -> None:
    """The LDS image, every register of every lane and every DMA instruction; reads past the strip give -5."""
    i, expected = streaming_trace["inputs"], streaming_trace["expected"]
    tag = tags(i["dtype"])
    params = params_of(i, tag.dtype, i["swizzle"])
    image, registers = [], []
    for operand in tag.operand(i["operand_shape"]):
        cache = PagedKVCache(operand, [0], [[0]], 1, i["end"])
        nbytes = expected["lds_after_load_from_dram"].size * tag.dtype.itemsize + 64
        smem = Memory(nbytes, space=AddressSpace.SHARED, programs=1, unsafe=True)
        place = UnsafePointer(smem, 0, tag.dtype)
        buffer = quietly(params, cache, i["batch"], i["kv_head"], place, num_keys=i["end"])
        tile = buffer.iterator().next_tile()
        buffer.load_from_dram(i["strip_idx"], tile)
        assert smem.written is not None
        assert smem.written.sum() == buffer.strip_bytes
        image.append(smem.image(tag.dtype)[0, : expected["lds_after_load_from_dram"].size])
        registers.append(np.array(buffer.load_from_shared())[0])
    np.testing.assert_array_equal(tag.join(image), expected["lds_after_load_from_dram"])
    np.testing.assert_array_equal(tag.join(registers).reshape(i["num_threads"], -1), expected["regs_per_thread"])
    if expected["dma"]:
        assert dma_of(params, tile, i["strip_idx"]) == golden_dma(expected["dma"])
    elif expected["n_buffer_loads"] is not None:
        passes, threads = register_plan(params).offset.shape
        assert passes * -(-threads // 64) == expected["n_buffer_loads"]


def golden_dma(dma: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted(
        (d["lds_base"], d["wave"], d["bytes_per_lane"],
         tuple(d["resource_base"] + d["soffset"] + v for v in d["voffset"]), d["resource_base"] + d["num_records"])
        for d in dma
    )


def dma_of(params: KVBufferParams, tile: Any, strip: int) -> list[tuple[Any, ...]]:
    plan, size = streaming_dma_plan(params), params.dtype.itemsize
    base, voffset, records = buffer_resource(tile, plan.row, strip * params.BK + plan.col)
    ends = np.broadcast_to((base + records)[0, :, 0], plan.wave.shape)
    rows = zip(plan.offset * size, plan.wave, base[0] + voffset, ends, strict=True)
    return sorted((int(o), int(w), 16, tuple(a.tolist()), int(e)) for o, w, a, e in rows)


def test_members_equal_compiled_max(golden: Callable[[str], list[dict[str, Any]]]) -> None:
    cases = golden("kvbuffer_members_streaming.json")
    for case in cases:
        i = case["inputs"]
        swizzle = None if i["swizzle"] is None else Swizzle(*i["swizzle"], "vector")
        params = params_of(i, i["dtype"], swizzle)
        cache = PagedKVCache(np.zeros((1, 1, 2, i["depth"]), params.dtype), [0], [[0]], 1, 1)
        buffer = quietly(params, cache, 0, 0)
        for name, wanted in case["expected"].items():
            got = getattr(buffer, name)
            if isinstance(wanted, dict):
                got, wanted = (got.shape, got.stride), (tuple(wanted["shape"]), tuple(wanted["stride"]))
            assert got == wanted, (case["id"], name)
    assert len(cases) == 4


def test_which_goldens_are_in_matrix_order(streaming_trace: dict[str, Any]) -> None:
    """``matrix_order`` is worked out from the addresses; here against the golden registers themselves."""
    i, expected = streaming_trace["inputs"], streaming_trace["expected"]
    params = params_of(i, i["dtype"], i["swizzle"])
    cache = PagedKVCache(np.zeros((1, 1, i["kv_num_heads"], i["depth"]), params.dtype), [0], [[0]], 1, 1)
    buffer = quietly(params, cache, 0, 0)
    if not buffer.matrix_order:
        with pytest.raises(ValueError, match="does not bring the matrix to the lanes"):
            buffer.fragment_map()
    layout = (quietly(params.unswizzled(), cache, 0, 0)).fragment_map()
    rows, cols = (i["strip_idx"] * i["BK"], 0) if not i["transpose"] else (0, i["strip_idx"] * i["BK"])
    row, depth = layout.row + rows, i["depth"]
    tag = (row * i["kv_num_heads"] + i["kv_head"]) * depth + layout.col + cols
    meant = np.where(row < i["end"], tag, -1).reshape(i["num_threads"], -1)
    assert buffer.matrix_order == np.array_equal(meant, expected["regs_per_thread"])


@pytest.mark.parametrize(
    "dtype,mma_shape,BK,swizzle,says",
    [
        ("bf16", (16, 16, 32), 64, Swizzle(2, 0, 2, "vector"), "BK == MMA_K"),
        ("bf16", (16, 16, 16), 32, SW303, "swizzle=None, or fragments of 16 bytes"),
        ("bf16", (32, 32, 16), 32, Swizzle(3, 0, 4, "vector"), "BK == MMA_K"),
        ("fp8", (16, 16, 32), 32, Swizzle(2, 0, 2, "vector"), "1-byte K needs swizzle=None"),
        ("fp8", (16, 16, 32), 32, SW303, "1-byte K needs swizzle=None"),
    ],
)
def test_broken_configurations_warn_and_what_they_name_works(
    dtype: str, mma_shape: tuple[int, int, int], BK: int, swizzle: Swizzle, says: str
) -> None:
    params = KVBufferParams(dtype, mma_shape, swizzle, 128, 32, BK, 256, 128, 1, True)
    cache = PagedKVCache(np.zeros((1, 1, 1, 128), params.dtype), [0], [[0]], 1, 1)
    with pytest.warns(UserWarning, match=says):
        assert not DecodeStreamingKVBuffer(params, cache, 0, 0).matrix_order
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DecodeStreamingKVBuffer(params.unswizzled(), cache, 0, 0).matrix_order


def test_a_broken_read_past_the_strip_is_an_error() -> None:
    params = KVBufferParams("fp8", (16, 16, 32), SW303, 128, 32, 32, 256, 128, 1, True)
    cache = PagedKVCache(np.zeros((1, 128, 1, 128), params.dtype), [0], [[0]], 1, 128)
    buffer = quietly(params, cache, 0, 0, num_keys=128)
    buffer.load_from_dram(0, buffer.iterator().next_tile())
    with pytest.raises(OutOfBounds, match="shared memory: access of 8 bytes"):
        buffer.load_from_shared()


LENGTHS = [300, 1, 128, 290, 0]


def launch(dtype: str, depth: int, page_size: int, *, BK: int = 32, programs: Any = None) -> tuple[Any, ...]:
    """Buffers of K and V over 5 sequences x 2 heads in shuffled, poisoned pages, and the dense operands."""
    dtype = as_dtype(dtype)
    rng = np.random.default_rng(depth)
    keys, values = (rng.standard_normal((1, len(LENGTHS), max(LENGTHS), 2, depth)).astype(dtype) for _ in range(2))
    pool = from_dense(keys, values, LENGTHS, page_size, shuffle=3, spare_pages=1)
    batch, head = np.divmod(np.arange(2 * len(LENGTHS)), 2) if programs is None else programs
    shape = {"bfloat16": (16, 16, 32), "float16": (16, 16, 32), "float32": (16, 16, 4), "float8_e4m3fn": (16, 16, 32)}
    swizzle = SW303 if dtype.itemsize == 2 and BK == 32 else None
    buffers = [
        DecodeStreamingKVBuffer(
            KVBufferParams(dtype, shape[dtype.name], swizzle if role else None, 128, 32, BK, 256, depth, 2, role),
            cache, batch, head, num_keys=np.take(LENGTHS, batch),
        )
        for role, cache in ((True, pool.get_key_cache(0)), (False, pool.get_value_cache(0)))
    ]
    return *buffers, keys[0][batch, :, head], values[0][batch, :, head]


def strips(buffer: DecodeStreamingKVBuffer, tile: Any) -> list[np.ndarray[Any, Any]]:
    out = []
    for strip in range(buffer.num_strips):
        buffer.load_from_dram(strip, tile)
        out.append(np.array(buffer.load_from_shared()))
    return out


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_q_k_and_p_v_through_the_fragments_are_matrix_products(dtype: str, depth: int, page_size: int) -> None:
    """Against float64: S = Q K^T and O = P V of one tile, P through shared memory. Products of storage values, summed
    in float32: the error is that of at most 256 additions."""
    k, v, keys, values = launch(dtype, depth, page_size)
    p, programs = k.params, k.programs
    q = np.random.default_rng(1).standard_normal((programs, 16, depth)).astype(p.dtype)
    q_registers = operand_map(p, 16).spread(q)
    s = np.zeros((programs, *score_map(p, 16).row.shape), np.float32)
    tiles = k.iterator(), v.iterator()
    for first in (0, 128, 256):
        n = np.clip(np.subtract(k.num_keys, first), 0, 128)
        s[...] = 0
        k_tile, v_tile = (walk.next_tile() for walk in tiles)
        for strip, registers in enumerate(strips(k, k_tile)):
            for kg in range(k.num_k_mmas2):
                a = in_registers(q_registers[:, :, strip * k.num_k_mmas2 + kg, None])
                if strip == k.num_strips - 1:
                    k.kv_mma_op.mma(a, in_registers(s), 0, kg, swap_a_b=True)
                else:
                    group = in_registers(registers[:, :, kg * k.num_mmas : (kg + 1) * k.num_mmas])
                    k.kv_mma_op.params.tiled_mma_op.mma(a, group, in_registers(s), swap_a_b=True)
        padded = np.zeros((2, programs, 128, depth))
        for b in range(programs):
            padded[0, b, : n[b]] = keys[b, first : first + n[b]]
            padded[1, b, : n[b]] = values[b, first : first + n[b]]
        wanted = q.astype(np.float64) @ padded[0].transpose(0, 2, 1)
        np.testing.assert_allclose(score_map(p, 16).gather(s), wanted, atol=2e-4 * depth**0.5, rtol=1e-5)

        staged = PRegisterBuffer(v.params, 16, programs)
        staged.copy_to_shared(s)
        staged.load_from_shared()
        o = np.zeros((programs, *output_map(v.params, 16).row.shape), np.float32)
        for strip in range(v.num_strips):
            v.load_from_dram(strip, v_tile)
            v.load_from_shared()
            for kg in range(v.num_k_mmas2):
                v.kv_mma_op.mma(staged.mma_tile(strip, kg), in_registers(o), 0, kg, swap_a_b=True)
        rounded = score_map(p, 16).gather(s).astype(p.dtype).astype(np.float64)
        tolerance = 1e-5 * (np.abs(rounded) @ np.abs(padded[1])).max()
        np.testing.assert_allclose(output_map(v.params, 16).gather(o), rounded @ padded[1], atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp32"])
@pytest.mark.parametrize("page_size", [16, 48, 64, 480])
def test_small_pages_equal_whole_ones_bit_for_bit_and_poison_never_shows(dtype: str, page_size: int) -> None:
    for role in (0, 1):
        one, other = (launch(dtype, 64, size)[role] for size in (512, page_size))
        walks = one.iterator(), other.iterator()
        for _ in range(3):
            left, right = (strips(b, w.next_tile()) for b, w in zip((one, other), walks, strict=True))
            for x, y in zip(left, right, strict=True):
                assert x.tobytes() == y.tobytes()
                assert not np.isnan(x.astype(np.float32)).any()


def test_a_launch_equals_its_programs_one_by_one() -> None:
    k, v, *_ = launch("bf16", 64, 48)
    for role, whole in enumerate((k, v)):
        together = strips(whole, whole.iterator().next_tile())
        for b in range(k.programs):
            single = launch("bf16", 64, 48, programs=np.array([[b // 2], [b % 2]]))[role]
            alone = strips(single, single.iterator().next_tile())
            for x, y in zip(together, alone, strict=True):
                assert x[b : b + 1].tobytes() == y.tobytes()


def test_traffic_of_active_programs() -> None:
    k, v, *_ = launch("bf16", 64, 128)
    v.traffic, walk = Traffic(), v.iterator()
    walk.tile_start_row = 256
    v.load_from_dram(1, walk.next_tile())  # keys 288 to 319: sequences of 300 and of 290 keys have 12 and 2 of them
    assert v.traffic.moved == {"DRAM->SMEM": 2 * (12 + 2) * 64 * 2}
    v.traffic = Traffic()
    v.load_from_dram(0, v.iterator().next_tile())  # a strip has 32 keys, however many the tile has (law of the shape)
    assert v.traffic.moved == {"DRAM->SMEM": 2 * (32 + 1 + 32 + 32) * 64 * 2}
    k.traffic = Traffic()
    tile = k.iterator().next_tile()
    k.load_from_dram(0, tile)
    k.load_from_shared()
    rows = 2 * (128 + 1 + 128 + 128)  # the last sequence is empty
    assert k.traffic.moved == {"DRAM->SMEM": rows * 32 * 2, "SMEM->registers": 8 * 128 * 32 * 2}
    active = np.arange(10) == 0
    k.load_from_dram(1, tile, active)
    k.load_from_shared()
    assert k.traffic.moved == {"DRAM->SMEM": (rows + 128) * 64, "SMEM->registers": 9 * 128 * 64}


def test_wavefronts_of_the_read() -> None:
    """K, BK 32: 8 fragments of ds_read_b128, each 4 phases of 16 lanes. Rows of 64 bytes: without a swizzle the 16 rows
    of a phase meet in 4 places of the 64 banks; Sw<3,0,3> spreads them. Counted by kvlab.hardware."""
    k, v, *_ = launch("bf16", 64, 128)
    for buffer, ideal in ((k, 8 * 4), (v, 4 * 8)):
        buffer.traffic = Traffic()
        buffer.load_from_dram(0, buffer.iterator().next_tile(), np.arange(10) < 3)
        buffer.load_from_shared()
        name, address = buffer.read_addresses()
        assert address.shape == ((2 if buffer is k else 8), 4, 64)
        role = f"{buffer.params.role} read"
        assert buffer.traffic.ideal[role] == 3 * ideal
        if buffer is k:
            assert name == "ds_read_b128"
            assert buffer.traffic.wavefronts[role] == 3 * count_wavefronts(name, address, arch="gfx950")[0].sum()
            assert buffer.traffic.wavefronts[role] < buffer.traffic.unswizzled[role]
        else:
            assert name == "ds_read_u16"
            assert buffer.traffic.wavefronts[role] == buffer.traffic.unswizzled[role]


def shared(nbytes: int, programs: int) -> UnsafePointer:
    return UnsafePointer(Memory(nbytes, space=AddressSpace.SHARED, programs=programs), 0, bfloat16)


def test_a_strip_of_any_tile_tensor_in_dram() -> None:
    """Keys as a tile tensor of one's own; a buffer of one warp shows that warp's registers."""
    k, *_ = launch("bf16", 64, 128)
    tile = k.iterator().next_tile()
    whole = strips(k, tile)
    mine = TileTensor(tile.memory, tile.dtype, tile.layout, tile.offset, valid_rows=tile.valid_rows)
    one = DecodeStreamingKVBuffer(k.params, k.cache, k.batch_idx, k.head_idx, num_keys=k.num_keys, warp_id=2)
    for strip, wanted in enumerate(whole):
        one.load_from_dram(strip_idx=strip, gmem_tile=mine)
        assert np.asarray(one.load_from_shared()).tobytes() == wanted.tobytes()
        group = np.asarray(one.get_mma_tile(k_mma_idx=0))
        assert group.tobytes() == wanted[:, 128:192, : one.num_mmas].tobytes()


def test_two_buffers_share_one_shared_memory() -> None:
    k, v, *_ = launch("bf16", 128, 64)
    smem = Memory(k.strip_bytes + v.strip_bytes, space=AddressSpace.SHARED, programs=k.programs, base=4096)
    own = [strips(b, b.iterator().next_tile()) for b in (k, v)]
    for buffer, address, wanted in ((k, 0, own[0]), (v, k.strip_bytes // 2, own[1])):
        where = UnsafePointer(smem, address, bfloat16)
        moved = DecodeStreamingKVBuffer(
            buffer.params, buffer.cache, buffer.batch_idx, buffer.head_idx, where, buffer.num_keys
        )
        for x, y in zip(strips(moved, moved.iterator().next_tile()), wanted, strict=True):
            assert x.tobytes() == y.tobytes()


def test_k_smem_block_tile_is_the_strip_by_rows() -> None:
    k, v, *_ = launch("bf16", 64, 128)
    k.load_from_dram(1, k.iterator().next_tile())
    block = k.k_smem_block_tile(32, 1)
    assert (block.layout.shape, block.layout.stride) == ((32, 32), (32, 1))
    values = block.load()  # [programs, 32, 32, 1]
    assert values[..., 0].tobytes() == np.ascontiguousarray(k.smem.image(bfloat16)[:, 32 * 32 : 64 * 32]).tobytes()
    smem = Memory(1024 + k.strip_bytes, space=AddressSpace.SHARED, programs=k.programs, base=4096)
    moved = DecodeStreamingKVBuffer(
        k.params, k.cache, k.batch_idx, k.head_idx, UnsafePointer(smem, 512, bfloat16), k.num_keys
    )
    moved.load_from_dram(1, moved.iterator().next_tile())
    assert moved.k_smem_block_tile(32, 1).load().tobytes() == values.tobytes()  # wherever the strip stands
    with pytest.raises(ValueError, match="of a V buffer"):
        v.k_smem_block_tile(32, 0)
    with pytest.raises(ValueError, match="past the 128 rows"):
        k.k_smem_block_tile(32, 4)


def test_bad_input_is_refused_and_nothing_written() -> None:
    k, *_ = launch("bf16", 64, 128)
    tile = k.iterator().next_tile()
    with pytest.raises(ValueError, match="strip_idx is 2: must be one of the 2 strips"):
        k.load_from_dram(2, tile)
    with pytest.raises(ValueError, match="gmem_tile is of bfloat16: must be of float32"):
        launch("fp32", 64, 128)[0].load_from_dram(0, tile)
    assert k.smem.written is not None
    assert not k.smem.written.any()
    with pytest.raises(ValueError, match="kv_num_heads 2 differs from the cache's 1"):
        DecodeStreamingKVBuffer(k.params, PagedKVCache(np.zeros((1, 1, 1, 64), bfloat16), [0], [[0]], 1, 1), 0, 0)
    with pytest.raises(ValueError, match="smem has 3 programs, batch_idx and head_idx 10"):
        DecodeStreamingKVBuffer(k.params, k.cache, k.batch_idx, k.head_idx, shared(9000, 3))
    with pytest.raises(ValueError, match="does not fit in"):
        DecodeStreamingKVBuffer(k.params, k.cache, k.batch_idx, k.head_idx, shared(8000, 10))
    with pytest.raises(TypeError, match="smem_ptr is 0: must be an UnsafePointer"):
        DecodeStreamingKVBuffer(k.params, k.cache, k.batch_idx, k.head_idx, 0)
    with pytest.raises(ValueError, match="smem_ptr points into generic memory: must point into shared memory"):
        DecodeStreamingKVBuffer(
            k.params, k.cache, k.batch_idx, k.head_idx, UnsafePointer(Memory(9000, programs=10), 0, bfloat16)
        )
    with pytest.raises(TypeError, match="gmem_tile is 3: must be a TileTensor in global or generic memory"):
        k.load_from_dram(0, 3)
    with pytest.raises(ValueError, match="warp_id is -1: must be None or one of the 4 warps"):
        DecodeStreamingKVBuffer(k.params, k.cache, k.batch_idx, k.head_idx, warp_id=-1)
    with pytest.raises(ValueError, match="num_keys None"):
        DecodeStreamingKVBuffer(k.params, k.cache, k.batch_idx, k.head_idx).iterator()


@pytest.mark.parametrize(
    "change,says",
    [
        ({"mma_shape": (16, 8, 16)}, r"mma_shape is \(16, 8, 16\): must be"),
        ({"BK": 48}, "BK is 48: must be a multiple of MMA_K 32"),
        ({"BK": 128}, "BK is 128: must be 64 or 128 bytes of bfloat16"),
        ({"WN": 48}, "BN is 128: must be a multiple of WN 48"),
        ({"num_threads": 100}, "num_threads is 100: must be a multiple of 64"),
        ({"num_threads": 192}, "num_threads is 192: must be at least 256: BN // WN = 4 warps along"),
        ({"dtype": "fp8", "swizzle": None, "BK": 64}, "BK is 64 of a 1-byte K: must be MMA_K 32"),
        ({"transpose": False, "depth": 96}, "depth is 96: must be a multiple of 64"),
        ({"depth": 0}, "depth is 0: must be at least 1"),
    ],
)
def test_parameters_that_cannot_be_are_refused(change: dict[str, Any], says: str) -> None:
    good = {
        "dtype": "bf16", "mma_shape": (16, 16, 32), "swizzle": SW303, "BN": 128, "WN": 32, "BK": 32, "num_threads": 256,
        "depth": 64, "kv_num_heads": 1, "transpose": True,
    }
    cache = PagedKVCache(np.zeros((1, 1, 1, 64), bfloat16), [0], [[0]], 1, 1)
    DecodeStreamingKVBuffer(KVBufferParams(**good), cache, 0, 0)
    with pytest.raises(ValueError, match=says):
        DecodeStreamingKVBuffer(KVBufferParams(**{**good, **change}), cache, 0, 0)


@pytest.mark.parametrize("dtype,depth,BK", [("bf16", 128, 32), ("bf16", 64, 64), ("fp8", 128, 32)])
def test_blocked_v_has_other_bytes_in_shared_memory_and_the_same_registers(dtype: str, depth: int, BK: int) -> None:
    """What MAX's documentation says: a strip as depth // BK blocks of BK x BK."""
    shape = (16, 16, 32)
    p = KVBufferParams(dtype, shape, None, 128, 32, BK, 256, depth, 1, transpose=False)
    values = (np.random.default_rng(0).standard_normal((1, 128, 1, depth))).astype(p.dtype)
    cache = PagedKVCache(values, [0], [[0]], 1, 128)
    both = p, replace(p, follows="document")
    flat, blocked = (DecodeStreamingKVBuffer(params, cache, 0, 0, num_keys=100) for params in both)
    for strip in range(flat.num_strips):
        for buffer in (flat, blocked):
            buffer.load_from_dram(strip, buffer.iterator().next_tile())
        assert np.asarray(flat.load_from_shared()).tobytes() == np.asarray(blocked.load_from_shared()).tobytes()
        images = [buffer.smem.image(p.dtype)[0] for buffer in (flat, blocked)]
        blocks = np.ascontiguousarray(images[0].reshape(BK, depth // BK, BK).transpose(1, 0, 2))
        assert blocks.tobytes() == images[1].tobytes()


def test_instructions_are_counted_by_warp() -> None:
    """K: DMA of 2 a warp tile and reads of 16 bytes; V: loads of 16 bytes a thread and reads of single elements."""
    k, v, *_ = launch("bf16", 64, 128)
    for buffer in (k, v):
        buffer.traffic = Traffic()
        buffer.load_from_dram(0, buffer.iterator().next_tile())
        buffer.load_from_shared()
    live = sum(length > 0 for length in LENGTHS) * 2
    assert k.traffic.per_warp("instructions", "k dma").tolist() == [2 * live] * 4
    assert k.traffic.per_warp("instructions", "k read").tolist() == [2 * live] * 4
    assert v.traffic.per_warp("instructions", "v load").tolist() == [live] * 4
    assert v.traffic.per_warp("instructions", "v read").tolist() == [8 * live] * 4
    assert k.traffic.per_warp("wavefronts", "k read").sum() == k.traffic.wavefronts["k read"]
