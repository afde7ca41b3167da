"""The table of pairs rests on its definition, counted the plain way."""

from __future__ import annotations

import itertools

from all_pairs import all_pairs


def test_every_pair_that_fits_is_in_some_row() -> None:
    columns = {"a": (1, 2, 3), "b": ("x", "y"), "c": (False, True), "d": (None, 0, 1, 2)}
    rows = all_pairs(lambda row: row["c"] or row["d"] != 2, **columns)
    found = {pair for row in rows for pair in itertools.combinations(row.items(), 2)}
    every = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(columns, 2)
        for i, j in itertools.product(columns[a], columns[b])
    }
    assert found == every - {(("c", False), ("d", 2))}
    assert len(rows) <= 14, "not far above the 12 of the two longest columns"
