"""The passes that shared memory takes for one warp instruction: who is served when, who collides, and words for it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvlab.common.drawn import Drawn
from kvlab.hardware._arrays import BoolArray, IntArray
from kvlab.hardware.arch import Arch
from kvlab.hardware.instructions import Instruction

from .rule import delivered, keys_of


@dataclass(frozen=True)
class Phase:
    """Lanes that are served together: the active ones, and the passes that this takes (0 without active lanes).

    >>> from kvlab.hardware import wavefronts
    >>> wavefronts("st.shared.b64", np.arange(32) * 8, mask=0b101).phases
    (Phase(lanes=(0, 2), passes=1), Phase(lanes=(), passes=0))
    """

    lanes: tuple[int, ...]
    passes: int


@dataclass(frozen=True)
class Collision:
    """One bank that has to deliver several words in one phase: the words, and for each the lanes that want it.

    ``words`` are 4-byte word numbers (byte address // 4).

    >>> from kvlab.hardware import wavefronts
    >>> wavefronts("ld.shared.b32", np.arange(32) // 16 * 128).colliding[0].words
    (0, 32)
    """

    phase: int
    bank: int
    words: tuple[int, ...]
    lanes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False, repr=False)
class Wavefronts(Drawn):
    """Result of :func:`kvlab.hardware.wavefronts` for one warp instruction.

    op, arch     the :class:`Instruction` and the :class:`Arch`
    addresses    ``[lanes]`` byte address of each lane that gives one (ldmatrix.x2: of the first 16)
    active       ``[lanes]`` bool
    merged       whether equal addresses of neighbouring lanes made phases merge

    >>> from kvlab.hardware import wavefronts
    >>> w = wavefronts("ld.shared.b32", np.arange(32) * 8)
    >>> w
    Wavefronts(ld.shared.b32 on sm_90: 2 wavefronts, ideal 1, 1 conflict)
    >>> w.banks[15:18, 0].tolist(), w.phase[15:18].tolist(), w.pass_in_phase[15:18, 0].tolist()
    ([30, 0, 2], [0, 0, 0], [0, 1, 1])
    """

    op: Instruction
    arch: Arch
    addresses: IntArray
    active: BoolArray
    merged: bool

    @property
    def instruction(self) -> str:
        """Name of the instruction."""
        return self.op.name

    @property
    def wavefronts(self) -> int:
        """Passes of shared memory."""
        return sum(phase.passes for phase in self.phases) * self.op.repeats

    @property
    def ideal(self) -> int:
        """Passes without any conflict: the phases that have an active lane."""
        return sum(phase.passes > 0 for phase in self.phases) * self.op.repeats

    @property
    def conflicts(self) -> int:
        """Count of the hardware's conflict counter: ``wavefronts - ideal``, half of it for a compare and swap."""
        return (self.wavefronts - self.ideal) // self.op.repeats

    @property
    def provisional(self) -> bool:
        """True where no chip of this architecture has confirmed the rule."""
        return "wavefronts" in self.arch.provisional or not self.op.measured

    @functools.cached_property
    def phase(self) -> IntArray:
        """``[lanes]`` the phase that serves each lane, -1 for an inactive lane."""
        served = np.empty(len(self.addresses), np.int64)
        served[self._served] = np.arange(len(self._served))[:, None]
        return np.where(self.active, served, -1)

    @property
    def bank_count(self) -> int:
        """Banks that take part in the instruction."""
        return self.op.banks(self.arch)

    @functools.cached_property
    def words(self) -> IntArray:
        """``[lanes, words]`` the 4-byte words of each lane; word w lies in bank ``w % bank_count``."""
        size = self.arch.bank_bytes
        words: IntArray = self.addresses[:, None] // size + np.arange(self.op.unit_bytes(self.arch) // size)
        return words

    @property
    def banks(self) -> IntArray:
        """``[lanes, words]`` the bank of each word."""
        return self.words % self.bank_count

    @functools.cached_property
    def pass_in_phase(self) -> IntArray:
        """``[lanes, words]`` in which pass of its phase a word is delivered, if a bank delivers in ascending order."""
        vectors = np.where(self.active, self.addresses // self.op.unit_bytes(self.arch), -1)
        keys = keys_of(self.op, self.arch, vectors[self._served])
        order = keys.argsort(axis=1, kind="stable")
        out = np.empty(len(self.addresses), np.int64)
        out[np.take_along_axis(self._served, order, 1)] = delivered(np.take_along_axis(keys, order, 1), self.op.shares)
        return np.repeat(out[:, None], self.words.shape[1], axis=1)

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases in order, each with its active lanes and its passes."""
        lanes = [np.flatnonzero(self.phase == number) for number in range(len(self._served))]
        passes = [int(self.pass_in_phase[who].max(initial=-1)) + 1 for who in lanes]
        return tuple(Phase(tuple(who.tolist()), n) for who, n in zip(lanes, passes, strict=True))

    @functools.cached_property
    def colliding(self) -> tuple[Collision, ...]:
        """Every bank that has to deliver more than one word in a phase."""
        table, inverse = self._distinct
        lane = np.broadcast_to(np.flatnonzero(self.active)[:, None], (self.active.sum(), self.words.shape[1])).ravel()
        order = np.argsort(inverse, kind="stable")
        lanes = np.split(lane[order], np.searchsorted(inverse[order], np.arange(1, len(table))))
        key = table[:, 0] * self.bank_count + table[:, 1]
        bounds = [*np.flatnonzero(np.diff(key, prepend=-1)).tolist(), len(key)]
        out = []
        for i, j in pairwise(bounds):
            if j - i > 1:
                phase, bank = table[i, :2].tolist()
                wanted = tuple(tuple(who.tolist()) for who in lanes[i:j])
                words = table[i:j, 2] // (1 if self.op.shares else len(self.addresses))
                out.append(Collision(phase, bank, tuple(words.tolist()), wanted))
        return tuple(out)

    @property
    def _served(self) -> IntArray:
        """``[phases, lanes]``, pairs of phases merged where they are."""
        phases = self.op.phases(self.arch)
        return phases.reshape(-1, phases.shape[1] * (1 + self.merged))

    @functools.cached_property
    def _distinct(self) -> tuple[IntArray, IntArray]:
        """The different (phase, bank, word) in ascending order ``[n, 3]``, and which one each active word is; where
        lanes do not share words, each lane's is one of its own: ``word * lanes + lane``."""
        phase = np.broadcast_to(self.phase[:, None], self.words.shape)
        lanes = np.arange(len(self.addresses))[:, None]
        word = self.words if self.op.shares else self.words * len(lanes) + lanes
        rows = np.stack([phase, self.banks, word], axis=-1)[self.active].reshape(-1, 3)
        table, inverse = np.unique(rows, axis=0, return_inverse=True)
        return table, inverse.reshape(-1)

    def explain(self) -> str:
        """In words: the phases, which lanes collide on which bank, and why.

        >>> from kvlab.hardware import wavefronts
        >>> print(wavefronts("ldmatrix.x1", np.arange(32) % 8 * 64).explain())
        ldmatrix.x1 on sm_90: 4 wavefronts, ideal 1, 3 conflicts.
        One phase: the 8 rows of 16 bytes of the 8x8 matrix can fill all 32 banks once.
        Phase 0 (lanes 0-7) takes 4 passes: banks 0-3 and 16-19 each have to deliver 4 different words. Bank 0: \
bytes 0 (lane 0), 128 (lane 2), 256 (lane 4), 384 (lane 6).
        Addresses that differ by a multiple of 128 bytes lie in the same bank; a bank delivers one word a pass.
        """
        from .wavefront_explain import explain

        return explain(self)

    def __repr__(self) -> str:
        note = ", provisional" if self.provisional else ""
        return f"Wavefronts({self.headline()}{note})"

    def headline(self) -> str:
        """One line: instruction, architecture, wavefronts, ideal, conflicts."""
        passes = "1 wavefront" if self.wavefronts == 1 else f"{self.wavefronts} wavefronts"
        conflicts = "1 conflict" if self.conflicts == 1 else f"{self.conflicts} conflicts"
        return f"{self.instruction} on {self.arch.name}: {passes}, ideal {self.ideal}, {conflicts}"
