"""Layouts, swizzles and views of memory through them. NumPy only."""

from kvlab.layout.layout import Layout
from kvlab.layout.linear_layout import LinearLayout
from kvlab.layout.swizzle import Swizzle
from kvlab.layout.tile_tensor import TileTensor

__all__ = ["Layout", "LinearLayout", "Swizzle", "TileTensor"]
