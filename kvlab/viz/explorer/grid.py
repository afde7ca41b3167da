"""The scene of a grid: a layout and reads over it, a view in its tensor, the registers of lanes over a tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvlab.viz.model.offset_grid import OffsetGrid
from kvlab.viz.pen.picture import Picture

from .access import instruction_shown
from .scene import Knob, Scene

if TYPE_CHECKING:
    from kvlab.layout import TileTensor
    from kvlab.staging import FragmentMap

MOST = 1 << 15
"""Cells that a page can redraw while a slider moves."""
SIZES = (1, 2, 4, 8, 16)
WAYS = ("down the column", "along the row")
Int64 = npt.NDArray[np.int64]


def of_layout(layout: Any, *, element_bytes: int | None = None, arch: str = "sm_90") -> Scene:
    """Loads of one element a lane over a layout (also composed with a swizzle), from any cell down or along."""
    from kvlab.viz.grid import draw_layout

    if element_bytes is None:
        element_bytes = getattr(getattr(layout, "outer", None), "unit_bytes", None)
    sizes = SIZES if element_bytes is None else (element_bytes,)
    return _reads(OffsetGrid(layout), 0, str(layout), sizes, arch, None, lambda: draw_layout(
        layout, element_bytes=sizes[0] if len(sizes) == 1 else 2
    ))


def of_tensor(tensor: TileTensor, *, arch: str = "sm_90") -> Scene:
    """A tensor, a view inside the one it was taken from, or the lanes that share it out."""
    from kvlab.viz.tile_tensor import Inside, draw_tile_tensor

    def still() -> Picture:
        return draw_tile_tensor(tensor)

    size, first = tensor.dtype.itemsize, int(np.ravel(tensor.offset)[0])
    found = None if tensor.parent is None else Inside.of(tensor, tensor.parent)
    if found is None:
        start = first * size + tensor.memory.base
        return _reads(OffsetGrid(tensor.layout), start, str(tensor.layout), (size,), arch, None, still)
    whole, start = found.field, found.start * size + tensor.memory.base
    number = found.number(*_all(whole))
    if len(found.held.lanes) == 1:
        return _reads(whole, start, f"{tensor.layout} in {whole.name}", (size,), arch, number >= 0, still)
    owner = np.where(number < 0, -1, number // found.held.each)
    return _owned(
        f"{whole.name} shared out", "lane", owner, number % found.held.each, len(found.held.lanes),
        _cells(whole), start, size, still,
    )


def of_fragments(fragments: FragmentMap) -> Scene:
    """The registers of the threads over the tile that they hold; of several holders the first."""
    from kvlab.viz.fragment_map import draw_fragment_map
    from kvlab.viz.model.holders import lowest

    threads, shape = len(fragments.row), fragments.shape
    _fits(shape)
    row, column = (places.reshape(threads, -1) for places in (fragments.row, fragments.col))
    held = lowest(shape, (row.ravel(), column.ravel()), np.arange(row.size))
    owner = np.where(held < 0, -1, held // row.shape[1])
    name = f"Tile of {shape[0]} x {shape[1]}"
    return _owned(name, "thread", owner, held % row.shape[1], threads, np.zeros(shape, np.int64), 0, 0,
                  lambda: draw_fragment_map(fragments))


def _fits(shape: tuple[int, int]) -> None:
    if not 0 < shape[0] * shape[1] <= MOST:
        raise ValueError(f"{shape[0]} x {shape[1]} elements: must be 1 to {MOST}; take a tile of them")


def _all(field: OffsetGrid) -> tuple[Int64, Int64]:
    _fits(field.shape)
    return np.arange(field.shape[0]), np.arange(field.shape[1])


def _cells(field: OffsetGrid) -> Int64:
    """Offsets [rows, columns]."""
    return field.at(*_all(field))


def _reads(
    field: OffsetGrid, start: int, name: str, sizes: tuple[int, ...], arch: str, kept: Any, still: Callable[[], Picture]
) -> Scene:
    """The scene of loads; ``start`` is the byte of offset 0, ``kept`` [rows, columns] tells what is not dimmed."""
    from kvlab.hardware import get_arch, get_instruction

    machine, offset = get_arch(arch), _cells(field)
    verb = "ld.shared.b" if machine.vendor == "nvidia" else "ds_read_b"
    reads: dict[str, Any] = {}
    for size in sizes:
        if size not in SIZES or (size < 4 and machine.vendor != "nvidia"):
            continue
        op = get_instruction(f"{verb}{8 * size}", machine)
        reads[str(size)] = {"name": op.name, **instruction_shown(op, machine)}
    if not reads:
        raise ValueError(f"element_bytes is {sizes[0]}: must be one that a lane of {arch} loads, of {SIZES}")
    if offset.min() < 0 or offset.max() * max(sizes) >= 1 << 31:
        raise ValueError(f"{name} has offsets {offset.min()} to {offset.max()}: must be from 0 on, below 2**31 bytes")
    options = tuple(int(size) for size in reads)
    knobs = {
        "element_bytes": Knob("bytes of an element", 2 if 2 in options else options[0], options=options),
        "direction": Knob("lanes go", WAYS[0], options=WAYS),
        "row": Knob("row", 0, high=field.shape[0] - 1),
        "column": Knob("column", 0, high=field.shape[1] - 1),
    }
    data = {
        "name": name, "rows": field.shape[0], "columns": field.shape[1], "offset": offset.ravel().tolist(),
        "start": start, "owner": None, "kept": None if kept is None else np.ravel(kept).astype(int).tolist(),
        "reads": reads, "banks": machine.banks,
    }
    return Scene("grid", data, knobs, still)


def _owned(
    name: str, who: str, owner: Int64, element: Int64, lanes: int, offset: Int64, start: int, size: int,
    still: Callable[[], Picture],
) -> Scene:
    """The scene of elements with owners; ``size`` is that of an element in memory, 0 in registers."""
    rows, columns = owner.shape
    knobs = {
        "element_bytes": Knob("bytes of an element", size or 1, options=(size or 1,)),
        "lane": Knob(who, 0, high=lanes - 1),
        "row": Knob("row", 0, high=rows - 1),
        "column": Knob("column", 0, high=columns - 1),
    }
    data = {
        "name": name, "who": who, "rows": rows, "columns": columns, "offset": offset.ravel().tolist(), "start": start,
        "owner": owner.ravel().tolist(), "element": element.ravel().tolist(), "bytes": bool(size), "reads": {},
        "banks": 32,
    }
    return Scene("grid", data, knobs, still)
