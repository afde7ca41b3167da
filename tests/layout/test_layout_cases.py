"""Cases asked for in practice (tests/data/layout_cases_layout.json), each tried as it is written there. Their values
were computed with integer arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvlab.layout import Layout, Swizzle, composition, make_tma_swizzle, zipped_divide
from kvlab.layout.encodings import SwizzledSharedLayout
from kvlab.viz import draw

CASES = json.loads((Path(__file__).parents[1] / "data" / "layout_cases_layout.json").read_text())["cases"]


def case(name):
    return CASES[name]["input"], CASES[name]["expected"]


def swizzle(text, unit):
    return Swizzle.parse(f"Sw{text}", unit)


def test_every_case_has_a_test():
    here = Path(__file__).read_text()
    assert [name for name in CASES if f'"{name}"' not in here] == []


def test_inadmissible_composition():
    given, expected = case("compose-inadmissible-stride")
    a, b = Layout(given["A"]), Layout(given["B"])
    assert [a(b(i)) for i in range(b.size)] == expected["pointwise_A_of_B"]
    with pytest.raises(ValueError, match="mode 0, shape 4, stride 3: neither divides the other"):
        composition(a, b)


def test_composition_that_crosses_modes():
    given, expected = case("compose-crossing-modes-valid")
    got = composition(Layout(given["A"]), Layout(given["B"]))
    assert str(got) == expected["layout"]
    assert got(np.arange(got.size)).tolist() == expected["flat_values"]


def test_zipped_divide_is_a_grid_of_tiles():
    given, expected = case("zipped-divide-tile-grid")
    got = zipped_divide(Layout(given["A"]), (1, 2))
    assert str(got) == expected["layout"]
    rows, columns, down, across = got.offsets(leaves=True).shape
    tiles = got.offsets(leaves=True).transpose(2, 3, 0, 1).reshape(down, across, rows * columns)
    assert tiles.tolist() == expected["tiles_row_major"]
    assert "a grid of 2 x 3 tiles of 1 x 2 elements" in draw(got, tiles=True).title


def test_units_of_a_tf32_swizzle():
    given, expected = case("tf32-swizzle-units")
    offset = Layout(given["layout"])(*given["coord"])
    assert [swizzle(text, "float32")(offset) for text in given["swizzles"]] == [
        expected[f"{text} in elements"] for text in given["swizzles"]
    ]
    assert swizzle("<3,4,3>", "byte").to("float32") == swizzle("<3,2,3>", "float32")


def test_cells_of_the_128_byte_mode():
    given, expected = case("swizzle-128b-cell-table")
    cells = make_tma_swizzle(given["mode"], "uint8").to("vector")(np.arange(64)).reshape(8, 8) % 8
    assert cells.tolist() == expected["rows"]


def test_vec_per_phase_max_phase():
    given, expected = case("vec-phase-parameters")
    encoding = SwizzledSharedLayout(given["vec"], given["per_phase"], given["max_phase"], [1, 0])
    stored = np.empty(given["shape"], int)
    stored.reshape(-1)[encoding.offsets(given["shape"])] = np.arange(given["shape"][1])
    assert stored.tolist() == expected["column_stored_at_each_place"]


def test_overlapping_swizzle():
    given, _ = case("overlapping-swizzle-refused")
    with pytest.raises(ValueError, match="shift 2 < bits 3 is not an involution"):
        swizzle(given["swizzle"], "vector")
