"""Grids: what is shown is what the layout says (law: offset, address and bank follow from strides and element size)."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.layout import ComposedLayout, Layout, Swizzle, TileTensor, zipped_divide
from kvlab.viz import draw, draw_layout
from kvlab.viz.model.offset_grid import OffsetGrid

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
    tile = ComposedLayout(Layout.row_major(8, 64), Swizzle(3, 3, 3, "bf16"))
    assert draw(tile).title.endswith(": the 8 rows of column 0 lie in 8 different banks")
    assert draw_layout(Layout.row_major(64, 33), element_bytes=4).title.endswith("column 0 lies in all 32 banks")
    assert draw_layout(Layout("(8,4):(1,8)"), element_bytes=2).title.endswith(
        "the 8 rows of column 0 lie in 4 words, in 4 different banks"
    )
    assert "64 elements share 8 offsets" in draw_layout(np.arange(8)[:, None] * np.ones(8, int)).title


SMALL_INTS = st.integers(1, 5)
TREES = st.tuples(SMALL_INTS, SMALL_INTS, SMALL_INTS, *[st.integers(-40, 40)] * 3)


@given(TREES, st.sampled_from([None, 1, 2, 4, 16]), st.sampled_from([32, 64]))
def test_what_is_said_of_large_layouts_is_what_all_offsets_say(tree, element_bytes, banks) -> None:
    """Rests on all offsets, one by one: what shapes and strides tell (as of large layouts) is the same."""
    a, b, c, *strides = tree
    layout = Layout(((a, b), c), ((strides[0], strides[1]), strides[2]))
    field, blind = OffsetGrid(layout), OffsetGrid(layout)
    blind.__dict__["every"] = None
    assert np.array_equal(field.every, layout.offsets())
    assert [x for x in blind.steps if x is not None] == [x for x in blind.steps if x is not None and x in field.steps]
    assert blind.steps[1] == field.steps[1] or blind.steps[1] is None or field.shape[0] == 1
    assert blind.distinct in (field.distinct, None)
    found = blind.find(field.every)
    if found is not None:
        row, column, there = found
        assert there.all()
        assert np.array_equal(blind.source(row, column), field.every)
        missing = np.setdiff1d(np.arange(-500, 500), field.every)
        assert not blind.find(missing)[2].any()
    if element_bytes:
        column = (64 + field.every[:, 0] * element_bytes) // 4
        start, down = int(field.every[0, 0]), field.leaves[0]
        scaled = type(down)(down.extents, tuple(d * element_bytes for d in down.strides))
        found = {at // 4 for at in scaled.residues(64 + start * element_bytes, 4 * banks)}
        assert found == set((column % banks).tolist())


def test_a_view_is_never_folded_away(sound, hovers) -> None:
    """The tile in the last corner of a large tensor; a strip in its middle."""
    whole = TileTensor.stack_allocation(Layout.row_major(256, 512), "bf16")
    for tile in (whole.tile((8, 32), (31, 15)), whole.tile((64, 512), (2, 0)), whole.tile((256, 8), (0, 40))):
        rows, columns = (n for n in tile.layout.shape)
        picture = draw(tile)
        found = hovers(sound(picture))
        first = tile.offset
        row, column = divmod(int(first), 512)
        last = row + rows - 1, column + columns - 1
        assert any(text.startswith(f"row {row}, column {column}\n") for text in found)
        assert any(text.startswith(f"row {last[0]}, column {last[1]}\n") for text in found)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"layout": np.zeros((0, 4), int)}, "non-empty integer array"),
        ({"layout": np.zeros((2, 2))}, "not float64"),
        ({"layout": np.zeros((2, 2), int), "owner": [1, 2]}, r"owner of shape \(2,\) does not fit"),
        ({"layout": np.zeros((2, 2), int), "mark": (2, 0)}, r"mark is \(2, 0\): must be a cell"),
    ],
)
def test_bad_input_is_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_layout(**kwargs)
