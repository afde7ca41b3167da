"""Linear layouts: every cell names what the layout itself maps there (law: the map evaluated at all indices)."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvlab.hardware import get_atom
from kvlab.layout import Layout, LinearLayout, Swizzle
from kvlab.layout.encodings import BlockedLayout, SwizzledSharedLayout, TensorMemoryLayout
from kvlab.viz import draw, draw_encoding, draw_linear_layout, draw_thread_values

MMA = get_atom("mma.sync.m16n8k16.bf16")
HELD = {
    "accumulators": LinearLayout.from_atom(MMA, "c", warps=(2, 2)),
    "operand": LinearLayout.from_atom(MMA, "b", warps=(2, 2)),
    "blocked": BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]).to_linear_layout((32, 64)),
    "small": BlockedLayout([1, 2], [4, 8], [2, 1], [1, 0]).to_linear_layout((4, 8)),
}


def held(titles: list[str], register: str = "register r") -> dict[tuple[int, int], tuple[int, int]]:
    found = {}
    for title in titles:
        match = re.fullmatch(rf"row (\d+), column (\d+)\nthread (\d+), {register}(\d+)", title)
        row, column, thread, number = map(int, match.groups())
        found[row, column] = (thread, number)
    return found


@pytest.mark.parametrize("name", HELD)
def test_every_element_names_its_lowest_thread_and_register(name: str, sound, hovers, overlaps) -> None:
    layout = HELD[name]
    picture = draw(layout)
    found = held(hovers(sound(picture)))
    assert not overlaps(picture)
    lanes = layout.in_dims["lane"]
    want: dict[tuple[int, int], tuple[int, int]] = {}
    for thread in range(lanes * layout.in_dims["warp"]):
        for register in range(layout.in_dims["register"]):
            place = layout(register=register, lane=thread % lanes, warp=thread // lanes)
            want.setdefault(place, (thread, register))
    assert found == want


@pytest.mark.parametrize("name", HELD)
def test_a_thread_that_is_picked_out_is_named_wherever_it_holds_an_element(name: str, sound, hovers) -> None:
    """Law: the layout evaluated at all registers of the thread, of every warp, also where another holds the same."""
    layout = HELD[name]
    lanes = layout.in_dims["lane"]
    for thread in range(5 % lanes, lanes * layout.in_dims["warp"], lanes):
        want: dict[tuple[int, int], tuple[int, int]] = {}
        for register in range(layout.in_dims["register"]):
            want.setdefault(layout(register=register, lane=thread % lanes, warp=thread // lanes), (thread, register))
        found = held(hovers(sound(draw_linear_layout(layout, thread=thread))))
        assert {place: who for place, who in found.items() if who[0] == thread} == want


def test_a_wide_tensor_folds_and_keeps_what_the_picked_thread_holds(sound, hovers, overlaps) -> None:
    """Law: as above; thread 63 holds columns that a fold to the first 64 and the last 8 leaves out."""
    layout = BlockedLayout([1, 4], [1, 64], [1, 1], [1, 0]).to_linear_layout((2, 512))
    picture = draw_linear_layout(layout, thread=40)
    found = held(hovers(sound(picture)))
    assert not overlaps(picture)
    assert {place for place, (thread, _) in found.items() if thread == 40} >= {(0, 160), (0, 161), (0, 162), (0, 163)}


def test_every_thread_of_a_replicated_layout_can_be_picked_out(sound, hovers) -> None:
    """Law: threads 4 to 7 hold what 0 to 3 hold."""
    layout = Layout("((4,2),2):((2,0),1)")
    for thread in range(8):
        found = held(hovers(sound(draw_thread_values(layout, (8, 1), thread=thread))), "value v")
        mine = {place: who for place, who in found.items() if who[0] == thread}
        assert mine == {(layout(thread, value), 0): (thread, value) for value in range(2)}


def test_broadcasts_are_counted_and_hatched() -> None:
    picture = draw(HELD["operand"])
    assert picture.title == "16 x 16 elements: 128 threads hold 4 each, every element twice"
    assert "zero: a copy at the same place" in picture.svg
    assert "zero: a copy" not in draw(HELD["accumulators"]).svg


def test_the_table_has_every_basis_vector(sound) -> None:
    for layout in HELD.values():
        texts = [t.text for t in sound(draw(layout)).iter("{http://www.w3.org/2000/svg}text")]
        for name, vectors in layout.bases.items():
            assert (name in texts) == bool(vectors)
            for vector in vectors:
                assert f"({','.join(map(str, vector))})" in texts


def test_a_tall_tensor_folds_and_keeps_the_thread_that_is_asked_for(sound, hovers, overlaps) -> None:
    layout = BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]).to_linear_layout((128, 64))
    picture = draw_linear_layout(layout, thread=127)
    found = held(hovers(sound(picture)))
    rows = {row for row, _ in found}
    assert len(rows) < 128
    assert {row for (row, _), (thread, _) in held(hovers(sound(draw_linear_layout(layout, thread=3)))).items()
            if thread == 3} <= {0, 32, 64, 96}
    assert any(thread == 127 for thread, _ in found.values())
    assert not overlaps(picture)


@pytest.mark.parametrize("shape", [(16, 64), (8, 32)], ids=str)
def test_a_shared_layout_is_its_memory_image(shape: tuple[int, int], sound, hovers) -> None:
    encoding = SwizzledSharedLayout(8, 1, 8 if shape[1] == 64 else 4, [1, 0])
    found = hovers(sound(draw(encoding.to_linear_layout(shape))))
    offsets = encoding.offsets(shape)
    for row, vector in np.ndindex(shape[0], shape[1] // 8):
        address = 2 * int(offsets[row, 8 * vector])
        where = f"byte {address}, bank {address // 4 % 32}"
        assert found[address // 16] == f"{where}\nrow {row} of the tile, vector {vector}"


def test_a_transposed_image_and_other_element_sizes(sound, hovers) -> None:
    columns = SwizzledSharedLayout(8, 1, 8, [0, 1]).to_linear_layout((64, 16))
    picture = draw(columns)
    sound(picture)
    assert picture.title.startswith("columns of 64 x 16, transposed: ")
    floats = draw_linear_layout(SwizzledSharedLayout(4, 1, 8, [1, 0]).to_linear_layout((8, 32)), element_bytes=4)
    assert hovers(sound(floats))[9].startswith("byte 144, bank 4\nrow 1 of the tile, vector 0")


def test_coordinates_to_offsets(sound, hovers) -> None:
    layout, swizzle = Layout("(4,8):(8,1)"), Swizzle(1, 2, 2, "bf16")
    found = hovers(sound(draw(LinearLayout.from_layout(layout, swizzle))))
    for row, column in np.ndindex(4, 8):
        assert found[8 * row + column] == f"row {row}, column {column}\noffset {swizzle(layout(row, column))}"


def test_thread_value_layouts(sound, hovers, overlaps) -> None:
    layout = Layout("((4,8),(2,2)):((32,1),(16,8))")
    picture = draw_thread_values(layout, (16, 8), thread=5)
    found = held(hovers(sound(picture)), "value v")
    for thread, value in np.ndindex(32, 4):
        number = layout(thread, value)
        assert found[number % 16, number // 16] == (thread, value)
        assert MMA.c(thread, value) == (number % 16, number // 16)
    assert not overlaps(picture)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"thread is 128: must be one of the 128 threads, 0\.\.127"):
        draw_linear_layout(HELD["blocked"], thread=128)
    with pytest.raises(ValueError, match="cannot draw a linear layout from block to dim0"):
        draw(LinearLayout({"block": [[1]]}, (2,)))
    with pytest.raises(ValueError, match="reaches element 127, a tile of 8 x 8 has fewer"):
        draw_thread_values(Layout("(32,4):(4,1)"), (8, 8))
    with pytest.raises(ValueError, match="has 1 modes: must be two"):
        draw_thread_values(Layout("32:1"), (8, 8))


def test_too_many_thread_values_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="up to 262144 elements can be drawn"):
        draw_thread_values(Layout((1 << 31, 1 << 31)), (1 << 31, 1 << 31))


@pytest.mark.parametrize("layout", [HELD["operand"], SwizzledSharedLayout(8, 1, 8, [1, 0]).to_linear_layout((8, 64))])
def test_the_matrix_over_bits_is_the_basis_vectors(layout: LinearLayout, sound, overlaps) -> None:
    """Law: the dark cells of a column, read from the top as the bits of the coordinates, are its basis vector."""
    picture = draw_linear_layout(layout, bits=True)
    assert not overlaps(picture)
    dark: dict[str, list[bool]] = {}
    svg = "{http://www.w3.org/2000/svg}"
    for rect in (one for one in sound(picture).iter(f"{svg}rect") if one.find(f"{svg}title") is not None):
        dark.setdefault(rect.findtext(f"{svg}title").partition(" ->")[0], []).append(rect.get("opacity") == "0.75")
    sizes = [size.bit_length() - 1 for size in layout.out_dims.values()]
    for name, vectors in layout.bases.items():
        for bit, vector in enumerate(vectors):
            digits = [bool(x >> at & 1) for x, size in zip(vector, sizes, strict=True) for at in range(size)]
            assert dark.pop(f"{name} {1 << bit}") == digits
    assert not dark


def test_tensor_memory_is_drawn_as_its_matrix():
    """The compiler's rows and columns (tests/layout/test_triton_oracle.py): a bit of each leads nowhere."""
    title = draw_encoding(TensorMemoryLayout((64, 64), 2), (64, 64)).title
    assert title == "row, col -> dim0, dim1: 12 of 14 bits choose the place, 2 hold a copy"
