"""Views inside their tensor (law: the byte addresses that the view itself gives)."""

from __future__ import annotations

import dataclasses
import re
from unittest import mock

import numpy as np
import pytest

from kvlab.layout import Layout, TileTensor
from kvlab.viz import draw, draw_tile_tensor
from kvlab.viz.tile_tensor import _Held


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
            assert f"lane {lane}, element {4 * vector + scalar}\n" in title
            assert f"byte {address[lane, vector] + 4 * scalar}," in title


def test_views_of_views_are_drawn_in_the_first(sound) -> None:
    view = tensor().tile((4, 8), (0, 1)).vectorize(1, 4).distribute(Layout.row_major(4, 2), np.arange(8))
    picture = draw(view)
    sound(picture)
    assert picture.title == "8 lanes share (8,16):(16,1): 4 elements each, in vectors of 4"
    assert sorted(re.findall(r">(T\d e\d–\d)<", picture.body)) == [f"T{lane} e0–3" for lane in range(8)]


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


@pytest.mark.parametrize(
    ("whole", "vector", "threads"),
    [
        (Layout.row_major(128, 64), 8, Layout.row_major(16, 8)),
        (Layout.row_major(128, 64), 1, Layout.row_major(8, 4)),
        (Layout.row_major(64, 256), 4, Layout.col_major(4, 8)),
        (Layout.row_major(8, 16), 1, Layout.row_major(4, 8)),
    ],
    ids=str,
)
def test_every_box_of_a_shared_out_tile_is_named(whole: Layout, vector: int, threads: Layout, sound, overlaps) -> None:
    lane = np.arange(32)
    shares = TileTensor.stack_allocation(whole, "bf16").vectorize(1, vector).distribute(threads, lane)
    picture = draw(shares)
    texts = {(t.text or "").split()[0] for t in sound(picture).iter("{http://www.w3.org/2000/svg}text") if t.text}
    assert {f"T{i}" for i in lane} <= texts
    assert not overlaps(picture)


def views(whole: TileTensor) -> list[TileTensor]:
    tile = whole.tile((16, 32), (3, 5))
    lanes = np.arange(32)
    return [
        tile,
        tile.vectorize(1, 8),
        tile.vectorize(1, 8).distribute(Layout.row_major(8, 4), lanes),
        tile.distribute(Layout.row_major(4, 8), lanes),
        whole.vectorize(1, 4).distribute(Layout.row_major(8, 4), lanes).tile((2, 2), (1, 0)),
    ]


@pytest.mark.parametrize("k", range(5))
def test_what_is_told_by_strides_is_what_all_places_tell(k: int, hovers, sound) -> None:
    """Rests on the list of all places of a view: where it is too long to be made, strides find the same."""
    view = views(TileTensor.stack_allocation(Layout.row_major(64, 256), "bf16"))[k]
    short, of = draw(view), _Held.of
    with (
        mock.patch.object(_Held, "of", lambda tensor: dataclasses.replace(of(tensor), ordered=None, order=None)),
        mock.patch("kvlab.viz.model.offset_grid.FEW", 0),
    ):
        assert hovers(sound(draw(view))) == hovers(sound(short))
