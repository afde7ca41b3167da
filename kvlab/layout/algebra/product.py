"""Products: copies of a block at the places that a tiler names, without overlap.

========  ====================================
logical   ``(block, tiler)``
zipped    ``((block_m, block_n), (tiler_m, tiler_n))`` for tilers by mode
tiled     ``((block_m, block_n), tiler_m, tiler_n)``
flat      ``(block_m, block_n, tiler_m, tiler_n)``
blocked   ``((block_m, tiler_m), (block_n, tiler_n))``: blocks side by side
raked     ``((tiler_m, block_m), (tiler_n, block_n))``: blocks interleaved
========  ===================================="""

from __future__ import annotations

from collections.abc import Callable

from kvlab.layout.algebra.checked import need_layouts
from kvlab.layout.algebra.composed import ComposedLayout
from kvlab.layout.algebra.compositions import compose
from kvlab.layout.algebra.int_tuple import IntTuple, check_nesting, flatten
from kvlab.layout.algebra.layout import Layout, unchecked
from kvlab.layout.algebra.operations import AnyLayout, Tiler, as_layout, coalesce, complement, make_layout
from kvlab.layout.algebra.systems import Rule, check_rule
from kvlab.layout.algebra.tree_ops import compact_order


def logical_product(block: AnyLayout, tiler: Tiler) -> AnyLayout:
    """``block`` as mode 0, its copies as mode 1: ``R((i, j)) == A(i) + A'(B(j))``, A' the complement of the block, so
    that no two copies meet. ``tiler`` is a layout, an int, or a tuple of them for the modes.

    >>> logical_product(Layout("(2,2):(2,1)"), Layout("4:1"))
    Layout("((2,2),4):((2,1),4)")
    """
    need_layouts("logical_product", block, composed=True)
    if isinstance(block, ComposedLayout):
        return block.over(logical_product(block.layout, tiler))
    if isinstance(tiler, tuple | list):
        check_nesting(tiler, "tiler")
        parts = [logical_product(mode, part) for mode, part in zip(block.modes, tiler, strict=False)]
        return make_layout(*parts, *block.modes[len(parts) :])
    if tiler is None:
        return block
    copies = as_layout(tiler)
    return make_layout(block, compose(complement(block, block.size * copies.cosize), copies))


def zipped_product(block: AnyLayout, tiler: Tiler) -> AnyLayout:
    """The block as mode 0, all copies as mode 1, also for a tuple of tilers.

    >>> zipped_product(Layout("(2,2):(1,2)"), Layout("(3,2):(1,3)"))
    Layout("((2,2),(3,2)):((1,2),(4,12))")
    """
    return _arranged("zipped_product", block, tiler, lambda inner, outer: (inner, outer))


def tiled_product(block: AnyLayout, tiler: Tiler) -> AnyLayout:
    """The block as mode 0, each mode of the copies as a mode of its own.

    >>> tiled_product(Layout("(2,2):(1,2)"), Layout("(3,2):(1,3)"))
    Layout("((2,2),3,2):((1,2),4,12)")
    """
    return _arranged("tiled_product", block, tiler, lambda inner, outer: (inner, *outer.modes))


def flat_product(block: AnyLayout, tiler: Tiler) -> AnyLayout:
    """The modes of the block, then the modes of the copies.

    >>> flat_product(Layout("(2,2):(1,2)"), Layout("(3,2):(1,3)"))
    Layout("(2,2,3,2):(1,2,4,12)")
    """
    return _arranged("flat_product", block, tiler, lambda inner, outer: (*inner.modes, *outer.modes))


def blocked_product(
    block: AnyLayout, tiler: Layout, *, coalesce_output: bool = False, rule: Rule = "cute"
) -> AnyLayout:
    """Blocks side by side: mode i of the result is (mode i of the block, mode i of the tiler), as a table of tables.

    ``coalesce_output`` coalesces each mode. ``rule="new"`` (MAX's tile_layout): the copies are as far apart as the
    block has elements, whatever its strides are, so that copies of a padded block overlap.

    >>> blocked_product(Layout.row_major(2, 2), Layout.row_major(2, 3))
    Layout("((2,2),(2,3)):((2,12),(1,4))")
    >>> blocked_product(Layout.row_major(2, 4), Layout.col_major(3, 2), coalesce_output=True)
    Layout("(6,(4,2)):(4,(1,24))")
    >>> padded = Layout("(2,2):(3,1)")
    >>> blocked_product(padded, Layout("(1,2):(2,1)")), blocked_product(padded, Layout("(1,2):(2,1)"), rule="new")
    (Layout("((2,1),(2,2)):((3,0),(1,6))"), Layout("((2,1),(2,2)):((3,8),(1,4))"))
    """
    need_layouts("blocked_product", block, composed=True)
    need_layouts("blocked_product", tiler)
    if isinstance(block, ComposedLayout):
        inner = blocked_product(block.layout, tiler, coalesce_output=coalesce_output, rule=rule)
        return block.over(inner)
    if check_rule(rule, "new") == "new":
        return _strided_product(block, tiler, coalesce_output)
    inner, outer = _padded(block, tiler)
    result = make_layout(*(make_layout(x, y) for x, y in zip(inner.modes, outer.modes, strict=True)))
    return coalesce(result, keep_rank=True) if coalesce_output else result


def raked_product(block: AnyLayout, tiler: Layout) -> AnyLayout:
    """Blocks interleaved: mode i of the result is (mode i of the tiler, mode i of the block).

    >>> raked_product(Layout("(2,2):(1,2)"), Layout("(3,2):(2,1)"))
    Layout("((3,2),(2,2)):((8,1),(4,2))")
    """
    need_layouts("raked_product", block, composed=True)
    need_layouts("raked_product", tiler)
    if isinstance(block, ComposedLayout):
        return block.over(raked_product(block.layout, tiler))
    inner, outer = _padded(block, tiler)
    return make_layout(*(make_layout(y, x) for x, y in zip(inner.modes, outer.modes, strict=True)))


def tile_to_shape(
    block: AnyLayout, shape: IntTuple, order: IntTuple | None = None, *, coalesce_output: bool = False
) -> AnyLayout:
    """Copies of ``block`` until mode i has ``shape[i]`` elements; the copies follow each other in ascending ``order``
    of the modes (the first mode first, when absent).

    >>> tile_to_shape(Layout("(2,4):(4,1)"), (4, 8)), tile_to_shape(Layout("(2,4):(4,1)"), (4, 8), (1, 0))
    (Layout("((2,2),(4,2)):((4,8),(1,16))"), Layout("((2,2),(4,2)):((4,16),(1,8))"))
    >>> tile_to_shape(Layout("(2,4):(4,1)"), (4, 6))
    Traceback (most recent call last):
        ...
    ValueError: tile_to_shape of (2,4):(4,1) to (4, 6): 4 does not divide 6, the extent of mode 1
    """
    need_layouts("tile_to_shape", block, composed=True)
    if isinstance(block, ComposedLayout):
        return block.over(tile_to_shape(block.layout, shape, order, coalesce_output=coalesce_output))
    targets = Layout(shape).modes
    extents = [mode.size for mode in block.modes] + [1] * (len(targets) - block.rank)
    if len(targets) < block.rank:
        raise ValueError(f"tile_to_shape of {block} to {shape}: must be one extent for each mode")
    for mode, (extent, target) in enumerate(zip(extents, targets, strict=True)):
        if not extent or target.size % extent:
            raise ValueError(
                f"tile_to_shape of {block} to {shape}: {extent} does not divide {target.size}, "
                f"the extent of mode {mode}"
            )
    copies = tuple(target.size // extent for extent, target in zip(extents, targets, strict=True))
    strides = compact_order(copies, tuple(range(len(copies))) if order is None else order)
    return blocked_product(block, Layout(copies, strides), coalesce_output=coalesce_output)


def _arranged(
    name: str, block: AnyLayout, tiler: Tiler, modes: Callable[[Layout, Layout], tuple[Layout, ...]]
) -> AnyLayout:
    """The product with these modes, of (the block, its copies)."""
    need_layouts(name, block, composed=True)
    if isinstance(block, ComposedLayout):
        return block.over(_arranged(name, block.layout, tiler, modes))
    return make_layout(*modes(*_zipped(block, tiler)))


def _zipped(block: Layout, tiler: Tiler) -> tuple[Layout, Layout]:
    if isinstance(tiler, tuple | list):
        parts = [_zipped(mode, part) for mode, part in zip(block.modes, tiler, strict=False)]
        inner = make_layout(*(x for x, _ in parts), *block.modes[len(parts) :])
        return inner, make_layout(*(y for _, y in parts))
    if tiler is None:
        return block, unchecked(1, 0)
    inner, outer = logical_product(block, tiler).modes
    return inner, outer


def _padded(block: Layout, tiler: Layout) -> tuple[Layout, Layout]:
    """Block and copies with equally many modes."""
    rank = max(block.rank, tiler.rank)
    block, tiler = (make_layout(*a.modes, *[unchecked(1, 0)] * (rank - a.rank)) for a in (block, tiler))
    inner, outer = logical_product(block, tiler).modes
    return inner, outer


def _strided_product(block: Layout, tiler: Layout, coalesce_output: bool) -> Layout:
    if block.rank != tiler.rank or not (block.is_flat and tiler.is_flat):
        raise ValueError(f"blocked_product of {block} and {tiler}, rule 'new': must be flat layouts of one rank")
    modes = []
    leaves = (zip(flatten(a.shape), flatten(a.stride), strict=True) for a in (block, tiler))
    for (s, d), (t, e) in zip(*leaves, strict=True):
        e *= block.size
        if coalesce_output and s * d == e:
            modes.append(unchecked(s * t, d))
        else:
            modes.append(unchecked((s, t), (d, e)))
    return make_layout(*modes)
