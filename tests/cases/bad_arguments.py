"""Arguments of a good call made bad, one at a time: each function gives a change of the dictionary of arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any]], None]


def change(name: str, new: Callable[[Any], Any]) -> Change:
    def apply(a: dict[str, Any]) -> None:
        a[name] = new(a[name])

    return apply


def in_use(table: Any, value: int) -> Any:
    """The table with ``value`` in an entry of sequence 1 that is in use."""
    table[1, 0] = value
    return table
