"""Inverses, common layouts, modes: results that C++ CuTe printed (tests/data/cute_algebra.json), and their laws."""

import json
from pathlib import Path

import numpy as np
import pytest

import kvlab.layout as kl
from kvlab.layout import ComposedLayout, CoordinateLayout, E, Layout, Swizzle, from_cute

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


@pytest.mark.parametrize(("operation", "text", "printed"), DATA["swizzled_inverses"])
def test_swizzled_layouts_have_swizzled_inverses(operation, text, printed):
    """CuTe's, and the law: of these layouts each offset below the size belongs to one coordinate."""
    layout, expected = from_cute(text, "f16"), from_cute(printed, "f16")
    found = getattr(kl, operation)(layout)
    assert (found.outer, found.offset, found.layout) == (expected.outer, 0, kl.coalesce(expected.layout))
    np.testing.assert_array_equal(layout(found(np.arange(layout.size))), np.arange(layout.size))


def test_what_swizzled_layouts_have_in_common():
    """CuTe's; and the law of vectors, of an offset that begins inside one, too."""
    for one, other, printed in DATA["swizzled_vectors"]:
        assert kl.max_common_vector(from_cute(one, "f16"), from_cute(other, "f16")) == int(printed[1:])
    plain = Layout("(8,64):(64,1)")
    part = ComposedLayout(plain, Swizzle(3, 3, 3, "f16"), 68)
    common = kl.max_common_layout(plain, part)
    assert common == Layout("4:8")
    assert [part(common(i)) - part(0) for i in range(4)] == [0, 1, 2, 3]


def test_layouts_after_swizzles_and_swizzles_after_swizzles():
    """CuTe's, and the law of composition."""
    for a, b, printed in DATA["compositions"]:
        a, b, expected = Layout(a), from_cute(b, "f16"), from_cute(printed, "f16")
        assert kl.compose(a, b) == expected
    turn, part = Layout("(64,8):(8,1)"), ComposedLayout(Layout("(2,64):(64,1)"), Swizzle(3, 3, 3, "f16"), 128)
    assert kl.compose(turn, part).offset == 2
    np.testing.assert_array_equal(kl.compose(turn, part).offsets(), turn(part.offsets()))
    for a, b, printed in DATA["swizzles"]:
        assert kl.compose(from_cute(a, "f16"), from_cute(b, "f16")) == from_cute(printed, "f16")
    x, tile = np.arange(1 << 12), Layout("(16,8):(8,1)")
    for numbers in ((3, 3, 4), (1, 5, 4), (2, 3, 4), (1, 6, 4)):
        one, two = Swizzle(2, 3, 4, "f16"), Swizzle(*numbers, "f16")
        if numbers != (1, 6, 4):
            np.testing.assert_array_equal(kl.compose(one, two)(x), one(two(x)))
            both = kl.compose(one, ComposedLayout(tile, two, 8))
            np.testing.assert_array_equal(both.offsets(), one(two(8 + tile.offsets())))
    scattered = ComposedLayout(Layout("(6,2):(8,2)"), None, 1)  # a start alone: the map after it is the layout
    assert [kl.compose(Layout("(4,8):(9,1)"), scattered)(i) for i in range(12)] == [
        Layout("(4,8):(9,1)")(1 + Layout("(6,2):(8,2)")(i)) for i in range(12)]  # fmt: skip


def test_steps_along_dimensions_are_cute_s():
    """CuTe's own coordinates, of C++ and of the DSL, divided, composed, sliced, tiled."""
    same = CoordinateLayout.identity((8, 64))
    nested = CoordinateLayout(((4, 2), 64, 2), ((E(0), E(1, 0)), 2 * E(1, 1), E(2)))
    found = {
        "identity": same, "nested": nested, "compose identity, (4,3):(2,8)": kl.compose(same, Layout("(4,4):(2,8)")),
        "divide identity, (4,16)": kl.zipped_divide(same, (4, 16)), "coalesce identity": kl.coalesce(same),
        "logical_divide identity, 4:2, 16:1": kl.logical_divide(same, (Layout("4:2"), 16)),
        "coalesce2 ((4,2),64)": kl.coalesce(CoordinateLayout("(4,2,64):(1@0,4@0,1@1)")), "tensor (3,_)": same[3, :],
        "tile (4,16),(1,2)": kl.local_tile(same, (4, 16), (1, 2)),
    }  # fmt: skip
    for name, layout in found.items():
        np.testing.assert_array_equal(layout.coordinates().reshape(-1, 2 if layout is not nested else 4),
                                      from_cute(DATA["coordinates"][name]).coordinates().reshape(
                                          -1, 2 if layout is not nested else 4))  # fmt: skip
        if name not in ("tensor (3,_)",):
            assert kl.to_cute(layout).replace("_", "") == DATA["coordinates"][name].replace("_", "")
    assert str(nested((3, 1), 5, 1)).replace(" ", "") == DATA["coordinates"]["value nested"]
    assert str(same(77)).replace(" ", "") == DATA["coordinates"]["value identity 77"]
    assert kl.to_cute(CoordinateLayout.identity(((8, 2), 64)), "dsl") == DATA["coordinates_dsl"]["identity"]
    assert kl.to_cute(found["tile (4,16),(1,2)"], "dsl") == DATA["coordinates_dsl"]["tile (4,16),(1,2)"]


def test_coordinates_go_back_too():
    """Laws of slices and of printing, of steps back and of arrays."""
    flipped = CoordinateLayout((4, 6), (-1 * E(1), 2 * E(0)), (5, 3))
    assert flipped(3, 2) == (9, 0) == flipped[3, :](2) == flipped[:, 2](3)
    assert CoordinateLayout(str(flipped[1:3, 2])) == flipped[1:3, 2]
    rows, columns = flipped(np.arange(4)[:, None], np.arange(6))
    np.testing.assert_array_equal(flipped.coordinates(), np.stack(np.broadcast_arrays(rows, columns), axis=-1))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: kl.append(Layout("(4,8):(8,1)"), EXTRA, 1), "rank is 1: must be at least the 2"),
    (lambda: kl.append(3), "append of 3: must be a Layout"),
    (lambda: kl.replace(Layout("(4,8):(8,1)"), 2, EXTRA), "index is 2: must be 0 to 1"),
    (lambda: kl.group(Layout("(4,8):(8,1)"), 1, 1), "end is 1: must be past begin 1"),
    (lambda: kl.idx2crd((1, 2, 3), (4, 8)), r"index \(1, 2, 3\) has 3 modes"),
    (lambda: kl.idx2crd((1, 2), (4, 8), 1), "stride 1 does not fit"),
    (lambda: kl.complement(EXTRA, 1.5), "size is 1.5"), (lambda: kl.complement(EXTRA, (4, -1)), "size is -1"),
    (lambda: kl.left_inverse(ComposedLayout(EXTRA, None, 7)), "starts at 7, must start at 0"),
    (lambda: kl.right_inverse(ComposedLayout(Layout("(8,24):(24,1)"), Swizzle(3, 3, 3, "f16"))), "no layout is"),
    (lambda: kl.compose(Layout("(8,8):(9,1)"), Swizzle(2, 0, 3, "f16")), "must be powers of two that double"),
    (lambda: kl.compose(Layout("(8,8,2):(8,1,8)"), Swizzle(1, 0, 3, "f16")), "offsets carry out of the bits"),
    (lambda: kl.compose(Swizzle(2, 0, 3, "f16"), Swizzle(2, 0, 4, "f16")), "must have one shift"),
    (lambda: kl.compose(Swizzle(1, 0, 4, "f16"), Swizzle(1, 2, 4, "f16")), "bits that are one run"),
    (lambda: kl.compose(Swizzle(1, 3, 1, "f16"), Swizzle(1, 4, 1, "f16")), "not an involution"),
    (lambda: kl.logical_product(CoordinateLayout.identity(4), 2), "must be a Layout or a ComposedLayout"),
    (lambda: CoordinateLayout((4, 2), (E(1), E(1, 0))), "dimension 1 is divided, and has steps of its own"),
    (lambda: CoordinateLayout((4, 2), (E(0), 3)), "stride is 3: must be E"),
    (lambda: CoordinateLayout(4, E(0) * (1 << 40)), "value is 1099511627776"),
    (lambda: CoordinateLayout("(4,2):(1@0)"), "not congruent"), (lambda: CoordinateLayout("4:1@"), "no layout"),
    (lambda: kl.max_common_vector("4:1", Layout("4:1")), "max_common_layout of '4:1'"),
])  # fmt: skip
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
