"""Every public class and function says what it is, and shows it: a law of the library.

A name is public if a room's ``__init__`` lists it in ``__all__``; ``kvlab.memory``, a file, has public names where they
are made. Doctests run with the other tests; here only their presence is looked at.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest

import kvlab

ROOMS = (
    "memory", "layout", "layout.encodings", "hardware", "rosetta", "formats", "cache", "staging", "attention", "mirror",
    "viz", "data", "xray",
)


# These run a kernel in Triton's interpreter, or compile one; tests/mirror and tests/xray show them.
NEED_TRITON = {"Difference", "Lockstep", "lockstep", "lockstep_pair", "draw_lockstep", "KernelLockstep",
               "assert_lockstep", "lockstep_kernel", "XRay", "XRayDiff"}


def public(room: str) -> list[tuple[str, object]]:
    module = importlib.import_module(f"kvlab.{room}")
    if hasattr(module, "__path__"):
        named = [(name, getattr(module, name)) for name in module.__all__]
    else:
        own = (pair for pair in vars(module).items() if getattr(pair[1], "__module__", None) == module.__name__)
        named = [(name, thing) for name, thing in own if not name.startswith("_")]
    return [(name, thing) for name, thing in named if inspect.isclass(thing) or inspect.isroutine(thing)]


def shown(thing: object) -> bool:
    """Whether a doctest stands in its docstring, or in one of the class's own methods.

    What cannot be made by hand needs none: an exception, a set of constants, a protocol.
    """
    if inspect.isclass(thing) and (issubclass(thing, Exception | Enum) or getattr(thing, "_is_protocol", False)):
        return True
    texts = [inspect.getdoc(thing) or ""]
    if inspect.isclass(thing):
        texts += [inspect.getdoc(member) or "" for member in vars(thing).values()]
    return any(">>>" in text for text in texts)


def test_no_function_is_hidden_by_the_folder_of_its_name() -> None:
    """Collecting doctests imports folders as modules; whatever has been collected, the names are the functions."""
    attention = importlib.import_module("kvlab.attention")
    assert all(callable(getattr(attention, name)) for name in attention.__all__)


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_a_docstring(room: str) -> None:
    # A frozen dataclass without a docstring gets its signature as one.
    words = {name: inspect.getdoc(thing) or "" for name, thing in public(room)}
    assert not [name for name, text in words.items() if not text or text.startswith(f"{name}(")]


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_a_doctest(room: str) -> None:
    assert not [name for name, thing in public(room) if name not in NEED_TRITON and not shown(thing)]


FIRST = {"what", "whether", "which", "who", "where", "how", "why", "when", "that", "those", "these", "this", "it"}
"""Words that begin neither a noun nor a verb in the third person; a docstring begins with either."""
STILTED = re.compile(r"\bof no kind\b|\bstands? (in|at|where|side|along|behind|together|as)\b|\bmeets (in|V|K|Q)\b")
LONGEST = 45
"""Words of a sentence in the first paragraph."""
WRITTEN_BESIDE_A_TWIN = re.compile(r"/kernel\.py$")
"""Portable kernels, whose docstrings speak to the reader of the twin."""


def own_words() -> Iterator[tuple[str, str]]:
    """(place, docstring) of every module and every public class and function of the package, methods among them."""
    for path in sorted(Path(kvlab.__file__).parent.rglob("*.py")):
        if WRITTEN_BESIDE_A_TWIN.search(str(path)):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                name = getattr(node, "name", "")
                if not name.startswith("_"):
                    yield f"{path}:{node.body[0].lineno} {name}", text


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """A law of style, as far as a program sees it: the first word, turns of phrase, the length of a sentence."""
    first = [place for place, text in own_words() if re.split(r"\W", text.lower(), maxsplit=1)[0] in FIRST]
    assert not first
    prose = {place: re.sub(r">>> .*(\n.+)*", "", text) for place, text in own_words()}
    assert not [place for place, text in prose.items() if STILTED.search(text)]
    sentences = {place: re.split(r"(?<=[.;])\s", text.partition("\n\n")[0]) for place, text in prose.items()}
    long = {place: [s for s in said if len(s.split()) > LONGEST] for place, said in sentences.items()}
    assert not {place: said for place, said in long.items() if said}


def test_errors_speak_in_one_voice() -> None:
    """A law of style: a message says "must be ..."; what is accepted, expected or wanted is said in no other words."""
    other = re.compile(r"\b(is|are) (accepted|wanted|needed)\b|: expected |\bis not one of\b|\bis outside \[")
    found = []
    for path in sorted(Path(kvlab.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            refused = isinstance(node, ast.Raise) and "OutOfBounds" not in ast.unparse(node)
            if refused and other.search(" ".join(re.split(r"[\"']\s*f?[\"']", ast.unparse(node)))):
                found.append(f"{path}:{node.lineno}")
    assert not found
