"""Wavefronts of warp instructions, many at once or one with all that happens in it, by the rule of :mod:`.rule`."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.hardware._arrays import Array, BoolArray, IntArray, mask_lanes
from kvlab.hardware.arch import Arch, get_arch
from kvlab.hardware.instructions import Instruction, get_instruction

from .rule import delivered, keys_of, merges
from .wavefront import Wavefronts


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
    vectors = np.where(active, address // op.unit_bytes(arch), -1).reshape(-1, lanes)
    total = np.zeros(len(vectors), np.int64)
    ideal = np.zeros(len(vectors), np.int64)
    merged = merges(op, vectors)
    phases = op.phases(arch)
    keys = keys_of(op, arch, vectors[:, phases.ravel()])
    for which, width in ((merged, 2 * phases.shape[1]), (~merged, phases.shape[1])):
        served = np.sort(keys[which].reshape(-1, width), axis=1)
        passes = 1 + delivered(served, op.shares).max(axis=1).reshape(which.sum(), phases.size // width)
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
        raise ValueError(f"{op.name}: address is {bad}: must be a multiple of {op.nbytes} bytes")
    return address, active
