"""The second V buffer of decode: every warp reads its own columns of a tile that another buffer has loaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.staging.tile.smem_image import SmemImage

from .kv_buffer import KVBuffer
from .kv_buffer_addresses import Window
from .params import KVBufferParams, ceildiv


class WarpSlices(KVBuffer):
    """V for decode: warp w reads columns ``[c, c + share)`` of all BN keys of the stage, ``share
    = output_depth // num_warps_n`` and ``c = w % num_warps_n * share``, through a base that is shifted to column c.

    Parameters
    ----------
    source : the buffer that moves the tile: V's own, or K's where V lies in K's memory (MLA).
    num_warps_n : how many warps share the columns. Those beyond begin again at the first column.
    output_depth : columns of V, those of the source unless given.
    stage : the stage of the source that is read.

    As in MAX the swizzle of K's memory counts from the shifted base: right where a slice starts on a block (see
    ``matrix_order``).

    >>> from kvlab.cache import PagedKVCache
    >>> params = KVBufferParams("bf16", (16, 16, 32), None, BN=128, WN=128, BK=32, num_threads=256, depth=256,
    ...                         kv_num_heads=1, transpose=False, num_smem_stages=1)
    >>> values = np.arange(128 * 256).reshape(1, 128, 1, 256).astype(params.dtype)
    >>> whole = KVBuffer(params, PagedKVCache(values, [127], [[0]], 1, 128), 0, 0, end=128)
    >>> v = WarpSlices(whole, num_warps_n=4)
    >>> whole.load_from_dram(0)
    >>> v.load_from_shared(0).shape, v.params.depth
    ((16, 8), 64)
    >>> bool((v.fragment_map().gather(v.strip_tile(3))[0] == values[0, 96:, 0]).all())
    True
    """

    def __init__(self, source: KVBuffer, num_warps_n: int, output_depth: int | None = None, *, stage: int = 0) -> None:
        p, depth = source.params, source.params.depth if output_depth is None else output_depth
        if not 0 < num_warps_n <= p.num_warps or depth % num_warps_n or not 0 < depth <= p.depth:
            raise ValueError(
                f"num_warps_n is {num_warps_n}: must be at most the {p.num_warps} warps and divide output_depth {depth}"
                f", which must be at most {p.depth}"
            )
        self.source, share = source, depth // num_warps_n
        self._first_stage = stage
        column = np.arange(p.num_warps) % num_warps_n * share
        shift = column // p.bk_smem * (p.BN * p.bk_smem) + column % p.bk_smem
        self._cut = Window(p, tuple(shift.tolist()), tuple(column.tolist()))
        params = KVBufferParams(
            p.dtype, p.mma_shape, p.swizzle, p.BN, p.BN, p.BK, p.num_threads, share, p.kv_num_heads, transpose=False,
            cache_depth=p.cache_depth, head_dim_offset=p.head_dim_offset, smem_depth=ceildiv(share, p.BK) * p.BK,
            bk_smem=p.bk_smem, num_smem_stages=1,
        )
        super().__init__(
            params, source.cache, source.batch_idx, source.head_idx,
            params.smem_tile(source.smem, source.stage_address(stage)), end=source.end, traffic=source.traffic,
            hazards=source.hazards,
        )

    @property
    def _window(self) -> Window:
        return self._cut

    def load_from_dram(self, buffer_idx: int, active: Any = None) -> None:
        """ValueError: the source moves the tile."""
        raise ValueError(f"load_from_dram({buffer_idx}) of slices: the buffer that they are cut from moves the tile")

    def smem_image(self, program: int = 0) -> SmemImage:
        """Contents that the source has loaded."""
        return self.source.smem_image(program)
