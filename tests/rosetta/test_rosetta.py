"""Texts from bug reports. Rests on what real printers wrote: Triton's three printers of one layout, with the compiler's
bases (tests/data/rosetta.json), CuTe's (cute_text.json), words that an H100 took, and the code that ptxas makes of
``tensormap.replace`` (tensor_map_fields.json)."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from kvlab.hardware import SmemDescriptor, TensorMapSwizzle
from kvlab.hardware.copies.tensor_map_words import ELEMENT_TYPES, decode_tensor_map
from kvlab.layout import Layout, LinearLayout, Swizzle
from kvlab.layout.encodings import (
    AMDMFMALayout,
    BlockedLayout,
    NVMMASharedLayout,
    SharedEncoding,
    SwizzledSharedLayout,
    TensorMemoryLayout,
)
from kvlab.memory import as_dtype
from kvlab.rosetta import recognise
from kvlab.rosetta.also import _offsets
from kvlab.viz import draw

DATA = Path(__file__).resolve().parents[1] / "data"
PRINTED = json.loads((DATA / "rosetta.json").read_text())
CUTE = json.loads((DATA / "cute_text.json").read_text())["rows"]
FIELDS = json.loads((DATA / "tensor_map_fields.json").read_text())["rows"]


@pytest.mark.parametrize("row", PRINTED["rows"], ids=lambda row: row["gluon"].partition("(")[0])
def test_three_printers_of_one_layout_say_the_same(row):
    """Gluon's repr, the IR's type, and the bases that the compiler makes of it."""
    shape = tuple(row["shape"])
    gluon, ttgir = recognise(row["gluon"]), recognise(row["ttgir"])
    assert (gluon.notation, ttgir.notation) == ("Gluon", "TTGIR")
    assert gluon.object.to_linear_layout(shape) == ttgir.object.to_linear_layout(shape)
    assert ttgir.how["shape"] == shape
    assert ("element_bytes" in ttgir.how) == isinstance(ttgir.object, SharedEncoding)
    if row["linear"] is not None:
        dump = recognise(row["linear"])
        assert dump.notation == "LinearLayout"
        ours = gluon.object.to_linear_layout(shape)
        assert dump.object.out_dims == ours.out_dims
        bases = {name: steps for name, steps in ours.bases.items() if name != "block"}
        assert bases == {name: dump.object.bases[name] for name in bases}


@pytest.mark.parametrize("shape, order, element", [
    ([64, 64], [1, 0], "float16"), ([64, 48], [1, 0], "float16"), ([64, 16], [1, 0], "bfloat16"),
    ([4, 64], [1, 0], "float16"), ([64, 8], [1, 0], "float16"), ([128, 64], [1, 0], "float8e4nv"),
    ([2, 4, 32], [2, 1, 0], "float32"),
])
def test_a_buffer_of_tlx_has_the_swizzle_that_triton_makes_of_its_shape(shape, order, element):
    """Rests on Gluon's default of the same attribute."""
    gl = pytest.importorskip("triton.experimental.gluon.language")
    theirs = gl.NVMMASharedLayout.get_default_for(shape, getattr(gl, element))
    name = str(getattr(gl, element))  # fp16, as TLX prints it
    ones = [1] * len(shape)
    layout = f"nv_mma_shared_layout_encoding<{shape}, {order}, {name}, {ones}, {ones}, {ones}, False>"
    found = recognise(f"buffered_tensor_<{name}, {shape}, {layout}, 3>")
    ours = found.object
    assert (ours.swizzle_byte_width, ours.element_bitwidth, ours.rank, ours.transposed) == (
        theirs.swizzle_byte_width, theirs.element_bitwidth, theirs.rank, theirs.transposed)
    assert (found.notation, found.how["shape"], 8 * found.how["element_bytes"]) == (
        "TLX", tuple(shape), theirs.element_bitwidth)
    assert found.sentence.endswith(", 3 of them.")


def test_other_layouts_of_tlx():
    """Rests on the values that the texts say."""
    ones = "numCTAs=[1, 1], numCTAsPerCGA=[1, 1], numCTASplit=[1, 1], numCTAOrder=[1, 1]"
    call = f"tlx.swizzled_shared_layout_encoding(vectorSize=4, perPhase=2, maxPhase=8, order=[0, 1], {ones})"
    assert recognise(call).object == SwizzledSharedLayout(4, 2, 8, (0, 1))
    turned = "nv_mma_shared_layout_encoding<[128, 64], [0, 1], fp16, [1, 1], [1, 1], [1, 1], False>"
    assert recognise(turned).object == NVMMASharedLayout(128, 16, 2, True)
    memory = recognise("buffered_tensor_<fp16, [128, 64], tensor_memory_layout_encoding(128, 64, True, 1, 1), 0>")
    assert memory.object == TensorMemoryLayout((128, 64), 2)
    assert "an element every 2 columns" in memory.sentence
    assert recognise("#ttng.tensor_memory_encoding<blockM = 128, blockN = 64, colStride = 2>").object == memory.object
    for text, says in {
        "buffered_tensor_<fp16, [64, 64], swizzled_shared_layout_encoding, 2>": "says no values: must be one",
        turned.replace("[1, 1], [1, 1], [1, 1]", "[2, 1], [1, 1], [1, 1]"): r"numCTAsPerCGA is \[2, 1\]: must be 1",
        turned.replace(", False>", ">"): "must have shape, order, elemType, numCTAsPerCGA",
        turned[:-1]: "must be a whole layout of TLX, brackets closed",
        "tensor_memory_layout_encoding(128, 64, True, 1, 1)": "unpacked is True: must have the elements",
    }.items():
        with pytest.raises(ValueError, match=says):
            recognise(text)


def test_of_a_module_the_first_type_is_taken_that_is_whole():
    """A product's IR for two machines: the load's blocked tensor; without its line, the shared memory it goes to."""
    text = PRINTED["modules"]["sm_80"]
    first = recognise(text)
    assert (type(first.object), first.how) == (BlockedLayout, {"shape": (64, 64)})
    assert "on 64 x 64 bfloat16" in first.sentence
    unnamed = "\n".join(line for line in text.splitlines() if not line.startswith("#blocked"))
    shared = recognise(unnamed)
    assert shared.object == SwizzledSharedLayout(8, 1, 8, (1, 0))
    assert shared.how == {"shape": (64, 64), "element_bytes": 2}
    names = "\n".join(line for line in PRINTED["modules"]["gfx942"].splitlines() if line.startswith("#mma"))
    assert type(recognise(names).object) is AMDMFMALayout
    with pytest.raises(ValueError, match="'#blocked1' is no encoding"):
        recognise("tensor<64x64xbf16, #blocked1>")


@pytest.mark.parametrize("row", CUTE, ids=lambda row: row["text"])
def test_texts_of_cute_are_cute(row):
    """Every printed text; what has no offsets in it is refused by CuTe's reader, not passed over."""
    dtype = row.get("dtype") or (None if "ptr" in row["text"] else "f16")
    if "@" in row["text"] or "?" in row["text"]:
        with pytest.raises(ValueError, match=r"must have (ints in place|offsets)"):
            recognise(row["text"], dtype)
        return
    found = recognise(row["text"], dtype)
    assert found.notation == "CuTe"
    assert found.sentence.endswith(".")
    if "16b" in row["text"] and "o (" in row["text"]:
        assert found.how["element_bytes"] == 2


def test_matrix_descriptors_are_those_that_an_h100_took():
    """Words made of the record's fields where the PTX ISA puts them; the addresses are those that were read back."""
    cases = json.loads(gzip.decompress((DATA / "hardware" / "h100_wgmma_descriptors.json.gz").read_bytes()))["cases"]
    for case in cases[::7]:
        _, major, start, leading, stride, mode, base = case["descriptor"]
        code = {"none": 0, "128B": 1, "64B": 2, "32B": 3}[mode] << 62
        word = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | code
        found = recognise(f"{word:#x}")
        assert (found.notation, found.object.start_address, found.object.swizzle.label) == (
            "matrix descriptor", start, mode
        )
        if "table" in case:
            assert found.object.addresses(64, 16, "f16", major).ravel().tolist() == case["table"]
    blackwell = SmemDescriptor(0x2000, 16, 512, "64B", arch="sm_100")
    assert recognise(f"{blackwell.encode():#x}").object == blackwell
    assert "tcgen05" in recognise(f"{blackwell.encode():016x}").sentence
    with pytest.raises(ValueError, match="word 0x4000004000010400: "):
        recognise("0x4000004000010400", arch="sm_100")
    with pytest.raises(ValueError, match="arch is 'sm_80': must be one that has matrix descriptors"):
        recognise("0x4000004000010400", arch="sm_80")


def tensor_map(**values) -> bytes:
    """128 bytes with fields where ptxas puts them; all others hold noise. A field is a number or (index, number)s."""
    noise = int.from_bytes(np.random.default_rng(7).bytes(128), "little")
    for row in FIELDS:
        name, index = row["field"], row["index"]
        given = values.get(name, 0)
        number = given[index] if isinstance(given, tuple) else given
        place, mask = 8 * row["offset"], row["mask"]
        stored = number - row["less"]
        if name == "global_stride":
            high = 8 * 0x1C + 4 * index
            noise = noise & ~(15 << high) | number >> 36 << high
            stored = number >> 4
        else:
            stored <<= row["shift"]
        noise = noise & ~(mask << place) | (stored & mask) << place
    return noise.to_bytes(128, "little")


VALUES = {
    "global_address": 0x7F12_3456_7890, "rank": 2, "global_stride": (8192, 3 << 36, 16, 32), "elemtype": 10,
    "global_dim": (4096, 77, 3, 5, 6), "box_dim": (64, 17, 2, 9, 11), "element_stride": (1, 3, 2, 5, 7),
    "swizzle_mode": 3,
}


def test_fields_lie_where_the_assembler_puts_them():
    """The record itself: each mask and offset stands in the instructions that were written down beside it."""
    for row in FIELDS:
        code = " ".join(row["sass"])
        assert row["offset"] == 0 or f"+{row['offset']:#x}]" in code
        if row["value"]:
            assert f"{row['value'] << row['shift']:#x}" in code
        elif row["value"] is None and row["mask"] < 1 << 32 and row["mask"] != 0xFFFFFFFF:
            assert f"{row['mask']:#x}" in code


def test_a_tensor_map_is_read_whatever_its_other_bits_are():
    found = decode_tensor_map(tensor_map(**VALUES))
    assert (found.base, found.dtype, found.shape) == (0x7F1234567890, as_dtype("bf16"), (3, 77, 4096))
    assert found.strides == ((3 << 36) // 2, 4096, 1)
    assert (found.box, found.element_strides, found.swizzle.label) == ((2, 17, 64), (2, 3, 1), "128B")
    for number, name in enumerate(ELEMENT_TYPES):
        plain = {"elemtype": number, "box_dim": (16, 8, 1, 1, 1), "swizzle_mode": 0, "rank": 1}
        one = decode_tensor_map(tensor_map(**VALUES | plain))
        assert (one.dtype, one.box) == (as_dtype(name), (8, 16))
    with pytest.raises(ValueError, match="must not be interleaved"):
        decode_tensor_map(tensor_map(**VALUES | {"interleave_layout": 1}))
    with pytest.raises(ValueError, match="must have a rank of 1 to 5"):
        decode_tensor_map(tensor_map(**VALUES | {"rank": 6}))
    with pytest.raises(ValueError, match="data has 64 bytes"):
        decode_tensor_map(bytes(64))


@pytest.mark.parametrize("width", [1, 4, 8])
def test_tensor_maps_are_recognised_however_they_are_printed(width):
    raw = tensor_map(**VALUES)
    words = [f"{int.from_bytes(raw[i : i + width], 'little'):0{2 * width}x}" for i in range(0, 128, width)]
    lines = [" ".join(words[i : i + 8]) for i in range(0, len(words), 8)]
    dumped = "\n".join(f"{8 * width * n:08x}: {line}" for n, line in enumerate(lines))
    printed = "{" + ", ".join(f"0x{word}" for word in words) + "}"
    for text in (raw.hex(), dumped, printed):
        found = recognise(text)
        assert found.notation == "tensor map"
        assert found.object.base == VALUES["global_address"]
    assert "boxes of 2 x 17 x 64 bfloat16 out of 3 x 77 x 4096 at 0x7f1234567890" in found.sentence


@pytest.mark.parametrize(
    "text, label",
    [
        ("SWIZZLE_128B", "128B"), ("CU_TENSOR_MAP_SWIZZLE_64B", "64B"), ("TensorMapSwizzle.SWIZZLE_32B", "32B"),
        ("128B", "128B"), ("CU_TENSOR_MAP_SWIZZLE_NONE", "none"), ("swizzle: 0x2", "64B"),
        ("tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [addr], 3;", "128B"),
    ],
)
def test_swizzle_modes(text, label):
    found = recognise(text)
    assert (found.notation, found.object) == ("swizzle mode", TensorMapSwizzle.of(label).swizzle())
    assert label in found.sentence or label == "none"


SENTENCES = {
    "64x128": "A layout of 64 x 128: 8192 elements in 8192 places; rows are contiguous.",
    "(4,8):(1,4)": "A layout of 4 x 8: 32 elements in 32 places; columns are contiguous.",
    "Sw<3,3,3> o (8,64):(64,1)": "A layout of 8 x 64: 512 elements in 512 places; rows are contiguous; then bits 4 to "
    "6 of a byte address are XORed with bits 7 to 9, the mode 128B of TMA and wgmma.",
    "#ttg.nvmma_shared<{swizzlingByteWidth = 64, transposed = true, elementBitWidth = 8}>": "Shared memory as TMA "
    "writes and wgmma reads it: panels of 64 bytes with swizzle 64B, the first dimension contiguous, elements of 8 "
    "bits.",
    "gl.SliceLayout(0, gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))":
    "A layout without its dimension 0: the accumulator of wgmma 16 x 64 x 16 over 4 x 1 warps.",
}


@pytest.mark.parametrize("text", SENTENCES)
def test_sentences_and_pictures(text):
    found = recognise(text, "f16")
    assert found.sentence == SENTENCES[text]
    assert draw(found).title == found.sentence


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "must be text"), ("7", "text is '7': must be a matrix descriptor"),
        ("0x00f0000000010400", "word 0x00f0000000010400"),
        ("SWIZZLE_128B_ATOM_32B", "must be a mode with pieces of 16 bytes"),
        ("AutoLayout()", "'AutoLayout' is no layout that kvlab has: must be one of AMDMFMALayout"),
        ("BlockedLayout(size_per_thread=[1, 8]", "must be a whole layout of Gluon"),
        ("BlockedLayout(size=[1])", r"fields \['size'\] of BlockedLayout"),
        ("#ttg.mystery<{a = 1}>", "encoding #ttg.mystery"),
        (" - lane=1 -> (0)", "has no line 'where out dims are"),
        (" - lane=2 -> (0)\nwhere out dims are: [dim0 (size 1)]", "has lane=2 in place of 1"),
        ("Sw<3,3,3> o (8,64):(64,1)", "dtype is None"),
        ("(8,64):(64", "is no CuTe text"),
        (" - lane=1 -> (0,[])\nwhere out dims are: [dim0 (size 1)]", r"leads to \(0,\[\]\): must be numbers"),
        ("#ttg.blocked<{sizePerThread = [1]}>", "BlockedLayout has no threads_per_warp, warps_per_cta, order"),
        ("#ttg.nvidia_mma<{versionMajor = 2}>", "has no versionMinor: must be whole"),
        ("#ttg.linear<{register = [[1]], warp = []}>", "has no lane"),
        ("#ttg.linear<{register = [1], lane = [], warp = []}>", r"bases \[1\]: must be lists"),
        ("#ttg.linear<{register = [[1], [0, 1]], lane = [], warp = []}>", "must have as many integers each"),
        ("#ttg.linear<{register = [[1]7], lane = [], warp = []}>", "'.*7.*' of an encoding: must be numbers"),
        ("#ttg.padded_shared<[4:+2] {order = [1, 0]}>", "has no shape: must be beside its order"),
        ("#ttg.padded_shared<[4:+2] {block = []}>", "must have an order and a shape, or bases"),
    ],
)
def test_what_is_wrong_is_told_by_its_own_reader(text, says):
    with pytest.raises(ValueError, match=says):
        recognise(text)


def test_the_page_says_what_is_said():
    """Each text of docs/rosetta.md and the sentence under it."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "rosetta.md").read_text(encoding="utf-8")
    pairs = re.findall(r"```text ?(\w*)\n(.*?)\n```\n\n> ([^\n]*)", page, re.DOTALL)
    assert len(pairs) == 8
    for dtype, text, said in pairs:
        assert recognise(text, dtype or None).sentence == said


ROWS = "#ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = 8, order = [1, 0]}>"
COLUMNS = "#ttg.swizzled_shared<{vec = 2, perPhase = 2, maxPhase = 4, order = [0, 1]}>"
BYTES = "#ttg.nvmma_shared<{swizzlingByteWidth = 32, transposed = true, elementBitWidth = 8}>"


@pytest.mark.parametrize(
    "text, dtype, names",
    [
        (f"!ttg.memdesc<32x64xf16, {ROWS}, #smem>", None, 4),
        (f"!ttg.memdesc<32x64xbf16, {COLUMNS}, #smem>", None, 2),
        (f"!ttg.memdesc<64x64xi8, {BYTES}, #smem>", None, 3),
        ("Sw<2,2,3> o ((_8,_2),_32):((_32,_512),_1)", "f32", 1),
        ("(16,64):(64,1)", "f16", 2),
        ("(16,24):(24,1)", "f16", 0),
        ("(4,8):(9,1)", "f16", 0),  # a padding looks like Sw<2,0,3> at powers of two alone
    ],
)
def test_other_notations_are_the_same_tile(text, dtype, names):
    """A law: each text is recognised as a tile with the same offsets (encodings: held against the compiler)."""
    found = recognise(text, dtype)
    assert len(found.also) == names
    shape = found.how.get("shape") or tuple(mode.size for mode in getattr(found.object, "layout", found.object).modes)
    expected = _offsets(found.object, {"shape": shape})
    for notation, other in found.also.items():
        if notation != "swizzle mode":
            again = recognise(other, f"uint{8 * found.how['element_bytes']}")
            np.testing.assert_array_equal(_offsets(again.object, {"shape": shape}), expected)


def test_what_kvlab_prints_is_recognised():
    """A law: str of a layout, a swizzle and a linear layout of our own."""
    linear = LinearLayout({"lane": [[1, 0], [0, 1]], "register": []}, (2, 2))
    assert recognise(str(linear)).object.bases == linear.bases
    assert recognise(str(Layout("(4,8):(8,1)"))).object == Layout("(4,8):(8,1)")
    assert recognise("Sw<3,4,3>", "uint8").object.in_bytes() == Swizzle(3, 4, 3, "byte")
    blocked = BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    assert recognise(repr(blocked)).object == blocked
