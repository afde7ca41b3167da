"""Global memory seen by a warp: the 32-byte sectors that one instruction touches."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._arrays import Array, mask_lanes

__all__ = ["SECTOR_BYTES", "sectors"]

SECTOR_BYTES = 32


def sectors(addresses: Any, nbytes: int, mask: Any = None) -> Array:
    """How many different 32-byte sectors of DRAM or L2 one warp access touches: ``[...]``.

    ``addresses`` ``[..., lanes]`` in bytes, absolute: an access that starts off a sector touches one more. ``nbytes``
    a lane moves. ``mask`` as in :func:`~kvlab.hardware.count_wavefronts`. The least possible for a full warp is
    ``lanes * nbytes / 32``.

    >>> lane = np.arange(32)
    >>> sectors(np.stack([lane * 16, lane * 16 + 8, lane * 256]), 16).tolist()
    [16, 17, 32]
    """
    address = np.asarray(addresses)
    if address.dtype.kind not in "iu" or address.ndim < 1:
        raise ValueError(f"addresses of shape {address.shape} and type {address.dtype} are not integers [..., lanes]")
    if nbytes < 1:
        raise ValueError(f"nbytes {nbytes!r} is not positive")
    active = mask_lanes(mask, address.shape)
    first = address.astype(np.int64) // SECTOR_BYTES
    last = (address.astype(np.int64) + nbytes - 1) // SECTOR_BYTES
    span = first[..., None] + np.arange((nbytes - 2) // SECTOR_BYTES + 2)  # [..., lanes, sectors a lane may touch]
    touched = np.where(active[..., None] & (span <= last[..., None]), span, -1)
    ordered = np.sort(touched.reshape(*address.shape[:-1], -1), axis=-1)
    new = ordered >= 0
    new[..., 1:] &= ordered[..., 1:] != ordered[..., :-1]
    count: Array = new.sum(axis=-1)
    return count
