"""mbarriers and the state of a pipeline, as arithmetic: arrivals, bytes, phases."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.common import checks

_MOST = (1 << 20) - 1  # arrivals, and bytes, that one phase can count (PTX ISA, mbarrier)


class BarrierDeadlock(RuntimeError):
    """A wait that would never end: nothing more arrives unless the waiting program lets it.

    >>> issubclass(BarrierDeadlock, RuntimeError)
    True
    """

    __module__ = "kvlab.hardware"  # where users find it


class SharedMemBarrier:
    """An mbarrier in shared memory. A phase completes when no arrival and no byte is pending; then the next begins.

    >>> barrier = SharedMemBarrier()
    >>> barrier.expect_bytes(2048)
    >>> barrier.try_wait(0)
    False
    >>> barrier.complete_tx(2048)
    >>> barrier.wait(0)
    >>> barrier
    SharedMemBarrier(phase 1, pending 1 of 1 arrivals, 0 bytes)
    >>> barrier.wait(1)
    Traceback (most recent call last):
        ...
    kvlab.hardware.BarrierDeadlock: wait(1): phase 1 has not completed: 1 of 1 arrivals pending
    """

    def __init__(self, arrivals: int = 1) -> None:
        self.init(arrivals)

    def init(self, arrivals: int = 1) -> None:
        """Every phase needs ``arrivals`` arrivals, 1 to 2^20 - 1."""
        if not 1 <= checks.count("arrivals", arrivals) <= _MOST:
            raise ValueError(f"arrivals is {arrivals!r}: must be 1 to {_MOST}")
        self.arrivals = self.pending_arrivals = arrivals
        self.pending_tx, self.phases = 0, 0

    @property
    def phase(self) -> int:
        """Parity of the phase that is running."""
        return self.phases % 2

    def arrive(self, count: int = 1) -> None:
        """``count`` arrivals. ValueError where the phase does not expect so many."""
        if not 1 <= checks.count("count", count) <= self.pending_arrivals:
            raise ValueError(f"arrive({count}): {self.pending_arrivals} of {self.arrivals} arrivals are pending")
        self.pending_arrivals -= count
        self._settle()

    def expect_bytes(self, nbytes: int) -> None:
        """One arrival that also announces ``nbytes`` bytes (``mbarrier.arrive.expect_tx``)."""
        if not 0 <= checks.count("nbytes", nbytes, -_MOST) or self.pending_tx + nbytes > _MOST:
            raise ValueError(f"expect_bytes({nbytes}): a phase counts 0 to {_MOST} bytes, pending: {self.pending_tx}")
        self.pending_tx += nbytes
        try:
            self.arrive()
        except ValueError:
            self.pending_tx -= nbytes
            raise

    def complete_tx(self, nbytes: int) -> None:
        """A copy brought ``nbytes``: for TMA the full boxes, parts outside the tensor included.

        Bytes may come before they are announced, while arrivals are pending. ValueError where more come than were
        announced and no arrival can announce them any more."""
        if nbytes < 0 or (not self.pending_arrivals and nbytes > self.pending_tx):
            raise ValueError(f"complete_tx({nbytes}): {self.pending_tx} bytes are pending in phase {self.phase}")
        self.pending_tx -= nbytes
        self._settle()

    def try_wait(self, phase: int) -> bool:
        """Tells whether the phase of parity ``phase`` has completed: whether the other one is running."""
        if phase not in (0, 1):
            raise ValueError(f"phase is {phase!r}: must be a parity, 0 or 1")
        return self.phase != phase

    def wait(self, phase: int) -> None:
        """Return once the phase of parity ``phase`` has completed; :class:`BarrierDeadlock` where it has not, since
        copies here are done when they are issued."""
        if not self.try_wait(phase):
            raise BarrierDeadlock(f"wait({phase}): phase {phase} has not completed: {self.pending}")

    @property
    def pending(self) -> str:
        """Needs of the running phase, in words."""
        missing = [f"{self.pending_arrivals} of {self.arrivals} arrivals"] * bool(self.pending_arrivals)
        missing += [f"{self.pending_tx} bytes"] * bool(self.pending_tx)
        return f"{' and '.join(missing)} pending"

    def _settle(self) -> None:
        if self.pending_arrivals:
            return
        if self.pending_tx < 0:
            raise ValueError(f"{-self.pending_tx} bytes came that phase {self.phase} never announced")
        if not self.pending_tx:
            self.phases += 1
            self.pending_arrivals = self.arrivals

    def __repr__(self) -> str:
        return (
            f"SharedMemBarrier(phase {self.phase}, pending {self.pending_arrivals} of {self.arrivals} arrivals, "
            f"{self.pending_tx} bytes)"
        )


@dataclass
class PipelineState:
    """Next stage of a ring of ``num_stages`` buffers, and the parity to wait for.

    >>> state = PipelineState(2)
    >>> for _ in range(3):
    ...     print(state.index, state.phase, state.count)
    ...     state.step()
    0 0 0
    1 0 1
    0 1 2
    """

    num_stages: int
    index: int = 0
    phase: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        if checks.count("num_stages", self.num_stages, -1) < 0:
            raise ValueError(f"num_stages is {self.num_stages}: must not be negative")

    def step(self) -> None:
        """The next stage; past the last one the first again, with the other parity. Without stages: nothing."""
        if not self.num_stages:
            return
        self.count += 1
        self.index += 1
        if self.index == self.num_stages:
            self.index, self.phase = 0, self.phase ^ 1
