"""Loads and stores of shared memory, executed. Rests on laws: what was stored comes back, from the right bytes."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.hardware import ld_shared, st_shared
from kvlab.memory import Memory, OutOfBounds, UnwrittenRead, bfloat16

SIZES = pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16])


@SIZES
def test_loads_take_the_lane_s_bytes(nbytes: int) -> None:
    values = np.random.default_rng(20).integers(0, 256, 1024).astype(np.uint8)
    address = np.random.default_rng(21).permutation(1024 // nbytes)[:32] * nbytes
    found = ld_shared(Memory.over(values), address, nbytes)
    assert found.shape == (32, nbytes)
    for lane in range(32):
        assert found[lane].tolist() == values[address[lane] : address[lane] + nbytes].tolist()


@SIZES
def test_stores_come_back_and_touch_nothing_else(nbytes: int) -> None:
    memory = Memory(64 * nbytes)
    address = np.random.default_rng(22).permutation(64)[:32] * nbytes
    values = np.random.default_rng(23).integers(0, 256, (32, nbytes)).astype(np.uint8)
    mask = np.arange(32) % 3 != 0
    st_shared(memory, address, values, mask=mask)
    np.testing.assert_array_equal(ld_shared(memory, address, nbytes, mask=mask)[mask], values[mask])
    assert memory.written is not None
    assert memory.written.sum() == mask.sum() * nbytes
    assert not ld_shared(memory, address, nbytes, mask=mask)[~mask].any()
    with pytest.raises(UnwrittenRead):
        ld_shared(memory, address, nbytes)


def test_elements_of_any_type_and_programs() -> None:
    memory = Memory(256, programs=3)
    values = np.random.default_rng(24).standard_normal((3, 16, 8)).astype(bfloat16)
    st_shared(memory, 16 * np.arange(16)[None], values)
    np.testing.assert_array_equal(ld_shared(memory, 16 * np.arange(16)[None], 16, "bf16"), values)
    np.testing.assert_array_equal(ld_shared(memory, 16 * np.arange(16)[None] + 8, 8, "bf16"), values[..., 4:])


def test_bad_input() -> None:
    memory = Memory(64)
    memory.store(0, np.zeros(64, np.uint8))
    with pytest.raises(ValueError, match="nbytes 12 of uint8 is not 1, 2, 4, 8 or 16"):
        ld_shared(memory, np.array([0]), 12)
    with pytest.raises(ValueError, match=r"nbytes 2 of float32 is not .* in whole elements"):
        ld_shared(memory, np.array([0]), 2, np.float32)
    with pytest.raises(ValueError, match="address 8 of 16 bytes is not a multiple of 16"):
        ld_shared(memory, np.array([0, 8]), 16)
    with pytest.raises(ValueError, match="address 2 of 4 bytes is not a multiple of 4"):
        st_shared(memory, np.array([2]), np.zeros((1, 4), np.uint8))
    with pytest.raises(ValueError, match=r"shape \(1, 3\) and float32 is not \[\.\.\., width\] of 1, 2, 4, 8 or 16"):
        st_shared(memory, np.array([0]), np.zeros((1, 3), np.float32))
    with pytest.raises(OutOfBounds):
        ld_shared(memory, np.array([64]), 16)
