"""Backends of a call: the reference and the emulator on NumPy views, the kernel on its GPU or in the interpreter."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import operator
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from kvlab.attention.call.explain import Explanation
from kvlab.common.arrays import on_gpu, to_numpy, to_torch
from kvlab.common.checks import require
from kvlab.common.torch_here import is_torch
from kvlab.hardware import chip
from kvlab.triton_support.versions import hint, missing

BACKENDS = ("auto", "reference", "emulator", "triton")


def choose_backend(array: Any, backend: str) -> tuple[str, str]:
    """(backend, reason) for a call whose first argument is ``array``. ValueError for one that cannot be had."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: must be one of {', '.join(BACKENDS)}")
    chosen, reason = backend, "asked for"
    if backend == "auto" and not is_torch(array):
        chosen, reason = "emulator", "NumPy arrays"
    elif backend == "auto" and missing() and not on_gpu(array):
        chosen, reason = "emulator", "torch tensors in CPU memory, without Triton"
    elif backend == "auto":
        chosen, reason = "triton", "torch tensors"
    if chosen == "triton":
        if missing():
            raise ValueError(f"backend is {backend!r}: must have {' and '.join(missing())}: {hint()}")
        reason += ", compiled for the GPU" if on_gpu(array) else ", interpreted on the CPU in a process of its own"
    elif on_gpu(array):
        raise ValueError(f"backend is {chosen!r} with tensors on {array.device}: must be CPU memory; use .cpu()")
    return chosen, reason


def check_arithmetic(plan: Explanation, name: Any) -> None:
    """ValueError unless ``name`` is an arithmetic that the plan's backend, or its emulated machine, has."""
    exact = chip.check_arithmetic(name, plan.arch).exact
    accepted = "'float32'; the emulator alone computes as the chip does"
    require(not exact or plan.backend == "emulator", f"arithmetic is {name!r} with backend {plan.backend!r}", accepted)


def run_kernel(path: str, *args: Any, again: dict[Any, Any] | None, **kwargs: Any) -> tuple[Any, ...]:
    """Call ``"module:launch"`` with torch tensors, here on a GPU, otherwise interpreted; results in args' library."""
    if on_gpu(args[0]):
        launch, device, cuda = function_at(path), args[0].device, sys.modules["torch"].cuda
        if cuda.current_device() == device.index:
            return tuple(launch(*args, again=again, **kwargs) or ())
        with cuda.device(device):
            return tuple(launch(*args, again=again, **kwargs) or ())
    from kvlab.triton_support import child

    tensors = _each(to_torch, args, kwargs)
    results = child.run(path, *tensors[0], **tensors[1])
    return tuple(r if is_torch(args[0]) else to_numpy(r) for r in results or ())


@functools.cache
def function_at(path: str) -> Callable[..., Any]:
    """The function ``"module:launch"``."""
    module, _, name = path.partition(":")
    launch: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return launch


def run_on_numpy(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Call a function of NumPy arrays with views of ``args``. Results are of args' library.

    Values that are not finite give such results without a warning, as they do on a GPU.
    """
    views = _each(to_numpy, args, kwargs)
    with np.errstate(over="ignore", invalid="ignore"):
        results = function(*views[0], **views[1]) or ()
    return tuple(map(to_torch, results) if is_torch(args[0]) else results)


def rounded(exact: Any, lse: Any, dtype: Any, out: Any) -> tuple[Any, Any]:
    """Results of a reference in the form of a launch: rounded once to ``dtype`` (that of ``out`` if given), in ``out``;
    lse float32.
    """
    dtype = dtype if out is None else out.dtype
    out = np.empty(exact.shape, dtype) if out is None else out
    out[...] = exact.astype(dtype)
    return out, lse.astype(np.float32)


def _each(convert: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """All arguments, arrays converted, also those in tuples and in the fields of dataclasses and NamedTuples."""

    def one(value: Any) -> Any:
        if is_torch(value) or isinstance(value, np.ndarray):
            return convert(value)
        if isinstance(value, tuple):
            found = [one(item) for item in value]
            same = all(map(operator.is_, found, value))
            return value if same else type(value)(*found) if hasattr(value, "_fields") else tuple(found)
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        before = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: new for name, old in before.items() if (new := one(old)) is not old}
        return dataclasses.replace(value, **changed) if changed else value

    return [one(value) for value in args], {name: one(value) for name, value in kwargs.items()}
