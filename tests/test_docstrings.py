"""Every public class and function says what it is, and shows it: a law of the library.

A name is public if a room's ``__init__`` lists it in ``__all__``; ``kvlab.memory``, a file, has public names where they
are made. Doctests run with the other tests; here only their presence is looked at.
"""

from __future__ import annotations

import importlib
import inspect
from enum import Enum

import pytest

ROOMS = ("memory", "layout", "layout.encodings", "hardware", "cache", "staging", "attention", "mirror", "viz", "data")


# These run a kernel in Triton's interpreter; tests/mirror shows them.
NEED_TRITON = {"Difference", "Lockstep", "lockstep", "lockstep_pair", "draw_lockstep"}


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
