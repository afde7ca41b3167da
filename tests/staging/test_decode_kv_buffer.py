"""DecodeKVBuffer. Rests on the gfx950 kernels compiled by MAX and followed lane by lane
(tests/data/kvbuffer_trace_decode.json.gz, kvbuffer_members.json), and on float64 products."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from registers import held, in_registers

from kvlab.cache import PagedKVCache, from_dense
from kvlab.layout import Layout, Swizzle
from kvlab.memory import AddressSpace, Memory, OutOfBounds, as_dtype
from kvlab.staging.max.decode_kv_buffer import DecodeKVBuffer, KBuffer, VBuffer
from kvlab.staging.max.decode_kv_params import DecodeKVBufferParams
from kvlab.staging.max.operand_maps import operand_map, output_map, score_map
from kvlab.staging.max.params import KVBufferParams
from kvlab.staging.max.tiled_mma_op import TiledTensorCore
from kvlab.staging.record.traffic import Traffic

SIZES = ("BN", "WN", "BK", "num_threads", "depth", "group_size", "num_stages")


def params_of(i: dict[str, Any], dtype: Any, swizzle: Swizzle | None) -> DecodeKVBufferParams:
    return staged(
        dtype, i["mma_shape"], swizzle, **{name: i[name] for name in SIZES}, kv_num_heads=i.get("kv_num_heads", 1),
        transpose=i["role"] == "K", token_gen=bool(i["token_gen"]),
    )


def staged(
    dtype: Any, shape: Any, swizzle: Any, *, BN: int, depth: int, kv_num_heads: int, transpose: bool,
    group_size: int = 1, **sizes: Any,
) -> DecodeKVBufferParams:
    """Parameters for the rows of a cache with so many heads of ``depth``."""
    core = TiledTensorCore("fp32", dtype, shape, group_size, transpose)
    layout = Layout((BN, depth), (kv_num_heads * depth, 1))
    return DecodeKVBufferParams(dtype, layout, core, swizzle, BN=BN, depth=depth, **sizes)


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
        ring = held(buffer.load_tile)[0]
        buffer.copy_to_shared(s % stages)
        image = buffer.smem.image(buffer.params.dtype)[0].copy()
        fragments = [held(buffer.load_from_shared(k))[0] for k in range(buffer.num_k_tiles)]
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
        smem = Memory(nbytes, space=AddressSpace.SHARED, programs=1, unsafe=True)
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


def test_which_goldens_are_in_matrix_order(decode_trace: dict[str, Any]) -> None:
    """``matrix_order`` is worked out from the addresses; here against the golden registers themselves."""
    i, expected = decode_trace["inputs"], decode_trace["expected"]
    params = params_of(i, i["dtype"], i["swizzle"])
    cache = PagedKVCache(np.zeros((1, 1, i["kv_num_heads"], i["depth"]), params.dtype), [0], [[0]], 1, 1)
    buffer = quietly(params, cache, 0, 0, end=1)
    if not buffer.matrix_order:
        with pytest.raises(ValueError, match="does not bring the matrix to the lanes"):
            buffer.fragment_map()
        whole = quietly(
            DecodeKVBufferParams(**{**vars(params), "swizzle": None, "token_gen": True}), cache, 0, 0, end=1
        )
        if not whole.matrix_order:
            assert params.transpose
            assert params.group_size == 2  # nothing repairs these
            return
        layout = whole.fragment_map()
    else:
        layout = buffer.fragment_map()
    rows, cols = (0, 1) if params.transpose else (1, 0)
    wanted = expected["regs_per_thread"]
    right = []
    for s in range(min(i["tiles"], buffer.num_tiles)):
        row, col = layout.row + rows * s * i["BK"], layout.col + cols * s * i["BK"]
        meant = np.where(row < i["end"], (row * i["kv_num_heads"] + i["kv_head"]) * i["depth"] + col, -1)
        right.append(np.array_equal(meant.reshape(i["num_threads"], -1), wanted[s].reshape(i["num_threads"], -1)))
    assert buffer.matrix_order == all(right)


LENGTHS = [130, 1, 77, 0]


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize(
    "shape,group_size,BK,depth,swizzle,token_gen",
    [
        ((16, 16, 32), 1, 32, 128, Swizzle(2, 0, 2, "vector"), False),
        ((16, 16, 32), 1, 32, 64, Swizzle(3, 0, 3, "vector"), True),
        ((16, 16, 32), 1, 64, 256, None, True),
        ((16, 16, 16), 2, 32, 128, None, True),
        ((16, 16, 16), 2, 64, 128, None, True),
    ],
)
def test_q_k_and_p_v_are_matrix_products(
    shape: Any, group_size: int, BK: int, depth: int, swizzle: Any, token_gen: bool, page_size: int
) -> None:
    """Against float64, two stages of registers, ragged sequences in shuffled pages; V always with token_gen. Products
    of storage values summed in float32."""
    rng = np.random.default_rng(depth)
    dense = rng.standard_normal((2, 1, len(LENGTHS), 130, 2, depth)).astype(as_dtype("bf16"))
    pool = from_dense(dense[0], dense[1], LENGTHS, page_size, shuffle=3, spare_pages=1)
    batch, head = np.divmod(np.arange(8), 2)
    ends = np.take(LENGTHS, batch)
    rows = np.arange(128) < ends[:, None]
    K, V = (np.where(rows[..., None], x[0][batch, :128, head].astype(np.float64), 0) for x in dense)
    common: dict[str, Any] = {"BN": 128, "WN": 32, "BK": BK, "num_threads": 256, "depth": depth, "kv_num_heads": 2}
    frag = KVBufferParams("bf16", (16, 16, 32), None, **common, transpose=True)
    if group_size == 1:
        p = staged("bf16", shape, swizzle, **common, transpose=True, num_stages=2, token_gen=token_gen)
        k = KBuffer(p, pool.get_key_cache(0), batch, head, end=ends)
        q = rng.standard_normal((8, 16, depth)).astype(p.dtype).astype(np.float64)
        got = product(k, q, operand_map(frag, 16), score_map(frag, 16))
        np.testing.assert_allclose(got, q @ K.mT, rtol=1e-5, atol=1e-6 * np.abs(q).sum(-1).max() * 4)
    p = staged("bf16", shape, None, **common, transpose=False, group_size=group_size, num_stages=2, token_gen=True)
    v = VBuffer(p, pool.get_value_cache(0), batch, head, end=ends)
    weights = rng.random((8, 16, 128)).astype(p.dtype).astype(np.float64)
    as_v = KVBufferParams("bf16", (16, 16, 32), None, **common, transpose=False)
    got = product(v, weights, operand_map(as_v, 16), output_map(as_v, 16))
    np.testing.assert_allclose(got, weights @ V, rtol=1e-5, atol=1e-4)


def product(buffer: DecodeKVBuffer, operand: Any, operand_layout: Any, c_layout: Any) -> Any:
    """Tiles through the ring as a pipeline: the next load is issued before the product."""
    registers = in_registers(operand_layout.spread(operand.astype(buffer.params.dtype)))
    c = in_registers(np.zeros((len(operand), *c_layout.row.shape), np.float32))
    buffer.load_from_dram()
    for tile in range(buffer.num_tiles):
        if tile + 1 < buffer.num_tiles:
            buffer.load_from_dram()
        buffer.copy_to_shared(tile % 2)
        fragments = []
        for k_mma in range(buffer.num_k_tiles):
            fragments.append(np.array(buffer.load_from_shared(k_mma)))
            kg = tile * buffer.num_k_tiles + k_mma
            buffer.mma(registers[kg : kg + 1, :], c, swap_a_b=True)
        strip = buffer.fragment_map().gather(np.concatenate(fragments, axis=2))
        assert strip.shape[1:] == buffer.params.btile
    return c_layout.gather(c)


@pytest.mark.parametrize(
    "change,says",
    [
        ({"BK": 64, "swizzle": Swizzle(3, 0, 3, "vector"), "token_gen": True}, "swizzle=None, or BK == MMA_K"),
        ({"shape": (16, 16, 16), "group_size": 2}, "K needs group_size 1"),
        ({"shape": (16, 16, 16)}, "1 fragments of 4 must be the 8 elements of 16 bytes"),
        ({"transpose": False}, "token_gen=True, or BK at least num_threads // 4 = 64"),
        ({"transpose": False, "token_gen": True, "swizzle": Swizzle(2, 0, 2, "vector")}, "V needs swizzle=None"),
    ],
)
def test_broken_configurations_warn(change: dict[str, Any], says: str) -> None:
    """Rests on MAX's compiled kernels: each of these was compiled and followed lane by lane."""
    with pytest.warns(UserWarning, match=says):
        assert not buffer_of(**change).matrix_order


def test_the_swizzle_that_two_k_groups_agree_on() -> None:
    """MAX's kernels: BK = 64 with (2,0,2) and the 4-wide grid happens to be right; with token_gen it is not."""
    change: dict[str, Any] = {"BK": 64, "swizzle": Swizzle(2, 0, 2, "vector")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert buffer_of(**change).matrix_order
    with pytest.warns(UserWarning, match="BK == MMA_K"):
        buffer_of(**change, token_gen=True)


def buffer_of(end: Any = 128, **change: Any) -> DecodeKVBuffer:
    good: dict[str, Any] = {
        "dtype": "bf16", "shape": (16, 16, 32), "swizzle": None, "BN": 128, "WN": 32, "BK": 32, "num_threads": 256,
        "depth": 128, "kv_num_heads": 1, "transpose": True,
    }
    p = staged(**{**good, **change})
    keys = np.ones((1, 128, 1, p.depth), p.dtype)
    return DecodeKVBuffer(p, PagedKVCache(keys, [0], [[0]], 1, 128), 0, 0, end=end)


def test_traffic_conserves_bytes() -> None:
    """What leaves DRAM passes every edge once; a warp reads its share."""
    traffic, k = Traffic(), buffer_of(end=100, swizzle=Swizzle(3, 0, 3, "vector"))
    k.traffic = traffic
    k.load_from_dram()
    k.copy_to_shared()
    k.load_from_shared(0)
    tile = 128 * 32 * 2
    assert traffic.moved == {"DRAM->registers": 100 * 64, "registers->SMEM": tile, "SMEM->registers": tile}
    assert traffic.per_warp("moved", "DRAM->registers").tolist() == [32 * 64, 32 * 64, 16 * 64 + 4 * 64, 16 * 64]
    assert traffic.instructions == {"k load": 8, "k write": 8, "k read": 8}
    assert traffic.ideal == {"k write": tile // 256, "k read": tile // 256}
    assert traffic.wavefronts["k read"] < traffic.unswizzled["k read"]


def test_bad_calls_are_refused() -> None:
    k = buffer_of()
    with pytest.raises(ValueError, match="stage is 1: must be one of the 1 stages of the register ring"):
        k.copy_to_shared(1)
    with pytest.raises(ValueError, match="k_mma_idx is 1: must be one of the 1 k groups"):
        k.load_from_shared(1)
    with pytest.raises(ValueError, match="end None"):
        buffer_of(end=None)
    with pytest.raises(ValueError, match="KBuffer: tensor_core_mma with transpose_b False is V"):
        KBuffer(buffer_of(transpose=False, token_gen=True).params, None, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="VBuffer: tensor_core_mma with transpose_b True is K"):
        VBuffer(k.params, None, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_threads is 192: must be a multiple of 256"):
        buffer_of(num_threads=192)
    with pytest.raises(ValueError, match="one with fragments of 16 bytes at most"):
        buffer_of(shape=(32, 32, 32))
    with pytest.raises(ValueError, match="enough to move the 128 x 64 tile with 2 vectors each, not 4"):
        buffer_of(BK=64, group_size=2)


def test_a_broken_read_past_the_tile_is_an_error() -> None:
    params = buffer_of().params
    params = DecodeKVBufferParams(
        **{**vars(params), "BK": 64, "swizzle": Swizzle(3, 0, 3, "vector"), "token_gen": True}
    )
    cache = PagedKVCache(np.ones((1, 128, 1, 128), params.dtype), [0], [[0]], 1, 128)
    broken = quietly(params, cache, 0, 0, end=128)
    broken.load_from_dram()
    broken.copy_to_shared()
    with pytest.raises(OutOfBounds, match="shared memory: access of 16 bytes"):
        broken.load_from_shared(1)
