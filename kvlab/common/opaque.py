"""Functions that torch.compile does not look into: each call breaks the graph and runs as it is.

torch is not imported for it. Its compiler is there, as ``torch._dynamo``, from the first ``torch.compile`` on.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

REASON = "kvlab runs as it is, outside of the graph: use fullgraph=False"


def opaque(function: F) -> F:
    """The same function, into which torch.compile does not look."""
    hidden: list[Callable[..., Any]] = []

    def from_compiler() -> Callable[..., Any]:
        if not hidden:
            hidden.append(importlib.import_module("torch").compiler.disable(function, reason=REASON))
        return hidden[0]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = from_compiler() if "torch._dynamo" in sys.modules else function
        return run(*args, **kwargs)

    return call  # type: ignore[return-value]


def opaque_methods(cls: C) -> C:
    """The class, into whose constructor and public methods torch.compile does not look."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, FunctionType):
            setattr(cls, name, opaque(member))
        elif isinstance(member, classmethod):
            setattr(cls, name, classmethod(opaque(member.__func__)))
    return cls
