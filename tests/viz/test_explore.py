"""Explorers in Python: their state, their pages, their widget. Rests on laws; ``tests/browser`` looks at them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvlab.cache import PagedKVCache
from kvlab.hardware import get_atom, wavefronts
from kvlab.layout import Layout, Swizzle
from kvlab.staging import SwizzledTile
from kvlab.viz import explore
from kvlab.viz.explorer.product import reused

SWIZZLE = Swizzle(3, 3, 3, "bf16")


def test_the_state_starts_at_the_object_and_is_checked() -> None:
    found = explore(SwizzledTile(64, 256))
    assert (found.bits, found.base, found.shift, found.row_bytes) == (3, 4, 4, 256)
    before = found.state
    with pytest.raises(ValueError, match="lane is 32: must be an integer from 0 to 31"):
        found.set(column=1, lane=32)
    with pytest.raises(ValueError, match=r"row_bytes is 100: must be one of 32, 64"):
        found.row_bytes = 100
    with pytest.raises(AttributeError, match="no attribute 'lanes'; its knobs are access, row_bytes"):
        found.lanes = 3
    assert found.state == before


@pytest.mark.parametrize(
    "obj, how, told",
    [
        ("tile", {}, r"cannot explore 'tile' \(str\); known are Swizzle"),
        (SWIZZLE, {"row_bytes": 96}, "row_bytes is 96: must be one of 32, 64"),
        (Swizzle(1, 0, 1, "byte"), {}, "swizzle is Sw<1,0,1>"),
        (Swizzle(2, 4, -3, "byte"), {}, "shift right"),
        (PagedKVCache(np.zeros((2, 4, 1, 8), np.float32), [0], [[1]], 4, 4), {}, r"cache_lengths is \[0\]: must be"),
        (Layout.row_major(1 << 20, 64), {}, "take a tile of them"),
        (Layout("(4,4):(-1,4)"), {}, "must be from 0 on"),
        (Layout.row_major(4, 4), {"element_bytes": 3}, "element_bytes is 3"),
        (wavefronts("ld.shared.b32", np.arange(32) * 4, mask=0), {}, "must have one"),
    ],
)
def test_what_cannot_be_explored(obj: Any, how: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        explore(obj, **how)


def test_a_page_is_one_file_with_the_still_picture_in_it(tmp_path: Path) -> None:
    found = explore(SWIZZLE)
    found.lane = 5
    text = found.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert found.still.inline in text
    assert not re.findall(r"\b(?:src|href)\s*=|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    (state,) = re.findall(r'page\(document.getElementById\("explorer"\), .*, (\{.*?\})\);', text)
    assert json.loads(state) == found.state
    with pytest.raises(ValueError, match=r"must end in \.html"):
        found.save(tmp_path / "page.svg")


def test_widget_and_explorer_have_one_state() -> None:
    pytest.importorskip("anywidget")
    found = explore(SWIZZLE)
    widget = found.widget
    widget.bits = 2
    assert found.bits == 2
    found.set(access="ld.shared.b32 along a row", lane=7)
    assert (widget.access, widget.lane) == ("ld.shared.b32 along a row", 7)
    with mock.patch("IPython.display.display") as display:
        found._ipython_display_()
    bundle = display.call_args.args[0]
    assert bundle["text/html"] == found.still.inline
    assert "application/vnd.jupyter.widget-view+json" in bundle


@pytest.mark.parametrize(
    "name, turned, order",
    [
        ("mma.sync.m16n8k16.bf16", False, range(16)),
        ("mfma.32x32x16.bf16", True, [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]),
        ("mfma.16x16x16.bf16", True, range(16)),
    ],
)
def test_c_is_an_a_without_leaving_its_lanes(name: str, turned: bool, order: Any) -> None:
    """Rests on a law, P V in float32: A is made of the registers of C alone, lane by lane, V in the order that is told.

    The scores of ``turned`` atoms are products of keys by queries.
    """
    atom, rng = get_atom(name), np.random.default_rng(3)
    m, n, k = atom.shape
    lane, found, is_turned = reused(atom)
    assert (is_turned, found.tolist()) == (turned, [*order])
    keys = -(-k // n) * n if not turned else m
    scores, v = rng.integers(-3, 4, (m if not turned else n, keys)), rng.integers(-3, 4, (keys, n))
    tiles = [scores.T] if turned else np.split(scores, keys // n, axis=1)
    held = [atom.fragment_c(tile.astype(np.float32)) for tile in tiles]  # [lanes, registers] of each product
    mine = np.concatenate(held, axis=1)
    wanted = atom.fragment_a(scores[:, found].astype(np.float32))
    assert all(set(row.tolist()) <= set(own.tolist()) for row, own in zip(wanted, mine, strict=True))
    assert np.array_equal(lane, tile_of_lanes(atom))
    product = atom.tile_a(wanted) @ v[found]
    assert np.array_equal(product, scores[:, found] @ v[found])


def tile_of_lanes(atom: Any) -> Any:
    return atom.tile_a(np.broadcast_to(np.arange(atom.warp_size)[:, None], (atom.warp_size, atom.regs_a)))


def test_without_anywidget_the_picture_is_still() -> None:
    with mock.patch("importlib.util.find_spec", return_value=None), mock.patch("IPython.display.display") as display:
        explore(SWIZZLE)._ipython_display_()
    assert set(display.call_args.args[0]) == {"text/html", "text/plain"}
