"""The copies in flight that a timeline has been told of, until somebody knows that they have landed."""

from __future__ import annotations

from typing import Any

import numpy as np

from .hazard_record import NEVER
from .timeline import Timeline

Array = np.ndarray[Any, Any]


class Flights:
    """Of one record; without a timeline nothing is kept."""

    def __init__(self, timeline: Timeline | None) -> None:
        self.timeline = timeline
        self._flying: list[tuple[Array, str, int | None, tuple[int, ...], int]] = []

    def begin(
        self, agents: Array, times: Array, count: int, what: str, stage: int | None, warps: tuple[int, ...], nbytes: int
    ) -> None:
        """A copy that has landed when ``agents`` (of ``count``) are done up to ``times``."""
        if self.timeline is None:
            return
        stamp = np.full(count, NEVER)
        stamp[agents] = times
        self._flying.append((stamp, what, stage, warps, nbytes))

    def land(self, known: Array) -> None:
        """Tell of the copies that some warp knows to be complete; ``known`` ``[warps, agents]``."""
        if not self._flying or self.timeline is None:
            return
        best = known.max(axis=0)
        still = []
        for flight in self._flying:
            stamp, what, stage, warps, nbytes = flight
            if (stamp <= best[: stamp.size]).all():
                self.timeline.add("landed", what, stage, warps, nbytes)
            else:
                still.append(flight)
        self._flying = still
