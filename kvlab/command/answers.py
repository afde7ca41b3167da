"""Answers of the subcommands: words for people, data for programs, and the exit code."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console

from kvlab.common.checks import require


@dataclass(frozen=True)
class Answer:
    """Result of a subcommand. words : text with rich's markup, or what rich prints. data : of plain Python and NumPy.
    yes : False ends the process with 1.

    >>> Answer("no conflicts", {"conflicts": 0}).json()
    '{"conflicts": 0}'
    """

    words: Any
    data: dict[str, Any]
    yes: bool = True

    def json(self) -> str:
        """The data as one line of JSON, which has no numbers that are not finite: these are text.

        >>> Answer("", {"error": np.float32("inf"), "rows": [float("nan"), 1]}).json()
        '{"error": "inf", "rows": ["nan", 1]}'
        """
        return json.dumps(_told(self.data), default=_plain, allow_nan=False)

    def give(self, as_json: bool) -> None:
        """Prints the answer and ends the subcommand."""
        if as_json:
            print(self.json())
        else:
            console().print(self.words, soft_wrap=isinstance(self.words, str), highlight=False)
        raise typer.Exit(0 if self.yes else 1)


def check_output(path: Path | None, *endings: str) -> None:
    """ValueError before the work where a file cannot be written after it: of another ending, or in no folder.

    >>> check_output(Path("x.svg"), ".html")
    Traceback (most recent call last):
        ...
    ValueError: output is 'x.svg': must be one that ends in .html
    """
    if path is not None:
        require(path.suffix.lower() in endings, f"output is {str(path)!r}", f"one that ends in {' or '.join(endings)}")
        require(path.parent.is_dir(), f"output is {str(path)!r}", "in a folder that there is")


def console(stderr: bool = False) -> Console:
    """The terminal; colours only where it shows them."""
    return Console(stderr=stderr)


def _told(value: Any) -> Any:
    """The value with text for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _told(one) for key, one in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _told(value.tolist())
    if isinstance(value, list | tuple):
        return [_told(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    return str(value) if not isinstance(value, Path) else value.as_posix()
