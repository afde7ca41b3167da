"""A CTA whose warps are specialised: TMA, mbarriers and wgmma on swizzled panels, and the warps of each partition."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from kvlab.hardware import TmaDescriptor, get_atom
from kvlab.staging.nvidia.wgmma_plan import K_BYTES, SUFFIX, PanelTile
from kvlab.staging.record.async_barrier import AsyncBarrier
from kvlab.staging.record.footprint import ByteCells, Footprint
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import FragmentMap, Fragments
from kvlab.staging.tile.launched_cta import LaunchedCTA

Array = np.ndarray[Any, Any]
Warps = tuple[int, ...]
UNIT = 16  # bytes: what is known of shared memory is known by vectors


class Places:
    """Which bytes of shared memory each warp touches. All CTAs of all launches share the footprints.

    nbytes      of shared memory
    partitions  the warps of each
    warps       their number

    >>> places = Places(8192, {"a warpgroup": (0, 1, 2, 3), "the producer": (4,)})
    >>> places.warps, places.region(0, 128, (4,)).moved.tolist()
    (5, [0, 0, 0, 0, 128])
    >>> places.shared(PanelTile(64, 64, 0), (0, 1, 2, 3), together=16, first=16).moved.tolist()
    [0, 2048, 2048, 2048, 0]
    """

    def __init__(self, nbytes: int, partitions: dict[str, Warps]) -> None:
        self.nbytes, self.partitions = nbytes, partitions
        self.warps = sum(map(len, partitions.values()))
        self.cells = ByteCells(nbytes, self.warps, unit=UNIT)
        self._made: dict[Hashable, Footprint] = {}

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

    dtype   of the operands of wgmma
    boxes   what TMA copies

    >>> cta = PartitionedCTA(Places(64, {"all": (0, 1, 2, 3)}), np.dtype(np.float16), {}, Traffic())
    >>> bar, = cta.barriers("k free", 1)
    >>> cta.arrive((0, 1, 2, 3), bar)
    >>> bar.try_wait(0), bar.try_wait(1)
    (True, False)
    """

    def __init__(
        self, places: Places, dtype: np.dtype[Any], boxes: dict[str, TmaDescriptor], traffic: Traffic,
        *, traced: bool = True,
    ) -> None:
        self.dtype, self.boxes = dtype, boxes
        super().__init__(
            places.nbytes, places.warps, "sm_90", None, traffic, traced=traced, cells=places.cells,
            partitions=places.partitions,
        )

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

    def wait_mma(self, me: Warps, n: int) -> None:
        """At most ``n`` products go on."""
        self.hazards.wait_mma(n, me)

    def load_a(self, at: PanelTile) -> Array:
        """wgmma's first operand in registers, ``[1, 1, threads, elements]``: step after step along its columns."""
        depth = K_BYTES // self.dtype.itemsize
        parts = (self._along_columns(at, col) for col in range(0, at.cols, depth))
        return np.concatenate([self._atom(self.dtype, 8).fragment_a(part) for part in parts], -1)

    def multiply_qk(self, q: PanelTile | Array, k_at: PanelTile, s: Array) -> Array:
        """S + Q K^T, Q from shared memory or as ``load_a`` has it, K from there; S ``[1, 1, threads, registers]``
        float32.
        """
        atom, depth = self._atom(self.dtype, k_at.rows), K_BYTES // self.dtype.itemsize
        a = self.load_a(q) if isinstance(q, PanelTile) else q
        for col in range(0, k_at.cols, depth):
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
