"""TiledMmaLoader and the subtiles of blocked shared memory. Rest on the formulas and worked examples of
MAX's loaders; the compiled kernels' registers are checked through KVMmaOp and KVBuffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.layout import Swizzle
from kvlab.memory import Memory, as_dtype
from kvlab.staging.max.smem_subtile import smem_mma_subtile, smem_mma_subtile_offset, smem_subtile
from kvlab.staging.max.tiled_mma_loader import TiledMmaLoader, fp8_lanes

LANE = np.arange(64)[:, None]


def tagged(rows: int, cols: int, dtype: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Numbers that the dtype holds exactly as bits, and a view of them as the dtype."""
    size = as_dtype(dtype).itemsize
    numbers = (np.arange(rows * cols).reshape(rows, cols) * 7 % (1 << 8 * size)).astype(f"u{size}")
    return numbers, numbers.view(as_dtype(dtype))


@pytest.mark.parametrize("swizzles", [(None, None), ((3, 0, 3), None), ((1, 0, 4), (1, 1, 4))], ids=str)
@pytest.mark.parametrize(
    "dtype,shape,BK", [("bf16", (16, 16, 32), 64), ("bf16", (32, 32, 16), 32), ("fp8", (16, 16, 128), 128),
                       ("fp8", (32, 32, 64), 64)]
)
def test_load_b_holds_rows_of_k(dtype: str, shape: tuple[int, int, int], BK: int, swizzles: Any) -> None:
    """7.3: lane l has row l % M and, of each half, 16 bytes at column 16 bytes * (l // M); the swizzles cancel."""
    M, _, K = shape
    loader = TiledMmaLoader(dtype, shape, *(None if s is None else Swizzle(*s, "vector") for s in swizzles))
    numbers, matrix = tagged(2 * M, BK, dtype)
    slot = loader.swizzled(np.arange(M * BK))  # of the elements of a block of M rows
    image = np.empty_like(matrix).reshape(2, -1)
    image[:, slot] = matrix.reshape(2, -1)
    got = loader.load_b(Memory.over(image), 0, num_mmas=2, BK=BK)[0]
    e = np.arange(loader.input_frag_size)
    width = loader.simd_width
    halves = loader.input_frag_size // width
    for kg in range(BK // K):
        for i in range(2):
            col = kg * K + e // width * (K // halves) + LANE // M * width + e % width
            np.testing.assert_array_equal(
                got[:, kg * 2 + i].view(numbers.dtype), numbers[i * M + LANE % M, col], err_msg=f"{kg} {i}"
            )


@pytest.mark.parametrize("shape", [(32, 32, 16), (16, 16, 32)])
def test_load_b_tr_holds_columns_in_accumulator_order(shape: tuple[int, int, int]) -> None:
    """7.4: column l % M, rows K/2 * (e // 4) + 4 * (l // M) + e % 4; two tiles at once, rows of 64."""
    M, _, K = shape
    numbers, matrix = tagged(K, 64, "bf16")
    got = TiledMmaLoader("bf16", shape).load_b_tr(Memory.over(matrix), 0, row_stride=64, tile=[0, 64 - M])[0]
    e = np.arange(8)
    row = K // 2 * (e // 4) + 4 * (LANE // M) + e % 4
    for register, first in enumerate((0, 64 - M)):
        np.testing.assert_array_equal(got[:, register].view(np.uint16), numbers[row, first + LANE % M])


@pytest.mark.parametrize("shape", [(32, 32, 64), (16, 16, 128)])
def test_load_v_fp8_strip_holds_columns(shape: tuple[int, int, int]) -> None:
    """7.5: column dt * M + l % M; keys 16q + f % 4 + 8 (f // 4) + 4 (l // 32) of 32x32x64, 32 (l // 16) + e of
    16x16x128; blocks of 128 keys x 64 columns."""
    M, _, K = shape
    numbers, matrix = tagged(128, 128, "fp8")
    blocks = np.ascontiguousarray(matrix.reshape(128, 2, 64).transpose(1, 0, 2))
    loader = TiledMmaLoader("fp8", shape)
    tiles = np.arange(128 // M)
    e = np.arange(32)
    for bk_tile in range(128 // K):
        got = loader.load_v_fp8_strip(Memory.over(blocks), 0, BN=128, BK=64, bk_tile=bk_tile, dt=tiles)[0]
        key = 16 * (e // 8) + e % 4 + 8 * (e % 8 // 4) + 4 * (LANE // 32) if M == 32 else 32 * (LANE // 16) + e
        for dt in tiles:
            wanted = numbers[bk_tile * K + key, dt * M + LANE % M]
            np.testing.assert_array_equal(got[:, dt].view(np.uint8), wanted)


def test_lane_constants_of_the_fp8_strip() -> None:
    """7.5, by their definition."""
    i = np.arange(64) % 16
    rel_key, hw_key_shift, depth_base = fp8_lanes()
    np.testing.assert_array_equal(rel_key, i // 2 % 4 + 8 * (i // 2 // 4))
    np.testing.assert_array_equal(hw_key_shift, 4 * (np.arange(64) // 32))
    np.testing.assert_array_equal(depth_base, 16 * (np.arange(64) // 16 % 2) + 8 * (i % 2))


def test_loads_refuse_what_they_are_not_for() -> None:
    smem = Memory(1 << 14, unsafe=True)
    with pytest.raises(ValueError, match="load_b is for fragments of 16 or 32 bytes"):
        TiledMmaLoader("bf16", (16, 16, 16)).load_b(smem, 0, 1, 32)
    with pytest.raises(ValueError, match="load_b_tr is for 2-byte V"):
        TiledMmaLoader("fp8", (32, 32, 64)).load_b_tr(smem, 0, 32)
    with pytest.raises(ValueError, match="load_v_fp8_strip is for 1-byte V"):
        TiledMmaLoader("bf16", (32, 32, 16)).load_v_fp8_strip(smem, 0, BN=64, BK=32)
    with pytest.raises(ValueError, match="BK 48, the width of a block, must be a multiple of MMA_M 32"):
        TiledMmaLoader("fp8", (32, 32, 64)).load_v_fp8_strip(smem, 0, BN=64, BK=48)


def test_mma_subtile_is_a_tile_of_the_blocked_stage() -> None:
    """7.6: element (key, d) of a stage is (d // BK) * BN * BK + key * BK + d % BK; worked examples of the offset."""
    BN, BK, mr, mc, depth = 64, 32, 16, 16, 64
    assert smem_mma_subtile_offset(16, 32, BN, BK, 1, 0, 1) == 3072
    assert smem_mma_subtile_offset(16, 16, BN, BK, 0, 1, 3) == 2576
    matrix = np.arange(BN * depth, dtype=np.int16).reshape(BN, depth)
    stage = np.ascontiguousarray(matrix.reshape(BN, depth // BK, BK).transpose(1, 0, 2))
    memory = Memory.over(stage)
    for bk_tile in range(BN // BK):
        for k_sub in range(BK // mr):
            for mma in range(depth // mc):
                tile = smem_mma_subtile(memory, "int16", mr, mc, BN, BK, bk_tile, k_sub, mma).to_numpy()
                key = bk_tile * BK + k_sub * mr
                np.testing.assert_array_equal(tile, matrix[key : key + mr, mma * mc : (mma + 1) * mc])
    np.testing.assert_array_equal(smem_subtile(memory, "int16", 32, 32, BN, BK, 1, 1).to_numpy(), matrix[32:, 32:])


def test_the_original_mma_subtile_has_the_wrong_pitch_and_warns() -> None:
    stage = Memory.over(np.arange(64 * 64, dtype=np.int16))
    with pytest.warns(UserWarning, match="rows 16 elements apart, in blocks whose rows are BK 32 apart"):
        tile = smem_mma_subtile(stage, "int16", 16, 16, 64, 32, 0, 0, 1, original=True)
    assert tile.to_numpy()[:3, 0].tolist() == [16, 32, 48]
    whole = smem_mma_subtile(stage, "int16", 16, 32, 64, 32, 0, 0, 1, original=True)  # mc == BK: right
    assert whole.to_numpy()[:3, 0].tolist() == [2048, 2080, 2112]
    with pytest.raises(ValueError, match="BK is 32: must be a multiple of the 24 columns"):
        smem_mma_subtile_offset(16, 24, 64, 32, 0, 0, 0)
    with pytest.raises(ValueError, match="cols is 16: must be BK 32"):
        smem_subtile(stage, "int16", 16, 16, 64, 32, 0, 0)
    with pytest.raises(ValueError, match="reach past the 64 rows"):
        smem_subtile(stage, "int16", 32, 32, 64, 32, 2, 0)
