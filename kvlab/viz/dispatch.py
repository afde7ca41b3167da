"""``draw(obj)``: the standard picture of an object, found by its class."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from .picture import Picture

__all__ = ["draw"]

_PICTURES: dict[str, tuple[str, str]] = {
    "kvlab.layout.layout:Layout": ("grid", "draw_layout"),
    "kvlab.layout.composed:ComposedLayout": ("grid", "draw_composed_layout"),
    "kvlab.layout.linear_map:LinearMap": ("linear_layout", "draw_linear_layout"),
    "kvlab.layout.encodings.base:Encoding": ("encoding", "draw_encoding"),
    "kvlab.layout.tile_base:TileBase": ("tile_tensor", "draw_tile_tensor"),
    "kvlab.layout.swizzle:Swizzle": ("swizzle", "draw_swizzle"),
    "kvlab.hardware.banks.wavefront:Wavefronts": ("punch_card", "draw_punch_card"),
    "kvlab.hardware.banks.sectors:Coalescing": ("coalescing", "draw_coalescing"),
    "kvlab.hardware.mma.atom:MmaAtom": ("atom", "draw_atom"),
    "kvlab.hardware.copies.tensor_map:TmaDescriptor": ("tma_box", "draw_tma_box"),
    "kvlab.hardware.copies.tma_tile:TMATensorTile": ("tma_box", "draw_tma_box"),
    "kvlab.hardware.copies.tma_gather4:TMAGather4Tile": ("tma_box", "draw_tma_box"),
    "kvlab.hardware.mma.smem_descriptor:SmemDescriptor": ("descriptor", "draw_descriptor"),
    "kvlab.hardware.copies.lds_dma:SubTileLoaderLDS": ("copy_picture", "draw_copy_plan"),
    "kvlab.hardware.copies.reg_tile:RegTileLoader": ("copy_picture", "draw_copy_plan"),
    "kvlab.hardware.copies.lds_dma:SubTileLoaderLDS_st_8x32": ("copy_picture", "draw_copy_plan"),
    "kvlab.viz.copy_plan:CopyPlan": ("copy_picture", "draw_copy_plan"),
    "kvlab.viz.path:BytePath": ("path", "draw_path_of_a_byte"),
    "kvlab.cache.paged:PagedKVCache": ("page_table", "draw_page_table"),
    "kvlab.cache.collection:PagedKVCacheCollection": ("page_table", "draw_page_table"),
    "kvlab.staging.kv_buffer:KVBuffer": ("kv_buffer", "draw_kv_buffer"),
    "kvlab.staging.decode_kv_buffer:DecodeKVBuffer": ("kv_buffer", "draw_kv_buffer"),
    "kvlab.staging.decode_streaming:DecodeStreamingKVBuffer": ("kv_buffer", "draw_kv_buffer"),
    "kvlab.staging.nvidia_buffer:NvidiaKVBuffer": ("kv_buffer", "draw_kv_buffer"),
    "kvlab.staging.fragments:FragmentMap": ("fragment_map", "draw_fragment_map"),
    "kvlab.staging.iterator:KVTile": ("kv_tile", "draw_kv_tile"),
    "kvlab.staging.timeline:Timeline": ("timeline", "draw_timeline"),
    "kvlab.staging.swizzled_tile:SwizzledTile": ("shared_memory", "draw_shared_memory"),
    "kvlab.mirror.lockstep_result:Lockstep": ("lockstep", "draw_lockstep"),
    "numpy:ndarray": ("grid", "draw_layout"),
}
"""Class, as module:name -> module of this room and function that draws its objects, and those of its subclasses.

An object of a class exists only where the class's module has been imported, so nothing is imported to find the class.
"""


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
    drawer = _drawer(type(obj))
    if drawer is None:
        known = ", ".join(name.partition(":")[2] for name in _PICTURES)
        raise ValueError(f"cannot draw {obj!r:.200} ({type(obj).__name__}); known are {known}")
    return drawer(obj, **how)


def _drawer(cls: type) -> Callable[..., Picture] | None:
    """What draws objects of ``cls``: the entry of the nearest of its bases that has one."""
    for base in cls.__mro__:
        entry = _PICTURES.get(f"{base.__module__}:{base.__qualname__}")
        if entry is not None and getattr(sys.modules.get(base.__module__), base.__qualname__, None) is base:
            module, function = entry
            found: Callable[..., Picture] = getattr(importlib.import_module(f".{module}", __package__), function)
            return found
    return None
