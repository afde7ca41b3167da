"""Shared memory of a tile, and how much of it a CTA may have on each GPU."""

from __future__ import annotations

from kvlab.hardware import get_arch
from kvlab.hardware.arch_table import ARCHS

__all__ = ["shared_limit", "tile_bytes"]


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that a CTA may have on a GPU of ``arch``; on one that no table has, those of its like that
    have least.

    >>> [shared_limit(arch) // 1024 for arch in ("sm_80", "sm_86", "sm_90", "sm_103", "sm_121", "gfx942", "gfx950")]
    [163, 99, 227, 227, 99, 64, 160]
    """
    if arch not in ARCHS:
        alike = "gfx942" if arch.startswith("gfx") else "sm_100" if 90 <= int(arch[3:]) < 120 else "sm_86"
        return get_arch(alike).shared_bytes
    return get_arch(arch).shared_bytes


def tile_bytes(BM: int, BN: int, columns: tuple[int, int], itemsize: int, num_stages: int) -> int:
    """Bytes of BM query rows, BN keys with ``columns`` of K and V, and P, where products are mma.sync's or without
    tensor cores: K and V stand side by side where more than one stage is asked for, else V where K was.

    >>> tile_bytes(32, 32, (576, 512), 2, 2), tile_bytes(32, 32, (576, 512), 2, 1)
    (108544, 75776)
    """
    k, v = columns
    held = k + v if num_stages > 1 else max(k, v)
    return itemsize * (BM * k + BN * held + BM * BN)
