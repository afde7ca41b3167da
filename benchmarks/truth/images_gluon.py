"""The Gluon kernels of :mod:`images`, and their launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as ttgl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .images import UNTOUCHED, ImageCase

__all__ = ["run"]

_tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(ttgl, "barrier", None) or ttgl.thread_barrier
DTYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32}
LINEAR = ttgl.SwizzledSharedLayout(1, 1, 1, [0])
LINEAR_REGISTERS = ttgl.BlockedLayout([16], [32], [4], [0])


@gluon.jit
def _filled(FILL: ttgl.constexpr, NBYTES: ttgl.constexpr, REG: ttgl.constexpr, LINEAR: ttgl.constexpr):
    raw = ttgl.allocate_shared_memory(ttgl.int8, [NBYTES], LINEAR)
    raw.store(ttgl.full([NBYTES], FILL, ttgl.int8, REG))
    _barrier()
    return raw


@gluon.jit
def _dump(raw, out, NBYTES: ttgl.constexpr, REG: ttgl.constexpr):
    ttgl.store(out + ttgl.arange(0, NBYTES, layout=REG), raw.load(REG))


@gluon.jit
def by_registers(
    x, out, M: ttgl.constexpr, N: ttgl.constexpr, NBYTES: ttgl.constexpr, FILL: ttgl.constexpr, BL: ttgl.constexpr,
    SH: ttgl.constexpr, REG: ttgl.constexpr, LINEAR: ttgl.constexpr, ASYNC: ttgl.constexpr,
):
    raw = _filled(FILL, NBYTES, REG, LINEAR)
    tile = raw._reinterpret(x.dtype.element_ty, [M, N], SH)
    row = ttgl.arange(0, M, layout=ttgl.SliceLayout(1, BL))
    col = ttgl.arange(0, N, layout=ttgl.SliceLayout(0, BL))
    at = x + row[:, None] * N + col[None, :]
    if ASYNC:
        _cp_async(tile, at)
        async_copy.commit_group()
        async_copy.wait_group(0)
    else:
        tile.store(ttgl.load(at))
    _barrier()
    _dump(raw, out, NBYTES, REG)


@gluon.jit
def by_tma(x, out, NBYTES: ttgl.constexpr, FILL: ttgl.constexpr, REG: ttgl.constexpr, LINEAR: ttgl.constexpr):
    raw = _filled(FILL, NBYTES, REG, LINEAR)
    tile = raw._reinterpret(x.dtype, x.block_type.shape, x.layout)
    bar = ttgl.allocate_shared_memory(ttgl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    _barrier()
    mbarrier.expect(bar, x.block_type.nbytes)
    _tma_load(x, [0, 0], bar, tile)
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    _dump(raw, out, NBYTES, REG)


def _launch(case: ImageCase, values: np.ndarray[Any, Any], fill: int) -> np.ndarray[Any, Any]:
    """The bytes of shared memory after a tile of these bytes was stored over the filling."""
    rows, cols = case.shape
    tile = torch.from_numpy(values.view(np.int8)).cuda().view(DTYPES[case.bits]).reshape(rows, cols)
    out = torch.empty(case.nbytes, dtype=torch.int8, device="cuda")
    layout = gluon_layout(case)
    common = {"NBYTES": case.nbytes, "FILL": fill, "REG": LINEAR_REGISTERS, "LINEAR": LINEAR}
    if case.route == "tma":
        descriptor = TensorDescriptor.from_tensor(tile, [rows, cols], layout)
        by_tma[(1,)](descriptor, out, **common)
    else:
        by_registers[(1,)](
            tile, out, M=rows, N=cols, BL=register_layout(case), SH=layout, ASYNC=case.route == "cp.async", **common
        )
    return out.cpu().numpy().view(np.uint8)


def register_layout(case: ImageCase) -> Any:
    """16 bytes a thread along a row."""
    return ttgl.BlockedLayout([1, 128 // case.bits], [8, 4], [4, 1], [1, 0])


def gluon_layout(case: ImageCase) -> Any:
    """The case's encoding as Gluon's own class."""
    encoding: Any = case.layout
    name = type(encoding).__name__
    if name == "SwizzledSharedLayout":
        return ttgl.SwizzledSharedLayout(encoding.vec, encoding.per_phase, encoding.max_phase, list(encoding.order))
    if name == "NVMMASharedLayout":
        return ttgl.NVMMASharedLayout(
            encoding.swizzle_byte_width, encoding.element_bitwidth, 2, transposed=encoding.transposed
        )
    pairs = [list(pair) for pair in encoding.interval_padding_pairs]
    return ttgl.PaddedSharedLayout.with_identity_for(pairs, list(case.shape), [1, 0])


def run(case: ImageCase) -> np.ndarray[Any, Any]:
    """Which byte of the tile stands in each byte of shared memory, -1 where nobody wrote: ``int32 [nbytes]``."""
    number = np.arange(case.shape[0] * case.shape[1] * case.bits // 8)
    low, high, again = (
        _launch(case, (number >> shift & 255).astype(np.uint8), fill) for shift, fill in ((0, 0), (8, 0), (0, -1))
    )
    return np.where(low == again, low.astype(np.int32) | high.astype(np.int32) << 8, UNTOUCHED)
