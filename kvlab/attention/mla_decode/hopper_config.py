"""What the Hopper kernel of MLA decode can do, and with which tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kvlab.attention.features import Features
from kvlab.attention.splits import check_splits, invariant_splits
from kvlab.cache.arrays import dtype_of, element_strides

from .config import MLADecodeProblem
from .inputs import MLAInputs

__all__ = ["SUPPORTED", "Constants", "HopperConfig", "choose_hopper", "hopper_declined", "hopper_lacks"]

SUPPORTED = (
    "bf16 or fp16 with a cache of that dtype, 512 + 64 columns, no mask but the causal one, no softcap, sinks or ALiBi, "
    "scale > 0, pages of 16, 32 or multiples of 64 tokens, arrays that start at 16 bytes and whose strides are multiples "
    "of 16 bytes"
)
MEASURED = False
"""Whether a GPU has shown that the kernel is right and faster than the portable one; "auto" takes it only then."""

MAX_SPLITS = 64


class Constants(NamedTuple):
    """Compile-time constants of the Hopper kernel: a tile of BM = TB tokens x HB heads, NB stages of BN keys of DV
    latent and DR rope columns, in boxes of BOX keys of pages of PAGE.

    MASKED: others than the last block of keys may need a mask. Registers of a thread of the FOLLOWER and of the
    PRODUCER; the leader has the others.
    """

    TB: int
    HB: int
    BOX: int
    PAGE: int
    MASKED: bool
    FOLLOWER: int = 208
    PRODUCER: int = 32
    NB: int = 2
    DV: int = 512
    DR: int = 64
    BM: int = 64
    BN: int = 64


@dataclass(frozen=True)
class HopperConfig:
    """Constants, and the items: ``row_tiles`` of each sequence, of which ``head_tiles`` belong to the same tokens, times
    ``num_splits``. ``programs`` take them in turn. The lengths have no part in it.
    """

    constants: Constants
    row_tiles: int
    head_tiles: int
    num_splits: int
    items: int
    programs: int

    def grid(self, problem: MLADecodeProblem | None = None) -> tuple[int]:
        """Programs."""
        return (self.programs,)
