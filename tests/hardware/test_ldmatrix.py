"""ldmatrix, stmatrix and ds_read_tr on data. Rests on the ISA's maps spelled out in loops, and on the MMA atoms."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.hardware import ds_read_tr8_b64, ds_read_tr16_b64, get_atom, ldmatrix, stmatrix
from kvlab.memory import Memory, UnwrittenRead, bfloat16

LANE = np.arange(32)
NUM = pytest.mark.parametrize("num", [1, 2, 4])
TRANS = pytest.mark.parametrize("trans", [False, True], ids=["plain", "trans"])


def tile_memory(rows: int, cols: int, programs: int | None = None) -> tuple[Memory, np.ndarray]:
    """A row-major int16 tile of distinct values, and its memory (every program has its own values)."""
    shape = (rows, cols) if programs is None else (programs, rows, cols)
    tile = np.arange(np.prod(shape)).astype(np.int16).reshape(shape)
    memory = Memory(rows * cols * 2, programs=programs)
    address = 2 * cols * np.arange(rows)
    memory.store(address if programs is None else address[None], tile)
    return memory, tile


@NUM
@TRANS
def test_ldmatrix_by_the_map(num: int, trans: bool) -> None:
    """Register m of lane L: matrix m, row L//4, columns 2(L%4) and +1; transposed for .trans."""
    memory, tile = tile_memory(32, 8)
    found = ldmatrix(memory, 16 * LANE, num, trans=trans, dtype=np.int16)
    assert found.shape == (32, 2 * num)
    for lane in range(32):
        for m in range(num):
            matrix = tile[8 * m : 8 * m + 8]
            matrix = matrix.T if trans else matrix
            expected = matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
            assert found[lane, 2 * m : 2 * m + 2].tolist() == expected.tolist()


@NUM
def test_rows_may_lie_anywhere_and_other_lanes_do_not_matter(num: int) -> None:
    memory, tile = tile_memory(64, 8)
    rows = np.random.default_rng(8).permutation(64)[:32]
    address = np.where(LANE < 8 * num, 16 * rows, 1 << 20)
    found = ldmatrix(memory, address, num, dtype=np.int16)
    assert (found[::4, ::2] == tile[rows[: 8 * num], 0].reshape(num, 8).T).all()


@NUM
@TRANS
def test_stmatrix_is_the_inverse(num: int, trans: bool) -> None:
    """Law: ldmatrix of what stmatrix stored gives the registers back; nothing else is written."""
    memory = Memory(1024)
    registers = np.random.default_rng(9).standard_normal((32, 2 * num)).astype(bfloat16)
    address = 32 * LANE
    stmatrix(memory, address, registers, num, trans=trans)
    np.testing.assert_array_equal(ldmatrix(memory, address, num, trans=trans), registers)
    with pytest.raises(UnwrittenRead):
        memory.load(np.array([16]), np.uint8)


def test_ldmatrix_feeds_mma_sync() -> None:
    """A [16, 16] by x4, B stored [N, K] by x2 and B stored [K, N] by x2.trans give the atom's fragments."""
    atom = get_atom("mma.sync.m16n8k16.bf16")
    memory, a = tile_memory(16, 16)
    x4 = 32 * (LANE % 16) + 16 * (LANE // 16)  # matrices: rows 0-7, rows 8-15, then the same of columns 8-15
    np.testing.assert_array_equal(ldmatrix(memory, x4, 4, dtype=np.int16), atom.fragment_a(a))
    memory, nk = tile_memory(8, 16)
    x2 = 32 * (LANE % 8) + 16 * (LANE // 8 % 2)
    np.testing.assert_array_equal(ldmatrix(memory, x2, 2, dtype=np.int16), atom.fragment_b(nk.T))
    memory, kn = tile_memory(16, 8)
    transposed = ldmatrix(memory, 16 * (LANE % 16), 2, trans=True, dtype=np.int16)
    np.testing.assert_array_equal(transposed, atom.fragment_b(kn))


@TRANS
def test_programs_and_leading_axes(trans: bool) -> None:
    """Every program reads its own memory, at common addresses (leading 1) or its own (leading P)."""
    memory, tile = tile_memory(32, 8, programs=3)
    common = (16 * (LANE + 8 * np.arange(2)[:, None]) % 512)[None]  # [1, 2, 32]
    found = ldmatrix(memory, common, 4, trans=trans, dtype=np.int16)
    assert found.shape == (3, 2, 32, 8)
    own = np.stack([common[0], common[0, ::-1], common[0]])
    own_found = ldmatrix(memory, own, 4, trans=trans, dtype=np.int16)
    for program in range(3):
        alone = Memory.over(tile[program])
        np.testing.assert_array_equal(found[program], ldmatrix(alone, common[0], 4, trans=trans, dtype=np.int16))
        np.testing.assert_array_equal(own_found[program], ldmatrix(alone, own[program], 4, trans=trans, dtype=np.int16))
    copy = Memory(512, programs=3)
    stmatrix(copy, 16 * LANE[None], ldmatrix(memory, 16 * LANE[None], 4, dtype=np.int16), 4)
    np.testing.assert_array_equal(copy.bytes, memory.bytes)


def test_other_element_sizes_see_the_same_registers() -> None:
    memory, _ = tile_memory(32, 8)
    wide = ldmatrix(memory, 16 * LANE, 4, dtype=np.uint32)
    assert wide.shape == (32, 4)
    np.testing.assert_array_equal(wide.view(np.int16), ldmatrix(memory, 16 * LANE, 4, dtype=np.int16))


def load_b_tr(memory: Memory, m: int, k: int) -> np.ndarray:
    """A ``k x m`` tile (row-major, 2-byte elements) by two ds_read_tr16_b64, one for each half of the rows."""
    lane = np.arange(64)
    across = 2 if m == 32 else 1  # 4 x 16 sub-tiles side by side
    row = 4 * (lane // 16 // across) + lane % 16 // 4
    col = 16 * (lane // 16 % across) + 4 * (lane % 4)
    halves = [ds_read_tr16_b64(memory, 2 * ((row + half * k // 2) * m + col), np.int16) for half in (0, 1)]
    return np.concatenate(halves, axis=-1)


@pytest.mark.parametrize(("m", "k"), [(16, 32), (32, 16)])
def test_ds_read_tr16_gives_the_rows_of_compiled_gfx950_code(m: int, k: int) -> None:
    """Compiler: lane l holds column l%m and, for 32x32x16, rows 8(e//4) + 4(l//32) + e%4 (16x16x32: 16, 16)."""
    memory, tile = tile_memory(k, m)
    found = load_b_tr(memory, m, k)
    for lane in range(64):
        rows = [(k // 2) * (e // 4) + 4 * (lane // m) + e % 4 for e in range(8)]
        assert found[lane].tolist() == tile[rows, lane % m].tolist()
    if m == 32:
        assert found[32].tolist() == tile[[4, 5, 6, 7, 12, 13, 14, 15], 0].tolist()


@pytest.mark.parametrize(("read", "n", "dtype"), [(ds_read_tr16_b64, 4, np.int16), (ds_read_tr8_b64, 8, np.uint8)])
def test_ds_read_tr_by_the_rule(read, n: int, dtype: type) -> None:  # type: ignore[no-untyped-def]
    """Register j of lane i of a 16-lane row is m[(16//n)*j + i//n][i % n], with m[i] what lane i's address reads."""
    values = np.random.default_rng(10).integers(0, 200, 1024 // np.dtype(dtype).itemsize).astype(dtype)
    address = 8 * np.random.default_rng(11).permutation(128)[:64]
    found = read(Memory.over(values), address, dtype)
    for lane in range(64):
        row, i = lane // 16 * 16, lane % 16
        for j in range(n):
            first = address[row + 16 // n * j + i // n] // np.dtype(dtype).itemsize
            assert found[lane, j] == values[first + i % n]
    stacked = read(Memory.over(values), np.stack([address, address[::-1]]), dtype)
    assert stacked.shape == (2, 64, n)
    np.testing.assert_array_equal(stacked[0], found)


def test_bad_input() -> None:
    memory, _ = tile_memory(32, 8)
    with pytest.raises(ValueError, match="ldmatrix: num is 3: must be 1, 2 or 4"):
        ldmatrix(memory, 16 * LANE, 3)
    with pytest.raises(ValueError, match="address 8 of 16 bytes is not a multiple of 16"):
        ldmatrix(memory, 8 * LANE, 4)
    with pytest.raises(ValueError, match=r"row_address has shape \(8,\): must be \[\.\.\., 32\]"):
        ldmatrix(memory, 16 * LANE[:8], 1)
    with pytest.raises(ValueError, match=r"stmatrix.x2: registers .* are not \[\.\.\., 32, 4\]"):
        stmatrix(memory, 16 * LANE, np.zeros((32, 2), np.int16), 2)
    with pytest.raises(ValueError, match="ds_read_tr16_b64: dtype float32 has 4 bytes, must have 2"):
        ds_read_tr16_b64(memory, 8 * np.arange(64), np.float32)
    with pytest.raises(ValueError, match="address 4 of 8 bytes is not a multiple of 8"):
        ds_read_tr16_b64(memory, 4 * np.arange(64))
    with pytest.raises(ValueError, match=r"address has shape \(32,\): must be \[\.\.\., 64\]"):
        ds_read_tr16_b64(memory, 8 * LANE)
