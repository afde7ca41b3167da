"""Tiles of K and V as compiled kernels stage them, against the emulated buffers: addresses, registers, reads.

Rests on the compiler's value: the encodings in the TTGIR of the installed Triton, for sm_80, sm_90 and gfx950, without
a GPU. That the encodings' closed forms are the compiler's own is tested by tests/layout/test_triton_oracle.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import triton

from kvlab.cache import PagedKVCache
from kvlab.layout import Swizzle
from kvlab.layout.encodings import (
    BlockedLayout,
    NVMMASharedLayout,
    PaddedSharedLayout,
    SharedLinearLayout,
    SwizzledSharedLayout,
)
from kvlab.staging import (
    CpAsyncKVBuffer,
    DecodeStreamingKVBuffer,
    KVBuffer,
    KVBufferParams,
    NvidiaKVParams,
    TmaKVBuffer,
)
from kvlab.triton_support.staged_tile import StagedTile, compiler_staging, staging_as
from kvlab.triton_support.staging_match import match_staging

pytestmark = pytest.mark.compile

ROWS, DEPTH = 128, 128
PADS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9)
"""Triton 3.9 pads V on gfx950, where older ones swizzle it."""
VALUES = np.arange(ROWS * DEPTH, dtype=np.uint16).reshape(1, ROWS, 1, DEPTH)
MAX = KVBufferParams("bf16", (32, 32, 16), Swizzle(3, 0, 4, "vector"), BN=64, WN=64, BK=32, num_threads=256,
                     depth=DEPTH, kv_num_heads=1, transpose=True, num_smem_stages=1)
STREAMED = KVBufferParams("bf16", (16, 16, 32), Swizzle(3, 0, 3, "vector"), BN=128, WN=32, BK=32, num_threads=256,
                          depth=DEPTH, kv_num_heads=1, transpose=True)
compiled = functools.cache(compiler_staging)


def cache() -> PagedKVCache:
    """Every element of the one page has bits of its own."""
    return PagedKVCache(VALUES.view(MAX.dtype), [ROWS - 1], [[0]], 1, ROWS)


def nvidia(arch: str, role: str, kind: Any, BN: int) -> Any:
    params = NvidiaKVParams("bf16", BN, DEPTH, 1, transpose=role == "k", num_smem_stages=1, arch=arch)
    buffer = kind(params, cache(), batch_idx=0, head_idx=0, end=ROWS)
    buffer.load_from_dram(0)
    return buffer


def amd(role: str) -> KVBuffer:
    params = MAX if role == "k" else replace(MAX, swizzle=None, transpose=False)
    buffer = KVBuffer(params, cache(), batch_idx=0, head_idx=0, end=ROWS)
    buffer.load_from_dram(0)
    return buffer


def streamed(role: str) -> DecodeStreamingKVBuffer:
    params = STREAMED if role == "k" else replace(STREAMED, swizzle=None, transpose=False)
    buffer = DecodeStreamingKVBuffer(params, cache(), batch_idx=0, head_idx=0, num_keys=ROWS)
    buffer.load_from_dram(0, buffer.iterator().next_tile())
    return buffer


def by_lane(read: tuple[str, Any]) -> Any:
    """The addresses of each lane ``[warps, lanes, instructions]``, sorted: compilers choose the order of reads."""
    return np.sort(np.moveaxis(read[1], 0, -1))


def found_in(buffer: Any, tile: StagedTile) -> np.ndarray[Any, Any]:
    """What lies in the emulated memory at the compiled addresses, as bits."""
    dtype, first = buffer.params.dtype, buffer.smem_image().base
    return buffer.smem.load(first + tile.addresses()[None, ..., None], dtype, 1).view(np.uint16).reshape(tile.shape)


@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize(
    ("arch", "kind", "BM", "BN", "encoding"),
    [
        ("sm_80", CpAsyncKVBuffer, 16, 32, SwizzledSharedLayout(8, 1, 8, [1, 0])),
        ("sm_80", CpAsyncKVBuffer, 16, 64, SwizzledSharedLayout(8, 1, 8, [1, 0])),
        ("sm_90", CpAsyncKVBuffer, 16, 32, SwizzledSharedLayout(8, 1, 8, [1, 0])),
        ("sm_90", TmaKVBuffer, 64, 64, NVMMASharedLayout(128, 16)),
    ],
)
def test_nvidia_keeps_each_element_where_the_emulator_does(arch, kind, BM, BN, encoding, role) -> None:
    """The same byte and the same registers; on the bytes themselves, too. Reads without a conflict."""
    tile = compiled(arch, BM=BM, BN=BN, D=DEPTH)["kv".index(role)]
    buffer = nvidia(arch, role, kind, BN)
    match = match_staging(buffer, tile)
    assert tile.shared == encoding
    assert match.same == BN * DEPTH == match.emulated.size
    assert (found_in(buffer, tile) == VALUES[0, :BN, 0]).all()
    assert match.registers is (None if kind is TmaKVBuffer else True)
    if match.registers:
        assert set(match.instructions) == {"ldmatrix.x4" if role == "k" else "ldmatrix.x4.trans"}
        assert len({*match.passes, *match.ideal}) == 1
        assert (by_lane(tile.read_addresses()) == by_lane(buffer.read_addresses(0))).all()


def test_gfx950_holds_maxs_fragments_of_k_and_v() -> None:
    """Thread by thread, V's keys in the order of the scores too; K lies elsewhere, and neither has a conflict there."""
    k, v = compiled("gfx950", BM=128, BN=64, D=DEPTH)
    match = match_staging(amd("k"), k)
    assert k.shared == SwizzledSharedLayout(8, 1, 16, [1, 0])
    assert match.registers
    assert match.same == 64, "four vectors of row 0, four of row 21"
    assert match.instructions == ("ds_read_b128", "ds_read_b128")
    assert match.passes == match.ideal == (256, 256)
    match = match_staging(amd("v"), v)
    assert match.registers
    assert match.instructions == ("ds_read_tr16_b64", "ds_read_tr16_b64")
    assert match.ideal == (256, 256)
    assert match.passes == (256, 256 if PADS else 1024)
    kind = PaddedSharedLayout if PADS else SwizzledSharedLayout
    assert isinstance(v.shared, kind)


def test_strips_of_gfx950_lie_in_other_places_and_registers() -> None:
    """Four warps share the keys of a strip in MAX's decode; the compiler gives every warp all of them."""
    k = compiled("gfx950", BM=16, BN=128, D=32)[0]
    match = match_staging(streamed("k"), k)
    assert match.registers is False
    assert match.ideal == (32, 128)
    assert match.passes == (32, 256)
    v = compiled("gfx950", BM=16, BN=32, D=DEPTH)[1]
    match = match_staging(streamed("v"), v)
    assert match.registers is False
    assert match.instructions == ("ds_read_u16", "ds_read_tr16_b64")
    assert match.passes == (256, 32 if PADS else 128)
    assert match.ideal == (64, 32)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx950"])
@pytest.mark.parametrize("role", ["k", "v"])
def test_gluon_keeps_maxs_layout_where_it_is_told_so(target, role) -> None:
    """MAX's image as a linear layout: the compiled kernel finds each element at MAX's byte, on every target."""
    buffer = amd(role)
    emulated = buffer.smem_image().addresses(2)
    shared = SharedLinearLayout.from_offsets(emulated // 2)
    registers = compiled("gfx950", BM=128, BN=64, D=DEPTH)["kv".index(role)].registers
    if target != "gfx950":
        registers = BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    tile = staging_as(target, (64, DEPTH), shared, registers)
    assert isinstance(tile.shared, SharedLinearLayout)
    assert (tile.addresses() == emulated).all()
    assert (found_in(buffer, tile) == VALUES[0, :64, 0]).all()
    if target == "gfx950":
        reads = [buffer.read_addresses(0, strip) for strip in range(buffer.num_k_tiles)]
        emulated_reads = "", np.concatenate([address for _, address in reads])
        assert (by_lane(tile.read_addresses()) == by_lane(emulated_reads)).all()


@pytest.mark.parametrize(
    ("target", "BM", "BN", "D"), [("sm_80", 16, 32, 64), ("sm_90", 16, 64, 128), ("gfx950", 128, 64, 64)]
)
def test_what_the_compiler_chose_can_be_told(target, BM, BN, D) -> None:
    """The same addresses and registers come back."""
    for tile in compiled(target, BM=BM, BN=BN, D=D):
        told = staging_as(target, tile.shape, tile.shared, tile.registers)
        assert (told.addresses() == tile.addresses()).all()
        assert (told.fragment_map().flat == tile.fragment_map().flat).all()


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="target is 'sm_70': must be one of sm_80"):
        compiler_staging("sm_70", BM=16, BN=32, D=64)
    swizzled, blocked = SwizzledSharedLayout(8, 1, 8, [1, 0]), BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    with pytest.raises(ValueError, match="target is 'sm_70': must be one of sm_80"):
        staging_as("sm_70", (32, 64), swizzled, blocked)
    with pytest.raises(ValueError, match=r"shape is \(32,\): must be of rank 2"):
        staging_as("sm_80", (32,), swizzled, blocked)
    tensor_cores = StagedTile("sm_90", (64, DEPTH), NVMMASharedLayout(128, 16), None)
    with pytest.raises(ValueError, match="no thread holds the tile"):
        tensor_cores.fragment_map()
    with pytest.raises(ValueError, match="reads are known of sm_80 to sm_90 and gfx950"):
        StagedTile("gfx942", (32, 64), swizzled, blocked).read_addresses()
    with pytest.raises(ValueError, match=r"tile of shape \(64, 128\): must be \(32, 128\)"):
        match_staging(nvidia("sm_80", "k", CpAsyncKVBuffer, 32), tensor_cores)
