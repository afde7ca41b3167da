"""Place of a buffer in shared memory: in memory of its own, or at an address in what it is given."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.cache import UnsafePointer
from kvlab.common.checks import shown
from kvlab.layout import TileTensor
from kvlab.memory import AddressSpace, Memory


def own_or_given(smem: Memory | None, nbytes: int, programs: int, programs_of: str) -> Memory:
    """``smem``, or memory of exactly ``nbytes`` if None. ValueError unless it is shared memory with the ``programs``
    that the arguments named ``programs_of`` have."""
    if smem is None:
        smem = Memory(nbytes, space=AddressSpace.SHARED, name="shared memory", programs=programs)
    if not isinstance(smem, Memory):
        raise TypeError(f"smem is {shown(smem)}: must be a Memory in shared memory")
    if smem.space is not AddressSpace.SHARED:
        raise ValueError(f"smem is {smem.space.value} memory: must be shared memory")
    if (1 if smem.programs is None else smem.programs) != programs:
        raise ValueError(f"smem has {smem.programs} programs, {programs_of} {programs}")
    return smem


def placed(smem: Memory, address: int | None, nbytes: int, what: str, name: str = "smem_address") -> int:
    """``address``, or the memory's first byte if None. ValueError, which begins with ``name``, unless ``what``, of
    ``nbytes``, fits there on a multiple of 16."""
    address = smem.base if address is None else address
    first = address - smem.base
    if address % 16 or first < 0 or first + nbytes > smem.nbytes:
        raise ValueError(
            f"{name} {address}: {what} of {nbytes} bytes on a multiple of 16 does not fit in "
            f"[{smem.base}, {smem.base + smem.nbytes}) of {smem.name}"
        )
    return address


def shared_tile(tile: TileTensor, params: Any, programs: int) -> tuple[Memory, int]:
    """The memory of ``smem_tile`` and the byte address of its first element. TypeError or ValueError unless it is of
    ``params.SmemParentType`` in a memory with ``programs`` programs."""
    memory = params.SmemParentType.checked("smem_tile", tile).memory
    if (1 if memory.programs is None else memory.programs) != programs:
        raise ValueError(f"smem_tile has {memory.programs} programs, batch_idx, head_idx and end {programs}")
    first = np.unique(tile.offset)
    if first.size != 1:
        raise ValueError(f"smem_tile begins at elements {first.tolist()}: must begin at one for all programs")
    nbytes = params.num_smem_stages * params.smem_stage_size * params.dtype.itemsize
    address = memory.base + int(first[0]) * tile.dtype.itemsize
    return memory, placed(memory, address, nbytes, "all stages", "smem_tile at")


def pointed(smem_ptr: UnsafePointer | None, dtype: np.dtype[Any]) -> tuple[Memory | None, int | None]:
    """The memory and the byte address of ``smem_ptr``, which points to ``dtype``; None of each without."""
    if smem_ptr is None:
        return None, None
    if not isinstance(smem_ptr, UnsafePointer):
        raise TypeError(f"smem_ptr is {shown(smem_ptr)}: must be an UnsafePointer into shared memory")
    if smem_ptr.memory.space is not AddressSpace.SHARED:
        raise ValueError(f"smem_ptr points into {smem_ptr.memory.space.value} memory: must point into shared memory")
    if smem_ptr.dtype != dtype:
        raise ValueError(f"smem_ptr points to {smem_ptr.dtype}: must point to {dtype}")
    return smem_ptr.memory, int(smem_ptr.byte_address)


def one_warp(warp_id: Any, num_warps: int) -> int | None:
    """``warp_id``, or ValueError unless it is None or one of the warps."""
    if warp_id is not None and (isinstance(warp_id, bool) or warp_id not in range(num_warps)):
        raise ValueError(f"warp_id is {warp_id!r}: must be None or one of the {num_warps} warps")
    return warp_id


def threads_of(warp_id: int | None) -> slice:
    """The threads of a warp of 64, or of all."""
    return slice(None) if warp_id is None else slice(64 * warp_id, 64 * warp_id + 64)
