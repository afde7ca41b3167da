"""Bank conflicts between two layouts. Rests on the compiler's counts (tests/data/triton_bank_conflicts.json) and on two
laws: 4-byte banks never show fewer than the compiler's wide ones, and the rule measured on an H100 counts the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvlab.hardware.banks.count import count_wavefronts
from kvlab.hardware.banks.triton_conflicts import bank_conflicts, shared_transfer
from kvlab.layout.encodings import (
    BlockedLayout,
    NVMMASharedLayout,
    PaddedSharedLayout,
    SwizzledSharedLayout,
    from_fields,
)

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "triton_bank_conflicts.json").read_text())
EXCEPTIONS = {exception["id"]: exception["rule"] for exception in GOLDEN["exceptions"]}


def arguments(case):
    registers, shared = (from_fields(GOLDEN["layouts"][case[name]]) for name in ("registers", "shared"))
    return registers, shared, case["shape"], case["elem_bits"]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['id']}-{case['target']}")
def test_equals_the_compiler(case):
    ours = bank_conflicts(*arguments(case))
    if case["conflicts"] is None:
        assert isinstance(arguments(case)[1], PaddedSharedLayout)
    elif case["id"] not in EXCEPTIONS:
        assert ours == case["conflicts"]
    assert ours <= bank_conflicts(*arguments(case), counted="words")


def bytes_of_a_piece(case):
    access = shared_transfer(*arguments(case))
    return access.vec * access.elem_bits // 8


# the rule was measured for pieces of 4, 8 and 16 bytes
CUDA = [case for case in GOLDEN["cases"] if case["target"].startswith("cuda") and bytes_of_a_piece(case) >= 4]


@pytest.mark.parametrize("case", CUDA, ids=lambda case: case["id"])
def test_equals_the_measured_rule(case):
    """Stores never merge phases: the rule that was measured on an H100 counts the same passes, per phase."""
    access = shared_transfer(*arguments(case))
    addresses = access.offset * access.elem_bits // 8
    wavefronts, ideal, _ = count_wavefronts(f"st.shared.b{access.vec * access.elem_bits}", addresses)
    assert int((wavefronts // ideal).max()) - 1 == access.excess(counted="words")


def test_pieces_narrower_than_a_bank():
    """Lanes down a column whose swizzle moves single 2-byte elements: Triton counts 3, banks need 7."""
    column, swizzled = BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1]), SwizzledSharedLayout(1, 1, 8, [1, 0])
    assert bank_conflicts(column, swizzled, (64, 64), 16) == 3
    assert bank_conflicts(column, swizzled, (64, 64), 16, counted="words") == 7


def test_padding_removes_conflicts():
    column = BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1])
    dense = SwizzledSharedLayout(1, 1, 1, [1, 0])
    padded = PaddedSharedLayout.with_identity_for([[64, 1]], (64, 64), (1, 0))
    assert bank_conflicts(column, dense, (64, 64), 32) == 31 // 4
    assert bank_conflicts(column, padded, (64, 64), 32) == 0


def test_a_piece_stays_within_padding():
    rows = BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    padded = PaddedSharedLayout.with_identity_for([[64, 2]], (64, 64), (1, 0))
    assert shared_transfer(rows, padded, (64, 64), 16).vec == 2


def test_instructions_reach_every_element_once():
    """Conservation: the pieces of all warps are the offsets of the tensor."""
    rows, swizzled = BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]), SwizzledSharedLayout(4, 2, 4, [1, 0])
    access = shared_transfer(rows, swizzled, (64, 64), 16)
    assert access.vec == 4
    reached = access.offset.reshape(-1, 1) + np.arange(access.vec)
    assert sorted(reached.ravel()) == list(range(64 * 64))


def test_registers_that_repeat_others_move_once():
    """A thread's box is wider than the tensor; Triton before 3.9 keeps such registers."""
    wide = BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]).to_linear_layout((32, 4), triton_version="3.7.1")
    access = shared_transfer(wide, SwizzledSharedLayout(1, 1, 1, [1, 0]), (32, 4), 32)
    assert (wide.in_dims["register"], access.vec, access.offset.shape) == (16, 4, (4, 1, 32))


def test_the_version_decides_what_an_encoding_is():
    """Triton before 3.9.0 ignored ``transposed`` without a swizzle (golden: triton_layouts): columns then conflict."""
    column = BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1])
    plain = NVMMASharedLayout(0, 32, transposed=True)
    counts = [bank_conflicts(column, plain, (64, 64), 32, triton_version=v) for v in ("3.6.0", "3.7.1", "3.9.0")]
    dense = [SwizzledSharedLayout(1, 1, 1, order) for order in ([1, 0], [1, 0], [0, 1])]
    assert counts == [bank_conflicts(column, layout, (64, 64), 32) for layout in dense] == [7, 7, 0]


def test_errors():
    rows, swizzled = BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]), SwizzledSharedLayout(4, 2, 4, [1, 0])
    with pytest.raises(ValueError, match="elem_bits is 12: must be 8, 16"):
        bank_conflicts(rows, swizzled, (64, 64), 12)
    with pytest.raises(ValueError, match="'triton' or 'words'"):
        bank_conflicts(rows, swizzled, (64, 64), 16, counted="bytes")
