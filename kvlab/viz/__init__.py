"""Pictures of what kvlab computes: SVG text by a small writer of our own, one look for all.

Every picture is a :class:`Picture`: it shows itself in a notebook, and :func:`save` writes it to a file.
"""

from __future__ import annotations

from .atom import draw_atom
from .dispatch import draw
from .files import save
from .grid import draw_layout
from .lockstep import draw_lockstep
from .page_table import draw_page_table
from .path import BytePath, draw_path_of_a_byte
from .picture import Picture
from .punch_card import draw_punch_card
from .shared_memory import draw_shared_memory
from .swizzle import draw_swizzle

__all__ = [
    "BytePath",
    "Picture",
    "draw",
    "draw_atom",
    "draw_layout",
    "draw_lockstep",
    "draw_page_table",
    "draw_path_of_a_byte",
    "draw_punch_card",
    "draw_shared_memory",
    "draw_swizzle",
    "save",
]
