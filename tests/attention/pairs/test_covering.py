"""The covering tables. Rests on a law: what rows cover is counted by enumeration."""

from __future__ import annotations

import itertools
from typing import Any

from pairs.covering import Rule, Table

SMALL = Table(
    {"a": (0, 1, 2), "b": "xyz", "c": (False, True), "d": (10, 20, 30, 40)},
    (
        Rule(("a", "b"), lambda a, b: (a, b) != (1, "y")),
        Rule(("b", "c", "d"), lambda b, c, d: not (b == "z" and c and d > 10)),
        Rule(("c", "d"), lambda c, d: c or d != 40),
    ),
)


def pairs_of(row: dict[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def test_rows_hold_every_pair_that_some_allowed_row_has() -> None:
    every = [dict(zip(SMALL.factors, levels, strict=True)) for levels in itertools.product(*SMALL.factors.values())]
    legal = [row for row in every if all(rule.allows(*(row[name] for name in rule.names)) for rule in SMALL.rules)]
    allowed = set().union(*map(pairs_of, legal))
    rows = SMALL.rows()
    assert set().union(*map(pairs_of, rows)) == allowed
    assert all(SMALL.obeys(row) for row in rows)
    assert len(SMALL.pairs()) == len(allowed)
    assert len(rows) <= 18  # 12 at least, the levels of b and d; 72 combinations


def test_rows_are_the_same_each_time() -> None:
    assert SMALL.rows() == SMALL.rows()


def test_a_rule_that_forbids_everything_leaves_no_row() -> None:
    nothing = Table(SMALL.factors, (Rule(("a",), lambda a: False),))
    assert nothing.rows() == []
    assert nothing.pairs() == set()
