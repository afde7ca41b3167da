"""Passes of each instruction that reads or writes shared memory: those that an X-ray predicts and those that the
machine of compiled code counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

MATRICES = ("ldmatrix", "stmatrix")
Passes = Counter[tuple[str, float, float]]


def predicted(found: Any) -> Passes:
    """(instruction, wavefronts, the fewest) a warp, of each access of an X-ray."""
    passes: Passes = Counter()
    for edge in found.edges:
        if edge.kind in ("read", "write", "scratch"):
            for access in edge.accesses:
                warps = edge.warps or len(access.addresses)
                taken, least = access.passes(found.target)
                passes[access.instruction.split(".")[0], taken / warps, least / warps] += 1
    return passes


def counted(ran: Any) -> Passes:
    """The same of each instruction of a run."""
    passes: Passes = Counter()
    for facts in ran.instructions:
        verb, *words = facts.instruction.op
        shared = verb in MATRICES or (verb in ("ld", "st") and any(word.startswith("shared") for word in words))
        if shared and facts.executed:
            passes[verb, facts.wavefronts / facts.executed, facts.ideal / facts.executed] += 1
    return passes
