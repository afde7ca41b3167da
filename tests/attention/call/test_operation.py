"""Public operations as objects: functions to everybody who looks at them, and the way to the modules of their folder.

Rests on Python's own rules: what an import binds, what pickle, inspect, doctest and pydoc do with a function, and on
mypy's answer to a user's file.
"""

from __future__ import annotations

import copy
import doctest
import importlib
import inspect
import pickle
import pkgutil
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import kvlab
from kvlab import attention
from kvlab.attention.features.options import DEFAULTS

ROOT = Path(kvlab.__file__).parents[1]
FOLDERS = [name for name in attention.__all__ if isinstance(sys.modules.get(f"kvlab.attention.{name}"), type(sys))
           and hasattr(sys.modules[f"kvlab.attention.{name}"], "__path__")]
OPERATIONS = [name for name in attention.__all__ if hasattr(getattr(attention, name), "explain")]
NEEDS_TRITON = ("kernel", "hopper")  # and what begins so


def modules_of(folder: str) -> list[str]:
    return [module.name for module in pkgutil.iter_modules([str(ROOT / "kvlab" / "attention" / folder)])]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_folders_are_the_operations() -> None:
    assert FOLDERS == ["attend_paged", "kv_store", "merge_states", "mha_decode", "mha_decode_streaming", "mha_prefill",
                       "mla_decode", "mla_prefill"]
    assert {"mha_decode_paged", "mla_store_paged", *FOLDERS} <= set(OPERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_module_of_a_folder_by_every_form_of_import(folder: str) -> None:
    """In a fresh process, where nothing but the import itself has brought the module."""
    forms = []
    for module in modules_of(folder):
        name = f"kvlab.attention.{folder}.{module}"
        forms += [
            f"import {name}; assert {name}.__name__ == {name!r}",
            f"import {name} as one; assert one is sys.modules[{name!r}], one",
            f"from kvlab.attention.{folder} import {module} as two; assert two is one, two",
            f"assert importlib.import_module({name!r}) is one",
            f"from kvlab.attention import {folder} as operation; assert operation.{module} is one",
            "assert callable(operation) and operation.__name__ == " + repr(folder),
        ]
    run("import importlib, sys\n" + "\n".join(forms))


def test_a_module_is_there_when_it_is_imported_and_not_before() -> None:
    """Naming an operation, or asking what it has, imports neither torch nor triton."""
    told = run(
        "import sys, kvlab.attention as a\n"
        "print(hasattr(a.mha_decode, 'kernel'), hasattr(a.mha_decode, 'config'), hasattr(a.mha_decode, '__len__'))\n"
        "print({'torch', 'triton'} & set(sys.modules))\n"
        "try: a.mha_decode.kernel\n"
        "except AttributeError as error: print(error)"
    )
    assert told.splitlines() == [
        "False True False",
        "set()",
        f"{attention.mha_decode!r} has no attribute 'kernel', and kvlab.attention.mha_decode.kernel is not imported",
    ]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_looked_at_as_a_function(name: str) -> None:
    operation: Any = getattr(attention, name)
    function = inspect.unwrap(operation)
    assert isinstance(function, FunctionType)
    assert inspect.signature(operation) == inspect.signature(function)
    assert inspect.getdoc(operation) == inspect.getdoc(function)
    assert inspect.getsource(operation) == inspect.getsource(function)
    assert (operation.__name__, operation.__module__) == (name, function.__module__)
    assert inspect.isroutine(operation)
    assert pickle.loads(pickle.dumps(operation)) is operation
    assert copy.deepcopy([operation])[0] is copy.copy(operation) is operation
    assert repr(operation) == f"<operation kvlab.attention.{name}>"


@pytest.mark.parametrize("name", OPERATIONS)
def test_help_shows_the_signature_and_the_text_and_doctest_finds_it(name: str) -> None:
    operation: Any = getattr(attention, name)
    text = pydoc.plain(pydoc.render_doc(operation))
    first = next(iter(inspect.signature(operation).parameters))
    assert f"\n{name}({first}:" in text
    assert inspect.getdoc(operation).splitlines()[0] in text  # type: ignore[union-attr]
    home = importlib.import_module(operation.__module__)
    found = {test.name: test for test in doctest.DocTestFinder().find(home)}
    assert found[f"{home.__name__}.{name}"].examples


@pytest.mark.parametrize("name", OPERATIONS)
def test_help_tells_every_feature_by_the_words_of_its_file(name: str) -> None:
    """Each keyword of the signature that is a feature's has a line of the text; keywords have their defaults."""
    operation: Any = getattr(attention, name)
    text, keywords = inspect.getdoc(operation) or "", inspect.signature(operation).parameters
    assert "{features" not in text
    if "mask" not in keywords or "options" in text:  # those of another form
        return
    for feature, default in DEFAULTS.items():
        if feature in keywords:
            assert keywords[feature].default == default
            told = re.search(rf"^[\w, ]*\b{feature}\b", text, re.MULTILINE)
            assert told or re.search("The (rest|other)", text), feature


def test_an_operation_in_a_class_is_bound_as_a_function() -> None:
    class Model:
        attend = attention.mha_decode

    model = Model()
    assert Model.attend is attention.mha_decode
    assert model.attend.__self__ is model
    assert model.attend.__func__ is attention.mha_decode


@pytest.mark.slow
def test_mypy_knows_operations_their_names_and_their_modules() -> None:
    """Of a user's files: right calls and imports pass; a wrong name, keyword or number of arguments does not."""
    pytest.importorskip("mypy")
    files = [Path(__file__).parent / name for name in ("user_typing.py", "user_typing_wrong.py")]
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file", "pyproject.toml"]
    told = subprocess.run([*command, *map(str, files)], cwd=ROOT, capture_output=True, text=True).stdout
    errors = [line for line in told.splitlines() if ": error:" in line]
    lines = files[1].read_text().splitlines()
    expected = {n: line.split("  # ")[1] for n, line in enumerate(lines, 1) if "  # " in line}
    assert [int(line.split(":")[1]) for line in errors] == list(expected), told
    for line, words in zip(errors, expected.values(), strict=True):
        assert files[1].name in line, told
        assert words in line, told
