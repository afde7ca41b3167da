"""``draw(obj)``: the standard picture of an object, found by the names of its classes."""

from __future__ import annotations

import importlib
from typing import Any

from .picture import Picture

__all__ = ["draw"]

_PICTURES: dict[str, tuple[str, str]] = {
    "Layout": ("grid", "draw_layout"),
    "ComposedLayout": ("grid", "draw_composed_layout"),
    "LinearMap": ("linear_layout", "draw_linear_layout"),
    "Encoding": ("encoding", "draw_encoding"),
    "TileBase": ("tile_tensor", "draw_tile_tensor"),
    "Swizzle": ("swizzle", "draw_swizzle"),
    "Wavefronts": ("punch_card", "draw_punch_card"),
    "Coalescing": ("coalescing", "draw_coalescing"),
    "MmaAtom": ("atom", "draw_atom"),
    "TmaDescriptor": ("tma_box", "draw_tma_box"),
    "TMATensorTile": ("tma_box", "draw_tma_box"),
    "TMAGather4Tile": ("tma_box", "draw_tma_box"),
    "SmemDescriptor": ("descriptor", "draw_descriptor"),
    "CopyPlan": ("copy_picture", "draw_copy_plan"),
    "SubTileLoaderLDS_st_8x32": ("copy_picture", "draw_copy_plan"),
    "PagedKVCache": ("page_table", "draw_page_table"),
    "PagedKVCacheCollection": ("page_table", "draw_page_table"),
    "Lockstep": ("lockstep", "draw_lockstep"),
    "BytePath": ("path", "draw_path_of_a_byte"),
    "KVBuffer": ("kv_buffer", "draw_kv_buffer"),
    "DecodeStreamingKVBuffer": ("kv_buffer", "draw_kv_buffer"),
    "DecodeKVBuffer": ("kv_buffer", "draw_kv_buffer"),
    "CpAsyncKVBuffer": ("kv_buffer", "draw_kv_buffer"),
    "TmaKVBuffer": ("kv_buffer", "draw_kv_buffer"),
    "FragmentMap": ("fragment_map", "draw_fragment_map"),
    "KVTile": ("kv_tile", "draw_kv_tile"),
    "Timeline": ("timeline", "draw_timeline"),
    "SwizzledTile": ("shared_memory", "draw_shared_memory"),
    "ndarray": ("grid", "draw_layout"),
}
"""Class name -> module of this room and function that draws such an object."""


def draw(obj: Any, **how: Any) -> Picture:
    """The standard picture of ``obj``: a layout, a swizzle, an MMA atom, the wavefronts of an instruction, ...

    ``how`` goes to the function that draws it, such as :func:`draw_layout`.

    Raises ValueError for an object that has no picture.

    >>> draw(7)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: cannot draw 7 (int); known are Layout, ComposedLayout, ...
    """
    if isinstance(obj, Picture):
        if how:
            raise ValueError(f"{', '.join(how)} cannot change a finished picture; draw the object itself with it")
        return obj
    for cls in type(obj).__mro__:
        if cls.__name__ in _PICTURES:
            module, function = _PICTURES[cls.__name__]
            picture: Picture = getattr(importlib.import_module(f".{module}", __package__), function)(obj, **how)
            return picture
    raise ValueError(f"cannot draw {obj!r} ({type(obj).__name__}); known are {', '.join(_PICTURES)}")
