"""Checks of arguments, in one voice: "NAME is VALUE: must be ..."."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.common.torch_here import is_torch

MOST_BITS = 56
"""Of an index: sums and products with what it indexes have no more than 63."""
Int64 = np.ndarray[Any, np.dtype[np.int64]]


def shown(value: Any) -> str:
    """The repr of a value for a message, without its middle where it is long; the shape of a tensor.

    >>> shown((4, "a")), len(shown(10**4000)), shown(10**9999)
    ("(4, 'a')", 205, 'an integer of 33216 bits')
    """
    if is_torch(value):
        return f"a tensor {tuple(value.shape)}"
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # tuples without end; an integer of more than 4300 digits
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 1000 else f"{text[:100]} ... {text[-100:]}"


def require(fulfilled: Any, what: str, accepted: str) -> None:
    """ValueError "what: must be accepted" unless fulfilled.

    >>> require(False, "page_size is 0", "at least 1")
    Traceback (most recent call last):
        ...
    ValueError: page_size is 0: must be at least 1
    """
    if not fulfilled:
        raise ValueError(f"{what}: must be {accepted}")


def is_integer(value: Any) -> bool:
    """Tells whether ``value`` is an integer of Python or NumPy; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def integers(name: str, value: Any) -> Int64:
    """``value`` as int64. ValueError, naming the argument, unless it holds integers.

    >>> integers("head_idx", [0.5])
    Traceback (most recent call last):
        ...
    ValueError: head_idx has dtype float64: must be integers
    """
    try:
        array = np.asarray(value)
    except ValueError:  # lists that are nested too deeply, or ragged
        raise ValueError(f"{name} is {shown(value)}: must be integers") from None
    if array.dtype.kind not in "iu" and array.size:
        said = f"is {shown(value)}" if array.dtype.kind in "OUS" else f"has dtype {array.dtype}"
        raise ValueError(f"{name} {said}: must be integers")
    if array.size and (array.max() >> MOST_BITS > 0 or array.min() < -(1 << MOST_BITS)):
        most = array.max() if array.max() >> MOST_BITS > 0 else array.min()
        raise ValueError(f"{name} is {most}: must be integers of {MOST_BITS} bits")
    return array.astype(np.int64, copy=False)


def index(name: str, value: Any, size: int) -> Int64:
    """``value`` as int64. IndexError, naming the argument, unless all of it lies in ``[0, size)``.

    >>> index("head_idx", [0, 8], 8)
    Traceback (most recent call last):
        ...
    IndexError: head_idx is 8: must be in [0, 8)
    """
    array = integers(name, value)
    bad = (array < 0) | (array >= size)
    if bad.any():
        raise IndexError(f"{name} is {array[bad].flat[0]}: must be in [0, {size})")
    return array


def count(name: str, value: Any, least: int = 0, bits: int | None = 48) -> int:
    """``value`` as an int. ValueError, naming the argument, if it is none, below ``least`` or of more ``bits``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):  # a bool is no number
        raise ValueError(f"{name} is {shown(value)}: must be an integer of at least {least}")
    require(number >= least, f"{name} is {shown(number)}", f"at least {least}")
    require(bits is None or number >> bits <= 0, f"{name} is {shown(number)}", f"of at most {bits} bits")
    return number


def path_of(name: str, value: Any) -> Path:
    """``value`` as a path. ValueError, naming the argument, for what is none.

    >>> path_of("folder", 3)
    Traceback (most recent call last):
        ...
    ValueError: folder is 3: must be a path, text or os.PathLike
    """
    fits = isinstance(value, str | os.PathLike) and "\0" not in str(value)
    require(fits, f"{name} is {shown(value)}", "a path, text or os.PathLike")
    return Path(value)


def one_of(name: str, value: Any, size: int, what: str) -> int:
    """``value`` as an int. ValueError, naming the argument, unless it is one of ``size`` things, which are ``what``.

    >>> one_of("stage", 2, 2, "stages")
    Traceback (most recent call last):
        ...
    ValueError: stage is 2: must be one of the 2 stages
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not 0 <= number < size:
        raise ValueError(f"{name} is {shown(value)}: must be one of the {size} {what}")
    return number


def flag(name: str, value: Any) -> bool:
    """``value`` as a bool of Python. ValueError, naming the argument, unless it is one, or one of NumPy.

    >>> flag("strict", "no")
    Traceback (most recent call last):
        ...
    ValueError: strict is 'no': must be True or False
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} is {value!r}: must be True or False")
    return bool(value)


def one_index(name: str, value: Any, size: int) -> int:
    """``value`` as an int in ``[0, size)``: as :func:`index`, and ValueError for an array.

    >>> one_index("page", [0, 1], 4)
    Traceback (most recent call last):
        ...
    ValueError: page is [0, 1]: must be one integer
    """
    array = index(name, value, size)
    require(array.ndim == 0, f"{name} is {shown(value)}", "one integer")
    return int(array)


def plain(value: Any) -> Any:
    """An int for an array without axes, the array itself otherwise."""
    return value if np.ndim(value) else int(value)
