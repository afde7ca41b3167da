"""The matrix descriptor of wgmma and tcgen05: its 64 bits, the fields in them, and words for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .pen.axis import QUIET
from .pen.palette import INK
from .pen.picture import Picture
from .pen.svg import Canvas
from .pen.text import number, text_width, wrap

if TYPE_CHECKING:
    from kvlab.hardware import SmemDescriptor

CELL = 26.0
HIGH = 24.0
HALF = 32

_COMMON = (
    (0, 14, "start address", "start_address"),
    (16, 14, "LBO", "leading_bytes"),
    (32, 14, "SBO", "stride_bytes"),
    (49, 3, "base offset", "base_offset"),
)
_FIELDS = {
    "sm_90": (*_COMMON, (62, 2, "swizzle", "swizzle")),
    "sm_100": (*_COMMON, (46, 3, "constant", ""), (61, 3, "swizzle", "swizzle")),
}
"""For each architecture: lowest bit, bits, name, attribute of the descriptor."""


def draw_descriptor(
    descriptor: SmemDescriptor, *, major: str = "K", title: str | None = None, caption: str | None = None
) -> Picture:
    """The 64-bit word of a :class:`kvlab.hardware.SmemDescriptor`: its bits, the field that each belongs to, and what
    the fields mean for an operand whose contiguous dimension is ``major`` (``"K"`` or ``"MN"``).

    >>> from kvlab.hardware import SmemDescriptor
    >>> draw_descriptor(SmemDescriptor(0x4000, 16, 1024, "128B")).title
    'sm_90 descriptor 0x4000004000010400: K-major, swizzle 128B, 8 rows every 1024 bytes'
    """
    told = descriptor.explain(major).splitlines()
    word = descriptor.encode()
    fields = _FIELDS[descriptor.arch]
    canvas = Canvas()
    for half, high in enumerate((HALF, 0)):
        y = 22.0 + half * 88
        for bit in range(high + HALF - 1, high - 1, -1):
            _bit(canvas, bit, word, _x(bit), y, fields)
        end = -HALF * CELL
        for low, bits, name, attribute in sorted(fields, reverse=True):
            if high <= low < high + HALF:
                words = f"{name} = {_value(descriptor, low, bits, attribute)}"
                end = _brace(canvas, low, bits, words, y + HIGH, end)
    canvas.extend(HALF * CELL, 0)
    y = 22.0 + 2 * 88 + 2
    for sentence in told[1:]:
        for row in wrap(sentence, HALF * CELL, 11):
            canvas.text(0, y, row, size=11)
            y += 16
    return canvas.picture(title or _title(descriptor, told[0], major), caption or _caption())


def _x(bit: int) -> float:
    return CELL * (HALF - 1 - bit % HALF)


def _bit(
    canvas: Canvas, bit: int, word: int, x: float, y: float, fields: tuple[tuple[int, int, str, str], ...]
) -> None:
    inside = next((name for low, bits, name, _ in fields if low <= bit < low + bits), "")
    on = word >> bit & 1
    title = f"bit {bit} = {on}\n{inside or 'no field: must be 0'}"
    canvas.rect(x, y, CELL, HIGH, fill=INK, opacity=(0.18 if on else 0.06) if inside else 0.0)
    canvas.rect(
        x, y, CELL, HIGH, stroke=INK, stroke_width=0.8, opacity=0.6 if inside else 0.25, title=title,
        dash=None if inside else "2 3",
    )
    canvas.text(
        x + CELL / 2, y + 16, str(on), size=11, mono=True, anchor="middle", weight=700 if on else None,
        opacity=None if on else QUIET, inactive=not inside,
    )
    if bit % 4 == 0 or bit % HALF == HALF - 1:
        canvas.text(x + CELL / 2, y - 5, str(bit), size=10, anchor="middle", opacity=QUIET)


def _brace(canvas: Canvas, low: int, bits: int, words: str, y: float, taken: float) -> float:
    """A bracket under the bits of a field, under it the name and value; lower where the words before reach ``taken``.

    Returns where the words end."""
    x0, x1 = _x(low + bits - 1) + 2, _x(low) + CELL - 2
    canvas.path(f"M{number(x0)} {number(y + 4)}v6H{number(x1)}v-6", stroke=INK, opacity=QUIET)
    half = text_width(words, 11) * 0.54  # bold
    middle = min(max((x0 + x1) / 2, half), HALF * CELL - half)
    lower = 14 if middle - half < taken + 8 else 0
    canvas.text(middle, y + 24 + lower, words, size=11, anchor="middle", weight=600)
    return middle + half


def _value(descriptor: Any, low: int, bits: int, attribute: str) -> str:
    code = descriptor.encode() >> low & (1 << bits) - 1
    if not attribute:
        return str(code)
    value = getattr(descriptor, attribute)
    if attribute == "swizzle":
        return f"{code} ({value.label})"
    return str(code) if attribute == "base_offset" else f"{code} x 16 = {value} bytes"


def _title(descriptor: Any, first: str, major: str) -> str:
    step = "8 of K" if major == "MN" and descriptor.swizzle else "16 bytes along MN" if major == "MN" else "8 rows"
    return f"{first.rstrip('.')}, {step} every {descriptor.stride_bytes} bytes"


def _caption() -> str:
    return (
        "The word that tells the tensor core where an operand lies in shared memory, highest bit first, in two lines "
        "of 32 bits. Dashed: bits of no field."
    )
