"""Pairwise covering tables: few rows in which every two levels that may meet do meet. Deterministic.

A table has factors, each with levels, and rules that forbid combinations. Faults that need two features at once are
found by rows in which all pairs of levels occur; those rows are far fewer than all combinations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Row = dict[str, Any]
Level = tuple[str, int]
"""A factor and the number of a level of it."""


@dataclass(frozen=True)
class Rule:
    """``allows(*levels of names)``: whether these may stand in one row."""

    names: tuple[str, ...]
    allows: Callable[..., bool]


@dataclass(frozen=True)
class Table:
    """Factors with their levels, and what may not meet; ``besides``: levels of a few further rows, in which three meet
    that no pair makes meet. They may be none of a factor's.
    """

    factors: Mapping[str, Sequence[Any]]
    rules: tuple[Rule, ...] = ()
    besides: tuple[Row, ...] = ()

    def rows(self) -> list[Row]:
        """Rows that obey the rules and in which every pair of levels that some such row has occurs."""
        names = sorted(self.factors, key=lambda name: -len(self.factors[name]))  # the hardest first; stable
        open_pairs = dict.fromkeys(self._pairs(names))
        used = dict.fromkeys(self._levels(names), 0)
        rows: list[dict[str, int]] = []
        while open_pairs:
            (a, i), (b, j) = next(iter(open_pairs))

            def gain(row: dict[str, int], level: Level, open_pairs: Any = open_pairs) -> tuple[int, int]:
                new = sum(_pair(level, other) in open_pairs for other in row.items())
                return -new, used[level]

            row = self._completed({a: i, b: j}, names, gain)
            if row is None:  # no row has these two
                del open_pairs[(a, i), (b, j)]
                continue
            for pair in _pairs_of(row):
                open_pairs.pop(pair, None)
            for level in row.items():
                used[level] += 1
            rows.append(row)
        return [{name: self.factors[name][row[name]] for name in self.factors} for row in rows]

    def further_rows(self) -> list[Row]:
        """Those of ``besides``; a factor that one leaves out has its first level."""
        first = {name: levels[0] for name, levels in self.factors.items()}
        rows = [first | row for row in self.besides]
        assert all(self.obeys(row) and row.keys() == first.keys() for row in rows)
        return rows

    def pairs(self) -> set[tuple[Level, Level]]:
        """The pairs of levels that some row obeying the rules has."""
        names = list(self.factors)
        some = {_pair((a, i), (b, j)): {a: i, b: j} for (a, i), (b, j) in self._pairs(names)}
        return {pair for pair, row in some.items() if self._completed(row, names) is not None}

    def levels_of(self, row: Row) -> dict[str, int]:
        """The numbers of a row's levels."""
        return {name: list(levels).index(row[name]) for name, levels in self.factors.items()}

    def obeys(self, row: Mapping[str, Any]) -> bool:
        """Whether all rules allow a row, or what there is of it."""
        return _allowed(self.rules, row)

    @cached_property
    def _rules_of(self) -> dict[str, tuple[Rule, ...]]:
        names = {name for rule in self.rules for name in rule.names}
        return {name: tuple(rule for rule in self.rules if name in rule.names) for name in names}

    def _may_be_completed(self, row: Row) -> bool:
        """Whether the rules allow what there is of a row, and beside it a level of each factor that is missing."""
        return self.obeys(row) and all(
            any(_allowed(rules, {**row, name: level}) for level in self.factors[name])
            for name, rules in self._rules_of.items() if name not in row
        )

    def _levels(self, names: Sequence[str]) -> Iterator[Level]:
        return ((name, i) for name in names for i in range(len(self.factors[name])))

    def _pairs(self, names: Sequence[str]) -> Iterator[tuple[Level, Level]]:
        for a, b in itertools.combinations(names, 2):
            for i, j in itertools.product(range(len(self.factors[a])), range(len(self.factors[b]))):
                yield _pair((a, i), (b, j))

    def _completed(
        self, row: dict[str, int], names: Sequence[str], order: Callable[..., Any] | None = None
    ) -> dict[str, int] | None:
        """``row`` with a level for every factor, the first in ``order`` that the rules allow; None if there is none."""
        if not self._may_be_completed({name: self.factors[name][i] for name, i in row.items()}):
            return None
        name = next((name for name in names if name not in row), None)
        if name is None:
            return row
        levels = list(range(len(self.factors[name])))
        if order is not None:
            levels.sort(key=lambda i: order(row, (name, i)))
        whole = (self._completed({**row, name: i}, names, order) for i in levels)
        return next((found for found in whole if found is not None), None)


def _allowed(rules: Sequence[Rule], row: Mapping[str, Any]) -> bool:
    return all(rule.allows(*(row[name] for name in rule.names)) for rule in rules if row.keys() >= {*rule.names})


def _pair(one: Level, other: Level) -> tuple[Level, Level]:
    return (one, other) if one <= other else (other, one)


def _pairs_of(row: Mapping[str, int]) -> Iterator[tuple[Level, Level]]:
    return (_pair(one, other) for one, other in itertools.combinations(row.items(), 2))
