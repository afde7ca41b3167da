"""The rule of wavefronts: how many passes of shared memory one warp instruction takes, and why.

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
``Arch.lane_groups``; all else in lane order. Only sm_90 was measured here; all else is provisional."""

from __future__ import annotations

import numpy as np

from kvlab.hardware._arrays import BoolArray, IntArray
from kvlab.hardware.arch import Arch
from kvlab.hardware.instructions import Instruction

GROUP = 48  #: where the group of banks stands in a key


def merges(op: Instruction, vectors: IntArray) -> BoolArray:
    """Tells which instructions' phases merge: ``[n]``, from their vectors ``[n, lanes]`` (-1 = inactive lane)."""
    if not op.merges:
        return np.zeros(len(vectors), np.bool_)
    result = np.zeros(len(vectors), np.bool_)
    for distance in (1, 2):
        partner = vectors[:, np.arange(vectors.shape[1]) ^ distance]
        result |= ((vectors == partner) | (vectors < 0) | (partner < 0)).all(axis=1)
    return result


def keys_of(op: Instruction, arch: Arch, vectors: IntArray) -> IntArray:
    """Keys that order the vectors of a phase: first the group of neighbouring banks that a vector fills, then the
    vector; -1 = inactive. Addresses are aligned: two lanes collide in all banks of a group or in none."""
    groups = op.banks(arch) * arch.bank_bytes // op.unit_bytes(arch)
    return np.where(vectors < 0, -1, vectors % groups << GROUP | vectors)


def delivered(keys: IntArray, shares: bool) -> IntArray:
    """The pass of its phase in which each lane's vector comes, from 0, -1 for inactive lanes: ``[phases, lanes]`` for
    keys that ascend along each row. A group of banks delivers one vector a pass, once for all lanes that share it."""
    turn, opens = np.ones(keys.shape, np.int64), np.ones(keys.shape, np.bool_)
    if shares:
        turn[:, 1:] = keys[:, 1:] != keys[:, :-1]
    opens[:, 1:] = keys[:, 1:] >> GROUP != keys[:, :-1] >> GROUP
    turn = turn.cumsum(axis=1)
    passes: IntArray = turn - np.maximum.accumulate(np.where(opens, turn, 0), axis=1)
    passes[keys < 0] = -1
    return passes
