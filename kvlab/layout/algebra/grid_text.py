"""Layouts as text tables."""

from __future__ import annotations

from kvlab.layout.algebra.checked import need_layouts
from kvlab.layout.algebra.composed import ComposedLayout
from kvlab.layout.algebra.layout import Layout


def format_layout(layout: Layout | ComposedLayout) -> str:
    """The layout and the table of its offsets, mode 0 downwards and mode 1 to the right (CuTe's ``print_layout``).

    >>> print(format_layout(Layout("(2,3):(3,1)")))
    (2,3):(3,1)
          0   1   2
        +---+---+---+
     0  | 0 | 1 | 2 |
        +---+---+---+
     1  | 3 | 4 | 5 |
        +---+---+---+
    """
    need_layouts("format_layout", layout, composed=True)
    if layout.rank != 2:
        raise ValueError(f"format_layout of {layout}: must be two modes; coalesce or slice it first")
    table = layout.offsets()
    width = max(len(str(layout.cosize - 1)), len(str(table.shape[1] - 1)), len(str(table.shape[0] - 1)))
    margin = " " * (width + 3)
    rule = margin + f"+{'-' * (width + 2)}" * table.shape[1] + "+"
    lines = [str(layout), margin + "".join(f"  {j:>{width}} " for j in range(table.shape[1])).rstrip(), rule]
    for i, row in enumerate(table.tolist()):
        lines += [f" {i:>{width}}  " + "".join(f"| {offset:>{width}} " for offset in row) + "|", rule]
    return "\n".join(lines)
