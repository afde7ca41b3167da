"""Common part of NVIDIA's CTA models without wgmma: K and V by cp.async a tile ahead, P through shared memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from kvlab.staging.record.footprint import Footprint
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.copy_plan import TileCopyPlan
from kvlab.staging.tile.fragments import FragmentMap, Fragments
from kvlab.staging.tile.iterator import KVCacheIterator
from kvlab.staging.tile.p_exchange import PExchange
from kvlab.staging.tile.rows_over_warps import RowsOverWarps
from kvlab.staging.tile.shared_access import SharedAccess
from kvlab.staging.tile.tile_copies import TileCopies
from kvlab.staging.tile.tile_pipeline import TilePipeline
from kvlab.staging.tile.tile_spec import KVRows, TileSpec

Array = np.ndarray[Any, Any]


class Shape(Protocol):
    """Sizes of a tile."""

    @property
    def arch(self) -> str: ...
    @property
    def warps(self) -> int: ...
    @property
    def v_in_k(self) -> bool: ...
    @property
    def shared_bytes(self) -> int: ...
    def columns(self, role: str) -> tuple[int, int]: ...
    def stored(self, role: str) -> np.dtype[Any]: ...
    def fragment_map(self, role: str) -> FragmentMap: ...
    def access(self, role: str) -> SharedAccess: ...


S = TypeVar("S", bound=Shape)


class NvidiaDecodeCTA(RowsOverWarps, Generic[S]):
    """The CTAs of one launch, side by side: ``programs`` copies of shared memory and registers. A subclass says where
    tiles lie, how they come to registers, and what is multiplied. ``ahead``: :meth:`follow` fetches tiles ahead."""

    follows_beside = True

    def __init__(
        self, shape: S, programs: int, traffic: Traffic, *, beside: bool = False, ahead: bool = True
    ) -> None:
        self.shape, self.ahead = shape, ahead
        super().__init__(shape.shared_bytes, shape.warps, shape.arch, programs, traffic, beside=beside)
        self.copies = TileCopies(self.smem, self.hazards, traffic, self._copied_to)
        barrier_before = "k" if self.p_in_registers or shape.v_in_k else "" if self.v_before_p else "v"
        self.pipeline = TilePipeline(
            lambda role, tile, stage: self.copies.by_cp_async(role, tile, stage, f"{role}{stage or ''}"),
            lambda role, tile, stage: self.copies.by_store(role, tile, stage, f"{role}{stage or ''}"),
            self.hazards, barrier_before=barrier_before, ahead=self.stages,
        )
        self._footprints: dict[tuple[str, int | None], Footprint] = {}

    @classmethod
    def of(cls, tile: TileSpec, rows: KVRows, traffic: Traffic, *, beside: bool = False) -> Self:
        """The model for a tile, or for a part of one ``beside`` another's; what is converted on its way is not
        fetched ahead."""
        ahead = tile.ahead > 0 and (tile.each > 1 or tile.stored == tile.dtype)
        return cls(cls.shape_of(tile), len(rows.batch_idx), traffic, beside=beside, ahead=ahead)

    @classmethod
    def shape_of(cls, tile: TileSpec) -> S:
        """The sizes of the model for a tile."""
        raise NotImplementedError

    @property
    def p_in_registers(self) -> bool:
        """Tells whether P is multiplied by V in the registers where the scores stood."""
        return False

    @property
    def v_before_p(self) -> bool:
        """Tells whether V is read before P is written to shared memory."""
        return False

    @property
    def stages(self) -> int:
        """Tiles of K that shared memory holds."""
        return 1

    def follow(self, *tiles: KVCacheIterator | None) -> None:
        """Fetch K and V (None: not of this CTA) ahead along these iterators, two for one loop after the other, whose
        tiles the loads take in turn; nothing unless ``ahead``."""
        if self.ahead:
            self.pipeline.follow(*tiles)

    def accumulate(self, p: Fragments, v: Fragments, o: Fragments, active: Array) -> Fragments:
        """O += P V, P through shared memory."""
        (o,) = self.accumulate_parts([self], p, [(self, v, o)], active)
        return o

    @classmethod
    def accumulate_parts(
        cls, ctas: Sequence[NvidiaDecodeCTA[Any]], p: Fragments,
        values: Sequence[tuple[NvidiaDecodeCTA[Any], Fragments, Fragments]], active: Array,
    ) -> list[Fragments]:
        """See :meth:`LaunchedCTA.accumulate_parts`: P goes through the shared memory of the first model with V; the
        last reads of the tile, then the copies of the next."""
        through = values[0][0]
        a = through.operand_p(p, active)
        for cta in ctas:
            if cta is not through:
                cta.p_barriers()
        for cta in ctas:
            cta.read_v()
        for role in "kv":
            for cta in ctas:
                cta.pipeline.refill(role)
        return [cta.add_values(a, v, o) for cta, v, o in values]

    def drain(self) -> None:
        """The copies that the last tile has issued ahead."""
        self.pipeline.drain()

    def operand_p(self, p: Fragments, active: Array) -> Fragments:
        """P as the product takes it, after its way through shared memory."""
        layout = self.shape.fragment_map("p")
        return Fragments(self._exchange(p.values, active).reshape(self.programs, *layout.row.shape), layout)

    @functools.cached_property
    def _exchange(self) -> PExchange:
        accesses = self.shape.access("p write"), self.shape.access("p")
        return PExchange(self.smem, accesses, self.shape.stored("p"), hazards=self.hazards, traffic=self.traffic)

    def p_barriers(self) -> None:
        """The barriers of :meth:`operand_p` where P goes through another CTA's model of the same threads."""
        raise NotImplementedError

    def read_v(self) -> None:
        """States the reads of V that come behind those of P."""
        if self.pipeline.following and self.shape.columns("v")[1] and not self.v_before_p:
            self._state_read("v")

    def add_values(self, p: Fragments, v: Fragments, o: Fragments) -> Fragments:
        """O += P V of what the lanes hold."""
        raise NotImplementedError

    def _copied_to(self, role: str) -> tuple[TileCopyPlan, Array]:
        """The plan of a role's tile, and where each of its vectors lands."""
        raise NotImplementedError

    def _read(self, role: str, active: Array, dtype: np.dtype[Any] | None = None) -> Fragments:
        """A role's tile to registers: elements of ``dtype``, of the role's if None."""
        access, layout = self.shape.access(role), self.shape.fragment_map(role)
        registers = access.load(self.smem, dtype or self.shape.stored(role), self._shift(role))
        access.count(self.traffic, f"{role} read", int(active.sum()))
        return Fragments(registers.reshape(self.programs, *layout.row.shape), layout)

    def _state_read(self, role: str) -> None:
        self.hazards.read(self._accessed(role), f"{role} read", self._stage(role))

    def _stage(self, role: str) -> int | None:
        """Place of the tile of K or V that was loaded last."""
        return self.pipeline.stage["k" if self.shape.v_in_k else role] if role in ("k", "v") else None

    def _shift(self, role: str) -> int:
        """Bytes from the first stage to that one."""
        return 0

    def _accessed(self, role: str) -> Footprint:
        """The bytes that each warp reads of a role."""
        at = role, self._stage(role)
        if at not in self._footprints:
            self._footprints[at] = self.shape.access(role).footprint(self.hazards, self._shift(role))
        return self._footprints[at]
