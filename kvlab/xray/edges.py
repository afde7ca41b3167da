"""Edges between places where a tensor lies: operations of the TTGIR joined with the instructions that they became."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvlab.hardware import (
    INSTRUCTIONS,
    SECTOR_BYTES,
    Coalescing,
    Wavefronts,
    coalescing,
    get_arch,
    get_atom,
    wavefronts,
)
from kvlab.hardware.mma.shared_mma import shared_mma_wavefronts
from kvlab.layout.encodings import Encoding, SharedEncoding
from kvlab.xray.accesses import MemoryAccess, passes_of
from kvlab.xray.llir import Place
from kvlab.xray.ttgir import IrModule, IrOperation, TensorType

#: operation -> what it does to shared memory: read, write, copy from global memory, both by scratch, tensor cores, TMA
SHARED = {
    "ttg.local_load": "read", "ttg.local_store": "write", "ttg.local_alloc": "write", "ttg.convert_layout": "scratch",
    "tt.reduce": "scratch", "tt.scan": "scratch", "tt.gather": "scratch", "tt.histogram": "scratch",
    "ttg.async_copy_global_to_local": "copy", "amdg.buffer_load_to_local": "copy",
    "amdgpu.buffer_load_to_local": "copy", "ttng.warp_group_dot": "product", "ttng.tc_gen5_mma": "product",
    "ttng.async_tma_copy_global_to_local": "tma", "ttng.async_tma_copy_local_to_global": "tma",
    "ttng.async_tma_gather": "tma", "ttng.async_tma_scatter": "tma", "ttng.async_tma_reduce": "tma",
    "ttng.tensormap_create": "scratch",
    "ttg.warp_specialize": "scratch",
    "tt.atomic_rmw": "scratch", "tt.atomic_cas": "scratch", "ttg.local_gather": "read",
    "ttg.local_scatter": "write",
}
GLOBAL = ("tt.load", "tt.store", "tt.atomic_rmw", "tt.atomic_cas", "ttg.async_copy_global_to_local")
GLOBAL_AMD = ("buffer_load", "buffer_store", "buffer_atomic", "buffer_load_to_local")


@dataclass(eq=False)
class Allocation:
    """A piece of shared memory: a tensor that is kept there, or scratch of one operation.

    name      in the TTGIR, and the source's name for it
    what      the operation that has it;  ``line`` of the source
    offset    bytes from the kernel's first one, None where the compiler did not say;  ``size`` bytes
    type      shape and element type, ``3x64x64xf16``: stages first;  ``layout`` None for scratch
    life      numbers of the first and the last operation of the TTGIR that need it
    fixed     whether TMA or the tensor cores touch it, whose swizzles are their own

    >>> print(Allocation("acc", "ttg.local_alloc", 22, 0, 24576, "3x64x64xf16", None, (39, 86)))
    0..+24576 B acc (ttg.local_alloc, line 22): 3x64x64xf16
    """

    name: str
    what: str
    line: int
    offset: int | None
    size: int
    type: str
    layout: Encoding | None
    life: tuple[int, int]
    fixed: bool = False

    def __str__(self) -> str:
        where = "?" if self.offset is None else self.offset
        kept = "" if self.layout is None else f", {brief(self.layout)}"
        return f"{where}..+{self.size} B {self.name} ({self.what}, line {self.line}): {self.type}{kept}"


@dataclass(eq=False)
class Edge:
    """A tensor's way between registers, shared memory and tensor cores, or to and from global memory.

    operation    of the TTGIR;  ``line`` of the source, of another ``file`` than the kernel's or of that (empty);
                 ``names`` that the source has for the result
    kind         read, write, copy, scratch, product, tma or global;  ``box`` type of the tile in shared memory of TMA
    source, target   layouts; None for what is not laid out, or unknown
    allocation   the piece of shared memory, None where there is none
    accesses     the instructions, as the compiled code has them
    wavefronts   of shared memory, all warps and instructions once; ``ideal`` the fewest of the same instructions
    sectors      of global memory, alike; ``ideal_sectors`` the fewest for the same bytes
    distinct     different sectors of all instructions: what must come from DRAM or L2
    why          words
    depth        loops that it is in
    measured     False where the count is a rule that no chip has confirmed
    many         operations that it stands for, of a prologue and of its loop;  ``warps`` that execute it
    """

    operation: str
    kind: str
    line: int
    column: int
    place: Place
    names: tuple[str, ...]
    type: TensorType | None
    source: Encoding | None
    target: Encoding | None
    allocation: Allocation | None
    depth: int
    accesses: list[MemoryAccess] = field(default_factory=list)
    wavefronts: int = 0
    ideal: int = 0
    sectors: int = 0
    ideal_sectors: int = 0
    distinct: int = 0
    why: str = ""
    measured: bool = True
    many: int = 1
    warps: int = 4
    file: str = ""
    box: TensorType | None = None

    @property
    def where(self) -> str:
        """``line 7``, or ``helpers.py:7`` of another file than the kernel's."""
        return f"{self.file}:{self.line}" if self.file else f"line {self.line}"

    @property
    def instructions(self) -> dict[str, int]:
        """Count of each instruction in it."""
        found: dict[str, int] = {}
        for access in self.accesses:
            found[access.instruction] = found.get(access.instruction, 0) + 1
        return found

    @property
    def nbytes(self) -> int:
        """Bytes a lane moves with the narrowest instruction; 0 without instructions."""
        return min((access.nbytes for access in self.accesses), default=0)

    def worst(self, arch: str) -> Wavefronts | None:
        """The warp instruction with the most conflicts, to be drawn; None where no such rule is known."""
        found = [a for a in self.accesses if a.instruction in INSTRUCTIONS]
        if not found:
            return None
        counts = passes_of(found, arch)
        access = found[int((counts[0] - counts[1]).sum(axis=1).argmax())]
        taken = [one_warp(access, warp, arch) for warp in range(len(access.addresses))]
        return max(taken, key=lambda w: w.wavefronts - w.ideal)

    def worst_sectors(self) -> Coalescing | None:
        """The warp access to global memory with the most sectors beyond the fewest, to be drawn."""
        sides = [side for side in (a.global_side() for a in self.accesses) if side is not None]
        if not sides:
            return None
        side = max(sides, key=lambda s: np.subtract(*s.sectors()))
        warps = [w for w in range(len(side.addresses)) if side.active[w].any()] or [0]
        near = side.addresses % (1 << 40)  # from the argument's first byte on
        found = [coalescing(near[w], side.nbytes, side.active[w]) for w in warps]
        return max(found, key=lambda c: c.excess)

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {name}" for name, n in self.instructions.items()) or "no instruction found"
        passes = f"{self.wavefronts} wavefronts, ideal {self.ideal}" if self.wavefronts else ""
        moved = f"{self.sectors} sectors, ideal {self.ideal_sectors}" if self.sectors else ""
        what = f"{self.where} {self.operation} {self.type or ''}: {counts}"
        return "; ".join(part for part in (what, passes, moved) if part)


def one_warp(access: MemoryAccess, warp: int, arch: str) -> Wavefronts:
    """The wavefronts of one warp of an access."""
    whole = INSTRUCTIONS[access.instruction].matrices
    return wavefronts(access.instruction, access.addresses[warp], None if whole else access.active[warp], arch)


GATHERS = "from places that memory names: taken for those of one page"
_BRIEF = {
    "BlockedLayout": "blocked {size_per_thread} {threads_per_warp} {warps_per_cta} order {order}",
    "NVMMASharedLayout": "nvmma_shared {swizzle_byte_width} B",
    "SwizzledSharedLayout": "swizzled_shared ({vec}, {per_phase}, {max_phase})",
    "AMDRotatingSharedLayout": "rotating_shared ({vec}, {per_phase}, {max_phase})",
    "PaddedSharedLayout": "padded_shared {interval_padding_pairs}",
    "NVMMADistributedLayout": "nvidia_mma v{version[0]} {instr_shape} warps {warps_per_cta}",
    "AMDMFMALayout": "amd_mfma {instr_shape} warps {warps_per_cta}",
    "DotOperandLayout": "operand {operand_index} of a product, k_width {k_width}",
    "SliceLayout": "slice {dim}",
    "DistributedLinearLayout": "linear",
    "SharedLinearLayout": "shared_linear",
}


def brief(layout: Encoding | None) -> str:
    """A layout in a few words.

    >>> from kvlab.layout.encodings import SwizzledSharedLayout
    >>> brief(SwizzledSharedLayout(8, 1, 8, [1, 0])), brief(None)
    ('swizzled_shared (8, 1, 8)', '-')
    """
    if layout is None:
        return "-"
    kind = type(layout).__name__
    return _BRIEF.get(kind, kind).format(**{name: getattr(layout, name) for name in vars(layout)})


def allocations(made: IrModule, shared: int) -> list[Allocation]:
    """The pieces of shared memory of a module that uses ``shared`` bytes, by offset."""
    last: dict[str, int] = {}
    for one in made.operations:
        for root in one.roots:
            last[root] = one.end
    found = []
    for one in made.operations:
        kept = one.name == "ttg.local_alloc"
        if not kept and one.offset is None:
            continue
        type_ = next((t for t in reversed(one.types) if t.memory), None) if kept else \
            (one.types[0] if one.types else None)
        layout = made.encoding(type_.encoding) if kept and type_ else None
        layout = layout if isinstance(layout, SharedEncoding) else None
        size = one.size if one.size is not None else _bytes(type_, layout) if kept else -1
        name = one.names[0] if one.names else one.results[0] if one.results else one.name
        end = last.get(one.results[0], one.end) if kept and one.results else one.end
        found.append(Allocation(name, one.name, one.line, one.offset, size,
                                str(type_ or ""), layout, (one.number, max(end, one.end))))
    known = sorted(found, key=lambda a: (a.offset is None, a.offset or 0))
    for piece in known:
        if piece.size < 0:
            piece.size = _scratch(piece, known, shared)
    return known


def _bytes(type_: TensorType | None, layout: SharedEncoding | None) -> int:
    if type_ is None:
        return 0
    size = getattr(layout, "size", None)
    if size is not None and layout is not None:
        rank = len(layout.pattern_shape())
        return int(size * math.prod(type_.shape[:-rank] or (1,)) * type_.bits // 8)
    return math.prod(type_.shape) * type_.bits // 8


def _scratch(scratch: Allocation, known: Sequence[Allocation], shared: int) -> int:
    """Size of scratch of which nobody said it: at most up to the next piece that lives at its time."""
    first, last = scratch.life
    start = scratch.offset or 0
    later = [a.offset for a in known if a.offset is not None and a.offset > start and a.life[0] <= last
             and first <= a.life[1]]
    end = min(later, default=shared)
    return max(0, end - start)


def edges(made: IrModule, found: Sequence[MemoryAccess], pieces: Sequence[Allocation], arch: str) -> list[Edge]:
    """All edges of a kernel, in its order, with the instructions that belong to them and their counts."""
    by_number = {piece.life[0]: piece for piece in pieces}
    by_name = {one.results[0]: by_number[one.number] for one in made.operations
               if one.name == "ttg.local_alloc" and one.results and one.number in by_number}
    groups: dict[tuple[object, ...], Edge] = {}
    for one in made.operations:
        for kind in _kinds(one):
            homes = [by_number[one.number]] if kind == "scratch" and one.number in by_number else \
                [by_name[root] for root in one.roots if root in by_name]
            for home in homes:
                home.fixed |= kind in ("product", "tma")
            edge = _edge(made, one, kind, homes[0] if homes else None)
            key = (edge.operation, kind, edge.place, edge.source, edge.target, id(edge.allocation))
            if key in groups:
                groups[key].many += 1
                groups[key].depth = max(groups[key].depth, edge.depth)
            else:
                groups[key] = edge
    made_edges = list(groups.values())
    for access in found:
        for edge in _homes(access, made_edges):
            edge.accesses.append(access)
    for edge in made_edges:
        edge.accesses = [_of_warps(access, edge.warps) for access in edge.accesses]
        _count(edge, arch)
        if edge.kind == "scratch" and edge.allocation is not None and edge.accesses:
            ends = [int(a.addresses[a.active].max(initial=0)) + a.nbytes for a in edge.accesses]
            edge.allocation.size = max(max(ends) - (edge.allocation.offset or 0), 0)
    return [edge for edge in made_edges if edge.accesses or edge.kind in ("product", "tma")]


def _kinds(one: IrOperation) -> list[str]:
    kinds = []
    base = one.name.split(".")[-1]
    if one.name in SHARED or base in ("buffer_load_to_local",):
        kind = SHARED.get(one.name, "copy")
        if one.name == "ttg.local_alloc" and not (one.operands and len(one.types) > 1):
            return []
        if kind != "scratch" or one.offset is not None:
            kinds.append(kind)
    if one.name in GLOBAL or base in GLOBAL_AMD:
        kinds.append("global")
    return kinds


def _edge(made: IrModule, one: IrOperation, kind: str, home: Allocation | None) -> Edge:
    types = one.types
    source = made.encoding(types[0].encoding) if types else None
    target = made.encoding(types[-1].encoding) if len(types) > 1 else None
    line, column = one.line, next((column for line, column in one.place if line == one.line), 0)
    return Edge(one.name, kind, line, column, one.place, one.names, types[0] if types else None, source, target, home,
                one.depth, warps=one.warps or made.warps, file=made.where(one),
                box=next((t for t in reversed(types) if t.memory), None) if kind == "tma" else None)


def _homes(access: MemoryAccess, known: Sequence[Edge]) -> list[Edge]:
    """The edges that an instruction belongs to: of its place and kind; of several, by its addresses."""
    if access.space == "unit":
        kind = "tma" if "bulk" in access.instruction else "product"
        fit = [edge for edge in known if edge.kind == kind]
        return ([e for e in fit if e.place == access.place] or
                [e for e in fit if access.place and e.line == access.place[-1][0]])[:1]
    kinds = {"global"} if access.space == "global" else {"copy", "global"} if access.source is not None else \
        {"write", "scratch"} if access.store else {"read", "scratch"}
    fit = [edge for edge in known if edge.kind in kinds and edge.place == access.place]
    if not fit:  # a place that the compiler merged with another
        fit = [edge for edge in known if edge.kind in kinds - {"global"} and _inside(access, edge)][:1]
        if not fit and access.store and access.source is None:  # what a copy writes where its mask is off
            fit = [edge for edge in known if edge.kind == "copy" and edge.place == access.place][:1]
        if not fit and access.nbytes <= 8:  # words that say which partition a warp is in: past all that is allocated
            fit = [edge for edge in known if edge.operation == "ttg.warp_specialize"][:1]
        if not fit and access.place:
            fit = [edge for edge in known if edge.kind in kinds and edge.line == access.place[-1][0]][:1]
    if len(fit) == 1:
        return fit
    first = []
    for kind in ("global", *sorted(kinds - {"global"})):
        same = [edge for edge in fit if edge.kind == kind]
        if len(same) > 1 and kind != "global":
            same = [edge for edge in same if _inside(access, edge)] or same
        first += same[:1]
    if access.source is None and len(first) > 1:
        inside = [edge for edge in first if _inside(access, edge)]
        first = (inside or first)[:1]
    return first


def _of_warps(access: MemoryAccess, warps: int) -> MemoryAccess:
    """The access of the warps of a partition."""
    if len(access.addresses) <= warps:
        return access
    source, zeros = (None if part is None else part[:warps] for part in (access.source, access.zeros))
    return replace(access, addresses=access.addresses[:warps], active=access.active[:warps], source=source, zeros=zeros)


def _inside(access: MemoryAccess, edge: Edge) -> bool:
    piece = edge.allocation
    if piece is None or piece.offset is None:
        return False
    where = int(access.addresses[access.active].min() if access.active.any() else access.addresses.min())
    return piece.offset <= where < piece.offset + max(1, piece.size)


def _count(edge: Edge, arch: str) -> None:
    if edge.kind == "global":
        sides = [side for side in (a.global_side() for a in edge.accesses) if side is not None]
        for side in sides:
            moved, ideal = side.sectors()
            edge.sectors, edge.ideal_sectors = edge.sectors + moved, edge.ideal_sectors + ideal
        touched = [np.unique((s.addresses[s.active][:, None] + np.array([0, s.nbytes - 1])) // 32) for s in sides]
        edge.distinct = len(np.unique(np.concatenate(touched))) if touched else 0
        worst = edge.worst_sectors()
        edge.why = worst.explain() if worst is not None else ""
        return
    if edge.kind == "product":
        edge.why, edge.measured = "the tensor cores read shared memory: one pass for every 128 bytes, any swizzle", True
        passes = [product_wavefronts(access.instruction) or 0 for access in edge.accesses]
        edge.wavefronts = edge.ideal = sum(passes) * max(1, edge.warps // 4)
        return
    if edge.kind == "tma":
        edge.why = "TMA moves whole boxes; the load and store unit has no pass with it"
        if edge.box is not None:
            nbytes = math.prod(edge.box.shape) * edge.box.bits // 8
            edge.sectors = edge.ideal_sectors = edge.many * nbytes // SECTOR_BYTES
        return
    if edge.accesses:
        edge.wavefronts, edge.ideal = (int(counts.sum()) for counts in passes_of(edge.accesses, arch))
    worst_pass = edge.worst(arch)
    if worst_pass is not None:
        edge.why, edge.measured = worst_pass.explain(), not worst_pass.provisional
    elif edge.accesses:
        edge.measured = "wavefronts" not in get_arch(arch).provisional
        edge.why = "copies to shared memory" if edge.wavefronts else "no rule of passes is known"
        if edge.wavefronts and any("source data" in access.notes for access in edge.accesses):
            edge.why += f", {GATHERS}"


def product_wavefronts(instruction: str) -> int | None:
    """Passes of one wgmma for its operands in shared memory; None for one that kvlab does not know.

    >>> product_wavefronts("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16")
    48
    """
    shape = re.search(r"\.(m\d+n\d+k\d+)\.\w+\.(\w+)", instruction)
    if shape is None or not instruction.startswith("wgmma"):
        return None
    try:
        atom = get_atom(f"wgmma.{shape[1]}.{shape[2]}")
    except ValueError:
        return None
    return shared_mma_wavefronts(atom, a_in_registers=instruction.endswith(".registers"))
