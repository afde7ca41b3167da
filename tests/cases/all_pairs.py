"""Rows of a table in which every two values of different columns meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any


def all_pairs(fits: Callable[[dict[str, Any]], bool] | None = None, **columns: Sequence[Any]) -> list[dict[str, Any]]:
    """The rows: each pair of values of two columns that some row which ``fits`` can hold is in at least one. The same
    rows in every run.

    Each row begins with a pair that is still missing, and takes in every other column the value that adds most pairs.
    """
    names, sizes = list(columns), [len(values) for values in columns.values()]
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i, j in itertools.product(range(sizes[a]), range(sizes[b]))
    }

    def row_of(chosen: dict[int, int]) -> dict[str, Any]:
        return {names[c]: columns[names[c]][v] for c, v in sorted(chosen.items())}

    def new(chosen: dict[int, int], at: tuple[int, int]) -> int:
        return sum(tuple(sorted([(c, v), at])) in missing for c, v in chosen.items())

    def complete(chosen: dict[int, int]) -> dict[int, int] | None:
        if len(chosen) == len(names):
            return chosen if fits is None or fits(row_of(chosen)) else None
        column = next(c for c in range(len(names)) if c not in chosen)
        for value in sorted(range(sizes[column]), key=lambda v: -new(chosen, (column, v))):
            if found := complete({**chosen, column: value}):
                return found
        return None

    rows = []
    for pair in sorted(missing):
        if pair not in missing:
            continue
        chosen = complete(dict(pair))
        missing.discard(pair)  # of which no row can be made, if there is none
        if chosen is not None:
            missing -= set(itertools.combinations(sorted(chosen.items()), 2))
            rows.append(row_of(chosen))
    return rows
