"""Points of a diagram: a filled dot, and the ring of something that it is compared with."""

from __future__ import annotations

from .palette import PAPER
from .svg import Canvas


def dot(canvas: Canvas, x: float, y: float, fill: str, title: str | None = None) -> None:
    """A dot around (x, y), set off from what lies under it."""
    canvas.rect(x - 5, y - 5, 10, 10, fill=fill, stroke=PAPER, stroke_width=1.5, radius=5, title=title)


def ring(canvas: Canvas, x: float, y: float, stroke: str, stroke_width: float, title: str | None = None) -> None:
    """A ring around (x, y)."""
    canvas.rect(x - 4.5, y - 4.5, 9, 9, stroke=stroke, stroke_width=stroke_width, radius=4.5, title=title)
