"""The picture of a lockstep run as SVG, for places that take no HTML: the same bands, with the lines wrapped here."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from .pen.palette import ALARM
from .pen.picture import Picture
from .pen.svg import Canvas

if TYPE_CHECKING:
    from kvlab.mirror.lockstep_result import Difference, Lockstep, Maximum
    from kvlab.mirror.source import TwinSide

_CHARACTERS, _SIZE, _HEIGHT = 58, 9.0, 12.0
_ADVANCE = 0.602 * _SIZE
_NUMBERS = 4 * _ADVANCE
_COLUMN = _NUMBERS + _CHARACTERS * _ADVANCE + 6
_MIDDLE = 150.0
_WIDTH = 2 * _COLUMN + _MIDDLE


def draw_lockstep(run: Lockstep) -> Picture:
    """Two sources side by side, the largest error of each output between them, the first difference in red."""
    canvas = Canvas()
    y = 0.0
    for name, kernel, emulator in run.ran:
        for x, text in ((0.0, _title(kernel)), (_COLUMN, f"{name}: max error"), (_COLUMN + _MIDDLE, _title(emulator))):
            canvas.text(x, y + 12, text, size=12, weight=600)
        y += 18
        for (lines, step), (others, _) in zip(kernel.bands, emulator.bands, strict=True):
            maxima, first = run.at(name, step) if step is not None else ((), None)
            left, right = _wrapped(kernel, lines), _wrapped(emulator, others)
            middle = _middle(maxima, first)
            height = _HEIGHT * max(len(left), len(right), len(middle)) + 5
            if first is not None:
                canvas.rect(0, y, _WIDTH, height, fill=ALARM, opacity=0.14)
                canvas.rect(0, y, _WIDTH, height, stroke=ALARM, stroke_width=1.5)
            canvas.line(0, y, _WIDTH, y, opacity=0.2)
            _code(canvas, 0.0, y, left, step is not None)
            _code(canvas, _COLUMN + _MIDDLE, y, right, step is not None)
            for row, (text, number, shade, bad) in enumerate(middle):
                base = y + _HEIGHT * (row + 0.85)
                if shade:
                    canvas.rect(_COLUMN, base - 9, _MIDDLE - 8, _HEIGHT, fill=ALARM, opacity=0.35 * shade)
                weight = 700 if bad else None
                canvas.text(_COLUMN + 2, base, text, size=_SIZE, mono=True, weight=weight)
                canvas.text(_COLUMN + _MIDDLE - 10, base, number, size=_SIZE, mono=True, anchor="end", weight=weight)
            y += height
        y += 10
    canvas.extend(_WIDTH, y)
    finding = run.finding
    return canvas.picture(
        ("✓ " if run.ok else "✗ ") + finding[:1].upper() + finding[1:],
        f"Kernel and emulator, step by step. {run.legend}",
    )


def _title(side: TwinSide) -> str:
    return f"{side.path.rsplit('/', 1)[-1]}: {side.function}"


def _wrapped(side: TwinSide, lines: range) -> list[tuple[str, int, str]]:
    """Rows of (line number, indent, text); what follows a line's first row is indented and has no number."""
    rows: list[tuple[str, int, str]] = []
    for line in lines:
        text = side.lines[line - 1].rstrip()
        indent = len(text) - len(text.lstrip())
        parts = textwrap.wrap(text.strip(), _CHARACTERS - indent - 2, break_on_hyphens=False) or [""]
        rows += [(str(line) if not i else "", indent + 2 * bool(i), part) for i, part in enumerate(parts)]
    while rows and not rows[-1][2]:
        rows.pop()
    return rows


def _middle(maxima: tuple[Maximum, ...], first: Difference | None) -> list[tuple[str, str, float, bool]]:
    """Rows of (left text, right text, tint, whether it differs)."""
    rows: list[tuple[str, str, float, bool]] = []
    if first is not None:
        at = f"iteration {', '.join(map(str, first.iteration))}" if first.iteration else ""
        rows = [("✗ FIRST DIFFERENCE", "", 0.0, True), (at, f"program {first.program}", 0.0, True)]
    elif not all(m.ok for m in maxima):
        rows = [("✗ differs, too", "", 0.0, True)]
    for m in maxima:
        number = f"{'not comparable' if m.problem else m.number} {'✓' if m.ok else '✗'}"
        rows.append((m.output, number, m.shade, not m.ok))
    return rows


def _code(canvas: Canvas, x: float, y: float, rows: list[tuple[str, int, str]], step: bool) -> None:
    marker = step
    for row, (number, indent, text) in enumerate(rows):
        base = y + _HEIGHT * (row + 0.85)
        marker = marker and (row == 0 or not number)
        if number:
            canvas.text(x + _NUMBERS - 6, base, number, size=_SIZE, mono=True, anchor="end", opacity=0.75)
        weight = 700 if marker else None
        opacity = 0.75 if text.startswith("#") and not marker else None
        canvas.text(x + _NUMBERS + indent * _ADVANCE, base, text, size=_SIZE, mono=True, weight=weight, opacity=opacity)
