"""Pictures of what kvlab computes: SVG text by a small writer of our own, one look for all.

Every picture is a :class:`Picture`: it shows itself in a notebook, and :func:`save` writes it to a file. The module
of a picture is imported when it is first drawn.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .atom import draw_atom
    from .coalescing import draw_coalescing
    from .copy_picture import draw_copy_plan
    from .copy_plan import CopyPlan
    from .cure import draw_cure
    from .descriptor import draw_descriptor
    from .dispatch import draw
    from .encoding import draw_encoding
    from .files import save
    from .fragment_map import draw_fragment_map
    from .gather4 import draw_gather4
    from .grid import draw_composed_layout, draw_layout
    from .kv_buffer import draw_kv_buffer
    from .kv_tile import draw_kv_tile
    from .linear_layout import draw_linear_layout, draw_thread_values
    from .lockstep import draw_lockstep
    from .page_table import draw_page_table
    from .path import BytePath, draw_path_of_a_byte
    from .picture import Picture
    from .punch_card import draw_punch_card
    from .quantised_page import draw_quantised_page
    from .roofline import RooflinePoint, draw_roofline
    from .shared_memory import draw_shared_memory
    from .shares import draw_shares
    from .swizzle import draw_swizzle
    from .tile_film import draw_tile_film
    from .tile_tensor import draw_tile_tensor
    from .tiles_beside import draw_tiles_beside
    from .timeline import draw_timeline
    from .tma_box import draw_tma_box

_MODULES = {
    "BytePath": "path",
    "CopyPlan": "copy_plan",
    "Picture": "picture",
    "RooflinePoint": "roofline",
    "draw": "dispatch",
    "draw_atom": "atom",
    "draw_coalescing": "coalescing",
    "draw_composed_layout": "grid",
    "draw_copy_plan": "copy_picture",
    "draw_cure": "cure",
    "draw_descriptor": "descriptor",
    "draw_encoding": "encoding",
    "draw_fragment_map": "fragment_map",
    "draw_gather4": "gather4",
    "draw_kv_buffer": "kv_buffer",
    "draw_kv_tile": "kv_tile",
    "draw_layout": "grid",
    "draw_linear_layout": "linear_layout",
    "draw_lockstep": "lockstep",
    "draw_page_table": "page_table",
    "draw_path_of_a_byte": "path",
    "draw_punch_card": "punch_card",
    "draw_quantised_page": "quantised_page",
    "draw_roofline": "roofline",
    "draw_shared_memory": "shared_memory",
    "draw_shares": "shares",
    "draw_swizzle": "swizzle",
    "draw_thread_values": "linear_layout",
    "draw_tile_film": "tile_film",
    "draw_tile_tensor": "tile_tensor",
    "draw_tiles_beside": "tiles_beside",
    "draw_timeline": "timeline",
    "draw_tma_box": "tma_box",
    "save": "files",
}

__all__ = [
    "BytePath",
    "CopyPlan",
    "Picture",
    "RooflinePoint",
    "draw",
    "draw_atom",
    "draw_coalescing",
    "draw_composed_layout",
    "draw_copy_plan",
    "draw_cure",
    "draw_descriptor",
    "draw_encoding",
    "draw_fragment_map",
    "draw_gather4",
    "draw_kv_buffer",
    "draw_kv_tile",
    "draw_layout",
    "draw_linear_layout",
    "draw_lockstep",
    "draw_page_table",
    "draw_path_of_a_byte",
    "draw_punch_card",
    "draw_quantised_page",
    "draw_roofline",
    "draw_shared_memory",
    "draw_shares",
    "draw_swizzle",
    "draw_thread_values",
    "draw_tile_film",
    "draw_tile_tensor",
    "draw_tiles_beside",
    "draw_timeline",
    "draw_tma_box",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_MODULES)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
