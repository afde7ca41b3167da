"""The LLVM IR of a kernel, read as text: blocks, instructions, places in the source; what each value is on every lane.

Triton prints it behind all optimisations: from here on the compilers only choose registers. Values are not run but
followed: of an address, everything that it is computed from. What memory holds, and floats, count as 0 and are noted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

IntArray = np.ndarray[Any, np.dtype[np.int64]]
Place = tuple[tuple[int, int], ...]
"""Lines and columns, the innermost call first."""

_DEFINE = re.compile(r"^define .*?@([\w.$]+)\((.*)\)[^()]*?\{?\s*$")
_LABEL = re.compile(r'^([\w.$-]+|"[^"]+"):')
_NAME = re.compile(r'%(?:[\w.$-]+|"[^"]+")')
_DEBUG = re.compile(r", !dbg !(\d+)")
_LOCATION = re.compile(r"^!(\d+) = (?:distinct )?!DILocation\((.*)\)$", re.M)
_FILE = re.compile(r'^!(\d+) = !DIFile\(filename: "([^"]*)"(?:, directory: "([^"]*)")?', re.M)
_SCOPE = re.compile(r"^!(\d+) = (?:distinct )?!DI(?:Subprogram|LexicalBlock\w*)\(.*?\bfile: !(\d+)", re.M)
_SIZES = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8}
_BINARY = ("add", "sub", "mul", "shl", "lshr", "ashr", "and", "or", "xor", "udiv", "sdiv", "urem", "srem")
_FLAGS = {"nuw", "nsw", "exact", "disjoint", "nneg", "inbounds", "samesign", "tail", "musttail", "notail", "fast",
          "nusw", "volatile"}


class Value(NamedTuple):
    """Contents of a name: ``lanes`` ``[threads or 1, elements]``, and what had to be assumed for it.

    notes   ``data`` where it comes from memory or floats, counted as 0; ``uniform`` where it does so and is the same on
            all lanes; ``unknown NAME`` for an operation that is not known
    """

    lanes: IntArray
    notes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class IrLine:
    """One line: its result (None without), opcode, the text behind it, block, place, and how many loops it is in."""

    result: str | None
    opcode: str
    text: str
    block: int
    place: Place
    depth: int = 0


@dataclass
class IrFunction:
    """The kernel: names and types of arguments, labels of blocks, instructions; the source's line of each place."""

    name: str
    arguments: list[tuple[str, str]]
    labels: list[str] = field(default_factory=list)
    lines: Mapping[Place, int] = field(default_factory=dict)
    instructions: list[IrLine] = field(default_factory=list)

    def line(self, place: Place) -> int:
        """Line of the source of a place, outside Triton's own library; 0 for none."""
        return self.lines.get(place, place[-1][0] if place else 0)


def split(text: str, by: str = ",") -> list[str]:
    """Parts of a text between commas that no bracket encloses.

    >>> split("i32 %1, <{ i8, i8 }> %2, f(a, b)")
    ['i32 %1', '<{ i8, i8 }> %2', 'f(a, b)']
    """
    parts, level, last, quoted = [], 0, 0, False
    for at, letter in enumerate(text):
        if letter == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif letter in "([{<":
            level += 1
        elif letter in ")]}>":
            level -= 1
        elif letter == by and level == 0:
            parts.append(text[last:at].strip())
            last = at + 1
    rest = text[last:].strip()
    return [*parts, rest] if rest or parts else []


def size_of(kind: str) -> int:
    """Bytes of a type.

    >>> [size_of(kind) for kind in ("i1", "<16 x i1>", "<8 x half>", "ptr addrspace(3)", "{ i32, i32 }", "[4 x i16]")]
    [1, 2, 16, 4, 8, 8]
    """
    kind = kind.strip()
    if many := re.match(r"[<\[]\s*(\d+) x (.*)[>\]]$", kind):
        return -(-int(many[1]) // 8) if kind.startswith("<") and many[2] == "i1" else int(many[1]) * size_of(many[2])
    if kind.startswith(("{", "<{")):
        return sum(size_of(part) for part in split(kind.strip("<{}> ")))
    if kind.startswith("ptr"):
        return 4 if "addrspace(3)" in kind else 8
    if kind.startswith("i") and kind[1:].isdigit():
        return -(-int(kind[1:]) // 8)
    return _SIZES.get(kind, 1)


def typed(text: str) -> tuple[str, str]:
    """Type and value of an operand, attributes left out.

    >>> typed("ptr addrspace(3) nonnull %7"), typed("<2 x i32> splat (i32 4)"), typed("i32 5")
    (('ptr addrspace(3)', '%7'), ('<2 x i32>', 'splat (i32 4)'), ('i32', '5'))
    """
    found = re.match(r"(ptr(?: addrspace\(\d+\))?|<[^>]*>|\[[^\]]*\]|\{[^}]*\}|\w+)\s+(.*)$", text.strip())
    if not found:
        return text, ""
    attributes = r"(?:(?:nonnull|noundef|captures\([^)]*\)|align \d+|readonly|writeonly|readnone|inreg|nocapture|" \
                 r"range\([^)]*\)|dereferenceable\(\d+\)|zeroext|signext|nofpclass\([^)]*\))\s+)*"
    return found[1], re.sub(rf"^{attributes}", "", found[2])


def places(text: str) -> dict[int, Place]:
    """Place of every debug location of a module."""
    fields: dict[int, tuple[int, int, int | None]] = {}
    for number, body in _LOCATION.findall(text):
        line, column = re.search(r"line: (\d+)", body), re.search(r"column: (\d+)", body)
        inside = re.search(r"inlinedAt: !(\d+)", body)
        fields[int(number)] = (int(line[1]) if line else 0, int(column[1]) if column else 0,
                               int(inside[1]) if inside else None)
    found: dict[int, Place] = {}
    for number in fields:
        chain: list[tuple[int, int]] = []
        at: int | None = number
        while at is not None and at in fields and len(chain) < 64:
            row, column_, at = fields[at]
            chain.append((row, column_))
        found[number] = tuple(chain)
    return found


def _lines(text: str, where: Mapping[int, Place]) -> dict[Place, int]:
    """The innermost line of each place that is not of Triton's own library."""
    files = {number: f"{folder}/{name}" for number, name, folder in _FILE.findall(text)}
    scopes = {number: files.get(file, "") for number, file in _SCOPE.findall(text)}
    fields = {}
    for number, body in _LOCATION.findall(text):
        scope, inside = re.search(r"scope: !(\d+)", body), re.search(r"inlinedAt: !(\d+)", body)
        fields[int(number)] = scopes.get(scope[1], "") if scope else "", int(inside[1]) if inside else None
    found: dict[Place, int] = {}
    for number, place in where.items():
        at: int | None = number
        for line, _ in place:
            file, outer = fields[at] if at is not None else ("", None)
            if "/triton/" not in file or "site-packages" not in file:
                found[place] = line
                break
            at = outer
    return found


def functions(text: str) -> list[IrFunction]:
    """The functions that a module defines, the kernel first."""
    where = places(text)
    lines = _lines(text, where)
    made: list[IrFunction] = []
    current: IrFunction | None = None
    for line in text.splitlines():
        if current is None:
            if line.startswith("define "):
                head = _DEFINE.match(line.split(" !dbg")[0].rstrip(" {"))
                if head:
                    arguments = [typed(one) for one in split(head[2])]
                    named = [(value or f"%{n}", kind) for n, (kind, value) in enumerate(arguments)]
                    current = IrFunction(head[1], [(name.split()[-1], kind) for name, kind in named])
                    current.labels.append(f"%{len(arguments)}")
                    current.lines = lines
            continue
        if line.startswith("}"):
            made.append(_with_loops(current))
            current = None
        elif label := _LABEL.match(line):
            current.labels.append("%" + label[1])
        elif line.startswith("  "):
            _instruction(current, line.strip(), where)
    return sorted(made, key=lambda one: -len(one.instructions))


def _instruction(current: IrFunction, line: str, where: Mapping[int, Place]) -> None:
    debug = _DEBUG.search(line)
    body = line[: debug.start()] if debug else line
    result, found = None, re.match(r'(%(?:[\w.$-]+|"[^"]+")) = (.*)$', body)
    if found:
        result, body = found[1], found[2]
    words = body.split(" ", 1)
    opcode, rest = words[0], words[1] if len(words) > 1 else ""
    while opcode in _FLAGS and rest:
        opcode, _, rest = rest.partition(" ")
    if not opcode[0].isalpha():  # the middle of a switch
        current.instructions[-1] = IrLine(*_joined(current.instructions[-1], body)) \
            if current.instructions else current.instructions[-1]
        return
    place = where.get(int(debug[1]), ()) if debug else ()
    current.instructions.append(IrLine(result, opcode, rest, len(current.labels) - 1, place))


def _joined(before: IrLine, more: str) -> tuple[Any, ...]:
    return before.result, before.opcode, f"{before.text} {more}", before.block, before.place, before.depth


def _with_loops(made: IrFunction) -> IrFunction:
    """The same with the loops counted that each block is in: from the target of a jump back to its source."""
    number = {label: n for n, label in enumerate(made.labels)}
    ways: dict[int, set[int]] = {n: set() for n in range(len(made.labels))}
    for one in made.instructions:
        if one.opcode in ("br", "switch", "indirectbr"):
            ways[one.block] |= {number[label] for label in re.findall(r"label (%[\w.$-]+)", one.text)
                                if label in number}
    back = _back_edges(ways)
    depth = [0] * len(made.labels)
    comes: dict[int, set[int]] = {n: set() for n in ways}
    for source, targets in ways.items():
        for target in targets:
            comes[target].add(source)
    heads: dict[int, set[int]] = {}
    for source, head in back:  # natural loops; those of one head are one
        body, waiting = heads.setdefault(head, {head}), [source]
        while waiting:
            block = waiting.pop()
            if block not in body:
                body.add(block)
                waiting.extend(comes[block])
    for body in heads.values():
        for block in body:
            depth[block] += 1
    made.instructions = [
        IrLine(one.result, one.opcode, one.text, one.block, one.place, depth[one.block])
        for one in made.instructions
    ]
    return made


def _back_edges(ways: Mapping[int, set[int]]) -> set[tuple[int, int]]:
    """Jumps to a block that is being visited, of a walk from the first block on."""
    found: set[tuple[int, int]] = set()
    state = dict.fromkeys(ways, 0)
    if not ways:
        return found
    stack: list[tuple[int, Iterator[int]]] = [(0, iter(sorted(ways[0])))]
    state[0] = 1
    while stack:
        block, rest = stack[-1]
        for target in rest:
            if state[target] == 1:
                found.add((block, target))
            elif state[target] == 0:
                state[target] = 1
                stack.append((target, iter(sorted(ways[target]))))
                break
        else:
            state[block] = 2
            stack.pop()
    return found


class LaneValues:
    """Values of a function's names on every thread of a CTA, computed when they are asked for.

    made        the function
    arguments   the value of each, by its place
    threads     of the CTA;  ``warp_size`` of the machine
    """

    def __init__(self, made: IrFunction, arguments: Sequence[int], threads: int, warp_size: int) -> None:
        self.threads, self.warp_size = threads, warp_size
        self.by_name = {one.result: one for one in made.instructions if one.result is not None}
        self.labels = {label: n for n, label in enumerate(made.labels)}
        self.known: dict[str, Value] = {
            name: Value(np.full((1, 1), value, np.int64))
            for (name, _), value in zip(made.arguments, arguments, strict=True)
        }
        self._open: set[str] = set()
        self.by_end = [one for one in made.instructions if one.opcode == "br"]
        self._ways: dict[int, list[tuple[IrLine, list[int]]]] | None = None

    def guard(self, block: int) -> Value | None:
        """Lanes that come to a block, where branches before it ask for each lane; None: all do, as far as is seen.

        Followed up through blocks that have one way in.
        """
        if self._ways is None:
            self._ways = {}
            for one in self.by_end:
                if one.opcode == "br":
                    labels = [self.labels[name] for name in re.findall(r"label (%[\w.$-]+)", one.text)
                              if name in self.labels]
                    for target in set(labels):
                        self._ways.setdefault(target, []).append((one, labels))
        found: Value | None = None
        seen: set[int] = set()
        while len(self._ways.get(block, ())) == 1 and block not in seen:
            seen.add(block)
            one, labels = self._ways[block][0]
            if len(labels) == 2 and labels[0] != labels[1]:
                condition = self.operand("i1", split(one.text)[0].removeprefix("i1 "))
                taken = condition.lanes if labels[0] == block else 1 - condition.lanes
                if not condition.notes and (taken != taken[:1]).any():
                    found = Value(taken if found is None else found.lanes * taken)
            block = one.block
        return found

    def operand(self, kind: str, text: str) -> Value:
        """Value of an operand of this type: a name, a number, a constant expression."""
        text = text.strip()
        if text.startswith("%"):
            return _unknown("cycle") if text in self._open and text not in self.known else self.named(text)
        return self._constant(kind, text)

    def named(self, name: str) -> Value:
        """Value of a name; everything that it needs first, without recursion."""
        waiting = [name]
        while waiting:
            now = waiting[-1]
            if now not in self.known:
                one = self.by_name.get(now)
                needs = [] if one is None or now in self._open else self._needs(one)
                self._open.add(now)
                fresh = [other for other in needs if other not in self.known and other not in self._open]
                if fresh:
                    waiting.extend(fresh)
                    continue
                self.known[now] = _unknown("cycle") if one is None else self._compute(one)
            self._open.discard(waiting.pop())
        return self.known[name]

    def _needs(self, one: IrLine) -> list[str]:
        if one.opcode == "phi":
            return _NAME.findall(self._incoming(one)[1])
        if one.opcode in ("load", "atomicrmw"):
            return _NAME.findall(split(one.text)[one.opcode == "load"])
        if one.opcode == "call" and not self._known_call(one):
            return _NAME.findall(one.text) if " asm " in f" {one.text}" and "ld." in one.text else []
        names = _NAME.findall(one.text)
        return [name for name in names if name in self.by_name or name in self.known]

    def _incoming(self, one: IrLine) -> tuple[str, str]:
        """Type of a phi, and its value on the way in: of a loop, the first trip's."""
        kind, _, rest = one.text.partition(" [")
        pairs = re.findall(r"\[\s*(.*?), (%[\w.$-]+) \]", "[" + rest)
        forward = [value for value, label in pairs if self.labels.get(label, 0) < one.block]
        value = (forward or [value for value, _ in pairs])[0]
        return kind, value.strip(" [")

    def _known_call(self, one: IrLine) -> bool:
        return _call_name(one.text) is not None and any(part in one.text for part in _CALLS)

    def _constant(self, kind: str, text: str) -> Value:
        if re.fullmatch(r"-?\d+", text):
            return _single(int(text))
        if text in ("true", "false"):
            return _single(int(text == "true"))
        if text in ("undef", "poison", "zeroinitializer", "null", "none"):
            count = re.match(r"<(\d+) x", kind)
            return Value(np.zeros((1, int(count[1]) if count else 1), np.int64))
        if text.startswith("splat"):
            inner = typed(text[text.index("(") + 1 : text.rindex(")")])
            count = re.match(r"<(\d+) x", kind)
            value = self.operand(*inner)
            return Value(np.repeat(value.lanes, int(count[1]) if count else 1, axis=1), value.notes)
        if text.startswith("<"):
            parts = [self.operand(*typed(part)) for part in split(text[1:-1])]
            return _stack(parts)
        if text.startswith("getelementptr"):
            return self._address(text[text.index("(") + 1 : text.rindex(")")])
        if text.startswith("@"):
            return _single(0)
        if found := re.match(r"(addrspacecast|ptrtoint|inttoptr|bitcast) \((.*) to .*\)$", text):
            return self.operand(*typed(found[2]))
        return _unknown("data")

    def _address(self, text: str) -> Value:
        kind, base, *indices = split(text)
        where = self.operand(*typed(base))
        total, notes = where.lanes, where.notes
        step = kind
        for place, index in enumerate(indices):
            if place:
                many = re.match(r"[\[<]\s*\d+ x (.*)[\]>]$", step)
                if many:
                    step = many[1]
                else:
                    parts = split(step.strip("<{}> "))
                    field_ = int(typed(index)[1])
                    total = total + sum(size_of(part) for part in parts[:field_])
                    step = parts[field_]
                    continue
            value = self.operand(*typed(index))
            total, notes = total + value.lanes * size_of(step), notes | value.notes
        return Value(total, notes)

    def _compute(self, one: IrLine) -> Value:
        try:
            value = self._value(one)
        except (ValueError, IndexError, KeyError, ZeroDivisionError, OverflowError):
            return _unknown(f"unknown {one.opcode}")
        return value

    def _value(self, one: IrLine) -> Value:
        opcode, text = one.opcode, one.text
        if opcode in _BINARY:
            return self._of_two(text, lambda a, b, kind: _wrap(_arithmetic(opcode, a, b, kind), kind))
        if opcode == "icmp":
            relation, _, rest = _flagless(text).partition(" ")
            return self._of_two(rest, lambda a, b, kind: _compare(relation, a, b, kind))
        if opcode in ("zext", "sext", "trunc", "bitcast", "ptrtoint", "inttoptr", "addrspacecast"):
            return self._converted(opcode, text)
        if opcode == "freeze":
            return self.operand(*typed(text))
        if opcode == "getelementptr":
            return self._address(_flagless(text))
        if opcode == "select":
            condition, yes, no = (self.operand(*typed(part)) for part in split(text))
            lanes = np.where(condition.lanes != 0, yes.lanes, no.lanes)
            return Value(lanes, condition.notes | yes.notes | no.notes)
        if opcode == "phi":
            return self.operand(*self._incoming(one))
        if opcode in ("extractvalue", "extractelement"):
            parts = split(text)
            value = self.operand(*typed(parts[0]))
            index = parts[1].split()[-1]
            at = int(index) if index.isdigit() else 0
            return Value(value.lanes[:, at : at + 1] if at < value.lanes.shape[1] else value.lanes[:, :1], value.notes)
        if opcode in ("insertvalue", "insertelement"):
            return self._inserted(*split(text))
        if opcode == "shufflevector":
            return self._shuffled(*split(text))
        if opcode == "load":
            return self._loaded([typed(split(text)[1])])
        if opcode == "call":
            if "asm" in text.split('"')[0]:
                operands = split(call_arguments("@f(" + text.split('"(', 1)[1])) if "ld." in text else []
                return self._loaded([typed(one) for one in operands]) if operands else _unknown("data")
            return self._call(one)
        return _unknown("data")

    def _of_two(self, text: str, function: Callable[[IntArray, IntArray, str], IntArray]) -> Value:
        """``function(lanes, lanes, type)`` of the two operands of ``text``."""
        left, right = split(_flagless(text))
        kind, first = typed(left)
        a, b = self.operand(kind, first), self.operand(kind, right)
        return Value(function(a.lanes, b.lanes, kind), a.notes | b.notes)

    def _converted(self, opcode: str, text: str) -> Value:
        source, _, target = _flagless(text).rpartition(" to ")
        kind, name = typed(source)
        value = self.operand(kind, name)
        if opcode == "bitcast" and _elements(kind) != _elements(target):
            return _unknown("data")
        lanes = _unsigned(value.lanes, kind) if opcode == "zext" else value.lanes
        return Value(_wrap(lanes, target) if opcode == "trunc" else lanes, value.notes)

    def _inserted(self, whole: str, part: str, index: str) -> Value:
        kind, name = typed(whole)
        base, element = self.operand(kind, name), self.operand(*typed(part))
        count = max(base.lanes.shape[1], _elements(kind))
        rows = max(len(base.lanes), len(element.lanes))
        lanes = np.array(np.broadcast_to(base.lanes if base.lanes.shape[1] == count else base.lanes[:, :1],
                                         (rows, count)))
        lanes[:, int(index.split()[-1])] = np.broadcast_to(element.lanes, (rows, 1))[:, 0]
        return Value(lanes, base.notes | element.notes)

    def _shuffled(self, first: str, second: str, mask: str) -> Value:
        a, b = self.operand(*typed(first)), self.operand(*typed(second))
        rows = max(len(a.lanes), len(b.lanes))
        both = np.concatenate([np.broadcast_to(v.lanes, (rows, v.lanes.shape[1])) for v in (a, b)], axis=1)
        kind, body = typed(mask)
        order = [0] * _elements(kind) if body in ("zeroinitializer", "poison", "undef") else \
            [int(n) if n.isdigit() else 0 for n in re.findall(r"i32 (\w+)", body)]
        return Value(both[:, order], a.notes | b.notes)

    def _loaded(self, operands: Sequence[tuple[str, str]]) -> Value:
        """What memory holds: the same on all lanes where all ask for one place."""
        pointers = [self.operand(*one) for one in operands if one[0].startswith("ptr")]
        same = bool(pointers) and all((p.lanes == p.lanes[:1]).all() and "data" not in p.notes for p in pointers)
        return _unknown("uniform" if same else "data")

    def _call(self, one: IrLine) -> Value:
        name = _call_name(one.text) or ""
        threads = np.arange(self.threads)[:, None]
        if name.endswith(("sreg.tid.x", "workitem.id.x")):
            return Value(threads)
        if name.endswith("sreg.laneid"):
            return Value(threads % self.warp_size)
        if "ctaid" in name or "workgroup.id" in name or name.endswith(("tid.y", "tid.z", "workitem.id.y")):
            return _single(0)
        if "nctaid" in name:
            return _single(1)
        values = [self.operand(*typed(part)) for part in split(call_arguments(one.text))]
        notes = frozenset().union(*(value.notes for value in values)) if values else frozenset()
        kind = typed(split(call_arguments(one.text))[0])[0] if values else "i32"
        lanes = [value.lanes for value in values]
        if "mbcnt" in name:
            part = threads % self.warp_size
            counted = np.minimum(part, 32) if ".lo" in name else np.maximum(part - 32, 0)
            return Value(counted + lanes[1], notes)
        if "readfirstlane" in name or "shfl.sync.idx" in name:
            value = lanes[1] if "shfl" in name else lanes[0]
            whole = np.broadcast_to(value, (self.threads, 1)).reshape(-1, self.warp_size, 1)
            return Value(np.repeat(whole[:, :1], self.warp_size, axis=1).reshape(-1, 1), notes)
        if "make.buffer.rsrc" in name:
            return values[0]
        for word, function in _MINIMA.items():
            if f"llvm.{word}." in name:
                a, b = (lane if word[0] == "s" else _unsigned(lane, kind) for lane in lanes[:2])
                return Value(_wrap(function(a, b), kind), notes)
        if "llvm.abs." in name:
            return Value(np.abs(lanes[0]), notes)
        if "llvm.fsh" in name and "64" not in kind:
            bits = int(kind[1:])
            both = (_unsigned(lanes[0], kind) << bits) | _unsigned(lanes[1], kind)
            turn = lanes[2] % bits
            shift = bits - turn if "fshl" in name else turn
            return Value(_wrap(both >> shift, kind), notes)
        if "assume" in name or "expect" in name:
            return values[0]
        return _unknown("data")


_CALLS = ("sreg.", "workitem.id", "workgroup.id", "mbcnt", "readfirstlane", "shfl.sync.idx", "make.buffer.rsrc",
          "llvm.umin", "llvm.umax", "llvm.smin", "llvm.smax", "llvm.abs", "llvm.fshl", "llvm.fshr", "llvm.expect")
_MINIMA = {"umin": np.minimum, "umax": np.maximum, "smin": np.minimum, "smax": np.maximum}


def _call_name(text: str) -> str | None:
    found = re.search(r"@([\w.$]+)\(", text)
    return found[1] if found else None


def call_arguments(text: str) -> str:
    """Text between the brackets of a call.

    >>> call_arguments('void @llvm.f(i32 %1, i32 (%2)) #3')
    'i32 %1, i32 (%2)'
    """
    found = re.search(r"@[\w.$]+\(", text)
    start = found.end() if found else text.index("(") + 1
    level = 1
    for at in range(start, len(text)):
        level += (text[at] == "(") - (text[at] == ")")
        if level == 0:
            return text[start:at]
    return text[start:]


def _single(value: int) -> Value:
    return Value(np.full((1, 1), value, np.int64))


def _unknown(note: str) -> Value:
    return Value(np.zeros((1, 1), np.int64), frozenset({note}))


def _stack(parts: Sequence[Value]) -> Value:
    rows = max((len(part.lanes) for part in parts), default=1)
    lanes = [np.broadcast_to(part.lanes[:, :1], (rows, 1)) for part in parts]
    notes = frozenset().union(*(part.notes for part in parts)) if parts else frozenset()
    return Value(np.concatenate(lanes, axis=1) if lanes else np.zeros((1, 1), np.int64), notes)


def _flagless(text: str) -> str:
    words = text.split(" ")
    while words and words[0] in _FLAGS:
        words.pop(0)
    return " ".join(words)


def _elements(kind: str) -> int:
    found = re.match(r"[<\[]\s*(\d+) x", kind.strip())
    return int(found[1]) if found else len(split(kind.strip(" {}"))) if kind.strip().startswith("{") else 1


def _bits(kind: str) -> int:
    found = re.search(r"\bi(\d+)\b", kind)
    return int(found[1]) if found else 64


def _wrap(lanes: IntArray, kind: str) -> IntArray:
    """Signed integers of this many bits; of one bit 0 and 1."""
    bits = _bits(kind)
    if bits >= 64:
        return lanes
    if bits == 1:
        return lanes & 1
    half = 1 << (bits - 1)
    return ((lanes + half) & ((1 << bits) - 1)) - half


def _unsigned(lanes: IntArray, kind: str) -> IntArray:
    bits = _bits(kind)
    return lanes if bits >= 63 else lanes & ((1 << bits) - 1)


def _arithmetic(opcode: str, a: IntArray, b: IntArray, kind: str) -> IntArray:
    if opcode in ("lshr", "udiv", "urem"):
        a, b = _unsigned(a, kind), _unsigned(b, kind)
    with np.errstate(over="ignore"):
        if opcode in ("udiv", "sdiv", "urem", "srem"):
            b = np.where(b == 0, 1, b)
            whole = np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
            return whole if opcode.endswith("div") else a - whole * b
        result: IntArray = {
            "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or,
            "xor": np.bitwise_xor, "shl": np.left_shift, "lshr": np.right_shift, "ashr": np.right_shift,
        }[opcode](a, b)
    return result


def _compare(relation: str, a: IntArray, b: IntArray, kind: str) -> IntArray:
    if relation.startswith("u"):
        a, b = _unsigned(a, kind), _unsigned(b, kind)
    name = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
            "ge": np.greater_equal}[relation if relation in ("eq", "ne") else relation[1:]]
    return np.asarray(name(a, b)).astype(np.int64)
