"""Pictures of schedules. Law: a bar is as long as its unit's key blocks, with those of the beginning."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvlab.attention import plan
from kvlab.viz import draw, draw_schedule

BAR = re.compile(
    r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"[^>]*>'
    r"<title>program (\d+), sequences? (\d+)[^:]*: ([\d.]+) key blocks"
)


def bars(svg: str) -> list[tuple[float, ...]]:
    """(x, y, width, program, sequence, key blocks) of every bar, those of the upper panel first."""
    return [tuple(map(float, found)) for found in BAR.findall(svg)]


def test_every_unit_is_a_bar_of_its_length(sound, overlaps) -> None:
    made = plan([9000, 300, 0, 700, 1500], q_heads=8, kv_heads=2, programs=40)
    picture = draw_schedule(made)
    sound(picture)
    assert not overlaps(picture)
    found = bars(picture.svg)
    units = made.units[made.units["kv_head"] == 0]
    shared = found[-len(units) :]
    cost = units["last"] - units["first"] + made.config.overhead
    assert [(bar[3], bar[4], bar[5]) for bar in shared] == [
        (program // 2, sequence, blocks) for program, sequence, blocks
        in zip(units["program"].tolist(), units["sequence"].tolist(), cost.tolist(), strict=True)
    ]
    px = shared[0][2] / shared[0][5]
    assert all(bar[2] == pytest.approx(px * bar[5], abs=0.1) for bar in shared)


def test_the_upper_panel_gives_a_tile_to_the_next_free_program() -> None:
    """Four sequences on two programs: the third goes where the shorter of the first two was."""
    made = plan([320, 160, 160, 320], q_heads=1, kv_heads=1, programs=2)
    alone = bars(draw_schedule(made).svg)[:4]
    assert [(bar[3], bar[4]) for bar in alone] == [(0, 0), (0, 3), (1, 1), (1, 2)]


def test_the_title_says_what_balancing_gives() -> None:
    made = plan([100_000] + 63 * [500], q_heads=32, kv_heads=8)
    picture = draw(made)
    costs = np.array([100_000 // 16 + 4] + 63 * [32 + 4])
    assert picture.title.startswith("64 sequences on 392 programs: the busiest does 1.00 of the mean")
    assert picture.title.endswith(f"with a tile each, {costs.max() / (costs.sum() / 49):.2f}")
    assert "it ends at 6,254, right of this picture" in picture.svg


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_a_picture_of_many_is_small(kv_heads: int, sound) -> None:
    """Bars too narrow to be seen are put together, programs that do not fit are folded away."""
    picture = draw_schedule(plan(np.arange(4096) % 3000, q_heads=32, kv_heads=kv_heads, programs=396))
    sound(picture)
    assert len(bars(picture.svg)) < 6000
    assert ("more programs" in picture.svg) == (kv_heads == 1)


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="schedule has no unit"):
        draw_schedule(plan([0, 0], q_heads=2, kv_heads=1))
    assert plan([0], q_heads=2, kv_heads=1)._repr_html_() is None


def test_a_mixed_batch_has_panels_of_both_walks(sound, overlaps) -> None:
    """Sequences with more rows than a small tile holds are walked after the others: a bar for each unit of both."""
    made = plan([9000, 300, 700, 4000], [1, 1, 300, 40], q_heads=8, kv_heads=2, programs=40)
    assert made.rest is not None
    picture = draw_schedule(made)
    sound(picture)
    assert not overlaps(picture)
    units = [one.units[one.units["kv_head"] == 0] for one in made.walks]
    sequences = {int(bar[4]) for bar in bars(picture.svg)}
    assert sequences == set(np.concatenate([one["sequence"] for one in units]).tolist()) == {0, 1, 2, 3}
    assert picture.svg.count("shared equally, tiles of") == 2
    assert "in two walks: the busiest do" in picture.title
