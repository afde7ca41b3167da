"""Trees of ints, the shapes and strides of layouts: products, congruence, coordinates, CuTe text.

A tree is an int or a tuple of trees: ``8``, ``(4, 8)``, ``(4, (3, 2))``. Coordinates have the same form, and each leaf
may be an int64 array of many coordinates."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvlab.common.checks import shown
from kvlab.layout.algebra.systems import Rule, check_rule

IntTuple: TypeAlias = "int | tuple[IntTuple, ...]"
IntArray: TypeAlias = NDArray[np.int64]
Coord: TypeAlias = "int | IntArray | tuple[Coord, ...]"

UNKNOWN = -1
"""An extent that only the running program knows (MAX's ``UNKNOWN_VALUE``)."""


MOST_NESTED = 64
"""Tuples in tuples of a tree. CuTe's and MAX's have four at most."""
MOST_AT_ONCE = 1 << 30
"""Numbers of one array that is made of a size alone: 8 GiB."""


def int_tuple(tree: Any, what: str = "tree") -> IntTuple:
    """``tree`` as nested tuples of Python ints; lists and NumPy ints are accepted. ValueError for anything else and for
    more than 64 tuples in one another.

    >>> int_tuple([4, [np.int64(3), 2]])
    (4, (3, 2))
    """
    return _int_tuple(tree, what, 0)


def _int_tuple(tree: Any, what: str, depth: int) -> IntTuple:
    if isinstance(tree, tuple | list):
        if depth == MOST_NESTED:
            raise ValueError(f"{what} is nested too deeply: must be at most {MOST_NESTED} tuples in one another")
        return tuple(_int_tuple(item, what, depth + 1) for item in tree)
    if not isinstance(tree, bool):
        try:
            return operator.index(tree)
        except TypeError:
            pass
    raise ValueError(f"{what} is {shown(tree)}: must be an int or a tuple of ints")


def check_nesting(tree: Any, what: str, depth: int = 0) -> None:
    """ValueError for more than 64 tuples or lists in one another, whatever is in them."""
    if isinstance(tree, tuple | list):
        if depth == MOST_NESTED:
            raise ValueError(f"{what} is nested too deeply: must be at most {MOST_NESTED} tuples in one another")
        for item in tree:
            check_nesting(item, what, depth + 1)


def at_once(count: int, what: str) -> int:
    """``count``, of which numbers an array is made. ValueError for more than 2^30.

    >>> at_once(1 << 40, "offsets")
    Traceback (most recent call last):
        ...
    ValueError: 1099511627776 offsets at once: must be at most 1073741824
    """
    if count > MOST_AT_ONCE:
        raise ValueError(f"{shown(count)} {what} at once: must be at most {MOST_AT_ONCE}")
    return count


def as_int(value: Any, what: str, least: int | None = None) -> int:
    """A Python int; ValueError for anything else, and below ``least``.

    >>> as_int(np.int8(3), "factor", 1)
    3
    """
    number = int_tuple(value, what) if not isinstance(value, tuple | list) else value
    if not isinstance(number, int) or (least is not None and number < least):
        accepted = "an int" if least is None else f"an int of {least} or more"
        raise ValueError(f"{what} is {shown(value)}: must be {accepted}")
    return number


def flatten(tree: IntTuple) -> tuple[int, ...]:
    """The leaves, left to right.

    >>> flatten((4, (3, 2)))
    (4, 3, 2)
    """
    if isinstance(tree, int):
        return (tree,)
    return tuple(leaf for item in _items(tree) for leaf in flatten(item))


def _items(tree: Any) -> tuple[IntTuple, ...]:
    """Those of a tree that is no int. ValueError for what is no tree, and for one that is nested too deeply."""
    if not isinstance(tree, tuple):
        raise ValueError(f"tree is {shown(tree)}: must be an int or a tuple of ints")
    inner = tree
    for _ in range(MOST_NESTED):
        if not inner or not isinstance(inner := inner[0], tuple):
            return tree
    return _int_tuple(tree, "tree", 0)  # type: ignore[return-value]


def product(tree: IntTuple) -> int:
    """The product of the leaves.

    >>> product((4, (3, 2)))
    24
    """
    return tree if isinstance(tree, int) else math.prod(product(item) for item in _items(tree))


def congruent(a: IntTuple, b: IntTuple) -> bool:
    """Do the two trees have the same nesting?

    >>> congruent((4, (3, 2)), (6, (2, 1))), congruent((4, 6), (6, (2, 1)))
    (True, False)
    """
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int)
    a, b = _items(a), _items(b)
    return len(a) == len(b) and all(congruent(x, y) for x, y in zip(a, b, strict=True))


def prefix_product(shape: IntTuple) -> IntTuple:
    """Exclusive products of the leaves in order: the column-major strides of ``shape``. What follows an unknown extent
    is unknown.

    >>> prefix_product(((2, 3), 4)), prefix_product((2, UNKNOWN, 4))
    (((1, 2), 6), (1, 2, -1))
    """
    return _prefix_product(shape, 1)[0]


def _prefix_product(shape: IntTuple, start: int) -> tuple[IntTuple, int]:
    if isinstance(shape, int):
        return start, UNKNOWN if UNKNOWN in (start, shape) else start * shape
    strides: list[IntTuple] = []
    for item in _items(shape):
        stride, start = _prefix_product(item, start)
        strides.append(stride)
    return tuple(strides), start


def as_int_array(value: Any, what: str, bits: int = 63) -> int | IntArray:
    """An int, or an int64 array of them; ValueError for anything else, for negative numbers and those of more bits."""
    if isinstance(value, np.ndarray) and value.ndim:
        if value.dtype.kind not in "iu":
            raise ValueError(f"{what} has dtype {value.dtype}: must be integers")
        if value.size and (value.min() < 0 or value.max() >> bits):
            bad = int(value.min() if value.min() < 0 else value.max())
            raise ValueError(f"{what} {bad} is {'negative' if bad < 0 else f'more than {bits} bits'}")
        return value.astype(np.int64, copy=False)
    number = int_tuple(value, what)
    if not isinstance(number, int):
        raise ValueError(f"{what} is {shown(value)}: must be an int or an int array; a coordinate of several modes is "
                         "a tuple")
    if not 0 <= number < 1 << bits:
        raise ValueError(f"{what} {shown(number)} is {'negative' if number < 0 else f'more than {bits} bits'}")
    return number


def crd2idx(crd: Coord, shape: IntTuple, stride: IntTuple, *, rule: Rule = "cute") -> int | IntArray:
    """The offset of a coordinate. An int against a tuple counts colexicographically, the first mode fastest; nothing is
    reduced modulo the last mode, so coordinates past the end extrapolate (spec: CuTe's ``crd2idx``). Ints give exact
    ints; ValueError where an offset of an array has more than 63 bits.

    ``rule="legacy"`` (MAX): ints into two flat modes wrap around at the end. ``rule="new"`` (MAX's tile_layout): a
    coordinate of neither 1 nor as many items as there are modes is multiplied with the first flattened strides.

    >>> crd2idx((1, 4), (4, (3, 2)), (6, (2, 1)))
    9
    >>> crd2idx(13, (3, 4), (4, 1)), crd2idx(13, (3, 4), (4, 1), rule="legacy")
    (8, 4)
    >>> crd2idx((1, 1, 1), (4, (3, 2)), (6, (2, 1)), rule="new"), crd2idx((1, 1), (2, 3, 4), (12, 4, 1), rule="new")
    (9, 16)
    >>> crd2idx(np.arange(6), (2, 3), (3, 1))
    array([0, 3, 1, 4, 2, 5])
    """
    if rule != "cute":
        check_rule(rule, "legacy", "new")
        crd, shape, stride = _as_max_does(crd, shape, stride, rule)
    offset, reach = _offset(crd, shape, stride)
    if reach >> 63 and isinstance(offset, np.ndarray):
        raise ValueError(f"offsets up to {shown(reach)} of an array of coordinates: must have at most 63 bits")
    return offset


def _offset(crd: Coord, shape: IntTuple, stride: IntTuple) -> tuple[int | IntArray, int]:
    """The offset, and what no absolute value in it exceeds; where that has more than 63 bits, arrays have wrapped."""
    if isinstance(crd, tuple):
        if isinstance(shape, int) or isinstance(stride, int) or len(crd) != len(shape):
            raise ValueError(f"coordinate {shown(crd)} does not fit shape {shown(shape)}: must be "
                             "one item for each mode")
        total: int | IntArray = 0
        reach = 0
        for c, s, d in zip(crd, shape, stride, strict=True):
            part, most = _offset(c, s, d)
            total, reach = total + part, reach + most
        return total, reach
    crd = as_int_array(crd, "coordinate")
    if isinstance(shape, int) or isinstance(stride, int):
        if not isinstance(shape, int) or not isinstance(stride, int):
            raise ValueError(f"stride {shown(stride)} does not fit shape {shown(shape)}: must be the same nesting")
        reach = int(np.max(crd, initial=0)) * abs(stride)
        return crd * (stride if isinstance(crd, int) or not abs(stride) >> 63 else 0), reach  # or all are 0
    total, reach = crd * 0, 0
    for s, d in zip(shape[:-1], stride[:-1], strict=True):
        extent = product(s) or 1
        if extent >> 63 and not isinstance(crd, int):
            part, most = _offset(crd, s, d)
            crd = crd * 0
        else:
            part, most = _offset(crd % extent, s, d)
            crd = crd // extent
        total, reach = total + part, reach + most
    if not shape:
        return total, reach
    part, most = _offset(crd, shape[-1], stride[-1])
    return total + part, reach + most


def _as_max_does(crd: Coord, shape: IntTuple, stride: IntTuple, rule: Rule) -> tuple[Coord, IntTuple, IntTuple]:
    """The same call in CuTe's terms."""
    if isinstance(shape, int):
        return crd, shape, stride
    if rule == "legacy":
        flat_pair = len(shape) == len(flatten(shape)) == 2
        if isinstance(crd, tuple) or not flat_pair:
            return crd, shape, stride
        crd, size = as_int_array(crd, "coordinate"), product(shape)
        if not size:
            raise ValueError(f"coordinate of shape {shown(shape)}, which is empty: there is none")
        return (crd if size >> 63 else crd % size), shape, stride
    if isinstance(crd, tuple) and len(crd) == 1:
        return crd[0], shape, stride
    if isinstance(crd, tuple) and len(crd) != len(shape):
        leaves = _leaves(crd)
        return leaves, flatten(shape)[: len(leaves)], flatten(stride)[: len(leaves)]
    return crd, shape, stride


def _leaves(crd: Coord) -> tuple[Coord, ...]:
    return tuple(leaf for item in crd for leaf in _leaves(item)) if isinstance(crd, tuple) else (crd,)


def idx2crd(idx: int | IntArray | tuple[Any, ...], shape: IntTuple, stride: IntTuple | None = None) -> Coord:
    """The coordinate of an offset: ``(idx // stride) % shape`` of each leaf by itself; column-major strides by default.
    It inverts :func:`crd2idx` for compact layouts only. A stride of 0 gives coordinate 0. A tuple has an offset for
    each mode of the shape, by the strides of that mode alone.

    >>> idx2crd(17, (3, (2, 4))), idx2crd((2, 5), (3, (2, 4)))
    ((2, (1, 2)), (2, (1, 2)))
    """
    if isinstance(idx, tuple):
        if not isinstance(shape, tuple) or len(shape) != len(idx):
            raise ValueError(f"index {shown(idx)} has {len(idx)} modes: must have those of shape {shown(shape)}")
        if stride is not None and (not isinstance(stride, tuple) or len(stride) != len(shape)):
            raise ValueError(f"stride {shown(stride)} does not fit shape {shown(shape)}: must be the same nesting")
        return tuple(map(idx2crd, idx, shape, stride or (None,) * len(shape)))
    stride = prefix_product(shape) if stride is None else stride
    if not congruent(shape, stride):
        raise ValueError(f"stride {shown(stride)} does not fit shape {shown(shape)}: must be the same nesting")
    if isinstance(shape, tuple) and isinstance(stride, tuple):
        return tuple(idx2crd(idx, s, d) for s, d in zip(shape, stride, strict=True))
    assert isinstance(shape, int)
    assert isinstance(stride, int)
    idx = as_int_array(idx, "index")
    if not stride or not shape:
        return idx * 0
    if isinstance(idx, np.ndarray) and abs(stride) >> 63:
        idx = np.where(idx > 0, -1, 0) if stride < 0 else idx * 0
    else:
        idx = idx // stride
    if not isinstance(idx, np.ndarray) or not abs(shape) >> 63:
        return idx % shape
    if idx.size and idx.min() < 0:
        raise ValueError(f"coordinates up to {shown(abs(shape))} of an array of offsets: must have at most 63 bits")
    return idx


def format_tree(tree: IntTuple) -> str:
    """CuTe text.

    >>> format_tree((4, (3, 2))), format_tree((32,)), format_tree(32)
    ('(4,(3,2))', '(32)', '32')
    """
    return shown(tree) if isinstance(tree, int) else f"({','.join(format_tree(item) for item in _items(tree))})"


def parse_tree(text: str) -> IntTuple:
    """The tree that :func:`format_tree` printed; blanks and a ``_`` before an int (CuTe's static ints) are accepted.

    >>> parse_tree("(4,(3,2))"), parse_tree("(32)"), parse_tree("(_8, _1)")
    ((4, (3, 2)), (32,), (8, 1))
    """
    if not isinstance(text, str):
        raise ValueError(f"{shown(text)} is not the text of a tree")
    tokens = iter(_tokens(text))
    tree = _parse(next(tokens, ""), tokens, text)
    if (rest := next(tokens, None)) is not None:
        raise ValueError(f"{text!r}: {rest!r} follows the end of the tree")
    return tree


def _tokens(text: str) -> list[str]:
    for mark in "(),":
        text = text.replace(mark, f" {mark} ")
    return text.split()


def _parse(token: str, tokens: Iterator[str], text: str, depth: int = 0) -> IntTuple:
    if token != "(":
        digits = token.removeprefix("_")
        if not digits.removeprefix("-").isdecimal():
            raise ValueError(f"{text!r}: {token or 'the end'!r} where an int or '(' is expected")
        return int(digits)
    if depth == MOST_NESTED:
        raise ValueError(f"{text[:80]!r}..: must be at most {MOST_NESTED} tuples in one another")
    items: list[IntTuple] = []
    token = next(tokens, "")
    while token != ")":
        items.append(_parse(token, tokens, text, depth + 1))
        token = next(tokens, "")
        if token == ",":
            token = next(tokens, "")
        elif token != ")":
            raise ValueError(f"{text!r}: {token or 'the end'!r} where ',' or ')' is expected")
    return tuple(items)
