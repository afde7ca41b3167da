"""The TTGIR of a kernel, read as text: operations with their types, layouts, places in the source, and shared memory.

The text is the one that the compiler prints, with the offsets that its allocation of shared memory gives (``offsets``
runs that pass again, in a process of its own). An operation that is not known here is kept by its name.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab.layout.encodings import Encoding, from_ttgir, ttgir_aliases
from kvlab.triton_support.compile import TARGETS, Compiled
from kvlab.xray.llir import Place, split

_OP = re.compile(r'^(?:(%[\w.$#-]+(?::\d+)?(?:, %[\w.$#-]+(?::\d+)?)*) = )?"?([a-z_]\w*\.[\w.]+)"?(.*)$')
_NAME = re.compile(r"%[\w.$-]+(?:#\d+)?")
_LOCATION = re.compile(r"^#(loc\d*) = loc\((.*)\)$", re.M)
_LOOPS = ("scf.for", "scf.while")


@dataclass(frozen=True)
class TensorType:
    """Shape, element type, text of the encoding; ``memory`` is ``#smem`` or another for what lies in memory.

    >>> tensor_type("2x64x64xf16, #shared, #smem, mutable")
    TensorType(shape=(2, 64, 64), element='f16', encoding='#shared', memory='#smem')
    >>> tensor_type("64x!tt.ptr<f16>, #ttg.slice<{dim = 0, parent = #blocked}>").element
    '!tt.ptr<f16>'
    """

    shape: tuple[int, ...]
    element: str
    encoding: str
    memory: str = ""

    @property
    def bits(self) -> int:
        """Bits of an element, of what a pointer points at."""
        kind = re.sub(r"!tt\.ptr<(.*?)(?:, \d+)?>", r"\1", self.element)
        found = re.search(r"(\d+)", kind)
        return int(found[1]) if found and not kind.startswith("f8") else 8 if kind.startswith("f8") else 64

    def __str__(self) -> str:
        return "x".join(map(str, (*self.shape, self.element)))


@dataclass
class IrOperation:
    """One operation: results, name, operands, types in the order of the text, place, loops that it is in, number; the
    line of the source that it belongs to, outside Triton's own library, and its file unless that is the kernel's.

    ``offset`` and ``size`` are bytes of shared memory that the allocation gave it, None where it gave none; ``warps``
    of its partition, 0 outside of partitions; ``roots`` the allocations that results and operands come from, or
    themselves.
    """

    number: int
    results: tuple[str, ...]
    name: str
    operands: tuple[str, ...]
    types: tuple[TensorType, ...]
    place: Place
    names: tuple[str, ...]
    depth: int
    text: str
    line: int = 0
    file: str = ""
    offset: int | None = None
    size: int | None = None
    end: int = 0
    warps: int = 0
    roots: tuple[str, ...] = ()


@dataclass
class IrModule:
    """A module: operations in order, encodings by name, what names stand for the same memory, warps of a CTA.

    unknown      texts of encodings that kvlab has no class for
    """

    operations: list[IrOperation] = field(default_factory=list)
    aliases: dict[str, Encoding] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    warps: int = 4
    warp_size: int = 32
    shared: int | None = None
    file: str = ""
    most_warps: int = 0

    def where(self, one: IrOperation) -> str:
        """File's name of an operation's line; empty where it is the kernel's own."""
        return "" if one.file == self.file else one.file.rpartition("/")[2]

    def encoding(self, text: str) -> Encoding | None:
        """The encoding that this text names; None for one that kvlab does not know."""
        try:
            return from_ttgir(text, self.aliases)
        except (ValueError, KeyError, SyntaxError, TypeError):
            if text:
                self.unknown.setdefault(text, text)
            return None

    def root(self, name: str) -> str:
        """The allocation that a name of a piece of shared memory comes from."""
        seen = set()
        while name in self.same and name not in seen:
            seen.add(name)
            name = self.same[name]
        return name


def tensor_type(body: str) -> TensorType:
    """Type from the text between the angle brackets."""
    parts = split(body)
    found = re.match(r"((?:\d+x)*)(.*)$", parts[0])
    assert found is not None
    shape = tuple(int(n) for n in found[1].split("x") if n)
    encoding = parts[1] if len(parts) > 1 else ""
    return TensorType(shape, found[2], encoding, next((p for p in parts[2:] if p.startswith("#")), ""))


def types_of(text: str) -> tuple[TensorType, ...]:
    """The tensors and pieces of memory that a text names, in its order.

    >>> [str(t) for t in types_of("%a : tensor<64x8xf16, #mma> -> <64x8xf16, #shared, #smem, mutable>")]
    ['64x8xf16', '64x8xf16']
    """
    found = []
    for start in re.finditer(r"(?:tensor|memdesc|(?<=-> ))<(?=\d)", text):
        level, at = 1, start.end()
        while level and at < len(text):
            level += (text[at] == "<") - (text[at] == ">" and text[at - 1] != "-")
            at += 1
        found.append(tensor_type(text[start.end() : at - 1]))
    return tuple(found)


@dataclass(frozen=True)
class IrLocation:
    """A place in the source: frames (file, line, column), the innermost call first, and names that it gives."""

    frames: tuple[tuple[str, int, int], ...] = ()
    names: tuple[str, ...] = ()

    @property
    def place(self) -> Place:
        """Lines and columns, the innermost call first."""
        return tuple((line, column) for _, line, column in self.frames)

    @property
    def line(self) -> int:
        """The innermost line that is not of Triton's own library; 0 for none."""
        return self._own[1]

    @property
    def file(self) -> str:
        """The file of :attr:`line`."""
        return self._own[0]

    @property
    def _own(self) -> tuple[str, int, int]:
        own = [frame for frame in self.frames if not in_library(frame[0])]
        return own[0] if own else self.frames[-1] if self.frames else ("", 0, 0)


def locations(text: str) -> dict[str, IrLocation]:
    """Each location that a module names."""
    bodies = dict(_LOCATION.findall(text))
    known: dict[str, IrLocation] = {}

    def resolve(body: str, deep: int = 0) -> IrLocation:
        body = body.strip()
        if deep > 64:
            return IrLocation()
        if body.startswith("#"):
            name = body[1:]
            if name not in known and name in bodies:
                known[name] = IrLocation()
                known[name] = resolve(bodies[name], deep + 1)
            return known.get(name, IrLocation())
        if found := re.match(r'"([^"]*)":(\d+):(\d+)', body):
            return IrLocation(((found[1], int(found[2]), int(found[3])),))
        if body.startswith("callsite("):
            callee, _, caller = body[9:-1].rpartition(" at ")
            inner, outer = resolve(callee, deep + 1), resolve(caller, deep + 1)
            return IrLocation(inner.frames + outer.frames, outer.names)
        if found := re.match(r'"([^"]*)"\((.*)\)$', body):
            inside = resolve(found[2], deep + 1)
            return IrLocation(inside.frames, (found[1], *inside.names))
        if body.startswith("fused"):
            parts = split(re.sub(r"^fused(<[^>]*>)?\[|\]$", "", body))
            return resolve(parts[0], deep + 1) if parts else IrLocation()
        return IrLocation()

    for name, body in bodies.items():
        if name not in known:
            known[name] = resolve(body)
    return known


def read(text: str) -> IrModule:
    """A module from its text."""
    made, where = IrModule(), locations(text)
    made.aliases = ttgir_aliases(text)
    for name, body in re.findall(r"^#(\w+) = (#(?!llvm)\w+\.\w+<.*>)$", text, re.M):
        if name not in made.aliases:
            made.unknown[f"#{name}"] = body
    if head := re.search(r"^module attributes \{(.*)\}", text, re.M):
        for name, number in re.findall(r'"?ttg\.([\w-]+)"? = (\d+)', head[1]):
            if name in ("num-warps", "total-num-warps"):
                made.warps = max(int(number), made.warps if name.startswith("total") else 0)
            elif name == "threads-per-warp":
                made.warp_size = int(number)
            elif name == "shared":
                made.shared = int(number)
    home = re.search(r"^  \} loc\(#(loc\d*)\)$", text, re.M)
    made.file = where[home[1]].file if home and home[1] in where else ""
    open_: list[IrOperation] = []
    partitions = 0
    captured: dict[int, tuple[str, ...]] = {}
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith(("#", "module", "^", "//")):
            continue
        body, at = _located(line, where)
        if body.startswith("}"):
            if open_:
                _close(made, open_[-1], body, at)
                if not body.rstrip().endswith("{"):
                    open_.pop()
            continue
        if partition := re.match(r"(?:partition\d+|default)\b(?:\((.*)\))?.*\{$", line):
            partitions += 1
            inner = IrOperation(partitions, (), "partition", (), (), (), (), 0, body)
            many = re.search(r"num_warps\((\d+)\)", line)
            inner.warps = int(many[1]) if many else 0
            made.most_warps = max(made.most_warps, inner.warps)
            for one, outer in zip(re.findall(r"(%[\w.$-]+):", partition[1] or ""),
                                  captured.get(-1, ()), strict=False):
                made.same[f"{one}${partitions}"] = outer
            open_.append(inner)
            continue
        alone = next((one for one in reversed(open_) if one.text.startswith("partition")), None)
        if alone is not None:  # it has names of its own, which another partition may have, too
            body = re.sub(r"%[\w.-]+", rf"\g<0>${alone.number}", body)
        found = _OP.match(body)
        if found is None:
            continue
        depth = sum(one.name in _LOOPS for one in open_)
        one = _operation(made, found, body, at, depth)
        one.warps = next((outer.warps for outer in reversed(open_) if outer.name == "partition"), 0)
        if one.name == "ttg.warp_specialize":
            captured[-1] = one.operands
        made.operations.append(one)
        if body.rstrip().endswith("{"):
            open_.append(one)
            _arguments(made, one, body)
    return made


def in_library(file: str) -> bool:
    """Tells whether a file is one of Triton's own.

    >>> in_library("/lib/python3.11/site-packages/triton/language/standard.py"), in_library("/home/me/triton/mine.py")
    (True, False)
    """
    return "/site-packages/triton/" in file or "/triton/language/" in file or "/triton/experimental/" in file


def _located(line: str, where: Mapping[str, IrLocation]) -> tuple[str, IrLocation]:
    body, _, location = line.rpartition(" loc(")
    if not body:
        return line, IrLocation()
    return body, where.get(location[1:].rstrip(")"), IrLocation())


def _operation(made: IrModule, found: re.Match[str], body: str, at: IrLocation, depth: int) -> IrOperation:
    name, rest = found[2], found[3]
    results: list[str] = []
    for result in (found[1] or "").split(", "):
        base, _, many = result.partition(":")
        results += [f"{base}#{n}" for n in range(int(many))] if many else [base] * bool(base)
    number = len(made.operations)
    one = IrOperation(number, tuple(results), name, tuple(_NAME.findall(rest)), types_of(rest), at.place, at.names,
                      depth, body, at.line, at.file, end=number)
    _memory(one, rest)
    for result in results:  # a name that stood for something else in a region before
        made.same.pop(result, None)
    if name.startswith("ttg.memdesc_"):
        made.same[results[0]] = one.operands[0]
    one.roots = tuple(map(made.root, (*one.results, *one.operands)))
    return one


def _memory(one: IrOperation, text: str) -> None:
    if place := re.search(r"allocation\.offset = (\d+)", text):
        one.offset = int(place[1])
    if size := re.search(r"allocation\.size = (\d+)", text):
        one.size = int(size[1])


def _arguments(made: IrModule, one: IrOperation, body: str) -> None:
    """Names of a loop's arguments stand for what comes in, its results too."""
    inside = re.search(r"iter_args\((.*?)\) ->", body)
    pairs = re.findall(r"(%[\w.$-]+) = (%[\w.$-]+(?:#\d+)?)", inside[1]) if inside else []
    for place, (inner, outer) in enumerate(pairs):
        made.same[inner] = outer
        if place < len(one.results):
            made.same[one.results[place]] = outer


def _close(made: IrModule, one: IrOperation, body: str, at: IrLocation) -> None:
    one.end = len(made.operations)
    _memory(one, body)
    if types := types_of(body):
        one.types = one.types + types
    if at.frames and not one.place:
        one.place, one.names, one.line, one.file = at.place, at.names, at.line, at.file


def offsets(made: Compiled) -> str:
    """TTGIR of a kernel in which each operation carries its offset in shared memory, by the compiler's own pass.

    It runs in a forked process, as a wrong query ends the process; where it ends, or the pass is not to be found, the
    text comes back as it was compiled.
    """
    text: str = made.asm["ttgir"]
    try:
        return _in_fork(lambda: _allocated(text, made.target)) or text
    except OSError:
        return text


def _allocated(text: str, target: str) -> str:
    import tempfile

    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget(*TARGETS[target])).load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(text)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    passes = ir.pass_manager(context)
    if target.startswith("sm_"):
        from triton._C.libtriton import nvidia

        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(passes, int(target[3:]), 80)
    else:
        from triton._C.libtriton import amd

        try:
            amd.passes.ttgpuir.add_allocate_shared_memory(passes)
        except TypeError:  # Triton 3.9
            amd.passes.ttgpuir.add_allocate_shared_memory(passes, target)
    passes.run(module, "allocation")
    return str(module)


def _in_fork(work: Callable[[], str]) -> str | None:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)

    def run() -> None:
        import os

        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the compiler says of a query that it refuses
            theirs.send(work())
        except Exception:
            theirs.send(None)

    process = fork.Process(target=run, daemon=True)
    process.start()
    theirs.close()
    try:
        said: Any = ours.recv() if ours.poll(30) else None
    except EOFError:
        said = None
    if said is None and process.is_alive():
        process.terminate()
    process.join()
    return said


def walk(made: IrModule, *names: str) -> Iterator[IrOperation]:
    """Operations of these names, or of names that begin so where they end with a dot."""
    for one in made.operations:
        if one.name in names or any(name.endswith(".") and one.name.startswith(name) for name in names):
            yield one
