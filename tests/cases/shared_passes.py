"""Passes of each instruction that reads or writes shared memory: those that an X-ray predicts and those that the
machine of compiled code counted."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvlab.hardware import copy_wavefronts
from kvlab.simt.record import Trace
from kvlab.xray.accesses import passes_of
from kvlab.xray.edges import GATHERS, product_wavefronts

MATRICES = ("ldmatrix", "stmatrix")
Passes = Counter[tuple[str, float, float]]
Moved = Counter[tuple[str, frozenset[Any]]]


def _shared(op: tuple[str, ...]) -> bool:
    """Whether an instruction is a load, a store, or a product that reads shared memory."""
    return op[0] in MATRICES or "mma_async" in op or \
        (op[0] in ("ld", "st") and any(word.startswith("shared") for word in op))


def idle(ran: Any) -> list[str]:
    """Loads, stores, products and boxes that no warp of a run came to."""
    boxes = lambda op: op[0] == "cp" and "tensor" in op  # noqa: E731
    return [facts.instruction.where for facts in ran.instructions
            if not facts.executed and (_shared(facts.instruction.op) or boxes(facts.instruction.op))]


def predicted(found: Any) -> Passes:
    """(instruction, wavefronts, the fewest) a warp, of each access of an X-ray."""
    passes: Passes = Counter()
    for edge in found.edges:
        for access in edge.accesses:
            name = access.instruction.split(".")[0]
            if edge.kind in ("read", "write", "scratch"):
                taken, least = access.passes(found.target)
                passes[name, taken / edge.warps, least / edge.warps] += 1
            elif name == "wgmma":
                taken = product_wavefronts(access.instruction) or 0
                passes[name, taken / 4, taken / 4] += 1
    return passes


def counted(ran: Any) -> Passes:
    """The same of each instruction of a run."""
    passes: Passes = Counter()
    for facts in ran.instructions:
        if _shared(facts.instruction.op) and facts.executed:
            passes[facts.instruction.op[0], facts.wavefronts / facts.executed, facts.ideal / facts.executed] += 1
    return passes


class Copies(NamedTuple):
    """Of a run: active lanes, wavefronts and the fewest of each warp's cp.async, and bytes of a box of TMA, by
    instruction."""

    lanes: dict[tuple[str, int], list[tuple[bytes, int, int]]]
    boxes: dict[int, set[int]]


@contextlib.contextmanager
def copies() -> Iterator[Copies]:
    """Watches the copies of the runs inside."""
    made = Copies(defaultdict(list), defaultdict(set))
    with pytest.MonkeyPatch.context() as patch:
        whole, boxes = Trace._copy, Trace.note_boxes

        def copy(self: Trace, at: int, nbytes: int, where: Any, source: Any, reads: Any, on: Any) -> None:
            name = f"cp.async.{'cg' if 'cg' in self.program.instructions[at].op else 'ca'}.{nbytes}"
            active = reads.any(axis=1)
            to, fro = (np.where(reads, x, 0)[active] for x in (where, source))
            both = copy_wavefronts(name, to, fro, reads[active], self.arch)
            for lanes, taken, least in zip(reads[active], *both, strict=True):
                made.lanes[name, at].append((lanes.tobytes(), int(taken), int(least)))
            whole(self, at, nbytes, where, source, reads, on)

        def box(self: Trace, at: int, many: int, nbytes: int) -> None:
            made.boxes[at].add(nbytes)
            boxes(self, at, many, nbytes)

        patch.setattr(Trace, "_copy", copy)
        patch.setattr(Trace, "note_boxes", box)
        yield made


def predicted_copies(found: Any) -> tuple[Moved, set[bytes], Counter[str]]:
    """(cp.async, wavefronts and the fewest of its warps) and (TMA, sectors of a box) of each access of an X-ray, none
    for a copy that its first trip does not make; lanes that are active together in a warp's cp.async; and how many of
    each name have words, or take more passes than the fewest, from places that come from memory: the X-ray says so, and
    takes them for those of one page; those of several have others."""
    moved: Moved = Counter()
    lanes: set[bytes] = set()
    gathers: Counter[str] = Counter()
    for edge in found.edges:
        for access in edge.accesses:
            if edge.kind == "tma":
                moved["TMA", frozenset([edge.sectors / len(edge.accesses)])] += 1
            elif edge.kind == "copy":
                active = access.active.any(axis=1)
                taken, least = (part[0, active] for part in passes_of([access], found.target))
                moved[access.instruction, frozenset(zip(taken.tolist(), least.tolist(), strict=True))] += 1
                if "source data" in access.notes and ((taken > least).any() or ".ca." in access.instruction):
                    assert GATHERS in edge.why
                    gathers[access.instruction] += 1
                lanes |= {row.tobytes() for row in access.active[active]}
    return moved, lanes, gathers


def counted_copies(made: Copies, lanes: set[bytes]) -> Moved:
    """The same of each instruction of a run: of cp.async where just these lanes are active."""
    moved: Moved = Counter()
    for (name, _), rows in made.lanes.items():
        moved[name, frozenset((taken, least) for row, taken, least in rows if row in lanes)] += 1
    for sizes in made.boxes.values():
        moved["TMA", frozenset(nbytes / 32 for nbytes in sizes)] += 1
    return moved


def agree(found: Any, made: Copies, run: Any) -> None:
    """Asserts that copies of an X-ray and of a run are the same. Not compared: those that the X-ray's first trip does
    not make, and those that no warp of the run makes with the same lanes, as of a loop that always has fewer trips than
    stages.
    """
    moved, lanes, gathers = predicted_copies(found)
    ran = counted_copies(made, lanes)
    idle = sum(many for (_, passes), many in moved.items() if not passes)
    known = Counter({key: many for key, many in moved.items() if key[1]})
    unmade = Counter(name for name, _ in copies_of(run)) - Counter(name for name, _ in made.lanes)
    unmade += _by_name(Counter({key: many for key, many in ran.items() if not key[1]}))
    missing, left = _by_name(known - ran), _by_name(ran - known)
    assert not missing - unmade - gathers
    assert (left - missing).total() <= idle


def copies_of(run: Any) -> list[tuple[str, int]]:
    """The names and places of the cp.async of a run's code."""
    ops = [(at, facts.instruction.op, facts.instruction.operands) for at, facts in enumerate(run.instructions)]
    return [(f"cp.async.{op[2]}.{int(operands[2], 0)}", at) for at, op, operands in ops
            if op[:2] == ("cp", "async") and op[2] in ("ca", "cg")]


def _by_name(moved: Moved) -> Counter[str]:
    names: Counter[str] = Counter()
    for (name, _), many in moved.items():
        names[name] += many
    return names
