"""A finished picture: SVG text that shows itself in a notebook and saves itself."""

from __future__ import annotations

import html
import re
import zlib
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from kvlab.common.drawn import Shown

from .host import scheme, words
from .palette import THEMES
from .text import SANS

_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""Characters that XML has no way to write."""
_LONE = re.compile("[\ud800-\udfff]")
_HOVER = "svg.kvlab .hover rect:hover{stroke:var(--kvlab-accent,#c4006a);stroke-width:2}"

_DARK = "".join(f"--kvlab-{name}:{value};" for name, value in THEMES["dark"].items())
# A file stands alone: it brings its own page and follows the reader's preference.
_STANDALONE = (
    f"svg.kvlab{{color:{THEMES['light']['ink']}}}"
    f"@media (prefers-color-scheme:dark){{svg.kvlab{{{_DARK}color:{THEMES['dark']['ink']}}}}}{_HOVER}"
)
# Inside a page the text colour is the page's own; the other words follow its colour scheme, or the host's theme. What
# a page does to letters moves them: that is taken back.
_OWN = (
    "letter-spacing:normal;word-spacing:normal;text-transform:none;font-style:normal;font-variant:normal;"
    "text-shadow:none;direction:ltr"
)
INLINE = (
    f"svg.kvlab:not(#_),svg.kvlab:not(#_) *{{{_OWN}}}"
    f"@supports (color:light-dark(#000,#fff)){{svg.kvlab{{{words('accent', 'alarm')}}}}}{scheme('svg.kvlab')}"
    "svg.kvlab{--kvlab-paper:var(--jp-layout-color0,var(--vscode-editor-background,Canvas))}" + _HOVER
)


@dataclass(frozen=True, repr=False)
class Picture(Shown):
    """SVG text with its title and caption; what every ``kvlab.viz.draw_...`` returns.

    title      states the finding
    caption    a sentence that says what is seen; ``aria-label`` is the title and the caption
    width, height    CSS px at 100 %
    body       the SVG elements
    content, extent    those without title and caption, and their width and height: what :meth:`Canvas.embed` takes

    >>> picture = Picture("A dot", "One dot.", 40, 40, '<circle cx="20" cy="20" r="3"/>')
    >>> picture.svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    True
    >>> picture
    Picture('A dot', 40 x 40)
    """

    title: str
    caption: str
    width: float
    height: float
    body: str
    content: str = ""
    extent: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        for name in ("title", "caption"):
            text = getattr(self, name)
            if not isinstance(text, str):
                raise ValueError(f"{name} is {text!r}: must be text")
            if lone := _LONE.search(text):
                raise ValueError(f"{name} {text!r} has half a character, {lone[0]!r}: must be text that UTF-8 holds")

    def __repr__(self) -> str:
        return f"Picture({self.title!r}, {self.width:g} x {self.height:g})"

    @property
    def svg(self) -> str:
        """A file of its own: light or dark by the reader's preference, with a page behind it."""
        paper = '<rect width="100%" height="100%" fill="var(--kvlab-paper,#ffffff)"/>'
        return self._element(_STANDALONE, paper)

    @property
    def inline(self) -> str:
        """An element for an HTML page: text in the page's own colour, no background."""
        return self._element(INLINE, "")

    def resolved(self, theme: str = "light") -> str:
        """The picture in one theme, ``"light"`` or ``"dark"``, with plain colours: for programs that know no CSS."""
        if theme not in THEMES:
            raise ValueError(f"theme is {theme!r}: must be one of {', '.join(THEMES)}")
        words = THEMES[theme]
        text = self._element("", f'<rect width="100%" height="100%" fill="{words["paper"]}"/>')
        text = re.sub(r"var\(--kvlab-(\w+),[^)]*\)", lambda match: words[match[1]], text)
        return text.replace("currentColor", words["ink"])

    @property
    def spoken(self) -> str:
        """The title and the caption: the name of the picture for those who hear it.

        >>> Picture("Is it so?", "One dot.", 40, 40, "").spoken, Picture("A dot", "One dot.", 40, 40, "").spoken
        ('Is it so? One dot.', 'A dot. One dot.')
        """
        end = "" if self.title.endswith((".", "!", "?")) else "."
        return f"{self.title}{end} {self.caption}"

    def _element(self, style: str, behind: str) -> str:
        w, h = f"{self.width:g}", f"{self.height:g}"
        body = _NO_XML.sub("\ufffd", self.body)
        unique = f"kv{zlib.crc32(body.encode()):08x}"
        hatch = (
            f'<defs><pattern id="{unique}hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><path d="M0 0V6" stroke="currentColor" stroke-opacity=".38"/>'
            "</pattern></defs>"
            if "#@hatch" in body
            else ""
        )
        whole = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="kvlab" width="{w}" height="{h}" viewBox="0 0 {w} {h}" '
            f'role="img" aria-label="{html.escape(self.spoken)}" '
            f'font-family="{SANS}" fill="currentColor" '
            'style="max-width:100%;height:auto">'
            f"<title>{html.escape(self.title, quote=False)}</title>"
            + (f"<style>{style}</style>" if style else "")
            + f"{hatch}{behind}{body.replace('#@hatch', f'#{unique}hatch')}</svg>"
        )
        return _NO_XML.sub("\ufffd", whole)

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return self.inline

    def save(self, path: str | PathLike[str], *, theme: str = "light", scale: float = 2.0) -> Path:
        """Write the picture to ``path`` (.svg, .html or .png); see :func:`kvlab.viz.save`."""
        from .files import save_picture

        return save_picture(self, path, theme=theme, scale=scale)
