"""Who imports what. Rests on the package's own rule (NumPy rooms run anywhere; the arrows point one way).

import-linter checks the arrows between modules; here stand the rules that it cannot express and those that only a
fresh process can show.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvlab

PACKAGE = Path(kvlab.__file__).parent


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def run(code: str) -> str:
    """The output of ``code`` in a fresh process, started where the package lies."""
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Every imported name of a file, at any depth, with the innermost function that holds the import; but not those of
    type checkers alone."""

    def walk(node: ast.AST, function: str | None) -> Iterator[tuple[str, str | None]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, function) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                package = ".".join(path.relative_to(PACKAGE.parent).parts[: -child.level]) if child.level else ""
                source = ".".join(filter(None, (package, child.module)))
                yield from ((f"{source}.{alias.name}", function) for alias in child.names)
            inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            yield from walk(child, inside)

    return walk(ast.parse(path.read_text(encoding="utf-8")), None)


@pytest.mark.timing
def test_import_takes_at_most_a_tenth_of_a_second_more_than_numpy() -> None:
    def seconds(module: str) -> float:
        """Of the process: the test may share the machine."""
        code = f"import time; start = time.process_time(); import {module}; print(time.process_time() - start)"
        return statistics.median(float(run(code)) for _ in range(5))

    assert seconds("kvlab") <= seconds("numpy") + 0.1


def test_import_brings_neither_torch_nor_triton() -> None:
    rooms = (
        "kvlab.memory, kvlab.layout, kvlab.hardware, kvlab.formats, kvlab.cache, kvlab.staging, kvlab.attention, "
        "kvlab.viz, kvlab.data"
    )
    loaded = run(f"import sys, kvlab; {rooms}; print(*sorted(sys.modules))").split()
    assert "kvlab.staging" in loaded
    assert not {"torch", "triton"} & set(loaded)


def test_import_brings_no_package_of_the_command() -> None:
    """Nor does the room itself, until it is called; a machine without them is told so."""
    assert not {"typer", "rich", "click"} & set(run("import sys, kvlab, kvlab.command; print(*sys.modules)").split())
    code = "import sys; sys.modules.update(typer=None); import kvlab.command; kvlab.command.main([])"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    hint = "pip install -e '.[command]', in kvlab's own folder"
    assert (done.returncode, done.stderr) == (2, f"kvlab: needs typer: {hint}\n")


def test_rooms_import_where_torch_and_triton_cannot_be(numpy_modules: list[Path]) -> None:
    """In a process where importing either raises: every module that is not one of the few named places."""
    names = [name_of(path) for path in numpy_modules]
    blocked = "import sys, importlib; sys.modules.update(torch=None, triton=None)"
    run(f"{blocked}; [importlib.import_module(name) for name in {names}]")


def test_rooms_need_numpy_and_ml_dtypes_only(numpy_modules: list[Path]) -> None:
    """No third package stands in the files that the core dependencies must carry."""
    known = set(sys.stdlib_module_names) | {"kvlab", "numpy", "ml_dtypes"}
    foreign = {
        f"{name_of(path)} imports {name}"
        for path in numpy_modules
        for name, _ in imports(path)
        if name.split(".")[0] not in known
    }
    assert not foreign


def test_pictures_are_reached_by_name_only() -> None:
    """Outside viz, the demo and the command, nothing imports kvlab.viz, inside functions neither."""
    wrong = {
        name_of(path)
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in {"viz", "demo", "command"}
        for name, _ in imports(path)
        if f"{name}.".startswith("kvlab.viz.")
    }
    assert not wrong


def test_the_pen_knows_nothing_of_what_it_draws() -> None:
    """pen/ uses itself and the display hooks; model/ uses no picture; a picture may use all of them."""
    viz = PACKAGE / "viz"
    lower = ("kvlab.memory", "kvlab.layout", "kvlab.hardware")
    allowed = {
        "pen": ("kvlab.common.drawn", "kvlab.viz.pen"),
        "model": ("kvlab.common.drawn", *lower, "kvlab.viz.pen", "kvlab.viz.model"),
    }
    wrong = {
        f"{name_of(path)} imports {name}"
        for room, rooms in allowed.items()
        for path in (viz / room).glob("*.py")
        for name, _ in imports(path)
        if name.startswith("kvlab") and not f"{name}.".startswith(tuple(f"{ours}." for ours in rooms))
    }
    assert not wrong


def test_an_object_is_drawn_without_its_neighbours() -> None:
    """One picture imports its own file and what that needs, not the other rooms whose objects have pictures."""
    code = "import sys; from kvlab.layout import Layout; Layout((4, 8))._repr_svg_(); print(*sorted(sys.modules))"
    loaded = set(run(code).split())
    assert "kvlab.viz.grid" in loaded
    assert not {"kvlab.staging", "kvlab.cache", "kvlab.mirror", "kvlab.hardware", "kvlab.viz.swizzle"} & loaded


def test_rooms_alone_list_their_names() -> None:
    """What is public is said once, in the room's ``__init__``."""
    files = (path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert not [name_of(path) for path in files if "__all__" in path.read_text(encoding="utf-8")]


def test_rooms_are_found_by_name_and_listed() -> None:
    assert kvlab.memory is sys.modules["kvlab.memory"]
    assert {"memory", "layout", "hardware", "cache", "staging", "attention", "data", "viz"} <= set(dir(kvlab))
    with pytest.raises(AttributeError, match=r"'kvlab' has no attribute 'lay0ut'; its rooms are attention, cache"):
        kvlab.lay0ut  # noqa: B018
