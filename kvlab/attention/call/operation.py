"""Common part of the public operations: flags and names are looked at first, torch.compile does not look in, and the
modules of the folder are reached through the operation.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

from kvlab.attention.call.checks import require, shown
from kvlab.common.opaque import opaque

P = ParamSpec("P")
R = TypeVar("R")

FLAGS = {"return_lse": False, "base2": False, "batch_invariant": False, "causal": True, "check": True}
"""The keywords that are True or False, and whether they may be None."""
NAMES = ("backend", "arch", "kv_layout")
"""The keywords that are names."""
KINDS: dict[str, type] = {**dict.fromkeys(FLAGS, bool), **dict.fromkeys(NAMES, str)}
MOST_BITS = 4096
"""Of an integer: longer ones Python does not write into messages."""


class PublicOperation(Generic[P, R]):
    """A public operation: calls ``function`` when its flags and names are right. To torch.compile it is one call that
    breaks the graph.

    An operation that has the name of its folder hides the folder. Modules of the folder that are imported are its
    attributes, so ``import kvlab.attention.mha_decode.kernel`` means what it says.

    >>> import kvlab.attention.mha_decode.config
    >>> kvlab.attention.mha_decode
    <operation kvlab.attention.mha_decode>
    >>> kvlab.attention.mha_decode.config.__name__
    'kvlab.attention.mha_decode.config'
    """

    __name__: str
    __wrapped__: Callable[P, R]
    explain: Callable[..., Any]
    """The plan of a call, with the arguments of the call."""

    def __init__(self, function: Callable[P, R]) -> None:
        functools.update_wrapper(self, function)

    @opaque
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.__wrapped__(*args, **checked_keywords(kwargs))

    def __get__(self, instance: object, owner: type | None = None) -> Any:  # binds as a function does
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> ModuleType:
        module = sys.modules.get(f"{self.__module__}.{name}")
        if module is None:
            raise AttributeError(f"{self!r} has no attribute {name!r}, and {self.__module__}.{name} is not imported")
        return module

    def __reduce__(self) -> str:  # pickled by name, as a function
        return self.__name__

    def __repr__(self) -> str:
        return f"<operation kvlab.attention.{self.__name__}>"


def checked_keywords(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords, flags as bool. ValueError for a flag that is not one, and for a name that is no text.

    >>> checked_keywords({"causal": np.True_, "check": None, "scale": 2})
    {'causal': True, 'check': None, 'scale': 2}
    >>> checked_keywords({"return_lse": "no"})
    Traceback (most recent call last):
        ...
    ValueError: return_lse is 'no': must be True or False
    """
    for name, value in kwargs.items():
        expected, given = KINDS.get(name), type(value)
        if given is expected:
            continue
        if expected is bool and not (value is None and FLAGS[name]):
            accepted = "True, False or None" if FLAGS[name] else "True or False"
            require(isinstance(value, np.bool_), f"{name} is {shown(value)}", accepted)
            kwargs[name] = bool(value)
        elif expected is str:
            require(isinstance(value, str), f"{name} is {shown(value)}", "text, one of the names it knows")
        elif given is int:
            require(value.bit_length() <= MOST_BITS, f"{name} is {shown(value)}", f"of at most {MOST_BITS} bits")
    return kwargs
