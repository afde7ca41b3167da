"""Shared-memory images. Rests on hardware: allocations dumped from an H100 byte by byte (tests/data/hardware)."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.truth import records
from benchmarks.truth.images import UNTOUCHED, ImageCase, cases, expected
from kvlab.hardware import cp_async, create_tensor_tile
from kvlab.layout.encodings import NVMMASharedLayout
from kvlab.memory import Memory

RECORD = records.read("images")
CASES = list(cases())
DTYPES = {8: np.int8, 16: np.int16, 32: np.int32}


def image_of(case: ImageCase) -> np.ndarray:
    return records.unpack(RECORD["cases"][str(case)])


@pytest.mark.parametrize("bits", DTYPES)
@pytest.mark.parametrize("route", ["registers", "cp.async", "tma"])
def test_the_image_is_the_chip_s(route: str, bits: int) -> None:
    """Every byte of the allocation: which byte of the tile stands there, and which bytes nobody wrote."""
    chosen = [case for case in CASES if (case.route, case.bits) == (route, bits)]
    assert len(chosen) >= 7
    for case in chosen:
        np.testing.assert_array_equal(image_of(case), expected(case), err_msg=str(case))


def test_the_record_is_whole_and_says_where_it_comes_from() -> None:
    assert list(RECORD["cases"]) == [str(case) for case in CASES]
    assert "H100" in RECORD["card"]
    assert {"command", "driver", "date", "versions"} <= set(RECORD)
    untouched = [case for case in CASES if (image_of(case) == UNTOUCHED).any()]
    assert {type(case.layout).__name__ for case in untouched} == {"PaddedSharedLayout"}


def tile_of(case: ImageCase) -> np.ndarray:
    """A tile of random bytes."""
    rows, cols = case.shape
    data = np.random.default_rng(case.nbytes).integers(0, 256, rows * cols * case.bits // 8).astype(np.uint8)
    return data.view(DTYPES[case.bits]).reshape(case.shape)


SWIZZLED = [c for c in CASES if isinstance(c.layout, NVMMASharedLayout) and c.layout.swizzle_byte_width]


@pytest.mark.parametrize("case", [c for c in SWIZZLED if c.route == "tma"], ids=str)
def test_the_emulated_tma_leaves_the_chip_s_image(case: ImageCase) -> None:
    """The boxes of a tile, copied by kvlab.hardware.tma. (Triton cuts unswizzled tiles into narrower boxes.)"""
    assert isinstance(case.layout, NVMMASharedLayout)
    tile, width = tile_of(case), case.layout.swizzle_byte_width
    memory = Memory(case.nbytes, name="smem")
    create_tensor_tile(tile, case.shape, f"{width}B").async_copy(memory, 0, (0, 0))
    np.testing.assert_array_equal(memory.bytes.ravel(), tile.view(np.uint8).ravel()[image_of(case)])


@pytest.mark.parametrize("case", [c for c in CASES if c.route == "cp.async"][::5], ids=str)
def test_the_emulated_cp_async_leaves_the_chip_s_image(case: ImageCase) -> None:
    """Copies of 4 bytes, each lane where the encoding says."""
    tile, size = tile_of(case), case.bits // 8
    place = case.layout.offsets(case.shape, triton_version="3.6.0") * size
    dram, smem = Memory.over(tile), Memory(case.nbytes, name="smem")
    source = np.arange(0, tile.nbytes, 4)
    cp_async(smem, place.ravel()[:: 4 // size] if size < 4 else place.ravel(), dram, source, 4)
    np.testing.assert_array_equal(smem.bytes.ravel(), tile.view(np.uint8).ravel()[image_of(case)])
