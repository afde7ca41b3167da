"""MMA tiles in blocked shared memory: a stage is blocks of BN x BK, row-major, in sequence."""

from __future__ import annotations

import warnings
from typing import Any

from kvlab.layout import Layout, TileTensor
from kvlab.memory import Memory


def smem_mma_subtile_offset(mr: int, mc: int, BN: int, BK: int, bk_tile: Any, k_sub: Any, mma: Any) -> Any:
    """Elements from a stage's first to an ``mr x mc`` MMA tile of V; int or int array.

    ``bk_tile`` selects BK keys, ``k_sub`` mr keys (MMA_K) among them, ``mma`` mc columns (MMA_M) of the depth.

    >>> smem_mma_subtile_offset(16, 32, 64, 32, bk_tile=1, k_sub=0, mma=1)
    3072
    >>> smem_mma_subtile_offset(16, 16, 64, 32, bk_tile=0, k_sub=1, mma=3)
    2576
    """
    if mc < 1 or BK % mc:
        raise ValueError(f"BK is {BK}: must be a multiple of the {mc} columns of an MMA tile")
    across = BK // mc
    return bk_tile * BK * BK + k_sub * mr * BK + mma // across * (BN * BK) + mma % across * mc


def smem_mma_subtile(
    memory: Memory, dtype: Any, mr: int, mc: int, BN: int, BK: int, bk_tile: int, k_sub: int, mma: int, *,
    base: int = 0, original: bool = False,
) -> TileTensor:
    """The ``mr x mc`` MMA tile at :func:`smem_mma_subtile_offset`, ``base`` elements into ``memory``.

    Its rows are BK apart. MAX's function of this name says mc apart, which is the tile only if mc == BK, and its
    callers build the view themselves: ``original`` reproduces that, with a UserWarning where it is wrong.

    >>> import numpy as np
    >>> block = Memory.over(np.arange(64 * 32, dtype=np.int16))
    >>> tile = smem_mma_subtile(block, "int16", 16, 16, 64, 32, bk_tile=0, k_sub=1, mma=1)
    >>> tile.to_numpy()[:2, :3].tolist()  # keys 16 and 17, columns 16 to 18
    [[528, 529, 530], [560, 561, 562]]
    """
    if original and mc != BK:
        warnings.warn(
            f"smem_mma_subtile as in MAX has rows {mc} elements apart, in blocks whose rows are BK {BK} apart: it is "
            f"not the MMA tile; without original=True it is",
            stacklevel=2,
        )
    offset = base + smem_mma_subtile_offset(mr, mc, BN, BK, bk_tile, k_sub, mma)
    return TileTensor(memory, dtype, Layout((mr, mc), (mc if original else BK, 1)), offset=offset)


def smem_subtile(
    memory: Memory, dtype: Any, rows: int, cols: int, BN: int, BK: int, r: int, c: int, *, base: int = 0
) -> TileTensor:
    """Rows ``[r * rows, (r + 1) * rows)`` of block c, row-major. ``cols`` is the width of a block, BK.

    >>> import numpy as np
    >>> stage = Memory.over(np.arange(2 * 64 * 32, dtype=np.int16))
    >>> smem_subtile(stage, "int16", 32, 32, 64, 32, r=1, c=1).to_numpy()[0, :2].tolist()
    [3072, 3073]
    """
    if cols != BK:
        raise ValueError(f"cols is {cols}: must be BK {BK}, the width of a block")
    if rows < 1 or r < 0 or (r + 1) * rows > BN:
        raise ValueError(f"rows [{r * rows}, {(r + 1) * rows}) reach past the {BN} rows of a block")
    return TileTensor(memory, dtype, Layout.row_major(rows, cols), offset=base + r * rows * BK + c * BN * BK)
