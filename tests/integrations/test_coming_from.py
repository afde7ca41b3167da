"""The page for those who come from other libraries. A law: what it names on the left is there, by that name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from kvlab.integrations import flash_attn, flashinfer, vllm

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
HOMES: dict[str, Any] = {"flash-attention": flash_attn, "FlashInfer": flashinfer, "vLLM": vllm}
OTHERS = {"softmax_lse", "query_start_loc", "paged_kv_last_page_len"}
"""Names of results and of metadata, which no signature has."""


def names_of(home: Any) -> set[str]:
    """Public callables of an adapter, and their parameters, those of methods and of typed keywords among them."""
    found: set[str] = set()
    for name, thing in (vars(home) | vars(getattr(home, "scores", home))).items():
        if name.startswith("_") or not callable(thing) or not thing.__module__.startswith(home.__name__):
            continue
        if hasattr(thing, "__total__"):
            found |= set(thing.__annotations__)
            continue
        found.add(name)
        methods = [m for n, m in inspect.getmembers(thing, callable) if n in ("__init__", "plan", "run")]
        found |= {p for f in (methods if inspect.isclass(thing) else [thing]) for p in inspect.signature(f).parameters}
        found |= {n for n, m in inspect.getmembers(thing, callable) if inspect.isclass(thing) and n in ("plan", "run")}
    return found | set(getattr(home, "LACKING", ())) | set(getattr(getattr(home, "scores", None), "LACKING", ()))


@pytest.mark.parametrize("library", HOMES)
def test_names_on_the_left_are_those_of_the_adapter(library: str) -> None:
    (part,) = re.findall(rf"^## {library}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    (lacking,) = re.findall(r"Not there: (.*?)\n\n|Not there: (.*?)\Z", part + "\n\n", re.DOTALL)
    named = set(re.findall(r"`([a-zA-Z_]\w+)", " ".join((*cells, *lacking)))) - OTHERS
    assert named <= names_of(HOMES[library])
    assert len(named) > 8


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_imports_work(block: str) -> None:
    exec(block, {})
