"""Functions of Triton's language that lie beside their NumPy twins, in modules that do without Triton, compiled here.

Such a function has a name that ends in ``_kernel``; ``tl`` and numbers of its module are constants to it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any


def compiled(jit: Callable[..., Any], language: ModuleType, *functions: Any) -> dict[str, Any]:
    """``functions`` by name without its ending, each compiled by ``jit``; so are those that they call.

    jit : ``triton.jit`` or ``gluon.jit``.
    language : ``triton.language`` or Gluon's, which the functions
    call ``tl``. The modules that they come from stay as they are.
    """
    every = [*functions]
    for function in every:  # grows
        called = (function.__globals__.get(name) for name in function.__code__.co_names)
        every += {one: None for one in called if _is_twin(one) and one not in every}
    namespaces = [dict(function.__globals__) for function in every]
    made: dict[str, Any] = {}
    for function, names in zip(every, namespaces, strict=True):
        copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        copy.__annotations__ = function.__annotations__
        copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
        made[function.__name__] = jit(copy)
    for names in namespaces:
        numbers = {name: language.constexpr(value) for name, value in names.items() if _is_constant(name, value)}
        names.update(numbers | made | {"tl": language})
    return {function.__name__.removesuffix("_kernel"): made[function.__name__] for function in functions}


def _is_twin(value: Any) -> bool:
    return isinstance(value, FunctionType) and value.__name__.endswith("_kernel")


def _is_constant(name: str, value: Any) -> bool:
    return name.isupper() and isinstance(value, int | float)
