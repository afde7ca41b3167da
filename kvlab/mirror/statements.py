"""Statements of a step: what each binds, under which conditions, and the class of one that is on one side only.

A *statement* is an assignment or a call. ``a, b = x, y`` is two of them; a docstring, an ``assert`` (which tells a type
checker what is there) and what counts traffic are none. A trailing comment ``#- address`` says why a statement has no
counterpart; on an ``if`` or ``for`` it speaks for all that is inside."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

CLASSES = {
    "address": "strides and offsets, which an array has of its own",
    "piece": "a second piece of columns",
    "wait": "what hardware waits for",
    "launch": "what a launch passes and the twin reads from an array",
    "instruction": "what an instruction does by itself and NumPy has to say",
    "layout": "which register holds what, which a fragment has of its own",
    "programs": "all programs of a launch at once: which of them still run, and their machine",
}
"""Why a statement may stand on one side only."""

_CLASS = re.compile(r"#\s?-\s*(\w+)\b")


@dataclass(frozen=True)
class Statement:
    """One statement: the names that it binds (or what it writes or calls), its value, and where it lies.

    >>> (one,) = statements_of(ast.parse("if BIAS:\\n    s, visible = add_bias(s, visible, bias_ptr)").body, {})
    >>> one.binds, [ast.unparse(test) for test in one.conditions], one.line
    (('s', 'visible'), ['BIAS'], 2)
    """

    binds: tuple[str, ...]
    targets: tuple[ast.expr, ...]
    value: ast.expr | None
    conditions: tuple[ast.expr, ...]
    line: int
    last_line: int
    kind: str = ""


def statements_of(nodes: list[ast.stmt], comments: dict[int, str]) -> list[Statement]:
    """The statements of a block, with ``comments`` (line -> trailing comment) for their classes. What follows an ``if``
    that returns is its ``else``."""
    return list(_walk(nodes, (), "", comments))


def _class_at(comments: dict[int, str], first: int, last: int) -> str:
    """The class that a comment on one of these lines names."""
    for line in range(first, last + 1):
        found = _CLASS.search(comments.get(line, ""))
        if found:
            return found[1]
    return ""


def _walk(
    nodes: list[ast.stmt], inside: tuple[ast.expr, ...], kind: str, comments: dict[int, str]
) -> Iterator[Statement]:
    for node in nodes:
        if isinstance(node, ast.If):
            own = kind or _class_at(comments, node.lineno, node.test.end_lineno or node.lineno)
            otherwise = ast.UnaryOp(ast.Not(), node.test)
            yield from _walk(node.body, (*inside, node.test), own, comments)
            yield from _walk(node.orelse, (*inside, otherwise), own, comments)
            if isinstance(node.body[-1], ast.Return) and not node.orelse:
                inside = (*inside, otherwise)
        elif isinstance(node, ast.For):
            own = kind or _class_at(comments, node.lineno, node.iter.end_lineno or node.lineno)
            each = ast.Call(ast.Name("each"), [node.target, node.iter], [])
            yield from _walk(node.body, (*inside, each), own, comments)
        elif isinstance(node, ast.While):
            yield from _walk(node.body, (*inside, node.test), kind, comments)
        elif isinstance(node, ast.With):
            yield from _walk(node.body, inside, kind, comments)
        else:
            last = node.end_lineno or node.lineno
            own = kind or _class_at(comments, node.lineno, last)
            for one in _simple(node):
                yield replace(one, conditions=inside, line=node.lineno, last_line=last, kind=own)


def _simple(node: ast.stmt) -> Iterator[Statement]:
    blank = Statement((), (), None, (), 0, 0)
    if isinstance(node, ast.AugAssign):
        left = _loaded(node.target)
        yield replace(
            blank, targets=(node.target,), value=ast.BinOp(left, node.op, node.value), binds=_bound(node.target)
        )
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield replace(blank, targets=(node.target,), value=node.value, binds=_bound(node.target))
    elif isinstance(node, ast.Assign):
        target, value = node.targets[0], node.value
        values = _elements(value, target)
        if values and isinstance(target, ast.Tuple):
            for one, its in zip(target.elts, values, strict=True):
                yield replace(blank, targets=(one,), value=its, binds=_bound(one))
        else:
            yield replace(blank, targets=tuple(node.targets), value=value, binds=_bound(target))
    elif isinstance(node, ast.Return) and node.value is not None:
        yield replace(blank, value=node.value, binds=("return",))
    elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant) and not _counts_traffic(node.value):
        yield replace(blank, value=node.value)


def _counts_traffic(value: ast.expr) -> bool:
    return ast.unparse(value).removeprefix("cta.").startswith("traffic.")


def _elements(value: ast.expr, target: ast.expr) -> list[ast.expr]:
    """The value of each element of a target, where the text tells them; program_ids are program_id(0) and so on."""
    if not isinstance(target, ast.Tuple):
        return []
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "program_ids":
        return [ast.Call(ast.Name("program_id"), [ast.Constant(axis)], []) for axis in range(len(target.elts))]
    if not isinstance(value, ast.Tuple) or len(value.elts) != len(target.elts):
        return []
    return [] if any(isinstance(e, ast.Starred) for e in (*target.elts, *value.elts)) else value.elts


def _bound(target: ast.expr) -> tuple[str, ...]:
    """The names of a target; () where it writes an element of an array."""
    if isinstance(target, ast.Name):
        return (target.id,)
    if isinstance(target, ast.Starred):
        return _bound(target.value)
    if isinstance(target, ast.Tuple | ast.List):
        return tuple(name for element in target.elts for name in _bound(element))
    return ()


def _loaded(target: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(target), mode="eval").body
