"""The compiled kernels of a call over a schedule, run by the PTX machine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from caught import as_tensors

from kvlab import simt
from kvlab.attention.attend_paged.config import ragged_problem, schedule_problem
from kvlab.attention.schedule import emulator as schedules
from kvlab.common.arrays import to_torch


class Launches:
    """Launches of a stream: each begins when that before it has ended or, where it may begin earlier (``launch_pdl``),
    that before it runs when it is waited for, at the end of its kernel if need be. A kernel that waits before it lets
    the next begin has, when that begins, what it waited for.
    """

    def __init__(self) -> None:
        self.finish = self._waited = _once(lambda: None)

    def add(self, fn: Any, run: Callable[..., Any], dependent: bool) -> None:
        """The next one: ``run`` of a kernel."""
        before, waited = self.finish, self._waited

        def early() -> None:
            waited()
            run(launch_before=before)

        if not dependent:
            before()
        self.finish = _once(early if dependent else run)
        text = inspect.getsource(fn.fn)
        self._waited = before if 0 < text.find(WAIT) < text.find(LET) else _once(lambda: None)


WAIT, LET = "wait_for_launch_before(", "let_next_begin("


def _once(run: Callable[[], Any]) -> Callable[[], None]:
    """``run`` when first called, then nothing."""
    left = [run]

    def call() -> None:
        if left:
            left.pop()()

    return call


class Simulated:
    """In place of a kernel: ``kernel[grid](*args, **named)`` runs its PTX for sm_90. ``checks`` as of ``simt.run``."""

    def __init__(self, fn: Any, launches: Launches, **checks: bool) -> None:
        self.fn: Any = fn
        self.launches, self.checks = launches, checks

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **named: Any) -> None:
            arguments = dict(zip(self.fn.arg_names, args, strict=False)) | named
            run = partial(simt.run, self.fn, grid, target="sm_90", arithmetic="float32", addresses=False,
                          **self.checks, **arguments)
            self.launches.add(self.fn, run, named.get("launch_pdl", False))

        return launch


@contextmanager
def simulating(*homes: Any, **checks: bool) -> Iterator[None]:
    """Where kernels of a call over a schedule run so, (module, name) each, as if all tensors were on a GPU."""
    launches = Launches()
    with pytest.MonkeyPatch.context() as patch:
        for home, name in homes:
            patch.setattr(home, name, Simulated(getattr(home, name), launches, **checks))
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        yield
    launches.finish()


def simulated(
    module: Any, arrays: tuple[Any, ...], named: dict[str, Any], *, lists: bool = False, **checks: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of all walks, Hopper's by ``module``, and of their joins; ``lists``: the kernel makes the work lists,
    too. ``checks`` as of ``simt.run``.
    """
    from kvlab.attention.attend_paged import hopper, kernel
    from kvlab.attention.attend_paged.wide import hopper as wide
    from kvlab.attention.schedule import kernel as list_kernel

    starts = arrays[5] if len(arrays) > 5 else None
    problem = schedule_problem(ragged_problem(*arrays[:4], starts), *named["features"].mask.by_length)
    works = None
    if not lists:
        works = [to_torch(schedules.launch(arrays[4], starts, problem=problem, config=one.schedule)[0])
                 for one in named["config"].walks]
    homes = (hopper, "walk"), (wide, "walk"), (kernel, "walk"), (kernel, "join"), (list_kernel, "work_list")
    tensors = tuple(map(as_tensors, arrays))
    with simulating(*homes, **checks):
        return kernel.launch(*tensors, **named | {"features": as_tensors(named["features"])}, works=works)
