"""Whether a call goes to the kernel that is written for Hopper."""

from __future__ import annotations

from typing import Any

from kvlab.attention.backends import BACKENDS, choose_backend, machine, on_gpu
from kvlab.triton_support.versions import gluon_lacks

__all__ = ["choose_with_hopper"]


def choose_with_hopper(
    array: Any, backend: str, lacks: str | None, declined: str | None, supported: str
) -> tuple[str, str, bool]:
    """(backend, reason) as of ``choose_backend``, and whether the kernel or the emulator is the one for Hopper.

    ``lacks`` says what of the call the Hopper kernel cannot do, ``declined`` why the portable one is taken all
    the same, ``supported`` what "hopper" accepts. Arrays that are not on a GPU go through its emulator. ValueError for
    "hopper" where it cannot be had.
    """
    known = (*BACKENDS, "hopper")
    if backend not in known:
        raise ValueError(f"backend {backend!r}: must be one of {', '.join(known)}")
    gpu = on_gpu(array)
    if backend == "hopper":
        lacks = lacks or (_machine_lacks(array) if gpu else None)
        if lacks:
            raise ValueError(f"backend 'hopper' with {lacks}: must be {supported}")
        return ("hopper", "asked for", True) if gpu else ("emulator", "asked for; it needs no GPU", True)
    chosen, reason = choose_backend(array, backend)
    if backend != "auto" or not gpu:
        return chosen, reason, False
    lacks = _machine_lacks(array) or lacks or declined
    if lacks:
        return chosen, f"{reason}; not the Hopper kernel: {lacks}", False
    return "hopper", "torch tensors on sm_90", True


def _machine_lacks(array: Any) -> str | None:
    """What keeps Hopper's kernels from running on the GPU of ``array``."""
    arch, _ = machine(array.device)
    if arch != "sm_90":
        return f"a GPU of {arch}"
    return gluon_lacks()
