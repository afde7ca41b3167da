"""The reference as Markdown: public names of a module with their signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect

from tools.website.pages import public, signature


def room_text(room: str) -> str:
    """The page of a module."""
    parts = [f"# {room}", inspect.getdoc(importlib.import_module(room)) or ""]
    for name, value in public(room).items():
        parts.append(f"## {name}{signature(value)}")
        if callable(value):
            parts.append(f"```text\n{inspect.getdoc(value) or ''}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"
