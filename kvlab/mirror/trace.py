"""Follow a twin's function line by line and tell when each of its steps ends, on either side.

A step ends when the next line event leaves its lines, or the function returns. An iteration is one counter per
enclosing loop, counted from the events that lead from a loop's header into its body. Events of a NumPy function are
those of Python's tracer (:func:`tracing`). A kernel's come from calls that are put before its statements
(:func:`put_probes`), as the tracer would stop at each of the interpreter's own calls, too.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from kvlab.mirror.source import Header, TwinSide

#: Called at the end of a step with its index, its iteration and the function's local variables.
Record = Callable[[int, tuple[int, ...], dict[str, Any]], None]


class StaleSource(RuntimeError):
    """A function's source file has changed since the function was imported."""


@dataclass(frozen=True)
class TracePlan:
    """Plan of the tracer for one side of a twin; plain data, so that it can be sent to another process."""

    twin: str
    path: str
    function: str
    span: tuple[int, int]
    steps: tuple[tuple[str, int], ...]  # name and line of the marker
    outputs: tuple[tuple[str, ...], ...]
    step_at: dict[int, int]  # line -> step
    loops: tuple[tuple[tuple[int, int], tuple[int, int]], ...]  # header lines, body lines
    loops_of: tuple[tuple[int, ...], ...]  # step -> enclosing loops, outermost first

    @classmethod
    def of(cls, twin: str, side: TwinSide) -> TracePlan:
        if len(side.spans) != 1:
            raise ValueError(
                f"twin {twin!r}: {side.function!r} is several functions; they are checked, but a lockstep run needs one"
            )
        steps = side.steps
        headers: list[Header] = list(dict.fromkeys(h for step in steps for h in step.headers if h.is_loop))
        return cls(
            twin, side.path, side.function, side.spans[0], tuple((step.marker.name, step.line) for step in steps),
            tuple(step.marker.outputs for step in steps),
            {line: i for i, step in enumerate(steps) for a, b in step.ranges for line in range(a, b + 1)},
            tuple((header.lines, header.body) for header in headers),
            tuple(tuple(headers.index(h) for h in step.headers if h.is_loop) for step in steps),
        )


def members(output: str, variables: dict[str, Any]) -> list[tuple[str, Any]]:
    """Compared members of a bound output, each with its name: the value, or the members of a tuple or of what has them
    by a method ``members``.

    >>> members("q", {"q": (1.5, 2.5)}), members("m", {"m": 3.5}), members("l", {})
    ([('q[0]', 1.5), ('q[1]', 2.5)], [('m', 3.5)], [])
    """
    if output not in variables:
        return []
    value = variables[output]
    value = value.members() if hasattr(value, "members") else value
    if type(value).__name__ != "tuple":  # Python's, or Triton's class of the same name
        return [(output, value)]
    return [(f"{output}[{i}]", member) for i, member in enumerate(value)]


class Tracer:
    """The trace function of one call of a twin's function."""

    def __init__(self, plan: TracePlan, record: Record, ran: set[int]) -> None:
        self.plan = plan
        self.record = record
        self.ran = ran
        self.step: int | None = None
        self.line = plan.span[0]
        self.count = [-1] * len(plan.loops)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Tracer:
        if event == "line":
            self.move(frame, frame.f_lineno)
        elif event == "return":
            self.move(frame, 0)
        return self

    def at(self, line: int) -> None:
        """Event of a probe: the caller is about to run this line, 0: it returns."""
        self.move(sys._getframe(1), line)

    def move(self, frame: FrameType, line: int) -> None:
        self.ran.add(line)
        step = self.plan.step_at.get(line)
        if self.step is not None and step != self.step:
            iteration = tuple(self.count[loop] for loop in self.plan.loops_of[self.step])
            self.record(self.step, iteration, frame.f_locals)
        for loop, (header, body) in enumerate(self.plan.loops):
            was_head, was_body = header[0] <= self.line <= header[1], body[0] <= self.line <= body[1]
            if header[0] <= line <= header[1] and not (was_head or was_body):
                self.count[loop] = -1
            elif body[0] <= line <= body[1] and was_head:
                self.count[loop] += 1
        self.step, self.line = step, line


@contextmanager
def tracing(plans: Sequence[TracePlan], begin: Callable[[int], Record | None]) -> Iterator[list[set[int]]]:
    """Trace every call of the plans' functions; ``begin(plan's index)`` gives its recorder, or None to skip it. Yields
    the lines of each plan that have been run."""
    ran: list[set[int]] = [set() for _ in plans]
    known: dict[CodeType, int | None] = {}
    names = {plan.function for plan in plans}

    def enter(frame: FrameType, _event: str, _arg: Any) -> Tracer | None:
        code = frame.f_code
        if code.co_name not in names:
            return None
        if code not in known:
            known[code] = next((i for i, plan in enumerate(plans) if is_code_of(plan, code)), None)
        index = known[code]
        record = begin(index) if index is not None else None
        return Tracer(plans[index], record, ran[index]) if index is not None and record is not None else None

    previous = sys.gettrace()
    sys.settrace(enter)
    try:
        yield ran
    finally:
        sys.settrace(previous)


def put_probes(function: ast.FunctionDef, begin: str) -> None:
    """Put calls before the statements of a function, in place: what ``begin`` returns, a global of it, is called with
    each statement's line, again with a loop's where its body begins, and with 0 in the end."""
    walk = "_mirror_walk"

    def probe(line: int, like: ast.stmt) -> ast.stmt:
        call = ast.Expr(ast.Call(ast.Name(walk, ast.Load()), [ast.Constant(line)], []))
        return ast.fix_missing_locations(ast.copy_location(call, like))

    def block(statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for one in statements:
            for part in ("body", "orelse", "finalbody"):
                if getattr(one, part, None) and not isinstance(one, ast.FunctionDef):
                    setattr(one, part, block(getattr(one, part)))
            if isinstance(one, ast.For | ast.While):
                one.body.insert(0, probe(one.lineno, one))
            found += [probe(one.lineno, one), one]
        return found

    first = function.body[0]
    start = ast.Assign([ast.Name(walk, ast.Store())], ast.Call(ast.Name(begin, ast.Load()), [], []))
    ends = ast.Try(block(function.body), [], [], [probe(0, first)])
    function.body = [ast.fix_missing_locations(ast.copy_location(one, first)) for one in (start, ends)]


def is_code_of(plan: TracePlan, code: CodeType) -> bool:
    """Tells whether a code object is that of the plan's function."""
    first, last = plan.span
    return (
        code.co_name == plan.function
        and first <= code.co_firstlineno <= last
        and os.path.realpath(code.co_filename) == os.path.realpath(plan.path)
    )


@functools.lru_cache(maxsize=64)
def _compiled(source: str, path: str, function: str) -> CodeType | None:
    """The code of a function at the module level of a text."""
    module = compile(source, path, "exec", dont_inherit=True)
    return next((c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == function), None)


def check_fresh(plan: TracePlan, function: Any) -> None:
    """Raise :class:`StaleSource` if ``function`` was imported from another text than the plan's file now has."""
    while hasattr(function, "fn"):  # @triton.jit, @triton.heuristics, ...
        function = function.fn
    code = inspect.unwrap(function).__code__
    if _compiled(Path(plan.path).read_text(encoding="utf-8"), plan.path, plan.function) != code:
        raise StaleSource(f"{plan.path} has changed since {plan.function!r} was imported from it; reload the module")
