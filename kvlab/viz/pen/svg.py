"""A small SVG writer: rects, text, paths, cells in merged runs, hover details.

Coordinates are CSS pixels with the origin at the top left of the content; :meth:`Canvas.picture` adds margins, the
title and the caption around it. Strings that come from the caller are escaped here and nowhere else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .palette import ACCENT, INK, PAPER, text_on
from .picture import Picture
from .text import MONO, attributes, number, text_width, wrap

MARGIN = 24.0
MIN_TEXT = 9.0
HATCH = "url(#@hatch)"
"""The fill of what is empty, untouched or poisoned."""


class BoxGrid(NamedTuple):
    """A grid of equal rectangles: left edges ``xs`` [columns], top edges ``ys`` [rows], with gaps or without."""

    xs: npt.ArrayLike
    ys: npt.ArrayLike
    width: float
    height: float

    def edges(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """``xs`` and ``ys`` as arrays."""
        return np.asarray(self.xs, float), np.asarray(self.ys, float)


class Canvas:
    """Collects SVG elements and the extent that they cover.

    >>> canvas = Canvas()
    >>> canvas.rect(0, 0, 40, 20, fill="#6252ad", title="byte 0")
    >>> canvas.text(20, 14, "0", anchor="middle")
    >>> canvas.picture("One byte", "A rectangle that stands for one byte.").title
    'One byte'
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.right = 0.0
        self.bottom = 0.0

    @property
    def hatched(self) -> bool:
        """Tells whether something is drawn hatched."""
        return any(HATCH in part for part in self._parts)

    def extend(self, right: float, bottom: float) -> None:
        """Make sure that the picture reaches as far as (right, bottom)."""
        self.right, self.bottom = max(self.right, right), max(self.bottom, bottom)

    def rect(
        self, x: float, y: float, width: float, height: float, *, fill: str = "none", stroke: str | None = None,
        stroke_width: float | None = None, dash: str | None = None, radius: float | None = None,
        opacity: float | None = None, title: str | None = None,
    ) -> None:
        """A rectangle; ``title`` appears when the pointer rests on it."""
        marks = attributes(
            x=float(x), y=float(y), width=float(width), height=float(height), fill=fill, stroke=stroke,
            stroke_width=stroke_width, stroke_dasharray=dash, rx=radius, opacity=opacity,
            pointer_events="all" if title is not None else None,
        )
        self._element("rect", marks, title)
        self.extend(x + width, y + height)

    def look_here(self, x: float, y: float, width: float, height: float, stroke_width: float = 3.0) -> None:
        """An outline in the accent colour, set off from any colour around it by a line of the page's."""
        self.rect(x, y, width, height, stroke=PAPER, stroke_width=stroke_width + 2.0)
        self.rect(x, y, width, height, stroke=ACCENT, stroke_width=stroke_width)

    def path(
        self, d: str, *, fill: str = "none", stroke: str | None = None, stroke_width: float | None = None,
        dash: str | None = None, opacity: float | None = None, crisp: bool = False, title: str | None = None,
    ) -> None:
        """A path in SVG's own words; it does not move the extent."""
        marks = attributes(
            d=d, fill=fill, stroke=stroke, stroke_width=stroke_width, stroke_dasharray=dash, opacity=opacity,
            shape_rendering="crispEdges" if crisp else None, pointer_events="all" if title is not None else None,
        )
        self._element("path", marks, title)

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = INK, width: float = 1.0,
        opacity: float | None = None, dash: str | None = None,
    ) -> None:
        """A straight line."""
        self.path(
            f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}",
            stroke=stroke, stroke_width=width, opacity=opacity, dash=dash,
        )
        self.extend(max(x1, x2), max(y1, y2))

    def arrow(self, points: Sequence[tuple[float, float]], *, stroke: str = INK, width: float = 1.25) -> None:
        """A line through ``points`` (a smooth curve through four of them) that ends in a head."""
        start, *rest = [f"{number(x)} {number(y)}" for x, y in points]
        curve = len(points) == 4
        self.path(f"M{start}" + ("C" if curve else "L") + " ".join(rest), stroke=stroke, stroke_width=width)
        (x0, y0), (x1, y1) = points[-2], points[-1]
        length = float(np.hypot(x1 - x0, y1 - y0)) or 1.0
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        base, half = 7.0, 3.2
        left = (x1 - base * dx - half * dy, y1 - base * dy + half * dx)
        right = (x1 - base * dx + half * dy, y1 - base * dy - half * dx)
        head = " ".join(f"{number(x)} {number(y)}" for x, y in ((x1, y1), left, right))
        self.path(f"M{head}Z", fill=stroke)
        self.extend(max(x for x, _ in points), max(y for _, y in points))

    def text(
        self, x: float, y: float, text: str, *, size: float = 11.0, anchor: str = "start", mono: bool = False,
        weight: int | None = None, fill: str | None = None, opacity: float | None = None, halo: bool = False,
        inactive: bool = False,
    ) -> None:
        """A line of text with its baseline at ``y``; ``halo`` keeps it readable over lines.

        inactive    the name of something that takes no part: faint, and marked as such"""
        if size < MIN_TEXT:
            raise ValueError(f"text {text!r} of {size} px is smaller than {MIN_TEXT} px; give it as a hover title")
        common = attributes(
            x=float(x), y=float(y), font_size=float(size), text_anchor=None if anchor == "start" else anchor,
            font_family=MONO if mono else None, font_weight=weight,
        )
        escaped = html.escape(text, quote=False)
        quiet = ' class="inactive"' if inactive else ""
        opacity = 0.3 if inactive else opacity
        if halo:
            edge = attributes(stroke=PAPER, stroke_width=3, stroke_linejoin="round", aria_hidden="true")
            self._parts.append(f"<text{common}{edge}>{escaped}</text>")
        self._parts.append(f"<text{common}{quiet}{attributes(fill=fill, opacity=opacity)}>{escaped}</text>")
        width = text_width(text, size, mono)
        self.extend(x + width * {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor], y + 0.25 * size)

    def cells(
        self, boxes: BoxGrid, index: npt.ArrayLike, colours: Sequence[str], *, opacity: float | None = None,
        rules: bool = True,
    ) -> None:
        """A grid of filled cells: one path for a colour, runs of equal neighbours merged.

        index [rows, columns]      position in ``colours``; -1 is hatched, -2 left out
        rules                      thin lines of the page's colour between cells"""
        (left, top), (width, height), colour = boxes.edges(), boxes[2:], np.asarray(index)
        if colour.shape != (len(top), len(left)):
            raise ValueError(f"index of shape {colour.shape} does not fit {len(top)} rows and {len(left)} columns")
        if colour.size == 0:
            return
        starts = np.ones(colour.shape, bool)
        starts[:, 1:] = (colour[:, 1:] != colour[:, :-1]) | (np.diff(left) > width + 1e-6)
        row, first = np.nonzero(starts)
        flat = np.flatnonzero(starts)
        last = first + np.diff(np.append(flat, colour.size)) - 1
        runs: dict[int, list[str]] = {}
        h = number(height)
        columns = [number(x) for x in left]
        rows = [number(y) for y in top]
        widths = [number(w) for w in left[last] + width - left[first]]
        for key, r, c, w in zip(colour[row, first].tolist(), row.tolist(), first.tolist(), widths, strict=True):
            runs.setdefault(key, []).append(f"M{columns[c]} {rows[r]}h{w}v{h}h-{w}z")
        for key, parts in sorted(runs.items()):
            if key != -2:
                self.path("".join(parts), fill=HATCH if key == -1 else colours[key], opacity=opacity, crisp=True)
        if rules:
            self._rules(boxes)
        self.extend(float(left[-1]) + width, float(top[-1]) + height)

    def _rules(self, boxes: BoxGrid) -> None:
        (left, top), (width, height) = boxes.edges(), boxes[2:]
        x0, x1 = number(left[0]), number(left[-1] + width)
        y0, y1 = number(top[0]), number(top[-1] + height)
        lines = [f"M{number(x)} {y0}V{y1}" for x in left[1:]] if width >= 4 else []
        lines += [f"M{x0} {number(y)}H{x1}" for y in top[1:]]
        self.path("".join(lines), stroke=PAPER, stroke_width=1.0 if width >= 10 else 0.5)

    def borders(
        self, boxes: BoxGrid, key: npt.ArrayLike, *, stroke: str = "#000000", stroke_width: float = 2.4,
        opacity: float | None = None,
    ) -> None:
        """Lines around every region of cells with equal ``key`` [rows, columns]; black, as cells are pale."""
        (left, top), (width, height), k = boxes.edges(), boxes[2:], np.asarray(key)
        lines: list[str] = []
        for edge, size, across, values, draw in (
            (left, width, top, k, f"M%s %sv{number(height)}"),
            (top, height, left, k.T, f"M%s %sh{number(width)}"),
        ):
            apart = np.diff(edge) > size + 1e-6  # a fold: both sides of the gap are borders
            changes = np.ones((values.shape[0], values.shape[1] + 1), bool)
            changes[:, 1:-1] = (values[:, 1:] != values[:, :-1]) | apart
            for i, j in zip(*np.nonzero(changes), strict=True):
                ends = [edge[-1] + size] if j == len(edge) else [edge[j]]
                if 0 < j < len(edge) and apart[j - 1]:
                    ends.append(edge[j - 1] + size)
                for end in ends:
                    place = (end, across[i]) if draw.endswith(f"v{number(height)}") else (across[i], end)
                    lines.append(draw % tuple(number(v) for v in place))
        self.path("".join(lines), stroke=stroke, stroke_width=stroke_width, opacity=opacity)

    def outlines(self, boxes: BoxGrid, key: npt.ArrayLike, *, stroke_width: float = 2.4) -> None:
        """Borders in the page's ink, set off from cells of any colour by a line of its paper."""
        for stroke, wide in ((PAPER, stroke_width + 2.2), (INK, stroke_width)):
            self.borders(boxes, key, stroke=stroke, stroke_width=wide)

    def labels(
        self, xs: Iterable[float], ys: Iterable[float], texts: Iterable[str], backgrounds: Iterable[str | None], *,
        size: float = 10.0, weight: int | None = None, anchor: str = "middle",
    ) -> None:
        """Many short monospaced texts, each readable on its own background (None: the page)."""
        if size < MIN_TEXT:
            raise ValueError(f"labels of {size} px are smaller than {MIN_TEXT} px; give them as hover titles")
        groups: dict[str, list[str]] = {}
        for x, y, text, background in zip(xs, ys, texts, backgrounds, strict=True):
            fill = INK if background is None or not background.startswith("#") else text_on(background)
            groups.setdefault(fill, []).append(
                f'<text x="{number(x)}" y="{number(y)}">{html.escape(text, quote=False)}</text>'
            )
        for fill, parts in groups.items():
            common = attributes(
                fill=fill, font_size=float(size), font_family=MONO, font_weight=weight,
                text_anchor=None if anchor == "start" else anchor,
            )
            self._parts.append(f"<g{common}>{''.join(parts)}</g>")

    def hover(self, boxes: BoxGrid, words: str, *values: npt.ArrayLike) -> None:
        """An invisible rectangle with a title over every cell of a grid.

        words, values    a %-format and its arguments, each broadcast to [rows, columns]

        One formatting for the whole grid: thousands of titles take milliseconds."""
        left, top = (edge.tolist() for edge in boxes.edges())
        shape = (len(top), len(left))
        x = [number(v) for v in left] * len(top)
        y = [text for v in top for text in [number(v)] * len(left)]
        fields = []
        for value in values:
            field = np.broadcast_to(np.asarray(value), shape).ravel()
            escape = field.dtype.kind in "OU"
            fields.append([html.escape(str(v), quote=False) for v in field] if escape else field.tolist())
        one = (
            f'<rect x="%s" y="%s" width="{number(boxes.width)}" height="{number(boxes.height)}"><title>'
            f"{html.escape(words, quote=False)}</title></rect>"
        )
        flat: list[object] = [None] * (len(x) * (2 + len(fields)))
        for k, column in enumerate((x, y, *fields)):
            flat[k :: 2 + len(fields)] = column
        self._parts.append(f'<g class="hover" fill="none" pointer-events="all">{one * len(x) % tuple(flat)}</g>')

    def embed(self, picture: Picture, x: float, y: float) -> None:
        """The content of another picture, without its title and caption, with its top left corner at (x, y)."""
        self._parts.append(f'<g transform="translate({number(x)} {number(y)})">{picture.content}</g>')
        self.extend(x + picture.extent[0], y + picture.extent[1])

    def _element(self, name: str, marks: str, title: str | None) -> None:
        inside = f"><title>{html.escape(title, quote=False)}</title></{name}>" if title is not None else "/>"
        self._parts.append(f"<{name}{marks}{inside}")

    def picture(self, title: str, caption: str) -> Picture:
        """The finished picture: ``title`` states the finding, ``caption`` says in a sentence what is seen.

        It is as wide as the longest word of both."""
        bold = 1.14  # times as wide as text_width says, in DejaVu Sans
        words = [(word, 15 * bold) for word in title.split()] + [(word, 12) for word in caption.split()]
        width = max(self.right, 420.0, *(text_width(*word) for word in words))
        frame = Canvas()
        y = MARGIN
        for line in wrap(title, width, 15):
            y += 16
            frame.text(MARGIN, y, line, size=15, weight=600)
            y += 4
        y += 2
        for line in wrap(caption, width, 12):
            y += 13
            frame.text(MARGIN, y, line, size=12, opacity=0.75)
            y += 3.5
        y += 18
        inside = "".join(self._parts)
        content = f'<g transform="translate({number(MARGIN)} {number(y)})">{inside}</g>'
        return Picture(
            title=title, caption=caption, width=round(width + 2 * MARGIN, 2), height=round(y + self.bottom + MARGIN, 2),
            body="".join(frame._parts) + content, content=inside, extent=(self.right, self.bottom),
        )
