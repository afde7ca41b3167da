"""A chart of matplotlib: its axes, a title, a caption, words for those who hear it, light and dark."""

from __future__ import annotations

import importlib
import importlib.util
import io
import re
import zlib
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from kvlab.common.drawn import Shown
from kvlab.viz.pen.picture import Picture
from kvlab.viz.pen.svg import Canvas

INK = "#010203"
"""Ink of a figure of our own; its picture has the page's text colour in its place."""
PX = 72.0
"""Px of a picture for an inch of a figure."""


@dataclass(frozen=True, repr=False)
class Chart(Shown):
    """Axes of matplotlib with what they show; in a notebook it is a picture, light or dark as the page is.

    axes       that were drawn in: those that were given, or the ones of a figure of its own
    title      states the finding
    caption    a sentence that says what is seen

    >>> from kvlab.viz.plots import plot_errors
    >>> chart = plot_errors({"emulator": [(1e-4, 1e-3)]})
    >>> chart.alt
    'All 1 comparisons are within what is allowed; the largest is 0.1 of it (emulator). Each mark is one comparison \
with the reference; right of the line an error is larger than it may be.'
    """

    axes: Any
    title: str
    caption: str
    own: bool

    @property
    def alt(self) -> str:
        """The title and the caption: what a page says to those who hear it."""
        return Picture(self.title, self.caption, 0, 0, "").spoken

    @property
    def picture(self) -> Picture:
        """The whole figure of the axes as a :class:`kvlab.viz.Picture`, with title and caption above it."""
        figure = self.axes.figure
        width, height = (float(side) * PX for side in figure.get_size_inches())
        body = _svg(figure, self.title)
        canvas = Canvas()
        canvas.embed(Picture(self.title, self.caption, width, height, body, body, (width, height)), 0, 0)
        canvas.extend(width, height)
        return canvas.picture(self.title, self.caption)

    def save(self, path: str | PathLike[str], *, theme: str = "light", scale: float = 2.0) -> Path:
        """Write the picture to ``path`` (.svg, .html or .png); see :func:`kvlab.viz.save`."""
        return self.picture.save(path, theme=theme, scale=scale)

    def _repr_svg_(self) -> str:
        return self.picture.svg

    def _repr_html_(self) -> str:
        return self.picture.inline

    def __repr__(self) -> str:
        return f"Chart({self.title!r})"


def drawn_in(ax: Any, height: float) -> tuple[Any, str, bool]:
    """(axes, colour of text and lines, whether they are of a figure of our own).

    ax        axes of matplotlib, which keep their style; None for a figure 852 px wide
    height    of that figure, in px

    ImportError where matplotlib is missing, ValueError for what is no axes.
    """
    if ax is not None:
        if not hasattr(ax, "plot") or not hasattr(ax, "figure"):
            raise ValueError(f"ax is {ax!r:.100}: must be axes of matplotlib, or None for a figure of its own")
        return ax, ax.xaxis.label.get_color(), False
    if importlib.util.find_spec("matplotlib") is None:
        where = "pip install -e '.[notebooks]', in kvlab's own folder"
        raise ImportError(f"matplotlib is not installed; charts of kvlab.viz.plots need it: {where}")
    with _style():
        figure = importlib.import_module("matplotlib.figure").Figure((852 / PX, height / PX), layout="constrained")
        axes = figure.add_subplot()
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    return axes, INK, True


def plain(*axes: Any) -> None:
    """Numbers of logarithmic axes without an exponent, which would be too small to be read."""
    for axis in axes:
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        axis.set_minor_formatter(lambda *_: "")


def finished(axes: Any, own: bool, title: str, caption: str) -> Chart:
    """The chart; axes of somebody else get the title, as their figure does not say it."""
    if not own:
        axes.set_title(title, loc="left", wrap=True)
    return Chart(axes, title, caption, own)


def _style() -> Any:
    """What matplotlib takes for text and lines while something of ours is made or written."""
    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "legend.labelcolor")
    words = {**dict.fromkeys(inks, INK), "font.size": 11.0, "svg.fonttype": "none", "legend.framealpha": 0.0,
             "font.family": "DejaVu Sans"}
    return importlib.import_module("matplotlib").rc_context(words)


def _svg(figure: Any, salt: str) -> str:
    """The drawing as one group, in the page's ink: marks stand where they are used, clips have names of their own."""
    out = io.StringIO()
    with _style(), importlib.import_module("matplotlib").rc_context({"svg.hashsalt": salt}):
        figure.savefig(out, format="svg", transparent=True, dpi=PX, metadata={"Date": None, "Creator": None})
    text = out.getvalue().partition("<svg")[2].partition(">")[2].rpartition("</svg>")[0]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    marks = dict(re.findall(r'<path id="(\w+)" ([^>]*)/>', text))
    text = re.sub(r'<path id="\w+" [^>]*/>', "", text)

    def placed(found: re.Match[str]) -> str:
        shape, style = marks[found[1]], found[4] or ""
        return f'<path {shape.partition("style=")[0]}transform="translate({found[2]} {found[3]})" style="{style}"/>'

    text = re.sub(r'<use xlink:href="#(\w+)" x="(\S+)" y="(\S+)"(?: style="([^"]*)")?/>', placed, text)
    unique, names = f"kv{zlib.crc32(salt.encode()):08x}", re.findall(r'clipPath id="(\w+)"', text)
    clips = {name: f"{unique}clip{n}" for n, name in enumerate(names)}
    text = re.sub(r'(?<!clipPath) id="[^"]*"', "", text)
    text = re.sub(r'(?<=clipPath id=")\w+|(?<=url\(#)\w+', lambda found: clips[found[0]], text)
    return f'<g stroke-linejoin="round">{text.replace(INK, "currentColor")}</g>'
