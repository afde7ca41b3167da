"""Problem of a CTA model, the same for every machine: a tile or a part of one, and where K and V come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from kvlab.layout import TileTensor
from kvlab.memory import Memory
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import Fragments
from kvlab.staging.tile.iterator import KVCacheIterator

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class TileSpec:
    """BM query rows and BN keys; ``k`` and ``v`` are the columns of Q and K and those of V, in DRAM and padded, (0, 0)
    for no such part.

    dtype       of Q, and of K where it is multiplied. weights : of P, and of V where it is multiplied
    stored      of K and V in DRAM. each : columns of an element of ``k`` and ``v``: two of e4m3, four of 4 bits
    ahead       tiles in flight while one is worked on; 0 : none
    along_rows  the last product is no wider than the query rows, along which warps of mma.sync then lie
    v_in_k      V is read from K's tile. rope : Q and K are the rope columns beside others, and are called so
    key_bytes   of a key in shared memory, columns of K and V of all parts"""

    arch: str
    BM: int
    BN: int
    k: tuple[int, int]
    v: tuple[int, int]
    dtype: np.dtype[Any]
    stored: np.dtype[Any]
    weights: np.dtype[Any]
    warps: int = 4
    ahead: int = 1
    each: int = 1
    along_rows: bool = False
    v_in_k: bool = False
    rope: bool = False
    key_bytes: int = 0


class KVRows(NamedTuple):
    """Rows that the iterators of K and of V walk over, and each program's sequence and KV head, ``[programs]``."""

    k: Any
    v: Any
    batch_idx: Array
    head_idx: Array


class TileCTA(Protocol):
    """A CTA model, of all programs of a launch at once: what an attention emulator asks of a machine.

    ``active`` ``[programs]`` tells which programs still have keys; only their traffic counts. A program past its range
    gets a tile without valid rows, which changes neither its row state nor its output. After ``follow`` the loads take
    the tiles of these iterators in turn, of K and V for one loop after the other: the model may fetch ahead. The
    attributes are those of :class:`~kvlab.staging.tile.launched_cta.LaunchedCTA`."""

    buffer: str
    p_path: str
    whole_rows: bool
    dense_rows: bool
    follows_beside: bool

    @classmethod
    def of(cls, tile: TileSpec, rows: KVRows, traffic: Traffic, *, beside: bool = False) -> Self: ...
    @classmethod
    def accumulate_parts(
        cls, ctas: Sequence[Any], p: Fragments, values: Sequence[tuple[Any, Any, Fragments]], active: Array
    ) -> list[Fragments]: ...
    def follow(self, *tiles: KVCacheIterator | None) -> None: ...
    def load_q(self, dram: Memory, offset: Array, valid: Array) -> Any: ...
    def load_k(self, tile: TileTensor, active: Array) -> Any: ...
    def scores(self, q: Any, k: Any, active: Array, s: Fragments | None = None) -> Fragments: ...
    def row_max(self, s: Fragments) -> Array: ...
    def row_sum(self, p: Fragments) -> Array: ...
    def load_v(self, tile: TileTensor, active: Array) -> Any: ...
    def zeros(self) -> Fragments: ...
    def accumulate(self, p: Fragments, v: Any, o: Fragments, active: Array) -> Fragments: ...
