"""CuTe text read and written: texts and offsets that C++ CuTe and the CuTe DSL printed (tests/data/cute_text.json)."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from kvlab.layout import ComposedLayout, Layout, Swizzle, from_cute, to_cute

BUFFER = 0x562684F8E000  # where the printer's tensors lie
ROWS = json.loads(Path("tests/data/cute_text.json").read_text())["rows"]
PRINTED = [row for row in ROWS if row["offsets"]]
REFUSED = [row["text"] for row in ROWS if "?" in row["text"]]
COORDINATES = [(row["printer"], row["text"]) for row in ROWS if "@" in row["text"]]


def read(row):
    """The layout of a text; a swizzle without a pointer counts f16, unless the row names its dtype."""
    return from_cute(row["text"], row.get("dtype") or (None if "ptr" in row["text"] else "f16"))


@pytest.mark.parametrize("row", PRINTED, ids=lambda row: row["text"])
def test_offsets_are_those_of_the_printer(row):
    layout = read(row)
    offsets = np.array([layout(i) for i in range(layout.size)])
    if row["kind"] == "tensor":
        width, address = re.search(r"ptr\[(\d+)b\]\((\w+)\)", row["text"]).groups()
        start = int(address, 16)
        if row["text"].startswith("Sw"):
            start -= start % 1024  # of no swizzle here more bytes are permuted
        offsets = start - BUFFER + offsets * (int(width) // 8)
    np.testing.assert_array_equal(offsets, row["offsets"])


@pytest.mark.parametrize("row", [row for row in PRINTED if row["kind"] != "tensor" and "tensor" not in row["text"]],
                         ids=lambda row: row["text"])
def test_what_was_printed_is_written(row):
    static = row["text"].replace("_", "").replace("S<1,2,-3 ", "S<1,2,-3> ")
    assert to_cute(read(row), row["printer"]).replace("_", "") == static


@pytest.mark.parametrize("printer", ["c++", "dsl"])
@pytest.mark.parametrize("unit", ["bf16", "byte", "float32"])
def test_written_layouts_are_read_back(printer, unit):
    """A law."""
    for outer in (Swizzle(2, 4, 3, unit), Swizzle(3, 3, -3, unit), Layout("(6,2):(8,2)")):
        layout = ComposedLayout(Layout("((2,4),3):((12,3),1)"), outer, 24)
        dtype = "uint8" if unit == "byte" else unit
        read = from_cute(to_cute(layout, printer), dtype)
        np.testing.assert_array_equal(read.offsets(), layout.offsets())
    assert from_cute(to_cute(Layout("(4,2):(-2,0)"), printer)) == Layout("(4,2):(-2,0)")


def test_the_unit_of_a_swizzle_is_the_caller_s_word():
    """The 128-byte mode of the hardware, by three texts of one tile (kvlab.layout.make_tma_swizzle)."""
    tile = ComposedLayout(Layout("(8,64):(64,1)"), Swizzle(3, 4, 3, "byte").to("bf16"))
    texts = {
        "Sw<3,3,3> o _0 o (_8,_64):(_64,_1)": None, "S<3,4,3> o 0 o (8,64):(64,1)": "byte",
        "Sw<3,4,3> o smem_ptr[16b](unset) o (_8,_64):(_64,_1)": None,
        "tensor<ptr<bf16, smem, align<1024>, S<3,4,3>> o (8,64):(64,1)>": None,
    }
    for text, unit in texts.items():
        assert from_cute(text, "bf16", swizzle_unit=unit) == tile, text


@pytest.mark.parametrize("text", REFUSED)
def test_unknown_sizes_are_refused(text):
    with pytest.raises(ValueError, match=r"must have ints in place of '\?'"):
        from_cute(text)


@pytest.mark.parametrize(("printer", "text"), COORDINATES)
def test_steps_of_coordinates_are_read_and_written(printer, text):
    """A start of zeros is read, and not written."""
    plain = text.replace("_", "").replace("ArithTuple(0,0) o ", "").replace("tensor<(0,0) o (8,64):(1@0,1@1)>",
                                                                             "(8,64):(1@0,1@1)")
    assert to_cute(from_cute(text), printer).replace("_", "") == plain


@pytest.mark.parametrize(("args", "message"), [
    (("Sw<3,3,3> o _0 o (_8,_64):(_64,_1)",), "dtype is None: .* must be their dtype"),
    (("smem_ptr[16b](0x100) o (_8,_64):(_64,_1)", "f32"), "dtype is float32: .* elements of 2 bytes"),
    (("Sw<3,4,3>_smem_ptr[16b](0x101) o (_8,_64):(_64,_1)",), "no multiple of its elements' 2 bytes"),
    (("Sw<3,3,3> o Sw<2,3,3> o _0 o (8,64):(64,1)", "f16"), "is no CuTe text"),
    (("Sw<3,3,3> o (6,2):(8,2) o 0 o (4,3):(3,1)", "f16"), "two maps after its layout"),
    (("TiledMMA",), "is no CuTe text"), (("",), "is no CuTe text"), ((7,), "text is 7: must be a str"),
    (("Sw<-1,4,3> o 8:1",), "'Sw<-1,4,3>' where an offset is expected"), (("ptr[16b](0x1)",), "a pointer alone"),
    (("(8,64):(64)",), "is no CuTe text"), (("tensor<ptr<f4E2M1FN, smem, S<3,4,3>> o 8:1>",), "dtype is None"),
])  # fmt: skip
def test_what_is_refused(args, message):
    with pytest.raises(ValueError, match=message):
        from_cute(*args)


def test_what_neither_prints_is_not_written():
    with pytest.raises(ValueError, match="must have a map after its offset"):
        to_cute(ComposedLayout(Layout("8:1"), None, 4))
    with pytest.raises(ValueError, match="printer is 'mlir'"):
        to_cute(Layout("8:1"), "mlir")
