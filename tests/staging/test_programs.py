"""Programs side by side, against the loops of one program after the other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.staging import program_ids, ragged_range

GRIDS = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)


@given(GRIDS)
def test_program_ids_count_like_nested_loops(grid: tuple[int, ...]) -> None:
    ids = program_ids(grid)
    expected = [index[::-1] for index in itertools.product(*(range(n) for n in reversed(grid)))]
    assert list(zip(*(i.tolist() for i in ids), strict=True)) == expected
    assert all(i.dtype == np.int32 for i in ids)


BOUNDS = st.lists(st.tuples(st.integers(-5, 40), st.integers(-5, 40)), min_size=1, max_size=5)


@given(BOUNDS, st.integers(1, 7))
def test_ragged_range_is_every_programs_range(bounds: list[tuple[int, int]], step: int) -> None:
    lo, hi = np.array(bounds, np.int32).T
    rounds = list(ragged_range(lo, hi, step))
    assert all(start.dtype == np.int32 for start in rounds)
    for program, (first, last) in enumerate(bounds):
        seen = [int(start[program]) for start in rounds]
        own = len(range(first, last, step))
        assert seen[:own] == list(range(first, last, step))
        assert all(start >= last for start in seen[own:])
    assert len(rounds) == max(len(range(a, b, step)) for a, b in bounds)


def test_no_program() -> None:
    assert list(ragged_range(np.zeros(0, int), np.zeros(0, int), 4)) == []


def test_step() -> None:
    with pytest.raises(ValueError, match="step is 0: must be at least 1"):
        next(ragged_range(np.array([0]), np.array([1]), 0))
