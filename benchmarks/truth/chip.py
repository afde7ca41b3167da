"""The probes on the chip: compiled by nvcc into a library, called with NumPy arrays."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .cuda_source import kernels, source

__all__ = ["LIBRARY", "build", "launch", "launch_tma", "nvcc"]

LIBRARY = "KVLAB_PROBES"  # environment variable: where the library is
TMA = {"load": 0, "store": 1, "nothing": 2}


def nvcc() -> str:
    """The path of nvcc. RuntimeError if there is none."""
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if found is None:
        raise RuntimeError("nvcc (CUDA 12.8 or newer) was not found: the probes cannot be compiled")
    return found


def build() -> Path:
    """Compile the probes for sm_90a, unless :data:`LIBRARY` names a library: its path."""
    if LIBRARY not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="kvlab-probes-"))
        (folder / "probes.cu").write_text(source())
        command = [nvcc(), "-w", "-gencode", "arch=compute_90a,code=sm_90a", "-split-compile=0", "-O1", "-shared"]
        command += ["-Xcompiler", "-fPIC", "-o", str(folder / "probes.so"), str(folder / "probes.cu")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc failed:\n{done.stderr[-2000:]}")
        os.environ[LIBRARY] = str(folder / "probes.so")
    return Path(os.environ[LIBRARY])


@functools.cache
def _library() -> tuple[Any, dict[str, int]]:
    library = ctypes.CDLL(str(build()))
    library.launch.argtypes = [ctypes.c_int, ctypes.c_int] + 2 * [ctypes.c_void_p, ctypes.c_size_t]
    library.launch_tma.argtypes = [ctypes.c_int] * 5 + [ctypes.c_uint32]
    return library, {name: number for number, name in enumerate(kernels())}


def launch(name: str, threads: int, words: np.ndarray[Any, Any], out_words: int) -> np.ndarray[Any, Any]:
    """Run a kernel of :mod:`cuda_source` once: what it left in its output, ``uint32 [out_words]``."""
    library, numbers = _library()
    words = np.ascontiguousarray(words, np.uint32)
    out = np.full(out_words, 0xDEADBEEF, np.uint32)
    error = library.launch(numbers[name], threads, words.ctypes.data, words.nbytes, out.ctypes.data, out.nbytes)
    if error:
        raise RuntimeError(f"{name}: CUDA error {error}")
    return out


def launch_tma(what: str, itemsize: int, rows: int, width: int, swizzle: int, address: int) -> None:
    """One TMA copy ("load", "store") of a box of ``rows`` x ``width`` bytes; "nothing": the barrier alone."""
    error = _library()[0].launch_tma(TMA[what], itemsize, rows, width, swizzle, address)
    if error:
        raise RuntimeError(f"TMA {what} {itemsize} {rows}x{width} {swizzle} at {address}: CUDA error {error}")
