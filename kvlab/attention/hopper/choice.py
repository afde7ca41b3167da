"""Choice of Hopper's kernels, and the features of decodes that none of these takes."""

from __future__ import annotations

from typing import Any

from kvlab.attention.call.backends import BACKENDS, choose_backend
from kvlab.attention.features.masks import UNLIMITED
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scores import beyond_rows
from kvlab.attention.machines.gpu import machine, traits
from kvlab.common.arrays import address_of, dtype_of, element_strides, on_gpu
from kvlab.triton_support.versions import gluon_lacks


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
        raise ValueError(f"backend is {backend!r}: must be one of {', '.join(known)}")
    gpu = on_gpu(array)
    if backend == "hopper":
        lacks = lacks or (machine_lacks(array) if gpu else None)
        if lacks:
            raise ValueError(f"backend is 'hopper' with {lacks}: must be {supported}")
        return ("hopper", "asked for", True) if gpu else ("emulator", "asked for; it needs no GPU", True)
    chosen, reason = choose_backend(array, backend)
    if backend != "auto" or not gpu:
        return chosen, reason, False
    lacks = machine_lacks(array) or lacks or declined
    if lacks:
        return chosen, f"{reason}; not the Hopper kernel: {lacks}", False
    return "hopper", "torch tensors on sm_90", True


def decode_lacks(features: Features, *, listed: bool = False) -> str | None:
    """Features of a decode that Hopper's kernels lack, scales aside; None if they can do them all. ``listed``: over a
    schedule, whose units know where a sequence begins.

    >>> decode_lacks(Features(softcap=30.0)), decode_lacks(Features())
    ('softcap', None)
    """
    mask = features.mask
    if beyond := beyond_rows(features):
        return beyond
    if (mask.left, mask.right, mask.chunk) != (UNLIMITED, 0, 0) or mask.valid is not None or mask.bias is not None:
        return "a mask other than the causal one"
    return "softcap" if features.softcap > 0 else "sinks" if features.sinks is not None and not listed else None


def tma_takes(array: Any, name: str) -> bool:
    """Tells whether an array ``[., ., ., D]`` can be read as boxes."""
    vector = 16 // dtype_of(array, name).itemsize
    strides = element_strides(array, name)
    outer = [s for s, n in zip(strides[:-1], array.shape[:-1], strict=True) if n > 1]
    return address_of(array) % 16 == 0 and all(s > 0 and s % vector == 0 and s < 1 << 39 for s in outer)


def machine_lacks(array: Any) -> str | None:
    """Reason why Hopper's kernels do not run on the GPU of ``array``; None if they do."""
    arch, _ = machine(array.device)
    if traits(arch).products != "wgmma":
        return f"a GPU of {arch}"
    return gluon_lacks()
