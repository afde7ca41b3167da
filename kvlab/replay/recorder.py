"""The recorder of calls: a file for each, written before the call runs and ended when it has."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import platform
import sys
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import kvlab
from kvlab.attention.call.call import RECORDERS, Call
from kvlab.common.arrays import on_gpu
from kvlab.common.checks import count, path_of
from kvlab.common.torch_here import torch_here

from .array_values import described, kept
from .pages import pages_named
from .values import packed

FORMAT, VERSION = "kvlab call", 1
LIMIT, CALLS = 64 << 20, 256
LEFT_OUT = "traffic"
"""The argument that says nothing of a call: it counts."""


class Recorder:
    """Keeper of calls; see :func:`recording`. folder : where; files : those that are written, in order.

    limit, calls : the most bytes of values in a file, and the most files.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int = LIMIT, calls: int = CALLS) -> None:
        self.folder, self.limit, self.calls = path_of("folder", folder), count("limit", limit), count("calls", calls)
        self.files: list[Path] = []
        self._numbers = itertools.count()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"folder is {str(folder)!r}: must be a folder that can be made ({error})") from None

    def keep(self, call: Call[Any]) -> Any:
        """The results of a call, which is kept. What cannot be kept, or written, is a warning: the call runs."""
        if len(self.files) >= self.calls or _captured(call):
            call.planned()
            return call.results(*call.launch())
        try:
            call.planned()
        except Exception as error:
            path, _ = self._begun(call)
            self._ended(path, {"raised": f"{type(error).__name__}: {error}"[:2000]}, {}, {}, 0)
            raise
        path, left = self._begun(call)
        try:
            found = call.results(*call.launch())
        except Exception as error:
            self._ended(path, {"raised": f"{type(error).__name__}: {error}"[:2000]}, {}, {}, 0)
            raise
        arrays, pages = results_of(call, found)
        self._ended(path, {"raised": None}, arrays, pages, left)
        return found

    def _begun(self, call: Call[Any]) -> tuple[Path | None, int]:
        """A new file with the arguments, and the bytes that are left for results; None where there is no file."""
        try:
            return self._written(call)
        except Exception as error:
            words = f"a call of {call.operation} is not recorded in {self.folder}: {type(error).__name__}: {error}"
            warnings.warn(words, RuntimeWarning, stacklevel=5)
            return None, 0

    def _written(self, call: Call[Any]) -> tuple[Path, int]:
        given = {name: value for name, value in call.arguments.items() if name != LEFT_OUT or value is None}
        arrays: dict[str, Any] = {}
        trees = {name: packed(value, name, arrays) for name, value in given.items()}
        entries, storages = described(arrays)
        members, left = kept(arrays, entries, pages_named(given), self.limit)
        told: dict[str, Any] = {
            "format": FORMAT, "version": VERSION, "call": type(call).__name__, "operation": call.operation,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "versions": versions(call),
            "plan": plan_of(call), "arguments": trees, "arrays": entries, "storages": storages,
            "left_out": sorted(call.arguments.keys() - given.keys()),
        }
        path = self._free(call.operation)
        while path.exists():  # of another process of this number, on another machine
            path = self._free(call.operation)
        with zipfile.ZipFile(path, "x") as file:
            write(file, "call.json", told, "arguments/", members)
        self.files.append(path)
        return path, left

    def _free(self, operation: str) -> Path:
        return self.folder / f"{operation}-{os.getpid()}-{next(self._numbers):06d}.npz"

    def _ended(
        self, path: Path | None, told: dict[str, Any], arrays: dict[str, Any], pages: Mapping[str, Any], left: int
    ) -> None:
        """The results beside the arguments."""
        if path is None:
            return
        try:
            entries, storages = described(arrays)
            members, _ = kept(arrays, entries, pages, left)
            told |= {"arrays": entries, "storages": storages}
            with zipfile.ZipFile(path, "a") as file:
                write(file, "results.json", told, "results/", members)
        except Exception as error:
            words = f"{path} has no results: {type(error).__name__}: {error}"
            warnings.warn(words, RuntimeWarning, stacklevel=4)


def results_of(call: Call[Any], found: Any) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """The arrays that a call gave or wrote, by name, and the pages of them that it may have written."""
    given = found if isinstance(found, tuple) else () if found is None else (found,)
    arrays = dict(zip(("out", "lse"), given, strict=False))
    written = {name: call.arguments[name] for name in call.writes if getattr(call.arguments.get(name), "ndim", 0) > 2}
    pages = pages_named(call.arguments)
    return arrays | written, {name: pages[name] for name in written if name in pages}


def plan_of(call: Call[Any]) -> dict[str, Any] | None:
    """The plan of a call as text; None of one that was refused."""
    plan = vars(call).get("plan")
    if plan is None:
        return None
    told = plan.explanation
    return {
        "backend": told.backend, "reason": told.reason, "arch": told.arch, "grid": [int(n) for n in told.grid],
        "config": str(told.config)[:4000], "sibling": plan.sibling,
    }


def versions(call: Call[Any]) -> dict[str, str]:
    """Versions of what runs, and the device of the first array."""
    found = {"kvlab": kvlab.__version__, "python": platform.python_version(), "machine": platform.platform()}
    for package in ("numpy", "ml_dtypes", "torch", "triton"):
        if package in sys.modules and _version(package):
            found[package] = _version(package)
    first: Any = next(iter(call.arguments.values()), None)
    if on_gpu(first):
        found["device"] = sys.modules["torch"].cuda.get_device_name(first.device)
    return found


@functools.cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def write(file: zipfile.ZipFile, name: str, told: dict[str, Any], folder: str, members: Mapping[str, Any]) -> None:
    """One JSON member, and an array's in ``folder`` each."""
    for member, values in members.items():
        with file.open(f"{folder}{member}.npy", "w", force_zip64=True) as stream:
            np.lib.format.write_array(stream, values, allow_pickle=False)
    file.writestr(name, json.dumps(told, allow_nan=False, indent=1))


def _captured(call: Call[Any]) -> bool:
    """Tells whether the call goes into a CUDA graph, out of which nothing can be copied."""
    torch = torch_here()
    if torch is None or not any(map(on_gpu, call.arguments.values())):
        return False
    return bool(torch.cuda.is_current_stream_capturing())


@contextlib.contextmanager
def recording(folder: str | os.PathLike[str], *, limit: int = LIMIT, calls: int = CALLS) -> Iterator[Recorder]:
    """Keep the calls of all operations, in all threads, until the block ends: a file each in ``folder``, which is made.
    Gives the :class:`Recorder`, whose ``files`` are those written.

    limit   bytes of values in a file. Arrays are kept from the smallest on, of a cache the pages that the call names;
            of what does not fit a SHA-256, the shape, dtype, strides and some values are kept. A file has besides some
            KB, and about 1 KB for each array
    calls   files; later calls are not kept

    ``KVLAB_RECORD=folder`` does the same for a whole process, with ``KVLAB_RECORD_LIMIT`` and ``KVLAB_RECORD_CALLS``.
    The arguments are written before the call runs, so that a crash leaves them; a GPU is waited for. Calls that a CUDA
    graph captures are not kept; those that raise are, with what they raised. The innermost recorder keeps a call.

    ValueError for a folder that cannot be made, a limit or a number below 0.

    >>> import tempfile
    >>> from kvlab.attention import merge_states
    >>> with tempfile.TemporaryDirectory() as folder, recording(folder, limit=0) as recorder:
    ...     out = merge_states(np.ones((2, 3, 4, 8), np.float32), np.zeros((2, 3, 4), np.float32))
    ...     recorder.files[0].name.split("-")[0], recorder.files[0].stat().st_size < 10_000
    ('merge_states', True)
    """
    recorder = Recorder(folder, limit, calls)
    RECORDERS.append(recorder)
    try:
        yield recorder
    finally:
        RECORDERS.remove(recorder)


def record_process() -> Recorder:
    """Keep the calls of the process as the environment says. ValueError, naming the variable, for what it cannot be."""
    found = {}
    for name, usual in (("LIMIT", LIMIT), ("CALLS", CALLS)):
        text = os.environ.get(f"KVLAB_RECORD_{name}", str(usual))
        if not text.isdecimal():
            raise ValueError(f"KVLAB_RECORD_{name} is {text!r}: must be a number")
        found[name.lower()] = int(text)
    try:
        recorder = Recorder(os.environ["KVLAB_RECORD"], **found)
    except ValueError as error:
        raise ValueError(f"KVLAB_RECORD: {error}") from None
    RECORDERS.insert(0, recorder)
    return recorder
