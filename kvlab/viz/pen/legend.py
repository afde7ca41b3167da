"""Legends: only where the colours are not labelled in place."""

from __future__ import annotations

from collections.abc import Sequence

from .axis import LABEL, QUIET
from .palette import BANKS, INK
from .svg import HATCH, BoxGrid, Canvas
from .text import text_width

BANKS_WIDTH, KEYS_WIDTH = 352.0, 852.0


def bank_legend(canvas: Canvas, x: float, y: float, name: str = "bank") -> float:
    """The 32 colours of the banks with their numbers; returns the y below it."""
    canvas.text(x, y + 10, name, size=LABEL, opacity=QUIET)
    left = x + text_width(name, LABEL) + 10
    cell = BANKS_WIDTH / 32
    canvas.cells(BoxGrid([left + cell * i for i in range(32)], [y], cell, 12), [list(range(32))], BANKS, rules=False)
    for i in range(0, 32, 4):
        canvas.text(left + cell * i, y + 24, str(i), size=LABEL, opacity=QUIET)
    canvas.text(left + BANKS_WIDTH, y + 24, "31", size=LABEL, anchor="end", opacity=QUIET)
    return y + 28


def keys(canvas: Canvas, x: float, y: float, entries: Sequence[tuple[str, str, str]]) -> float:
    """Small squares with words: entries of (fill, stroke or "", words); returns the y below."""
    left = x
    for fill, stroke, words in entries:
        wide = 18 + text_width(words, LABEL) + 16
        if left > x and left + wide > KEYS_WIDTH:
            left, y = x, y + 18
        edge = stroke or (INK if fill in (HATCH, "none") else None)
        canvas.rect(left, y, 12, 12, fill=fill, stroke=edge, stroke_width=1.6 if stroke else 0.5)
        canvas.text(left + 18, y + 10, words, size=LABEL, opacity=QUIET)
        left += wide
    return y + 18
