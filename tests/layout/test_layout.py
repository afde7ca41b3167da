"""Layout and the trees under it. Rests on laws (an independent evaluation leaf by leaf, round trips) and on the worked
numbers of the Mojo layout package's own tests."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.layout import Layout
from kvlab.layout.algebra.int_tuple import congruent, crd2idx, flatten, int_tuple, product


def layouts(max_leaf=4):
    """Nested layouts of a few modes with arbitrary strides."""
    leaf = st.tuples(st.integers(1, max_leaf), st.integers(0, 40))
    tree = st.recursive(leaf, lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=5)
    return tree.map(lambda t: Layout(split(t, 0), split(t, 1)))


def split(tree, part):
    return tree[part] if isinstance(tree, tuple) else tuple(split(item, part) for item in tree)


def coordinates(shape):
    """All coordinates of a shape, first leaf fastest."""
    if isinstance(shape, int):
        return list(range(shape))
    per_mode = [coordinates(item) for item in reversed(shape)]
    return [tuple(reversed(choice)) for choice in itertools.product(*per_mode)]


@given(layouts())
def test_text_round_trip(layout):
    assert Layout.parse(str(layout)) == layout
    assert eval(repr(layout)) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout


@given(layouts())
def test_offset_is_the_dot_product_of_the_leaves(layout):
    for crd in coordinates(layout.shape):
        expected = sum(c * d for c, d in zip(flatten(crd), flatten(layout.stride), strict=True))
        assert crd2idx(crd, layout.shape, layout.stride) == expected


@given(layouts())
def test_ints_count_colexicographically(layout):
    expected = [layout(crd) if isinstance(crd, tuple) else crd * layout.stride for crd in coordinates(layout.shape)]
    assert [layout(i) for i in range(layout.size)] == expected
    assert layout(np.arange(layout.size)).tolist() == expected
    assert layout.offsets().T.reshape(-1).tolist() == expected


@given(layouts())
def test_cosize_is_one_past_the_largest_offset(layout):
    assert layout.cosize == layout.offsets().max() + 1


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.randoms())
def test_idx2crd_inverts_compact_layouts(shape, random):
    order = list(range(len(shape)))
    random.shuffle(order)
    stride, reach = [0] * len(shape), 1
    for mode in order:
        stride[mode] = reach
        reach *= shape[mode]
    layout = Layout(tuple(shape), tuple(stride))
    index = np.arange(layout.size)
    assert (layout(layout.idx2crd(index)) == index).all()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_row_and_column_major_are_numpys_orders(shape):
    index = np.arange(product(tuple(shape))).reshape(shape)
    assert (Layout.row_major(*shape).offsets() == index).all()
    assert (Layout.col_major(*shape).offsets() == index.reshape(-1).reshape(shape, order="F")).all()


class TestWorkedNumbers:
    nested = Layout((4, (3, 2)), (6, (2, 1)))

    @pytest.mark.parametrize(
        "crd, offset",
        [((2, (1, 0)), 14), ((2, 1), 14), ((2, 1, 0), 14), ((0, 5), 5), (1, 6), ((1, (1, 1)), 9), (17, 9)],
    )
    def test_nested(self, crd, offset):
        assert self.nested(crd) == offset

    def test_row_major_counts_colexicographically(self):
        assert [Layout.row_major(3, 4)(i) for i in range(12)] == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]

    def test_blocked(self):
        layout = Layout("((2,2),(2,3)):((2,12),(1,4))")
        assert (layout((1, 0), (0, 2)), layout(1, 0, 0, 2), layout(1, 2)) == (10, 10, 6)
        assert layout.offsets().tolist()[2] == [12, 13, 16, 17, 20, 21]

    def test_column_major_of_a_tree(self):
        assert str(Layout(((2, 3), 4))) == "((2,3),4):((1,2),6)"

    def test_cosize(self):
        assert Layout("(3,5):(9,2)").cosize == 27
        assert Layout("(4,0):(1,1)").cosize == 0
        assert Layout("(4,4):(0,1)").cosize == 4

    def test_past_the_end_extrapolates(self):
        assert Layout.row_major(3, 4)(1, 7) == 11
        assert Layout.row_major(3, 4)(12) == 4


class TestArrays:
    def test_broadcast(self):
        layout = Layout.row_major(4, 8)
        rows, cols = np.arange(4)[:, None], np.arange(8)
        assert (layout(rows, cols) == layout.offsets()).all()
        assert layout(rows, cols).dtype == np.int64

    def test_int_results_are_python_ints(self):
        assert type(Layout.row_major(4, 8)(np.int64(1), 2)) is int

    def test_nested_coordinate_arrays(self):
        layout = TestWorkedNumbers.nested
        index = np.arange(24)
        assert (layout(index % 4, (index // 4 % 3, index // 12)) == layout(index)).all()

    def test_offsets_are_cached_and_read_only(self):
        offsets = Layout.row_major(4, 8).offsets()
        assert offsets is Layout.row_major(4, 8).offsets()
        with pytest.raises(ValueError):
            offsets[0, 0] = 1

    def test_rank_one(self):
        assert Layout(8).offsets().shape == Layout((8,)).offsets().shape == (8,)
        assert str(Layout(8, 2)) == "8:2"
        assert str(Layout((8,), (2,))) == "(8):(2)"

    def test_rank_zero_is_one_element(self):
        layout = Layout((), ())
        assert (layout.size, layout.cosize, layout.rank, layout.offsets().shape) == (1, 1, 0, ())


def test_modes_and_transpose():
    layout = Layout("(4,(3,2)):(6,(2,1))")
    assert [str(mode) for mode in layout.modes] == ["4:6", "(3,2):(2,1)"]
    assert str(layout.transpose()) == "((3,2),4):((2,1),6)"
    assert (layout.transpose().offsets() == layout.offsets().T).all()


def test_is_row_major():
    assert Layout.row_major(4, 1, 8).is_row_major
    assert Layout("(4,1,8):(8,77,1)").is_row_major
    assert not Layout("(4,8):(9,1)").is_row_major
    assert not Layout("(4,(4,2)):(8,(2,1))").is_row_major


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Layout((4, 8), (1,)), r"stride \(1,\) is not congruent with shape \(4, 8\)"),
        (lambda: Layout((4, (2, 2)), (1, 2)), "not congruent"),
        (lambda: Layout((4, -1)), "negative extent"),
        (lambda: Layout((4, 2.0)), r"is 2.0: must be an int"),
        (lambda: Layout((4, True)), r"is True: must be an int"),
        (lambda: Layout("(4,8):(8,1)", 3), "stride must be None"),
        (lambda: Layout.parse("(4,8:(8,1)"), r"'the end' where"),
        (lambda: Layout.parse("(4,8)):(8,1)"), r"'\)' follows the end"),
        (lambda: Layout.parse("(4;8):(8,1)"), "where an int"),
        (lambda: Layout.row_major(4, (2, 2)), r"shape \(4, \(2, 2\)\) is nested"),
        (lambda: Layout.row_major(4, 8)(1, 2, 3), r"has 3 items; \(4,8\):\(8,1\) accepts 1 or 2"),
        (lambda: Layout((4, 8, 2))(1, 2), "accepts 1 or 3"),
        (lambda: Layout.row_major(4, 8)((1, 2), 3), "does not fit shape 4"),
        (lambda: Layout.row_major(4, 8)(-1, 0), "coordinate -1 is negative"),
        (lambda: Layout.row_major(4, 8)(np.array([3, -2]), 0), "coordinate -2 is negative"),
        (lambda: Layout.row_major(4, 8)(np.array([0.5]), 0), "dtype float64: must be integers"),
        (lambda: Layout.row_major(4, 8)([1, 2]), "a coordinate of several modes is a tuple"),
    ],
)
def test_refusals(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_int_tuple_and_congruence():
    assert int_tuple([4, [np.int32(3), 2]]) == (4, (3, 2))
    assert not congruent((4, 2), (4, (2, 1)))
    assert not congruent(4, (4,))


def test_draws_itself():
    assert Layout.row_major(4, 8)._repr_svg_().startswith("<svg")


class TestOtherRules:
    """What the two layout systems of MAX do otherwise, from their sources."""

    def test_legacy_ints_wrap_in_two_flat_modes_only(self):
        pair, triple = ((3, 4), (4, 1)), ((3, 2, 2), (4, 2, 1))
        assert [crd2idx(i, *pair, rule="legacy") for i in range(24)] == [crd2idx(i % 12, *pair) for i in range(24)]
        assert [crd2idx(i, *triple, rule="legacy") for i in range(24)] == [crd2idx(i, *triple) for i in range(24)]
        assert crd2idx(np.arange(24), *pair, rule="legacy").tolist() == [crd2idx(i % 12, *pair) for i in range(24)]

    def test_new_coordinates_of_another_length_are_flat(self):
        nested = ((2, 2), (2, 3)), ((2, 12), (1, 4))
        assert crd2idx((1, 0, 0, 2), *nested, rule="new") == 10
        assert crd2idx(((1, 0), (0, 2)), *nested, rule="new") == 10
        assert crd2idx((5,), *nested, rule="new") == crd2idx(5, *nested)
        assert crd2idx((1, 1, 1), *nested, rule="new") == 15
