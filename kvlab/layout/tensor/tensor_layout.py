"""Protocol of a tile tensor's layout."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class TensorLayout(Protocol):
    """MAX's trait of the layouts of tile tensors: a shape, a stride, and an offset for each coordinate.

    >>> from kvlab.layout import Layout
    >>> isinstance(Layout.row_major(4, 8), TensorLayout)
    True
    """

    @property
    def shape(self) -> Any:
        """Extents, nested as the coordinates are."""

    @property
    def stride(self) -> Any:
        """Elements from one to the next, nested as the shape."""

    @property
    def size(self) -> int:
        """Coordinates."""

    @property
    def cosize(self) -> int:
        """One past the largest offset."""

    def __call__(self, *coord: Any) -> Any:
        """The offset of a coordinate, in elements."""
