"""Text twins of the site's pages, and llms.txt and llms-full.txt, for programs that read and search."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from tools.website.pages import NAVIGATION

ABOUT = (
    "# kvlab\n\n> How a KV cache travels from DRAM through shared memory into tensor-core registers, byte by byte: a "
    "Python library, a course of notebooks, and the attention kernels (Triton, Gluon) with NumPy emulators that mirror "
    "them.\n"
)


def notebook_text(notebook: Any) -> str:
    """A notebook that has run, as Markdown: its pictures are their titles and captions."""
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(f"```python\n{cell.source}\n```")
            parts += [text for output in cell.outputs if (text := _output_text(output))]
    return "\n\n".join(parts) + "\n"


def _output_text(output: Any) -> str:
    data = output.get("data", {})
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```"
    if spoken := re.search(r'aria-label="([^"]*)"', data.get("text/html", "")):
        return f"*Picture: {html.unescape(spoken[1])}*"
    if "text/markdown" in data:
        return str(data["text/markdown"])
    plain = data.get("text/plain", "")
    return f"```text\n{plain}\n```" if plain else ""


_TEX = (
    (r"\\,", " "), (r"\\cdot", "·"), (r"\\top", "T"), (r"\^\{(.+?)\}|\^(\w)", r"<sup>\1\2</sup>"),
    (r"_\{(.+?)\}|_(\w)", r"<sub>\1\2</sub>"),
)


def without_tex(text: str) -> str:
    """Markdown whose formulas are HTML: pages load no program that sets them.

    >>> without_tex("of $q^\\\\top K$, at most $2^{-9}$, `$HOME`")
    'of <i>q<sup>T</sup> K</i>, at most <i>2<sup>-9</sup></i>, `$HOME`'
    """

    def set_in_html(found: re.Match[str]) -> str:
        words = found[1]
        for tex, plain in _TEX:
            words = re.sub(tex, plain, words)
        return f"<i>{words}</i>"

    return re.sub(r"\$([^$`\n]+)\$", set_in_html, text)


def title_of(text: str) -> str:
    """The first heading of a page."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found[1] if found else ""


def write(site: Path, texts: dict[str, str]) -> None:
    """Write the twin of each page beside it (``PAGE.md``), llms.txt and llms-full.txt.

    texts    page, as :data:`~tools.website.pages.NAVIGATION` names it -> its Markdown
    """
    for name, text in texts.items():
        target = site / f"{name}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    lines, whole = [ABOUT], [ABOUT]
    for heading, names in NAVIGATION.items():
        lines.append(f"## {heading}\n")
        there = [name for page in names for name in texts if name == page or (page, name[:4]) == ("api/index", "api/")]
        lines += [f"- [{title_of(texts[name])}]({name}.md): {_first_words(texts[name])}" for name in there]
        lines.append("")
        whole += [f"<!-- {name}.md -->\n\n{texts[name]}" for name in there]
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    (site / "llms-full.txt").write_text("\n\n".join(whole), encoding="utf-8")


def _first_words(text: str) -> str:
    """The first sentence of the prose."""
    prose = re.search(r"^(?!#|```|!\[|\||\s*$|<)(.+(?:\n(?!\s*$).+)*)", text, re.MULTILINE)
    words = " ".join(prose[1].split()) if prose else ""
    return re.split(r"(?<=[.:;]) ", words)[0]
