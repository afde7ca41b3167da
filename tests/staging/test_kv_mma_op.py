"""KVMmaOp. Rests on the registers of MAX's compiled gfx950 kernels, loaded from their own LDS images
(tests/data/kvbuffer_trace_kvbuffer.json.gz), and on float64 products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from registers import held, in_registers

from kvlab.cache import UnsafePointer
from kvlab.layout import Layout, Swizzle, TileTensor
from kvlab.memory import AddressSpace, Memory, UnwrittenRead, as_dtype, bfloat16
from kvlab.staging.max.kv_mma_op import KVMmaOp, KVMmaOpParams
from kvlab.staging.max.mma_op_addresses import v_bf16_offsets, v_fp8_offsets
from kvlab.staging.max.operand_maps import operand_map, output_map, score_map
from kvlab.staging.max.p_buffer import PRegisterBuffer
from kvlab.staging.max.params import KVBufferParams
from kvlab.staging.max.tiled_mma_op import mfma_atom, mma_tiles
from kvlab.staging.record.traffic import Traffic


class Case:
    """How a KVBuffer drives its KVMmaOp, from a golden case."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.i = i = case["inputs"]
        self.K, self.slices = bool(i["transpose"]), "depth_per_warp" in i
        self.warps, N = i["num_threads"] // 64, i["mma_shape"][1]
        depth = i["depth_per_warp"] if self.slices else i["depth"]
        chunk = i.get("reg_chunk_depth", depth) if self.K else i.get("reg_chunk_keys", i["BN"])
        self.slots = -(-chunk // i["BK"])
        self.strips = -(-(depth if self.K else i["BN"]) // i["BK"])
        self.num_mmas = -(-(i["WN"] if self.K else depth) // N)
        self.stages = 1 if self.slices else i.get("num_smem_stages", 2)
        self.block = i["BN"] * i["bk_smem"]
        self.stage = i["BN"] * (i["smem_depth"] if not self.slices else 0)
        self.split = i["bk_smem"] < i["BK"]

    def op(self, dtype: Any) -> KVMmaOp:
        i = self.i
        params = KVMmaOpParams(
            dtype, i["mma_shape"], self.num_mmas, i["BK"] // i["mma_shape"][2], self.slots, i["BN"], i["BK"], self.K,
            i["swizzle"], bk_smem=i["bk_smem"],
        )
        return KVMmaOp(params, num_threads=i["num_threads"])

    def load(self, op: KVMmaOp, smem: Memory, stage: int, strip: int) -> None:
        i, base = self.i, stage * self.stage
        column = np.arange(self.warps) % (i["BN"] // i["WN"])
        if self.K:
            rows = column * i["WN"] * i["bk_smem"]

            def tile(first: Any) -> TileTensor:
                return TileTensor(smem, op.in_type, Layout.row_major(i["WN"], i["bk_smem"]), first[None])

            if self.split:
                lo, has_hi = base + 2 * strip * self.block + rows, strip < i["depth"] // i["BK"]
                op.load_prefill_split(strip, tile(lo), tile(lo + self.block if has_hi else lo), has_hi)
            else:
                op.load_prefill(strip, tile(base + strip * self.block + rows))
            return
        if self.slices:
            c0 = column * i["depth_per_warp"]
            base = c0 // i["bk_smem"] * self.block + c0 % i["bk_smem"]
        pointer = UnsafePointer(smem, base, op.in_type)
        (op.load_v_bf16 if op.in_type.itemsize == 2 else op.load_v_fp8_strip)(strip, pointer)


def test_loads_equal_compiled_max(kvbuffer_trace: dict[str, Any], tags: Any) -> None:
    """Every register of every lane: K whole and split, V by transposing reads, per-warp slices, chunked tiles."""
    case, expected = Case(kvbuffer_trace), kvbuffer_trace["expected"]
    if not case.i.get("full_kv", 1):  # these kernels only load from DRAM
        assert not expected["regs_per_thread"].size
        return
    tag, image = tags(case.i["dtype"]), expected["lds_after_load_from_dram"]
    got = []
    for piece in tag.split(image):
        smem = Memory(piece.nbytes + 4096, space=AddressSpace.SHARED, programs=1, unsafe=True)
        written = np.flatnonzero(image != -2)
        smem.store(written[None] * tag.dtype.itemsize, piece[written][None, :, None])
        op, registers = case.op(tag.dtype), []
        for stage in range(case.stages):
            for strip in range(case.strips):
                case.load(op, smem, stage, strip)
                if case.i.get("strip_by_strip"):
                    registers.append(held(op.reg_tile)[0])
            if not case.i.get("strip_by_strip"):
                registers.append(held(op.reg_tile)[0])
        got.append(np.stack(registers, axis=1).reshape(case.i["num_threads"], -1))
    wanted = np.where(expected["regs_per_thread"] == -3, -5, expected["regs_per_thread"])
    if case.i.get("zero_partial_tile_pad"):  # zeroes the upper half of the last strip afterwards, no load of KVMmaOp
        wanted = wanted.reshape(case.i["num_threads"], case.strips, -1, 32)[:, :-1].reshape(case.i["num_threads"], -1)
        got = [g.reshape(case.i["num_threads"], case.strips, -1, 32)[:, :-1].reshape(g.shape[0], -1) for g in got]
    np.testing.assert_array_equal(tag.join(got), wanted)


def test_transposing_reads_equal_compiled_max(kvbuffer_trace: dict[str, Any]) -> None:
    """As many ds_read_tr as the compiled kernel issues, and at its addresses (golden: the first eight of wave 0)."""
    case, expected = Case(kvbuffer_trace), kvbuffer_trace["expected"]
    reads = expected["n_tr16"] + expected["n_tr8"]
    if case.K:
        assert not reads
        return
    params = case.op(case.i["dtype"]).params
    offsets = v_bf16_offsets if params.in_type.itemsize == 2 else v_fp8_offsets
    elements = np.concatenate([offsets(params, strip).reshape(-1, 64) for strip in range(case.strips)])
    assert reads == case.warps * case.stages * len(elements)
    stages = np.concatenate([elements + stage * case.stage for stage in range(case.stages)]) * params.in_type.itemsize
    assert {tuple(row) for row in expected["tr_wave0_lds_byte_addr"]} <= {tuple(row) for row in stages.tolist()}


def warps_of(dtype: str, *, transpose: bool, mma_shape: tuple[int, int, int], depth: int = 128) -> KVBufferParams:
    return KVBufferParams(dtype, mma_shape, None, 128, 32, 32, 256, depth, 1, transpose)


@pytest.mark.parametrize("swap_a_b", [True, False])
@pytest.mark.parametrize("BM", [16, 32])
@pytest.mark.parametrize("dtype,mma_shape", [("bf16", (16, 16, 32)), ("fp16", (16, 16, 32)), ("fp32", (16, 16, 4))])
def test_mma_is_the_product_m_inner(dtype: str, mma_shape: tuple[int, int, int], BM: int, swap_a_b: bool) -> None:
    """C[m + n * num_m] += A[m] B[n], against float64; small integers, so that it is exact."""
    p = warps_of(dtype, transpose=True, mma_shape=mma_shape, depth=32)
    op = KVMmaOp(KVMmaOpParams.of(p))
    rng = np.random.default_rng(0)
    q, k = (rng.integers(-4, 5, (1, rows, 32)) for rows in (BM, 128))
    atom, num_m = mfma_atom(mma_shape, dtype), BM // 16
    a = operand_map(p, BM).spread(q.astype(p.dtype))
    # B: fragment n of warp w holds keys 32 w + 16 n + lane % 16, as operand_map of 128 "rows" shared out by fours
    keys = k.astype(p.dtype)[0].reshape(4, 2, 16, 32)
    steps = np.split(keys, 32 // mma_shape[2], axis=-1)
    fragments = np.stack([atom.fragment_a(step) for step in steps], axis=1)  # [warps, kg, n, lanes, frag]
    op.reg_tile.store(fragments.transpose(0, 3, 1, 2, 4).reshape(1, 256, -1, op.params.input_frag_size, 1))
    acc, q_tile = np.ones((1, 256, num_m * 2, 4), np.float32), in_registers(a)
    for kg in range(op.params.num_k_mmas):
        op.mma(q_tile[kg * num_m : (kg + 1) * num_m, :], in_registers(acc), 0, kg, swap_a_b)
    wanted = q[0] @ k[0].T + 1
    if swap_a_b:
        np.testing.assert_array_equal(score_map(p, BM).gather(acc)[0], wanted)
    else:
        tiles = atom.tile_c(acc.reshape(4, 64, 2, num_m, 4).transpose(0, 2, 3, 1, 4))  # [warps, n, m, 16, 16]
        np.testing.assert_array_equal(tiles.transpose(2, 3, 0, 1, 4).reshape(BM, 128), wanted)


def test_mma_tile_at_is_a_window_of_the_register_tile() -> None:
    params = KVMmaOpParams("bf16", (32, 32, 16), 2, 2, 3, 64, 32, True)
    op = KVMmaOp(params, programs=2, num_threads=64)
    assert (op.reg_tile.memory.space, op.reg_tile.shape, held(op.reg_tile).shape) == (
        AddressSpace.LOCAL, (12, 8), (2, 64, 12, 8),
    )
    assert np.isnan(held(op.reg_tile).astype(np.float32)).all()
    with pytest.raises(UnwrittenRead):
        np.asarray(op.reg_tile)
    op.reg_tile.store(np.arange(12).astype(bfloat16)[None, None, :, None, None])
    assert np.asarray(op.mma_tile_at(2, 1))[0, 0, :, 0].tolist() == [10, 11]
    assert np.asarray(op.mma_tile_at(4, 0))[0, 0, :, 0].tolist() == [4, 5]  # strip 4 stands in slot 4 % 3
    op.strip_tile(4).store(bfloat16.type(7))  # a view
    assert np.asarray(op.reg_tile)[1, 63, :, 7].tolist() == [0, 1, 2, 3, 7, 7, 7, 7, 8, 9, 10, 11]
    with pytest.raises(ValueError, match="kg is 2: must be one of the 2 k groups"):
        op.mma_tile_at(0, 2)


def test_loads_refuse_what_they_are_not_for() -> None:
    k = KVMmaOp(KVMmaOpParams("bf16", (16, 16, 32), 2, 1, 1, 128, 32, True))
    v = KVMmaOp(KVMmaOpParams("bf16", (16, 16, 32), 2, 1, 1, 128, 32, False))
    smem = Memory(1 << 16, space=AddressSpace.SHARED, programs=1, unsafe=True)
    tile, pointer = TileTensor(smem, "bf16", Layout.row_major(32, 32)), UnsafePointer(smem, 0, bfloat16)
    with pytest.raises(ValueError, match="load_prefill is for K"):
        v.load_prefill(0, tile)
    with pytest.raises(ValueError, match="load_prefill_split is for 1-byte K"):
        k.load_prefill_split(0, tile, tile)
    with pytest.raises(ValueError, match="load_v_bf16 is for 2-byte V"):
        k.load_v_bf16(0, pointer)
    with pytest.raises(ValueError, match="load_v_fp8_strip is for 1-byte V"):
        v.load_v_fp8_strip(0, pointer)
    with pytest.raises(TypeError, match=r"warp_smem .* must be a TileTensor in shared memory"):
        k.load_prefill(0, smem)
    with pytest.raises(ValueError, match=r"warp_smem .* must be 32 x 32 of bfloat16, row-major"):
        k.load_prefill(0, TileTensor(smem, "bf16", Layout.row_major(32, 64)))
    with pytest.raises(ValueError, match="warp_smem is in global memory: must be in shared memory"):
        k.load_prefill(0, TileTensor(Memory.over(np.zeros((32, 32), bfloat16)), "bf16", Layout.row_major(32, 32)))
    with pytest.raises(TypeError, match="smem_base is 0: must be an UnsafePointer"):
        v.load_v_bf16(0, 0)
    with pytest.raises(ValueError, match="out_type is float64: must be float32, bfloat16 or float16"):
        KVMmaOpParams("bf16", (16, 16, 32), 2, 1, 1, 128, 32, out_type="fp64")
    c = np.zeros((1, 256, 3, 4), np.float32)
    with pytest.raises(ValueError, match=r"c has 3 registers, must have num_m \* num_n = 1 \* 2"):
        mma_tiles(mfma_atom((16, 16, 32), "bf16"), held(k.reg_tile)[:, :, :1], held(k.reg_tile), c)
    with pytest.raises(ValueError, match="num_threads is 100"):
        KVMmaOp(k.params, num_threads=100)
    with pytest.raises(ValueError, match="num_mmas is 0: must be at least 1"):
        KVMmaOpParams("bf16", (16, 16, 32), 0, 1, 1, 128, 32, True)


@pytest.mark.parametrize(
    "dtype,mma_shape,BM",
    [
        ("bf16", (16, 16, 32), 16),
        ("bf16", (16, 16, 32), 32),
        ("fp32", (16, 16, 4), 16),
        ("fp8", (16, 16, 32), 32),
        ("bf16", (32, 32, 16), 32),
    ],
)
def test_p_goes_through_shared_memory_unchanged(dtype: str, mma_shape: tuple[int, int, int], BM: int) -> None:
    """Rounded once to the storage dtype; every warp reads all keys; the image is BN/BK blocks of BM x BK row-major."""
    p = warps_of(dtype, transpose=False, mma_shape=mma_shape)
    tile = np.random.default_rng(0).random((3, BM, 128), np.float32)
    traffic = Traffic()
    staged = PRegisterBuffer(p, BM, 3, traffic=traffic)
    staged.copy_to_shared(staged.score_map.spread(tile), np.array([True, False, True]))
    registers = np.asarray(staged.load_from_shared(np.array([True, False, True])))
    rounded = tile.astype(as_dtype(dtype))
    assert registers.tobytes() == staged.operand_map.spread(rounded).tobytes()
    blocks = np.ascontiguousarray(rounded.reshape(3, BM, 4, 32).transpose(0, 2, 1, 3))
    assert staged.smem.image().tobytes() == blocks.tobytes()
    groups = [staged.mma_tile(s, kg) for s in range(4) for kg in range(p.num_k_mmas2)]
    joined = np.concatenate(list(map(np.asarray, groups)), axis=2)
    assert joined.tobytes() == registers.tobytes()
    size = rounded.itemsize
    assert traffic.moved == {"registers->SMEM": 2 * BM * 128 * size, "SMEM->registers": 2 * 4 * BM * 128 * size}
    assert traffic.ideal["p write"] >= 2 * BM * 128 * size // 256
    with pytest.raises(ValueError, match=r"mma_tile\(4, 0\): P has 4 strips"):
        staged.mma_tile(4, 0)
    with pytest.raises(ValueError, match=rf"strips of {p.num_k_mmas2} k groups"):
        staged.mma_tile(0, p.num_k_mmas2)  # the next strip's, or past the last one


@pytest.mark.parametrize("mma_shape", [(16, 16, 32), (32, 32, 16)])
def test_maps_hold_every_element_once_a_warp_group(mma_shape: tuple[int, int, int]) -> None:
    """Accumulators are shared out between the warps, operands held by each; warps beyond those take other rows."""
    p = KVBufferParams("bf16", mma_shape, None, 64, 32, 32, 256, 64, 1, False)  # 4 warps, 2 along the keys
    for layout in (score_map(p, 64), output_map(p, 64)):
        assert (np.bincount(layout.flat.reshape(-1)) == 1).all()
    assert (np.bincount(operand_map(p, 64).flat.reshape(-1)) == 2).all()
    assert set(operand_map(p, 64).row[:128].reshape(-1)) == set(range(32))
    with pytest.raises(ValueError, match="BM is 16: must be a multiple of"):
        score_map(p, 16)


@pytest.mark.parametrize(
    "dtype,mma_shape,BK,swizzle",
    [
        ("bf16", (16, 16, 32), 32, (3, 0, 3)),  # moves single elements: reads of 2 bytes
        ("bf16", (32, 32, 16), 64, (2, 1, 7)),
        ("bf16", (16, 16, 32), 64, (3, 2, 8)),  # over rows of the warp's tile beyond those of a fragment
        ("fp8", (16, 16, 32), 32, (2, 3, 3)),  # fragments of 8 bytes, as of decode's K: one read
        ("fp8", (16, 16, 128), 128, (3, 2, 5)),
        ("fp8", (32, 32, 64), 64, (1, 0, 9)),
        ("fp32", (16, 16, 4), 16, (2, 0, 4)),
    ],
)
def test_an_element_space_swizzle_brings_the_matrix(dtype: str, mma_shape: Any, BK: int, swizzle: Any) -> None:
    """Law: what was stored at the swizzle of its offset in the warp's tile is in the register in which it is without a
    swizzle; two warps with tiles of their own."""
    (M, _, K), WN = mma_shape, 64
    unit = as_dtype(dtype)
    with_it = Swizzle(*swizzle, unit)
    plain = KVMmaOpParams(dtype, mma_shape, WN // M, BK // K, 2, 2 * WN, BK)
    rows = (np.arange(2 * WN * BK) * 7 % (1 << 8 * min(unit.itemsize, 2))).astype(f"u{unit.itemsize}").view(unit)
    place = np.arange(WN * BK)
    scattered = np.empty_like(rows).reshape(2, -1)
    scattered[:, with_it(place)] = rows.reshape(2, -1)
    registers = []
    for params, content in ((plain, rows), (replace(plain, swizzle=with_it), scattered)):
        op = KVMmaOp(params, num_threads=128)
        smem = Memory(rows.nbytes, space=AddressSpace.SHARED)
        smem.store(0, content.reshape(-1))
        tile = TileTensor(smem, dtype, Layout.row_major(WN, BK), WN * BK * np.arange(2)[None])
        if op.input_frag_size * unit.itemsize >= 16 or params.swizzle is not None:
            op.load_prefill(1, tile)
        registers.append(held(op.reg_tile)[0, :, op.params.rows_per_strip :])
    lane, kg, i, e = np.ogrid[:64, : BK // K, : WN // M, : plain.input_frag_size]
    halves = max(plain.input_frag_size // plain.simd_width, 1)
    part = plain.input_frag_size // halves
    column = kg * K + e // part * (K // halves) + lane // M * part + e % part + 0 * i
    wanted = rows.reshape(2, WN, BK)[:, i * M + lane % M + 0 * column, column]
    assert registers[1].tobytes() == np.ascontiguousarray(wanted).tobytes()
    if plain.input_frag_size * unit.itemsize >= 16:
        assert registers[0].tobytes() == registers[1].tobytes()


def test_transposing_reads_take_swizzles_of_their_pieces() -> None:
    """V of 2 bytes: a read takes 8 bytes of a row; a swizzle that splits them is refused, and nothing is loaded."""
    v = KVMmaOpParams("bf16", (16, 16, 32), 2, 1, 1, 32, 32, False)
    rows = (np.arange(32 * 32) % 251).astype(np.uint16).view(bfloat16)
    fours = Swizzle(2, 2, 5, bfloat16)
    images = {None: rows, fours: np.empty_like(rows)}
    images[fours][fours(np.arange(1024))] = rows
    registers = []
    for swizzle, image in images.items():
        smem = Memory(2048, space=AddressSpace.SHARED)
        smem.store(0, image)
        op = KVMmaOp(replace(v, swizzle=swizzle), num_threads=64)
        op.load_v_bf16(0, UnsafePointer(smem, 0, bfloat16))
        registers.append(np.array(op.strip_tile(0)))
    assert registers[0].tobytes() == registers[1].tobytes()
    op = KVMmaOp(replace(v, swizzle=Swizzle(2, 1, 5, bfloat16)), num_threads=64)
    with pytest.raises(ValueError, match=r"swizzle Sw<2,1,5> \(bfloat16\) moves pieces of 4 bytes: a transposing read"):
        op.load_v_bf16(0, UnsafePointer(smem, 0, bfloat16))
    assert not op.reg_tile.memory.written.any()


def test_a_swizzle_in_another_unit_is_the_same_swizzle() -> None:
    params = [
        KVMmaOpParams("bf16", (16, 16, 32), 2, 1, 1, 128, 32, True, s)
        for s in (Swizzle(3, 4, 3, "byte"), Swizzle(3, 3, 3, bfloat16), Swizzle(3, 0, 3, "vector"))
    ]
    assert params[0] == params[1] == params[2]
