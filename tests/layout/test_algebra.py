"""The laws of the layout algebra, each a statement about layouts as functions on ints, checked on drawn layouts; and
worked examples of cases that users ran into."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvlab import layout as kl
from kvlab.layout import ComposedLayout, Layout, Swizzle
from kvlab.layout.algebra.int_tuple import congruent, flatten, int_tuple
from kvlab.layout.algebra.operations import is_exact
from kvlab.layout.algebra.tree_ops import compatible, fill_like, unflatten


def shapes(extents=(1, 2, 3, 4, 6, 8), leaves=4):
    """Nested shapes."""
    tree = st.recursive(
        st.sampled_from(extents), lambda inner: st.lists(inner, min_size=1, max_size=3).map(tuple), max_leaves=leaves
    )
    return tree


@st.composite
def layouts(draw, strides=(0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 48), leaves=4):
    shape = draw(shapes(leaves=leaves))
    return Layout(shape, unflatten([draw(st.sampled_from(strides)) for _ in flatten(shape)], shape))


@st.composite
def injective(draw, gaps=(1, 1, 1, 2, 3), leaves=4, extents=(1, 2, 3, 4, 6, 8)):
    """Layouts without repeated offsets: leaves in some order, each past what lies below, by a factor that may leave
    gaps."""
    shape = draw(shapes(extents, leaves))
    extents = flatten(shape)
    strides, reach = [0] * len(extents), 1
    for leaf in draw(st.permutations(range(len(extents)))):
        strides[leaf] = reach * draw(st.sampled_from(gaps))
        reach = strides[leaf] * extents[leaf]
    return Layout(shape, unflatten(strides, shape))


def values(layout, count=None):
    return np.asarray(layout(np.arange(layout.size if count is None else count))).tolist()


def tried(operation, *arguments, **keywords):
    """The result, or the draw is given up where the operation refuses."""
    try:
        return operation(*arguments, **keywords)
    except ValueError:
        assume(False)


@given(layouts())
def test_size_and_cosize_bound_the_function(a):
    offsets = values(a)
    assert (kl.size(a), kl.cosize(a)) == (len(offsets), max(offsets) + 1)
    assert kl.cosize(a, rule="legacy") == offsets[-1] + 1


@given(layouts(), layouts())
def test_modes_add_up(a, b):
    """make_layout is the sum over its modes, sublayout takes modes out of it, zip_modes pairs them."""
    both = kl.make_layout(a, b)
    i, j = np.arange(a.size)[:, None], np.arange(b.size)
    np.testing.assert_array_equal(both(i, j), a(i) + b(j))
    assert (kl.sublayout(both, 1, 0).modes, kl.sublayout(both, 1)) == ((b, a), kl.make_layout(b))
    pair = kl.zip_modes(kl.make_layout(a, b), kl.make_layout(b, a))
    x, y = pair.modes
    np.testing.assert_array_equal(x(i, j), a(i) + b(j))
    np.testing.assert_array_equal(y(j, i), b(j) + a(i))


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3])), min_size=1, max_size=3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_tile_to_shape_is_the_block_and_copies_of_it(pairs, row_major, random):
    """The first tile is the block; every offset occurs once; copies follow each other in the order asked for."""
    sizes, counts = zip(*pairs, strict=True)
    block = Layout.row_major(*sizes) if row_major else Layout.col_major(*sizes)
    order = list(range(len(pairs)))
    random.shuffle(order)
    target = tuple(n * m for n, m in pairs)
    whole = kl.tile_to_shape(block, target, tuple(order))
    assert tuple(mode.size for mode in whole.modes) == target
    first = whole.offsets()[tuple(slice(n) for n in sizes)]
    np.testing.assert_array_equal(first, block.offsets())
    assert sorted(whole.offsets().ravel().tolist()) == list(range(whole.size))
    steps = [mode(n) if m > 1 else None for mode, n, m in zip(whole.modes, sizes, counts, strict=True)]
    in_order = [steps[axis] for axis in np.argsort(order) if steps[axis] is not None]
    assert in_order == sorted(in_order)


@given(layouts(), layouts())
def test_composition_is_a_after_b(a, b):
    """Or it is refused. Also past the end of A, where layouts go on linearly."""
    result = tried(kl.compose, a, b)
    assert values(result) == [a(b(i)) for i in range(b.size)]
    assert compatible(b.shape, result.shape)


@given(layouts(), st.integers(1, 12), st.integers(0, 30))
def test_composition_is_refused_only_where_steps_do_not_divide(a, s, d):
    """A run that never leaves A's first mode, or that follows A whole, is always a layout."""
    first = a.modes[0]
    assert values(kl.compose(a, Layout(a.size, 1))) == values(a)
    if (s - 1) * d < first.size and isinstance(first.shape, int):
        assert values(kl.compose(a, Layout(s, d))) == [first(i * d) for i in range(s)]


@given(injective(), st.integers(1, 400))
def test_complement_is_disjoint_ordered_and_complete(a, end):
    rest = kl.complement(a, end)
    sums = [x + y for x in values(a) for y in values(rest)]
    assert len(set(sums)) == len(sums)
    assert values(rest) == sorted(values(rest))
    assert a.size * rest.size >= min(end, a.cosize)
    if is_exact(a):
        assert sorted(sums) == list(range(len(sums)))
        assert len(sums) >= end


@given(layouts())
def test_coalesce_is_the_same_function_with_fewer_modes(a):
    for result in (kl.coalesce(a), kl.coalesce(a, keep_rank=True), kl.coalesce(a, rule="new")):
        assert values(result) == values(a)
    flat = kl.coalesce(a)
    assert len(flatten(flat.shape)) <= len(flatten(a.shape))
    assert kl.coalesce(flat) == flat
    assert kl.coalesce(a, keep_rank=True).rank == a.rank


@given(layouts())
def test_coalesce_by_profile_keeps_its_nesting(a):
    if isinstance(a.shape, tuple):
        assert kl.coalesce(a, profile=(0,) * a.rank) == kl.coalesce(a, keep_rank=True)
        assert values(kl.coalesce(a, profile=(0,))) == values(a)


@given(layouts(), injective(leaves=2))
def test_logical_divide_puts_every_element_in_one_tile(a, tiler):
    assume(a.size % tiler.size == 0)
    divided = tried(kl.logical_divide, a, tiler)
    tile, rest = divided.modes
    assume(divided.size == a.size)
    assert sorted(values(divided)) == sorted(values(a))
    assert values(tile) == [a(tiler(i)) for i in range(tiler.size)]
    step = kl.complement(tiler, a.size)
    assert [int(divided(i, j)) for i in range(tile.size) for j in range(rest.size)] == [
        a(tiler(i) + step(j)) for i in range(tile.size) for j in range(rest.size)
    ]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3), st.booleans())
def test_the_four_divides_are_one_tiling(pairs, row_major):
    """Against plain slices of an array."""
    shape, tile = tuple(t * n for t, n in pairs), tuple(t for t, _ in pairs)
    a = Layout.row_major(*shape) if row_major else Layout.col_major(*shape)
    array = a.offsets()
    logical, zipped = kl.logical_divide(a, tile), kl.zipped_divide(a, tile)
    tiled, flat = kl.tiled_divide(a, tile), kl.flat_divide(a, tile)
    assert values(zipped) == values(tiled) == values(flat)
    for where in np.ndindex(*(n for _, n in pairs)):
        window = array[tuple(slice(c * t, (c + 1) * t) for c, t in zip(where, tile, strict=True))]
        fixed = tuple(int(c) for c in where)
        local = kl.local_tile(a, tile, fixed)
        assert (local.offsets().reshape(window.shape) == window).all()
        for inside in np.ndindex(*tile):
            crd = tuple(int(c) for c in inside)
            assert window[inside] == zipped(crd, fixed) == tiled(crd, *fixed) == flat(*crd, *fixed)
            assert window[inside] == logical(*zip(crd, fixed, strict=True))


@given(injective(leaves=3), layouts(strides=(1, 2, 3), leaves=2))
def test_logical_product_copies_the_block_without_overlap(block, tiler):
    result = tried(kl.logical_product, block, tiler)
    inner, outer = result.modes
    assert inner == block
    places = kl.complement(block, block.size * tiler.cosize)
    assert values(outer) == [places(tiler(j)) for j in range(tiler.size)]
    copies = {step: {step + x for x in values(block)} for step in values(outer)}
    assert sum(map(len, copies.values())) == len(set().union(*copies.values()))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3))
def test_blocked_and_raked_products_are_the_same_copies_arranged(pairs):
    block, tiler = Layout.row_major(*(b for b, _ in pairs)), Layout.col_major(*(t for _, t in pairs))
    blocked, raked = kl.blocked_product(block, tiler), kl.raked_product(block, tiler)
    logical = kl.logical_product(block, tiler)
    for b in np.ndindex(*block.shape):
        for t in np.ndindex(*tiler.shape):
            b, t = tuple(map(int, b)), tuple(map(int, t))
            place = logical(b, t)
            assert place == blocked(*zip(b, t, strict=True)) == raked(*zip(t, b, strict=True))
    merged = kl.blocked_product(block, tiler, coalesce_output=True)
    assert (merged.offsets() == blocked.offsets()).all()
    assert values(kl.zipped_product(block, tiler)) == values(kl.flat_product(block, tiler)) == values(logical)
    assert values(kl.tiled_product(block, tiler)) == values(logical)


@given(layouts())
def test_right_inverse(a):
    inverse = kl.right_inverse(a)
    assert [a(inverse(i)) for i in range(inverse.size)] == list(range(inverse.size))
    assert inverse == kl.coalesce(kl.right_inverse(a, rule="legacy"))


@given(injective())
def test_right_inverse_is_as_long_as_the_gapless_start(a):
    offsets = set(values(a))
    gap = next(i for i in range(a.size + 1) if i not in offsets)
    size = kl.right_inverse(a).size
    assert size <= gap
    if gap == a.size:
        assert size == a.size


@given(injective())
def test_left_inverse(a):
    inverse = kl.left_inverse(a)
    assert [inverse(offset) for offset in values(a)] == list(range(a.size))


@given(layouts())
def test_left_inverse_is_right_or_refused(a):
    """CuTe's law."""
    inverse = tried(kl.left_inverse, a)
    assert [a(inverse(offset)) for offset in values(a)] == values(a)


@given(injective(extents=(2, 3, 4, 6, 8)), st.sampled_from([1, 2, 3, 4, 8]))
def test_upcast_undoes_downcast(a, factor):
    assert kl.upcast(kl.downcast(a, factor, rule="legacy"), factor) == a
    fine = kl.downcast(a, factor)
    assert kl.upcast(fine, factor) == a
    assert {offset // factor for offset in values(fine)} == set(values(a))


@given(injective(gaps=(1, 2, 4)), st.sampled_from([2, 4, 8]))
def test_upcast_names_the_elements_that_hold_the_scalars(a, factor):
    coarse = tried(kl.upcast, a, factor)
    assert set(values(coarse)) == {offset // factor for offset in values(a)}


@given(shapes(), st.randoms())
def test_ordered_layouts_are_dense_in_their_order(shape, random):
    order = list(range(len(flatten(shape))))
    random.shuffle(order)
    a = kl.make_ordered_layout(shape, unflatten(order, shape))
    assert sorted(values(a)) == list(range(a.size))
    by_order = sorted(zip(order, flatten(a.stride), strict=True))
    assert [d for _, d in by_order] == sorted(flatten(a.stride))
    assert congruent(a.shape, shape)


@given(layouts())
def test_slices_are_the_function_with_arguments_fixed(a):
    if not isinstance(a.shape, tuple):
        return
    for mode, extent in enumerate(part.size for part in a.modes):
        for c in {0, extent - 1}:
            coord = tuple(c if m == mode else None for m in range(a.rank))
            kept = a[coord]
            if a.rank == 1:
                assert kept == a(c)
                continue
            rest = [0] * a.rank
            rest[mode] = c
            other = 0 if mode else 1
            for j in range(a.modes[other].size):
                rest[other] = j
                point = [j if m == other else 0 for m in range(a.rank) if m != mode]
                assert a(*rest) == (kept(*point) if len(point) > 1 else kept(point[0]))


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 7))
def test_parts_of_a_mode_are_numpys_slices(start, stop, column):
    a = Layout("(5,(2,4)):(9,(4,1))")
    part = slice(start, max(start, stop))
    assert a[part, column].offsets().tolist() == a.offsets()[part, column].tolist()
    assert a[part, :].offsets().tolist() == a.offsets()[part].tolist()


@given(layouts(leaves=3), st.sampled_from([0, 1, 5]))
def test_expanding_modes_changes_no_offset(a, step):
    for other in (Layout(a.size, step), Layout((a.size, 2), (step, 1)), Layout(a.shape)):
        mine = kl.make_layout(a, Layout(2, 7)) if other.rank == 2 and isinstance(other.shape, tuple) else a
        if other.size != mine.size:
            continue
        x, y = kl.expand_modes_alike(mine, other)
        assert congruent(x.shape, y.shape)
        assert (values(x), values(y)) == (values(mine), values(other))


@given(layouts(leaves=3), st.integers(0, 40), st.integers(1, 3), st.integers(0, 3))
def test_swizzled_layouts_stay_exact(a, offset, bits, base):
    """A slice or composition of the swizzled layout is the slice of the function, not the swizzle of the slice."""
    swizzled = ComposedLayout(a, Swizzle(bits, base, bits, "byte"), offset)
    expected = [swizzled.outer(offset + a(i)) for i in range(a.size)]
    assert values(swizzled) == expected
    assert swizzled.offsets().T.reshape(-1).tolist() == expected
    assert ComposedLayout.parse(str(swizzled)) == swizzled
    assert values(kl.coalesce(swizzled)) == expected
    picked = tried(kl.compose, swizzled, Layout(3, 2))
    assert values(picked) == [swizzled.outer(offset + a(2 * i)) for i in range(3)]


def test_tiles_of_a_swizzled_tile():
    smem = ComposedLayout(Layout.row_major(64, 64), Swizzle(3, 3, 3, "bf16"))
    table = smem.offsets()
    for i in range(4):
        for j in range(2):
            tile = kl.local_tile(smem, (16, 32), (i, j))
            assert (tile.offsets() == table[16 * i : 16 * i + 16, 32 * j : 32 * j + 32]).all()
            assert (tile[3, :].offsets() == tile.offsets()[3]).all()


class TestCases:
    def test_inadmissible_composition_is_refused_with_the_numbers(self):
        with pytest.raises(ValueError, match="mode 0, shape 4, stride 3: neither divides"):
            kl.compose(Layout("(4,6,8):(2,3,5)"), Layout("6:3"))

    def test_a_run_that_fills_no_whole_mode_is_refused(self):
        with pytest.raises(ValueError, match=r"mode 0 has shape 4; shape 6 with stride 1 is not a multiple"):
            kl.compose(Layout("(4,6,8):(2,3,5)"), Layout("6:1"))

    def test_overlapping_modes_whose_sums_carry_are_refused(self):
        """A(B(3)) is A(2), in the second mode of A, but B's modes alone stay in the first."""
        with pytest.raises(ValueError, match=r"mode 0 has shape 2; the modes of \(2,2\):\(1,1\) overlap"):
            kl.compose(Layout("(2,4):(4,1)"), Layout("(2,2):(1,1)"))

    def test_a_step_that_lands_on_the_next_mode_is_accepted(self):
        assert str(kl.compose(Layout("(4,8):(8,1)"), Layout("2:4"))) == "2:1"

    def test_composition_that_crosses_modes(self):
        result = kl.compose(Layout("(10,2):(16,4)"), Layout("(3,4):(1,5)"))
        assert str(result) == "(3,(2,2)):(16,(80,4))"
        assert values(result) == [0, 16, 32, 80, 96, 112, 4, 20, 36, 84, 100, 116]

    def test_composition_of_a_coalesced_walk(self):
        """(4,2,8):(3,12,97) is (8,8):(3,97), so 3:3 stays in its first mode."""
        assert str(kl.compose(Layout("(4,2,8):(3,12,97)"), Layout("3:3"))) == "3:9"

    def test_zipped_divide_is_a_grid_of_tiles(self):
        zipped = kl.zipped_divide(Layout("(2,6):(6,1)"), (1, 2))
        assert str(zipped) == "((1,2),(2,3)):((0,1),(6,2))"
        grid = zipped.offsets(leaves=True).transpose(2, 3, 0, 1).reshape(2, 3, 2)
        assert grid.tolist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]

    def test_swizzle_of_tf32_counts_elements(self):
        layout = Layout("(32,8):(1,32)")
        assert ComposedLayout(layout, Swizzle(3, 4, 3, "float32"))(0, 1) == 32
        assert ComposedLayout(layout, kl.make_tma_swizzle("128B", "float32"))(0, 1) == 36

    def test_cells_of_the_128_byte_mode(self):
        cells = ComposedLayout(Layout.row_major(8, 8), kl.make_tma_swizzle("128B", "vector"))
        r, c = np.mgrid[:8, :8]
        assert (cells.offsets() == 8 * r + (c ^ r)).all()

    @pytest.mark.parametrize(
        "text, end, expected",
        [
            ("4:1", 24, "6:4"),
            ("4:2", 24, "(2,3):(1,8)"),
            ("(2,2):(1,6)", 24, "(3,2):(2,12)"),
            ("(2,3):(3,1)", 10, "2:6"),
        ],
    )
    def test_complements(self, text, end, expected):
        assert str(kl.complement(Layout(text), end)) == expected

    @pytest.mark.parametrize("text", ["(4,2):(1,2)", "(2,2):(1,1)", "(3,2):(2,3)"])
    def test_no_complement_of_interleaved_modes(self, text):
        with pytest.raises(ValueError, match="falls inside"):
            kl.complement(Layout(text), 24)

    def test_padded_rows_can_be_tiled_but_do_not_divide(self):
        padded = Layout("(32,32):(33,1)")
        copies = kl.blocked_product(padded, Layout("(2,1):(1,0)"))
        assert len(set(values(copies))) == 2048
        with pytest.raises(ValueError, match="its gaps do not divide"):
            kl.logical_divide(Layout(4096), padded)

    def test_legacy_and_new_rules(self):
        a = Layout("(4,6,2):(12,2,1)")
        assert kl.logical_divide(a, (2, 3)).rank == 3
        assert kl.logical_divide(a, (2, 3), rule="legacy").rank == 2
        assert str(kl.zipped_divide(Layout("(5,6):(6,1)"), (2, 3), rule="new")) == "((2,3),(2,2)):((6,1),(12,3))"
        assert str(kl.coalesce(Layout("(4,8):(1,4)"), rule="new")) == "(32):(1)"
        with pytest.raises(ValueError, match="this operation knows 'cute', 'legacy'"):
            kl.logical_divide(a, (2, 3), rule="new")
        with pytest.raises(ValueError, match="must be one int for each flat mode"):
            kl.zipped_divide(Layout("(5,6):(6,1)"), (2, 0), rule="new")  # law: a tile has at least one element
        one = Layout(int_tuple([[2, 4]]), int_tuple([[1, 8]]))
        expected = kl.logical_divide(Layout(64), Layout("(2,4):(1,8)"))
        assert kl.logical_divide(Layout(64), one, rule="legacy") == expected
        assert kl.logical_divide(Layout(64), one).modes[0] == kl.make_layout(expected.modes[0])

    def test_fill_like_keeps_nesting(self):
        assert fill_like((4, (3, 2)), 7) == (7, (7, 7))
