"""The kernel's side of :mod:`kvlab.mirror.any_kernel`, in the process that interprets kernels."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

from kvlab.mirror.memory_accesses import MemoryRecord, MemoryWatch
from kvlab.mirror.trace import TracePlan
from kvlab.mirror.trace_triton import Recorded, trace

_NOW: list[Any] = []


def trace_kernel(
    module: str, path: str, grid: tuple[int, ...], case: dict[str, Any], plans: Sequence[TracePlan],
    programs: Sequence[int] | None, unwritten: Sequence[str],
) -> tuple[Recorded, MemoryRecord]:
    """Launch the kernel that the first plan names; what its steps and its helpers' bind, and how it reaches memory."""
    kernel = getattr(_module(module, path), plans[0].function)
    while type(kernel).__name__ in ("Autotuner", "Heuristics"):
        kernel = kernel.fn
    _NOW[:] = [kernel, grid]
    watch = MemoryWatch(case, unwritten)
    with watch.watching():
        recorded = trace("kvlab.mirror.any_kernel_child:launch", plans, watch.case, programs)
    return recorded, watch.record


def launch(**case: Any) -> dict[str, Any]:
    """Launch the kernel of now; its tensors afterwards."""
    kernel, grid = _NOW
    kernel[grid](**case)
    return {name: value for name, value in case.items() if hasattr(value, "data_ptr")}


def _module(name: str, path: str) -> Any:
    """The module of a file: by its name where an import finds that file, otherwise by its path."""
    known = next((m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == path), None)
    if known is not None:
        return known
    try:
        spec = importlib.util.find_spec(name) if name != "__main__" else None
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None and os.path.samefile(spec.origin, path):
        return importlib.import_module(name)
    own = importlib.util.spec_from_file_location(f"_lockstep_{os.path.basename(path).removesuffix('.py')}", path)
    assert own is not None
    assert own.loader is not None
    module = importlib.util.module_from_spec(own)
    sys.modules[own.name] = module
    own.loader.exec_module(module)
    return module
