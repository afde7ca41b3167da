"""Facts about a GPU: its architecture and processors, whose tiles it takes, shared memory, e4m3."""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

from kvlab.common.arrays import on_gpu
from kvlab.common.checks import require
from kvlab.hardware import get_arch
from kvlab.hardware.arch_table import ARCHS

AMD_E4M3 = ("gfx942", "gfx950")
"""AMD's that convert float8_e4m3fn; the first multiplies another e4m3."""


@functools.cache
def machine(device: Any) -> tuple[str, int]:
    """Architecture ("sm_90", "gfx950") and number of processors of a GPU."""
    properties = importlib.import_module("torch").cuda.get_device_properties(device)
    arch = getattr(properties, "gcnArchName", "").partition(":")[0]
    if not arch.startswith("gfx"):
        arch = f"sm_{properties.major}{properties.minor}"
    return arch, properties.multi_processor_count


class Target(NamedTuple):
    """Target of a configuration: the architecture whose tiles are taken (see ``family``), processors, and bytes of
    shared memory that a CTA may have.
    """

    arch: str
    processors: int
    shared: int


def target_of(array: Any, emulated: str | None) -> Target:
    """The GPU of ``array``, else the emulated architecture, else an H100."""
    if not on_gpu(array):
        arch = emulated or "sm_90"
        return Target(arch, 132, shared_limit(arch))
    arch, processors = machine(array.device)
    return Target(family(arch), processors, shared_limit(arch))


class Traits(NamedTuple):
    """Facts about an architecture that choose the tiles.

    amd : its vendor is AMD. products : of tiles, by "mma.sync", "wgmma", "tcgen05" or "mfma". of_max : MAX has tiles
    for it.
    """

    amd: bool
    products: str
    of_max: bool


@functools.cache
def traits(arch: str) -> Traits:
    """The traits of ``arch``. Products are mma.sync's before Hopper, and on GeForce's and workstations' Blackwell.

    >>> [traits(arch).products for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")]
    ['mma.sync', 'mma.sync', 'wgmma', 'tcgen05', 'mma.sync', 'mfma']
    """
    if arch.startswith("gfx"):
        return Traits(True, "mfma", arch == "gfx950")
    number = int(arch.removeprefix("sm_"))
    return Traits(False, "wgmma" if 90 <= number < 100 else "tcgen05" if 100 <= number < 120 else "mma.sync", False)


def family(arch: str) -> str:
    """The architecture whose tiles a GPU of ``arch`` takes: that of Ampere where products are mma.sync's, whose CTAs
    have less shared memory, too; otherwise its own.

    >>> [family(arch) for arch in ("sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx950")]
    ['sm_80', 'sm_80', 'sm_90', 'sm_100', 'sm_80', 'gfx950']
    """
    return "sm_80" if traits(arch).products == "mma.sync" else arch


def converts_e4m3(arch: str) -> bool:
    """Tells whether kernels for ``arch`` convert float8_e4m3fn.

    >>> [arch for arch in ("sm_86", "sm_89", "sm_90", "gfx90a", "gfx942", "gfx950") if converts_e4m3(arch)]
    ['sm_89', 'sm_90', 'gfx942', 'gfx950']
    """
    return int(arch[3:]) >= 89 if arch.startswith("sm_") else arch in AMD_E4M3


def multiplies_e4m3(arch: str) -> bool:
    """Tells whether they multiply it, too."""
    return converts_e4m3(arch) and arch not in AMD_E4M3[:1]


def check_fp8_gpu(array: Any, *, products: bool = False) -> None:
    """ValueError where ``array`` is on a GPU that does not convert e4m3, or (``products``) does not multiply it."""
    if not on_gpu(array):
        return
    arch, _ = machine(array.device)
    fits, amd = (multiplies_e4m3(arch), AMD_E4M3[1:]) if products else (converts_e4m3(arch), AMD_E4M3)
    require(fits, f"float8_e4m3fn on {arch}", f"on sm_89 or later, or {' or '.join(amd)}")


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that a CTA may have on a GPU of ``arch``; on one that no table has, those of its like that
    have least.

    >>> [shared_limit(arch) // 1024 for arch in ("sm_80", "sm_86", "sm_90", "sm_103", "sm_121", "gfx942", "gfx950")]
    [163, 99, 227, 227, 99, 64, 160]
    """
    if arch not in ARCHS:
        alike = {"mfma": "gfx942", "mma.sync": "sm_86"}.get(traits(arch).products, "sm_100")
        return get_arch(alike).shared_bytes
    return get_arch(arch).shared_bytes
