"""The gallery is whole: every public picture, and every kind of object that has one, is in it. Needs no browser."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from unittest import mock

from gallery import GALLERY

from kvlab import viz
from kvlab.viz import dispatch


def test_every_public_picture_is_drawn() -> None:
    """Rests on the gallery's source: a picture is in it by a call of ``viz.draw_...`` or of ``viz.draw``."""
    source = ast.parse((Path(__file__).parent / "gallery.py").read_text(encoding="utf-8"))
    called = {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)}
    assert {name for name in viz.__all__ if name.startswith("draw")} <= called


def test_every_kind_of_object_that_has_a_picture_shows_it() -> None:
    """Rests on the table of ``viz.draw``, through which every object goes that draws itself."""
    with mock.patch.object(dispatch, "_drawer", side_effect=dispatch._drawer) as drawer:
        shown = [viz.draw(make()) for make in GALLERY.values()]
    assert len(shown) == len(GALLERY)
    drawn = {call.args[0] for call in drawer.call_args_list}
    kinds = [name.split(":") for name in dispatch._PICTURES]
    classes = [getattr(importlib.import_module(module), name) for module, name in kinds]
    assert [kind for kind in classes if not any(issubclass(cls, kind) for cls in drawn)] == []
