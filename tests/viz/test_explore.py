"""Explorers in Python: their state, their pages, their widget. Rests on laws; ``tests/browser`` looks at them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvlab.hardware import wavefronts
from kvlab.layout import Swizzle
from kvlab.staging import SwizzledTile
from kvlab.viz import explore

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


def test_without_anywidget_the_picture_is_still() -> None:
    with mock.patch("importlib.util.find_spec", return_value=None), mock.patch("IPython.display.display") as display:
        explore(SWIZZLE)._ipython_display_()
    assert set(display.call_args.args[0]) == {"text/html", "text/plain"}
