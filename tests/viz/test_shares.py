"""Shares of ceilings. Law: a dot lies as far to the right as its share says; every implementation of a task has one."""

from __future__ import annotations

import re

import pytest

from kvlab.viz import draw_shares

TASKS = [
    ("prefill, 4096 keys, causal", {"kvlab": 0.8, "FA3": 0.71, "cuDNN": 0.66}),
    ("decode of 64 sequences", {"kvlab": 0.945, "FA3": 0.95}),
    ("append", {"kvlab": 0.5}),
]


def marks(svg: str) -> list[tuple[float, float]]:
    """Middles of the dots and rings of the rows: (x, y)."""
    found = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="(10|9)" height="\3"[^>]*pointer-events', svg)
    return [(float(x) + float(size) / 2, float(y) + float(size) / 2) for x, y, size in found]


def test_every_share_is_a_mark_where_it_says(sound, overlaps) -> None:
    picture = draw_shares(TASKS)
    sound(picture)
    assert not overlaps(picture)
    found = marks(picture.svg)
    wanted = [share for _, shares in TASKS for who, share in [*list(shares.items())[1:], next(iter(shares.items()))]]
    assert len(found) == len(wanted)
    (x0, _), (x1, _) = found[0], found[2]
    scale = (x1 - x0) / (wanted[2] - wanted[0])
    for (x, _), share in zip(found, wanted, strict=True):
        assert x - x0 == pytest.approx(scale * (share - wanted[0]), abs=0.05)
    assert len({y for _, y in found}) == len(TASKS)


def test_the_axis_and_the_words_are_those_of_the_marks() -> None:
    """A dot stands where the axis has its share, and says whose it is; the column has the first one's share."""
    svg = draw_shares(TASKS).svg
    axis = {int(n): float(x) for x, n in re.findall(r'<text x="([\d.]+)"[^>]*"middle"[^>]*>(\d+) %<', svg)}
    assert list(axis) == [0, 20, 40, 60, 80, 100]
    assert max(x for x, _ in marks(svg)) == pytest.approx(axis[0] + 0.95 * (axis[100] - axis[0]), abs=0.05)
    assert "FA3, prefill, 4096 keys, causal: 71.0% of the ceiling" in svg
    assert ">94 %<" in svg
    rings = re.findall(r'width="9" height="9"[^>]*stroke="([^"]+)"', svg)  # of the legend, then row by row
    assert rings == [rings[0], rings[1], rings[0], rings[1], rings[0]]
    assert rings[0] != rings[1]


def test_what_is_ahead_is_counted(sound) -> None:
    picture = draw_shares(TASKS)
    assert picture.title == "kvlab is as fast as its fastest peer, or faster, in 1 of 2 tasks"  # append has no peer
    assert ">1.13<" in picture.svg  # 0.8 / 0.71
    assert ">0.99<" in picture.svg
    assert draw_shares([("a", {"kvlab": 0.5, "FA3": 0.5})]).title.endswith("in 1 of 1 tasks")
    sound(draw_shares(TASKS[:1], title="One task", caption="A caption of one sentence is here."))


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ([], "tasks is empty"),
        ([("a", {})], "at least one share each"),
        ([("a", {"kvlab": 1.2})], "'a': share 1.2 of kvlab"),
        ([("a", {"kvlab": 0.0})], "'a': share 0.0 of kvlab"),
        ([("a", {"kvlab": float("nan")})], "share nan"),
        ([("a", {"kvlab": 0.5}), ("b", {"FA3": 0.5})], "begin with the same implementation, 'kvlab'"),
    ],
)
def test_bad_input(tasks: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        draw_shares(tasks)
