"""The chart of errors: a mark for each comparison, alarm where one is too large. Rests on counting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvlab.viz import draw_errors
from kvlab.viz.pen.palette import ACCENT, ALARM


def test_marks_are_comparisons(sound: Callable[[Any], Any]) -> None:
    picture = draw_errors({"emulator": [(0.0, 1e-3), (2e-4, 1e-3)], "kernel": [(3e-3, 2e-3), (1e-9, 1e-3)]})
    sound(picture)
    assert picture.body.count(f'fill="{ACCENT}"') == 3
    assert picture.body.count(f'fill="{ALARM}"') == 1
    assert picture.title == "1 of 4 comparisons is outside of what is allowed; the largest is 1.5 times that (kernel)"


def test_an_error_that_is_no_number_is_outside() -> None:
    assert draw_errors({"kernel": [(float("inf"), 1.0)]}).title.startswith("1 of 1 comparisons is outside")


@pytest.mark.parametrize("siblings", [{}, {"kernel": []}, {"kernel": [(-1.0, 1.0)]}, {"kernel": [(1.0, 0.0)]}])
def test_what_cannot_be_drawn(siblings: Any) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        draw_errors(siblings)
