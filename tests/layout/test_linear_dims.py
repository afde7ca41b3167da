"""The dimensions of linear layouts. Rests on laws: what an index leads to is the same, however its dimensions are named
and cut."""

import numpy as np
import pytest

from kvlab.layout import ColumnAction, LinearLayout

LAYOUT = LinearLayout(
    {"register": [[0, 1], [0, 2], [3, 8]], "lane": [[1, 0], [2, 4], [0, 0]], "warp": [[4, 8]]}, {"dim0": 8, "dim1": 16}
)
GRID = np.ix_(np.arange(8), np.arange(8), np.arange(2))
TABLE = LAYOUT.coordinates()  # [register, lane, warp, (dim0, dim1)]


def test_inputs_are_one_number_whose_first_dimension_is_fastest():
    index = np.arange(128)
    flat = LAYOUT.flatten_ins("i")
    np.testing.assert_array_equal(np.stack(flat(i=index), -1), TABLE[index % 8, index // 8 % 8, index // 64])
    cut = LAYOUT.reshape_ins({"a": 4, "b": 1, "c": 32})
    assert cut.in_dims == {"a": 4, "b": 1, "c": 32}
    assert cut.flatten_ins("i") == flat == LAYOUT.flatten_ins().rename({"register": "i"})
    turned = LAYOUT.transpose_ins("warp", "register", "lane")
    np.testing.assert_array_equal(turned.coordinates(), TABLE.transpose(2, 0, 1, 3))
    assert LAYOUT.transpose_ins() == turned.transpose_ins("warp", "lane", "register")


def test_parts_put_together_are_the_whole():
    lane = LAYOUT.sublayout(["lane"], ["dim0", "dim1"])
    rest = LAYOUT.sublayout(["register", "warp"], ["dim0", "dim1"])
    np.testing.assert_array_equal(lane.coordinates(), TABLE[0, :, 0])
    assert rest.concat_ins(lane).transpose_ins("register", "lane", "warp") == LAYOUT
    columns, every = LAYOUT.sublayout(LAYOUT.in_dims, ["dim1"]), LAYOUT.sublayout(LAYOUT.in_dims, "dim0")
    np.testing.assert_array_equal(columns.coordinates()[..., 0], TABLE[..., 1])
    assert every.concat_outs(columns) == LAYOUT
    cluster = LAYOUT * LinearLayout.identity1d(4, "block", "block")
    assert cluster.quotient(["block"]) == LAYOUT


def test_dimensions_are_cut():
    np.testing.assert_array_equal(LAYOUT.resize_in("lane", 2).coordinates(), TABLE[:, :2])
    np.testing.assert_array_equal(LAYOUT.resize_in("lane", 1).coordinates(), TABLE[:, :1])
    small = LAYOUT.resize_out("dim1", 4)
    assert small.bases == {"register": [[0, 1], [0, 2], [3, 0]], "lane": [[1, 0], [2, 0], [0, 0]], "warp": [[4, 0]]}


@pytest.mark.parametrize(("layout", "dims", "count"), [
    (LAYOUT, (), 4), (LAYOUT, ("lane", "dim0"), 1), (LAYOUT.resize_in("register", 4), ("lane", "dim0"), 2),
    (LinearLayout({"register": [[2], [1]]}, (4,)), (), 1),
    (LinearLayout({"register": [[1], [2]], "x": [[2]]}, (4,)), (), 2),
    (LinearLayout({"register": [[1], [2], [3]]}, (4,)), (), 1), (LinearLayout({"x": [[1], [2], [6]]}, (8,)), (), 2),
])  # fmt: skip
def test_vectors_are_consecutive_wherever_they_start(layout, dims, count):
    assert layout.num_consecutive(*dims) == count
    source, target = dims or (next(iter(layout.in_dims)), list(layout.out_dims)[-1])
    axis = list(layout.out_dims).index(target)
    table = np.moveaxis(layout.coordinates(), list(layout.in_dims).index(source), 0)
    for n in (count, 2 * count):
        if n <= len(table):
            vectors = table.reshape(-1, n, *table.shape[1:])
            step = np.zeros_like(vectors)
            step[..., axis] = np.arange(n).reshape(1, n, *(1,) * (table.ndim - 2))
            assert np.array_equal(vectors, vectors[:, :1] + step) == (n == count)


def test_actions_move_layouts_and_values_alike():
    action = ColumnAction("register", (2, 0), 3)
    values = TABLE[:, 5, 1]  # of one lane, a value for each register
    moved = action.apply(LAYOUT)
    np.testing.assert_array_equal(action.apply_values(values, axis=0), moved.coordinates()[:, 5, 1])
    turn = ColumnAction("register", (1, 2, 0), 3)
    assert turn.after(turn.inverse()).is_identity
    assert not turn.is_identity
    assert action.after(turn).apply(LAYOUT) == action.apply(turn.apply(LAYOUT))
    assert LAYOUT.broadcast_free("lane").apply(LAYOUT) == LAYOUT.resize_in("lane", 4)


def test_ways_into_a_larger_buffer_of_another_order():
    """Law of the inverse: the same element, whatever the order of dimensions and the size of the buffer."""
    buffer = LinearLayout({"offset": [[1, 0], [2, 1], [4, 0], [0, 1], [0, 2], [8, 0]]}, {"dim1": 16, "dim0": 4})
    tile = LinearLayout({"lane": [[1, 0], [0, 2], [1, 4]]}, {"dim0": 2, "dim1": 8})
    way = tile.invert_and_compose(buffer)
    lane = np.arange(8)
    np.testing.assert_array_equal(np.stack(buffer(offset=way(lane=lane)[0])), np.stack(tile(lane=lane))[::-1])


@pytest.mark.parametrize(("call", "message"), [
    (lambda: LAYOUT.transpose_ins("lane"), "must be a permutation"),
    (lambda: LAYOUT.reshape_ins({"a": 4}), "the size 128"),
    (lambda: LAYOUT.reshape_ins({"a": 3}), "a of size 3: must be a power"),
    (lambda: LAYOUT.concat_ins(LAYOUT), "in both"),
    (lambda: LAYOUT.concat_outs(LAYOUT), r"output dimensions \['dim0', 'dim1'\] are in both"),
    (lambda: LAYOUT.sublayout(["thread"], ["dim0"]), r"in_dims is \['thread'\]"),
    (lambda: LAYOUT.quotient(["lane"]), "names is .* must be among"),
    (lambda: LAYOUT.resize_in("lane", 16), "at most the 8"),
    (lambda: LinearLayout({"a": [[2], [1]]}, {"a": 4}).quotient(["a"]), r"a=1 leads to \[2\]"),
    (lambda: LinearLayout({"a": [[1]]}, {"a": 4}).quotient(["a"]), "a has 2 indices and 4"),
    (lambda: LinearLayout({"a": [[1, 0]], "b": [[1, 1]]}, {"a": 2, "c": 2}).quotient("a"), "b=1 leads to"),
    (lambda: LAYOUT.num_consecutive("thread"), "in_dim is"),
    (lambda: ColumnAction("lane", (0, 0), 2), "different bits"),
    (lambda: ColumnAction("lane", (0,), 2).inverse(), "leaves bits out"),
    (lambda: ColumnAction("lane", (0, 1), 2).apply(LAYOUT), "must be a layout with 4 of lane"),
    (lambda: LAYOUT.product(LAYOUT.transpose_ins()), "common names in one order"),
    (lambda: LinearLayout({}, (2,)).flatten_ins(), "name is None"),
])  # fmt: skip
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
