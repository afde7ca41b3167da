"""Sectors of global accesses. Rests on the definition, spelled out byte by byte."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.hardware import sectors

LANE = np.arange(32)


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 12, 16, 32, 33, 64])
def test_by_definition(nbytes: int) -> None:
    rng = np.random.default_rng(15)
    addresses, mask = rng.integers(0, 2000, (20, 32)), rng.random((20, 32)) < 0.7
    found = sectors(addresses, nbytes, mask)
    for row, active, count in zip(addresses, mask, found, strict=True):
        touched = {byte // 32 for a in row[active].tolist() for byte in range(a, a + nbytes)}
        assert count == len(touched)


def test_coalesced_strided_and_misaligned() -> None:
    assert sectors(LANE * 4, 4) == 4
    assert sectors(LANE * 16, 16) == 16
    assert sectors(LANE * 16 + 16, 16) == 17
    assert sectors(LANE * 128, 16) == 32
    assert sectors(LANE * 0, 4) == 1
    assert sectors(LANE * 4, 4, mask=0) == 0
    assert sectors(np.zeros((2, 3, 64), int), 16).shape == (2, 3)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="nbytes 0 is not positive"):
        sectors(LANE, 0)
    with pytest.raises(ValueError, match="float64 are not integers"):
        sectors(LANE * 1.0, 4)
