"""KVBuffer and WarpSlices. Rest on the gfx950 kernels compiled by MAX and followed lane by lane
(tests/data/kvbuffer_trace_kvbuffer.json.gz, kvbuffer_members.json)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvlab.cache import PagedKVCache, from_dense
from kvlab.layout import Swizzle
from kvlab.memory import Memory, OutOfBounds, as_dtype
from kvlab.staging.kv_buffer import KVBuffer
from kvlab.staging.kv_buffer_addresses import dma_plan
from kvlab.staging.params import KVBufferParams
from kvlab.staging.traffic import Traffic
from kvlab.staging.warp_slices import WarpSlices

SW304, SW303 = Swizzle(3, 0, 4, "vector"), Swizzle(3, 0, 3, "vector")
OPTIONAL = ("cache_depth", "head_dim_offset", "reg_chunk_depth", "smem_depth", "reg_chunk_keys", "bk_smem")


def params_of(i: dict[str, Any], dtype: Any) -> KVBufferParams:
    """The buffer that moves the tile, from a golden case."""
    sizes = {name: i[name] for name in ("BN", "WN", "BK", "num_threads", "depth", "kv_num_heads")}
    optional = {name: i[name] for name in (*OPTIONAL, "num_smem_stages") if name in i}
    K, full_kv = bool(i["transpose"]), bool(i.get("full_kv", 1))
    if "depth_per_warp" in i:  # the tile is V's own, or K's
        K = bool(i["v_in_k_memory"])
        sizes["WN"] = i["WN"] if K else i["BN"]
        optional |= {"smem_depth": i["depth"], "num_smem_stages": 1}
    return KVBufferParams(dtype, i["mma_shape"], i["swizzle"], **sizes, transpose=K, full_kv=full_kv, **optional)


def quietly(make: Callable[..., KVBuffer], *args: Any, **kwargs: Any) -> KVBuffer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return make(*args, **kwargs)


def run(i: dict[str, Any], params: KVBufferParams, operand: Any, spare: int = 0) -> tuple[Any, ...]:
    """LDS image, registers ``[threads, *]``, DMA of a golden case, with one piece of the tags."""
    cache = PagedKVCache(operand, [0], [[0]], 1, i["end"])
    nbytes = params.num_smem_stages * params.smem_stage_size * params.dtype.itemsize
    smem = Memory(nbytes + spare, programs=1, unsafe=True)
    buffer = quietly(KVBuffer, params, cache, i["batch"], i["kv_head"], smem, i["end"])
    dma = []
    for stage in range(params.num_smem_stages):
        dma += dma_of(buffer, stage)
        buffer.load_from_dram(stage)
    reader = quietly(WarpSlices, buffer, i["BN"] // i["WN"], i["output_depth"]) if "depth_per_warp" in i else buffer
    registers = []
    for stage in range(reader.params.num_smem_stages) if params.full_kv else ():
        for strip in range(reader.num_k_tiles) if i.get("strip_by_strip") else (None,):
            registers.append(reader.load_from_shared(stage, strip)[0].copy())
            if i.get("zero_partial_tile_pad"):
                reader.zero_partial_tile_pad()
                registers[-1] = reader.mma_op.reg_tile[0].copy()
    image = smem.image(params.dtype)[0, : nbytes // params.dtype.itemsize]
    shape = (params.num_threads, -1)
    return image, np.stack(registers, axis=1).reshape(shape) if registers else np.zeros(0, params.dtype), dma


def dma_of(buffer: KVBuffer, stage: int) -> list[tuple[int, ...]]:
    """Wave, LDS base, end of the resource and address of every lane of each instruction of the next load."""
    p, walk = buffer.params, buffer.kv_cache_iter
    start = walk.tile_start_row
    tile, plan = walk.next_tile(), dma_plan(p)
    walk.tile_start_row = start
    base, voffset, records = tile.resource(plan.row, plan.col)
    assert (base == base[..., :1]).all()
    assert (records == records[..., :1]).all()
    lds = plan.offset * p.dtype.itemsize + buffer.stage_address(stage)
    columns = [plan.wave[:, None], lds[:, None], (base + records)[0, :, :1], base[0] + voffset]
    return list(map(tuple, np.concatenate(columns, axis=1).tolist()))


def golden_dma(dma: dict[str, np.ndarray[Any, Any]]) -> list[tuple[int, ...]]:
    address = (dma["resource_base"] + dma["soffset"])[:, None] + dma["voffset"]
    ends = dma["resource_base"] + dma["num_records"]
    return list(map(tuple, np.column_stack([dma["wave"], dma["lds_base"], ends, address]).tolist()))


def test_dma_lds_image_and_registers_equal_compiled_max(kvbuffer_trace: dict[str, Any], tags: Any) -> None:
    """Every DMA instruction, byte of shared memory and register of every lane."""
    i, expected = kvbuffer_trace["inputs"], kvbuffer_trace["expected"]
    tag = tags(i["dtype"])
    params = params_of(i, tag.dtype)
    images, registers, dma = zip(*(run(i, params, piece) for piece in tag.operand(i["operand_shape"])), strict=True)
    assert sorted(dma[0]) == sorted(golden_dma(expected["dma"]))
    np.testing.assert_array_equal(tag.join(images), tag.unknown(expected["lds_after_load_from_dram"]))
    np.testing.assert_array_equal(tag.join(registers), tag.unknown(expected["regs_per_thread"]))


def test_members_equal_compiled_max(golden: Callable[[str], list[dict[str, Any]]]) -> None:
    cases = [case for case in golden("kvbuffer_members.json") if case["op"] == "KVBuffer"]
    for case in cases:
        i = dict(case["inputs"])
        assert i.pop("warp_size") == 64
        i["swizzle"] = None if i["swizzle"] is None else Swizzle(*i["swizzle"], "vector")
        params = KVBufferParams(**i)
        cache = PagedKVCache(np.zeros((1, 1, 2, i["depth"]), params.dtype), [0], [[0]], 1, 1)
        smem = Memory(16, programs=1)
        buffer = quietly(KVBuffer, params, cache, 0, 0, smem, 1)
        for name, wanted in case["expected"].items():
            for holder, attribute in ((buffer, name), (params, name.lstrip("_"))):
                got = getattr(holder, attribute)
                if isinstance(wanted, dict):
                    got = {"shape": list(got.shape), "stride": list(got.stride)}
                assert got == (tuple(wanted) if isinstance(wanted, list) else wanted), (case["id"], name)
    assert len(cases) == 16
