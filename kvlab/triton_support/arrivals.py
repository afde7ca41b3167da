"""Counters of programs that have arrived: 0 before and after every launch, so that no launch sets them."""

from __future__ import annotations

import torch

CHUNK = 1 << 18
OF_STREAMS: dict[tuple[int, int], torch.Tensor] = {}
"""The counters of launches on each stream of each device, which come one after the other."""
LEFT: dict[int, list[torch.Tensor]] = {}
"""A device's chunks, less what captured launches have. They stay for ever, as graphs do not say when they end."""


def arrivals(count: int, device: torch.device) -> torch.Tensor | None:
    """At least ``count`` counters of int32 at 16 bytes, all 0, for a launch on the current stream that leaves 0 behind.

    A captured launch may be replayed beside any other, so that it has its own for good, from a chunk that launches that
    are not captured set apart. None where nothing of it is left.
    """
    count = -(-count // 4) * 4
    index = torch.cuda.current_device() if device.index is None else device.index
    left = LEFT.setdefault(index, [])
    if torch.cuda.is_current_stream_capturing():
        if not left or len(left[-1]) < count:
            return None
        own, left[-1] = left[-1][:count], left[-1][count:]
        return own
    if not left or len(left[-1]) < CHUNK // 2:
        left.append(torch.zeros(CHUNK, dtype=torch.int32, device=device))
    key = index, torch.cuda.current_stream(device).cuda_stream
    if key not in OF_STREAMS or len(OF_STREAMS[key]) < count:
        OF_STREAMS[key] = torch.zeros(max(1024, count), dtype=torch.int32, device=device)
    return OF_STREAMS[key]
