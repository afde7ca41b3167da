"""Arguments of the algebra that must be layouts, checked in one place."""

from __future__ import annotations

from typing import Any

from kvlab.common.checks import shown
from kvlab.layout.algebra.composed import ComposedLayout
from kvlab.layout.algebra.layout import Layout


def need_layouts(operation: str, *values: Any, composed: bool = False) -> None:
    """ValueError unless all values are layouts (``composed``: or composed ones).

    >>> need_layouts("coalesce", "(4,8):(8,1)")
    Traceback (most recent call last):
        ...
    ValueError: coalesce of '(4,8):(8,1)': must be a Layout (Layout.parse reads text)
    """
    for value in values:
        if not isinstance(value, (Layout, ComposedLayout) if composed else Layout):
            kinds = " or a ComposedLayout" if composed else ""
            raise ValueError(f"{operation} of {shown(value)}: must be a Layout{kinds} (Layout.parse reads text)")
