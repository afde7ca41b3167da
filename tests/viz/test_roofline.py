"""Rooflines. Law: a dot lies where its numbers say, under the roof or on it; the list names every dot."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import pytest

from kvlab.viz import RooflinePoint, draw_roofline
from kvlab.viz.charts.roofline import HEIGHT, TOP
from kvlab.viz.pen.axis import LABEL
from kvlab.viz.pen.text import text_width

POINTS = [
    RooflinePoint("decode, page 16", 4e9, 1e9, 3.6e-4, "decode"),
    RooflinePoint("decode, page 64", 4e9, 1e9, 3.61e-4, "decode"),
    RooflinePoint("prefill", 5.5e11, 2.7e8, 8e-4, "prefill"),
    RooflinePoint("tiny", 1e6, 1e6, 2e-6, "tiny"),
]
CEILINGS = {"bandwidth": 3.1e12, "compute": 7.9e14}


def dots(svg: str) -> list[tuple[float, float]]:
    found = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="10" height="10"[^>]*pointer-events', svg)
    return [(float(x) + 5, float(y) + 5) for x, y in found]


def test_every_point_is_a_dot_and_a_line_of_the_list(sound, overlaps) -> None:
    picture = draw_roofline(POINTS, **CEILINGS)
    sound(picture)
    assert len(dots(picture.svg)) == len(POINTS)
    assert all(point.name in picture.svg for point in POINTS)
    assert not overlaps(picture)
    assert picture.title == "decode, page 16 reaches 90 % of its ceiling: memory"


def test_peers_are_rings_over_their_task(sound, overlaps) -> None:
    """Law: a peer of half the time stands where a kernel of twice the rate would; the list tells its share."""
    task = RooflinePoint("decode", 4e9, 1e9, 4e-4, peers=(("FA3", 8e-4), ("vLLM", 5e-4)))
    picture = draw_roofline([task, POINTS[2]], **CEILINGS)
    sound(picture)
    assert not overlaps(picture)
    rings = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="9" height="9"', picture.svg)
    alone = draw_roofline([RooflinePoint("slow", 4e9, 1e9, 8e-4), POINTS[2]], **CEILINGS)
    (x, y), _ = dots(alone.svg)
    assert [float(n) + 4.5 for n in rings[0]] == pytest.approx([x, y], abs=0.02)
    assert len(rings) == 2
    assert "81 %, FA3 40 %, vLLM 65 %" in picture.svg
    assert "FA3, decode: 40 % of the ceiling" in picture.svg
    assert "A ring is a peer at the same task." in picture.caption
    slow = draw_roofline([RooflinePoint("decode", 4e9, 1e9, 4e-4, peers=(("FA3", 4e-1),)), POINTS[2]], **CEILINGS)
    (ring,) = re.findall(r'<rect x="[\d.]+" y="([\d.]+)" width="9" height="9"', slow.svg)
    assert float(ring) < TOP + HEIGHT, "above the axis"
    with pytest.raises(ValueError, match=r"seconds of FA3 0\.0 must be a positive number"):
        RooflinePoint("decode", 4e9, 1e9, 4e-4, peers=(("FA3", 0.0),))


def test_points_that_lie_together_share_a_label(overlaps) -> None:
    crowd = [RooflinePoint(f"decode {n}", 4e9, 1e9, 3.6e-4 + n * 1e-6) for n in range(5)]
    picture = draw_roofline([*crowd, POINTS[2]], **CEILINGS)
    assert ">1-5<" in picture.svg
    assert ">6<" in picture.svg
    assert not overlaps(picture)


def test_labels_are_clear_of_marks_and_of_each_other() -> None:
    """Every point is in one label, the faster of one intensity first; one label is of neighbours less than 12 px
    apart.
    """
    points = [RooflinePoint(f"{x}.{y}.", 4e9 * 1.25**x, 1e9, 1e-3 * 1.13**y) for x in range(6) for y in (9, 4, 3, 0)]
    svg = draw_roofline(points, **CEILINGS).svg
    assert re.findall(r">(\d\.\d\.)</text>", svg) == [
        p.name for p in sorted(points, key=lambda p: (p.intensity, -p.rate))
    ]
    where = dots(svg)
    near = [max(abs(a - x), abs(b - y)) < 12 for (a, b), (x, y) in pairwise(where)]
    together = "".join(f" {n}" if n == 1 or not near[n - 2] else f"-{n}" for n in range(1, len(where) + 1)).split()
    found = re.findall(rf'<text x="([\d.]+)" y="([\d.]+)" font-size="{LABEL:g}" font-weight="600">([\d-]+)<', svg)
    assert [words for *_, words in found] == together
    boxes = [(float(x), float(x) + text_width(words, LABEL), float(y)) for x, y, words in found]
    for left, right, base in boxes:
        assert not any(left - 5 < x < right + 5 and base - 12 < y < base + 5 for x, y in where), "a dot of 5 px"
    for (left, right, base), (other_left, other_right, other) in combinations(boxes, 2):
        assert left >= other_right or other_left >= right or abs(base - other) >= LABEL


def test_a_factor_is_the_same_distance_everywhere(sound) -> None:
    """Law of logarithmic axes: ten times the intensity at the same rate moves a dot by one decade, and none up."""
    apart = [RooflinePoint(str(n), 1e9, 1e9 / n, 1e-3) for n in (1, 10, 100)]
    (x0, y0), (x1, y1), (x2, y2) = sorted(dots(draw_roofline(apart, **CEILINGS).svg))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.02)
    assert y0 == y1 == y2


def test_a_kernel_at_its_ceiling_stands_on_the_roof() -> None:
    point = RooflinePoint("copy", 1e12, 1e12, 1e12 / CEILINGS["bandwidth"])
    assert point.rate == pytest.approx(point.ceiling(**CEILINGS))
    picture = draw_roofline([point, RooflinePoint("gemm", 7.9e14, 1e10, 1.0)], **CEILINGS)
    copy, gemm = sorted(dots(picture.svg))
    roof = re.search(r'd="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)H', picture.svg)
    assert roof is not None
    x0, y0, x1, y1 = map(float, roof.groups())
    assert copy[1] == pytest.approx(y0 + (y1 - y0) * (copy[0] - x0) / (x1 - x0), abs=0.05)
    assert gemm[1] == pytest.approx(y1, abs=0.05)
    assert gemm[1] < copy[1], "more operations a second stand higher"


def test_numbers_of_another_rate_have_a_level_of_their_own(overlaps) -> None:
    """Law: each level begins where the slope reaches it; a kernel's share is that of its own."""
    fast = RooflinePoint("e4m3", 1.58e15, 2e10, 1.25, compute=1.58e15)
    assert fast.ceiling(**CEILINGS) == 1.58e15
    picture = draw_roofline([fast, RooflinePoint("gemm", 7.9e14, 1e10, 1.25)], **CEILINGS)
    assert not overlaps(picture)
    assert picture.svg.count(": 80 %</text>") == 2
    assert "tensor cores 790 TFLOP/s" in picture.svg
    assert "tensor cores 1,580 TFLOP/s" in picture.svg
    found = re.findall(r"M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)H", picture.svg)
    (x0, y0, x1, y1), (x2, y2, x3, y3) = [tuple(map(float, one)) for one in found]
    assert (x1, y1) == (x2, y2)
    assert (y3 - y2) / (x3 - x2) == pytest.approx((y1 - y0) / (x1 - x0), abs=0.01), "one slope"
    with pytest.raises(ValueError, match=r"'x': compute -1\.0 must be a positive number"):
        RooflinePoint("x", 1, 1, 1, compute=-1.0)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="points is empty"):
        draw_roofline([], **CEILINGS)
    with pytest.raises(ValueError, match="bandwidth 0"):
        draw_roofline(POINTS, bandwidth=0, compute=1)
    for bad in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"'x': seconds .* must be a positive number"):
            RooflinePoint("x", 1, 1, bad)
