"""The arguments of a kernel's launch, caught instead of run, to compile it for GPUs that are not there."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvlab.attention.call import kinds
from kvlab.attention.hopper import choice as hopper_choice
from kvlab.common.arrays import to_torch
from kvlab.triton_support.compile import Compiled, compile_kernel, signature_of
from kvlab.triton_support.versions import installed

SHARED = {
    "sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376,
    "gfx942": 65536, "gfx950": 163840,
}
"""Bytes of shared memory that a CTA may have."""
FIVE = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
"""Targets whose tiles are not another's."""
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")
"""Arguments of a launch that are the compiler's, not the kernel's."""


class Caught:
    """In place of a kernel: ``kernel[grid](*args, **named)`` notes the grid and the arguments."""

    def __init__(self, fn: Any) -> None:
        self.fn: Any = fn
        self.calls: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **named: self.calls.append(
            (grid, dict(zip(self.fn.arg_names, args, strict=False)) | named)
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of the only launch."""
        ((_, arguments),) = self.calls
        return arguments


def fits_small_gpus(made: Compiled) -> bool:
    """Whether a kernel for sm_80 fits the GPUs that take its tiles and have less shared memory: their code differs in
    instructions alone.
    """
    return made.target != "sm_80" or made.shared <= SHARED["sm_86"]


def has_room(made: Compiled, law: int) -> bool:
    """Whether a kernel takes the shared memory of the law at most. On AMD's GPUs Triton 3.9 fetches further ahead, by
    up to a tile of K and of V: there it is what the GPU has."""
    ahead = made.target.startswith("gfx") and str(installed()).startswith("3.9.")
    return made.shared <= (SHARED[made.target] if ahead else law)


def ptx_of(target: str) -> int:
    """The constant PTX of kernels that are launched on ``target``."""
    return int(target[3:]) if target.startswith("sm_") else 0


def as_launched(fn: Any, arguments: dict[str, Any], target: str) -> Compiled:
    """A kernel as a launch with these arguments compiles it: the same types, constants and alignments."""
    options = {name: arguments[name] for name in OPTIONS if name in arguments}
    own = {name: value for name, value in arguments.items() if name not in options}
    made = compile_kernel(fn, target=target, **signature_of(fn, **own), **options)
    if target == "sm_90":
        assert not made.unwritten, "ptxas left out a write"
    return made


def as_if_on(patch: pytest.MonkeyPatch, arch: str, triton: str = "3.6.0") -> None:
    """The choice of a kernel sees tensors on a GPU of ``arch``, and this release of Triton."""
    patch.setattr(kinds, "_kinds", {})  # nothing is known from this machine
    patch.setattr(hopper_choice, "on_gpu", lambda array: True)
    patch.setattr(hopper_choice, "machine", lambda device: (arch, 132))
    patch.setattr("kvlab.triton_support.versions.installed", lambda: triton)


def as_tensors(value: Any, device: str = "cpu") -> Any:
    """NumPy arrays, also in the fields of dataclasses and NamedTuples, as torch tensors."""
    if hasattr(value, "_fields"):
        return type(value)(*(as_tensors(item, device) for item in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: as_tensors(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        )
    return to_torch(value).to(device) if isinstance(value, np.ndarray) else value
