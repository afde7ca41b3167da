"""Configurations drawn from the families of MAX's buffers. Rests on laws: the image of a stage holds every element of
the tile once, every register holds the element that the map names, and the fragments' product is the matrix product."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from registers import held, in_registers

from kvlab.cache import PagedKVCache
from kvlab.layout import Layout, Swizzle
from kvlab.memory import AddressSpace, Memory, UnwrittenRead, as_dtype
from kvlab.staging import (
    DecodeKVBuffer,
    DecodeKVBufferParams,
    DecodeStreamingKVBuffer,
    Hazards,
    KVBuffer,
    TiledTensorCore,
    WarpSlices,
)
from kvlab.staging.max.operand_maps import kv_buffer_operand_map, output_map, score_map
from kvlab.staging.max.params import KVBufferParams
from kvlab.staging.tile.smem_image import ZEROS

SHAPES = {("bf16", 32): (32, 32, 16), ("bf16", 16): (16, 16, 32), ("fp8", 32): (32, 32, 64), ("fp8", 16): (16, 16, 128)}
SWIZZLES = [None, Swizzle(3, 0, 3, "vector"), Swizzle(3, 0, 4, "vector"), Swizzle(2, 0, 3, "vector")]
laws = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@st.composite
def whole_tiles(draw: Any) -> KVBufferParams:
    """KVBuffer: prefill's and decode's sizes, 4, 5 and 8 waves, K and V, one or two stages, strips in two blocks."""
    dtype, M = draw(st.sampled_from(list(SHAPES)))
    BK = draw(st.sampled_from([32, 64] if dtype == "bf16" else [64, 128] if M == 32 else [128]))
    transpose = draw(st.booleans())
    split = dtype == "fp8" and M == 16 and transpose and draw(st.booleans())
    depth = draw(st.sampled_from([64, 128, 192, 256, 512, 576]))
    bk_smem = 64 if split else BK
    if not transpose:
        depth = max(depth // bk_smem * bk_smem, bk_smem)
    smem_depth = -(-depth // bk_smem) * bk_smem if split else -(-depth // BK) * BK
    if dtype == "fp8" and not transpose:
        BK = bk_smem = SHAPES[dtype, M][2]
        smem_depth = depth = max(depth // BK * BK, BK)
    BN = draw(st.sampled_from([32, 64, 128] if transpose else [64, 128] if BK == 64 else [BK, 128]))
    WN = draw(st.sampled_from([BN, max(BN // 4, 32)])) if transpose else BN
    return KVBufferParams(
        dtype, SHAPES[dtype, M], draw(st.sampled_from(SWIZZLES)) if transpose else None, BN=BN, WN=WN, BK=BK,
        num_threads=64 * draw(st.sampled_from([4, 5, 8])), depth=depth, kv_num_heads=draw(st.integers(1, 2)),
        transpose=transpose, bk_smem=bk_smem, smem_depth=smem_depth, num_smem_stages=draw(st.integers(1, 2)),
    )


def rows_of(p: Any, rows: int) -> np.ndarray[Any, Any]:
    """Different small numbers ``[1, rows, heads, depth]``: the bytes of an element tell it from its neighbours."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal((1, rows, getattr(p, "kv_num_heads", 1), p.depth)) / 4).astype(p.dtype)


def made(build: Any, *args: Any, **named: Any) -> tuple[Any, bool]:
    """The buffer, and whether it warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return build(*args, **named), bool(caught)


PAD = KVBufferParams(
    "fp8", (32, 32, 64), None, 32, 32, 128, 256, 64, 1, transpose=True, smem_depth=128, num_smem_stages=1
)


@laws
@example(PAD, 0)  # the last strip ends with the first of its two k groups
@given(whole_tiles(), st.integers(0, 9))
def test_whole_tiles(p: KVBufferParams, ragged: int) -> None:
    end = 2 * p.BN - ragged * p.BN // 8
    values = rows_of(p, end)
    head = p.kv_num_heads - 1
    smem = Memory(4 * p.num_smem_stages * p.smem_stage_size * p.dtype.itemsize, space=AddressSpace.SHARED, programs=1)
    hazards = Hazards(smem, p.num_warps, arch="gfx950")
    cache = PagedKVCache(values, [0], [[0]], 1, end)
    buffer, warned = made(KVBuffer, p, cache, 0, head, p.smem_tile(smem), end=end, hazards=hazards)
    assert warned != buffer.matrix_order
    if not buffer.matrix_order:
        with pytest.raises(ValueError, match="does not bring the matrix to the lanes"):
            buffer.fragment_map()
        return
    tile = np.zeros((2 * p.BN, p.num_k_tiles * p.BK if p.transpose else p.depth), p.dtype)
    tile[:end, : p.depth] = values[0, :, head]
    for step in range(2):
        stage = step % p.num_smem_stages
        hazards.barrier()
        buffer.load_from_dram(stage)
        hazards.wait_group(0)
        hazards.barrier()
        buffer.load_from_shared(stage)
        check_image(buffer, stage)
        buffer.zero_partial_tile_pad() if p.transpose else None
        axis = 1 if p.transpose else 0
        strips = [buffer.fragment_map().gather(buffer.strip_tile(strip))[0] for strip in range(p.num_k_tiles)]
        here = tile[step * p.BN :][: p.BN]
        assert np.concatenate(strips, axis=axis).tobytes() == here.tobytes()
    if p.num_warps % p.num_warps_n == 0:
        check_product(buffer, here)


def check_image(buffer: KVBuffer, stage: int) -> None:
    """Each 16-byte vector of the columns of the stage once, and its rows where the image says."""
    p, image = buffer.params, buffer.smem_image()
    vectors = p.smem_stage_size * p.dtype.itemsize // 16
    rows, columns = image.slots[stage * vectors : (stage + 1) * vectors].T
    valid = int(buffer.stage_keys[stage][1][0])
    here = rows >= 0
    assert (rows[~here] == ZEROS).all()
    places = rows[here] * (p.smem_cols * p.dtype.itemsize // 16) + columns[here]
    assert np.unique(places).size == here.sum() == valid * p.smem_cols * p.dtype.itemsize // 16


def check_product(buffer: KVBuffer, tile: np.ndarray[Any, Any]) -> None:
    p = buffer.params
    BM = p.MMA_M * p.num_warps // p.num_warps_n
    operand_map = kv_buffer_operand_map(p, BM)
    c_map = score_map(p, BM) if p.transpose else output_map(p, BM)
    rng = np.random.default_rng(1)
    other = (rng.random((1, *operand_map.shape)) / 4).astype(p.dtype)
    registers, c = in_registers(operand_map.spread(other)), in_registers(np.zeros((1, *c_map.row.shape), np.float32))
    for strip in range(buffer.num_k_tiles):
        for kg in range(buffer.num_k_mmas2):
            at = strip * buffer.num_k_mmas2 + kg
            buffer.kv_mma_op.mma(registers[at : at + 1, :], c, strip, kg, swap_a_b=True)
    exact = tile.astype(np.float64)
    wanted = other[0].astype(np.float64) @ (exact.T if p.transpose else exact)
    np.testing.assert_allclose(c_map.gather(c)[0], wanted, rtol=1e-5, atol=1e-4)


@st.composite
def streams(draw: Any) -> KVBufferParams:
    """Strips of the streaming buffer, 2 to 8 waves."""
    transpose, dtype = draw(st.booleans()), draw(st.sampled_from(["bf16", "fp8"]))
    shape = draw(st.sampled_from([(16, 16, 32), (32, 32, 16)] if dtype == "bf16" else [(16, 16, 32)]))
    waves_n = draw(st.sampled_from([2, 4]))
    return KVBufferParams(
        dtype, shape, draw(st.sampled_from(SWIZZLES)) if transpose else None, BN=128, WN=128 // waves_n,
        BK=draw(st.sampled_from([32, 64] if dtype == "bf16" else [32])),
        num_threads=64 * draw(st.integers(waves_n, 8)), depth=draw(st.sampled_from([128, 256, 512])),
        kv_num_heads=1, transpose=transpose,
    )


@laws
@given(streams(), st.sampled_from(["MAX 26.7", "document"]))
def test_streams(p: KVBufferParams, follows: str) -> None:
    p = replace(p, follows=follows)
    values = rows_of(p, 200)
    cache = PagedKVCache(values, [0], [[0]], 1, 200)
    buffer, warned = made(DecodeStreamingKVBuffer, p, cache, 0, 0, num_keys=200)
    assert warned != buffer.matrix_order
    walk = buffer.iterator()
    walk.increment()
    tile, wanted = walk.next_tile(), np.zeros((128, p.depth), p.dtype)
    wanted[:72] = values[0, 128:, 0]
    if not buffer.matrix_order:
        return
    strips = []
    for strip in range(buffer.num_strips):
        buffer.load_from_dram(strip, tile)
        strips.append(buffer.fragment_map().gather(buffer.load_from_shared())[0])
    assert np.concatenate(strips, axis=1 if p.transpose else 0).tobytes() == wanted.tobytes()


@laws
@given(
    st.sampled_from([(16, 16, 32), (32, 32, 16)]), st.sampled_from(SWIZZLES), st.booleans(), st.sampled_from([32, 64]),
    st.sampled_from([256, 512]), st.sampled_from([64, 128, 256]), st.booleans(), st.integers(1, 3),
)
def test_register_staged(
    shape: Any, swizzle: Any, transpose: bool, BK: int, threads: int, depth: int, token_gen: bool, stages: int
) -> None:
    core = TiledTensorCore("fp32", "bf16", shape, 1, transpose)
    p = DecodeKVBufferParams("bf16", Layout.row_major(128, depth), core, swizzle, BN=128, WN=32, BK=BK, depth=depth,
                             num_threads=threads, num_stages=stages, token_gen=token_gen)
    values = rows_of(p, 100)
    buffer, warned = made(DecodeKVBuffer, p, PagedKVCache(values, [0], [[0]], 1, 100), 0, 0, end=100)
    assert warned != buffer.matrix_order
    if not buffer.matrix_order:
        return
    wanted, tiles = np.zeros((128, depth), p.dtype), []
    wanted[:100] = values[0, :, 0]
    for tile in range(buffer.num_tiles):
        buffer.load_from_dram()
        buffer.copy_to_shared(tile % stages)
        groups = [np.array(buffer.load_from_shared(k_mma)) for k_mma in range(buffer.num_k_tiles)]
        tiles.append(buffer.fragment_map().gather(np.concatenate(groups, axis=2))[0])
    assert np.concatenate(tiles, axis=1 if transpose else 0).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("depth,warps", [(64, 2), (128, 4), (512, 4), (256, 2), (512, 8)])
def test_slices_of_warps(depth: int, warps: int) -> None:
    p = KVBufferParams("bf16", (16, 16, 32), None, BN=64, WN=64, BK=32, num_threads=64 * max(warps, 4), depth=depth,
                       kv_num_heads=1, transpose=False, num_smem_stages=2)
    values = rows_of(p, 100)
    whole = KVBuffer(p, PagedKVCache(values, [0], [[0]], 1, 100), 0, 0, end=100)
    whole.load_from_dram(0)
    whole.load_from_dram(1)
    slices = WarpSlices(whole, warps, stage=1)
    slices.load_from_shared(0)
    got = np.concatenate([slices.fragment_map().gather(slices.strip_tile(s))[0] for s in range(slices.num_k_tiles)])
    assert got[:36].tobytes() == values[0, 64:, 0].tobytes()
    assert (got[36:] == 0).all()


def strided(depth: int) -> tuple[np.ndarray[Any, Any], PagedKVCache]:
    """Rows of two heads with twice as many bytes between them as they have: a view of a larger array."""
    wide = np.random.default_rng(0).standard_normal((2, 64, 2, 2, depth)).astype(as_dtype("bf16"))
    view = wide[:, :, 1]
    return view, PagedKVCache(view, [0], [[1, 0]], 1, 100)


def test_the_cache_knows_how_far_apart_its_rows_are() -> None:
    """A strided cache, default ``cache_depth``: the three buffers read its rows, and another pitch when told so."""
    view, cache = strided(64)
    keys = np.concatenate([view[1], view[0]])[:100, 1]
    sizes: dict[str, Any] = {"BN": 64, "WN": 64, "BK": 32, "num_threads": 256, "depth": 64, "kv_num_heads": 2}
    p = KVBufferParams("bf16", (32, 32, 16), None, **sizes, transpose=True)
    for params in (p, replace(p, cache_depth=64), replace(p, num_smem_stages=1)):
        k = KVBuffer(params, cache, 0, 1, end=100)
        k.load_from_dram(0)
        k.load_from_shared(0)
        got = np.concatenate([k.fragment_map().gather(k.strip_tile(s))[0] for s in (0, 1)], axis=1)
        assert got.tobytes() == keys[:64].tobytes()
    stream = DecodeStreamingKVBuffer(replace(p, mma_shape=(16, 16, 32)), cache, 0, 1, num_keys=100)
    stream.load_from_dram(1, stream.iterator().next_tile())
    assert stream.fragment_map().gather(stream.load_from_shared())[0].tobytes() == keys[:64, 32:].tobytes()
    del sizes["kv_num_heads"]
    core = TiledTensorCore("fp32", "bf16", (32, 32, 16), 1, transpose_b=True)
    apart = DecodeKVBufferParams("bf16", Layout((64, 64), (256, 1)), core, None, **sizes)
    staged = DecodeKVBuffer(apart, cache, 0, 1, end=100)
    staged.load_from_dram()
    assert held(staged.load_tile)[0, 0, 0].tobytes() == keys[0, :8].tobytes()
    close = replace(apart, kv_tile_layout=Layout((64, 64), (128, 1)))
    with pytest.raises(ValueError, match=r"kv_tile_layout .* has rows 128 elements apart, the cache 256"):
        DecodeKVBuffer(close, cache, 0, 1, end=100)
    assert KVBuffer(replace(p, cache_depth=128), cache, 0, 1, end=100).kv_cache_iter.row_stride == 256
    assert KVBuffer(replace(p, cache_depth=96), cache, 0, 1, end=100).kv_cache_iter.row_stride == 192


def test_streams_of_five_waves() -> None:
    """K: the fifth wave moves nothing and reads what the first reads. V: 320 threads make 20 rows of 16 vectors, which
    leave the last 12 of 32 rows; nobody may read them."""
    values = np.random.default_rng(0).standard_normal((1, 128, 1, 128)).astype(as_dtype("bf16"))
    cache = PagedKVCache(values, [0], [[0]], 1, 128)
    p = KVBufferParams("bf16", (16, 16, 32), SWIZZLES[1], 128, 32, 32, 320, 128, 1, transpose=True)
    k = DecodeStreamingKVBuffer(p, cache, 0, 0, num_keys=128)
    k.load_from_dram(0, k.iterator().next_tile())
    registers = np.asarray(k.load_from_shared())
    assert registers.shape[1] == 320
    assert registers[0, 256:].tobytes() == registers[0, :64].tobytes()
    assert k.fragment_map().gather(registers)[0].tobytes() == values[0, :, 0, :32].tobytes()
    with pytest.warns(UserWarning, match="the grid of 320 threads, 16 wide, must divide the 32 rows of a strip"):
        v = DecodeStreamingKVBuffer(replace(p, transpose=False, swizzle=None), cache, 0, 0, num_keys=128)
    v.load_from_dram(0, v.iterator().next_tile())
    assert v.smem.image(p.dtype)[0, : 20 * 128].tobytes() == values[0, :20, 0].tobytes()
    with pytest.raises(UnwrittenRead):
        v.load_from_shared()
