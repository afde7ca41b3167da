"""Matrix descriptors and the products through them. Rests on the addresses that an H100's wgmma took its operands from
(tests/data/hardware/h100_wgmma_descriptors.json.gz), on the PTX ISA's bit fields, on the canonical layouts (whose
values are the compiler's, test_canonical.py), and on exact products A @ B."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.hardware import (
    ATOMS,
    SmemDescriptor,
    TensorMapSwizzle,
    TensorMemory,
    create_tensor_tile,
    get_atom,
    round_tf32,
    shared_mma,
    tile_layout_k_major,
    tile_layout_mn_major,
    tile_to_descriptor,
    tmem_address,
    tmem_layout,
)
from kvlab.memory import Memory

MODES = pytest.mark.parametrize("mode", list(TensorMapSwizzle), ids=lambda mode: mode.label)


@given(
    fields=st.tuples(*[st.integers(0, (1 << 14) - 1)] * 3),
    mode=st.sampled_from(list(TensorMapSwizzle)),
    base_offset=st.integers(0, 7),
    arch=st.sampled_from(["sm_90", "sm_100"]),
)
def test_encode_and_decode_are_inverse(
    fields: tuple[int, int, int], mode: TensorMapSwizzle, base_offset: int, arch: str
) -> None:
    start, leading, stride = (16 * field for field in fields)
    descriptor = SmemDescriptor(start, leading, stride, mode, base_offset, arch)
    word = descriptor.encode()
    assert SmemDescriptor.decode(word, arch) == descriptor
    # The PTX ISA's fields: 13-0 start, 29-16 LBO, 45-32 SBO (in 16 bytes), 51-49 base offset.
    assert (word & 0x3FFF, word >> 16 & 0x3FFF, word >> 32 & 0x3FFF) == fields
    assert word >> 49 & 7 == base_offset
    # wgmma: 63-62 mode (1 = 128B, 2 = 64B, 3 = 32B). tcgen05: 63-61 mode (2, 4, 6), 48-46 the constant 1.
    if arch == "sm_90":
        assert (word >> 62, word >> 46 & 7) == ((4 - mode) % 4, 0)
    else:
        assert (word >> 61, word >> 46 & 7) == (2 * ((4 - mode) % 4), 1)


def test_an_h100_finds_the_operands_there() -> None:
    """A and B, K- and MN-major, all swizzles, starts inside a pattern, every base offset; LBO where it is ignored."""
    file = Path(__file__).parents[1] / "data" / "hardware" / "h100_wgmma_descriptors.json.gz"
    record = json.loads(gzip.decompress(file.read_bytes()))
    wrong = []
    for case in record["cases"]:
        _, major, start, leading, stride, swizzle, base_offset = case["descriptor"]
        table = SmemDescriptor(start, leading, stride, swizzle, base_offset).addresses(64, 16, "fp16", major)
        assert "table" not in case or case["table"] == table.ravel().tolist()
        if hashlib.sha256(table.astype("<i4").tobytes()).hexdigest()[:16] != case["sha256"]:
            wrong.append(case["descriptor"])
    assert len(record["cases"]) == 1810
    assert not wrong


@MODES
@pytest.mark.parametrize("dtype", ["fp8", "bf16", "float32"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_k_major_operands_are_found_where_the_layout_puts_them(
    mode: TensorMapSwizzle, dtype: str, arch: str
) -> None:
    """Law: addresses = XOR(start + size * layout), for every K step of 32 bytes."""
    layout = tile_layout_k_major(dtype, 64, 256, mode)
    size = {"fp8": 1, "bf16": 2, "float32": 4}[dtype]
    descriptor = tile_to_descriptor(layout, dtype, mode, 2048, arch=arch)
    K = 32 // size
    for k in range(0, 256, K):
        found = descriptor.advance(layout(0, k) * size).addresses(64, K, dtype)
        expected = mode.swizzle()(2048 + size * layout.offsets()[:, k : k + K])
        np.testing.assert_array_equal(found, expected)


@MODES
@pytest.mark.parametrize(("dtype", "arch"), [("bf16", "sm_90"), ("bf16", "sm_100"), ("fp8", "sm_100")])
def test_mn_major_operands_are_found_where_the_layout_puts_them(
    mode: TensorMapSwizzle, dtype: str, arch: str
) -> None:
    layout = tile_layout_mn_major(dtype, 128, 64, mode)
    size = {"fp8": 1, "bf16": 2}[dtype]
    descriptor = tile_to_descriptor(layout, dtype, mode, 1024, "MN", arch)
    K = 32 // size
    for k in range(0, 64, K):
        found = descriptor.advance(layout(0, k) * size).addresses(128, K, dtype, "MN")
        expected = mode.swizzle()(1024 + size * layout.offsets()[:, k : k + K])
        np.testing.assert_array_equal(found, expected)


@given(
    row=st.integers(0, 40),
    mode=st.sampled_from(list(TensorMapSwizzle)),
    dtype=st.sampled_from(["fp8", "bf16", "float32"]),
    step=st.integers(0, 3),
)
def test_a_tile_moves_with_its_own_pattern(row: int, mode: TensorMapSwizzle, dtype: str, step: int) -> None:
    """Law of the base offset (PTX ISA: ``(pattern start >> 7) & 7``): a tile that was permuted relative to its own
    first byte is found wherever that lies, at the places of the tile at 0, moved."""
    size = {"fp8": 1, "bf16": 2, "float32": 4}[dtype]
    layout = tile_layout_k_major(dtype, 64, 256, mode)
    along = layout(0, step * 32 // size) * size
    at_zero = tile_to_descriptor(layout, dtype, mode).advance(along)
    moved = tile_to_descriptor(layout, dtype, mode, 128 * row, pattern_start=128 * row).advance(along)
    assert moved.base_offset == (row % 8 if row % (1 << mode.value) else 0)
    expected = 128 * row + at_zero.addresses(64, 32 // size, dtype)
    np.testing.assert_array_equal(moved.addresses(64, 32 // size, dtype), expected)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    low = 0 if dtype.kind == "u" else -8
    return rng.integers(low, 9, shape).astype(dtype)


ONE_WIDTH = [atom.name for atom in ATOMS.values() if atom.b is None and atom.shape[1] in (24, 48, 128)]


@pytest.mark.parametrize("name", ONE_WIDTH)
def test_products_of_k_major_tiles(name: str) -> None:
    """TMA images -> descriptors -> product of K = 128 bytes in four steps, exact; A also from registers (wgmma)."""
    atom = get_atom(name)
    m, n, k = atom.shape
    rng = np.random.default_rng(70)
    a, b = numbers(rng, (m, 4 * k), atom.dtype), numbers(rng, (n, 4 * k), atom.dtype_of("b"))
    for mode in (TensorMapSwizzle.SWIZZLE_NONE, TensorMapSwizzle.SWIZZLE_128B):
        memory = Memory(65536)
        create_tensor_tile(a, a.shape, mode).async_copy(memory, 0, (0, 0))
        create_tensor_tile(b, b.shape, mode).async_copy(memory, 32768, (0, 0))
        layout_a, layout_b = (tile_layout_k_major(x.dtype, *x.shape, mode) for x in (a, b))
        first_a = tile_to_descriptor(layout_a, a.dtype, mode, 0, arch=atom.arch)
        first_b = tile_to_descriptor(layout_b, b.dtype, mode, 32768, arch=atom.arch)
        results = [np.zeros((128, atom.regs_c), atom.dtype_c) for _ in range(2)]
        for step in range(0, 4 * k, k):
            at_a = first_a.advance(layout_a(0, step) * a.itemsize)
            at_b = first_b.advance(layout_b(0, step) * b.itemsize)
            results[0] = shared_mma(atom, memory, at_a, at_b.encode(), results[0])
            if atom.a is not None:
                fragment = atom.fragment_a(a[:, step : step + k])
                results[1] = shared_mma(atom, memory, fragment, at_b, results[1])
        expected = a.astype(np.float64) @ b.astype(np.float64).T
        for result in results[: 1 + (atom.a is not None)]:
            np.testing.assert_array_equal(atom.tile_c(result), expected)


@MODES
@pytest.mark.parametrize("name", ["wgmma.m64n64k16.bf16", "tcgen05.m128n64k16.bf16", "tcgen05.m128n128k32.e4m3"])
def test_products_of_mn_major_tiles(mode: TensorMapSwizzle, name: str) -> None:
    """A^T [K, M] and B [K, N] as they lie: the images of their K-major tiles, read MN-major; two programs."""
    atom = get_atom(name)
    m, n, k = atom.shape
    rng = np.random.default_rng(71)
    at, b = numbers(rng, (2 * k, m), atom.dtype), numbers(rng, (2 * k, n), atom.dtype)
    memory = Memory(65536, programs=2)
    create_tensor_tile(at, at.shape, mode).async_copy(memory, 0, (0, 0))
    create_tensor_tile(b, b.shape, mode).async_copy(memory, 32768, (0, 0))
    layouts = [tile_layout_mn_major(atom.dtype, extent, 2 * k, mode) for extent in (m, n)]
    first = [
        tile_to_descriptor(layout, atom.dtype, mode, start, "MN", atom.arch)
        for layout, start in zip(layouts, (0, 32768), strict=True)
    ]
    c = np.zeros((2, 128, atom.regs_c), np.float32)
    for step in (0, k):
        a_at, b_at = (d.advance(lay(0, step) * b.itemsize) for d, lay in zip(first, layouts, strict=True))
        c = shared_mma(atom, memory, a_at, b_at, c, a_major="MN", b_major="MN")
    expected = at.astype(np.float64).T @ b.astype(np.float64)
    np.testing.assert_array_equal(atom.tile_c(c), np.stack([expected, expected]))


def test_tf32_rounds_before_the_product() -> None:
    """Values of 10 bits of mantissa are multiplied whole."""
    atom = get_atom("wgmma.m64n8k8.tf32")
    rng = np.random.default_rng(72)
    a, b = (round_tf32(rng.standard_normal(shape)) for shape in ((64, 32), (8, 32)))
    memory = Memory(16384)
    create_tensor_tile(b, b.shape, "128B").async_copy(memory, 8192, (0, 0))
    descriptor = tile_to_descriptor(tile_layout_k_major(b.dtype, 8, 32, "128B"), b.dtype, "128B", 8192)
    c = shared_mma(atom, memory, atom.fragment_a(a[:, :8]), descriptor, np.zeros((128, 4), np.float32))
    np.testing.assert_allclose(atom.tile_c(c), a[:, :8].astype(np.float64) @ b[:, :8].T, atol=1e-6)


def test_explanations() -> None:
    none = SmemDescriptor(128, 1024, 128, "none").explain()
    assert "LBO 1024 bytes (encoded 64): to the next 16 bytes of K, the neighbouring core matrix." in none
    assert "Base offset 0: without a swizzle it has no meaning." in none
    mn = SmemDescriptor(0, 8192, 1024, "128B", arch="sm_100").explain("MN")
    assert "sm_100 descriptor 0x4000404002000000: MN-major, swizzle 128B." in mn
    assert "LBO 8192 bytes (encoded 512): to the next 128 bytes along MN." in mn
    assert "SBO 1024 bytes (encoded 64): to the next 8 of K." in mn
    off = SmemDescriptor(128, 16, 512, "128B").explain()
    assert "the start lies 128 bytes past a multiple of 1024" in off
    assert "less than 1024, so rows of 8 overlap" in off
    assert "the pattern starts 384 bytes past a multiple of 1024" in SmemDescriptor(384, 16, 1024, 3, 3).explain()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 16, 1024), "start_address is 8: must be a multiple of 16 below 262144"),
        ((1 << 18, 16, 1024), "start_address is 262144: must be"),
        ((0, 24, 1024), "leading_bytes is 24: must be"),
        ((0, 16, -16), "stride_bytes is -16: must be"),
        ((0, 16, 1024, "128B", 8), "base_offset is 8: must be 0 to 7"),
        ((0, 16, 1024, "128B", 0, "sm_80"), "arch 'sm_80' has no matrix descriptors; sm_90 and sm_100 have"),
    ],
)
def test_bad_fields(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SmemDescriptor(*arguments)


def test_bad_words_and_uses() -> None:
    with pytest.raises(ValueError, match="swizzle code 1 of sm_100 is not modelled"):
        SmemDescriptor.decode(1 << 61 | 1 << 46, "sm_100")
    with pytest.raises(ValueError, match="are not those of a sm_90 descriptor"):
        SmemDescriptor.decode(1 << 62 | 1 << 46)
    with pytest.raises(ValueError, match="word is -1: must be an unsigned 64-bit integer"):
        SmemDescriptor.decode(-1)
    descriptor = SmemDescriptor(0, 16, 1024, "128B")
    with pytest.raises(ValueError, match="float32 must be K-major: wgmma transposes 16-bit elements only"):
        descriptor.addresses(64, 8, "float32", "MN")
    with pytest.raises(ValueError, match="an operand of 60 x 16 bfloat16 is not whole core matrices"):
        descriptor.addresses(60, 16, "bf16")
    with pytest.raises(ValueError, match="major is 'N': must be 'K' or 'MN'"):
        descriptor.addresses(64, 16, "bf16", "N")
    own = tile_layout_k_major("bf16", 64, 64, "128B")
    with pytest.raises(ValueError, match="pattern_start is 64: must be a multiple of 128"):
        tile_to_descriptor(own, "bf16", "128B", pattern_start=64)
    layout = tile_layout_k_major("bf16", 64, 64, "64B")
    with pytest.raises(ValueError, match="is not canonical K-major for swizzle 128B"):
        tile_to_descriptor(layout, "bf16", "128B")
    with pytest.raises(ValueError, match="1 columns of 16 bytes are an odd number"):
        tile_to_descriptor(tile_layout_k_major("bf16", 64, 8), "bf16")
    atom, memory = get_atom("tcgen05.m128n16k16.bf16"), Memory(4096)
    memory.store(0, np.zeros(4096, np.uint8))
    blackwell = SmemDescriptor(0, 16, 1024, "128B", arch="sm_100")
    with pytest.raises(ValueError, match="A must be a descriptor, it has no register fragment"):
        shared_mma(atom, memory, np.zeros((128, 8)), blackwell, np.zeros((128, 16), np.float32))
    with pytest.raises(ValueError, match="a descriptor of sm_90 does not fit an instruction of sm_100"):
        shared_mma(atom, memory, descriptor, descriptor, np.zeros((128, 16), np.float32))
    with pytest.raises(ValueError, match="has its operands in registers; use its mma"):
        shared_mma(get_atom("mma.sync.m16n8k16.bf16"), memory, 0, 0, 0)


def test_tensor_memory_holds_the_accumulator() -> None:
    """D[row, column] is lane row, column column; a warp reaches its own 32 lanes."""
    atom = get_atom("tcgen05.m128n32k16.f16")
    c = np.random.default_rng(73).standard_normal((128, 32)).astype(np.float32)
    fragment = atom.fragment_c(c)
    tmem = TensorMemory(64)
    for warp in range(4):
        tmem.store(warp, 16, fragment[32 * warp : 32 * warp + 32])
    for warp in range(4):
        np.testing.assert_array_equal(tmem.load(warp, 20, 4), c[32 * warp : 32 * warp + 32, 4:8])
    assert tmem.memory.image(np.float32)[tmem_layout(64)(77, 18)] == c[77, 2]
    assert tmem_address(77, 18) == 77 << 16 | 18


def test_bad_tensor_memory() -> None:
    tmem = TensorMemory(32)
    for arguments, message in (
        ((4, 0, 1), "warp 4 of the warpgroup is not 0 to 3"),
        ((0, 0, 3), "repeat is 3: must be a power of two"),
        ((0, 30, 4), "columns 30 to 33 are not 0 to 31"),
        ((0, 0, 1, np.float16), "tensor memory holds 32-bit cells, not float16"),
    ):
        with pytest.raises(ValueError, match=message):
            tmem.load(*arguments)
    with pytest.raises(ValueError, match=r"value has shape \(64, 1\): must be \[32, repeat\]"):
        tmem.store(0, 0, np.zeros((64, 1), np.float32))
    with pytest.raises(ValueError, match="columns 48 of tensor memory"):
        TensorMemory(48)
    with pytest.raises(ValueError, match="lane is 128: must be 0 to 127"):
        tmem_address(128, 0)
    with pytest.raises(ValueError, match="column is 512: must be 0 to 511"):
        tmem_address(0, 512)
