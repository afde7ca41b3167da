"""A twin read from its source text: the tree of steps, with the loop and branch headers that enclose them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from kvlab.mirror.meetings import Meeting, meetings_of
from kvlab.mirror.statements import Statement, statements_of

_NAME = r"[A-Za-z_]\w*"
_MARKER = re.compile(
    rf"#:\s*(?P<name>{_NAME})(?:\s*->\s*(?P<outputs>{_NAME}(?:\s*,\s*{_NAME})*))?(?:\s+(?P<words>(?!->).*))?$"
)
_ROLE = re.compile(rf"#@\s*(?P<role>{_NAME})(?:\s+.*)?$")
_ALIKE = re.compile(r"#\s*[:@]")
"""A marker, or meant to be one."""
_RANGES = {"range", "static_range", "ragged_range"}
_RANGE_HINTS = {
    "num_stages",
    "loop_unroll_factor",
    "disallow_acc_multi_buffer",
    "flatten",
    "warp_specialize",
    "disable_licm",
}


@dataclass(frozen=True)
class Marker:
    """One ``#: name -> outputs   words`` comment; ``text`` has its white space normalised."""

    name: str
    outputs: tuple[str, ...]
    text: str
    role: str
    line: int
    column: int


@dataclass
class MirrorStep:
    """The statements from a marker to the next marker or dedent, as (first line, last line) pairs."""

    marker: Marker
    ranges: list[tuple[int, int]] = field(default_factory=list)
    bound: set[str] = field(default_factory=set)
    meetings: list[Meeting] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    headers: tuple[Header, ...] = ()

    @property
    def line(self) -> int:
        return self.marker.line

    @property
    def last_line(self) -> int:
        return max((last for _, last in self.ranges), default=self.line)


@dataclass(eq=False)
class Header:
    """A loop or branch that encloses markers. ``text`` is its comparable form, ``lines`` and ``body`` line ranges."""

    kind: str
    text: str
    lines: tuple[int, int]
    body: tuple[int, int]
    children: list[MirrorStep | Header] = field(default_factory=list)

    @property
    def line(self) -> int:
        return self.lines[0]

    @property
    def is_loop(self) -> bool:
        return self.kind in ("for", "while")


@dataclass(frozen=True)
class Problem:
    """A fault of one side by itself."""

    line: int
    message: str


@dataclass
class TwinSide:
    """One side of a twin: its source, the tree of its steps and what is wrong with it."""

    path: str
    function: str
    lines: list[str]
    spans: list[tuple[int, int]]
    tree: list[MirrorStep | Header]
    problems: list[Problem]
    parameters: dict[str, bool] = field(default_factory=dict)
    """Names of the function's parameters, and whether each is a constexpr."""
    constants: frozenset[str] = frozenset()
    """Names in capitals that the module imports or assigns: a function may use them, whether or not it does."""

    @property
    def steps(self) -> list[MirrorStep]:
        return list(_steps(self.tree))

    @property
    def first_line(self) -> int:
        return self.spans[0][0]

    @property
    def bands(self) -> list[tuple[range, int | None]]:
        """The function's lines cut at its headers and markers; a step's band comes with the step's index."""
        starts: list[tuple[int, int | None]] = [(self.first_line, None)]
        number = 0

        def walk(nodes: list[MirrorStep | Header]) -> None:
            nonlocal number
            for node in nodes:
                starts.append((node.line, number if isinstance(node, MirrorStep) else None))
                if isinstance(node, MirrorStep):
                    number += 1
                else:
                    walk(node.children)

        walk(self.tree)
        ends = [line for line, _ in starts[1:]] + [self.spans[0][1] + 1]
        return [(range(line, end), step) for (line, step), end in zip(starts, ends, strict=True)]


def _steps(nodes: Iterable[MirrorStep | Header]) -> Iterator[MirrorStep]:
    for node in nodes:
        if isinstance(node, MirrorStep):
            yield node
        else:
            yield from _steps(node.children)


def read_side(source: str, function: str, path: str = "<source>") -> TwinSide:
    """Read the function (or the comma-separated functions) ``function`` of a module's text into its steps."""
    module = ast.parse(source, filename=path)
    definitions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    reader = _SourceReader(source)
    spans: list[tuple[int, int]] = []
    tree: list[MirrorStep | Header] = []
    parameters: dict[str, bool] = {}
    for name in (part.strip() for part in function.split(",")):
        if name not in definitions:
            known = ", ".join(definitions) or "none"
            raise ValueError(f"{path} defines no function {name!r} at module level; its functions: {known}")
        node = definitions[name]
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        spans.append((first, reader.last_line(node)))
        tree += reader.read_function(node, spans[-1])
        parameters |= _parameters(node)
    if not any(True for _ in _steps(tree)):
        reader.problems.append(Problem(spans[0][0], f"{function} has no marker (a comment '#: name -> outputs')"))
    problems = sorted(reader.problems, key=lambda problem: problem.line)
    return TwinSide(path, function, source.splitlines(), spans, tree, problems, parameters, _constants(module))


def read_marked(source: str, function: str, path: str, markers: dict[tuple[int, int], Marker]) -> TwinSide:
    """Read a function whose markers are given, by line and column of the statements that they open. A step is that one
    statement.
    """
    module = ast.parse(source, filename=path)
    node = next(n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == function)
    reader = _SourceReader(source)
    span = min([node.lineno, *(d.lineno for d in node.decorator_list)]), reader.last_line(node)
    reader.markers = markers
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    tree = reader._block(body, ())
    for step in _steps(tree):
        step.ranges = step.ranges[:1]  # what follows may bind the name anew
    return TwinSide(path, function, source.splitlines(), [span], tree, [], _parameters(node), _constants(module))


@lru_cache(maxsize=256)
def read_helper(source: str, function: str, path: str = "<source>") -> TwinSide:
    """Read a function without markers as one step of its name."""
    module = ast.parse(source)
    node = next(n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == function)
    reader = _SourceReader(source)
    span = min([node.lineno, *(d.lineno for d in node.decorator_list)]), reader.last_line(node)
    step = MirrorStep(Marker(function, (), function, "", node.lineno, node.col_offset))
    step.statements = statements_of(node.body, reader.trailing)
    return TwinSide(path, function, source.splitlines(), [span], [step], [], _parameters(node), _constants(module))


def _parameters(node: ast.FunctionDef) -> dict[str, bool]:
    """Names of parameters, and whether each is a constexpr."""
    return {
        one.arg: one.annotation is not None and ast.unparse(one.annotation).endswith("constexpr")
        for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    }


def _constants(module: ast.Module) -> frozenset[str]:
    """Names in capitals that a module imports or assigns."""
    imported = {
        alias.asname or alias.name for node in module.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    targets = (
        target for node in module.body if isinstance(node, ast.Assign | ast.AnnAssign)
        for part in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in ast.walk(part)
    )
    assigned = {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(name for name in imported | assigned if name.isupper())


class _SourceReader:
    """Reads one module; collects problems."""

    def __init__(self, source: str) -> None:
        self.problems: list[Problem] = []
        self.lines = source.splitlines()
        self.code, self.comments = _tokens(source)
        self.trailing = {token.start[0]: token.string for token in self.comments}

    def _fault(self, line: int, message: str) -> None:
        self.problems.append(Problem(line, message))

    def last_line(self, node: ast.FunctionDef) -> int:
        """The function's last line, trailing comments of its body included."""
        last = node.end_lineno or node.lineno
        following = next((token.start[0] for token in self.code if token.start[0] > last), len(self.lines) + 1)
        trailing = [c.start[0] for c in self.comments if last < c.start[0] < following and c.start[1] > node.col_offset]
        return max([last, *trailing])

    def read_function(self, node: ast.FunctionDef, span: tuple[int, int]) -> list[MirrorStep | Header]:
        starts = {(s.lineno, s.col_offset): s for s in ast.walk(node) if isinstance(s, ast.stmt) and s is not node}
        self.markers: dict[tuple[int, int], Marker] = {}
        role = ""
        for comment in self.comments:
            line, column = comment.start
            if not span[0] <= line <= span[1] or not _ALIKE.match(comment.string):
                continue
            text = " ".join(comment.string.split())
            if self.lines[line - 1][:column].strip():
                self._fault(line, f"marker '{text}' stands behind code; give it its own line")
                continue
            found_role = _ROLE.match(text)
            found = _MARKER.match(text)
            if found_role:
                role = found_role["role"]
            elif found:
                outputs = tuple(re.split(r"\s*,\s*", found["outputs"])) if found["outputs"] else ()
                self._place(Marker(found["name"], outputs, _normal(found), role, line, column), starts)
            else:
                form = "'#@ role'" if "@" in text[:3] else "'#: name -> out1, out2   words'"
                self._fault(line, f"marker '{text}' is not of the form {form}")
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        return self._block(body, ())

    def _place(self, marker: Marker, starts: dict[tuple[int, int], ast.stmt]) -> None:
        """Tie a marker to the statement right after it, in its own block."""
        token = next((token for token in self.code if token.start[0] > marker.line), None)
        if token is None or token.start not in starts or token.start[1] != marker.column or token.string == "elif":
            self._fault(marker.line, f"step '{marker.name}' is empty: no statement of its block follows")
        elif token.start in self.markers:
            empty = self.markers[token.start]
            self._fault(empty.line, f"step '{empty.name}' is empty: the next marker follows at once")
            self.markers[token.start] = marker
        else:
            self.markers[token.start] = marker

    def _block(self, statements: list[ast.stmt], headers: tuple[Header, ...]) -> list[MirrorStep | Header]:
        nodes: list[MirrorStep | Header] = []
        step: MirrorStep | None = None
        for statement in statements:
            marker = self.markers.get((statement.lineno, statement.col_offset))
            if marker is not None:
                step = MirrorStep(marker, headers=headers)
                nodes.append(step)
            if self._encloses_markers(statement):
                if marker is not None:
                    text = f"step '{marker.name}' is empty: a loop or branch with markers of its own follows at once"
                    self._fault(marker.line, text)
                step = None
                nodes += self._structure(statement, headers)
            elif step is not None:
                step.ranges.append((statement.lineno, statement.end_lineno or statement.lineno))
                step.bound |= _bound_names(statement)
                step.meetings += meetings_of(statement)
                step.statements += statements_of([statement], self.trailing)
            else:
                code = self.lines[statement.lineno - 1].strip()
                self._fault(statement.lineno, f"statement outside a step: {code!r}; a marker must open it")
        return nodes

    def _encloses_markers(self, statement: ast.stmt) -> bool:
        last = statement.end_lineno or statement.lineno
        return any(statement.lineno < line <= last for line, _ in self.markers)

    def _structure(self, statement: ast.stmt, headers: tuple[Header, ...]) -> list[MirrorStep | Header]:
        if isinstance(statement, ast.For):
            lines = (statement.lineno, statement.iter.end_lineno)
            head = self._header("for", _for_text(statement), lines, statement.body)
        elif isinstance(statement, ast.While):
            text = f"while {ast.unparse(statement.test)}"
            head = self._header("while", text, (statement.lineno, statement.test.end_lineno), statement.body)
        elif isinstance(statement, ast.If):
            kind = "elif" if self.lines[statement.lineno - 1][statement.col_offset :].startswith("elif") else "if"
            text = f"{kind} {ast.unparse(statement.test)}"
            head = self._header(kind, text, (statement.lineno, statement.test.end_lineno), statement.body)
        else:
            kind = type(statement).__name__.lower()
            self._fault(statement.lineno, f"'{kind}' encloses markers; only for, while and if may")
            return []
        head.children = self._block(statement.body, (*headers, head))
        if not statement.orelse:
            return [head]
        first = statement.orelse[0]
        if isinstance(first, ast.If) and self.lines[first.lineno - 1][first.col_offset :].startswith("elif"):
            return [head, *self._block(statement.orelse, headers)]
        before = (first.lineno, first.col_offset)
        line = max(token.start[0] for token in self.code if token.string == "else" and token.start < before)
        other = self._header("else", "else", (line, line), statement.orelse)
        other.children = self._block(statement.orelse, (*headers, other))
        return [head, other]

    def _header(self, kind: str, text: str, lines: tuple[int, int | None], body: list[ast.stmt]) -> Header:
        last = body[-1].end_lineno or body[-1].lineno
        return Header(kind, text, (lines[0], lines[1] or lines[0]), (body[0].lineno, last))


@lru_cache(maxsize=64)
def _tokens(source: str) -> tuple[list[tokenize.TokenInfo], list[tokenize.TokenInfo]]:
    """A module's code and its comments."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return [t for t in tokens if t.type not in blank], [t for t in tokens if t.type == tokenize.COMMENT]


def _normal(found: re.Match[str]) -> str:
    outputs = ", ".join(re.split(r"\s*,\s*", found["outputs"])) if found["outputs"] else ""
    parts = [found["name"], f"-> {outputs}" if outputs else "", f"  {found['words']}" if found["words"] else ""]
    return " ".join(part for part in parts if part)


def _for_text(statement: ast.For) -> str:
    """``for start in range(lo, hi, BN)``, the same for every kind of range; compiler hints are left out."""
    iterator = statement.iter
    text = ast.unparse(iterator)
    if isinstance(iterator, ast.Call) and ast.unparse(iterator.func).rpartition(".")[2] in _RANGES:
        arguments = [ast.unparse(argument) for argument in iterator.args]
        arguments += [f"{k.arg}={ast.unparse(k.value)}" for k in iterator.keywords if k.arg not in _RANGE_HINTS]
        text = f"range({', '.join(arguments)})"
    return f"for {ast.unparse(statement.target)} in {text}"


def _bound_names(statement: ast.stmt) -> set[str]:
    """Names that a statement binds in the function's own scope."""
    names: set[str] = set()
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
            continue
        elif isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            names |= {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}
            continue
        elif isinstance(node, ast.AnnAssign) and node.value is None:
            continue
        waiting += ast.iter_child_nodes(node)
    return names
