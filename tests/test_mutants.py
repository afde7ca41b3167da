"""The mutants: what they change, what becomes of them, and the list of those that no test can kill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tools import mutants as m

ROOT = Path(__file__).parents[1]

SOURCE = '''"""A file."""


def attend(k_token, v_token, page, key, limit, bias):
    """Words with 1 + 1."""
    at = page * k_token + key
    visible = (key < limit) & (bias > 0)
    if bias and at:
        visible = -visible
    return tl.where(
        visible, np.minimum(at, 3), v_token
    )
'''


def changes(source: str = SOURCE) -> set[str]:
    return {mutant.change for mutant in m.mutants_of("mha_decode/kernel.py", source)}


def test_every_kind_of_change_is_made() -> None:
    assert changes() >= {
        "k_token -> v_token",  # an operand
        "page * k_token + key -> ((page * k_token) - (key))", "-visible -> (visible)",  # signs
        "key < limit -> ((key) <= (limit))", "np.minimum(at, 3) -> (at)", "np.minimum -> np.maximum",  # bounds
        "(key < limit) & (bias > 0) -> (key < limit)", "(key < limit) & (bias > 0) -> (bias > 0)",  # masks
        "bias and at -> (at)", "3 -> 4", "bias and at -> (not (bias and at))",
        "tl.where( visible, np.minimum(at, 3), v_token ) -> tl.where(visible, v_token, np.minimum(at, 3))",
    }
    assert not any("1 + 1" in change for change in changes())


def test_a_mutant_changes_one_place_and_keeps_the_numbers_of_lines() -> None:
    for mutant in m.mutants_of("mha_decode/kernel.py", SOURCE):
        changed = mutant.source(SOURCE)
        compile(changed, "mutant", "exec")
        assert changed != SOURCE
        different = [a != b for a, b in zip(SOURCE.splitlines(), changed.splitlines(), strict=True)]
        assert different[: mutant.row - 1] == [False] * (mutant.row - 1)
        assert not any(different[mutant.last_row :])


def test_who_has_imported_a_function_sees_the_change(tmp_path: Path) -> None:
    text = "def inner(x):\n    return x + 1\n\n\ndef outer(x, *, by=2):\n    return inner(x) * by\n"
    module = ModuleType("planted")
    exec(compile(text, "planted.py", "exec"), module.__dict__)
    outer = module.outer
    assert outer(1) == 4
    m.put_in_place(module, text.replace("x + 1", "x - 1"), str(tmp_path / "mutant.py"))
    assert outer(2) == 2


def listed(tmp_path: Path, **entry: object) -> Path:
    words = {"file": "mha_decode/kernel.py", "line": "if bias and at:", "changes": ["bias and at -> (at)"],
             "reason": "so"} | entry
    path = tmp_path / "list.toml"
    path.write_text("[[equivalent]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in words.items()))
    return path


def test_the_list_names_mutants(tmp_path: Path) -> None:
    every = m.mutants_of("mha_decode/kernel.py", SOURCE)
    (entry,) = m.read_list(listed(tmp_path), every)
    assert [mutant.change for mutant in every if entry.fits(mutant)] == ["bias and at -> (at)"]
    (entry,) = m.read_list(listed(tmp_path, line="if bias...", changes=["*"]), every)
    assert sum(entry.fits(mutant) for mutant in every) == 3


@pytest.mark.parametrize("entry, message", [
    ({"line": "if bias:"}, "entry 1 fits no mutant"), ({"file": "mha_decode/emulator.py"}, "entry 1 fits no mutant"),
    ({"changes": ["bias and at -> (at)", "at -> bias"]}, r"entry 1 fits no mutant.*'at -> bias'"),
    ({"reason": "  "}, "entry 1 .* has no reason"),
])
def test_an_entry_that_fits_nothing_or_says_nothing_is_an_error(
    entry: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        m.read_list(listed(tmp_path, **entry), m.mutants_of("mha_decode/kernel.py", SOURCE))


def test_the_list_of_the_project_holds() -> None:
    """Every entry names mutants of today's files, and why no test kills them."""
    every = [mutant for file in m.files_of([]) for mutant in m.mutants_of(file, (m.ATTENTION / file).read_text())]
    m.read_list(m.LIST, every)


@pytest.mark.slow
@pytest.mark.interpreter
def test_a_run_kills_what_changes_results_and_tells_what_survives(tmp_path: Path) -> None:
    """Two strides for others are killed; what is taken from minus infinity changes no result, and is told."""
    none, found = tmp_path / "none.toml", tmp_path / "found.json"
    none.write_text("")
    places = "part_head -> part_batch", "o_head -> o_token", "0.0 -> 1.0    in shift ="
    words = [sys.executable, "tools/mutants.py", "merge_states/kernel.py", *(f"--find={place}" for place in places)]
    words += ["--equivalents", str(none), "--json", str(found), "--tests", "merge_states"]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)
    states = [outcome["state"] for outcome in json.loads(found.read_text())]
    assert states == ["survived", "killed", "killed"], run.stdout + run.stderr
    assert run.returncode == 1
    assert "SURVIVED merge_states/kernel.py" in run.stdout
    assert "2 killed, 1 survived; unexplained survivors 1 of 3 = 33.3 %" in run.stdout
