"""An mbarrier of a CTA whose hazards are recorded: who arrives, what arrives with it, who may go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.hardware import BarrierDeadlock, SharedMemBarrier

from .hazard_words import Hazard, Side

if TYPE_CHECKING:
    from .hazards import Hazards


class AsyncBarrier:
    """Made by :meth:`~kvlab.staging.Hazards.mbarrier`. The arithmetic is that of
    :class:`~kvlab.hardware.SharedMemBarrier`; besides, who waits for a phase knows from then on what the arriving warps
    knew, and that the bulk copies of the phase have landed. A parity does not tell how many phases have gone by: who
    waits knows of the first that lets it pass, whatever has completed since.

    >>> from kvlab.memory import Memory
    >>> from kvlab.staging import Hazards
    >>> hazards = Hazards(Memory(1024), warps=2)
    >>> full, box = hazards.mbarrier("full[0]"), hazards.region(0, 1024, warps=(1,))
    >>> full.expect_bytes(1024, warp=1)
    >>> hazards.copy_bulk(box, full, 1024, "k copy", stage=0)
    >>> full.wait(0, warps=(0,))
    >>> hazards.read(hazards.region(0, 1024, warps=(0,)), "k read", stage=0)
    >>> full.wait(1, warps=(0,))
    Traceback (most recent call last):
        ...
    kvlab.hardware.BarrierDeadlock: full[0]: warps [0] wait for phase 1 for ever: 1 of 1 arrivals \
pending; complete is phase 0
    """

    def __init__(self, hazards: Hazards, name: str, agent: int, arrivals: int = 1) -> None:
        self.hazards, self.name, self.agent = hazards, name, agent
        self.state = SharedMemBarrier(arrivals)
        self._coming: np.ndarray[Any, Any] = np.zeros(agent + 1, np.int64)
        self._complete = [self._coming]  # what is known when so many phases have completed

    @property
    def phases(self) -> int:
        """Phases that have completed."""
        return self.state.phases

    def grow(self, agents: int) -> None:
        """Make room for the clocks of ``agents`` agents."""
        self._coming = np.pad(self._coming, (0, agents - len(self._coming)))

    def arrive(self, warps: tuple[int, ...], each: int = 1) -> None:
        """``each`` arrivals of every one of ``warps``."""
        self.hazards._expect_running(warps)
        self._join(warps)
        self.hazards._event("arrive", self.name, None, warps)
        self._change(lambda: self.state.arrive(each * len(warps)), f"arrival of warps {list(warps)}")

    def arrive_copied(self, warps: tuple[int, ...]) -> None:
        """An arrival of every lane of ``warps`` once its copies so far have landed (cp.async.mbarrier.arrive.noinc)."""
        h, chosen = self.hazards, list(warps)
        h._expect_running(warps)
        h._issued[chosen] += 1
        copies = 2 * h.warps + np.array(chosen)
        self._coming[copies] = np.maximum(self._coming[copies], h._issued[chosen])
        h._event("arrive", self.name, None, warps)
        self._change(lambda: self.state.arrive(32 * len(warps)), f"arrival of the copies of warps {chosen}")

    def expect_bytes(self, nbytes: int, warp: int) -> None:
        """One arrival of a warp that announces ``nbytes`` bytes."""
        self.hazards._expect_running((warp,))
        self._join((warp,))
        self.hazards._event("expect", self.name, None, (warp,), nbytes)
        self._change(lambda: self.state.expect_bytes(nbytes), f"expect_bytes({nbytes}) by warp {warp}")

    def complete_tx(self, nbytes: int) -> None:
        """A bulk copy has brought ``nbytes``."""
        self._change(lambda: self.state.complete_tx(nbytes), f"{nbytes} bytes of a copy")

    def try_wait(self, phase: int) -> bool:
        """Tells whether a wait for the phase of parity ``phase`` would end at once."""
        return self.state.try_wait(phase)

    def why(self, phase: int, warps: tuple[int, ...]) -> str:
        """Reason of ``warps`` that wait for that phase."""
        done = f"complete is phase {(self.phases - 1) % 2}" if self.phases else "none has completed"
        return f"{self.name}: warps {list(warps)} wait for phase {phase} for ever: {self.state.pending}; {done}"

    def wait(self, phase: int, warps: tuple[int, ...]) -> None:
        """``warps`` wait until the phase of parity ``phase`` has completed; BarrierDeadlock if nothing more comes.

        As on the hardware a parity of the phase before passes at once."""
        h = self.hazards
        h._expect_running(warps)
        if not self.try_wait(phase):
            raise BarrierDeadlock(self.why(phase, warps))
        for seen in set(h.known[list(warps), self.agent].tolist()):
            chosen = [warp for warp in warps if h.known[warp, self.agent] == seen]
            told = self._complete[seen + (seen % 2 == phase)]
            h.known[chosen, : len(told)] = np.maximum(h.known[chosen, : len(told)], told)
        h._event("wait", f"{self.name}, phase {phase}", None, warps)
        h._flights.land(h.known)

    def _join(self, warps: tuple[int, ...]) -> None:
        """Joins the knowledge of the arriving warps to the running phase."""
        chosen = list(warps)
        self._coming = np.maximum(self._coming, self.hazards.known[chosen].max(axis=0))
        self.hazards._tick(chosen)

    def _change(self, change: Any, what: str) -> None:
        before = self.phases
        try:
            change()
        except ValueError as reason:
            raise Hazard(
                "barrier", self.hazards.name, None, Side(f"{self.name}: {what}: {reason}"), None,
                "as many arrivals and bytes as the phase expects",
            ) from None
        if self.phases > before:
            told = self._coming.copy()
            told[self.agent] = self.phases
            self._complete.append(told)
