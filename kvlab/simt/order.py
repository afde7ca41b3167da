"""Order of accesses to shared memory and to the registers of products: a wait, a barrier or a fence that was forgotten
raises where its lack is met.

Warps have vector clocks: a barrier, or an arrival at an mbarrier and the wait for it, hands on what a warp has done. A
read of what another warp wrote, or a write over what another warp read, needs such a way between them
(:class:`Race`). Of several readers of one word the last is known; pieces below 4 bytes are not followed, nor are
atomics and memory that CTAs share. Products of wgmma and boxes on their way out of shared memory go on behind the
instruction: until they are waited for, their registers may not be touched and what they read may not be written
(:class:`Unwaited`). What stores wrote, wgmma and TMA read behind a fence of the proxies (:class:`Unfenced`); what
cp.async brought needs none here, as Triton 3.6 puts none behind it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from .ptx import Program
from .values import Array, Mask, Operands, Step

if TYPE_CHECKING:
    from .machine import SimtMachine

_REGISTER = re.compile(r"%[\w$]+")
_WORD, _CHUNK, _BITS = 4, 16, 5
_NOBODY = -1


class Race(RuntimeError):
    """Two warps at one word of shared memory, one of which writes, with no barrier between them."""

    __module__ = "kvlab.simt"


class Unwaited(RuntimeError):
    """A use of what an asynchronous instruction still works on: its wait is missing."""

    __module__ = "kvlab.simt"


class Unfenced(RuntimeError):
    """A read by wgmma or TMA of what stores have written, without ``fence.proxy.async``; or a product whose registers
    were written without ``wgmma.fence``."""

    __module__ = "kvlab.simt"


class Groups:
    """Groups of asynchronous instructions of each warp: how many it has closed, how many it knows to have ended, and
    which of them read each 16 bytes of the shared memory of its CTA last."""

    def __init__(self, ctas: int, warps: int, nbytes: int, what: str, wait: str) -> None:
        self.shape, self.what, self.wait = (ctas, warps, -(-nbytes // _CHUNK) + 1), what, wait
        self.closed = np.zeros(ctas * warps, np.int32)
        self.ended = np.zeros(ctas * warps, np.int32)
        self.last = np.full(ctas * warps, _NOBODY, np.int32)  # that reads
        self._reads: Array | None = None

    def close(self, warps: Array) -> None:
        """The warps close a group."""
        self.closed[warps] += 1

    def end(self, warps: Array, left: int) -> None:
        """The warps have waited for all closed groups but the last ``left``."""
        self.ended[warps] = np.maximum(self.ended[warps], self.closed[warps] - left)

    def read(self, cta: Array, warp: Array, where: Array) -> None:
        """The open group of a warp ``[n]`` reads 16 bytes at each of ``[n, chunks]``."""
        if self._reads is None:
            self._reads = np.full(self.shape, _NOBODY, np.int32)
        group = self.closed.reshape(self.shape[:2])[cta, warp]
        self._reads[cta[:, None], warp[:, None], where // _CHUNK] = group[:, None]
        self.last[cta * self.shape[1] + warp] = group

    def check(self, cta: Array, where: Array, nbytes: int) -> None:
        """Raise :class:`Unwaited` where a piece that is written ``[n]`` is still read."""
        if self._reads is None:
            return
        chunk = where[:, None] // _CHUNK + np.arange(-(-nbytes // _CHUNK))
        busy = self._reads[cta[:, None], :, chunk] >= self.ended.reshape(self.shape[:2])[cta][:, None]
        if busy.any():
            piece, _, warp = (int(n) for n in np.argwhere(busy)[0])
            raise Unwaited(f"{nbytes} bytes at shared address {int(where[piece])} are written while {self.what} of "
                           f"warp {warp} still reads them: no {self.wait}")


class Order:
    """Clocks of warps, the last writer and reader of each word, groups in flight, and stores without a fence.

    races   whether a :class:`Race` raises: two warps may store one value to a word, and one of them read it, on purpose
    """

    def __init__(self, ctas: int, warps: int, nbytes: int, races: bool) -> None:
        self.ctas, self.warps, self.races = ctas, warps, races
        self.clock = np.broadcast_to(np.eye(warps, dtype=np.int32), (ctas, warps, warps)).copy()
        words = -(-nbytes // _WORD) + _CHUNK
        self.writer, self.reader = (np.full((ctas, words), _NOBODY, np.int32) for _ in range(2))
        self.unfenced = np.zeros((ctas, -(-nbytes // _CHUNK) + 1), np.bool_)
        self.products = Groups(ctas, warps, nbytes, "a product of wgmma", "wgmma.wait_group")
        self.boxes = Groups(ctas, warps, nbytes, "a copy of TMA", "cp.async.bulk.wait_group")
        self.flying: dict[int, Array] = {}
        """Group of the product that a register waits for, by its slot: ``[warps]``, -1: none."""
        self.unset: dict[int, Array] = {}
        """Warps that wrote a register of a product behind their last ``wgmma.fence``, by slot."""
        self._handed: dict[Hashable, Array] = {}

    # ---- ways between warps

    def _diagonal(self, warps: Array) -> None:
        own = np.arange(self.warps)
        self.clock[:, own, own] += warps.reshape(self.ctas, self.warps)

    def hand(self, key: Hashable, warps: Array) -> None:
        """Warps ``[all]`` leave at a barrier, named by ``key`` in each CTA, what they have done and know."""
        on = warps.reshape(self.ctas, self.warps, 1)
        handed = self._handed.setdefault(key, np.zeros((self.ctas, self.warps), np.int32))
        np.maximum(handed, np.where(on, self.clock, 0).max(axis=1), out=handed)
        self._diagonal(warps)

    def take(self, key: Hashable, warps: Array) -> None:
        """Warps know what was left there."""
        if key in self._handed:
            on = warps.reshape(self.ctas, self.warps, 1)
            self.clock = np.where(on, np.maximum(self.clock, self._handed[key][:, None]), self.clock)

    def meet(self, key: Hashable, warps: Array) -> None:
        """Warps wait for each other."""
        self.hand(key, warps)
        self.take(key, warps)

    # ---- accesses

    def wrote(self, m: SimtMachine, where: Array, nbytes: int, mask: Mask, unfenced: bool = True) -> None:
        """Lanes ``[warps, 32]`` write so many bytes each, by the generic proxy if they are ``unfenced``."""
        cta, warp, at = _active(m, where, mask)
        self.products.check(cta, at, nbytes)
        self.boxes.check(cta, at, nbytes)
        self._over(cta, warp, at, nbytes)
        word = at[:, None] // _WORD + np.arange(max(nbytes // _WORD, 1))
        own = (self.clock[cta, warp, warp] << _BITS | warp)[:, None] if nbytes >= _WORD else _NOBODY
        self.writer[cta[:, None], word] = own
        self.unfenced[cta[:, None], at[:, None] // _CHUNK + np.arange(-(-nbytes // _CHUNK))] = unfenced

    def copied(self, cta: Array, warp: Array, where: Array) -> None:
        """A warp ``[n]`` has TMA write 16 bytes at each of ``[n, chunks]``."""
        every, by = (np.repeat(part, where.shape[1]) for part in (cta, warp))
        at = where.ravel()
        self.products.check(every, at, _CHUNK)
        self.boxes.check(every, at, _CHUNK)
        self._over(every, by, at, _CHUNK)
        self.writer[every[:, None], at[:, None] // _WORD + np.arange(_CHUNK // _WORD)] = _NOBODY
        self.unfenced[every, at // _CHUNK] = False

    def _over(self, cta: Array, warp: Array, at: Array, nbytes: int) -> None:
        word = at[:, None] // _WORD + np.arange(max(nbytes // _WORD, 1))
        self._check(self.reader, cta, warp, word, "writes what warp {} read")

    def read(self, m: SimtMachine, where: Array, nbytes: int, mask: Mask) -> None:
        """Lanes ``[warps, 32]`` read so many bytes each."""
        cta, warp, at = _active(m, where, mask)
        self._read(cta, warp, at[:, None] // _WORD + np.arange(max(nbytes // _WORD, 1)))

    def read_async(self, groups: Groups, cta: Array, warp: Array, where: Array) -> None:
        """A warp ``[n]`` has wgmma or TMA read 16 bytes at each of ``[n, chunks]``."""
        bare = self.unfenced[cta[:, None], where // _CHUNK]
        if bare.any():
            place = int(where[bare][0])
            raise Unfenced(f"{groups.what} reads what was stored at shared address {place}: no fence.proxy.async")
        word = (where[..., None] // _WORD + np.arange(_CHUNK // _WORD)).reshape(len(where), -1)
        self._read(cta, warp, word)
        groups.read(cta, warp, where)

    def _read(self, cta: Array, warp: Array, word: Array) -> None:
        self._check(self.writer, cta, warp, word, "reads what warp {} wrote")
        self.reader[cta[:, None], word] = (self.clock[cta, warp, warp] << _BITS | warp)[:, None]

    def _check(self, last: Array, cta: Array, warp: Array, word: Array, words: str) -> None:
        if not self.races:
            return
        packed = last[cta[:, None], word]
        other, when = packed & ((1 << _BITS) - 1), packed >> _BITS
        other = np.minimum(other, self.warps - 1)
        late = (packed != _NOBODY) & (other != warp[:, None]) & (when > self.clock[cta[:, None], warp[:, None], other])
        if late.any():
            piece, part = (int(n) for n in np.argwhere(late)[0])
            raise Race(f"shared address {int(word[piece, part]) * _WORD}: warp {int(warp[piece])} "
                       f"{words.format(int(other[piece, part]))} with no barrier between them")

    # ---- products

    def check_landed(self, slot: int, name: str, warps: Array) -> None:
        """Raise :class:`Unwaited` where a product of these warps still works on a register."""
        group = self.flying.get(slot)
        if group is not None and (warps & (group >= self.products.ended)).any():
            raise Unwaited(f"{name} holds a product of wgmma in flight: no wgmma.wait_group before its use")

    def check_ends(self, warps: Array) -> None:
        """Raise :class:`Unwaited` where warps return while TMA still reads the shared memory of their CTA."""
        if (warps & (self.boxes.last >= self.boxes.ended)).any():
            raise Unwaited(f"the kernel ends while {self.boxes.what} reads shared memory: no {self.boxes.wait}")

    def start(self, warps: Array, sums: Mapping[int, str], factors: Mapping[int, str]) -> None:
        """A product of these warps begins to work on registers, names by slot: its sums and its first factor."""
        for slot, name in {**sums, **factors}.items():
            if (wrote := self.unset.get(slot)) is not None and (wrote & warps).any():
                raise Unfenced(f"{name} was written and goes into a product: no wgmma.fence between")
        for slot, name in factors.items():
            self.check_landed(slot, name, warps)
        for slot in sums:
            self.flying.setdefault(slot, np.full(len(warps), _NOBODY, np.int32))[warps] = self.products.closed[warps]

    def fence_registers(self, warps: Array) -> None:
        """``wgmma.fence`` of these warps."""
        for wrote in self.unset.values():
            wrote[warps] = False

    def fence(self, m: SimtMachine, mask: Mask) -> None:
        """A fence of the proxies: what the CTA has stored, wgmma and TMA may read."""
        self.unfenced[m.cta if mask is None else m.cta[mask.any(axis=1)]] = False


def _active(m: SimtMachine, where: Array, mask: Mask) -> tuple[Array, Array, Array]:
    """CTA, warp of the CTA and address of each lane that takes part."""
    cta, warp = (np.broadcast_to(part[:, None], where.shape) for part in (m.cta, np.arange(m.shape[0]) % m.warps))
    if mask is None:
        return cta.ravel(), warp.ravel(), where.ravel()
    mask = np.broadcast_to(mask, where.shape)
    return cta[mask], warp[mask], where[mask]


# ---- registers of products

def product_registers(program: Program) -> set[int]:
    """Slots of the registers that products of wgmma read or write while they run."""
    found = set()
    for at, instruction in enumerate(program.instructions):
        if instruction.op[:2] == ("wgmma", "mma_async"):
            x = Operands(program, at, {}, {})
            for place in (0, *[1] * x.texts[1].startswith("{")):
                found |= {x.register(name).slot for name in x.list(place)}
    return found


def watched(x: Operands, step: Step, slots: set[int]) -> Step:
    """The step of an instruction that may touch registers of products: it raises where one is still worked on."""
    names = {name for text in x.texts for name in _REGISTER.findall(text)}
    registers = [found for name in names if (found := x.program.register(x.instruction.scope, name)) is not None]
    mine = {register.slot: register.name for register in registers if register.slot in slots}
    if not mine or x.op[0] == "wgmma":
        return step
    written = [slot for slot, name in mine.items() if name in x.list(0)]

    def checked(m: SimtMachine, mask: Mask) -> None:
        if m.order is not None:
            on: Array = np.ones(m.shape[0], np.bool_) if mask is None else np.asarray(mask.any(axis=1))
            for slot, name in mine.items():
                m.order.check_landed(slot, name, on)
            for slot in written:
                m.order.unset.setdefault(slot, np.zeros(m.shape[0], np.bool_))[on] = True
        step(m, mask)

    return checked
