"""K and V on sm_90: stages filled by TMA boxes and guarded by mbarriers; wgmma finds them through descriptors."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.cache import PagedKVCache
from kvlab.hardware import (
    MmaAtom,
    PipelineState,
    SmemDescriptor,
    TmaDescriptor,
    get_atom,
    shared_mma,
    tile_layout_k_major,
    tile_layout_mn_major,
    tile_to_descriptor,
    tma,
)
from kvlab.layout import Layout, TileTensor
from kvlab.memory import Memory
from kvlab.staging.record.hazards import Hazards
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.smem_image import SmemImage, stage_areas

from .kv_buffer import NvidiaKVBuffer
from .params import WARPS, NvidiaKVParams

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

    def __init__(
        self,
        params: NvidiaKVParams,
        cache: PagedKVCache,
        batch_idx: Any,
        head_idx: Any,
        end: Any,
        smem: Memory | None = None,
        *,
        smem_address: int | None = None,
        traffic: Traffic | None = None,
        hazards: Hazards | None = None,
    ) -> None:
        p = params
        if p.arch != "sm_90":
            raise ValueError(f"arch {p.arch!r}: TMA and wgmma need sm_90")
        if cache.kv_params.num_heads != p.kv_num_heads or cache.dtype != p.dtype:
            raise ValueError(
                f"cache of {cache.kv_params.num_heads} heads of {cache.dtype}: must have {p.kv_num_heads} of {p.dtype}"
            )
        super().__init__(params, cache, batch_idx, head_idx, end, smem, smem_address, traffic)
        self.box_rows = min(p.BN, cache.page_size_)
        if max(p.BN, cache.page_size_) % self.box_rows or self.box_rows % 8:
            raise ValueError(
                f"page_size {cache.page_size_} and BN {p.BN}: one must divide the other, the smaller a multiple of 8"
            )
        nbytes = p.num_smem_stages * p.stage_bytes
        smem = self.smem
        if self.smem_address % 1024 or self.smem_address + nbytes > smem.base + smem.nbytes:
            raise ValueError(
                f"smem_address {self.smem_address}: {nbytes} bytes of stages on a multiple of 1024 do not fit in "
                f"[{smem.base}, {smem.base + smem.nbytes}) of {smem.name}"
            )
        self.descriptor: TmaDescriptor = cache.create_tma_tile(SWIZZLE, BN=self.box_rows, BK=p.padded_depth).descriptor
        self.hazards = hazards or Hazards(smem, WARPS + 1, arch=p.arch, timeline=self.traffic.timeline)
        stages = range(p.num_smem_stages)
        self.full = [self.hazards.mbarrier(f"{p.role} full[{stage}]") for stage in stages]
        self.empty = [self.hazards.mbarrier(f"{p.role} empty[{stage}]", arrivals=WARPS) for stage in stages]
        self.producer, self.consumer = PipelineState(p.num_smem_stages), PipelineState(p.num_smem_stages)
        self._valid: list[Array] = [np.zeros(self.programs, np.int64) for _ in stages]
        self._filled = [self.hazards.region(self.stage_address(s), p.stage_bytes, (PRODUCER,)) for s in stages]
        self._used = [self.hazards.region(self.stage_address(s), p.stage_bytes, CONSUMERS) for s in stages]

    @property
    def atom(self) -> MmaAtom:
        """The wgmma: N is BN for K, the padded depth for V."""
        p = self.params
        kind = {"bfloat16": "bf16", "float16": "f16"}[p.dtype.name]
        return get_atom(f"wgmma.m64n{p.BN if p.transpose else p.padded_depth}k16.{kind}")

    @property
    def tile_layout(self) -> Layout:
        """The canonical layout of a stage, in elements: ``[BN, padded_depth]`` K-major for K, ``[padded_depth, BN]``
        MN-major for V.
        """
        p = self.params
        if p.transpose:
            return tile_layout_k_major(p.dtype, p.BN, p.padded_depth, SWIZZLE)
        return tile_layout_mn_major(p.dtype, p.padded_depth, p.BN, SWIZZLE)

    def smem_block_tile(self, tile_rows: int, tile_row: int, block_col: int) -> TileTensor:
        """Rows ``[tile_row * tile_rows, + tile_rows)`` of a chunk of 64 columns as they lie in memory, swizzle and all.

        Chunks are counted over all stages.
        """
        p = self.params
        blocks = p.num_smem_stages * p.padded_depth // 64
        if tile_rows < 1 or tile_row < 0 or (tile_row + 1) * tile_rows > p.BN or not 0 <= block_col < blocks:
            raise ValueError(
                f"smem_block_tile({tile_rows}, {tile_row}, {block_col}) is not in the {blocks} chunks of {p.BN} rows"
            )
        offset = (self.smem_address - self.smem.base) // p.dtype.itemsize + (
            block_col * p.BN + tile_row * tile_rows
        ) * 64
        return TileTensor(self.smem, p.dtype, Layout.row_major(tile_rows, 64), offset=offset)

    def load_from_dram(self, stage: int) -> None:
        """The producer: wait until the stage is empty, announce its bytes, issue the boxes of the next tile.

        ``stage`` is the producer's next one. In flight until :meth:`wait`.
        """
        p, state = self.params, self.producer
        self._expect("producer", state, stage)
        first_key = self.kv_cache_iter.tile_start_row
        rows, valid = self._next_rows()
        chunk = 64 * np.arange(p.padded_depth // 64)
        run = self.box_rows * np.arange(rows.shape[1])[:, None]
        address = self.stage_address(stage) + (chunk * p.BN + run * 64) * p.dtype.itemsize
        self.empty[stage].wait(state.phase ^ 1, warps=(PRODUCER,))
        self.full[stage].expect_bytes(p.stage_bytes, warp=PRODUCER)
        self.hazards.copy_bulk(self._filled[stage], self.full[stage], p.stage_bytes, f"{p.role} copy", stage)
        head = self.kv_cache_iter.kv_head_idx[:, None, None]
        tma.load(self.descriptor, (rows[..., None], head, chunk), self.smem, address[None])
        self._valid[stage] = valid
        self.stage_keys[stage] = first_key, valid
        state.step()
        boxes = np.zeros(WARPS + 1, np.int64)
        boxes[PRODUCER] = len(chunk) * int((rows < self.descriptor.shape[0]).sum())
        row_bytes = self.box_rows * p.depth * p.dtype.itemsize
        self.traffic.move("DRAM->SMEM", boxes // len(chunk) * row_bytes)
        self.traffic.issue(f"{p.role} tma", boxes)

    def wait(self, stage: int) -> None:
        """The consumers: wait until the stage, their next one, is full."""
        self._expect("consumers", self.consumer, stage)
        self.full[stage].wait(self.consumer.phase, warps=CONSUMERS)

    def zero_rows_past_end(self, stage: int) -> None:
        """The consumers write zeros over the rows past the last key, which P = 0 does not mask if they are infinite or
        NaN; then a fence, since wgmma reads through the async proxy, and a barrier of the warpgroup.
        """
        p, valid = self.params, self._valid[stage]
        row, chunk, vector = np.ogrid[: p.BN, : p.padded_depth // 64, :8]
        past = (row >= valid[:, None, None, None]) & (valid[:, None, None, None] > 0)
        if past.any():
            linear = self.stage_address(stage) + (chunk * p.BN + row) * 128 + 16 * vector
            self.hazards.write(self._used[stage], f"{p.role} zeros", stage)
            address = self.descriptor.swizzle.swizzle()(linear)
            self.smem.store(address[None], np.zeros((1, *address.shape, 16), np.uint8), mask=past)
            self.hazards.fence_async(CONSUMERS)
            self.hazards.barrier(CONSUMERS, CONSUMERS, name=1)

    def load_from_shared(self, stage: int) -> list[SmemDescriptor]:
        """The descriptor of every k step: wgmma reads the stage itself, no register holds it."""
        p, layout = self.params, self.tile_layout
        first = tile_to_descriptor(layout, p.dtype, SWIZZLE, self.stage_address(stage), "K" if p.transpose else "MN")
        steps = [layout(0, p.MMA_K * k) for k in range(p.num_k_mmas2)]
        return [first.advance(int(step) * p.dtype.itemsize) for step in steps]

    def get_mma_tile(self, k_mma: int, stage: int) -> SmemDescriptor:
        """The descriptor of a k step."""
        if not 0 <= k_mma < self.params.num_k_mmas2:
            raise ValueError(f"k_mma {k_mma} is not one of the {self.params.num_k_mmas2} k steps")
        return self.load_from_shared(stage)[k_mma]

    mma_subtile = get_mma_tile

    def operand(self, tile: Array) -> Array:
        """Registers of the other operand: ``[programs, 64, depth]`` of Q or ``[programs, 64, BN]`` of P ->
        ``[programs, num_k_mmas2, 128, 8]``; a narrower tile gets zeros.
        """
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

        a : the registers of :meth:`operand`, or one descriptor of shared memory for each k step.
        """
        p, atom = self.params, self.atom
        self.hazards.read_async(self._used[stage], f"{p.role} wgmma", stage)
        for k, descriptor in enumerate(self.load_from_shared(stage)):
            step = a[k] if isinstance(a[0], SmemDescriptor | int) else a[:, k]
            c = shared_mma(atom, self.smem, step, descriptor, c, b_major="K" if p.transpose else "MN")
        programs = int((self._valid[stage] > 0).sum())
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
        """What lies where in the stages of one program, as TMA has brought it: rows past the last key are those that
        follow in their page, zeros where the page does not exist."""
        p = self.params
        chunks = p.padded_depth // 64
        areas = stage_areas(
            self.stage_keys, p.num_smem_stages, p.stage_bytes, self.smem_address, program,
            blocks=chunks, width=64, name="chunk",
        )
        image = SmemImage.empty(self.smem_address, p.num_smem_stages * p.stage_bytes, areas)
        row, chunk, vector = np.ogrid[: p.BN, :chunks, :8]
        inside = (8 * chunk + vector) * 16 < p.depth * p.dtype.itemsize
        for stage, (_, valid) in self.stage_keys.items():
            linear = self.stage_address(stage) + (chunk * p.BN + row) * 128 + 16 * vector
            slot = (self.descriptor.swizzle.swizzle()(linear) - self.smem_address) // 16
            arrived = -(-int(valid[program]) // self.box_rows) * self.box_rows
            image.put(slot, np.where(inside, row, p.BN), 8 * chunk + vector, arrived)
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
