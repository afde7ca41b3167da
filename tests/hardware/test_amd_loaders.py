"""MAX's gfx950 loaders, executed. Rests on DMA records of compiled kernels, worked examples, and laws."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from kvlab.hardware import RegTileLoader, RegTileWriterLDS, SubTileLoaderLDS, SubTileLoaderLDS_st_8x32, get_atom
from kvlab.layout import Layout, Swizzle, TileTensor
from kvlab.memory import AddressSpace, Memory

DMA = json.loads((Path(__file__).parents[1] / "data" / "gfx950_lds_dma.json").read_text())["cases"]


def in_registers(values: np.ndarray) -> TileTensor:
    return TileTensor.from_numpy(values, space=AddressSpace.LOCAL, batch=1)


def loaded(loader: RegTileLoader, tile: np.ndarray) -> np.ndarray:
    """The registers ``[workers, elements]`` of a whole tile."""
    workers, number, _ = loader.vectors(tile.shape).shape
    registers = TileTensor.stack_allocation(
        Layout(number * loader.width), loader.dtype, AddressSpace.LOCAL, threads=workers
    )
    loader.load(registers, TileTensor.from_numpy(tile))
    return np.asarray(registers)


def vectors(swizzle: tuple[int, int, int] | None) -> Swizzle | None:
    return None if swizzle is None else Swizzle(*swizzle, "vector")


def test_the_addresses_of_a_compiled_kernel() -> None:
    """Compiler: the KVBuffer of the record moves 32 x 32 tiles, rows 256 bytes apart, with Swizzle(3,0,4)."""
    plan = SubTileLoaderLDS("bf16", vectors((3, 0, 4))).plan(32, 32)
    offset = plan.row * 256 + plan.col * 2
    seen = set()
    for dma in DMA[0]["dma"]:
        half = dma["lds_base"] % 2048 // 1024
        # The compiler puts the second half's 16 rows into soffset or voffset alike: compare the distance from lane 0.
        voffset = np.array(dma["voffset"])
        seen.add(half)
        np.testing.assert_array_equal(voffset - voffset[0], offset[half] - offset[half, 0])
    assert seen == {0, 1}
    np.testing.assert_array_equal(plan.offset * 2, [0, 1024])


def test_worked_lanes() -> None:
    """bf16 32 x 32, Swizzle(3,0,4): lanes 0-15 identity, lane 16 (4,1); second half: lane 0 (17,0), lane 4 (16,0)."""
    plan = SubTileLoaderLDS("bf16", vectors((3, 0, 4))).plan(32, 32)
    place = list(zip(plan.row[0].tolist(), (plan.col[0] // 8).tolist(), strict=True))
    assert place[:16] == [(lane // 4, lane % 4) for lane in range(16)]
    assert place[16:21] == [(4, 1), (4, 0), (4, 3), (4, 2), (5, 1)]
    assert (plan.row[1, 0], plan.col[1, 0], plan.row[1, 4], plan.col[1, 4]) == (17, 0, 16, 0)


@pytest.mark.parametrize(
    ("dtype", "M", "N", "instructions"),
    [("bf16", 32, 32, 2), ("bf16", 32, 64, 4), ("fp8", 32, 64, 2), ("fp8", 64, 128, 8), ("f4", 32, 16, 2)],
)
@pytest.mark.parametrize(
    "swizzles", [(None, None), ((3, 0, 3), None), ((3, 0, 4), None), ((1, 0, 4), (1, 1, 4))], ids=str
)
def test_reading_at_the_swizzled_slot_returns_the_vector(
    dtype: str, M: int, N: int, instructions: int, swizzles: tuple
) -> None:
    """Law: logical vector v of a 32-row block stands at the slot whose swizzles, undone one by one, give v; zeros past
    the bound."""
    np_dtype = np.dtype(np.float32) if dtype == "f4" else dtype
    loader = SubTileLoaderLDS(np_dtype, *map(vectors, swizzles))
    plan = loader.plan(M, N)
    assert plan.row.shape == (instructions, 64)
    size = loader.dtype.itemsize
    dram = np.random.default_rng(30).integers(0, 256, (M + 3, 2 * N * size)).astype(np.uint8)
    lds = Memory(M * N * size + 256, space=AddressSpace.SHARED, programs=2)
    src = TileTensor(Memory.over(dram), np_dtype, Layout((M, N), (2 * N, 1)), np.array([0, N]))
    src.end = src.offset + (M - 5) * 2 * N  # a bound inside a row
    loader.load(TileTensor(lds, np_dtype, Layout.row_major(M, N), np.array([256 // size, 0])), src)
    slots_per_block = 32 * N * size // 16
    for program in range(2):
        image = lds.bytes[program, 256 * (1 - program) :][: M * N * size].reshape(-1, 16)
        tile = dram[:M, N * size * program :][:, : N * size].copy()
        linear = np.arange(M)[:, None] * 2 * N * size + np.arange(0, N * size, 16) + 16
        tile.reshape(M, -1, 16)[linear > (M - 5) * 2 * N * size] = 0
        logical = np.arange(len(image)) % slots_per_block
        slot = logical
        for swizzle in (loader.swizzle2, loader.swizzle):
            slot = slot if swizzle is None else swizzle(slot)
        block = np.arange(len(image)) // slots_per_block * slots_per_block
        np.testing.assert_array_equal(image[block + slot], tile.reshape(-1, 16))


def test_waves_that_share_a_block_know_their_place() -> None:
    """Law: two waves with 16 rows each, worker_base 0 and 1, fetch what one wave fetches of 32 rows."""
    loader = SubTileLoaderLDS("bf16", vectors((3, 0, 4)))
    whole, parts = loader.plan(32, 32), [loader.plan(16, 32, worker_base) for worker_base in (0, 1)]
    np.testing.assert_array_equal(np.concatenate([part.row for part in parts]), whole.row - [[0], [16]])
    np.testing.assert_array_equal(np.concatenate([part.col for part in parts]), whole.col)


@pytest.mark.parametrize(("dtype", "BK"), [("bf16", 32), ("fp8", 64)])
def test_sub_tiles_of_8_rows(dtype: str, BK: int) -> None:
    """Law: element (key, d) lands in sub-tile (key // 8, d // BK), row-major over them and inside them."""
    loader = SubTileLoaderLDS_st_8x32(dtype, BN=64, depth=128, BK=BK, num_threads=256)
    size = loader.dtype.itemsize
    dram = np.random.default_rng(31).integers(0, 256, (64, 128 * size)).astype(np.uint8)
    lds = TileTensor.stack_allocation(Layout(64 * 128), dtype)
    loader.load(lds, TileTensor(Memory.over(dram), dtype, Layout.row_major(64, 128)))
    expected = dram.reshape(8, 8, 128 // BK, 64).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(lds.memory.bytes, expected.ravel())


def test_reg_tile_loader_by_the_formula() -> None:
    """Register (i*N + j)*es + k = DRAM[base + lane offset + i*s0 + j*s1 + k], zero outside the linear bound."""
    tile = np.arange(1, 64 * 100 + 1, dtype=np.int32).reshape(64, 100)
    loader = RegTileLoader(np.int32, Layout.col_major(16, 4))
    bound = (40 * 100 + 20) * 4
    src = TileTensor(Memory.over(tile), np.int32, Layout((64, 32), (100, 1)), 8)
    src.end = 8 + bound // 4
    registers = TileTensor.stack_allocation(Layout(4 * 2 * 4), np.int32, AddressSpace.LOCAL, threads=80)
    loader.load(registers, src)
    found = registers.memory.image(np.int32).reshape(80, 4 * 2 * 4)
    flat = tile.ravel()
    for worker in range(64):
        row, col = worker % 16, worker // 16 * 4
        for i in range(4):
            for j in range(2):
                at = (row + 16 * i) * 100 + col + 16 * j
                expected = flat[8 + at : 12 + at] if (at + 4) * 4 <= bound else np.zeros(4)
                assert found[worker, (i * 2 + j) * 4 : (i * 2 + j) * 4 + 4].tolist() == expected.tolist()
    assert (found[64:] == -1).all()  # poison: the threads past the workers do nothing
    assert (found == 0).any()


@pytest.mark.parametrize(("name", "grid"), [("mfma.32x32x16.bf16", (32, 2)), ("mfma.16x16x32.bf16", (16, 4))])
def test_q_by_16_byte_vectors_is_the_atom_s_a(name: str, grid: tuple[int, int]) -> None:
    """Q of a strip of one k group, loaded with col_major(M, 64 // M) vectors of 16 bytes, is the fragment of A."""
    atom = get_atom(name)
    M, _, K = atom.shape
    q = np.random.default_rng(32).standard_normal((M, K)).astype(atom.dtype)
    np.testing.assert_array_equal(loaded(RegTileLoader("bf16", Layout.col_major(*grid)), q), atom.fragment_a(q))


@pytest.mark.parametrize(("name", "grid"), [("mfma.16x16x128.fp8", (16, 4)), ("mfma.32x32x64.fp8", (32, 2))])
def test_fp8_q_by_16_byte_vectors_is_in_two_halves(name: str, grid: tuple[int, int]) -> None:
    atom = get_atom(f"{name}.two_half")
    M, _, K = atom.shape
    q = np.random.default_rng(33).standard_normal((M, K)).astype(atom.dtype)
    np.testing.assert_array_equal(loaded(RegTileLoader("fp8", Layout.col_major(*grid)), q), atom.fragment_a(q))


@pytest.mark.parametrize("swizzle", [None, (2, 0, 2)])
def test_writer_puts_the_tile_back(swizzle: tuple[int, int, int] | None) -> None:
    """Law: vector v of the tile stands at slot swizzle(v), where fragment distances are multiples of the period."""
    tile = np.arange(32 * 16, dtype=np.int32).reshape(32, 16)
    threads = Layout.row_major(16, 4)
    registers = in_registers(loaded(RegTileLoader(np.int32, threads), tile))
    lds = TileTensor.stack_allocation(Layout.row_major(32, 16), np.int32)
    RegTileWriterLDS(np.int32, threads, vectors(swizzle)).store(lds, registers)
    slot = np.arange(128) if swizzle is None else Swizzle(*swizzle, "vector")(np.arange(128))
    np.testing.assert_array_equal(lds.memory.image(np.int32).reshape(128, 4)[slot], tile.reshape(128, 4))


def test_what_a_writer_and_a_loader_say_of_swizzles_and_threads_is_checked() -> None:
    """Law: a swizzled tile is read back by the swizzle of each vector; what is not written so is refused."""
    tall = RegTileWriterLDS(np.int32, Layout.row_major(4, 4), Swizzle(2, 0, 4, "vector"))
    lds = TileTensor.stack_allocation(Layout.row_major(8, 16), np.int32)
    with pytest.raises(ValueError, match="puts the others elsewhere than behind these"):
        tall.store(lds, in_registers(np.zeros((16, 8), np.int32)))
    assert not lds.memory.written.any()
    moved = dataclasses.replace(tall, original=True).offsets((8, 16))
    assert (moved[:, 0] == 4 * Swizzle(2, 0, 4, "vector")(np.arange(16))).all()
    assert (moved[:, 1] == moved[:, 0] + 64).all()
    plain = RegTileWriterLDS(np.int32, Layout.row_major(4, 4))
    for pitch in (12, 18):
        with pytest.raises(ValueError, match=f"row_stride is {pitch}: must be a multiple of 4 elements, at least 16"):
            plain.offsets((8, 16), pitch)
    for threads in (Layout("(4,2):(3,1)"), Layout("(4,2):(0,1)"), Layout("(4,2):(1,1)")):
        for made in (RegTileLoader, RegTileWriterLDS):
            with pytest.raises(ValueError, match="must give each of the workers 0 to 7 a place of its own"):
                made(np.int32, threads)
    for name in ("swizzle", "swizzle2"):
        with pytest.raises(ValueError, match=f"{name} .* changes bits of a vector's number from 6 on"):
            SubTileLoaderLDS("bf16", **{name: Swizzle(1, 6, 1, "vector")})
    SubTileLoaderLDS("bf16", Swizzle(1, 5, 1, "vector")).plan(32, 32)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="N 40 of bfloat16 gives each of 8 lanes a row 10 bytes, must be 1"):
        SubTileLoaderLDS("bf16").plan(32, 40)
    with pytest.raises(ValueError, match="M is 24: must be a multiple of 16 rows"):
        SubTileLoaderLDS("bf16").plan(24, 32)
    with pytest.raises(ValueError, match="BK 64 of bfloat16 must be 64 bytes"):
        SubTileLoaderLDS_st_8x32("bf16", 64, 128, 64, 256)
    with pytest.raises(ValueError, match="must be a multiple of 16 bytes for each of num_threads 1024"):
        SubTileLoaderLDS_st_8x32("bf16", 8, 64, 32, 1024)
    with pytest.raises(ValueError, match=r"thread_layout is Layout\(.*\): must be flat, of two modes"):
        RegTileLoader("bf16", Layout("64:1"))
    with pytest.raises(ValueError, match="shape is 32 x 24: must be a multiple of 32 x 2 workers of 8 elements"):
        RegTileLoader("bf16", Layout.col_major(32, 2)).vectors((32, 24))
    loader = RegTileLoader(np.int32, Layout.col_major(32, 2))
    few = TileTensor.stack_allocation(Layout(4), np.int32, AddressSpace.LOCAL, threads=32)
    with pytest.raises(ValueError, match=r"dst is of \(32,\) threads: must be of the 64 workers"):
        loader.load(few, TileTensor.from_numpy(np.zeros((32, 8), np.int32)))
