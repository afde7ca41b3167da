"""Lockstep of anyone's kernel with a NumPy twin, without markers: values compared where both bind the same names."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvlab.mirror.lockstep_result import Lockstep
from kvlab.mirror.lockstep_run import Tolerances, _Comparer, _program_list
from kvlab.mirror.patterns import Pattern, pattern_of
from kvlab.mirror.proposed import Proposal, propose
from kvlab.mirror.trace import Record, StaleSource, TracePlan, members, tracing
from kvlab.mirror.trace_triton import Key, Recorded, to_numpy

_PID = ("pid", "program", "program_id")


class KernelLockstep(Lockstep):
    """Result of :func:`lockstep_kernel`: a :class:`~kvlab.mirror.Lockstep` with what was found out without markers.

    proposal      steps of both sides; ``proposal.kernel_text`` and ``twin_text`` have the markers to be taken over
    skipped       names of the kernel that could not be compared, each with the reason: pointers, descriptors
    """

    def __init__(
        self, proposal: Proposal, skipped: Mapping[str, str], near: Callable[[Any], list[Any]], *args: Any
    ) -> None:
        super().__init__(*args)
        self.proposal, self.skipped, self._near = proposal, dict(skipped), near

    @functools.cached_property
    def explanation(self) -> Pattern | None:
        """The pattern of the first difference; None where nothing differs or shapes do."""
        first = self.first_difference
        if first is None or first.kernel is None or first.emulator is None:
            return None
        return pattern_of(first.kernel, first.emulator, *self._near(first))

    @property
    def finding(self) -> str:
        """One or two sentences: the first difference, and what it looks like."""
        said = super().finding
        return said if self.explanation is None else f"{said}; {self.explanation}"


def lockstep_kernel(
    kernel: Any, twin: Callable[..., Any], args: Mapping[str, Any], grid: Any = (1,), *,
    programs: int | Sequence[int] | None = None, tolerance: Tolerances = None,
) -> KernelLockstep:
    """Run a ``@triton.jit`` kernel, interpreted, and a NumPy function, and compare what both bind by the same names.

    kernel     a function of a file, autotuned (its first configuration) or with heuristics or not
    twin       a NumPy function with parameters of the same names; with one called ``pid`` it is called for each
               program, ``pid`` the program's number, or the tuple of two or three of them as the grid has; without one
               it is called once, and its values have an axis of programs first, unless there is only one
    args       arguments of both by name; each side gets a copy of the arrays, which are compared in the end, too
    grid       as at a launch: one to three numbers, or a function of ``args``
    programs, tolerance   as for :func:`kvlab.mirror.lockstep`

    A statement corresponds to one of the other side that binds the same names as deep in loops, in the same order.
    Values are taken right after it, the twin's in the kernel's dtype. ValueError where the sides have no name in
    common, or either has no source file.
    """
    function, found = _unwrapped(kernel, dict(args))
    wanted = _program_list(programs)
    sizes = tuple(grid(found)) if callable(grid) else tuple(grid) if isinstance(grid, Sequence) else (grid,)
    size = math.prod(sizes)
    paths = [_source(name, fn) for name, fn in (("kernel", function), ("twin", twin))]
    proposal = propose(*((path, fn.__name__) for path, fn in zip(paths, (function, twin), strict=True)))
    name = function.__name__
    plans = [TracePlan.of(name, side) for side in (proposal.kernel, proposal.twin)]
    case = {key: to_numpy(value) for key, value in found.items()}
    recorded = _run_kernel(function, paths[0], sizes, copy.deepcopy(case), plans[0], wanted)
    values, after = _run_twin(twin, plans[1], sizes, copy.deepcopy(case), wanted)
    named = tolerance if isinstance(tolerance, dict) else {}
    comparer = _Comparer(recorded, plans[:1], named, None if isinstance(tolerance, dict) else tolerance)
    skipped = _compare(comparer, recorded, values, size)
    comparer.compare_returned(recorded.returned, after)
    twins = ((name, proposal.kernel, proposal.twin),)

    def near(first: Any) -> list[tuple[str, np.ndarray]]:
        """Tiles of the twin that stand beside the one that differs."""
        tiles = []
        for key, held in values.items():
            if key[2] != first.index or key[4] != first.output or not first.iteration:
                continue
            step = key[3][-1] - first.iteration[-1]
            tile = held.get(first.program, held.get(-1))
            if key[3][:-1] == first.iteration[:-1] and step in (-1, 1) and tile is not None:
                tiles.append(("of the iteration before" if step < 0 else "of the iteration after", np.asarray(tile)))
        return tiles

    return KernelLockstep(proposal, skipped, near, twins, comparer.sorted_rows(), comparer.grids)


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
    function: Any, path: str, grid: tuple[int, ...], case: dict[str, Any], plan: TracePlan, wanted: list[int] | None
) -> Recorded:
    from kvlab.triton_support import child, versions

    versions.require()
    call = ("kvlab.mirror.any_kernel_child:trace_kernel", function.__module__, path, grid, case, plan, wanted)
    try:
        recorded: Recorded = child.run(*call)
    except StaleSource:
        child.close()
        recorded = child.run(*call)
    return recorded


def _run_twin(
    twin: Callable[..., Any], plan: TracePlan, grid: tuple[int, ...], case: dict[str, Any], wanted: list[int] | None
) -> tuple[dict[Key, dict[int, Any]], dict[str, np.ndarray]]:
    """Values of the twin's steps by key and program, -1 for all at once; its arrays afterwards."""
    parameters = inspect.signature(twin).parameters
    given = {name: value for name, value in case.items() if name in parameters}
    pid = next((name for name in _PID if name in parameters), None)
    found: dict[Key, dict[int, Any]] = defaultdict(dict)
    now = -1

    def begin(_: int) -> Record:
        def record(step: int, iteration: tuple[int, ...], variables: dict[str, Any]) -> None:
            for output in plan.outputs[step]:
                for name, value in members(output, variables):
                    found[0, 0, step, iteration, name][now] = copy.copy(value)

        return record

    with tracing([plan], begin):
        if pid is None:
            twin(**given)
        else:
            for now in range(math.prod(grid)):
                if wanted is None or now in wanted:
                    place = np.unravel_index(now, grid[::-1])[::-1]  # the first axis of a grid is fastest
                    twin(**given, **{pid: now if len(grid) == 1 else tuple(int(n) for n in place)})
    arrays = {name: value for name, value in case.items() if isinstance(value, np.ndarray)}
    return found, arrays


def _compare(
    comparer: _Comparer, recorded: Recorded, values: Mapping[Key, Mapping[int, Any]], size: int
) -> dict[str, str]:
    """Compares all recorded values; what cannot be, by name."""
    skipped: dict[str, str] = {}
    for key, (programs, kernel) in recorded.values.items():
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
