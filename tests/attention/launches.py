"""What a launch hands to its kernels, caught instead of run, and compiled for GPUs that are not there."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from decode_cases import Case

from kvlab.attention import mha_decode_paged
from kvlab.attention.explain import explain
from kvlab.attention.merge_states import kernel as merge_kernel
from kvlab.attention.mha_decode import kernel
from kvlab.triton_support.compile import Compiled, compile_kernel, signature_of


class _Caught:
    """In place of a kernel: ``kernel[grid](*args, **named)`` notes its arguments."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.calls = fn, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **named: self.calls.append(
            (grid, dict(zip(self.fn.arg_names, args, strict=False)) | named)
        )


def launches(case: Case) -> dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]]:
    """Name -> (kernel, grid, arguments) of what a call launches."""
    x = case.build()
    config = explain(mha_decode_paged, *x.torch(), num_splits=case.splits).config
    homes = {"attend": kernel, "merge": merge_kernel}
    caught = {name: _Caught(getattr(home, name)) for name, home in homes.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in caught.items():
            patch.setattr(homes[name], name, stub)
        kernel.launch(*x.torch(), scale=x.scale, config=config)
    return {name: (stub.fn, *stub.calls[0]) for name, stub in caught.items() if stub.calls}


@functools.cache
def compiled(case: Case, name: str, target: str) -> Compiled:
    """A kernel as a call compiles it: the same types, constants and alignments."""
    fn, _, arguments = launches(case)[name]
    arguments["PTX"] = target.startswith("sm_")
    options = {key: arguments.pop(key) for key in ("num_warps", "num_stages") if key in arguments}
    return compile_kernel(fn, target=target, **signature_of(fn, **arguments), **options)
