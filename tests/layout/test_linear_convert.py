"""Linear layouts and swizzled shape:stride layouts. Rests on a law: both give the same offsets, also of TMA images."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvlab.layout import Layout, LinearLayout, Swizzle
from kvlab.layout.encodings import NVMMASharedLayout, SwizzledSharedLayout

quick = settings(deadline=None, max_examples=100)


@st.composite
def compact_layouts(draw):
    """Modes of powers of two which share no bit, nested at random, some with stride 0."""
    bits = draw(st.permutations(range(draw(st.integers(1, 8)))))
    modes = []
    while bits:
        take = draw(st.integers(1, len(bits)))
        modes.append((tuple(2 for _ in bits[:take]), tuple(1 << bit for bit in bits[:take])))
        bits = bits[take:]
    if draw(st.booleans()):
        modes.append((4, 0))
    return Layout(tuple(shape for shape, _ in modes), tuple(stride for _, stride in modes))


@st.composite
def swizzles(draw):
    bits = draw(st.integers(0, 3))
    distance = draw(st.integers(bits, 4))
    return Swizzle(bits, draw(st.integers(0, 3)), draw(st.sampled_from([1, -1])) * distance, "bf16")


@quick
@given(compact_layouts(), swizzles())
def test_from_layout_gives_the_same_offsets(layout, swizzle):
    linear = LinearLayout.from_layout(layout, swizzle)
    np.testing.assert_array_equal(linear.coordinates()[..., 0], swizzle(layout.offsets()))


@quick
@given(compact_layouts())
def test_round_trip(layout):
    linear = LinearLayout.from_layout(layout)
    back = linear.to_layout()
    np.testing.assert_array_equal(back.offsets(), layout.offsets())
    assert LinearLayout.from_layout(back) == linear


@quick
@given(compact_layouts(), swizzles())
def test_swizzled_round_trip(layout, swizzle):
    linear = LinearLayout.from_layout(layout, swizzle)
    assume(linear.shape[0] >= swizzle.period)
    back, found = linear.to_swizzled_layout("bf16")
    assert LinearLayout.from_layout(back, found).bases == linear.bases
    assert found.bits <= swizzle.bits


@pytest.mark.parametrize("width, expected", [(32, (1, 3, 3)), (64, (2, 3, 3)), (128, (3, 3, 3))])
def test_tma_swizzles_of_bf16(width, expected):
    """The hardware's modes are Sw<n,3,3> on 2-byte elements."""
    place = NVMMASharedLayout(width, 16).to_linear_layout((64, width)).invert()
    inner, swizzle = place.reshape({"offset": 64 * width}).to_swizzled_layout("bf16")
    assert swizzle == Swizzle(*expected, "bf16")
    panel = width // 2
    r, c = np.ix_(np.arange(64), np.arange(width))
    np.testing.assert_array_equal(inner.offsets(), c // panel * 64 * panel + r * panel + c % panel)


def test_triton_swizzle_as_layout():
    place = SwizzledSharedLayout(8, 1, 8, [1, 0]).to_linear_layout((16, 64)).invert().reshape({"offset": 1024})
    assert place.to_swizzled_layout("bf16") == (Layout("(16,64):(64,1)"), Swizzle(3, 3, 3, "bf16"))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: LinearLayout.from_layout(Layout("(3,4):(4,1)")), "mode 3:4 is not a power of two"),
        (lambda: LinearLayout.from_layout(Layout("(4,4):(-1,4)")), "mode 4:-1 is not a power of two with"),
        (lambda: LinearLayout.from_layout(Layout("(4,4):(1,1)")), "strides overlap in the bits 0x3, so sums carry"),
        (lambda: LinearLayout({"a": [[1], [3]]}, {"offset": 4}).to_layout(), "share the bits 0x1"),
        (lambda: LinearLayout({"a": [[1, 0]]}, (2, 2)).to_layout(), "one output, its offset"),
        (lambda: LinearLayout({"a": [[1], [1]]}, {"o": 2}).to_swizzled_layout("byte"), "no swizzle"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
