"""Copies between DRAM and shared memory, executed on data: cp.async, and AMD's buffer loads to registers and to LDS."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.common.checks import integers, shown
from kvlab.hardware._arrays import Array, memory_of
from kvlab.memory import Memory, as_dtype


def cp_async(
    dst_memory: Memory, dst_address: Any, src_memory: Memory, src_address: Any, nbytes: int, valid: Any = None
) -> None:
    """``cp.async``: every lane copies ``nbytes`` (4, 8 or 16) from ``src_address`` to ``dst_address``.

    The addresses ``[...]`` are in bytes, multiples of ``nbytes``, and broadcast with ``valid`` (bool): an invalid lane
    reads nothing and writes zeros (the source size of 0 of PTX). Where ``dst_memory`` has programs the leading axis is
    theirs. Source: PTX ISA, cp.async.

    >>> dram, smem = Memory.over(np.arange(8, dtype=np.int32)), Memory(32)
    >>> cp_async(smem, np.array([0, 16]), dram, np.array([16, 999 * 16]), 16, valid=[True, False])
    >>> smem.image(np.int32).tolist()
    [4, 5, 6, 7, 0, 0, 0, 0]
    """
    if nbytes not in (4, 8, 16):
        raise ValueError(f"cp_async: nbytes is {shown(nbytes)}: must be 4, 8 or 16")
    memory_of(dst_memory, "cp_async: dst_memory")
    memory_of(src_memory, "cp_async: src_memory")
    value = src_memory.load(src_address, np.uint8, nbytes, mask=valid, alignment=nbytes)
    dst_memory.store(dst_address, value, alignment=nbytes)


def buffer_load(
    memory: Memory, resource_base: Any, voffset: Any, nbytes: int, num_records: Any, soffset: Any = 0,
    dtype: Any = np.uint8,
) -> Array:
    """``buffer_load``: every lane loads ``nbytes`` (1, 2, 4, 8, 12 or 16) at ``resource_base + voffset + soffset``.

    All are in bytes and broadcast to ``[...]``. The bound is LINEAR: a lane whose ``voffset + soffset + nbytes``
    exceeds ``num_records`` gets zeros, whatever row or column that is. Returns ``[..., nbytes // size]`` of ``dtype``.
    Source: AMD CDNA ISA (raw buffers, stride 0); the sum with ``soffset`` is what the compiled gfx950 kernels rely on.

    >>> memory = Memory.over(np.arange(8, dtype=np.float32))
    >>> buffer_load(memory, 8, np.array([0, 8, 16]), 8, num_records=16, dtype=np.float32).tolist()
    [[2.0, 3.0], [4.0, 5.0], [0.0, 0.0]]
    """
    if nbytes not in (1, 2, 4, 8, 12, 16):
        raise ValueError(f"buffer_load: nbytes is {shown(nbytes)}: must be 1, 2, 4, 8, 12 or 16")
    offset = integers("buffer_load: voffset", voffset) + integers("buffer_load: soffset", soffset)
    records = integers("buffer_load: num_records", num_records)
    valid = None
    if offset.size and records.size and (offset.min() < 0 or offset.max() + nbytes > records.min()):
        valid = (offset >= 0) & (offset + nbytes <= records)
    address = integers("buffer_load: resource_base", resource_base) + offset
    source = memory_of(memory, "buffer_load: memory")
    value: Array = source.load(address, np.uint8, nbytes, mask=valid, alignment=min(nbytes, 4))
    return value.view(as_dtype(dtype))


def buffer_load_lds(
    lds_memory: Memory, lds_base: Any, memory: Memory, resource_base: Any, voffset: Any, nbytes: int, num_records: Any,
    soffset: Any = 0,
) -> None:
    """``buffer_load ... lds``: lane l's ``nbytes`` (1, 2, 4, 12 or 16) go to LDS address ``lds_base + l * nbytes``.

    ``voffset`` ``[..., lanes]`` and the bound are as in :func:`buffer_load`; ``lds_base`` ``[...]`` is one for a wave:
    the LDS side is linear in the lane, so a swizzle has to be made by permuting the source.

    >>> dram, lds = Memory.over(np.arange(64, dtype=np.int32)), Memory(256)
    >>> buffer_load_lds(lds, 0, dram, 0, np.arange(64)[::-1] * 4, 4, num_records=128)
    >>> lds.image(np.int32)[[0, 31, 32, 63]].tolist()
    [0, 0, 31, 0]
    """
    if nbytes not in (1, 2, 4, 12, 16):
        raise ValueError(f"buffer_load_lds: nbytes is {nbytes!r}: must be 1, 2, 4, 12 or 16")
    offset = integers("buffer_load_lds: voffset", voffset)
    if offset.ndim < 1:
        raise ValueError("buffer_load_lds: voffset is a scalar, must be [..., lanes]")
    memory_of(lds_memory, "buffer_load_lds: lds_memory")
    first = integers("buffer_load_lds: lds_base", lds_base)
    value = buffer_load(memory, resource_base, offset, nbytes, num_records, soffset)
    lane = np.arange(value.shape[-2]) * nbytes
    lds_memory.store(first[..., None] + lane, value)
