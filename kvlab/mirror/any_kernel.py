"""Lockstep of anyone's kernel with a NumPy twin, without markers: values compared where both bind the same names."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from kvlab.common.checks import is_integer, require, shown
from kvlab.mirror.causes import cause_of, place_of
from kvlab.mirror.lockstep_result import Lockstep
from kvlab.mirror.lockstep_run import Tolerances, _check_tolerance, _Comparer, _program_list
from kvlab.mirror.memory_accesses import MemoryRecord
from kvlab.mirror.patterns import Pattern, differing, held_by, pattern_of
from kvlab.mirror.proposed import Proposal, called_by_both, propose
from kvlab.mirror.source import TwinSide
from kvlab.mirror.trace import Record, StaleSource, TracePlan, members, tracing
from kvlab.mirror.trace_triton import Key, Recorded, to_numpy

_PID = ("pid", "program", "program_id")


class KernelLockstep(Lockstep):
    """Result of :func:`lockstep_kernel`: a :class:`~kvlab.mirror.Lockstep` with what was found out without markers.

    proposal      steps of both sides; ``proposal.kernel_text`` and ``twin_text`` have the markers to be taken over
    helpers       the same of each helper that both sides call, by name
    skipped       names that could not be compared, each with the reason: pointers, descriptors, helpers of one side
    memory        how the kernel reached its arrays: ``memory.lines``, ``memory.faults``, ``memory.table()``
    target        the GPU whose threads :attr:`finding` names; None: none
    """

    def __init__(
        self, proposal: Proposal, helpers: Mapping[str, Proposal], skipped: Mapping[str, str], memory: MemoryRecord,
        target: str | None, again: tuple[Any, Mapping[str, Any]], near: Callable[[Any], list[Any]], *args: Any,
    ) -> None:
        super().__init__(*args)
        self.proposal, self.helpers, self.skipped, self.memory = proposal, dict(helpers), dict(skipped), memory
        self.target, self._again, self._near = target, again, near

    @property
    def ok(self) -> bool:
        """Tells whether no output of any step differs and no access to memory is at fault."""
        return super().ok and not self.memory.faults

    @functools.cached_property
    def explanation(self) -> Pattern | None:
        """The pattern of the first difference; None where nothing differs or shapes do."""
        first = self.first_difference
        if first is None or first.kernel is None or first.emulator is None:
            return None
        found, sides = pattern_of(first.kernel, first.emulator, *self._near(first)), self._sides(first.twin)
        if found.name != "region" or sides is None:
            return found
        later = bool(first.iteration) and first.iteration[-1] > 0
        agreed = self.helpers.get(first.twin, self.proposal).matched
        said = cause_of(*sides, first.index, first.output.partition("[")[0], later, agreed)
        return found if said is None else Pattern(*said, found.where)

    def _sides(self, twin: str) -> tuple[TwinSide, TwinSide] | None:
        """Kernel and twin of the function that a difference is in; None for what the launch returned."""
        return next(((kernel, other) for name, kernel, other in self.twins if name == twin), None)

    @property
    def finding(self) -> str:
        """A few sentences: what is wrong with the kernel's accesses, the first difference, the kernel's line, what it
        looks like, and with a ``target`` which threads hold it."""
        return "; ".join(self.sentences)

    @property
    def sentences(self) -> list[str]:
        """The finding, one by one."""
        parts = [str(fault) for fault in self.memory.faults]
        if self.first_difference is not None or not parts:
            parts.append(super().finding)
        first = self.first_difference
        sides = None if first is None else self._sides(first.twin)
        if first is not None and sides is not None:
            parts.append(place_of(*sides, first.index, first.output.partition("[")[0]))
        if self.explanation is not None:
            parts.append(str(self.explanation))
            if self.target is not None:
                parts.append(self.lanes(self.target))
        return parts

    @property
    def alarms(self) -> dict[tuple[str, int], str]:
        """Faults of accesses to memory at lines of the kernel's text: (path, line) -> kind."""
        return {(self.proposal.kernel.path, fault.line): fault.kind for fault in self.memory.faults}

    def lanes(self, target: str = "sm_90", **options: Any) -> str:
        """Words for the threads that hold the elements of the first difference in the kernel compiled for ``target``.

        ``options`` are those of :func:`kvlab.xray.xray`. The layout is that of the value's last operation in the TTGIR;
        ``""`` where nothing differs, the reason where the compiler kept no tensor of that name or line.
        """
        from kvlab.xray import xray

        first = self.first_difference
        if first is None or first.kernel is None or first.emulator is None:
            return ""
        sides = self._sides(first.twin)
        if sides is None:
            return ""
        side = sides[0]
        name = first.output.partition("[")[0]
        lines = {n for low, high in side.steps[first.index].ranges for n in range(low, high + 1)}
        layout = xray(*self._again, target, **options).layout_of(first.kernel.shape, name, lines, side.path)
        if layout is None:
            return f"{target} keeps no tensor {name} of {list(first.kernel.shape)} in registers"
        return f"on {target} in {held_by(layout, differing(first.kernel, first.emulator))}"


def lockstep_kernel(
    kernel: Any, twin: Callable[..., Any], args: Mapping[str, Any], grid: Any = (1,), *,
    programs: int | Sequence[int] | None = None, tolerance: Tolerances = None, unwritten: Collection[str] = (),
    target: str | None = None,
) -> KernelLockstep:
    """Run a ``@triton.jit`` kernel, interpreted, and a NumPy function, and compare what both bind by the same names.

    kernel     a function of a file, autotuned (its first configuration) or with heuristics or not
    twin       a NumPy function with parameters of the same names; with one called ``pid`` it is called for each
               program, ``pid`` the program's number, or the tuple of two or three of them as the grid has; without one
               it is called once, and its values have an axis of programs first, unless there is only one
    args       arguments of both by name; each side gets a copy of the arrays, which are compared in the end, too
    grid       as at a launch: one to three numbers, or a function of ``args``
    programs, tolerance   as for :func:`kvlab.mirror.lockstep`
    unwritten  arrays of ``args`` by name whose values nobody has written yet: a load before a store is a fault
    target     a GPU as ``"sm_90"``: the kernel is compiled for it, too, to name the threads of a difference

    A statement corresponds to one of the other side that binds the same names as deep in loops, in the same order.
    Values are taken right after it, the twin's in the kernel's dtype. Of a ``@triton.jit`` helper that the kernel
    calls, the statements are compared in the same way, call by call, where the twin calls a function of that name.
    Each access to memory is checked: what lies outside an array is not touched and is a fault, as is an element where
    programs store different values. ValueError where the sides have no name in common, or either has no source file.
    """
    function, found = _unwrapped(kernel, dict(args))
    wanted = _program_list(programs)
    sizes = tuple(grid(found)) if callable(grid) else tuple(grid) if isinstance(grid, Sequence) else (grid,)
    some = 1 <= len(sizes) <= 3 and all(is_integer(n) and n > 0 for n in sizes)
    require(some, f"grid is {shown(grid if callable(grid) else sizes)}", "one to three integers above 0")
    size = math.prod(sizes)
    most = max(wanted or [0])
    require(most < size, f"programs has {most}", f"below the {size} programs of the grid")
    _check_tolerance(tolerance)
    named_ones = isinstance(unwritten, Collection) and not isinstance(unwritten, str)
    require(named_ones, f"unwritten is {shown(unwritten)}", "names of arrays in a list or tuple")
    if target is not None:
        from kvlab.triton_support.compile import TARGETS

        require(target in tuple(TARGETS), f"target is {shown(target)}", f"None or one of {', '.join(TARGETS)}")
    path, _ = (_source(name, fn) for name, fn in (("kernel", function), ("twin", twin)))
    pairs, skipped = called_by_both(function, twin)
    proposals: dict[str, Proposal] = {}
    for ours, theirs in [(function, twin), *pairs]:
        try:
            both = [(_source(ours.__name__, fn), fn.__name__) for fn in (ours, theirs)]
            proposals[ours.__name__] = propose(*both)
        except ValueError as error:
            if ours is function:
                raise
            skipped[ours.__name__] = str(error)
    name = function.__name__
    sides = [[TracePlan.of(one, side) for one, side in held]
             for held in ([(n, p.kernel) for n, p in proposals.items()], [(n, p.twin) for n, p in proposals.items()])]
    case = {key: to_numpy(value) for key, value in found.items()}
    recorded, memory = _run_kernel(function, path, sizes, copy.deepcopy(case), sides[0], wanted, list(unwritten))
    values, after = _run_twin(twin, sides[1], sizes, copy.deepcopy(case), wanted)
    named = tolerance if isinstance(tolerance, dict) else {}
    comparer = _Comparer(recorded, sides[0], named, None if isinstance(tolerance, dict) else tolerance)
    skipped |= _compare(comparer, recorded, values, size)
    comparer.compare_returned(recorded.returned, after)
    twins = tuple((one, p.kernel, p.twin) for one, p in proposals.items())
    numbers = {one: number for number, one in enumerate(proposals)}

    def near(first: Any) -> list[tuple[str, np.ndarray]]:
        """Tiles of the twin that stand beside the one that differs."""
        tiles = []
        for key, held in values.items():
            here = (numbers.get(first.twin), first.launch, first.index)
            if key[:3] != here or key[4] != first.output or not first.iteration:
                continue
            step = key[3][-1] - first.iteration[-1]
            tile = held.get(first.program, held.get(-1))
            if key[3][:-1] == first.iteration[:-1] and step in (-1, 1) and tile is not None:
                tiles.append(("of the iteration before" if step < 0 else "of the iteration after", np.asarray(tile)))
        return tiles

    helpers = {one: p for one, p in proposals.items() if one != name}
    return KernelLockstep(proposals[name], helpers, skipped, memory, target, (kernel, dict(args)), near, twins,
                          comparer.rows, comparer.grids)


def assert_lockstep(
    kernel: Any, twin: Callable[..., Any], args: Mapping[str, Any], grid: Any = (1,), **options: Any
) -> KernelLockstep:
    """Run :func:`lockstep_kernel`; AssertionError with the first difference, explained, if there is one. For tests."""
    found = lockstep_kernel(kernel, twin, args, grid, **options)
    if not found.ok:
        raise AssertionError(f"{found.finding}\n\n{found.table()}")
    return found


def _unwrapped(kernel: Any, args: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The Python function of a kernel, and its arguments with those of autotuning and heuristics."""
    while hasattr(kernel, "fn"):
        if hasattr(kernel, "configs"):
            chosen = kernel.configs[0].all_kwargs()
            args = {**{k: v for k, v in chosen.items() if k in kernel.arg_names}, **args}
        elif isinstance(getattr(kernel, "values", None), dict):
            args = {**{name: of(args) for name, of in kernel.values.items()}, **args}
        kernel = kernel.fn
    if not inspect.isfunction(kernel):
        raise ValueError(f"kernel is {kernel!r}: must be a @triton.jit function")
    for name, parameter in inspect.signature(kernel).parameters.items():
        if name not in args and parameter.default is not inspect.Parameter.empty:
            args[name] = parameter.default
    missing = [name for name in inspect.signature(kernel).parameters if name not in args]
    if missing:
        raise ValueError(f"args are {list(args)}: must have {missing}, too, of {kernel.__name__}")
    return kernel, args


def _source(name: str, function: Any) -> str:
    path = inspect.getsourcefile(inspect.unwrap(function)) if callable(function) else None
    if path is None:
        raise ValueError(f"{name} is {function!r}: must be a function of a file, its source is read")
    return path


def _run_kernel(
    function: Any, path: str, grid: tuple[int, ...], case: dict[str, Any], plans: list[TracePlan],
    wanted: list[int] | None, unwritten: list[str],
) -> tuple[Recorded, MemoryRecord]:
    from kvlab.triton_support import child, versions

    versions.require()
    home = "kvlab.mirror.any_kernel_child:trace_kernel"
    call = (home, function.__module__, path, grid, case, plans, wanted, unwritten)
    try:
        recorded: tuple[Recorded, MemoryRecord] = child.run(*call)
    except StaleSource:
        child.close()
        recorded = child.run(*call)
    return recorded


def _run_twin(
    twin: Callable[..., Any], plans: list[TracePlan], grid: tuple[int, ...], case: dict[str, Any],
    wanted: list[int] | None,
) -> tuple[dict[Key, dict[int, Any]], dict[str, np.ndarray]]:
    """Values of the twin's steps, and of its helpers', by key and program, -1 for all at once; its arrays
    afterwards."""
    parameters = inspect.signature(twin).parameters
    given = {name: value for name, value in case.items() if name in parameters}
    pid = next((name for name in _PID if name in parameters), None)
    found: dict[Key, dict[int, Any]] = defaultdict(dict)
    calls: Counter[tuple[int, int]] = Counter()
    now = -1

    def begin(one: int) -> Record:
        number = calls[one, now]
        calls[one, now] += 1

        def record(step: int, iteration: tuple[int, ...], variables: dict[str, Any]) -> None:
            for output in plans[one].outputs[step] if now < 0 or wanted is None or now in wanted else ():
                for name, value in members(output, variables):
                    found[one, number, step, iteration, name][now] = copy.copy(value)

        return record

    with tracing(plans, begin):
        if pid is None:
            twin(**given)
        else:
            for now in range(math.prod(grid)):
                place = np.unravel_index(now, grid[::-1])[::-1]  # the first axis of a grid is fastest
                twin(**given, **{pid: now if len(grid) == 1 else tuple(int(n) for n in place)})
    arrays = {name: value for name, value in case.items() if isinstance(value, np.ndarray)}
    return found, arrays


def _compare(
    comparer: _Comparer, recorded: Recorded, values: Mapping[Key, Mapping[int, Any]], size: int
) -> dict[str, str]:
    """Compares all recorded values in the order in which they came; what cannot be, by name."""
    skipped: dict[str, str] = {}
    for key in sorted(recorded.values, key=recorded.when.__getitem__):
        programs, kernel = recorded.values[key]
        if isinstance(kernel, str):
            skipped[key[-1]] = kernel
            continue
        held = values.get(key, {})
        if -1 in held:
            whole = np.asarray(held[-1])
            whole = whole[None] if size == 1 and whole.ndim < kernel.ndim else whole
        elif all(int(program) in held for program in programs):
            tiles = [_like(held[int(program)], kernel) for program in programs]
            if len({tile.shape for tile in tiles}) > 1:
                comparer.rows.append(comparer.row(key, programs, "the twin's shape differs from program to program"))
                continue
            whole = np.zeros((size, *tiles[0].shape), tiles[0].dtype)
            whole[programs] = np.stack(tiles)
        else:
            comparer.rows.append(comparer.row(key, programs, "the twin did not run this step"))
            continue
        if whole.dtype != kernel.dtype and (whole.dtype.kind in "iub") == (kernel.dtype.kind in "iub"):
            whole = whole.astype(kernel.dtype)
        comparer.rows.append(comparer.measure(key, programs, kernel, whole, size))
    return skipped


def _like(value: Any, kernel: np.ndarray) -> np.ndarray:
    tile = np.asarray(value)
    return tile.reshape(()) if tile.size == 1 and kernel.ndim == 1 else tile
