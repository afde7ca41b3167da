"""Matrix-multiply atoms: which element of A, B and C each register of each lane holds.

An atom is data: its shape and three maps ``(lane, register) -> (row, column)``. Everything else follows from the maps:
taking a matrix apart into fragments, putting it together again, and multiplying.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from kvlab.memory import bfloat16, float16, float32

from ._arrays import Array, IntArray, frozen

__all__ = ["ATOMS", "MmaAtom", "get_atom"]

Map: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class MmaAtom:
    """One matrix instruction ``C[M, N] += A[M, K] @ B[K, N]`` of a warp.

    name, arch        ``mma.sync.m16n8k16.bf16``; the oldest architecture that has it
    shape             (M, N, K)
    warp_size         lanes
    dtype             of A and B; C is float32
    a, b, c           maps (lane, register) -> (row, column): of A (m, k), of B (k, n), of C (m, n)

    A fragment is ``[..., lanes, registers]``; ``registers`` counts elements, in the order of the instruction's operand.

    >>> atom = get_atom("mma.sync.m16n8k16.bf16")
    >>> atom.regs_a, atom.regs_b, atom.regs_c
    (8, 4, 4)
    >>> [atom.a(13, register) for register in range(4)]
    [(3, 2), (3, 3), (11, 2), (11, 3)]
    >>> matrix = np.arange(128).reshape(16, 8)
    >>> np.array_equal(atom.tile_c(atom.fragment_c(matrix)), matrix)
    True
    """

    name: str
    arch: str
    shape: tuple[int, int, int]
    warp_size: int
    dtype: np.dtype[Any]
    a: Map
    b: Map
    c: Map

    @property
    def regs_a(self) -> int:
        """Elements of A that a lane holds."""
        return self.shape[0] * self.shape[2] // self.warp_size

    @property
    def regs_b(self) -> int:
        """Elements of B that a lane holds."""
        return self.shape[1] * self.shape[2] // self.warp_size

    @property
    def regs_c(self) -> int:
        """Elements of C that a lane holds."""
        return self.shape[0] * self.shape[1] // self.warp_size

    def fragment_a(self, matrix: Any) -> Array:
        """``[..., M, K]`` -> ``[..., lanes, regs_a]``."""
        return _take_apart(self, "a", matrix)

    def fragment_b(self, matrix: Any) -> Array:
        """``[..., K, N]`` -> ``[..., lanes, regs_b]``."""
        return _take_apart(self, "b", matrix)

    def fragment_c(self, matrix: Any) -> Array:
        """``[..., M, N]`` -> ``[..., lanes, regs_c]``."""
        return _take_apart(self, "c", matrix)

    def tile_a(self, fragment: Any) -> Array:
        """``[..., lanes, regs_a]`` -> ``[..., M, K]``."""
        return _put_together(self, "a", fragment)

    def tile_b(self, fragment: Any) -> Array:
        """``[..., lanes, regs_b]`` -> ``[..., K, N]``."""
        return _put_together(self, "b", fragment)

    def tile_c(self, fragment: Any) -> Array:
        """``[..., lanes, regs_c]`` -> ``[..., M, N]``."""
        return _put_together(self, "c", fragment)

    def mma(self, a: Any, b: Any, c: Any) -> Array:
        """``c + a @ b`` on fragments (leading axes broadcast): ``[..., lanes, regs_c]`` float32.

        A and B must have the atom's dtype; their products are exact in float32 and accumulated in float32.

        >>> atom = get_atom("mfma.16x16x4.f32")
        >>> a, b = np.eye(16, 4, dtype=np.float32), np.full((4, 16), 2, np.float32)
        >>> c = atom.mma(atom.fragment_a(a), atom.fragment_b(b), np.ones((64, 4), np.float32))
        >>> atom.tile_c(c)[3:5, 0]
        array([3., 1.], dtype=float32)
        """
        a, b, c = np.asarray(a), np.asarray(b), np.asarray(c)
        for name, operand, dtype in (("a", a, self.dtype), ("b", b, self.dtype), ("c", c, float32)):
            if operand.dtype != dtype:
                raise ValueError(f"{self.name}: {name} is {operand.dtype}, must be {dtype}")
        product = np.matmul(self.tile_a(a).astype(float32), self.tile_b(b).astype(float32))
        _check(self, "c", c, (self.warp_size, self.regs_c))
        out: Array = c + self.fragment_c(product)
        return out


def _extent(atom: MmaAtom, operand: str) -> tuple[int, int]:
    m, n, k = atom.shape
    return {"a": (m, k), "b": (k, n), "c": (m, n)}[operand]


@functools.cache
def _element_of_register(atom: MmaAtom, operand: str) -> IntArray:
    """The flat element that each register holds: ``[lanes, registers]``."""
    rows, cols = _extent(atom, operand)
    lane, register = np.arange(atom.warp_size)[:, None], np.arange(rows * cols // atom.warp_size)
    row, col = getattr(atom, operand)(lane, register)
    return frozen(row * cols + col)


@functools.cache
def _register_of_element(atom: MmaAtom, operand: str) -> IntArray:
    """The inverse: the flat register (lane * registers + register) that holds each element: ``[rows, columns]``."""
    return frozen(np.argsort(_element_of_register(atom, operand), axis=None).reshape(_extent(atom, operand)))


def _check(atom: MmaAtom, operand: str, array: Array, shape: tuple[int, int]) -> None:
    if array.shape[-2:] != shape:
        raise ValueError(f"{atom.name}: {operand} of shape {array.shape} is not [..., {shape[0]}, {shape[1]}]")


def _take_apart(atom: MmaAtom, operand: str, matrix: Any) -> Array:
    matrix = np.asarray(matrix)
    _check(atom, operand, matrix, _extent(atom, operand))
    return np.take(matrix.reshape(*matrix.shape[:-2], -1), _element_of_register(atom, operand), axis=-1)


def _put_together(atom: MmaAtom, operand: str, fragment: Any) -> Array:
    fragment = np.asarray(fragment)
    index = _register_of_element(atom, operand)
    _check(atom, operand, fragment, (atom.warp_size, index.size // atom.warp_size))
    return np.take(fragment.reshape(*fragment.shape[:-2], -1), index, axis=-1)


def _mma_sync(n: int, k: int, dtype: np.dtype[Any], suffix: str) -> MmaAtom:
    """``mma.sync.m16n<n>k<k>`` (PTX ISA, matrix fragments): w elements fill one 32-bit register."""
    w = 4 // dtype.itemsize
    return MmaAtom(
        f"mma.sync.m16n{n}k{k}.{suffix}", "sm_80", (16, n, k), 32, dtype,
        a=lambda lane, r: (lane // 4 + 8 * (r // w % 2), lane % 4 * w + 4 * w * (r // w // 2) + r % w),
        b=lambda lane, r: (lane % 4 * w + 4 * w * (r // w) + r % w, lane // 4),
        c=lambda lane, r: (lane // 4 + 8 * (r // 2), 2 * (lane % 4) + r % 2),
    )  # fmt: skip


def _mfma(arch: str, m: int, k: int, dtype: np.dtype[Any], suffix: str) -> MmaAtom:
    """``v_mfma_f32_<m>x<m>x<k>`` (AMD CDNA ISA): w consecutive k for each group of m lanes."""
    w = m * k // 64
    return MmaAtom(
        f"mfma.{m}x{m}x{k}.{suffix}", arch, (m, m, k), 64, dtype,
        a=lambda lane, r: (lane % m, lane // m * w + r),
        b=lambda lane, r: (lane // m * w + r, lane % m),
        c=lambda lane, r: (4 * (lane // m) + r // 4 * 4 * (64 // m) + r % 4, lane % m),
    )  # fmt: skip


ATOMS: Mapping[str, MmaAtom] = MappingProxyType(
    {
        atom.name: atom
        for atom in (
            _mma_sync(8, 16, bfloat16, "bf16"),
            _mma_sync(8, 16, float16, "f16"),
            _mfma("gfx950", 16, 32, bfloat16, "bf16"),
            _mfma("gfx950", 16, 32, float16, "f16"),
            _mfma("gfx950", 32, 16, bfloat16, "bf16"),
            _mfma("gfx950", 32, 16, float16, "f16"),
            _mfma("gfx90a", 16, 16, bfloat16, "bf16"),
            _mfma("gfx90a", 16, 16, float16, "f16"),
            _mfma("gfx90a", 32, 8, bfloat16, "bf16"),
            _mfma("gfx90a", 32, 8, float16, "f16"),
            _mfma("gfx90a", 16, 4, float32, "f32"),
        )
    }
)


def get_atom(name: str) -> MmaAtom:
    """The atom called ``name``.

    >>> get_atom("mfma.16x16x32.bf16").shape
    (16, 16, 32)
    >>> get_atom("wgmma")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: atom 'wgmma' is not one of mma.sync.m16n8k16.bf16, mma.sync.m16n8k16.f16, mfma.16x16x32.bf16, ...
    """
    if name in ATOMS:
        return ATOMS[name]
    raise ValueError(f"atom {name!r} is not one of {', '.join(ATOMS)}")
