"""Tables as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def text_columns(rows: Sequence[Sequence[str]], left: Collection[int] | None = None) -> list[str]:
    """Lines of text, one for each row of cells, whose columns begin two spaces apart.

    left  : the columns that are aligned to the left, the others are to the right; None: all.

    >>> text_columns([("step", "bytes"), ("load", "4096"), ("s", "64")], left=[0])
    ['step  bytes', 'load   4096', 's        64']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if left is None or column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
