"""A tile in NVIDIA shared memory as our kernels keep it: dense rows, 16-byte vectors swizzled for ldmatrix.

The image is that of Triton's ``SwizzledSharedLayout(vec = 16 bytes, ...)`` which the compiler picks for 16-bit tiles
read by ldmatrix on sm_80 and sm_90: rows of 256 bytes ``(8, 1, 8)``, of 64 bytes ``(8, 2, 4)``, of 32 bytes ``(8, 4,
2)``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.drawn import Drawn
from kvlab.layout import Swizzle


def ldmatrix_swizzle(row_bytes: int) -> Swizzle:
    """The swizzle, on 16-byte vectors, that lets ldmatrix read 8 rows of one column without a bank conflict.

    ``row_bytes`` is a power of two of at least 16. Source: spec of ``make_ldmatrix_swizzle``, equal to Triton's choice.

    >>> ldmatrix_swizzle(128), ldmatrix_swizzle(256), ldmatrix_swizzle(64)
    (Swizzle(3, 0, 3, unit='vector'), Swizzle(3, 0, 4, unit='vector'), Swizzle(2, 0, 3, unit='vector'))
    """
    if row_bytes < 16 or row_bytes & (row_bytes - 1):
        raise ValueError(f"row_bytes is {row_bytes}: must be a power of two of at least 16")
    bits = (min(8 * row_bytes // 128, 8)).bit_length() - 1
    return Swizzle(bits, 0, max((row_bytes // 16).bit_length() - 1, 3), unit="vector")


@dataclass(frozen=True)
class SwizzledTile(Drawn):
    """``rows x row_bytes`` at byte ``base`` of shared memory, its 16-byte vectors permuted by ``swizzle``.

    ValueError for a swizzle that moves vectors out of the tile.

    >>> SwizzledTile(rows=128, row_bytes=256).address(row=1, vector=np.arange(3)).tolist()
    [272, 256, 304]
    >>> SwizzledTile(rows=128, row_bytes=256).plain().address(1, np.arange(3)).tolist()
    [256, 272, 288]
    """

    rows: int
    row_bytes: int
    base: int = 0
    swizzle: Swizzle | None = None

    def __post_init__(self) -> None:
        for name, unit in (("rows", 1), ("row_bytes", 16), ("base", 16)):
            value = getattr(self, name)
            if not hasattr(value, "__index__") or value < 0 or value % unit:
                what = "an integer of at least 0" if unit == 1 else f"a multiple of {unit} of at least 0"
                raise ValueError(f"{name} is {value!r}: must be {what}")
        if self.swizzle is None:
            object.__setattr__(self, "swizzle", ldmatrix_swizzle(self.row_bytes))
        assert self.swizzle is not None
        vectors, group = self.rows * self.vectors, 1 << self.swizzle.zzz_mask.bit_length()
        if (self.swizzle(np.arange(vectors // group * group, vectors)) >= vectors).any():
            raise ValueError(
                f"swizzle {self.swizzle} moves vectors out of the tile of {self.rows} x {self.row_bytes} bytes: "
                f"must be multiples of {group} vectors"
            )

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def vectors(self) -> int:
        """16-byte vectors of a row."""
        return self.row_bytes // 16

    def plain(self) -> SwizzledTile:
        """The same tile without its swizzle."""
        return SwizzledTile(self.rows, self.row_bytes, self.base, Swizzle.identity("vector"))

    def address(self, row: Any, vector: Any) -> Any:
        """Byte address of 16-byte ``vector`` of ``row`` (ints or int arrays). ValueError outside the tile."""
        assert self.swizzle is not None
        row, vector = _inside("row", row, self.rows), _inside("vector", vector, self.vectors)
        return self.base + 16 * self.swizzle(row * self.vectors + vector)

    def owner(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """For pictures: ``[slots, 2]``, the (row, vector) that lives in each 16-byte slot of the tile."""
        return _owner(self)

    def owner_of(self, slot: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """``[*slot, 2]``: the (row, vector) that lives in each of some 16-byte slots, -1 where none does.

        >>> SwizzledTile(rows=1 << 40, row_bytes=128).owner_of(8 * 9 + np.arange(3)).tolist()
        [[9, 1], [9, 0], [9, 3]]
        """
        assert self.swizzle is not None
        number = np.asarray(self.swizzle(np.asarray(slot, np.int64)))  # its own inverse
        pair = np.stack(np.divmod(number, self.vectors), axis=-1)
        return np.where((number < self.rows * self.vectors)[..., None], pair, -1)


def _inside(name: str, value: Any, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    array = np.asarray(value)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} of {array.dtype}: must be integers from 0 to {count - 1}")
    if array.size and not (0 <= array.min() and array.max() < count):
        bad = array.min() if array.min() < 0 else array.max()
        raise ValueError(f"{name} is {bad}: must be 0 to {count - 1}, in the tile")
    return array.astype(np.int64, copy=False)


@functools.cache
def _owner(tile: SwizzledTile) -> np.ndarray[Any, np.dtype[np.int64]]:
    row, vector = np.divmod(np.arange(tile.rows * tile.vectors), tile.vectors)
    owner = np.empty((len(row), 2), np.int64)
    owner[(tile.address(row, vector) - tile.base) // 16] = np.stack([row, vector], axis=1)
    return owner
