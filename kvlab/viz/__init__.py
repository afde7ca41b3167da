"""Pictures of what kvlab computes: SVG text by a small writer of our own, one look for all.

Every picture is a :class:`Picture`: it shows itself in a notebook, and :func:`save` writes it to a file. The module
of a picture is imported when it is first drawn. :data:`PICTURES` is the table of them all: a new picture is a file of
this room, of ``charts/`` for numbers on axes or of ``formats/`` for KV caches at rest, and a line of the table.
``pen/`` is what all of them draw with, ``model/`` what they work out before."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvlab.common.drawn import register as register

if TYPE_CHECKING:
    from .atom import draw_atom as draw_atom
    from .charts.byte_budget import ByteBudget as ByteBudget
    from .charts.byte_budget import draw_byte_budget as draw_byte_budget
    from .charts.errors import draw_errors as draw_errors
    from .charts.explanation import draw_explanation as draw_explanation
    from .charts.kv_budget import draw_kv_budget as draw_kv_budget
    from .charts.roofline import RooflinePoint as RooflinePoint
    from .charts.roofline import draw_roofline as draw_roofline
    from .charts.schedule import draw_schedule as draw_schedule
    from .charts.shares import draw_shares as draw_shares
    from .charts.traffic import draw_traffic as draw_traffic
    from .coalescing import draw_coalescing as draw_coalescing
    from .copy_plan import draw_copy_plan as draw_copy_plan
    from .descriptor import draw_descriptor as draw_descriptor
    from .explorer.explore import Explorer as Explorer
    from .explorer.explore import explore as explore
    from .explorer.scroll import ByteScroll as ByteScroll
    from .formats.kv_audit import draw_audit as draw_audit
    from .formats.kv_format import draw_agreement as draw_agreement
    from .formats.kv_format import draw_format as draw_format
    from .formats.kv_transfer import draw_transfer as draw_transfer
    from .formats.quantised_page import draw_quantised_page as draw_quantised_page
    from .fragment_map import draw_fragment_map as draw_fragment_map
    from .gather4 import draw_gather4 as draw_gather4
    from .grid import draw_composed_layout as draw_composed_layout
    from .grid import draw_layout as draw_layout
    from .kv_buffer import draw_kv_buffer as draw_kv_buffer
    from .kv_tile import draw_kv_tile as draw_kv_tile
    from .linear_layout import draw_encoding as draw_encoding
    from .linear_layout import draw_linear_layout as draw_linear_layout
    from .linear_layout import draw_thread_values as draw_thread_values
    from .lockstep import draw_lockstep as draw_lockstep
    from .model.copy_plan import CopyPlan as CopyPlan
    from .one_diagonal import draw_one_diagonal as draw_one_diagonal
    from .page_table import draw_page_table as draw_page_table
    from .path import BytePath as BytePath
    from .path import draw_path_of_a_byte as draw_path_of_a_byte
    from .pen.dispatch import draw as draw
    from .pen.dispatch import save as save
    from .pen.picture import Picture as Picture
    from .pen.svg import Canvas as Canvas
    from .pipeline import Pipeline as Pipeline
    from .pipeline import draw_pipeline as draw_pipeline
    from .punch_card import draw_cure as draw_cure
    from .punch_card import draw_punch_card as draw_punch_card
    from .recognised import draw_recognised as draw_recognised
    from .shared_memory import draw_shared_memory as draw_shared_memory
    from .shared_memory import draw_tiles_beside as draw_tiles_beside
    from .swizzle import draw_swizzle as draw_swizzle
    from .tile_film import draw_tile_film as draw_tile_film
    from .tile_tensor import draw_tile_tensor as draw_tile_tensor
    from .timeline import draw_timeline as draw_timeline
    from .tma_box import draw_tma_box as draw_tma_box

PICTURES: dict[str, tuple[str, str]] = {
    "draw_layout": ("grid", "kvlab.layout:Layout numpy:ndarray"),
    "draw_composed_layout": ("grid", "kvlab.layout:ComposedLayout"),
    "draw_linear_layout": ("linear_layout", "kvlab.layout:LinearMap"),
    "draw_encoding": ("linear_layout", "kvlab.layout:Encoding"),
    "draw_thread_values": ("linear_layout", ""),
    "draw_tile_tensor": ("tile_tensor", "kvlab.layout:TileBase"),
    "draw_swizzle": ("swizzle", "kvlab.layout:Swizzle"),
    "draw_one_diagonal": ("one_diagonal", ""),
    "draw_punch_card": ("punch_card", "kvlab.hardware:Wavefronts"),
    "draw_cure": ("punch_card", "kvlab.hardware:Cure"),
    "draw_coalescing": ("coalescing", "kvlab.hardware:Coalescing"),
    "draw_atom": ("atom", "kvlab.hardware:MmaAtom"),
    "draw_tma_box": ("tma_box", "kvlab.hardware:TmaDescriptor kvlab.hardware:TMATensorTile"),
    "draw_gather4": ("gather4", ""),
    "draw_descriptor": ("descriptor", "kvlab.hardware:SmemDescriptor"),
    "draw_copy_plan": ("copy_plan", "kvlab.hardware:SubTileLoaderLDS kvlab.hardware:SubTileLoaderLDS_st_8x32 "
                       "kvlab.hardware:RegTileLoader kvlab.viz:CopyPlan"),
    "draw_page_table": ("page_table", "kvlab.cache:PagedKVCache kvlab.cache:PagedKVCacheCollection "
                        "kvlab.cache:PagePool kvlab.cache:ContinuousBatchingKVCache "
                        "kvlab.cache:ContinuousBatchingKVCacheCollection"),
    "draw_quantised_page": ("formats.quantised_page", ""),
    "draw_kv_tile": ("kv_tile", ""),
    "draw_format": ("formats.kv_format", "kvlab.formats:Format"),
    "draw_agreement": ("formats.kv_format", "kvlab.formats:Agreement"),
    "draw_transfer": ("formats.kv_transfer", "kvlab.formats:Transfer"),
    "draw_audit": ("formats.kv_audit", "kvlab.formats:Audit"),
    "draw_kv_budget": ("charts.kv_budget", "kvlab.formats:KVBudget"),
    "draw_kv_buffer": ("kv_buffer", "kvlab.staging:KVBuffer kvlab.staging:DecodeKVBuffer "
                       "kvlab.staging:DecodeStreamingKVBuffer kvlab.staging:NvidiaKVBuffer"),
    "draw_shared_memory": ("shared_memory", "kvlab.staging:SwizzledTile"),
    "draw_tiles_beside": ("shared_memory", ""),
    "draw_fragment_map": ("fragment_map", "kvlab.staging:FragmentMap"),
    "draw_timeline": ("timeline", "kvlab.staging:Timeline kvlab.staging:Hazards"),
    "draw_pipeline": ("pipeline", "kvlab.viz:Pipeline"),
    "draw_tile_film": ("tile_film", ""),
    "draw_path_of_a_byte": ("path", "kvlab.viz:BytePath kvlab.viz:ByteScroll"),
    "draw_lockstep": ("lockstep", "kvlab.mirror:Lockstep"),
    "draw_recognised": ("recognised", "kvlab.rosetta:Recognised"),
    "draw_schedule": ("charts.schedule", "kvlab.attention:Schedule"),
    "draw_explanation": ("charts.explanation", "kvlab.attention:Explanation"),
    "draw_traffic": ("charts.traffic", "kvlab.staging:Traffic"),
    "draw_roofline": ("charts.roofline", ""),
    "draw_shares": ("charts.shares", ""),
    "draw_errors": ("charts.errors", ""),
    "draw_byte_budget": ("charts.byte_budget", "kvlab.viz:ByteBudget"),
}
"""Function -> the file of this room that holds it, dotted where it lies in a folder, and the classes,
``package:Name``, whose objects :func:`draw` gives to it; none where a picture is of several objects."""

_FILES = {name: file for name, (file, _) in PICTURES.items()} | {
    "ByteBudget": "charts.byte_budget",
    "BytePath": "path",
    "ByteScroll": "explorer.scroll",
    "Canvas": "pen.svg",
    "Explorer": "explorer.explore",
    "CopyPlan": "model.copy_plan",
    "Picture": "pen.picture",
    "Pipeline": "pipeline",
    "RooflinePoint": "charts.roofline",
    "draw": "pen.dispatch",
    "explore": "explorer.explore",
    "save": "pen.dispatch",
}

__all__ = ["PICTURES", "register", *_FILES]

for _function, (_file, _classes) in PICTURES.items():
    for _class in _classes.split():
        register(_class, f"{__name__}.{_file}:{_function}")


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(importlib.import_module(f".{_FILES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FILES})
