"""Text before it is drawn: numbers, attributes, widths, lines."""

from __future__ import annotations

import html

SANS = "system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif"
MONO = "ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"


def number(x: float) -> str:
    """A coordinate as text: at most two decimals, no trailing zeros.

    >>> number(3.0), number(2.125), number(-0.001)
    ('3', '2.12', '0')
    """
    text = f"{x:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def text_width(text: str, size: float, mono: bool = False) -> float:
    """An estimate of the width of ``text`` in px, for the widest of the fonts that may be used.

    >>> text_width("ab", 10, mono=True)
    12.04
    """
    if mono:
        return round(0.602 * size * len(text), 2)
    em = sum(0.36 if c in " .,:;'|!()[]il/" else 0.97 if c in "mwMW%@" else 0.7 if c.isupper() else 0.62 for c in text)
    return round(em * size, 2)


def wrap(text: str, width: float, size: float) -> list[str]:
    """``text`` in lines of at most ``width`` px (a longer word keeps a line of its own).

    >>> wrap("one two three", 60, 12)
    ['one two', 'three']
    """
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def attributes(**values: object) -> str:
    """`` name="value"`` for every value that is not None; ``_`` in a name stands for ``-``."""
    return "".join(
        f' {name.replace("_", "-")}="{number(value) if isinstance(value, float) else html.escape(str(value))}"'
        for name, value in values.items()
        if value is not None
    )
