"""Arrays of other libraries, by DLPack: over the same memory as arrays of NumPy or torch, and results the other way."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np

from kvlab.common.checks import require
from kvlab.common.torch_here import is_torch

CPU = 1
"""The kind of device, as ``__dlpack_device__`` gives it, that is CPU memory."""
GPUS = (2, 10, 13)


def is_foreign(value: Any) -> bool:
    """Tells whether ``value`` is an array of another library than NumPy and torch that exports itself by DLPack.

    >>> is_foreign(np.zeros(1)), is_foreign(memoryview(b"")), is_foreign(3)
    (False, False, False)
    """
    return not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__") and not is_torch(value)


def as_known(values: dict[str, Any]) -> dict[str, Any]:
    """``values``, foreign arrays among them as arrays of one library: NumPy's where all lie in CPU memory and have
    dtypes of NumPy, else torch's. ValueError, naming the first that cannot be taken.
    """
    foreign = {name: value for name, value in values.items() if is_foreign(value)}
    if not foreign:
        return values
    devices = {name: int(value.__dlpack_device__()[0]) for name, value in foreign.items()}
    for name, device in devices.items():
        what = f"{name} is a {type(foreign[name]).__name__} on device {device} of DLPack"
        require(device == CPU or device in GPUS, what, "CPU memory (1) or a GPU of CUDA (2, 13) or ROCm (10)")
    in_cpu = set(devices.values()) == {CPU}
    libraries = ["numpy"] * in_cpu + ["torch"] * (importlib.util.find_spec("torch") is not None)
    refused = next(iter(foreign)), "torch, which is not installed, takes what is not in CPU memory"
    for library in libraries:
        take, found = importlib.import_module(library).from_dlpack, {}
        try:
            for name in foreign:
                found[name] = take(foreign[name])
            return values | found
        except (BufferError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            refused = name, f"{library}: {error}"
    name, why = refused
    kind = type(foreign[name]).__name__
    raise ValueError(f"{name} is a {kind}: must be one that NumPy or torch take by DLPack ({why})")


def like_caller(result: Any, array: Any) -> Any:
    """Results, an array, a tuple of them or None, in the library of a foreign array, if that has ``from_dlpack``."""
    own = getattr(array, "__array_namespace__", None)
    namespace = own() if own is not None else sys.modules.get(type(array).__module__.partition(".")[0])
    take = getattr(namespace, "from_dlpack", None)
    if take is None or result is None:
        return result
    return tuple(map(take, result)) if isinstance(result, tuple) else take(result)
