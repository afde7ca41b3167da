"""Grids: what is shown is what the layout says (law: offset, address and bank follow from strides and element size)."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvlab.layout import Layout, TileTensor, zipped_divide
from kvlab.viz import draw, draw_layout

TILE = np.arange(128)[:, None] * 64 + np.arange(64)


def test_every_cell_has_its_details(sound, hovers) -> None:
    found = hovers(sound(draw_layout(TILE[:16], element_bytes=2, base=256)))
    assert len(found) == 16 * 64
    for row, column in ((0, 0), (3, 17), (15, 63)):
        offset = 64 * row + column
        address = 256 + 2 * offset
        want = f"row {row}, column {column}\noffset {offset}\nbyte {address}, bank {address // 4 % 32}"
        assert found[64 * row + column] == want


def test_a_large_tile_folds_to_first_eight_and_last_row(sound, hovers, overlaps) -> None:
    picture = draw_layout(TILE, element_bytes=2)
    found = hovers(sound(picture))
    assert len(found) == 9 * 64
    assert found[-1].startswith("row 127, column 63\noffset 8191")
    assert "119 more rows" in picture.svg
    assert not overlaps(picture)
    wide = draw_layout(np.arange(2)[:, None] * 512 + np.arange(512))
    assert len(hovers(sound(wide))) == 2 * (64 + 8)
    assert not overlaps(wide)


def test_a_marked_cell_is_never_folded_away(sound, hovers, overlaps) -> None:
    wide = np.arange(100)[:, None] * 1000 + np.arange(1000)
    picture = draw_layout(wide, mark=(50, 500))
    found = hovers(sound(picture))
    assert "row 50, column 500\noffset 50500" in found
    assert len(found) == 10 * 73
    assert not overlaps(picture)


@pytest.mark.parametrize(("array", "tiler"), [((8, 16), (4, 8)), ((6, 6), (2, 3)), ((12,), (4,))], ids=str)
def test_a_divided_layout_is_a_grid_of_its_tiles(array, tiler, sound, hovers, overlaps) -> None:
    """Cell (row, column) is element (row % tile, column % tile) of the tile there: the undivided layout again."""
    whole = Layout.row_major(*array)
    divided = zipped_divide(whole, tiler if len(tiler) > 1 else tiler[0])
    picture = draw(divided, tiles=True)
    assert not overlaps(picture)
    want = whole.offsets().reshape(array[0], -1)
    found = {title.split("\n")[0]: title.split("\n")[1] for title in hovers(sound(picture))}
    assert found == {f"row {r}, column {c}": f"offset {v}" for (r, c), v in np.ndenumerate(want)}


def test_what_is_no_grid_of_tiles() -> None:
    for layout in (Layout("(4,8):(8,1)").modes[0], Layout("((2,2),4)"), TILE, Layout("((2,2,2),(2,2,2))")):
        with pytest.raises(ValueError, match=r"two modes, \(tile, rest\)"):
            draw(layout, tiles=True)
    with pytest.raises(ValueError, match="group cannot be given with tiles"):
        draw(Layout("(2,2)"), tiles=True, group=np.zeros((2, 2), int))


def test_a_tile_tensor_is_drawn_at_its_address(hovers, sound) -> None:
    tensor = TileTensor.stack_allocation(Layout.row_major(8, 64), "bf16", base=144, alignment=16)
    assert hovers(sound(draw(tensor)))[0] == "row 0, column 0\noffset 0\nbyte 144, bank 4"


@pytest.mark.timing
def test_unfolded_tile_is_complete_and_fast(sound, hovers) -> None:
    best = np.inf  # seconds of this process: the test may share the machine
    for _ in range(5):
        start = time.process_time()
        text = draw_layout(TILE, element_bytes=2, fold=False).svg
        best = min(best, time.process_time() - start)
    assert text.count("<title>") == 128 * 64 + 1
    assert best < 0.05  # drawn at once, to the eye


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (16, 16), (24, 128), (3, 4, 5)], ids=str)
def test_texts_do_not_overlap(shape: tuple[int, ...], sound, overlaps) -> None:
    picture = draw_layout(np.arange(np.prod(shape)).reshape(shape))
    sound(picture)
    assert not overlaps(picture)


def test_owner_shows_threads_and_registers(sound, hovers) -> None:
    row, column = np.arange(16)[:, None], np.arange(8)
    owner = row % 8 * 4 + column // 2
    picture = draw_layout(row * 8 + column, owner=owner, register=row // 8 * 2 + column % 2)
    root = sound(picture)
    assert hovers(root)[9 * 8 + 3].endswith("thread 5: warp 0, lane 5, register 3")
    labels = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert labels.count("T5") == 4
    assert "32 threads hold 128 of 128 elements" in picture.title


def test_a_view_is_bright_inside_its_dimmed_parent(sound) -> None:
    inside = np.zeros((4, 4), bool)
    inside[1, 2] = True
    picture = draw_layout(np.arange(16).reshape(4, 4), inside=inside, element_bytes=4)
    sound(picture)
    assert 'opacity="0.22"' in picture.svg


def test_title_states_the_finding() -> None:
    assert draw_layout(TILE[:8], element_bytes=2).title.endswith("column 0 lies in 1 of 32 banks")
    assert "64 elements share 8 offsets" in draw_layout(np.arange(8)[:, None] * np.ones(8, int)).title


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"layout": np.zeros((0, 4), int)}, "non-empty integer array"),
        ({"layout": np.zeros((2, 2))}, "not float64"),
        ({"layout": np.zeros((2, 2), int), "owner": [1, 2]}, r"owner of shape \(2,\) does not fit"),
        ({"layout": np.zeros((2, 2), int), "mark": (2, 0)}, r"mark \(2, 0\) is not a cell"),
    ],
)
def test_bad_input_is_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_layout(**kwargs)
