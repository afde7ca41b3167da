"""The names of MAX's documents. Rests on the declarations of its five public pages (tests/data/max_documents.txt)."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvlab.cache import ContinuousBatchingKVCache, PagedKVCache, padded_depth
from kvlab.memory import bfloat16
from kvlab.staging import (
    DecodeStreamingKVBuffer,
    KBufferConfig,
    KVBuffer,
    KVBufferConfig,
    KVBufferParams,
    KVMmaOp,
    KVMmaOpParams,
    VBufferConfig,
    get_accum_type,
)
from tools import max_documents as m

TEXT = (m.DATA / "max_documents.txt").read_text()
ROWS = m.table()
PLACES = [row for row in ROWS if row.at]


def test_the_table_has_every_name_of_the_documents_once() -> None:
    rows = [row.name for row in ROWS]
    assert len(rows) == len(set(rows))
    assert m.names(TEXT) == set(rows)
    assert all(bool(row.at) != bool(row.mojo_only) for row in ROWS)


@pytest.mark.parametrize("row", PLACES, ids=lambda row: f"{row.name.document}.{row.name.of}.{row.name.name}")
def test_each_name_has_its_place_keyword_and_default(row: Any) -> None:
    assert m.wrong(row) is None


CALLS = sorted({at.partition("(")[0] for row in PLACES for at in [row.at, *m.implemented(row.at)] if "(" in at})


@pytest.mark.parametrize("path", CALLS)
def test_an_unknown_keyword_is_named(path: str) -> None:
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'swizzle_modes'"):
        m.find(path)(swizzle_modes=0)


def test_only_what_is_said_follows_max_26_7(capsys: pytest.CaptureFixture[str]) -> None:
    assert m.main() == 0
    said = capsys.readouterr().out
    follows = [row.name.name for row in ROWS if row.follows]
    assert sorted(follows) == ["full_kv", "load_from_dram", "vm_instrs_per_load"]
    assert all('follows="document"' in row.follows for row in ROWS if row.follows)
    exact = sum(bool(row.at) for row in ROWS) - len(follows)
    assert said.startswith(f"{len(ROWS)} names: {exact} exact, {len(ROWS) - len(PLACES)} of Mojo alone, 3 as MAX 26.7")
    assert [line for line in said.splitlines() if line and not line.startswith(" ")][1:] == [
        "Mojo only", "Follows MAX 26.7"
    ]


# What the table's tests can see.


def test_names_are_taken_from_declarations() -> None:
    text = """document Thing (struct)
struct Thing[a_t: Trait, //, shape: Index[3], swizzle: Optional[Swizzle] = None, out: DType = accum[a_t]()]
comptime MMA_K = shape[2]
comptime granularity = Int(1)
def load[tile: Int](mut self, smem: Tile[a_t, space=Space.SHARED], end: Int = Int(0)) -> Tile[a_t, other=x.other]
"""
    N = m.Name
    assert m.names(text) >= {
        N("Thing", "struct", "", "Thing"), N("Thing", "parameter", "", "a_t"), N("Thing", "parameter", "", "shape"),
        N("Thing", "parameter", "", "swizzle", "None"), N("Thing", "parameter", "", "out", "accum[a_t]()"),
        N("Thing", "comptime", "", "MMA_K"), N("Thing", "comptime", "", "granularity", "Int(1)"),
        N("Thing", "method", "", "load"), N("Thing", "parameter", "load", "tile"),
        N("Thing", "argument", "load", "smem"), N("Thing", "argument", "load", "end", "Int(0)"),
        N("types", "type", "", "Swizzle"), N("types", "type", "", "SHARED"), N("types", "type", "", "other"),
    }
    assert not any(name.name in ("self", "space_", "Int(0)") for name in m.names(text))


@pytest.mark.parametrize(
    "change,says",
    [
        ({"at": "kvlab.staging.KVBuffer.load_from_dram(buffer)"}, "has another name"),
        ({"at": "kvlab.staging.KVBuffer.load_from_shared(buffer_idx)"}, "takes no keyword buffer_idx"),
        ({"at": "kvlab.staging.KVBuffers.load_from_dram(buffer_idx)"}, "has no attribute 'KVBuffers'"),
        ({"mojo_only": "no"}, "has a place, too"),
    ],
)
def test_a_wrong_row_is_seen(change: dict[str, str], says: str) -> None:
    (row,) = (row for row in ROWS if row.name.name == "buffer_idx")
    assert m.wrong(row) is None
    assert says in m.wrong(replace(row, **change))


@pytest.mark.parametrize("name,default", [("full_kv", "False"), ("full_kv", ""), ("depth", "0"), ("swap_a_b", "True")])
def test_another_default_is_seen(name: str, default: str) -> None:
    row = next(row for row in PLACES if row.name.name == name and row.name.kind == "parameter")
    assert "has default" in m.wrong(replace(row, name=replace(row.name, default=default)))


# Types that the documents name.


@pytest.mark.parametrize("warp_id", [None, 2])
def test_tiles_are_of_the_types_of_their_members(warp_id: int | None) -> None:
    p = KVBufferParams("bf16", (16, 16, 32), None, 128, 32, 32, 256, 80, 1, transpose=True, smem_depth=96)
    whole = KVBuffer(p, cache(), 0, 0, end=1, warp_id=warp_id)
    strips = DecodeStreamingKVBuffer(p, cache(), 0, 0, num_keys=1, warp_id=warp_id)
    assert isinstance(whole.smem_tile, whole.SmemParentType)
    assert not isinstance(whole.smem_tile, whole.MMATileType)
    for buffer, tile in ((whole, whole.get_mma_tile(0, 1)), (strips, strips.get_mma_tile(0))):
        assert isinstance(buffer.kv_mma_op, KVMmaOp)
        assert buffer.KVMmaOpType == buffer.kv_mma_op.params
        assert isinstance(buffer.kv_mma_op.reg_tile, buffer.MMATileType)
        assert tile.memory is buffer.kv_mma_op.reg_tile.memory
        threads = slice(None) if warp_id is None else slice(128, 192)  # the registers of one warp, or of all
        everyone = buffer.kv_mma_op.mma_tile_at(1 if buffer is whole else 0, 0)
        np.testing.assert_array_equal(tile.addresses(), everyone.addresses()[:, threads])


def test_roles_are_configurations() -> None:
    assert isinstance(KBufferConfig(BN=128, BK=32, WN=32), KVBufferConfig)
    assert isinstance(VBufferConfig(BN=128, BK=32, WN=32, depth=64), KVBufferConfig)
    assert not isinstance(object(), KVBufferConfig)


# Defaults that the documents work out from other arguments.


def cache(**more: Any) -> PagedKVCache:
    return PagedKVCache(np.zeros((3, 8, 1, 80), bfloat16), [0], [[0]], 1, 1, **more)


def test_defaults_of_parameters() -> None:
    p = KVBufferParams("bf16", (16, 16, 32), None, 128, 32, 32, 256, 96, 1, transpose=True)
    assert p.cache_depth == p.reg_chunk_depth == p.smem_depth == p.depth
    op = KVMmaOpParams("fp8", (16, 16, 128), 2, 1, 1, BN=128, BK=128)
    assert op.out_type == get_accum_type("fp8") == np.float32


@pytest.mark.parametrize("mode", ["SWIZZLE_NONE", "SWIZZLE_32B", "SWIZZLE_128B"])
@pytest.mark.parametrize("create", ["create_tma_tile", "create_ragged_tma_tile"])
def test_default_width_of_tiles(create: str, mode: str) -> None:
    tile, width = getattr(cache(), create)(mode, BN=8), padded_depth(bfloat16, mode, 80)
    assert (tile.tile_shape[-1] if create == "create_tma_tile" else tile.BN) == width


def test_defaults_of_gathers() -> None:
    tile = cache().create_gather4_tma_tile(tile_width=80)
    assert tile.descriptor.dtype == bfloat16
    assert tile.descriptor.strides[0] == 80
    with pytest.raises(ValueError, match="tile_stride 64 of bfloat16 is 128 bytes: must be a row of the cache, 160"):
        cache().create_gather4_tma_tile(tile_width=64)


def test_default_dtype_of_a_load() -> None:
    assert cache().load(0, 0, 0, 0, width=4).dtype == bfloat16


@pytest.mark.parametrize("kind", [PagedKVCache, ContinuousBatchingKVCache])
def test_a_copy_is_another_view_of_the_same_memory(kind: Any) -> None:
    one = kind(np.zeros((3, 8, 1, 16), np.float32), [0], [[0]] if kind is PagedKVCache else [0], 1, 1)
    for other in (one.copy(), copy.copy(one)):
        assert type(other) is kind
        assert other is not one
        other.store(0, 0, 3, 2, np.float32(7))
        assert one.load(0, 0, 3, 2) == 7
        one.store(0, 0, 3, 2, np.float32(0))
    assert "copy" not in inspect.signature(kind).parameters
