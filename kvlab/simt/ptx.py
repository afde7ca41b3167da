"""The text of a PTX module as instructions: parsed, with the line of each and the line of the source that it is of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)[^\n]*")
_INLINED = re.compile(r"([^\s@\[\]]+):(\d+):\d+")
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)([^,)]*?)\s*([\w$]+)(?:\[(\d+)\])?\s*(?=,|\)|$)", re.S)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?([^{;]*)\{", re.S)
_ARRAY = re.compile(
    r"\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?(?:\.attribute\([^)]*\)\s+)?\.(\w+)\s+([\w$]+)"
    r"(?:\[(\d*)\])?(?:\s*=\s*(\{[^}]*\}|[^;]+))?\s*;"
)
_STATEMENT = re.compile(r"\s+|(?P<loc>\.loc\s[^\n]*)|(?P<line>\.(?:file|section|pragma)[^\n]*)|(?P<brace>[{}])|"
                        r"(?P<label>[\w$%.]+)\s*:(?!:)|(?P<text>[^;]+);")
_GUARD = re.compile(r"@(!?)([\w%$]+)\s+")
_REGISTER = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_SHOWN = 100  # letters of an instruction in a message
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


@dataclass(frozen=True)
class Register:
    """A register: its slot in the register file, its name in the text, its bytes (0: a predicate).

    >>> Register(3, "%r1", 4).nbytes
    4
    """

    slot: int
    name: str
    nbytes: int


@dataclass(frozen=True)
class PtxInstruction:
    """One instruction of a kernel.

    op         the words of its name: ``("ld", "global", "v4", "b32")``
    operands   their texts, as they are written; registers resolved in ``registers``
    guard      the predicate of ``@%p``, None without one; ``negated`` for ``@!%p``
    line       of the PTX, from 1;  ``source`` (file, line) of the kernel, None where the compiler gives none
    inner      (file, line) of the function that was inlined there, the same as ``source`` where none was

    >>> parse(EXAMPLE).instructions[1]
    PtxInstruction(line 7: add.s32 %r2, %r1, 1)
    """

    op: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str | None
    negated: bool
    line: int
    source: tuple[str, int] | None
    inner: tuple[str, int] | None
    text: str
    scope: int

    @property
    def where(self) -> str:
        """Place in words: the line of the PTX, its text and the line of the source."""
        source = "" if self.source is None else f", {Path(self.source[0]).name}:{self.source[1]}"
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        return f"PTX line {self.line}{source}: `{text}`"

    def __repr__(self) -> str:
        return f"PtxInstruction(line {self.line}: {self.text})"


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel: its name, its type without the dot, and the bytes of an array (0: one value)."""

    name: str
    type: str
    nbytes: int = 0


@dataclass(frozen=True)
class Variable:
    """An array in ``shared``, ``global``, ``const`` or ``local`` memory: its bytes (0: as many as the launch says) and
    alignment, and what it holds at the start, None for nothing."""

    name: str
    space: str
    nbytes: int
    align: int
    value: bytes | None = None


@dataclass
class Program:
    """A kernel as it was parsed.

    name          of the entry;  ``target`` such as ``sm_80``;  ``threads`` of a CTA that it requires, 0 if it says none
    parameters    in order;  ``variables`` of the module by name
    instructions  in order;  ``labels`` by name with their scope: the number of the instruction that follows
    registers     by name with their scope

    >>> program = parse(EXAMPLE)
    >>> program.name, program.target, program.parameters
    ('f', 'sm_80', [Parameter(name='f_param_0', type='u32', nbytes=0)])
    """

    name: str
    target: str
    threads: int
    parameters: list[Parameter]
    variables: dict[str, Variable]
    instructions: list[PtxInstruction] = field(default_factory=list)
    labels: dict[tuple[int, str], int] = field(default_factory=dict)
    registers: dict[tuple[int, str], Register] = field(default_factory=dict)
    parents: list[int] = field(default_factory=lambda: [-1])
    tables: dict[tuple[int, str], list[str]] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)

    def scopes(self, scope: int) -> Iterator[int]:
        """The scope and those around it, the innermost first."""
        while scope >= 0:
            yield scope
            scope = self.parents[scope]

    def register(self, scope: int, name: str) -> Register | None:
        """The register that a name means in a scope, None for a name that is none."""
        return next((r for s in self.scopes(scope) if (r := self.registers.get((s, name))) is not None), None)

    def label(self, scope: int, name: str) -> int | None:
        """The number of the instruction behind a label."""
        return next((at for s in self.scopes(scope) if (at := self.labels.get((s, name))) is not None), None)


EXAMPLE = """.version 8.0
.target sm_80
.visible .entry f(.param .u32 f_param_0) {
  .reg .b32 %r<3>;
  .loc 1 4 0 // k.py:4:0
  mov.u32 %r1, %tid.x;
  add.s32 %r2, %r1, 1;
  ret;
}
"""


def parse(text: str) -> Program:
    """The kernel of a PTX module, its only entry. ValueError where there is none, with the line of what is not PTX.

    >>> program = parse(EXAMPLE)
    >>> [instruction.op for instruction in program.instructions]
    [('mov', 'u32'), ('add', 's32'), ('ret',)]
    >>> program.instructions[0].where
    'PTX line 6, k.py:4: `mov.u32 %r1, %tid.x`'
    """
    notes = _notes(text)
    text = _COMMENT.sub(lambda m: "\n" * m[0].count("\n"), text)
    entries = list(_ENTRY.finditer(text))
    if len(entries) != 1:
        raise ValueError(f"the PTX has {len(entries)} entries: must be one kernel")
    entry = entries[0]
    target = re.search(r"^\s*\.target\s+(\w+)", text, re.M)
    threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", entry[3])
    parameters = [
        Parameter(m[3], m[1], int(m[4] or 0) * _BYTES.get(m[1][1:], 1) if m[4] else 0)
        for m in _PARAM.finditer(entry[2] or "")
    ]
    program = Program(
        entry[1], target[1] if target else "", int(np.prod([int(n or 1) for n in threads.groups()])) if threads else 0,
        parameters, {v.name: v for v in map(_variable, _ARRAY.finditer(text[: entry.start()]))},
        files={int(m[1]): m[2] for m in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)},
    )
    _body(program, text, entry.end(), notes)
    return program


def _notes(text: str) -> dict[int, str]:
    """Lines with ``.loc`` by number. Of those in one piece of inline assembly the first: compilers count on there, as
    if every line of the piece were one of the source."""
    found, seen = {}, 0
    for number, line in enumerate(text.split("\n"), 1):
        if "inline asm" in line:
            seen = 1 if "begin" in line else 0
        elif ".loc" in line and seen < 2:
            found[number] = line
            seen *= 2
    return found


def _variable(found: re.Match[str]) -> Variable:
    size = int(re.sub(r"\D", "", found[3]) or 8) // 8
    count = int(found[5] or 0) if found[5] is not None else 1
    value = None
    if found[6]:
        numbers = [int(n, 0) for n in re.findall(r"-?\w+", found[6])]
        value = b"".join((n % (1 << 8 * size)).to_bytes(size, "little") for n in numbers)
    return Variable(found[4], found[1], count * size, int(found[2] or size), value)


def _body(program: Program, text: str, start: int, notes: dict[int, str]) -> None:
    scopes, scope, at, line = [0], 0, start, text.count("\n", 0, start) + 1
    source = inner = None
    while True:
        found = _STATEMENT.match(text, at)
        if found is None:
            raise ValueError(f"PTX line {line}: {text[at : at + 60]!r} is no statement")
        first, at = line + _leading(found[0]), found.end()
        line += found[0].count("\n")
        if found["loc"]:
            source, inner = _places(program, notes[first]) if first in notes else (source, inner)
        elif found["brace"] == "{":
            program.parents.append(scope)
            scopes.append(scope := len(program.parents) - 1)
        elif found["brace"] == "}":
            scopes.pop()
            if not scopes:
                return
            scope = scopes[-1]
        elif found["label"]:
            program.labels[scope, found["label"]] = len(program.instructions)
        elif found["text"]:
            statement = " ".join(found["text"].split())
            if statement.startswith(".reg"):
                _declare(program, scope, statement)
            elif statement.startswith(".branchtargets"):
                last = next(label for label, to in reversed(program.labels.items()) if to == len(program.instructions))
                program.tables[last] = [name.strip() for name in statement.split(None, 1)[1].split(",")]
            elif statement.startswith(".local"):
                variable = _variable(_ARRAY.match(statement + ";"))  # type: ignore[arg-type]
                program.variables[variable.name] = variable
            elif not statement.startswith((".param", ".pragma")):
                guard = _GUARD.match(statement)
                name, _, rest = (statement[guard.end() :] if guard else statement).partition(" ")
                program.instructions.append(PtxInstruction(
                    tuple(name.split(".")), tuple(split(rest)), guard[2] if guard else None, bool(guard and guard[1]),
                    first, source, inner, statement, scope,
                ))


def _leading(text: str) -> int:
    return text[: len(text) - len(text.lstrip())].count("\n")


def _places(program: Program, note: str) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """(the line of the kernel, the line of the function that was inlined there) of a ``.loc`` with its comment."""
    found = _LOC.search(note)
    if found is None:
        return None, None
    around = _INLINED.findall(note.partition("//")[2])
    inner = program.files.get(int(found[1]), around[0][0] if around else "?"), int(found[2])
    return ((around[-1][0], int(around[-1][1])) if len(around) > 1 else inner), inner


def _declare(program: Program, scope: int, statement: str) -> None:
    found = _REGISTER.match(statement)
    if found is None:
        raise ValueError(f"{statement!r} declares no registers")
    nbytes = 0 if found[1] == "pred" else int(re.sub(r"\D", "", found[1])) // 8
    for item in split(found[2]):
        many = re.match(r"(.*)<(\d+)>$", item)
        for name in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [item]:
            program.registers[scope, name] = Register(len(program.registers), name, nbytes)


def split(text: str) -> Iterator[str]:
    """Operands: what lies between commas outside brackets.

    >>> list(split("{ %r1, %r2 }, [ %rd1 + 0 ], 4"))
    ['{ %r1, %r2 }', '[ %rd1 + 0 ]', '4']
    """
    depth, start = 0, 0
    for at, letter in enumerate(text):
        if letter in "{[(":
            depth += 1
        elif letter in "}])":
            depth -= 1
        elif letter == "," and not depth:
            yield text[start:at].strip()
            start = at + 1
    if text[start:].strip():
        yield text[start:].strip()
