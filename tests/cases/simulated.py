"""The compiled kernels of a call over a schedule, run by the PTX machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caught import as_tensors

from kvlab import simt
from kvlab.attention.attend_paged.config import ragged_problem, schedule_problem
from kvlab.attention.schedule import emulator as schedules
from kvlab.common.arrays import to_torch


class Simulated:
    """In place of a kernel: ``kernel[grid](*args, **named)`` runs its PTX for sm_90."""

    def __init__(self, fn: Any, strict: bool) -> None:
        self.fn: Any = fn
        self.strict = strict

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **named: Any) -> None:
            arguments = dict(zip(self.fn.arg_names, args, strict=False)) | named
            simt.run(self.fn, grid, target="sm_90", arithmetic="float32", strict=self.strict, **arguments)

        return launch


def simulated(
    module: Any, arrays: tuple[Any, ...], named: dict[str, Any], *, strict: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of all walks, Hopper's by ``module``, and of their joins; ``strict`` as of ``simt.run``."""
    from kvlab.attention.attend_paged import kernel

    starts = arrays[5] if len(arrays) > 5 else None
    problem = schedule_problem(ragged_problem(*arrays[:4], starts), *named["features"].mask.by_length)
    walks = named["config"].walks
    works = [to_torch(schedules.launch(arrays[4], starts, problem=problem, config=one.schedule)[0]) for one in walks]
    with pytest.MonkeyPatch.context() as patch:
        for home, name in ((module, "walk"), (kernel, "walk"), (kernel, "join")):
            patch.setattr(home, name, Simulated(getattr(home, name), strict))
        tensors = map(as_tensors, arrays)
        return kernel.launch(*tensors, **named | {"features": as_tensors(named["features"])}, works=works)
