"""X-ray of a kernel: what the compilers made of it, without a GPU."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.common.drawn import Shown
from kvlab.layout.encodings import Encoding, SharedEncoding
from kvlab.triton_support.compile import Compiled
from kvlab.xray import findings as rules
from kvlab.xray.accesses import MemoryAccess
from kvlab.xray.edges import Allocation, Edge
from kvlab.xray.findings import Finding
from kvlab.xray.histogram import histogram
from kvlab.xray.llir import IrFunction
from kvlab.xray.resources import Resources
from kvlab.xray.ttgir import IrModule


@dataclass(frozen=True, eq=False, repr=False)
class XRay(Shown):
    """Result of :func:`kvlab.xray.xray`. ``print`` tells it in words; a notebook shows it as a page.

    name, target   the kernel and what it was compiled for
    compiled       every stage's text: :class:`~kvlab.triton_support.compile.Compiled`
    resources      registers, spills, shared memory, occupancy and its limiter
    edges          a tensor's ways through shared and to global memory, with wavefronts and sectors
    allocations    pieces of shared memory: offset, size, lifetime, layout
    unplaced       accesses that belong to no operation of the TTGIR that is known
    assumed        values that were taken for arguments, by name
    seconds        time of the compilation, and of the X-ray after it
    source         lines of the kernel's source by number
    remake         makes the X-ray of the same kernel with other options; None for what was compiled elsewhere
    """

    name: str
    target: str
    compiled: Compiled
    module: IrModule
    function: IrFunction
    resources: Resources
    edges: tuple[Edge, ...]
    allocations: tuple[Allocation, ...]
    unplaced: tuple[MemoryAccess, ...]
    assumed: Mapping[str, int]
    seconds: tuple[float, float]
    source: Mapping[int, str]
    remake: Callable[..., XRay] | None = None
    unread: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.module.warps * self.module.warp_size

    @property
    def layouts(self) -> dict[str, Encoding]:
        """The layouts of the TTGIR by name; each draws itself."""
        return dict(self.module.aliases)

    @property
    def unknown(self) -> list[str]:
        """Layouts that kvlab has no class for, operations whose shared memory it does not know, and access that belong
        to none: listed, not guessed."""
        layouts = [f"layout {name}: {text}" for name, text in self.module.unknown.items()]
        from kvlab.xray.edges import SHARED

        operations = sorted({one.name for one in self.module.operations
                             if one.offset is not None and one.name not in SHARED})
        notes = Counter(note for edge in self.edges for access in edge.accesses for note in access.notes
                        if note.startswith("unknown"))
        stray = Counter(f"{a.instruction} at line {self.function.line(a.place) or '?'}" for a in self.unplaced)
        lines = [f"line of the IR: {text}" for text in self.unread]
        return [*layouts, *lines, *(f"shared memory of {name}" for name in operations),
                *(f"address: {note}, {many} times" for note, many in notes.items()),
                *(f"access {what}, {many} times" for what, many in stray.items())]

    @property
    def notes(self) -> list[str]:
        """Limits of the counts: accesses that the last stage of the compiler joined, so that the PTX has fewer."""
        found = []
        for kind, start in (("shared load", "ld.shared"), ("shared store", "st.shared"), ("global load", "ld.global"),
                            ("global store", "st.global")):
            ours = sum(access.instruction.startswith(start) for access in self._accesses)
            theirs = sum(lines.total() for lines in self.histogram.get(kind, {}).values())
            if self.target.startswith("sm_") and theirs < ours:
                found.append(f"{ours} accesses of kind {start} are counted; the PTX has {theirs}, some of them joined")
        return found

    @property
    def _accesses(self) -> list[MemoryAccess]:
        found = {id(a): a for edge in self.edges for a in edge.accesses
                 if (edge.kind == "global") == (a.space == "global")}
        return [*found.values(), *self.unplaced]

    @functools.cached_property
    def histogram(self) -> dict[str, dict[str, Counter[int]]]:
        """Kind -> instruction -> how often at each line, from PTX or AMD assembly."""
        return histogram(self.compiled)

    @functools.cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Causes of slowness and what helps, the dearest first."""
        return rules.findings(self)

    def with_options(self, **options: Any) -> XRay:
        """X-ray of the same kernel with other options: ``num_warps``, ``num_stages``, ``maxnreg``, ``target``, ...

        ValueError where the kernel was compiled elsewhere.
        """
        if self.remake is None:
            raise ValueError(f"{self.name} was compiled elsewhere: xray(kernel, ...) can compile it again")
        return self.remake(**options)

    def try_options(self) -> list[tuple[Finding, dict[str, Any], XRay]]:
        """Cures that only a compilation can try: for each finding that warps or stages may cure, the options, and the
        X-ray with them, where it does not have the finding any more. It compiles up to three times for each.
        """
        options = self.remake.keywords if isinstance(self.remake, functools.partial) else {}
        warps, stages = options.get("num_warps", 4), options.get("num_stages", 3)
        more = [{"num_warps": n * warps} for n in (2, 4) if n * warps <= 32]
        wanted: dict[str, list[dict[str, Any]]] = {
            "spill": [*[{"maxnreg": None}] * ("maxnreg" in options), *more],
            "low-occupancy": [{"num_stages": n} for n in range(stages - 1, 0, -1)][:3],
            "too-much-shared": [{"num_stages": n} for n in range(stages - 1, 0, -1)][:3],
            "not-pipelined": [{"num_stages": 3}],
            "idle-threads": [{"num_warps": n} for n in (warps // 2, warps // 4) if n],
        }
        found = []
        for finding in self.findings:
            for change in wanted.get(finding.kind, []):
                other = self.with_options(**change)
                if not any((one.kind, one.line) == (finding.kind, finding.line) for one in other.findings):
                    found.append((finding, change, other))
                    break
        return found

    def at(self, line: int) -> list[Edge]:
        """The edges of a line of the source."""
        return [edge for edge in self.edges if edge.line == line]

    def layout_of(
        self, shape: Sequence[int], name: str = "", lines: Collection[int] = (), path: str = ""
    ) -> Encoding | None:
        """The layout in registers of the last tensor of this shape that the source calls ``name``, otherwise of the
        last one of these lines of the file ``path`` (``""``: the kernel's). None where there is none.
        """
        found: dict[bool, str] = {}
        for one in self.module.operations:
            if not one.types or one.types[-1].shape != tuple(shape) or one.types[-1].memory or not one.results:
                continue
            here = one.line in lines and (not path or os.path.basename(path) == os.path.basename(one.file))
            if name in one.names or here:
                found[name in one.names] = one.types[-1].encoding
        text = found.get(True) or found.get(False)
        layout = self.module.encoding(text) if text else None
        return layout if layout is not None and not isinstance(layout, SharedEncoding) else None

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        from kvlab.xray.report import as_data

        return as_data(self)

    def to_json(self, **options: Any) -> str:
        """JSON text; ``options`` are those of ``json.dumps``."""
        import json

        return json.dumps(self.to_dict(), **options)

    def to_html(self) -> str:
        """A page of its own, without other files."""
        from kvlab.xray.report import as_page

        return as_page(self)

    def _repr_html_(self) -> str:
        from kvlab.xray.report import as_html

        return as_html(self)

    def __repr__(self) -> str:
        many = len(self.findings)
        return f"XRay({self.name} on {self.target}: {many} finding{'s' * (many != 1)}; {self.resources})"

    def __str__(self) -> str:
        from kvlab.xray.report import as_text

        return as_text(self)
