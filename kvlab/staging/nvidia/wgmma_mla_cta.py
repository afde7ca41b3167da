"""One CTA of MLA decode on sm_90 with 64 query rows: cp.async, swizzled panels, wgmma, the K tile again as V.

What Triton compiles our decode tile of many heads to (read from its TTGIR and PTX): Q and the latent and rope columns
of K lie in shared memory as panels of at most 128 bytes a row, swizzled as TMA would. Eight warps are two warpgroups,
and 64 rows are one's: for S = Q K^T both do all of it, two instructions of BN / 2 keys a step, so that each has all of
P in its registers where the next product takes it; for O += P V each has half of the latent columns, read from K's
stage along its contiguous dimension (MN-major). Nothing but Q and K ever lies in shared memory.

K has two stages. Every access, wait and barrier is stated to ``hazards``, in the order of the PTX::

    copy latents, commit, copy rope, commit                                     before the loop
    loop: wait_group(0), barrier, fence.proxy.async, wgmma of the latents, wgmma.wait_group(0), wgmma of the rope part,
          wgmma.wait_group(0), softmax, wgmma O += P V, barrier, copy the next latents, commit, copy the next rope,
          commit                                                                (P V is still in flight)
    wgmma.wait_group(0), wait_group(0), barrier
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kvlab.cache import PagedKVCache
from kvlab.hardware import MmaAtom, get_atom
from kvlab.memory import Memory
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.copy_plan import TileCopyPlan, copy_plan
from kvlab.staging.tile.fragments import FragmentMap, Fragments
from kvlab.staging.tile.iterator import KVCacheIterator
from kvlab.staging.tile.launched_cta import LaunchedCTA
from kvlab.staging.tile.rows_over_warps import butterfly, in_turn
from kvlab.staging.tile.shared_tile import SharedTile
from kvlab.staging.tile.tile_copies import TileCopies
from kvlab.staging.tile.tile_spec import LatentRows, TileSpec

from .wgmma_plan import PanelTile, along_columns, along_rows

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
ROWS, WARPS, GROUPS = 64, 8, 2
STAGES = 2  # of K
Parts = tuple[SharedTile, SharedTile]


@dataclass(frozen=True)
class WgmmaMLAShape:
    """Sizes of the tile: 64 query rows, BN keys; ``latent`` and ``rope`` columns in DRAM and padded in shared memory.

    >>> shape = WgmmaMLAShape(64, (512, 512), (64, 64), np.dtype(np.float16))
    >>> shape.shared_bytes, shape.scores_atom.name, shape.output_atom.name
    (221184, 'wgmma.m64n32k16.f16', 'wgmma.m64n256k16.f16')
    """

    BN: int
    latent: tuple[int, int]
    rope: tuple[int, int]
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        widths = self.latent[1], self.rope[1]
        fits = all(D % 8 == 0 and D <= BD and BD % 32 == 0 for D, BD in (self.latent, self.rope))
        if self.BN % 32 or self.BN > 256 or not fits or widths[0] > 512 or self.dtype.name not in _SUFFIX:
            raise ValueError(
                f"{self}: BN must be a multiple of 32 up to 256, columns multiples of 8, padded to multiples of 32 "
                "that hold them, 512 latent ones at most, in float16 or bfloat16"
            )

    @property
    def scores_atom(self) -> MmaAtom:
        """A warpgroup's instruction for half of the keys."""
        return get_atom(f"wgmma.m64n{self.BN // 2}k16.{_SUFFIX[self.dtype.name]}")

    @property
    def output_atom(self) -> MmaAtom:
        """A warpgroup's instruction for its half of the latent columns."""
        return get_atom(f"wgmma.m64n{self.latent[1] // GROUPS}k16.{_SUFFIX[self.dtype.name]}")

    @property
    def places(self) -> dict[str, PanelTile]:
        """Q's two parts (``"q"``, ``"q_rope"``), and the stages of K's (``"k0"``, ``"k1"``, ``"rope0"``,
        ``"rope1"``).
        """
        return _places(self)

    @property
    def shared_bytes(self) -> int:
        return sum(place.nbytes for place in self.places.values())

    def columns(self, at: str) -> tuple[int, int]:
        """(in DRAM, in shared memory) of a place."""
        return self.rope if "rope" in at else self.latent


_SUFFIX = {"bfloat16": "bf16", "float16": "f16"}


@functools.cache
def _places(shape: WgmmaMLAShape) -> dict[str, PanelTile]:
    base, places = 0, dict[str, PanelTile]()
    for at in ("q", "q_rope", *(f"k{i}" for i in range(STAGES)), *(f"rope{i}" for i in range(STAGES))):
        rows = ROWS if at.startswith("q") else shape.BN
        places[at] = PanelTile(rows, shape.columns(at)[1], base, shape.dtype.itemsize)
        base += places[at].nbytes
    return places


@functools.cache
def _scores_map(shape: WgmmaMLAShape) -> FragmentMap:
    """S ``[64, BN]``, all of it in each warpgroup."""
    thread, r = np.arange(32 * WARPS)[:, None, None], np.arange(shape.BN // 2)
    regs = shape.scores_atom.regs_c
    row, col = shape.scores_atom.c(thread % 128, r % regs)
    return FragmentMap((ROWS, shape.BN), row + 0 * r, col + r // regs * (shape.BN // 2), warp_size=32)


@functools.cache
def _output_map(shape: WgmmaMLAShape) -> FragmentMap:
    """O ``[64, latent columns]``, half of the columns in each warpgroup."""
    thread, r = np.arange(32 * WARPS)[:, None, None], np.arange(shape.output_atom.regs_c)
    row, col = shape.output_atom.c(thread % 128, r)
    return FragmentMap((ROWS, shape.latent[1]), row, col + thread // 128 * (shape.latent[1] // GROUPS), warp_size=32)


class WgmmaMLACTA(LaunchedCTA):
    """The CTAs of one launch, side by side: ``programs`` copies of shared memory and registers. The tile after the one
    that is worked on is in flight.

    latent, rope : the windows of a cache with one head. batch_idx, end ``[programs]``: sequence, and the exclusive
    bound of its keys.
    """

    buffer = "cp.async into swizzled panels, two stages; V is read from K's"
    p_path = "registers"
    of_latents = True

    @classmethod
    def of_windows(cls, tile: TileSpec, rope: tuple[int, int], rows: LatentRows, traffic: Traffic) -> Self:
        """The model for a tile of 64 rows of latent columns and those of ``rope``."""
        return cls(WgmmaMLAShape(tile.BN, tile.k, rope, tile.dtype), *rows, traffic)

    def __init__(
        self, shape: WgmmaMLAShape, latent: PagedKVCache, rope: PagedKVCache, batch_idx: Array, end: Array,
        traffic: Traffic,
    ) -> None:
        self.shape = shape
        super().__init__(shape.shared_bytes, WARPS, "sm_90", len(batch_idx), traffic)
        self.copies = TileCopies(self.smem, self.hazards, traffic, self._copied_to)
        self.tiles = [KVCacheIterator(cache, shape.BN, batch_idx, 0, end) for cache in (latent, rope)]
        self._fetched: list[Array] = []  # first keys of the tiles that have come or are in flight
        self._used = {at: self.hazards.region(p.base, p.nbytes) for at, p in shape.places.items()}

    def load_q(self, dram: Memory, offset: Array, valid: Array) -> Parts:
        """Q rows, elements ``offset[programs, 64]`` of ``dram``, through registers into panels; invalid rows are 0."""
        for at, first in (("q", 0), ("q_rope", self.shape.latent[0])):
            self.copies.by_registers(at, dram, np.where(valid, offset + first, -1), self.shape.dtype.itemsize)
        return self._tile("q"), self._tile("q_rope")

    def load_k(self, start: Array, active: Array) -> Parts:
        """The tile of these pages in its panels, latent and rope columns."""
        if not self._fetched or not np.array_equal(self._fetched[-1], start):
            self._fetch(start)
        self.hazards.wait_group(0)
        self.hazards.barrier()
        self.hazards.fence_async()
        return self._tile(f"k{self._stage}"), self._tile(f"rope{self._stage}")

    def scores(self, q: Parts, k: Parts, active: Array, by_key: Array | None = None) -> Fragments:
        """S = Q K^T, float32, ``[64, BN]``: first the latent columns, times ``by_key`` ``[programs, BN]`` if given,
        then the rope columns.
        """
        zeros = Fragments.zeros(self.programs, _scores_map(self.shape))
        s = self._add_scores("q", f"k{self._stage}", zeros, active)
        if by_key is not None:
            s = s.with_values(s.values * np.take(by_key, s.map.col, axis=1))
        return self._add_scores("q_rope", f"rope{self._stage}", s, active)

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, 64]``: in the lane, over its quad."""
        return self._by_row(s, np.maximum)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, 64]``: in the lane, over its quad."""
        return self._by_row(p, np.add)

    def load_v(self, active: Array) -> SharedTile:
        """The latent part of the K tile: nothing moves."""
        return self._tile(f"k{self._stage}")

    def zeros(self) -> Fragments:
        """The output accumulator ``[64, latent columns]``."""
        return Fragments.zeros(self.programs, _output_map(self.shape))

    def accumulate(self, p: Fragments, v: SharedTile, o: Fragments, active: Array) -> Fragments:
        """O += P V: P rounded where it lies, each warpgroup its half of V's columns; the copies of the next tile."""
        shape, atom, stage = self.shape, self.shape.output_atom, self._stage
        a = p.values.astype(shape.dtype).reshape(self.programs, GROUPS, 128, -1)
        self.hazards.read_async(self._used[f"k{stage}"], "k wgmma of P V", stage)
        b = along_rows(shape.places[f"k{stage}"], shape.latent[1] // GROUPS, shape.dtype)
        c, regs = o.values.reshape(self.programs, GROUPS, 128, -1), a.shape[-1] // len(b)
        for step in range(len(b)):
            values = self.smem.load(b[step][None], shape.dtype)[..., 0]  # [programs, groups, columns, k]
            c = atom.mma(a[..., regs * step : regs * (step + 1)], values.swapaxes(2, 3), c)
        self._count("pv", len(b) * np.ones(WARPS, np.int64), shape.BN * shape.latent[1] // GROUPS, active)
        self.hazards.barrier()
        self._fetch(self._fetched[-1] + shape.BN)
        return o.with_values(c.reshape(o.values.shape))

    def drain(self) -> None:
        """The last product, and the copies past the end of the loop."""
        self.hazards.wait_mma(0)
        self.hazards.wait_group(0)
        self.hazards.barrier()

    @property
    def _stage(self) -> int:
        """Place of the tile that was fetched last."""
        return (len(self._fetched) - 1) % STAGES

    def _fetch(self, start: Array) -> None:
        """Begin to copy the tile at ``start``; past the end of a program's keys it brings zeros."""
        self._fetched.append(np.asarray(start))
        for part, tiles in zip(("k", "rope"), self.tiles, strict=True):
            tiles.tile_start_row = start
            self.copies.by_cp_async(part, tiles.next_tile(), self._stage, f"{part}{self._stage}")
            self.hazards.commit_group()

    def _add_scores(self, q: str, k: str, s: Fragments, active: Array) -> Fragments:
        """S + Q K^T over the columns of a part. Both warpgroups find the same; it is found once."""
        shape, atom, half = self.shape, self.shape.scores_atom, self.shape.BN // 2
        a, b = (along_columns(shape.places[at], rows, shape.dtype) for at, rows in ((q, ROWS), (k, half)))
        for at, what, stage in ((q, q, None), (k, k[:-1], self._stage)):
            self.hazards.read_async(self._used[at], f"{what} wgmma", stage)
        c = s.values[:, :128].reshape(self.programs, 128, 2, -1).swapaxes(1, 2)  # [programs, halves, 128, registers]
        for step in range(len(a)):
            rows = self.smem.load(a[step][None], shape.dtype)[..., 0]  # [programs, 1, 64, k]
            keys = self.smem.load(b[step][None], shape.dtype)[..., 0]  # [programs, halves, BN / 2, k]
            c = atom.mma(atom.fragment_a(rows), keys.swapaxes(2, 3), c)
        self.hazards.wait_mma(0)
        instructions = 2 * len(a) * np.ones(WARPS, np.int64)
        self._count("qk", instructions, 2 * (ROWS + half) * shape.columns(k)[1], active)
        registers = c.swapaxes(1, 2).reshape(self.programs, 128, 1, -1)
        return s.with_values(np.concatenate([registers] * GROUPS, axis=1))

    def _by_row(self, x: Fragments, combine: np.ufunc) -> Array:
        parts = x.values[:, :128].reshape(self.programs, 4, 8, 4, -1, 2, 2)
        lane = in_turn(combine, parts.swapaxes(4, 5).reshape(*parts.shape[:4], 2, -1))
        rows = butterfly(combine, lane.swapaxes(3, 4))  # [programs, warps, 8 rows, halves]
        return rows.swapaxes(2, 3).reshape(self.programs, ROWS)

    def _count(self, product: str, instructions: IntArray, elements: int, active: Array) -> None:
        """wgmma of each warp, and the elements of shared memory that a warpgroup's take."""
        programs = int(active.sum())
        self.traffic.issue(f"{product} wgmma", instructions * programs)
        self.traffic.move("SMEM->tensor cores", GROUPS * elements * self.shape.dtype.itemsize * programs)

    def _tile(self, at: str) -> SharedTile:
        return SharedTile(self.smem, self.shape.places[at], self.shape.dtype)

    def _copied_to(self, at: str) -> tuple[TileCopyPlan, IntArray]:
        """The plan of a place, and the address of each of its vectors."""
        place, (columns, _) = self.shape.places[at], self.shape.columns(at)
        plan = copy_plan(place.rows, 16 * place.vectors, columns * place.itemsize, WARPS)
        return plan, place.address(plan.row, plan.byte // 16)
