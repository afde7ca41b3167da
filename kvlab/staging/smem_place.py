"""Where a buffer stands in shared memory: in memory of its own, or at an address in what it is given."""

from __future__ import annotations

from kvlab.memory import AddressSpace, Memory

__all__ = ["own_or_given", "placed"]


def own_or_given(smem: Memory | None, nbytes: int, programs: int, programs_of: str) -> Memory:
    """``smem``, or memory of exactly ``nbytes`` if None. ValueError unless it has the ``programs`` that the arguments
    named ``programs_of`` have."""
    if smem is None:
        smem = Memory(nbytes, space=AddressSpace.SHARED, name="shared memory", programs=programs)
    if (1 if smem.programs is None else smem.programs) != programs:
        raise ValueError(f"smem has {smem.programs} programs, {programs_of} {programs}")
    return smem


def placed(smem: Memory, address: int | None, nbytes: int, what: str) -> int:
    """``address``, or the memory's first byte if None. ValueError unless ``what``, of ``nbytes``, fits there on a
    multiple of 16."""
    address = smem.base if address is None else address
    first = address - smem.base
    if address % 16 or first < 0 or first + nbytes > smem.nbytes:
        raise ValueError(
            f"smem_address {address}: {what} of {nbytes} bytes on a multiple of 16 does not fit in "
            f"[{smem.base}, {smem.base + smem.nbytes}) of {smem.name}"
        )
    return address
