"""Who shares counters of arrivals: launches that cannot run side by side, nobody else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvlab.triton_support import arrivals as room

CPU = torch.device("cpu")


class Streams:
    """A GPU whose current stream, and whether it captures, the test says."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.stream, self.captures = 1, False
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=self.stream))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)
        patch.setattr(room, "OF_STREAMS", {})
        patch.setattr(room, "LEFT", {})
        patch.setattr(room, "CHUNK", 64)

    def counters(self, count: int, *, stream: int = 1, captures: bool = False) -> Any:
        self.stream, self.captures = stream, captures
        return room.arrivals(count, CPU)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_launches_on_a_stream_share_counters(streams: Streams) -> None:
    first, again, other = (streams.counters(8, stream=n) for n in (1, 1, 2))
    assert first.data_ptr() == again.data_ptr() != other.data_ptr()
    large = streams.counters(5000)
    assert len(large) >= 5000
    assert streams.counters(8).data_ptr() == large.data_ptr()
    assert not any(x.any() for x in (first, other, large))


def test_captured_launches_have_their_own(streams: Streams) -> None:
    eager = streams.counters(8)
    taken = [streams.counters(20, captures=True) for _ in range(2)]
    streams.counters(8)  # sets a new chunk apart
    taken += [streams.counters(20, captures=True) for _ in range(3)]
    places = {x.data_ptr() + 4 * n for x in taken for n in range(20)}
    assert len(places) == 5 * 20
    assert places.isdisjoint(eager.data_ptr() + 4 * n for n in range(len(eager)))
    kept = {x.untyped_storage().data_ptr() for x in room.LEFT[0]}
    assert {x.untyped_storage().data_ptr() for x in taken} <= kept  # memory that a graph writes is not given back


def test_a_capture_takes_what_was_set_apart(streams: Streams) -> None:
    """Memory that is made while a stream captures is the graph's, and nothing would make it 0 before each replay."""
    assert streams.counters(8, captures=True) is None
    streams.counters(8)
    assert streams.counters(65, captures=True) is None
    assert len(streams.counters(64, captures=True)) == 64
    assert streams.counters(1, captures=True) is None
