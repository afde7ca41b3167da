"""Mutation testing of kernels and emulators: one small change at a time, and do the fitting tests notice?

A mutant is one change of one file: an operand for its like (``k_token`` for ``v_token``), a sign, a bound, a part of a
mask, a constant, a branch. The tree stays as it is: tests are collected once, each mutant lives in a fork of that
process, in which the functions of the changed file have the changed code. A fork runs the fitting tests, those first
that have killed others, and ends at the first failure; a mutant that no test kills has survived.

    python tools/mutants.py --sample 200 --seed 1              # of all files, drawn at random
    python tools/mutants.py mha_decode kv_store/kernel.py      # some of them
    python tools/mutants.py mha_decode/kernel.py --find "k_scale_head -> q_scale_head"

``tools/equivalent_mutants.toml`` holds survivors that no test can kill, each with its reason::

    [[equivalent]]
    file = "mha_decode/kernel.py"
    line = "code of the line, or ..., up to the end of it"
    changes = ["k_head -> q_head"]     # "*": every change of the line
    reason = "why no result can tell them apart"

An entry that fits no mutant is an error. The exit status is 1 if a survivor is not in that list.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import faulthandler
import importlib
import inspect
import json
import linecache
import os
import random
import re
import resource
import select
import signal
import sys
import tempfile
import time
import tomllib
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ATTENTION = ROOT / "kvlab" / "attention"
LIST = Path(__file__).parent / "equivalent_mutants.toml"

OPERATIONS = {
    "mha_decode": ("mha_decode",),
    "mha_decode_streaming": ("mha_decode",),
    "mha_prefill": ("mha_prefill",),
    "mla_decode": ("mla_decode",),
    "mla_prefill": ("mla_prefill",),
    "kv_store": ("kv_store",),
    "merge_states": ("merge_states",),
}
"""The folders of tests/attention that fit an operation besides the pairwise tables and what SHARED have of it."""
SHARED = ("features", "call", "machines")
PAIRS = {"kv_store": ("kv_store", "mla_store")}
"""Tables of another name than the operation."""
PARTS = {
    "tiles/fp8_pairs": ("mha_decode",),
    "merge_states": ("merge_states", "mha_decode"),
    "features": ("mha_decode", "mha_prefill", "mla_prefill"),
    "tiles": ("mha_decode", "mha_prefill", "mla_prefill"),
}
"""Files that operations share, and those whose tests are run."""
LEFT_OUT = re.compile(r"compile|hopper|smollm2|error|gpu|far|high_page|all_pairs|untouched|mirror|lockstep|seeded")
"""Tests that run neither the emulator nor the portable kernel, that read the files of both, or that take long."""
SECONDS = 20.0
"""CPU time of one test: what takes longer does not end."""
MEMORY = 12 << 30


# -- mutants ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Mutant:
    """``file`` (below kvlab/attention) with ``old`` at a place replaced by ``new``."""

    file: str
    row: int
    column: int
    last_row: int
    last_column: int
    function: str
    line: str
    old: str
    new: str
    kind: str

    @property
    def change(self) -> str:
        return f"{self.old} -> {self.new}"

    def __str__(self) -> str:
        return f"{self.file}:{self.row} {self.function}: {self.change}    in {self.line}"

    def source(self, text: str) -> str:
        """The whole file, changed."""
        lines = text.splitlines(keepends=True)
        head, tail = lines[self.row - 1], lines[self.last_row - 1]
        start = head.encode()[: self.column].decode()
        rest = tail.encode()[self.last_column :].decode()
        gap = "\n" * (self.last_row - self.row)  # later lines keep their numbers
        changed = start + (f"({self.new}{gap})" if gap else self.new) + rest
        return "".join([*lines[: self.row - 1], changed, *lines[self.last_row :]])


ALIKE = (
    ("q", "k", "v", "o"),
    ("page", "slot", "token", "head", "batch", "split", "row", "key"),
    ("first", "limit"),
    ("lo", "hi", "full"),
    ("begin", "stop", "end", "start"),
    ("left", "right"),
    ("m", "l"),
    ("position", "key"),
    ("cos", "sin"),
    ("rope", "latent", "nope"),
    ("BM", "BN"),
    ("D", "DV", "DR"),
    ("BD", "BV", "BR"),
    ("W0", "W1", "V0", "V1"),
    ("even", "odd"),
    ("tokens", "heads", "group"),
    ("num_keys", "num_q", "total"),
    ("page_size", "columns", "pages"),
)
"""Parts of names that stand for things of a kind."""
OPERATORS: dict[type, str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "%", ast.Mod: "//", ast.Div: "*", ast.LShift: ">>",
    ast.RShift: "<<",
}
COMPARISONS: dict[type, str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
}
CALLS = {"minimum": "maximum", "maximum": "minimum", "max": "min", "fmax": "fmin", "fmin": "fmax", "zeros": "ones"}
SKIPPED = {"num_warps", "num_stages", "input_precision"}
"""Arguments that say how, not what."""


class _Changes(ast.NodeVisitor):
    """Every change of one file."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text, self.lines = file, text, text.splitlines()
        self.found: list[Mutant] = []
        self.function, self.names = "", set[str]()

    def add(self, node: ast.expr | ast.stmt, new: str, kind: str, old: str | None = None) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        rows = [row.encode() for row in self.lines[node.lineno - 1 : node.end_lineno]]
        rows[-1] = rows[-1][: node.end_col_offset]
        text = b" ".join([rows[0][node.col_offset :], *rows[1:]]).decode()
        line = self.lines[node.lineno - 1].strip()
        self.found.append(Mutant(
            self.file, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, self.function, line,
            " ".join((text if old is None else old).split()), " ".join(new.split()), kind,
        ))

    def code(self, node: ast.AST) -> str:
        return ast.unparse(node)

    def visit_Module(self, node: ast.Module) -> None:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = self.function, self.names
        self.function = node.name
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        self.names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | set(arguments)
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        for statement in body:
            self.visit(statement)
        self.function, self.names = outer

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """What only tells the type checker something."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Words."""

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in SKIPPED:
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            for other in _likes(node.id, self.names):
                self.add(node, other, "operand")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        parts = [node.attr] if isinstance(node.ctx, ast.Load) else []
        for name in parts:
            for group in (("q", "k", "v"), ("left", "right"), ("heads", "tokens")):
                if name in group:
                    other = group[(group.index(name) + 1) % len(group)]
                    self.add(node, f"{self.code(node.value)}.{other}", "operand")

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        left, right = self.code(node.left), self.code(node.right)
        if isinstance(node.op, ast.BitAnd | ast.BitOr):
            self.add(node, f"({left})", "mask")
            self.add(node, f"({right})", "mask")
        elif type(node.op) in OPERATORS:
            self.add(node, f"(({left}) {OPERATORS[type(node.op)]} ({right}))", "sign")

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.generic_visit(node)
        word = " and " if isinstance(node.op, ast.And) else " or "
        for i in range(len(node.values)):
            rest = [self.code(value) for j, value in enumerate(node.values) if j != i]
            self.add(node, f"({word.join(rest)})", "mask")

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        if len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            left, right = self.code(node.left), self.code(node.comparators[0])
            self.add(node, f"(({left}) {COMPARISONS[type(node.ops[0])]} ({right}))", "bound")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.USub | ast.Not):
            self.add(node, f"({self.code(node.operand)})", "sign")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if type(node.op) in OPERATORS:
            sign = OPERATORS[type(node.op)]
            self.add(node, f"{self.code(node.target)} {sign}= {self.code(node.value)}", "sign")

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, str(not node.value), "constant")
        elif isinstance(node.value, int):
            self.add(node, str(node.value + 1), "constant")
        elif isinstance(node.value, float):
            self.add(node, repr(node.value * 2 if node.value else 1.0), "constant")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.generic_visit(node)
        self.add(node, f"({self.code(node.body)})", "branch")
        self.add(node, f"({self.code(node.orelse)})", "branch")

    def visit_If(self, node: ast.If) -> None:
        self.generic_visit(node)
        self.add(node.test, f"(not ({self.code(node.test)}))", "branch")

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in CALLS:
            assert isinstance(node.func, ast.Attribute)
            self.add(node.func, f"{self.code(node.func.value)}.{CALLS[name]}", "sign")
            if len(node.args) == 2 and name not in ("max", "zeros"):
                self.add(node, f"({self.code(node.args[0])})", "bound")
        if name == "where" and len(node.args) == 3:
            self.add(node, f"{self.code(node.func)}({', '.join(self.code(node.args[i]) for i in (0, 2, 1))})", "mask")


def _likes(name: str, names: set[str]) -> list[str]:
    """At most two names of the function that differ from ``name`` in one part, by one of the same kind."""
    parts, found = name.split("_"), []
    for i, part in enumerate(parts):
        for group in ALIKE:
            if part in group:
                at = group.index(part)
                for other in sorted(set(group) - {part}, key=lambda x: (abs(group.index(x) - at), group.index(x))):
                    like = "_".join([*parts[:i], other, *parts[i + 1 :]])
                    if like in names and like not in found:
                        found.append(like)
    return found[:2]


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Every mutant of a file below kvlab/attention."""
    changes = _Changes(file, text)
    changes.visit(ast.parse(text))
    return sorted(dict.fromkeys(changes.found))


@dataclass(frozen=True)
class Equivalent:
    """Survivors that no test can kill."""

    file: str
    line: str
    changes: tuple[str, ...]
    reason: str

    def fits(self, mutant: Mutant) -> bool:
        """``line`` is the whole line, or its beginning where it ends in ``...``."""
        same = mutant.line.startswith(self.line[:-3]) if self.line.endswith("...") else mutant.line == self.line
        return mutant.file == self.file and same and ("*" in self.changes or mutant.change in self.changes)


def read_list(path: Path, every: Sequence[Mutant]) -> list[Equivalent]:
    """The list of equivalents. ValueError for an entry without a reason, or of which a change fits no mutant."""
    found = []
    for number, entry in enumerate(tomllib.loads(path.read_text()).get("equivalent", ()), 1):
        it = Equivalent(entry["file"], entry["line"], tuple(entry["changes"]), entry.get("reason", "").strip())
        if not it.reason:
            raise ValueError(f"{path.name}: entry {number} ({it.file}: {it.line}) has no reason")
        for change in it.changes:
            alone = Equivalent(it.file, it.line, (change,), it.reason)
            if not any(alone.fits(mutant) for mutant in every):
                raise ValueError(f"{path.name}: entry {number} fits no mutant: {it.file}, {it.line!r}, {change!r}")
        found.append(it)
    return found


# -- running ----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of a mutant: "killed" by a test, "survived", "equivalent" (argued), or "not run"."""

    mutant: Mutant
    state: str
    by: str = ""
    seconds: float = 0.0
    tests: int = 0


def put_in_place(module: types.ModuleType, text: str, path: str) -> None:
    """Give the functions, kernels and constants of a module those of a changed text; who has imported them sees it."""
    Path(path).write_text(text)
    linecache.checkcache(path)
    changed = types.ModuleType(module.__name__)
    changed.__file__, changed.__package__ = path, module.__package__
    exec(compile(text, path, "exec"), changed.__dict__)
    _renew(module, changed)
    if any(name.endswith("_kernel") for name in vars(changed)):  # compiled from these functions elsewhere
        home = importlib.import_module("kvlab.attention.features.kernel")
        again = types.ModuleType(home.__name__)
        again.__file__, again.__package__ = home.__file__, home.__package__
        exec(compile(Path(inspect.getfile(home)).read_text(), inspect.getfile(home), "exec"), again.__dict__)
        for name, new in vars(again).items():
            if hasattr(new, "fn"):
                old = vars(home)[name]
                vars(old).clear()
                vars(old).update(vars(new))


def _renew(module: types.ModuleType, changed: types.ModuleType) -> None:
    """Give functions and kernels of a module the code of those of another of the same name."""
    for name, new in vars(changed).items():
        new, old = inspect.unwrap(new), inspect.unwrap(vars(module).get(name))
        if isinstance(new, types.FunctionType) and new.__module__ == module.__name__:
            if isinstance(old, types.FunctionType):
                old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__
        elif isinstance(getattr(new, "fn", None), types.FunctionType) and new.fn.__module__ == module.__name__:
            vars(old).clear()  # a kernel
            vars(old).update(vars(new))


@dataclass
class Runner:
    """Runs tests in forks, each with a mutant."""

    items: list[Any]
    """Collected by pytest."""
    folder: str
    kills: Counter[str] = field(default_factory=Counter)
    sound: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Of files and tests that have killed: whether these pass with the file as it is, put in place alike."""

    def run(self, mutant: Mutant, seconds: float) -> Outcome:
        """Try a mutant for so long."""
        module = importlib.import_module(f"kvlab.attention.{mutant.file[:-3].replace('/', '.')}")
        text = Path(inspect.getfile(module)).read_text()
        began, tried = time.monotonic(), 0
        chosen = [item for item in fitting(self.items, mutant) if self.sound.get((mutant.file, item.nodeid), True)]
        order = sorted(chosen, key=lambda item: -self.kills[item.nodeid])
        while True:
            state, by, tests = self._fork(order, seconds, module, mutant.source(text))
            tried += tests
            if state != "killed" or self._passes(by, mutant.file, module, text):
                break
            order = [item for item in order if item.nodeid != by]
        if state == "killed":
            self.kills[by] += 1
        return Outcome(mutant, state, by, round(time.monotonic() - began, 2), tried)

    def _passes(self, nodeid: str, file: str, module: Any, text: str) -> bool:
        """Whether a test passes with the file as it is."""
        if (file, nodeid) not in self.sound:
            item = next(item for item in self.items if item.nodeid == nodeid)
            self.sound[file, nodeid] = self._fork([item], 120.0, module, text)[0] == "survived"
            if not self.sound[file, nodeid]:
                print(f"left out, as it fails without a mutant: {nodeid}", flush=True)
        return self.sound[file, nodeid]

    def _fork(self, items: Sequence[Any], seconds: float, module: Any, text: str) -> tuple[str, str, int]:
        """(state, the test that failed, tests run)."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            with contextlib.suppress(BaseException):
                self._child(items, write, module, text)
            os._exit(0)
        os.close(write)
        words, until, over = b"", time.monotonic() + seconds, False
        while not over:
            ready, _, _ = select.select([read], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(read, 4096) if ready else b""
            words, over = words + piece, not piece
        os.kill(child, signal.SIGKILL) if time.monotonic() >= until else None
        os.waitpid(child, 0)
        os.close(read)
        lines = words.decode().split("\n")
        begun = [line[6:] for line in lines if line.startswith("begin ")]
        if "passed" in lines:
            return "survived", "", len(begun)
        if "failed" not in lines and time.monotonic() >= until:
            return "not run", "", len(begun)
        return "killed", begun[-1] if begun else "", len(begun)  # a crash kills, too

    def _child(self, items: Sequence[Any], write: int, module: Any, text: str) -> None:
        from _pytest.runner import runtestprotocol

        def say(words: str) -> None:
            os.write(write, f"{words}\n".encode())

        faulthandler.disable()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for item in items[:1]:  # a change that the file itself does not survive
            say(f"begin {item.nodeid}")
        put_in_place(module, text, os.path.join(self.folder, "mutant.py"))
        for item in items:
            say(f"begin {item.nodeid}")
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
            reports = runtestprotocol(item, log=False, nextitem=None)
            if any(report.failed for report in reports):
                say("failed")
                return
        say("passed")


def fitting(items: Sequence[Any], mutant: Mutant) -> list[Any]:
    """The tests that fit a mutant's side, pairwise tables first."""
    folder, _, side = mutant.file.rpartition("/")
    side = "kernel.py" if mutant.function.endswith("_kernel") else side  # a twin beside the emulator's
    operations = PARTS.get(folder, (folder,))
    tables = [name for operation in operations for name in PAIRS.get(operation, (operation,))]
    test = "test_kernel" if side == "kernel.py" else "test_emulator"
    pairs = [f"{test}[{table}-" for table in tables]
    folders = {name for operation in operations for name in OPERATIONS[operation]}
    first, then = [], []
    for item in items:
        path, _, name = item.nodeid.partition("::")
        if "attention/pairs" in path:
            if name.startswith(tuple(pairs)):
                first.append(item)
        elif not LEFT_OUT.search(item.nodeid) and (
            Path(path).parent.name in folders
            or (Path(path).parent.name in SHARED and any(o in name for o in operations))
        ):
            marked = item.get_closest_marker("interpreter") is not None
            if marked == (side == "kernel.py"):
                then.append(item)
    random.Random(0).shuffle(first)  # unlike cases one after the other
    return first + then


class Session:
    """Takes the place of pytest's loop over tests."""

    def __init__(self, chosen: Sequence[Mutant], known: Sequence[Equivalent], asked: argparse.Namespace) -> None:
        self.chosen, self.known, self.path, self.tests = chosen, known, asked.json, asked.tests
        self.until, self.each = time.monotonic() + asked.limit, asked.each
        self.outcomes: list[Outcome] = []

    def pytest_runtestloop(self, session: Any) -> bool:
        from kvlab.triton_support.interpreter import install

        install()
        if session.testsfailed:
            raise RuntimeError("tests could not be collected")
        for file in sorted({m.file for m in self.chosen}):
            importlib.import_module(f"kvlab.attention.{file[:-3].replace('/', '.')}")
        with tempfile.TemporaryDirectory(prefix="kvlab-mutants-") as folder:
            runner = Runner([item for item in session.items if self.tests in item.nodeid], folder)
            for number, mutant in enumerate(self.chosen, 1):
                if any(it.fits(mutant) for it in self.known):
                    outcome = Outcome(mutant, "equivalent")
                elif time.monotonic() >= self.until:
                    outcome = Outcome(mutant, "not run")
                else:
                    outcome = runner.run(mutant, min(self.each, max(1.0, self.until - time.monotonic())))
                self.outcomes.append(outcome)
                if self.path is not None:
                    self.path.write_text(json.dumps([asdict(outcome) for outcome in self.outcomes], indent=1) + "\n")
                if outcome.state == "survived":
                    print(f"[{number}/{len(self.chosen)}] SURVIVED {mutant} ({outcome.tests} tests)", flush=True)
                elif number % 20 == 0:
                    print(f"[{number}/{len(self.chosen)}] {tally(self.outcomes)}", flush=True)
        return True


def tally(outcomes: Sequence[Outcome]) -> str:
    """``12 killed, 1 survived ...``, and the share of survivors among those that were run or argued."""
    counts = Counter(outcome.state for outcome in outcomes)
    done = len(outcomes) - counts["not run"]
    words = ", ".join(f"{counts[s]} {s}" for s in ("killed", "survived", "equivalent", "not run") if counts[s])
    return f"{words or 'none'}; unexplained survivors {counts['survived']} of {done} = " + (
        f"{100 * counts['survived'] / done:.1f} %" if done else "none"
    )


def files_of(asked: Sequence[str]) -> list[str]:
    """``mha_decode`` -> its kernel and its emulator; all of them for nothing."""
    every = [f"{name}/{side}" for name in {**OPERATIONS, **PARTS} for side in ("emulator.py", "kernel.py")]
    every = [file for file in every if (ATTENTION / file).is_file()]
    twins = (path for folder in ("features", "tiles") for path in sorted((ATTENTION / folder).glob("*.py")))
    every += [str(path.relative_to(ATTENTION)) for path in twins if "_kernel(" in path.read_text()]
    every = list(dict.fromkeys(every))
    found = [file for file in every if not asked or file in asked or file.rpartition("/")[0] in asked]
    unknown = [a for a in asked if a not in every and a not in (*OPERATIONS, *PARTS)]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: must be one of {', '.join((*OPERATIONS, *PARTS))}, or a file of them")
    return found


def test_paths(files: Sequence[str]) -> Iterator[str]:
    """What pytest collects."""
    yield from ("tests/attention/pairs/test_pairs.py", *(f"tests/attention/{folder}" for folder in SHARED))
    folders = (file.rpartition("/")[0] for file in files)
    operations = dict.fromkeys(op for folder in folders for op in PARTS.get(folder, (folder,)))
    for folder in dict.fromkeys(folder for operation in operations for folder in OPERATIONS[operation]):
        for path in sorted((ROOT / "tests" / "attention" / folder).glob("test_*.py")):
            if not LEFT_OUT.search(path.name):
                yield str(path.relative_to(ROOT))


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", help="operations or files; all by default")
    parser.add_argument("--sample", type=int, help="so many mutants, as many of each file as it has of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="1/1", help="k/n: the k-th of n parts of the sample")
    parser.add_argument("--find", action="append", help="only mutants whose text has this; may be given several times")
    parser.add_argument("--tests", default="", help="only tests whose name has this")
    parser.add_argument("--again", type=Path, help="only those that a run with --json did not see killed")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds in all; the rest is not run")
    parser.add_argument("--each", type=float, default=300.0, help="seconds for one mutant")
    parser.add_argument("--json", type=Path, help="where to write what became of each mutant")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    parser.add_argument("--equivalents", type=Path, default=LIST)
    return parser.parse_args(words)


def chosen_of(asked: argparse.Namespace, every: Sequence[Mutant]) -> list[Mutant]:
    """The mutants that were asked for, always in the same order."""
    files = set(files_of(asked.files))
    some = [m for m in every if m.file in files and (not asked.find or any(word in str(m) for word in asked.find))]
    if asked.again is not None:
        before = json.loads(asked.again.read_text())
        left = {(o["mutant"]["file"], o["mutant"]["line"], o["mutant"]["old"], o["mutant"]["new"])
                for o in before if o["state"] in ("survived", "not run")}
        some = [m for m in some if (m.file, m.line, m.old, m.new) in left]
    if asked.sample is not None:
        some = sorted(random.Random(asked.seed).sample(some, min(asked.sample, len(some))))
    part, parts = (int(n) for n in asked.part.split("/"))
    return some[part - 1 :: parts]


def main(words: Sequence[str] | None = None) -> int:
    asked = options(words)
    every = [m for file in files_of([]) for m in mutants_of(file, (ATTENTION / file).read_text())]
    known = read_list(asked.equivalents, every)
    chosen = chosen_of(asked, every)
    if asked.list:
        print(*chosen, f"{len(chosen)} of {len(every)} mutants", sep="\n")
        return 0
    os.environ |= {"TRITON_INTERPRET": "1", "CI": "1"}  # kernels in this process; Hypothesis draws the same each time
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    import pytest

    session = Session(chosen, known, asked)
    quiet = ["-q", "-s", "-p", "no:cacheprovider", "-W", "ignore", "--no-summary"]
    code = pytest.main([*quiet, *test_paths(sorted({m.file for m in chosen}))], plugins=[session])
    if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(code)
    outcomes = session.outcomes
    for file in sorted({outcome.mutant.file for outcome in outcomes}):
        print(f"{file:35} {tally([o for o in outcomes if o.mutant.file == file])}")
    print(f"{len(chosen)} of {len(every)} mutants, seed {asked.seed}: {tally(outcomes)}")
    return int(any(outcome.state == "survived" for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
