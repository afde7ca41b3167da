"""Steps of a kernel and its twin that carry no markers: found by the names that both bind, in the order of the text."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.mirror.source import Marker, TwinSide, read_marked


@dataclass(frozen=True)
class Binding:
    """One statement that binds names: where it is, in how many loops, and where its block begins."""

    names: tuple[str, ...]
    line: int
    column: int
    depth: int
    block: tuple[int, ...]  # lines of the enclosing loops

    @property
    def token(self) -> tuple[int, tuple[str, ...]]:
        """Depth and names, to be compared with the other side."""
        return self.depth, self.names


@dataclass(frozen=True)
class Proposal:
    """Both sides with the steps that were found, and their texts with markers to be taken over.

    matched   names that are compared, in order;  ``alone`` names that the kernel alone binds
    """

    kernel: TwinSide
    twin: TwinSide
    matched: tuple[str, ...]
    alone: tuple[str, ...]
    kernel_text: str
    twin_text: str


def propose(kernel: tuple[str, str], twin: tuple[str, str]) -> Proposal:
    """Steps for two functions, each ``(path, name)``: one for each statement that binds the same names on both sides,
    in the same order and as deep in loops. Of several statements on a line the last one: values are taken after lines.

    ValueError where no name is bound by both.
    """
    texts = [Path(path).read_text(encoding="utf-8") for path, _ in (kernel, twin)]
    nodes = [_function(text, name, path) for text, (path, name) in zip(texts, (kernel, twin), strict=True)]
    found = [list(_bindings(node.body)) for node in nodes]
    pairs = _pairs(*(list({one.line: one for one in side}.values()) for side in found))
    if not pairs:
        names = [sorted({n for b in side for n in b.names}) for side in found]
        raise ValueError(f"kernel binds {names[0]}, twin {names[1]}: must have names in common to be compared")
    sides, marked = [], []
    for place, (text, (path, name)) in enumerate(zip(texts, (kernel, twin), strict=True)):
        markers = _markers([pair[place] for pair in pairs])
        sides.append(read_marked(text, name, path, markers))
        marked.append(_with_markers(text, markers, nodes[place]))
    matched = tuple(name for one, _ in pairs for name in one.names)
    alone = tuple(dict.fromkeys(n for b in found[0] for n in b.names if n not in matched))
    return Proposal(sides[0], sides[1], matched, alone, *marked)


def called_by_both(kernel: Any, twin: Any) -> tuple[list[tuple[Any, Any]], dict[str, str]]:
    """Pairs of functions that both sides call by one name, those that such functions call included: the ``@triton.jit``
    helpers of a kernel and their NumPy counterparts. Helpers without one are returned by name, with the reason."""
    pairs: list[tuple[Any, Any]] = []
    alone: dict[str, str] = {}
    waiting = [(kernel, twin)]
    while waiting:
        ours, theirs = (_called(fn) for fn in waiting.pop(0))
        for name, helper in ours.items():
            if not hasattr(helper, "fn"):
                continue
            if name not in theirs:
                alone.setdefault(name, "a helper of the kernel; the twin calls no function of this name")
            elif name not in [known.__name__ for known, _ in pairs] and helper.fn is not kernel:
                pairs.append((helper.fn, theirs[name]))
                waiting.append(pairs[-1])
    return pairs, {name: why for name, why in alone.items() if name not in [known.__name__ for known, _ in pairs]}


def _called(function: Any) -> dict[str, Any]:
    """Functions of files that a function calls by name, by the last part of it; those of libraries of Triton not."""
    function = inspect.unwrap(function)
    text = Path(inspect.getsourcefile(function) or "").read_text(encoding="utf-8")
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    found = {}
    for node in ast.walk(_function(text, function.__name__, function.__code__.co_filename)):
        if not isinstance(node, ast.Call):
            continue
        parts: list[str] = []
        callee = node.func
        while isinstance(callee, ast.Attribute):
            parts.insert(0, callee.attr)
            callee = callee.value
        if not isinstance(callee, ast.Name) or callee.id not in names:
            continue
        value = names[callee.id]
        for part in parts:
            value = getattr(value, part, None)
        plain = getattr(value, "fn", value)
        if inspect.isfunction(plain) and not plain.__module__.startswith(("triton.", "numpy")):
            found[plain.__name__] = value
    return found


def _function(text: str, name: str, path: str) -> ast.FunctionDef:
    for node in ast.walk(ast.parse(text, filename=path)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise ValueError(f"{path} defines no function {name!r}")


def _bindings(body: Sequence[ast.stmt], block: tuple[int, ...] = ()) -> Iterator[Binding]:
    for statement in body:
        if isinstance(statement, ast.For | ast.While):
            yield from _bindings(statement.body, (*block, statement.lineno))
            continue
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = list(statement.targets)
        elif isinstance(statement, ast.AugAssign) or (isinstance(statement, ast.AnnAssign) and statement.value):
            targets = [statement.target]
        names = tuple(node.id for target in targets for node in ast.walk(target)
                      if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        if names:
            yield Binding(names, statement.lineno, statement.col_offset, len(block), block)


def _pairs(kernel: list[Binding], twin: list[Binding]) -> list[tuple[Binding, Binding]]:
    """Statements that correspond: the longest runs of equal names in order, loops of one side in one of the other."""
    matcher = difflib.SequenceMatcher(None, [b.token for b in kernel], [b.token for b in twin], autojunk=False)
    pairs = [(kernel[m.a + n], twin[m.b + n]) for m in matcher.get_matching_blocks() for n in range(m.size)]
    loops: dict[tuple[int, ...], tuple[int, ...]] = {}
    return [(a, b) for a, b in pairs if loops.setdefault(a.block, b.block) == b.block]


def _markers(chosen: Sequence[Binding]) -> dict[tuple[int, int], Marker]:
    """A marker for each chosen statement."""
    counts: dict[str, int] = {}
    markers = {}
    for one in chosen:
        name = "_".join(one.names)
        counts[name] = counts.get(name, 0) + 1
        step = name if counts[name] == 1 else f"{name}_{counts[name]}"
        text = f"{step} -> {', '.join(one.names)}"
        markers[one.line, one.column] = Marker(step, one.names, text, "", one.line, one.column)
    return markers


def _with_markers(text: str, markers: dict[tuple[int, int], Marker], node: ast.FunctionDef) -> str:
    """The function's text with a marker in a line of its own above each step."""
    above = {line: f"{' ' * column}#: {marker.text}" for (line, column), marker in markers.items()}
    lines = text.splitlines()
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    out = []
    for number in range(first, (node.end_lineno or node.lineno) + 1):
        out += [above[number]] if number in above else []
        out.append(lines[number - 1])
    return "\n".join(out) + "\n"
