"""Copies by cp.async from which no rule was made: other addresses, copies of zeros, and some launched one by one."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.hardware import COPIES

from . import chip, profiler, records
from .accesses import HARDWARE, ONE_BY_ONE, WARM, WAVEFRONTS, accesses, is_access, launch, took
from .accesses import SEEDS as SEEN
from .cuda_source import SLOTS, ZEROS

__all__ = ["ALONE", "OPS", "SEEDS", "play", "record"]

SEEDS = (2, 3)
OPS = (*COPIES, *ZEROS)
ALONE = "cp.async.ca.4"
"""Launched one by one, so that no line of another copy is on its way."""


def play(group: str) -> None:
    """The launches of "copies" or "alone", in order; what runs under the profiler."""
    if group == "copies":
        for op in OPS:
            for seed in SEEDS:
                launch(op, seed)
    else:
        for seed in SEEN:
            for slot in range(SLOTS):
                launch(ALONE, seed, slot)


def record(step: records.Steps) -> dict[str, Any]:
    """Passes of each copy as ncu counts them, and those that the unit took (``lsu``)."""
    chip.build()
    return {"together": step("together", _together), "alone": step("alone", _alone)}


def _together() -> dict[str, Any]:
    rows = iter(profiler.profile("copies", [WAVEFRONTS, *HARDWARE], *WARM, by_instruction=[ONE_BY_ONE]))
    out = {}
    for op in OPS:
        for seed in SEEDS:
            row, chosen = next(rows), accesses(op, seed)
            out[f"{op}, {seed}"] = {
                "lsu": took(row),
                "wavefronts": [count for _, count, sass in row["instructions"][ONE_BY_ONE] if is_access(sass)],
                "mask": [x.mask for x in chosen],
                "address": records.pack(np.stack([x.address for x in chosen])),
                "source": records.pack(np.stack([x.source for x in chosen])),
            }
    return out


def _alone() -> dict[str, list[int]]:
    rows = iter(profiler.profile("alone", HARDWARE, *WARM))
    return {f"{ALONE}, {seed}": [took(next(rows)) for _ in range(SLOTS)] for seed in SEEN}
