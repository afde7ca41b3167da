"""Reads of a tile that are worth looking at: which rows and bytes the lanes of one instruction ask for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlab.hardware import Arch, Instruction, get_arch, get_instruction

_READS = {
    "nvidia": (
        ("ldmatrix.x4", "", 16),
        ("ld.shared.b128", " down a column", 32),
        ("ld.shared.b32", " down a column", 32),
        ("ld.shared.b32", " along a row", 1),
    ),
    "amd": (
        ("ds_read_b128", " down a column", 16),
        ("ds_read_b64", " down a column", 32),
        ("ds_read_b32", " down a column", 64),
        ("ds_read_b32", " along a row", 1),
    ),
}
"""Instruction, what is said of its lanes, and over how many rows they go before they begin the next column."""


@dataclass(frozen=True, eq=False)
class TileRead:
    """One instruction over a tile: the row of each lane [lanes], -1 for an inactive one, and the byte in the row."""

    op: Instruction
    row: npt.NDArray[np.int64]
    byte: npt.NDArray[np.int64]

    def address(self, row_bytes: int, column: int = 0) -> npt.NDArray[np.int64]:
        """Byte addresses [lanes] in a plain tile of such rows, ``column`` vectors of 16 bytes to the right; -1 for an
        inactive lane."""
        moved = (self.byte + 16 * column) % row_bytes
        return np.where(self.row < 0, -1, self.row * row_bytes + moved)


def tile_reads(arch: str | Arch, piece: int = 16) -> dict[str, TileRead]:
    """The reads of an architecture whose lanes take no more than ``piece`` bytes, by name.

    >>> reads = tile_reads("sm_90")
    >>> list(reads)
    ['ldmatrix.x4', 'ld.shared.b128 down a column', 'ld.shared.b32 down a column', 'ld.shared.b32 along a row']
    >>> reads["ldmatrix.x4"].address(row_bytes=128, column=2)[[0, 7, 8, 16]].tolist()
    [32, 928, 1056, 48]
    """
    machine, found = get_arch(arch), {}
    for name, lanes, rows in _READS[machine.vendor]:
        op = get_instruction(name, machine)
        lane = np.arange(op.lanes(machine))
        if op.nbytes <= piece and op.exists_on(machine):
            found[name + lanes] = TileRead(op, lane % rows, lane // rows * op.nbytes)
    return found
