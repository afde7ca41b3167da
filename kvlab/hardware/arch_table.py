"""The table of architectures. Every number has its source; what the sources leave open is provisional."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .arch import Arch, LaneGroups

_KIB = 1024
_CUDA = "CUDA Programming Guide, compute capabilities, memory information per compute capability"
_PTX = "PTX ISA: target notes of each instruction"
_MEASURED = "measured: warp instructions counted on an H100 with Nsight Compute, tests/data/h100_wavefronts.json"
_LLVM = "LLVM AMDGPU target: LDS bank count and addressable local memory; not confirmed on a chip"
_LLVM_REGISTERS = "LLVM AMDGPU target: registers of a lane and of a SIMD, SIMDs of a CU"
_CDNA4 = "AMD CDNA 4: 160 KiB LDS; 64 banks by MAX's public sources; not confirmed on a chip"
_RDNA = "AMD RDNA ISA manuals: a work-group processor has two halves of 64 KiB and 32 banks, a work group at most one"
_WAVE = "AMD ISA manuals: wave64 on CDNA, wave32 on RDNA"
_LANE_ORDER = "assumed: lane order, as many lanes at a time as fill all banks once"
_MEASURED_BY_OTHERS = "the lane groups were measured on {} by others and are used by two compilers, not confirmed here"
_AMD_ISA = "LLVM AMDGPU target: buffer loads to LDS and their widths, transposing LDS reads"


def _nvidia(name: str, sm_kib: int, *features: str, measured: bool = False) -> Arch:
    """1 KiB of the SM's shared memory is reserved for each CTA."""
    banks = _MEASURED if measured else _CUDA
    return Arch(
        name, "nvidia", warp_size=32, banks=32, bank_bytes=4,
        shared_bytes=(sm_kib - 1) * _KIB, shared_bytes_sm=sm_kib * _KIB, registers=255, registers_sm=64 * _KIB,
        features=frozenset({"cp.async", "ldmatrix", *features}),
        provisional=frozenset() if measured else frozenset({"wavefronts", "arithmetic"}),
        sources=MappingProxyType({
            "warp_size": _CUDA, "banks": banks, "bank_bytes": banks, "shared_bytes": _CUDA, "shared_bytes_sm": _CUDA,
            "registers": _CUDA, "registers_sm": _CUDA, "features": _PTX, "lane_groups": _MEASURED,
        }),
    )


def _amd(
    name: str, warp_size: int, banks: int, lds_kib: int, registers: int, registers_sm: int, *features: str,
    lds: str, sm_kib: int | None = None, provisional: frozenset[str] = frozenset(),
) -> Arch:
    lane_groups = _LANE_GROUPS.get(name, ())
    return Arch(
        name, "amd", warp_size=warp_size, banks=banks, bank_bytes=4,
        shared_bytes=lds_kib * _KIB, shared_bytes_sm=(sm_kib or lds_kib) * _KIB,
        registers=registers, registers_sm=registers_sm,
        features=frozenset(features), provisional=frozenset({"wavefronts"}) | provisional, lane_groups=lane_groups,
        sources=MappingProxyType({
            "warp_size": _WAVE, "banks": lds, "bank_bytes": lds, "shared_bytes": lds, "shared_bytes_sm": lds,
            "registers": _LLVM_REGISTERS, "registers_sm": _LLVM_REGISTERS, "features": _AMD_ISA,
            "lane_groups": "; ".join(group.source for group in lane_groups) or _LANE_ORDER,
        }),
    )


def _both_halves(*groups: tuple[range, ...]) -> tuple[tuple[int, ...], ...]:
    """The groups of lanes 0-31, and the same of lanes 32-63."""
    lanes = [tuple(lane for part in group for lane in part) for group in groups]
    return (*lanes, *(tuple(lane + 32 for lane in group) for group in lanes))


_LANE_GROUPS = {
    "gfx942": (
        LaneGroups(
            ("ds_read_b128",),
            _both_halves(
                (range(4), range(20, 24)), (range(4, 8), range(16, 20)),
                (range(8, 12), range(28, 32)), (range(12, 16), range(24, 28)),
            ),
            banks=32, source=_MEASURED_BY_OTHERS.format("gfx942"),
        ),
    ),
    "gfx950": (
        LaneGroups(
            ("ds_read_b128",),
            _both_halves((range(4), range(12, 16), range(20, 28)), (range(4, 12), range(16, 20), range(28, 32))),
            banks=64, source=_MEASURED_BY_OTHERS.format("gfx950"),
        ),
        LaneGroups(
            ("ds_write_b64",), tuple(tuple(range(first, first + 16)) for first in range(0, 64, 16)), banks=32,
            source="one source says that gfx950 serves writes of 8 bytes 16 lanes at a time over 32 banks",
        ),
    ),
}

_CDNA_REGISTERS = 4 * 512 * 64  # SIMDs of a CU x registers of a lane (VGPR and AGPR) x lanes
_RDNA_REGISTERS = 2 * 1536 * 32  # SIMDs of a CU x registers of a SIMD x lanes

ARCHS: Mapping[str, Arch] = MappingProxyType(
    {
        arch.name: arch
        for arch in (
            _nvidia("sm_80", 164),
            _nvidia("sm_86", 100),
            _nvidia("sm_89", 100),
            _nvidia("sm_90", 228, "stmatrix", "tma", "wgmma", measured=True),
            _nvidia("sm_100", 228, "stmatrix", "tma", "tma.gather4", "tcgen05"),
            _nvidia("sm_120", 100, "stmatrix", "tma"),
            _amd("gfx90a", 64, 32, 64, 512, _CDNA_REGISTERS, "buffer_load_lds", lds=_LLVM),
            _amd("gfx942", 64, 32, 64, 512, _CDNA_REGISTERS, "buffer_load_lds", lds=_LLVM),
            _amd("gfx950", 64, 64, 160, 512, _CDNA_REGISTERS, "buffer_load_lds", "buffer_load_lds_b128", "ds_read_tr",
                 lds=_CDNA4, provisional=frozenset({"transposing reads"})),
            _amd("gfx1100", 32, 32, 64, 256, _RDNA_REGISTERS, lds=_RDNA, sm_kib=128),
            _amd("gfx1201", 32, 32, 64, 256, _RDNA_REGISTERS, lds=_RDNA, sm_kib=128),
        )
    }
)
