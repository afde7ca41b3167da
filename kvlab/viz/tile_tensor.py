"""A view of memory inside the tensor that it was taken from: a tile bright, or the lanes that share it out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .grid import draw_layout
from .holders import lowest
from .picture import Picture

__all__ = ["draw_tile_tensor"]


def draw_tile_tensor(
    tensor: Any, *, inside: Any = None, title: str | None = None, caption: str | None = None
) -> Picture:
    """A :class:`kvlab.layout.TileTensor` as a grid, coloured by bank.

    A view is drawn inside the tensor that it was taken from (or ``inside``), the rest dimmed, its vectors outlined. A
    view of many lanes shows which lane T holds each element, and as which of its registers r. Of several programs the
    first is drawn. Raises ValueError for ``inside`` in another memory.

    >>> from kvlab.layout import Layout, TileTensor
    >>> tensor = TileTensor.stack_allocation(Layout.row_major(8, 16), "fp32")
    >>> draw_tile_tensor(tensor.tile((4, 8), (1, 1))).title
    '(4,8):(16,1) at element 72 of (8,16):(16,1): 32 of 128 elements'
    >>> draw_tile_tensor(tensor.vectorize(1, 4).distribute(Layout.row_major(4, 4), np.arange(16))).title
    '16 lanes share (8,16):(16,1): 8 elements each, in vectors of 4'
    """
    parent = inside if inside is not None else tensor.parent
    size = tensor.dtype.itemsize
    if parent is None:
        first = int(np.ravel(tensor.offset)[0]) * size + tensor.memory.base
        return draw_layout(tensor.layout, element_bytes=size, base=first, title=title, caption=caption)
    if parent.memory is not tensor.memory:
        raise ValueError(f"{tensor!r} does not lie inside {parent!r}: their memories differ")
    start = int(np.ravel(parent.offset)[0])
    grid = _cells(parent) + start
    lanes = _lanes(tensor)
    scalars = _scalars(tensor)
    index = lanes[:, None] + scalars.ravel()  # [lanes, scalars of a lane]
    place, found = _find(grid, index)
    each = index.shape[1]
    number = lowest((grid.size,), (place[found],), np.flatnonzero(found)).reshape(grid.shape)
    held = number >= 0
    owner, register = np.where(held, number // each, -1), np.where(held, number % each, -1)
    group = np.where(held, number // tensor.element_size, -1)
    layout = grid - start
    base = start * size + tensor.memory.base
    vectors = group if tensor.element_size > 1 else None
    kept = None if (owner >= 0).all() else owner >= 0
    if len(lanes) > 1:
        return draw_layout(
            layout, element_bytes=size, base=base, owner=owner, register=register, group=vectors, inside=kept,
            title=title or _shared_out(tensor, parent), caption=caption or _caption(True),
        )  # fmt: skip
    return draw_layout(
        layout, element_bytes=size, base=base, inside=kept, group=vectors,
        title=title or _tile(tensor, parent, owner, int(lanes[0])), caption=caption or _caption(False),
    )  # fmt: skip


def _cells(tensor: Any) -> npt.NDArray[np.int64]:
    """[rows, columns] offsets of the elements, later modes side by side."""
    offsets = np.asarray(tensor.layout.offsets())
    return offsets.reshape(1, -1) if offsets.ndim < 2 else offsets.reshape(offsets.shape[0], -1, order="F")


def _lanes(tensor: Any) -> npt.NDArray[np.int64]:
    """The offsets of the lanes of the first program: the last axis of the offset."""
    offset = np.asarray(tensor.offset)
    if offset.ndim == 0 or (offset.ndim == 1 and tensor.memory.programs is not None):
        return offset.reshape(-1)[:1]
    return np.asarray(offset.reshape(-1, offset.shape[-1])[0])


def _scalars(tensor: Any) -> npt.NDArray[np.int64]:
    """[elements, scalars] in the order of a load, relative to the lane's first."""
    inner = (
        np.arange(tensor.element_size) if tensor.element_layout is None else np.ravel(tensor.element_layout.offsets())
    )
    return np.asarray(np.ravel(tensor.layout.offsets())[:, None] + inner, np.int64)


def _find(
    grid: npt.NDArray[np.int64], index: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """For each scalar the number of the cell that holds it, and whether there is one."""
    order = np.argsort(grid, axis=None, kind="stable")
    ordered = grid.ravel()[order]
    at = np.searchsorted(ordered, index).clip(max=grid.size - 1)
    return order[at], ordered[at] == index


def _shared_out(tensor: Any, parent: Any) -> str:
    vector = f", in vectors of {tensor.element_size}" if tensor.element_size > 1 else ""
    each = tensor.layout.size * tensor.element_size
    return f"{len(_lanes(tensor))} lanes share {parent.layout}: {each} elements each{vector}"


def _tile(tensor: Any, parent: Any, owner: npt.NDArray[np.int64], offset: int) -> str:
    vector = f", in vectors of {tensor.element_size}" if tensor.element_size > 1 else ""
    held = f"{(owner >= 0).sum()} of {owner.size} elements"
    return f"{tensor.layout} at element {offset} of {parent.layout}: {held}{vector}"


def _caption(lanes: bool) -> str:
    if lanes:
        return "Each element of the whole with the lane T that holds it, and its register r in the order of a load."
    return "The view inside the whole, each element labelled with its offset; colour = bank, dimmed = outside the view."
