"""Linear layouts over F2. Rests on laws: linearity, composition, inverse, product, quotient, conservation of places."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.layout import LinearLayout

IN_DIMS = ("register", "lane", "warp")
quick = settings(deadline=None, max_examples=80)


@st.composite
def linear_layouts(draw, in_dims=IN_DIMS, out_dims=None):
    """Any bases; output dimensions of up to 16."""
    if out_dims is None:
        out_dims = {f"dim{axis}": 1 << draw(st.integers(0, 4)) for axis in range(draw(st.integers(1, 3)))}
    vector = st.tuples(*(st.integers(0, size - 1) for size in out_dims.values()))
    bases = {name: draw(st.lists(vector, max_size=4)) for name in in_dims}
    return LinearLayout(bases, out_dims)


@st.composite
def permutations(draw, bits):
    """An invertible map from ``register``, ``lane`` and ``warp`` to two dimensions: random row operations."""
    columns = draw(st.permutations([1 << bit for bit in range(bits)]))
    for _ in range(draw(st.integers(0, 6))):
        i, j = draw(st.integers(0, bits - 1)), draw(st.integers(0, bits - 1))
        if i != j:
            columns[i] ^= columns[j]
    cuts = sorted(draw(st.tuples(st.integers(0, bits), st.integers(0, bits))))
    rows = 1 << draw(st.integers(0, bits))
    vectors = [divmod(column, (1 << bits) // rows) for column in columns]
    parts = {"register": vectors[: cuts[0]], "lane": vectors[cuts[0] : cuts[1]], "warp": vectors[cuts[1] :]}
    return LinearLayout(parts, (rows, (1 << bits) // rows))


def index_grid(layout):
    return dict(zip(layout.in_dims, np.ix_(*map(np.arange, layout.in_dims.values())), strict=True))


@quick
@given(linear_layouts())
def test_is_the_xor_of_its_bases(layout):
    table = layout.coordinates()
    for index in itertools.islice(np.ndindex(table.shape[:-1]), 0, 200, 7):
        bits = [
            vector
            for number, vectors in zip(index, layout.bases.values(), strict=True)
            for bit, vector in enumerate(vectors)
            if number >> bit & 1
        ]
        expected = functools.reduce(np.bitwise_xor, bits, np.zeros(len(layout.out_dims), np.int64))
        assert table[index].tolist() == list(expected)
        assert layout(**dict(zip(layout.in_dims, index, strict=True))) == tuple(expected)


@quick
@given(linear_layouts())
def test_rank_counts_the_places(layout):
    table = layout.coordinates().reshape(-1, len(layout.out_dims))
    places = len(np.unique(table, axis=0))
    assert places == 1 << layout.rank
    assert layout.is_injective == (places == len(table))
    assert layout.is_surjective == (places == np.prod(layout.shape))
    for move in layout.kernel():
        assert any(move.values())
        assert layout(**move) == (0,) * len(layout.out_dims)
    assert len(layout.kernel()) + layout.rank == sum(len(vectors) for vectors in layout.bases.values())


@quick
@given(st.integers(1, 8).flatmap(permutations))
def test_inverse(layout):
    inverse = layout.invert()
    assert layout.is_invertible
    assert layout.compose(inverse) == LinearLayout(
        {name: [[0] * axis + [1 << bit] + [0] * (1 - axis) for bit in range(size.bit_length() - 1)]
         for axis, (name, size) in enumerate(layout.out_dims.items())}, layout.out_dims)
    assert inverse.invert().bases == layout.bases


@quick
@given(linear_layouts())
def test_right_inverse(layout):
    if layout.is_surjective:
        inverse = layout.invert()
        grid = index_grid(inverse)
        back = layout(**dict(zip(layout.in_dims, inverse(**grid), strict=True)))
        for ours, axis in zip(back, grid.values(), strict=True):
            np.testing.assert_array_equal(ours, np.broadcast_to(axis, ours.shape))
    else:
        with pytest.raises(ValueError, match="not surjective"):
            layout.invert()


@quick
@given(st.data())
def test_compose(data):
    inner = data.draw(linear_layouts(out_dims={"dim0": 8, "dim1": 4}))
    outer = data.draw(linear_layouts(in_dims=(), out_dims={"offset": 16}))
    vector = st.tuples(st.integers(0, 15))
    outer = LinearLayout({"dim0": data.draw(st.lists(vector, min_size=3, max_size=3)),
                          "dim1": data.draw(st.lists(vector, min_size=2, max_size=2))}, {"offset": 16})
    grid = index_grid(inner)
    expected = outer(**dict(zip(("dim0", "dim1"), inner(**grid), strict=True)))[0]
    np.testing.assert_array_equal(outer.compose(inner)(**grid)[0], expected)


@quick
@given(st.data(), st.integers(2, 7))
def test_invert_and_compose(data, bits):
    """Registers to shared memory: the same element on both ways."""
    shared = data.draw(permutations(bits)).rename({"register": "a", "lane": "b", "warp": "c"})
    registers = data.draw(linear_layouts(out_dims=shared.out_dims))
    way = registers.invert_and_compose(shared)
    grid = index_grid(registers)
    there = shared(**dict(zip(shared.in_dims, way(**grid), strict=True)))
    for ours, expected in zip(there, registers(**grid), strict=True):
        np.testing.assert_array_equal(ours, expected)


@quick
@given(st.data())
def test_product_and_quotients(data):
    """The tile inside, the positions of the tiles outside; each is what the division by the other leaves."""
    outs = {"dim0": 4, "dim1": 8}
    tile, places = data.draw(linear_layouts(out_dims=outs)), data.draw(linear_layouts(out_dims=outs))
    product = tile * places
    assert product.out_dims == {"dim0": 16, "dim1": 64}
    assert product.divide(tile) == places
    assert product.divide(places, side="right") == tile
    inner, outer = index_grid(tile), index_grid(places)
    both = {name: (inner[name].ravel()[:, None] + len(inner[name].ravel()) * outer[name].ravel()).T.ravel()
            for name in product.in_dims}
    whole = product.coordinates()[np.ix_(*both.values())]
    shapes = [(places.in_dims[name], tile.in_dims[name]) for name in product.in_dims]
    whole = whole.reshape(*itertools.chain(*shapes), 2)[0, :, 0, :, 0, :]
    np.testing.assert_array_equal(whole, tile.coordinates())


def test_no_quotient():
    layout = LinearLayout({"register": [[2], [1]]}, (4,))
    with pytest.raises(ValueError, match="not divisible on the left"):
        layout.divide(LinearLayout.identity1d(2, "register", "dim0"))
    with pytest.raises(ValueError, match="not divisible on the right"):
        layout.divide(LinearLayout.identity1d(2, "register", "dim0"), side="right")
    with pytest.raises(ValueError, match="'left' or 'right'"):
        layout.divide(layout, side="up")


@quick
@given(linear_layouts(out_dims={"dim0": 4, "dim1": 8, "dim2": 2}))
def test_reshape_and_transpose(layout):
    """As NumPy moves the coordinates."""
    flat = layout.reshape({"offset": 64})
    np.testing.assert_array_equal(
        flat.coordinates()[..., 0], np.ravel_multi_index(tuple(np.moveaxis(layout.coordinates(), -1, 0)), (4, 8, 2))
    )
    assert flat.reshape(layout.out_dims) == layout
    turned = layout.transpose("dim2", "dim0", "dim1")
    np.testing.assert_array_equal(turned.coordinates(), layout.coordinates()[..., [2, 0, 1]])
    assert turned.transpose(*layout.out_dims) == layout
    with pytest.raises(ValueError, match="permutation"):
        layout.transpose("dim0", "dim1")
    with pytest.raises(ValueError, match="size 64"):
        layout.reshape((8, 4))


@quick
@given(st.integers(2, 7).flatmap(permutations), st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_fit_covers(layout, bits):
    sizes = {"dim0": 1 << bits[0], "dim1": 1 << bits[1]}
    fitted = LinearLayout({"register": layout.bases["register"], **layout.bases}, layout.out_dims).fit(sizes)
    assert fitted.out_dims == sizes
    assert list(fitted.in_dims)[1:] == list(layout.in_dims)[1:]
    if all(size >= old for size, old in zip(sizes.values(), layout.shape, strict=True)):
        assert fitted.is_invertible


def test_identity_text_and_hash():
    layout = LinearLayout({"lane": [[0, 1], [2, 0]], "warp": []}, {"row": 4, "col": 2})
    assert eval(repr(layout)) == layout
    assert hash(eval(repr(layout))) == hash(layout)
    assert layout != LinearLayout({"lane": [[0, 1], [2, 0]]}, {"row": 4, "col": 2})
    assert str(layout).splitlines() == [
        "lane=1 -> (0, 1)",
        "lane=2 -> (2, 0)",
        "warp is a size 1 dimension",
        "where out dims are: [row (size 4), col (size 2)]",
    ]
    assert LinearLayout({"lane": [[0, 1], [2, 0]]}, ["row", "col"]).shape == (4, 2)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: LinearLayout({"lane": [[4]]}, (4,)), r"basis \[4\] of 'lane' does not fit .*from 0 to its size - 1"),
        (lambda: LinearLayout({"lane": [[1, 0]]}, (4,)), "one coordinate for each"),
        (lambda: LinearLayout({"lane": [[1]]}, (3,)), "dim0 of size 3: must be a power of two"),
        (lambda: LinearLayout({"lane": [[1]]}, (2,))(lane=2), "integers from 0 to 1"),
        (lambda: LinearLayout({"lane": [[1]]}, (2,))(lane=np.array([0.5])), "integers from 0 to 1"),
        (lambda: LinearLayout({"lane": [[1]]}, (2,))(thread=1), r"\['thread'\]: must be \{'lane': 2\}"),
        (lambda: LinearLayout({}, (2,)).fit({"dim0": 4}), "there is no input to grow"),
        (lambda: LinearLayout({"a": [[1]]}, (2,)).fit({}), "sizes is {}: must have dim0"),
        (lambda: LinearLayout({"a": [[1]]}, (2,)).fit({"dim0": 3}), "dim0 of size 3: must be a power of two"),
        (lambda: LinearLayout({"a": [[1]]}, (2,)).compose(LinearLayout({"b": [[2]]}, {"a": 4})), "does not fit"),
        (lambda: LinearLayout({"a": []}, (4,)).invert_and_compose(LinearLayout({"a": []}, (2,))), "differ"),
        (lambda: LinearLayout.identity1d(6, "lane", "dim0"), "power of two"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_million_places():
    """Whole arrays at once: a table look-up for each input dimension."""
    layout = LinearLayout({"offset": [[1 << bit ^ (bit > 3)] for bit in range(1, 20)]}, {"place": 1 << 20})
    place = layout(offset=np.arange(1 << 19))[0]
    assert len(np.unique(place)) == 1 << 19
