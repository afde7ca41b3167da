"""A CTA of the Hopper prefill kernel: shared memory, mbarriers, TMA and wgmma, and the roles that share them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvlab.hardware import BarrierDeadlock, SharedMemBarrier, TmaDescriptor, get_atom, tma
from kvlab.memory import AddressSpace, Memory
from kvlab.staging import Fragments, Traffic
from kvlab.staging.fragments import FragmentMap
from kvlab.staging.wgmma_cta import PanelTile

from .hopper_config import Constants

__all__ = ["HopperCTA", "Wait", "run_roles"]

Array = np.ndarray[Any, Any]
Wait = tuple[SharedMemBarrier, int]
"""A barrier and the parity of the phase that a role waits for."""


class HopperCTA:
    """Shared memory as the kernel lays it out, and what is done to it.

    Buffers of Q (NQ) and O for each consumer, of K and V for each stage, all as panels of 128 bytes a row, swizzled.
    """

    def __init__(self, C: Constants, dtype: np.dtype[Any], boxes: dict[str, TmaDescriptor], traffic: Traffic) -> None:
        self.C, self.dtype, self.boxes, self.traffic = C, dtype, boxes, traffic
        self.words = [[0] * 6 for _ in range(C.NQ)]
        self.q, end = _buffers(C.NQ * C.NC, C.BM, C.D, 0)
        self.k, end = _buffers(C.NB, C.BN, C.D, end)
        self.v, end = _buffers(C.NB, C.BN, C.DV, end)
        self.o, end = _buffers(C.NC, C.BM, C.DV // C.ROUNDS, end)
        self.smem = Memory(end, space=AddressSpace.SHARED, name="shared memory")
        counts = ((C.NQ * C.NC, 1), (C.NQ * C.NC, 1), (C.NB, 1), (C.NB, C.NC), (C.NB, 1), (C.NB, C.NC))
        self.q_full, self.q_free, self.k_full, self.k_free, self.v_full, self.v_free = (
            [SharedMemBarrier(arrivals) for _ in range(n)] for n, arrivals in counts
        )

    def load_rows(
        self, role: str, bar: SharedMemBarrier, b: int, batch: int, first: int, head: int, key: int = 0,
        num_keys: int = 0, table: Array | None = None,
    ) -> None:  # fmt: skip
        """A tile: boxes of some rows and one panel of columns, all on one mbarrier. Pages past the end read as 0."""
        place, box = getattr(self, role)[b], self.boxes[role]
        bar.expect_bytes(place.nbytes)
        token = key + np.arange(0, place.rows, box.box[1])
        page, row = np.full(len(token), batch), first + token
        if table is not None:
            named = table[np.minimum(token // self.C.PAGE, len(table) - 1)].astype(np.int64)
            page, row = np.where(token < num_keys, named, box.shape[0]), token % self.C.PAGE
        panel = np.arange(0, place.cols, 64)[:, None]
        address = place.base + panel // 64 * place.rows * 128 + (token - key) * 128  # [panels, boxes]
        tma.load(box, (page, row, head, panel), self.smem, address, bar)
        self.traffic.move("DRAM->SMEM", place.nbytes)

    def clean_rows(self, b: int, end: int) -> None:
        """Zero the rows of a V tile from ``end`` on: what stands behind a sequence may be anything."""
        place = self.v[b]
        address = place.address(np.arange(end, place.rows)[:, None], np.arange(place.vectors))
        self.smem.store(address, np.zeros((*address.shape, 16), np.uint8))

    def scores(self, u: int, b: int) -> Fragments:
        """S = Q K^T of buffer u and stage b, both operands from shared memory: ``[BM, BN]`` float32."""
        C, atom = self.C, self._atom(self.C.BN)
        c = np.zeros((1, 1, 128, C.BN // 2), np.float32)
        for k in range(0, C.D, 16):
            q = self._operand(self.q[u].descriptor(0, k, along_rows=False).addresses(C.BM, 16, self.dtype))
            key = self._operand(self.k[b].descriptor(0, k, along_rows=False).addresses(C.BN, 16, self.dtype))
            c = atom.mma(atom.fragment_a(q), key.swapaxes(2, 3), c)
        self.traffic.move("SMEM->tensor cores", (C.BM + C.BN) * C.D * 2)
        return Fragments(c.reshape(1, 128, 1, -1), _accumulator(C.BN))

    def accumulate(self, p: Fragments, b: int, o: Fragments) -> Fragments:
        """O += P V: P from registers, V from shared memory, transposed by the unit."""
        C, atom = self.C, self._atom(self.C.DV)
        c, a = o.values.reshape(1, 1, 128, -1), p.values.reshape(1, 1, 128, -1)
        for key in range(0, C.BN, 16):
            v = self._operand(self.v[b].descriptor(key, 0, along_rows=True).addresses(C.DV, 16, self.dtype, "MN"))
            c = atom.mma(a[..., key // 2 : key // 2 + 8], v.swapaxes(2, 3), c)
        self.traffic.move("SMEM->tensor cores", C.BN * C.DV * 2)
        return o.with_values(c.reshape(o.values.shape))

    def zeros(self) -> Fragments:
        """An output accumulator ``[BM, DV]``."""
        return Fragments.zeros(1, _accumulator(self.C.DV))

    def store_columns(self, w: int, values: Array, batch: int, row: int, head: int, col: int) -> None:
        """``values``, the columns of O from ``col`` on, through shared memory to the output."""
        place = self.o[w]
        address = place.address(np.arange(place.rows)[:, None], np.arange(place.vectors))
        self.smem.store(address, values.reshape(*address.shape, 8))
        panel = np.arange(0, place.cols, 64)
        tma.store(self.boxes["o"], (batch, row, head, col + panel), self.smem, place.base + panel * place.rows * 2)
        self.traffic.move("registers->DRAM", values.nbytes)

    def _atom(self, columns: int) -> Any:
        return get_atom(f"wgmma.m64n{columns}k16.{'bf16' if self.dtype.name == 'bfloat16' else 'f16'}")

    def _operand(self, address: Array) -> Array:
        """``[1, 1, rows, 16]`` elements at ``address``."""
        return self.smem.load(address, self.dtype)[None, None, ..., 0]


def _buffers(n: int, rows: int, cols: int, base: int) -> tuple[list[PanelTile], int]:
    """``n`` tiles one after the other, and where they end."""
    size = rows * cols * 2
    return [PanelTile(rows, cols, base + i * size) for i in range(n)], base + n * size


@functools.cache
def _accumulator(columns: int) -> FragmentMap:
    """wgmma's accumulator of 64 rows: warp w has the rows ``16 w ...``."""
    thread, repeat, r = np.ogrid[:128, :1, : columns // 2]
    row, col = get_atom(f"wgmma.m64n{columns}k16.bf16").c(thread, r)
    return FragmentMap((64, columns), row + 0 * repeat, np.broadcast_to(col + 0 * repeat, row.shape), warp_size=32)


def run_roles(roles: list[Iterator[Wait]], order: np.random.Generator | None = None) -> None:
    """Run the roles of all CTAs, each until it waits, in turn until all have ended. BarrierDeadlock if none can go on.

    order : with a generator, whose turn it is is drawn at every wait, some roles more often than others.

    >>> bar = SharedMemBarrier()
    >>> def waits():
    ...     yield bar, 0
    ...     print("woken")
    >>> def arrives():
    ...     print("arrives")
    ...     bar.arrive()
    ...     yield from ()
    >>> run_roles([waits(), arrives()])
    arrives
    woken
    """
    waits: dict[int, Wait | None] = dict.fromkeys(range(len(roles)))
    pace = None if order is None else order.random(len(roles)) ** 4
    while waits:
        ready = [i for i, wait in waits.items() if wait is None or wait[0].try_wait(wait[1])]
        if not ready:
            raise BarrierDeadlock(f"all {len(waits)} roles wait: {list(waits.values())}")
        if order is not None and pace is not None:
            ready = [int(order.choice(ready, p=pace[ready] / pace[ready].sum()))]
        for i in ready:
            wait = waits[i]
            while wait is None or wait[0].try_wait(wait[1]):
                try:
                    waits[i] = wait = next(roles[i])
                except StopIteration:
                    del waits[i]
                    break
                if order is not None:
                    break
