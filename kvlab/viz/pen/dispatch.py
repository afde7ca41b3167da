"""``draw(obj)`` and ``save(obj, path)``: the picture of an object, found by its class."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from kvlab.common.drawn import drawer_of, known

from .files import save_picture
from .picture import Picture


def draw(obj: Any, **how: Any) -> Picture:
    """The picture of ``obj``: a layout, a swizzle, an MMA atom, the wavefronts of an instruction, ...

    The function that is registered for its class, or for the nearest of its bases, draws it;
    ``kvlab.viz.PICTURES`` is the table of what kvlab registers, :func:`kvlab.viz.register` adds a class of your own.

    how    options of that function, such as ``element_bytes`` of :func:`draw_layout` (docs/pictures.md lists them)

    Raises ValueError for an object of a class that has no picture.

    >>> from kvlab.layout import Layout
    >>> draw(Layout("(4,8):(8,1)"), element_bytes=2).title
    '(4,8):(8,1): +1 along a row, +8 down a column; the 4 rows of column 0 lie in 4 different banks'
    >>> draw(7)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: cannot draw 7 (int); known are Layout, ...; kvlab.viz.register adds a class
    """
    if isinstance(obj, Picture):
        if how:
            raise ValueError(f"{', '.join(how)} cannot change a finished picture; draw the object itself with it")
        return obj
    drawer = drawer_of(type(obj))
    if drawer is None:
        name = type(obj).__name__
        raise ValueError(
            f"cannot draw {obj!r:.200} ({name}); known are {', '.join(known())}; kvlab.viz.register adds a class"
        )
    picture = drawer(obj, **how)
    if not isinstance(picture, Picture):
        raise TypeError(f"what is registered for {type(obj).__name__} gave {picture!r:.200}: must give a Picture")
    return picture


def save(obj: Any, path: str | PathLike[str], *, theme: str = "light", scale: float = 2.0, **how: Any) -> Path:
    """Draw ``obj`` (a :class:`Picture`, or anything that :func:`draw` knows, to which ``how`` goes) into the file
    ``path``.

    The ending decides: ``.svg`` and ``.html`` follow the reader's light or dark preference; ``.png`` has one ``theme``
    and ``scale`` pixels for each CSS px. A PNG needs CairoSVG, rsvg-convert or a Chromium browser. Returns the path.

    Raises ValueError for another ending, for an object that cannot be drawn, or for a PNG without a converter.

    >>> import tempfile
    >>> from kvlab.viz import draw_layout
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(draw_layout([[0, 1], [2, 3]]), f"{folder}/layout.svg").name
    'layout.svg'
    """
    return save_picture(draw(obj, **how), path, theme=theme, scale=scale)
