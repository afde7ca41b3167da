"""Layouts divided into tiles: every element of the layout in exactly one tile.

``tiler`` is a layout (its offsets are the coordinates of one tile), an int n (n consecutive ones), or a tuple of tilers
for the modes, where None leaves a mode whole and modes past the end are not divided. The four divides differ in how
they arrange what :func:`logical_divide` finds:

=============  ====================================
logical        ``((tile_m, rest_m), (tile_n, rest_n), ...)``
zipped         ``((tile_m, tile_n), (rest_m, rest_n, ...))``
tiled          ``((tile_m, tile_n), rest_m, rest_n, ...)``
flat           ``(tile_m, tile_n, rest_m, rest_n, ...)``
=============  ===================================="""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvlab.common.checks import shown
from kvlab.layout.algebra.checked import need_layouts
from kvlab.layout.algebra.compositions import compose
from kvlab.layout.algebra.int_tuple import check_nesting, flatten, int_tuple
from kvlab.layout.algebra.layout import Layout, unchecked
from kvlab.layout.algebra.operations import Tileable, Tiler, as_layout, complement, is_exact, make_layout, unwrapped
from kvlab.layout.algebra.systems import Rule, check_rule


def logical_divide(layout: Tileable, tiler: Tiler, *, rule: Rule = "cute") -> Tileable:
    """The layout seen as (tile, which tile): ``compose(A, (T, complement(T, size(A))))``, by mode for a tuple.

    ``R((i, j)) == A(T(i) + T'(j))``, where T' is the complement of the tiler. A tiler that does not divide the size
    gives a last tile past the end. ``rule="legacy"`` (MAX): modes past the end of the tuple are dropped, a tiler of one
    mode counts as that mode. ValueError for a tiler that repeats coordinates or leaves some out of every tile.

    >>> logical_divide(Layout("(4,2,3):(2,1,8)"), Layout("4:2"))
    Layout("((2,2),(2,3)):((4,1),(2,8))")
    >>> logical_divide(Layout("(2,6):(6,1)"), (1, 2))
    Layout("((1,2),(2,3)):((0,6),(1,2))")
    """
    need_layouts("logical_divide", layout, coordinates=True)
    check_rule(rule, "legacy")
    if not isinstance(layout, Layout):
        return layout.over(logical_divide(layout.layout, tiler, rule=rule))
    if isinstance(tiler, tuple | list):
        _fits(layout, tiler)
        if not tiler:
            return layout
        parts = [logical_divide(mode, part, rule=rule) for mode, part in zip(layout.modes, tiler, strict=False)]
        return make_layout(*parts, *(layout.modes[len(parts) :] if rule == "cute" else ()))
    if tiler is None:
        return layout
    tile = unwrapped(as_layout(tiler)) if rule == "legacy" else as_layout(tiler)
    if rule == "cute" and not is_exact(tile):
        raise ValueError(f"divide of {layout} by {tile}: its gaps do not divide, some coordinates are in no tile")
    result: Layout = compose(layout, make_layout(tile, complement(tile, layout.size)))
    return result


def zipped_divide(layout: Tileable, tiler: Tiler, *, rule: Rule = "cute") -> Tileable:
    """The tile as mode 0, the number of the tile as mode 1.

    ``rule="legacy"`` (MAX): only the shapes of layouts in the tiler count, their strides are ignored. ``rule="new"``
    (MAX's tile_layout): no algebra; flat modes, shape // tile rounded down, a mode's stride times its tile.

    >>> zipped_divide(Layout("(2,6):(6,1)"), (1, 2))
    Layout("((1,2),(2,3)):((0,1),(6,2))")
    >>> zipped_divide(Layout("(2,6):(6,1)"), (1, 2)).offsets(leaves=True)[0, :, 1, 2]  # tile (1, 2) of the 2 x 3 grid
    array([10, 11])
    >>> zipped_divide(Layout("16:1"), Layout("4:2")), zipped_divide(Layout("16:1"), Layout("4:2"), rule="legacy")
    (Layout("(4,(2,2)):(2,(1,8))"), Layout("(4,4):(1,4)"))
    """
    need_layouts("zipped_divide", layout, coordinates=True)
    check_rule(rule, "legacy", "new")
    if not isinstance(layout, Layout):
        return layout.over(zipped_divide(layout.layout, tiler, rule=rule))
    if rule == "new":
        return _strided_divide(layout, tiler)
    if rule == "legacy" and isinstance(tiler, Layout) and layout.rank > 1 and tiler.rank > 1:
        tiler = tiler.modes
    tile, rest = _zipped(layout, tiler, rule)
    return make_layout(tile, rest)


def tiled_divide(layout: Tileable, tiler: Tiler) -> Tileable:
    """The tile as mode 0, each mode of the grid of tiles as a mode of its own.

    >>> tiled_divide(Layout("(4,8,3):(1,4,32)"), (2, 4))
    Layout("((2,4),2,2,3):((1,4),2,16,32)")
    """
    return _arranged("tiled_divide", layout, tiler, lambda tile, rest: (tile, *rest.modes))


def flat_divide(layout: Tileable, tiler: Tiler) -> Tileable:
    """The modes of the tile, then the modes of the grid of tiles.

    >>> flat_divide(Layout("(4,8,3):(1,4,32)"), (2, 4))
    Layout("(2,4,2,2,3):(1,4,2,16,32)")
    """
    return _arranged("flat_divide", layout, tiler, lambda tile, rest: (*tile.modes, *rest.modes))


def local_tile(layout: Tileable, tiler: Tiler, coord: Any) -> Any:
    """Tile number ``coord`` of the grid (ints and ``:`` as in a slice; a single int counts colexicographically): exact
    also under a swizzle, because the tile's offset stays inside it.

    >>> from kvlab.layout import ComposedLayout, Swizzle
    >>> smem = ComposedLayout(Layout.row_major(8, 128), Swizzle(3, 3, 4, "bf16"))
    >>> local_tile(smem, (4, 64), (1, 1))
    ComposedLayout("Sw<3,3,4> (bfloat16) o 576 o (4,64):(128,1)")
    """
    need_layouts("local_tile", layout, coordinates=True)
    divided = zipped_divide(layout, tiler)
    return divided[:, tuple(coord) if isinstance(coord, list) else coord]


def _arranged(
    name: str, layout: Tileable, tiler: Tiler, modes: Callable[[Layout, Layout], tuple[Layout, ...]]
) -> Tileable:
    """The layout divided, with these modes of (the tile, which tile)."""
    need_layouts(name, layout, coordinates=True)
    if not isinstance(layout, Layout):
        return layout.over(_arranged(name, layout.layout, tiler, modes))
    return make_layout(*modes(*_zipped(layout, tiler, "cute")))


def _zipped(layout: Layout, tiler: Tiler, rule: Rule) -> tuple[Layout, Layout]:
    if isinstance(tiler, tuple | list):
        _fits(layout, tiler)
        parts = [_zipped(mode, part, rule) for mode, part in zip(layout.modes, tiler, strict=False)]
        rests = [rest for _, rest in parts]
        return make_layout(*(tile for tile, _ in parts)), make_layout(*rests, *layout.modes[len(parts) :])
    if tiler is None:
        return layout, unchecked(1, 0)
    if rule == "legacy" and isinstance(tiler, Layout):
        tiler = Layout(unwrapped(tiler).shape)
    tile, rest = logical_divide(layout, tiler, rule=rule).modes
    return tile, rest


def _strided_divide(layout: Layout, tiler: Tiler) -> Layout:
    shape = int_tuple(tiler, "tile")
    sizes = flatten(shape)
    whole = (shape,) if isinstance(shape, int) else shape
    if not layout.is_flat or whole != sizes or len(sizes) != layout.rank or min(sizes) < 1:
        raise ValueError(f"zipped_divide of {layout} by {tiler!r}, rule 'new': must be one int for each flat mode")
    extents, strides = tuple(mode.size for mode in layout.modes), flatten(layout.stride)
    outer = tuple(extent // n for extent, n in zip(extents, sizes, strict=True))
    steps = tuple(d * n for d, n in zip(strides, sizes, strict=True))
    return Layout((sizes, outer), (strides, steps))


def _fits(layout: Layout, tiler: tuple[Tiler, ...] | list[Tiler]) -> None:
    check_nesting(tiler, "tiler")
    if len(tiler) > layout.rank:
        raise ValueError(f"divide of {layout} by {shown(tuple(tiler))}: {len(tiler)} tilers for {layout.rank} modes")
