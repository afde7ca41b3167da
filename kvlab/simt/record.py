"""Record of a run: how often each instruction executes, and the passes and sectors that its addresses take."""

from __future__ import annotations

import html
import linecache
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.common.drawn import Shown
from kvlab.common.text_table import text_columns
from kvlab.hardware import copy_wavefronts, count_wavefronts, get_arch
from kvlab.hardware.banks.sectors import sectors as count_sectors
from kvlab.hardware.instructions import INSTRUCTIONS

from .ptx import Program, PtxInstruction
from .values import Array, Mask

_AT_ONCE = 1 << 17  # lanes whose addresses are kept before they are counted


@dataclass
class Totals:
    """Sums over the executions of one instruction by warps."""

    wavefronts: int = 0
    ideal: int = 0
    conflicts: int = 0
    sectors: int = 0
    ideal_sectors: int = 0
    nbytes: int = 0


class Trace:
    """The notes of a run: what executes, and the addresses, counted a batch at a time."""

    def __init__(self, program: Program, arch: str, addresses: bool) -> None:
        self.program, self.addresses = program, addresses
        self.arch = get_arch(arch)
        self.blocks: Counter[int] = Counter()
        self.lanes: Counter[int] = Counter()
        self.totals: dict[int, Totals] = defaultdict(Totals)
        self._kept: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        self._size: Counter[int] = Counter()
        self._counters: dict[int, Callable[..., None]] = {}

    def count(self, at: int, warps: int, lanes: int) -> None:
        """A block begins."""
        self.blocks[at] += warps
        self.lanes[at] += lanes

    def note(self, at: int, shared: bool, nbytes: int, where: Array, mask: Mask) -> None:
        """An access of ``nbytes`` a lane."""
        if self.addresses:
            on = np.ones(where.shape, np.bool_) if mask is None else mask
            self._keep(at, self._shared if shared else self._global, nbytes, where, on)

    def note_matrix(self, at: int, name: str, where: Array) -> None:
        """An ldmatrix or stmatrix of whole warps."""
        if self.addresses:
            self._keep(at, self._matrix, name, where)

    def note_copy(self, at: int, nbytes: int, where: Array, source: Array, reads: Array, on: Array) -> None:
        """A cp.async: the lanes that read, and those that write."""
        if self.addresses:
            self._keep(at, self._copy, nbytes, where, source, reads, on)

    def note_boxes(self, at: int, boxes: int, nbytes: int) -> None:
        """Boxes of TMA: their bytes are whole sectors."""
        total = self.totals[at]
        total.nbytes += boxes * nbytes
        total.sectors += boxes * nbytes // 32
        total.ideal_sectors += boxes * nbytes // 32

    def note_products(self, at: int, passes: int) -> None:
        """Operands of products that are read from shared memory."""
        total = self.totals[at]
        total.wavefronts += passes
        total.ideal += passes

    def _keep(self, at: int, counter: Callable[..., None], fixed: Any, *arrays: Array) -> None:
        self._kept[at].append(arrays)
        self._counters[at] = lambda *stacked: counter(at, fixed, *stacked)
        self._size[at] += arrays[0].size
        if self._size[at] > _AT_ONCE:
            self._fold(at)

    def _fold(self, at: int) -> None:
        kept = self._kept.pop(at)
        self._size[at] = 0
        self._counters[at](*(np.concatenate(arrays) for arrays in zip(*kept, strict=True)))

    def finish(self) -> dict[int, Totals]:
        """All notes counted: the totals by instruction."""
        for at in list(self._kept):
            self._fold(at)
        return self.totals

    def _passes(self, at: int, name: str, where: Array, mask: Mask) -> None:
        total = self.totals[at]
        for key, counted in zip(("wavefronts", "ideal", "conflicts"), count_wavefronts(name, where, mask, self.arch),
                                strict=True):
            setattr(total, key, getattr(total, key) + int(counted.sum()))

    def _shared(self, at: int, nbytes: int, where: Array, on: Array) -> None:
        warps = on.any(axis=1)
        op = self.program.instructions[at].op
        bits = 8 * nbytes
        if op[0] in ("atom", "red"):
            name = f"atom.shared.{'cas' if 'cas' in op else 'exch'}.b{bits}"
        else:
            name = f"{'ld' if op[0] == 'ld' else 'st'}.shared.b{bits}"
        self.totals[at].nbytes += int(on.sum()) * nbytes
        if name in INSTRUCTIONS and warps.any():
            self._passes(at, name, np.where(on, where, 0)[warps], on[warps])

    def _matrix(self, at: int, name: str, where: Array) -> None:
        self.totals[at].nbytes += len(where) * 128 * INSTRUCTIONS[name].matrices
        self._passes(at, name, where, None)

    def _global(self, at: int, nbytes: int, where: Array, on: Array) -> None:
        warps = on.any(axis=1)
        total, on, where = self.totals[at], on[warps], where[warps]
        total.nbytes += int(on.sum()) * nbytes
        if warps.any():
            found = count_sectors(np.where(on, where, 0), nbytes, on)
            total.sectors += int(found.sum())
            total.ideal_sectors += int(np.minimum(found, -(-on.sum(axis=1) * nbytes // 32)).sum())

    def _copy(self, at: int, nbytes: int, where: Array, source: Array, reads: Array, on: Array) -> None:
        self._global(at, nbytes, source, reads)
        name = f"cp.async.{'cg' if 'cg' in self.program.instructions[at].op else 'ca'}.{nbytes}"
        total, warps = self.totals[at], on.any(axis=1)
        if warps.any():  # of zeros alone, too; beside lanes that read, those of zeros are not counted
            to, fro = np.where(on, where, 0)[warps], np.where(reads, source, 0)[warps]
            found, ideal = copy_wavefronts(name, to, fro, reads[warps], self.arch, zeros=on[warps])
            total.wavefronts += int(found.sum())
            total.ideal += int(ideal.sum())
            total.conflicts += int((found - ideal).sum())


@dataclass(frozen=True)
class InstructionFacts:
    """One instruction of the compiled code and what its executions took.

    line, text      of the PTX;  ``source`` (file, line) of the kernel
    executed        warps that executed it, each time
    wavefronts      passes of shared memory of all executions, ``ideal`` without conflicts, ``conflicts`` as the chip's
                    counter has them; 0 for instructions that do not touch it
    sectors         of 32 bytes of global memory, ``ideal_sectors`` the fewest that hold what the lanes ask for
    nbytes          that the lanes moved
    """

    instruction: PtxInstruction
    executed: int
    wavefronts: int = 0
    ideal: int = 0
    conflicts: int = 0
    sectors: int = 0
    ideal_sectors: int = 0
    nbytes: int = 0

    @property
    def line(self) -> int:
        """Line of the PTX, from 1."""
        return self.instruction.line

    @property
    def text(self) -> str:
        """The instruction, a line of the PTX."""
        return self.instruction.text

    @property
    def source(self) -> tuple[str, int] | None:
        """(file, line) of the kernel."""
        return self.instruction.source


@dataclass(frozen=True)
class LineFacts:
    """Sums over the instructions of one line of the kernel; ``code`` is its text where the file can be read."""

    source: tuple[str, int]
    code: str
    executed: int
    wavefronts: int
    ideal: int
    conflicts: int
    sectors: int
    ideal_sectors: int


@dataclass(frozen=True, repr=False)
class KernelRun(Shown):
    """Record of :func:`kvlab.simt.run`.

    name, target, grid    of the launch;  ``ptx`` the text that ran
    instructions          :class:`InstructionFacts`, all of the kernel, in the order of the PTX
    lane_instructions     lanes times instructions that they went through;  ``seconds`` that it took here
    provisional           names of what was not rounded as the chip is known to: tf32 products, log2 and others

    ``print(run)`` shows the accesses to memory by line of the kernel, dearest first; a notebook shows them as a table.
    """

    name: str
    target: str
    grid: tuple[int, int, int]
    ptx: str
    instructions: tuple[InstructionFacts, ...]
    lane_instructions: int
    seconds: float
    provisional: tuple[str, ...] = field(default=())

    @property
    def rate(self) -> float:
        """Lane-instructions a second."""
        return self.lane_instructions / self.seconds if self.seconds else 0.0

    @property
    def executed(self) -> Counter[str]:
        """Executions by warps of each instruction's name."""
        found: Counter[str] = Counter()
        for facts in self.instructions:
            found[".".join(facts.instruction.op)] += facts.executed
        return found

    @property
    def accesses(self) -> tuple[InstructionFacts, ...]:
        """Instructions that touch memory."""
        return tuple(facts for facts in self.instructions if facts.wavefronts or facts.sectors or facts.nbytes)

    @property
    def wavefronts(self) -> int:
        """Passes of shared memory, all together."""
        return sum(facts.wavefronts for facts in self.instructions)

    @property
    def conflicts(self) -> int:
        """Bank conflicts, all together."""
        return sum(facts.conflicts for facts in self.instructions)

    @property
    def sectors(self) -> int:
        """Sectors of global memory that instructions ask for, all together."""
        return sum(facts.sectors for facts in self.instructions)

    def lines(self) -> list[LineFacts]:
        """Sums by line of the kernel of what touches memory; those with the most passes and sectors in excess of the
        ideal first."""
        groups: dict[tuple[str, int], list[InstructionFacts]] = defaultdict(list)
        for facts in self.accesses:
            groups[facts.source or ("?", 0)].append(facts)
        found = []
        for source, group in groups.items():
            sums = [sum(getattr(facts, key) for facts in group)
                    for key in ("executed", "wavefronts", "ideal", "conflicts", "sectors", "ideal_sectors")]
            found.append(LineFacts(source, linecache.getline(*source).strip(), *sums))
        return sorted(found, key=lambda f: (f.ideal - f.wavefronts + f.ideal_sectors - f.sectors, f.source))

    def table(self, *, by: str = "source") -> str:
        """Accesses to memory as text: ``by`` line of the ``"source"``, or each instruction of the ``"ptx"``."""
        rows = list(self._rows(by))
        return "\n".join(text_columns(rows, left=[0, len(rows[0]) - 1]))

    def _rows(self, by: str) -> Iterator[tuple[str, ...]]:
        if by not in ("source", "ptx"):
            raise ValueError(f"by is {by!r}: must be 'source' or 'ptx'")
        yield "line", "warps", "wavefronts", "ideal", "conflicts", "sectors", "ideal", "code"
        if by == "source":
            for of in self.lines():
                numbers = (of.executed, of.wavefronts, of.ideal, of.conflicts, of.sectors, of.ideal_sectors)
                yield f"{Path(of.source[0]).name}:{of.source[1]}", *map(str, numbers), of.code
            return
        for facts in self.accesses:
            numbers = (facts.executed, facts.wavefronts, facts.ideal, facts.conflicts, facts.sectors,
                       facts.ideal_sectors)
            yield str(facts.line), *map(str, numbers), facts.text

    def headline(self) -> str:
        """One line: what ran, and its passes, conflicts and sectors."""
        return (
            f"{self.name} on {self.target}, grid {self.grid}: {self.wavefronts} wavefronts of shared memory, "
            f"{self.conflicts} conflicts, {self.sectors} sectors of global memory"
        )

    def __str__(self) -> str:
        notes = [f"not known of the chip to the bit: {', '.join(self.provisional)}"] if self.provisional else []
        return "\n".join([self.headline(), self.table(), *notes])

    def __repr__(self) -> str:
        return f"KernelRun({self.headline()})"

    def _repr_html_(self) -> str:
        head, *rows = self._rows("source")
        lines = ["<table>", f"<caption>{html.escape(self.headline())}</caption>"]
        lines.append("<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>")
        for row in rows:
            *numbers, code = (html.escape(cell) for cell in row)
            cells = "".join(f"<td>{cell}</td>" for cell in numbers)
            lines.append(f"<tr>{cells}<td><code>{code}</code></td></tr>")
        return "\n".join([*lines, "</table>"])


def facts_of(program: Program, trace: Trace, ends: Callable[[int], int]) -> tuple[InstructionFacts, ...]:
    """The facts of every instruction; ``ends`` gives where a block that begins there ends."""
    executed: Counter[int] = Counter()
    for start, warps in trace.blocks.items():
        for at in range(start, ends(start)):
            executed[at] += warps
    totals = trace.finish()
    return tuple(
        InstructionFacts(instruction, executed[at], **(vars(totals[at]) if at in totals else {}))
        for at, instruction in enumerate(program.instructions)
    )
