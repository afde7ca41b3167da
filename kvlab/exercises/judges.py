"""Judges of what readers build: each tries all inputs and says what is wrong, or ""."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.hardware import wavefronts
from kvlab.layout import Layout

ROWS, VECTORS = 16, 4


def narrow_swizzle(place: Any) -> str:
    """Faults of ``place(row, vector)``, the place 0 to 3 of a 16-byte vector in its row of 64 bytes, for 16 rows that
    ``ldmatrix.x4`` reads without a conflict.

    >>> narrow_swizzle(lambda row, vector: vector)
    'ldmatrix.x4 takes 16 passes, 4 are possible'
    >>> narrow_swizzle(lambda row, vector: vector ^ row // 2 % 4), narrow_swizzle(lambda row, vector: vector + row)
    ('', 'row 1 has places [1, 2, 3, 4]: a row has 0, 1, 2 and 3, each once')
    """
    row, vector = np.indices((ROWS, VECTORS))
    if not callable(place):
        return "a function of (row, vector) is asked"
    try:
        places = np.asarray(place(row, vector))
    except Exception as error:  # whatever the reader's function raises is the reader's
        return f"it raises {error!r} when row and vector are arrays"
    if places.shape != row.shape:
        return f"it gives the shape {places.shape} for arrays of {row.shape}"
    wrong = np.flatnonzero((np.sort(places, axis=1) != np.arange(VECTORS)).any(axis=1))
    if wrong.size:
        return f"row {wrong[0]} has places {places[wrong[0]].tolist()}: a row has 0, 1, 2 and 3, each once"
    lane = np.arange(32)
    passes = 0
    for first in (0, 2):
        at = lane % 16 * 64 + places[lane % 16, first + lane // 16] * 16
        passes = max(passes, wavefronts("ldmatrix.x4", at).wavefronts)
    return "" if passes == 4 else f"ldmatrix.x4 takes {passes} passes, 4 are possible"


def padded_transpose(layout: Any) -> str:
    """Faults of a layout of (column, row) over a row-major tile of 8 rows and 32 columns whose rows are padded to 40.

    >>> padded_transpose("(32,8):(1,40)"), padded_transpose("(8,32):(40,1)")
    ('', 'its shape is (8, 32): 32 columns come first, then 8 rows')
    >>> padded_transpose(Layout("(32,8):(1,32)"))
    'column 0 of row 1 is sent to 32, it lies at 40'
    """
    try:
        made = layout if isinstance(layout, Layout) else Layout(layout)
        shape = made.shape
    except (TypeError, ValueError) as error:
        return f"that is no layout: {error}"
    if shape != (32, 8):
        return f"its shape is {shape}: 32 columns come first, then 8 rows"
    column, row = np.indices((32, 8))
    found = np.array([[made(c, r) for r in range(8)] for c in range(32)])
    wrong = np.argwhere(found != row * 40 + column)
    if not wrong.size:
        return ""
    c, r = (int(x) for x in wrong[0])
    return f"column {c} of row {r} is sent to {found[c, r]}, it lies at {r * 40 + c}"
