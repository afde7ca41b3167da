"""Plain loads and stores of shared memory, executed: ``ld.shared``/``st.shared`` and ``ds_read``/``ds_write``."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.hardware._arrays import Array, memory_of
from kvlab.memory import Memory, as_dtype

_SIZES = (1, 2, 4, 8, 16)


def ld_shared(memory: Memory, address: Any, nbytes: int, dtype: Any = np.uint8, mask: Any = None) -> Array:
    """Every lane loads ``nbytes`` (1, 2, 4, 8 or 16) at its byte ``address`` ``[...]``: ``[..., nbytes // size]``.

    An address is a multiple of ``nbytes`` (PTX ISA: natural alignment; the LDS reads of AMD alike). Where ``mask`` is
    False nothing is read and zeros are returned. Where ``memory`` has programs the leading axis is theirs. What the
    same addresses cost: :func:`~kvlab.hardware.count_wavefronts`.

    >>> memory = Memory.over(np.arange(8, dtype=np.float32))
    >>> ld_shared(memory, np.array([16, 0]), 8, np.float32).tolist()
    [[4.0, 5.0], [0.0, 1.0]]
    >>> ld_shared(memory, np.array([4]), 8, np.float32)
    Traceback (most recent call last):
        ...
    ValueError: array: address 4 of 8 bytes is not a multiple of 8
    """
    dtype = as_dtype(dtype)
    if nbytes not in _SIZES or not isinstance(nbytes, int | np.integer) or nbytes % dtype.itemsize:
        raise ValueError(f"ld_shared: nbytes {nbytes!r} of {dtype} is not 1, 2, 4, 8 or 16, in whole elements")
    width = nbytes // dtype.itemsize
    return memory_of(memory, "ld_shared: memory").load(address, dtype, width, mask=mask, alignment=nbytes)


def st_shared(memory: Memory, address: Any, value: Any, mask: Any = None) -> None:
    """Every lane stores its ``value`` ``[..., width]``, 1, 2, 4, 8 or 16 bytes, at its byte ``address`` ``[...]``.

    Alignment, mask and programs as in :func:`ld_shared`. Where lanes write the same byte the last one wins here;
    hardware promises no order.

    >>> memory = Memory(16)
    >>> st_shared(memory, np.array([8, 0]), np.array([[1, 2], [3, 4]], np.int32))
    >>> memory.image(np.int32).tolist()
    [3, 4, 1, 2]
    """
    value = np.asarray(value)
    nbytes = value.shape[-1] * value.itemsize if value.ndim else value.itemsize
    if value.ndim == 0 or nbytes not in _SIZES:
        raise ValueError(
            f"st_shared: a value of shape {value.shape} and {value.dtype} is not [..., width] of 1, 2, 4, 8 or 16 bytes"
        )
    memory_of(memory, "st_shared: memory").store(address, value, mask=mask, alignment=nbytes)
