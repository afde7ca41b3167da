"""The kernel side of a lockstep run, called in the process that interprets kernels; only here Triton is needed."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from kvlab.common.torch_here import torch_here
from kvlab.mirror.trace import Record, TracePlan, Tracer, check_fresh, is_code_of, members, put_probes

#: (twin's index, number of the launch, step's index, iteration, output's name: of a member of a tuple ``q[1]``)
Key = tuple[int, int, int, tuple[int, ...], str]

_DTYPES = {
    "int1": np.dtype(bool),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "fp8e5b16": np.dtype(ml_dtypes.float8_e5m2fnuz),
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
}


@dataclass
class Recorded:
    """``values[key] = (program indices [n], values [n, ...])``; a string in place of the values says what is wrong."""

    returned: Any
    grids: dict[tuple[int, int], tuple[int, int, int]]
    values: dict[Key, tuple[np.ndarray, np.ndarray | str]]
    ran: list[set[int]] = dataclasses.field(default_factory=list)
    """Lines of each planned kernel that some recorded program has run."""
    when: dict[Key, int] = dataclasses.field(default_factory=dict)
    """Place of each key among those of its program, the last of all programs: an order in time."""


def trace(launch: str, plans: Sequence[TracePlan], case: dict[str, Any], programs: Sequence[int] | None) -> Recorded:
    """Run ``launch(**case)`` and record every listed output at the end of every step of the planned kernels.

    NumPy arrays in ``case`` become torch tensors. ``programs`` are program indices, pid0 + grid0*(pid1 + grid1*pid2);
    None records all. Raises ``StaleSource`` when a kernel's file has changed since it was imported."""
    from triton.runtime import interpreter

    module, _, name = launch.partition(":")
    function = getattr(importlib.import_module(module), name)
    _check_kernels(plans)
    builder = interpreter.interpreter_builder
    seen: Counter[tuple[int, int]] = Counter()
    before: Counter[int] = Counter()  # calls in the launches before this one
    launched: list[Any] = [None]
    grids: dict[tuple[int, int], tuple[int, int, int]] = {}
    found: dict[Key, list[tuple[int, np.ndarray | str]]] = defaultdict(list)
    when: dict[Key, int] = {}
    passed: Counter[int] = Counter()

    def begin(twin: int) -> Record | None:
        (x, y, z), (nx, ny, nz) = builder.grid_idx, builder.grid_dim
        program = x + nx * (y + ny * z)
        if builder.grid_dim is not launched[-1]:  # each launch sets one of its own
            launched.append(builder.grid_dim)
            for (one, _), calls in seen.items():
                before[one] = max(before[one], calls)
        number = seen[twin, program] = max(seen[twin, program], before[twin])
        seen[twin, program] += 1
        grids[twin, number] = (nx, ny, nz)
        if programs is not None and program not in programs:
            return None

        def record(step: int, iteration: tuple[int, ...], variables: dict[str, Any]) -> None:
            for output in plans[twin].outputs[step]:
                for name, value in members(output, variables) or [(output, None)]:
                    said = "not bound at the end of the step" if value is None else _value(value)
                    key = (twin, number, step, iteration, name)
                    found[key].append((program, said))
                    passed[program] += 1
                    when[key] = max(when.get(key, 0), passed[program])

        return record

    with _probing(plans, begin) as ran:
        returned = function(**_to_torch(case))
    return Recorded(to_numpy(returned), grids, {key: _stack(items) for key, items in found.items()}, ran, when)


@contextmanager
def _probing(plans: Sequence[TracePlan], begin: Callable[[int], Record | None]) -> Iterator[list[set[int]]]:
    """As :func:`kvlab.mirror.trace.tracing`, for functions that Triton's interpreter runs."""
    from triton.runtime import interpreter

    rewriter, rewritten = interpreter.FunctionRewriter, interpreter.InterpretedFunction.rewritten_fn
    transform = rewriter._transform_ast
    ran: list[set[int]] = [set() for _ in plans]
    planned: dict[Any, int] = {}

    def start(index: int) -> Callable[[int], None]:
        record = begin(index)
        return (lambda line: None) if record is None else Tracer(plans[index], record, ran[index]).at

    def with_probes(self: Any, source: str) -> Any:
        tree = transform(self, source)
        index = next((i for i, plan in enumerate(plans) if is_code_of(plan, self.fn.__code__)), None)
        if index is not None:
            name = f"_mirror_begin_{index}"
            self.fn.__globals__[name] = functools.partial(start, index)
            planned[self.fn] = index
            put_probes(tree.body[0], name)
        return tree

    kept = {fn: rewritten.pop(fn) for fn in list(rewritten) if any(is_code_of(p, fn.__code__) for p in plans)}
    rewriter._transform_ast = with_probes
    try:
        yield ran
    finally:
        rewriter._transform_ast = transform
        for fn, index in planned.items():
            rewritten.pop(fn, None)
            fn.__globals__.pop(f"_mirror_begin_{index}", None)
        rewritten.update(kept)


def _check_kernels(plans: Sequence[TracePlan]) -> None:
    modules = {getattr(module, "__file__", None): module for module in list(sys.modules.values())}
    for plan in plans:
        if plan.path not in modules:
            raise ValueError(
                f"the launch function does not import {plan.path}, where twin {plan.twin!r} has its kernel"
            )
        check_fresh(plan, getattr(modules[plan.path], plan.function))


def _stack(items: list[tuple[int, np.ndarray | str]]) -> tuple[np.ndarray, np.ndarray | str]:
    """The values of one key in the order of the programs (the interpreter runs the last grid axis fastest)."""
    items = sorted(items, key=lambda item: item[0])
    programs = np.array([program for program, _ in items])
    wrong = next((value for _, value in items if isinstance(value, str)), None)
    if wrong is not None:
        return programs, wrong
    values = [value for _, value in items if isinstance(value, np.ndarray)]
    if len({(value.shape, value.dtype) for value in values}) > 1:
        return programs, "shape or dtype differs from program to program"
    return programs, np.stack(values)


def _value(value: Any) -> np.ndarray | str:
    """A copy of a variable of an interpreted kernel, in its logical shape and dtype; or why it cannot be had."""
    value = getattr(value, "value", value)  # a constexpr
    if isinstance(value, bool | int | float):
        return np.array(value, bool if isinstance(value, bool) else np.int32 if isinstance(value, int) else np.float32)
    data = getattr(getattr(value, "handle", None), "data", None)
    if data is None:
        return f"a {type(value).__name__} of the kernel cannot be compared; list tensors and scalars"
    dtype = _DTYPES.get(str(value.dtype))
    if dtype is None:
        return f"dtype {value.dtype} cannot be compared"
    if data.dtype != dtype:
        data = data.view(dtype) if data.dtype.kind in "uV" and dtype.kind in "fV" else data.astype(dtype)
    return np.array(data).reshape([int(getattr(extent, "value", extent)) for extent in value.shape])


def _to_torch(value: Any) -> Any:
    """NumPy arrays as torch tensors that share their memory, in dicts, lists, tuples and dataclasses too."""
    import torch

    if isinstance(value, dict):
        return {key: _to_torch(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        found = [_to_torch(item) for item in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if not isinstance(value, np.ndarray):
        return _fields(value, _to_torch)
    if value.dtype.isbuiltin == 1:
        return torch.from_numpy(value)
    return torch.from_numpy(value.view(f"u{value.itemsize}")).view(getattr(torch, value.dtype.name))


def _fields(value: Any, convert: Callable[[Any], Any]) -> Any:
    """A dataclass with its fields converted; anything else as it is."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    before = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    changed = {name: new for name, old in before.items() if (new := convert(old)) is not old}
    return dataclasses.replace(value, **changed) if changed else value


def to_numpy(value: Any) -> Any:
    """Torch tensors as NumPy arrays, in dicts, lists, tuples and dataclasses too; torch is not imported for it."""
    if isinstance(value, dict):
        return {key: to_numpy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        found = [to_numpy(item) for item in value]
        return type(value)(*found) if hasattr(value, "_fields") else found
    torch = torch_here()
    if torch is None or not isinstance(value, torch.Tensor):
        return _fields(value, to_numpy)
    value = value.detach()
    dtype = str(value.dtype).removeprefix("torch.")
    if not hasattr(ml_dtypes, dtype):
        return value.numpy()
    return value.view(getattr(torch, f"uint{8 * value.element_size()}")).numpy().view(getattr(ml_dtypes, dtype))
