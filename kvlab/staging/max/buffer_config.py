"""The two roles of MAX's register-staged decode buffer: what its tiles are for K and for V."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class KVBufferConfig(Protocol):
    """Sizes that a role decides: the block tile that is moved at a time, and the part of it that a warp reads.

    The tiles walk over the ``BN x depth`` window in DRAM down the rows (``iterator_axis`` 0) or along the columns (1).
    """

    @property
    def wtile_dim0(self) -> int: ...
    @property
    def wtile_dim1(self) -> int: ...
    @property
    def wsize(self) -> int: ...
    @property
    def btile_dim0(self) -> int: ...
    @property
    def btile_dim1(self) -> int: ...
    @property
    def iterator_axis(self) -> int: ...

    def get_wtile_coord(self, warp_col: Any) -> tuple[Any, Any]:
        """Place of a warp's tile in the block tile, in warp tiles; ``warp_col`` is an int or an int array."""
        ...


@dataclass(frozen=True)
class KBufferConfig:
    """K: strips of BK columns; a warp reads its WN keys.

    >>> k = KBufferConfig(BN=128, BK=32, WN=32)
    >>> (k.btile_dim0, k.btile_dim1), (k.wtile_dim0, k.wtile_dim1), k.wsize, k.iterator_axis, k.get_wtile_coord(3)
    ((128, 32), (32, 32), 32, 1, (3, 0))
    """

    BN: int
    BK: int
    WN: int

    iterator_axis = 1
    wtile_dim0 = wsize = property(lambda k: k.WN, doc="Keys whose fragments make up a k group.")
    wtile_dim1 = btile_dim1 = property(lambda k: k.BK)
    btile_dim0 = property(lambda k: k.BN)

    def get_wtile_coord(self, warp_col: Any) -> tuple[Any, Any]:
        """``(warp_col, 0)``."""
        return warp_col, 0


@dataclass(frozen=True)
class VBufferConfig:
    """V: strips of BK keys; a warp reads its share of the depth.

    >>> v = VBufferConfig(BN=128, BK=32, WN=32, depth=256)
    >>> (v.btile_dim0, v.btile_dim1), (v.wtile_dim0, v.wtile_dim1), v.wsize, v.iterator_axis, v.get_wtile_coord(3)
    ((32, 256), (32, 64), 64, 0, (0, 3))
    """

    BN: int
    BK: int
    WN: int
    depth: int

    iterator_axis = 0
    wtile_dim0 = btile_dim0 = property(lambda v: v.BK)
    wtile_dim1 = wsize = property(
        lambda v: v.depth // (v.BN // v.WN), doc="Columns whose fragments make up a k group."
    )
    btile_dim1 = property(lambda v: v.depth)

    def get_wtile_coord(self, warp_col: Any) -> tuple[Any, Any]:
        """``(0, warp_col)``."""
        return 0, warp_col
