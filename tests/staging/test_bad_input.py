"""What buffers, iterators and operators refuse. Rests on the rule that an error names the caller's argument and that
nothing is loaded then: shared memory and registers that nobody has written stay so, what they held stays too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.cache import KVCacheMHAOperand, PagedKVCache, UnsafePointer
from kvlab.layout import Layout, TileTensor
from kvlab.memory import AddressSpace, Memory, bfloat16
from kvlab.staging import (
    DecodeKVBuffer,
    DecodeKVBufferParams,
    DecodeStreamingKVBuffer,
    KBuffer,
    KVBuffer,
    KVBufferParams,
    KVCacheIterator,
    KVMmaOp,
    KVMmaOpParams,
    TiledTensorCore,
    VBuffer,
)

SHARED, LOCAL = AddressSpace.SHARED, AddressSpace.LOCAL
KEYS = (np.arange(128 * 64) % 251).reshape(1, 128, 1, 64).astype(bfloat16)
K = KVBufferParams("bf16", (16, 16, 32), None, 128, 32, 32, 256, 64, 1, transpose=True)


def cache() -> PagedKVCache:
    return PagedKVCache(KEYS, [100], [[0]], 1, 128)


def staged(operand: Any) -> DecodeKVBuffer:
    core = TiledTensorCore("fp32", "bf16", (16, 16, 32), 1, transpose_b=True)
    layout = Layout.row_major(128, 64)
    return DecodeKVBuffer(DecodeKVBufferParams("bf16", layout, core, None, 128, 32, 32, 64, 256), operand, 0, 0, end=99)


TAKERS: dict[str, Any] = {
    "KVBuffer": lambda operand: KVBuffer(K, operand, 0, 0, end=99),
    "DecodeStreamingKVBuffer": lambda operand: DecodeStreamingKVBuffer(K, operand, 0, 0, num_keys=99),
    "DecodeKVBuffer": staged,
    "KVCacheIterator": lambda operand: KVCacheIterator(operand, 128, 0, 0, 99),
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("member", ["block_paged_ptr", "dtype", "kv_params", "page_size", "token_stride"])
def test_an_operand_without_a_member(taker: str, member: str) -> None:
    """An operand like a cache's, without one of the members that are asked of it."""
    whole = KVCacheMHAOperand(cache())
    members = ("block_paged_ptr", "dtype", "kv_params", "page_size", "token_stride")
    operand = type("Latents", (), {name: getattr(whole, name) for name in members if name != member})()
    with pytest.raises(TypeError, match=f"Latents is no KV cache and no MHAOperand: it has no {member}$"):
        TAKERS[taker](operand)
    TAKERS[taker](type("Latents", (), {name: getattr(whole, name) for name in members})())


@pytest.mark.parametrize("taker", TAKERS)
def test_what_is_no_operand(taker: str) -> None:
    for operand in (None, KEYS, "keys", 3):
        with pytest.raises(TypeError, match="is no KV cache and no MHAOperand: it has no block_paged_ptr"):
            TAKERS[taker](operand)


# Tiles.

BAD = {
    "no tile": (TypeError, 3, "TileTensor"),
    "array": (TypeError, KEYS[0, :, 0], "TileTensor"),
    "float16": (ValueError, "fp16", "bfloat16"),
    "float32": (ValueError, "fp32", "bfloat16"),
    "space": (ValueError, "space", "memory|shared"),
}


def tile(kind: str, rows: int, columns: int, space: AddressSpace, other: AddressSpace) -> Any:
    """A tile of ``rows x columns`` with the fault, in memory that has been written."""
    what = BAD[kind][1]
    if kind in ("no tile", "array"):
        return what
    dtype = what if kind.startswith("float") else "bf16"
    memory = Memory(rows * columns * 4, space=other if kind == "space" else space)
    memory.store(0, np.zeros(rows * columns * 4, np.uint8))
    return TileTensor(memory, dtype, Layout.row_major(rows, columns))


@pytest.mark.parametrize("kind", BAD)
def test_a_strip_of_what_is_no_tile_in_dram(kind: str) -> None:
    k = DecodeStreamingKVBuffer(K, cache(), 0, 0, num_keys=99)
    error, _, words = BAD[kind]
    with pytest.raises(error, match=f"(?s)^gmem_tile .*({words})"):
        k.load_from_dram(strip_idx=0, gmem_tile=tile(kind, 128, 64, AddressSpace.GLOBAL, LOCAL))
    assert k.smem.written is not None
    assert not k.smem.written.any()


LOADS: dict[str, tuple[KVMmaOpParams, Any]] = {
    "warp_smem": (KVMmaOpParams("bf16", (16, 16, 32), 2, 1, 1, 32, 32),
                  lambda op, bad, good: op.load_prefill(0, warp_smem=bad)),
    "warp_smem_lo": (KVMmaOpParams("fp8", (16, 16, 128), 2, 1, 1, 32, 128, bk_smem=64),
                     lambda op, bad, good: op.load_prefill_split(0, warp_smem_lo=bad, warp_smem_hi=good)),
    "warp_smem_hi": (KVMmaOpParams("fp8", (16, 16, 128), 2, 1, 1, 32, 128, bk_smem=64),
                     lambda op, bad, good: op.load_prefill_split(0, warp_smem_lo=good, warp_smem_hi=bad)),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", LOADS)
def test_loads_of_what_is_no_tile_in_shared_memory(name: str, kind: str) -> None:
    params, load = LOADS[name]
    op, columns = KVMmaOp(params, num_threads=64), params.bk_smem
    bad = tile(kind, 32, columns, SHARED, AddressSpace.GLOBAL)
    smem = Memory(32 * columns * params.in_type.itemsize, space=SHARED)
    smem.store(0, np.ones(smem.nbytes, np.uint8))
    good = TileTensor(smem, params.in_type, Layout.row_major(32, columns))
    before = registers(op)
    error, _, words = BAD[kind]
    words = words.replace("bfloat16", params.in_type.name)
    with pytest.raises(error, match=f"(?s)^{name} .*({words})"):
        load(op, bad, good)
    assert registers(op) == before
    load(op, good, good)
    assert registers(op) != before


def registers(op: KVMmaOp) -> tuple[bytes, Any]:
    """What registers hold, and which of them have been written."""
    memory = op.reg_tile.memory
    return memory.bytes.tobytes(), None if memory.written is None else memory.written.tobytes()


@pytest.mark.parametrize(
    "bad,error,words",
    [
        (0, TypeError, "must be an UnsafePointer"),
        ("fp16", ValueError, "must point to bfloat16"),
        ("fp32", ValueError, "must point to bfloat16"),
        ("space", ValueError, "shared memory"),
    ],
)
def test_pointers_to_what_is_no_shared_memory(bad: Any, error: type[Exception], words: str) -> None:
    """``smem_base`` of V's loads, ``smem_ptr`` of the streaming buffer."""
    op = KVMmaOp(KVMmaOpParams("bf16", (16, 16, 32), 2, 1, 1, 32, 32, transpose_b=False), num_threads=64)
    memory = Memory(1 << 15, space=AddressSpace.GLOBAL if bad == "space" else SHARED)
    dtype = bad if isinstance(bad, str) and bad != "space" else "bf16"
    pointer = bad if bad == 0 else UnsafePointer(memory, 0, dtype)
    before = registers(op)
    with pytest.raises(error, match=f"^smem_base .*{words}"):
        op.load_v_bf16(bk_tile=0, smem_base=pointer)
    assert registers(op) == before
    with pytest.raises(error, match=f"^smem_ptr .*{words}"):
        DecodeStreamingKVBuffer(K, cache(), 0, 0, smem_ptr=pointer, num_keys=99)


# Numbers, parameters and room. None of the calls loads anything, nor moves the walk on.


@pytest.mark.parametrize("number", [2, -1, 0.0, "0", None, True])
def test_numbers_that_are_none(number: Any) -> None:
    """Of stages and strips: refused by the argument's name before the walk moves on."""
    k = KVBuffer(K, cache(), 0, 0, end=99)
    with pytest.raises(ValueError, match=f"^buffer_idx is {number!r}: must be one of the 2 stages$"):
        k.load_from_dram(buffer_idx=number)
    assert k.kv_cache_iter.tile_start_row == 0
    assert not k.stage_keys
    k.load_from_dram(np.int64(0))  # NumPy's integers are taken
    assert k.kv_cache_iter.tile_start_row == 128
    with pytest.raises(ValueError, match=f"^buffer is {number!r}: must be one of the 2 stages$"):
        k.load_from_shared(buffer=number)
    if number is not None:  # all strips
        with pytest.raises(ValueError, match=f"^bk_tile is {number!r}: must be one of the 2 strips in a stage$"):
            k.load_from_shared(0, bk_tile=number)
    with pytest.raises(ValueError, match=f"^kg is {number!r}: must be one of the 1 k groups of a strip$"):
        k.get_mma_tile(k_mma_tile_idx=number, bk_tile_idx=0)
    with pytest.raises(ValueError, match=f"^bk_tile_idx is {number!r}: must be one of the 2 strips of the tile$"):
        k.get_mma_tile(k_mma_tile_idx=0, bk_tile_idx=number)
    if number != 2:  # a strip past the registers stands in the slot of one before
        with pytest.raises(ValueError, match=r"^bk_tile "):
            k.strip_tile(number)
    s = DecodeStreamingKVBuffer(K, cache(), 0, 0, num_keys=99)
    with pytest.raises(ValueError, match=f"^strip_idx is {number!r}: must be one of the 2 strips of the tile$"):
        s.load_from_dram(strip_idx=number, gmem_tile=s.iterator().next_tile())
    d = staged(cache())
    with pytest.raises(ValueError, match=f"^stage is {number!r}: must be one of the 1 stages of the register ring$"):
        d.copy_to_shared(stage=number)
    with pytest.raises(ValueError, match=f"^k_mma_idx is {number!r}: must be one of the 1 k groups of a strip$"):
        d.load_from_shared(k_mma_idx=number)


def test_parameters_of_another_structure() -> None:
    d = staged(cache()).params
    for make, bad, kind in (
        (lambda p: KVBuffer(p, cache(), 0, 0, end=99), d, "KVBufferParams"),
        (lambda p: DecodeStreamingKVBuffer(p, cache(), 0, 0, num_keys=99), d, "KVBufferParams"),
        (lambda p: DecodeKVBuffer(p, cache(), 0, 0, end=99), K, "DecodeKVBufferParams"),
        (lambda p: KBuffer(p, cache(), 0, 0, end=99), K, "DecodeKVBufferParams"),
        (lambda p: VBuffer(p, cache(), 0, 0, end=99), K, "DecodeKVBufferParams"),
        (KVMmaOp, K, "KVMmaOpParams"),
    ):
        for params in (bad, None, 3):
            with pytest.raises(TypeError, match=rf"^params .* must be a {kind}$"):
                make(params)


def test_shared_memory_without_room() -> None:
    """One stage is not both; nothing of the first is loaded."""
    stage = K.smem_stage_size * 2
    for nbytes, address in ((stage, 0), (2 * stage, 16)):
        memory = Memory(nbytes, space=SHARED)
        with pytest.raises(ValueError, match=rf"^smem_tile at {address}: all stages of {2 * stage} bytes .* not fit"):
            KVBuffer(K, cache(), 0, 0, K.smem_tile(memory, address), end=99)
    strip = UnsafePointer(Memory(128 * 32 * 2, space=SHARED), 8, bfloat16)
    with pytest.raises(ValueError, match=r"^smem_ptr at 16: a strip of 8192 bytes .* does not fit"):
        DecodeStreamingKVBuffer(K, cache(), 0, 0, strip, 99)
    with pytest.raises(TypeError, match=r"^smem is TileTensor\(.* must be a Memory in shared memory$"):
        DecodeKVBuffer(staged(cache()).params, cache(), 0, 0, TileTensor(strip.memory, "bf16", K.mma_layout), 99)


def test_programs_that_do_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"^batch_idx \(2,\), kv_head_idx \(1,\), end \(3,\) do not broadcast"):
        KVCacheIterator(cache(), 128, [0, 0], 0, [1, 2, 3])


def test_which_operand_of_the_instruction_comes_first() -> None:
    op = KVMmaOp(KVMmaOpParams("bf16", (16, 16, 32), 2, 1, 1, BN=32, BK=32), num_threads=64)
    a, b, c = (
        TileTensor.stack_allocation(Layout.row_major(*shape), dtype, LOCAL, 1, threads=64).fill(0)
        for shape, dtype in (((1, 8), "bf16"), ((2, 8), "bf16"), ((2, 4), "fp32"))
    )
    op.reg_tile.store(b.load())
    with pytest.raises(ValueError, match=r"^swap_a_b is 'no': must be True or False$"):
        op.mma(a=a, c=c, bk_tile=0, kg=0, swap_a_b="no")  # type: ignore[arg-type]
    assert not np.asarray(c).any()


def test_the_walk_of_a_bounded_strip_buffer() -> None:
    """Of a head with fewer columns than the depth: tiles of its own columns. Rests on the stored keys."""
    narrow = PagedKVCache(KEYS[..., :48].copy(), [99], [[0]], 1, 128)
    s = DecodeStreamingKVBuffer(K, narrow, 0, 0, num_keys=99, bounded=True)
    s.load_from_dram(1, s.iterator().next_tile())
    strip = s.fragment_map().gather(s.load_from_shared())[0]
    assert (strip[:99, :16] == KEYS[0, :99, 0, 32:48]).all()
    assert not strip[:99, 16:].any()
    assert not strip[99:].any()


@pytest.mark.parametrize("more, words", [
    ({"batch_idx": 0.5}, "batch_idx is 0.5: must be an integer"), ({"num_keys": "x"}, "num_keys is 'x': must"),
    ({"head_idx": [[0]]}, "head_idx"), ({"batch_idx": [0, 0], "num_keys": [1, 2, 3]}, "batch_idx"),
])
def test_a_strip_buffer_of_no_sequence(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DecodeStreamingKVBuffer(K, cache(), **{"batch_idx": 0, "head_idx": 0, "num_keys": 100} | more)


def test_a_strip_buffer_of_another_size() -> None:
    wide = PagedKVCache(KEYS.astype(np.float32), [100], [[0]], 1, 128)
    with pytest.raises(ValueError, match="dtype bfloat16 has another size than the cache's float32"):
        DecodeStreamingKVBuffer(K, wide, 0, 0)
