"""Arguments of the algebra that must be layouts, checked in one place."""

from __future__ import annotations

from typing import Any

from kvlab.common.checks import shown
from kvlab.layout.algebra.composed import ComposedLayout
from kvlab.layout.algebra.coordinate_layout import CoordinateLayout
from kvlab.layout.algebra.layout import Layout


def need_layouts(operation: str, *values: Any, composed: bool = False, coordinates: bool = False) -> None:
    """ValueError unless all values are layouts (``composed``: or composed ones; ``coordinates``: or those of
    coordinates, too).

    >>> need_layouts("coalesce", "(4,8):(8,1)")
    Traceback (most recent call last):
        ...
    ValueError: coalesce of '(4,8):(8,1)': must be a Layout (Layout.parse reads text)
    """
    kinds: list[type] = [Layout]
    kinds += [ComposedLayout] * (composed or coordinates) + [CoordinateLayout] * coordinates
    for value in values:
        if not isinstance(value, tuple(kinds)):
            names = " or a ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{operation} of {shown(value)}: must be a {names} (Layout.parse reads text)")
