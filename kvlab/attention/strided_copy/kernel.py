"""A strided copy as a Triton kernel: one program moves one tile, through registers. Conversions of formats with it."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvlab.common.checks import require
from kvlab.formats import Conversion
from kvlab.formats.copies import StridedCopy
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import MOST_HELD, CopyConfig, choose_tile, unit_of

Launches = tuple[tuple[CopyConfig, torch.Tensor | None, dict[Any, Any]], ...]
_PREPARED: weakref.WeakKeyDictionary[Conversion, dict[Any, Launches]] = weakref.WeakKeyDictionary()
ITEMS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""dtypes of items of so many bytes."""


class CopyConstants(NamedTuple):
    """Constants that the kernel is compiled for besides its axes; see ``CopyConfig``."""

    align: int
    in_place: bool


@triton.jit
def steps(i, axis: tl.constexpr):
    """Steps of the items of an axis from the first of the tile, at the source and at the target, and the last digit."""
    first = (i % axis.size0).to(tl.int64)
    second = (i // axis.size0 % axis.size1).to(tl.int64)
    last = (i // (axis.size0 * axis.size1)).to(tl.int64)
    at = first * axis.source0 + second * axis.source1 + last * axis.source2
    to = first * axis.target0 + second * axis.target1 + last * axis.target2
    return at, to, last


@triton.jit
def move(
    source_ptr, target_ptr, source_table_ptr, target_table_ptr, outer, X: tl.constexpr, Y: tl.constexpr,
    C: tl.constexpr,
):
    """Move the items of one tile: columns X, rows Y, and the digits that the program stands for."""
    #: parts -> x_first, y_first, rest    which share of the last column and row digit the tile has
    program = tl.program_id(0)
    x_first = (program % outer.x_parts).to(tl.int64) * X.part
    y_first = (program // outer.x_parts % outer.y_parts).to(tl.int64) * Y.part
    rest = program // (outer.x_parts * outer.y_parts)
    #: outer -> at, to, rest    the steps of the digits that the program stands for
    i0, rest = rest % outer.size0, rest // outer.size0
    i1, rest = rest % outer.size1, rest // outer.size1
    i2, rest = rest % outer.size2, rest // outer.size2
    i3, rest = rest % outer.size3, rest // outer.size3
    i4, rest = rest % outer.size4, rest // outer.size4
    at = outer.source + i0.to(tl.int64) * outer.source0 + i1.to(tl.int64) * outer.source1
    at = at + i2.to(tl.int64) * outer.source2 + i3.to(tl.int64) * outer.source3
    at = at + i4.to(tl.int64) * outer.source4
    to = outer.target + i0.to(tl.int64) * outer.target0 + i1.to(tl.int64) * outer.target1
    to = to + i2.to(tl.int64) * outer.target2 + i3.to(tl.int64) * outer.target3
    to = to + i4.to(tl.int64) * outer.target4
    #: table -> at, to    what no digits say
    if source_table_ptr is not None:
        at = at + tl.load(source_table_ptr + rest)
        to = to + tl.load(target_table_ptr + rest)
    at = at * C.align + x_first * X.source2 + y_first * Y.source2
    to = to * C.align + x_first * X.target2 + y_first * Y.target2
    #: tile -> x_at, x_to, x_last, y_at, y_to, y_last    steps within it
    x_at, x_to, x_last = steps(tl.arange(0, X.BLOCK), X)
    y_at, y_to, y_last = steps(tl.arange(0, Y.BLOCK), Y)
    #: load -> inside, items    all of the tile
    x_inside = (x_last < X.part) & (x_first + x_last < X.edge)
    y_inside = (y_last < Y.part) & (y_first + y_last < Y.edge)
    inside = y_inside[:, None] & x_inside[None, :]
    items = tl.load(source_ptr + at + y_at[:, None] + x_at[None, :], mask=inside, other=0)
    #: store    where both ends are one buffer, when all of the tile has been read
    if C.in_place:
        tl.debug_barrier()  #- wait
    tl.store(target_ptr + to + y_to[:, None] + x_to[None, :], items, mask=inside)


def launch(
    source: torch.Tensor, target: torch.Tensor, *, config: CopyConfig, table: torch.Tensor | None = None,
    again: Again = None,
) -> tuple[torch.Tensor]:
    """Run the kernel on flat tensors of items of ``config.unit`` bytes, ``table`` the configuration's on their device.

    The arguments are valid; ``again`` as of :mod:`kvlab.triton_support.launching`.
    """
    pointers = source, target, *((None, None) if table is None else table)
    if not relaunched(move, pointers, again):
        first_launch(move, config.grid(), pointers, again)(
            config.outer, X=config.X, Y=config.Y, C=CopyConstants(config.align, config.in_place),
            num_warps=config.num_warps,
        )
    return (target,)


def converted(plan: Conversion, buffer: torch.Tensor, fill: int, out: torch.Tensor | None) -> torch.Tensor:
    """The bytes of the target, uint8 ``[nbytes]``: a new tensor, or ``out``. The sizes are those of the formats."""
    flat, size = buffer.contiguous().reshape(-1).view(torch.uint8), plan.target.nbytes
    if out is None:
        covered = sum(one.times * one.bits for one in plan.strided) == 8 * size
        out = torch.empty(size, dtype=torch.uint8, device=buffer.device)
        out = out if covered else out.fill_(fill)
    if all(one.whole for one in plan.strided):
        _run(plan, flat, out, 8)
    else:
        halves = _halves(out)
        _run(plan, _halves(flat), halves, 4)
        torch.bitwise_or(halves[0::2], halves[1::2] << 4, out=out)
    return out


def convert_in_place(plan: Conversion, buffer: torch.Tensor) -> None:
    """Convert a flat uint8 tensor. ValueError where a program cannot hold what changes places with each other."""
    whole = all(one.whole for one in plan.strided if one.moves)
    require(whole, "buffer has half bytes that change places", "converted by apply")
    _run(plan, buffer, buffer, 8, in_place=True)


def _halves(flat: torch.Tensor) -> torch.Tensor:
    """Half bytes, the low one first: ``[2 * bytes]``."""
    return torch.stack([flat & 15, flat >> 4], 1).reshape(-1)


def _run(plan: Conversion, source: torch.Tensor, target: torch.Tensor, item: int, in_place: bool = False) -> None:
    """Launch the kernel for each copy of a plan, with an index of ``item`` bits in a byte."""
    ends = source, target
    key = source.device, item, in_place, *(x.data_ptr() % 16 for x in ends)
    prepared = _PREPARED.setdefault(plan, {})
    if key not in prepared:
        prepared[key] = _prepared(plan.strided, ends, item, in_place)
    with torch.cuda.device(source.device):
        for config, table, again in prepared[key]:
            launch(*(x.view(ITEMS[config.unit]) for x in ends), config=config, table=table, again=again)


def _prepared(
    copies: tuple[StridedCopy, ...], ends: tuple[torch.Tensor, ...], item: int, in_place: bool
) -> Launches:
    """Configurations of the copies, each with its table on the device, and what is kept of its first launch."""
    numbers = [number for x in ends for number in (x.data_ptr(), x.storage_offset(), x.numel())]
    moving = [one for one in copies if one.moves or not in_place]
    chosen = [choose_tile(one, unit_of(one, item, numbers), item, in_place=in_place) for one in moving]
    found = [config for config in chosen if config is not None]
    require(
        len(found) == len(chosen), f"buffer has more than {MOST_HELD} bytes that change places with each other",
        "converted by apply: no program holds them",
    )
    tables = (None if one.table is None else torch.from_numpy(one.table).to(ends[0].device) for one in found)
    return tuple((config, table, {}) for config, table in zip(found, tables, strict=True))
