"""HTML that stays itself inside a page of somebody else: JupyterLab, nbconvert, VS Code, any web page.

A host styles what it shows: Jupyter aligns table cells right and stripes their rows, VS Code draws no borders, a blog's
style sheet does what it likes. All HTML of the package therefore lies in one scope, :func:`view`: the host's rules
are taken back for every element in it, and ours weigh more than any rule made of classes. Light or dark is one decision
for views and pictures, :func:`scheme`: the host's theme where the host says it, else the page's own colour scheme."""

from __future__ import annotations

import html
import re

from .palette import THEMES
from .text import SANS

# Who tells a theme by an attribute or a class of the page, and not by CSS's own `color-scheme`. VS Code gives a light
# page of high contrast both of its classes, so the light ones come last.
_SAYS_DARK = ("[data-jp-theme-light=false]", ".vscode-dark", ".vscode-high-contrast", "html[theme=dark]")
_SAYS_LIGHT = ("[data-jp-theme-light=true]", ".vscode-light", ".vscode-high-contrast-light", "html[theme=light]")

_COLOURS: dict[str, tuple[str, str]] = {
    **{name: (light, THEMES["dark"][name]) for name, light in THEMES["light"].items()},
    "soft": ("#5c6673", "#98a3b1"),
    "rule": ("#d5dae1", "#3a424d"),
    "band": ("#eef2f7", "#232b36"),
    "alarmed": ("#ffe3e6", "#431a20"),
    "word": ("#1c4f9c", "#8ab8ff"),
    "string": ("#7a4b00", "#e2b86b"),
}
"""Colours of a light and of a dark page: those of the pictures, and what tables and sources need besides."""

_VIEW = ".kvlab-view:not(#_)"
"""What every rule of a view starts with; the id, which nothing has, makes it weigh more than classes do."""

_GROUND = f"""{{all:initial;color-scheme:inherit;direction:ltr;display:block;box-sizing:border-box;max-width:900px;
  overflow-x:auto;color:var(--kvlab-ink);background:var(--kvlab-paper);font:13px/1.4 {SANS};
  border:1px solid var(--kvlab-rule);border-radius:6px;text-align:left}}
:where(:not(svg,svg *)){{all:revert}}
table{{font:inherit;color:inherit}}
"""


def scheme(selector: str) -> str:
    """CSS that makes the elements of ``selector`` light or dark as the host's theme is.

    >>> scheme("svg").splitlines()[0].endswith(".vscode-dark svg,.vscode-high-contrast svg,html[theme=dark] svg"
    ...     "{color-scheme:dark}")
    True
    """
    dark, light = (",".join(f"{host} {selector}" for host in hosts) for hosts in (_SAYS_DARK, _SAYS_LIGHT))
    return f"{dark}{{color-scheme:dark}}\n{light}{{color-scheme:light}}"


def words(*names: str) -> str:
    """Declarations of colours as CSS variables that follow the colour scheme.

    >>> words("paper")
    '--kvlab-paper:light-dark(#ffffff,#15171c);'
    """
    return "".join(f"--kvlab-{name}:light-dark({','.join(_COLOURS[name])});" for name in names)


def view(name: str, body: str, *, rules: str, label: str) -> str:
    """HTML for any page: ``body`` in a box at most 900 px wide, with its style, which nothing outside changes.

    name     an additional class
    rules    CSS, each selector relative to the box; its colours are ink, paper, accent, alarm (``var(--kvlab-ink)``),
             soft (ink of less weight), rule (lines), band (behind a heading), alarmed (behind what is wrong), word and
             string (of a source)
    label    what a screen reader says of the whole

    >>> text = view("dot", "<table><tr><td>1</td></tr></table>", rules="td{color:var(--kvlab-soft)}", label="One")
    >>> ".kvlab-view.dot:not(#_) td{color:var(--kvlab-soft)}" in text
    True
    """
    return (
        f'<div class="kvlab-view {name}" role="figure" aria-label="{html.escape(label)}">'
        f"<style>{style(name, rules)}</style>{body}</div>"
    )


def style(name: str, rules: str) -> str:
    """CSS of boxes of classes ``kvlab-view`` and ``name``: that of :func:`view`, for a page that brings them itself.

    The ground is that of every box, and comes again with each style of a page; ``rules`` are for the boxes of this
    name, and weigh more than the ground, wherever it comes.

    >>> style("dot", "{padding:1px} td{color:red}").splitlines()[-2:]
    ['.kvlab-view.dot:not(#_){padding:1px}', '.kvlab-view.dot:not(#_) td{color:red}']
    """
    plain = "".join(f"--kvlab-{name}:{light};" for name, (light, _) in _COLOURS.items())
    return "\n".join(
        [
            f"{_VIEW}{{{plain}}}",
            f"@supports (color:light-dark(#000,#fff)){{{_VIEW}{{{words(*_COLOURS)}}}}}",
            _scoped(_VIEW, _GROUND),
            scheme(_VIEW),
            _scoped(_VIEW.replace(":", f".{name}:", 1), rules),
        ]
    )


def _scoped(box: str, rules: str) -> str:
    """Each selector inside the box; the one without a name is the box itself."""
    found = re.findall(r"([^{}]*)\{([^{}]*)\}", rules)
    return "\n".join(
        ",".join(f"{box} {one.strip()}".strip() for one in re.split(r",(?![^(]*\))", selectors)) + f"{{{body}}}"
        for selectors, body in found
    )


def document(title: str, body: str, *, style: str = "body{margin:0}") -> str:
    """A page of its own around ``body``, light or dark by the reader's preference, without anything external.

    >>> document("A & B", "<p>text</p>").endswith("<body><p>text</p></body></html>\\n")
    True
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{html.escape(title)}</title>'
        f"<style>{style}</style></head><body>{body}</body></html>\n"
    )
