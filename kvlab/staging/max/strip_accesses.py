"""Accesses of the warps to the strip of a streaming buffer, stated to the record of hazards."""

from __future__ import annotations

import functools

from kvlab.staging.max import streaming_addresses as addresses
from kvlab.staging.record.footprint import Footprint
from kvlab.staging.record.hazards import Hazards

from .params import KVBufferParams


class StripAccesses:
    """The copies and reads of a strip at byte ``address``, with the bytes that each warp touches.

    >>> from kvlab.memory import Memory
    >>> params = KVBufferParams("bf16", (16, 16, 32), None, BN=128, WN=32, BK=32, num_threads=256, depth=64,
    ...                         kv_num_heads=1, transpose=True)
    >>> strip = StripAccesses(Hazards(Memory(8192), warps=4, arch="gfx950"), params, address=0)
    >>> strip.copy()
    >>> strip.read()
    Traceback (most recent call last):
        ...
    kvlab.staging.Hazard: memory, bytes [0, 2048): k read by warp 0, stage 0, of what k copy by warp 0, \
stage 0, still brings; missing: s_waitcnt vmcnt in warp 0
    """

    def __init__(self, hazards: Hazards, params: KVBufferParams, address: int) -> None:
        self.hazards, self.params, self.address = hazards, params, address

    def copy(self) -> None:
        """DRAM -> strip: DMA that is in flight, or stores of what went through registers."""
        p = self.params
        if addresses.by_dma(p):
            issued = addresses.streaming_dma_plan(p).by_warp(1, p.num_warps)
            self.hazards.copy_async(self._written, f"{p.role} copy", 0, instructions=issued)
        else:
            self.hazards.write(self._written, f"{p.role} copy", 0)

    def read(self) -> None:
        """Strip -> registers."""
        self.hazards.read(self._read, f"{self.params.role} read", 0)

    @functools.cached_property
    def _written(self) -> Footprint:
        return self.hazards.footprint(*addresses.written_by_warp(self.params, self.address))

    @functools.cached_property
    def _read(self) -> Footprint:
        plan, size = addresses.read_plan(self.params), self.params.dtype.itemsize
        return self.hazards.footprint(self.address + plan.by_instruction() * size, plan.width * size)
