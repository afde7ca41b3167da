"""Tiles of a strided copy: which digits the columns and the rows of a tile have, and which a program stands for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvlab.formats.copies import Digit, StridedCopy
from kvlab.mirror.twin import Twin

TWINS = (
    Twin(
        "move", kernel="kernel:move", emulator="emulator:move",
        synonyms={"source_array": "source_ptr", "target_array": "target_ptr",
                  "source_table_array is not None and target_table_array is not None": "source_table_ptr is not None"},
    ),
)
LAUNCH = ("kernel:launch", "emulator:launch")

UNITS = (8, 4, 2, 1)
"""Bytes of the items that are moved."""
LINE, SHORT = 256, 64
"""Bytes that a row of a tile has, where so many lie side by side at the target; runs below the second are short: what
lies side by side at the source has to be in one tile, too."""
TILE, HELD, MOST_HELD = 8 << 10, 16 << 10, 64 << 10
"""Bytes of a tile; of one of a conversion in place, and of the largest of these."""
MOST_DIGITS, PLACES = 3, 5
"""Digits of an axis of a tile, and of programs."""
WHOLE = 1 << 62


class TileAxis(NamedTuple):
    """Columns or rows of a tile: index ``i`` has the digits ``i % size0``, ``i // size0 % size1`` and the rest. A tile
    has ``part`` of that, which ends at ``edge``: WHOLE where all tiles are full, so that one compiled kernel serves
    pools of many sizes. Steps are in items; ``BLOCK`` is a power of two.
    """

    size0: int
    size1: int
    edge: int
    source0: int
    source1: int
    source2: int
    target0: int
    target1: int
    target2: int
    part: int
    BLOCK: int


class ProgramDigits(NamedTuple):
    """Digits that programs stand for: the first program's place in items, then steps in ``align`` items."""

    source: int
    target: int
    x_parts: int
    y_parts: int
    size0: int
    size1: int
    size2: int
    size3: int
    size4: int
    source0: int
    source1: int
    source2: int
    source3: int
    source4: int
    target0: int
    target1: int
    target2: int
    target3: int
    target4: int


@dataclass(frozen=True, eq=False)
class CopyConfig:
    """Tiles of one copy of items of ``unit`` bytes.

    X, Y      columns and rows of a tile
    outer     what programs stand for
    align     what all steps between programs are multiples of, in items: a power of two
    table     further steps in items, int64 ``[2, n]``, or None
    in_place  tells whether both ends are one buffer: all of a tile is read before any of it is written
    """

    unit: int
    X: TileAxis
    Y: TileAxis
    outer: ProgramDigits
    align: int
    table: Any
    num_warps: int
    in_place: bool = False

    @property
    def rows(self) -> int:
        """Entries of the table; 1 without one."""
        return 1 if self.table is None else int(self.table.shape[1])

    def grid(self) -> tuple[int]:
        """Programs."""
        sizes = self.outer[2:9]
        return (math.prod(sizes) * self.rows,)


def unit_of(copy: StridedCopy, item: int = 8, addresses: Sequence[int] = ()) -> int:
    """Bytes of the largest item of which all runs and steps are multiples. An index of ``item`` bits is a byte.

    addresses : of the buffers, or whatever else must be a multiple.

    >>> unit_of(StridedCopy.of((0, 32), [(np.arange(4) * 64, np.arange(4) * 128)], 64))
    4
    """
    numbers = [copy.source, copy.target, copy.bits, *np.unique(copy.table).tolist()]
    numbers += [step for digit in copy.digits for step in digit[1:]]
    common = math.gcd(*(number // item for number in numbers), *addresses)
    return next(unit for unit in UNITS if common % unit == 0)


def choose_tile(
    copy: StridedCopy, unit: int, item: int = 8, *, in_place: bool = False, tile: int = TILE, num_warps: int = 4,
) -> CopyConfig | None:
    """Tiles for a copy: columns are what lies side by side at the target, rows what does so at the source, then more.

    None where a tile of a conversion in place would be larger than 64 KiB, or the copy leaves its bytes.

    >>> copy = StridedCopy.of((0, 0), [(np.arange(16) * 1024, np.arange(16) * 8192)], 1024)  # rows of 128 bytes
    >>> chosen = choose_tile(copy, 8)
    >>> chosen.X.BLOCK, chosen.Y.BLOCK, chosen.grid()
    (16, 16, (1,))
    """
    scale = unit * item
    run = Digit(copy.bits // scale, 1, 1)
    digits = [Digit(size, here // scale, there // scale) for size, here, there in copy.digits]
    table = None if copy.table.shape[1] == 1 else copy.table // scale
    whole = [digit for digit in digits if digit.source != digit.target] if in_place else []
    if in_place:
        if table is not None or copy.source != copy.target or not _same_places(whole):
            return None
        run_items = min(run.size, max(1, 16 // unit))
        if math.prod(digit.size for digit in whole) * run_items * unit > MOST_HELD:
            return None
        tile = max(HELD, math.prod(digit.size for digit in whole) * run_items * unit)
        return _held(copy, unit, scale, run, whole, digits, tile, num_warps)
    items, short = tile // unit, run.size * unit < SHORT
    beside = [digit for digit in digits if short and abs(digit.source) == run.size][:1]
    columns = _chain([run], [digit for digit in digits if digit not in beside], LINE // unit, "target")
    room = items if run.size * unit >= LINE else min(items, max(LINE // unit, run.size))
    x, x_parts = _axis(columns, room)
    rest = [digit for digit in digits if digit not in columns]
    rows = _chain([], rest, max(1, items // x.BLOCK), "source", start=run.size) if short else []
    rows = _filled(rows, rest, max(1, items // x.BLOCK))
    y, y_parts = _axis(rows, max(1, items // x.BLOCK))
    rest = [digit for digit in rest if digit not in rows]
    outer, align, table = _outer(copy, scale, (x_parts, y_parts), rest, table)
    return CopyConfig(unit, x, y, outer, align, table, num_warps)


def _same_places(digits: Sequence[Digit]) -> bool:
    """Tells whether all steps of the digits together reach the same places at both ends."""
    if math.prod(digit.size for digit in digits) > MOST_HELD:
        return False
    source, target = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for size, here, there in digits:
        source, target = (np.add.outer(x, np.arange(size) * y).ravel() for x, y in ((source, here), (target, there)))
    return bool(np.array_equal(np.sort(source), np.sort(target)))


def _chain(
    found: list[Digit], digits: Sequence[Digit], enough: int, end: str, start: int = 1
) -> list[Digit]:
    """Digits that follow each other at one end, until there are ``enough`` items."""
    found, left = [*found], list(digits)
    step = start * math.prod(digit.size for digit in found)
    while math.prod(digit.size for digit in found) < enough and len(found) < MOST_DIGITS:
        following = [digit for digit in left if abs(getattr(digit, end)) == step]
        if not following:
            break
        found.append(following[0])
        left.remove(following[0])
        step *= following[0].size
    return found


def _filled(found: list[Digit], digits: Sequence[Digit], enough: int) -> list[Digit]:
    """More digits, the finest at the target first, until there are ``enough`` items."""
    found = [*found]
    for digit in digits:
        if digit not in found and math.prod(d.size for d in found) < enough and len(found) < MOST_DIGITS:
            found.append(digit)
    return found


def _axis(digits: Sequence[Digit], room: int, whole: bool = False) -> tuple[TileAxis, int]:
    """Columns or rows of at most ``room`` items, and the tiles that it takes: the last digit is shared out."""
    fine = math.prod(digit.size for digit in digits[:-1])
    last = digits[-1].size if digits else 1
    most = last if whole else max(1, room // fine)
    part = last if last <= most else _part(last, most)
    kept = [*([Digit(1, 0, 0)] * (MOST_DIGITS - len(digits))), *digits]
    block = 1 << (fine * part - 1).bit_length()
    numbers = [number for column in zip(*kept, strict=True) for number in column]
    axis = TileAxis._make([*numbers, part, block])
    return (axis._replace(edge=WHOLE) if last % part == 0 else axis), -(-last // part)


def _part(size: int, most: int) -> int:
    """Share of a digit that a tile has: the largest power of two that leaves few places of tiles empty.

    >>> _part(2304, 1024), _part(4096, 1024), _part(24, 16), _part(999, 64)
    (256, 1024, 8, 64)
    """
    largest = 1 << (most.bit_length() - 1)
    parts = [part for part in (largest >> n for n in range(4)) if part]
    empty = {part: -(-size // part) * part - size for part in parts}
    return next((part for part in parts if 16 * empty[part] <= size), min(parts, key=lambda part: (empty[part], -part)))


def _held(
    copy: StridedCopy, unit: int, scale: int, run: Digit, whole: Sequence[Digit], digits: Sequence[Digit], tile: int,
    num_warps: int,
) -> CopyConfig | None:
    """Tiles of a conversion in place, which hold all that changes places."""
    columns = _chain([run], whole, LINE // unit, "target")
    if len(columns) > 1:
        x, parts = _axis(columns, 0, whole=True)
    else:
        count = math.prod(digit.size for digit in whole)
        x, parts = _axis(columns, max(1, tile // unit // (1 << (count - 1).bit_length())))
    rows = [digit for digit in whole if digit not in columns]
    if len(rows) > MOST_DIGITS:
        return None
    y, _ = _axis(rows, 0, whole=True)
    if x.BLOCK * y.BLOCK * unit > MOST_HELD:
        return None
    rest = [digit for digit in digits if digit not in columns and digit not in rows]
    outer, align, _ = _outer(copy, scale, (parts, 1), rest, None)
    return CopyConfig(unit, x, y, outer, align, None, max(num_warps, x.BLOCK * y.BLOCK * unit >> 12), in_place=True)


def _outer(
    copy: StridedCopy, scale: int, parts: tuple[int, int], rest: Sequence[Digit], table: Any
) -> tuple[ProgramDigits, int, Any]:
    """What programs stand for, what all its steps are multiples of, and the table, which takes digits beyond five."""
    outer = sorted(rest, key=lambda digit: abs(digit.target))
    for digit in outer[PLACES:]:
        steps = np.arange(digit.size) * np.array(digit[1:])[:, None]
        table = steps if table is None else np.add(table[:, None], steps[..., None]).reshape(2, -1)
    outer = outer[:PLACES]
    base = copy.source // scale, copy.target // scale
    numbers = [*base, *(step for digit in outer for step in digit[1:]), 16]
    numbers += [] if table is None else np.unique(table).tolist()
    align = math.gcd(*numbers)
    outer += [Digit(1, 0, 0)] * (PLACES - len(outer))
    programs = ProgramDigits(
        base[0] // align, base[1] // align, *parts, *(d.size for d in outer),
        *(d.source // align for d in outer), *(d.target // align for d in outer),
    )
    return programs, align, None if table is None else np.ascontiguousarray(table // align)

