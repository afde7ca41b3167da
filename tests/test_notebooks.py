"""Every notebook: its two files say the same, carry no outputs, and run from a fresh kernel without an error.

It runs once, as it is; behind each question its answer is given and taken back, so that the course's own marks judge
it: each must say "Right.". Answers rest on what the notebooks' own objects say.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from notebook_truths import TRUTHS

from kvlab.exercises import solution, solve
from kvlab.exercises.course import QUESTIONS
from kvlab.exercises.question import same
from tools.course import LONGEST, SHORTEST, size

jupytext = pytest.importorskip("jupytext", reason="notebooks need the extra `notebooks`")
nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("[0-9]*.py"))

pytestmark = pytest.mark.parametrize("source", SOURCES, ids=[path.stem for path in SOURCES])


def _printed(cells: Any) -> str:
    """What cells printed."""
    code = [cell for cell in cells if cell.cell_type == "code"]
    return "\n".join("".join(output.get("text", "") for output in cell.outputs) for cell in code)


def test_the_ipynb_is_its_source_without_outputs(source: Path) -> None:
    paired = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    written = jupytext.read(source)
    kinds = [(cell.cell_type, cell.source) for cell in written.cells]
    assert [(cell.cell_type, cell.source) for cell in paired.cells] == kinds, "run `jupytext --sync notebooks/*.py`"
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in paired.cells)


def test_it_runs_as_it_is_and_with_the_right_answers(source: Path, executed: Callable[[Path], Any]) -> None:
    """Without answers no hint is printed; with them, the notebook's own objects say the same as the course.

    0 to 8 have run where kvlab, NumPy and ml-dtypes are all that there is, up to the cell that asks Triton.
    """
    names = list(TRUTHS[source.stem])
    assert len(names) >= 3, "a notebook asks the reader at least three questions"
    parts: dict[bool, list[Any]] = {False: [], True: []}
    for cell in executed(source).cells:
        parts["answered" in cell.metadata.get("tags", [])].append(cell)
    printed = _printed(parts[False])
    assert printed.count("No answer yet:") == len(names)
    assert not [text for name in names for text in QUESTIONS[name].hints if text in printed]
    assert _printed(parts[True]).count("Right.") == len(names)


def test_what_a_cell_claims_holds(source: Path, executed: Callable[[Path], Any]) -> None:
    """A law: a comparison that a cell prints behind its name, or gives as its value, is true."""
    cells = executed(source).cells
    given = [output.get("data", {}).get("text/plain") for cell in cells for output in cell.get("outputs", [])]
    assert "False" not in given
    assert not re.findall(r".*: False\b.*", _printed(cells))


def test_between_two_texts_is_at_most_a_screen_of_picture(source: Path, executed: Callable[[Path], Any]) -> None:
    """A law: 900 px, what a window of 1080 lines shows of a notebook; details that are closed do not count."""
    tall = 0.0
    for cell in [cell for cell in executed(source).cells if "answered" not in cell.metadata.get("tags", [])]:
        shown = [] if cell.cell_type == "markdown" else [output.get("data", {}) for output in cell.outputs]
        html = re.sub(r"<details\b.*?</details>", "", "".join(data.get("text/html", "") for data in shown), flags=re.S)
        heights = map(float, re.findall(r'<svg[^>]*viewBox="0 0 [\d.]+ ([\d.]+)"', html))
        tall = 0 if cell.cell_type == "markdown" else tall + sum(heights)
        assert tall <= 900, cell.source


def test_it_takes_ten_to_twenty_five_minutes(source: Path, executed: Callable[[Path], Any]) -> None:
    """Rests on the model of ``tools/course.py``, and on the clock of the kernel: less than a minute for all cells."""
    notebook = executed(source)
    notebook.cells = [cell for cell in notebook.cells if "answered" not in cell.metadata.get("tags", [])]
    found = size(notebook)
    assert SHORTEST <= found.minutes <= LONGEST, found
    assert 0 < found.seconds < 60, found


def test_it_is_written_with_its_answers(source: Path, tmp_path: Path) -> None:
    """A law: the cell of each question becomes its answer, and no other cell changes."""
    target = tmp_path / "solved.ipynb"
    names = solve(source.with_suffix(".ipynb"), target)
    assert names == [name for name in QUESTIONS if name in TRUTHS[source.stem]]
    was, now = (nbformat.read(path, as_version=4).cells for path in (source.with_suffix(".ipynb"), target))
    changed = [b.source for a, b in zip(was, now, strict=True) if a.source != b.source]
    assert sorted(changed) == sorted(map(solution, names))


def test_the_first_cell_says_how_to_install(source: Path) -> None:
    """Also where there is no checkout."""
    first = jupytext.read(source).cells[0]
    assert first.cell_type == "markdown"
    assert "`%pip install`" in first.source


def test_no_answer_stands_in_a_cell(source: Path) -> None:
    """Nor a hint: the cell of a question names it, and no more."""
    notebook = jupytext.read(source)
    text = "\n".join(cell.source for cell in notebook.cells)
    for name in TRUTHS[source.stem]:
        assert f'ask("{name}", ' in text
        assert not [one for one in QUESTIONS[name].hints if one in text]
    assert {name[:2] for name in QUESTIONS} == {one.stem[:2] for one in SOURCES}


def test_no_answer_stands_before_its_question(source: Path, executed: Callable[[Path], Any]) -> None:
    """A law: in no title, and in no line printed since the last heading. Numbers below 100 are there by accident."""
    assert told_before(executed(source)) == []


def told_before(notebook: Any) -> list[str]:
    """Questions whose answer is a number of three digits or more that is told between their heading and them."""
    since, found = "", []
    for cell in [cell for cell in notebook.cells if "answered" not in cell.metadata.get("tags", [])]:
        if cell.cell_type == "markdown":
            since = "" if re.search("^#", cell.source, re.MULTILINE) else since
            continue
        for name in re.findall(r'\bask\("([^"]+)"', cell.source):
            answer = QUESTIONS[name].answer
            if isinstance(answer, int) and answer >= 100 and re.search(rf"\b({answer}|{answer:,})\b", since):
                found.append(name)
        for output in cell.outputs:
            data = output.get("data", {})
            titles = re.findall(r"<title>([^<]*)", data.get("text/html", ""))[:1]
            since += "\n".join(["", output.get("text", ""), *titles] + [data.get("text/plain", "")] * (not titles))
    return found


def test_named_mistakes_are_wrong(source: Path) -> None:
    """A law: an answer that is right has no name of a mistake, and mistakes differ from each other."""
    for name, question in QUESTIONS.items():
        if name.startswith(source.stem[:2]):
            answers = [question.answer, *(wrong for wrong, _ in question.mistakes)]
            assert not [(a, b) for i, a in enumerate(answers) for b in answers[:i] if same(a, b)]
            assert question.hints
            for text, what in getattr(question.answer, "wrong", ()):  # of a function, as an expression
                assert question.verdict(eval(question.answer.code(text))) == f"Not yet: {what}."
