"""Causes of slowness in a compiled kernel and what helps, in words: a rule for each, the dearest finding first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvlab.hardware import get_arch
from kvlab.layout.encodings import NVMMADistributedLayout
from kvlab.xray import cures
from kvlab.xray.cures import Remedy
from kvlab.xray.edges import Edge, brief

if TYPE_CHECKING:
    from kvlab.xray.result import XRay

TRIPS = 16  #: how often a loop is taken to run, whose count is not known here
SECTOR_CYCLES = 2  #: cycles of an SM that a sector of DRAM takes: 32 B of about 16 B a cycle
L1_CYCLES = 0.25  #: of a sector that L1 has
Rule = Callable[["XRay"], Iterator["Finding"]]
RULES: list[Rule] = []


@dataclass(frozen=True)
class Finding:
    """One cause of slowness.

    kind      its name: ``bank-conflict``, ``uncoalesced``, ``spill``, ...
    line      of the source, 0 for the whole kernel; ``file`` where it is another than the kernel's
    words     what is so, with numbers
    cost      estimated cycles of an SM for each CTA, loops taken 16 times: to order findings, no measurement
    cures     what would help; those with ``tried`` above 0 were counted by the model

    >>> finding = Finding("spill", 0, "32 B are spilled", 64.0, (Remedy("more warps"),))
    >>> print(finding)
    spill: 32 B are spilled. Cure: more warps.
    """

    kind: str
    line: int
    words: str
    cost: float
    cures: tuple[Remedy, ...] = ()
    column: int = 0
    file: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.file else f"line {self.line}: " if self.line else ""
        cured = [f"{cure.words}" + (f" gives {cure.after} for {cure.before}" if cure.after != cure.before else "")
                 + (f" (all {cure.tried} tried)" if cure.tried > 1 else "") for cure in self.cures]
        return f"{self.kind}: {where}{self.words}." + (f" Cure: {'; or '.join(cured)}." if cured else "")


def findings(xray: XRay) -> tuple[Finding, ...]:
    """All findings, the dearest first."""
    found: dict[tuple[object, ...], Finding] = {}
    for one in (finding for rule in RULES for finding in rule(xray)):
        key = one.kind, one.file, one.line, one.words  # of two partitions that run the same code
        found[key] = replace(one, cost=one.cost + found[key].cost) if key in found else one
    return tuple(sorted(found.values(), key=lambda one: -one.cost))


def rule(function: Rule) -> Rule:
    """Adds a rule to the list."""
    RULES.append(function)
    return function


def _trips(edge: Edge) -> float:
    deepest = max((access.depth for access in edge.accesses), default=edge.depth)
    return float(TRIPS**deepest)


def _every(edge: Edge) -> str:
    deepest = max((access.depth for access in edge.accesses), default=edge.depth)
    return " on each trip of a loop" if deepest else ""


@rule
def bank_conflicts(xray: XRay) -> Iterator[Finding]:
    """More wavefronts than the instructions' phases."""
    known: dict[int, list[Remedy]] = {}
    for edge in xray.edges:
        if edge.wavefronts <= edge.ideal or not edge.ideal:
            continue
        if edge.kind == "write" and edge.nbytes <= 2 and edge.allocation is not None and edge.allocation.fixed:
            yield _transposed(edge)
            continue
        if edge.kind == "copy" and "cp.async.cg.16" in edge.instructions and (short := _short_rows(edge)):
            yield short
            continue
        names = " and ".join(edge.instructions)
        kept = f" of {brief(edge.allocation.layout)}" if edge.allocation and edge.allocation.layout else ""
        words = (f"{names}{kept} takes {edge.wavefronts} wavefronts where {edge.ideal} would do"
                 f" ({edge.wavefronts / edge.ideal:.3g} passes for 1){_every(edge)}, in {edge.operation}"
                 f" of {edge.type}" + ("" if edge.measured else f"; by a rule that no {xray.target} has confirmed"))
        found: list[Remedy] = []
        if edge.allocation is not None and edge.allocation.layout is not None:
            piece = edge.allocation
            if id(piece) not in known:
                known[id(piece)] = cures.shared_layouts(piece, xray.edges, xray.target)
            found = known[id(piece)]
        if not found:
            found = [Remedy("another order of the tile on one side of this change of layout: its scratch memory is "
                          "laid out by the compiler")] if edge.kind == "scratch" else \
                    [Remedy("no swizzle and no padding of this tile is better", edge.wavefronts, edge.wavefronts)]
        sure = 1.0 if edge.measured or xray.target.startswith("sm_") else 0.25
        yield Finding("bank-conflict", edge.line, words, sure * (edge.wavefronts - edge.ideal) * _trips(edge),
                      tuple(found), edge.column, edge.file)


def _transposed(edge: Edge) -> Finding:
    many = len(edge.accesses)
    return Finding(
        "transposed-operand", edge.line, f"{edge.operation} of {edge.type}: the tensor cores want this operand with "
        f"its reduced dimension contiguous; it is turned in registers and stored with {many} instructions of "
        f"{edge.nbytes} B a lane, {edge.wavefronts} wavefronts{_every(edge)}",
        (edge.wavefronts + 2 * many) * _trips(edge),
        (Remedy("the operand stored in memory with its K dimension contiguous ([N, K] for B)"),), edge.column,
        edge.file,
    )


def _short_rows(edge: Edge) -> Finding | None:
    """Copies past L1 of rows that fill no line of 128 bytes."""
    for access in edge.accesses:
        row = access.source[0] if access.source is not None else np.zeros(0, np.int64)
        breaks = np.flatnonzero(np.diff(row) != access.nbytes)
        length = (int(breaks[0]) + 1 if len(breaks) else len(row)) * access.nbytes
        if length >= 128 or not access.active[0].all():
            return None
    return Finding(
        "short-rows", edge.line, f"cp.async of {edge.type}: rows of {length} B, and a pass moves part of one line of "
        f"128 B: {edge.wavefronts} wavefronts for {edge.ideal}{_every(edge)}",
        (edge.wavefronts - edge.ideal) * _trips(edge),
        (Remedy("a tile with rows of 128 B", edge.wavefronts, edge.ideal, None, 1),), edge.column, edge.file,
    )


@rule
def uncoalesced(xray: XRay) -> Iterator[Finding]:
    """More sectors than the bytes need."""
    for edge in xray.edges:
        if edge.kind != "global" or edge.sectors < 1.25 * edge.ideal_sectors or not edge.accesses:
            continue
        worst = edge.worst_sectors()
        if worst is None or _from_memory(edge) or _is_atomic(edge) or _wider(edge) is not None:
            continue
        steps = np.unique(np.diff(np.sort(worst.addresses[worst.active])))
        span = int(np.ptp(worst.addresses[worst.active])) + worst.nbytes if worst.active.any() else 0
        kind = "misaligned" if span == worst.useful and worst.misaligned else "uncoalesced"
        useful = edge.distinct <= 1.25 * edge.ideal_sectors  # other instructions of the tile find them in L1
        if useful and edge.sectors <= 2 * edge.ideal_sectors and kind == "uncoalesced":
            continue
        if kind == "uncoalesced" and worst.excess < 2:
            continue
        apart = f", lanes {steps[-1]} B apart" if len(steps) and kind == "uncoalesced" else ""
        words = (f"{edge.operation} of {edge.type} moves {edge.sectors} sectors of 32 B for the bytes of "
                 f"{edge.ideal_sectors}{_every(edge)}{apart}")
        if kind == "misaligned":
            odd = ", if unknown integers are odd" * any(n % 16 for n in xray.assumed.values())
            cured = Remedy(f"a base and strides that are multiples of 32 B, warps start {worst.misaligned} B past{odd}",
                         edge.sectors, edge.ideal_sectors, None, 1)
        else:
            cured = cures.register_order(edge, xray.target) or Remedy("neighbouring lanes at neighbouring addresses")
        cycles = L1_CYCLES if useful else SECTOR_CYCLES
        yield Finding(kind, edge.line, words, cycles * (edge.sectors - edge.ideal_sectors) * _trips(edge), (cured,),
                      edge.column, edge.file)


def _from_memory(edge: Edge) -> bool:
    """Whether an address in global memory was itself loaded."""
    for access in edge.accesses:
        copied = access.source is not None
        if ("source data" if copied else "data") in access.notes:
            return True
    return False


def _is_atomic(edge: Edge) -> bool:
    return edge.operation.startswith("tt.atomic")


def _wider(edge: Edge) -> Remedy | None:
    if len(edge.accesses) < 2 * edge.many:  # one instruction, of a prologue and of the loop
        return None
    sides = [a if edge.kind != "global" else a.global_side() for a in edge.accesses]
    cured = cures.wider([side for side in sides if side is not None])
    return None if cured is None or cured.after * 2 > cured.before else cured


@rule
def narrow(xray: XRay) -> Iterator[Finding]:
    """Several narrow instructions where one wide one would do."""
    for edge in xray.edges:
        if not edge.accesses or edge.kind not in ("global", "read", "write") or _is_atomic(edge):
            continue
        cured = _wider(edge)
        if edge.kind != "global" and edge.type is not None and np.prod(edge.type.shape) < xray.threads:
            continue  # words of one barrier or of a schedule
        if cured is None or (edge.kind == "write" and edge.allocation is not None and edge.allocation.fixed):
            continue
        if edge.kind != "global":
            cured = replace(cured, words=f"a tile whose contiguous dimension is the one that a lane reads along: "
                            f"{16 // edge.nbytes} elements at a time")
        what = "global memory" if edge.kind == "global" else "shared memory"
        words = (f"{edge.operation} of {edge.type} reaches {what} with {cured.before} instructions of {edge.nbytes} B "
                 f"a lane{_every(edge)}")
        warps = len(edge.accesses[0].addresses)
        extra = L1_CYCLES * max(0, edge.sectors - edge.ideal_sectors)
        cost = (cured.before - cured.after) * warps / 2 + extra
        yield Finding("narrow-access", edge.line, words, cost * _trips(edge), (cured,), edge.column, edge.file)


@rule
def replicated(xray: XRay) -> Iterator[Finding]:
    """The same bytes asked for by many threads of the CTA."""
    for edge in xray.edges:
        if edge.kind != "global" or not edge.accesses or edge.type is None or _is_atomic(edge):
            continue
        if _from_memory(edge) or len(edge.type.shape) != 1:
            continue
        sides = [side for side in (a.global_side() for a in edge.accesses) if side is not None]
        asked = sum(int(side.active.sum()) for side in sides)
        distinct = len(np.unique(np.concatenate([side.addresses[side.active] for side in sides]))) if asked else 0
        if not distinct or asked < 2 * distinct or asked - distinct < 64 or edge.type.shape[0] >= 2 * xray.threads:
            continue
        words = (f"{edge.operation} of {edge.type}: {asked} lanes ask for {distinct} different places, each "
                 f"{asked // distinct} times, as the tile is smaller than the {xray.threads} threads{_every(edge)}")
        fewer = max(1, xray.resources.warps * distinct // asked)
        cured = Remedy(f"num_warps={fewer}, or a larger block", asked, distinct * max(1, asked // distinct // (
            xray.resources.warps // fewer)), None, 1)
        cost = (asked - distinct) / 32 * _trips(edge)
        yield Finding("idle-threads", edge.line, words, cost, (cured,), edge.column, edge.file)


@rule
def spills(xray: XRay) -> Iterator[Finding]:
    """Registers in local memory."""
    resources = xray.resources
    if resources.spills:
        unit = "B of spill stores and loads" if xray.target.startswith("sm_") else "registers spilled"
        words = f"{resources.spills} {unit} at {resources.registers} registers a thread"
        yield Finding("spill", 0, words, float(resources.spills * resources.warps * TRIPS / 4),
                      (Remedy(f"num_warps={2 * resources.warps}, a smaller tile, or no maxnreg"),))
    elif resources.stack:
        yield Finding("local-memory", 0, f"{resources.stack} B of local memory a thread without spills: an array that "
                      "is indexed at run time", float(resources.stack * resources.warps),
                      (Remedy("tl.static_range, or a constexpr index"),))


@rule
def occupancy(xray: XRay) -> Iterator[Finding]:
    """Too few warps to hide memory behind, or none at all."""
    resources, arch = xray.resources, get_arch(xray.target)
    if resources.shared > arch.shared_bytes:
        fewer = cures.fewer_stages(resources, xray.allocations)
        yield Finding("too-much-shared", 0, f"{resources.shared} B of shared memory, {xray.target} gives a CTA "
                      f"{arch.shared_bytes}: it cannot be launched", 1e9,
                      tuple(one for one in (fewer,) if one) or (Remedy("fewer stages or a smaller tile"),))
        return
    asynchronous = any(edge.kind in ("copy", "tma") for edge in xray.edges)
    if resources.occupancy > (0.125 if asynchronous else 0.34):
        return
    found: list[Remedy] = []
    if "shared memory" in resources.limiter and (one := cures.fewer_stages(resources, xray.allocations)):
        found.append(one)
    if "registers" in resources.limiter and (one := cures.fewer_registers(resources)):
        found.append(one)
    if resources.limiter == "CTAs":
        found.append(Remedy(f"num_warps={2 * resources.warps}"))
    words = (f"{resources.ctas} CTA{'s' * (resources.ctas != 1)} of {resources.warps} warps an SM, "
             f"{resources.occupancy:.0%} of its warps: limited by {resources.limiter}")
    yield Finding("low-occupancy", 0, words, 200 * (0.35 - resources.occupancy),
                  tuple(found) or (Remedy("a smaller tile"),))


@rule
def products(xray: XRay) -> Iterator[Finding]:
    """Matrix products without tensor cores, or with the smaller ones."""
    for one in xray.module.operations:
        if one.name != "tt.dot" or not one.types:
            continue
        line = one.line
        parent = xray.module.encoding(one.types[-1].encoding)
        steps = float(np.prod(one.types[-1].shape)) * (one.types[0].shape[-1])
        trips = TRIPS**one.depth
        if type(parent).__name__ == "BlockedLayout":
            yield Finding("no-tensor-cores", line, f"tt.dot of {one.types[0]} and {one.types[1]} runs on the scalar "
                          "units", steps / 128 * trips,
                          (Remedy('float16, bfloat16 or float8 operands, or input_precision="tf32"'),))
        elif isinstance(parent, NVMMADistributedLayout) and not parent.is_hopper and xray.target == "sm_90":
            rows = one.types[-1].shape[-2]
            why = f"{rows} rows are fewer than 64" if rows < 64 else \
                f"{xray.resources.warps} warps are no warpgroups of 4" if xray.resources.warps % 4 else \
                "an operand has no form for it"
            yield Finding("mma-sync", line, f"tt.dot of {one.types[0]} and {one.types[1]} uses mma.sync, not wgmma: "
                          f"{why}", steps / 2048 * trips,
                          (Remedy("tiles of 64 rows or more with 4 or 8 warps; q and k exchanged where q is short"),))


@rule
def pipelining(xray: XRay) -> Iterator[Finding]:
    """Loads of a loop that wait in registers before a product."""
    copies = any(edge.kind in ("copy", "tma") for edge in xray.edges)
    dots = [one for one in xray.module.operations if one.name in ("tt.dot", "ttng.warp_group_dot", "ttng.tc_gen5_mma")
            and one.depth]
    if copies or not dots or not xray.target.startswith("sm_"):
        return
    for edge in xray.edges:
        if edge.kind == "global" and edge.operation == "tt.load" and edge.depth and edge.type is not None \
                and len(edge.type.shape) > 1:
            why = f"{edge.type.bits // 8 * 8}-bit elements with {edge.nbytes} B a lane cannot be copied by cp.async" \
                if edge.nbytes < 4 else "the loop has one stage"
            yield Finding("not-pipelined", edge.line, f"{edge.operation} of {edge.type} passes through registers and "
                          f"its loop waits for it: {why}", 600.0 * TRIPS**edge.depth / 8,
                          (Remedy("num_stages=3" if edge.nbytes >= 4 else "contiguous pieces of 4 B or more a lane"),),
                          edge.column, edge.file)


@rule
def conversions(xray: XRay) -> Iterator[Finding]:
    """Changes of layout through shared memory in a loop."""
    for edge in xray.edges:
        if edge.operation == "ttg.convert_layout" and edge.kind == "scratch" and any(a.depth for a in edge.accesses):
            words = (f"ttg.convert_layout of {edge.type} goes through shared memory on each trip: {brief(edge.source)} "
                     f"to {brief(edge.target)}")
            yield Finding("convert-in-loop", edge.line, words, (edge.wavefronts + 60) * _trips(edge),
                          (Remedy("operands that have the layout already: the same num_warps along the product's rows, "
                                "or the value computed outside the loop"),), edge.column, edge.file)


@rule
def contended_atomics(xray: XRay) -> Iterator[Finding]:
    """LaneValues of a warp at one address, or one atomic an element where a sum first would do."""
    for edge in xray.edges:
        atomics = [a for a in edge.accesses if a.instruction.startswith(("atom", "red", "buffer_atomic"))]
        if not atomics or edge.kind != "global":
            continue
        active = sum(int(a.active.sum()) for a in atomics)
        where = np.concatenate([a.addresses[a.active] for a in atomics]) if active else np.zeros(0)
        places = len(np.unique(where))
        known = not _from_memory(edge)
        if active > 4 * max(1, places):
            lanes = f"{active} lanes at {places} address{'es' * (places != 1)}" if known else \
                f"{active} lanes, addresses from memory"
            yield Finding("contended-atomic", edge.line, f"{edge.operation} of {edge.type}: {lanes}, one after another",
                          float(active * (4 if known else 1)) * _trips(edge),
                          (Remedy("tl.sum of the block first, then one atomic", active, places, None, 1)
                           if known else Remedy("tl.histogram of the block first"),), edge.column, edge.file)


@rule
def divisions(xray: XRay) -> Iterator[Finding]:
    """Integer divisions by values that are no constants, in a loop."""
    lines = []
    for one in xray.function.instructions:
        if one.opcode in ("sdiv", "udiv", "srem", "urem") and one.depth and not re.search(r", -?\d+$", one.text):
            lines.append(xray.function.line(one.place))
    if lines:
        many, where = len(lines), ", ".join(map(str, sorted(set(lines))))
        yield Finding("integer-division", min(lines), f"{many} integer division{'s' * (many != 1)} by a value that is "
                      f"no constant, on each trip of a loop (lines {where})", 20.0 * many * TRIPS,
                      (Remedy("a constexpr divisor (a power of two becomes a shift), or a division outside the loop"),))


@rule
def float64(xray: XRay) -> Iterator[Finding]:
    """Arithmetic of 64 bits."""
    counted = {line: n for names in (xray.histogram.get("float64", {}),) for name, lines in names.items()
               if not name.startswith(("mov", "ld", "st")) for line, n in lines.items()}
    for line, many in sorted(counted.items()):
        yield Finding("float64", line, f"{many} instructions of float64", 16.0 * many,
                      (Remedy("float32 constants and inputs: one float64 value makes its whole expression float64"),))


@rule
def gathers(xray: XRay) -> Iterator[Finding]:
    """Addresses that come from memory, on every lane its own."""
    for edge in xray.edges:
        if edge.kind != "global" or _is_atomic(edge) or not edge.accesses:
            continue
        if _from_memory(edge) and edge.nbytes <= 4:
            lanes = sum(int(a.active.sum()) for a in edge.accesses)
            yield Finding("gather", edge.line, f"{edge.operation} of {edge.type} with {edge.nbytes} B a lane at "
                          f"addresses that come from memory: up to {lanes} sectors{_every(edge)}",
                          SECTOR_CYCLES * lanes * _trips(edge) / 4,
                          (Remedy("rows: a whole row of contiguous elements for each index"),), edge.column, edge.file)
