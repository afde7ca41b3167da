"""Cures that the model tries: other layouts of shared memory and of registers, other sizes, and what they cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvlab.hardware import INSTRUCTIONS, Candidate, Cure, get_arch, sectors
from kvlab.layout.encodings import (
    BlockedLayout,
    Encoding,
    NVMMASharedLayout,
    PaddedSharedLayout,
    SharedEncoding,
    SwizzledSharedLayout,
)
from kvlab.xray.accesses import MemoryAccess, passes_of
from kvlab.xray.edges import Allocation, Edge, brief, one_warp
from kvlab.xray.llir import IntArray
from kvlab.xray.resources import Resources


class LayoutCure(Cure):
    """A layout of shared memory with fewer wavefronts, with the counts that prove it."""

    def __str__(self) -> str:
        return f"{brief(self.layout)}: {self.wavefronts} wavefronts of all that touches the tile, before {self.given}"


@dataclass(frozen=True)
class Remedy:
    """A change, in words, and what the model counts with it: ``before`` and ``after`` in the same unit.

    layout   the encoding to use, None where the cure is of another sort;  ``tried`` how many candidates were counted
    proof    of a layout of shared memory: all that was counted; it draws the worst instruction before and after

    >>> Remedy("num_warps=2", before=256, after=64).proof is None
    True
    """

    words: str
    before: int = 0
    after: int = 0
    layout: Encoding | None = None
    tried: int = 0
    proof: LayoutCure | None = None


def shared_layouts(piece: Allocation, edges: Sequence[Edge], arch: str) -> list[Remedy]:
    """The smallest swizzle and the smallest padding with the fewest wavefronts of all that touches a piece of memory.

    Each candidate is counted on all accesses of all edges. Empty where the layout is not known, or none is better.
    """
    old = piece.layout
    touching = [edge for edge in edges if edge.allocation is piece]
    moves = [a for edge in touching if edge.kind in ("read", "write", "copy") for a in edge.accesses]
    if not isinstance(old, SharedEncoding) or piece.offset is None or not moves:
        return []
    rank = len(getattr(old, "order", ())) or len(old.pattern_shape())
    dims_, element = piece.type.split("x"), 0
    shape = tuple(int(n) for n in dims_ if n.isdigit())[-rank:]
    digits = "".join(c for c in dims_[-1].partition("E")[0] if c.isdigit())
    element = 1 if dims_[-1].startswith("f8") else max(1, int(digits or 32) // 8)
    try:
        offsets = old.offsets(shape).ravel()
    except ValueError:
        return []
    where = np.full(int(offsets.max()) + 1, -1, np.int64)
    where[offsets] = np.arange(offsets.size)
    stage = _stage_bytes(piece, shape, element)
    plans = [_Plan.of(a, piece.offset, stage, element, where) for a in moves]
    if any(plan is None for plan in plans):
        return []
    known = [plan for plan in plans if plan is not None]
    before, least = (int(counts.sum()) for counts in passes_of(moves, arch))
    width = max(a.nbytes for a in moves) // element
    best: list[Remedy] = []
    for family in _families(old, shape, max(1, width), element, piece.fixed):
        found, tried, best_moves = None, 0, moves
        counted: list[Candidate] = []
        for candidate in family:
            try:
                new = candidate.offsets(shape).ravel() * element
            except ValueError:
                continue
            tried += 1
            moved = [plan.moved(new) for plan in known]
            if any(one is None for one in moved):
                continue
            kept = [one for one in moved if one is not None]
            after = int(passes_of(kept, arch)[0].sum())
            counted.append(Candidate(brief(candidate), after))
            if after < before and (found is None or after < found.after):
                found, best_moves = Remedy(f"{brief(candidate)}", before, after, candidate), kept
            if after <= least:
                break
        if found is not None:
            proof = _proof(found, least, counted, moves, best_moves, arch)
            best.append(replace(found, tried=tried, proof=proof))
    return best


def _proof(
    found: Remedy, least: int, counted: Sequence[Candidate], moves: Sequence[MemoryAccess],
    after: Sequence[MemoryAccess], arch: str,
) -> LayoutCure | None:
    """All that was counted, and the worst warp instruction before and after."""
    taken, ideal = passes_of(moves, arch)
    worst, warp = np.unravel_index(int((taken - ideal).argmax()), taken.shape)
    if moves[int(worst)].instruction not in INSTRUCTIONS:
        return None
    one, other = (one_warp(side[int(worst)], int(warp), arch) for side in (moves, after))
    return LayoutCure(found.layout, found.layout, found.after, least, found.before, tuple(counted), one, other, 0)


@dataclass(frozen=True)
class _Plan:
    """An access by the elements that it wants, so that another layout can say where they lie."""

    access: MemoryAccess
    element: IntArray
    rest: IntArray

    @classmethod
    def of(cls, access: MemoryAccess, base: int, stage: int, size: int, where: IntArray) -> _Plan | None:
        """None where an active lane points outside the tile."""
        relative = (access.addresses - base) % stage
        index = np.clip(relative // size, 0, len(where) - 1)
        element = where[index]
        if (element[access.active] < 0).any() or (relative[access.active] // size >= len(where)).any():
            return None
        return cls(access, np.maximum(element, 0), relative % size)

    def moved(self, new: IntArray) -> MemoryAccess | None:
        """The access if element e lay at byte ``new[e]``; None where that tears the piece of a lane."""
        address = new[self.element] + self.rest
        return None if (address % self.access.nbytes).any() else replace(self.access, addresses=address)


def _stage_bytes(piece: Allocation, shape: tuple[int, ...], element: int) -> int:
    sizes = [int(n) for n in piece.type.split("x") if n.isdigit()]
    stages = math.prod(sizes[: len(sizes) - len(shape)])
    return max(1, piece.size // max(1, stages))


def _families(
    old: SharedEncoding, shape: tuple[int, ...], width: int, element: int, fixed: bool
) -> Iterator[list[SharedEncoding]]:
    """Swizzles, then paddings, the smallest first; of what TMA or wgmma reads, their own swizzles."""
    if fixed or isinstance(old, NVMMASharedLayout):
        transposed = bool(getattr(old, "transposed", False))
        yield [NVMMASharedLayout(n, 8 * element, len(shape), transposed) for n in (32, 64, 128)]
        if fixed:
            return
    order = getattr(old, "order", None) or _order(old, shape)
    columns = shape[order[0]]
    swizzles = [(vec, per, phases) for phases in (1, 2, 4, 8, 16) for per in (1, 2, 4, 8)
                for vec in (width, 2 * width) if phases > 1 or (per == 1 and vec == width)]
    yield [SwizzledSharedLayout(vec, per, phases, order) for vec, per, phases in swizzles if vec * phases <= columns]
    gaps = [n for n in (width, 2 * width, 4 * width) if n * element <= 64]
    yield [PaddedSharedLayout.with_identity_for([[interval, gap]], shape, order)
           for gap, interval in itertools.product(gaps, (columns, 2 * columns, 4 * columns))]


def _order(old: SharedEncoding, shape: tuple[int, ...]) -> tuple[int, ...]:
    bases = old.to_linear_layout(shape).bases["offset"]
    seen: list[int] = []
    for vector in bases:
        seen += [axis for axis, step in enumerate(vector) if step and axis not in seen]
    return tuple(seen + [axis for axis in range(len(shape)) if axis not in seen])


def register_order(edge: Edge, arch: str) -> Remedy | None:
    """The order of lanes with the fewest sectors, of all orders of the tile's dimensions; None where strides are not
    to be seen.
    """
    fitted = strides(edge)
    if fitted is None or edge.type is None:
        return None
    shape, element = edge.type.shape, edge.type.bits // 8
    threads = edge.accesses[0].addresses.size
    lanes = get_arch(arch).warp_size
    counted: list[tuple[int, BlockedLayout]] = []
    for order in itertools.permutations(range(len(shape))):
        layout = _blocked(shape, order, element, lanes, threads // lanes)
        try:
            held = layout.to_linear_layout(shape)
        except ValueError:
            continue
        coordinates = held.coordinates()  # [register, lane, warp, block, dims]
        names = list(held.in_dims)
        axes = [names.index(n) for n in ("register", "warp", "lane")]
        at = coordinates.transpose(*axes, *(n for n in range(len(names) + 1) if n not in axes))
        at = at.reshape(*at.shape[:3], -1, at.shape[-1])[:, :, :, 0]
        address = (at * np.array(fitted)).sum(axis=-1)
        piece = layout.size_per_thread[order[0]] if fitted[order[0]] == element else 1
        counted.append((int(sectors(address[::piece] + 128, piece * element).sum()), layout))
    if not counted:
        return None
    after, layout = min(counted, key=lambda pair: pair[0])
    if after >= edge.sectors:
        apart = min((abs(step) for step in fitted if step), default=0)
        return Remedy(f"no order of its dimensions needs fewer sectors, as neighbouring elements lie {apart} B apart "
                    "in memory: the dimension that is contiguous there as the tile's, or the tensor stored so",
                    edge.sectors, edge.sectors, None, len(counted))
    return Remedy(f"lanes along dimension {layout.order[0]}, which has stride 1 in memory: {brief(layout)}",
                  edge.sectors, after, layout, len(counted))


def _blocked(
    shape: Sequence[int], order: Sequence[int], element: int, lanes: int, warps: int
) -> BlockedLayout:
    per, threads, groups = [1] * len(shape), [1] * len(shape), [1] * len(shape)
    per[order[0]] = max(1, min(16 // max(1, element), shape[order[0]]))
    left = lanes
    for axis in order:
        threads[axis] = max(1, min(left, shape[axis] // per[axis]))
        left //= threads[axis]
    threads[order[-1]] *= left
    left = warps
    for axis in order:
        groups[axis] = max(1, min(left, shape[axis] // (per[axis] * threads[axis])))
        left //= groups[axis]
    groups[order[-1]] *= left
    return BlockedLayout(per, threads, groups, order)  # type: ignore[arg-type]


def strides(edge: Edge) -> list[int] | None:
    """Bytes between neighbours along each dimension of a tile in global memory, as the lanes' addresses show."""
    if edge.source is None or edge.type is None or not edge.accesses:
        return None
    try:
        layout = edge.source.to_linear_layout(edge.type.shape)
    except ValueError:
        return None
    sides = [side for side in (a.global_side() for a in edge.accesses) if side is not None]
    address = sides[0].addresses
    found: dict[int, int] = {}
    for name, axis in (("lane", 1), ("warp", 0)):
        for bit, vector in enumerate(layout.bases.get(name, [])):
            moved = [dim for dim, step in enumerate(vector) if step]
            if len(moved) == 1 and 1 << bit < address.shape[axis]:
                there = address[0, 1 << bit] if axis else address[1 << bit, 0]
                found.setdefault(moved[0], int(there - address[0, 0]) // vector[moved[0]])
    registers = layout.bases.get("register", [])
    element = edge.type.bits // 8
    first = [int(side.addresses[0, 0]) for side in sides]
    per = max(1, sides[0].nbytes // element)
    for bit, vector in enumerate(registers):
        moved = [dim for dim, step in enumerate(vector) if step]
        if len(moved) != 1 or moved[0] in found:
            continue
        if 1 << bit < per:
            found[moved[0]] = element // vector[moved[0]]
        elif (1 << bit) // per < len(first):
            found[moved[0]] = (first[(1 << bit) // per] - first[0]) // vector[moved[0]]
    for dim, size in enumerate(edge.type.shape):
        if size == 1:
            found.setdefault(dim, 0)
    if len(found) < len(edge.type.shape):
        return None
    return [found[dim] for dim in range(len(edge.type.shape))]


def wider(accesses: Sequence[MemoryAccess]) -> Remedy | None:
    """One wide access in place of several narrow ones whose addresses run on, where a thread has such."""
    narrow = [a for a in accesses if a.nbytes < 16]
    if len(narrow) < 2:
        return None
    ordered = sorted(narrow, key=lambda a: int(a.addresses.flat[0]))
    runs, length = [], 1
    for one, other in itertools.pairwise(ordered):
        follows = np.array_equal(one.addresses + one.nbytes, other.addresses)
        if follows and (length + 1) * one.nbytes <= 16:
            length += 1
        else:
            runs.append(length)
            length = 1
    runs.append(length)
    if len(runs) >= len(narrow):
        return None
    size = max(runs) * narrow[0].nbytes
    size = 1 << (size.bit_length() - 1)
    return Remedy(f"accesses of {size} bytes: the addresses of a thread run on, but the compiler does not know that "
                f"they are multiples of {size}; a stride or pointer known to be divisible by 16 (tl.multiple_of, "
                "tl.assume, an argument that is) tells it", len(narrow),
                max(1, len(narrow) * narrow[0].nbytes // size))


def fewer_stages(resources: Resources, pieces: Sequence[Allocation]) -> Remedy | None:
    """One stage less, where shared memory limits the CTAs of an SM."""
    staged = 0
    for piece in pieces:
        if piece.layout is None:
            continue
        sizes = [int(n) for n in piece.type.split("x") if n.isdigit()]
        rank = len(getattr(piece.layout, "order", ())) or len(piece.layout.pattern_shape())
        stages = math.prod(sizes[: len(sizes) - rank])
        staged += piece.size // stages if stages > 1 else 0
    if not staged:
        return None
    fewer = replace(resources, shared=resources.shared - staged)
    if fewer.ctas <= resources.ctas:
        return None
    return Remedy(f"one stage less takes {staged} B less shared memory", resources.ctas, fewer.ctas)


def fewer_registers(resources: Resources) -> Remedy | None:
    """The largest number of registers with which one more CTA fits an SM."""
    for registers in range(resources.registers - 8, 31, -8):
        fewer = replace(resources, registers=registers)
        if fewer.ctas > resources.ctas:
            return Remedy(f"{registers} registers a thread (maxnreg={registers}, or a smaller tile)", resources.ctas,
                        fewer.ctas)
    return None


