"""wgmma and tcgen05.mma executed: operands found in shared memory through their descriptors."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.hardware._arrays import Array
from kvlab.memory import Memory

from .atom import MmaAtom
from .smem_descriptor import SmemDescriptor

PASS_BYTES = 128


def shared_mma(
    atom: MmaAtom, memory: Memory, a: Any, b: Any, c: Any, *, a_major: str = "K", b_major: str = "K"
) -> Array:
    """``c + A @ B`` of a wgmma or tcgen05 atom: ``[..., 128, regs_c]``.

    a       a descriptor (:class:`~kvlab.hardware.SmemDescriptor` or its 64-bit word), or A's fragment ``[..., 128,
            regs_a]`` where the atom takes A from registers (wgmma)
    b       a descriptor of B, seen as ``[N, K]``
    c       the accumulator ``[..., 128, regs_c]``; where ``memory`` has programs the leading axis is theirs
    majors  ``"K"`` or ``"MN"``: which dimension of the operand is contiguous

    >>> from kvlab.hardware import create_tensor_tile, get_atom, tile_layout_k_major, tile_to_descriptor
    >>> atom, smem = get_atom("wgmma.m64n8k16.f16"), Memory(64 * 128 + 8 * 128)
    >>> a, b = np.eye(64, 64, dtype=np.float16), np.arange(8 * 64, dtype=np.float16).reshape(8, 64)
    >>> create_tensor_tile(a, (64, 64), "128B").async_copy(smem, 0, (0, 0))
    >>> create_tensor_tile(b, (8, 64), "128B").async_copy(smem, 8192, (0, 0))
    >>> A, B = (tile_to_descriptor(tile_layout_k_major("fp16", n, 64, "128B"), "fp16", "128B", at)
    ...         for n, at in ((64, 0), (8, 8192)))
    >>> c = np.zeros((128, 4), np.float32)
    >>> for step in range(0, 128, 32):  # K = 64 in steps of 32 bytes
    ...     c = shared_mma(atom, smem, A.advance(step), B.advance(step), c)
    >>> np.array_equal(atom.tile_c(c), b.T.astype(np.float32))
    True
    """
    if atom.b is not None:
        raise ValueError(f"{atom.name} has its operands in registers; use its mma")
    m, n, k = atom.shape
    arch = atom.arch
    tile_b = np.swapaxes(_operand(memory, b, n, k, atom.dtype_of("b"), b_major, arch), -1, -2)
    if isinstance(a, int | np.integer | SmemDescriptor):
        tile_a = _operand(memory, a, m, k, atom.dtype, a_major, arch)
        operand_a = tile_a if atom.a is None else atom.fragment_a(tile_a)
    elif atom.a is None:
        raise ValueError(f"{atom.name}: A must be a descriptor, it has no register fragment")
    else:
        operand_a = np.asarray(a)
    return atom.mma(operand_a, tile_b, c)


def shared_mma_wavefronts(atom: MmaAtom, *, a_in_registers: bool = False) -> int:
    """Passes of shared memory that one wgmma takes to read its operands: one for every 128 bytes.

    That holds for every swizzle and stride of a descriptor: the 8 rows of 16 bytes of a core matrix lie in all 32 banks
    (counted on an H100, tests/data/hardware/accesses.json). ValueError for an atom that reads registers.

    >>> from kvlab.hardware import get_atom
    >>> atom = get_atom("wgmma.m64n128k16.bf16")
    >>> shared_mma_wavefronts(atom), shared_mma_wavefronts(atom, a_in_registers=True)
    (48, 32)
    """
    if not atom.name.startswith("wgmma"):
        raise ValueError(f"{atom.name} is not a wgmma, whose operands' passes were counted")
    m, n, k = atom.shape
    return ((0 if a_in_registers else m) + n) * k * atom.dtype.itemsize // PASS_BYTES


def _operand(memory: Memory, descriptor: Any, mn: int, k: int, dtype: Any, major: str, arch: str) -> Array:
    """``[..., mn, k]`` as the instruction reads it."""
    if not isinstance(descriptor, SmemDescriptor):
        descriptor = SmemDescriptor.decode(descriptor, arch)
    if descriptor.arch != arch:
        raise ValueError(f"a descriptor of {descriptor.arch} does not fit an instruction of {arch}")
    address = descriptor.addresses(mn, k, dtype, major)
    return memory.load(address if memory.programs is None else address[None], dtype)[..., 0]
