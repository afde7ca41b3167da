"""Bank conflicts between registers and shared memory as Triton's compiler counts them, from their two layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvlab.common.checks import shown
from kvlab.hardware._arrays import IntArray
from kvlab.layout.encodings import NEWEST, Encoding, SharedEncoding
from kvlab.layout.linear.f2 import Elimination
from kvlab.layout.linear.linear_layout import LinearLayout

BANK_BITS = 32
INSTRUCTION_BITS = 128  # the widest ld.shared and st.shared
BLOCK = "block"


@dataclass(frozen=True, eq=False)
class SharedTransfer:
    """The ld/st.shared instructions that move a tensor between registers and shared memory.

    offset       int64 ``[warps, instructions, lanes]``: where each lane's piece starts, in elements of its CTA's memory
    vec          elements that a lane moves with one instruction
    elem_bits    bits of an element

    >>> transfer = SharedTransfer(np.arange(0, 256, 8).reshape(1, 1, 32), vec=8, elem_bits=16)
    >>> transfer.phases.shape  # 16 bytes a lane: eight lanes at a time
    (4, 8)
    """

    offset: IntArray
    vec: int
    elem_bits: int

    @property
    def phases(self) -> IntArray:
        """The offsets ``[phases, lanes]`` of lanes that are served together: 128 bytes of a warp of 32, 256 of 64."""
        words = max(1, self.vec * self.elem_bits // BANK_BITS)
        return self.offset.reshape(-1, self.offset.shape[-1] // words)

    def excess(self, *, banks: int = 32, counted: str = "triton") -> int:
        """Passes of the worst phase beyond the first, as :func:`bank_conflicts` describes them."""
        start = self.phases
        if counted == "triton":
            units, slots = start // self.vec, max(1, banks * BANK_BITS // (self.vec * self.elem_bits))
        elif counted == "words":
            words = np.arange(max(1, self.vec * self.elem_bits // BANK_BITS))
            units = (start[..., None] * self.elem_bits // BANK_BITS + words).reshape(len(start), -1)
            slots = banks
        else:
            raise ValueError(f"counted={counted!r}: must be 'triton' or 'words'")
        span = int(units.max()) + 1
        distinct = np.unique(units + np.arange(len(units))[:, None] * span)
        phase, unit = np.divmod(distinct, span)
        return int(np.bincount(phase * slots + unit % slots).max()) - 1


def shared_transfer(
    register_layout: Encoding | LinearLayout, shared_layout: SharedEncoding | LinearLayout, shape: Sequence[int],
    elem_bits: int, *, triton_version: str = NEWEST,
) -> SharedTransfer:
    """The instructions: registers that only repeat others are skipped, and the widest pieces (up to 128 bits) are
    moved whose elements are consecutive in both layouts, as ``triton_version`` defines these.

    >>> from kvlab.layout.encodings import BlockedLayout, SwizzledSharedLayout
    >>> b, s = BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]), SwizzledSharedLayout(2, 1, 4, [1, 0])
    >>> access = shared_transfer(b, s, (16, 32), 16)
    >>> access.vec, access.offset.shape
    (2, (4, 2, 32))
    """
    for name, given, kinds in (
        ("register_layout", register_layout, Encoding | LinearLayout),
        ("shared_layout", shared_layout, SharedEncoding | LinearLayout),
    ):
        if not isinstance(given, kinds):
            raise ValueError(f"{name} is {given!r}: must be an encoding or a LinearLayout")
    registers, shared = (
        layout.to_linear_layout(shape, triton_version=triton_version) if isinstance(layout, Encoding) else layout
        for layout in (register_layout, shared_layout)
    )
    if elem_bits not in (8, 16, 32, 64, 128):
        raise ValueError(f"elem_bits is {shown(elem_bits)}: must be 8, 16, 32, 64 or 128")
    names = list(registers.out_dims)
    way = registers.invert_and_compose(shared.transpose(*names))
    axis = list(way.out_dims).index("offset")
    bits = {name: [vector[axis] for vector in vectors] for name, vectors in way.bases.items() if name != BLOCK}
    reg = _without_repeats(registers, bits.pop("register"))
    others = [step for steps in bits.values() for step in steps]
    limit = INSTRUCTION_BITS // elem_bits
    pairs = getattr(shared_layout, "interval_padding_pairs", ())
    vec = min([_vectorisation(reg, others, limit), *(n for pair in pairs for n in pair)])
    inner = [1 << bit for bit in range(vec.bit_length() - 1)]
    reg = [step for step in reg if step not in inner]
    order = {"warp": bits["warp"], "register": reg, "lane": bits["lane"]}
    bases = {name: [[step] for step in steps] for name, steps in order.items()}
    starts = LinearLayout(bases, {"offset": way.out_dims["offset"]}).coordinates()[..., 0]
    offset = shared_layout.physical(starts) if isinstance(shared_layout, SharedEncoding) else starts
    return SharedTransfer(offset, vec, elem_bits)


def bank_conflicts(
    register_layout: Encoding | LinearLayout, shared_layout: SharedEncoding | LinearLayout, shape: Sequence[int],
    elem_bits: int, *, banks: int = 32, counted: str = "triton", triton_version: str = NEWEST,
) -> int:
    """Excess wavefronts for each wavefront of the ld.shared or st.shared between two layouts; 0 is conflict free.

    The lanes of a warp are served in phases of 32 words (of 64 on AMD's 64 lanes), in lane order. The passes of a phase
    are the most places of one bank that it needs; equal places count once (broadcast). ldmatrix is not modelled. AMD's
    chips do not serve every access in lane order: what theirs take is :func:`~kvlab.hardware.count_wavefronts` of
    ``shared_transfer(...).offset * elem_bits // 8`` with the chip's ``arch``.

    counted : ``"triton"``: what ``GluonOpBuilder.get_shared_bank_conflicts`` of Triton 3.6.0 to 3.9.0 returns. It knows
        banks as wide as the piece of a lane. ``"words"``: the 4-byte banks of the hardware. They differ where pieces
        are narrower than 4 bytes and two lanes need different words of a bank at different bytes: Triton misses that.
        For a warp of 32 lanes this is what NVIDIA's hardware takes.
    banks : Triton 3.6.0 counts with 32 for AMD too, also where the chip has 64.
    triton_version : the version whose layouts the encodings are (3.6.0 to 3.9.0): a transposed ``NVMMASharedLayout``
        without a swizzle is row-major before 3.9.0.

    A padded layout is counted by its padded offsets (the compilers abort on it).

    >>> from kvlab.layout.encodings import BlockedLayout, SwizzledSharedLayout
    >>> column = BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1])
    >>> [bank_conflicts(column, SwizzledSharedLayout(*s, [1, 0]), (64, 64), 16) for s in ((1, 1, 1), (8, 1, 8))]
    [7, 0]
    """
    transfer = shared_transfer(register_layout, shared_layout, shape, elem_bits, triton_version=triton_version)
    return transfer.excess(banks=banks, counted=counted)


def _without_repeats(registers: LinearLayout, offsets: list[int]) -> list[int]:
    """The offsets of the register bits that reach something which the registers before them do not."""
    columns = registers.columns[: len(offsets)]
    repeats = {mask.bit_length() - 1 for mask in Elimination(columns).kernel}
    return [step for bit, step in enumerate(offsets) if bit not in repeats]


def _vectorisation(registers: list[int], others: list[int], limit: int) -> int:
    """The most consecutive elements, a power of two, that one lane holds at aligned offsets wherever it lies."""
    vec = 1
    while vec * 2 <= limit and vec in registers:
        inner = [1 << bit for bit in range(vec.bit_length())]
        if any(step % (2 * vec) for step in others + [step for step in registers if step not in inner]):
            break
        vec *= 2
    return vec
