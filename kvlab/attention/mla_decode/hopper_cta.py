"""A CTA of the Hopper MLA decode kernel: shared memory, mbarriers, TMA and wgmma that is waited for."""

from __future__ import annotations

import functools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.attention.mha_prefill.hopper_cta import Wait
from kvlab.hardware import SharedMemBarrier, TmaDescriptor, get_atom, tma
from kvlab.memory import AddressSpace, Memory
from kvlab.staging import Fragments, Traffic
from kvlab.staging.fragments import FragmentMap
from kvlab.staging.wgmma_cta import PanelTile

from .hopper_config import Constants

__all__ = ["HopperCTA", "Product"]

Array = np.ndarray[Any, Any]


@dataclass
class Product:
    """wgmmas that were started: what they add to, and their steps, each two operands in shared memory (A may be
    registers instead).
    """

    what: str
    acc: Fragments
    steps: list[tuple[Any, Array]]
    reads: list[PanelTile]


class HopperCTA:
    """Shared memory as panels of 128 bytes a row, swizzled: Q, NB stages of latent rows, P; and what is done to it.

    A product reads its operands when it is waited for. ``RuntimeError`` where a copy or a store meets memory that a
    started product still reads, or a product memory that was stored to without a fence.
    """

    def __init__(self, C: Constants, dtype: np.dtype[Any], boxes: dict[str, TmaDescriptor], traffic: Traffic) -> None:
        self.C, self.dtype, self.boxes, self.traffic = C, dtype, boxes, traffic
        sizes = {"q": C.DV, "q_rope": C.DR, "p": C.BN} | {f"k{b}": C.DV for b in range(C.NB)}
        sizes |= {f"k_rope{b}": C.DR for b in range(C.NB)}
        self.places: dict[str, PanelTile] = {}
        end = 0
        for name, cols in sizes.items():
            self.places[name] = PanelTile(64, cols, end)
            end += self.places[name].nbytes
        self.smem = Memory(end, space=AddressSpace.SHARED, name="shared memory")
        self.alpha, self.inv = (np.full(C.BM, np.nan, np.float32) for _ in range(2))
        self.q_full, self.q_free, self.p_full, self.s_done = (SharedMemBarrier() for _ in range(4))
        self.l_full, self.l_free, self.r_full, self.r_free = ([SharedMemBarrier() for _ in range(C.NB)] for _ in "1234")
        self.started: list[Product] = []
        self.unfenced: list[PanelTile] = []
        self.pause: Wait = (SharedMemBarrier(), 1)
        """A wait that is over: the other roles may run meanwhile."""

    def half(self, b: int, half: int) -> PanelTile:
        """The columns of stage b that are one warpgroup's V."""
        cols = self.C.DV // 2
        return PanelTile(self.C.BN, cols, self.places[f"k{b}"].base + half * self.C.BN * cols * 2)

    def load_queries(self, batch: int, token: int, head: int) -> None:
        """TB tokens x HB heads, panel by panel, all on one mbarrier."""
        C = self.C
        self.q_full.expect_bytes(C.BM * (C.DV + C.DR) * 2)
        for name, first in (("q", 0), ("q_rope", C.DV)):
            place = self.places[name]
            self._copied(place)
            panel = np.arange(0, place.cols, 64)
            address = place.base + panel * place.rows * 2
            tma.load(self.boxes["q"], (batch, token, head, first + panel), self.smem, address, self.q_full)
            self.traffic.move("DRAM->SMEM", place.nbytes)

    def load_keys(self, box: str, place: PanelTile, bar: SharedMemBarrier, col: int, pages: Array, row: int) -> None:
        """Columns from ``col`` on of a block's keys: boxes of BOX keys and one panel."""
        self._copied(place)
        panel, box_row = np.arange(0, place.cols, 64)[:, None], np.arange(0, self.C.BN, self.C.BOX)
        address = place.base + panel * place.rows * 2 + box_row * 128  # [panels, boxes]
        tma.load(self.boxes[box], (pages, row, col + panel), self.smem, address, bar)
        self.traffic.move("DRAM->SMEM", place.nbytes)

    def start_scores(self, b: int, phase: int) -> Generator[Wait, None, Product]:
        """S = Q K^T of stage b, started in parts as they arrive: left half, rope, right half. Returns the product."""
        C = self.C
        q_left, q_right = (PanelTile(C.BM, C.DV // 2, self.places["q"].base + h * C.BM * C.DV) for h in (0, 1))
        rope = self.places["q_rope"], self.places[f"k_rope{b}"]
        product = self._start("Q K^T", Fragments.zeros(1, _accumulator(C.BN)))
        for q, k in ((q_left, self.half(b, 0)), rope, (q_right, self.half(b, 1))):
            yield (self.r_full if q is q_right else self.l_full)[b], phase
            self._read(product, q, k)
            for at in range(0, k.cols, 16):
                a = q.descriptor(0, at, along_rows=False).addresses(C.BM, 16, self.dtype)
                product.steps.append((a, k.descriptor(0, at, along_rows=False).addresses(C.BN, 16, self.dtype)))
        return product

    def start_values(self, p: Fragments | None, b: int, half: int, o: Fragments) -> Product:
        """O += P V with half the columns of stage b, started; P in registers, or None: from shared memory."""
        C, v = self.C, self.half(b, half)
        product = self._start(f"P V{half}", o)
        self._read(product, v, *([] if p is not None else [self.places["p"]]))
        for key in range(0, C.BN, 16):
            if p is not None:
                a = p.values.reshape(1, 1, 128, -1)[..., key // 2 : key // 2 + 8]
            else:
                a = self.places["p"].descriptor(0, key, along_rows=False).addresses(C.BM, 16, self.dtype)
            product.steps.append((a, v.descriptor(key, 0, along_rows=True).addresses(v.cols, 16, self.dtype, "MN")))
        return product

    def finish(self, product: Product) -> Fragments:
        """The accumulator, once the product is done."""
        columns = product.acc.map.shape[1]
        atom = get_atom(f"wgmma.m64n{columns}k16.{'bf16' if self.dtype.name == 'bfloat16' else 'f16'}")
        c = product.acc.values.reshape(1, 1, 128, -1)
        for a, b in product.steps:
            left = a if a.dtype == self.dtype else atom.fragment_a(self._operand(a))
            c = atom.mma(left, self._operand(b).swapaxes(2, 3), c)
        self.started.remove(product)
        self.traffic.move("SMEM->tensor cores", sum(place.nbytes for place in product.reads))
        return product.acc.with_values(c.reshape(product.acc.values.shape))

    def send(self, p: Fragments, alpha: Array) -> None:
        """P and what O is multiplied by, for the other warpgroup."""
        place = self.places["p"]
        self._stored(place)
        address = place.address(np.arange(place.rows)[:, None], np.arange(place.vectors))
        self.smem.store(address, p.tile()[0].reshape(*address.shape, 8))
        self.alpha = alpha
        self.fence()
        self.p_full.arrive()

    def clean_rows(self, b: int, half: int, end: int) -> None:
        """Zero the rows of half a V tile from ``end`` on."""
        place = self.half(b, half)
        self._stored(place)
        address = place.address(np.arange(end, place.rows)[:, None], np.arange(place.vectors))
        self.smem.store(address, np.zeros((*address.shape, 16), np.uint8))
        self.fence()

    def fence(self) -> None:
        """What was stored, wgmma and TMA may see."""
        self.unfenced.clear()

    def zeros(self) -> Fragments:
        """Half the output accumulator."""
        return Fragments.zeros(1, _accumulator(self.C.DV // 2))

    def _start(self, what: str, acc: Fragments) -> Product:
        product = Product(what, acc, [], [])
        self.started.append(product)
        return product

    def _read(self, product: Product, *places: PanelTile) -> None:
        for place in places:
            if any(_meet(place, other) for other in self.unfenced):
                raise RuntimeError(f"{product.what} reads bytes from {place.base} on that were stored without a fence")
        product.reads.extend(places)

    def _copied(self, place: PanelTile) -> None:
        for product in self.started:
            if any(_meet(place, other) for other in product.reads):
                raise RuntimeError(f"bytes from {place.base} on are written while {product.what} still reads them")

    def _stored(self, place: PanelTile) -> None:
        self._copied(place)
        self.unfenced.append(place)

    def _operand(self, address: Array) -> Array:
        """``[1, 1, rows, 16]`` elements at ``address``."""
        return self.smem.load(address, self.dtype)[None, None, ..., 0]


def _meet(one: PanelTile, other: PanelTile) -> bool:
    return one.base < other.base + other.nbytes and other.base < one.base + one.nbytes


@functools.cache
def _accumulator(columns: int) -> FragmentMap:
    """wgmma's accumulator of 64 rows: warp w has the rows ``16 w ...``."""
    thread, repeat, r = np.ogrid[:128, :1, : columns // 2]
    row, col = get_atom(f"wgmma.m64n{columns}k16.bf16").c(thread, r)
    return FragmentMap((64, columns), row + 0 * repeat, np.broadcast_to(col + 0 * repeat, row.shape), warp_size=32)
