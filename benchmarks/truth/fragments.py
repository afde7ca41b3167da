"""Registers of ldmatrix, stmatrix, mma.sync and wgmma: what goes in, and what the chip gave.

The inputs are small integers, exact in every type, from a fixed recurrence. mma.sync gets registers straight from it:
D = A B + C shows every place of all three operands. wgmma gets tiles in shared memory, found by descriptors.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import ATOMS, MmaAtom, tile_layout_k_major, tile_layout_mn_major, tile_to_descriptor
from kvlab.hardware.copies.tensor_map import TensorMapSwizzle

from . import chip, records
from .cuda_source import MATRICES, mma_atoms, wgmma_atoms, wgmma_forms, wgmma_name

__all__ = ["WgmmaCase", "digest", "matrix_inputs", "mma_inputs", "pool", "record", "wgmma_cases"]

Array = np.ndarray[Any, Any]
ROW_PATTERNS = ("rows of 16 bytes", "rows of 128 bytes, swizzled", "shuffled")


@functools.cache
def pool(count: int, seed: int, low: int = -4, high: int = 4) -> Array:
    """``count`` integers of low .. high by a fixed recurrence (Knuth's MMIX)."""
    state, out = np.uint64(seed * 7919 + 12345), np.empty(count, np.int64)
    with np.errstate(over="ignore"):
        for i in range(count):
            state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            out[i] = int(state >> np.uint64(40)) % (high - low + 1) + low
    out.setflags(write=False)
    return out


def digest(values: Array) -> str:
    """Of integers, whatever their type."""
    return hashlib.sha256(np.ascontiguousarray(values, "<i4").tobytes()).hexdigest()[:32]


def matrix_inputs(pattern: str) -> tuple[Array, Array, Array]:
    """Memory (512 half-words that number themselves), 32 row addresses in bytes, 4 registers of each lane."""
    lane = np.arange(32)
    if pattern == ROW_PATTERNS[0]:
        rows = lane * 16
    elif pattern == ROW_PATTERNS[1]:
        linear = lane % 8 * 128 + lane // 8 * 16
        rows = linear ^ (linear >> 7 & 7) << 4
    else:
        rows = np.argsort(pool(64, 3, 0, 1 << 20))[:32] * 16
    return np.arange(512, dtype=np.uint16), rows, np.arange(32 * 8, dtype=np.uint16).reshape(32, 8) + 0x4000


def _typed(values: Array, dtype: np.dtype[Any]) -> Array:
    return (np.abs(values) if dtype.kind == "u" else values).astype(dtype)


def mma_inputs(atom: MmaAtom) -> tuple[Array, Array, Array]:
    """Registers of A, B and C: ``[32, registers]`` of the atom's types."""
    a, b, c = (
        pool(32 * count, seed).reshape(32, count)
        for seed, count in ((1, atom.regs_a), (2, atom.regs_b), (3, atom.regs_c))
    )
    return _typed(a, atom.dtype), _typed(b, atom.dtype_of("b")), c.astype(atom.dtype_c)


@dataclass(frozen=True)
class WgmmaCase:
    """One wgmma: where A is, which dimension of each operand is contiguous, its swizzle, which 32 bytes of a row."""

    atom: str
    in_registers: bool
    a_major: int
    b_major: int
    mode: str
    step: int

    @property
    def kernel(self) -> str:
        return wgmma_name(self.atom, self.in_registers, self.a_major, self.b_major)

    def __str__(self) -> str:
        return f"{self.kernel}, swizzle {self.mode}, step {self.step}"

    def tiles(self) -> tuple[Array, Array]:
        """A ``[64, K]`` and B ``[N, K]``."""
        atom = ATOMS[self.atom]
        _, n, k = atom.shape
        a, b = pool(64 * 32, 5).reshape(64, 32)[:, :k], pool(256 * 32, 6).reshape(256, 32)[:n, :k]
        return _typed(a, atom.dtype), _typed(b, atom.dtype_of("b"))

    def inputs(self) -> tuple[Array, int, int, Array]:
        """The image of shared memory (bytes), the descriptors of A and B, A's fragment ``[128, registers]``."""
        atom = ATOMS[self.atom]
        a, b = self.tiles()
        at_b = 16384
        image = np.full(at_b + 256 * 128, 0x3C, np.uint8)  # 0x3C3C is 0.01 in bfloat16, 1.06 in float16: no zeros
        word_a = self._place(image, a, 0, self.a_major)
        word_b = self._place(image, b, at_b, self.b_major)
        return image, word_a, word_b, atom.fragment_a(a)

    def _place(self, image: Array, tile: Array, start: int, mn_major: int) -> int:
        mode, size = TensorMapSwizzle.of(self.mode), tile.itemsize
        rows, k = tile.shape
        if mn_major:
            layout, first = tile_layout_mn_major(tile.dtype, rows, k, mode), 0
        else:
            depth = max(mode.granularity(tile.dtype), k)
            layout, first = tile_layout_k_major(tile.dtype, rows, depth, mode), self.step * k
        where = layout(np.arange(rows)[:, None], np.arange(first, first + k)) * size + start
        at = mode.swizzle()(where)[..., None] + np.arange(size)
        image[at] = np.ascontiguousarray(tile)[..., None].view(np.uint8).reshape(rows, k, size)
        major = "MN" if mn_major else "K"
        word = tile_to_descriptor(layout, tile.dtype, mode, start, major).advance(self.step * 32 * (not mn_major))
        return word.encode()


def wgmma_cases() -> Iterator[WgmmaCase]:
    """Every kernel; all swizzles that fit, every 32 bytes of a row of 64 columns."""
    for name in wgmma_atoms():
        atom = ATOMS[name]
        n = atom.shape[1]
        for in_registers, a, b in wgmma_forms(name):
            for mode in ("none", "32B", "64B", "128B"):
                width = TensorMapSwizzle.of(mode).granularity(atom.dtype)
                if (a and 64 % width) or (b and n % width):
                    continue
                steps = TensorMapSwizzle.of(mode).bytes // 32 if n == 64 and not a + b else 1
                for step in range(max(steps, 1)):
                    yield WgmmaCase(name, in_registers, a, b, mode, step)


def record(step: records.Steps) -> dict[str, Any]:
    """Run everything on the chip."""
    return {"matrices": step("matrices", _matrices), "mma.sync": step("mma.sync", _products),
            "wgmma": step("wgmma", _wgmma)}


def _matrices() -> dict[str, str]:
    matrices = {}
    for name in MATRICES:
        for pattern in ROW_PATTERNS:
            memory, rows, registers = matrix_inputs(pattern)
            mine = np.concatenate([rows[:, None].astype(np.uint32), registers.view(np.uint32)], axis=1)
            words = np.concatenate([[memory.nbytes // 4], memory.view(np.uint32), mine.ravel()])
            out = chip.launch(name, 32, words, 128 + memory.nbytes // 4)
            found = out[128:].view(np.uint16) if name.startswith("st") else out[:128].view(np.uint16)
            matrices[f"{name}, {pattern}"] = records.pack(found)
    return matrices


def _products() -> dict[str, str]:
    products = {}
    for name in mma_atoms():
        atom = ATOMS[name]
        a, b, c = mma_inputs(atom)
        words = np.concatenate([np.ascontiguousarray(x).reshape(-1).view(np.uint32) for x in (a, b, c)])
        out = chip.launch(name, 32, words, 32 * atom.regs_c * atom.dtype_c.itemsize // 4)
        products[name] = records.pack(out.view(atom.dtype_c))
    return products


def _wgmma() -> dict[str, str]:
    wide = {}
    for case in wgmma_cases():
        atom = ATOMS[case.atom]
        image, word_a, word_b, fragment = case.inputs()
        halves = [word >> shift & 0xFFFFFFFF for word in (word_a, word_b) for shift in (0, 32)]
        head = np.array([image.nbytes // 4, *halves], np.uint32)
        registers = np.ascontiguousarray(fragment).view(np.uint32).ravel()
        words = np.concatenate([head, registers, image.view(np.uint32)])
        out = chip.launch(case.kernel, 128, words, 128 * atom.regs_c)
        wide[str(case)] = digest(out.view(atom.dtype_c))
    return wide
