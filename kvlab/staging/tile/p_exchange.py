"""P between the two products: from the registers of the scores through shared memory to those of the operand."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.memory import Memory
from kvlab.staging.record.hazards import Hazards
from kvlab.staging.record.traffic import Traffic

from .shared_access import SharedAccess

Array = np.ndarray[Any, Any]


class PExchange:
    """Exchange of P between the warps of a CTA. A machine is told by its two accesses.

    accesses  how the lanes of each warp write P and read it: bytes of ``smem``, counted from ``first``
    dtype     of P there
    hazards   checks the accesses; traffic counts them; neither where None

    >>> lane = np.arange(64)[:, None]
    >>> accesses = tuple(SharedAccess.of_elements(f"ds_{kind}_b", at, 2, "gfx950") for kind, at in
    ...             (("write", 2 * lane), ("read", 2 * (63 - lane))))
    >>> smem = Memory(128, programs=1)
    >>> exchange = PExchange(smem, accesses, np.dtype(np.float16), hazards=Hazards(smem, 1, arch="gfx950"))
    >>> exchange(np.arange(64, dtype=np.float32).reshape(1, 64, 1), np.array([True]))[0, :3, 0].tolist()
    [63.0, 62.0, 61.0]
    """

    def __init__(
        self, smem: Memory, accesses: tuple[SharedAccess, SharedAccess], dtype: np.dtype[Any], *, first: int = 0,
        hazards: Hazards | None = None, traffic: Traffic | None = None,
    ) -> None:
        self.smem, self.first, self.dtype, self.hazards, self.traffic = smem, first, dtype, hazards, traffic
        self._accesses = accesses
        self._touched = None if hazards is None else [access.footprint(hazards, first) for access in accesses]

    def __call__(self, p: Array, active: Array) -> Array:
        """The operand ``[programs, threads, elements]`` of P ``[programs, threads, ...]``, rounded to ``dtype``; active
        ``[programs]``: whose traffic is counted."""
        self.write(p, active)
        if self.hazards is not None:
            self.hazards.barrier()
        return self.read(active)

    def write(self, p: Array, active: Array | None = None) -> None:
        """The first half; a barrier has to follow."""
        if self.hazards is not None and self._touched is not None:
            self.hazards.write(self._touched[0], "p write")
        self._accesses[0].store(self.smem, p.astype(self.dtype, copy=False), self.first)
        self._count("write", len(p), active)

    def read(self, active: Array | None = None) -> Array:
        """The second half."""
        if self.hazards is not None and self._touched is not None:
            self.hazards.read(self._touched[1], "p read")
        operand = self._accesses[1].load(self.smem, self.dtype, self.first)
        self._count("read", len(operand), active)
        return operand.reshape(len(operand), operand.shape[1] * operand.shape[2], -1)

    def _count(self, what: str, programs: int, active: Array | None) -> None:
        if self.traffic is not None:
            programs = programs if active is None else int(active.sum())
            self._accesses[what == "read"].count(self.traffic, f"p {what}", programs)
