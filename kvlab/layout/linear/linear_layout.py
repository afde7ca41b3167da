"""Linear layouts: maps from the bits of named indices to the bits of named coordinates, linear over F2.

Every layout whose extents are powers of two and every XOR swizzle is such a map (https://arxiv.org/abs/2505.23819). The
compilers of Triton describe registers, lanes, warps and shared-memory offsets with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import shown
from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.swizzle import Swizzle
from kvlab.layout.linear import convert as linear_convert
from kvlab.layout.linear.from_atom import Atom, atom_bases
from kvlab.layout.linear.linear_dims import LinearDims, common_order
from kvlab.layout.linear.linear_map import Vector, log2_of


@dataclass(frozen=True, init=False, repr=False, slots=True)
class LinearLayout(LinearDims):
    """A linear map between named indices and named coordinates (see :class:`LinearMap` for its construction and use,
    :class:`LinearDims` for its dimensions),
    with the algebra of such maps and the ways from and to other descriptions of layouts.

    >>> reg = LinearLayout({"register": [[0, 1]], "lane": [[0, 2], [1, 0]]}, (2, 4))
    >>> smem = LinearLayout({"offset": [[0, 1], [0, 2], [1, 2]]}, (2, 4))
    >>> reg(register=1, lane=3)
    (1, 3)
    >>> reg.invert_and_compose(smem).bases  # to which offset of shared memory each register of each lane goes
    {'register': [[1]], 'lane': [[2], [6]]}
    """

    @classmethod
    def from_layout(cls, layout: Layout, swizzle: Swizzle | None = None) -> LinearLayout:
        """``swizzle o layout`` as a map from ``dim0``, ``dim1``, ... (the top-level modes) to ``offset``.

        The layout counts in the unit of the swizzle. ValueError where it is not linear: an extent that is no power of
        two, or strides whose sums carry.

        >>> ll = LinearLayout.from_layout(Layout("(4,8):(8,1)"), Swizzle(1, 2, 2, "bf16"))
        >>> ll.bases
        {'dim0': [[8], [20]], 'dim1': [[1], [2], [4]]}
        >>> LinearLayout.from_layout(Layout("(4,8):(9,1)"))
        Traceback (most recent call last):
            ...
        ValueError: Layout("(4,8):(9,1)") is not linear over F2: its strides overlap in the bits 0x3, so sums carry
        """
        bases = linear_convert.bases_of_layout(layout, swizzle)
        reach = max((x for vectors in bases.values() for x in vectors), default=0)
        return cls(
            {name: [[x] for x in vectors] for name, vectors in bases.items()}, {"offset": 1 << reach.bit_length()}
        )

    @classmethod
    def from_atom(
        cls, atom: Atom, operand: str = "c", warps: Sequence[int] = (1, 1), *, warp_order: Sequence[int] = (1, 0)
    ) -> LinearLayout:
        """The fragment map of a matrix instruction: ``register``, ``lane`` and ``warp`` -> (row, column).

        Parameters
        ----------
        atom : any object with ``shape`` (M, N, K), ``warp_size`` and the maps ``a``, ``b``, ``c`` of (lane, register)
            to (row, column), as in ``kvlab.hardware``. The 128 threads of a warpgroup are 4 warps of 32 lanes.
        operand : ``"a"``, ``"b"`` or ``"c"``.
        warps : how many warps lie along M and N; warps that differ only along the dimension which an operand lacks
            hold the same elements of it.
        warp_order : the dimension in which warps are counted first: (1, 0) along N, (0, 1) along M.

        ValueError where the map is not linear, or covers the operand partly.

        >>> from kvlab.hardware import get_atom
        >>> LinearLayout.from_atom(get_atom("mma.sync.m16n8k16.bf16"), "b", warps=(2, 2)).bases
        {'register': [[1, 0], [8, 0]], 'lane': [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], 'warp': [[0, 8], [0, 0]]}
        """
        bases, shape = atom_bases(atom, operand)
        layout = cls(bases, shape)
        free = {"a": 1, "b": 0}.get(operand)
        for dim in warp_order:
            name = f"dim{dim}"
            layout *= (cls.zeros1d if dim == free else cls.identity1d)(warps[dim], "warp", name)
        return layout

    def invert(self) -> LinearLayout:
        """A right inverse, from coordinates to indices: ``L(**inverse(x)) == x``; where a coordinate has several
        indices, the index is made of the earliest bases that span the rest. ValueError where L is not surjective.

        >>> ll = LinearLayout({"offset": [[0, 1], [1, 1]]}, (2, 2))
        >>> ll.invert()(dim0=1, dim1=0)
        (3,)
        """
        unit = LinearLayout(
            {name: self._basis_along(axis, size) for axis, (name, size) in enumerate(self._outs)}, self.out_dims
        )
        return unit.invert_and_compose(self)

    def _basis_along(self, axis: int, size: int) -> list[Vector]:
        zeros, bits = [0] * len(self._outs), range(size.bit_length() - 1)
        return [(*zeros[:axis], 1 << bit, *zeros[axis + 1 :]) for bit in bits]

    def invert_and_compose(self, other: LinearLayout, *, keep_equal: bool = False) -> LinearLayout:
        """From this layout's indices to the indices of ``other`` at the same coordinates: ``other(**R(i)) == self(i)``.

        The way from registers to shared memory is ``registers.invert_and_compose(shared)``. Output dimensions are those
        of one name, in any order, and ``other`` may have more coordinates: a buffer of which this layout is a tile.
        Where a coordinate has several indices, the earliest bases that span the rest are taken. ``keep_equal``, as
        Triton does: an input dimension that both have with the same bases is passed on as it is. (Before 3.9 Triton
        took no index of such a dimension for the others.)

        ValueError where ``other`` does not reach a coordinate of this layout, or lacks a dimension of it.

        >>> reg = LinearLayout({"lane": [[1], [2]]}, (4,))
        >>> reg.invert_and_compose(LinearLayout({"offset": [[2], [1]]}, (4,))).bases
        {'lane': [[2], [1]]}
        >>> twice = LinearLayout({"lane": [[1]], "warp": [[0]]}, (2,))
        >>> twice.invert_and_compose(twice).bases, twice.invert_and_compose(twice, keep_equal=True).bases
        ({'lane': [[1, 0]], 'warp': [[0, 0]]}, {'lane': [[1, 0]], 'warp': [[0, 1]]})
        """
        sizes = other.out_dims
        if sizes.keys() != self.out_dims.keys() or any(size > sizes[name] for name, size in self._outs):
            raise ValueError(
                f"output dimensions {self.out_dims} and {sizes} differ: must be those of one name, and no more here"
            )
        target = other.transpose(*self.out_dims) if sizes else other
        theirs, ours = target.bases, self.bases
        kept = [name for name in theirs if keep_equal and theirs[name] == ours.get(name)]
        solver = target.elimination
        bases: dict[str, list[list[int]]] = {}
        for name, vectors in self._bases:
            bases[name] = rows = []
            for bit, vector in enumerate(vectors):
                mask = solver.solve(target._pack(vector))
                if mask is None:
                    raise ValueError(f"coordinate {vector} is not reached: the layout is not surjective\n{other}")
                steps = {dim: 1 << bit if dim == name else 0 for dim in theirs} if name in kept else target._split(mask)
                rows.append(list(steps.values()))
        return LinearLayout(bases, other.in_dims)

    def compose(self, inner: LinearLayout) -> LinearLayout:
        """``R(i) == self(inner(i))``: the output dimensions of ``inner`` are input dimensions of this layout.

        (Triton writes it the other way round, ``inner.compose(outer)``.)

        >>> outer = LinearLayout({"dim0": [[2], [1]]}, {"offset": 4})
        >>> outer.compose(LinearLayout({"lane": [[3]]}, {"dim0": 4})).bases
        {'lane': [[3]]}
        """
        for name, size in inner._outs:
            if size > self.in_dims.get(name, 0):
                raise ValueError(f"{name} of size {size} does not fit the input dimensions {self.in_dims}")
        names = list(inner.out_dims)
        return LinearLayout(
            {
                name: [self(**dict(zip(names, vector, strict=True))) for vector in vectors]
                for name, vectors in inner._bases
            },
            self.out_dims,
        )

    def __mul__(self, other: LinearLayout) -> LinearLayout:
        """The product: this layout is the tile, ``other`` says where the tiles lie.

        Bases of a common input dimension are appended; coordinates of a common output dimension are counted in tiles.

        >>> (LinearLayout.identity1d(2, "register", "dim0") * LinearLayout.identity1d(4, "lane", "dim0")).bases
        {'register': [[1]], 'lane': [[2], [4]]}
        """
        return _product(self, other)

    def product(self, other: LinearLayout) -> LinearLayout:
        """The product ``self * other`` with its dimensions in an order that both layouts have, as Triton orders them;
        ``*`` has this layout's first. ValueError where both have the same names in different orders.

        >>> row = LinearLayout.identity1d(2, "lane", "dim1")
        >>> tile = LinearLayout({"register": [[1, 0]], "lane": [[0, 1]]}, (2, 2))
        >>> row.product(tile).in_dims, (row * tile).in_dims
        ({'register': 2, 'lane': 4}, {'lane': 4, 'register': 2})
        """
        ins, outs = (
            common_order(list(ours), list(theirs))
            for ours, theirs in ((self.in_dims, other.in_dims), (self.out_dims, other.out_dims))
        )
        found = self * other
        if ins:
            found = found.transpose_ins(*ins)
        return found.transpose(*outs) if outs else found

    def divide(self, tile: LinearLayout, *, side: str = "left") -> LinearLayout:
        """The quotient Q with ``tile * Q == self`` (``side="left"``) or ``Q * tile == self`` (``side="right"``).

        ValueError where there is none. Dimensions are those of this layout.

        >>> ll = LinearLayout.identity1d(8, "register", "dim0")
        >>> ll.divide(LinearLayout.identity1d(2, "register", "dim0")).bases
        {'register': [[1], [2]]}
        """
        return _quotient(self, tile, side)

    def fit(self, sizes: Mapping[str, int]) -> LinearLayout:
        """Tile of this layout that covers output dimensions of the given sizes.

        Where it is smaller it is repeated along the first input dimension, the output dimensions in their order; where
        it is larger coordinates wrap around, so that steps past the end become broadcasts (zero bases).

        >>> LinearLayout({"register": [[1]], "lane": [[2], [4]]}, (8,)).fit({"dim0": 4}).bases
        {'register': [[1]], 'lane': [[2], [0]]}
        >>> LinearLayout({"register": [[1]], "lane": [[2]]}, (4,)).fit({"dim0": 16}).bases
        {'register': [[1], [4], [8]], 'lane': [[2]]}
        """
        grown = self
        if lacking := [name for name in self.out_dims if name not in sizes]:
            raise ValueError(f"sizes is {shown(sizes)}: must have {', '.join(lacking)}")
        for name, size in self._outs:
            log2_of(sizes[name], name)
            if size < sizes[name]:
                if not self._bases:
                    raise ValueError(f"sizes is {shown(sizes)}: must be {self.out_dims}, there is no input to grow")
                grown *= LinearLayout.identity1d(sizes[name] // size, self._bases[0][0], name)
        kept = [sizes[name] for name in grown.out_dims]
        bases = {
            name: [[x % size for x, size in zip(vector, kept, strict=True)] for vector in vectors]
            for name, vectors in grown._bases
        }
        return LinearLayout(bases, dict(zip(grown.out_dims, kept, strict=True)))

    def transpose(self, *names: str) -> LinearLayout:
        """The output dimensions in the order of ``names`` (all of them; reversed when none is given).

        >>> LinearLayout({"lane": [[0, 1]]}, (4, 2)).transpose()
        LinearLayout({'lane': [[1, 0]]}, {'dim1': 2, 'dim0': 4})
        """
        current = list(self.out_dims)
        order = list(names) or current[::-1]
        if sorted(order) != sorted(current):
            raise ValueError(f"transpose to {order}: must be a permutation of {current}")
        axes = [current.index(name) for name in order]
        return LinearLayout(
            {name: [[vector[axis] for axis in axes] for vector in vectors] for name, vectors in self._bases},
            {name: self.out_dims[name] for name in order},
        )

    def reshape(self, out_dims: Mapping[str, int] | Sequence[int]) -> LinearLayout:
        """Other output dimensions of the same total size, row-major as in NumPy: the last is fastest.

        >>> LinearLayout({"lane": [[0, 1], [1, 0]]}, (2, 4)).reshape({"offset": 8}).bases
        {'lane': [[1], [4]]}
        """
        like = LinearLayout({}, out_dims)
        sizes = [int(np.prod(layout.shape, dtype=np.int64)) for layout in (self, like)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"reshape of {self.out_dims} (size {sizes[0]}) to {like.out_dims} (size {sizes[1]})")
        return LinearLayout(
            {name: [like._unpack(self._pack(vector)) for vector in vectors] for name, vectors in self._bases},
            like.out_dims,
        )

    def rename(self, names: Mapping[str, str]) -> LinearLayout:
        """Dimensions with other names.

        >>> LinearLayout.identity1d(2, "lane", "dim0").rename({"dim0": "row"}).out_dims
        {'row': 2}
        """
        return LinearLayout(
            {names.get(name, name): vectors for name, vectors in self._bases},
            {names.get(name, name): size for name, size in self._outs},
        )

    def to_layout(self) -> Layout:
        """The ``shape:stride`` layout that this is: one mode for each input dimension, its offset the only output.

        ValueError, with the reason, where there is none: several output dimensions, or bases which share bits.

        >>> LinearLayout.from_layout(Layout("((2,4),8):((1,16),2)")).to_layout()
        Layout("((2,4),8):((1,16),2)")
        """
        return linear_convert.layout_of_bases(self._offsets())

    def to_swizzled_layout(self, unit: Any) -> tuple[Layout, Swizzle]:
        """``(layout, swizzle)`` with ``self == swizzle o layout``, of the fewest bits; offsets count in ``unit``.

        ValueError, with the reason, where no swizzle does it.

        >>> ll = LinearLayout.from_layout(Layout("(4,8):(8,1)"), Swizzle(1, 2, 2, "bf16"))
        >>> ll.to_swizzled_layout("bf16")
        (Layout("(4,8):(8,1)"), Swizzle(1, 2, 2, unit='bfloat16'))
        """
        return linear_convert.swizzled_layout_of_bases(self._offsets(), unit)

    def _offsets(self) -> dict[str, list[int]]:
        if len(self._outs) != 1:
            raise ValueError(
                f"a layout has one output, its offset; this has {self.out_dims}: reshape() or invert() it first"
            )
        return {name: [vector[0] for vector in vectors] for name, vectors in self._bases}


def _product(left: LinearLayout, right: LinearLayout) -> LinearLayout:
    outs = left.out_dims | {n: left.out_dims.get(n, 1) * size for n, size in right.out_dims.items()}
    bases: dict[str, list[list[int]]] = {name: [] for name in (*left.in_dims, *right.in_dims)}
    for factor, unit in ((left, {}), (right, left.out_dims)):
        for name, vectors in factor.bases.items():
            for vector in vectors:
                coord = dict(zip(factor.out_dims, vector, strict=True))
                bases[name].append([coord.get(out, 0) * unit.get(out, 1) for out in outs])
    return LinearLayout(bases, outs)


def _quotient(whole: LinearLayout, tile: LinearLayout, side: str) -> LinearLayout:
    if side not in ("left", "right"):
        raise ValueError(f"side is {side!r}: must be 'left' or 'right'")
    left, bases, tile_bases = side == "left", {}, tile.bases
    outs = {name: size // tile.out_dims.get(name, 1) for name, size in whole.out_dims.items()}
    unit = [tile.out_dims.get(name, 1) if left else 1 for name in outs]
    for name, vectors in whole.bases.items():
        cut = len(tile_bases.get(name, ())) if left else len(vectors) - len(tile_bases.get(name, ()))
        rest = vectors[max(cut, 0) :] if left else vectors[: max(cut, 0)]
        bases[name] = [[x // n for x, n in zip(vector, unit, strict=True)] for vector in rest]
    try:
        quotient = LinearLayout(bases, outs)
        product = tile * quotient if left else quotient * tile
    except ValueError:
        product = None
    if product is None or product.bases != LinearLayout(whole.bases, whole.out_dims).transpose(*product.out_dims).bases:
        raise ValueError(f"not divisible on the {side}: no quotient exists of\n{whole}\nby\n{tile}")
    return quotient
