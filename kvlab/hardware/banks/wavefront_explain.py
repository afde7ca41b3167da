"""Words for :class:`~kvlab.hardware.Wavefronts`: the phases, who collides, and why."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np

from .wavefront import Collision, Wavefronts


def explain(w: Wavefronts) -> str:
    """The text of :meth:`Wavefronts.explain`."""
    lines = [w.headline() + ".", _service(w)]
    if not w.active.all():
        lines.append(f"Inactive: {_lanes([i for i, on in enumerate(w.active.tolist()) if not on])}.")
    crowded = [number for number, phase in enumerate(w.phases) if phase.passes > 1]
    for _, alike in groupby(crowded, key=lambda number: _pattern(w, number)):
        first, *others = alike
        lines.append(_phase(w, first))
        if others:
            phases = f"Phase{'s' if len(others) > 1 else ''} {listed(others)}"
            lines.append(f"{phases} likewise, {_where(w, first, others)}.")
    if crowded:
        verb = "takes" if w.op.store else "delivers"
        lines.append(
            f"Addresses that differ by a multiple of {w.bank_count * w.arch.bank_bytes} bytes lie in the same bank; "
            f"a bank {verb} one word a pass."
        )
    elif w.wavefronts:
        lines.append("No bank has two different words to move in one phase: there is no conflict.")
    if _shares(w):
        lines.append("Lanes of a phase with the same word share its pass.")
    if w.provisional:
        small = f" for {w.op.nbytes} byte{'s' * (w.op.nbytes > 1)} a lane" if w.op.nbytes < w.arch.bank_bytes else ""
        groups = w.op.lane_groups(w.arch)
        reason = f"no {w.arch.name} has confirmed this rule{small}" if groups is None else groups.source
        lines.append(f"Provisional: {reason}.")
    return "\n".join(lines)


def _where(w: Wavefronts, first: int, others: Sequence[int]) -> str:
    """In which banks the phases ``others`` collide: those of phase ``first``, or their own."""
    phases: dict[str, list[int]] = {}
    for number in others:
        phases.setdefault(listed([c.bank for c in _worst(w, number)]), []).append(number)
    if [*phases] == [listed([c.bank for c in _worst(w, first)])]:
        return "in the same banks"
    if len(phases) == 1 or len(phases) == len(others):
        return f"in banks {'; '.join(phases)}"
    return "; ".join(f"{listed(numbers)} in banks {banks}" for banks, numbers in phases.items())


def _service(w: Wavefronts) -> str:
    n = len(w.phases)
    if w.op.matrices:
        if n == 1:
            return f"One phase: the 8 rows of 16 bytes of the 8x8 matrix can fill all {w.arch.banks} banks once."
        return f"{n} phases, one for each 8x8 matrix: its 8 rows of 16 bytes can fill all {w.arch.banks} banks once."
    lanes = w.op.lanes_per_phase(w.arch)
    served = f"{lanes} lanes x {w.op.unit_bytes(w.arch)} bytes can fill {_banks(w)} once"
    if w.op.nbytes < w.arch.bank_bytes:
        served = f"a lane asks for the {w.arch.bank_bytes}-byte word that holds its bytes"
    if w.merged:
        return f"{_phases(n)} of {2 * lanes} lanes: {served}; equal addresses of neighbouring lanes merge two phases."
    return f"{_phases(n)} of {lanes} lanes{_order(w)}: {served}."


def _banks(w: Wavefronts) -> str:
    return f"all {w.bank_count} banks" if w.bank_count == w.arch.banks else f"{w.bank_count} banks, of {w.arch.banks},"


def _order(w: Wavefronts) -> str:
    """Which lanes, where those of a phase are no neighbours; what is left out lies 32 lanes further."""
    phases = w.op.phases(w.arch)
    if (np.diff(phases, axis=1) == 1).all():
        return ""
    half = "; ".join(listed(lanes) for lanes in phases[: len(phases) // 2].tolist())
    return f", not in lane order ({half}; the same {w.arch.warp_size // 2} lanes on)"


def _phases(n: int) -> str:
    return "One phase" if n == 1 else f"{n} phases"


def _worst(w: Wavefronts, number: int) -> list[Collision]:
    """The collisions that decide the passes of phase ``number``."""
    return [c for c in w.colliding if c.phase == number and len(c.words) == w.phases[number].passes]


def _phase(w: Wavefronts, number: int) -> str:
    phase, worst = w.phases[number], _worst(w, number)
    banks = f"banks {listed([c.bank for c in worst])} each have" if len(worst) > 1 else f"bank {worst[0].bank} has"
    pairs = zip(worst[0].words, worst[0].lanes, strict=True)
    wanted = [f"{word * w.arch.bank_bytes} ({_lanes(lanes)})" for word, lanes in pairs]
    if len(wanted) > 8:
        wanted = [*wanted[:7], f"... {len(wanted) - 7} more"]
    return (
        f"Phase {number} ({_lanes(phase.lanes)}) takes {phase.passes} passes: {banks} to "
        f"{'take' if w.op.store else 'deliver'} {phase.passes} different words. "
        f"Bank {worst[0].bank}: bytes {', '.join(wanted)}."
    )


def _pattern(w: Wavefronts, number: int) -> object:
    """What two phases share when one sentence serves both: passes, lanes by their places in the phase, and banks
    relative to the first one."""
    place, worst = {lane: n for n, lane in enumerate(w.phases[number].lanes)}, _worst(w, number)
    wanted = [[[place[lane] for lane in lanes] for lanes in c.lanes] for c in worst]
    return w.phases[number].passes, [c.bank - worst[0].bank for c in worst], wanted


def _shares(w: Wavefronts) -> bool:
    wanted = np.unique(np.stack([w.phase, w.addresses])[:, w.active], axis=1)
    return bool(wanted.shape[1] < w.active.sum())


def _lanes(lanes: Sequence[int]) -> str:
    return f"lane{'s' if len(lanes) > 1 else ''} {listed(lanes)}"


def listed(numbers: Sequence[int]) -> str:
    """Numbers in words: runs, and regular steps shortened.

    >>> listed([0, 1, 2, 3, 16, 17, 18, 19]), listed([0, 2, 4, 6, 8])
    ('0-3 and 16-19', '0, 2, ..., 8')
    """
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 4 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
