"""The layouts in which wgmma and tcgen05 want their operands in shared memory: shape:stride data.

Offsets count elements and are not swizzled: the XOR of the mode is applied to the byte address afterwards. S is the
width of the mode in elements (16 bytes without one); 8 rows of it make a core matrix (without one) or a swizzle atom.
"""

from __future__ import annotations

import warnings
from typing import Any

from kvlab.common.checks import count
from kvlab.hardware.copies.tensor_map import TensorMapSwizzle
from kvlab.layout import Layout
from kvlab.memory import as_dtype


def tile_layout_k_major(dtype: Any, BM: int, BK: int, swizzle: Any = "none", page_dense: bool = False) -> Layout:
    """``[BM, BK]`` with K contiguous: column chunks of S elements, each ``BM`` dense rows (what TMA boxes deliver).

    An outer stride is 0 where its extent is 1. ``page_dense`` (128B only): the chunks of 8 rows lie together.

    >>> tile_layout_k_major("bf16", 64, 128, "128B")
    Layout("((8,8),(64,2)):((64,512),(1,4096))")
    >>> tile_layout_k_major("bf16", 64, 128, "128B", page_dense=True)
    Layout("((8,8),(64,2)):((64,1024),(1,512))")
    """
    mode = TensorMapSwizzle.of(swizzle)
    S = _checked(dtype, "BM", BM, "BK", BK, mode, page_dense)
    atoms, chunks = BM // 8, BK // S
    row, chunk = (chunks * 8 * S, 8 * S) if page_dense else (8 * S, BM * S)
    return Layout(((8, atoms), (S, chunks)), ((S, row if atoms > 1 else 0), (1, chunk if chunks > 1 else 0)))


def tile_layout_mn_major(dtype: Any, MN: int, K: int, swizzle: Any = "none", page_dense: bool = False) -> Layout:
    """``[MN, K]`` with MN contiguous: the K-major layout of ``[K, MN]``, transposed.

    >>> tile_layout_mn_major("bf16", 128, 16, "128B")
    Layout("((64,2),(8,2)):((1,1024),(64,512))")
    >>> tile_layout_mn_major("bf16", 128, 16, "128B", page_dense=True)
    Layout("((64,2),(8,2)):((1,512),(64,1024))")
    """
    mode = TensorMapSwizzle.of(swizzle)
    _checked(dtype, "K", K, "MN", MN, mode, page_dense)
    return tile_layout_k_major(dtype, K, MN, mode, page_dense).transpose()


def internal_k_major(dtype: Any, BM: int, BK: int, swizzle_bytes: int) -> Layout:
    """MAX's ``internal_k_major``: the K-major layout whose outer K stride is always 0, so that it addresses one chunk.

    Warns where ``BK`` is more than a chunk: the K loop must add ``BM * S`` for each itself.

    >>> internal_k_major("fp8", 64, 128, 128)
    Layout("((8,8),(128,1)):((128,1024),(1,0))")
    """
    dtype = as_dtype(dtype)
    if swizzle_bytes not in (16, 32, 64, 128):
        raise ValueError(f"swizzle_bytes is {swizzle_bytes!r}: must be 16, 32, 64 or 128")
    S = swizzle_bytes // dtype.itemsize
    count("BM", BM)
    count("BK", BK)
    if BM < 8 or BM % 8 or BK < S or BK % S:
        raise ValueError(f"BM is {BM}: must be a multiple of 8 and BK {BK} one of {S} ({swizzle_bytes} B of {dtype})")
    if BK > S:
        warnings.warn(
            f"internal_k_major: BK {BK} is {BK // S} chunks of {S}, the layout addresses the first one only",
            stacklevel=2,
        )
    return Layout(((8, BM // 8), (S, BK // S)), ((S, 8 * S), (1, 0)))


def tile_sf_layout_k_major(BM: int, BK: int, SF: int) -> Layout:
    """Block-scale factors of ``[BM, BK]``, one for ``SF`` elements of K: atoms of 512, tiled along K first, then M.

    >>> tile_sf_layout_k_major(128, 128, 16)
    Layout("((32,1),((4,4),2)):((16,1024),((1,4),512))")
    """
    for name, value in (("BM", BM), ("BK", BK), ("SF", SF)):
        count(name, value)
    if BM < 128 or BM % 128 or BK < 4 * SF or SF < 1 or BK % (4 * SF):
        raise ValueError(f"BM is {BM}: must be a multiple of 128, BK {BK} one of 4 * SF = {4 * SF}")
    across = BK // (4 * SF)
    return Layout(((32, BM // 128), ((4, 4), across)), ((16, 512 * across), ((1, 4), 512)))


def st_matrix_n_atom(num_stmatrix: int) -> Layout:
    """Vector of 16 bytes of an output tile that each thread of a warpgroup gives ``stmatrix``: row ``t % 16 + 16 * (t
    // 32)``, column ``t // 16 % 2``, of rows of ``2 * num_stmatrix`` vectors.

    >>> st_matrix_n_atom(2)
    Layout("(16,2,4):(4,1,64)")
    """
    count("num_stmatrix", num_stmatrix, 1)
    pitch = 2 * num_stmatrix
    return Layout((16, 2, 4), (pitch, 1, 16 * pitch))


def _checked(dtype: Any, outer: str, rows: int, inner: str, cols: int, mode: TensorMapSwizzle, page_dense: bool) -> int:
    """S, or ValueError."""
    dtype = as_dtype(dtype)
    S = mode.granularity(dtype)
    count(outer, rows)
    count(inner, cols)
    if rows < 8 or rows % 8:
        raise ValueError(f"{outer} {rows} is not a multiple of 8, the rows of a core matrix")
    if cols < S or cols % S:
        raise ValueError(
            f"{inner} {cols} of {dtype} = {cols * dtype.itemsize} B is not a multiple of {mode.bytes} B (swizzle "
            f"{mode.label})"
        )
    if page_dense and mode is not TensorMapSwizzle.SWIZZLE_128B:
        raise ValueError(f"page_dense needs swizzle 128B, not {mode.label}")
    return S
