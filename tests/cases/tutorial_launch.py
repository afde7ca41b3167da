"""A tutorial's kernel in the interpreter alone, in the child process, for its time."""

from __future__ import annotations

import time
from typing import Any


def interpreted(name: str, case: dict[str, Any], grid: tuple[int, ...]) -> float:
    """Seconds of a launch of a kernel of ``tutorial_kernels``, the faster of two."""
    import tutorial_kernels

    from kvlab.mirror.trace_triton import _to_torch

    given, seconds = _to_torch(case), []
    for _ in range(2):
        start = time.perf_counter()
        getattr(tutorial_kernels, name)[grid](**given)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
