"""Sectors of global accesses. Rests on the definition, spelled out byte by byte."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.hardware import coalescing, sectors

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
    assert sectors(np.zeros((0, 32), int), 16).shape == (0,)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="nbytes is 0: must be at least 1"):
        sectors(LANE, 0)
    with pytest.raises(ValueError, match="float64: must be int"):
        sectors(LANE * 1.0, 4)


@pytest.mark.parametrize("nbytes", [1, 4, 16])
def test_coalescing_agrees_with_the_counts(nbytes: int) -> None:
    """Laws: useful and ideal count different bytes; sectors >= ideal; lines count 128 bytes."""
    rng = np.random.default_rng(16)
    for _ in range(20):
        addresses, mask = rng.integers(0, 500, 32), rng.random(32) < 0.8
        found = coalescing(addresses, nbytes, mask)
        touched = {byte for a in addresses[mask].tolist() for byte in range(a, a + nbytes)}
        assert found.sectors == sectors(addresses, nbytes, mask)
        assert (found.useful, found.lines) == (len(touched), len({byte // 128 for byte in touched}))
        assert found.sectors >= found.ideal == -(-len(touched) // 32)
        assert found.misaligned == min(touched) % 32
        assert found.efficiency == len(touched) / (32 * found.sectors)


def test_misalignment_costs_one_sector_of_a_contiguous_access() -> None:
    for offset in range(0, 64, 4):
        found = coalescing(LANE * 4 + offset, 4)
        assert (found.ideal, found.excess) == (4, int(offset % 32 != 0))
    text = coalescing(LANE * 8 + 4096 + 24, 8).explain()
    assert "lies 24 bytes past a multiple of 32: the 256 contiguous bytes straddle 9 sectors instead of 8" in text


@pytest.mark.parametrize(
    ("addresses", "nbytes", "mask", "words"),
    [
        (LANE * 16, 16, None, "Every byte that moves is wanted."),
        (LANE * 0, 4, None, "Lanes share bytes: 128 are asked for, 4 of them differ."),
        (LANE * 128, 16, None, "every lane has a sector of its own and uses 16 of its 32 bytes."),
        (LANE * 8 + 4, 4, None, "Lanes are 8 bytes apart: 128 of 256 bytes move unused; the lowest address, 4, lies 4"),
        (LANE * 4, 4, 1, "Fewer sectors cannot hold these bytes."),
        (LANE * 4, 4, 0, "No lane is active: nothing moves."),
    ],
)
def test_words_for_the_difference(addresses: np.ndarray, nbytes: int, mask: int | None, words: str) -> None:
    assert words in coalescing(addresses, nbytes, mask).explain()


def test_coalescing_is_for_one_instruction() -> None:
    with pytest.raises(ValueError, match="use sectors"):
        coalescing(np.zeros((2, 32), int), 4)
