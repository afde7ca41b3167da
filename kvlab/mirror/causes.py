"""Causes of a difference that the text of both sides shows: a name that a statement lacks, a name that a trip of a loop
leaves to the next one."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from kvlab.mirror.source import TwinSide
from kvlab.mirror.statements import Statement, statements_of


def place_of(kernel: TwinSide, twin: TwinSide, step: int, output: str) -> str:
    """Words for the kernel's statement that binds ``output`` in a step, with the lines of what it is made of and the
    twin does not have: ``line 7: `x = tl.load(where)`, where of line 5``.
    """
    ours, line = _Function(kernel), kernel.steps[step].line
    own = ours.uses(line, output, _Function(twin).known)[1]
    text = f"line {line}: `{kernel.lines[line - 1].strip()}`"
    return ", ".join([text, *(f"{name} of line {' and '.join(map(str, sorted(at)))}" for name, at in own.items())])


def cause_of(
    kernel: TwinSide, twin: TwinSide, step: int, output: str, later: bool, compared: Collection[str],
) -> tuple[str, str] | None:
    """Name and words of what the texts of a step say of a difference in it; None where they say nothing.

    step       number of the step on both sides;  ``output`` the name whose value differs
    later      whether an earlier trip of its loop agreed
    compared   names whose values agreed up to there

    Names count that both sides know; one that is a side's own stands for what it is made of.
    """
    ours, theirs = _Function(kernel), _Function(twin)
    lines = kernel.steps[step].line, twin.steps[step].line
    missing = theirs.uses(lines[1], output, ours.known)[0] - ours.uses(lines[0], output, theirs.known)[0]
    if missing:
        return "operand missing", f"the second's statement uses {', '.join(sorted(missing))}, the first's does not"
    carried = [f"{name} (line {line})" for name, line in ours.carried(lines[0]) if name not in compared] * later
    if carried:
        return "carried", f"the trip before agrees, so what it leaves to this one does not: {', '.join(carried)}"
    return None


class _Function:
    """Statements of one side, and the names that it knows."""

    def __init__(self, side: TwinSide) -> None:
        self.node = next(node for node in ast.walk(ast.parse("\n".join(side.lines)))
                         if isinstance(node, ast.FunctionDef) and node.name == side.function)
        self.statements = statements_of(self.node.body, {})
        self.bound = {name for one in self.statements for name in one.binds}
        self.known = self.bound | set(side.parameters)

    def uses(self, line: int, output: str, shared: Collection[str]) -> tuple[set[str], dict[str, set[int]]]:
        """Names among ``shared`` that the binding of ``output`` at a line uses, an own one standing for what binds it;
        and the own ones, with the lines of what binds them."""
        found: set[str] = set()
        own: dict[str, set[int]] = {}
        seen: set[str] = set()
        waiting = [one for one in self.statements if one.line == line and output in one.binds]
        while waiting:
            for name in sorted(_names(waiting.pop()) - seen):
                seen.add(name)
                if name in shared and name in self.known:
                    found.add(name)
                else:
                    made = [one for one in self.statements if name in one.binds]
                    own |= {name: {one.line for one in made}} if made else {}
                    waiting += made
        return found, own

    def carried(self, line: int) -> Iterator[tuple[str, int]]:
        """Names that the innermost loop around a line reads before it binds them, and where it does."""
        around = [node for node in ast.walk(self.node) if isinstance(node, ast.For | ast.While)
                  and node.lineno < line <= (node.end_lineno or node.lineno)]
        if not around:
            return
        inside = statements_of(max(around, key=lambda node: node.lineno).body, {})
        fresh: set[str] = set()
        read: set[str] = set()
        for one in inside:
            read |= _names(one) - fresh
            fresh |= set(one.binds)
        for one in inside:
            yield from ((name, one.line) for name in one.binds if name in read)


def _names(statement: Statement) -> set[str]:
    return set() if statement.value is None else {n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name)}
