"""A real JupyterLab, light and dark: everything that shows itself, and notebooks of the course run in it.

Rests on: WCAG 2 (contrast of at least 4.5), and laws (as in ``test_hosts.py``; a notebook runs without an error).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hosts import OURS, jupyterlab, notebook_of

pytestmark = pytest.mark.browser

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
RUN = {"01_follow_one_token": "light", "09_mha_decode": "dark", "13_on_the_chip": "light"}


@pytest.fixture(scope="module")
def lab(chromium: Any, outputs: dict[str, dict[str, str]], tmp_path_factory: Any) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("lab")
    (folder / "notebooks").mkdir()
    nbformat.write(notebook_of(outputs), folder / "notebooks" / "gallery.ipynb")
    for read in ("benchmarks", "tests"):  # notebooks read records in them
        (folder / read).symlink_to(NOTEBOOKS.parent / read)
    nbformat.write(explorers(), folder / "notebooks" / "explorers.ipynb")
    for name in RUN:
        shutil.copy(NOTEBOOKS / f"{name}.ipynb", folder / "notebooks")
    with jupyterlab(folder) as url:
        yield url


CELLS = (
    """from kvlab.layout import Swizzle
from kvlab.viz import explore

shown = explore(Swizzle(3, 4, 3, "byte"))
shown""",
    "print(shown.bits, shown.lane)",
    "shown.set(lane=20, column=3)",
    """from IPython.display import HTML
from kvlab.viz.pen.host import view

HTML(view("other", "<form>a box of another name</form>", rules="{padding:3px} form{margin:5px}", label="Other"))""",
)


def explorers() -> Any:
    """A notebook with an explorer, what it says to Python, what Python says to it."""
    notebook = notebook_of({})
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
    return notebook


def enter(tab: Any, url: str, notebook: str, theme: str) -> None:
    """Open a notebook in the lab, alone, and choose the theme."""
    tab.tab.goto(f"{url}lab/tree/{notebook}.ipynb?reset")
    tab.tab.wait_for_selector(".jp-Notebook .jp-Cell")
    tab.tab.evaluate(
        "name => jupyterapp.commands.execute('apputils:change-theme', {theme: name})", f"JupyterLab {theme.title()}"
    )
    light = str(theme == "light").lower()
    tab.tab.wait_for_function("light => document.body.dataset.jpThemeLight === light", arg=light)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_shows_itself_is_legible_and_its_own(
    theme: str, lab: str, page: Callable[..., Any], bare: Any, outputs: dict[str, dict[str, str]]
) -> None:
    tab = page("dark" if theme == "light" else "light", width=1400)
    enter(tab, lab, "gallery", theme)
    shown = ".jp-OutputArea-executeResult"
    tab.tab.wait_for_function(f"count => document.querySelectorAll('{shown}').length === count", arg=len(outputs))
    exhibits = tab.exhibits(shown, list(outputs))
    assert not tab.faults_of(exhibits)
    assert not tab.changed(exhibits, bare[theme == "dark"])
    assert not tab.errors


RUN_ALL = """async () => {
  await jupyterapp.restored;
  const notebook = jupyterapp.shell.currentWidget;
  await notebook.context.ready; await notebook.sessionContext.ready; await notebook.sessionContext.session.kernel.info;
  return await jupyterapp.commands.execute("notebook:run-all-cells");
}"""

RENDERED = """() => jupyterapp.shell.currentWidget.content.widgets.every(({outputArea: area}) =>
  !area || area.widgets.length === area.model.length
           && [...area.node.querySelectorAll(".jp-OutputArea-output")].every((output) => output.hasChildNodes()))"""


@pytest.mark.parametrize("name, theme", RUN.items())
def test_a_notebook_runs_and_is_legible(name: str, theme: str, lab: str, page: Callable[..., Any]) -> None:
    tab = page("dark" if theme == "light" else "light", width=1400)
    enter(tab, lab, name, theme)
    assert tab.tab.evaluate(RUN_ALL), "a cell failed"
    assert not tab.tab.query_selector_all("[data-mime-type='application/vnd.jupyter.error']")
    tab.tab.wait_for_function(RENDERED)
    found = tab.tab.query_selector_all(OURS)
    assert len(found) >= 3
    assert not tab.faults_of({f"output {number}": one for number, one in enumerate(found, 1)})
    assert not tab.errors


RUN_ONE = """async (index) => {
  const notebook = jupyterapp.shell.currentWidget;
  await jupyterapp.restored; await notebook.context.ready; await notebook.sessionContext.ready;
  await notebook.sessionContext.session.kernel.info;
  notebook.content.activeCellIndex = index;
  return await jupyterapp.commands.execute("notebook:run-cell");
}"""


def test_an_explorer_and_python_have_one_state(lab: str, page: Callable[..., Any]) -> None:
    """Rests on a law: a knob that is moved by hand is read in Python, and what Python sets moves."""
    tab = page("light", width=1400)
    enter(tab, lab, "explorers", "dark")
    at = tab.tab
    at.evaluate(RUN_ONE, 0)
    at.wait_for_selector(".kvlab-explorer svg text")
    at.evaluate(RUN_ONE, 3)  # a style that comes later changes no box of another name
    at.wait_for_selector(".other form")
    for box, (padding, margin) in {".kvlab-explorer": ("10px", "24px"), ".other": ("3px", "5px")}.items():
        look = "box => [getComputedStyle(box).paddingTop, getComputedStyle(box.querySelector('form')).marginLeft]"
        assert at.eval_on_selector(box, look) == [padding, margin]
    at.locator(".kvlab-explorer input[name=bits]").fill("2")
    at.locator("rect[data-set='{\"lane\":9}']").last.hover()
    at.evaluate(RUN_ONE, 1)
    at.wait_for_function("() => document.body.innerText.includes('2 9')")
    at.evaluate(RUN_ONE, 2)
    at.wait_for_function("() => document.querySelector('.kvlab-explorer').textContent.includes('T20: row 4')")
    assert at.input_value(".kvlab-explorer input[name=column]") == "3"
    at.locator(".kvlab-explorer input[name=lane]").press("ArrowRight")
    for key in ("ArrowDown", "ArrowUp", "ArrowDown", "d", "d"):  # to the lab, two d mean: this cell goes
        at.locator(".kvlab-explorer .picture").press(key)
    assert at.input_value(".kvlab-explorer input[name=lane]") == "22"
    assert at.locator(".jp-Cell").count() == len(CELLS)
    assert not tab.faults(at.query_selector(".jp-OutputArea-output:has(.kvlab-explorer)"))
    assert not tab.errors
