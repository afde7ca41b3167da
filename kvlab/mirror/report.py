"""The static check: two twins have the same steps, in the same order, under the same loops and branches, and the same
statements with the same quantities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path

from kvlab.mirror.helpers import Module, helper_pairs, helpers_alone
from kvlab.mirror.lines import Line, Lines, lines_of
from kvlab.mirror.source import Header, MirrorStep, Problem, TwinSide, read_side
from kvlab.mirror.statements import CLASSES
from kvlab.mirror.twin import Operation, Twin, module_file


@dataclass(frozen=True)
class Violation:
    """One breach of the mirror rule; ``kernel`` and ``emulator`` are ``file:line`` of the place on each side.

    >>> print(Violation("step 'mask' is missing", "kernel.py:40", "emulator.py:31"))
    step 'mask' is missing
        kernel   kernel.py:40
        emulator emulator.py:31
    """

    message: str
    kernel: str
    emulator: str

    def __str__(self) -> str:
        return f"{self.message}\n    kernel   {self.kernel}\n    emulator {self.emulator}"


@dataclass(frozen=True)
class Report:
    """Result of the check: the two sides of every twin, and the violations (none when the twins mirror each other).

    >>> report = compare("mha_decode")
    >>> report.ok, [name for name, kernel, emulator in report.twins]
    (True, ['attend', 'hopper', 'merge'])
    """

    twins: tuple[tuple[str, TwinSide, TwinSide], ...]
    violations: tuple[Violation, ...] = field(default=())
    lines: tuple[Lines, ...] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        counts = ", ".join(f"{name}: {len(kernel.steps)} steps" for name, kernel, _ in self.twins)
        if self.ok:
            return f"twins mirror each other ({counts})"
        listed = "\n".join(f"  {number}. {violation}" for number, violation in enumerate(self.violations, 1))
        return f"{len(self.violations)} violations of the mirror rule ({counts})\n{listed}"


class MirrorError(ValueError):
    """The twins do not mirror each other; ``report`` has every violation."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def check(op: str | Operation) -> Report:
    """Prove that the twins of an operation have the same steps in the same order, under the same loops and branches,
    with the same outputs, and those that declare ``synonyms`` the same statements with the same quantities; nothing is
    run and Triton is not imported.

    ``op`` is a folder of ``kvlab.attention``, the dotted name of a package whose ``config.py`` has ``TWINS``, or an
    :class:`Operation`. Raises :class:`MirrorError` with every violation and its place in both files.

    >>> print(check("merge_states"))
    twins mirror each other (merge: 7 steps)
    """
    report = compare(op)
    if not report.ok:
        raise MirrorError(report)
    return report


def compare(op: str | Operation) -> Report:
    """Compares as :func:`check`, but returns violations.

    >>> compare("merge_states").violations
    ()
    """
    operation = Operation.load(op)
    return _merge(_compare_twin(operation, twin) for twin in operation.twins)


def _compare_twin(operation: Operation, twin: Twin) -> Report:
    (kernel_module, kernel), (emulator_module, emulator) = operation.kernel(twin), operation.emulator(twin)
    kernel_file, emulator_file = module_file(kernel_module), module_file(emulator_module)
    return check_sources(
        Path(kernel_file).read_text(encoding="utf-8"), Path(emulator_file).read_text(encoding="utf-8"), kernel,
        emulator, name=twin.name, kernel_path=kernel_file, emulator_path=emulator_file, synonyms=twin.synonyms,
        held=twin.held,
    )


def _merge(reports: Iterable[Report]) -> Report:
    listed = list(reports)
    return Report(
        tuple(twin for report in listed for twin in report.twins),
        tuple(violation for report in listed for violation in report.violations),
        tuple(lines for report in listed for lines in report.lines),
    )


def check_sources(
    kernel_source: str, emulator_source: str, kernel_name: str, emulator_name: str, *, name: str | None = None,
    kernel_path: str = "kernel.py", emulator_path: str = "emulator.py", synonyms: Mapping[str, str] | None = None,
    held: Mapping[str, str] | None = None,
) -> Report:
    """Compare two functions given as module text; never raises for a violation, see :attr:`Report.violations`.

    ``synonyms`` and ``held`` are those of :class:`Twin`; with ``synonyms`` None only steps are compared.

    >>> text = "def f(x):\\n    #: setup -> y   one more\\n    y = x + 1\\n"
    >>> print(check_sources(text, text.replace("f(", "g("), "f", "g"))
    twins mirror each other (f: 1 steps)
    >>> check_sources(text, text.replace("y = ", "z = "), "f", "f").violations[0].message
    "step 'setup' lists 'y' but the emulator does not bind it"
    """
    kernel = read_side(kernel_source, kernel_name, kernel_path)
    emulator = read_side(emulator_source, emulator_name, emulator_path)
    found = [Violation(f.message, _here(kernel, f), _counterpart(kernel, emulator, f)) for f in kernel.problems]
    found += [Violation(f.message, _counterpart(emulator, kernel, f), _here(emulator, f)) for f in emulator.problems]
    for role in dict.fromkeys(step.marker.role for step in (*kernel.steps, *emulator.steps)):
        found += _compare_order(kernel, emulator, role)
    name = name or kernel_name
    pairs = [(name, kernel, emulator)]
    modules = Module(kernel_source, kernel_path), Module(emulator_source, emulator_path)
    pairs += [(f"{name}: {one}", a, b) for one, a, b in helper_pairs(*modules, (kernel_name, emulator_name))]
    lines = [lines_of(one, a, b, synonyms or {}, held or {}) for one, a, b in pairs]
    named = {one.rpartition(": ")[2] for one, _, _ in pairs[1:]}
    lines[0] = replace(lines[0], alone=helpers_alone(modules[0], kernel_name, named))
    if synonyms is not None:
        found += [violation for one in lines for violation in _unlike(one)]
    return Report(((name, kernel, emulator),), tuple(found), tuple(lines))


def _unlike(lines: Lines) -> list[Violation]:
    """Counterparts that differ, and statements that are on one side without a word why."""
    found = []
    for line, (here, there) in _places(lines):
        named = ", ".join((line.kernel or line.emulator).binds)  # type: ignore[union-attr]
        words = f"step '{line.step}'" + (f", '{named}'" if named else "")
        found += [Violation(f"{words}: {difference}", here, there) for difference in line.differences]
        if line.kernel is None or line.emulator is None:
            side = "emulator" if line.kernel is None else "kernel"
            if not line.kind:
                found.append(Violation(f"{words}: in the {side} only; a comment '#- class' says why", here, there))
            elif line.kind not in CLASSES:
                known = ", ".join(CLASSES)
                found.append(Violation(f"{words}: class '{line.kind}' is none of {known}", here, there))
    return found


def _places(lines: Lines) -> Iterator[tuple[Line, tuple[str, str]]]:
    """Each line with the places of both its sides; of a statement that is missing, the place of the one before."""
    at = [lines.kernel.first_line, lines.emulator.first_line]
    for line in lines.lines:
        for side, statement in enumerate((line.kernel, line.emulator)):
            if statement is not None:
                at[side] = statement.line
        yield line, (f"{lines.kernel.path}:{at[0]}", f"{lines.emulator.path}:{at[1]}")


def _here(side: TwinSide, fault: Problem) -> str:
    return f"{side.path}:{fault.line}"


def _counterpart(side: TwinSide, other: TwinSide, fault: Problem) -> str:
    """The place on the other side of a fault of one side: the step of the same name, or the function."""
    name = next((step.marker.name for step in reversed(side.steps) if step.line <= fault.line), None)
    line = next((step.line for step in other.steps if step.marker.name == name), other.first_line)
    return f"{other.path}:{line}"


@dataclass(frozen=True)
class _Item:
    """An element of a side in reading order: a header that opens or closes, or a marker."""

    key: tuple[str, str]
    line: int
    step: MirrorStep | None = None

    def __str__(self) -> str:
        kind, text = self.key
        return {"open": f"header '{text}'", "close": f"end of '{text}'", "marker": f"marker '{text}'"}[kind]


def _flatten(nodes: list[MirrorStep | Header], role: str) -> list[_Item]:
    """The part of the tree that belongs to one role; headers without a marker of that role vanish."""
    items: list[_Item] = []
    for node in nodes:
        if isinstance(node, MirrorStep):
            if node.marker.role == role:
                items.append(_Item(("marker", node.marker.text), node.line, node))
            continue
        inside = _flatten(node.children, role)
        if inside:
            items += [_Item(("open", node.text), node.line), *inside, _Item(("close", node.text), node.body[1])]
    return items


def _compare_order(kernel: TwinSide, emulator: TwinSide, role: str) -> list[Violation]:
    left, right = _flatten(kernel.tree, role), _flatten(emulator.tree, role)
    where = f" (role {role})" if role else ""
    found: list[Violation] = []
    matcher = SequenceMatcher(None, [item.key for item in left], [item.key for item in right], autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            for one, other in zip(left[i:i_end], right[j:j_end], strict=True):
                found += _unbound(kernel, emulator, one, other) + _unmet(kernel, emulator, one, other)
            continue
        for offset in range(max(i_end - i, j_end - j)):
            a = left[i + offset] if i + offset < i_end else None
            b = right[j + offset] if j + offset < j_end else None
            if all(item is None or item.key[0] == "close" for item in (a, b)) and _header_reported(a, b, left, right):
                continue
            here = _place(kernel, a or _at(left, i_end))
            there = _place(emulator, b or _at(right, j_end))
            message = f"{a or 'nothing'} in the kernel, {b or 'nothing'} in the emulator{where}"
            found.append(Violation(message, here, there))
    return found


def _header_reported(a: _Item | None, b: _Item | None, left: list[_Item], right: list[_Item]) -> bool:
    """Tells whether the header that closes here differs by its text, which its opening has already reported."""
    opened = {item.key[1] for item in left if item.key[0] == "open"}, {i.key[1] for i in right if i.key[0] == "open"}
    return (a is None or a.key[1] not in opened[1]) and (b is None or b.key[1] not in opened[0])


def _unbound(kernel: TwinSide, emulator: TwinSide, a: _Item, b: _Item) -> list[Violation]:
    if a.step is None or b.step is None:
        return []
    found = []
    for output in a.step.marker.outputs:
        missing = [side for side, step in (("kernel", a.step), ("emulator", b.step)) if output not in step.bound]
        if missing:
            who = f"the {missing[0]} does not bind it" if len(missing) == 1 else "neither side binds it"
            message = f"step '{a.step.marker.name}' lists '{output}' but {who}"
            found.append(Violation(message, _place(kernel, a), _place(emulator, b)))
    return found


def _unmet(kernel: TwinSide, emulator: TwinSide, a: _Item, b: _Item) -> list[Violation]:
    """Waits and arrivals of a step that the other side has not, or elsewhere."""
    if a.step is None or b.step is None:
        return []
    sides = (kernel, a.step), (emulator, b.step)
    ours, theirs = ([one.text for one in step.meetings] for _, step in sides)
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    found = []
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            continue
        there = a.step.meetings[i:i_end], b.step.meetings[j:j_end]
        words = [", ".join(f"'{one.text}'" for one in some) or "nothing" for some in there]
        lines = [
            f"{side.path}:{(some[0] if some else step).line}" for (side, step), some in zip(sides, there, strict=True)
        ]
        message = f"step '{a.step.marker.name}' has {words[0]} in the kernel, {words[1]} in the emulator"
        found.append(Violation(message, *lines))
    return found


def _at(items: list[_Item], index: int) -> _Item | None:
    return items[min(index, len(items) - 1)] if items else None


def _place(side: TwinSide, item: _Item | None) -> str:
    return f"{side.path}:{item.line if item else side.first_line}"
