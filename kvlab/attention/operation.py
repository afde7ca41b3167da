"""What all public operations share: flags and names are looked at first, and torch.compile does not look in."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from kvlab.attention.inputs import require, shown

__all__ = ["FLAGS", "NAMES", "checked_keywords", "operation"]

F = TypeVar("F", bound=Callable[..., Any])

FLAGS = {"return_lse": False, "base2": False, "batch_invariant": False, "causal": True, "check": True}
"""The keywords that are True or False, and whether they may be None."""
NAMES = ("backend", "arch", "kv_layout")
"""The keywords that are names."""
MOST_BITS = 4096
"""Of an integer: longer ones Python does not write into messages."""


def operation(function: F) -> F:
    """The public operation ``function``: its flags and names are checked before it is called, and to torch.compile it
    is one call that breaks the graph.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **checked_keywords(kwargs))

    hidden: list[Callable[..., Any]] = []

    def from_dynamo() -> Callable[..., Any]:
        if not hidden:
            hidden.append(importlib.import_module("torch").compiler.disable(checked))
        return hidden[0]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:  # imported by the first torch.compile; hiding takes a microsecond
            return from_dynamo()(*args, **kwargs)
        return checked(*args, **kwargs)

    return call  # type: ignore[return-value]


def checked_keywords(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords, flags as bool. ValueError for a flag that is not one, and for a name that is no text.

    >>> checked_keywords({"causal": np.True_, "check": None, "scale": 2})
    {'causal': True, 'check': None, 'scale': 2}
    >>> checked_keywords({"return_lse": "no"})
    Traceback (most recent call last):
        ...
    ValueError: return_lse 'no': must be True or False
    """
    for name, value in kwargs.items():
        if name in FLAGS:
            if value is not True and value is not False:
                optional = FLAGS[name]
                fits = isinstance(value, np.bool_) or (optional and value is None)
                require(fits, f"{name} {shown(value)}", "True, False or None" if optional else "True or False")
                kwargs[name] = None if value is None else bool(value)
        elif type(value) is int and value.bit_length() > MOST_BITS:
            require(False, f"{name} {shown(value)}", f"an integer of at most {MOST_BITS}")
        elif name in NAMES:
            require(isinstance(value, str), f"{name} {shown(value)}", "text, one of the names it knows")
    return kwargs
