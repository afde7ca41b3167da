"""TiledMmaOp and TiledTensorCore. Rest on the fragment maps of the instructions and on numbered matrices; products are
those of KVMmaOp and DecodeKVBuffer, whose tests multiply."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.layout import Layout, Swizzle, TileTensor
from kvlab.memory import AddressSpace, Memory, as_dtype, bfloat16
from kvlab.staging import KVMmaOp, KVMmaOpParams, TiledMmaOp, TiledTensorCore, mfma_atom

SHAPES = [("bf16", (16, 16, 32)), ("bf16", (32, 32, 16)), ("fp16", (16, 16, 16)), ("fp8", (16, 16, 32)),
          ("fp32", (16, 16, 4))]
LOCAL, SHARED = AddressSpace.LOCAL, AddressSpace.SHARED


def numbered(rows: int, columns: int, dtype: Any) -> np.ndarray[Any, Any]:
    """A matrix of bits that tell an element from its neighbours."""
    size = as_dtype(dtype).itemsize
    return (np.arange(rows * columns) * 7 % (1 << 8 * min(size, 2))).astype(f"u{size}").view(as_dtype(dtype)).reshape(
        rows, columns
    )


def warp_tiles(matrix: np.ndarray[Any, Any], first: Any, rows: int, columns: int) -> TileTensor:
    """A tile of ``rows x columns`` for each warp, at elements ``first`` of shared memory that holds ``matrix``."""
    smem = Memory(matrix.nbytes, space=SHARED, programs=1)
    smem.store(np.array([0]), matrix.reshape(1, -1))
    return TileTensor(smem, matrix.dtype, Layout((rows, columns), (matrix.shape[1], 1)), np.array([first]))


def registers(op: TiledMmaOp, fragments: int, threads: int) -> TileTensor:
    layout = Layout.row_major(fragments, op.b_frag_size)
    return TileTensor.stack_allocation(layout, op.in_type, LOCAL, 1, threads=threads)


@pytest.mark.parametrize("dtype,shape", SHAPES)
def test_load_b_brings_k(dtype: str, shape: tuple[int, int, int]) -> None:
    """Fragment i of warp w: the map of the instruction's first operand, rows w * 2 N + i N on, columns of group 1."""
    op = TiledMmaOp("fp32", dtype, shape, transpose_b=True)
    _, N, K = shape
    keys = numbered(4 * N, 3 * K, dtype)
    reg_tile = registers(op, 2, 128)
    op.load_b(warp_tiles(keys, [0, 2 * N * 3 * K], 2 * N, 3 * K), reg_tile, k_group_idx=1)
    atom = mfma_atom(shape, dtype)
    wanted = atom.fragment_a(keys.reshape(2, 2, N, 3 * K)[..., K : 2 * K])  # [warps, fragments, lanes, elements]
    got = np.asarray(reg_tile.load())[0, ..., 0].reshape(2, 64, 2, -1)
    assert got.tobytes() == np.ascontiguousarray(np.swapaxes(wanted, 1, 2)).tobytes()


@pytest.mark.parametrize("dtype,shape", SHAPES)
def test_load_b_gathers_v_along_the_keys(dtype: str, shape: tuple[int, int, int]) -> None:
    op = TiledMmaOp("fp32", dtype, shape)
    _, N, K = shape
    values = numbered(2 * K, 4 * N, dtype)
    reg_tile = registers(op, 2, 128)
    op.load_b(warp_tiles(values, [0, 2 * N], 2 * K, 2 * N), reg_tile, k_group_idx=1)
    columns = values[K:].reshape(K, 2, 2, N).transpose(1, 2, 3, 0)
    wanted = mfma_atom(shape, dtype).fragment_a(columns)
    got = reg_tile.load()[0, ..., 0].reshape(2, 64, 2, -1)
    assert got.tobytes() == np.ascontiguousarray(np.swapaxes(wanted, 1, 2)).tobytes()


@pytest.mark.parametrize("swizzle", [None, Swizzle(3, 0, 3, "vector")])
def test_load_b_is_the_prefill_load_of_a_k_group(swizzle: Swizzle | None) -> None:
    """Fragments of 16 bytes, a strip of one k group: what KVMmaOp loads."""
    keys = numbered(32, 32, "bf16")
    params = KVMmaOpParams("bf16", (16, 16, 32), 2, 1, 1, 32, 32, swizzle=swizzle)
    op, tile = KVMmaOp(params, num_threads=64), warp_tiles(keys, [0], 32, 32)
    op.load_prefill(0, tile)
    reg_tile = registers(params.tiled_mma_op, 2, 64)
    params.tiled_mma_op.load_b(tile, reg_tile, swizzle=swizzle)
    assert reg_tile.load()[..., 0].tobytes() == np.asarray(op.strip_tile(0)).tobytes()


def test_load_b_refuses_and_loads_nothing() -> None:
    op = TiledMmaOp("fp32", "bf16", (16, 16, 32), transpose_b=True)
    keys = numbered(32, 32, "bf16")
    tile, reg_tile = warp_tiles(keys, [0], 32, 32), registers(op, 2, 64)
    plain = TileTensor(Memory(2048), bfloat16, Layout.row_major(32, 32))
    half = TileTensor(tile.memory, "fp16", Layout.row_major(32, 32), np.array([[0]]))
    narrow = TileTensor.stack_allocation(Layout.row_major(2, 4), bfloat16, LOCAL, 1, threads=64)
    down = TileTensor(tile.memory, bfloat16, Layout((32, 32), (1, 32)), np.array([[0]]))
    for kind, what, message in (
        (TypeError, (3, reg_tile), "warp_tile .* must be a TileTensor"),
        (TypeError, (tile, 3), "reg_tile .* must be a TileTensor"),
        (ValueError, (plain, reg_tile), "warp_tile .* must be of bfloat16 in shared memory"),
        (ValueError, (half, reg_tile), "warp_tile .* must be of bfloat16 in shared memory"),
        (ValueError, (tile, tile), "reg_tile .* must be of bfloat16 in local memory"),
        (ValueError, (tile, narrow), "reg_tile .* must be fragments of 8"),
        (ValueError, (down, reg_tile), "columns of warp_tile .* side by side"),
    ):
        with pytest.raises(kind, match=message):
            op.load_b(*what)
    with pytest.raises(ValueError, match=r"swizzle .* must be None: B is read column by column"):
        TiledMmaOp("fp32", "bf16", (16, 16, 32)).load_b(tile, reg_tile, swizzle=Swizzle(3, 0, 3, "vector"))
    assert reg_tile.memory.written is not None
    assert not reg_tile.memory.written.any()
    op.load_b(tile, reg_tile)
    assert reg_tile.load().shape == (1, 64, 2, 8, 1)


def local(rows: int, columns: int, dtype: Any, threads: int = 64, space: AddressSpace = LOCAL) -> TileTensor:
    """Ones in registers."""
    ones = np.ones((1, threads, rows, columns), as_dtype(dtype))
    return TileTensor.from_numpy(ones, space=space, batch=2)


@pytest.mark.parametrize("kind", [TiledMmaOp, TiledTensorCore])
def test_mma_refuses_and_adds_nothing(kind: Any) -> None:
    op = kind("fp32", "bf16", (16, 16, 32), **({"group_size": 1} if kind is TiledTensorCore else {}))
    c = np.full((1, 64, 6, 4), 7, np.float32)
    good = {"a": local(2, 8, "bf16"), "b": local(3, 8, "bf16"),
            "c": TileTensor.from_numpy(c, space=LOCAL, batch=2)}
    for name, bad, error in (
        ("a", 3, TypeError), ("b", None, TypeError), ("c", c, TypeError),
        ("a", local(2, 8, "fp16"), ValueError), ("b", local(3, 8, "fp16"), ValueError),
        ("c", local(6, 4, "int32"), ValueError), ("c", local(6, 4, "bf16"), ValueError),
        ("a", local(2, 8, "bf16", space=SHARED), ValueError), ("c", local(6, 4, "fp32", space=SHARED), ValueError),
        ("a", local(2, 4, "bf16"), ValueError), ("c", local(5, 4, "fp32"), ValueError),
        ("b", local(3, 8, "bf16", threads=128), ValueError), ("c", local(6, 4, "fp32", threads=128), ValueError),
    ):
        with pytest.raises(error, match=f"(?s)^{name} "):
            op.mma(**{**good, name: bad})
    assert (c == 7).all()
    op.mma(**good)
    assert (c == 7 + 32).all()


def test_what_adds_up_in_nothing_is_refused() -> None:
    for kind in (TiledMmaOp, TiledTensorCore):
        more = {"group_size": 1} if kind is TiledTensorCore else {}
        with pytest.raises(ValueError, match="out_type is int8: must be float32, bfloat16 or float16"):
            kind("int8", "bf16", (16, 16, 32), **more)
