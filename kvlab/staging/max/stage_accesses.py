"""Accesses of the warps to the stages of a KVBuffer, stated to the record of hazards."""

from __future__ import annotations

import numpy as np

from kvlab.staging.max import kv_buffer_addresses as addresses
from kvlab.staging.record.footprint import Footprint
from kvlab.staging.record.hazards import Hazards

from .kv_buffer_addresses import Window
from .params import WARP_SIZE, KVBufferParams


class StageAccesses:
    """The copies and reads of stages, with the bytes that each warp touches; ``first`` is the byte address of stage 0,
    ``number`` what messages call it.

    >>> from kvlab.layout import Swizzle
    >>> from kvlab.memory import Memory
    >>> params = KVBufferParams("bf16", (32, 32, 16), Swizzle(3, 0, 4, "vector"), BN=64, WN=64, BK=32, num_threads=256,
    ...                         depth=64, kv_num_heads=1, transpose=True)
    >>> whole = Window(params, (0,) * 4, (0,) * 4)
    >>> stages = StageAccesses(Hazards(Memory(16384), warps=4, arch="gfx950"), params, whole, first=0)
    >>> stages.copy(1)
    >>> stages.hazards.wait_group(0)
    >>> stages.read(1, None)
    Traceback (most recent call last):
        ...
    kvlab.staging.Hazard: memory, bytes [8192, 10240): k read by warp 1, stage 1, of what k copy by \
warp 0, stage 1, still brings; missing: a barrier after s_waitcnt vmcnt in warp 0
    """

    def __init__(self, hazards: Hazards, params: KVBufferParams, window: Window, first: int, number: int = 0) -> None:
        self.hazards, self.params, self.window, self.first, self.number = hazards, params, window, first, number
        self._footprints: dict[tuple[str, int, int | None], Footprint] = {}

    def copy(self, stage: int) -> None:
        """DRAM -> stage: DMA, in flight until each warp has waited."""
        p = self.params
        issued = addresses.kv_buffer_dma_plan(p).by_warp(1, p.num_warps)
        self.hazards.copy_async(self._of("copy", stage), f"{p.role} copy", stage + self.number, instructions=issued)

    def read(self, stage: int, strip: int | None) -> None:
        """Stage -> registers: one strip, or all."""
        self.hazards.read(self._of("read", stage, strip), f"{self.params.role} read", stage + self.number)

    def _of(self, what: str, stage: int, strip: int | None = None) -> Footprint:
        key = what, stage, strip
        if key not in self._footprints:
            first = self.first + stage * self.params.smem_stage_size * self.params.dtype.itemsize
            self._footprints[key] = self._copied(first) if what == "copy" else self._read(first, strip)
        return self._footprints[key]

    def _copied(self, first: int) -> Footprint:
        p, dma = self.params, addresses.kv_buffer_dma_plan(self.params)
        lanes = dma.offset[:, None] + np.arange(WARP_SIZE) * p.simd_width
        return self.hazards.footprint_inside(first + lanes * p.dtype.itemsize, 16, dma.wave[:, None])

    def _read(self, first: int, strip: int | None) -> Footprint:
        p = self.params
        strips = range(addresses.strips(p)) if strip is None else (strip,)
        parts = [part for one in strips for part in addresses.reads(p, one, self.window.shift)]
        offset = np.concatenate([part.offset[:, None] + part.base[:, None] for part in parts])
        nbytes = int(parts[0].instruction.rpartition("_b")[2]) // 8  # [instructions, warps, lanes]
        return self.hazards.footprint_inside(first + offset * p.dtype.itemsize, nbytes, np.arange(p.num_warps)[:, None])
