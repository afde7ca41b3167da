"""Global memory as an interpreted kernel reaches it, line by line: addresses, sectors, and what no GPU would forgive.

:class:`MemoryWatch` stands between Triton's interpreter and memory. Each array argument lies in a piece of memory of
its own with room on both sides, so that an address outside belongs to the argument that it ran off from; the element is
then not touched.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlab.common.checks import shown
from kvlab.common.text_table import text_columns
from kvlab.hardware import SECTOR_BYTES

_GUARD = 4096


@dataclass(frozen=True)
class MemoryFault:
    """One mistake of a line: its kind, how many elements in how many programs, and the first of them.

    kind     ``out of bounds``, ``unwritten read`` (of an argument whose values nobody wrote), ``overwritten`` (another
             value where another program stored one: which stays is chance)
    element  the first one's, counted from the argument's start; outside it is below 0 or past the end
    size     elements of the argument

    >>> print(MemoryFault("out of bounds", 12, "load", "x_ptr", 14, 1, 3, 64, 64))
    out of bounds: line 12: load of 14 elements outside x_ptr in 1 program, first element 64 of 64 in program 3
    """

    kind: str
    line: int
    operation: str
    argument: str
    elements: int
    programs: int
    program: int
    element: int
    size: int

    def __str__(self) -> str:
        many = f"{self.elements} element{'s' * (self.elements != 1)}"
        what = {
            "out of bounds": f"{many} outside {self.argument}",
            "unwritten read": f"{many} of {self.argument} that no store has written",
            "overwritten": f"{many} of {self.argument}, where another program stored other values,",
        }[self.kind]
        programs = f"{self.programs} program{'s' * (self.programs != 1)}"
        return (f"{self.kind}: line {self.line}: {self.operation} of {what} in {programs}, first element "
                f"{self.element} of {self.size} in program {self.program}")


@dataclass
class LineAccess:
    """Accesses of one line to one argument, all programs and trips together.

    operation  ``load``, ``store`` or ``atomic``;  ``times`` that it ran;  ``elements`` that its masks let through
    nbytes     of an element;  ``low``, ``high``: bytes from the argument's start, the first touched and past the last
    sectors    of 32 bytes that tiles touch, each counted once a tile;  ``ideal``: the fewest for their bytes

    >>> one = LineAccess(7, "x.py", "load", "x_ptr", 4, 1, 128, 0, 2036, 64, 16)
    >>> one.part
    0.25
    """

    line: int
    path: str
    operation: str
    argument: str
    nbytes: int
    times: int = 0
    elements: int = 0
    low: int = 0
    high: int = 0
    sectors: int = 0
    ideal: int = 0

    @property
    def code(self) -> str:
        """The line of the source."""
        return linecache.getline(self.path, self.line).strip()

    @property
    def part(self) -> float:
        """Part of the moved bytes that were asked for, 1 at best."""
        return self.ideal / self.sectors if self.sectors else 1.0


@dataclass
class MemoryRecord:
    """Record of a launch: ``lines`` by line, operation and argument; ``faults`` in the order in which they happened."""

    lines: list[LineAccess] = field(default_factory=list)
    faults: list[MemoryFault] = field(default_factory=list)

    def table(self) -> str:
        """A line of text for each line of the kernel that reaches memory."""
        head = ("line", "operation", "argument", "times", "elements", "bytes", "sectors", "ideal", "code")
        rows = [head, *((str(one.line), one.operation, one.argument, str(one.times), str(one.elements),
                         f"{one.low}-{one.high}", str(one.sectors), str(one.ideal), one.code) for one in self.lines)]
        return "\n".join(text_columns(rows))


@dataclass
class _Region:
    """An argument's piece of memory: bytes ``[start, end)`` of the process; who wrote each element last, if anyone."""

    name: str
    start: int
    end: int
    nbytes: int
    writer: np.ndarray  # program, -1: nobody in this launch
    written: np.ndarray | None  # None: the argument came with values

    @property
    def size(self) -> int:
        return (self.end - self.start) // self.nbytes


class MemoryWatch:
    """Watcher of an interpreted launch: places its arrays, sees its accesses, keeps a :class:`MemoryRecord`.

    unwritten   arrays of the case, by name, whose values nobody has written before the launch

    ValueError where ``unwritten`` names no array.
    """

    def __init__(self, case: Mapping[str, Any], unwritten: Collection[str] = ()) -> None:
        arrays = {name: value for name, value in case.items() if isinstance(value, np.ndarray)}
        stray = [name for name in unwritten if name not in arrays]
        if stray:
            raise ValueError(f"unwritten is {shown(list(unwritten))}: must be names of arrays among {list(arrays)}")
        self.regions: list[_Region] = []
        self.case = dict(case)
        guards = {name: -(-max(_GUARD, array.nbytes) // 256) * 256 for name, array in arrays.items()}
        total = sum(2 * guard + -(-arrays[name].nbytes // 256) * 256 for name, guard in guards.items()) + 256
        self._arena = np.zeros(total, np.uint8)
        base = self._arena.ctypes.data
        place, ends = -base % 256, []
        for name, array in arrays.items():
            first = place + guards[name]
            view = self._arena[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
            view[...] = array
            self.case[name] = view
            written = np.zeros(array.size, bool) if name in unwritten else None
            where = base + first
            self.regions.append(_Region(name, where, where + array.nbytes, array.itemsize,
                                        np.full(array.size, -1, np.int32), written))
            place = first + -(-array.nbytes // 256) * 256 + guards[name]
            ends.append(base + place)
        self._ends = np.array(ends, np.uint64)
        self._lines: dict[tuple[str, int, str, str, int], LineAccess] = {}
        self._faults: dict[tuple[str, str, int, str, str], list[Any]] = {}
        self._library: tuple[str, ...] = ()
        self._program: Any = int
        self._locks: set[tuple[int, int]] = set()  # program, address

    @property
    def record(self) -> MemoryRecord:
        """All that was seen until now."""
        faults = [MemoryFault(kind, line, operation, region.name, elements, len(programs), program, element,
                              region.size)
                  for (kind, _, line, operation, _), (region, elements, programs, program, element)
                  in self._faults.items()]
        lines = sorted(self._lines.values(), key=lambda one: (one.path, one.line, one.operation, one.argument))
        return MemoryRecord(lines, faults)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """All loads, stores and atomics of the interpreter are seen."""
        import triton
        from triton.runtime import interpreter

        module, builder = interpreter._interpreter, interpreter.interpreter_builder

        def program() -> int:
            (x, y, z), (nx, ny, _) = builder.grid_idx, builder.grid_dim
            return int(x + nx * (y + ny * z))

        here = os.path.dirname(os.path.abspath(__file__))
        support = os.path.join(os.path.dirname(here), "triton_support")
        self._library = tuple(f"{os.path.dirname(os.path.abspath(f))}{os.sep}" for f in (triton.__file__,)) + (
            f"{support}{os.sep}", os.path.join(here, "memory_accesses.py"))
        self._program = program
        interpreter._interpreter = _WatchedModule(module, self)
        try:
            yield
        finally:
            interpreter._interpreter = module

    def access(
        self, operation: str, pointers: np.ndarray, mask: np.ndarray, nbytes: int, value: np.ndarray | None = None
    ) -> np.ndarray:
        """The mask without elements that lie in no argument; the access is kept."""
        path, line = self._line()
        address, kept = np.asarray(pointers, np.uint64), np.array(mask, bool)
        if not kept.any() or not self.regions:
            return kept
        for region, mine in self._owners(address, kept):
            where = address[mine].astype(np.int64) - region.start
            outside = (where < 0) | (where + nbytes > region.end - region.start)
            element = where // region.nbytes
            if outside.any():
                self._fault("out of bounds", path, line, operation, region, element[outside])
                kept[mine] = ~outside
                where, element = where[~outside], element[~outside]
            self._count(path, line, operation, region, nbytes, where)
            if region.written is not None and operation != "store":
                unknown = ~region.written[element]
                if unknown.any():
                    self._fault("unwritten read", path, line, operation, region, element[unknown])
            if operation == "load":
                continue
            if value is not None and operation == "store" and nbytes == region.nbytes:
                self._overwrites(path, line, region, element, np.broadcast_to(value, mask.shape)[mine][~outside])
            for step in range(max(1, nbytes // region.nbytes)):
                region.writer[element + step] = -1 if operation == "atomic" else self._program()
                if region.written is not None:
                    region.written[element + step] = True
        return kept

    def lock(self, pointers: np.ndarray, held: bool) -> None:
        """A program has compared and swapped these elements, or has written them again: in between it may be the only
        one that reaches what a lock guards, and what it stores there replaces nothing unseen."""
        program = self._program()
        for address in np.ravel(pointers).tolist() if held or self._locks else ():
            (self._locks.add if held else self._locks.discard)((program, int(address)))

    def _owners(self, address: np.ndarray, kept: np.ndarray) -> list[tuple[_Region, np.ndarray]]:
        """Arguments that some of the addresses belong to, each with the mask of those."""
        some = address[kept]
        first, last = np.minimum(self._ends.searchsorted([some.min(), some.max()], "right"), len(self.regions) - 1)
        if first == last:
            return [(self.regions[first], kept.copy())]
        owner = np.minimum(self._ends.searchsorted(address, "right"), len(self.regions) - 1)
        return [(self.regions[number], kept & (owner == number)) for number in np.unique(owner[kept])]

    def _overwrites(self, path: str, line: int, region: _Region, element: np.ndarray, value: np.ndarray) -> None:
        if any(program == self._program() for program, _ in self._locks):
            return
        others = (region.writer[element] >= 0) & (region.writer[element] != self._program())
        if others.any():
            start = region.start - self._arena.ctypes.data
            unit = f"u{region.nbytes}"
            there = self._arena[start : start + region.size * region.nbytes].view(unit)[element[others]]
            mine = np.ascontiguousarray(value[others])
            differs = there != (mine.view(unit) if mine.dtype.itemsize == region.nbytes else there)
            if differs.any():
                self._fault("overwritten", path, line, "store", region, element[others][differs])

    def _count(
        self, path: str, line: int, operation: str, region: _Region, nbytes: int, inside: np.ndarray
    ) -> None:
        key = (path, line, operation, region.name, nbytes)
        one = self._lines.setdefault(key, LineAccess(line, path, operation, region.name, nbytes))
        one.times += 1
        if not inside.size:
            return
        ordered = np.sort(inside)
        low, high = int(ordered[0]), int(ordered[-1]) + nbytes
        one.low, one.high = (low, high) if not one.elements else (min(one.low, low), max(one.high, high))
        one.elements += inside.size
        distinct = 1 + int(np.count_nonzero(np.diff(ordered)))
        one.sectors += 1 + int(np.count_nonzero(np.diff((region.start + ordered) // SECTOR_BYTES)))
        one.ideal += -(-distinct * nbytes // SECTOR_BYTES)

    def _fault(
        self, kind: str, path: str, line: int, operation: str, region: _Region, element: np.ndarray
    ) -> None:
        program = self._program()
        entry = self._faults.setdefault((kind, path, line, operation, region.name),
                                        [region, 0, set(), program, int(element[0])])
        entry[1] += len(element)
        entry[2].add(program)

    def _line(self) -> tuple[str, int]:
        """File and line of the kernel, or of its helper, that reaches memory now."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(self._library):
            frame = frame.f_back
        return frame.f_code.co_filename, frame.f_lineno


class _WatchedModule:
    """The interpreter's own module, each access shown to a :class:`MemoryWatch` first."""

    def __init__(self, module: Any, watch: MemoryWatch) -> None:
        self._module, self._watch = module, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        kept = self._watch.access("load", pointers, mask, np.dtype(dtype).itemsize)
        return self._module.load(pointers, kept, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        kept = self._watch.access("store", pointers, mask, value.dtype.itemsize, value)
        self._watch.lock(pointers, held=False)
        return self._module.store(pointers, value, kept)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        kept = self._watch.access("atomic", pointers, mask, value.dtype.itemsize)
        self._watch.lock(pointers, held=False)
        return self._module.atomic_rmw(operation, pointers, value, kept, order)

    def atomic_cas(self, pointers: Any, expected: Any, value: Any, order: Any) -> Any:
        kept = self._watch.access("atomic", pointers, np.ones(np.shape(pointers), bool), value.dtype.itemsize)
        if not kept.all():
            raise ValueError("an atomic_cas lies outside every argument: see the record of memory")
        self._watch.lock(pointers, held=True)
        return self._module.atomic_cas(pointers, expected, value, order)
