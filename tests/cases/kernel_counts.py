"""A whole kernel's counters by role, and traces of what its emulator copies."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.truth import records
from benchmarks.truth.whole import KERNELS, opcode
from kvlab.hardware import copy_wavefronts, count_wavefronts, cp_async, sectors, tma
from kvlab.staging import Traffic
from kvlab.staging.nvidia.wgmma_plan import PanelTile
from kvlab.staging.tile import tile_copies

RECORD = records.read("kernels")
SECTOR, LANE = 32, np.arange(32)
Counts = dict[str, tuple[int, int]]  # role -> executed by warps, wavefronts


class CopyTrace:
    """Stands in for cp_async: makes the copies, and keeps of every warp's copy the passes, the sectors, the place."""

    def __init__(self) -> None:
        self.passes: list[np.ndarray] = []  # of copies that bring something
        self.places: list[np.ndarray] = []  # where a copy goes, the lowest address
        self.memories: list[int] = []  # the bytes of the memory to which it goes
        self.sectors, self.empty = 0, 0

    def __call__(self, to: Any, address: Any, dram: Any, source: Any, nbytes: int, valid: Any) -> None:
        cp_async(to, address, dram, source, nbytes, valid)
        where, fro, exists = (x.reshape(-1, 32) for x in np.broadcast_arrays(address, source, valid))
        brings = exists.any(axis=1)
        assert (exists[brings]).all()  # these problems have no partial tile
        passes, _ = copy_wavefronts(f"cp.async.cg.{nbytes}", where[brings], fro[brings])
        self.passes.append(passes)
        self.places.append(where[brings].min(axis=1))
        self.memories.append(to.nbytes)
        self.sectors += int(sectors(fro[brings], nbytes).sum())
        self.empty += int((~brings).sum())

    def of(self, low: int, high: int) -> tuple[int, int]:
        """Copies to addresses from ``low`` to below ``high``: how many warps made, and their passes."""
        places, passes = np.concatenate(self.places), np.concatenate(self.passes)
        chosen = (low <= places) & (places < high)
        return int(chosen.sum()), int(passes[chosen].sum())

    def into(self, nbytes: int) -> tuple[int, int]:
        """Copies to the memory of so many bytes: how many warps made, and their passes."""
        chosen = [passes for passes, size in zip(self.passes, self.memories, strict=True) if size == nbytes]
        return sum(map(len, chosen)), int(sum(passes.sum() for passes in chosen))


class TmaTrace:
    """Stands in for ``kvlab.hardware.tma``: makes the copies, counts the boxes."""

    def __init__(self) -> None:
        self.loaded, self.stored = 0, 0

    def load(self, box: Any, at: Any, smem: Any, address: Any) -> None:
        tma.load(box, at, smem, address)
        self.loaded += np.size(address)

    def store(self, box: Any, at: Any, smem: Any, address: Any) -> None:
        tma.store(box, at, smem, address)
        self.stored += np.size(address)


def emulated(name: str, module: Any, copy: str, trace: Any) -> Traffic:
    """What the emulator of a kernel of the record counts; ``trace`` stands in for ``module.copy``, and for that of
    ``tile_copies``."""
    traffic = Traffic()
    with pytest.MonkeyPatch.context() as patch:
        for each in (module, tile_copies):
            patch.setattr(each, copy, trace)
        KERNELS[name].emulate(traffic)
    return traffic


def of(name: str) -> dict[str, Any]:
    """The record of a kernel, which was made on the problem of :data:`KERNELS`."""
    record: dict[str, Any] = RECORD[name]
    assert record["problem"] == KERNELS[name].problem
    return record


def counted(
    record: dict[str, Any], role_of: Callable[[str, int, str], str], end: Callable[[str], str] | None = None
) -> Counts:
    """The chip's counts by role: that of an opcode, an offset in shared memory, and the SASS. ``end``: of an opcode
    that comes after the last copy and the last product in the code.
    """
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    listing = record["listing"]
    last = max((i for i, (sass, _, _) in enumerate(listing) if re.search("LDGSTS|GMMA", sass)), default=0)
    for i, (sass, executed, passes) in enumerate(listing):
        offset = int((re.search(r"\+0x([0-9a-f]+)\]", sass) or ["", "0"])[1], 16)
        op = opcode(sass) or ""
        role = end(op) if end and i > last else role_of(op, offset, sass)
        found[role] = found[role][0] + executed, found[role][1] + passes
    assert sum(passes for _, passes in found.values()) == record["counters"]["wavefronts"]
    return dict(found)


def vectors(address: np.ndarray) -> np.ndarray:
    """Addresses of a warp's lanes ``[instructions x warps, 32]``: vectors in order, one a thread."""
    return address.reshape(-1, 32)


def stmatrix(place: PanelTile) -> tuple[int, int]:
    """Instructions and passes of four warps that write 64 rows by stmatrix.x4: 16 rows and 16 columns each."""
    warp, pair = np.ogrid[:4, : place.vectors // 2]
    address = place.address(16 * warp[..., None] + LANE % 16, 2 * pair[..., None] + LANE // 16)
    passes, _, _ = count_wavefronts("stmatrix.x4", address)
    return passes.size, int(passes.sum())
