"""The compile-time members of a buffer: those of its parameters, by the same names."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from kvlab.layout import Layout, TileType

T = TypeVar("T")


class Member(Generic[T]):
    """``name = Member[int]()`` in a class whose instances have ``params``: reads ``params.name``, or that of another
    part (``Member[int]("config")``). MAX's internal names begin with an underscore, those of the part do not.

    >>> class Buffer:
    ...     _size = Member[int]()
    ...     def __init__(self, params):
    ...         self.params = params
    >>> from types import SimpleNamespace
    >>> Buffer(SimpleNamespace(size=3))._size
    3
    """

    def __init__(self, part: str = "params") -> None:
        self.part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, buffer: Any, owner: type | None = None) -> T:
        if buffer is None:
            return self  # type: ignore[return-value]  # the class attribute itself
        return getattr(getattr(buffer, self.part), self.name.lstrip("_"))


class KVBufferMembers:
    """MAX's members of ``KVBuffer``; see :class:`KVBufferParams`."""

    MMA_M = Member[int]()
    MMA_N = Member[int]()
    MMA_K = Member[int]()
    num_mmas = Member[int]()
    num_k_mmas2 = Member[int]()
    input_frag_size = Member[int]()
    simd_width = Member[int]()
    num_k_tiles = Member[int]()
    warp_tile_rows = Member[int]()
    num_repeats = Member[int]()
    smem_cols = Member[int]()
    smem_stage_size = Member[int]()
    vm_instrs_per_load = Member[int]()
    mma_layout = Member[Layout]()
    MMATileType = Member[TileType]()
    SmemParentType = Member[TileType]()
    smem_parent_layout = Member[Layout]()
    smem_tile_strides = Member[tuple[int, int]]()
    wtile_dim0 = Member[int]()
    wtile_dim1 = Member[int]()
    _reg_num_k_tiles = Member[int]()
    _blocks_per_stage = Member[int]()
    _smem_total_cols = Member[int]()
    _num_warps = Member[int]()
    _dma_col_groups = Member[int]()
    _total_tiles = Member[int]()
    _tiles_per_warp = Member[int]()
    _mma_total_rows = Member[int]()
    _rows_per_k_tile = Member[int]()
    _rows_per_k_mma = Member[int]()
