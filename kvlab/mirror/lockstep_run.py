"""Run a kernel and its emulator in lockstep: every output at the end of every step, compared."""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvlab.common.checks import is_integer, require, shown
from kvlab.mirror.comparison import Tolerance, apart
from kvlab.mirror.lockstep_result import Lockstep, Row
from kvlab.mirror.report import MirrorError, compare
from kvlab.mirror.source import TwinSide
from kvlab.mirror.trace import Record, StaleSource, TracePlan, check_fresh, members, tracing
from kvlab.mirror.trace_triton import Key, Recorded, to_numpy
from kvlab.mirror.twin import Operation, Twin, split_address

Compared = tuple[tuple[str, TwinSide, TwinSide], ...]
Tolerances = float | dict[str, tuple[float, str]] | None


def lockstep(
    op: str | Operation, case: dict[str, Any], *, twin: str | None = None, programs: int | Sequence[int] | None = None,
    tolerance: Tolerances = None, emulator: dict[str, Any] | None = None,
) -> Lockstep:
    """Run both sides of an operation on ``case`` and compare every listed output at the end of every step.

    ``case`` holds the keyword arguments of the operation's two launch functions; each side gets its own copy, the
    kernel's with torch tensors, the emulator's with NumPy arrays. The kernel is interpreted, in a process of its own,
    and traced line by line. ``emulator`` has arguments for the emulator's launch function alone, as
    ``{"arch": "gfx950"}``. ``twin`` picks one twin by name (by default all but those of several
    functions), ``programs`` the program indices pid0 + grid0*(pid1 + grid1*pid2) to compare (all by default). A program
    that has finished a ragged loop is not compared in the iterations that others still run. What the two launch
    functions return is compared as well.

    Emulator values are arrays with a leading program axis ``[P, ...]`` (or ``[1, ...]`` where all programs have the
    same), or objects whose ``.tile()`` gives such an array; a scalar of the kernel is ``[P]``. The members of a tuple
    are compared one by one, as ``q[1]``. Shape and dtype must be equal. Tolerance: by dtype
    (:class:`kvlab.mirror.comparison.Tolerance`), replaced for single outputs by the operation's
    ``LOCKSTEP_TOLERANCE`` and by ``tolerance``, which is ``{output: (value, reason)}`` or one number for all floats;
    values are relative to the largest magnitude of the program's tensor, and an output may be named with its step,
    ``"accumulate.o"``.

    Raises :class:`kvlab.mirror.MirrorError` if the twins do not mirror each other statically, ``ValueError`` for an
    unknown twin or program, and whatever either side raises."""
    _check_tolerance(tolerance)
    operation = Operation.load(op)
    chosen = operation.pick(twin)
    if twin is None:
        chosen = tuple(one for one in chosen if not one.specialised)
    if operation.launch is None:
        raise ValueError("this operation has no LAUNCH = ('kernel:launch', 'emulator:launch'); lockstep runs both")
    wanted = _program_list(programs)
    report = compare(Operation(chosen, operation.launch, operation.package))
    if not report.ok:
        raise MirrorError(report)
    kernels = [TracePlan.of(name, side) for name, side, _ in report.twins]
    emulators = [TracePlan.of(name, side) for name, _, side in report.twins]
    kernel_launch, emulator_launch = (":".join(split_address(a, operation.package)) for a in operation.launch)
    recorded = _run_kernel(kernel_launch, kernels, copy.deepcopy(case), wanted)
    _check_programs(recorded, wanted)
    tolerances = operation.tolerance | (tolerance if isinstance(tolerance, dict) else {})
    comparer = _Comparer(recorded, kernels, tolerances, None if isinstance(tolerance, dict) else tolerance)
    returned, ran = _run_emulator(
        emulator_launch, operation, chosen, report.twins, emulators, case | (emulator or {}), comparer
    )
    comparer.finish(all_programs=wanted is None)
    comparer.compare_returned(recorded.returned, returned)
    lines_run = {name: both for (name, _, _), *both in zip(report.twins, recorded.ran, ran, strict=True)}
    return Lockstep(report.twins, comparer.sorted_rows(), comparer.grids, report.lines, lines_run)


def lockstep_pair(
    twins: Twin | Sequence[Twin], launch: tuple[str, str], case: dict[str, Any], *,
    programs: int | Sequence[int] | None = None, tolerance: Tolerances = None, emulator: dict[str, Any] | None = None,
) -> Lockstep:
    """Runs :func:`lockstep` for any importable Triton kernel and NumPy twin, without an operation's folder.

    With ``my/kernels.py`` and ``my/twins.py`` importable, both with the same markers::

        lockstep_pair(
            Twin("scale", kernel="my.kernels:scale", emulator="my.twins:scale"),
            launch=("my.kernels:launch", "my.twins:launch"),
            case={"x": np.ones((4, 64), np.float32), "factor": 2.0},
        )

    ``my.kernels.launch(*, x, factor)`` gets torch tensors and launches the kernel, ``my.twins.launch(*, x, factor)``
    gets NumPy arrays and calls the emulator; both return the same (an array, a tuple or dict of arrays, or None)."""
    listed = (twins,) if isinstance(twins, Twin) else tuple(twins)
    return lockstep(Operation(listed, launch), case, programs=programs, tolerance=tolerance, emulator=emulator)


def _program_list(programs: int | Sequence[int] | None) -> list[int] | None:
    if programs is None:
        return None
    given = list(programs) if isinstance(programs, Iterable) else [programs]
    if not given or not all(is_integer(one) and one >= 0 for one in given):
        raise ValueError(f"programs={programs!r}: give program indices >= 0, or None for all")
    return sorted({int(one) for one in given})


def _check_tolerance(tolerance: Any) -> None:
    """ValueError for a tolerance that is none: what compares with nothing would pass."""
    pairs = list(tolerance.values()) if isinstance(tolerance, dict) else [] if tolerance is None else [(tolerance, "")]
    for pair in pairs:
        whole = isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], str)
        number = pair[0] if whole else None
        fits = isinstance(number, int | float | np.number) and number is not True and number >= 0
        require(fits, f"tolerance is {shown(tolerance)}", "a number of at least 0, or {output: (number, reason)}")


def _check_programs(recorded: Recorded, wanted: list[int] | None) -> None:
    sizes = [int(np.prod(grid)) for grid in recorded.grids.values()]
    if not sizes:
        raise ValueError("the launch function launched none of the twins' kernels")
    if wanted is not None and wanted[-1] >= max(sizes):
        raise ValueError(f"programs={wanted}: {wanted[-1]} must be in a grid; they have {sizes} programs")


def _run_kernel(launch: str, plans: list[TracePlan], case: dict[str, Any], programs: list[int] | None) -> Recorded:
    from kvlab.triton_support import child, versions

    versions.require()
    call = ("kvlab.mirror.trace_triton:trace", launch, plans, case, programs)
    try:
        recorded: Recorded = child.run(*call)
    except StaleSource:
        child.close()  # the next child imports the file as it is now
        recorded = child.run(*call)
    return recorded


def _run_emulator(
    launch: str, operation: Operation, twins: Sequence[Twin], compared: Compared, plans: list[TracePlan],
    case: dict[str, Any], comparer: _Comparer,
) -> tuple[Any, list[set[int]]]:
    """What the emulator's launch returns, and the lines of each twin that were run."""
    module, name = split_address(launch)
    function = getattr(importlib.import_module(module), name)
    for twin, plan in zip(twins, plans, strict=True):
        module, name = operation.emulator(twin)
        check_fresh(plan, getattr(importlib.import_module(module), name))
    arguments = to_numpy(copy.deepcopy(case))
    try:
        with tracing(plans, comparer.begin) as ran:
            return to_numpy(function(**arguments)), ran
    except Exception as error:
        before = Lockstep(compared, comparer.sorted_rows(), comparer.grids).first_difference
        if before is not None:
            error.add_note(f"lockstep, before the emulator raised this: {before}")
        raise


class _Comparer:
    """Takes the emulator's values as its steps end and compares them with the recorded ones of the kernel."""

    def __init__(
        self, recorded: Recorded, plans: list[TracePlan], named: dict[str, tuple[float, str]], general: float | None
    ):
        self.recorded = recorded
        self.plans = plans
        self.named = named
        self.general = general
        self.calls: Counter[int] = Counter()
        self.met: set[Key] = set()
        self.extra: list[Key] = []
        self.rows: list[Row] = []
        self.grids = {(plans[twin].twin, number): grid for (twin, number), grid in recorded.grids.items()}

    def sorted_rows(self) -> list[Row]:
        return sorted(self.rows, key=lambda row: row.order)

    def begin(self, twin: int) -> Record:
        number = self.calls[twin]
        self.calls[twin] += 1

        def record(step: int, iteration: tuple[int, ...], variables: dict[str, Any]) -> None:
            for output in self.plans[twin].outputs[step]:
                for name, value in members(output, variables) or [(output, None)]:
                    key = (twin, number, step, iteration, name)
                    if key not in self.recorded.values:
                        self.extra.append(key)
                        continue
                    self.met.add(key)
                    self.rows.append(self.compare(key, value))

        return record

    def compare(self, key: Key, value: Any) -> Row:
        programs, kernel = self.recorded.values[key]
        twin, number, *_ = key
        grid = self.recorded.grids[twin, number]
        if isinstance(kernel, str):
            return self.row(key, programs, f"kernel: {kernel}")
        if value is None:
            return self.row(key, programs, "emulator: not bound at the end of the step")
        if not isinstance(value, np.ndarray) and hasattr(value, "tile"):
            value = value.tile()
        return self.measure(key, programs, kernel, np.asarray(value), int(np.prod(grid)))

    def measure(self, key: Key, programs: np.ndarray, kernel: np.ndarray, value: np.ndarray, size: int) -> Row:
        if value.ndim == 0 or value.shape[0] not in (1, size) or value.shape[1:] != kernel.shape[1:]:
            expected = f"[{', '.join(map(str, (size, *kernel.shape[1:])))}]"
            text = (
                f"shape: emulator {list(value.shape)}, kernel {list(kernel.shape[1:])} in {size} programs = {expected}"
            )
            return self.row(key, programs, text)
        if value.dtype != kernel.dtype:
            return self.row(key, programs, f"dtype: emulator {value.dtype.name}, kernel {kernel.dtype.name}")
        mine = value[programs] if value.shape[0] == size else np.broadcast_to(value, kernel.shape)
        tolerance = self.tolerance(self.plans[key[0]].steps[key[2]][0], key[-1], kernel.dtype)
        distance = apart(kernel, mine, tolerance)
        first = int(np.argmin(distance.ok))
        shown = None if distance.ok.all() else (kernel[first].copy(), mine[first].copy(), distance.worst[first])
        return self.row(key, programs, None, kernel, tolerance, distance, shown)

    def tolerance(self, step: str, output: str, dtype: np.dtype[Any]) -> Tolerance:
        default = Tolerance.default(dtype)
        whole = output.partition("[")[0]
        named = self.named.get(f"{step}.{whole}", self.named.get(whole))
        if named is not None:
            return Tolerance(named[0], 0, named[1])
        if self.general is not None and default.relative:
            return Tolerance(self.general, 0, "given by the caller")
        return default

    def row(self, key: Key, programs: np.ndarray, problem: str | None, *measured: Any) -> Row:
        twin, number, step, iteration, output = key
        return Row(
            self.order(key), self.plans[twin].twin, number, step, iteration, output, programs, problem, *measured
        )

    def order(self, key: Key) -> tuple[Any, ...]:
        """Position of a step's end in time: launches, then the way through the nested loops."""
        twin, number, step, iteration, output = key
        plan = self.plans[twin]
        way: list[int] = []
        for loop, count in zip(plan.loops_of[step], iteration, strict=True):
            way += [plan.loops[loop][0][0], count]
        whole, _, member = output.partition("[")
        place = plan.outputs[step].index(whole), int(member.rstrip("]") or 0)
        return (twin, number, (*way, plan.steps[step][1]), place)

    def finish(self, all_programs: bool) -> None:
        """Steps that only one side has run."""
        for key in self.recorded.values.keys() - self.met:
            self.rows.append(self.row(key, self.recorded.values[key][0], "the emulator did not run this step"))
        if all_programs:
            for key in self.extra:
                if key[:2] in self.recorded.grids:
                    self.rows.append(self.row(key, np.arange(0), "no program of the kernel ran this step"))

    def compare_returned(self, kernel: Any, emulator: Any) -> None:
        """Compares the results of the launch functions: their own row, after all steps."""
        left, right = _named(kernel), _named(emulator)
        for place, name in enumerate({**left, **right}):
            order = (len(self.plans), 0, (0,), (place, 0))
            row = (order, "launch", 0, 0, (), name, np.arange(1))
            a, b = left.get(name), right.get(name)
            if a is None or b is None:
                if a is not b:
                    self.rows.append(Row(*row, f"only the {'kernel' if b is None else 'emulator'} returned it"))
            elif a.shape != b.shape or a.dtype != b.dtype:
                text = f"emulator {b.dtype.name} {list(b.shape)}, kernel {a.dtype.name} {list(a.shape)}"
                self.rows.append(Row(*row, text))
            else:
                tolerance = self.tolerance("returned", name, a.dtype)
                distance = apart(a[None], b[None], tolerance)
                shown = None if distance.ok.all() else (a, b, distance.worst[0])
                self.rows.append(Row(*row, None, a[None], tolerance, distance, shown))


def _named(returned: Any) -> dict[str, np.ndarray]:
    """The arrays of a result by name: a dict's keys, a tuple's indices."""
    if returned is None:
        return {}
    if isinstance(returned, dict):
        items: dict[Any, Any] = returned
    elif isinstance(returned, list | tuple):
        items = {f"result {i}": value for i, value in enumerate(returned)}
    else:
        items = {"result": returned}
    return {str(name): np.asarray(value) for name, value in items.items() if value is not None}
