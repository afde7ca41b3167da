"""Compile-time parameters are what their class says they are."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from kvlab.common.checks import count, flag, shown
from kvlab.layout import Swizzle
from kvlab.memory import as_dtype

T = TypeVar("T")


def set_typed(params: Any, **least: int) -> None:
    """Replace the fields of a frozen dataclass by ints, bools, tuples and dtypes of Python and NumPy, as their
    annotations say. TypeError or ValueError that begins with the field's name and repeats its value unless they are;
    ints are at least 1, or what is given.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Tile:
    ...     BN: int
    ...     swizzle: Swizzle | None = None
    >>> set_typed(Tile(0))
    Traceback (most recent call last):
        ...
    ValueError: BN is 0: must be at least 1
    >>> set_typed(Tile(64, swizzle=3))
    Traceback (most recent call last):
        ...
    TypeError: swizzle is 3: must be a Swizzle or None
    """
    for field in fields(params):
        name, value = field.name, getattr(params, field.name)
        if field.type == "int":
            value = count(name, value, least.get(name, 1))
        elif field.type == "bool":
            value = flag(name, value)
        elif field.type == "np.dtype[Any]":
            value = _dtype(name, value)
        elif field.type == "Swizzle | None" and not (value is None or isinstance(value, Swizzle)):
            raise TypeError(f"{name} is {shown(value)}: must be a Swizzle or None")
        elif field.type == "tuple[int, int, int]":
            value = _shape(name, value)
        object.__setattr__(params, name, value)


def of_type(params: Any, kind: type[T]) -> T:
    """``params``. TypeError unless they are of that type.

    >>> of_type(None, Swizzle)
    Traceback (most recent call last):
        ...
    TypeError: params is None: must be a Swizzle
    """
    if not isinstance(params, kind):
        raise TypeError(f"params is {shown(params)}: must be a {kind.__name__}")
    return params


def _dtype(name: str, value: Any) -> np.dtype[Any]:
    try:
        return as_dtype(value)
    except ValueError as error:
        raise ValueError(f"{name} {shown(value)}: {error}") from None


def _shape(name: str, value: Any) -> tuple[int, ...]:
    """Three ints of at least 1."""
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise ValueError(f"{name} is {shown(value)}: must be (M, N, K)")
    return tuple(count(f"{name} {shown(value)}: {letter}", n, 1) for letter, n in zip("MNK", value, strict=True))
