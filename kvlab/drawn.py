"""How an object shows itself in a notebook: the display hooks, in one place."""

from __future__ import annotations

import importlib

__all__ = ["Drawn", "Shown"]


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
    """A mixin for what :func:`kvlab.viz.draw` knows: the picture replaces the repr where pictures are shown.

    In HTML the details appear under the pointer and the colours follow the notebook's theme. An object of a kind that
    has no picture (an empty layout, say) keeps its repr.

    >>> from kvlab.layout import Layout
    >>> Layout("(4,8):(8,1)")._repr_html_()[:4], Layout("(0,8):(8,1)")._repr_html_()
    ('<svg', None)
    """

    __slots__ = ()

    def _repr_svg_(self) -> str | None:
        from kvlab import viz

        try:
            return viz.draw(self).svg
        except ValueError:
            return None

    def _repr_html_(self) -> str | None:
        from kvlab import viz

        try:
            return viz.draw(self).inline
        except ValueError:
            return None
