"""P between the two products of streaming decode: accumulators -> shared memory -> operand."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.layout import Layout, TileTensor
from kvlab.memory import AddressSpace, Memory
from kvlab.staging.record.hazards import Hazards
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import FragmentMap
from kvlab.staging.tile.p_exchange import PExchange
from kvlab.staging.tile.shared_access import SharedAccess
from kvlab.staging.tile.smem_place import placed

from .operand_maps import operand_map, score_map
from .params import KVBufferParams

Array = np.ndarray[Any, Any]


class PRegisterBuffer:
    """P of a tile, in the storage dtype: ``BN // BK`` blocks of ``BM x BK`` row-major, one for each strip of V.

    Every warp writes the keys that it owns and, after a barrier, reads all of them in the canonical order in which the
    streaming buffer brings V: lane l, element e holds key ``kg * MMA_K + l // MMA_M * frag + e``. No swizzle.

    Parameters
    ----------
    params : those of the V buffer.
    BM : query rows.
    programs : CTAs of the launch.
    smem, smem_address : where the blocks lie; a memory of their own if None.
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
        self, params: KVBufferParams, BM: int, programs: int = 1, smem: Memory | None = None, *,
        smem_address: int | None = None, traffic: Traffic | None = None, hazards: Hazards | None = None,
    ) -> None:
        self.params, self.BM = params, BM
        if smem is None:
            smem = Memory(self.nbytes, space=AddressSpace.SHARED, name="shared memory", programs=programs)
        self.smem = smem
        self.smem_address = placed(smem, smem_address, self.nbytes, "P")
        how: dict[str, Any] = {"first": self.smem_address, "hazards": hazards, "traffic": traffic}
        self._exchange = PExchange(smem, _accesses(params, BM), params.dtype, **how)
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
        """Map of the argument of :meth:`copy_to_shared`: the accumulator of S, ``[BM, BN]``."""
        return score_map(self.params, self.BM)

    @property
    def operand_map(self) -> FragmentMap:
        """Map of the result of :meth:`load_from_shared`: the operand of O += P V, ``[BM, BN]``."""
        return operand_map(self.params, self.BM)

    def copy_to_shared(self, scores: Array, active: Array | None = None) -> None:
        """Round P once to the storage dtype and write it. ``scores`` ``[programs, threads, num_n * num_m, regs]``.

        active : bool ``[programs]``, whose traffic is counted; all unless given."""
        self._exchange.write(scores, active)

    def load_from_shared(self, active: Array | None = None) -> TileTensor:
        """The operand of every strip, in registers: of each thread ``(strips * num_k_mmas2 * num_m) x frag``."""
        values = self._exchange.read(active)
        self.reg_tile.store(values.reshape(*values.shape[:2], *self.reg_tile.shape, 1))
        return self.reg_tile

    def mma_tile(self, strip: int, kg: int) -> TileTensor:
        """The fragments that multiply ``get_mma_tile(kg)`` of V's strip: of each thread ``num_m x frag``."""
        p = self.params
        groups = p.BN // p.BK * p.num_k_mmas2
        if not (0 <= strip < p.BN // p.BK and 0 <= kg < p.num_k_mmas2):
            raise ValueError(f"mma_tile({strip}, {kg}): P has {p.BN // p.BK} strips of {p.num_k_mmas2} k groups")
        rows, frag = self.reg_tile.shape
        return self.reg_tile.tile((rows // groups, frag), (strip * p.num_k_mmas2 + kg, 0))


@functools.cache
def _accesses(p: KVBufferParams, BM: int) -> tuple[SharedAccess, SharedAccess]:
    """How the warps write P, block after block, row after row, and read it; provisional, as all AMD wavefronts."""
    write, read = (
        SharedAccess.of_elements(
            f"ds_{kind}_b", (m.col // p.BK * BM * p.BK + m.row * p.BK + m.col % p.BK) * p.dtype.itemsize,
            p.dtype.itemsize, "gfx950",
        )
        for kind, m in (("write", score_map(p, BM)), ("read", operand_map(p, BM)))
    )
    return write, read
