"""The smallest conflict-free swizzle. Rests on answers that users' cases record, and on the
measured rule of wavefronts through ``count_wavefronts``."""

from __future__ import annotations

import numpy as np
import pytest
from lds_groups import amd_phases

from kvlab.hardware import best_swizzle, count_wavefronts
from kvlab.layout import Layout, Swizzle, make_ldmatrix_swizzle


def triple(swizzle):
    return swizzle.bits, swizzle.base, swizzle.shift


@pytest.mark.parametrize(
    "pitch, expected, unswizzled", [(16, (1, 3, 3), 8), (32, (2, 3, 3), 16), (64, (3, 3, 3), 32), (128, (3, 3, 4), 32)]
)
def test_ldmatrix_by_pitch(pitch, expected, unswizzled):
    lane = np.arange(32)
    one = best_swizzle((16, pitch), "fp16", ("ldmatrix.x4", lane % 16, 8 * (lane // 16)))
    assert (triple(one.swizzle), one.unswizzled, one.wavefronts, one.conflicts) == (expected, unswizzled, 4, 0)
    whole = best_swizzle((16, pitch), "fp16", "ldmatrix.x4")
    assert (triple(whole.swizzle), whole.conflicts) == (expected, 0)
    assert whole.swizzle.to("vector") == make_ldmatrix_swizzle("fp16", pitch)


def test_x2_trans_of_a_16_by_16_tile():
    found = best_swizzle((16, 16), "fp16", "ldmatrix.x2.trans")
    assert (triple(found.swizzle), found.unswizzled - found.ideal) == ((1, 3, 3), 4)  # two instructions, 2 excess each


def test_column_of_floats():
    found = best_swizzle((32, 32), "fp32", ("ld.shared.b32", np.arange(32), 0))
    assert (triple(found.swizzle), found.unswizzled, found.wavefronts) == ((5, 0, 5), 32, 1)


def test_no_swizzle_where_none_is_needed():
    found = best_swizzle((8, 32), "fp32", ("ld.shared.b32", 0, np.arange(32)))
    assert (found.swizzle.bits, found.tried, found.conflicts) == (0, 0, 0)
    padded = best_swizzle(Layout((32, 32), (33, 1)), "fp32", ("ld.shared.b32", np.arange(32), 0))
    assert padded.swizzle.bits == 0


def test_several_accesses_are_all_served():
    """Accumulators stored in pairs, then read with ldmatrix: the swizzle is good for both, by counting again."""
    lane = np.arange(32)
    rows, columns = np.broadcast_arrays(lane // 4, 2 * (lane % 4) + 8 * np.arange(8)[:, None])
    found = best_swizzle((16, 64), "fp16", [("st.shared.b32", rows, columns), "ldmatrix.x4"])
    assert (triple(found.swizzle), found.conflicts) == ((3, 3, 3), 0)
    address = found.swizzle(rows * 64 + columns) * 2
    assert count_wavefronts("st.shared.b32", address)[2].tolist() == [0] * 8


def test_the_answer_is_minimal():
    """Every swizzle with fewer bits has conflicts."""
    found = best_swizzle((16, 32), "fp16", "ldmatrix.x4")
    lane = np.arange(32)
    offsets = lane % 16 * 32 + 8 * (lane // 16)
    for base in range(3, 6):
        for shift in range(1, 8):
            swizzle = Swizzle(1, base, shift, "fp16")
            assert count_wavefronts("ldmatrix.x4", swizzle(offsets) * 2)[2] > 0
    assert found.swizzle.bits == 2


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("columns", [32, 64, 128])
def test_amd_reads_of_16_bytes_are_served_in_their_groups(arch, columns):
    """Law: under the answer no two lanes of a hardware's group want different words of one bank (the operand of a 16 x
    16 MFMA: row lane % 16); and a swizzle that serves lanes in lane order is not the answer where it fails.
    """
    groups, banks = amd_phases("ds_read_b128", arch)
    lane = np.arange(64)
    row, column = lane % 16, lane // 16 * 8
    found = best_swizzle((32, columns), "bf16", ("ds_read_b128", row, column), arch=arch)
    address = found.swizzle(row * columns + column) * 2
    assert found.conflicts == 0
    for group in groups:
        bank = (address[group, None] // 4 + np.arange(4)) % banks
        assert len(np.unique(bank)) == banks


def test_where_nothing_helps_the_fewest_conflicts_are_told():
    same_bank = best_swizzle(Layout((32, 2), (32, 1)), "fp32", ("ld.shared.b32", np.arange(32), 0))
    assert same_bank.conflicts > 0
    assert "would be ideal" in str(same_bank)


@pytest.mark.parametrize(
    "access, says",
    [
        ("ld.shared.b32", "does not say where lanes go"),
        (("ld.shared.b32", np.arange(32), 0), "outside the tile"),
        (7, "must be a matrix instruction"),
        ([], "at least one access"),
    ],
)
def test_refusals(access, says):
    with pytest.raises(ValueError, match=says):
        best_swizzle((8, 32), "fp16", access)
    with pytest.raises(ValueError, match="blocks of 16 x 16, which do not divide"):
        best_swizzle((8, 24), "fp16", "ldmatrix.x4")


def test_eight_rows_are_read_by_four_matrices_side_by_side():
    lane = np.arange(32)
    found = best_swizzle((8, 64), "fp16", "ldmatrix.x4")
    places = [("ldmatrix.x4", lane % 8, first + 8 * (lane // 8)) for first in (0, 32)]
    assert (found.swizzle, found.given) == (Swizzle(3, 3, 3, "fp16"), best_swizzle((8, 64), "fp16", places).given)
