"""P between the two products of decode through KVBuffer: accumulators -> shared memory -> the operand that meets V."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.hardware import count_wavefronts
from kvlab.layout import Swizzle
from kvlab.memory import Memory
from kvlab.staging.max.params import WARP_SIZE
from kvlab.staging.record.hazards import Hazards
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import FragmentMap

WARPS, BLOCK, ITEMSIZE = 4, 32, 2
SWIZZLE = Swizzle(3, 0, 3, unit="vector")
Array = np.ndarray[Any, Any]


class PExchange:
    """P of 16 rows and 128 keys in 16 bits, in blocks of 32 keys. A warp writes the block of its keys, every warp reads
    all blocks (spec: MAX's P staging of 16x16 instructions, swizzled).

    The 16 bytes of a lane are four keys of each of its two score tiles: V's fragments of 16 bits hold the keys in that
    very order. Those of 8 bits hold consecutive keys and take 8 bytes at a time.

    layout       of the operand ``[16, 128]``: :func:`~kvlab.staging.kv_buffer_operand_map` of V's parameters
    smem, first  shared memory, and the byte where P stands
    hazards      checks the accesses and takes the barrier between them
    """

    nbytes = 16 * WARPS * BLOCK * ITEMSIZE

    def __init__(self, layout: FragmentMap, smem: Memory, first: int, traffic: Traffic, hazards: Hazards) -> None:
        self.layout, self.smem, self.first, self.traffic, self.hazards = layout, smem, first, traffic, hazards
        self._reads = {swizzled: _read(layout, swizzled) for swizzled in (True, False)}
        read, width = self._reads[True]
        self._touched = (
            hazards.footprint(first + _lanes(_write(True)), 8 * ITEMSIZE),
            hazards.footprint(first + _lanes(read), width * ITEMSIZE),
        )

    def __call__(self, p: Array, active: Array) -> Array:
        """The operand ``[programs, threads, registers, elements]`` of P ``[programs, threads, 2, 4]`` in 16 bits."""
        write, (read, width) = _write(True), self._reads[True]
        self.hazards.write(self._touched[0], "p write")
        self.smem.store(self.first + write[None], p.reshape(*p.shape[:2], 1, 8))
        self.hazards.barrier()
        self.hazards.read(self._touched[1], "p read")
        operand = self.smem.load(self.first + read[None], p.dtype, width)
        programs = int(active.sum())
        accesses = (("write", 8, write, _write(False)), ("read", width, read, self._reads[False][0]))
        for what, elements, address, plain in accesses:
            name = f"ds_{what}_b{8 * ITEMSIZE * elements}"
            wavefronts, ideal = _passes(name, _by_instruction(address))
            without, _ = _passes(name, _by_instruction(plain))
            self.traffic.access(
                f"p {what}", wavefronts=wavefronts * programs, ideal=ideal * programs, unswizzled=without * programs
            )
            edge = "registers->SMEM" if what == "write" else "SMEM->registers"
            self.traffic.move(edge, address.size * elements * ITEMSIZE * programs)
        return operand.reshape(len(operand), *self.layout.row.shape)


def _place(row: Array, key: Array, swizzled: bool) -> Array:
    """Byte of four consecutive keys: in a block groups of 16 bytes, [keys 4c.., keys 16 + 4c..] in group c of a row."""
    group = row * 4 + key % 16 // 4
    vector = SWIZZLE(group) if swizzled else group
    place: Array = key // BLOCK * (16 * BLOCK * ITEMSIZE) + 16 * vector + key % BLOCK // 16 * 8
    return place


@functools.cache
def _write(swizzled: bool) -> Array:
    """Bytes that a thread writes, 16 at a time: ``[threads, 1]``."""
    warp, lane = np.divmod(np.arange(WARPS * WARP_SIZE), WARP_SIZE)
    return _place(lane % 16, warp * BLOCK + lane // 16 * 4, swizzled)[:, None]


def _read(layout: FragmentMap, swizzled: bool) -> tuple[Array, int]:
    """Bytes that a thread reads ``[threads, pieces]``, and the elements of a piece."""
    at = _place(layout.row[..., ::4], layout.col[..., ::4], swizzled)  # [threads, registers, fours]
    pairs = at.reshape(len(at), -1, 2)
    if (pairs[..., 1] == pairs[..., 0] + 8).all():
        return pairs[..., 0], 8
    return at.reshape(len(at), -1), 4


def _lanes(address: Array) -> Array:
    """``[instructions, warps, lanes]``."""
    return address.reshape(WARPS, WARP_SIZE, -1).transpose(2, 0, 1)


def _by_instruction(address: Array) -> bytes:
    return _lanes(address).tobytes()


@functools.lru_cache(maxsize=16)
def _passes(name: str, address: bytes) -> tuple[int, int]:
    """(wavefronts, ideal) of a CTA's accesses; provisional, as all AMD wavefronts."""
    lanes = np.frombuffer(address, np.int64).reshape(-1, WARP_SIZE)
    wavefronts, ideal, _ = count_wavefronts(name, lanes, arch="gfx950")
    return int(wavefronts.sum()), int(ideal.sum())
