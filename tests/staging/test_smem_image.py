"""What the buffers say of their shared memory (law: each slot has the 16 bytes of the DRAM vector that it is said to
hold, the others are zeros or poison)."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from kvlab.cache import PagedKVCache
from kvlab.layout import Layout, Swizzle
from kvlab.staging import (
    CpAsyncKVBuffer,
    DecodeKVBuffer,
    DecodeKVBufferParams,
    DecodeStreamingKVBuffer,
    KVBuffer,
    KVBufferParams,
    NvidiaKVParams,
    TiledTensorCore,
    TmaKVBuffer,
    WarpSlices,
)

KEYS, PAGE = 200, 128


def cache(depth: int, dtype: str) -> tuple[PagedKVCache, np.ndarray]:
    """A shuffled cache of random bytes, none of which is 0, and its keys in order ``[256, bytes of a row]``."""
    rng = np.random.default_rng(0)
    size = KVBufferParams(dtype, (16, 16, 32), None, 32, 32, 32, 64, 32, 1, True).dtype
    raw = rng.integers(1, 100, (3, PAGE, 1, depth * size.itemsize), np.uint8)
    view = PagedKVCache(raw.view(size), [KEYS - 1], [[2, 0]], 1, KEYS)
    return view, np.concatenate([raw[2, :, 0], raw[0, :, 0]])


def said(image: Any, tiles: list[np.ndarray]) -> np.ndarray:
    """The bytes that the image claims ``[slots, 16]``; poison where it claims nothing. One tile for each stage."""
    stages = np.array_split(image.slots, len(tiles))
    out = []
    for slots, tile in zip(stages, tiles, strict=True):
        vectors = tile.reshape(len(tile), -1, 16)
        claimed = vectors[np.maximum(slots[:, 0], 0), np.maximum(slots[:, 1], 0)]
        out.append(np.where(slots[:, :1] >= 0, claimed, np.where(slots[:, :1] == -3, 0, 0xFF)))
    return np.concatenate(out).astype(np.uint8)


SW34, SW33 = Swizzle(3, 0, 4, "vector"), Swizzle(3, 0, 3, "vector")


@pytest.mark.parametrize(
    ("dtype", "mma", "swizzle", "BN", "WN", "BK", "depth", "k", "more"),
    [
        ("bf16", (32, 32, 16), SW34, 64, 64, 32, 128, True, {}),
        ("bf16", (32, 32, 16), None, 64, 64, 32, 128, False, {}),
        ("fp8", (16, 16, 128), SW34, 128, 32, 128, 192, True, {"bk_smem": 64}),
        ("bf16", (16, 16, 32), SW33, 128, 32, 32, 64, True, {"num_smem_stages": 3}),
        ("bf16", (32, 32, 16), SW34, 64, 64, 32, 128, True, {"full_kv": False}),
    ],
    ids=["k-bf16-32x32", "v-bf16", "k-fp8-split", "k-bf16-16x16-3-stages", "full_kv-False"],
)
def test_stages(dtype: str, mma: Any, swizzle: Any, BN: int, WN: int, BK: int, depth: int, k: bool, more: dict) -> None:
    view, keys = cache(depth, dtype)
    params = KVBufferParams(dtype, mma, swizzle, BN, WN, BK, 256, depth, 1, k, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        buffer = KVBuffer(params, view, 0, 0, end=KEYS)
    assert (buffer.smem_image().slots == -1).all()
    stages = params.num_smem_stages
    blank = np.zeros((BN, keys.shape[1]), np.uint8)
    tiles = [blank] * stages
    for load in range(4):  # the last tiles end past the keys
        buffer.load_from_dram(load % stages)
        tiles[load % stages] = np.concatenate([keys[load * BN : (load + 1) * BN], blank])[:BN]
        image = buffer.smem_image()
        if load + 1 >= stages:
            assert np.array_equal(said(image, tiles).ravel(), buffer.smem.bytes[0])
    assert buffer.stage_keys[0][0].tolist() == [BN * (4 - (4 % stages or stages))]
    assert len(image.areas) == stages * params.blocks_per_stage
    first, last = (BN * (4 - (4 % stages or stages)), params.bk_smem - 1)
    held = f"keys {first}–{min(first + BN, KEYS) - 1}" if first < KEYS else "no key"
    assert image.areas[0].words == f"stage 0, {held}, block 0: columns 0–{last}"
    steps = np.diff([area.address for area in image.areas])
    assert (steps == BN * params.bk_smem * params.dtype.itemsize).all()


@pytest.mark.parametrize("dtype, mma, BK", [("bf16", (32, 32, 16), 32), ("fp8", (32, 32, 64), 64)], ids=["bf16", "fp8"])
@pytest.mark.parametrize("k", [True, False], ids=["k", "v"])
def test_columns_past_the_head_are_zeros(dtype: str, mma: Any, BK: int, k: bool) -> None:
    """A bounded buffer of 128 columns over heads of 80."""
    view, keys = cache(80, dtype)
    params = KVBufferParams(dtype, mma, SW34 if k else None, 64, 64, BK, 256, 128, 1, k, num_smem_stages=1)
    with pytest.raises(ValueError, match="depth 128 from head_dim_offset 0 on must end inside the head of 80"):
        KVBuffer(params, view, 0, 0, end=KEYS)
    buffer = KVBuffer(params, view, 0, 0, end=KEYS, bounded=True)
    buffer.load_from_dram(0)
    assert np.array_equal(said(buffer.smem_image(), [keys[:64]]).ravel(), buffer.smem.bytes[0])
    assert (buffer.smem_image().slots[:, 0] == -3).sum() == 64 * 48 * params.dtype.itemsize // 16
    tile = [buffer.load_from_shared(0), *(np.array(buffer.strip_tile(s)) for s in range(params.num_k_tiles))][1:]
    found = np.concatenate([buffer.fragment_map().gather(strip)[0] for strip in tile], axis=1 if k else 0)
    assert (found[:, :80].view(np.uint8) == keys[:64]).all()
    assert (found[:, 80:].view(np.uint8) == 0).all()


def test_slices_show_what_their_source_loaded() -> None:
    view, _ = cache(256, "bf16")
    params = KVBufferParams("bf16", (16, 16, 32), None, 128, 128, 32, 256, 256, 1, False, num_smem_stages=1)
    whole = KVBuffer(params, view, 0, 0, end=KEYS)
    slices = WarpSlices(whole, num_warps_n=4)
    whole.load_from_dram(0)
    assert np.array_equal(slices.smem_image().slots, whole.smem_image().slots)


@pytest.mark.parametrize("k", [True, False], ids=["k", "v"])
@pytest.mark.parametrize(("dtype", "mma", "BK"), [("bf16", (16, 16, 32), 32), ("fp8", (16, 16, 32), 32)])
@pytest.mark.parametrize("follows", ["MAX 26.7", "document"])
def test_streaming_strips(dtype: str, mma: Any, BK: int, k: bool, follows: str) -> None:
    view, keys = cache(128, dtype)
    swizzle = SW33 if k and dtype == "bf16" else None
    params = KVBufferParams(dtype, mma, swizzle, 128, 32, BK, 256, 128, 1, k, follows=follows)
    buffer = DecodeStreamingKVBuffer(params, view, 0, 0, num_keys=KEYS)
    walk = buffer.iterator()
    tile = keys[:0]
    for number, strip in ((0, 1), (1, 2)):
        buffer.load_from_dram(strip, walk.next_tile())
        tile = keys[128 * number : min(128 * (number + 1), KEYS)]
        image = buffer.smem_image()
        assert np.array_equal(said(image, [tile]).ravel(), buffer.smem.bytes[0])
    assert f"strip {strip}" in image.areas[0].words


@pytest.mark.parametrize("k", [True, False], ids=["k", "v"])
def test_register_staged_tiles(k: bool) -> None:
    view, keys = cache(128, "bf16")
    core = TiledTensorCore("fp32", "bf16", (16, 16, 32), 1, k)
    params = DecodeKVBufferParams("bf16", Layout.row_major(128, 128), core, SW33 if k else None, 128, 32, 32, 128, 256,
                                  num_stages=2, token_gen=True)
    buffer = DecodeKVBuffer(params, view, 0, 0, end=90)
    assert (buffer.smem_image().slots == -1).all()
    for _ in range(3):
        buffer.load_from_dram()
    buffer.copy_to_shared(0)  # tile 2 has replaced tile 0
    image = buffer.smem_image()
    assert image.areas[0].words.startswith("tile 2")
    assert np.array_equal(said(image, [keys[:90]]).ravel(), buffer.smem.bytes[0])


def test_read_addresses_are_the_reads() -> None:
    """A read of 16 bytes at each address gives the registers of the lane."""
    view, _ = cache(128, "bf16")
    params = KVBufferParams("bf16", (16, 16, 32), SW33, 128, 32, 32, 256, 128, 1, True)
    buffer = KVBuffer(params, view, 0, 0, end=KEYS)
    buffer.load_from_dram(0)
    buffer.load_from_dram(1)
    name, address = buffer.read_addresses(1, bk_tile=2)
    assert (name, address.shape) == ("ds_read_b128", (2, 4, 64))
    read = buffer.smem.load(address[None], params.dtype, 8)[0]  # [instructions, warps, lanes, 8]
    buffer.load_from_shared(1, bk_tile=2)
    registers = np.asarray(buffer.strip_tile(2))[0].reshape(4, 64, 2, 8)
    assert np.array_equal(np.moveaxis(read, 0, 2).view(np.uint16), registers.view(np.uint16))

    core = TiledTensorCore("fp32", "bf16", (16, 16, 32), 1, transpose_b=True)
    staged = DecodeKVBufferParams("bf16", Layout.row_major(128, 128), core, None, 128, 32, 64, 128, 256)
    other = DecodeKVBuffer(staged, view, 0, 0, end=KEYS)
    other.load_from_dram()
    other.copy_to_shared()
    name, address = other.read_addresses(1)
    assert name == "ds_read_b128"
    read = other.smem.load(address[None], staged.dtype, 8)[0]
    registers = np.asarray(other.load_from_shared(1))[0].reshape(4, 64, 2, 8)
    assert np.array_equal(np.moveaxis(read, 0, 2).view(np.uint16), registers.view(np.uint16))


@pytest.mark.parametrize("k", [True, False], ids=["k", "v"])
@pytest.mark.parametrize("depth", [128, 96])
def test_cp_async_stages(k: bool, depth: int) -> None:
    view, keys = cache(depth, "bf16")
    params = NvidiaKVParams("bf16", BN=64, depth=depth, kv_num_heads=1, transpose=k)
    buffer = CpAsyncKVBuffer(params, view, 0, 0, end=KEYS)
    assert (buffer.smem_image().slots == -1).all()
    tiles = []
    for load in range(2, 4):  # the last tile ends past the keys
        buffer.kv_cache_iter.tile_start_row = 64 * load
        buffer.load_from_dram(load - 2)
        tiles.append(np.concatenate([keys[64 * load : min(64 * load + 64, KEYS)], np.zeros_like(keys[:64])])[:64])
    image = buffer.smem_image()
    assert np.array_equal(said(image, tiles).ravel(), buffer.smem.bytes[0])
    assert [area.words for area in image.areas] == ["stage 0, keys 128–191", "stage 1, keys 192–199"]
    buffer.wait()
    name, address = buffer.read_addresses(1)
    assert name.startswith("ldmatrix.x4")
    first = buffer.stage_address(1)
    assert first <= address.min() <= address.max() < first + params.stage_bytes


@pytest.mark.parametrize("depth", [128, 96])
def test_tma_stages(depth: int) -> None:
    """Rows past the last key are those of the page (random, too)."""
    view, keys = cache(depth, "bf16")
    params = NvidiaKVParams("bf16", BN=64, depth=depth, kv_num_heads=1, transpose=True, arch="sm_90")
    buffer = TmaKVBuffer(params, view, 0, 0, end=KEYS)
    buffer.kv_cache_iter.tile_start_row = 128
    buffer.load_from_dram(0)
    buffer.load_from_dram(1)
    image = buffer.smem_image()
    assert np.array_equal(said(image, [keys[128:192], keys[192:256]]).ravel(), buffer.smem.bytes[0])
    assert image.areas[-1].words == "stage 1, keys 192–199, chunk 1: columns 64–127"
