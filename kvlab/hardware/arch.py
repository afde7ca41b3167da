"""Architectures as data: the numbers that the models of this room need, each with its source.

A model that no chip has confirmed is named in :attr:`Arch.provisional`; whoever shows its result says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["ARCHS", "Arch", "get_arch"]

_CUDA = "CUDA C++ Programming Guide, technical specifications per compute capability"
_CDNA = "AMD CDNA ISA manuals and MAX's public sources; not confirmed on a chip"


@dataclass(frozen=True)
class Arch:
    """One GPU architecture.

    ============== =====================================================================================
    warp_size      lanes that execute one instruction together (AMD: a wave)
    banks          shared-memory (LDS) banks
    bank_bytes     width of a bank: what it delivers in one pass
    shared_bytes   largest shared memory of one CTA, in bytes
    registers      32-bit registers a lane may have
    features       data instructions beyond plain loads and stores: ``cp.async``, ``ldmatrix``, ...
    provisional    models of this package that no such chip has confirmed: ``wavefronts``, ...
    sources        where each number was read
    ============== =====================================================================================

    >>> get_arch("sm_90").shared_bytes
    232448
    >>> sorted(get_arch("gfx950").provisional)
    ['transposing reads', 'wavefronts']
    >>> print(get_arch("gfx950").sources["banks"])
    AMD CDNA ISA manuals and MAX's public sources; not confirmed on a chip
    """

    name: str
    vendor: str
    warp_size: int
    banks: int
    bank_bytes: int
    shared_bytes: int
    registers: int
    features: frozenset[str] = frozenset()
    provisional: frozenset[str] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def pass_bytes(self) -> int:
        """Bytes that all banks deliver in one pass.

        >>> get_arch("sm_90").pass_bytes, get_arch("gfx950").pass_bytes
        (128, 256)
        """
        return self.banks * self.bank_bytes


def _sources(every: str, **single: str) -> Mapping[str, str]:
    names = ("warp_size", "banks", "bank_bytes", "shared_bytes", "registers", "features")
    return MappingProxyType({**dict.fromkeys(names, every), **single})


_MEASURED = "measured: 1854 warp instructions counted on an H100 with Nsight Compute"

ARCHS: Mapping[str, Arch] = MappingProxyType(
    {
        arch.name: arch
        for arch in (
            Arch(
                "sm_80", "nvidia", 32, banks=32, bank_bytes=4, shared_bytes=163 * 1024, registers=255,
                features=frozenset({"cp.async", "ldmatrix"}),
                provisional=frozenset({"wavefronts"}),
                sources=_sources(_CUDA, features="PTX ISA: cp.async and ldmatrix, target notes"),
            ),
            Arch(
                "sm_90", "nvidia", 32, banks=32, bank_bytes=4, shared_bytes=227 * 1024, registers=255,
                features=frozenset({"cp.async", "ldmatrix", "stmatrix", "tma", "wgmma"}),
                sources=_sources(_CUDA, banks=_MEASURED, bank_bytes=_MEASURED,
                                 features="PTX ISA: target notes of each instruction"),
            ),
            Arch(
                "gfx942", "amd", 64, banks=32, bank_bytes=4, shared_bytes=64 * 1024, registers=512,
                features=frozenset({"buffer_load_lds"}),
                provisional=frozenset({"wavefronts"}),
                sources=_sources(_CDNA),
            ),
            Arch(
                "gfx950", "amd", 64, banks=64, bank_bytes=4, shared_bytes=160 * 1024, registers=512,
                features=frozenset({"buffer_load_lds", "buffer_load_lds_b128", "ds_read_tr"}),
                provisional=frozenset({"wavefronts", "transposing reads"}),
                sources=_sources(_CDNA),
            ),
        )
    }
)  # fmt: skip


def get_arch(name: str | Arch | Any) -> Arch:
    """The architecture called ``name`` (an :class:`Arch` is returned as it is).

    >>> get_arch("sm_80").warp_size
    32
    >>> get_arch("sm_70")
    Traceback (most recent call last):
        ...
    ValueError: arch 'sm_70' is not one of sm_80, sm_90, gfx942, gfx950
    """
    if isinstance(name, Arch):
        return name
    if isinstance(name, str) and name in ARCHS:
        return ARCHS[name]
    raise ValueError(f"arch {name!r} is not one of {', '.join(ARCHS)}")
