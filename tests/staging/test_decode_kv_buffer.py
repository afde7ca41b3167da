"""DecodeKVBuffer. Rests on the gfx950 kernels compiled by MAX and followed lane by lane
(tests/data/kvbuffer_trace_decode.json.gz, kvbuffer_members.json), and on float64 products."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvlab.cache import PagedKVCache, from_dense
from kvlab.layout import Swizzle
from kvlab.memory import Memory, OutOfBounds, as_dtype
from kvlab.staging.decode_kv_buffer import DecodeKVBuffer, KBuffer, VBuffer
from kvlab.staging.decode_kv_params import DecodeKVBufferParams
from kvlab.staging.operand_maps import operand_map, output_map, score_map
from kvlab.staging.params import KVBufferParams
from kvlab.staging.traffic import Traffic

SIZES = ("BN", "WN", "BK", "num_threads", "depth", "group_size", "num_stages")


def params_of(i: dict[str, Any], dtype: Any, swizzle: Swizzle | None) -> DecodeKVBufferParams:
    return DecodeKVBufferParams(
        dtype, i["mma_shape"], swizzle, **{name: i[name] for name in SIZES}, kv_num_heads=i.get("kv_num_heads", 1),
        transpose=i["role"] == "K", token_gen=bool(i["token_gen"]),
    )  # fmt: skip


def quietly(*args: Any, **kwargs: Any) -> DecodeKVBuffer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return DecodeKVBuffer(*args, **kwargs)


def steps(buffer: DecodeKVBuffer, tiles: int) -> list[tuple[np.ndarray[Any, Any], ...]]:
    """The kernel of the golden traces: register ring, LDS image and fragments of each step."""
    out, stages = [], buffer.params.num_stages
    for _ in range(stages):
        buffer.load_from_dram()
    for s in range(tiles):
        ring = buffer.load_tile[0].copy()
        buffer.copy_to_shared(s % stages)
        image = buffer.smem.image(buffer.params.dtype)[0].copy()
        fragments = [buffer.load_from_shared(k)[0].copy() for k in range(buffer.num_k_tiles)]
        out.append((ring, image, np.stack(fragments, axis=1)))
        if s + stages < tiles:
            buffer.load_from_dram()
    return out


def test_ring_lds_image_and_registers_equal_compiled_max(decode_trace: dict[str, Any], tags: Any) -> None:
    """In every step every register of the ring, byte of shared memory, and register of every lane."""
    i, expected = decode_trace["inputs"], decode_trace["expected"]
    tag = tags(i["dtype"])
    params, traffic, pieces = params_of(i, tag.dtype, i["swizzle"]), Traffic(), []
    nbytes = params.smem_layout.size * params.dtype.itemsize
    for operand in tag.operand(i["operand_shape"]):
        cache = PagedKVCache(operand, [0], [[0]], 1, i["end"])
        smem = Memory(nbytes, programs=1, unsafe=True)
        buffer = quietly(params, cache, i["batch"], i["kv_head"], smem, i["end"], traffic=traffic)
        pieces.append(steps(buffer, i["tiles"]))
    names = ("load_tile_per_thread", "lds_after_copy_to_shared", "regs_per_thread")
    for s in range(i["tiles"]):
        for number, name in enumerate(names):
            got = tag.join([piece[s][number] for piece in pieces])
            wanted = tag.unknown(expected[name][s])
            np.testing.assert_array_equal(got.reshape(wanted.shape), wanted, err_msg=f"{name}[{s}]")
    assert traffic.instructions[f"{params.role} load"] == tag.pieces * expected["n_buffer_loads"]


def test_members_equal_compiled_max(golden: Callable[[str], list[dict[str, Any]]]) -> None:
    cases = [case for case in golden("kvbuffer_members.json") if case["op"] == "DecodeKVBuffer"]
    for case in cases:
        i = case["inputs"]
        swizzle = None if i["swizzle"] is None else Swizzle(*i["swizzle"], "vector")
        params = params_of(i, i["dtype"], swizzle)
        cache = PagedKVCache(np.zeros((1, 1, 1, i["depth"]), params.dtype), [0], [[0]], 1, 1)
        buffer = quietly(params, cache, 0, 0, end=1)
        for name, wanted in case["expected"].items():
            got = getattr(buffer, name)
            if isinstance(wanted, dict):
                got = {"shape": list(got.shape), "stride": list(got.stride)}
            assert got == wanted, (case["id"], name)
    assert len(cases) == 3
