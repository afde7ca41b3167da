"""A CTA whose warps are specialised: TMA, mbarriers and wgmma on swizzled panels, and the warps of each partition."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvlab.hardware import TmaDescriptor, get_atom, tma
from kvlab.staging.nvidia.wgmma_plan import K_BYTES, SUFFIX, PanelTile
from kvlab.staging.record.async_barrier import AsyncBarrier
from kvlab.staging.record.footprint import ByteCells, Footprint
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import FragmentMap, Fragments
from kvlab.staging.tile.launched_cta import LaunchedCTA
from kvlab.staging.tile.tile_copies import copy_boxes

from .turns import Wait

Array = np.ndarray[Any, Any]
Warps = tuple[int, ...]
UNIT = 16  # bytes: what is known of shared memory is known by vectors


class Places:
    """Places of tiles in shared memory, one after the other as panels of 128 bytes a row, swizzled, then ``more``
    bytes; and which bytes each warp touches. All CTAs of all launches share the footprints.

    sizes       role -> how many buffers, their rows and columns, and the bytes of an element (2)
    partitions  how many warps each has
    tiles       role -> its buffers
    behind      where the bytes behind the tiles begin
    nbytes      of shared memory

    >>> places = Places({"k": (2, 64, 64)}, {"a warpgroup": 4, "the producer": 1}, more=256)
    >>> places.partitions, places.tiles["k"][1].base, places.behind, places.nbytes
    ({'a warpgroup': (0, 1, 2, 3), 'the producer': (4,)}, 8192, 16384, 16640)
    >>> places.whole("k", 0, (4,)).moved.tolist()
    [0, 0, 0, 0, 8192]
    >>> places.shared(places.tiles["k"][0], (0, 1, 2, 3), together=16, first=16).moved.tolist()
    [0, 2048, 2048, 2048, 0]
    """

    def __init__(self, sizes: Mapping[str, tuple[int, ...]], partitions: Mapping[str, int], more: int = 0) -> None:
        self.tiles: dict[str, list[PanelTile]] = {}
        self.partitions: dict[str, Warps] = {}
        self.behind = self.warps = 0
        for role, (n, *size) in sizes.items():
            one = PanelTile(size[0], size[1], self.behind, *size[2:])
            self.tiles[role] = [replace(one, base=self.behind + i * one.nbytes) for i in range(n)]
            self.behind += n * one.nbytes
        for name, n in partitions.items():
            self.partitions[name] = tuple(range(self.warps, self.warps + n))
            self.warps += n
        self.nbytes = self.behind + more
        self.cells = ByteCells(self.nbytes, self.warps, unit=UNIT)
        self._made: dict[Hashable, Footprint] = {}

    def whole(self, role: str, i: int, warps: Warps) -> Footprint:
        """A buffer, all of which each of ``warps`` touches: as TMA or wgmma do."""
        place = self.tiles[role][i]
        return self.region(place.base, place.nbytes, warps)

    def region(self, start: int, nbytes: int, warps: Warps) -> Footprint:
        """Bytes that each of ``warps`` touches."""
        return self.once((start, nbytes, warps), lambda: self.cells.region(start, nbytes, warps))

    def shared(
        self, place: PanelTile, warps: Warps, together: int, first: int = 0, stop: int | None = None
    ) -> Footprint:
        """The rows of a tile from ``first`` to ``stop - 1``, which four warps share out, ``together`` rows in turn."""

        def make() -> Footprint:
            row, vector = np.ogrid[first : place.rows if stop is None else stop, : place.vectors]
            return self.cells.footprint(place.address(row, vector), 16, warps[0] + row // together % 4)

        return self.once((place, warps, together, first, stop), make)

    def once(self, key: Hashable, make: Callable[[], Footprint]) -> Footprint:
        """The footprint called ``key``, made where there is none."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class PartitionedCTA(LaunchedCTA):
    """Shared memory of ``places`` on sm_90, and what is done to it; every access, wait and arrival is stated to
    ``hazards``, in the order of the PTX. ``me`` are the warps of a partition.

    An arrival or a copy of TMA is one thread's; before it the warps of its partition meet, as the compiler has it.

    C       constants of the kernel
    dtype   of the operands of wgmma
    boxes   what TMA copies

    >>> cta = PartitionedCTA(None, Places({}, {"all": 4}, more=64), np.dtype(np.float16), {}, Traffic())
    >>> bar, = cta.barriers("k free", 1)
    >>> cta.arrive((0, 1, 2, 3), bar)
    >>> bar.try_wait(0), bar.try_wait(1)
    (True, False)
    """

    def __init__(
        self, C: Any, places: Places, dtype: np.dtype[Any], boxes: dict[str, TmaDescriptor], traffic: Traffic,
        *, traced: bool = True,
    ) -> None:
        self.C, self.places, self.dtype, self.boxes = C, places, dtype, boxes
        super().__init__(
            places.nbytes, places.warps, "sm_90", None, traffic, traced=traced, cells=places.cells,
            partitions=places.partitions,
        )
        self.start(C)

    def start(self, C: Any) -> None:
        """Makes the mbarriers of a kernel, before its partitions begin."""

    def barriers(self, name: str, n: int, arrivals: int = 1) -> list[AsyncBarrier]:
        """mbarriers called ``name[0]``, ``name[1]``, ..."""
        return [self.hazards.mbarrier(f"{name}[{i}]", arrivals) for i in range(n)]

    def meet(self, me: Warps) -> None:
        """The barrier of a partition."""
        self.hazards.barrier(me, me, name=1 + me[0] // 4)

    def elect(self, me: Warps) -> Warps:
        """The warp whose thread does what one thread does, once all warps of the partition are here."""
        self.meet(me)
        return me[:1]

    def arrive(self, me: Warps, bar: AsyncBarrier) -> None:
        """One thread arrives."""
        bar.arrive(self.elect(me))

    def sync(self, bar: AsyncBarrier, phase: int) -> Wait:
        """Object to wait for at a barrier of the hardware, which counts its phases itself."""
        return bar, phase

    def wait_mma(self, me: Warps, n: int) -> None:
        """At most ``n`` products go on."""
        self.hazards.wait_mma(n, me)

    def load(
        self, me: Warps, box: str, role: str, i: int, bar: AsyncBarrier, at: tuple[Any, ...], offset: Array
    ) -> None:
        """Boxes of TMA to buffer ``i`` of a role, byte ``offset`` of it each, whose bytes an mbarrier expects."""
        place = self.places.tiles[role][i]
        into, what = self.places.whole(role, i, me), f"{role.split()[0]} copy"
        copy_boxes(self.smem, self.hazards, self.boxes[box], at, place.base + offset, into, bar, what, i)
        self.traffic.move("DRAM->SMEM", place.nbytes)

    def store(self, box: str, at: tuple[Any, ...], address: Array | int) -> None:
        """Boxes of TMA from shared memory at ``address`` to ``at``."""
        tma.store(self.boxes[box], at, self.smem, address)

    def write(
        self, me: Warps, place: PanelTile, values: Array, what: str, i: int | None = None, together: int = 16
    ) -> None:
        """``values`` of a tile, ``together`` rows a warp in turn."""
        self.hazards.write(self.places.shared(place, me, together), f"{what} write", i)
        address = place.address(np.arange(place.rows)[:, None], np.arange(place.vectors))
        self.smem.store(address, values.reshape(*address.shape, -1))

    def zero_rows(self, place: PanelTile, row: Array) -> None:
        """Zeros to some rows of a tile."""
        address = place.address(row[:, None], np.arange(place.vectors))
        self.smem.store(address, np.zeros((*address.shape, 16), np.uint8))

    def load_a(self, at: PanelTile) -> Array:
        """wgmma's first operand in registers, ``[1, 1, threads, elements]``: step after step along its columns."""
        depth = K_BYTES // self.dtype.itemsize
        parts = (self._along_columns(at, col) for col in range(0, at.cols, depth))
        return np.concatenate([self._atom(self.dtype, 8).fragment_a(part) for part in parts], -1)

    def multiply_qk(self, q: PanelTile | Array, k_at: PanelTile, s: Array, columns: int | None = None) -> Array:
        """S + Q K^T of the first ``columns`` (None: all), Q from shared memory or as ``load_a`` has it, K from there; S
        ``[1, 1, threads, registers]`` float32.
        """
        atom, depth = self._atom(self.dtype, k_at.rows), K_BYTES // self.dtype.itemsize
        a = self.load_a(q) if isinstance(q, PanelTile) else q
        for col in range(0, columns or k_at.cols, depth):
            k = self._along_columns(k_at, col)
            s = atom.mma(a[..., col // 2 : (col + depth) // 2], k.swapaxes(2, 3), s)
        return s

    def multiply_pv(self, p: Fragments | PanelTile, v_at: PanelTile, o: Fragments) -> Fragments:
        """O + P V, both of 16 bits: P from registers or shared memory, V from there, transposed by the unit."""
        dtype, atom, c = self.dtype, self._atom(self.dtype, v_at.cols), o.values.reshape(1, 1, 128, -1)
        for key in range(0, v_at.rows, 16):
            if isinstance(p, PanelTile):
                rows = self._operand(p.descriptor(0, key, along_rows=False).addresses(p.rows, 16, dtype), dtype)
                a = atom.fragment_a(rows)
            else:
                a = p.values.reshape(1, 1, 128, -1)[..., key // 2 : key // 2 + 8]
            v = self._operand(v_at.descriptor(key, 0, along_rows=True).addresses(v_at.cols, 16, dtype, "MN"), dtype)
            c = atom.mma(a, v.swapaxes(2, 3), c)
        return o.with_values(c.reshape(o.values.shape))

    def multiply_pv_transposed(self, p: Array, v_at: PanelTile, o: Fragments) -> Fragments:
        """O + P V, both of 8 bits: P ``[1, 1, threads, keys / 2]`` as wgmma's registers have it, V from shared memory
        with its keys along the rows.
        """
        dtype, atom, c = self.dtype, self._atom(self.dtype, v_at.rows), o.values.reshape(1, 1, 128, -1)
        for key in range(0, v_at.cols, K_BYTES):
            at = v_at.descriptor(0, key, along_rows=False).addresses(v_at.rows, K_BYTES, dtype)
            c = atom.mma(p[..., key // 2 : (key + K_BYTES) // 2], self._operand(at, dtype).swapaxes(2, 3), c)
        return o.with_values(c.reshape(o.values.shape))

    def _along_columns(self, at: PanelTile, col: int) -> Array:
        """The columns of one product from ``col`` on, ``[1, 1, rows, depth]``."""
        at_col = at.descriptor(0, col, along_rows=False)
        return self._operand(at_col.addresses(at.rows, K_BYTES // self.dtype.itemsize, self.dtype), self.dtype)

    def _atom(self, dtype: np.dtype[Any], columns: int) -> Any:
        return get_atom(f"wgmma.m64n{columns}k{K_BYTES // dtype.itemsize}.{SUFFIX[dtype.name]}")

    def _operand(self, address: Array, dtype: np.dtype[Any]) -> Array:
        """``[1, 1, rows, depth]`` elements at ``address``."""
        return self.smem.load(address, dtype)[None, None, ..., 0]


@functools.cache
def accumulator(columns: int) -> FragmentMap:
    """wgmma's accumulator of 64 rows: warp w has the rows ``16 w ...``.

    >>> accumulator(64).row[:, 0, 0].reshape(4, 32)[:, 0].tolist()
    [0, 16, 32, 48]
    """
    thread, repeat, r = np.ogrid[:128, :1, : columns // 2]
    row, col = get_atom(f"wgmma.m64n{columns}k16.bf16").c(thread, r)
    return FragmentMap((64, columns), row + 0 * repeat, np.broadcast_to(col + 0 * repeat, row.shape), warp_size=32)
