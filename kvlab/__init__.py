"""kvlab: follow a KV cache byte by byte from DRAM through shared memory into tensor-core registers.

``import kvlab`` loads nothing but this file; a room is imported when it is first named.

>>> import kvlab
>>> kvlab.memory.bfloat16
dtype(bfloat16)
"""

from __future__ import annotations

import importlib
from types import ModuleType

__version__ = "0.2.0"

_ROOMS = (
    "attention",
    "cache",
    "data",
    "formats",
    "hardware",
    "integrations",
    "layout",
    "memory",
    "mirror",
    "replay",
    "rosetta",
    "simt",
    "staging",
    "triton_support",
    "viz",
    "xray",
)

__all__ = ["__version__"]


def __getattr__(name: str) -> ModuleType:
    if name in _ROOMS:
        return importlib.import_module(f"kvlab.{name}")
    raise AttributeError(f"module 'kvlab' has no attribute {name!r}; its rooms are {', '.join(_ROOMS)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
