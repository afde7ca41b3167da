"""Everything that `draw` knows shows itself: SVG and HTML, the same picture (rests on the hooks of Jupyter)."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.hardware import (
    SmemDescriptor,
    SubTileLoaderLDS_st_8x32,
    TmaDescriptor,
    coalescing,
    create_tensor_tile,
    create_tma_tile_gather4,
    get_atom,
    wavefronts,
)
from kvlab.layout import ComposedLayout, Layout, LinearLayout, Swizzle, TileTensor
from kvlab.viz import draw, draw_layout, save

ARRAY = np.zeros((32, 64), np.float16)
OBJECTS = [
    Layout("(4,8):(8,1)"),
    Swizzle(3, 4, 3, "byte"),
    ComposedLayout(Layout.row_major(8, 64), Swizzle(3, 3, 3, "bf16")),
    ComposedLayout(Layout("(4,8):(8,1)"), None, 3),
    LinearLayout({"register": [[0, 1]], "lane": [[0, 2], [1, 0]]}, (2, 4)),
    TileTensor.stack_allocation(Layout.row_major(8, 16), "fp32").tile((4, 8), (1, 1)),
    get_atom("mma.sync.m16n8k16.bf16"),
    wavefronts("ld.shared.b32", np.arange(32) * 8),
    coalescing(np.arange(32) * 4, 4),
    TmaDescriptor.of(ARRAY, (16, 64), "128B"),
    create_tensor_tile(ARRAY, (16, 64), "128B"),
    create_tma_tile_gather4(ARRAY, 64, "128B"),
    SmemDescriptor(0x4000, 16, 1024, "128B"),
    SubTileLoaderLDS_st_8x32("bf16", BN=64, depth=128, BK=32, num_threads=256),
]


@pytest.mark.parametrize("shown", OBJECTS, ids=lambda shown: type(shown).__name__)
def test_both_hooks_and_save(shown, sound, tmp_path) -> None:
    picture = draw(shown)
    sound(picture)
    assert shown._repr_svg_() == picture.svg
    assert shown._repr_html_() == picture.inline
    assert save(shown, tmp_path / "a.svg").read_text() == picture.svg
    assert "<title>" in picture.body


def test_options_reach_the_picture() -> None:
    layout = Layout("(4,8):(8,1)")
    assert draw(layout, element_bytes=2).svg == draw_layout(layout, element_bytes=2).svg


def test_what_has_no_picture_keeps_its_repr() -> None:
    empty = Layout("(0,8):(8,1)")
    assert empty._repr_svg_() is None
    assert empty._repr_html_() is None
