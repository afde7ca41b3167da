"""Every notebook: its two files say the same, carry no outputs, and run from a fresh kernel without an error.

The answers of a notebook's questions are filled in here, so that its own checks judge them: each must say "Right.". The
course's answers rest on the notebooks' own objects.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from notebook_truths import TRUTHS

from kvlab.exercises.course import QUESTIONS
from kvlab.exercises.question import same

jupytext = pytest.importorskip("jupytext", reason="notebooks need the extra `notebooks`")
nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("[0-9]*.py"))

# Right answers, as a reader would write them, in the order of the questions.
ANSWERS = {
    "00_start_here": ["key_bytes = 128", "group = 3", "pages = 19"],
    "01_follow_one_token": ["slot = 9", "address = 1168", "lanes = [4, 5, 6, 7]"],
    "02_layouts": [
        "offset = 389", "numbers = 1273", "columns = [4, 12]", "start = 40", 'transposed = "(32,8):(1,40)"',
    ],
    "03_swizzles_and_banks": [
        "passes = 2", "sent_to = 416", "middle = 3", "def place(row, vector):\n    return vector ^ row // 2 % 4",
    ],
    "04_fragments": ["holder = 10", "addresses = lane * 16", "element = (9, 12)", "base_offset = 5", "amd_holder = 19"],
    "05_tma": ["longest = 16", "zero_rows = 4", "byte = 2048 + 128", "expected = 2048"],
    "06_kv_caches": ["page_and_slot = (7, 8)", "distance = -20224", "nbytes = 272", "row = 101"],
    "07_kv_buffer": ["byte = 5440", "saved = 12", "who = 1", "columns = (0, 31)", 'works = "None"', "key = 17"],
    "08_kv_mma_op": [
        "key_and_depth = (50, 8)",
        "mmas = 16",
        "v_keys = [0, 1, 2, 3, 8, 9, 10, 11]",
        "warp_keys = (64, 95)",
    ],
    "09_mha_decode": ["rows = 3", "nbytes = 230_400", "working = 3", "sharing = 36"],
    "10_mha_prefill": ["loaded = 11", "k_rows = 683", "empty = 3"],
    "11_mla": ["factor = 71", "nbytes = 267_904", "more = 384"],
    "12_fp8_kv": ["stored = 18", "nbytes = 136", "x = -18"],
    "13_on_the_chip": ["byte = 752", "place = (10, 2)", "passes = 16", "nbytes = 8_388_608"],
    "16_in_your_stack": ["slot = 84", "together = 5", "nbytes = 80"],
}

pytestmark = pytest.mark.parametrize("source", SOURCES, ids=[path.stem for path in SOURCES])


def _questions(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if "question" in cell.metadata.get("tags", [])]


def _printed(notebook: Any) -> str:
    """What the cells printed."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return "\n".join("".join(output.get("text", "") for output in cell.outputs) for cell in cells)


def test_the_ipynb_is_its_source_without_outputs(source: Path) -> None:
    paired = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    written = jupytext.read(source)
    kinds = [(cell.cell_type, cell.source) for cell in written.cells]
    assert [(cell.cell_type, cell.source) for cell in paired.cells] == kinds, "run `jupytext --sync notebooks/*.py`"
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in paired.cells)


def test_it_runs_as_it_is_and_with_the_right_answers(source: Path, run_notebook: Callable[[Any], None]) -> None:
    """Without answers no hint is printed; with them, the notebook's own objects say the same as the course."""
    notebook, names = jupytext.read(source), list(TRUTHS[source.stem])
    assert len(names) >= 3, "a notebook asks the reader at least three questions"
    run_notebook(notebook)
    printed = _printed(notebook)
    assert printed.count("No answer yet:") == len(names)
    assert not [text for name in names for text in QUESTIONS[name].hints if text in printed]
    answered = jupytext.read(source)
    for cell, answer in zip(_questions(answered), ANSWERS[source.stem], strict=True):
        cell.source = answer
    for cell in answered.cells:
        for name in [one for one in names if f'ask("{one}"' in cell.source and not callable(QUESTIONS[one].answer)]:
            cell.source += f"{TRUTHS[source.stem][name]}import numpy as np\n"
            cell.source += "from kvlab.exercises.course import QUESTIONS\n"
            cell.source += f"assert np.array_equal(truth, QUESTIONS['{name}'].answer), ('{name}', truth)"
    run_notebook(answered)
    assert _printed(answered).count("Right.") == len(names)


def test_no_answer_stands_in_a_cell(source: Path) -> None:
    """Nor a hint: the cell of a question names it, and no more."""
    notebook = jupytext.read(source)
    text = "\n".join(cell.source for cell in notebook.cells)
    for name in TRUTHS[source.stem]:
        assert f'ask("{name}", ' in text
        assert not [one for one in QUESTIONS[name].hints if one in text]
    assert {name[:2] for name in QUESTIONS} == {one.stem[:2] for one in SOURCES}


def test_named_mistakes_are_wrong(source: Path) -> None:
    """A law: an answer that is right has no name of a mistake, and mistakes differ from each other."""
    for name, question in QUESTIONS.items():
        if name.startswith(source.stem[:2]):
            answers = [question.answer, *(wrong for wrong, _ in question.mistakes)]
            assert not [(a, b) for i, a in enumerate(answers) for b in answers[:i] if same(a, b)]
            assert question.hints
