"""Cases of a grid, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

Case = dict[str, Any]


def sampled(
    axes: dict[str, tuple[Any, ...]], count: int, seed: int, first: Sequence[Case] = (),
    allowed: Callable[[Case], bool] = lambda case: True,
) -> list[Case]:
    """``first``, and cases drawn until each value of each axis is there; then ``count`` in all."""
    draw = random.Random(seed)
    cases = list(first)
    missing = {(axis, value) for axis, values in axes.items() for value in values}
    while len(cases) < count or missing:
        case = {axis: draw.choice(values) for axis, values in axes.items()}
        if not allowed(case) or (len(cases) >= count and not missing & set(case.items())):
            continue
        cases.append(case)
        missing -= set(case.items())
    return cases


def label(case: Case) -> str:
    """The name of a test."""
    return "-".join(str(value).replace(" ", "") for value in case.values())
