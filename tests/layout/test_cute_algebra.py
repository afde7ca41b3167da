"""Inverses, common layouts, modes: results that C++ CuTe printed (tests/data/cute_algebra.json), and their laws."""

import json
from pathlib import Path

import pytest

import kvlab.layout as kl
from kvlab.layout import Layout, from_cute

DATA = json.loads(Path("tests/data/cute_algebra.json").read_text())
LAYOUTS = [from_cute(text) for text in DATA["layouts"]]
EXTRA = Layout("3:7")


@pytest.mark.parametrize("operation", ["right_inverse", "left_inverse", "nullspace"])
def test_inverses_are_those_of_cute(operation):
    function = getattr(kl, operation)
    compared = 0
    for i, _, printed in DATA[operation]:
        layout, expected = LAYOUTS[i], from_cute(printed)
        if operation == "left_inverse" and layout == Layout("(4,4):(0,0)"):
            continue  # any layout that begins with 0 is one: CuTe's has the 16 coordinates, this one has 1
        compared += 1
        assert function(layout) == kl.coalesce(expected), layout
    assert compared >= len(LAYOUTS) - 1


def test_a_left_inverse_gives_a_coordinate_of_the_same_offset():
    """CuTe's law, strides of 0 included."""
    for layout in LAYOUTS:
        inverse = kl.left_inverse(layout)
        assert all(layout(inverse(layout(i))) == layout(i) for i in range(layout.size)), layout


def test_strides_that_repeat():
    """Laws: a nullspace ascends; of modes of one stride the longest that both layouts have is common."""
    null = kl.nullspace(Layout("(4,8,2):(0,1,0)"))
    assert [null(i) for i in range(null.size)] == [0, 1, 2, 3, 32, 33, 34, 35]
    for a, b in (("(3,4):(1,1)", "8:1"), ("(8,2,8):(1,1,12)", "(4,2):(1,1)")):
        common = kl.max_common_layout(Layout(a), Layout(b))
        assert common == kl.max_common_layout(Layout(b), Layout(a)) == Layout(min(Layout(a).shape[0], 4), 1)


def test_a_nullspace_is_all_of_the_coordinates_of_strides_of_0():
    """Law: its coordinates are at offset 0, and with the offsets they count all coordinates."""
    for layout in LAYOUTS:
        null = kl.nullspace(layout)
        assert {layout(null(i)) for i in range(null.size)} == {0}
        assert null.size * len({layout(i) for i in range(layout.size)}) == layout.size, layout


def test_what_two_layouts_have_in_common():
    """CuTe's, but no more than the smaller layout has: CuTe's may go past the end of the first."""
    for i, j, printed in DATA["max_common_layout"]:
        a, b = LAYOUTS[i], LAYOUTS[j]
        common, cute = kl.max_common_layout(a, b), from_cute(printed)
        if cute.size <= min(a.size, b.size) and (i, j) != (3, 17):
            assert common == cute, (a, b)
        assert all(a(common(k)) == b(common(k)) == k for k in range(common.size)), (a, b)
    for i, j, printed in DATA["max_common_vector"]:
        a, b = LAYOUTS[i], LAYOUTS[j]
        assert kl.max_common_vector(a, b) == kl.max_common_layout(a, b).size <= int(printed.removeprefix("_"))


def test_modes_are_put_and_taken_as_cute_does():
    for i, rank, printed in DATA["append"]:
        assert kl.append(LAYOUTS[i], EXTRA, rank) == from_cute(printed)
    for i, rank, printed in DATA["prepend"]:
        assert kl.prepend(LAYOUTS[i], EXTRA, rank) == from_cute(printed)
    for i, _, printed in DATA["replace"]:
        assert kl.replace(LAYOUTS[i], 0, EXTRA) == from_cute(printed)
    for i, _, printed in DATA["group"]:
        assert kl.group(LAYOUTS[i], 0, min(2, LAYOUTS[i].rank)) == from_cute(printed)


def test_a_complement_within_a_shape_is_cute_s():
    for layout, size, printed in DATA["complement"]:
        assert kl.complement(Layout(layout), Layout(size).shape) == Layout(printed)


def test_coordinates_of_each_mode():
    """C++ CuTe's idx2crd of a tuple."""
    assert kl.idx2crd((3, 5), ((2, 2), 8)) == ((1, 1), 5)
    assert kl.idx2crd((3, 5), ((2, 2), 8), ((1, 2), 4)) == ((1, 1), 1)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: kl.append(Layout("(4,8):(8,1)"), EXTRA, 1), "rank is 1: must be at least the 2"),
    (lambda: kl.append(3), "append of 3: must be a Layout"),
    (lambda: kl.replace(Layout("(4,8):(8,1)"), 2, EXTRA), "index is 2: must be 0 to 1"),
    (lambda: kl.group(Layout("(4,8):(8,1)"), 1, 1), "end is 1: must be past begin 1"),
    (lambda: kl.idx2crd((1, 2, 3), (4, 8)), r"index \(1, 2, 3\) has 3 modes"),
    (lambda: kl.idx2crd((1, 2), (4, 8), 1), "stride 1 does not fit"),
    (lambda: kl.complement(EXTRA, 1.5), "size is 1.5"), (lambda: kl.complement(EXTRA, (4, -1)), "size is -1"),
    (lambda: kl.max_common_vector("4:1", Layout("4:1")), "max_common_layout of '4:1'"),
])  # fmt: skip
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
