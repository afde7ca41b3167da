"""Wavefronts: how many passes of shared memory one warp instruction takes, and why.

The rule was measured on an H100 with Nsight Compute (1112 instructions are in tests/data/h100_wavefronts.json):

1. The active lanes are served in *phases*, in lane order, as many lanes at a time as fill all banks once: on NVIDIA 32,
   16, 8 lanes for 4, 8, 16 bytes a lane; for ldmatrix and stmatrix the 8 rows of one 8x8 matrix.
2. Loads of 8 and 16 bytes: if every active lane has the address of lane ^ 1, or every active lane that of lane ^ 2
   (where that lane is active), neighbouring phases *merge* in pairs.
3. The passes of a phase are the largest number of different words that one bank has to deliver in it.
4. Wavefronts are the sum of the passes; the conflict counter is that less the number of phases with an active lane.
5. 1 and 2 bytes a lane ask for the 4-byte word that holds them. Lanes of an atomic never share a word: a phase takes
   as many passes as lanes want one bank. A compare and swap takes every pass twice; its conflicts are counted once.

Rule 5 reproduces each of 2704 accesses (tests/data/hardware/accesses.json). cp.async: ``copy_wavefronts``. AMD follows
the same arithmetic with its own phases (no merging): reads of 16 bytes on gfx942 and gfx950 are served in groups of
lanes that others measured, writes of 8 bytes on gfx950 sixteen lanes at a time over 32 banks (one source), see
``Arch.lane_groups``; all else in lane order. Only sm_90 was measured here; all else is provisional.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._arrays import Array, BoolArray, IntArray, mask_lanes
from .arch import Arch, get_arch
from .instructions import Instruction, get_instruction
from .wavefront import Wavefronts

__all__ = ["count_wavefronts", "wavefronts"]


def count_wavefronts(
    instruction: str, addresses: Any, mask: Any = None, arch: str | Arch = "sm_90"
) -> tuple[Array, Array, Array]:
    """Wavefronts, ideal wavefronts and bank conflicts of many warp instructions at once: three int arrays ``[...]``.

    Parameters
    ----------
    instruction : a name of :data:`~kvlab.hardware.INSTRUCTIONS`.
    addresses : ``[..., lanes]`` absolute byte addresses in shared memory, each a multiple of the bytes a lane moves.
        ldmatrix and stmatrix ignore the addresses past lane ``8 * matrices - 1``.
    mask : active lanes, as booleans ``[..., lanes]`` or as bit masks ``[...]`` (bit l = lane l); None = all.
    arch : name or :class:`~kvlab.hardware.Arch`. Only sm_90 was measured, see ``Wavefronts.provisional``.

    ``ideal`` counts the phases that have an active lane, after merging: the least that any addresses of the same
    phases could take. ``conflicts`` is what the hardware's counter shows: ``wavefronts - ideal``, half of it for a
    compare and swap.

    >>> rows = np.arange(32) % 8 * 128 + np.arange(32) // 8 * 16  # an 8 x 32 bf16 tile, rows of 128 bytes
    >>> swizzled = rows ^ (rows >> 7 & 7) << 4
    >>> wavefronts, ideal, conflicts = count_wavefronts("ldmatrix.x4", [rows, swizzled])
    >>> wavefronts.tolist(), ideal.tolist(), conflicts.tolist()
    ([32, 4], [4, 4], [28, 0])
    """
    arch = get_arch(arch)
    op = get_instruction(instruction, arch)
    address, active = checked_lanes(op, arch, addresses, mask)
    lead, lanes = address.shape[:-1], address.shape[-1]
    unit = op.unit_bytes(arch)
    vectors = np.where(active, address // unit, -1).reshape(-1, lanes)
    total = np.zeros(len(vectors), np.int64)
    ideal = np.zeros(len(vectors), np.int64)
    merged = merges(op, vectors)
    phases, groups = op.phases(arch), op.banks(arch) * arch.bank_bytes // unit
    for which, width in ((merged, 2 * phases.shape[1]), (~merged, phases.shape[1])):
        passes = _passes(vectors[which][:, phases.ravel()], width, groups, op.shares)
        total[which], ideal[which] = passes.sum(axis=1), (passes > 0).sum(axis=1)
    conflicts = (total - ideal).reshape(lead)
    return (total * op.repeats).reshape(lead), (ideal * op.repeats).reshape(lead), conflicts


def wavefronts(instruction: str, addresses: Any, mask: Any = None, arch: str | Arch = "sm_90") -> Wavefronts:
    """The wavefronts of ONE warp instruction, phase by phase, with the lanes and banks that collide.

    ``addresses`` ``[lanes]`` and ``mask`` as in :func:`count_wavefronts`.

    >>> wavefronts("ld.shared.b128", np.arange(32) * 16)
    Wavefronts(ld.shared.b128 on sm_90: 4 wavefronts, ideal 4, 0 conflicts)
    >>> w = wavefronts("ld.shared.b32", np.arange(32) * 8)
    >>> w.wavefronts, w.ideal, w.conflicts
    (2, 1, 1)
    >>> w.colliding[0]
    Collision(phase=0, bank=0, words=(0, 32), lanes=((0,), (16,)))
    """
    arch = get_arch(arch)
    op = get_instruction(instruction, arch)
    address, active = checked_lanes(op, arch, addresses, mask)
    if address.ndim != 1:
        raise ValueError(f"addresses of shape {address.shape} are not those of one instruction; use count_wavefronts")
    merged = bool(merges(op, np.where(active, address // op.unit_bytes(arch), -1)[None])[0])
    return Wavefronts(op, arch, address, np.array(active), merged)


def checked_lanes(op: Instruction, arch: Arch, addresses: Any, mask: Any) -> tuple[IntArray, BoolArray]:
    """Addresses and active lanes ``[..., lanes that give an address]``, or ValueError."""
    address = np.asarray(addresses)
    if address.dtype.kind not in "iu" or address.ndim < 1 or address.shape[-1] != arch.warp_size:
        raise ValueError(
            f"{op.name}: addresses of shape {address.shape} and type {address.dtype} are not integers "
            f"[..., {arch.warp_size}], one for each lane of {arch.name}"
        )
    active = mask_lanes(mask, address.shape)
    if op.matrices and not active.all():
        raise ValueError(f"{op.name}: every lane takes part, mask {mask!r} must be None")
    address = address[..., : op.lanes(arch)].astype(np.int64)
    active = active[..., : op.lanes(arch)]
    used = np.where(active, address, 0)
    if (used < 0).any():
        raise ValueError(f"{op.name}: address {int(used.min())} is negative")
    if (used % op.nbytes).any():
        bad = int(used[used % op.nbytes != 0].flat[0])
        raise ValueError(f"{op.name}: address {bad} is not a multiple of {op.nbytes} bytes")
    return address, active


def merges(op: Instruction, vectors: IntArray) -> BoolArray:
    """Which instructions' phases merge: ``[n]``, from their vectors ``[n, lanes]`` (-1 = inactive lane)."""
    if not op.merges:
        return np.zeros(len(vectors), np.bool_)
    result = np.zeros(len(vectors), np.bool_)
    for distance in (1, 2):
        partner = vectors[:, np.arange(vectors.shape[1]) ^ distance]
        result |= ((vectors == partner) | (vectors < 0) | (partner < 0)).all(axis=1)
    return result


def _passes(vectors: IntArray, lanes_per_phase: int, groups: int, shares: bool) -> IntArray:
    """Passes of each phase, ``[n, phases]``, for vectors ``[n, lanes]``, phase after phase (-1 = inactive).

    Addresses are aligned, so the words of a lane fill one *group* of neighbouring banks: two lanes collide in all banks
    of a group or in none, and it is enough to count vectors per group: different ones where lanes share a pass.
    """
    n, phases = len(vectors), vectors.shape[1] // lanes_per_phase
    v = np.sort(vectors.reshape(n * phases, lanes_per_phase), axis=1)
    first = v >= 0
    if shares:
        first[:, 1:] &= v[:, 1:] != v[:, :-1]
    row, _ = np.nonzero(first)
    counts = np.bincount(row * groups + v[first] % groups, minlength=n * phases * groups)
    passes: IntArray = counts.reshape(n, phases, groups).max(axis=2, initial=0)
    return passes
