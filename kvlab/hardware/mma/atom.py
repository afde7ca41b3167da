"""Matrix-multiply atoms: which element of A, B and C each register of each lane holds.

An atom is data: its shape and three maps ``(lane, register) -> (row, column)``. Everything else follows from the maps:
taking a matrix apart into fragments, putting it together again, and multiplying. The table is in ``atoms.py``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kvlab.common.drawn import Drawn
from kvlab.common.regroup import Regroup
from kvlab.hardware._arrays import Array, IntArray, frozen
from kvlab.hardware.arch import get_arch
from kvlab.hardware.chip import SUMS, current_arithmetic, mma_sum
from kvlab.memory import float32

Map: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True, eq=False, repr=False)
class MmaAtom(Drawn):
    """One matrix instruction ``C[M, N] += A[M, K] @ B[K, N]`` of a warp, or of the 4 warps of a warpgroup.

    name, arch        ``mma.sync.m16n8k16.bf16``; the oldest architecture that has it
    shape             (M, N, K)
    warp_size         lanes that hold the fragments: 32 or 64, or the 128 threads of a warpgroup (wgmma, tcgen05)
    dtype             of A, and of B unless ``dtype_b`` names another
    a, b, c           maps (lane, register) -> (row, column): of A (m, k), of B (k, n), of C (m, n); None for an operand
                      that the instruction reads from shared memory and that no register holds
    dtype_c           of C: float32, int32 (sums wrap around) or float64
    holders           lanes that hold each element of A and B: 2 on RDNA3, whose half-waves have the same values
    ignored_bits      low bits of every element of A and B that the multiplier ignores (tf32: 13)
    archs             the architectures that have it

    A fragment is ``[..., lanes, registers]``; ``registers`` counts elements, in the order of the instruction's operand.

    >>> from kvlab.hardware import get_atom
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
    a: Map | None
    b: Map | None
    c: Map
    dtype_b: np.dtype[Any] | None = None
    dtype_c: np.dtype[Any] = float32
    holders: int = 1
    ignored_bits: int = 0
    archs: tuple[str, ...] = ()

    @property
    def regs_a(self) -> int:
        """Elements of A that a lane holds; 0 where A is in shared memory."""
        return self._registers("a")

    @property
    def regs_b(self) -> int:
        """Elements of B that a lane holds; 0 where B is in shared memory."""
        return self._registers("b")

    @property
    def regs_c(self) -> int:
        """Elements of C that a lane holds."""
        return self._registers("c")

    def _registers(self, operand: str) -> int:
        rows, cols = self.extent(operand)
        holders = 1 if operand == "c" else self.holders
        return rows * cols * holders // self.warp_size if getattr(self, operand) else 0

    def extent(self, operand: str) -> tuple[int, int]:
        """Rows and columns of operand ``"a"``, ``"b"`` or ``"c"``.

        >>> from kvlab.hardware import get_atom
        >>> get_atom("mma.sync.m16n8k16.bf16").extent("b")
        (16, 8)
        """
        m, n, k = self.shape
        return (m, n) if operand == "c" else (m, k) if operand == "a" else (k, n)

    def dtype_of(self, operand: str) -> np.dtype[Any]:
        """Storage dtype of operand ``"a"``, ``"b"`` or ``"c"``."""
        return self.dtype_c if operand == "c" else self.dtype if operand == "a" else self.dtype_b or self.dtype

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
        """``[..., lanes, regs_a]`` -> ``[..., M, K]``. ValueError where holders of an element disagree about it."""
        return _put_together(self, "a", fragment)

    def tile_b(self, fragment: Any) -> Array:
        """``[..., lanes, regs_b]`` -> ``[..., K, N]``. ValueError where holders of an element disagree about it."""
        return _put_together(self, "b", fragment)

    def tile_c(self, fragment: Any) -> Array:
        """``[..., lanes, regs_c]`` -> ``[..., M, N]``."""
        return _put_together(self, "c", fragment)

    def mma(self, a: Any, b: Any, c: Any) -> Array:
        """``c + a @ b`` on fragments (leading axes broadcast): ``[..., lanes, regs_c]`` of ``dtype_c``.

        A and B must have the atom's dtypes; their products are exact in ``dtype_c`` and accumulated in it, or summed as
        an H100 does inside :func:`~kvlab.hardware.arithmetic` ``("chip")`` (ValueError for atoms whose sums
        are not known). An operand without a register map is the matrix itself: :func:`~kvlab.hardware.shared_mma` reads
        it from shared memory.

        >>> from kvlab.hardware import get_atom
        >>> atom = get_atom("mfma.16x16x4.f32")
        >>> a, b = np.eye(16, 4, dtype=np.float32), np.full((4, 16), 2, np.float32)
        >>> c = atom.mma(atom.fragment_a(a), atom.fragment_b(b), np.ones((64, 4), np.float32))
        >>> atom.tile_c(c)[3:5, 0]
        array([3., 1.], dtype=float32)
        """
        a, b, c = np.asarray(a), np.asarray(b), np.asarray(c)
        for name, operand in (("a", a), ("b", b), ("c", c)):
            if operand.dtype != self.dtype_of(name):
                raise ValueError(f"{self.name}: {name} is {operand.dtype}, must be {self.dtype_of(name)}")
        _check(self, "c", c, (self.warp_size, self.regs_c))
        if current_arithmetic().exact:
            return self.fragment_c(_as_the_chip_sums(self, a, b, self.tile_c(c)))
        first, second = _factor(self, "a", a), _factor(self, "b", b)
        if self.c is not None and _by_columns(self, "c"):  # the product as the registers take it: column after column
            product = np.matmul(second.swapaxes(-1, -2), first.swapaxes(-1, -2)).swapaxes(-1, -2)
        else:
            product = np.matmul(first, second)
        product = product.astype(self.dtype_c, copy=False)
        out: Array = c + self.fragment_c(product)
        return out

    def __repr__(self) -> str:
        return f"MmaAtom({self.name})"


def _factor(atom: MmaAtom, operand: str, values: Array) -> Array:
    """The matrix of an operand in the dtype of the multiplier: exact for the products and their sum."""
    if getattr(atom, operand) is None:
        _check(atom, operand, values, atom.extent(operand))
        tile = values
    else:
        tile = _put_together(atom, operand, values)
    if atom.ignored_bits:
        tile = (np.ascontiguousarray(tile).view(np.uint32) >> atom.ignored_bits << atom.ignored_bits).view(tile.dtype)
    return tile.astype(np.float64 if atom.dtype_c.kind == "i" else atom.dtype_c, copy=False)


def _as_the_chip_sums(atom: MmaAtom, a: Array, b: Array, c: Array) -> Array:
    """``c + a @ b`` of an H100, ``c`` a matrix."""
    known = atom.dtype in SUMS and atom.dtype_of("b") == atom.dtype and get_arch(atom.arch).vendor == "nvidia"
    if not known or atom.shape[2] % SUMS[atom.dtype].k:
        raise ValueError(f"{atom.name}: how the chip sums its products is not known; use arithmetic 'float32'")
    first, second = (
        x if getattr(atom, operand) is None else _put_together(atom, operand, x) for operand, x in (("a", a), ("b", b))
    )
    return mma_sum(first, second, c)


@functools.cache
def _element_of_register(atom: MmaAtom, operand: str) -> IntArray:
    """The flat element that each register holds: ``[lanes, registers]``."""
    place = getattr(atom, operand)
    if place is None:
        raise ValueError(f"{atom.name}: {operand.upper()} is read from shared memory, no register holds it")
    lane, register = np.arange(atom.warp_size)[:, None], np.arange(atom._registers(operand))
    row, col = place(lane, register)
    return frozen(np.broadcast_to(row * atom.extent(operand)[1] + col, (atom.warp_size, register.size)))


@functools.cache
def _register_of_element(atom: MmaAtom, operand: str) -> IntArray:
    """The inverse: the first flat register (lane * registers + register) that holds each element: ``[rows, cols]``."""
    _, first = np.unique(_element_of_register(atom, operand), return_index=True)
    return frozen(first.reshape(atom.extent(operand)))


@functools.cache
def _by_columns(atom: MmaAtom, operand: str) -> bool:
    """Tells whether the neighbours in a lane's registers are neighbours in a column of the matrix, not in a row."""
    element, cols = _element_of_register(atom, operand), atom.extent(operand)[1]
    return element.shape[1] > 1 and bool((element[:, 1] - element[:, 0] == cols).all())


@functools.cache
def _apart(atom: MmaAtom, operand: str) -> Regroup:
    """Matrix, row after row (``_by_columns``: column after column) -> registers."""
    element, (rows, cols) = _element_of_register(atom, operand), atom.extent(operand)
    return Regroup(element % cols * rows + element // cols if _by_columns(atom, operand) else element)


@functools.cache
def _together(atom: MmaAtom, operand: str) -> Regroup:
    """Registers -> matrix ``[rows, cols]``, or ``[cols, rows]`` if ``_by_columns``."""
    register = _register_of_element(atom, operand)
    return Regroup(np.ascontiguousarray(register.T) if _by_columns(atom, operand) else register)


def _check(atom: MmaAtom, operand: str, array: Array, shape: tuple[int, int]) -> None:
    if array.shape[-2:] != shape:
        raise ValueError(f"{atom.name}: {operand} has shape {array.shape}: must be [..., {shape[0]}, {shape[1]}]")


def _take_apart(atom: MmaAtom, operand: str, matrix: Any) -> Array:
    matrix = np.asarray(matrix)
    _check(atom, operand, matrix, atom.extent(operand))
    apart = _apart(atom, operand)
    if not _by_columns(atom, operand):
        return apart(matrix.reshape(*matrix.shape[:-2], -1))
    return apart(matrix.swapaxes(-1, -2).reshape(*matrix.shape[:-2], -1))


def _put_together(atom: MmaAtom, operand: str, fragment: Any) -> Array:
    fragment = np.asarray(fragment)
    registers = _element_of_register(atom, operand).shape
    _check(atom, operand, fragment, registers)
    tile = _together(atom, operand)(fragment.reshape(*fragment.shape[:-2], -1))
    tile = tile.swapaxes(-1, -2) if _by_columns(atom, operand) else tile
    if operand != "c" and atom.holders > 1:
        _check_holders(atom, operand, fragment, tile)
    return tile


def _check_holders(atom: MmaAtom, operand: str, fragment: Array, tile: Array) -> None:
    """ValueError unless all lanes that hold an element of ``tile`` have the same bits of it."""
    bits = np.dtype(f"u{fragment.itemsize}")
    right = _take_apart(atom, operand, tile)
    differ = np.ascontiguousarray(fragment).view(bits) != np.ascontiguousarray(right).view(bits)
    if differ.any():
        lane = int(np.nonzero(differ)[-2][0])
        half = atom.warp_size // atom.holders
        raise ValueError(
            f"{atom.name}: lane {lane} holds other elements of {operand.upper()} than lane {lane % half}; "
            f"lanes {half} to {atom.warp_size - 1} must repeat lanes 0 to {half - 1}"
        )
