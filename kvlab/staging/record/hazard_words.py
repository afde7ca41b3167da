"""A hazard in words: the two accesses, their warps, the bytes, and the wait or barrier that is missing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Side:
    """One of the two accesses: what it was, such as ``"k copy"``, of which warp, into or out of which stage; where the
    warps are specialised, of which partition.

    >>> print(Side("k copy", warp=2, stage=0), Side("k wgmma", 5, 1, "consumer 1"), sep="; ")
    k copy by warp 2, stage 0; k wgmma by warp 5 of consumer 1, stage 1
    """

    what: str
    warp: int | None = None
    stage: int | None = None
    partition: str | None = None

    def __str__(self) -> str:
        warp = "" if self.warp is None else f" by warp {self.warp}"
        partition = "" if self.partition is None else f" of {self.partition}"
        return f"{self.what}{warp}{partition}" + ("" if self.stage is None else f", stage {self.stage}")


class Hazard(RuntimeError):
    """Two accesses to shared memory that nothing orders, or a misused barrier.

    kind          ``"read in flight"``, ``"read not ordered"``, ``"overwritten while read"``, ``"overwritten while
                  written"``, ``"in flight at the end"``, ``"barrier"``
    earlier, later  the two accesses, a :class:`Side` each (None where there is one only)
    byte_range    (first, past the last) byte address that both touch
    missing       the wait, barrier or fence that would order them
    too_weak      what was waited for and does not reach, in words; "" where nothing was. The message says it in place
                  of what is missing

    >>> raise Hazard("read in flight", "shared memory", Side("k copy", 2), Side("k read", 0), (0, 256),
    ...              "wait_group in warp 2, then a barrier")
    Traceback (most recent call last):
        ...
    kvlab.staging.Hazard: shared memory, bytes [0, 256): k read by warp 0, of what k copy by warp 2, \
still brings; missing: wait_group in warp 2, then a barrier
    """

    __module__ = "kvlab.staging"  # where users find it

    _WORDS = {
        "read in flight": "{later}, of what {earlier}, still brings",
        "read not ordered": "{later}, may come before {earlier}",
        "overwritten while read": "{later}, may come before {earlier}, is done",
        "overwritten while written": "{later}, may come before {earlier}, is done",
        "in flight at the end": "{earlier}, is in flight at {later}",
    }

    def __init__(
        self, kind: str, memory: str, earlier: Side | None, later: Side | None, byte_range: tuple[int, int] | None,
        missing: str, too_weak: str = "",
    ) -> None:
        self.kind, self.earlier, self.later, self.byte_range = kind, earlier, later, byte_range
        self.missing, self.too_weak = missing, too_weak
        where = memory if byte_range is None else f"{memory}, bytes [{byte_range[0]}, {byte_range[1]})"
        words = self._WORDS.get(kind, "{later}").format(earlier=earlier, later=later)
        super().__init__(f"{where}: {words}; {too_weak or f'missing: {missing}'}")
