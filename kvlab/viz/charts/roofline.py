"""A roofline: what kernels reach, under the ceilings of memory and of the tensor cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvlab.viz.pen.axis import LABEL, QUIET, WIDTH
from kvlab.viz.pen.marks import dot, ring
from kvlab.viz.pen.palette import BANKS, INK
from kvlab.viz.pen.picture import Picture
from kvlab.viz.pen.svg import Canvas
from kvlab.viz.pen.text import text_width

LEFT, TOP, HEIGHT = 54.0, 24.0, 330.0
ROW, LOW = 17.0, 14.0
Place = Callable[[float], float]  # of a value, in px
FAMILIES = tuple(BANKS[4 * group] for group in (0, 6, 4, 2, 7, 1, 5, 3))


@dataclass(frozen=True)
class RooflinePoint:
    """One measured kernel.

    name      what was computed, with its sizes
    flops     operations that the task needs (2 for a multiply-add)
    nbytes    bytes that it has to move through DRAM
    seconds   measured
    family    points of one family share a colour
    peers     (name, seconds) of others at the same task
    compute   of the tensor cores, flop/s, where its numbers have another rate than the drawing's

    >>> RooflinePoint("decode", flops=4e9, nbytes=1e9, seconds=1e-3).intensity
    4.0
    """

    name: str
    flops: float
    nbytes: float
    seconds: float
    family: str = ""
    peers: tuple[tuple[str, float], ...] = ()
    compute: float | None = None

    def __post_init__(self) -> None:
        numbers = [(what, getattr(self, what)) for what in ("flops", "nbytes", "seconds")]
        numbers += [] if self.compute is None else [("compute", self.compute)]
        for what, value in numbers + [(f"seconds of {peer}", seconds) for peer, seconds in self.peers]:
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{self.name!r}: {what} {value!r} must be a positive number")

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.nbytes

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.flops / self.seconds

    def ceiling(self, bandwidth: float, compute: float) -> float:
        """The most operations a second that memory (bytes/s) and tensor cores (flop/s, unless it has its own) allow it.

        >>> RooflinePoint("decode", flops=4e9, nbytes=1e9, seconds=1e-3).ceiling(3e12, 8e14)
        12000000000000.0
        """
        return min(self.intensity * bandwidth, self.level(compute))

    def level(self, compute: float) -> float:
        """Rate of the tensor cores with the point's numbers: ``compute``, unless it has its own."""
        return compute if self.compute is None else self.compute


def draw_roofline(
    points: Sequence[RooflinePoint], *, bandwidth: float, compute: float, title: str | None = None,
    caption: str | None = None,
) -> Picture:
    """Operations a second over operations a byte, both logarithmic. Every point is numbered and listed below (points
    that lie together share a label), its peers are rings above or under it.

    bandwidth    of DRAM, bytes/s: the slope
    compute      of the tensor cores, flop/s: the level
    ValueError without a point, or for a ceiling that is not positive.

    >>> point = RooflinePoint("decode", flops=4e9, nbytes=1e9, seconds=4e-4)
    >>> draw_roofline([point], bandwidth=3.1e12, compute=7.9e14).title
    'decode reaches 81 % of its ceiling: memory'
    """
    if not points:
        raise ValueError("points is empty: a roofline needs at least one")
    if not (bandwidth > 0 and compute > 0):
        raise ValueError(f"bandwidth {bandwidth!r} and compute {compute!r} must be positive")
    levels = sorted({compute, *(p.level(compute) for p in points)})
    xs = [p.intensity for p in points] + [level / bandwidth for level in levels]
    low_x, high_x = _decades(min(xs) / 1.5, max(xs) * 4)
    rates = [rate for p in points for rate in _rates(p)] + levels
    low_y, high_y = _decades(min(rates) / 2, max(rates) * 1.2)

    def x_of(value: float) -> float:
        return LEFT + (WIDTH - LEFT) * math.log10(value / low_x) / math.log10(high_x / low_x)

    def y_of(value: float) -> float:
        return TOP + HEIGHT * (1 - math.log10(value / low_y) / math.log10(high_y / low_y))

    canvas = Canvas()
    _grid(canvas, (low_x, high_x), (low_y, high_y), x_of, y_of)
    start = max(low_x, low_y / bandwidth)
    corners = [f"{x_of(x):.2f} {y_of(x * bandwidth):.2f}" for x in (start, *(level / bandwidth for level in levels))]
    roof = "".join(f"M{low}L{high}H{WIDTH:g}" for low, high in pairwise(corners))
    for level in levels:
        canvas.text(WIDTH, y_of(level) - 6, f"tensor cores {level / 1e12:,.0f} TFLOP/s", size=11, anchor="end")
    canvas.path(roof, stroke=INK, stroke_width=2.0)
    canvas.text(x_of(start) + 14, y_of(start * bandwidth) + 4, f"DRAM {bandwidth / 1e12:.2f} TB/s", size=11, fill=INK)
    families = list(dict.fromkeys(p.family for p in points))
    colours = {family: FAMILIES[n % len(FAMILIES)] for n, family in enumerate(families)}
    ordered = sorted(points, key=lambda p: (x_of(p.intensity), -p.rate))
    where = [(x_of(p.intensity), y_of(p.rate)) for p in ordered]
    _labels(canvas, where, [(x_of(p.intensity), y_of(rate)) for p in points for rate in _rates(p)])
    for point, (x, _) in zip(ordered, where, strict=True):  # rings first, the dots over them
        for peer, rate in _peer_rates(point):
            said = f"{peer}, {point.name}: {_percent(point, rate, bandwidth, compute)} of the ceiling"
            ring(canvas, x, y_of(rate), INK, 1.3, said)
    for point, (x, y) in zip(ordered, where, strict=True):
        dot(canvas, x, y, colours[point.family], f"{point.name}\n{_figures(point, bandwidth, compute)}")
    y = TOP + HEIGHT + 40
    widest = max(text_width(p.name, 11) for p in points) + 74
    for number, point in enumerate(ordered, 1):
        canvas.rect(LEFT, y - 9, 10, 10, fill=colours[point.family], radius=5)
        canvas.text(LEFT + 30, y, str(number), size=11, anchor="end", weight=600)
        canvas.text(LEFT + 40, y, point.name, size=11)
        canvas.text(LEFT + widest, y, _figures(point, bandwidth, compute), size=11, opacity=QUIET)
        y += ROW if len(ordered) <= 20 else LOW
    canvas.extend(WIDTH, y)
    best = max(points, key=lambda p: _share(p, p.rate, bandwidth, compute))
    rings = " A ring is a peer at the same task." if any(p.peers for p in points) else ""
    return canvas.picture(title or _title(best, bandwidth, compute), caption or _CAPTION + rings)


def _labels(canvas: Canvas, where: Sequence[tuple[float, float]], marks: Sequence[tuple[float, float]]) -> None:
    """The numbers of the points, of neighbours that lie together as one ("3-7"), clear of marks and each other."""
    groups: list[list[int]] = []
    for i, (x, y) in enumerate(where):
        near = groups and all(abs(a - b) < 12 for a, b in zip((x, y), where[groups[-1][-1]], strict=True))
        if near:
            groups[-1].append(i)
        else:
            groups.append([i])
    placed: list[tuple[float, float, float]] = []  # left, right, baseline
    for group in groups:
        words = str(group[0] + 1) + (f"-{group[-1] + 1}" if len(group) > 1 else "")
        x, y = where[group[-1]]
        left, right, base = x + 12, x + 12 + text_width(words, LABEL), y + 14
        while any(left < b + 4 and right > a - 4 and abs(base - c) < 12 for a, b, c in placed) or any(
            left - 6 < a < right + 6 and base - 14 < b < base + 6 for a, b in marks
        ):
            base += 4
        placed.append((left, right, base))
        canvas.line(x, y, left - 1, base - 4, opacity=0.45)
        canvas.text(left, base, words, size=LABEL, weight=600)


def _peer_rates(point: RooflinePoint) -> list[tuple[str, float]]:
    """(name, operations a second) of each peer."""
    return [(peer, point.flops / seconds) for peer, seconds in point.peers]


def _rates(point: RooflinePoint) -> list[float]:
    """Operations a second of the point itself, then of its peers."""
    return [point.rate, *(rate for _, rate in _peer_rates(point))]


_CAPTION = (
    "Each dot is a measured kernel: how many operations it needs for each byte of DRAM, and how many it does a second. "
    "The sloping line is what memory allows, the level one what the tensor cores allow."
)


def _share(point: RooflinePoint, rate: float, bandwidth: float, compute: float) -> float:
    """Share of the point's ceiling that a rate, the point's or a peer's, reaches."""
    return rate / point.ceiling(bandwidth, compute)


def _title(point: RooflinePoint, bandwidth: float, compute: float) -> str:
    share = _share(point, point.rate, bandwidth, compute)
    what = "memory" if point.intensity * bandwidth < point.level(compute) else "tensor cores"
    return f"{point.name} reaches {share:.0%} of its ceiling: {what}".replace("%", " %")


def _figures(point: RooflinePoint, bandwidth: float, compute: float) -> str:
    speed = f"{_short(point.rate / 1e12)} TFLOP/s, {_short(point.nbytes / point.seconds / 1e12)} TB/s"
    shares = [_percent(point, point.rate, bandwidth, compute)]
    shares += [f"{peer} {_percent(point, rate, bandwidth, compute)}" for peer, rate in _peer_rates(point)]
    return f"{_short(point.intensity)} flop/B, {speed}: {', '.join(shares)}"


def _percent(point: RooflinePoint, rate: float, bandwidth: float, compute: float) -> str:
    return f"{100 * _share(point, rate, bandwidth, compute):.0f} %"


def _short(value: float) -> str:
    """Three digits, no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _decades(low: float, high: float) -> tuple[float, float]:
    """The powers of ten around a range."""
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))


def _grid(canvas: Canvas, xs: tuple[float, float], ys: tuple[float, float], x_of: Place, y_of: Place) -> None:
    """Decades with their values, and what the axes mean."""
    for exponent in range(round(math.log10(xs[0])), round(math.log10(xs[1])) + 1):
        x = x_of(10.0**exponent)
        canvas.line(x, TOP, x, TOP + HEIGHT, opacity=0.14)
        anchor = "middle" if x < WIDTH - 20 else "end"
        canvas.text(x, TOP + HEIGHT + 14, f"{10.0**exponent:g}", size=LABEL, anchor=anchor, opacity=QUIET)
    for exponent in range(round(math.log10(ys[0])), round(math.log10(ys[1])) + 1):
        y = y_of(10.0**exponent)
        canvas.line(LEFT, y, WIDTH, y, opacity=0.14)
        canvas.text(LEFT - 8, y + 3.5, f"{10.0 ** (exponent - 12):g}", size=LABEL, anchor="end", opacity=QUIET)
    canvas.text(0, TOP - 12, "TFLOP/s", size=LABEL, opacity=QUIET)
    canvas.text(WIDTH, TOP + HEIGHT + 28, "operations for each byte of DRAM", size=LABEL, anchor="end", opacity=QUIET)
