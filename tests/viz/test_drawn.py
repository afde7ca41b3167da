"""Everything that `draw` knows shows itself: SVG and HTML, the same picture (rests on the hooks of Jupyter)."""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvlab.common.drawn import Drawn, Shown, drawer_of
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
from kvlab.staging import Timeline
from kvlab.viz import Picture, draw, draw_layout, register, save

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


def test_a_subclass_is_drawn_as_its_base() -> None:
    class Mine(Timeline):
        """A user's own."""

    line = Mine()
    line.add("copy", "k copy", 0, (0, 1), 4096)
    assert draw(line).title == draw(list_of(line)).title
    assert "1 copy" in draw(line).title


def list_of(line: Timeline) -> Timeline:
    return Timeline(list(line))


@pytest.mark.parametrize("name", ["Timeline", "Layout", "PagedKVCache", "ndarray"])
def test_a_name_alone_draws_nothing(name: str) -> None:
    """Somebody else's class may have the name of one of ours, and even say that it comes from our module."""
    for module in (__name__, "kvlab.staging.record.timeline", "kvlab.layout.algebra.layout", "numpy"):
        other = type(name, (SimpleNamespace,), {"__module__": module})
        with pytest.raises(ValueError, match=rf"cannot draw .*\({name}\); known are Layout, .*Timeline, .*Lockstep"):
            draw(other(events=[], offsets=None))


@pytest.mark.parametrize("package", ["mine", "kvlab_staging", "kvlab.stagings", "kvlab"])
def test_a_class_of_the_name_in_another_package_is_not_ours(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(package)
    vars(module)["Timeline"] = type("Timeline", (), {"__module__": package})
    monkeypatch.setitem(sys.modules, package, module)
    with pytest.raises(ValueError, match=r"cannot draw .*\(Timeline\); known are Layout"):
        draw(module.Timeline())


def kinds(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_everything_that_shows_itself_has_a_picture() -> None:
    for cls in kinds(Drawn):
        module = importlib.import_module(cls.__module__)
        if module.__name__.startswith("kvlab.") and getattr(module, cls.__name__, None) is cls:
            assert drawer_of(cls) is not None, cls


class Board:
    """A class of a user, with the picture of its layout."""

    def __init__(self, rows: int):
        self.layout = Layout((rows, 8), (8, 1))


class Wide(Board):
    """One that is drawn as its base."""


@pytest.mark.usefixtures("registry")
class TestRegister:
    """Rests on the registry's own words: by class, nearest base first, the newest function of a class."""

    def test_a_class_of_a_user_and_its_subclasses(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"cannot draw .*\(Board\); known are Layout, .*; kvlab.viz.register"):
            draw(Board(4))
        register(Board, lambda board, **how: draw_layout(board.layout, **how))
        for board in (Board(4), Wide(4)):
            assert draw(board, mark=(3, 5)).svg == draw_layout(board.layout, mark=(3, 5)).svg
        assert save(Board(4), tmp_path / "a.svg").read_text() == draw_layout(Layout((4, 8), (8, 1))).svg
        with pytest.raises(ValueError, match=r"known are Layout, .*, Board;"):
            draw(7)

    def test_the_newest_function_and_the_nearest_base(self) -> None:
        first, second = draw(Layout((2, 2), (2, 1))), draw(Layout((2, 4), (4, 1)))
        register(Board, lambda board: first)
        register(Wide, lambda board: second)
        assert draw(Board(4)) is first
        assert draw(Wide(4)) is second
        register(Board, lambda board: second)
        assert draw(Board(4)) is second
        register(Layout, lambda layout: first)
        assert draw(Layout((4, 8), (8, 1))) is first

    def test_names_of_what_is_not_imported_yet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "colorsys", raising=False)
        register("colorsys:Colour", "colorsys:rgb_to_hsv")
        assert drawer_of(Board) is None
        assert "colorsys" not in sys.modules
        register(f"{__name__}:Board", "kvlab.viz.grid:draw_layout")
        assert drawer_of(Board) is draw_layout
        for cls, drawer in ((Board, draw), (f"{__name__}:Board", draw_layout), (Board, draw)):
            register(cls, drawer)
            assert drawer_of(Board) is drawer, "the newest, named or not"

    def test_a_class_that_derives_from_drawn_shows_itself(self) -> None:
        class Mine(Drawn):
            layout = Layout((2, 2), (2, 1))

        assert Mine()._repr_html_() is None
        register(Mine, lambda mine: draw(mine.layout))
        assert Mine()._repr_html_() == draw(Mine.layout).inline

    @pytest.mark.parametrize("cls", [7, None, "Board", "a b:C", "mine:", ":Mine", "a:b:c"])
    def test_what_is_no_class(self, cls: Any) -> None:
        with pytest.raises(ValueError, match=f"cls is {re.escape(repr(cls))}: must be a class or the name of one"):
            register(cls, draw_layout)

    @pytest.mark.parametrize("drawer", [7, None, "draw_layout", "kvlab.viz.grid:"])
    def test_what_cannot_draw(self, drawer: Any) -> None:
        with pytest.raises(ValueError, match=f"drawer is {re.escape(repr(drawer))}: must be a function or the name"):
            register(Board, drawer)
        assert drawer_of(Board) is None

    def test_what_gives_no_picture(self) -> None:
        register(Board, lambda board: "<svg/>")
        with pytest.raises(TypeError, match="registered for Board gave '<svg/>': must give a Picture"):
            draw(Board(4))


CELLS = [
    "from kvlab.layout import Layout\nfrom kvlab.viz import draw\nLayout('(4,8):(8,1)')",
    "draw(Layout('(4,8):(8,1)'))",
    "display(draw(Layout('(4,8):(8,1)')))",
    "Layout('(0,8):(8,1)')",
]


def test_an_executed_notebook_holds_each_picture_once() -> None:
    """Rests on what nbclient stores: one MIME form with the drawing, and a short text beside it."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    config = importlib.import_module("traitlets.config").Config
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    with tempfile.TemporaryDirectory(prefix="kvlab-") as folder:
        transport = config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/socket"}})
        nbclient.NotebookClient(notebook, timeout=300, config=transport).execute()
    nbformat.validate(notebook)
    *pictures, empty = [cell.outputs for cell in notebook.cells]
    for outputs in pictures:
        (output,) = outputs
        data: dict[str, Any] = output["data"]
        assert sorted(data) == ["text/html", "text/plain"]
        assert data["text/html"] == draw(Layout("(4,8):(8,1)")).inline
        assert len(data["text/plain"]) < 200
    (output,) = empty
    assert output["data"] == {"text/plain": 'Layout("(0,8):(8,1)")'}


def test_where_no_notebook_is_both_forms_are_there() -> None:
    picture = draw(Layout("(4,8):(8,1)"))
    assert isinstance(picture, Shown)
    assert isinstance(picture, Picture)
    assert len(repr(picture)) < 200
