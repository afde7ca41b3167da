"""A strided copy, the kernel's twin in NumPy, all programs at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.tiles.masked import load, store
from kvlab.staging import program_ids

from .config import CopyConfig, ProgramDigits, TileAxis

Array = np.ndarray[Any, Any]


def steps(i: Array, axis: TileAxis) -> tuple[Array, Array, Array]:
    """Steps of the items of an axis from the first of the tile, at the source and at the target, and the last digit."""
    first = (i % axis.size0).astype(np.int64)
    second = (i // axis.size0 % axis.size1).astype(np.int64)
    last = (i // (axis.size0 * axis.size1)).astype(np.int64)
    at = first * axis.source0 + second * axis.source1 + last * axis.source2
    to = first * axis.target0 + second * axis.target1 + last * axis.target2
    return at, to, last


def move(
    source_array: Array, target_array: Array, source_table_array: Array | None, target_table_array: Array | None,
    outer: ProgramDigits, config: CopyConfig,
) -> None:
    """Move the items of one tile: columns X, rows Y, and the digits that the program stands for."""
    #: parts -> x_first, y_first, rest    which share of the last column and row digit the tile has
    X, Y = config.X, config.Y  #- launch
    (program,) = program_ids(config.grid())
    x_first = (program % outer.x_parts).astype(np.int64) * X.part
    y_first = (program // outer.x_parts % outer.y_parts).astype(np.int64) * Y.part
    rest = program // (outer.x_parts * outer.y_parts)
    #: outer -> at, to, rest    the steps of the digits that the program stands for
    i0, rest = rest % outer.size0, rest // outer.size0
    i1, rest = rest % outer.size1, rest // outer.size1
    i2, rest = rest % outer.size2, rest // outer.size2
    i3, rest = rest % outer.size3, rest // outer.size3
    i4, rest = rest % outer.size4, rest // outer.size4
    at = outer.source + i0.astype(np.int64) * outer.source0 + i1.astype(np.int64) * outer.source1
    at = at + i2.astype(np.int64) * outer.source2 + i3.astype(np.int64) * outer.source3
    at = at + i4.astype(np.int64) * outer.source4
    to = outer.target + i0.astype(np.int64) * outer.target0 + i1.astype(np.int64) * outer.target1
    to = to + i2.astype(np.int64) * outer.target2 + i3.astype(np.int64) * outer.target3
    to = to + i4.astype(np.int64) * outer.target4
    #: table -> at, to    what no digits say
    if source_table_array is not None and target_table_array is not None:
        at = at + source_table_array[rest]
        to = to + target_table_array[rest]
    at = at * config.align + x_first * X.source2 + y_first * Y.source2
    to = to * config.align + x_first * X.target2 + y_first * Y.target2
    #: tile -> x_at, x_to, x_last, y_at, y_to, y_last    steps within it
    x_at, x_to, x_last = steps(np.arange(X.BLOCK, dtype=np.int32)[None], X)
    y_at, y_to, y_last = steps(np.arange(Y.BLOCK, dtype=np.int32)[None], Y)
    #: load -> inside, items    all of the tile
    x_inside = (x_last < X.part) & (x_first[:, None] + x_last < X.edge)
    y_inside = (y_last < Y.part) & (y_first[:, None] + y_last < Y.edge)
    inside = y_inside[:, :, None] & x_inside[:, None, :]
    items = load(source_array, (at[:, None, None] + y_at[:, :, None] + x_at[:, None, :],), mask=inside, other=0)
    #: store    where both ends are one buffer, when all of the tile has been read
    store(target_array, (to[:, None, None] + y_to[:, :, None] + x_to[:, None, :],), items, mask=inside)


def launch(source: Array, target: Array, *, config: CopyConfig, table: Array | None = None) -> tuple[Array]:
    """Run the twin on flat arrays of items of ``config.unit`` bytes. The arguments are valid."""
    here, there = (None, None) if table is None else (table[0], table[1])
    move(source, target, here, there, config.outer, config)
    return (target,)
