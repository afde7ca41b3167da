"""Which machine a tile is worked on: the CTA model for an architecture and a storage dtype."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kvlab.memory import Memory

from .fma_cta import FmaCTA, FmaShape
from .fragments import Fragments
from .iterator import KVTile
from .mfma_cta import MfmaCTA, MfmaShape
from .mma_sync_cta import MmaSyncCTA, MmaSyncShape
from .traffic import Traffic

__all__ = ["DECODE_ARCHS", "DecodeCTA", "decode_cta"]

Array = np.ndarray[Any, Any]

DECODE_ARCHS = ("sm_80", "sm_90", "gfx950")


class Tile(Protocol):
    """What stands for a tile: it can be put back together, ``[programs, rows, cols]``."""

    def tile(self) -> Array: ...


class DecodeCTA(Protocol):
    """What the decode emulator asks of a machine, for all programs of a launch at once.

    ``active`` ``[programs]`` tells which programs still have keys; only their traffic counts. A program past its range
    gets a tile without valid rows, which changes neither its row state nor its output.
    """

    def load_q(self, dram: Memory, offset: Array, valid: Array) -> Any: ...
    def load_k(self, tile: KVTile, active: Array) -> Any: ...
    def scores(self, q: Any, k: Any, active: Array) -> Fragments: ...
    def row_max(self, s: Fragments) -> Array: ...
    def row_sum(self, p: Fragments) -> Array: ...
    def load_v(self, tile: KVTile, active: Array) -> Any: ...
    def zeros(self) -> Fragments: ...
    def accumulate(self, p: Fragments, v: Any, o: Fragments, active: Array) -> Fragments: ...


def decode_cta(
    arch: str, BM: int, BN: int, D: int, BD: int, dtype: np.dtype[Any], programs: int, traffic: Traffic
) -> DecodeCTA:
    """The CTA model of ``arch`` for tiles of BM query rows, BN keys and D columns (padded to BD).

    gfx950: MAX's streaming decode. sm_80, sm_90: what our Triton kernel compiles to; float32 without tensor cores.
    """
    if arch == "gfx950":
        return MfmaCTA(MfmaShape(BM, BN, D, dtype), programs, traffic)
    if arch in ("sm_80", "sm_90"):
        if dtype.itemsize == 4:
            return FmaCTA(FmaShape(BM, BN, D, BD, arch), programs, traffic)
        return MmaSyncCTA(MmaSyncShape(BM, BN, D, BD, dtype, arch), programs, traffic)
    raise ValueError(f"arch {arch!r} is not one of {', '.join(DECODE_ARCHS)}")
