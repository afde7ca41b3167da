"""A tile in registers and back: laws, with maps drawn by Hypothesis."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.staging import FragmentMap, Fragments


@st.composite
def maps(draw: st.DrawFn) -> FragmentMap:
    """Every element of a tile in one register, a few of them in a second one."""
    rows, cols = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    extra = draw(st.integers(0, 2)) * rows * cols
    flat = np.r_[np.arange(rows * cols), draw(st.permutations(range(rows * cols))) * 2][: rows * cols + extra]
    flat = flat[np.random.default_rng(draw(st.integers(0, 99))).permutation(flat.size)]
    flat = flat.reshape(rows, -1, cols) if draw(st.booleans()) else flat.reshape(-1, 1, 1)
    return FragmentMap((rows, cols), flat // cols, flat % cols)


@given(maps())
def test_gather_undoes_spread(layout: FragmentMap) -> None:
    tile = np.random.default_rng(0).standard_normal((3, *layout.shape))
    registers = layout.spread(tile)
    assert registers.shape == (3, *layout.row.shape)
    assert (registers == tile[:, layout.row, layout.col]).all()
    assert (layout.gather(registers) == tile).all()
    assert (Fragments(registers, layout).tile() == tile).all()


@given(maps())
def test_by_row(layout: FragmentMap) -> None:
    vector = np.arange(2 * layout.shape[0]).reshape(2, -1)
    seen = Fragments(layout.spread(np.zeros((2, *layout.shape))), layout).by_row(vector)
    assert (layout.gather(seen) == vector[:, :, None]).all()


def test_with_values_keeps_the_layout() -> None:
    layout = FragmentMap((1, 2), np.zeros((2, 1, 1), int), np.arange(2).reshape(2, 1, 1))
    one = Fragments(np.ones((1, 2, 1, 1)), layout)
    assert one.with_values(one.values * 2).map is layout
    assert one.with_values(one.values * 2).tile().tolist() == [[[2, 2]]]


def test_a_register_outside_the_tile() -> None:
    with pytest.raises(ValueError, match="outside the tile 1 x 2"):
        FragmentMap((1, 2), np.zeros((1, 1, 1), int), np.full((1, 1, 1), 2))


def test_an_element_that_no_register_holds() -> None:
    layout = FragmentMap((2, 3), np.array([[[0, 0, 0, 1, 1]]]), np.array([[[0, 1, 2, 0, 2]]]))
    with pytest.raises(ValueError, match=r"no register holds element \(1, 1\) of the tile 2 x 3"):
        layout.gather(np.zeros((1, 1, 1, 5)))
