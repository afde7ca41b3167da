"""Relations and divisions of trees of ints. Rests on their definitions, spelled out by enumeration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.layout import Layout
from kvlab.layout.algebra.int_tuple import UNKNOWN, flatten, prefix_product, product
from kvlab.layout.algebra.tree_ops import (
    compact_order,
    compatible,
    depth,
    fill_like,
    inner_product,
    mul,
    product_each,
    propagate_unknown,
    reverse,
    shape_div,
    unflatten,
    weakly_compatible,
    weakly_congruent,
)

trees = st.recursive(
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(tuple),
    max_leaves=5,
)


@given(trees)
def test_shapes_of_one_tree(tree):
    assert flatten(reverse(tree)) == flatten(tree)[::-1]
    assert reverse(reverse(tree)) == tree
    assert unflatten(list(flatten(tree)), tree) == tree
    assert product(product_each(tree)) == product(tree)
    assert flatten(fill_like(tree, 3)) == (3,) * len(flatten(tree))
    assert inner_product(tree, fill_like(tree, 1)) == sum(flatten(tree))
    assert flatten(mul(tree, 5)) == tuple(5 * leaf for leaf in flatten(tree))
    assert compact_order(tree, 0) == prefix_product(tree)


@given(trees)
def test_every_tree_refines_its_size_and_itself(tree):
    assert compatible(product(tree), tree)
    assert compatible(tree, tree)
    assert compatible(product_each(tree), tree)
    assert weakly_compatible(tree, tree)
    assert weakly_congruent(0, tree)
    if isinstance(tree, tuple):
        assert not compatible(tree, product(tree))
        assert not weakly_congruent(tree, 1)


@given(trees, trees)
def test_coordinates_of_a_compatible_shape_are_coordinates(a, b):
    """Evaluated with the other shape's own coordinates, the layouts agree."""
    if compatible(a, b):
        assert [Layout(b)(i) for i in range(product(a))] == list(range(product(b)))
        assert weakly_compatible(a, b)


@given(trees, st.integers(1, 48))
def test_shape_div_uses_up_the_divisor_from_the_left(tree, divisor):
    try:
        quotient = shape_div(tree, divisor)
    except ValueError:
        return
    assert compatible(fill_like(quotient, 1), fill_like(tree, 1))
    if product(tree) % divisor == 0:
        assert product(quotient) * divisor == product(tree)


def test_depth_of_both_kinds():
    tree = (1, (2, (3, 4)), (5, 6))
    assert (depth(7), depth(tree), depth(tree, rule="legacy")) == (0, 3, 4)


def test_unknown_spreads():
    assert prefix_product((2, (UNKNOWN, 3), 4)) == (1, (2, UNKNOWN), UNKNOWN)
    assert compact_order((4, UNKNOWN, 2), (0, 1, 2)) == (1, 4, UNKNOWN)
    assert propagate_unknown((1, (2, 3)), (4, (UNKNOWN, 5))) == (1, (UNKNOWN, 3))
    assert mul((2, UNKNOWN), 3) == (6, UNKNOWN)


@pytest.mark.parametrize("a, b", [(6, 4), ((6, 4), 4), ((4, 4), (2, 3)), ((2, 2), (1, 1, 1))])
def test_shape_div_refuses(a, b):
    with pytest.raises(ValueError, match="shape_div"):
        shape_div(a, b)


@pytest.mark.parametrize("shape, order", [((2, 3), (0, 1, 2)), (4, (0, 1)), ((2, 3), ((0, 1), 2))])
def test_order_must_fit(shape, order):
    with pytest.raises(ValueError, match="does not fit"):
        compact_order(shape, order)
