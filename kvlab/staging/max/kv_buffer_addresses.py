"""Bytes that each lane of MAX's KVBuffer moves: index arrays, made once.

Offsets are in elements; a stage is ``num_repeats`` blocks of ``BN x bk_smem``, row-major, one after the other."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import require
from kvlab.hardware import count_wavefronts, ds_read_tr8_b64, ds_read_tr16_b64
from kvlab.memory import Memory
from kvlab.staging.tile.fragments import FragmentMap
from kvlab.staging.tile.smem_image import SmemImage, dma_slots, stage_areas

from .dma_plan import CTADmaPlan, warp_tiles
from .mma_op_addresses import KVMmaOpParams, prefill_offsets, split_offsets, v_bf16_offsets, v_fp8_offsets
from .operand_maps import v_keys
from .params import WARP_SIZE, KVBufferParams, ceildiv

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
Shift = tuple[int, ...]  # one number for each warp
ARCH = "gfx950"


@dataclass(frozen=True)
class Window:
    """Part of a stage that the warps read: the parameters of the buffer whose DMA wrote it, and for each warp how many
    elements its base is shifted and which column of the tile that is."""

    source: KVBufferParams
    shift: Shift
    columns: Shift


def check(p: KVBufferParams) -> None:
    """ValueError unless the buffer can be built with these parameters."""
    require(p.BN % p.warp_tile_rows == 0, f"BN is {p.BN}", f"a multiple of {p.warp_tile_rows}: a warp tile of the DMA")
    row = p.bk_smem * p.dtype.itemsize
    require(row in (64, 128), f"bk_smem is {p.bk_smem}", f"64 or 128 bytes of {p.dtype}: a row of a DMA")
    require(p.smem_depth % p.bk_smem == 0, f"smem_depth is {p.smem_depth}", f"a multiple of bk_smem {p.bk_smem}")
    require(p.smem_depth >= p.depth, f"smem_depth is {p.smem_depth}", f"at least depth {p.depth}")
    op = KVMmaOpParams.of(p)
    if not p.transpose:
        require(p.depth % p.MMA_N == 0, f"depth is {p.depth}", f"a multiple of MMA_N {p.MMA_N}")
        v_bf16_offsets(op, 0) if p.dtype.itemsize == 2 else v_fp8_offsets(op, 0)
        return
    require(p.WN % p.MMA_N == 0, f"WN is {p.WN}", f"a multiple of MMA_N {p.MMA_N}")
    prefill_offsets(op) if p.bk_smem == p.BK else split_offsets(op)
    columns = ceildiv(p.depth, p.bk_smem) * p.bk_smem if is_split(p) else p.num_k_tiles * p.BK
    require(p.smem_depth >= columns, f"smem_depth is {p.smem_depth}", f"at least {columns}: all strips of BK {p.BK}")


def is_split(p: KVBufferParams) -> bool:
    """Tells whether a strip of K lies in two blocks."""
    return p.transpose and p.bk_smem != p.BK


def strips(p: KVBufferParams) -> int:
    """Strips that a stage holds whole: of ``full_kv=False`` those of its one block."""
    if p.full_kv:
        return p.num_k_tiles
    if p.transpose:
        return 0 if is_split(p) else 1
    return p.num_k_tiles if p.depth <= p.bk_smem else 0


def one_tile_a_warp(p: KVBufferParams) -> bool:
    """Tells whether MAX gives every warp the one tile ``(warp // 2, warp % 2)``, without any guard."""
    return p.full_kv and p.smem_depth == 64 and p.BN <= 64 and p.num_repeats >= 2


@functools.cache
def kv_buffer_dma_plan(p: KVBufferParams) -> CTADmaPlan:
    """The DMA instructions that load a stage of ``KVBuffer``, step after step; in a step warp after warp.

    Fields ``wave`` ``[n]``, ``offset`` ``[n]`` (elements of the stage), ``row`` and ``col`` ``[n, 64]`` (of the tile).

    >>> k = KVBufferParams("bf16", (32, 32, 16), None, BN=64, WN=64, BK=32, num_threads=256, depth=128, kv_num_heads=1,
    ...                    transpose=True)
    >>> plan = kv_buffer_dma_plan(k)
    >>> plan.row.shape, plan.wave[:4].tolist(), plan.offset[:4].tolist(), plan.col[2, :5].tolist()
    ((16, 64), [0, 0, 1, 1], [0, 512, 2048, 2560], [32, 40, 48, 56, 32])
    """
    wave = np.arange(p.num_warps)
    if one_tile_a_warp(p):
        return warp_tiles(p, wave, wave // 2, wave % 2, p.bk_smem)
    tile = np.arange(p.total_tiles)
    tile_row, block = np.divmod(tile, p.dma_col_groups)
    return warp_tiles(p, tile % p.num_warps, tile_row, block, p.bk_smem)


# What load_from_shared reads.


@dataclass(frozen=True, eq=False)
class Reads:
    """Reads of a strip: the instruction; the elements that the lanes address, ``offset`` ``[instructions, lanes]``,
    from the base of the warp; these bases, in elements from the stage's first, ``[warps]``."""

    instruction: str
    offset: IntArray
    base: IntArray


@functools.cache
def reads(p: KVBufferParams, strip: int, shift: Shift) -> tuple[Reads, ...]:
    """Reads of one strip of a stage."""
    op, base = KVMmaOpParams.of(p), np.array(shift)
    if not p.transpose:
        two = p.dtype.itemsize == 2
        offset = v_bf16_offsets(op, strip) if two else v_fp8_offsets(op, strip)
        return (Reads("ds_read_tr16_b64" if two else "ds_read_tr8_b64", offset.reshape(-1, WARP_SIZE), base),)
    block, rows = p.BN * p.bk_smem, base + p.warp_col() * p.WN * p.bk_smem
    if not is_split(p):
        offset = prefill_offsets(op).reshape(WARP_SIZE, -1).T
        return (Reads("ds_read_b128", offset, rows + strip * block),)
    offset = split_offsets(op).reshape(WARP_SIZE, -1).T
    halves = [2 * strip] if lacks_upper_half(p, strip) else [2 * strip, 2 * strip + 1]
    return tuple(Reads("ds_read_b128", offset, rows + half * block) for half in halves)


def lacks_upper_half(p: KVBufferParams, strip: int) -> bool:
    """Tells whether a split strip ends in its lower half: the upper one is zeros."""
    return strip >= p.depth // p.BK


@functools.cache
def _elements(p: KVBufferParams, strip: int, shift: Shift) -> IntArray:
    """The element of the stage in each register of a strip, -1 where zeros are put: ``[threads, registers, frag]``."""
    shape = (p.num_warps, WARP_SIZE, p.rows_per_k_tile, -1)
    parts = []
    for read in reads(p, strip, shift):
        address = read.base[:, None, None] + read.offset  # [warps, instructions, lanes]
        if p.transpose:
            element = address.transpose(0, 2, 1)[..., None] + np.arange(p.simd_width)
        else:
            lane, inside = _transposing(8 // p.dtype.itemsize)
            element = np.moveaxis(address[..., lane] + inside, 2, 1)
        parts.append(element.reshape(shape))
    if sum(part.shape[-1] for part in parts) < p.input_frag_size:
        parts.append(np.full_like(parts[0], -1))
    return np.concatenate(parts, axis=-1).reshape(p.num_threads, p.rows_per_k_tile, p.input_frag_size)


@functools.cache
def _transposing(n: int) -> tuple[IntArray, IntArray]:
    """Which lane's vector, and which of its elements, a lane's registers get from a transposing read: ``[64, n]``."""
    row = np.arange(16 * n).astype(np.uint16 if n == 4 else np.uint8)  # what 16 lanes read, numbered
    read = ds_read_tr16_b64 if n == 4 else ds_read_tr8_b64
    lane = np.arange(WARP_SIZE)
    number = read(Memory.over(row), lane % 16 * 8, row.dtype).astype(np.int64)
    return lane[:, None] // 16 * 16 + number // n, number % n


@functools.cache
def _intended(p: KVBufferParams, strip: int, columns: Shift) -> tuple[IntArray, IntArray]:
    """Key and column that each register of a strip should hold ``[threads, registers, frag]``; ``columns``: first of
    each warp."""
    frag, N = p.input_frag_size, p.MMA_N
    warp, lane, kg, i, e = np.ogrid[: p.num_warps, :WARP_SIZE, : p.num_k_mmas2, : p.num_mmas, :frag]
    if p.transpose:
        pieces = frag // p.simd_width
        row = p.warp_col()[warp] * p.WN + i * N + lane % N + 0 * kg + 0 * e
        within = e // p.simd_width * (p.MMA_K // pieces) + lane // N * p.simd_width + e % p.simd_width
        col = strip * p.BK + kg * p.MMA_K + within + 0 * row
    else:
        row = strip * p.BK + v_keys(p)[lane, kg, e] + 0 * i + 0 * warp
        col = np.array(columns)[warp] + i * N + lane % N + 0 * row
    shape = (p.num_threads, p.rows_per_k_tile, frag)
    return row.reshape(shape), col.reshape(shape)


@functools.cache
def in_matrix_order(p: KVBufferParams, window: Window) -> bool:
    """Tells whether the reads of ``p`` bring every register the element of the tile that it should hold. Columns past
    ``depth`` do not count."""
    source = window.source
    image = np.full(source.smem_stage_size, -1)
    dma, inside = kv_buffer_dma_plan(source), np.arange(source.simd_width)
    tile = np.where(dma.row < source.BN, dma.row * source.smem_cols + dma.col, -1)[..., None]
    target = (dma.offset[:, None] + np.arange(WARP_SIZE) * source.simd_width)[..., None] + inside
    kept = target < image.size
    image[target[kept]] = np.where(tile < 0, -1, tile + inside)[kept]
    for strip in range(strips(p)):
        element = _elements(p, strip, window.shift)
        if element.max() >= image.size:
            return False
        row, col = _intended(p, strip, window.columns)
        meant = col < p.depth if p.transpose else np.True_
        right = np.where(element < 0, -1, image[element]) == row * source.smem_cols + col
        if not (right | ~meant).all():
            return False
    return True


@functools.cache
def fragment_map(p: KVBufferParams, window: Window) -> FragmentMap:
    """Contents of any strip's registers: K ``[BN, BK]``, V ``[BK, columns of all warps]``."""
    row, col = _intended(p, 0, window.columns)
    return FragmentMap((p.BN, p.BK) if p.transpose else (p.BK, max(window.columns) + p.depth), row, col)


def what_works(p: KVBufferParams, source: KVBufferParams) -> str:
    """A remedy for a configuration that is not in matrix order."""
    if one_tile_a_warp(source) and (source.num_warps != source.BN // 16 or source.num_repeats != 2):
        return f"smem_depth 64 and BN {p.BN} take exactly {p.BN // 16} warps (num_threads {p.BN * 4}) and 2 blocks"
    if not p.transpose and p.dtype.itemsize == 2 and p.MMA_M == 32 and p.swizzle is not None:
        return "2-byte V of 32x32x16 needs swizzle=None"
    if not p.transpose:
        return (
            f"slices of {p.depth} columns need swizzle=None or bk_smem {p.bk_smem} dividing them, and must not cross "
            f"a block in between"
        )
    if is_split(p) and p.depth % p.BK > p.bk_smem:
        return f"the last strip of K needs at most {p.bk_smem} columns, a lower half, or all {p.BK}"
    rows = p.MMA_M * p.bk_smem // p.simd_width
    return f"K needs swizzle=None, or one that repeats within the {rows} vectors of {p.MMA_M} rows of a block"


@functools.cache
def read_passes(p: KVBufferParams, strip: int, base: Shift) -> tuple[IntArray, IntArray, IntArray]:
    """Wavefronts, ideal and instructions ``[warps]`` of the reads of a strip; ``base``: byte address that each warp
    reads the stage from. Provisional, as all AMD wavefronts."""
    total = np.zeros((3, p.num_warps), np.int64)
    for read in reads(p, strip, (0,) * p.num_warps):
        address = np.array(base) + (read.base + read.offset[..., None]) * p.dtype.itemsize  # [n, lanes, warps]
        wavefronts, ideal, _ = count_wavefronts(read.instruction, address.transpose(2, 0, 1), arch=ARCH)
        total += np.stack([wavefronts.sum(axis=1), ideal.sum(axis=1), np.full(p.num_warps, len(read.offset))])
    return total[0], total[1], total[2]


def smem_image(
    p: KVBufferParams, address: int, held: dict[int, tuple[Any, Any]], program: int, columns: int | None,
    first: dict[int, int],
) -> SmemImage:
    """Contents of the stages that begin at byte ``address``; ``held``: first key and valid rows of each, as loaded,
    ``first``: its first column. Columns past ``columns``, unless it is None, are zeros."""
    size, stages = p.dtype.itemsize, p.num_smem_stages
    nbytes = p.smem_stage_size * size
    areas = stage_areas(held, stages, nbytes, address, program, blocks=p.blocks_per_stage, width=p.bk_smem, first=first)
    image, dma = SmemImage.empty(address, stages * nbytes, areas), kv_buffer_dma_plan(p)
    for stage, (_, valid) in held.items():
        slot, col = dma_slots(dma.offset, size, stage * nbytes // 16), first[stage] + dma.col
        row = dma.row if columns is None else np.where(col < columns, dma.row, p.BN)
        image.put(slot, row, col * size // 16, int(valid[program]))
    return image
