"""A tile that an emulated buffer stages, held against the same tile of a compiled kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import count_wavefronts
from kvlab.staging import DecodeStreamingKVBuffer, FragmentMap, KVBuffer
from kvlab.triton_support.staged_tile import StagedTile

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class StagingMatch:
    """Result of :func:`match_staging`.

    emulated, compiled   byte address of every element ``[rows, columns]``, from the tile's first byte
    registers            whether each thread holds the same elements; None where no thread holds the tile
    instructions         that read the tile: emulated, compiled; none where no thread does
    passes               wavefronts that all of them take: emulated, compiled
    ideal                the fewest that they could take: emulated, compiled
    """

    emulated: IntArray
    compiled: IntArray
    registers: bool | None
    instructions: tuple[str, ...] = ()
    passes: tuple[int, ...] = ()
    ideal: tuple[int, ...] = ()

    @property
    def same(self) -> int:
        """Elements that lie at the same byte."""
        return int((self.emulated == self.compiled).sum())

    def __str__(self) -> str:
        held = {None: "read by the tensor cores", True: "the same registers", False: "other registers"}[self.registers]
        text = f"{self.same} of {self.emulated.size} elements at the same byte, {held}"
        whose = zip(("emulated", "compiled"), self.instructions, self.passes, self.ideal, strict=False)
        return "; ".join([text, *(f"{who}: {name}, {n} passes, ideal {ideal}" for who, name, n, ideal in whose)])


def match_staging(buffer: Any, tile: StagedTile) -> StagingMatch:
    """Compare what ``buffer`` holds in stage 0 with ``tile``, element by element.

    buffer   one of :mod:`kvlab.staging` that has loaded one program's whole tile of 16-bit elements: KVBuffer,
             DecodeStreamingKVBuffer (a strip), CpAsyncKVBuffer, TmaKVBuffer
    tile     of the same rows and columns

    ValueError for a tile of another shape, and where a part of the tile is not loaded.

    >>> from kvlab.cache import PagedKVCache
    >>> from kvlab.layout.encodings import NVMMASharedLayout
    >>> from kvlab.staging import NvidiaKVParams, TmaKVBuffer
    >>> params = NvidiaKVParams("bf16", BN=32, depth=64, kv_num_heads=1, transpose=True, arch="sm_90")
    >>> cache = PagedKVCache(np.zeros((1, 32, 1, 64), params.dtype), [31], [[0]], 1, 32)
    >>> buffer = TmaKVBuffer(params, cache, batch_idx=0, head_idx=0, end=32)
    >>> buffer.load_from_dram(0)
    >>> print(match_staging(buffer, StagedTile("sm_90", (32, 64), NVMMASharedLayout(128, 16), None)))
    2048 of 2048 elements at the same byte, read by the tensor cores
    """
    emulated, compiled = buffer.smem_image().stage(0).addresses(2), tile.addresses()
    if emulated.shape != compiled.shape:
        raise ValueError(f"tile of shape {tile.shape}: must be {emulated.shape}, what the buffer holds")
    if tile.registers is None:
        return StagingMatch(emulated, compiled, None)
    ours, theirs = _held(buffer.fragment_map(), tile.shape), _held(tile.fragment_map(), tile.shape)
    reads = (_reads(buffer), tile.read_addresses())
    counts = [_passes(name, address, tile.target) for name, address in reads]
    passes, ideal = zip(*counts, strict=True)
    names = tuple(name for name, _ in reads)
    return StagingMatch(emulated, compiled, np.array_equal(ours, theirs), names, passes, ideal)


def _held(layout: FragmentMap, shape: tuple[int, int]) -> IntArray:
    """The elements of the tile that each thread holds, sorted ``[threads, elements]``; a strip's map is repeated."""
    rows, columns = layout.shape
    down, across = np.meshgrid(np.arange(0, shape[0], rows), np.arange(0, shape[1], columns))
    strip = (down * shape[1] + across).reshape(-1, 1)
    flat = (layout.row * shape[1] + layout.col).reshape(len(layout.row), 1, -1)
    return np.sort((flat + strip).reshape(len(flat), -1))


def _reads(buffer: Any) -> tuple[str, IntArray]:
    """All reads of stage 0, from the first byte of its tile."""
    if isinstance(buffer, KVBuffer):
        parts = [buffer.read_addresses(0, strip) for strip in range(buffer.num_k_tiles)]
    else:
        parts = [buffer.read_addresses() if isinstance(buffer, DecodeStreamingKVBuffer) else buffer.read_addresses(0)]
    return parts[0][0], np.concatenate([address for _, address in parts]) - buffer.smem_image().stage(0).base


def _passes(name: str, address: IntArray, arch: str) -> tuple[int, int]:
    """Wavefronts and the fewest possible; reads of 2 bytes are counted by the words that they touch."""
    if name == "ds_read_u16":
        name, address = "ds_read_b32", address // 4 * 4
    wavefronts, ideal, _ = count_wavefronts(name, address, arch=arch)
    return int(wavefronts.sum()), int(ideal.sum())
