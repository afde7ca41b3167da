"""AMD's transposing LDS reads, executed: ``ds_read_tr16_b64`` and ``ds_read_tr8_b64`` (gfx950). Provisional: no chip
has confirmed them here; the 8-bit rule is the linear one that compiled gfx950 code relies on.

Inside each row of 16 lanes, lane i reads n contiguous elements m[i][0..n-1] (8 bytes: n = 4 of 16 bits, 8 of 8 bits);
afterwards register j of lane i holds ``m[16//n * j + i//n][i % n]``. When the lanes address an n x 16 tile as
(row = i * n // 16, columns n * (i % (16 // n)) ...), lane i ends with column i."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.common.checks import integers
from kvlab.common.regroup import Regroup
from kvlab.hardware._arrays import Array, memory_of
from kvlab.memory import Memory, as_dtype, bfloat16, float8_e4m3fn


def ds_read_tr16_b64(memory: Memory, address: Any, dtype: Any = bfloat16) -> Array:
    """8 bytes at each lane's ``address`` ``[..., 64]``, transposed inside rows of 16 lanes: ``[..., 64, 4]``.

    Addresses are in bytes, multiples of 8. Provisional.

    >>> memory = Memory.over(np.arange(64, dtype=np.int16).reshape(4, 16))
    >>> i = np.arange(64) % 16
    >>> ds_read_tr16_b64(memory, 32 * (i // 4) + 8 * (i % 4), np.int16)[5].tolist()
    [5, 21, 37, 53]
    """
    return _read("ds_read_tr16_b64", memory, address, dtype, 2)


def ds_read_tr8_b64(memory: Memory, address: Any, dtype: Any = float8_e4m3fn) -> Array:
    """8 bytes at each lane's ``address`` ``[..., 64]``, transposed inside rows of 16 lanes: ``[..., 64, 8]``.

    Addresses are in bytes, multiples of 8. Provisional.

    >>> memory = Memory.over(np.arange(128, dtype=np.uint8).reshape(8, 16))
    >>> i = np.arange(64) % 16
    >>> ds_read_tr8_b64(memory, 16 * (i // 2) + 8 * (i % 2), np.uint8)[5].tolist()
    [5, 21, 37, 53, 69, 85, 101, 117]
    """
    return _read("ds_read_tr8_b64", memory, address, dtype, 1)


def _read(name: str, memory: Memory, address: Any, dtype: Any, itemsize: int) -> Array:
    dtype = as_dtype(dtype)
    if dtype.itemsize != itemsize:
        raise ValueError(f"{name}: dtype {dtype} has {dtype.itemsize} bytes, must have {itemsize}")
    where = integers(f"{name}: address", address)
    if where.ndim < 1 or where.shape[-1] != 64:
        raise ValueError(f"{name}: address has shape {where.shape}: must be [..., 64], one for each lane")
    n = 8 // itemsize
    value = memory_of(memory, f"{name}: memory").load(where, dtype, n, alignment=8)  # [..., 64, n]
    return _source(n)(value.reshape(*value.shape[:-2], 64 * n))


@functools.cache
def _source(n: int) -> Regroup:
    """Which of the ``64 * n`` elements read each register gets: ``[64, n]``."""
    lane, register = np.arange(64)[:, None], np.arange(n)
    row, i = lane // 16, lane % 16
    return Regroup((16 * row + 16 // n * register + i // n) * n + i % n)
