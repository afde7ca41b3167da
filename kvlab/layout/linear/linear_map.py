"""Maps between the bits of named indices and the bits of named coordinates, linear over F2."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np

from kvlab.common.checks import shown
from kvlab.common.drawn import Drawn
from kvlab.layout.algebra.int_tuple import IntArray, as_int, at_once, flatten, int_tuple
from kvlab.layout.linear.f2 import Elimination, xor_table

Vector: TypeAlias = tuple[int, ...]
Bases: TypeAlias = Mapping[str, Sequence[Sequence[int]]]
OutDims: TypeAlias = Mapping[str, int] | Sequence[int] | Sequence[str]


@dataclass(frozen=True, init=False, repr=False, slots=True)
class LinearMap(Drawn):
    """``L(i) = XOR of the basis vectors at the set bits of i``, over all input dimensions.

    Parameters
    ----------
    bases : for each input dimension the coordinates of the indices 1, 2, 4, ...; a basis vector of zeros broadcasts.
    out_dims : name and size (a power of two) of each output dimension; or the sizes only, then the names are ``dim0``,
        ``dim1``, ...; or the names only, then the sizes are the smallest that hold the bases.

    Called with an index (an int or an int array; arrays broadcast) for each input dimension by its name, missing ones
    being 0, it returns the tuple of coordinates. Frozen and hashable; the order of dimensions is part of its identity.

    >>> mma = LinearMap({"register": [[0, 1], [8, 0]], "lane": [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]}, (16, 8))
    >>> mma(register=2, lane=5)
    (9, 2)
    >>> mma(lane=np.arange(6))
    (array([0, 0, 0, 0, 1, 1]), array([0, 2, 4, 6, 0, 2]))
    >>> mma.is_invertible, mma.in_dims
    (True, {'register': 4, 'lane': 32})
    >>> print(LinearMap({"lane": [[1], [0]]}, (2,)))
    lane=1 -> (1)
    lane=2 -> (0)
    where out dims are: [dim0 (size 2)]
    """

    _bases: tuple[tuple[str, tuple[Vector, ...]], ...]
    _outs: tuple[tuple[str, int], ...]

    def __init__(self, bases: Bases, out_dims: OutDims) -> None:
        if not isinstance(bases, Mapping):
            raise ValueError(f"bases is {bases!r}: must be a mapping from names to lists of basis vectors")
        for name, vectors in bases.items():
            if not isinstance(vectors, Iterable):
                raise ValueError(f"bases {shown(vectors)} of {name!r}: must be a list of basis vectors")
        frozen = tuple((str(name), tuple(_vector(v) for v in vectors)) for name, vectors in bases.items())
        outs = _out_dims(out_dims, [v for _, vectors in frozen for v in vectors])
        for name, vectors in frozen:
            for vector in vectors:
                if len(vector) != len(outs) or any(not 0 <= x < n for x, (_, n) in zip(vector, outs, strict=False)):
                    raise ValueError(
                        f"basis {list(vector)} of {name!r} does not fit the output dimensions {dict(outs)}: must be "
                        "one coordinate for each of them, from 0 to its size - 1"
                    )
        object.__setattr__(self, "_bases", frozen)
        object.__setattr__(self, "_outs", outs)

    @classmethod
    def identity1d(cls, size: int, in_dim: str, out_dim: str) -> Self:
        """``in_dim`` counts ``size`` steps along ``out_dim``.

        >>> LinearMap.identity1d(4, "lane", "dim0").bases
        {'lane': [[1], [2]]}
        """
        return cls({in_dim: [[1 << bit] for bit in range(log2_of(size, in_dim))]}, {out_dim: size})

    @classmethod
    def zeros1d(cls, size: int, in_dim: str, out_dim: str) -> Self:
        """``size`` indices of ``in_dim`` at the same place: a broadcast.

        >>> LinearMap.zeros1d(4, "lane", "dim0").bases
        {'lane': [[0], [0]]}
        """
        return cls({in_dim: [[0]] * log2_of(size, in_dim)}, {out_dim: 1})

    @property
    def bases(self) -> dict[str, list[list[int]]]:
        """The basis vectors of each input dimension, as the constructor takes them."""
        return {name: [list(vector) for vector in vectors] for name, vectors in self._bases}

    @property
    def in_dims(self) -> dict[str, int]:
        """Name and size of each input dimension."""
        return {name: 1 << len(vectors) for name, vectors in self._bases}

    @property
    def out_dims(self) -> dict[str, int]:
        """Name and size of each output dimension."""
        return dict(self._outs)

    @property
    def shape(self) -> Vector:
        """The sizes of the output dimensions."""
        return tuple(size for _, size in self._outs)

    def __str__(self) -> str:
        lines = [
            f"{name}={1 << bit} -> ({', '.join(map(str, vector))})"
            for name, vectors in self._bases
            for bit, vector in enumerate(vectors)
        ] + [f"{name} is a size 1 dimension" for name, vectors in self._bases if not vectors]
        outs = ", ".join(f"{name} (size {size})" for name, size in self._outs)
        return "\n".join([*lines, f"where out dims are: [{outs}]"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.bases}, {self.out_dims})"

    def __call__(self, **indices: Any) -> tuple[Any, ...]:
        """The coordinates of indices: ints where all indices are ints, otherwise int64 arrays."""
        code = self.code(**indices)
        coords = self._unpack(code)
        return coords if isinstance(code, np.ndarray) and code.ndim else tuple(int(x) for x in coords)

    def code(self, **indices: Any) -> Any:
        """The coordinates of indices as one number: row-major over the output dimensions, the last fastest.

        >>> LinearMap({"lane": [[0, 1], [1, 0]]}, (2, 4)).code(lane=np.arange(4))
        array([0, 1, 4, 5])
        """
        tables = _tables(self)
        if unknown := indices.keys() - tables.keys():
            raise ValueError(f"indices of {sorted(unknown)}: must be {self.in_dims}")
        code: Any = np.int64(0)
        for name, index in indices.items():
            table, index = tables[name], np.asarray(index)
            if index.dtype.kind not in "iu" or (index.size and not (0 <= index.min() and index.max() < table.size)):
                raise ValueError(f"{name} is {index!r}: must be integers from 0 to {table.size - 1}")
            code = code ^ table[index]
        return code

    def coordinates(self) -> IntArray:
        """All coordinates: int64 ``[size of each input dimension..., output dimension]``, computed once, read-only.

        >>> LinearMap({"lane": [[0, 1], [1, 0]]}, (2, 2)).coordinates().tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1]]
        """
        return _coordinates(self)

    def _unpack(self, code: Any) -> tuple[Any, ...]:
        coords = []
        for size in reversed(self.shape):
            coords.append(code & (size - 1))
            code = code >> (size.bit_length() - 1)
        return tuple(reversed(coords))

    def _pack(self, vector: Sequence[int]) -> int:
        code = 0
        for x, size in zip(vector, self.shape, strict=True):
            code = code * size + x
        return code

    @property
    def columns(self) -> list[int]:
        """The matrix over F2: the code of every basis vector, the bits of the first input dimension first."""
        return [self._pack(vector) for _, vectors in self._bases for vector in vectors]

    @property
    def elimination(self) -> Elimination:
        """The matrix, eliminated: its rank, kernel and solutions; computed once."""
        return _elimination(self)

    @property
    def rank(self) -> int:
        """Rank of the matrix: the image has ``2 ** rank`` elements."""
        return self.elimination.rank

    @property
    def is_surjective(self) -> bool:
        """Does every coordinate have an index?"""
        return 1 << self.rank == functools.reduce(lambda total, size: total * size, self.shape, 1)

    @property
    def is_injective(self) -> bool:
        """Does no coordinate have two indices?"""
        return not self.elimination.kernel

    @property
    def is_invertible(self) -> bool:
        """Does every coordinate have exactly one index?"""
        return self.is_surjective and self.is_injective

    def kernel(self) -> tuple[dict[str, int], ...]:
        """A basis of the indices that are mapped to 0: what one may add (XOR) to an index without a change of place.

        >>> LinearMap({"register": [[1], [2]], "lane": [[1], [0]]}, (4,)).kernel()
        ({'register': 1, 'lane': 1}, {'register': 0, 'lane': 2})
        """
        return tuple(self._split(mask) for mask in self.elimination.kernel)

    def _split(self, mask: int) -> dict[str, int]:
        """A mask of columns as one index for each input dimension."""
        split = {}
        for name, vectors in self._bases:
            split[name] = mask & ((1 << len(vectors)) - 1)
            mask >>= len(vectors)
        return split


def _vector(vector: Iterable[int]) -> Vector:
    coords = int_tuple(tuple(vector) if isinstance(vector, Iterable) else vector, "basis")
    if not isinstance(coords, tuple) or not all(isinstance(x, int) for x in coords):
        raise ValueError(f"basis is {vector!r}: must be one int for each output dimension")
    return flatten(coords)


def log2_of(size: int, what: str) -> int:
    """The bits of a size that is a power of two.

    >>> log2_of(8, "size")
    3
    """
    size = as_int(size, what)
    if size < 1 or size & (size - 1):
        raise ValueError(f"{what} of size {shown(size)}: must be a power of two")
    return size.bit_length() - 1


def _out_dims(out_dims: OutDims, vectors: list[Vector]) -> tuple[tuple[str, int], ...]:
    named: list[tuple[str, int]] = []
    if not isinstance(out_dims, Mapping | list | tuple):
        raise ValueError(f"out_dims is {out_dims!r}: must be names, sizes, or a mapping from names to sizes")
    items: Iterable[Any] = out_dims.items() if isinstance(out_dims, Mapping) else out_dims
    for axis, item in enumerate(items):
        if isinstance(item, str):
            reach = max((vector[axis] for vector in vectors if axis < len(vector)), default=0)
            named.append((item, 1 << reach.bit_length()))
        else:
            named.append(item if isinstance(item, tuple) else (f"dim{axis}", item))
    for name, size in named:
        log2_of(size, name)
    return tuple(named)


@functools.cache
def _elimination(linear: LinearMap) -> Elimination:
    return Elimination(linear.columns)


@functools.cache
def _tables(linear: LinearMap) -> dict[str, IntArray]:
    columns, tables = linear.columns, {}
    for name, size in linear.in_dims.items():
        bits = size.bit_length() - 1
        tables[name], columns = xor_table(columns[:bits]), columns[bits:]
    return tables


@functools.cache
def _coordinates(linear: LinearMap) -> IntArray:
    at_once(math.prod(linear.in_dims.values()), "coordinates")
    grid = np.ix_(*(np.arange(size) for size in linear.in_dims.values()))
    coords = linear(**dict(zip(linear.in_dims, grid, strict=True)))
    stacked = np.stack(np.broadcast_arrays(*coords), axis=-1)
    stacked.setflags(write=False)
    return stacked
