"""Wavefronts of cp.async: the passes that a warp's copy from global to shared memory takes, and why.

Each of 832 copies counted on an H100 takes them (tests/data/hardware/accesses.json). Through L1 (``.ca``):

1. Lanes are served in phases in lane order, as for a store: 32, 16, 8 lanes for 4, 8, 16 bytes a lane.
2. Two lanes of a phase are *rivals* if they write the same bank, or read the same bank of L1 (word ``source // 4``,
   bank ``word % 32``); the same word counts as well: copies share nothing.
3. A phase takes as many passes as its most contested lane has rivals, itself among them; those on both sides once.

Past L1 (``.cg``, 16 bytes a lane) data arrive as sectors of 32 bytes:

1. Of the lanes that write the same 16 bytes the first one counts.
2. Its *move* takes one or both halves of a sector of the source to one sector of shared memory, straight or exchanged.
3. Moves share a pass if they come from one line of 128 bytes and go to one row of 128 bytes, take the same halves,
   straight or exchanged alike, all from even to even and odd to odd sectors or all across; and a sector of the source
   is in a pass once.

Nsight Compute computes these counters of an instruction from its addresses (they are the same in every run). What the
load and store unit itself takes is another number, :func:`copy_unit_passes` (tests/data/hardware/copies.json): a lane
goes in the pass behind the last earlier lane of its phase that is its rival, so that a phase takes as many passes as
its longest chain of rivals is long. Past L1 the unit has no part. Copies of zeros (a source size of 0) are the unit's:
through L1 copies that read nothing, past L1 stores of 16 bytes. Only sm_90 was measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.common.checks import integers
from kvlab.hardware._arrays import Array, BoolArray, IntArray, mask_lanes
from kvlab.hardware.arch import Arch, get_arch

from .count import count_wavefronts

#: instruction -> bytes a lane
COPIES = {"cp.async.ca.4": 4, "cp.async.ca.8": 8, "cp.async.ca.16": 16, "cp.async.cg.16": 16}

HALF, SECTOR, LINE = 16, 32, 128


def copy_wavefronts(
    instruction: str, addresses: Any, source: Any, mask: Any = None, arch: str | Arch = "sm_90", *, zeros: Any = None
) -> tuple[Array, Array]:
    """Wavefronts of many cp.async at once, and the fewest that could move as many bytes: two int arrays ``[...]``.

    Parameters
    ----------
    instruction : ``cp.async.ca.4``, ``.ca.8``, ``.ca.16`` or ``cp.async.cg.16``.
    addresses : ``[..., 32]`` byte addresses in shared memory, each a multiple of the bytes a lane moves.
    source : ``[..., 32]`` byte addresses in global memory, likewise; broadcasts with ``addresses``.
    mask : active lanes, as booleans ``[..., 32]`` or bit masks ``[...]``; None = all.
    arch : with cp.async. Only sm_90 was measured.
    zeros : lanes that write zeros in place of a source, likewise; they count in warps of which no lane is active: the
        passes of the unit (:func:`copy_unit_passes`).

    >>> lane = np.arange(32)
    >>> copy_wavefronts("cp.async.cg.16", lane * 16, lane * 16)                   # a row, in order: 512 bytes in 4
    (array(4), array(4))
    >>> copy_wavefronts("cp.async.cg.16", lane * 16, lane * 16 + 32)[0].item()    # rows that straddle two lines
    8
    >>> copy_wavefronts("cp.async.ca.4", lane * 4, np.stack([lane * 4, lane // 2 * 4, 0 * lane]))[0].tolist()
    [1, 2, 32]
    """
    to, fro, active, past_l1, machine = _operands(instruction, addresses, source, mask, arch)
    size, lead = COPIES[instruction], to.shape[:-1]
    together = machine.warp_size if past_l1 else machine.pass_bytes // size
    flat = to.reshape(-1, together), fro.reshape(-1, together), active.reshape(-1, together)
    if past_l1:
        passes, kept = _past_l1(*flat)
        taken, least = passes.reshape(lead), (-(-kept.sum(axis=1) * size // LINE)).reshape(lead)
    else:
        most = _rivals(*flat, size, machine.pass_bytes).sum(axis=2).max(axis=1)
        phases = most.reshape(*lead, machine.warp_size // together)
        taken, least = phases.sum(axis=-1), (phases > 0).sum(axis=-1)
    if zeros is None:
        return taken, least
    unit, alone = copy_unit_passes(instruction, to, None, zeros, machine), ~active.any(axis=-1)
    return np.where(alone, unit, taken), np.where(alone, unit, least)


def copy_unit_passes(
    instruction: str, addresses: Any, source: Any = None, mask: Any = None, arch: str | Arch = "sm_90"
) -> Array:
    """Passes that the load and store unit takes for many cp.async, int array ``[...]``; 0 for ``.cg``.

    Arguments and errors as for :func:`copy_wavefronts`; ``source`` None: copies of zeros. Exact for lines that are in
    L1; where some are on their way the unit takes more (up to 1.1 % in kernels of 104 copies, of 4 bytes a lane 0.2 %).

    >>> lane = np.arange(32)
    >>> to, fro = (lane + 1) // 2 * 4, lane // 2 * 4                               # a chain: each lane and the next
    >>> [int(n) for n in (copy_wavefronts("cp.async.ca.4", to, fro)[0], copy_unit_passes("cp.async.ca.4", to, fro))]
    [3, 32]
    >>> [int(copy_unit_passes(f"cp.async.{kind}.16", lane * 16)) for kind in ("ca", "cg")]
    [4, 4]
    """
    zeros = source is None
    apart = COPIES.get(instruction, 1) * np.arange(32)  # a source without rivals
    to, fro, active, past_l1, machine = _operands(instruction, addresses, apart if zeros else source, mask, arch)
    size, lead = COPIES[instruction], to.shape[:-1]
    if past_l1:
        stores: Array = count_wavefronts("st.shared.b128", to, active, machine)[0]
        return stores if zeros else np.zeros(lead, np.int64)
    together = machine.pass_bytes // size
    flat = to.reshape(-1, together), fro.reshape(-1, together), active.reshape(-1, together)
    rivals = _rivals(*flat, size, machine.pass_bytes) & np.tri(together, k=-1, dtype=np.bool_)
    passes, before = flat[2].astype(np.int64), None
    while before is None or (passes != before).any():  # as often as the longest chain is long
        before = passes
        passes = flat[2] * (1 + (rivals * before[:, None, :]).max(axis=2))
    taken: Array = passes.max(axis=1).reshape(*lead, machine.warp_size // together).sum(axis=-1)
    return taken


def _operands(
    instruction: str, addresses: Any, source: Any, mask: Any, arch: str | Arch
) -> tuple[IntArray, IntArray, BoolArray, bool, Arch]:
    """Addresses, source and active lanes ``[..., 32]``, whether past L1, the machine; ValueError for what is wrong."""
    if instruction not in COPIES:
        raise ValueError(f"instruction is {instruction!r}: must be one of {', '.join(COPIES)}")
    machine, size = get_arch(arch), COPIES[instruction]
    if "cp.async" not in machine.features:
        raise ValueError(f"{instruction}: {machine.name} has no cp.async")
    to, fro = (integers(f"{instruction}: {what}", x) for x, what in ((addresses, "addresses"), (source, "source")))
    if {to.shape[-1:], fro.shape[-1:]} != {(machine.warp_size,)}:
        raise ValueError(
            f"{instruction}: addresses has shape {to.shape}, source {fro.shape}: must be [..., "
            f"{machine.warp_size}], one of each for every lane"
        )
    try:
        to, fro = np.broadcast_arrays(to, fro)
    except ValueError:
        raise ValueError(f"{instruction}: addresses {to.shape} and source {fro.shape} do not broadcast") from None
    active = mask_lanes(mask, to.shape)
    for what, address in (("address", to), ("source", fro)):
        wrong = active & ((address < 0) | (address % size != 0))
        if wrong.any():
            bad = int(address[wrong][0])
            raise ValueError(f"{instruction}: {what} is {bad}: must be a multiple of {size} bytes from 0 on")
    return to, fro, active, instruction.startswith("cp.async.cg"), machine


def _rivals(to: IntArray, fro: IntArray, active: BoolArray, size: int, pass_bytes: int) -> BoolArray:
    """Pairs of rivals in phases ``[n, lanes]``, each lane its own: ``[n, lanes, lanes]``. Addresses are aligned: groups
    of banks are equal or disjoint."""
    bank, line = (x // size % (pass_bytes // size) for x in (to, fro))
    rivals = (bank[:, :, None] == bank[:, None, :]) | (line[:, :, None] == line[:, None, :])
    return np.asarray(rivals & active[:, :, None] & active[:, None, :])


def _past_l1(to: IntArray, fro: IntArray, active: BoolArray) -> tuple[IntArray, BoolArray]:
    """Passes of warps ``[n, 32]``: ``[n]``; and the lanes whose bytes stay."""
    earlier = np.tri(to.shape[1], k=-1, dtype=np.bool_)  # [lane, other]: the other comes first
    kept = active & ~_any(_same(to // HALF) & active[:, None, :] & earlier)
    exchanged = (to // HALF ^ fro // HALF) & 1
    same_move = _same(to // SECTOR, fro // SECTOR, exchanged) & kept[:, :, None] & kept[:, None, :]
    both = same_move.sum(axis=2) == 2
    halves = np.where(both, 2, fro // HALF % 2)
    first = kept & ~_any(same_move & earlier)  # one lane for each move
    group = _same(to // LINE, fro // LINE, exchanged, (to // SECTOR ^ fro // SECTOR) & 1, halves)
    group &= first[:, :, None] & first[:, None, :]
    turn = (group & _same(fro // SECTOR) & earlier).sum(axis=2)  # of a source sector, moves come one by one
    passes: IntArray = (first & ~_any(group & _same(turn) & earlier)).sum(axis=1)
    return passes, kept


def _same(*keys: IntArray) -> BoolArray:
    """Which lanes agree in every key ``[n, lanes]``: ``[n, lanes, lanes]``."""
    out = keys[0][:, :, None] == keys[0][:, None, :]
    for key in keys[1:]:
        out &= key[:, :, None] == key[:, None, :]
    return np.asarray(out)


def _any(pairs: BoolArray) -> BoolArray:
    return np.asarray(pairs.any(axis=2))
