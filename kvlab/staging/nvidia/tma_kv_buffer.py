"""K and V on sm_90: stages filled by TMA boxes and guarded by mbarriers; wgmma finds them through descriptors."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.common.checks import one_of
from kvlab.hardware import (
    MmaAtom,
    PipelineState,
    SmemDescriptor,
    TmaDescriptor,
    get_atom,
    shared_mma,
    tile_layout_k_major,
    tile_layout_mn_major,
)
from kvlab.layout import Layout, TileTensor
from kvlab.staging.tile.smem_image import SmemImage, stage_areas
from kvlab.staging.tile.tile_copies import copy_boxes

from .nvidia_kv_buffer import NvidiaKVBuffer
from .nvidia_kv_params import WARPS
from .wgmma_plan import PanelTile

Array = np.ndarray[Any, Any]
SWIZZLE = "128B"
CONSUMERS, PRODUCER = tuple(range(WARPS)), WARPS


class TmaKVBuffer(NvidiaKVBuffer):
    """The sm_90 counterpart of :class:`~kvlab.staging.KVBuffer`, for all CTAs of a launch.

    A stage is the canonical 128-byte-swizzled tile: chunks of 64 columns, each BN rows of 128 bytes. One producer warp
    (warp 4) waits for the stage's ``empty`` mbarrier, announces the bytes to its ``full`` one and issues the boxes; one
    warpgroup (warps 0 to 3) waits for ``full``, multiplies by wgmma, waits for that and arrives at ``empty``.

    ``stage_keys`` tells of each loaded stage the first key and the valid rows ``[programs]`` of its tile.

    Parameters
    ----------
    params : the compile-time parameters, ``arch="sm_90"``. A page must hold whole tiles, or a tile whole pages of a
        multiple of 8 rows.
    cache : the K or V cache of a layer, its rows dense.
    batch_idx, head_idx, end : ``[programs]`` or scalars: sequence, KV head, and the exclusive bound of its keys.
    smem, smem_address : shared memory and the byte of the first stage, a multiple of 1024; own memory if None.
    traffic, hazards : as for :class:`~kvlab.staging.CpAsyncKVBuffer`; hazards are those of 5 warps.

    Rows past the last key hold what follows in their page: mask S; for V see :meth:`zero_rows_past_end`.

    >>> from kvlab.cache import PagedKVCache
    >>> from kvlab.staging import NvidiaKVParams
    >>> params = NvidiaKVParams("bf16", BN=32, depth=64, kv_num_heads=1, transpose=True, arch="sm_90")
    >>> keys = (np.arange(64 * 64) % 7).reshape(2, 32, 1, 64).astype(params.dtype)
    >>> cache = PagedKVCache(keys, [63], [[1, 0]], max_seq_length=1, max_cache_length=64)
    >>> k = TmaKVBuffer(params, cache, batch_idx=0, head_idx=0, end=64)
    >>> k.load_from_dram(0)
    >>> k.wait(0)
    >>> q = np.ones((1, 64, 64), params.dtype)
    >>> s = k.mma(k.operand(q), k.zeros(), stage=0)
    >>> k.wait_mma()
    >>> k.release(0)
    >>> bool((k.atom.tile_c(s)[0] == q[0].astype(float) @ keys[1, :, 0].astype(float).T).all())
    True
    >>> k.wait(1)
    Traceback (most recent call last):
        ...
    kvlab.hardware.BarrierDeadlock: k full[1]: warps [0, 1, 2, 3] wait for phase 0 for ever: 1 of 1 \
arrivals pending; none has completed
    """

    ALIGNMENT, NUM_WARPS = 1024, WARPS + 1

    def _begin(self) -> None:
        p, cache = self.params, self.cache
        if p.arch != "sm_90":
            raise ValueError(f"arch {p.arch!r}: TMA and wgmma need sm_90")
        if cache.dtype != p.dtype:
            raise ValueError(f"cache of {cache.dtype}: must be of {p.dtype}")
        self.box_rows = min(p.BN, cache.page_size_)
        if max(p.BN, cache.page_size_) % self.box_rows or self.box_rows % 8:
            raise ValueError(
                f"page_size {cache.page_size_} and BN {p.BN}: one must divide the other, the smaller a multiple of 8"
            )
        self.descriptor: TmaDescriptor = cache.create_tma_tile(SWIZZLE, BN=self.box_rows, BK=p.padded_depth).descriptor
        stages = range(p.num_smem_stages)
        self.full = [self.hazards.mbarrier(f"{p.role} full[{stage}]") for stage in stages]
        self.empty = [self.hazards.mbarrier(f"{p.role} empty[{stage}]", arrivals=WARPS) for stage in stages]
        self.producer, self.consumer = PipelineState(p.num_smem_stages), PipelineState(p.num_smem_stages)
        self.panels = [PanelTile(p.BN, p.padded_depth, self.stage_address(stage)) for stage in stages]
        self._filled, self._used = (
            [self.hazards.region(panel.base, panel.nbytes, warps) for panel in self.panels]
            for warps in ((PRODUCER,), CONSUMERS)
        )

    @property
    def atom(self) -> MmaAtom:
        """The wgmma: N is BN for K, the padded depth for V."""
        p = self.params
        kind = {"bfloat16": "bf16", "float16": "f16"}[p.dtype.name]
        return get_atom(f"wgmma.m64n{p.BN if p.transpose else p.padded_depth}k16.{kind}")

    @property
    def tile_layout(self) -> Layout:
        """The canonical layout of a stage, in elements: ``[BN, padded_depth]`` K-major for K, ``[padded_depth, BN]``
        MN-major for V."""
        p = self.params
        if p.transpose:
            return tile_layout_k_major(p.dtype, p.BN, p.padded_depth, SWIZZLE)
        return tile_layout_mn_major(p.dtype, p.padded_depth, p.BN, SWIZZLE)

    def smem_block_tile(self, tile_rows: int, tile_row: int, block_col: int) -> TileTensor:
        """Rows ``[tile_row * tile_rows, + tile_rows)`` of a chunk of 64 columns as they lie in memory, swizzle and all.

        Chunks are counted over all stages."""
        return self._block_tile(tile_rows, tile_row, block_col, 64)

    def load_from_dram(self, stage: int) -> None:
        """The producer: wait until the stage is empty, announce its bytes, issue the boxes of the next tile.

        ``stage`` is the producer's next one. In flight until :meth:`wait`."""
        p, state = self.params, self.producer
        self._expect("producer", state, stage)
        first_key = self.kv_cache_iter.tile_start_row
        rows, valid = self._next_rows()
        panel, run = 64 * np.arange(p.padded_depth // 64), self.box_rows * np.arange(rows.shape[1])[:, None]
        address = self.stage_address(stage) + (panel * p.BN + run * 64) * p.dtype.itemsize
        self.empty[stage].wait(state.phase ^ 1, warps=(PRODUCER,))
        self.full[stage].expect_bytes(p.stage_bytes, warp=PRODUCER)
        at = rows[..., None], self.kv_cache_iter.kv_head_idx[:, None, None], panel
        into, bar = self._filled[stage], self.full[stage]
        copy_boxes(self.smem, self.hazards, self.descriptor, at, address[None], into, bar, f"{p.role} copy", stage)
        self.stage_keys[stage] = first_key, valid
        state.step()
        boxes = np.zeros(WARPS + 1, np.int64)
        boxes[PRODUCER] = len(panel) * int((rows < self.descriptor.shape[0]).sum())
        row_bytes = self.box_rows * p.depth * p.dtype.itemsize
        self.traffic.move("DRAM->SMEM", boxes // len(panel) * row_bytes)
        self.traffic.issue(f"{p.role} tma", boxes)

    def wait(self, stage: int) -> None:
        """The consumers: wait until the stage, their next one, is full."""
        self._expect("consumers", self.consumer, stage)
        self.full[stage].wait(self.consumer.phase, warps=CONSUMERS)

    def zero_rows_past_end(self, stage: int) -> None:
        """The consumers write zeros over the rows past the last key, which P = 0 does not mask if they are infinite or
        NaN; then a fence, since wgmma reads through the async proxy, and a barrier of the warpgroup."""
        p, place, (_, valid) = self.params, self.panels[stage], self.stage_keys[stage]
        row, vector = np.ogrid[: p.BN, : place.vectors]
        past = (row >= valid[:, None, None]) & (valid[:, None, None] > 0)
        if past.any():
            self.hazards.write(self._used[stage], f"{p.role} zeros", stage)
            address = place.address(row, vector)
            self.smem.store(address[None], np.zeros((1, *address.shape, 16), np.uint8), mask=past)
            self.hazards.fence_async(CONSUMERS)
            self.hazards.barrier(CONSUMERS, CONSUMERS, name=1)

    def load_from_shared(self, stage: int) -> list[SmemDescriptor]:
        """The descriptor of every k step: wgmma reads the stage itself, no register holds it."""
        p, place = self.params, self.panels[one_of("stage", stage, len(self.panels), "stages")]
        first = [p.MMA_K * step for step in range(p.num_k_mmas2)]  # column of K, row of V
        at = [(0, n) if p.transpose else (n, 0) for n in first]
        return [place.descriptor(*each, along_rows=not p.transpose) for each in at]

    def get_mma_tile(self, k_mma: int, stage: int) -> SmemDescriptor:
        """The descriptor of a k step."""
        return self.load_from_shared(stage)[self._step(k_mma)]

    mma_subtile = get_mma_tile

    def operand(self, tile: Array) -> Array:
        """Registers of the other operand: ``[programs, 64, depth]`` of Q or ``[programs, 64, BN]`` of P ->
        ``[programs, num_k_mmas2, 128, 8]``; a narrower tile gets zeros."""
        p = self.params
        inner = p.num_k_mmas2 * p.MMA_K
        padded = np.zeros((len(tile), 64, inner), p.dtype)
        padded[..., : tile.shape[2]] = tile
        return self.atom.fragment_a(padded.reshape(len(tile), 64, -1, p.MMA_K).swapaxes(1, 2))

    def zeros(self) -> Array:
        """An accumulator ``[programs, 128, regs]``."""
        return np.zeros((self.programs, 128, self.atom.regs_c), np.float32)

    def mma(self, a: Any, c: Array, stage: int) -> Array:
        """``c + a x stage``, k step after k step: in flight until :meth:`wait_mma`.

        a : the registers of :meth:`operand`, or one descriptor of shared memory for each k step."""
        p, atom = self.params, self.atom
        self.hazards.read_async(self._used[stage], f"{p.role} wgmma", stage)
        for k, descriptor in enumerate(self.load_from_shared(stage)):
            step = a[k] if isinstance(a[0], SmemDescriptor | int) else a[:, k]
            c = shared_mma(atom, self.smem, step, descriptor, c, b_major="K" if p.transpose else "MN")
        programs = int((self.stage_keys[stage][1] > 0).sum())
        self.traffic.move("SMEM->tensor cores", p.stage_bytes * programs)
        self.traffic.issue(f"{p.role} wgmma", np.array([p.num_k_mmas2 * programs] * WARPS + [0]))
        return c

    def wait_mma(self, n: int = 0) -> None:
        """The consumers wait until at most ``n`` products are in flight (wgmma.wait_group)."""
        self.hazards.wait_mma(n, CONSUMERS)

    def release(self, stage: int) -> None:
        """The consumers, one arrival a warp, give the stage back to the producer."""
        self._expect("consumers", self.consumer, stage)
        self.empty[stage].arrive(CONSUMERS)
        self.consumer.step()

    def smem_image(self, program: int = 0) -> SmemImage:
        """Contents of the stages of one program, as TMA has brought it: rows past the last key are those that follow in
        their page, zeros where the page does not exist."""
        p = self.params
        areas = stage_areas(
            self.stage_keys, p.num_smem_stages, p.stage_bytes, self.smem_address, program,
            blocks=p.padded_depth // 64, width=64, name="chunk",
        )
        image = SmemImage.empty(self.smem_address, p.num_smem_stages * p.stage_bytes, areas)
        for stage, (_, valid) in self.stage_keys.items():
            place = self.panels[stage]
            row, vector = np.ogrid[: p.BN, : place.vectors]
            arrived = -(-int(valid[program]) // self.box_rows) * self.box_rows
            row_or_none = np.where(16 * vector < p.depth * p.dtype.itemsize, row, p.BN)
            image.put((place.address(row, vector) - self.smem_address) // 16, row_or_none, vector, arrived)
        return image

    def _expect(self, who: str, state: PipelineState, stage: int) -> None:
        if stage != state.index:
            raise ValueError(f"stage {stage}: the next one of the {who} is {state.index} of {state.num_stages}")

    def _next_rows(self) -> tuple[Array, Array]:
        """First row of every box ``[programs, boxes]`` (far outside for those without a key), and the valid rows."""
        iterator, p = self.kv_cache_iter, self.params
        start = iterator.tile_start_row
        valid = np.clip(iterator.end - start, 0, p.BN)
        rows, _ = self.cache.populate(
            iterator.batch_idx, start, BN=p.BN, base_alignment=max(p.BN, self.box_rows), valid=valid
        ).k_copies(oob_fill=True)
        iterator.increment()
        return rows, valid
