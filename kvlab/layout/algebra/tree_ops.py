"""Further operations on trees of ints: parts, relations between shapes, division, and the order of strides.

Names are those of CuTe and of the MAX layout package. ``UNKNOWN`` (-1) stands for an extent that only the running
program knows; it spreads through products as it does there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from kvlab.layout.algebra.int_tuple import (
    UNKNOWN,
    IntTuple,
    congruent,
    flatten,
    format_tree,
    int_tuple,
    prefix_product,
    product,
)
from kvlab.layout.algebra.systems import Rule, check_rule

F = TypeVar("F", bound=Callable[..., Any])


def of_trees(function: F) -> F:
    """``function`` of positional arguments that are trees: ValueError for what is none, or is nested too deeply."""

    @functools.wraps(function)
    def checked(*trees: Any, **options: Any) -> Any:
        return function(*(int_tuple(tree, function.__name__) for tree in trees), **options)

    return checked  # type: ignore[return-value]


@of_trees
def product_each(tree: IntTuple) -> IntTuple:
    """The product of each top-level mode.

    >>> product_each((4, (3, 2)))
    (4, 6)
    """
    return tree if isinstance(tree, int) else tuple(product(item) for item in tree)


@of_trees
def reverse(tree: IntTuple) -> IntTuple:
    """The leaves and all nestings from right to left.

    >>> reverse((4, (3, 2)))
    ((2, 3), 4)
    """
    return tree if isinstance(tree, int) else tuple(reverse(item) for item in reversed(tree))


@of_trees
def depth(tree: IntTuple, *, rule: Rule = "cute") -> int:
    """Depth of the nesting, 0 for an int; ``rule="legacy"`` adds up the depths of the children, as MAX does.

    >>> depth(((1, 2), (3, 4))), depth(((1, 2), (3, 4)), rule="legacy")
    (2, 3)
    """
    if isinstance(tree, int):
        return 0
    children = [depth(item, rule=rule) for item in tree]
    return 1 + (sum(children) if check_rule(rule, "legacy") == "legacy" else max(children, default=0))


@of_trees
def fill_like(tree: IntTuple, value: int) -> IntTuple:
    """A tree of the same nesting with ``value`` in every leaf.

    >>> fill_like((4, (3, 2)), 0)
    (0, (0, 0))
    """
    return value if isinstance(tree, int) else tuple(fill_like(item, value) for item in tree)


@of_trees
def mul(tree: IntTuple, factor: int) -> IntTuple:
    """Every leaf times ``factor``; an unknown leaf stays unknown.

    >>> mul((4, (3, UNKNOWN)), 2)
    (8, (6, -1))
    """
    if isinstance(tree, int):
        return UNKNOWN if UNKNOWN in (tree, factor) else tree * factor
    return tuple(mul(item, factor) for item in tree)


@of_trees
def inner_product(a: IntTuple, b: IntTuple) -> int:
    """The sum of the products of the leaves of two congruent trees.

    >>> inner_product((1, (2, 3)), (10, (20, 30)))
    140
    """
    _require_congruent("inner_product", a, b)
    return sum(x * y for x, y in zip(flatten(a), flatten(b), strict=True))


@of_trees
def propagate_unknown(tree: IntTuple, like: IntTuple) -> IntTuple:
    """``tree`` with UNKNOWN wherever the congruent tree ``like`` has it.

    >>> propagate_unknown((8, 4), (UNKNOWN, 2))
    (-1, 4)
    """
    _require_congruent("propagate_unknown", tree, like)
    if isinstance(tree, int) or isinstance(like, int):
        return UNKNOWN if like == UNKNOWN else tree
    return tuple(propagate_unknown(x, y) for x, y in zip(tree, like, strict=True))


@of_trees
def weakly_congruent(a: IntTuple, b: IntTuple) -> bool:
    """Can the nesting of ``a`` be refined to that of ``b``? An int can be refined to anything.

    >>> weakly_congruent((1, 2), (3, (4, 5))), weakly_congruent((1, (2, 3)), (4, 5))
    (True, False)
    """
    if isinstance(a, int):
        return True
    return not isinstance(b, int) and len(a) == len(b) and all(map(weakly_congruent, a, b))


@of_trees
def compatible(a: IntTuple, b: IntTuple) -> bool:
    """Is every coordinate of shape ``a`` a coordinate of shape ``b``? Sizes agree and ``b`` refines ``a``.

    >>> compatible(24, (4, 6)), compatible((4, 6), (4, (2, 3))), compatible((2, 12), (4, 6))
    (True, True, False)
    """
    if isinstance(a, int):
        return a == product(b)
    return not isinstance(b, int) and len(a) == len(b) and all(map(compatible, a, b))


@of_trees
def weakly_compatible(a: IntTuple, b: IntTuple) -> bool:
    """Does shape ``a`` tile shape ``b``: does each int of ``a`` divide the size of what lies there in ``b``?

    >>> weakly_compatible(12, (4, 6)), weakly_compatible((2, 3), (4, (3, 2))), weakly_compatible(5, (4, 6))
    (True, True, False)
    """
    if isinstance(a, int):
        return product(b) % a == 0 if a else product(b) == 0
    return not isinstance(b, int) and len(a) == len(b) and all(map(weakly_compatible, a, b))


@of_trees
def shape_div(a: IntTuple, b: IntTuple) -> IntTuple:
    """``a / b`` where one divides the other: the quotient, or 1 (with the sign) where ``b`` is the multiple.

    An int ``b`` is used up by the leaves of ``a`` from left to right; tuples divide mode by mode; an int by a tuple is
    divided by its product.

    >>> shape_div((4, 5, 6), 40), shape_div((6, (3, 4)), 36), shape_div((8, 6), (2, 12)), shape_div(12, (2, 3))
    ((1, 1, 3), (1, (1, 2)), (4, 1), 2)
    >>> shape_div(6, 4)
    Traceback (most recent call last):
        ...
    ValueError: shape_div(6, 4): neither divides the other
    """
    if isinstance(a, tuple):
        if isinstance(b, tuple):
            if len(a) != len(b):
                raise ValueError(f"shape_div({a}, {b}): must be one divisor for each mode")
            return tuple(shape_div(x, y) for x, y in zip(a, b, strict=True))
        quotients = []
        for item in a:
            quotients.append(shape_div(item, b))
            rest = shape_div(b, product(item))
            assert isinstance(rest, int)
            b = rest
        return tuple(quotients)
    divisor = product(b)
    if divisor and a % divisor == 0:
        return a // divisor
    if a and divisor % a == 0:
        return 1 if a * divisor > 0 else -1
    raise ValueError(f"shape_div({a}, {divisor}): neither divides the other")


@of_trees
def compact_order(shape: IntTuple, order: IntTuple) -> IntTuple:
    """Dense strides for ``shape`` whose leaves vary in ascending ``order`` (lowest fastest; equals from left to right).
    An int of ``order`` against a tuple of ``shape`` orders that tuple as a whole.

    >>> compact_order((2, 3, 4, 5), (1, 4, 3, 2))
    (1, 40, 10, 2)
    >>> compact_order((2, (3, 4)), (1, 0))
    (12, (1, 3))
    """
    order = int_tuple(order, "order")
    if not weakly_congruent(order, shape):
        raise ValueError(f"order {format_tree(order)} does not fit shape {format_tree(shape)}: one int for each mode")
    leaves, ranks = flatten(shape), _spread(order, shape)
    strides, reach = [0] * len(leaves), 1
    for leaf in sorted(range(len(leaves)), key=ranks.__getitem__):
        strides[leaf] = reach
        reach = UNKNOWN if UNKNOWN in (reach, leaves[leaf]) else reach * leaves[leaf]
    return unflatten(strides, shape)


def unflatten(leaves: list[int], like: IntTuple) -> IntTuple:
    """The leaves in the nesting of ``like``.

    >>> unflatten([1, 2, 3], (0, (0, 0)))
    (1, (2, 3))
    """
    rest = iter(leaves)

    def build(tree: IntTuple) -> IntTuple:
        return next(rest) if isinstance(tree, int) else tuple(build(item) for item in tree)

    return build(like)


def _spread(order: IntTuple, shape: IntTuple) -> list[int]:
    if isinstance(order, int):
        return [order] * len(flatten(prefix_product(shape)))
    assert isinstance(shape, tuple)
    return [rank for o, s in zip(order, shape, strict=True) for rank in _spread(o, s)]


def _require_congruent(what: str, a: IntTuple, b: IntTuple) -> None:
    if not congruent(a, b):
        raise ValueError(f"{what}({format_tree(a)}, {format_tree(b)}): must be trees of the same nesting")
