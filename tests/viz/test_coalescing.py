"""Sectors: outlined are those that the access itself counts (tests/hardware/test_sectors.py proves it)."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.hardware import coalescing
from kvlab.viz import draw

LANE = np.arange(32)
ACCESSES = {
    "misaligned": coalescing(LANE * 4 + 8, 4),
    "strided": coalescing(LANE * 64, 4),
    "rows": coalescing(LANE // 8 * 256 + LANE % 8 * 16, 16),
    "shared": coalescing(LANE // 2 * 2, 2),
    "odd": coalescing(LANE * 3, 3),
    "masked": coalescing(LANE * 16, 16, mask=LANE < 5),
}


@pytest.mark.parametrize("name", ACCESSES)
def test_sectors_that_move_are_outlined_and_lanes_named(name: str, sound, hovers, overlaps) -> None:
    access = ACCESSES[name]
    picture = draw(access)
    root = sound(picture)
    assert picture.svg.count('stroke="var(--kvlab-accent') == access.sectors + 1  # and the legend
    assert picture.title == access.headline()
    assert not overlaps(picture)
    where = {int(t.partition("\n")[0].removeprefix("byte ").replace(",", "")): t for t in hovers(root)}
    for lane in np.flatnonzero(access.active).tolist():
        first = min(np.flatnonzero(access.active & (access.addresses == access.addresses[lane])))
        assert where[int(access.addresses[lane])].partition("\n")[2].startswith(f"lane {first}")


def test_many_lines_fold(sound, overlaps) -> None:
    picture = draw(coalescing(LANE * 4096, 4))
    sound(picture)
    assert "more lines" in picture.svg
    assert picture.height < 1000
    assert not overlaps(picture)


def test_nothing_moves() -> None:
    idle = coalescing(LANE, 1, mask=np.zeros(32, bool))
    with pytest.raises(ValueError, match="no lane is active"):
        draw(idle)
    assert idle._repr_html_() is None
