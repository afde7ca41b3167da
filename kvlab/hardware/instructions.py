"""The shared-memory instructions of a warp, as data: what a lane moves and how lanes are grouped into phases."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ._arrays import IntArray, frozen
from .arch import Arch, LaneGroups


@dataclass(frozen=True)
class Instruction:
    """One shared-memory instruction.

    name       as written in the ISA (``ld.shared.b128``, ``ldmatrix.x4.trans``, ``ds_read_b64``, ...)
    vendor     ``nvidia`` or ``amd``
    nbytes     bytes behind each address: of a lane, or of a matrix row (16) for ldmatrix and stmatrix
    store      whether it writes
    matrices   8x8 matrices that ldmatrix or stmatrix moves, 0 for the others; lanes 0 .. 8*matrices-1 give addresses
    feature    the architecture's feature that it needs, or None
    shares     whether lanes that want the same word are served in one pass; not those of an atomic
    repeats    how often each pass is taken: twice by a compare and swap

    >>> INSTRUCTIONS["ldmatrix.x2"].matrices
    2
    """

    name: str
    vendor: str
    nbytes: int
    store: bool = False
    matrices: int = 0
    feature: str | None = None
    shares: bool = True
    repeats: int = 1

    def exists_on(self, arch: Arch) -> bool:
        """Tells whether ``arch`` has it.

        >>> from kvlab.hardware import get_arch
        >>> INSTRUCTIONS["stmatrix.x4"].exists_on(get_arch("sm_89"))
        False
        """
        return self.vendor == arch.vendor and self.feature in (None, *arch.features)

    def lanes(self, arch: Arch) -> int:
        """Number of lanes that give an address: all, or the first ``8 * matrices``."""
        return 8 * self.matrices or arch.warp_size

    def unit_bytes(self, arch: Arch) -> int:
        """Bytes that a lane asks of the banks: its own, at least one bank's word."""
        return max(self.nbytes, arch.bank_bytes)

    def lane_groups(self, arch: Arch) -> LaneGroups | None:
        """The architecture's own groups of lanes for it, or None: lane order, all banks."""
        return next((groups for groups in arch.lane_groups if self.name in groups.instructions), None)

    def banks(self, arch: Arch) -> int:
        """Banks that take part.

        >>> from kvlab.hardware import get_arch
        >>> [INSTRUCTIONS[name].banks(get_arch("gfx950")) for name in ("ds_read_b64", "ds_write_b64")]
        [64, 32]
        """
        groups = self.lane_groups(arch)
        return arch.banks if groups is None else groups.banks

    def phases(self, arch: Arch) -> IntArray:
        """``[phases, lanes]``: the lanes that are served together; in lane order, as many as fill all banks once,
        unless the architecture has groups of its own.

        >>> from kvlab.hardware import get_arch
        >>> INSTRUCTIONS["ds_read_b128"].phases(get_arch("gfx942"))[0].tolist()
        [0, 1, 2, 3, 20, 21, 22, 23]
        """
        return _phases(self, arch)

    def lanes_per_phase(self, arch: Arch) -> int:
        """Lanes that are served together.

        >>> from kvlab.hardware import get_arch
        >>> [INSTRUCTIONS[f"ld.shared.b{bits}"].lanes_per_phase(get_arch("sm_90")) for bits in (8, 32, 64, 128)]
        [32, 32, 16, 8]
        """
        return len(self.phases(arch)[0])

    @property
    def measured(self) -> bool:
        """Tells whether the H100 records behind the rule have such instructions."""
        return self.vendor == "nvidia"

    @property
    def merges(self) -> bool:
        """Tells whether phases of neighbours with equal addresses may merge (NVIDIA loads of 8 and 16 bytes a lane)."""
        return self.vendor == "nvidia" and not self.store and not self.matrices and self.nbytes > 4


@functools.cache
def _phases(op: Instruction, arch: Arch) -> IntArray:
    groups = op.lane_groups(arch)
    if groups is not None:
        return frozen(np.array(groups.groups))
    together = min(arch.pass_bytes // op.unit_bytes(arch), arch.warp_size)
    return frozen(np.arange(op.lanes(arch)).reshape(-1, together))


_ATOMICS = [f"atom.shared.{form}" for form in ("add.u32", "max.u32", "exch.b32", "exch.b64", "cas.b32", "cas.b64")]
_ATOMICS.append("red.shared.add.u32")


def _table() -> dict[str, Instruction]:
    sizes = (8, 16, 32, 64, 128)
    nvidia = [
        Instruction(f"{verb}.shared.b{bits}", "nvidia", bits // 8, store=verb == "st")
        for verb in ("ld", "st") for bits in sizes
    ]
    matrices = [
        Instruction(f"{verb}.x{n}{trans}", "nvidia", 16, store=verb == "stmatrix", matrices=n, feature=verb)
        for verb in ("ldmatrix", "stmatrix") for n in (1, 2, 4) for trans in ("", ".trans")
    ]
    amd = [
        Instruction(f"ds_{verb}_{'u' if verb == 'read' and bits < 32 else 'b'}{bits}", "amd", bits // 8,
                    store=verb == "write")
        for verb in ("read", "write") for bits in sizes
    ]
    transposing = [Instruction(f"ds_read_tr{bits}_b64", "amd", 8, feature="ds_read_tr") for bits in (16, 8)]
    atomics = [
        Instruction(form, "nvidia", int(form[-2:]) // 8, store=True, shares=False, repeats=1 + ("cas" in form))
        for form in _ATOMICS
    ]
    return {i.name: i for i in (*nvidia, *matrices, *atomics, *amd, *transposing)}


INSTRUCTIONS: Mapping[str, Instruction] = MappingProxyType(_table())


def get_instruction(name: str, arch: Arch) -> Instruction:
    """The instruction called ``name``, if ``arch`` has it.

    >>> from kvlab.hardware import get_arch
    >>> get_instruction("stmatrix.x4", get_arch("sm_80"))
    Traceback (most recent call last):
        ...
    ValueError: instruction 'stmatrix.x4' does not exist on sm_80, which has no stmatrix
    """
    instruction = INSTRUCTIONS.get(name) if isinstance(name, str) else None
    if isinstance(name, str) and name.startswith("cp.async"):
        raise ValueError(f"instruction {name!r} has two addresses a lane: copy_wavefronts counts its passes")
    if instruction is None or instruction.vendor != arch.vendor:
        raise ValueError(f"instruction is {name!r}: must be, on {arch.name}, one of {', '.join(arch.instructions)}")
    if not instruction.exists_on(arch):
        raise ValueError(f"instruction {name!r} does not exist on {arch.name}, which has no {instruction.feature}")
    return instruction
