"""Bytes that the threads of MAX's register-staged decode buffer move: index arrays, made once.

Offsets are in elements of the block tile, row-major."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.hardware import count_wavefronts
from kvlab.staging.tile.fragments import FragmentMap
from kvlab.staging.tile.smem_image import Area, SmemImage

from .decode_kv_params import DecodeKVBufferParams
from .params import WARP_SIZE

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
ARCH = "gfx950"


@functools.cache
def read_offsets(p: DecodeKVBufferParams, k_mma: int) -> IntArray:
    """Elements that ``load_from_shared`` reads, in elements of the tile ``[threads, num_mmas, elements]``.

    K: a fragment at once, at ``swizzle(fragment number)`` counted from the MMA tile; V: a column of keys, one by one.
    """
    N, config = p.MMA_N, p.role_config
    warp, lane, i, e = np.ogrid[: p.num_warps, :WARP_SIZE, : p.num_mmas, : p.elements]
    row, col = config.get_wtile_coord(warp % p.num_warps_n)
    row, col, pitch = row * config.wtile_dim0, col * config.wtile_dim1, p.btile[1]
    if p.transpose:
        inside, _ = p.tensor_core_mma.mma_op.b_offsets(p.num_mmas, pitch, k_mma, p.swizzle)
        offset = row * pitch + col + inside + e
    else:
        key = row + k_mma * p.MMA_K * p.group_size + lane // N * p.simd_width + e
        offset = key * pitch + col + i * N + lane % N
    return offset.reshape(p.num_threads, p.num_mmas, p.elements)


@functools.cache
def _intended(p: DecodeKVBufferParams) -> tuple[IntArray, IntArray]:
    """Row and column of the block tile that each register should hold ``[threads, num_k_tiles * num_mmas, elements]``:
    what is read where nothing is swizzled."""
    reads = [read_offsets(p.unswizzled(), k_mma) for k_mma in range(p.num_k_tiles)]
    return tuple(np.divmod(np.concatenate(reads, axis=1), p.btile[1]))  # type: ignore[return-value]


@functools.cache
def in_matrix_order(p: DecodeKVBufferParams) -> bool:
    """Tells whether the registers of all k groups hold the whole strip, every one the element that it should."""
    b0, b1 = p.btile
    if p.copied != p.btile or p.input_frag_size * p.group_size != p.simd_width:
        return False
    where = p.loader.vectors(p.btile)
    tile = np.arange(b0 * b1).reshape(b0, b1)
    image = np.full(b0 * b1, -1)
    if written_offsets(p).max() + p.simd_width > image.size:  # the swizzle carries a thread's first vector too far
        return False
    image[written_offsets(p)[..., None] + np.arange(p.simd_width)] = tile[
        where[..., :1], where[..., 1:] + np.arange(p.simd_width)
    ]
    reads = np.concatenate([read_offsets(p, k_mma) for k_mma in range(p.num_k_tiles)], axis=1)
    if reads.max() >= image.size:
        return False
    row, col = _intended(p)
    whole = p.elements == p.simd_width and np.unique(row * b1 + col).size == image.size
    return whole and np.array_equal(image[reads], row * b1 + col)


@functools.cache
def written_offsets(p: DecodeKVBufferParams) -> IntArray:
    """Places where ``copy_to_shared`` puts the vectors of a thread ``[threads of the grid, vectors]``, in elements."""
    return p.writer.offsets(p.copied, p.btile[1])


def fragment_map(p: DecodeKVBufferParams) -> FragmentMap:
    """Contents of ``mma_tile`` after each k group, in sequence: K ``[BN, BK]``, V ``[BK, depth]``."""
    return FragmentMap(p.btile, *_intended(p))


def what_works(p: DecodeKVBufferParams) -> str:
    """A remedy for a configuration that is not in matrix order."""
    if p.copied != p.btile:
        rows, cols = p.thread_grid
        return (
            f"the grid of {rows} x {cols} threads does not cover the {p.btile[0]} x {p.btile[1]} tile: token_gen=True, "
            f"or BK at least num_threads // 4 = {p.num_threads // 4}"
        )
    if p.transpose and p.group_size > 1:
        return "K needs group_size 1 and fragments of 16 bytes, such as those of 16x16x32"
    if p.input_frag_size * p.group_size != p.simd_width:
        return f"{p.group_size} fragments of {p.input_frag_size} must be the {p.simd_width} elements of 16 bytes"
    return "V needs swizzle=None" if not p.transpose else "K needs swizzle=None, or BK == MMA_K (one k group)"


@functools.cache
def read_passes(p: DecodeKVBufferParams, k_mma: int, address: int) -> tuple[IntArray, IntArray, IntArray]:
    """Wavefronts, ideal and instructions ``[warps]`` of one ``load_from_shared``; ``address`` in bytes. Provisional, as
    all AMD wavefronts. Reads of less than 4 bytes are counted by the words they touch, unaligned ones as if aligned."""
    width = p.input_frag_size if p.transpose else 1
    offset = read_offsets(p, k_mma)[..., ::width].reshape(p.num_warps, WARP_SIZE, -1)
    return _passes("ds_read", address + offset * p.dtype.itemsize, width * p.dtype.itemsize)


@functools.cache
def write_passes(p: DecodeKVBufferParams, address: int) -> tuple[IntArray, IntArray, IntArray]:
    """Wavefronts, ideal and instructions ``[warps]`` of one ``copy_to_shared``; ``address`` in bytes."""
    if not p.vectors_per_stage:
        none = np.zeros(p.num_warps, np.int64)
        return none, none, none
    where = np.full((p.num_threads, p.vectors_per_stage), -1)
    offset = written_offsets(p)
    where[: len(offset)] = address + offset * p.dtype.itemsize
    return _passes("ds_write", where.reshape(p.num_warps, WARP_SIZE, -1), 16)


def _passes(verb: str, address: IntArray, nbytes: int) -> tuple[IntArray, IntArray, IntArray]:
    """From ``[warps, lanes, instructions]``, -1 for lanes that do nothing."""
    unit = max(nbytes, 4)
    by_instruction = np.moveaxis(address, 2, 1)
    active = by_instruction >= 0
    aligned = np.where(active, by_instruction // unit * unit, 0)
    wavefronts, ideal, _ = count_wavefronts(f"{verb}_b{8 * unit}", aligned, active, arch=ARCH)
    return wavefronts.sum(axis=1), ideal.sum(axis=1), active.any(axis=2).sum(axis=1)


def smem_image(p: DecodeKVBufferParams, address: int, tile: int | None, valid: int) -> SmemImage:
    """Contents of the block tile at byte ``address``: number ``tile`` of a window with ``valid`` keys."""
    (rows, cols), size = p.btile, p.dtype.itemsize
    if tile is None:
        return SmemImage.empty(address, rows * cols * size, [Area(address, 0, "not loaded")])
    row, col = (0, tile * p.BK) if p.role_config.iterator_axis else (tile * p.BK, 0)
    words = f"tile {tile}: rows {row}–{row + rows - 1}, columns {col}–{col + cols - 1}"
    image = SmemImage.empty(address, rows * cols * size, [Area(address, 0, words)])
    if p.vectors_per_stage:
        where = p.loader.vectors(p.copied)
        slot = written_offsets(p) * size // 16
        image.put(slot, row + where[..., 0], (col + where[..., 1]) * size // 16, min(valid, p.BN))
    return image
