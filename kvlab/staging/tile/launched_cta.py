"""Base of every CTA model of a launch: shared memory, the record of what is in flight in it, and an end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvlab.hardware import get_arch
from kvlab.memory import AddressSpace, Memory
from kvlab.staging.record.footprint import ByteCells
from kvlab.staging.record.hazard_record import Partitions
from kvlab.staging.record.hazards import Hazards
from kvlab.staging.record.timeline import BesideTimeline
from kvlab.staging.record.traffic import Traffic


class LaunchedCTA:
    """The CTAs of one launch, side by side: ``programs`` copies of shared memory (None: one CTA).

    smem     : the shared memory.
    hazards  : what is in flight, and who waited; checks every access.
    programs : of the launch.
    unit     : bytes that no access divides; what is known of shared memory is kept by so many.
    traced   : whether its events go to the traffic's timeline. beside : it is a second model of the same threads, whose
               waits and barriers are those of the first.

    It ends with the launch (:meth:`Traffic.launch`): after the waits of :meth:`drain` nothing may be in flight.

    >>> traffic = Traffic()
    >>> with traffic.launch():
    ...     cta = LaunchedCTA(64, 2, "sm_90", None, traffic)
    ...     cta.hazards.copy_async(cta.hazards.region(0, 64, (1,)), "k copy", stage=0)
    ...     cta.hazards.commit_group()
    Traceback (most recent call last):
        ...
    kvlab.staging.Hazard: shared memory, bytes [0, 64): k copy by warp 1, stage 0, is in flight at the \
end of the CTA; missing: cp.async.wait_group in warp 1
    """

    buffer = ""
    """How K and V come to shared memory."""
    p_path = ""
    """The way of P from the first product to the second."""
    whole_rows = False
    """True where decode's rows come whole: e4m3 not as pairs in elements of 16 bits, latents with the rope columns."""
    dense_rows = False
    """True where rows of the cache must lie one after the other, as those of a matrix."""
    follows_beside = False
    """True where it fetches ahead beside others of the same threads, too, which have the other columns of K or V."""

    def __init__(
        self, nbytes: int, warps: int, arch: str, programs: int | None, traffic: Traffic, *,
        traced: bool = True, beside: bool = False, cells: ByteCells | None = None, partitions: Partitions = None,
        unit: int = 4,
    ) -> None:
        self.traffic, self.programs = traffic, 1 if programs is None else programs
        name = "shared memory" if get_arch(arch).vendor == "nvidia" else "LDS"
        self.smem = Memory(nbytes, space=AddressSpace.SHARED, name=name, programs=programs)
        timeline = traffic.timeline if traced else None
        if beside and timeline is not None:
            timeline = BesideTimeline(timeline.events)
        if cells is None:
            cells = ByteCells(nbytes, warps, unit=unit)
        self.hazards = Hazards(self.smem, warps, arch=arch, timeline=timeline, cells=cells, partitions=partitions)
        traffic.begin(self)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Waits and barriers that no other model of these threads states."""
        timeline = self.hazards.timeline
        if isinstance(timeline, BesideTimeline):
            timeline.own = True
            yield
            timeline.own = False
        else:
            yield

    @classmethod
    def accumulate_parts(cls, ctas: Sequence[Any], p: Any, values: Sequence[tuple[Any, Any, Any]], active: Any) -> Any:
        """O += P V of models of the same threads, ``ctas``, and the end of the tile: the list of O; ``values`` are
        (model, V, O), each of columns of its own."""
        return [cta.accumulate(p, v, o, active) for cta, v, o in values]

    def drain(self) -> None:
        """Waits of the kernel behind its loops: nothing, unless a machine fetches ahead."""

    def end(self) -> None:
        """The end of the CTA: :class:`Hazard` if anything is in flight, BarrierDeadlock if a warp waits."""
        self.drain()
        self.hazards.finish()
