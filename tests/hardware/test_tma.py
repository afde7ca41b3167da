"""TMA copies. Rests on hardware: 80 boxes read back from an H100 (tests/data/h100_tma.json.gz), and what else was
observed with them: which copies fault; and 120 stores (h100_tma_store.json). More dimensions rest on NumPy slices."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlab.hardware import SharedMemBarrier, TensorMapSwizzle, TmaDescriptor, tma
from kvlab.memory import Memory, OutOfBounds, UnwrittenRead, as_dtype, bfloat16

RECORD = json.loads(gzip.decompress((Path(__file__).parents[1] / "data" / "h100_tma.json.gz").read_bytes()))
CASES = RECORD["cases"]
STORES = json.loads((Path(__file__).parents[1] / "data" / "h100_tma_store.json").read_text())["cases"]
WORDS = np.arange(64 * 128, dtype=np.uint16).reshape(64, 128)
UNTOUCHED = 0xEEEE
MODES = pytest.mark.parametrize("mode", list(TensorMapSwizzle), ids=lambda mode: mode.label)


def case_id(case: dict) -> str:
    return f"{case['id']}-{case['swizzle']}-box{case['box']}-at{case['coord']}-dst{case['dst_offset']}"


def shared(nbytes: int, base: int = 0) -> Memory:
    """Shared memory filled with 0xEEEE."""
    memory = Memory(nbytes, base=base, name="smem")
    memory.store(base, np.full(nbytes // 2, UNTOUCHED, np.uint16))
    return memory


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_image_is_the_chip_s(case: dict) -> None:
    """All words of shared memory up to the last one written, untouched ones included, and what the barrier counted."""
    words = case["words"]
    memory = shared(65536)
    descriptor = TmaDescriptor.of(WORDS, tuple(case["box"]), case["swizzle"])
    barrier = SharedMemBarrier()
    barrier.expect_bytes(2 * case["box"][0] * case["box"][1])
    tma.load(descriptor, case["coord"], memory, case["dst_offset"], barrier)
    found = memory.image(np.uint16)
    np.testing.assert_array_equal(found[: len(words)], words)
    assert (found[len(words) :] == UNTOUCHED).all()
    assert barrier.try_wait(0) == case["completed"]


def test_the_record_is_whole() -> None:
    assert len(CASES) == 80
    assert {case["swizzle"] for case in CASES} == {"none", "32B", "64B", "128B"}


def test_the_record_of_stores_is_whole() -> None:
    assert len(STORES) == 120
    assert sum(case["end_byte"] > case["extent_bytes"] for case in STORES) >= 80


@pytest.mark.parametrize(
    "case", STORES, ids=lambda case: f"{case['dtype']}-{case['swizzle']}-extent{case['extent']}-x{case['x']}"
)
def test_stores_write_the_bytes_that_the_chip_writes(case: dict) -> None:
    """The rows that changed, the first and the last byte of each, and what came to stand there: the image, as a load
    would have left it. Nothing else changed.
    """
    dtype = {"u8": np.dtype(np.uint8), "bf16": bfloat16, "f32": np.dtype(np.float32)}[case["dtype"]]
    whole = np.zeros((12, 1024), np.uint8)
    out = whole[2:10].view(dtype)[:6, : case["extent"]]
    descriptor = TmaDescriptor.of(out, (8, case["box_columns"]), case["swizzle"])
    image = np.random.default_rng(46).integers(1, 127, (8, case["box_columns"] * dtype.itemsize)).astype(np.uint8)
    smem = Memory(descriptor.image_bytes, name="smem")
    smem.store(descriptor.image(0), image.view(dtype)[..., None])
    tma.store(descriptor, (0, case["x"]), smem, 0)
    first, end = case["first_byte"], case["end_byte"]
    assert first == case["x"] * dtype.itemsize
    expected = np.zeros_like(whole)
    expected[2 : 2 + case["rows_changed"], first:end] = image[: case["rows_changed"], : end - first]
    np.testing.assert_array_equal(whole, expected)
    assert descriptor.stored_extent * dtype.itemsize == end
    assert ("whole chunks of 16 bytes" in descriptor.explain()) == (end != case["extent_bytes"])


@MODES
@pytest.mark.parametrize("coord", [(-3, 0), (62, 0), (64, 0), (100, 0), (0, -8), (0, 128), (0, 200)], ids=str)
def test_boxes_partly_or_wholly_outside(mode: TensorMapSwizzle, coord: tuple[int, int]) -> None:
    """Observed: zeros outside, the full bytes counted. The inside is what NumPy finds there."""
    descriptor = TmaDescriptor.of(WORDS + 1, (16, 8), mode)
    memory, barrier = shared(4096), SharedMemBarrier()
    barrier.expect_bytes(descriptor.transaction_bytes)
    tma.load(descriptor, coord, memory, 0, barrier)
    barrier.wait(0)
    padded = np.pad(WORDS + 1, 256)
    expected = padded[256 + coord[0] : 272 + coord[0], 256 + coord[1] : 264 + coord[1]]
    np.testing.assert_array_equal(memory.load(descriptor.image(0), np.uint16)[..., 0], expected)


@MODES
@pytest.mark.parametrize("address", [16, 32, 64, 96, 144, 1040])
def test_destinations_that_fault(mode: TensorMapSwizzle, address: int) -> None:
    memory = shared(4096)
    descriptor = TmaDescriptor.of(WORDS, (16, 8), mode)
    with pytest.raises(ValueError, match=f"address {address} is not a multiple of 128 bytes"):
        tma.load(descriptor, (0, 0), memory, address)
    assert (memory.image(np.uint16) == UNTOUCHED).all()


@pytest.mark.parametrize("column", [1, 3, 4, 12, 100, 121, 124, 126, -4])
@pytest.mark.parametrize(("mode", "width"), [("none", 8), ("none", 16), ("none", 64), ("128B", 64), ("128B", 16)])
def test_columns_that_fault(mode: str, width: int, column: int) -> None:
    memory = shared(4096)
    with pytest.raises(ValueError, match=f"innermost coordinate {column} of 2 bytes an element is not a multiple"):
        tma.load(TmaDescriptor.of(WORDS, (16, width), mode), (0, column), memory, 0)
    assert (memory.image(np.uint16) == UNTOUCHED).all()


# What follows rests on NumPy.


@MODES
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(256,), (40, 64), (5, 12, 32), (3, 4, 5, 32), (2, 3, 4, 5, 16)], ids=str)
def test_every_rank_by_slices(mode: TensorMapSwizzle, dtype: type, shape: tuple[int, ...]) -> None:
    """Law: image(address) names the place of every element; a store of that image restores the slice."""
    rng = np.random.default_rng(40)
    tensor = rng.integers(1, 200, shape).astype(dtype)
    chunk = 16 // tensor.itemsize
    inner = min(mode.bytes // tensor.itemsize, shape[-1], 16 * chunk) if mode else min(shape[-1], 4 * chunk)
    box = (*(min(n, 3) for n in shape[:-1]), inner // chunk * chunk or chunk)
    start = (*(n - 2 for n in shape[:-1]), 0 if shape[-1] == box[-1] else chunk)
    descriptor = TmaDescriptor.of(tensor, box, mode)
    memory = Memory(descriptor.image_bytes + 128 + 1024, name="smem")
    tma.load(descriptor, start, memory, 128)
    padded = np.pad(tensor, [(0, 300)] * len(shape) if len(shape) < 4 else [(0, 16)] * len(shape))
    expected = padded[tuple(slice(a, a + n) for a, n in zip(start, box, strict=True))]
    np.testing.assert_array_equal(memory.load(descriptor.image(128), dtype)[..., 0], expected)
    assert memory.written is not None
    assert memory.written.sum() == descriptor.transaction_bytes
    target = np.zeros_like(tensor)
    tma.store(TmaDescriptor.of(target, box, mode), start, memory, 128)
    inside = tuple(slice(a, a + n) for a, n in zip(start, box, strict=True))
    np.testing.assert_array_equal(target[inside], tensor[inside])
    assert np.count_nonzero(target) == np.count_nonzero(tensor[inside])


def test_rows_that_do_not_end_on_16_bytes() -> None:
    """A tensor of 61 columns (pitch 64): the last chunk ends with zeros; a store writes the columns past it, too
    (measured, see above), in every row, the last one of the array included.
    """
    storage = np.random.default_rng(41).integers(1, 1000, (8, 64)).astype(np.float16)
    descriptor = TmaDescriptor.of(storage[:, :61], (4, 16), "32B")
    memory = Memory(128)
    tma.load(descriptor, (2, 48), memory, 0)
    found = memory.load(descriptor.image(0), np.float16)[..., 0]
    np.testing.assert_array_equal(found[:, :13], storage[2:6, 48:61])
    assert not found[:, 13:].any()
    before = storage.copy()
    memory.store(descriptor.image(0), np.full((4, 16, 1), 7, np.float16))
    tma.store(descriptor, (6, 48), memory, 0)
    assert (storage[6:, 48:64] == 7).all()
    storage[6:, 48:64] = before[6:, 48:64]
    np.testing.assert_array_equal(storage, before)


@pytest.mark.parametrize("dtype", ["bf16", "fp8e4m3", "fp8e5m2", "int8", "float64"])
def test_the_ends_of_rows_are_found_in_every_dtype(dtype: str) -> None:
    """Law: bytes 0 to 32 of the last row are written, whatever the elements mean; the tensor ends before byte 32."""
    whole = np.zeros((4, 64), np.uint8)
    kind = as_dtype(dtype)
    descriptor = TmaDescriptor.of(whole.view(kind)[:, : 32 // kind.itemsize - 1], (1, 32 // kind.itemsize))
    memory = Memory(128)
    memory.store(0, np.full(32, 7, np.uint8))
    tma.store(descriptor, (3, 0), memory, 0)
    expected = np.zeros_like(whole)
    expected[3, :32] = 7
    np.testing.assert_array_equal(whole, expected)


def test_a_store_past_the_last_byte_of_the_array_is_an_error() -> None:
    """What lies behind the array belongs to somebody else: nothing is written. A row before the last one has room."""
    storage = np.zeros(7 * 64 + 61, np.float16)
    out = np.lib.stride_tricks.as_strided(storage, (8, 61), (128, 2))
    descriptor, memory = TmaDescriptor.of(out, (4, 16), "32B"), Memory(128)
    memory.store(descriptor.image(0), np.full((4, 16, 1), 7, np.float16))
    with pytest.raises(OutOfBounds, match=r"access of 16 bytes at address 1008 is outside \[0, 1018\)"):
        tma.store(descriptor, (4, 48), memory, 0)
    assert not storage.any()
    tma.store(descriptor, (3, 48), memory, 0)
    assert np.flatnonzero(storage == 7).max() == 6 * 64 + 63


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 4, 5)], ids=str)
def test_stores_of_every_rank_round_the_innermost_extent_up(shape: tuple[int, ...]) -> None:
    """Law: as in two dimensions, which were measured: of 5 columns 8 are written, no row past an end."""
    whole = np.zeros(tuple(n + 2 for n in shape[:-1]) + (16,), np.int16)
    out = whole[tuple(slice(0, n) for n in shape)]
    box = (*(2 for _ in shape[:-1]), 8)
    descriptor, start = TmaDescriptor.of(out, box), (*(n - 1 for n in shape[:-1]), 0)
    memory = Memory(max(128, descriptor.image_bytes))
    memory.store(descriptor.image(0), np.full((*box, 1), 7, np.int16))
    tma.store(descriptor, start, memory, 0)
    expected = np.zeros_like(whole)
    expected[(*start[:-1], slice(0, 8))] = 7
    np.testing.assert_array_equal(whole, expected)


def test_element_strides_take_every_nth_row() -> None:
    descriptor = TmaDescriptor.of(WORDS, (16, 8), "none", element_strides=(3, 1))
    assert descriptor.smem_box == (6, 8)
    assert descriptor.transaction_bytes == 6 * 16
    memory = Memory(128)
    tma.load(descriptor, (50, 8), memory, 0)
    expected = np.pad(WORDS, 32)[82:98:3, 40:48]
    np.testing.assert_array_equal(memory.image(np.uint16)[:48].reshape(6, 8), expected)


def test_many_boxes_and_programs_at_once() -> None:
    """Coordinates and addresses broadcast; every CTA's memory gets its own box; the barrier counts one CTA's boxes."""
    memory = Memory(2048, programs=3, name="smem")
    descriptor = TmaDescriptor.of(WORDS, (4, 32), "64B")
    barrier = SharedMemBarrier()
    barrier.expect_bytes(2 * descriptor.transaction_bytes)
    rows = np.array([[0, 8], [20, 30], [62, 70]])
    tma.load(descriptor, (rows, 32), memory, np.array([[0, 512]]), barrier)
    barrier.wait(0)
    for program in range(3):
        for box, address in enumerate((0, 512)):
            image = memory.load(np.broadcast_to(descriptor.image(address), (1, 4, 32)), np.uint16)[program, ..., 0]
            np.testing.assert_array_equal(image, np.pad(WORDS, ((0, 64), (0, 0)))[rows[program, box] :][:4, 32:64])
    tma.load(descriptor, (0, 0), memory, 1024)  # scalars: the same for all programs
    np.testing.assert_array_equal(memory.bytes[0, 1024:1280], memory.bytes[2, 1024:1280])
    out = np.zeros_like(WORDS)
    tma.store(TmaDescriptor.of(out, (4, 32), "64B"), (np.array([0, 8, 62]), 0), memory, np.array([1024]))
    np.testing.assert_array_equal(out[[0, 8, 62], :32], WORDS[[0, 0, 0], :32])


def test_stores_read_only_what_they_write() -> None:
    """Parts of the image outside the tensor need not have been written; parts inside must."""
    out = np.zeros((4, 8), np.float32)
    descriptor = TmaDescriptor.of(out, (4, 4), "none")
    memory = Memory(128, name="smem")
    memory.store(0, np.ones(8, np.float32))
    tma.store(descriptor, (2, 4), memory, 0)
    assert out.sum() == 8
    with pytest.raises(UnwrittenRead):
        tma.store(descriptor, (1, 4), memory, 0)
    assert out.sum() == 8


@pytest.mark.parametrize("coords", [(-1, 0), (0, -4), (np.array([2, -2]), 4), (-100, 0)], ids=str)
def test_stores_that_start_at_negative_coordinates_are_illegal(coords: tuple[Any, ...]) -> None:
    """CUDA's programming guide lets loads alone have them; an H100 answered with an illegal instruction. Nothing is
    written, not even by the boxes that may be."""
    out = np.zeros((4, 8), np.float32)
    descriptor = TmaDescriptor.of(out, (4, 4), "none")
    memory = Memory(128, name="smem")
    memory.store(0, np.ones(16, np.float32))
    with pytest.raises(ValueError, match=r"TMA: a store at coordinates \(.*-\d.*\) is an illegal instruction"):
        tma.store(descriptor, coords, memory, 0)
    assert not out.any()
    tma.load(descriptor, coords, memory, 0)


@MODES
def test_gather4_is_a_box_of_rows_by_number(mode: TensorMapSwizzle) -> None:
    width = mode.bytes // 2
    single, box = TmaDescriptor.of(WORDS, (1, width), mode), TmaDescriptor.of(WORDS[[7, 60, 2, 2]], (4, width), mode)
    memory, expected, barrier = shared(2048), shared(2048), SharedMemBarrier()
    barrier.expect_bytes(4 * width * 2)
    tma.gather4(single, [7, 60, 2, 2], 64, memory, 384, barrier)
    tma.load(box, (0, 64), expected, 384)
    np.testing.assert_array_equal(memory.bytes, expected.bytes)
    barrier.wait(0)
    tma.gather4(single, [7, 64, -1, 2], 64, memory, 384)
    found = memory.load(box.image(384), np.uint16)[..., 0]
    np.testing.assert_array_equal(found[[0, 3]], WORDS[[7, 2], 64 : 64 + width])
    assert not found[1:3].any()


@pytest.mark.parametrize(("mode", "alignment"), [("none", 128), ("32B", 256), ("64B", 512), ("128B", 1024)])
def test_the_xor_reads_absolute_address_bits(mode: str, alignment: int) -> None:
    """A base that is not a multiple of 8 swizzle widths does not follow the pattern relative to the box."""
    descriptor = TmaDescriptor.of(WORDS, (8, TensorMapSwizzle.of(mode).bytes // 2), mode)
    assert descriptor.swizzle.alignment == alignment
    relative = [descriptor.image(base)[:, ::8] - base for base in (0, 128, alignment)]
    np.testing.assert_array_equal(relative[0], relative[2])
    elsewhere = int((relative[0] != relative[1]).sum())
    assert elsewhere == (0 if mode == "none" else relative[0].size)
    words = f"Address 128 is not a multiple of {alignment}: {elsewhere} of {relative[0].size} chunks stand elsewhere"
    assert (words in descriptor.explain(128)) == (mode != "none")
    assert "the pattern starts with the box" in descriptor.explain(alignment)
    assert "the copy faults" in descriptor.explain(64)


def test_rows_of_the_tables() -> None:
    """The specification's chunk table: 128B r1: 144 128 176 ..., 64B r2: 144 128 176 160, 32B r5: 176 160."""
    for mode, row, chunks in (
        ("128B", 1, [144, 128, 176, 160, 208, 192, 240, 224]),
        ("128B", 7, [1008, 992, 976, 960, 944, 928, 912, 896]),
        ("64B", 2, [144, 128, 176, 160]),
        ("64B", 6, [432, 416, 400, 384]),
        ("32B", 4, [144, 128]),
        ("32B", 7, [240, 224]),
    ):
        descriptor = TmaDescriptor.of(WORDS, (8, TensorMapSwizzle.of(mode).bytes // 2), mode)
        assert descriptor.image(0)[row, ::8].tolist() == chunks


@pytest.mark.parametrize(("dtype", "base"), [("uint8", 4), ("bf16", 3), ("float32", 2), ("float64", 1)])
@MODES
def test_the_mode_as_a_swizzle_of_elements(mode: TensorMapSwizzle, dtype: str, base: int) -> None:
    """make_swizzle of the compiled package: (mode, log2(16 / size), 3)."""
    swizzle = mode.swizzle(dtype)
    assert (swizzle.bits, swizzle.base, swizzle.shift) == (int(mode), base, 3)
    assert mode.bytes == 16 * 2 ** int(mode)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (2,) * 6, "strides": (1,) * 6, "box": (1,) * 6}, "rank 6 is not 1 to 5"),
        ({"shape": (), "strides": (), "box": ()}, "rank 0 is not 1 to 5"),
        ({"box": (16,)}, "differ in rank"),
        ({"dtype": np.dtype("c16")}, "elements of 16 bytes (complex128) are not of 1, 2, 4 or 8"),
        ({"shape": (0, 128)}, "shape (0, 128) has an extent outside 1 to 2^32"),
        ({"base": 8}, "base address 8 is not a multiple of 16 bytes"),
        ({"strides": (128, 2)}, "strides (128, 2): the innermost must be 1 element"),
        ({"strides": (100, 1)}, "stride 100*2 = 200 B is not a multiple of 16 bytes"),
        ({"box": (257, 8)}, "box (257, 8) has an extent outside 1 to 256"),
        ({"box": (0, 8)}, "box (0, 8) has an extent outside 1 to 256"),
        ({"box": (16, 12)}, "the box's rows have 12*2 = 24 B, not a multiple of 16 bytes"),
        ({"box": (16, 48), "swizzle": "32B"}, "48*2 = 96 B > 32 B, the span of swizzle 32B; use 128B or rows of 16"),
        ({"box": (16, 72), "swizzle": "128B"}, "72*2 = 144 B > 128 B, the span of swizzle 128B; use rows of 64"),
        ({"element_strides": (9, 1)}, "element_strides (9, 1) are not 1 to 8"),
        ({"element_strides": (1, 2)}, "with 1 innermost"),
        ({"box": (256, 256), "dtype": np.dtype(np.float64)}, "524288 bytes of shared memory, more than the 232448"),
        ({"swizzle": "256B"}, "swizzle is '256B': must be none, 32B, 64B or 128B"),
        ({"base": 8, "strides": (100, 1)}, "not a multiple of 16 bytes; stride 100*2"),
    ],
)
def test_rules_of_the_hardware(arguments: dict, message: str) -> None:
    """cuTensorMapEncodeTiled's limits, each named with the numbers that break it."""
    fitting = {"dtype": np.float16, "shape": (64, 128), "strides": (128, 1), "box": (16, 64)}
    TmaDescriptor(Memory.over(WORDS), **fitting)
    with pytest.raises(ValueError, match=re.escape(message)):
        TmaDescriptor(Memory.over(WORDS), **{**fitting, **arguments})


@pytest.mark.parametrize(("span", "valid"), [("32B", False), ("64B", False), ("128B", True)])
def test_a_box_of_48_half_words(span: str, valid: bool) -> None:
    if valid:
        assert "stay untouched" in TmaDescriptor.of(WORDS, (16, 48), span).explain()
        return
    with pytest.raises(ValueError, match=rf"48\*2 = 96 B > {span[:2]} B"):
        TmaDescriptor.of(WORDS, (16, 48), span)


def test_bad_copies() -> None:
    descriptor, memory = TmaDescriptor.of(WORDS, (16, 8)), shared(1024)
    with pytest.raises(ValueError, match=r"3 coordinates \(0, 0, 0\) for a tensor of rank 2"):
        tma.load(descriptor, (0, 0, 0), memory, 0)
    with pytest.raises(ValueError, match="must be integers"):
        tma.load(descriptor, (0.0, 0), memory, 0)
    with pytest.raises(ValueError, match="must have rank 2 and a box of one row"):
        tma.gather4(descriptor, [0, 1, 2, 3], 0, memory, 0)
    with pytest.raises(ValueError, match=r"rows has shape \(3,\): must be \[\.\.\., 4\]"):
        tma.gather4(TmaDescriptor.of(WORDS, (1, 8)), [0, 1, 2], 0, memory, 0)
