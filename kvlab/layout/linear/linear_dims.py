"""The dimensions of linear layouts: joined, split, ordered, cut, left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kvlab.common.checks import shown
from kvlab.layout.algebra.int_tuple import as_int
from kvlab.layout.linear.linear_map import LinearMap, log2_of


@dataclass(frozen=True, init=False, repr=False, slots=True)
class LinearDims(LinearMap):
    """A linear map whose input and output dimensions can be arranged anew.

    Several input dimensions count as one number whose lowest bits are the first dimension's, as Triton has it."""

    def transpose_ins(self, *names: str) -> Self:
        """The input dimensions in the order of ``names`` (all of them; reversed when none is given).

        >>> LinearDims({"register": [[1]], "lane": [[2]]}, (4,)).transpose_ins("lane", "register").in_dims
        {'lane': 2, 'register': 2}
        """
        bases = self.bases
        order = list(names) or list(bases)[::-1]
        if sorted(order) != sorted(bases):
            raise ValueError(f"transpose_ins to {order}: must be a permutation of {list(bases)}")
        return type(self)({name: bases[name] for name in order}, self.out_dims)

    def reshape_ins(self, in_dims: Mapping[str, int]) -> Self:
        """Other input dimensions of the same total size, the first fastest.

        >>> LinearDims({"lane": [[1], [2], [4]]}, (8,)).reshape_ins({"a": 2, "b": 4}).bases
        {'a': [[1]], 'b': [[2], [4]]}
        """
        if not isinstance(in_dims, Mapping):
            raise ValueError(f"in_dims is {shown(in_dims)}: must be a mapping from names to sizes")
        vectors = [vector for rows in self.bases.values() for vector in rows]
        sizes = {name: log2_of(size, name) for name, size in in_dims.items()}
        if sum(sizes.values()) != len(vectors):
            raise ValueError(f"in_dims is {dict(in_dims)}: must have the size {1 << len(vectors)} of {self.in_dims}")
        rest = iter(vectors)
        return type(self)({name: [next(rest) for _ in range(bits)] for name, bits in sizes.items()}, self.out_dims)

    def flatten_ins(self, name: str | None = None) -> Self:
        """All input dimensions as one, called ``name`` (as the first is, if None), the first fastest.

        >>> LinearDims({"register": [[1]], "lane": [[2]]}, (4,)).flatten_ins().bases
        {'register': [[1], [2]]}
        """
        first = next(iter(self.in_dims), None) if name is None else name
        if first is None:
            raise ValueError("name is None: must be the name of a dimension where the layout has no input to name it")
        return self.reshape_ins({first: 1 << sum(map(len, self.bases.values()))})

    def concat_ins(self, other: LinearMap) -> Self:
        """Input dimensions of this layout, then those of ``other``, which leads to the same coordinates.

        >>> LinearDims({"register": [[1]]}, (4,)).concat_ins(LinearMap({"lane": [[2]]}, (4,))).bases
        {'register': [[1]], 'lane': [[2]]}
        """
        if list(self.out_dims.items()) != list(other.out_dims.items()):
            raise ValueError(f"output dimensions {self.out_dims} and {other.out_dims} differ: must be equal ones")
        _apart("input", self.in_dims, other.in_dims)
        return type(self)(self.bases | other.bases, self.out_dims)

    def concat_outs(self, other: LinearMap) -> Self:
        """Output dimensions of this layout, then those of ``other``, which has the same input dimensions.

        >>> LinearDims({"lane": [[1]]}, {"a": 2}).concat_outs(LinearMap({"lane": [[2]]}, {"b": 4})).bases
        {'lane': [[1, 2]]}
        """
        if list(self.in_dims.items()) != list(other.in_dims.items()):
            raise ValueError(f"input dimensions {self.in_dims} and {other.in_dims} differ: must be equal ones")
        _apart("output", self.out_dims, other.out_dims)
        theirs = other.bases
        bases = {name: [x + y for x, y in zip(rows, theirs[name], strict=True)] for name, rows in self.bases.items()}
        return type(self)(bases, self.out_dims | other.out_dims)

    def sublayout(self, in_dims: Iterable[str], out_dims: Iterable[str]) -> Self:
        """The dimensions of these names alone, in the order of the layout: the other inputs are 0, the other outputs
        left out.

        >>> LinearDims({"register": [[0, 1]], "lane": [[1, 0]]}, (2, 2)).sublayout(["lane"], ["dim0"])
        LinearDims({'lane': [[1]]}, {'dim0': 2})
        """
        ins, outs = _names("in_dims", in_dims, self.in_dims), _names("out_dims", out_dims, self.out_dims)
        axes = [axis for axis, name in enumerate(self.out_dims) if name in outs]
        rows = {name: vectors for name, vectors in self.bases.items() if name in ins}
        bases = {name: [[vector[axis] for axis in axes] for vector in vectors] for name, vectors in rows.items()}
        return type(self)(bases, {name: size for name, size in self.out_dims.items() if name in outs})

    def quotient(self, names: Iterable[str]) -> Self:
        """The layout without dimensions that it passes on as they are, each an input and an output of one name.

        ValueError where they change, or mix with others.

        >>> LinearDims({"lane": [[2, 0]], "block": [[0, 1]]}, {"dim0": 4, "block": 2}).quotient(["block"])
        LinearDims({'lane': [[2]]}, {'dim0': 4})
        """
        kept = _names("names", names, {name: n for name, n in self.in_dims.items() if name in self.out_dims})
        outs = list(self.out_dims)
        for name, rows in self.bases.items():
            for bit, row in enumerate(rows):
                there = [1 << bit if out == name else 0 for out in outs]
                mixed = [row[axis] for axis, out in enumerate(outs) if out in kept]
                if row != there if name in kept else any(mixed):
                    raise ValueError(f"no quotient by {sorted(kept)}: {name}={1 << bit} leads to {row} of {outs}")
        for name in kept:
            if self.in_dims[name] != self.out_dims[name]:
                raise ValueError(f"no quotient by {sorted(kept)}: {name} has {self.in_dims[name]} indices and "
                                 f"{self.out_dims[name]} coordinates")  # fmt: skip
        return self.sublayout(self.in_dims.keys() - kept, self.out_dims.keys() - kept)

    def resize_in(self, name: str, size: int) -> Self:
        """The indices of the input dimension ``name`` below ``size``, a power of two that is not above its own.

        >>> LinearDims({"lane": [[1], [2], [4]]}, (8,)).resize_in("lane", 4).bases
        {'lane': [[1], [2]]}
        """
        bits = _smaller(name, size, self.in_dims)
        return type(self)({n: rows[:bits] if n == name else rows for n, rows in self.bases.items()}, self.out_dims)

    def resize_out(self, name: str, size: int) -> Self:
        """The output dimension ``name`` with ``size`` coordinates: steps of ``size`` and more become 0.

        >>> LinearDims({"lane": [[1], [6], [2]]}, (8,)).resize_out("dim0", 4).bases
        {'lane': [[1], [0], [2]]}
        """
        _smaller(name, size, self.out_dims)
        at = list(self.out_dims).index(name)
        bases = {
            dim: [[0 if axis == at and x >= size else x for axis, x in enumerate(row)] for row in rows]
            for dim, rows in self.bases.items()
        }
        return type(self)(bases, self.out_dims | {name: size})

    def num_consecutive(self, in_dim: str | None = None, out_dim: str | None = None) -> int:
        """Number of indices of ``in_dim`` (the first, if None) in a row that lead to coordinates of ``out_dim`` (the
        last, if None) in a row, wherever the others start: the longest vector of an access.

        >>> LinearDims({"register": [[0, 1], [0, 2], [1, 0]], "lane": [[0, 4]]}, (2, 8)).num_consecutive()
        4
        >>> LinearDims({"register": [[0, 1], [0, 2]], "lane": [[0, 6]]}, (2, 8)).num_consecutive()
        2
        """
        if not self.in_dims or not self.out_dims:
            return 1
        source = next(iter(self.in_dims)) if in_dim is None else in_dim
        target = list(self.out_dims)[-1] if out_dim is None else out_dim
        _names("in_dim", [source], self.in_dims)
        _names("out_dim", [target], self.out_dims)
        axis = list(self.out_dims).index(target)
        steps = [[1 << bit if at == axis else 0 for at in range(len(self.out_dims))]
                 for bit in range(len(self.bases[source]))]  # fmt: skip
        run = next((bit for bit, row in enumerate(self.bases[source]) if row != steps[bit]), len(steps))
        others = 0
        for name, rows in self.bases.items():
            for row in rows[run if name == source else 0 :]:
                others |= row[axis]
        return 1 << min(run, (others & -others).bit_length() - 1 if others else run)

    def broadcast_free(self, in_dim: str) -> ColumnAction:
        """The action that leaves out the bits of ``in_dim`` which lead nowhere: of registers that hold what the one
        without the bit holds, say.

        >>> LinearDims({"register": [[1], [0], [2]]}, (4,)).broadcast_free("register")
        ColumnAction(in_dim='register', columns=(0, 2), bits=3)
        """
        _names("in_dim", [in_dim], self.in_dims)
        rows = self.bases[in_dim]
        return ColumnAction(in_dim, tuple(bit for bit, row in enumerate(rows) if any(row)), len(rows))


@dataclass(frozen=True)
class ColumnAction:
    """Bits of one input dimension in another order, some left out: bit k of the new index is bit ``columns[k]`` of the
    old one, of which it has ``bits``. What acts on a layout acts on the values of its registers alike.

    >>> action = ColumnAction("register", (1, 0), 2)
    >>> action.apply(LinearDims({"register": [[1], [2]]}, (4,))).bases
    {'register': [[2], [1]]}
    >>> action.apply_values(np.array([10, 11, 12, 13])).tolist()
    [10, 12, 11, 13]
    """

    in_dim: str
    columns: tuple[int, ...]
    bits: int

    def __post_init__(self) -> None:
        as_int(self.bits, "bits", 0)
        columns = tuple(as_int(column, "columns", 0) for column in self.columns)
        if len(set(columns)) != len(columns) or max(columns, default=-1) >= self.bits:
            raise ValueError(f"columns is {shown(self.columns)}: must be different bits, 0 to {self.bits - 1}")
        object.__setattr__(self, "columns", columns)

    @property
    def is_identity(self) -> bool:
        """Does it change nothing?"""
        return self.columns == tuple(range(self.bits))

    def apply(self, layout: LinearDims) -> LinearDims:
        """The layout of the new indices."""
        if layout.in_dims.get(self.in_dim) != 1 << self.bits:
            raise ValueError(f"{self} on {layout.in_dims}: must be a layout with {1 << self.bits} of {self.in_dim}")
        rows = layout.bases[self.in_dim]
        return type(layout)(layout.bases | {self.in_dim: [rows[column] for column in self.columns]}, layout.out_dims)

    def apply_values(self, values: Any, axis: int = -1) -> Any:
        """``values`` along ``axis``, one for each old index, in the order of the new ones: an array."""
        found = np.asarray(values)
        if not found.ndim or found.shape[axis] != 1 << self.bits:
            raise ValueError(f"values is {shown(found.shape)} along axis {axis}: must be {1 << self.bits} long")
        new = np.arange(1 << len(self.columns))
        old = new * 0
        for bit, column in enumerate(self.columns):
            old |= (new >> bit & 1) << column
        return found.take(old, axis)

    def after(self, first: ColumnAction) -> ColumnAction:
        """Composition: this action after another one.

        >>> ColumnAction("lane", (0,), 2).after(ColumnAction("lane", (2, 1), 3))
        ColumnAction(in_dim='lane', columns=(2,), bits=3)
        """
        if self.in_dim != first.in_dim or self.bits != len(first.columns):
            raise ValueError(f"{self} after {first}: must be of {first.in_dim} and of {len(first.columns)} bits")
        return ColumnAction(self.in_dim, tuple(first.columns[column] for column in self.columns), first.bits)

    def inverse(self) -> ColumnAction:
        """The action that undoes this one. ValueError where bits were left out.

        >>> ColumnAction("lane", (2, 0, 1), 3).inverse().columns
        (1, 2, 0)
        """
        if len(self.columns) != self.bits:
            raise ValueError(f"{self} leaves bits out: must keep all, to have an inverse")
        return ColumnAction(self.in_dim, tuple(self.columns.index(bit) for bit in range(self.bits)), self.bits)


def common_order(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """The names of both, in an order that both have. ValueError where they have common names in different orders.

    >>> common_order(["b"], ["a", "b"]), common_order(["a", "c"], ["a", "b", "c"])
    (['a', 'b'], ['a', 'b', 'c'])
    """
    if [name for name in first if name in second] != [name for name in second if name in first]:
        raise ValueError(f"dimensions {list(first)} and {list(second)}: must have common names in one order")
    order, rest = [], list(second)
    for name in first:
        if name in rest:
            order += rest[: rest.index(name)]
            rest = rest[rest.index(name) + 1 :]
        order.append(name)
    return order + rest


def _apart(side: str, first: Mapping[str, int], second: Mapping[str, int]) -> None:
    if both := first.keys() & second.keys():
        raise ValueError(f"{side} dimensions {sorted(both)} are in both: must be of different names")


def _names(what: str, names: Iterable[str], known: Mapping[str, int]) -> set[str]:
    found = {names} if isinstance(names, str) else set(names)
    if unknown := found - known.keys():
        lacking = sorted(map(str, unknown))
        raise ValueError(f"{what} is {sorted(map(str, found))}: {lacking} must be among {list(known)}")
    return found


def _smaller(name: str, size: int, known: Mapping[str, int]) -> int:
    """The bits of a size that is a power of two and at most that of the dimension."""
    _names("name", [name], known)
    bits = log2_of(size, "size")
    if size > known[name]:
        raise ValueError(f"size is {size}: must be at most the {known[name]} of {name}")
    return bits
