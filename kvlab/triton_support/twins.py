"""Functions of Triton's language that lie beside their NumPy twins, in modules that do without Triton, compiled here.

Such a function has a name that ends in ``_kernel``; ``tl`` and numbers of its module are constants to it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any


def compiled(jit: Callable[..., Any], language: ModuleType, *functions: Any) -> dict[str, Any]:
    """``functions`` by name without its ending, each compiled by ``jit``; they may call one another.

    jit : ``triton.jit`` or ``gluon.jit``.
    language : ``triton.language``, which the functions
    call ``tl``. The modules that they come from stay as they are.
    """
    namespaces = [dict(function.__globals__) for function in functions]
    made: dict[str, Any] = {"tl": language}
    for function, names in zip(functions, namespaces, strict=True):
        copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        copy.__annotations__ = function.__annotations__
        copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
        made[function.__name__] = jit(copy)
    for names in namespaces:
        numbers = {name: language.constexpr(value) for name, value in names.items() if _is_constant(name, value)}
        names.update(numbers | made)
    return {name.removesuffix("_kernel"): function for name, function in made.items() if name != "tl"}


def _is_constant(name: str, value: Any) -> bool:
    return name.isupper() and isinstance(value, int | float)
