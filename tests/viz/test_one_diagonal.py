"""The one diagonal: its passes are those of the instruction (rests on the rule of wavefronts), its errors speak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvlab.hardware import wavefronts
from kvlab.layout import Swizzle
from kvlab.staging import SwizzledTile
from kvlab.viz import draw_one_diagonal
from kvlab.viz.pen.palette import ALARM


@pytest.mark.parametrize("row_bytes", [64, 128, 256])
def test_ticks_are_the_passes_of_the_first_phase(row_bytes: int, sound: Callable[[Any], Any]) -> None:
    tile, lane = SwizzledTile(32, row_bytes), np.arange(32)
    plain, cured = (
        wavefronts("ldmatrix.x4", t.address(lane % 16, lane // 16)).phases[0].passes for t in (tile.plain(), tile)
    )
    picture = draw_one_diagonal(tile)
    sound(picture)
    assert cured == 1 < plain
    assert picture.body.count(f'fill="{ALARM}"') == plain
    assert picture.title.endswith(f"8 lanes of ldmatrix.x4 take 1 pass instead of {plain}")


def test_a_small_picture_says_the_same(sound: Callable[[Any], Any]) -> None:
    """A law: the passes are those of the large one; it is as wide as half a column."""
    large, small = (draw_one_diagonal(SwizzledTile(32, 256), small=one) for one in (False, True))
    sound(small)
    assert small.width < 480
    assert small.title == large.title
    assert small.body.count(f'fill="{ALARM}"') == large.body.count(f'fill="{ALARM}"')


def test_a_swizzle_that_cures_nothing_says_so() -> None:
    assert draw_one_diagonal(Swizzle(1, 6, 6, "byte")).title.endswith("take 8 passes with and without it")


@pytest.mark.parametrize(
    "swizzle, how, told",
    [
        (Swizzle(2, 0, 3, "byte"), {}, "must move 4 bytes or more"),
        (Swizzle(3, 4, 3, "byte"), {"row_bytes": 72}, "row_bytes is 72: must be a multiple of 16"),
        (7, {}, "swizzle is 7: must be a Swizzle"),
    ],
)
def test_what_cannot_be_drawn(swizzle: Any, how: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        draw_one_diagonal(swizzle, **how)
