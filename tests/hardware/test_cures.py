"""Cures of bank conflicts. Rests on the measured rule of wavefronts (``count_wavefronts``) over addresses made here, on
Triton's choice of instructions (``shared_transfer``, held against the compiler elsewhere), and on descriptors that an
H100 confirmed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvlab.hardware import (
    LaneAccess,
    SmemDescriptor,
    best_order,
    best_padding,
    best_swizzle,
    copy_wavefronts,
    count_wavefronts,
    shared_transfer,
)
from kvlab.layout import ComposedLayout, Layout, Swizzle
from kvlab.layout.encodings import (
    BlockedLayout,
    DotOperandLayout,
    NVMMADistributedLayout,
    NVMMASharedLayout,
    PaddedSharedLayout,
    SharedLinearLayout,
    SwizzledSharedLayout,
)
from kvlab.viz import draw

LANE = np.arange(32)
ORDER = (1, 0)


def ldmatrix_passes(address) -> int:
    """Wavefronts of ldmatrix.x4 over byte addresses ``[rows, columns]`` of 2-byte elements, 16 x 16 at a time."""
    total = 0
    for row, column in itertools.product(range(0, address.shape[0], 16), range(0, address.shape[1], 16)):
        total += int(count_wavefronts("ldmatrix.x4", address[row + LANE % 16, column + 8 * (LANE // 16)])[0])
    return total


def bytes_of(layout):
    """Byte addresses ``[rows, columns]`` of 2-byte elements."""
    rows, columns = layout.shape
    return 2 * np.asarray(layout(np.arange(rows)[:, None], np.arange(columns)))


def test_a_composed_layout_is_counted_with_its_swizzle_and_cured_by_another():
    wrong = ComposedLayout(Layout.row_major(32, 64), Swizzle(2, 3, 3, "bf16"))
    found = best_swizzle(wrong, "bf16", "ldmatrix.x4")
    assert found.given == ldmatrix_passes(bytes_of(wrong))
    assert found.given not in (found.unswizzled, found.wavefronts)
    assert found.swizzle == best_swizzle((32, 64), "bf16", "ldmatrix.x4").swizzle
    assert found.layout == ComposedLayout(Layout.row_major(32, 64), found.swizzle)
    assert found.wavefronts == found.ideal == ldmatrix_passes(bytes_of(found.layout))


def test_an_offset_inside_the_swizzle_stays():
    """A row further on: the swizzle reads absolute bits. Half a row further, it must not leave that half."""
    row = ComposedLayout(Layout((16, 64), (64, 1)), Swizzle(0, 3, 0, "bf16"), 64)
    found = best_swizzle(row, "bf16", "ldmatrix.x4")
    assert (found.layout.offset, found.before.addresses[0], found.after.addresses[0]) == (64, 128, 128 + 16)
    half = best_swizzle(ComposedLayout(Layout((16, 32), (64, 1)), None, 32), "bf16", "ldmatrix.x4")
    assert (half.swizzle.bits, half.conflicts) == (2, ldmatrix_passes(bytes_of(half.layout)) - 8)
    assert found.wavefronts == ldmatrix_passes(bytes_of(found.layout)) == found.ideal


MMA = NVMMADistributedLayout((2, 0), (2, 2), (16, 8))
REGISTERS = {
    "blocked": BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]),
    "column": BlockedLayout([2, 1], [32, 1], [2, 1], [0, 1]),
    "operand": DotOperandLayout(0, MMA, 2),
    "mma": MMA,
}


@pytest.mark.parametrize("name", REGISTERS)
def test_each_candidate_of_an_encoding_is_counted_as_triton_moves_it(name):
    """Candidates whose pieces Triton's rule keeps as wide as they are: the addresses of its instructions, counted."""
    registers, shape, compared = REGISTERS[name], (64, 32), 0
    found = best_swizzle(SwizzledSharedLayout(1, 1, 1, ORDER), "fp16", ("st", registers), shape=shape)
    widest = shared_transfer(registers, found.candidates[0].change, shape, 16).vec
    for encoding, total in found.candidates:
        transfer = shared_transfer(registers, encoding, shape, 16)
        if transfer.vec == widest:
            name = f"st.shared.b{16 * transfer.vec}"
            assert total == int(count_wavefronts(name, transfer.offset * 2)[0].sum()), encoding
            compared += 1
    assert compared == len(found.candidates)
    assert found.wavefronts == min(one.wavefronts for one in found.candidates)
    assert found.layout == found.swizzle


def test_the_swizzle_of_triton_for_ldmatrix_is_found():
    """Rows of 64 halves: (8, 1, 8), what the compiler gives the operand of an mma."""
    found = best_swizzle(SwizzledSharedLayout(1, 1, 1, ORDER), "fp16", "ldmatrix.x4", shape=(64, 64))
    assert (found.swizzle.vec, found.swizzle.per_phase, found.swizzle.max_phase) == (8, 1, 8)
    offsets = np.asarray(found.swizzle.offsets((64, 64)))
    assert found.wavefronts == found.ideal == ldmatrix_passes(2 * offsets)


def test_other_encodings():
    """Panels of 32 bytes, 8 rows of which fill two rows of banks: one bit is enough. Bases for a linear layout."""
    wide = best_swizzle(NVMMASharedLayout(0, 16), "fp16", "ldmatrix.x4", shape=(64, 64))
    widths = {one.change.swizzle_byte_width: one.wavefronts for one in wide.candidates}
    assert widths == {0: 512, 32: 64}
    assert ldmatrix_passes(2 * np.asarray(wide.layout.offsets((64, 64)))) == 64
    bases = [(0, 1 << bit) for bit in range(6)] + [(1 << bit, 0) for bit in range(4)]
    linear = best_swizzle(SharedLinearLayout(bases), "fp16", "ldmatrix.x4", shape=(16, 64))
    assert (linear.given, linear.wavefronts) == (128, 16)
    assert ldmatrix_passes(2 * np.asarray(linear.layout.offsets((16, 64)))) == 16


def test_a_thread_value_layout_counts_down_the_columns():
    """CuTe's TV layout of 32 threads x 4 values of a 32 x 4 tile, thread t the row t: one 16-byte load a lane."""
    found = best_swizzle(Layout((32, 4), (64, 1)), "fp32", Layout((32, 4), (1, 32)))
    assert found.before.instruction == "ld.shared.b128"
    assert found.given == int(count_wavefronts("ld.shared.b128", LANE * 256)[0]) == 32
    column = best_swizzle(Layout((32, 4), (1, 33)), "fp32", Layout((32, 4), (1, 32)))
    assert (column.before.instruction, column.given, column.swizzle.bits) == ("ld.shared.b32", 4, 0)


@pytest.mark.parametrize("columns, mode", [(64, "128B"), (32, "64B"), (16, "32B"), (8, "none")])
def test_wgmma_takes_the_swizzle_that_its_descriptor_names(columns, mode):
    """The cured tile lies where the descriptor of that mode finds it (held against an H100 elsewhere)."""
    found = best_swizzle((64, columns), "bf16", "wgmma")
    assert (found.conflicts, found.wavefronts) == (0, 64 * columns * 2 // 128)
    assert ("no smaller swizzle" in str(found)) == (mode != "none")
    descriptor = SmemDescriptor(0, 16 if mode != "none" else 8 * 16, 16 * columns, mode)
    expected = descriptor.addresses(64, columns, "bf16")
    assert np.array_equal(bytes_of(found.layout), expected)


def test_wgmma_and_a_store_are_both_served():
    rows = BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    found = best_swizzle((64, 64), "bf16", [("st", rows), "wgmma"])
    assert (found.swizzle, found.conflicts) == (Swizzle(3, 3, 3, "bf16"), 0)
    with pytest.raises(ValueError, match="'wgmma': no candidate is a tile that a descriptor can name: must be panels"):
        best_swizzle((64, 128), "bf16", "wgmma")
    with pytest.raises(ValueError, match="no candidate is a tile that a descriptor"):  # 8 rows at two strides
        best_swizzle(Layout("((8,2,2),64):((64,512,2048),1)"), "bf16", "wgmma")
    with pytest.raises(ValueError, match="sm_80 has none"):
        best_swizzle((64, 64), "bf16", "wgmma", arch="sm_80")


@pytest.mark.parametrize("rows, columns", [(32, 64), (16, 128), (64, 16)])
def test_padding_is_the_smallest(rows, columns):
    """Each number of elements from 0 on, counted here; what misaligns the 16-byte rows of a matrix is none."""
    found = best_padding((rows, columns), "fp16", "ldmatrix.x4")
    passes = {}
    for more in range(0, found.padding + 1, 8):
        passes[more] = ldmatrix_passes(2 * (np.arange(rows)[:, None] * (columns + more) + np.arange(columns)))
    assert {one.change: one.wavefronts for one in found.candidates} == passes
    assert [more for more, total in passes.items() if total == found.ideal] == [found.padding]
    assert found.layout == Layout((rows, columns), (columns + found.padding, 1))
    assert found.extra_bytes == (rows - 1) * found.padding * 2


def test_padding_of_columns_and_of_an_encoding():
    column = best_padding(Layout((32, 8), (1, 32)), "fp32", ("ld.shared.b32", 0, LANE % 8))
    assert (column.padding, column.layout) == (1, Layout((32, 8), (1, 33)))
    found = best_padding(SwizzledSharedLayout(1, 1, 1, ORDER), "fp16", "ldmatrix.x4", shape=(32, 64))
    assert found.layout == PaddedSharedLayout.with_identity_for([(64, 8)], (32, 64), ORDER)
    assert found.wavefronts == found.ideal == ldmatrix_passes(2 * np.asarray(found.layout.offsets((32, 64))))
    sizes = [one.change.size for one in found.candidates[1:]]
    assert sizes == sorted(sizes)
    assert len(sizes) > 3


def test_order_counts_every_permutation():
    """A tile of two halves whose columns are read one by one: the six orders, counted here."""
    tile = Layout((32, (4, 2)), (8, (2, 1)))
    row, column = LANE[None], np.arange(8)[:, None]
    found = best_order(tile, "fp32", ("ld.shared.b32", *np.broadcast_arrays(row, column)))
    sizes = (32, 4, 2)
    for order, total in found.candidates:
        stride, strides = 1, [0, 0, 0]
        for mode in order:
            strides[mode], stride = stride, stride * sizes[mode]
        address = 4 * (row * strides[0] + column % 4 * strides[1] + column // 4 * strides[2])
        assert total == int(count_wavefronts("ld.shared.b32", address)[0].sum())
    assert sorted(one.change for one in found.candidates) == sorted(itertools.permutations(range(3)))
    assert found.wavefronts == min(one.wavefronts for one in found.candidates) == 8
    assert found.layout(LANE, 0).tolist() == LANE.tolist()


def test_order_of_an_encoding_keeps_its_swizzle():
    found = best_order(SwizzledSharedLayout(4, 1, 2, ORDER), "fp16", REGISTERS["column"], shape=(64, 32))
    assert (found.order, found.layout) == ((0, 1), SwizzledSharedLayout(4, 1, 2, (0, 1)))
    assert found.before.wavefronts > found.after.wavefronts


def test_a_cure_draws_itself_and_tells_its_proof():
    found = best_padding((32, 32), "fp32", ("ld.shared.b32", LANE, 0))
    assert found.table().split() == ["0", "32", "1", "1"]
    assert draw(found).title == str(found)
    assert (found.before.wavefronts, found.after.wavefronts) == (32, 1)


def test_copies_and_their_masks_are_counted_in_a_cure():
    """A tile that cp.async fills and nobody reads here: the passes of its copies, by the rule over the addresses that
    the cure's layout gives; a lane that copies nothing counts for nothing. They have no picture of banks."""
    lane = np.arange(32)
    rows, columns = 4 * np.arange(16)[:, None] + lane // 8, lane % 8 * 8
    source, mask = rows * 256 + columns * 2, lane < 24
    copy = LaneAccess("cp.async.cg.16", (rows, columns), mask, source)
    plain = SwizzledSharedLayout(1, 1, 1, ORDER)
    found = best_swizzle(plain, "bf16", [copy], shape=(64, 64))
    address = 2 * np.asarray(plain.offsets((64, 64)))[rows, columns]
    assert found.given == int(copy_wavefronts("cp.async.cg.16", address, source, mask)[0].sum()) == 16 * 3
    assert found.before is found.after is None
    with pytest.raises(ValueError, match="has no picture"):
        draw(found)
    wrong = LaneAccess("cp.async.cg.16", (rows, columns), mask)
    with pytest.raises(ValueError, match=r"access cp\.async\.cg\.16: source is None: must be given"):
        best_swizzle(plain, "bf16", wrong, shape=(64, 64))
    with pytest.raises(ValueError, match=r"access ld\.shared\.b32: at has 1 arrays: must be 2, one for each mode"):
        best_swizzle(plain, "bf16", LaneAccess("ld.shared.b32", (lane,)), shape=(64, 64))


X4 = "ldmatrix.x4"


@pytest.mark.parametrize(
    "cure, arguments, says",
    [
        (best_swizzle, {"tile": 7, "access": X4}, r"tile is 7: must be \(rows, columns\), a Layout"),
        (best_swizzle, {"tile": Layout("(4,4,4):(16,4,1)"), "access": X4}, "must be a tile of two modes"),
        (best_swizzle, {"tile": (16, 16), "access": X4, "shape": (4, 4)}, "has a shape of its own"),
        (best_swizzle, {"tile": SwizzledSharedLayout(1, 1, 1, ORDER), "access": X4}, "shape is None: must be the"),
        (best_swizzle, {"tile": (16, 16), "access": ("mv", MMA)}, "access is .*: must be a matrix instruction"),
        (best_swizzle, {"tile": (16, 16), "access": Layout("(8,4):(1,8)")}, "8 threads: must be whole warps of 32"),
        (best_swizzle, {"tile": (8, 8), "access": Layout("(32,4):(1,32)")}, "0 to 127 outside the tile of 8 x 8"),
        (best_swizzle, {"tile": (8, 8), "access": Layout("(32,2):(-1,32)")}, "-31 to 32 outside the tile of 8 x 8"),
        (best_swizzle, {"tile": (16, 16), "access": ("ldmatrix.x4", 0, 0)}, r"are \(\): must be \[..., 32\] lanes"),
        (best_swizzle, {"tile": (1 << 14, 1 << 12), "access": X4}, "67108864 elements: must be at most 4194304"),
        (best_swizzle, {"tile": (16, 16), "access": X4, "base": 1.5}, "base is 1.5: must be an integer"),
        (
            best_swizzle,
            {"tile": ComposedLayout(Layout.row_major(16, 16), Swizzle(1, 4, 3, "byte")), "access": X4},
            "must have a swizzle that counts elements of 2 bytes",
        ),
        (
            best_swizzle,
            {"tile": PaddedSharedLayout.with_identity_for([(16, 4)], (16, 16), ORDER), "access": X4, "shape": (16, 16)},
            "must have no padding",
        ),
        (best_padding, {"tile": ComposedLayout(Layout.row_major(16, 16)), "access": X4}, "must have no swizzle"),
        (best_padding, {"tile": Layout("((4,4),16):((16,64),1)"), "access": X4}, "must have two flat modes"),
        (best_padding, {"tile": (64, 64), "access": "wgmma"}, "a descriptor has no padding"),
        (best_order, {"tile": (64, 64), "access": ["wgmma"]}, "the major of an operand"),
        (best_order, {"tile": NVMMASharedLayout(0, 16), "access": X4, "shape": (16, 16)}, "must be a SwizzledSharedL"),
    ],
)
def test_refusals(cure, arguments, says):
    with pytest.raises(ValueError, match=says):
        cure(arguments.pop("tile"), "fp16", **arguments)
