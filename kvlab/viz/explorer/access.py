"""The scene of an access to a swizzled tile: plain beside swizzled, the passes one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.viz.model.accesses import TileRead, tile_reads
from kvlab.viz.one_diagonal import draw_one_diagonal
from kvlab.viz.pen.picture import Picture

from .scene import Knob, Scene

if TYPE_CHECKING:
    from kvlab.hardware import Arch, Instruction, Wavefronts
    from kvlab.layout import Swizzle

ROWS = (32, 64, 128, 256, 512)
"""Bytes of a row of the tile that can be chosen."""
MOST_BITS, FARTHEST = 5, 8


def of_swizzle(swizzle: Swizzle, *, row_bytes: int = 128, arch: str = "sm_90") -> Scene:
    """Reads of a tile with rows of ``row_bytes``, swizzled."""
    from kvlab.hardware import get_arch

    in_bytes = swizzle.in_bytes()
    finest = min(4, in_bytes.base) if in_bytes.bits else 4
    if in_bytes.bits > MOST_BITS or finest < 2 or (in_bytes.bits and not 0 < in_bytes.shift <= FARTHEST):
        raise ValueError(
            f"swizzle is {swizzle}: must have at most {MOST_BITS} bits, move 4 bytes or more, and shift right by at "
            f"most {FARTHEST} bits"
        )
    reads = tile_reads(arch, 1 << finest)
    return _scene(reads, in_bytes, finest, row_bytes, get_arch(arch), "plain", lambda: draw_one_diagonal(
        swizzle, row_bytes=row_bytes, arch=arch
    ))


def of_tile(tile: Any, *, arch: str = "sm_90") -> Scene:
    """Reads of a :class:`kvlab.staging.SwizzledTile`."""
    return of_swizzle(tile.swizzle, row_bytes=tile.row_bytes, arch=arch)


def of_wavefronts(access: Wavefronts, *, row_bytes: int = 128) -> Scene:
    """One instruction with its own addresses, and what a swizzle would make of it."""
    from kvlab.layout import Swizzle
    from kvlab.viz.punch_card import draw_punch_card

    used = access.addresses[access.active]
    if used.size == 0 or used.max() >= 1 << 30:
        raise ValueError(f"access {access!r} has no address below 2**30: must have one that can be moved")
    row, byte = np.divmod(access.addresses, row_bytes)
    read = TileRead(access.op, np.where(access.active, row, -1), byte)
    finest = max(2, (access.op.nbytes - 1).bit_length())
    return _scene({access.instruction: read}, Swizzle.identity("byte"), finest, row_bytes, access.arch, "as it is",
                  lambda: draw_punch_card(access))


def _scene(
    reads: Mapping[str, TileRead], swizzle: Swizzle, finest: int, row_bytes: int, arch: Arch, plain: str,
    still: Callable[[], Picture],
) -> Scene:
    """The scene; ``swizzle`` counts bytes, ``finest`` is the least base of the knob."""
    if row_bytes not in ROWS:
        raise ValueError(f"row_bytes is {row_bytes}: must be one of {', '.join(map(str, ROWS))}")
    base, shift = (swizzle.base, swizzle.shift) if swizzle.bits else (4, 3)
    bits = max(swizzle.bits, min(3, shift))  # with every shift that can be chosen, a permutation
    lanes = max(len(read.row) for read in reads.values())
    knobs = {
        "access": Knob("access", next(iter(reads)), options=tuple(reads)),
        "row_bytes": Knob("bytes of a row", row_bytes, options=ROWS),
        "bits": Knob("bits", swizzle.bits, high=bits),
        "base": Knob("base", base, finest, max(6, base)),
        "shift": Knob("shift", shift, bits, max(bits + 2, shift)),
        "column": Knob("column", 0, high=7),
        "step": Knob("pass", 1, high=lanes),
        "lane": Knob("lane", 0, high=lanes - 1),
    }
    accesses = {
        name: {**instruction_shown(read.op, arch), "row": read.row.tolist(), "byte": read.byte.tolist()}
        for name, read in reads.items()
    }
    note = ", provisional" if "wavefronts" in arch.provisional else ""
    return Scene("access", {"accesses": accesses, "arch": arch.name + note, "plain": plain}, knobs, still)


def instruction_shown(op: Instruction, arch: Arch) -> dict[str, Any]:
    """An instruction as the module takes it."""
    unit, banks = op.unit_bytes(arch), op.banks(arch)
    return {
        "nbytes": op.nbytes, "unit": unit, "banks": banks, "groups": arch.bank_bytes * banks // unit,
        "phases": op.phases(arch).tolist(), "shares": op.shares, "merges": op.merges, "repeats": op.repeats,
    }
