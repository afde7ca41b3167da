"""Cures that the model tries: other layouts of shared memory and of registers, other sizes, and what they cost."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvlab.hardware import COPIES, INSTRUCTIONS, Cure, LaneAccess, best_padding, best_swizzle, get_arch, sectors
from kvlab.layout.encodings import (
    BlockedLayout,
    Encoding,
    NVMMASharedLayout,
    PaddedSharedLayout,
    SharedEncoding,
    SwizzledSharedLayout,
)
from kvlab.xray.accesses import MemoryAccess
from kvlab.xray.edges import Allocation, Edge, brief
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

    Each candidate is counted on all accesses of all edges (:func:`~kvlab.hardware.best_swizzle`,
    :func:`~kvlab.hardware.best_padding`). Empty where the layout is not known, or none is better.
    """
    old, start = piece.layout, piece.offset
    moves = [access for edge in edges if edge.allocation is piece and edge.kind in ("read", "write", "copy")
             for access in edge.accesses if access.instruction in INSTRUCTIONS or access.instruction in COPIES]
    if not isinstance(old, SharedEncoding) or start is None or not moves:
        return []
    shape, size = _tile(piece, old)
    try:
        given = _lane_accesses(piece, moves, old, shape, size)
        if given is None:
            return []
        how: dict[str, Any] = {"shape": shape, "base": start, "arch": arch}
        as_it_is = best_padding(old, f"uint{8 * size}", given, **how)
    except ValueError:
        return []
    plain = SwizzledSharedLayout(1, 1, 1, getattr(old, "order", None) or _order(old, shape))
    panels = NVMMASharedLayout(0, 8 * size, len(shape), bool(getattr(old, "transposed", False)))
    tiles = [old if isinstance(old, NVMMASharedLayout) else panels] * (piece.fixed or old == panels)
    best: list[Cure] = []
    for tile in [*tiles, *[plain] * (not piece.fixed)]:
        with contextlib.suppress(ValueError):
            best.append(best_swizzle(tile, f"uint{8 * size}", given, **how))
    best += [as_it_is] * (not piece.fixed and isinstance(as_it_is.change, PaddedSharedLayout))
    return [
        Remedy(brief(one.layout), as_it_is.given, one.wavefronts, one.layout, len(one.candidates),
               LayoutCure(**vars(one) | {"given": as_it_is.given, "before": as_it_is.before}))
        for one in best if one.wavefronts < as_it_is.given
    ]


def _tile(piece: Allocation, layout: SharedEncoding) -> tuple[tuple[int, ...], int]:
    """Shape of the tile of a layout, without the stages before it, and the bytes of an element."""
    dims = piece.type.split("x")
    rank = len(getattr(layout, "order", ())) or len(layout.pattern_shape())
    digits = "".join(c for c in dims[-1].partition("E")[0] if c.isdigit())
    return tuple(int(n) for n in dims if n.isdigit())[-rank:], \
        1 if dims[-1].startswith("f8") else max(1, int(digits or 32) // 8)


def _lane_accesses(
    piece: Allocation, moves: Sequence[MemoryAccess], layout: SharedEncoding, shape: tuple[int, ...], size: int,
) -> list[LaneAccess] | None:
    """Accesses by the elements that their lanes want, those of one instruction together, so that another layout can say
    where they lie; None where an active lane points outside the tile, or into an element."""
    offsets = layout.offsets(shape).ravel()
    element = np.full(int(offsets.max()) + 1, -1, np.int64)
    element[offsets] = np.arange(offsets.size)
    stage = _stage_bytes(piece, shape)
    found = []
    for name, same in _by_instruction(moves).items():
        active = np.stack([access.active for access in same])
        if name in INSTRUCTIONS and INSTRUCTIONS[name].matrices:
            active = np.broadcast_to(np.arange(active.shape[-1]) < 8 * INSTRUCTIONS[name].matrices, active.shape)
        relative = (np.stack([access.addresses for access in same]) - (piece.offset or 0)) % stage
        place = np.where(active, relative // size, 0)
        held = element[np.minimum(place, len(element) - 1)]
        if (place >= len(element)).any() or (active & ((held < 0) | (relative % size > 0))).any():
            return None
        at = np.unravel_index(np.maximum(held, 0), shape)
        source = None if same[0].source is None else np.stack([access.source for access in same])  # type: ignore
        found.append(LaneAccess(name, at, active, source))
    return found


def _by_instruction(moves: Sequence[MemoryAccess]) -> dict[str, list[MemoryAccess]]:
    found: dict[str, list[MemoryAccess]] = {}
    for access in moves:
        found.setdefault(access.instruction, []).append(access)
    return found


def _stage_bytes(piece: Allocation, shape: tuple[int, ...]) -> int:
    sizes = [int(n) for n in piece.type.split("x") if n.isdigit()]
    stages = math.prod(sizes[: len(sizes) - len(shape)])
    return max(1, piece.size // max(1, stages))


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
        words = ("a tile along the dimension that is contiguous in memory, or the tensor stored the other way round: "
                 f"its neighbouring elements lie {apart} B apart in memory, no order of lanes needs fewer sectors")
        return Remedy(words, edge.sectors, edge.sectors, None, len(counted))
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


