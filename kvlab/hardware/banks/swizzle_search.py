"""Search of a tile's swizzle: the smallest one without bank conflicts, found by trying them all in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import integers
from kvlab.hardware._arrays import IntArray
from kvlab.hardware.arch import Arch, get_arch
from kvlab.hardware.instructions import get_instruction
from kvlab.layout import Layout, Swizzle
from kvlab.memory import as_dtype

from .count import count_wavefronts


@dataclass(frozen=True)
class BestSwizzle:
    """Result of :func:`best_swizzle`, with the counts that prove it. ``str`` tells it in words.

    ``swizzle`` counts elements of the tile's dtype. ``wavefronts`` and ``ideal`` are those of all instructions of all
    accesses under it, ``unswizzled`` without one; ``tried`` is how many smaller swizzles have conflicts.

    >>> BestSwizzle(Swizzle(3, 3, 3, "bf16"), wavefronts=4, ideal=4, unswizzled=32, tried=9).conflicts
    0
    """

    swizzle: Swizzle
    wavefronts: int
    ideal: int
    unswizzled: int
    tried: int

    @property
    def conflicts(self) -> int:
        """Passes more than the least: 0 where the swizzle does what was asked."""
        return self.wavefronts - self.ideal

    def __str__(self) -> str:
        found = (
            f"{self.swizzle}: {self.wavefronts} wavefronts, the least possible; without it {self.unswizzled}. "
            f"All {self.tried} smaller swizzles have conflicts."
        )
        if self.conflicts:
            found = (
                f"{self.swizzle}: {self.wavefronts} wavefronts where {self.ideal} would be ideal; without it "
                f"{self.unswizzled}. None of {self.tried} swizzles is free of conflicts; this one has the fewest."
            )
        return found


def best_swizzle(tile: Any, dtype: Any, access: Any, *, arch: str | Arch = "sm_90", base: int = 0) -> BestSwizzle:
    """The smallest swizzle under which no access to a shared-memory tile has a bank conflict.

    Parameters
    ----------
    tile : the (rows, columns) of a row-major tile, or its :class:`~kvlab.layout.Layout`, in elements.
    dtype : of an element.
    access : what reads or writes it; one access or a list of them, all of which the swizzle must serve:
        the name of a matrix instruction (``"ldmatrix.x4"``, ``"stmatrix.x2"``, ``.trans`` or not), which visits the
        whole tile in blocks of 16 x 16 (x4), 16 x 8 (x2) or 8 x 8 (x1), lane l with row l % 16 and 16-byte column
        l // 16; or ``(instruction, rows, columns)``, int arrays ``[..., lanes]`` of each lane's first element.
    arch : its banks and phases; ``base`` : byte address of the tile (hardware swizzles read absolute addresses).

    "Smallest" is fewest bits, then the shortest reach (shift), then the finest piece. Pieces are at least as large as
    the widest access, and the tile must map onto itself. All candidates before the answer are counted, by the rule that
    :func:`~kvlab.hardware.count_wavefronts` documents: that is the proof. Where no swizzle is free of conflicts, the
    one with the fewest is returned (``conflicts`` is not 0).

    >>> [str(best_swizzle((16, pitch), "fp16", "ldmatrix.x4").swizzle) for pitch in (16, 32, 64, 128)]
    ['Sw<1,3,3> (float16)', 'Sw<2,3,3> (float16)', 'Sw<3,3,3> (float16)', 'Sw<3,3,4> (float16)']
    >>> print(best_swizzle((32, 32), "fp32", ("ld.shared.b32", np.arange(32), 0)))
    Sw<5,0,5> (float32): 1 wavefronts, the least possible; without it 32. All 75 smaller swizzles have conflicts.
    """
    arch, dtype = get_arch(arch), as_dtype(dtype)
    if not isinstance(tile, Layout | tuple | list):
        raise ValueError(f"best_swizzle of {tile!r}: must be a Layout or (rows, columns)")
    layout = tile if isinstance(tile, Layout) else Layout.row_major(*tile)
    if layout.rank != 2:
        raise ValueError(f"best_swizzle of {layout}: must be a tile of two modes, rows and columns")
    size = dtype.itemsize
    whole = np.unique(layout.offsets()) * size + base
    plans = [_plan(one, layout, size, base, arch) for one in (access if isinstance(access, list) else [access])]
    piece = max((width for _, _, width in plans), default=1)
    if not plans or not whole.size:
        raise ValueError(f"best_swizzle of {layout} for {access!r}: must be at least one access and one element")

    best: tuple[int, Swizzle] | None = None
    unswizzled = ideal = tried = 0
    for swizzle in _candidates(max(piece, size), int(whole[-1]) + size, arch):
        if swizzle.bits and not np.isin(swizzle(whole), whole).all():
            continue
        total = 0
        for name, address, _ in plans:
            wavefronts, least, _ = count_wavefronts(name, swizzle(address), arch=arch)
            total += int(wavefronts.sum())
            ideal += int(least.sum()) if not swizzle.bits else 0
        unswizzled = unswizzled if swizzle.bits else total
        if best is None or total < best[0]:
            best = (total, swizzle)
        if total == ideal:
            break
        tried += 1
    assert best is not None
    return BestSwizzle(best[1].to(dtype), best[0], ideal, unswizzled, tried)


def _candidates(piece: int, end: int, arch: Arch) -> Iterator[Swizzle]:
    """Byte swizzles that move pieces of ``piece`` bytes or more among the banks, smallest first."""
    yield Swizzle(0, piece.bit_length() - 1, 0, "byte")
    low, high, top = piece.bit_length() - 1, arch.pass_bytes.bit_length() - 1, (end - 1).bit_length()
    for bits in range(1, high - low + 1):
        for shift in range(bits, top):
            for first in range(low, high - bits + 1):
                if first + shift + bits <= top:
                    yield Swizzle(bits, first, shift, "byte")


def _plan(access: Any, layout: Layout, size: int, base: int, arch: Arch) -> tuple[str, IntArray, int]:
    """Instruction, byte addresses ``[n, lanes]`` and the bytes that must stay together."""
    if isinstance(access, str):
        name, (row, column) = access, _matrix_walk(access, layout, size, arch)
    elif isinstance(access, Sequence) and len(access) == 3:
        name, (row, column) = access[0], np.broadcast_arrays(*(integers("access", part) for part in access[1:]))
    else:
        raise ValueError(f"access is {access!r}: must be a matrix instruction or (instruction, rows, columns)")
    rows, columns = (mode.size for mode in layout.modes)
    if row.size and (min(row.min(), column.min()) < 0 or row.max() >= rows or column.max() >= columns):
        raise ValueError(f"access {name}: rows or columns outside the tile {layout}")
    address = np.asarray(layout(row, column), np.int64) * size + base
    return name, address.reshape(-1, address.shape[-1]), get_instruction(name, arch).nbytes


def _matrix_walk(name: str, layout: Layout, size: int, arch: Arch) -> tuple[IntArray, IntArray]:
    count = get_instruction(name, arch).matrices
    if not count:
        raise ValueError(f"access {name!r} does not say where lanes go; give (instruction, rows, columns)")
    lane, vector = np.arange(arch.warp_size), 16 // size
    height, width = (8 if count == 1 else 16), (2 if count == 4 else 1) * vector
    rows, columns = (mode.size for mode in layout.modes)
    if rows % height or columns % width:
        raise ValueError(f"access {name!r} visits blocks of {height} x {width}, which do not divide the tile {layout}")
    first_row, first_column = np.arange(0, rows, height), np.arange(0, columns, width)
    row = first_row[:, None, None] + lane % height
    column = first_column[:, None] + lane // 16 * vector % width
    shape = (len(first_row), len(first_column), arch.warp_size)
    return np.broadcast_to(row, shape), np.broadcast_to(column, shape)
