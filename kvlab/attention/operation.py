"""What all public operations share: flags and names are looked at first, and torch.compile does not look in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from kvlab.attention.inputs import require, shown
from kvlab.cache.opaque import opaque

__all__ = ["FLAGS", "NAMES", "checked_keywords", "operation"]

F = TypeVar("F", bound=Callable[..., Any])

FLAGS = {"return_lse": False, "base2": False, "batch_invariant": False, "causal": True, "check": True}
"""The keywords that are True or False, and whether they may be None."""
NAMES = ("backend", "arch", "kv_layout")
"""The keywords that are names."""
KINDS: dict[str, type] = {**dict.fromkeys(FLAGS, bool), **dict.fromkeys(NAMES, str)}
MOST_BITS = 4096
"""Of an integer: longer ones Python does not write into messages."""


def operation(function: F) -> F:
    """The public operation ``function``: its flags and names are checked before it is called, and to torch.compile it
    is one call that breaks the graph.
    """

    @opaque
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **checked_keywords(kwargs))

    return checked  # type: ignore[return-value]


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
        expected, given = KINDS.get(name), type(value)
        if given is expected:
            continue
        if expected is bool and not (value is None and FLAGS[name]):
            accepted = "True, False or None" if FLAGS[name] else "True or False"
            require(isinstance(value, np.bool_), f"{name} {shown(value)}", accepted)
            kwargs[name] = bool(value)
        elif expected is str:
            require(isinstance(value, str), f"{name} {shown(value)}", "text, one of the names it knows")
        elif given is int:
            require(value.bit_length() <= MOST_BITS, f"{name} {shown(value)}", f"of at most {MOST_BITS} bits")
    return kwargs
