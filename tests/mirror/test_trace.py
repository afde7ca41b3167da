"""The line tracer. Rests on a law: the steps and iterations it tells are those that the function itself counts."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlab.mirror.source import read_side
from kvlab.mirror.trace import StaleSource, TracePlan, Tracer, check_fresh, put_probes, tracing

TEXT = """
def walk(log, rows):
    #: setup -> total
    total = 0
    log.append(("setup", ()))
    for row in range(
        0,
        rows,
    ):
        #: before -> total
        total = sum(
            (total, 1),
        )
        log.append(("before", (row,)))
        for column in range(row):
            #: inner -> total
            for repeat in range(2):
                total += 1
            log.append(("inner", (row, column)))
        if row % 2:
            #: odd -> total
            total = total
            log.append(("odd", (row,)))
            if row == 1:
                continue
        #: after -> total
        total += 1
        log.append(("after", (row,)))
    #: turn -> turn
    turn = -1
    log.append(("turn", ()))
    while total > 10:
        #: down -> total
        total -= 10
        turn += 1
        log.append(("down", (turn,)))
    #: store -> done
    done = total
    log.append(("store", ()))
    return done
"""


@pytest.mark.parametrize("rows", [0, 1, 2, 6])
def test_steps_and_iterations(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "walk.py"
    path.write_text(TEXT)
    space: dict[str, Any] = {}
    exec(compile(TEXT, str(path), "exec", dont_inherit=True), space)
    side = read_side(TEXT, "walk", str(path))
    assert not side.problems
    plan = TracePlan.of("walk", side)
    names = [step.marker.name for step in side.steps]
    seen, expected = [], []

    def record(step: int, iteration: tuple[int, ...], variables: dict[str, Any]) -> None:
        assert all(output in variables for output in plan.outputs[step])
        seen.append((names[step], iteration))

    before = sys.gettrace()
    with tracing([plan], lambda index: record):
        space["walk"](expected, rows)
    assert sys.gettrace() is before
    assert seen == expected
    assert len(seen) >= 3


@pytest.mark.parametrize("rows", [0, 1, 2, 6])
def test_probes_tell_what_the_tracer_tells(tmp_path: Path, rows: int) -> None:
    """The law is the same: calls before the statements, as a kernel has them, see the steps that the function counts,
    with its values, and the lines of its statements."""
    path = tmp_path / "walk.py"
    path.write_text(TEXT)
    plan = TracePlan.of("walk", read_side(TEXT, "walk", str(path)))
    tree = ast.parse(TEXT)
    assert isinstance(tree.body[0], ast.FunctionDef)
    put_probes(tree.body[0], "begin")
    seen, expected, ran = [], [], set[int]()

    def record(step: int, iteration: tuple[int, ...], variables: dict[str, Any]) -> None:
        seen.append((plan.steps[step][0], iteration, *(variables[name] for name in plan.outputs[step])))

    space: dict[str, Any] = {"begin": lambda: Tracer(plan, record, ran).at}
    exec(compile(tree, str(path), "exec", dont_inherit=True), space)
    result = space["walk"](expected, rows)
    assert [one[:2] for one in seen] == expected
    assert seen[-1] == ("store", (), result)
    lines = {node.lineno for node in ast.walk(ast.parse(TEXT)) if isinstance(node, ast.Assign | ast.AugAssign)}
    assert (lines - ran == set()) == (rows > 3)


def test_stale_source(tmp_path: Path) -> None:
    path = tmp_path / "walk.py"
    path.write_text(TEXT)
    space: dict[str, Any] = {}
    exec(compile(TEXT, str(path), "exec", dont_inherit=True), space)
    plan = TracePlan.of("walk", read_side(TEXT, "walk", str(path)))
    check_fresh(plan, space["walk"])
    path.write_text(TEXT.replace("total += 1", "total += 2"))
    with pytest.raises(StaleSource, match="has changed since 'walk' was imported"):
        check_fresh(plan, space["walk"])


def test_a_twin_of_several_functions_is_not_run(tmp_path: Path) -> None:
    text = "def a():\n    #: x -> y\n    y = 1\n\ndef b():\n    #: z -> y\n    y = 2\n"
    with pytest.raises(ValueError, match="'a,b' is several functions"):
        TracePlan.of("pair", read_side(text, "a,b"))
