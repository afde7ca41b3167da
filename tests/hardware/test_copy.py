"""Copies on data. Rests on laws (what arrives is what left, or zeros) and on DMA records of compiled gfx950 kernels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvlab.hardware import buffer_load, buffer_load_lds, cp_async
from kvlab.memory import Memory, OutOfBounds, UnwrittenRead

DMA = json.loads((Path(__file__).parents[1] / "data" / "gfx950_lds_dma.json").read_text())


def dram(nbytes: int = 1024) -> tuple[Memory, np.ndarray]:
    values = np.random.default_rng(12).integers(0, 256, nbytes).astype(np.uint8)
    return Memory.over(values), values


@pytest.mark.parametrize("nbytes", [4, 8, 16])
def test_cp_async_moves_valid_lanes_and_zeroes_the_others(nbytes: int) -> None:
    memory, values = dram()
    rng = np.random.default_rng(13)
    src = rng.permutation(1024 // nbytes)[:32] * nbytes
    dst = rng.permutation(64)[:32] * nbytes
    valid = rng.random(32) < 0.6
    smem = Memory(64 * nbytes)
    cp_async(smem, dst, memory, np.where(valid, src, -3), nbytes, valid=valid)  # nobody reads an invalid address
    for lane in range(32):
        arrived = smem.load(dst[lane], np.uint8, nbytes)
        assert (arrived == (values[src[lane] : src[lane] + nbytes] if valid[lane] else 0)).all()
    assert smem.written is not None
    assert smem.written.sum() == 32 * nbytes


def test_cp_async_into_the_memories_of_programs() -> None:
    """Addresses [1, lanes] and [P, lanes] broadcast; a program without a valid lane gets zeros."""
    memory, values = dram()
    smem = Memory(512, programs=3)
    src = 16 * (np.arange(32) + 8 * np.arange(3)[:, None])
    valid = np.array([[True], [False], [True]])
    cp_async(smem, 16 * np.arange(32)[None], memory, src, 16, valid=valid)
    for program in range(3):
        expected = values[128 * program : 128 * program + 512] if valid[program] else np.zeros(512)
        np.testing.assert_array_equal(smem.bytes[program], expected)
    cp_async(smem, 16 * np.arange(32)[None], memory, src, 16, valid=False)
    assert not smem.bytes.any()


def test_cp_async_bad_input_writes_nothing() -> None:
    memory, _ = dram()
    smem = Memory(64)
    with pytest.raises(ValueError, match="nbytes is 12: must be 4, 8 or 16"):
        cp_async(smem, 0, memory, 0, 12)
    with pytest.raises(ValueError, match="array: address 8 of 16 bytes is not a multiple of 16"):
        cp_async(smem, [0, 16], memory, [0, 8], 16)
    with pytest.raises(ValueError, match="memory: address 8 of 16 bytes is not a multiple of 16"):
        cp_async(smem, [0, 8], memory, [0, 16], 16)
    with pytest.raises(OutOfBounds, match="at address 1024"):
        cp_async(smem, [0, 16], memory, [0, 1024], 16)
    with pytest.raises(UnwrittenRead):
        smem.load([0], np.uint8)


def test_buffer_load_has_a_linear_bound() -> None:
    """3 of 4 rows of 5 of 9 columns are valid: 2*9+5 elements. Past the last one zeros, past a row the next column."""
    values = np.arange(1, 37, dtype=np.float32).reshape(4, 9)
    bound = 4 * (2 * 9 + 4 + 1)
    found = buffer_load(Memory.over(values), 0, 4 * np.arange(36), 4, bound, dtype=np.float32)[:, 0]
    np.testing.assert_array_equal(found, np.where(np.arange(36) < 23, values.ravel(), 0))


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 12, 16])
def test_buffer_load_counts_the_sum_of_offsets(nbytes: int) -> None:
    """A lane is valid iff voffset + soffset + nbytes <= num_records; bases may differ between programs."""
    memory, values = dram()
    voffset, soffset, base = nbytes * np.arange(64), 2 * nbytes, np.array([[0], [48]])
    found = buffer_load(memory, base, voffset, nbytes, np.array([[10 * nbytes], [20 * nbytes - 1]]), soffset)
    assert found.shape == (2, 64, nbytes)
    assert found[0, :8].ravel().tolist() == values[soffset : 10 * nbytes].tolist()
    assert found[1, :17].ravel().tolist() == values[48 + soffset : 48 + 19 * nbytes].tolist()
    assert not found[0, 8:].any()
    assert not found[1, 17:].any()
    assert not buffer_load(memory, 0, voffset, nbytes, 0).any()


def test_buffer_load_lds_is_linear_in_the_lane() -> None:
    memory, values = dram()
    lds = Memory(4096, programs=2)
    voffset = 16 * np.random.default_rng(14).permutation(64)
    buffer_load_lds(lds, np.array([[512, 2048]]), memory, 0, voffset[None, None], 16, 512)
    expected = np.where(voffset[:, None] + 16 <= 512, values.reshape(64, 16)[voffset // 16], 0).ravel()
    for program in range(2):
        np.testing.assert_array_equal(lds.bytes[program, 512 : 512 + 1024], expected)
        np.testing.assert_array_equal(lds.bytes[program, 2048 : 2048 + 1024], expected)
    assert lds.written is not None
    assert lds.written.sum() == 2 * 2 * 1024


@pytest.mark.parametrize("case", DMA["cases"], ids=lambda case: f"trace{case['id']}")
def test_buffer_load_lds_rebuilds_the_image_of_compiled_kernels(case: dict) -> None:
    """Compiler: the DMA instructions of a compiled gfx950 kernel, executed, give the LDS image that was recorded."""
    image = np.array(case["lds"])  # element indices into the operand, -1 = zero-filled, -2 = never written
    source = np.arange(1, case["elements"] + 1, dtype=np.uint16)  # element i has the value i + 1; 0 = zero-filled
    lds = Memory(2 * image.size)
    keys = ("lds_base", "resource_base", "voffset", "num_records", "soffset")
    lds_base, base, voffset, bound, soffset = (np.array([dma[key] for dma in case["dma"]]) for key in keys)
    one = (slice(None), None)  # one value for the 64 lanes of a wave
    buffer_load_lds(lds, lds_base, Memory.over(source), base[one], voffset, 16, bound[one], soffset[one])
    assert lds.written is not None
    written = lds.written.reshape(-1, 2).all(axis=1)
    np.testing.assert_array_equal(written, image != -2)
    np.testing.assert_array_equal(lds.image(np.uint16)[written], image[written] + 1)
    assert (image == -1).any()


def test_bad_sizes() -> None:
    memory, _ = dram()
    with pytest.raises(ValueError, match="buffer_load: nbytes is 3: must be 1, 2, 4, 8, 12 or 16"):
        buffer_load(memory, 0, [0], 3, 64)
    with pytest.raises(ValueError, match="buffer_load_lds: nbytes is 8: must be 1, 2, 4, 12 or 16"):
        buffer_load_lds(Memory(64), 0, memory, 0, [0], 8, 64)
    with pytest.raises(ValueError, match=r"voffset is a scalar, must be \[\.\.\., lanes\]"):
        buffer_load_lds(Memory(64), 0, memory, 0, 0, 4, 64)
