"""The gallery is whole: every public picture, and every kind of object that has one, is in it. Needs no browser."""

from __future__ import annotations

import ast
from pathlib import Path
from unittest import mock

from gallery import GALLERY

from kvlab import viz
from kvlab.common.drawn import _names
from kvlab.viz.pen import dispatch
from tools import picture_gallery


def test_every_public_picture_is_drawn() -> None:
    """Rests on the gallery's source: a picture is in it by a call of ``viz.draw_...`` or of ``viz.draw``."""
    source = ast.parse((Path(__file__).parent / "gallery.py").read_text(encoding="utf-8"))
    called = {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)}
    assert {name for name in viz.__all__ if name.startswith("draw")} <= called


def test_every_kind_of_object_that_has_a_picture_shows_it() -> None:
    """Rests on the table of pictures and on what is asked of it, through which every object goes that draws itself."""
    with mock.patch.object(dispatch, "drawer_of", side_effect=dispatch.drawer_of) as drawer_of:
        shown = [viz.draw(make()) for make in GALLERY.values()]
    assert len(shown) == len(GALLERY)
    bases = {base for call in drawer_of.call_args_list for base in call.args[0].__mro__}
    names = [name for _, classes in viz.PICTURES.values() for name in classes.split()]
    assert [name for name in names if not any(_names(name, base) for base in bases)] == []


def test_the_page_of_the_documents_shows_what_is_drawn_today() -> None:
    """Rests on regenerating it; every function of the table is on it, but the one whose numbers are the machine's."""
    files = picture_gallery.files(GALLERY)
    assert {path for path, text in files.items() if path.read_text(encoding="utf-8") != text} == set()
    assert set(picture_gallery.FOLDER.iterdir()) == {path for path in files if path.suffix == ".svg"}
    shown = {function for names in picture_gallery.SHOWN.values() for function in names.values()}
    assert shown == set(viz.PICTURES) - {"draw_lockstep"}
