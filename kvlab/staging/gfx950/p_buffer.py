"""P between the two products of streaming decode: accumulators -> shared memory -> operand."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.hardware import count_wavefronts
from kvlab.layout import Layout, TileTensor
from kvlab.memory import AddressSpace, Memory
from kvlab.staging.max.operand_maps import operand_map, score_map
from kvlab.staging.max.params import WARP_SIZE, KVBufferParams
from kvlab.staging.record.footprint import Footprint
from kvlab.staging.record.hazards import Hazards
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import FragmentMap
from kvlab.staging.tile.smem_place import placed

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


class PRegisterBuffer:
    """P of a tile, in the storage dtype: ``BN // BK`` blocks of ``BM x BK`` row-major, one for each strip of V.

    Every warp writes the keys that it owns and, after a barrier, reads all of them in the canonical order in which the
    streaming buffer brings V: lane l, element e holds key ``kg * MMA_K + l // MMA_M * frag + e``. No swizzle.

    Parameters
    ----------
    params : those of the V buffer.
    BM : query rows.
    programs : CTAs of the launch.
    smem, smem_address : where the blocks stand; a memory of their own if None.
    hazards : checks the accesses; who owns the buffer states the barrier. None: nothing is checked.

    >>> v = KVBufferParams("bf16", (16, 16, 32), None, BN=128, WN=32, BK=32, num_threads=256, depth=128, kv_num_heads=8,
    ...                    transpose=False)
    >>> p = PRegisterBuffer(v, BM=16)
    >>> tile = (np.arange(16 * 128).reshape(1, 16, 128) % 251).astype(np.float32)
    >>> p.copy_to_shared(p.score_map.spread(tile))
    >>> registers = p.load_from_shared()
    >>> registers.shape, bool((p.operand_map.gather(registers) == tile).all())
    ((4, 8), True)
    """

    def __init__(
        self,
        params: KVBufferParams,
        BM: int,
        programs: int = 1,
        smem: Memory | None = None,
        *,
        smem_address: int | None = None,
        traffic: Traffic | None = None,
        hazards: Hazards | None = None,
    ) -> None:
        self.params, self.BM, self.traffic, self.hazards = params, BM, traffic, hazards
        if smem is None:
            smem = Memory(self.nbytes, space=AddressSpace.SHARED, name="shared memory", programs=programs)
        self.smem = smem
        self.smem_address = placed(smem, smem_address, self.nbytes, "P")
        rows, frag = self.operand_map.row.shape[1:]
        self.reg_tile = TileTensor.stack_allocation(
            Layout.row_major(rows, frag), params.dtype, AddressSpace.LOCAL, programs, threads=params.num_threads
        )

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return self.BM * self.params.BN * self.params.dtype.itemsize

    @property
    def score_map(self) -> FragmentMap:
        """What :meth:`copy_to_shared` takes: the accumulator of S, ``[BM, BN]``."""
        return score_map(self.params, self.BM)

    @property
    def operand_map(self) -> FragmentMap:
        """What :meth:`load_from_shared` returns: the operand of O += P V, ``[BM, BN]``."""
        return operand_map(self.params, self.BM)

    def copy_to_shared(self, scores: Array, active: Array | None = None) -> None:
        """Round P once to the storage dtype and write it. ``scores`` ``[programs, threads, num_n * num_m, regs]``.

        active : bool ``[programs]``, whose traffic is counted; all unless given.
        """
        offset, width = _write_plan(self.params, self.BM)  # [threads, registers, pieces]
        if self.hazards is not None:
            self.hazards.write(self._footprints[0], "p write")
        values = scores.astype(self.params.dtype).reshape(len(scores), *offset.shape, width)
        self.smem.store(self._address(offset), values)
        self._count("write", offset, width, active, len(scores))

    def load_from_shared(self, active: Array | None = None) -> TileTensor:
        """The operand of every strip, in registers: of each thread ``(strips * num_k_mmas2 * num_m) x frag``."""
        offset, width = _read_plan(self.params, self.BM)  # [threads, registers, pieces]
        if self.hazards is not None:
            self.hazards.read(self._footprints[1], "p read")
        values = self.smem.load(self._address(offset), self.params.dtype, width)
        self.reg_tile.store(values.reshape(*values.shape[:3], -1, 1))
        self._count("read", offset, width, active, len(values))
        return self.reg_tile

    def mma_tile(self, strip: int, kg: int) -> TileTensor:
        """The fragments that meet ``get_mma_tile(kg)`` of V's strip: of each thread ``num_m x frag``."""
        p = self.params
        groups = p.BN // p.BK * p.num_k_mmas2
        if not (0 <= strip < p.BN // p.BK and 0 <= kg < p.num_k_mmas2):
            raise ValueError(f"mma_tile({strip}, {kg}): P has {p.BN // p.BK} strips of {p.num_k_mmas2} k groups")
        rows, frag = self.reg_tile.shape
        return self.reg_tile.tile((rows // groups, frag), (strip * p.num_k_mmas2 + kg, 0))

    def _address(self, offset: IntArray) -> IntArray:
        return self.smem_address + offset[None] * self.params.dtype.itemsize

    @functools.cached_property
    def _footprints(self) -> tuple[Footprint, Footprint]:
        """The bytes of shared memory that each warp writes and reads."""
        assert self.hazards is not None
        made = []
        for offset, width in (_write_plan(self.params, self.BM), _read_plan(self.params, self.BM)):
            warp = np.arange(len(offset))[:, None, None] // WARP_SIZE
            address = self._address(offset)[0]
            made.append(self.hazards.footprint(address, width * self.params.dtype.itemsize, warp))
        return made[0], made[1]

    def _count(self, what: str, offset: IntArray, width: int, active: Array | None, programs: int) -> None:
        if self.traffic is None:
            return
        programs = programs if active is None else int(active.sum())
        edge = "registers->SMEM" if what == "write" else "SMEM->registers"
        wavefronts, ideal = _passes(what, self.params, self.BM)
        self.traffic.access(
            f"p {what}", wavefronts=wavefronts * programs, ideal=ideal * programs, unswizzled=wavefronts * programs
        )
        self.traffic.move(edge, offset.size * width * self.params.dtype.itemsize * programs)


def _place(p: KVBufferParams, BM: int, row: IntArray, key: IntArray) -> IntArray:
    """Element offset of ``P[row, key]``."""
    return key // p.BK * BM * p.BK + row * p.BK + key % p.BK


@functools.cache
def _write_plan(p: KVBufferParams, BM: int) -> tuple[IntArray, int]:
    """Offsets ``[threads, registers, pieces]`` and the elements of a piece: four neighbouring keys."""
    m = score_map(p, BM)
    return _place(p, BM, m.row[..., ::4], m.col[..., ::4]), 4


@functools.cache
def _read_plan(p: KVBufferParams, BM: int) -> tuple[IntArray, int]:
    """Offsets ``[threads, registers, pieces]`` and the elements of a piece: up to 16 bytes of a fragment."""
    m, width = operand_map(p, BM), min(p.input_frag_size, p.simd_width)
    return _place(p, BM, m.row[..., ::width], m.col[..., ::width]), width


@functools.cache
def _passes(what: str, p: KVBufferParams, BM: int) -> tuple[int, int]:
    """(wavefronts, ideal) of all writes or reads of a CTA; provisional, as all AMD wavefronts.

    Reads of less than 4 bytes are counted by the words they touch.
    """
    offset, width = _write_plan(p, BM) if what == "write" else _read_plan(p, BM)
    nbytes = max(width * p.dtype.itemsize, 4)
    address = offset.reshape(-1, WARP_SIZE, offset[0].size).transpose(2, 0, 1) * p.dtype.itemsize // nbytes * nbytes
    wavefronts, ideal, _ = count_wavefronts(f"ds_{what}_b{8 * nbytes}", address, arch="gfx950")
    return int(wavefronts.sum()), int(ideal.sum())
