"""Tiles of several TMA boxes, KV tiles, gathered and ragged tiles. Rests on NumPy slices, on canonical layouts
(element -> offset, then the XOR of the mode), and on the specification's net effects."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.hardware import (
    RaggedTensorMap,
    RaggedTMA3DTile,
    SharedMemBarrier,
    TensorMapSwizzle,
    TmaDescriptor,
    TMATensorTile,
    create_kv_tile,
    create_split_tma,
    create_tensor_tile,
    create_tma_tile,
    create_tma_tile_gather4,
    fold_kv_descriptor,
    tma,
)
from kvlab.memory import Memory

MODES = pytest.mark.parametrize("mode", list(TensorMapSwizzle), ids=lambda mode: mode.label)


def k_major(rows: int, cols: int, mode: TensorMapSwizzle, itemsize: int) -> np.ndarray:
    """Byte of each element: column chunks of the swizzle's width, each ``rows`` dense rows, then the XOR."""
    S = mode.bytes // itemsize
    row, col = np.arange(rows)[:, None], np.arange(cols)
    linear = (col // S * rows * S + row * S + col % S) * itemsize
    return linear ^ (linear >> 7 & (1 << int(mode)) - 1) << 4


def read(memory: Memory, place: np.ndarray, dtype: type) -> np.ndarray:
    return memory.load(place, dtype)[..., 0]


@MODES
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32], ids=lambda d: np.dtype(d).name)
def test_a_tile_is_the_canonical_k_major_image(mode: TensorMapSwizzle, dtype: type) -> None:
    tensor = np.random.default_rng(50).integers(1, 200, (96, 256)).astype(dtype)
    tile = create_tensor_tile(tensor, (32, 128), mode)
    assert tile.descriptor.box == (32, mode.bytes // tensor.itemsize)
    memory, barrier = Memory(32 * 128 * tensor.itemsize), SharedMemBarrier()
    barrier.expect_bytes(32 * 128 * tensor.itemsize)
    tile.async_copy(memory, 0, (128, 80), barrier)
    barrier.wait(0)
    expected = np.pad(tensor, ((0, 64), (0, 0)))[80:112, 128:]
    np.testing.assert_array_equal(read(memory, k_major(32, 128, mode, tensor.itemsize), dtype), expected)
    out = np.zeros_like(tensor)
    create_tensor_tile(out, (32, 128), mode).async_store(memory, 0, (128, 80))
    np.testing.assert_array_equal(out[80:, 128:], tensor[80:, 128:])
    assert np.count_nonzero(out) == 16 * 128


def test_the_order_of_boxes() -> None:
    """2-D: row blocks, then columns, whatever is_k_major says of the tile's order; 3-D: first dimension fastest."""
    flat = TmaDescriptor.of(np.zeros((64, 64), np.float32), (8, 16))
    tile = TMATensorTile(flat, (16, 32))
    assert tile.corners.tolist() == [[0, 0], [0, 16], [8, 0], [8, 16]]
    assert tile.offsets.tolist() == [0, 128, 256, 384]
    assert TMATensorTile(flat, (32, 16), is_k_major=False).corners.tolist() == tile.corners.tolist()
    for rest in ((15, 32), (16, 40)):
        with pytest.raises(ValueError, match=r"must be whole boxes of \(8, 16\); no rest is copied"):
            TMATensorTile(flat, rest)
    deep = TmaDescriptor.of(np.zeros((8, 4, 64), np.float32), (4, 2, 32))
    k_first, k_last = TMATensorTile(deep, (6, 4, 64)), TMATensorTile(deep, (6, 4, 64), is_k_major=False)
    corners = [[m, i, j] for j in (0, 32) for i in (0, 2) for m in (0, 4)]
    assert k_first.corners.tolist() == corners
    assert k_last.corners.tolist() == sorted(corners)
    assert k_first.offsets.tolist() == [256 * n for n in range(8)]


@MODES
def test_kv_tiles(mode: TensorMapSwizzle) -> None:
    """[BN, 1, BK] of [rows, heads, head_size]: the canonical image of that head; rows past the end are zeros."""
    kv = np.random.default_rng(51).standard_normal((100, 3, 128)).astype(np.float16)
    tile = create_kv_tile(kv, 64, 128, mode)
    memory = Memory(64 * 128 * 2, programs=2)
    tile.async_copy(memory, np.array([0]), (0, np.array([1, 2]), np.array([0, 60])))
    place = k_major(64, 128, mode, 2)[None]
    found = read(memory, place, np.float16)
    np.testing.assert_array_equal(found[0], kv[:64, 1])
    np.testing.assert_array_equal(found[1, :40], kv[60:, 2])
    assert not found[1, 40:].any()


def test_kv_tiles_of_depth_80_are_padded_with_zeros() -> None:
    """The pad columns lie past head_size: out of range, zeros, counted by the barrier."""
    kv = np.random.default_rng(52).standard_normal((64, 2, 80)).astype(np.float16)
    tile = create_kv_tile(kv, 32, 80, "128B")
    assert tile.tile_shape == (32, 1, 128)
    assert tile.transaction_bytes == 32 * 128 * 2
    memory = Memory(32 * 128 * 2)
    tile.async_copy(memory, 0, (0, 1, 16))
    found = read(memory, k_major(32, 128, tile.descriptor.swizzle, 2), np.float16)
    np.testing.assert_array_equal(found[:, :80], kv[16:48, 1])
    assert not found[:, 80:].any()


def test_folding_gives_the_same_bytes_in_one_copy() -> None:
    kv = np.random.default_rng(53).standard_normal((96, 3, 256)).astype(np.float16)
    tile, folded = create_kv_tile(kv, 32, 128), fold_kv_descriptor(kv, 32, 128)
    assert folded.transaction_bytes == tile.transaction_bytes
    memory, once = Memory(8192), Memory(8192)
    tile.async_copy(memory, 0, (128, 2, 64))
    tma.load(folded, (2, 128 // 64, 64, 0), once, 0)
    np.testing.assert_array_equal(once.bytes, memory.bytes)


def test_page_dense_folding() -> None:
    """Scalar atom_row * (chunks * 8 * S) + chunk * (8 * S) + (row % 8) * S + c, then the XOR."""
    kv = np.random.default_rng(54).standard_normal((96, 3, 256)).astype(np.float16)
    memory = Memory(8192)
    tma.load(fold_kv_descriptor(kv, 32, 128, row_major=True), (1, 64 // 8, 0, 0, 0), memory, 0)
    row, col = np.arange(32)[:, None], np.arange(128)
    linear = 2 * (row // 8 * 1024 + col // 64 * 512 + row % 8 * 64 + col % 64)
    np.testing.assert_array_equal(read(memory, linear ^ (linear >> 7 & 7) << 4, np.float16), kv[64:, 1, :128])


@MODES
def test_gathered_tiles_have_the_bulk_image(mode: TensorMapSwizzle) -> None:
    tensor = np.random.default_rng(55).integers(1, 1000, (50, 128)).astype(np.int16)
    rows = np.random.default_rng(56).integers(0, 50, 16)
    tile = create_tma_tile_gather4(tensor, 128, mode, tile_height=16)
    memory, barrier = Memory(16 * 128 * 2), SharedMemBarrier()
    barrier.expect_bytes(tile.transaction_bytes)
    tile.async_copy_gather4_tile(memory, 0, rows, barrier)
    barrier.wait(0)
    place = k_major(16, 128, mode, 2)
    if not mode:  # without a swizzle a row is one box, 256 bytes wide
        place = 256 * np.arange(16)[:, None] + 2 * np.arange(128)
    np.testing.assert_array_equal(read(memory, place, np.int16), tensor[rows])


@MODES
@pytest.mark.parametrize("width", [64, 128, 192])
def test_a_gather_of_a_part_of_the_row_is_a_tensor_tile_of_it(mode: TensorMapSwizzle, width: int) -> None:
    """The first columns of wider rows: as create_tensor_tile has them, byte for byte, where its boxes are the same."""
    tensor = np.random.default_rng(57).integers(1, 1000, (20, 576)).astype(np.int16)
    rows, image = np.array([3, 19, 0, 7, 7, 1, 18, 2]), Memory(8 * width * 2)
    tile = create_tma_tile_gather4(tensor, width, mode, tile_height=8)
    memory = Memory(tile.transaction_bytes)
    tile.async_copy_gather4_tile(memory, 0, rows)
    if not mode:
        np.testing.assert_array_equal(memory.image(np.int16).reshape(8, width), tensor[rows, :width])
        return
    bulk = create_tensor_tile(tensor[rows], (8, width), mode)
    bulk.async_copy(image, 0, (0, 0))
    assert memory.image(np.uint8).tobytes() == image.image(np.uint8).tobytes()
    assert tile.transaction_bytes == bulk.transaction_bytes
    past = Memory(4 * mode.bytes)  # the matrix ends with the width
    tma.gather4(tile.descriptor, rows[:4], width, past, 0)
    assert not past.image(np.uint8).any()


def test_a_gather_refuses_what_a_tensor_tile_refuses() -> None:
    tensor = np.zeros((20, 576), np.int16)
    for width, mode in ((72, "128B"), (96, "128B"), (16, "64B"), (24, "32B")):
        message = rf"rows of {width}\*2 = {2 * width} B are not a multiple of .* B, the span of swizzle {mode}"
        with pytest.raises(ValueError, match=f"tile_width {width}: {message}"):
            create_tma_tile_gather4(tensor, width, mode)
        with pytest.raises(ValueError, match=rf"tile_shape \(4, {width}\): {message}"):
            create_tensor_tile(tensor, (4, width), mode)
    with pytest.raises(ValueError, match="tile_width 8: four rows of a box take 64 bytes, not a multiple of 128"):
        create_tma_tile_gather4(tensor, 8, tile_height=8)
    assert create_tma_tile_gather4(tensor, 8).transaction_bytes == 64  # one copy


@MODES
@pytest.mark.parametrize("dynamic", [0, 1, 5, 8])
def test_ragged_tiles(mode: TensorMapSwizzle, dynamic: int) -> None:
    """gmem[ragged_idx + r, middle_idx, col * S + c] = smem(r, c) for r < dynamic_dim; nothing else is written."""
    S = mode.bytes // 2
    out = np.zeros((20, 3, 2 * S), np.int16)
    values = np.random.default_rng(58).integers(1, 1000, (8, 2 * S)).astype(np.int16)
    memory = Memory(8 * 4 * S)
    memory.store(k_major(8, 2 * S, mode, 2), values[..., None])
    tile = RaggedTMA3DTile.of(out, BM=8, BN=2 * S, swizzle=mode)
    for col in (0, 1):
        tile.async_copy_from_col(col, memory, 0, ragged_idx=12, dynamic_dim=dynamic, middle_idx=2)
    np.testing.assert_array_equal(out[12 : 12 + dynamic, 2], values[:dynamic])
    assert np.count_nonzero(out) == dynamic * 2 * S
    out[:] = np.random.default_rng(59).integers(1, 1000, out.shape)
    for col in (0, 1):
        tile.async_copy_to_col(col, memory, 0, ragged_idx=0, dynamic_dim=dynamic, middle_idx=1)
    found = read(memory, k_major(8, 2 * S, mode, 2), np.int16)
    np.testing.assert_array_equal(found[:dynamic], out[:dynamic, 1])
    assert not found[dynamic:].any()


def test_ragged_tiles_at_the_end_of_the_tensor() -> None:
    out = np.zeros((10, 2, 8), np.int16)
    memory = Memory(128)
    memory.store(0, np.arange(1, 65, dtype=np.int16))
    RaggedTMA3DTile.of(out, BM=8, BN=8, swizzle="none").async_copy_from_col(0, memory, 0, 7, 3, 1)
    assert out[7:, 1, 0].tolist() == [1, 9, 17]
    assert np.count_nonzero(out) == 24


def test_ragged_groups() -> None:
    """group heads a position: shared-memory row seq * group + g; dynamic_dim counts positions."""
    out = np.zeros((12, 2, 4, 64), np.int16)
    values = np.random.default_rng(60).integers(1, 1000, (16, 64)).astype(np.int16)
    memory = Memory(16 * 128)
    memory.store(k_major(16, 64, TensorMapSwizzle.SWIZZLE_128B, 2), values[..., None])
    tile = RaggedTMA3DTile.of(out, BM=16, BN=64, group=4)
    tile.async_copy_from_col(0, memory, 0, ragged_idx=5, dynamic_dim=3, middle_idx=1)
    np.testing.assert_array_equal(out[5:8, 1], values[:12].reshape(3, 4, 64))
    assert np.count_nonzero(out) == 12 * 64


@pytest.mark.parametrize("group", [1, 2])
def test_ragged_blocks_of_columns_at_once(group: int) -> None:
    """tma_blocks_per_op chunks a copy, chunk k at k * BM * S; columns past depth are masked."""
    shape = (12, 2, 24) if group == 1 else (12, 2, 2, 24)
    out = np.zeros(shape, np.int16)
    values = np.random.default_rng(61).integers(1, 1000, (8, 32)).astype(np.int16)
    memory = Memory(8 * 64)
    memory.store(k_major(8, 32, TensorMapSwizzle.SWIZZLE_NONE, 2), values[..., None])
    tile = RaggedTMA3DTile.of(out, BM=8, BN=32, swizzle="none", group=group, tma_blocks_per_op=2)
    for col in (0, 2):
        tile.async_copy_from_col(col, memory, 0, ragged_idx=4, dynamic_dim=3, middle_idx=0)
    np.testing.assert_array_equal(out[4:7, 0].reshape(3 * group, 24), values[: 3 * group, :24])
    assert np.count_nonzero(out) == 3 * group * 24


@pytest.mark.parametrize("length", [0, 1, 8, 11, 16])
def test_ragged_sequences(length: int) -> None:
    """Rows P + i*d_len + r with i*d_len + r < L are written, the others dropped."""
    out = np.zeros((30, 16), np.int16)
    values = np.random.default_rng(62).integers(1, 1000, (16, 8)).astype(np.int16)
    memory = Memory(256)
    memory.store(0, values.reshape(-1))
    RaggedTensorMap.of(out, d_len=8, width=8, max_length=20).store_ragged_tile(memory, 0, 8, 9, length)
    np.testing.assert_array_equal(out[9 : 9 + length, 8:], values[:length])
    assert np.count_nonzero(out) == 8 * length


def test_bad_tiles() -> None:
    tensor = np.zeros((64, 128), np.float16)
    with pytest.raises(ValueError, match=r"rows of 80\*2 = 160 B are not a multiple of 128 B, the span of"):
        create_tensor_tile(tensor, (16, 80), "128B")
    with pytest.raises(ValueError, match=r"boxes of \(4, 8\) take 64 bytes, not a multiple of 128"):
        create_tensor_tile(tensor, (4, 16), "none")
    with pytest.raises(ValueError, match=r"64\*2 = 128 B > 64 B"):
        create_tma_tile(tensor, (16, 64), "64B")
    with pytest.raises(ValueError, match="must be \\[rows, heads, head_size\\]"):
        create_kv_tile(tensor, 16, 64)
    with pytest.raises(ValueError, match="BK is 96: must be at least 2 times and a multiple of 64"):
        fold_kv_descriptor(np.zeros((64, 2, 192), np.float16), 16, 96)
    with pytest.raises(ValueError, match="must have its rank, 2 to 5"):
        TMATensorTile(TmaDescriptor.of(tensor, (16, 8)), (16, 8, 8))
    with pytest.raises(ValueError, match="1 coordinates"):
        create_split_tma(tensor, (16, 64)).async_copy(Memory(2048), 0, (0,))
    with pytest.raises(ValueError, match="tile_height is 6: must be a positive multiple of 4"):
        create_tma_tile_gather4(tensor, 64, tile_height=6)
    with pytest.raises(ValueError, match=r"tile_width is 577: must be 1 to the columns .*, not of \(64, 128\)"):
        create_tma_tile_gather4(tensor, 577)
    with pytest.raises(ValueError, match=r"rows has shape \(3,\): must be \[\.\.\., 4\]"):
        create_tma_tile_gather4(tensor, 64).async_copy_gather4_tile(Memory(1024), 0, [1, 2, 3])
    ragged = RaggedTMA3DTile.of(np.zeros((8, 2, 64), np.float16), BM=8, BN=64)
    for arguments, message in (
        ((0, 9, 0), "dynamic_dim is 9: must be 0 to 8"),
        ((0, 1, 2), "middle_idx is 2: must be 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            ragged.async_copy_from_col(0, Memory(1024), 0, *arguments)
    with pytest.raises(ValueError, match="col is 1: must be one of the 1 column chunks"):
        ragged.async_copy_from_col(1, Memory(1024), 0, 0, 1, 0)
    with pytest.raises(ValueError, match="is not a contiguous \\[rows, middle_dim, group, depth\\] for group 4"):
        RaggedTMA3DTile.of(np.zeros((8, 2, 64), np.float16), BM=8, BN=64, group=4)
