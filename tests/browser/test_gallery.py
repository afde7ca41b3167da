"""The gallery is whole: every public picture and every class that draws itself is in it. Needs no browser."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import kvlab
from kvlab import viz
from kvlab.drawn import Drawn, Shown
from kvlab.viz import Picture


def test_every_public_picture_is_drawn() -> None:
    """Rests on the gallery's source: a picture is in it by a call of ``viz.draw_...`` or of ``viz.draw``."""
    source = ast.parse((Path(__file__).parent / "gallery.py").read_text(encoding="utf-8"))
    called = {node.func.attr for node in ast.walk(source)
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}  # fmt: skip
    assert {name for name in viz.__all__ if name.startswith("draw")} <= called


def test_every_class_that_draws_itself_is_shown() -> None:
    from gallery import GALLERY

    for found in pkgutil.walk_packages(kvlab.__path__, "kvlab."):
        if not found.name.endswith(("__main__", "kernel")) and "hopper" not in found.name:
            importlib.import_module(found.name)
    wanted, todo = set[type](), [Shown]
    while todo:
        below = todo.pop().__subclasses__()
        todo += below
        wanted |= {one for one in below if one.__module__.startswith("kvlab.") and not inspect.isabstract(one)}
    shown = {type(make()) for make in GALLERY.values()}
    bare = {one.__name__ for one in wanted - {Drawn, Picture} if not any(issubclass(s, one) for s in shown)}
    assert not bare
