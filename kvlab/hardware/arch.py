"""Architectures: the numbers that the models of this room need. The table is in ``arch_table.py``, source by source.

A model that no chip has confirmed is named in :attr:`Arch.provisional`; whoever shows its result says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab.common.checks import shown

_COPIES = ("cp.async", "tma", "tma.gather4", "buffer_load_lds", "buffer_load_lds_b128")


@dataclass(frozen=True)
class LaneGroups:
    """Order in which shared memory serves some instructions, other than lane order over all banks.

    instructions   their names
    groups         the lanes of each phase, in the order in which the phases are counted; each lane once
    banks          that take part
    source         who says so, as words that follow "Provisional: "

    >>> pairs = LaneGroups(("ds_read_b128",), groups=((0, 2), (1, 3)), banks=32, source="an example")
    >>> pairs.groups[1]
    (1, 3)
    >>> LaneGroups(("ds_read_b128",), groups=((0, 2), (2, 3)), banks=32, source="an example")
    Traceback (most recent call last):
        ...
    ValueError: groups is ((0, 2), (2, 3)): must be of one size and hold each lane once
    """

    instructions: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    banks: int
    source: str

    def __post_init__(self) -> None:
        lanes = sorted(lane for group in self.groups for lane in group)
        if lanes != list(range(len(lanes))) or len({len(group) for group in self.groups}) != 1:
            raise ValueError(f"groups is {self.groups}: must be of one size and hold each lane once")


@dataclass(frozen=True)
class Arch:
    """One GPU architecture.

    =============== ====================================================================================
    warp_size       lanes that execute one instruction together (AMD: a wave)
    banks           shared-memory (LDS) banks
    bank_bytes      width of a bank: what it delivers in one pass
    shared_bytes    largest shared memory of one CTA, in bytes
    shared_bytes_sm shared memory of one SM (AMD: of one CU, RDNA: of one work-group processor), in bytes
    registers       32-bit registers a lane may have
    registers_sm    32-bit registers of one SM (AMD: of one CU)
    features        data instructions beyond plain loads and stores: ``cp.async``, ``ldmatrix``, ...
    lane_groups     the :class:`LaneGroups` of instructions whose lanes are not served in lane order over all banks
    provisional     models of this package that no such chip has confirmed: ``wavefronts``, ``arithmetic``, ...
    sources         where each number was read
    =============== ====================================================================================

    >>> get_arch("sm_90").shared_bytes
    232448
    >>> sorted(get_arch("gfx950").provisional)
    ['transposing reads', 'wavefronts']
    >>> print(get_arch("gfx942").sources["banks"])
    LLVM AMDGPU target: LDS bank count and addressable local memory; not confirmed on a chip
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
    shared_bytes_sm: int = 0
    registers_sm: int = 0
    lane_groups: tuple[LaneGroups, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def pass_bytes(self) -> int:
        """Bytes that all banks deliver in one pass.

        >>> get_arch("sm_90").pass_bytes, get_arch("gfx950").pass_bytes
        (128, 256)
        """
        return self.banks * self.bank_bytes

    @property
    def copies(self) -> tuple[str, ...]:
        """Features that bring DRAM to shared memory without passing through registers.

        >>> get_arch("sm_90").copies, get_arch("gfx1100").copies
        (('cp.async', 'tma'), ())
        """
        return tuple(name for name in _COPIES if name in self.features)

    @property
    def instructions(self) -> tuple[str, ...]:
        """Names of the shared-memory instructions that it has.

        >>> get_arch("gfx942").instructions[:3]
        ('ds_read_u8', 'ds_read_u16', 'ds_read_b32')
        """
        from .instructions import INSTRUCTIONS

        return tuple(i.name for i in INSTRUCTIONS.values() if i.exists_on(self))

    @property
    def atoms(self) -> tuple[str, ...]:
        """Names of the MMA atoms that it has.

        >>> [name for name in get_arch("sm_89").atoms if "f64" in name or "e4m3.e5m2" in name]
        ['mma.sync.m16n8k32.e4m3.e5m2', 'mma.sync.m8n8k4.f64']
        """
        from .mma.atoms import ATOMS

        return tuple(atom.name for atom in ATOMS.values() if self.name in atom.archs)


def get_arch(name: str | Arch | Any) -> Arch:
    """The architecture called ``name`` (an :class:`Arch` is returned as it is).

    >>> get_arch("sm_80").warp_size
    32
    >>> get_arch("sm_70")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: arch is 'sm_70': must be one of sm_80, sm_86, sm_89, sm_90, ..., gfx1201
    """
    from .arch_table import ARCHS

    if isinstance(name, Arch):
        return name
    if isinstance(name, str) and name in ARCHS:
        return ARCHS[name]
    raise ValueError(f"arch is {shown(name)}: must be one of {', '.join(ARCHS)}")
