"""``explore(obj)``: a picture whose state can be changed, by hand and from Python."""

from __future__ import annotations

import functools
import html
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from kvlab.common.drawn import Shown, function_of
from kvlab.viz.pen.host import document, style
from kvlab.viz.pen.picture import INLINE, Picture

from .scene import Scene

EXPLORED: dict[type | str, Callable[..., Scene] | str] = {
    "kvlab.layout:Swizzle": "kvlab.viz.explorer.access:of_swizzle",
    "kvlab.staging:SwizzledTile": "kvlab.viz.explorer.access:of_tile",
    "kvlab.hardware:Wavefronts": "kvlab.viz.explorer.access:of_wavefronts",
    "kvlab.layout:Layout": "kvlab.viz.explorer.grid:of_layout",
    "kvlab.layout:ComposedLayout": "kvlab.viz.explorer.grid:of_layout",
    "kvlab.layout:TileBase": "kvlab.viz.explorer.grid:of_tensor",
    "kvlab.staging:FragmentMap": "kvlab.viz.explorer.grid:of_fragments",
    "kvlab.staging:Timeline": "kvlab.viz.explorer.pipeline:of_timeline",
    "kvlab.viz:Pipeline": "kvlab.viz.explorer.pipeline:of_pipeline",
    "kvlab.cache:PagedKVCache": "kvlab.viz.explorer.pages:of_cache",
    "kvlab.cache:PagedKVCacheCollection": "kvlab.viz.explorer.pages:of_collection",
    "kvlab.viz:ByteBudget": "kvlab.viz.explorer.budget:of_budget",
    "kvlab.hardware:MmaAtom": "kvlab.viz.explorer.product:of_atom",
}
"""Class, ``package:Name`` -> what makes the scene of its objects, ``module:function``."""

_RULES = """{padding:10px 0 4px}
form{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:center;margin:0 24px}
label{display:inline-flex;gap:6px;align-items:center;font:12px system-ui,sans-serif}
input{width:84px;margin:0;accent-color:var(--kvlab-accent)}
output{display:inline-block;min-width:20px}
select,button{font:12px system-ui,sans-serif;color:var(--kvlab-ink);background:var(--kvlab-band);
  border:1px solid var(--kvlab-rule);border-radius:4px;padding:2px 6px}
.picture{outline-offset:-2px}
.picture:focus-visible{outline:2px solid var(--kvlab-accent)}
"""


def explore(obj: Any, **how: Any) -> Explorer:
    """A picture of ``obj`` to play with, in a notebook or, by :meth:`Explorer.save`, as a page of its own.

    obj    a Swizzle, a SwizzledTile or the Wavefronts of an instruction: plain beside swizzled, pass by pass; a Layout
           or a TileTensor: what loads over it ask of the banks, or who holds what; an MmaAtom: who holds what of A, B
           and C, and whether C is an A of the next product; a FragmentMap; a Timeline, or a :class:`Pipeline`, of
           which a wait can be left out; a PagedKVCache or its collection: the byte of a token, term by term; a
           :class:`ByteBudget`: sizes, bytes and time under the roofline
    how    options of its scene: ``row_bytes`` of a swizzle, ``element_bytes`` of a layout, ``layer`` of a collection,
           ``arch``

    Raises ValueError for an object of another class, and for one that the scene cannot hold.

    >>> from kvlab.layout import Swizzle
    >>> found = explore(Swizzle(3, 4, 3, "byte"))
    >>> found.bits, found.access
    (3, 'ldmatrix.x4')
    >>> found.bits = 9
    Traceback (most recent call last):
        ...
    ValueError: bits is 9: must be an integer from 0 to 3
    """
    make = function_of(type(obj), EXPLORED)
    if make is None:
        known = ", ".join(str(name).partition(":")[2] for name in EXPLORED)
        raise ValueError(f"cannot explore {obj!r:.200} ({type(obj).__name__}); known are {known}")
    return Explorer(make(obj, **how))


class Explorer(Shown):
    """Scene, and the state that its picture is drawn from: each knob is an attribute that can be set.

    In a notebook the state lives in the traits of a widget where anywidget is installed (``widget``): what is moved by
    hand is read here, what is set here moves there. Elsewhere the picture is still.

    >>> from kvlab.layout import Swizzle
    >>> found = explore(Swizzle(3, 4, 3, "byte"))
    >>> found.set(bits=2, lane=5)
    >>> found
    Explorer(access: access='ldmatrix.x4', row_bytes=128, bits=2, base=4, shift=3, column=0, step=1, lane=5)
    """

    scene: Scene

    def __init__(self, scene: Scene) -> None:
        vars(self).update(scene=scene, _state={name: knob.start for name, knob in scene.knobs.items()})

    @property
    def state(self) -> dict[str, Any]:
        """The state now, by knob."""
        return dict(self._state)

    def set(self, **values: Any) -> None:
        """Set several knobs at once. ValueError for a value out of bounds, AttributeError for what is no knob."""
        checked = {name: self._knob(name).checked(name, value) for name, value in values.items()}
        self._state.update(checked)
        if "widget" in vars(self):
            with self.widget.hold_sync():
                for name, value in checked.items():
                    setattr(self.widget, name, value)

    def __getattr__(self, name: str) -> Any:
        state = vars(self).get("_state", {})
        if name in state:
            return state[name]
        self._knob(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.set(**{name: value})

    def __dir__(self) -> Iterator[str]:
        return iter([*super().__dir__(), *self._state])

    def _knob(self, name: str) -> Any:
        knobs: Mapping[str, Any] = self.scene.knobs if "scene" in vars(self) else {}
        if name not in knobs:
            raise AttributeError(f"Explorer has no attribute {name!r}; its knobs are {', '.join(knobs)}")
        return knobs[name]

    @functools.cached_property
    def widget(self) -> Any:
        """The anywidget widget of this explorer; ImportError where anywidget is not installed."""
        found = _widget_class()(scene=self.scene.shown, **self._state)
        found.observe(lambda change: self._state.update({change["name"]: change["new"]}), names=[*self._state])
        return found

    @property
    def still(self) -> Picture:
        """The picture without a browser's help."""
        return self.scene.still()

    def save(self, path: str | PathLike[str]) -> Path:
        """Write one page that needs nothing else to the file ``path``, which ends in .html; the ``#`` of its address
        names the state."""
        target = Path(path)
        if target.suffix.lower() != ".html":
            raise ValueError(f"path {str(path)!r} must end in .html")
        target.write_text(self.page, encoding="utf-8")
        return target

    @property
    def page(self) -> str:
        """The page as text.

        >>> from kvlab.layout import Swizzle
        >>> explore(Swizzle(3, 4, 3, "byte")).page.startswith("<!doctype html>")
        True
        """
        picture = self.still
        scene, state = (json.dumps(part).replace("</", "<\\/") for part in (self.scene.shown, self._state))
        body = (
            f'<style>{css()}</style><div id="explorer">{picture.inline}</div>'
            f'<script type="module">{module()}\npage(document.getElementById("explorer"), {scene}, {state});</script>'
        )
        return document(html.unescape(picture.title), body, style="body{margin:16px auto;max-width:920px}")

    def _repr_html_(self) -> str:
        return self.still.inline

    def _ipython_display_(self) -> None:
        """The widget, and beside it the still picture for places that cannot run it."""
        if importlib.util.find_spec("anywidget") is None:
            super()._ipython_display_()
            return
        found = self.widget._repr_mimebundle_()
        data = found[0] if isinstance(found, tuple) else found
        bundle = {**data, "text/html": self._repr_html_(), "text/plain": repr(self)}
        importlib.import_module("IPython.display").display(bundle, raw=True)

    def __repr__(self) -> str:
        return f"Explorer({self.scene.kind}: {', '.join(f'{name}={value!r}' for name, value in self._state.items())})"


@functools.cache
def module() -> str:
    """The text of the ES module."""
    return Path(__file__).with_name("explorer.js").read_text(encoding="utf-8")


@functools.cache
def css() -> str:
    """The style of an explorer: nothing of a host's page changes it."""
    return style("kvlab-explorer", _RULES) + INLINE


@functools.cache
def _widget_class() -> Any:
    """The class of the widgets; a trait for each knob is added to an object of it."""
    anywidget, traits = (importlib.import_module(name) for name in ("anywidget", "traitlets"))

    class ExplorerWidget(anywidget.AnyWidget):  # type: ignore[name-defined]
        _esm, _css = module(), css()

        def __init__(self, scene: Any, **state: Any) -> None:
            kinds = {name: traits.Int() if isinstance(now, int) else traits.Unicode() for name, now in state.items()}
            kinds["scene"] = traits.Dict()
            self.add_traits(**{name: kind.tag(sync=True) for name, kind in kinds.items()})
            super().__init__(scene=scene, **state)

    return ExplorerWidget
