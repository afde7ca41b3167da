"""Registers of the CTAs of gfx950: rows of Q from DRAM, and the strips of a K or V tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.memory import Memory
from kvlab.staging.max.kv_buffer import KVBuffer
from kvlab.staging.tile.fragments import FragmentMap, Fragments

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StripShape:
    """Sizes of a tile: BM query rows, BN keys, D columns of K and DV of V (D if None; 0: no such part).

    dtype : of Q, and of K where it is multiplied. stored : of K and V in DRAM and LDS. weights : of P, and of V where
    it is multiplied. Each as ``dtype`` if None. columns : of Q in DRAM, D if None; those of K and V are told by the
    tiles, which may have fewer than D or DV.
    """

    BM: int
    BN: int
    D: int
    dtype: np.dtype[Any]
    DV: int | None = None
    stored: np.dtype[Any] | None = None
    weights: np.dtype[Any] | None = None
    columns: int | None = None

    @property
    def v_depth(self) -> int:
        """Columns of V."""
        return self.D if self.DV is None else self.DV

    @property
    def q_columns(self) -> int:
        """Columns of Q in DRAM."""
        return self.D if self.columns is None else self.columns

    @property
    def p_dtype(self) -> np.dtype[Any]:
        """Dtype of P and of V where they are multiplied."""
        return self.dtype if self.weights is None else self.weights

    @property
    def kv_dtype(self) -> np.dtype[Any]:
        """Dtype of K and V in DRAM and LDS."""
        return self.dtype if self.stored is None else self.stored


@dataclass(frozen=True, eq=False)
class Strips:
    """The registers ``[programs, threads, strips, registers, frag]`` of a tile's strips, each laid out by ``map``;
    ``axis`` is the one along which they make up the tile."""

    registers: Array
    map: FragmentMap
    axis: int

    @classmethod
    def of(cls, buffer: KVBuffer, axis: int) -> Strips:
        """Contents of all strips of a buffer at this moment."""
        held = np.asarray(buffer.kv_mma_op.reg_tile)
        shape = *held.shape[:2], buffer.params.num_k_tiles, -1, held.shape[-1]
        return cls(held.reshape(shape).copy(), buffer.fragment_map(), axis)

    def tile(self) -> Array:
        """``[programs, BN, depth]``."""
        strips = range(self.registers.shape[2])
        return np.concatenate([self.map.gather(self.registers[:, :, strip]) for strip in strips], axis=self.axis)

    def steps(self, operand: Array, k_groups: int) -> tuple[Array, Array]:
        """The factors of ``operand`` times the strips, a k group a step: both ``[programs, threads, steps, tiles,
        frag]``. ``operand`` is ``[programs, threads, (strip, k group, m), frag]``; a strip has ``k_groups``."""
        programs, threads, strips, _, frag = self.registers.shape
        shape = programs, threads, strips * k_groups, -1, frag
        return operand.reshape(shape), self.registers.reshape(shape)


def eights(fragments: Array) -> Array:
    """Fragments cut into those of instructions that take eight elements a lane: ``[programs, threads, steps, tiles,
    8 n]`` -> ``[programs, threads, n steps, tiles, 8]``."""
    programs, threads, steps, tiles, _ = fragments.shape
    parts = fragments.reshape(programs, threads, steps, tiles, -1, 8).swapaxes(3, 4)
    return parts.reshape(programs, threads, -1, tiles, 8)


def query_fragments(
    dram: Memory, offset: Array, valid: Array, layout: FragmentMap, dtype: np.dtype[Any], run: int | None = None,
    columns: int | None = None,
) -> Fragments:
    """Q rows, elements ``offset[programs, BM]`` of ``dram``, straight into registers; invalid rows are 0, and so are
    columns past ``columns``, where that is given.

    ``run`` columns of a fragment are consecutive and read at once; all of them if None.

    >>> lane = np.arange(4)[:, None, None]
    >>> layout = FragmentMap((2, 4), lane // 2, 2 * (lane % 2) + np.arange(2))
    >>> dram = Memory.over(np.arange(8, dtype=np.float32))
    >>> query_fragments(dram, np.array([[0, 4]]), np.array([[False, True]]), layout, np.dtype(np.float32)).tile()
    array([[[0., 0., 0., 0.],
            [4., 5., 6., 7.]]], dtype=float32)
    """
    threads, registers, width = layout.row.shape
    run = width if run is None else min(run, width)
    row, col = (x.reshape(threads, registers, -1, run)[..., 0] for x in (layout.row, layout.col))  # first of each run
    ok = valid[:, row] if columns is None else valid[:, row] & (col < columns)
    address = np.where(ok, offset[:, row] + col, 0) * dtype.itemsize
    return Fragments(dram.load(address, dtype, run, mask=ok).reshape(-1, threads, registers, width), layout)
