"""Traffic of a launch as bars: bytes by way, and the passes of shared memory beside the fewest possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.viz.pen.axis import LABEL, QUIET, WIDTH
from kvlab.viz.pen.legend import keys
from kvlab.viz.pen.palette import ACCENT, BANKS, INK
from kvlab.viz.pen.picture import Picture
from kvlab.viz.pen.svg import Canvas
from kvlab.viz.pen.text import text_width

if TYPE_CHECKING:
    from kvlab.staging import Traffic

ROW, BAR, RIGHT = 26.0, 14.0, 190.0
BYTES, PASSES = BANKS[4 * 7 + 1], BANKS[4 * 4 + 1]


def draw_traffic(traffic: Traffic, *, title: str | None = None, caption: str | None = None) -> Picture:
    """Draws the bytes that a launch moved on each way, and for each role the passes that shared memory took.

    traffic    a :class:`kvlab.staging.Traffic` that counted something; ValueError otherwise

    >>> from kvlab.staging import Traffic
    >>> counted = Traffic()
    >>> counted.move("DRAM->SMEM", 4096)
    >>> counted.access("K read", wavefronts=8, ideal=8, unswizzled=64)
    >>> draw_traffic(counted).title
    '4,096 bytes from DRAM; 8 passes of shared memory, 8 at the least, 64 without the swizzle'
    """
    if not (traffic.moved or traffic.wavefronts):
        raise ValueError("traffic has counted nothing: must be that of a launch")
    names = [edge.replace("->", " → ") for edge in traffic.moved] + list(traffic.wavefronts)
    left = max(text_width(name, 11) for name in names) + 20
    canvas, y, wide = Canvas(), 0.0, WIDTH - RIGHT - left
    if traffic.moved:
        canvas.text(0, y + 12, "bytes", size=11, weight=600)
        y += 22
        most = max(traffic.moved.values())
        for edge, count in traffic.moved.items():
            told = edge.replace("->", " → ")
            canvas.text(0, y + 12, told, size=11)
            canvas.rect(left, y, max(wide * count / max(most, 1), 1), BAR, fill=BYTES, title=f"{told}: {count:,} bytes")
            canvas.text(WIDTH, y + 12, f"{count:,}", size=11, anchor="end")
            y += ROW
    if traffic.wavefronts:
        canvas.text(0, y + 16, "passes of shared memory", size=11, weight=600)
        y += 28
        rows = [(role, traffic.wavefronts[role], traffic.ideal[role], traffic.unswizzled[role])
                for role in traffic.wavefronts]
        most = max(max(row[1:]) for row in rows)
        for role, passes, ideal, plain in rows:
            canvas.text(0, y + 12, role, size=11)
            told = f"{role}: {plain:,} without the swizzle"
            canvas.rect(left, y, wide * plain / most, BAR, fill=INK, opacity=0.14, title=told)
            canvas.rect(left, y, wide * passes / most, BAR, fill=PASSES, title=f"{role}: {passes:,} passes")
            x = left + wide * ideal / most
            canvas.line(x, y - 3, x, y + BAR + 3, stroke=ACCENT, width=2.0)
            canvas.text(WIDTH, y + 12, f"{passes:,} of {ideal:,}", size=11, anchor="end")
            y += ROW
        y = keys(canvas, left, y + 2, [(PASSES, "", "passes"), (ACCENT, "", "the fewest possible (a line)")])
        canvas.rect(left, y, 12, 12, fill=INK, opacity=0.14)
        canvas.text(left + 18, y + 10, "without the swizzle", size=LABEL, opacity=QUIET)
        y += 16
    canvas.extend(WIDTH, y)
    return canvas.picture(title or _title(traffic), caption or _CAPTION)


_CAPTION = "Bytes are those of the whole launch; a pass serves at most one word of each bank."


def _title(traffic: Traffic) -> str:
    told = []
    if any(edge.startswith("DRAM") for edge in traffic.moved):
        told.append(f"{sum(n for edge, n in traffic.moved.items() if edge.startswith('DRAM')):,} bytes from DRAM")
    if traffic.wavefronts:
        passes, ideal, plain = (traffic.total(kind) for kind in ("wavefronts", "ideal", "unswizzled"))
        told.append(f"{passes:,} passes of shared memory, {ideal:,} at the least, {plain:,} without the swizzle")
    return "; ".join(told) or f"{sum(traffic.moved.values()):,} bytes moved"
