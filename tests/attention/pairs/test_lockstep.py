"""The twins of every operation in lockstep, with every two of its features: no step differs, and no line is dead.

Rests on two implementations of one operation, which agree at the end of every step, and on the lines that the
interpreter and NumPy have run.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from pairs import lockstep_rows

from kvlab.mirror import lockstep

NOT_REACHED = {
    "return out, lse": "nothing is launched for an output without elements",
    "k, v = (np.zeros(": "no sequence has a key: nothing is loaded",
    "num_keys = np.zeros(problem.batch": "no sequence has a key",
    "later = sequence + (1 <<": "more than 256 sequences: in tests/attention/kv_store",
    "start = load(where_array, (later,)": "the same",
    "sequence = np.where(start.": "the same",
    "parts, w = (x.reshape(": "the order of sums on the chip, which the interpreter does not have",
    "return butterfly(np.add, np.moveaxis": "the same",
    "part, part_lse = (np.full(": "parts of a decode, whose rows are here under its name",
    "return part, part_lse": "the same",
    "return out[None], lse[None]": "the same",
}
"""Lines of emulators that no case of their own operation runs, and why."""


@contextmanager
def lines_run(path: str) -> Iterator[set[int]]:
    """The lines of a file that are run."""
    seen: set[int] = set()

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        seen.add(frame.f_lineno)
        return follow

    before = sys.gettrace()
    sys.settrace(lambda frame, event, _: follow if frame.f_code.co_filename == path else None)
    try:
        yield seen
    finally:
        sys.settrace(before)


def statements(path: str) -> dict[int, tuple[range, str]]:
    """The statements of a file's functions: their lines, and the first one's text."""
    text = Path(path).read_text()
    found = {}
    for function in (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            simple = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr | ast.Raise
            if isinstance(node, simple) and not isinstance(getattr(node, "value", None), ast.Constant | type(None)):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                found[node.lineno] = lines, text.splitlines()[node.lineno - 1].strip()
    return found


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("op", lockstep_rows.TABLES)
def test_every_two_features_meet_in_lockstep_and_no_line_is_dead(op: str) -> None:
    emulator = importlib.import_module(f"kvlab.attention.{op}.emulator")
    every: dict[tuple[str, int], str] = {}
    ran: set[tuple[str, int]] = set()
    for row, case, more in lockstep_rows.cases(op):
        run = lockstep(op, case, emulator=more)
        assert run.ok, f"{row}: {run.first_difference}"
        with lines_run(emulator.__file__) as seen:
            emulator.launch(**case, **more)
        for name, *sides in run.ran:
            for side, lines in zip(sides, run.lines_run[name], strict=True):
                for one in (statement for step in side.steps for statement in step.statements):
                    every[side.path, one.line] = side.lines[one.line - 1].strip()
                    ran |= {(side.path, one.line)} if lines & {*range(one.line, one.last_line + 1)} else set()
        for line, (lines, text) in statements(emulator.__file__).items():
            every[emulator.__file__, line] = text
            ran |= {(emulator.__file__, line)} if seen & {*lines} else set()
    dead = [text for place, text in every.items() if place not in ran]
    assert not [text for text in dead if not any(text.startswith(begins) for begins in NOT_REACHED)]
