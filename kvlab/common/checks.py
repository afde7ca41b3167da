"""Checks of arguments, in one voice: "NAME is VALUE: must be ..."."""

from __future__ import annotations

from typing import Any


def shown(value: Any) -> str:
    """The repr of a value for a message, without its middle where it is long, and where Python has none.

    >>> shown((4, "a")), len(shown(10**4000)), shown(10**9999)
    ("(4, 'a')", 205, 'an integer of 33216 bits')
    """
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # tuples without end; an integer of more than 4300 digits
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 1000 else f"{text[:100]} ... {text[-100:]}"
