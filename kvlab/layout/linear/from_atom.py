"""The fragment maps of a matrix instruction as basis vectors."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kvlab.layout.linear.f2 import xor_table

LANES_OF_A_WARP = (32, 64)
WARPGROUP = 128


class Atom(Protocol):
    """Protocol of a matrix instruction: ``kvlab.hardware.MmaAtom`` does.

    A map takes (lane, register), ints or int arrays, to (row, column); None where the operand is not in registers."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""

    @property
    def warp_size(self) -> int:
        """Lanes that hold a fragment: 32 or 64, or the 128 threads of a warpgroup."""

    @property
    def a(self) -> Any:
        """The map of A [M, K]."""

    @property
    def b(self) -> Any:
        """The map of B [K, N]."""

    @property
    def c(self) -> Any:
        """The map of C [M, N]."""


def atom_bases(atom: Atom, operand: str) -> tuple[dict[str, list[list[int]]], tuple[int, int]]:
    """Basis vectors of ``register``, ``lane`` and ``warp``, and the shape of the operand.

    The number of registers is what the operand needs, counting lanes that hold the same elements. ValueError where the
    map is missing, not linear, or does not cover the operand."""
    if not all(hasattr(atom, name) for name in ("shape", "a", "b", "c")) or not isinstance(operand, str):
        raise ValueError(f"from_atom of {atom!r}, operand {operand!r}: an MMA atom, and 'a', 'b' or 'c'")
    m, n, k = atom.shape
    shapes = {"a": (m, k), "b": (k, n), "c": (m, n)}
    name = getattr(atom, "name", repr(atom))
    if operand not in shapes:
        raise ValueError(f"operand is {operand!r}: must be 'a', 'b' or 'c'")
    place, shape = getattr(atom, operand), shapes[operand]
    if place is None:
        raise ValueError(f"{operand} of {name} is read from shared memory: it has no fragment")
    if atom.warp_size not in (*LANES_OF_A_WARP, WARPGROUP):
        raise ValueError(f"{name} has {atom.warp_size} lanes: must be 32, 64 or a warpgroup of 128")

    def code(lane: Any, register: Any) -> Any:
        row, col = np.broadcast_arrays(*(np.asarray(x, np.int64) for x in place(lane, register)))
        return row * shape[1] + col

    if any(extent & (extent - 1) for extent in shape):
        raise ValueError(f"{operand} of {name} is {shape}: not linear over F2, extents are powers of two")
    powers = 1 << np.arange(atom.warp_size.bit_length() - 1)
    lanes = code(powers, 0 * powers)
    held = atom.warp_size >> int(np.count_nonzero(lanes == 0))
    powers = 1 << np.arange((shape[0] * shape[1] // held).bit_length() - 1)
    registers = code(0 * powers, powers)
    table = code(np.arange(atom.warp_size)[:, None], np.arange(1 << powers.size))
    if not np.array_equal(table, xor_table(lanes.tolist())[:, None] ^ xor_table(registers.tolist())):
        raise ValueError(f"{operand} of {name} is not linear over F2")
    if np.unique(table).size != shape[0] * shape[1]:
        raise ValueError(f"{operand} of {name} covers only {np.unique(table).size} elements of {shape}")
    lane_bits = (32 if atom.warp_size == WARPGROUP else atom.warp_size).bit_length() - 1
    bits = {"register": registers, "lane": lanes[:lane_bits], "warp": lanes[lane_bits:]}
    return {dim: np.stack(np.divmod(codes, shape[1]), axis=-1).tolist() for dim, codes in bits.items()}, shape
