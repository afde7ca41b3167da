"""The pages of docs/: every file, function and page that they name exists. Rests on looking."""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "CHANGELOG.md") + [
    ROOT / "CONTRIBUTING.md"
]
ROW = re.compile(r"`(\w+)` (?:in|of) `(kvlab/[\w/]+\.py)`")


def ids(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"`((?:kvlab|tests|docs|tools|benchmarks|notebooks)/[^`*]*)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", page.read_text())]
    assert [link for link in links if link and "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_functions_stand_where_a_page_says(page: Path) -> None:
    for name, path in ROW.findall(page.read_text()):
        assert re.search(rf"^\s*(def|class) {name}\b|^{name}\b", (ROOT / path).read_text(), re.MULTILINE), (name, path)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_dotted_names_are_importable(page: Path) -> None:
    for name in set(re.findall(r"`(kvlab(?:\.\w+)+)(?:\([^`]*\))?`", page.read_text())):
        module, _, member = name.rpartition(".")
        assert hasattr(importlib.import_module(module), member) or importlib.util.find_spec(name), name


def test_the_recipe_of_a_feature_lists_its_files() -> None:
    """A law: the files of the package that name the feature of the recipe, and no other: no kernel and no emulator."""
    recipe = (ROOT / "docs" / "recipes.md").read_text().partition("## A feature")[2].partition("\n## ")[0]
    sources = (ROOT / "kvlab").rglob("*.py")
    naming = {str(path.relative_to(ROOT)) for path in sources if re.search(r"\btemperature\b", path.read_text())}
    assert set(re.findall(r"`(kvlab/[\w/]+\.py)`", recipe)) == naming


def test_the_rooms_are_those_of_the_package_in_the_order_of_the_contract() -> None:
    """A law: the table of the architecture, the contract that import-linter keeps, and the folders name the same."""
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Rooms")[2].partition("\n\n## ")[0]
    rows = [f"kvlab.{room}" for room in re.findall(r"^\| `kvlab/(\w+)[/.]", table, re.MULTILINE)]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert rows == contracts[0]["layers"][::-1]
    found = {path.stem for path in (ROOT / "kvlab").iterdir() if path.is_dir() or path.suffix == ".py"}
    assert {f"kvlab.{name}" for name in found if not name.startswith("__")} == set(rows)


def test_the_glossary_is_in_order() -> None:
    words = re.findall(r"^\| (\S[^|]*?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)[1:]
    assert words == sorted(words, key=str.lower)


@pytest.mark.interpreter
def test_the_recipe_of_one_twin_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Rests on the kernel, interpreted, and the emulator: they agree in every step."""
    (code,) = re.findall(r"## Run one twin.*?```python\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(), re.S)
    exec(code, {})
    assert "no step differs" in capsys.readouterr().out
