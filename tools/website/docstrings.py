"""Docstrings as Sphinx reads them: lists of arguments become definitions."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

_ROW = re.compile(r"( *)(\S.*?) {2,}(\S.*)|( *)([\w*]+(?:, [\w*]+)*) : (.*)")


def as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Change ``lines`` in place: a handler of autodoc."""
    lines[:] = arguments(lines)


def arguments(lines: list[str]) -> list[str]:
    """Lines whose paragraphs of the form "name    what it is" are definition lists.

    >>> arguments(["rows    of a tile,", "        at least 1", "dtype   of its elements"])
    ['``rows``', '    of a tile,', '    at least 1', '``dtype``', '    of its elements', '']
    """
    found: list[str] = []
    blocks = [list(group) for _, group in groupby(lines, key=lambda line: not line.strip())]
    while blocks:
        block = blocks.pop(0)
        margin = _margin(block[0])
        rows = block[2:] if block[0].strip() == "Parameters" and len(block) > 2 else block
        if not _ROW.fullmatch(rows[0]) or rows[0].lstrip().startswith((">>>", "=", "- ", "* ", ".. ")):
            found += block
            continue
        while len(blocks) > 1 and _margin(blocks[1][0]) > margin:  # what follows a blank line, and belongs to a row
            rows = [*rows, *blocks.pop(0), *blocks.pop(0)]
        found += [*(["**Parameters**", ""] if rows[0] != block[0] else []), *_definitions(rows, margin), ""]
    return found


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip())


def _definitions(rows: list[str], margin: int) -> list[str]:
    """The definitions of rows, and of the lines below them that are set further in."""
    made: list[str] = []
    inner = min((_margin(line) for line in rows if line.strip() and _margin(line) > margin), default=margin)
    for line in rows:
        found = _ROW.fullmatch(line)
        if line[: margin + 1].strip():
            words = [part for part in found.groups() if part and part.strip()] if found else line.split(" ", 1)
            made += [f"{' ' * margin}``{words[0].strip()}``", f"{' ' * margin}    {words[-1].strip()}"]
        else:
            text = line[inner:]
            made += [""] if text.startswith("* ") and not rows[0].startswith("* ") else []
            made.append(f"{' ' * (margin + 4)}{text}" if text else "")
    return made
