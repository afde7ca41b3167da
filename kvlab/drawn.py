"""How an object shows itself in a notebook: the two display hooks, in one place."""

from __future__ import annotations

__all__ = ["Drawn"]


class Drawn:
    """A mixin for what :func:`kvlab.viz.draw` knows: the picture replaces the repr where pictures are shown.

    HTML comes first in a notebook: only there the details appear under the pointer. An object of a kind that has no
    picture (an empty layout, say) keeps its repr.

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
