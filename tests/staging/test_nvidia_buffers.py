"""The NVIDIA counterparts of KVBuffer: products through fragments and descriptors against float64; images; counts."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from nvidia_tiles import buffer, padded

from kvlab.cache import PagedKVCache
from kvlab.hardware import SmemDescriptor, create_tensor_tile, tile_layout_k_major, tile_to_descriptor
from kvlab.memory import AddressSpace, Memory, bfloat16
from kvlab.staging import CpAsyncKVBuffer, Hazards, NvidiaKVParams, Timeline, TmaKVBuffer, Traffic

Array = np.ndarray[Any, Any]
DEPTHS = [64, 72, 80, 96, 128, 192, 256]
depths = pytest.mark.parametrize("depth", DEPTHS, ids=lambda d: f"D{d}")
roles = pytest.mark.parametrize("transpose", [True, False], ids=["K", "V"])
dtypes = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


def random(shape: tuple[int, ...], dtype: Any) -> Array:
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


@depths
@roles
@dtypes
@pytest.mark.parametrize("BN, page, BM", [(64, 64, 16), (64, 16, 32), (32, 256, 16), (128, 5, 16)])
def test_mma_sync_product(depth: int, transpose: bool, dtype: str, BN: int, page: int, BM: int) -> None:
    """Rests on float64: S = Q K^T and O = P V of two tiles, copied one ahead, ragged ends as zeros."""
    b, dense = buffer(CpAsyncKVBuffer, dtype, BN, depth, page, transpose=transpose)
    p = b.params
    b.load_from_dram(0)
    b.load_from_dram(1)
    for stage in range(2):
        b.wait(1 - stage)
        b.load_from_shared(stage)
        keys = padded(dense[:, stage * BN : (stage + 1) * BN], p.padded_depth)
        assert (b.fragment_map().gather(b.reg_tile).astype(np.float64) == keys).all()
        a = random((3, BM, p.padded_depth if transpose else BN), p.dtype)
        c = np.ones((3, *b.output_map(BM).row.shape), np.float32)
        for k in range(p.num_k_mmas2):
            c = b.mma(b.operand_map(BM).spread(a), c, k)
        exact = 1 + a.astype(np.float64) @ (keys.swapaxes(1, 2) if transpose else keys)
        np.testing.assert_allclose(b.output_map(BM).gather(c), exact, rtol=0, atol=1e-4)


@depths
@roles
@dtypes
@pytest.mark.parametrize("BN, page", [(64, 64), (64, 16), (128, 8), (32, 256), (256, 64)])
def test_wgmma_product(depth: int, transpose: bool, dtype: str, BN: int, page: int) -> None:
    """Rests on float64. Three tiles through two stages, so that one stage is filled again; columns of S and rows of P
    past the end are left out: nothing is promised of them."""
    b, dense = buffer(TmaKVBuffer, dtype, BN, depth, page, transpose=transpose)
    p = b.params
    b.load_from_dram(0)
    for tile in range(2):
        stage = tile % 2
        b.load_from_dram(1 - stage)  # the next tile; past the last one its boxes lie outside and arrive as zeros
        b.wait(stage)
        keys = dense[:, tile * BN : (tile + 1) * BN]
        valid = np.clip(np.array([2 * BN, BN + 5, 1]) - tile * BN, 0, BN)
        seen = np.arange(BN) < valid[:, None]
        a = random((3, 64, depth if transpose else BN), p.dtype)
        a = a if transpose else a * seen[:, None].astype(p.dtype)
        c = b.mma(b.operand(a), b.zeros() + np.float32(1), stage)
        b.wait_mma()
        b.release(stage)
        got = b.atom.tile_c(c)
        exact = 1 + a.astype(np.float64) @ (keys.swapaxes(1, 2) if transpose else padded(keys, p.padded_depth))
        if transpose:
            got, exact = (np.where(seen[:, None], x, 0) for x in (got, exact))
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-4)


def test_wgmma_with_both_operands_in_shared_memory() -> None:
    """Rests on float64: Q through a descriptor of its own, beside the stages of K."""
    smem = Memory(2 * 64 * 256 + 64 * 256, space=AddressSpace.SHARED, name="smem", programs=3)
    b, dense = buffer(TmaKVBuffer, "bf16", 64, 128, 64, transpose=True, smem=smem)
    q, at = random((64, 128), bfloat16), 2 * 64 * 256
    create_tensor_tile(q, (64, 128), "128B").async_copy(smem, at, (0, 0))
    layout = tile_layout_k_major("bf16", 64, 128, "128B")
    first = tile_to_descriptor(layout, "bf16", "128B", at)
    operand = [first.advance(int(layout(0, 16 * k)) * 2) for k in range(8)]
    b.load_from_dram(0)
    b.wait(0)
    s = b.atom.tile_c(b.mma(operand, b.zeros(), 0))
    exact = q.astype(np.float64) @ dense[0, :64].T
    np.testing.assert_allclose(s[0], exact, rtol=0, atol=1e-4)


def test_rows_past_the_end_are_zeroed_for_v() -> None:
    """Rests on arithmetic: 0 times NaN is NaN, so the NaN of unused slots must be gone before P V."""
    pool = np.full((1, 64, 1, 64), np.nan, bfloat16)
    pool[0, :5] = 2
    cache = PagedKVCache(pool, [4], [[0]], max_seq_length=1, max_cache_length=64)
    v = TmaKVBuffer(NvidiaKVParams("bf16", 64, 64, 1, False, 1, "sm_90"), cache, 0, 0, 5)
    p = np.where(np.arange(64) < 5, 1, 0) * np.ones((1, 64, 1))
    v.load_from_dram(0)
    v.wait(0)
    assert np.isnan(v.atom.tile_c(v.mma(v.operand(p), v.zeros(), 0))).any()
    v.wait_mma()
    v.hazards.barrier((0, 1, 2, 3), (0, 1, 2, 3), name=1)
    v.zero_rows_past_end(0)
    assert (v.atom.tile_c(v.mma(v.operand(p), v.zeros(), 0)) == 10).all()


@pytest.mark.parametrize("depth", [64, 128, 256])
def test_block_tiles_are_the_bytes_of_the_stage(depth: int) -> None:
    """Rests on the swizzles: Triton's (8, 1, 8) for cp.async, 128B of TMA, both spelled out here."""
    for kind in (CpAsyncKVBuffer, TmaKVBuffer):
        b, dense = buffer(kind, "bf16", 32, depth, 32, transpose=True)
        b.load_from_dram(0)
        b.load_from_dram(1)
        width = depth if kind is CpAsyncKVBuffer else 64
        for row, vector in ((0, 0), (9, 3), (31, width // 8 - 1)):
            image = b.smem_block_tile(8, row // 8, depth // width).to_numpy()[0]  # of stage 1, its first columns
            got = image[row % 8, 8 * (vector ^ row % 8) :][:8].astype(np.float64)
            assert (got == dense[0, 32 + row, 8 * vector : 8 * vector + 8]).all()


def test_descriptors_step_along_k() -> None:
    """Rests on the PTX ISA: 32 bytes inside a swizzled row, one chunk beyond; MN-major: 16 keys of 128 bytes."""
    k, _ = buffer(TmaKVBuffer, "bf16", 64, 128, 64, transpose=True)
    v, _ = buffer(TmaKVBuffer, "bf16", 64, 128, 64, transpose=False)
    starts = [d.start_address for d in k.load_from_shared(1)]
    assert starts == [16384 + s for s in (0, 32, 64, 96, 8192, 8224, 8256, 8288)]
    assert [d.start_address for d in v.load_from_shared(0)] == [0, 2048, 4096, 6144]
    assert isinstance(v.get_mma_tile(3, 0), SmemDescriptor)
    assert v.get_mma_tile(3, 0).leading_bytes == 64 * 128  # from 64 columns to the next


def test_what_moves() -> None:
    """Rests on arithmetic: 64 keys of 128 bf16 are 16 KiB, 32 ldmatrix.x4 of 512 bytes, 8 a warp, 4 passes each."""
    traffic = Traffic(timeline=Timeline())
    b, _ = buffer(CpAsyncKVBuffer, "bf16", 64, 128, 64, transpose=True, traffic=traffic)
    b.load_from_dram(0)
    b.wait()
    b.load_from_shared(0)
    assert traffic.moved["DRAM->SMEM"] == (64 + 64 + 1) * 256
    assert traffic.moved["SMEM->registers"] == 3 * 16384
    assert traffic.per_warp("wavefronts", "k read").tolist() == [3 * 32] * 4
    assert traffic.per_warp("instructions", "k read").tolist() == [3 * 8] * 4
    assert traffic.total("wavefronts") == traffic.total("ideal")
    assert [event.kind for event in traffic.trace()] == ["copy", "commit", "wait", "landed", "barrier", "read"]
    t = Traffic(timeline=Timeline())
    b, _ = buffer(TmaKVBuffer, "bf16", 64, 128, 64, transpose=True, traffic=t)
    b.load_from_dram(0)
    b.wait(0)
    b.mma(b.operand(random((3, 64, 128), bfloat16)), b.zeros(), 0)
    b.wait_mma()
    b.release(0)
    kinds = [event.kind for event in t.trace()]
    assert kinds == ["wait", "expect", "copy", "wait", "landed", "read in flight", "wait", "arrive"]
    assert t.per_warp("instructions", "k tma").tolist() == [0, 0, 0, 0, 3 * 2]
    assert t.moved["DRAM->SMEM"] == 3 * 16384


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": "float32"}, "dtype is float32: must be bfloat16 or float16"),
        ({"BN": 48}, "BN is 48: must be a multiple of 32"),
        ({"depth": 60}, "depth is 60: must be a multiple of 8"),
        ({"depth": 512}, "depth is 512: must be a multiple of 8 from 16 to 256"),
        ({"num_smem_stages": 0}, "num_smem_stages is 0: must be at least 1"),
        ({"arch": "gfx950"}, "arch 'gfx950' is not NVIDIA's"),
    ],
    ids=str,
)
def test_bad_parameters(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"dtype": "bf16", "BN": 64, "depth": 64, "kv_num_heads": 2, "transpose": True}
    with pytest.raises(ValueError, match=re.escape(message)):
        NvidiaKVParams(**{**good, **change})


def test_bad_calls() -> None:
    cp, _ = buffer(CpAsyncKVBuffer, "bf16", 32, 64, 32, transpose=True)
    tma, _ = buffer(TmaKVBuffer, "bf16", 32, 64, 32, transpose=True)
    for b in (cp, tma):
        with pytest.raises(ValueError, match="stage is 2: must be one of the 2 stages"):
            b.stage_address(2)
        with pytest.raises(ValueError, match=r"smem_block_tile\(8, 4, 0\) is not in the"):
            b.smem_block_tile(8, 4, 0)
    with pytest.raises(ValueError, match="stage 1: the next one of the producer is 0 of 2"):
        tma.load_from_dram(1)
    with pytest.raises(ValueError, match="page_size 12 and BN 32: one must divide the other"):
        buffer(TmaKVBuffer, "bf16", 32, 64, 12, transpose=True)
    with pytest.raises(ValueError, match="k_mma is 4: must be one of the 4 k steps"):
        cp.get_mma_tile(4)
    small = Memory(4096, programs=3)
    with pytest.raises(ValueError, match="do not fit in"):
        buffer(CpAsyncKVBuffer, "bf16", 32, 64, 32, transpose=True, smem=small)
    with pytest.raises(ValueError, match="do not fit in"):
        buffer(TmaKVBuffer, "bf16", 32, 64, 32, transpose=True, smem=small)


def test_k_and_v_share_hazards_and_memory() -> None:
    """V's stages behind K's in one memory under one record."""
    smem = Memory(2 * 2 * 32 * 128, programs=3)
    hazards = Hazards(smem, 5)
    k, _ = buffer(TmaKVBuffer, "bf16", 32, 64, 32, transpose=True, smem=smem, hazards=hazards)
    v, _ = buffer(TmaKVBuffer, "bf16", 32, 64, 32, transpose=False, smem=smem, smem_address=8192, hazards=hazards)
    for b in (k, v):
        b.load_from_dram(0)
        b.wait(0)
        b.mma(b.operand(random((3, 64, 64 if b is k else 32), bfloat16)), b.zeros(), 0)
        b.wait_mma()
        b.release(0)
    hazards.finish()


@pytest.mark.parametrize("kind", [CpAsyncKVBuffer, TmaKVBuffer])
def test_members_are_those_of_the_parameters(kind: Any) -> None:
    """The names of MAX's KVBuffer, the numbers by their formulas."""
    b, _ = buffer(kind, "bf16", 32, 80, 32, transpose=True)
    assert (b.MMA_K, b.num_k_mmas2, b.simd_width, b.smem_cols, b.smem_stage_size) == (16, 8, 8, 128, 32 * 128)
    assert kind.mma_subtile is kind.get_mma_tile
