"""Views inside their tensor (law: the byte addresses that the view itself gives)."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvlab.layout import Layout, TileTensor
from kvlab.viz import draw, draw_tile_tensor


def tensor(programs: int | None = None) -> TileTensor:
    return TileTensor.stack_allocation(Layout.row_major(8, 16), "fp32", programs=programs)


def bright(picture) -> int:
    """Labels with a background: the cells that are not dimmed."""
    return len(re.findall(r"<text", "".join(re.findall(r'<g fill="#[0-9a-f]{6}"[^>]*>.*?</g>', picture.body))))


def test_a_tile_is_bright_and_the_rest_dimmed(sound, hovers, overlaps) -> None:
    tile = tensor().tile((4, 8), (1, 1))
    picture = draw(tile)
    assert len(hovers(sound(picture))) == 128
    assert bright(picture) == 32
    assert picture.title == "(4,8):(16,1) at element 72 of (8,16):(16,1): 32 of 128 elements"
    assert not overlaps(picture)


@pytest.mark.parametrize("programs", [None, 3])
def test_lanes_are_named_where_their_bytes_are(programs: int | None, sound, hovers) -> None:
    whole = tensor(programs)
    shares = whole.vectorize(1, 4).distribute(Layout.row_major(4, 4), np.arange(16))
    found = hovers(sound(draw(shares)))
    address = shares.addresses().reshape(-1, 16, 2)[0]  # [lanes, vectors]
    for lane, vector in np.ndindex(address.shape):
        for scalar in range(4):
            title = found[address[lane, vector] // 4 + scalar]
            assert f"thread {lane}: warp 0, lane {lane}, register {4 * vector + scalar}" in title
            assert f"byte {address[lane, vector] + 4 * scalar}," in title


def test_views_of_views_are_drawn_in_the_first(sound) -> None:
    view = tensor().tile((4, 8), (0, 1)).vectorize(1, 4).distribute(Layout.row_major(4, 2), np.arange(8))
    picture = draw(view)
    sound(picture)
    assert picture.title == "8 lanes share (8,16):(16,1): 4 elements each, in vectors of 4"
    assert len(re.findall(r">T\d<", picture.body)) == 32


def test_a_tensor_of_its_own_and_a_given_parent(sound) -> None:
    whole = tensor()
    assert whole.parent is None
    assert draw(whole).title.startswith("(8,16):(16,1): +1 along a row")
    tile = whole.tile((4, 8), (1, 0))
    assert tile.parent is whole
    assert tile.transpose().parent is whole
    inner = tile.tile((2, 2), (1, 1))
    sound(draw_tile_tensor(inner, inside=tile))
    assert draw_tile_tensor(inner, inside=tile).title == "(2,2):(16,1) at element 98 of (4,8):(16,1): 4 of 32 elements"
    with pytest.raises(ValueError, match="their memories differ"):
        draw_tile_tensor(tile, inside=tensor())
