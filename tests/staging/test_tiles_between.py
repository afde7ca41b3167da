"""Tile tensors between DRAM, shared memory and registers: what buffers, loaders and products take and give.

Rests on laws: a tile of the wrong address space, dtype or shape is refused by the name of the argument, and every byte
of shared memory and every register is as it was; sub-tiles of shared memory are views of ``smem_tile``, with the
strides of a block; register tiles are views of ``reg_tile``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from registers import held, in_registers

from kvlab.cache import PagedKVCache
from kvlab.hardware import RegTileLoader, RegTileWriterLDS, SubTileLoaderLDS, SubTileLoaderLDS_st_8x32
from kvlab.layout import Layout, Swizzle, TileTensor
from kvlab.memory import AddressSpace, Memory, UnwrittenRead, bfloat16
from kvlab.staging import (
    DecodeKVBuffer,
    DecodeKVBufferParams,
    DecodeStreamingKVBuffer,
    KVBuffer,
    KVBufferParams,
    KVMmaOp,
    KVMmaOpParams,
    TiledMmaOp,
    TiledTensorCore,
)

GLOBAL, SHARED, LOCAL = AddressSpace.GLOBAL, AddressSpace.SHARED, AddressSpace.LOCAL
KEYS = (np.arange(2 * 64 * 2 * 64) % 251).reshape(2, 64, 2, 64).astype(bfloat16)
SIZES: dict[str, Any] = {"BN": 64, "WN": 32, "BK": 32, "num_threads": 256, "depth": 64}


def cache() -> PagedKVCache:
    return PagedKVCache(KEYS, [99], [[1, 0]], 1, 100)


def parameters(transpose: bool) -> KVBufferParams:
    swizzle = Swizzle(3, 0, 3, "vector") if transpose else None
    return KVBufferParams("bf16", (16, 16, 32), swizzle, **SIZES, kv_num_heads=2, transpose=transpose)


def tensor(space: AddressSpace, layout: Any, dtype: Any = "bf16", **more: Any) -> TileTensor:
    """A tile of ones."""
    return TileTensor.stack_allocation(layout, dtype, space, **more).fill(1)


def dram(rows: int, cols: int, dtype: Any = bfloat16, **more: Any) -> TileTensor:
    return TileTensor.from_numpy(np.ones((rows, cols), dtype), **more)


SQUARE = Layout.row_major(32, 32)
LOADER = SubTileLoaderLDS("bf16")
CTA = SubTileLoaderLDS_st_8x32("bf16", BN=64, depth=128, BK=32, num_threads=256)
TO_REGISTERS = RegTileLoader("bf16", Layout.row_major(16, 4))
TO_LDS = RegTileWriterLDS("bf16", Layout.row_major(16, 4))
OP = TiledMmaOp("fp32", "bf16", (16, 16, 32), True)
CORE = TiledTensorCore("fp32", "bf16", (16, 16, 32), 1, True)


def stream(tile: TileTensor, transpose: bool = True) -> tuple[Callable[[], None], TileTensor]:
    buffer = DecodeStreamingKVBuffer(parameters(transpose), cache(), 0, 1, num_keys=100)
    place = buffer.smem_ptr.tile_tensor(Layout(buffer.strip_bytes // 2))
    return lambda: buffer.load_from_dram(0, gmem_tile=tile), place


def walked(tile: TileTensor) -> tuple[Callable[[], None], TileTensor]:
    buffer = KVBuffer(parameters(True), cache(), 0, 1, end=100)
    buffer.kv_cache_iter.next_tile = lambda: tile  # type: ignore[method-assign]
    return lambda: buffer.load_from_dram(0), buffer.smem_tile


def loads(loader: Any, dst: TileTensor, src: TileTensor) -> tuple[Callable[[], None], TileTensor]:
    return lambda: (loader.store if loader is TO_LDS else loader.load)(dst, src), dst


def op_loads(name: str, tile: TileTensor) -> tuple[Callable[[], None], TileTensor]:
    op = KVMmaOp(KVMmaOpParams("bf16", (16, 16, 32), 2, 1, 1, 64, 32, True), num_threads=64)
    return lambda: op.load_prefill(0, **{name: tile}), op.reg_tile


def multiplies(which: Any, a: Any = (1, 8), c: Any = (2, 4), **of: Any) -> tuple[Callable[[], None], TileTensor]:
    tiles = {
        name: tensor(of.get(f"{name}_space", LOCAL), Layout.row_major(*shape), of.get(f"{name}_dtype", dtype),
                     threads=of.get(f"{name}_threads", 64), programs=1)
        for name, shape, dtype in (("a", a, "bf16"), ("b", (2, 8), "bf16"), ("c", c, "fp32"))
    }
    return lambda: which.mma(**tiles), tiles["c"]


LANES, VECTORS = {"threads": 64}, Layout(16)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "strip of registers": (lambda: stream(tensor(LOCAL, Layout.row_major(64, 64))), "gmem_tile is in local"),
    "strip of shared memory": (lambda: stream(tensor(SHARED, Layout.row_major(64, 64))), "gmem_tile is in shared"),
    "strip of another dtype": (lambda: stream(dram(64, 64, np.float32)), "gmem_tile is of float32: must be of bfloat"),
    "strip of vectors": (lambda: stream(dram(64, 64).vectorize(1, 8)), "gmem_tile is of bfloat16 x8"),
    "strip of other rows": (lambda: stream(dram(32, 64)), "gmem_tile is 32 x 64: must be 64 x 64"),
    "strip of fewer columns": (lambda: stream(dram(64, 32), False), "gmem_tile is 64 x 32: must be 64 x 64"),
    "strip of more columns": (lambda: stream(dram(64, 96)), "gmem_tile is 64 x 96: must be 64 x 64"),
    "strip of columns apart": (lambda: stream(dram(64, 128).tile((64, 64), (0, 0)).transpose()), "columns contiguous"),
    "strip of two programs": (lambda: stream(TileTensor.from_numpy(np.ones((2, 64, 64), bfloat16), batch=1)),
                              "gmem_tile is of 2 programs: must be of 1"),
    "walk of shared memory": (lambda: walked(tensor(SHARED, Layout.row_major(64, 64))), "kv_cache_iter is in shared"),
    "walk of other rows": (lambda: walked(dram(48, 64)), "the tile of kv_cache_iter is 48 x 64: must be 64 x 64"),
    "dma to registers": (lambda: loads(LOADER, tensor(LOCAL, SQUARE), dram(32, 32)), "dst is in local memory: must be"),
    "dma from shared": (lambda: loads(LOADER, tensor(SHARED, SQUARE), tensor(SHARED, SQUARE)), "src is in shared"),
    "dma of float32": (lambda: loads(LOADER, tensor(SHARED, SQUARE), dram(32, 32, np.float32)), "src is of float32"),
    "dma to float32": (lambda: loads(LOADER, tensor(SHARED, SQUARE, "fp32"), dram(32, 32)), "dst is of float32"),
    "dma of another shape": (lambda: loads(LOADER, tensor(SHARED, SQUARE), dram(32, 64)), "src is 32 x 64: must be 32"),
    "dma to rows apart": (lambda: loads(LOADER, tensor(SHARED, Layout("(32,32):(40,1)")), dram(32, 32)),
                          "dst is .* row-major"),
    "cta's dma": (lambda: loads(CTA, tensor(SHARED, Layout(64 * 128)), dram(64, 64)), "src is 64 x 64: must be 64 x"),
    "registers in shared": (lambda: loads(TO_REGISTERS, tensor(SHARED, VECTORS, **LANES), dram(32, 32)),
                            "dst is in shared"),
    "registers of too few": (lambda: loads(TO_REGISTERS, tensor(LOCAL, VECTORS, threads=32), dram(32, 32)),
                             "dst is of .32,. threads"),
    "registers too many": (lambda: loads(TO_REGISTERS, tensor(LOCAL, Layout(24), **LANES), dram(32, 32)),
                           "dst is .* must be 16"),
    "registers from registers": (lambda: loads(TO_REGISTERS, tensor(LOCAL, VECTORS, **LANES), tensor(LOCAL, SQUARE)),
                                 "src is in local"),
    "write to DRAM": (lambda: loads(TO_LDS, dram(32, 32), tensor(LOCAL, VECTORS, **LANES)), "dst is in global"),
    "write from shared": (lambda: loads(TO_LDS, tensor(SHARED, SQUARE), tensor(SHARED, VECTORS, **LANES)),
                          "src is in shared"),
    "write of float16": (lambda: loads(TO_LDS, tensor(SHARED, SQUARE), tensor(LOCAL, VECTORS, "fp16", **LANES)),
                         "src .* of float16"),
    "fragments from DRAM": (lambda: op_loads("warp_smem", dram(32, 32)), "warp_smem is in global memory"),
    "fragments of float32": (lambda: op_loads("warp_smem", tensor(SHARED, SQUARE, "fp32")), "warp_smem .* of bfloat16"),
    "fragments of more": (lambda: op_loads("warp_smem", tensor(SHARED, Layout.row_major(32, 64))), "warp_smem .* 32 x"),
    **{f"{kind}: {what}": (lambda w=which, a=arguments: multiplies(w, **a), says)
       for kind, which in (("op", OP), ("core", CORE))
       for what, arguments, says in (
           ("a in shared", {"a_space": SHARED}, "a is in shared memory: must be in local memory"),
           ("c in DRAM", {"c_space": GLOBAL}, "c is in global memory: must be in local memory"),
           ("a of float16", {"a_dtype": "fp16"}, "a is of float16: must be of bfloat16"),
           ("c of bfloat16", {"c_dtype": "bf16"}, "c is of bfloat16: must be of float32"),
           ("c of int32", {"c_dtype": "int32"}, "c is of int32: must be of float32"),
           ("a too narrow", {"a": (1, 4)}, "a is .*must be"),
           ("c too long", {"c": (3, 4)}, "c is 3 x 4: must be 2 x 4"),
           ("a of other threads", {"a_threads": 128}, "b is of .* programs and threads"),
       )},
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_by_name_and_nothing_moves(case: str) -> None:
    make, says = BAD[case]
    call, target = make()
    before = target.memory.bytes.copy()
    with pytest.raises(ValueError, match=says):
        call()
    np.testing.assert_array_equal(target.memory.bytes, before)


@pytest.mark.parametrize("wrong", [3, None, KEYS], ids=["int", "None", "array"])
def test_what_is_no_tile_tensor_is_a_type_error_by_name(wrong: Any) -> None:
    good = tensor(LOCAL, Layout.row_major(1, 8), programs=1, threads=64)
    k = DecodeStreamingKVBuffer(parameters(True), cache(), 0, 1, num_keys=100)
    for name, call in {
        "gmem_tile": lambda: k.load_from_dram(0, wrong),
        "dst": lambda: LOADER.load(wrong, dram(32, 32)),
        "src": lambda: LOADER.load(tensor(SHARED, SQUARE), wrong),
        "warp_smem": lambda: k.kv_mma_op.load_prefill(0, wrong),
        "a": lambda: OP.mma(wrong, good, good),
        "b": lambda: CORE.mma(good, wrong, good),
        "c": lambda: OP.mma(good, good, wrong),
    }.items():
        with pytest.raises(TypeError, match=f"(?s)^{name} .* must be a TileTensor"):
            call()
    params = DecodeKVBufferParams("bf16", Layout((64, 64), (128, 1)), CORE, None, num_stages=1, **SIZES)
    with pytest.raises(ValueError, match="smem is generic memory: must be shared memory"):
        DecodeKVBuffer(params, cache(), 0, 1, Memory(9000, programs=1), 100)


def test_sub_tiles_of_shared_memory_are_views_of_the_parent() -> None:
    """Inside a block the strides are (BK, 1); the parent's own, (BK, BN), only say where a block begins."""
    p = parameters(True)
    k = KVBuffer(p, cache(), 0, 1, end=100)
    assert isinstance(k.smem_tile, TileTensor)
    assert (k.smem_tile.layout.stride, k.smem_tile.memory.space) == ((32, 64), SHARED)
    stage = p.smem_stage_size
    for rows, row, block in ((32, 1, 0), (16, 3, 1), (64, 0, 3)):
        tile = k.smem_block_tile(rows, row, block)
        assert tile.memory is k.smem_tile.memory
        assert (tile.shape, tile.layout.stride) == ((rows, 32), (32, 1))
        assert tile.offset.tolist() == [block * 64 * 32 + row * rows * 32]
    k.load_from_dram(1)
    whole = np.concatenate([k.smem_block_tile(64, 0, 2 + block).to_numpy()[0] for block in (0, 1)], axis=1)
    assert np.array_equal(np.sort(whole.ravel()), np.sort(KEYS[1, :, 1].ravel()))
    last = k.smem.image(bfloat16)[0, stage:].reshape(2, 64, 32)[1]
    assert np.array_equal(last, k.smem_block_tile(64, 0, 3).to_numpy()[0])
    stream_ = DecodeStreamingKVBuffer(p, cache(), 0, 1, num_keys=100)
    tile = stream_.k_smem_block_tile(16, 2)
    assert (tile.layout.stride, tile.offset.tolist(), tile.memory.space) == ((32, 1), [2 * 16 * 32], SHARED)


def test_register_tiles_are_views_of_reg_tile_in_local_memory() -> None:
    k = KVBuffer(parameters(True), cache(), 0, 1, end=100)
    k.load_from_dram(0)
    with pytest.raises(UnwrittenRead):
        np.asarray(k.get_mma_tile(0, 0))  # nothing was loaded
    k.load_from_shared(0)
    registers = k.kv_mma_op.reg_tile
    assert (registers.memory.space, registers.shape, np.shape(registers.offset)) == (LOCAL, (4, 8), (1, 256))
    for strip in (0, 1):
        tile = k.get_mma_tile(0, strip)
        assert tile.memory is registers.memory
        np.testing.assert_array_equal(np.asarray(tile), np.asarray(registers)[:, :, 2 * strip : 2 * strip + 2])
    k.get_mma_tile(0, 1).store(bfloat16.type(5))
    assert (held(registers)[:, :, 2:] == 5).all()
    assert np.array_equal(np.asarray(k.strip_tile(0)), held(registers)[:, :, :2])
    one = KVBuffer(parameters(True), cache(), 0, 1, end=100, warp_id=1)
    one.load_from_dram(0)
    one.load_from_shared(0)
    assert np.array_equal(np.asarray(one.get_mma_tile(0, 0)), held(one.kv_mma_op.reg_tile)[:, 64:128, :2])


def test_products_add_into_the_tile_that_is_given() -> None:
    """Against float64: small integers, exact; what stands in C stays in the sum."""
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-3, 4, (3, 64, n, 8)).astype(bfloat16) for n in (1, 2))
    c = np.full((3, 64, 2, 4), 100, np.float32)
    OP.mma(in_registers(a), in_registers(b), in_registers(c))
    again = np.zeros_like(c)
    CORE.mma(in_registers(a), in_registers(b), in_registers(again))
    np.testing.assert_array_equal(c, again + 100)
    tiles = [OP.atom.tile_a(x.transpose(0, 2, 1, 3)).astype(np.float64) for x in (a, b)]  # [programs, tiles, 16, 32]
    found = OP.atom.tile_c(again.transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(found, tiles[0] @ tiles[1].swapaxes(2, 3))
