"""Ragged tiles: rows past a run-time count stay out of a TMA copy, by the bounds of the descriptor alone.

The trick: one dimension counts the rows that may still come, and the tensor starts that many rows
early. Starting a copy ``BM - rows`` into it leaves exactly ``rows`` rows in range; a second dimension brings the start
back to the right place. No address before the tensor is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import count, integers
from kvlab.memory import Memory

from . import tma
from .mbarrier import SharedMemBarrier
from .tensor_map import TensorMapSwizzle, TmaDescriptor


@dataclass(frozen=True, eq=False)
class RaggedTMA3DTile:
    """Tiles of ``BM`` rows by ``BN`` columns of an array ``[rows, middle_dim, depth]``, of which only the first
    ``dynamic_dim`` rows are copied. ``group`` > 1: of an array ``[rows, middle_dim, group, depth]``, ``BM // group``
    rows with all heads of a group, shared-memory row ``row * group + g``.

    Shared memory: the K-major image of ``[BM, BN]``: columns in chunks of the swizzle's width, each ``BM`` rows.

    >>> out = np.zeros((6, 2, 8), np.float32)
    >>> smem = Memory(4 * 8 * 4)
    >>> smem.store(0, np.arange(1, 33, dtype=np.float32))
    >>> tile = RaggedTMA3DTile.of(out, BM=4, BN=8, swizzle="32B")
    >>> tile.async_copy_from_col(0, smem, 0, ragged_idx=1, dynamic_dim=2, middle_idx=1)
    >>> out[:, 1, 0].tolist()
    [0.0, 1.0, 9.0, 0.0, 0.0, 0.0]
    """

    descriptor: TmaDescriptor
    BM: int
    BN: int
    middle_dim: int
    group: int = 1

    @classmethod
    def of(
        cls, array: Any, BM: int, BN: int, swizzle: Any = "128B", group: int = 1, tma_blocks_per_op: int = 0
    ) -> RaggedTMA3DTile:
        """``tma_blocks_per_op`` > 0 (without swizzle): copies of that many column chunks at once."""
        array = np.asarray(array)
        mode = TensorMapSwizzle.of(swizzle)
        expected = 3 if count("group", group, 1) == 1 else 4
        if array.ndim != expected or (group > 1 and array.shape[2] != group) or not array.flags.c_contiguous:
            raise ValueError(
                f"array of shape {array.shape} is not a contiguous [rows, middle_dim{', group' * (group > 1)}, depth] "
                f"for group {group}"
            )
        given = {"BM": BM, "BN": BN, "group": group, "tma_blocks_per_op": tma_blocks_per_op}
        BM, BN, group, tma_blocks_per_op = (count(name, value) for name, value in given.items())
        S = mode.bytes // array.itemsize
        rows, middle, depth = array.shape[0], array.shape[1], array.shape[-1]
        if BM < 1 or BM % group or BN % S or BN < 1:
            raise ValueError(f"BM is {BM}: must be a multiple of group {group}, BN {BN} one of {S} ({mode.label})")
        if tma_blocks_per_op < 0 or (tma_blocks_per_op and (mode or depth % S)):
            raise ValueError(f"tma_blocks_per_op {tma_blocks_per_op} needs swizzle none, depth {depth} in whole {S}s")
        step, row, sequence = group * depth, middle * group * depth, BM // group
        heads = ((group, depth, group),) if group > 1 else ()
        blocks = ((depth // S, S, tma_blocks_per_op),) if tma_blocks_per_op else ()
        last = (S if tma_blocks_per_op else depth, 1, S)
        dims = ((middle * (rows + 1), step, 1), *blocks, (sequence, row, sequence), *heads, last)
        shape, strides, box = zip(*dims, strict=True)
        base = -sequence * row * array.itemsize
        descriptor = TmaDescriptor(Memory.over(array), array.dtype, shape, strides, box, mode, base=base)
        return cls(descriptor, BM, BN, middle, group)

    @property
    def column_elements(self) -> int:
        """Columns of a chunk: the swizzle's width."""
        return self.descriptor.box[-1]

    def async_copy_from_col(
        self, col: int, memory: Memory, address: Any, ragged_idx: Any, dynamic_dim: Any, middle_idx: Any
    ) -> None:
        """Shared memory -> DRAM: chunk ``col`` of the tile at ``address`` to rows ``ragged_idx ..`` of ``middle_idx``.

        ``dynamic_dim``: how many rows (of a group: positions), at most ``BM // group``; the others are dropped.
        ``address`` (bytes), ``ragged_idx``, ``dynamic_dim`` and ``middle_idx`` broadcast."""
        coords, where = self._place(col, address, ragged_idx, dynamic_dim, middle_idx)
        tma.store(self.descriptor, coords, memory, where)

    def async_copy_to_col(
        self, col: int, memory: Memory, address: Any, ragged_idx: Any, dynamic_dim: Any, middle_idx: Any,
        barrier: SharedMemBarrier | None = None,
    ) -> None:
        """DRAM -> shared memory, arguments as for :meth:`async_copy_from_col`; rows past ``dynamic_dim`` are zeros."""
        coords, where = self._place(col, address, ragged_idx, dynamic_dim, middle_idx)
        tma.load(self.descriptor, coords, memory, where, barrier)

    def _place(self, col: int, address: Any, ragged: Any, dynamic: Any, middle: Any) -> tuple[list[Any], Any]:
        ragged, dynamic, middle = (integers("ragged, dynamic, middle", x) for x in (ragged, dynamic, middle))
        most = self.BM // self.group
        if (dynamic < 0).any() or (dynamic > most).any():
            raise ValueError(f"dynamic_dim is {dynamic.tolist()}: must be 0 to {most}, the rows of the tile")
        if (middle < 0).any() or (middle >= self.middle_dim).any():
            raise ValueError(f"middle_idx is {middle.tolist()}: must be 0 to {self.middle_dim - 1}")
        if not 0 <= count("col", col) < self.BN // self.column_elements:
            raise ValueError(f"col is {col}: must be one of the {self.BN // self.column_elements} column chunks")
        merged = (ragged + dynamic) * self.middle_dim + middle
        inner: tuple[Any, ...] = (most - dynamic, *(0,) * (self.group > 1))
        blocks = self.descriptor.rank - len(inner) - 2
        coords = [merged, col, *inner, 0] if blocks else [merged, *inner, col * self.column_elements]
        chunk = self.BM * self.column_elements * self.descriptor.dtype.itemsize
        return coords, integers("address", address) + col * chunk


@dataclass(frozen=True, eq=False)
class RaggedTensorMap:
    """Sequences packed one after another in ``array`` ``[total rows, columns]``, copied ``d_len`` rows at a time.

    >>> out = np.zeros((10, 4), np.float32)
    >>> smem = Memory(2 * 128)
    >>> smem.store(0, np.arange(1, 65, dtype=np.float32))
    >>> RaggedTensorMap.of(out, d_len=8, width=4, max_length=16).store_ragged_tile(smem, 0, 0, 3, 5)
    >>> out[:, 0].tolist()
    [0.0, 0.0, 0.0, 1.0, 5.0, 9.0, 13.0, 17.0, 0.0, 0.0]
    """

    descriptor: TmaDescriptor
    max_length: int

    @classmethod
    def of(cls, array: Any, d_len: int, width: int, max_length: int, swizzle: Any = "none") -> RaggedTensorMap:
        """``d_len`` x ``width``: the box; ``max_length``: the longest sequence."""
        array = np.asarray(array)
        if array.ndim != 2 or not array.flags.c_contiguous:
            raise ValueError(f"array has shape {array.shape}: must be a contiguous [total rows, columns]")
        rows, cols = array.shape
        given = {"d_len": d_len, "width": width, "max_length": max_length}
        d_len, width, max_length = (count(name, value, 1) for name, value in given.items())
        descriptor = TmaDescriptor(
            Memory.over(array), array.dtype, (rows + 1, max_length, cols), (cols, cols, 1), (1, d_len, width), swizzle,
            base=-max_length * cols * array.itemsize,
        )
        return cls(descriptor, max_length)

    def store_ragged_tile(
        self, memory: Memory, address: int, column: Any, preceding_cumulative_length: int, store_length: int
    ) -> None:
        """Rows 0 .. ``store_length`` - 1 of the tile at ``address``, box after box, to the rows from
        ``preceding_cumulative_length`` on; the rest of the last box is dropped."""
        length = count("store_length", store_length)
        before = integers("preceding_cumulative_length", preceding_cumulative_length)
        if not 0 <= length <= self.max_length:
            raise ValueError(f"store_length is {length}: must be 0 to {self.max_length}, the longest sequence")
        d_len = self.descriptor.box[1]
        box = np.arange(-(-length // d_len))
        where = integers("address", address) + box * self.descriptor.image_bytes
        column = integers("column", column)
        coords = (before + length + 0 * box, self.max_length - length + box * d_len, column + 0 * box)
        tma.store(self.descriptor, coords, memory, where)
