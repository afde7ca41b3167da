"""Drawers of objects: pictures registered by class, and how an object shows itself in a notebook."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

_DRAWERS: dict[type | str, Callable[..., Any] | str] = {}
"""Class -> what draws its objects, the last registered one last."""


def register(cls: type | str, drawer: Callable[..., Any] | str) -> None:
    """Have ``drawer`` draw the objects of a class, and of its subclasses that have no picture of their own.

    :func:`kvlab.viz.draw` and :func:`kvlab.viz.save` find it; a class that derives from :class:`Drawn` shows it in
    notebooks. A class that is registered again is drawn by the newest function.

    cls       a class; or ``"package:Name"``, the class of that name in a module of the package, imported or not
    drawer    a function ``(obj, **options) -> kvlab.viz.Picture``; or ``"module:name"``, imported when it first draws

    Raises ValueError for anything else.

    >>> from kvlab.layout import Layout
    >>> from kvlab.viz import draw, draw_layout
    >>> class Transpose:
    ...     def __init__(self, rows, columns):
    ...         self.layout = Layout((columns, rows), (1, columns))
    >>> register(Transpose, lambda turned, **options: draw_layout(turned.layout, **options))
    >>> draw(Transpose(4, 8), element_bytes=2) == draw_layout(Layout((8, 4), (1, 8)), element_bytes=2)
    True
    """
    if not (isinstance(cls, type) or _is_name(cls)):
        raise ValueError(f'cls is {cls!r}: must be a class or the name of one, "package:Name"')
    if not (callable(drawer) or _is_name(drawer)):
        raise ValueError(f'drawer is {drawer!r}: must be a function or the name of one, "module:name"')
    _DRAWERS.pop(cls, None)
    _DRAWERS[cls] = drawer


def drawer_of(cls: type) -> Callable[..., Any] | None:
    """Drawer of the objects of a class: the function of the nearest of its bases that has one."""
    return function_of(cls, _DRAWERS)


def function_of(cls: type, table: dict[type | str, Callable[..., Any] | str]) -> Callable[..., Any] | None:
    """Function of a class in a table such as that of the drawers: that of the nearest of its bases, or None."""
    for base in cls.__mro__:
        for key, function in reversed(table.items()):
            if key is base or (isinstance(key, str) and _names(key, base)):
                if isinstance(function, str):
                    module, _, name = function.partition(":")
                    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
                    return found
                return function
    return None


def known() -> list[str]:
    """Names of the classes that have a picture."""
    return [key.partition(":")[2] if isinstance(key, str) else key.__qualname__ for key in _DRAWERS]


def _is_name(text: object) -> bool:
    parts = text.split(":") if isinstance(text, str) else []
    return len(parts) == 2 and all(word.isidentifier() for part in parts for word in part.split("."))


def _names(name: str, cls: type) -> bool:
    """Tells whether ``cls`` is the class of this name: nothing is imported, as an object's class has been."""
    package, _, qualname = name.partition(":")
    inside = f"{cls.__module__}.".startswith(f"{package}.")
    return inside and cls.__qualname__ == qualname and getattr(sys.modules.get(cls.__module__), qualname, None) is cls


class Shown:
    """A mixin for what has an HTML form: a notebook stores that form, and no other picture of the same thing beside it.

    IPython would store the result of every ``_repr_..._`` method that an object has; ``_ipython_display_`` is its hook
    for objects that decide themselves. All other programs find ``_repr_html_`` and ``_repr_svg_``.
    """

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        raise NotImplementedError

    def _ipython_display_(self) -> None:
        """Show the HTML, with the repr for places that show text.

        NotImplementedError without HTML: IPython then goes on to the repr.
        """
        html = self._repr_html_()
        if html is None:
            raise NotImplementedError
        show = importlib.import_module("IPython.display").display
        show({"text/html": html, "text/plain": repr(self)}, raw=True)


class Drawn(Shown):
    """A mixin for classes that have a picture (:func:`register`): it replaces the repr where pictures are shown.

    In HTML the details appear under the pointer and the colours follow the notebook's theme. An object that cannot be
    drawn (an empty layout, say) keeps its repr.

    >>> from kvlab.layout import Layout
    >>> Layout("(4,8):(8,1)")._repr_html_()[:4], Layout("(0,8):(8,1)")._repr_html_()
    ('<svg', None)
    """

    __slots__ = ()

    def _repr_svg_(self) -> str | None:
        picture = _picture(self)
        return None if picture is None else picture.svg

    def _repr_html_(self) -> str | None:
        picture = _picture(self)
        return None if picture is None else picture.inline


def _picture(obj: object) -> Any:
    """The picture of an object, None where it has none.

    The room of the pictures registers them when it is imported; no room below knows more of it than this name.
    """
    try:
        return importlib.import_module("kvlab.viz").draw(obj)
    except ValueError:
        return None
