"""Bytes that each lane of the streaming decode buffer moves: index arrays, made once.

K of 2 or 4 bytes goes to shared memory by DMA, a strip of BN x BK; K of 1 byte and V go through registers, V as
BK x depth. Offsets are in elements from the strip's first."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import require
from kvlab.hardware import RegTileLoader, count_wavefronts
from kvlab.layout import Layout
from kvlab.staging.tile.fragments import FragmentMap
from kvlab.staging.tile.smem_image import Area, SmemImage, dma_slots

from .dma_plan import CTADmaPlan, warp_tiles
from .params import WARP_SIZE, KVBufferParams, ceildiv
from .tiled_mma_op import TiledMmaOp, get_accum_type

IntArray = np.ndarray[Any, np.dtype[np.int64]]
ARCH = "gfx950"


def num_mmas(p: KVBufferParams) -> int:
    """Fragments of a k group: of the warp's keys (K), or of its share of the depth (V)."""
    return ceildiv(p.WN if p.transpose else p.depth // p.num_warps_n, p.MMA_N)


def strip_shape(p: KVBufferParams) -> tuple[int, int]:
    """Rows and columns of a strip in shared memory."""
    return (p.BN, p.BK) if p.transpose else (p.BK, p.depth)


def check(p: KVBufferParams) -> None:
    """ValueError unless the streaming buffer can be built with these parameters."""
    require(
        p.num_warps >= p.num_warps_n, f"num_threads is {p.num_threads}",
        f"at least {WARP_SIZE * p.num_warps_n}: BN // WN = {p.num_warps_n} warps along the keys",
    )
    require(not p.blocked_strip or p.depth % p.BK == 0, f"depth is {p.depth}", f"a multiple of BK {p.BK}")
    if p.transpose:
        require(p.WN % p.MMA_N == 0, f"WN is {p.WN}", f"a multiple of MMA_N {p.MMA_N}")
        one = p.dtype.itemsize == 1
        require(not one or p.BK == p.MMA_K, f"BK is {p.BK} of a 1-byte K", f"MMA_K {p.MMA_K}")
        fits = one or p.input_frag_size <= p.simd_width
        require(fits, f"mma_shape is {p.mma_shape} of {p.dtype}", "one whose fragment is at most 16 bytes")
    else:
        whole = p.num_warps_n * p.MMA_N
        require(p.depth % whole == 0, f"depth is {p.depth}", f"a multiple of {whole}: MMA_N for each warp of a tile")
        require(p.BN % p.BK == 0, f"BN is {p.BN}", f"a multiple of BK {p.BK}")
    streaming_dma_plan(p) if by_dma(p) else register_plan(p)


def by_dma(p: KVBufferParams) -> bool:
    """Tells whether the strip goes to shared memory by DMA (K of 2 bytes and more); else it goes through registers."""
    return p.transpose and p.dtype.itemsize > 1


@functools.cache
def streaming_dma_plan(p: KVBufferParams) -> CTADmaPlan:
    """The DMA instructions that load a strip of K: warp w has the 32-row groups ``t * num_warps + w``.

    Fields as of :func:`kv_buffer_dma_plan`. ValueError for strips that no DMA loads.

    >>> k = KVBufferParams("bf16", (16, 16, 32), None, BN=128, WN=32, BK=32, num_threads=256, depth=128, kv_num_heads=1,
    ...                    transpose=True)
    >>> plan = streaming_dma_plan(k)
    >>> plan.wave.tolist(), plan.offset[:4].tolist(), plan.row[2, ::16].tolist()
    ([0, 0, 1, 1, 2, 2, 3, 3], [0, 512, 1024, 1536], [32, 36, 40, 44])
    """
    require(p.BK * p.dtype.itemsize in (64, 128), f"BK is {p.BK}", f"64 or 128 bytes of {p.dtype}: a row of a DMA")
    require(p.BN % p.warp_tile_rows == 0, f"BN is {p.BN}", f"a multiple of {p.warp_tile_rows}")
    group = np.arange(p.BN // p.warp_tile_rows)
    return warp_tiles(p, group % p.num_warps, group, np.zeros_like(group), p.BK)


@dataclass(frozen=True, eq=False)
class RegisterPlan:
    """A copy through registers, one 16-byte vector a thread and pass: the element of the tile's first strip, ``row``
    and ``col``, and where its vector goes, ``offset``; all ``[passes, threads that take part]``."""

    loader: RegTileLoader
    row: IntArray
    col: IntArray
    offset: IntArray

    def by_warp(self, num_warps: int) -> IntArray:
        """Loads of each warp: one a pass if any of its threads takes part, ``[warps]``."""
        passes, threads = self.row.shape
        return passes * (np.arange(num_warps) * WARP_SIZE < threads)


@functools.cache
def register_plan(p: KVBufferParams) -> RegisterPlan:
    """Threads form a grid as wide as a row of vectors; whole passes go down the rows, so that a grid whose rows do not
    divide those of the strip leaves the last ones. The swizzle acts on a thread's first vector, the passes are added. V
    is not swizzled; it may be blocks of BK x BK (``blocked_strip``)."""
    rows, cols = strip_shape(p)
    require(cols % p.simd_width == 0, f"{'BK' if p.transpose else 'depth'} {cols}", f"a multiple of {p.simd_width}")
    grid_cols = cols // p.simd_width
    grid_rows = min(p.num_threads, rows * grid_cols) // grid_cols
    require(grid_rows > 0, f"num_threads is {p.num_threads}", f"at least {grid_cols}: the 16-byte vectors of a row")
    step, thread = np.ogrid[: rows // grid_rows, : grid_rows * grid_cols]
    first = p.swizzle(thread) if p.swizzle is not None and p.transpose else thread
    row = thread // grid_cols + step * grid_rows
    col = thread % grid_cols * p.simd_width + 0 * step
    offset = (first + step * grid_rows * grid_cols) * p.simd_width
    loader = RegTileLoader(p.dtype, Layout.row_major(grid_rows, grid_cols))
    return RegisterPlan(loader, row, col, offset=_blocked(p, row, col) if p.blocked_strip else offset)


def written_by_warp(p: KVBufferParams, first: int) -> tuple[IntArray, int, IntArray]:
    """Every vector of a strip at byte ``first``: its byte address, its bytes, and the warp that brings it."""
    if by_dma(p):
        dma, lane = streaming_dma_plan(p), np.arange(WARP_SIZE)
        return first + dma.offset[:, None] * p.dtype.itemsize + 16 * lane, 16, dma.wave[:, None]
    plan = register_plan(p)
    warp = np.arange(plan.row.shape[1]) // WARP_SIZE
    return first + plan.offset * p.dtype.itemsize, p.simd_width * p.dtype.itemsize, warp


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """Reads of shared memory: ``offset`` ``[threads, registers, pieces]``, of ``width`` elements each. The pieces of a
    register make up its fragment."""

    offset: IntArray
    width: int

    def instruction(self, itemsize: int) -> str:
        """The LDS instruction of one piece."""
        nbytes = self.width * itemsize
        return f"ds_read_u{8 * nbytes}" if nbytes < 4 else f"ds_read_b{8 * nbytes}"

    def by_instruction(self) -> IntArray:
        """``[instructions, warps, lanes]``."""
        _, registers, pieces = self.offset.shape
        return self.offset.reshape(-1, WARP_SIZE, registers * pieces).transpose(2, 0, 1)


def _blocked(p: KVBufferParams, row: IntArray, col: IntArray) -> IntArray:
    """Offset of an element of a V strip that lies as ``depth // BK`` blocks of BK x BK."""
    return col // p.BK * p.BK * p.BK + row * p.BK + col % p.BK


@functools.cache
def read_plan(p: KVBufferParams) -> ReadPlan:
    """K: a fragment is read at once, at ``swizzle(fragment number)``, counted from the MMA tile (1-byte K: at the
    ``swizzle(element)`` of the warp's tile). V: a fragment is a column of keys, read one by one."""
    frag, N = p.input_frag_size, p.MMA_N
    warp, lane, kg, i = np.ogrid[: p.num_warps, :WARP_SIZE, : p.num_k_mmas2, : num_mmas(p)]
    wc = p.warp_col()[warp]
    if not p.transpose:
        column = wc * (p.depth // p.num_warps_n) + i * N + lane % N
        key = (kg * p.MMA_K + lane // N * frag)[..., None] + np.arange(frag)
        column = column[..., None]
        return _read_plan(_blocked(p, key, column) if p.blocked_strip else key * p.depth + column, width=1)
    if p.dtype.itemsize > 1:
        op = TiledMmaOp(get_accum_type(p.dtype), p.dtype, p.mma_shape, transpose_b=True)
        groups = [op.b_offsets(num_mmas(p), p.BK, k_group, p.swizzle)[0] for k_group in range(p.num_k_mmas2)]
        pieces, width = _pieces(p)
        offset = np.stack(groups, axis=1) + np.arange(pieces) * width  # [lanes, kg, i, pieces]
        return _read_plan((wc * p.WN * p.BK)[..., None] + offset, width)
    pieces, width = _pieces(p)
    half = np.arange(pieces) * (p.MMA_K // pieces)
    element = (i * N * p.BK + lane % N * p.BK + lane // N * width + 0 * kg)[..., None] + half
    element = element if p.swizzle is None else p.swizzle(element)
    return _read_plan((wc * p.WN * p.BK)[..., None] + element, width)


def _pieces(p: KVBufferParams) -> tuple[int, int]:
    """Instructions of a K fragment, 16 bytes at most, and the elements of each."""
    width = min(p.input_frag_size, p.simd_width)
    return p.input_frag_size // width, width


def _read_plan(offset: IntArray, width: int) -> ReadPlan:
    """From ``[warps, lanes, kg, i, pieces]``."""
    warps, lanes, kgs, mmas, pieces = offset.shape
    return ReadPlan(np.ascontiguousarray(offset.reshape(warps * lanes, kgs * mmas, pieces)), width)


@functools.cache
def intended(p: KVBufferParams) -> FragmentMap:
    """The element of the strip that each register should hold, whether or not it does."""
    frag, N = p.input_frag_size, p.MMA_N
    warp, lane, kg, i, e = np.ogrid[: p.num_warps, :WARP_SIZE, : p.num_k_mmas2, : num_mmas(p), :frag]
    wc = p.warp_col()[warp]
    if p.transpose:
        pieces, width = _pieces(p)
        row = wc * p.WN + i * N + lane % N + 0 * kg + 0 * e
        col = kg * p.MMA_K + e // width * (p.MMA_K // pieces) + lane // N * width + e % width + 0 * row
    else:
        row = kg * p.MMA_K + lane // N * frag + e + 0 * i + 0 * wc
        col = wc * (p.depth // p.num_warps_n) + i * N + lane % N + 0 * row
    shape = (p.num_threads, p.num_k_mmas2 * num_mmas(p), frag)
    return FragmentMap(strip_shape(p), row.reshape(shape), col.reshape(shape))


@functools.cache
def in_matrix_order(p: KVBufferParams) -> bool:
    """Tells whether the reads, composed with the writes, bring every register the element that it should hold."""
    rows, cols = strip_shape(p)
    image = np.full(rows * cols, -1)
    write = streaming_dma_plan(p) if by_dma(p) else register_plan(p)
    target = write.offset[:, None] + np.arange(WARP_SIZE) * p.simd_width if by_dma(p) else write.offset
    inside = np.arange(p.simd_width)
    image[target[..., None] + inside] = (write.row * cols + write.col)[..., None] + inside
    read = read_plan(p)
    source = read.offset[..., None] + np.arange(read.width)
    if source.max() >= image.size:
        return False
    return np.array_equal(image[source].reshape(intended(p).flat.shape), intended(p).flat)


def fragment_map(p: KVBufferParams) -> FragmentMap:
    """Contents of the registers: K ``[BN, BK]``, V ``[BK, depth]``. ValueError where that is not the matrix."""
    if not in_matrix_order(p):
        raise ValueError(f"{p} does not bring the matrix to the lanes; {what_works(p)}")
    return intended(p)


def what_works(p: KVBufferParams) -> str:
    """A remedy for a configuration that is not in matrix order."""
    rows, cols = strip_shape(p)
    if not by_dma(p) and register_plan(p).row.size < rows * cols // p.simd_width:
        return (
            f"the grid of {p.num_threads} threads, {cols // p.simd_width} wide, must divide the {rows} rows of a strip"
        )
    if p.dtype.itemsize == 1:
        return "1-byte K needs swizzle=None"
    return f"K of {p.dtype} needs swizzle=None, or fragments of 16 bytes and BK == MMA_K (one k group)"


@functools.cache
def read_passes(p: KVBufferParams) -> tuple[IntArray, IntArray, IntArray]:
    """Wavefronts, ideal and instructions ``[warps]`` of one ``load_from_shared``. Provisional, as all AMD wavefronts.

    Reads of less than 4 bytes are counted by the words they touch; unaligned ones as if they were aligned."""
    plan = read_plan(p)
    nbytes = max(plan.width * p.dtype.itemsize, 4)
    address = plan.by_instruction() * p.dtype.itemsize // nbytes * nbytes
    wavefronts, ideal, _ = count_wavefronts(f"ds_read_b{8 * nbytes}", address, arch=ARCH)
    return wavefronts.sum(axis=0), ideal.sum(axis=0), np.full(p.num_warps, len(address))


def smem_image(p: KVBufferParams, address: int, held: tuple[int, int] | None) -> SmemImage:
    """Contents of the strip at byte ``address``; ``held``: which strip, and the valid rows of its tile."""
    (rows, cols), size = strip_shape(p), p.dtype.itemsize
    if held is None:
        return SmemImage.empty(address, rows * cols * size, [Area(address, 0, "not loaded")])
    strip, valid = held
    first_row, first_col = (0, strip * p.BK) if p.transpose else (strip * p.BK, 0)
    spans = [f"rows {first_row}–{first_row + rows - 1}, columns {first_col}–{first_col + cols - 1}"]
    if p.blocked_strip:
        spans = [f"rows {first_row}–{first_row + rows - 1}, columns {c}–{c + p.BK - 1}" for c in range(0, cols, p.BK)]
    step = rows * cols * size // len(spans)
    areas = [Area(address + i * step, 0, f"strip {strip}: {span}") for i, span in enumerate(spans)]
    image = SmemImage.empty(address, rows * cols * size, areas)
    plan = streaming_dma_plan(p) if by_dma(p) else register_plan(p)
    slot = dma_slots(plan.offset, size) if by_dma(p) else plan.offset * size // 16
    image.put(slot, first_row + plan.row, (first_col + plan.col) * size // 16, valid)
    return image
