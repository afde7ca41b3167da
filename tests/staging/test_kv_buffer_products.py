"""Q K^T and P V through KVBuffer's fragments. Rests on float64 products, for every configuration of the table of
derived values and on the table itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from registers import in_registers

from kvlab.cache import PagedKVCache, from_dense
from kvlab.layout import Swizzle
from kvlab.memory import as_dtype
from kvlab.staging.max.kv_buffer import KVBuffer
from kvlab.staging.max.operand_maps import kv_buffer_operand_map, output_map, score_map
from kvlab.staging.max.params import KVBufferParams
from kvlab.staging.max.warp_slices import WarpSlices

SW304, SW303 = Swizzle(3, 0, 4, "vector"), Swizzle(3, 0, 3, "vector")
PREFILL, DECODE = {"num_threads": 256}, {"BN": 128, "WN": 32, "num_threads": 256}
SHAPES = {("bf16", 32): (32, 32, 16), ("bf16", 16): (16, 16, 32), ("fp8", 32): (32, 32, 64), ("fp8", 16): (16, 16, 128)}


@dataclass(frozen=True)
class Row:
    """A row of the table: the configuration, and what it says follows from it."""

    role: str
    dtype: str
    M: int
    depth: int
    BN: int
    BK: int
    num_mmas: int
    num_k_mmas2: int
    input_frag_size: int
    num_k_tiles: int
    num_repeats: int
    smem_stage_size: int
    vm_instrs_per_load: int
    reg_rows: int
    bk_smem: int = 0

    def params(self, heads: int) -> KVBufferParams:
        decode = self.BN == 128
        return KVBufferParams(
            self.dtype, SHAPES[self.dtype, self.M], (SW303 if self.M == 16 else SW304) if self.role == "K" else None,
            BN=self.BN, WN=32 if decode else self.BN, BK=self.BK, num_threads=256, depth=self.depth,
            kv_num_heads=heads, transpose=self.role == "K", bk_smem=self.bk_smem or self.BK, num_smem_stages=1,
        )

    def __str__(self) -> str:
        return f"{self.role}-{self.dtype}-M{self.M}-D{self.depth}-BN{self.BN}-BK{self.BK}"


TABLE = [
    Row("K", "bf16", 32, 64, 64, 32, 2, 2, 8, 2, 2, 4096, 2, 8),  # and K_rope of MLA
    Row("V", "bf16", 32, 64, 64, 32, 2, 2, 8, 2, 2, 4096, 2, 8),
    Row("K", "bf16", 32, 128, 64, 32, 2, 2, 8, 4, 4, 8192, 4, 16),
    Row("V", "bf16", 32, 128, 64, 32, 4, 2, 8, 2, 4, 8192, 4, 16),
    Row("K", "bf16", 32, 256, 64, 32, 2, 2, 8, 8, 8, 16384, 8, 32),
    Row("V", "bf16", 32, 256, 64, 32, 8, 2, 8, 2, 8, 16384, 8, 32),
    Row("K", "bf16", 32, 512, 32, 32, 1, 2, 8, 16, 16, 16384, 8, 32),
    Row("V", "bf16", 32, 512, 32, 32, 16, 2, 8, 1, 16, 16384, 8, 32),
    Row("K", "fp8", 32, 128, 64, 64, 2, 1, 32, 2, 2, 8192, 2, 4),
    Row("V", "fp8", 32, 128, 64, 64, 4, 1, 32, 1, 2, 8192, 2, 4),
    Row("K", "fp8", 32, 256, 64, 64, 2, 1, 32, 4, 4, 16384, 4, 8),
    Row("V", "fp8", 32, 256, 64, 64, 8, 1, 32, 1, 4, 16384, 4, 8),
    Row("K", "bf16", 16, 64, 128, 32, 2, 1, 8, 2, 2, 8192, 4, 4),
    Row("K", "bf16", 16, 128, 128, 32, 2, 1, 8, 4, 4, 16384, 8, 8),
    Row("K", "bf16", 16, 256, 128, 32, 2, 1, 8, 8, 8, 32768, 16, 16),
    Row("K", "bf16", 16, 512, 128, 32, 2, 1, 8, 16, 16, 65536, 32, 32),
    Row("K", "fp8", 16, 128, 128, 128, 2, 1, 32, 1, 1, 16384, 2, 2),
    Row("K", "fp8", 16, 256, 128, 128, 2, 1, 32, 2, 2, 32768, 4, 4),
    Row("K", "fp8", 16, 512, 128, 128, 2, 1, 32, 4, 4, 65536, 8, 8),
    Row("K", "fp8", 16, 576, 128, 128, 2, 1, 32, 5, 9, 73728, 18, 10, bk_smem=64),
    Row("K", "fp8", 32, 576, 128, 64, 1, 1, 32, 9, 9, 73728, 18, 9),
    Row("K", "bf16", 16, 576, 128, 32, 2, 1, 8, 18, 18, 73728, 36, 36),
]
LENGTHS = [150, 70]


def tensors(dtype: Any, heads: int, depth: int) -> Any:
    """A pool of shuffled poisoned pages, and the dense keys ``[sequences, tokens, heads, depth]``."""
    rng = np.random.default_rng(depth)
    dense = rng.standard_normal((1, 2, max(LENGTHS), heads, depth)).astype(as_dtype(dtype))
    return from_dense(dense, dense, LENGTHS, 128, shuffle=3, spare_pages=1), dense[0]


def second_tile(dense: Any, batch: Any, head: Any, BN: int) -> Any:
    """Rows ``[BN, 2 BN)`` in float64, zeros past the sequence: ``[programs, BN, depth]``."""
    length = np.take(LENGTHS, batch)
    row = np.arange(BN, 2 * BN)
    values = dense[batch[:, None], np.minimum(row, max(LENGTHS) - 1), head[:, None]].astype(np.float64)
    return np.where((row < length[:, None])[..., None], values, 0)


def product(reader: KVBuffer, operand: Any, operand_map: Any, c_map: Any, num_m: int) -> Any:
    """``c_map`` tile of the operand times what the registers hold, strip after strip, k group after k group."""
    registers = in_registers(operand_map.spread(operand.astype(reader.params.dtype)))
    c = in_registers(np.zeros((len(operand), *c_map.row.shape), np.float32))
    for strip in range(reader.num_k_tiles):
        for kg in range(reader.num_k_mmas2):
            first = (strip * reader.num_k_mmas2 + kg) * num_m
            reader.kv_mma_op.mma(registers[first : first + num_m, :], c, strip, kg, swap_a_b=True)
    return c_map.gather(c)


def padded(q: Any, columns: int) -> Any:
    return np.pad(q, ((0, 0), (0, 0), (0, columns - q.shape[-1])))


BATCH, HEAD = np.divmod(np.arange(4), 2)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_every_configuration_of_the_table(row: Row) -> None:
    """Products of storage values summed in float32: at most depth + BN additions of rounding error. The second tile of
    ragged sequences, the first of them past its end."""
    p = row.params(heads=2)
    for name in ("num_mmas", "num_k_mmas2", "input_frag_size", "num_k_tiles", "num_repeats", "smem_stage_size",
                 "vm_instrs_per_load"):
        assert getattr(p, name) == getattr(row, name), name
    assert p.mma_total_rows == row.reg_rows
    pool, dense = tensors(row.dtype, 2, row.depth)
    buffer = KVBuffer(p, pool.get_key_cache(0), BATCH, HEAD, end=np.take(LENGTHS, BATCH))
    buffer.kv_cache_iter.increment()
    buffer.load_from_dram(0)
    buffer.load_from_shared(0)
    buffer.zero_partial_tile_pad() if p.transpose else None
    tile, BM, num_m = second_tile(dense, BATCH, HEAD, p.BN), 128 if p.BN < 128 else row.M, 1
    rng = np.random.default_rng(1)
    if p.transpose:
        q = rng.standard_normal((4, BM, p.depth)).astype(p.dtype).astype(np.float64)
        operand = padded(q, p.num_k_tiles * p.BK)
        got, wanted = product(buffer, operand, kv_buffer_operand_map(p, BM), score_map(p, BM), num_m), q @ tile.mT
    else:
        q = rng.random((4, BM, p.BN)).astype(p.dtype).astype(np.float64)
        got, wanted = product(buffer, q, kv_buffer_operand_map(p, BM), output_map(p, BM), num_m), q @ tile
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6 * np.abs(q).sum(-1).max() * 4)


SLICES = [
    *[("bf16", 16, 32, 32, depth, depth, False) for depth in (64, 128, 256, 512)],
    *[("fp8", 16, 128, 128, depth, depth, False) for depth in (128, 256)],
    ("fp8", 32, 64, 64, 256, 256, False),
    ("bf16", 16, 32, 32, 512, 512, True),
    ("bf16", 16, 32, 32, 576, 512, True),
    ("fp8", 16, 128, 64, 576, 512, True),
    ("fp8", 32, 64, 64, 576, 512, True),
]


@pytest.mark.parametrize(
    "dtype,M,BK,bk_smem,depth,output_depth,in_k",
    [pytest.param(*s, id=f"{s[0]}-M{s[1]}-D{s[4]}-V{s[5]}-{'in-K' if s[6] else 'own'}") for s in SLICES],
)
def test_p_v_through_the_slices_of_warps(
    dtype: str, M: int, BK: int, bk_smem: int, depth: int, output_depth: int, in_k: bool
) -> None:
    """Decode: each warp its columns of V, which is its own tile or the first columns of K's (MLA, swizzled)."""
    p = KVBufferParams(
        dtype, SHAPES[dtype, M], (SW303 if M == 16 else SW304) if in_k else None, BN=128, WN=32 if in_k else 128, BK=BK,
        num_threads=256, depth=depth, kv_num_heads=2, transpose=in_k, bk_smem=bk_smem, num_smem_stages=1,
    )
    pool, dense = tensors(dtype, 2, depth)
    whole = KVBuffer(p, pool.get_value_cache(0), BATCH, HEAD, end=np.take(LENGTHS, BATCH))
    v = WarpSlices(whole, 4, output_depth)
    if (dtype, in_k) == ("bf16", False):  # a row of the table
        table = {64: (1, 1, 4), 128: (2, 1, 8), 256: (4, 2, 16), 512: (8, 4, 32)}
        assert (v.num_mmas, v.num_repeats, v.params.mma_total_rows) == table[depth]
    whole.kv_cache_iter.increment()
    whole.load_from_dram(0)
    v.load_from_shared(0)
    tile = second_tile(dense, BATCH, HEAD, 128)[..., :output_depth]
    weights = np.random.default_rng(1).random((4, M, 128)).astype(p.dtype).astype(np.float64)
    decode = replace(p, WN=32, depth=output_depth, transpose=False, swizzle=None)
    got = product(v, weights, kv_buffer_operand_map(decode, M), output_map(decode, M), 1)
    np.testing.assert_allclose(got, weights @ tile, rtol=1e-5, atol=1e-4)
    strips = [v.fragment_map().gather(v.strip_tile(s)) for s in range(v.num_k_tiles)]
    np.testing.assert_array_equal(np.concatenate(strips, axis=1).astype(np.float64), tile)


def test_576_columns_in_blocks_as_wide_as_strips_need_the_zero_pad() -> None:
    """bk_smem = BK = 128, smem_depth 640: LDS columns past 576 hold the next token's. With the pad it does not matter
    what Q has there."""
    p = KVBufferParams(
        "fp8", (16, 16, 128), SW303, BN=128, WN=32, BK=128, num_threads=256, depth=576, kv_num_heads=1, transpose=True,
        smem_depth=640, num_smem_stages=1,
    )
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((1, 128, 1, 576)).astype(p.dtype)
    k = KVBuffer(p, PagedKVCache(keys, [127], [[0]], 1, 128), 0, 0, end=128)
    k.load_from_dram(0)
    k.load_from_shared(0)
    assert (k.fragment_map().gather(k.strip_tile(4))[0, :127, 64:] == keys[0, 1:, 0, :64]).all()
    k.zero_partial_tile_pad()
    assert (k.fragment_map().gather(k.strip_tile(4))[0, :, 64:] == 0).all()
    q = rng.standard_normal((1, 16, 576)).astype(p.dtype).astype(np.float64)
    operand = np.pad(q, ((0, 0), (0, 0), (0, 64)), constant_values=7)
    got = product(k, operand, kv_buffer_operand_map(p, 16), score_map(p, 16), 1)
    np.testing.assert_allclose(got[0], q[0] @ keys[0, :, 0].astype(np.float64).T, rtol=1e-5, atol=1e-4)


def test_rope_columns_of_a_latent_row() -> None:
    """K_rope of MLA prefill: columns 512 to 575 of rows of 576, into a register tile of its own."""
    p = KVBufferParams(
        "bf16", (32, 32, 16), SW304, BN=64, WN=64, BK=32, num_threads=256, depth=64, kv_num_heads=1, transpose=True,
        cache_depth=576, head_dim_offset=512,
    )
    keys = np.random.default_rng(0).standard_normal((1, 128, 1, 576)).astype(p.dtype)
    k = KVBuffer(p, PagedKVCache(keys, [99], [[0]], 1, 100), 0, 0, end=100)
    for stage in (0, 1):
        k.load_from_dram(stage)
        k.load_from_shared(stage)
        got = np.concatenate([k.fragment_map().gather(k.strip_tile(s)) for s in (0, 1)], axis=2)
        wanted = np.where(np.arange(stage * 64, stage * 64 + 64)[:, None] < 100, keys[0, stage * 64 :][:64, 0, 512:], 0)
        np.testing.assert_array_equal(got[0], wanted)


@pytest.mark.parametrize("dtype,BK", [("bf16", 32), ("fp8", 64)])
def test_p_of_one_warp_needs_no_exchange_between_lanes(dtype: str, BK: int) -> None:
    """Prefill: the scores' accumulator of 32x32, cast, is the operand that meets V, register by register."""
    p = KVBufferParams(dtype, SHAPES[dtype, 32], None, 64, 64, BK, 256, 128, 1, transpose=False)
    scores, operand = score_map(p, 128), kv_buffer_operand_map(p, 128)
    np.testing.assert_array_equal(scores.flat.reshape(256, -1), operand.flat.reshape(256, -1))
