"""Twins line for line: each statement of a step beside its counterpart, and what the two do not share."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvlab.mirror.meetings import meeting_of
from kvlab.mirror.quantities import EXCHANGEABLE, Form, Reading
from kvlab.mirror.source import MirrorStep, TwinSide
from kvlab.mirror.statements import Statement


@dataclass(frozen=True)
class Line:
    """A kernel's statement beside its counterpart; one of them is None where a statement stands alone.

    ``kind``: the class of a statement that stands alone, "" where none is named. ``differences``: what counterparts do
    not share, in words."""

    step: str
    kernel: Statement | None
    emulator: Statement | None
    differences: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        alone = self.kernel if self.emulator is None else self.emulator if self.kernel is None else None
        return alone.kind if alone else ""


@dataclass(frozen=True)
class Lines:
    """All lines of a twin, step by step; ``steps[i]`` are those of step ``i`` of both sides. ``alone``: helpers of the
    kernel that have no counterpart to be compared with."""

    name: str
    kernel: TwinSide
    emulator: TwinSide
    steps: tuple[tuple[Line, ...], ...]
    alone: tuple[str, ...] = ()

    @cached_property
    def lines(self) -> list[Line]:
        return [line for step in self.steps for line in step]

    def count(self) -> tuple[int, int, int]:
        """Statements of the kernel, those with a counterpart, and those that are equal to it."""
        ours = [line for line in self.lines if line.kernel is not None]
        paired = [line for line in ours if line.emulator is not None]
        return len(ours), len(paired), sum(not line.differences for line in paired)

    @property
    def share(self) -> float:
        """Share of the kernel's statements that have a counterpart, 0 to 1."""
        total, paired, _ = self.count()
        return paired / total if total else 1.0


@dataclass(frozen=True)
class Beside:
    """Lines of both sources that are beside each other in a picture; ``kinds`` of those of one side, () for both."""

    kernel: range
    emulator: range
    kinds: tuple[str, ...] = ()


def beside(lines: Iterable[Line], kernel: range, emulator: range) -> list[Beside]:
    """The source lines of one step, counterparts beside each other; what is on one side alone is put together.

    A line without a statement (a comment, a header) lies with the statement after it.

    >>> from kvlab.mirror.source import read_side
    >>> text = "def f(x):\\n    #: a -> y, z\\n    y = x\\n    at = 2 * x\\n    z = y\\n"
    >>> sides = read_side(text, "f"), read_side(text.replace("    at = 2 * x\\n", ""), "f")
    >>> for row in beside(lines_of("f", *sides, {}, {}).steps[0], range(2, 6), range(2, 5)):
    ...     print([*row.kernel], [*row.emulator], row.kinds)
    [2, 3] [2, 3] ()
    [4] [] ('no class',)
    [5] [4] ()
    """
    at, ends = [kernel.start, emulator.start], (kernel.stop, emulator.stop)
    found: list[Beside] = []
    for line in lines:
        places = [
            at[i] if one is None else max(at[i], one.last_line + 1)
            for i, one in enumerate((line.kernel, line.emulator))
        ]
        both = line.kernel is not None and line.emulator is not None
        if places == at and found:
            continue  # of a physical line that has been taken
        new = range(at[0], places[0]), range(at[1], places[1])
        last = found[-1] if found else None
        if last is not None and ((both and not all(new)) or (not both and last.kinds)):
            kinds = () if both else tuple(dict.fromkeys((*last.kinds, line.kind or "no class")))
            found[-1] = Beside(range(last.kernel.start, places[0]), range(last.emulator.start, places[1]), kinds)
        else:
            found.append(Beside(*new, () if both else (line.kind or "no class",)))
        at = places
    if not found:
        return [Beside(kernel, emulator)]
    last = found[-1]
    if at != [*ends]:
        found[-1] = Beside(range(last.kernel.start, ends[0]), range(last.emulator.start, ends[1]), last.kinds)
    return found


class _StatementReader:
    """One side's statements as keys, conditions and facts.

    A statement that gives a name to what has this name already (``group = problem.group``, ``batch = batch.to(..)``),
    or, once and on this side only, to something by plumbing alone (``key_at = by_column(s, key)``), is none."""

    def __init__(self, side: TwinSide, synonyms: Mapping[str, str], flags: Iterable[str], others: TwinSide) -> None:
        self.side = side
        statements = _statements(side)
        pointers = {name for name in side.parameters if name.endswith("_ptr")}
        strides = {}
        for name in side.parameters:
            heads = [p for p in pointers if name.startswith(p.removesuffix("ptr")) and name not in pointers]
            if heads and name not in synonyms:
                strides[name] = max(heads, key=len)
        addresses = {n for s in statements if s.kind == "address" for n in s.binds}
        self.reading = Reading(synonyms, pointers | addresses, strides, set(flags))
        self.addresses = {self.reading.name(name) for name in addresses}
        self.forms: dict[int, Form] = {}
        self.meetings = {
            id(s): meeting_of(s.value) for s in statements if isinstance(s.value, ast.Call | ast.Yield)
        }
        self.plumbing: set[int] = set()
        bound = Counter(name for statement in statements for name in statement.binds)
        there = {name for statement in _statements(others) for name in statement.binds} | set(others.parameters)
        for statement in statements:
            form = self.form(statement)
            if len(statement.binds) != 1 or form.op != "leaf":
                continue
            (name,) = statement.binds
            if self.reading.name(name) == form.text:
                self.plumbing.add(id(statement))
            elif bound[name] == 1 and name not in there and form.text.isidentifier():
                self.plumbing.add(id(statement))
                self.reading.aliases[name] = form
        self.forms.clear()
        self.names = {self.reading.name(name) for name in (*side.parameters, *side.constants)}
        self.made_of: dict[str, set[str]] = {}
        for statement in self.kept(statements):
            names = self.form(statement).all_names
            binds = [self.reading.name(name) for name in statement.binds]
            self.names |= {*names, *binds}
            for condition in statement.conditions:
                self.names |= self.reading.form(condition).all_names
            for name in binds:
                self.made_of.setdefault(name, set()).update(names)

    def kept(self, statements: Iterable[Statement]) -> list[Statement]:
        """Statements without those that are plumbing."""
        return [statement for statement in statements if id(statement) not in self.plumbing]

    def form(self, statement: Statement) -> Form:
        """The plain form of a statement's value and, where it writes an element, of where."""
        met = self.meeting(statement)
        if met:
            return Form("leaf", (), met)
        if id(statement) not in self.forms:
            parts = [self.reading.form(statement.value)] if statement.value is not None else []
            parts += [self.reading.form(t) for t in statement.targets if isinstance(t, ast.Subscript | ast.Attribute)]
            self.forms[id(statement)] = parts[0] if len(parts) == 1 else Form("tuple", tuple(parts))
        return self.forms[id(statement)]

    def meeting(self, statement: Statement) -> str | None:
        """The wait, arrival or fence that a statement is, in its comparable form."""
        return self.meetings.get(id(statement))

    def key(self, statement: Statement) -> tuple[str, ...]:
        """Key of a statement: the names that it binds, what it writes, or calls, or where it waits."""
        met = self.meeting(statement)
        if met:
            return ("meeting", met)
        if statement.binds:
            return tuple(self.reading.name(name) for name in statement.binds)
        target = next((t for t in statement.targets if isinstance(t, ast.Subscript)), None)
        if target is not None:
            return ("store", *sorted(self.reading.form(target.value).names))
        form = self.form(statement)
        if form.parts and "store" in (form.text or form.op):
            return ("store", self._array(form.parts[0]))
        return ("call", form.text or form.op)

    def _array(self, place: Form) -> str:
        """The array that a place belongs to: the first of its names that is one, or that an offset is made of."""
        names = [part.text for part in (place.parts or (place,)) if part.op == "leaf"]
        names += [other for name in names for other in sorted(self.made_of.get(name, ()))]
        return next((name for name in names if name.endswith("_ptr")), names[0] if names else "")

    def conditions(self, statement: Statement) -> tuple[str, ...]:
        return tuple(self.reading.condition(test) for test in statement.conditions)


def lines_of(
    name: str, kernel: TwinSide, emulator: TwinSide, synonyms: Mapping[str, str], held: Mapping[str, str]
) -> Lines:
    """Put the statements of two sides beside each other; their steps must be the same (see ``check_sources``)."""
    others = (
        emulator.steps if len(kernel.steps) == len(emulator.steps) == 1 else _in_order(kernel.steps, emulator.steps)
    )
    pairs = list(zip(kernel.steps, others, strict=True))
    flags = {name for name, constexpr in kernel.parameters.items() if constexpr}
    flags |= {name for statement in _statements(kernel) for name in _constants(statement, flags)}
    ours = _StatementReader(kernel, synonyms, flags, emulator)
    theirs = _StatementReader(emulator, synonyms, flags, kernel)
    compared = _Comparison(ours, theirs, held)
    return Lines(name, kernel, emulator, tuple(tuple(compared.step(one, other)) for one, other in pairs))


def _statements(side: TwinSide) -> list[Statement]:
    return [statement for step in side.steps for statement in step.statements]


def _constants(statement: Statement, flags: Iterable[str]) -> Iterator[str]:
    """Fields of a constexpr that a statement, or a condition of it, uses: ``C.BN``."""
    for node in (part for one in (statement.value, *statement.conditions) if one is not None for part in ast.walk(one)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in flags:
            yield node.attr


def _in_order(steps: Sequence[MirrorStep], others: Sequence[MirrorStep]) -> Sequence[MirrorStep | None]:
    """For each step the next one of the same text and role on the other side."""
    found: list[MirrorStep | None] = []
    used: set[int] = set()
    for step in steps:
        same = (
            i for i, other in enumerate(others)
            if i not in used and (other.marker.text, other.marker.role) == (step.marker.text, step.marker.role)
        )
        at = next(same, None)
        if at is not None:
            used.add(at)
        found.append(others[at] if at is not None else None)
    return found


class _Comparison:
    """Statements of two sides, compared."""

    def __init__(self, kernel: _StatementReader, emulator: _StatementReader, held: Mapping[str, str]) -> None:
        self.kernel, self.emulator = kernel, emulator
        self.shared = kernel.names & emulator.names
        self.flags = kernel.reading.flags
        self.held = {helper: set(names.split()) for helper, names in held.items()}
        self.values = {name for name in self.shared - self.flags if _is_name(name) and not name.endswith("_ptr")}

    def step(self, one: MirrorStep, other: MirrorStep | None) -> list[Line]:
        a, b = self.kernel.kept(one.statements), self.emulator.kept(other.statements if other is not None else [])
        name = one.marker.name
        keys = [self.kernel.key(s) for s in a], [self.emulator.key(s) for s in b]
        found: list[Line] = []
        i = j = 0
        for at, to in [*_align(keys[0], keys[1], lambda x, y: len(self.differences(a[x], b[y]))), (len(a), len(b))]:
            found += [Line(name, statement, None) for statement in a[i:at]]
            found += [Line(name, None, statement) for statement in b[j:to]]
            if at < len(a):
                found.append(Line(name, a[at], b[to], tuple(self.differences(a[at], b[to]))))
            i, j = at + 1, to + 1
        return found

    def differences(self, a: Statement, b: Statement) -> list[str]:
        """Differences of two counterparts, in words."""
        found = []
        conditions = self.kernel.conditions(a), self.emulator.conditions(b)
        if conditions[0] != conditions[1]:
            both = (" and ".join(f"'{c}'" for c in some) or "no condition" for some in conditions)
            found.append("under {} in the kernel, {} in the emulator".format(*both))
        ours, theirs = self.kernel.form(a), self.emulator.form(b)
        found += self._names(ours, theirs)
        left, right = self._facts(self.kernel, ours), self._facts(self.emulator, theirs)
        if _tells_other(left) != _tells_other(right):
            left, right = (Counter({f: n for f, n in some.items() if not _tells_other([f])}) for some in (left, right))
        only = [sorted((some - others).elements()) for some, others in ((left, right), (right, left))]
        if any(only):
            both = (", ".join(f"'{fact}'" for fact in some) or "nothing" for some in only)
            found.append("{} in the kernel, {} in the emulator".format(*both))
        given = [self._given(reader, form) for reader, form in ((self.kernel, ours), (self.emulator, theirs))]
        for helper in given[0].keys() & given[1].keys():
            first, second = ([n for n in one[helper] if n in other[helper]] for one, other in (given, given[::-1]))
            if first != second:
                found.append(f"{helper} is given {', '.join(first)} in the kernel, {', '.join(second)} in the emulator")
        return found

    def _given(self, reader: _StatementReader, form: Form) -> dict[str, list[str]]:
        """Names that helpers are given by themselves, in order, without arrays: of helpers that are called once."""
        calls = [(op, operands) for op, operands in reader.reading.facts(form) if op.endswith("()")]
        once = Counter(op for op, _ in calls)
        return {
            op: list(dict.fromkeys(name for names in operands if len(names) == 1 for name in names & self.values))
            for op, operands in calls
            if once[op] == 1
        }

    def _names(self, ours: Form, theirs: Form) -> list[str]:
        """Names of one side that the other neither uses nor holds in what it uses."""
        sides = (self.kernel, ours), (self.emulator, theirs)
        used = [form.all_names for _, form in sides]
        may = [
            set().union(*(self._holds(reader, name) for name in names))
            for (reader, _), names in zip(sides, used, strict=True)
        ]
        found = []
        plain = self.shared - self.flags - self.kernel.addresses - self.emulator.addresses
        for (who, other), there in (((0, 1), "emulator"), ((1, 0), "kernel")):
            lacking = {n for n in used[who] & plain if _is_name(n)} - used[other] - may[other]
            found += [f"'{name}' is not used in the {there}" for name in sorted(lacking)]
        return found

    def _holds(self, reader: _StatementReader, name: str) -> set[str]:
        """What a name stands for that this side alone has, and what a helper is said to hold."""
        if name.endswith("()"):
            return self.held.get(name[:-2], set())
        found: set[str] = set()
        waiting = [name]
        while waiting:
            one = waiting.pop()
            if one in found or (one in self.shared and one not in reader.addresses):
                continue
            found.add(one)
            waiting += reader.made_of.get(one, ())
            found |= reader.made_of.get(one, set())
        return found

    def _facts(self, reader: _StatementReader, form: Form) -> Counter[str]:
        """Facts in words, without the names that one side alone has."""
        found: Counter[str] = Counter()
        for op, operands in reader.reading.facts(form):
            text = self._fact(op, operands)
            if text:
                found[text] += 1
        return found

    def _fact(self, op: str, operands: Iterable[frozenset[str]]) -> str:
        if op.endswith("()"):
            return op
        kept = [" ".join(sorted(n for n in operand if self._keeps(n))) for operand in operands]
        kept = [one for one in kept if one]
        if op in EXCHANGEABLE:
            kept.sort()
        if not op.isalnum():
            return f" {op} ".join(kept) if len(kept) > 1 else ""
        return f"{op}({', '.join(kept)})"

    def _keeps(self, name: str) -> bool:
        bare = name.lstrip("-/") if not _is_number(name) else name
        return not _is_name(bare) or bare in self.shared


def _tells_other(facts: Iterable[str]) -> bool:
    """Tells whether some fact is what lies outside a mask, which not every statement tells."""
    return any(fact.startswith("other(") for fact in facts)


def _is_name(text: str) -> bool:
    return text.isidentifier() and text not in ("True", "False", "None", "INFINITY", "INFINITY_BELOW")


def _is_number(text: str) -> bool:
    return text.lstrip("-")[:1].isdigit()


def _align(a: list[tuple[str, ...]], b: list[tuple[str, ...]], cost: object) -> list[tuple[int, int]]:
    """The longest common subsequence of two lists of keys, that of the fewest differences among the longest."""
    best = [[0.0] * (len(b) + 1) for _ in range(len(a) + 1)]
    worth = {
        (i, j): 100 - min(cost(i, j), 90)  # type: ignore[operator]
        for i, one in enumerate(a) for j, other in enumerate(b) if one == other
    }
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            here = worth[i, j] + best[i + 1][j + 1] if (i, j) in worth else 0.0
            best[i][j] = max(here, best[i + 1][j], best[i][j + 1])
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        if (i, j) in worth and best[i][j] == worth[i, j] + best[i + 1][j + 1]:
            found.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return found
