"""Result of a lockstep run: every comparison, the first difference, a table, and the two sources side by side."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from kvlab.common.text_table import text_columns
from kvlab.memory import as_dtype
from kvlab.mirror.comparison import Apart, Tolerance
from kvlab.mirror.lines import Lines
from kvlab.mirror.source import TwinSide


@dataclass
class Row:
    """One output at the end of one step in one iteration, over the programs that ran it.

    ``twin`` is ``"launch"`` for what the launch functions returned. ``problem`` says why nothing could be measured.
    ``shown`` has both tiles of the first program that differs and the index of the element that decides."""

    order: tuple[Any, ...]
    twin: str
    launch: int
    step: int
    iteration: tuple[int, ...]
    output: str
    programs: np.ndarray
    problem: str | None = None
    kernel: Any = field(default=None, repr=False)
    tolerance: Tolerance | None = None
    distance: Apart | None = field(default=None, repr=False)
    shown: tuple[np.ndarray, np.ndarray, tuple[int, ...]] | None = field(default=None, repr=False)
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def __post_init__(self) -> None:
        if self.kernel is not None:
            self.shape, self.dtype = self.kernel.shape[1:], self.kernel.dtype.name
            self.kernel = None

    @property
    def ok(self) -> bool:
        return self.problem is None and self.distance is not None and bool(self.distance.ok.all())


@dataclass(frozen=True)
class Difference:
    """First difference of the two sides; ``kernel`` and ``emulator`` are the tiles of that program, if comparable."""

    twin: str
    step: str
    iteration: tuple[int, ...]
    program: int | None
    output: str
    error: str
    kernel: np.ndarray | None = field(default=None, repr=False)
    emulator: np.ndarray | None = field(default=None, repr=False)
    pid: tuple[int, int, int] | None = None
    index: int = 0  # of the step in its twin
    launch: int = 0  # of the twin: how many launches, or calls of a helper, came before

    def __str__(self) -> str:
        iteration = f", iteration {', '.join(map(str, self.iteration))}" if self.iteration else ""
        pid = f" = {self.pid}" if self.pid else ""
        program = f", program {self.program}{pid}" if self.program is not None and self.twin != "launch" else ""
        call = f", call {self.launch}" if self.launch else ""
        return f"{self.twin}.{self.step}{call}{iteration}{program}: {self.output} {self.error}"


@dataclass(frozen=True)
class Maximum:
    """The largest distances of one output of one step, over its iterations and programs, as :class:`Apart` has them."""

    twin: str
    step: str
    output: str
    shape: tuple[int, ...]
    dtype: str
    compared: int
    absolute: float
    relative: float
    ulps: float
    ok: bool
    problem: str | None
    tolerance: Tolerance | None
    index: int  # of the step in its twin

    @property
    def number(self) -> str:
        """The error in a few characters, ``exact`` where there is none; ULPs are those of the tensor's maximum."""
        if self.problem:
            return self.problem
        if not self.absolute:
            return "exact"
        if np.isinf(self.ulps):
            return f"{self.absolute:.1e}"
        places = "<0.1" if self.ulps < 0.1 else f"{self.ulps:.1f}" if self.ulps < 9.95 else f"{self.ulps:.0f}"
        return f"{self.absolute:.1e} {places if self.ulps < 9999.5 else '>9999'} ulp"

    @property
    def rule(self) -> str:
        """Meaning of agreement for this output, ``""`` where it means equality."""
        tolerance = self.tolerance
        if tolerance is None or not tolerance.relative:
            return ""
        usual = tolerance == Tolerance.default(as_dtype(self.dtype))
        near = f" or at most {tolerance.ulps} {'value' if tolerance.ulps == 1 else 'values'} of {self.dtype} apart"
        what = self.dtype if usual else f"{self.step}.{self.output}"
        allowed = f"{tolerance.relative:.2g} of the tensor's largest magnitude{near if tolerance.ulps else ''}"
        return f"{what}: {allowed} ({tolerance.reason})"

    @property
    def shade(self) -> float:
        """Strength of the number's tint, 0 to 1: by the distance in ULPs, faint where it is allowed."""
        if self.problem:
            return 1.0
        steps = min(self.ulps, 1e9)
        return min(1.0, 0.1 + 0.1 * float(np.log10(steps))) * (0.25 if self.ok else 1.0) if steps >= 1 else 0.0


class Lockstep:
    """The result of :func:`kvlab.mirror.lockstep`; it draws itself in a notebook, :meth:`to_html` makes a page."""

    def __init__(
        self, twins: tuple[tuple[str, TwinSide, TwinSide], ...], rows: list[Row],
        grids: dict[tuple[str, int], tuple[int, int, int]], lines: tuple[Lines, ...] = (),
        lines_run: dict[str, list[set[int]]] | None = None,
    ):
        self.twins = twins
        self.lines = {one.name: one for one in lines}  # a twin's statements beside each other
        self.lines_run = lines_run or {}  # the lines of a twin that some program has run, of kernel and emulator
        self.rows = rows
        self.grids = grids  # (twin, number of its launch) -> programs in x, y, z
        self._steps = {name: [step.marker.name for step in kernel.steps] for name, kernel, _ in twins}

    @property
    def ok(self) -> bool:
        """Tells whether no output of any step differs."""
        return self.first_difference is None

    @property
    def ran(self) -> tuple[tuple[str, TwinSide, TwinSide], ...]:
        """The twins that were launched."""
        return tuple(twin for twin in self.twins if any(row.twin == twin[0] for row in self.rows))

    def step_name(self, row: Row) -> str:
        return "returned" if row.twin == "launch" else self._steps[row.twin][row.step]

    @cached_property
    def first_difference(self) -> Difference | None:
        """The first output, in the order of execution, that differs by more than its tolerance."""
        row = next((row for row in self.rows if not row.ok), None)
        if row is None:
            return None
        name = self.step_name(row)
        if row.problem is not None or row.distance is None or row.tolerance is None or row.shown is None:
            program = int(row.programs[0]) if row.programs.size else None
            pid = self._pid(row, program)
            error = row.problem or ""
            return Difference(row.twin, name, row.iteration, program, row.output, error, pid=pid, index=row.step,
                              launch=row.launch)
        at = int(np.argmin(row.distance.ok))
        kernel, emulator, place = row.shown
        distance, allowed = row.distance, row.tolerance.relative
        bad = int((~distance.ok).sum())
        error = (
            f"off by {distance.absolute[at]:.3g} (relative {distance.relative[at]:.3g}, allowed {allowed:.3g}): "
            f"at {list(place)} kernel {kernel[place]:.6g}, emulator {emulator[place]:.6g}"
            f"; {bad} of {len(distance.ok)} programs differ"
        )
        program = int(row.programs[at])
        pid = self._pid(row, program)
        return Difference(
            row.twin, name, row.iteration, program, row.output, error, kernel, emulator, pid, row.step, row.launch
        )

    def _pid(self, row: Row, program: int | None) -> tuple[int, int, int] | None:
        """A program's three coordinates in its grid."""
        grid = self.grids.get((row.twin, row.launch))
        if grid is None or program is None:
            return None
        return program % grid[0], program // grid[0] % grid[1], program // (grid[0] * grid[1])

    @cached_property
    def maxima(self) -> tuple[Maximum, ...]:
        """One entry for every output of every step, in the order of the source."""
        groups: dict[tuple[str, int, str], list[Row]] = {}
        for row in sorted(self.rows, key=lambda row: (row.order[0], row.step, row.order[-1])):
            groups.setdefault((row.twin, row.step, row.output), []).append(row)
        return tuple(self._maximum(rows) for rows in groups.values())

    def _maximum(self, rows: list[Row]) -> Maximum:
        measured = [row for row in rows if row.distance is not None]
        shape, dtype, tolerance = next(((r.shape, r.dtype, r.tolerance) for r in measured), ((), "", None))
        return Maximum(
            rows[0].twin, self.step_name(rows[0]), rows[0].output, shape, dtype,
            sum(len(row.programs) for row in measured),
            _largest(row.distance.absolute for row in measured if row.distance),
            _largest(row.distance.relative for row in measured if row.distance),
            _largest(row.distance.ulps for row in measured if row.distance), all(row.ok for row in rows),
            next((row.problem for row in rows if row.problem), None), tolerance, rows[0].step,
        )

    def at(self, twin: str, step: int) -> tuple[tuple[Maximum, ...], Difference | None]:
        """View of one step of a twin: its outputs' maxima, and the first difference if it is here."""
        first = self.first_difference
        here = first if first is not None and (first.twin, first.index) == (twin, step) else None
        return tuple(m for m in self.maxima if (m.twin, m.index) == (twin, step)), here

    @property
    def finding(self) -> str:
        """One sentence."""
        if self.first_difference is not None:
            return f"first difference: {self.first_difference}"
        sizes = [(name, int(np.prod(grid))) for (name, _), grid in self.grids.items()]
        programs = ", ".join(f"{name} {size} program{'s' * (size != 1)}" for name, size in sizes)
        worst = max(self.maxima, key=lambda m: m.relative, default=None)
        largest = (
            f"; largest relative error {worst.relative:.2g} ({worst.twin}.{worst.step}: {worst.output})"
            if worst
            else ""
        )
        return f"no step differs ({programs}){largest}"

    @property
    def sentences(self) -> list[str]:
        """The finding, sentence by sentence."""
        return [self.finding]

    @property
    def alarms(self) -> dict[tuple[str, int], str]:
        """Faults of accesses to memory at lines of the kernel's text: (path, line) -> kind."""
        return {}

    @property
    def legend(self) -> str:
        """Legend of the numbers between the sources, and the meaning of agreement."""
        rules = "; ".join(dict.fromkeys(m.rule for m in self.maxima if m.rule))
        ran = [name for name, _, _ in self.ran]
        idle = ", ".join(name for name, _, _ in self.twins if name not in ran)
        return (f"Not launched in this call: {idle}. " if idle else "") + (
            "Between the sources: each output listed by a step, its largest absolute error over all programs and "
            "iterations, and that error in ulp, units in the last place of the tensor's largest magnitude (without a "
            "mask's constants)." + (f" Agreement means: {rules}; all else exact." if rules else "")
        )

    def table(self) -> str:
        """A text table: one line for every output of every step; ULPs are those of the tensor's largest magnitude."""
        lines = [("twin", "step", "output", "shape", "dtype", "compared", "max abs", "max rel", "ULPs", "")]
        for m in self.maxima:
            shape = "x".join(map(str, m.shape)) or "scalar"
            mark = "ok" if m.ok else "DIFFERS" + (f": {m.problem}" if m.problem else "")
            numbers = (f"{m.absolute:.3g}", f"{m.relative:.3g}", "-" if np.isinf(m.ulps) else f"{m.ulps:.3g}")
            lines.append((m.twin, m.step, m.output, shape, m.dtype, str(m.compared), *numbers, mark))
        text = text_columns(lines)
        return "\n".join([text[0], "-" * max(map(len, text)), *text[1:], self.finding])

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Lockstep: {self.finding}>"

    def to_html(self, full: bool = False) -> str:
        """The two sources side by side with the errors between them; ``full`` makes the fragment a page of its own."""
        view = importlib.import_module("kvlab.viz.lockstep_page")
        html: str = view.page(self) if full else view.fragment(self)
        return html

    def _repr_html_(self) -> str:
        return self.to_html()


def _largest(arrays: Iterable[np.ndarray]) -> float:
    return max((float(array.max(initial=0)) for array in arrays), default=0.0)
