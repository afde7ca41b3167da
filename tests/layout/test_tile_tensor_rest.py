"""Slices, splits, casts, legacy tensors, copies and arithmetic of TileTensor. Rests on NumPy views of the bytes, on
values printed by compiled programs (tests/data/layout_mojo.json), and on worked numbers of the package's tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.layout import Layout, Swizzle, TileTensor
from kvlab.layout.algebra.int_tuple import int_tuple
from kvlab.layout.tensor.tile_ops import Fill
from kvlab.memory import AddressSpace, Memory, OutOfBounds, bfloat16

CASES = json.loads((Path(__file__).parent.parent / "data" / "layout_mojo.json").read_text())["cases"]


def of(op):
    return [pytest.param(c["inputs"], c["expected"], id=f"{op}-{c['id']}") for c in CASES if c["op"] == op]


def numbered(*shape, dtype=np.int32):
    return np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)


def legacy(inputs):
    layout = Layout(int_tuple(inputs["layout"]["shape"]), int_tuple(inputs["layout"]["stride"]))
    memory = Memory.over(np.arange(2 * layout.cosize, dtype=np.int32))  # a swizzled fragment may reach past the tensor
    return TileTensor(memory, np.int32, layout).vectorize(*inputs["vector"], legacy=True)


def listed(value):
    """Elements in lexicographic order, vectors as lists."""
    return (value[..., 0] if value.shape[-1] == 1 else value).tolist()


class TestLegacy:
    @pytest.mark.parametrize("inputs, expected", of("lt_vectorize"))
    def test_vectorize(self, inputs, expected):
        tensor = legacy(inputs)
        for ours, theirs in ((tensor.layout, "layout"), (tensor.element_layout, "element_layout")):
            assert ours == Layout(int_tuple(expected[theirs]["shape"]), int_tuple(expected[theirs]["stride"]))
        assert listed(tensor.load().reshape(-1, tensor.element_size)) == expected["values"]

    @pytest.mark.parametrize("inputs, expected", of("lt_distribute"))
    def test_distribute(self, inputs, expected):
        tensor = legacy(inputs)
        threads = Layout(int_tuple(inputs["thread_layout"]["shape"]), int_tuple(inputs["thread_layout"]["stride"]))
        swizzle = None
        if inputs["swizzle"]:
            bits, base, shift = inputs["swizzle"]
            swizzle = Swizzle(bits, base + tensor.element_size.bit_length() - 1, shift, np.int32)
        fragments = tensor.distribute(threads, np.arange(threads.size), swizzle, legacy=True).load()
        assert listed(fragments.reshape(threads.size, -1, tensor.element_size)) == expected["per_thread_values"]

    def test_stores_scatter_and_bounds_cut(self):
        array = np.zeros((8, 4), np.int32)
        TileTensor.from_numpy(array).vectorize(4, 1, legacy=True).store_at(0, 1, value=np.array([1, 2, 3, 4], np.int32))
        assert array[:, 1].tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
        bounded = TileTensor.from_numpy(numbered(8, 4)).with_valid_rows(2).vectorize(4, 1, legacy=True)
        assert bounded.load()[0, 1].tolist() == [1, 5, 0, 0]

    def test_nested_threads(self):
        """A nested mode of threads is the flat one with its coordinate split."""
        t = TileTensor.from_numpy(numbered(8, 8))
        nested = t.distribute(Layout("((2,2),2):((1,4),2)"), np.arange(8), legacy=True)
        row, column = np.arange(8) % 2 + np.arange(8) // 4 * 2, np.arange(8) // 2 % 2
        flat = t.distribute(Layout("(4,2):(2,1)"), 2 * row + column)
        assert nested.load()[..., 0].reshape(8, -1).tolist() == flat.load()[..., 0].reshape(8, -1).tolist()

    def test_axis_shares_fragments(self):
        t = TileTensor.from_numpy(numbered(16))
        values = t.distribute(Layout.row_major(4, 2), np.arange(8), legacy=True, axis=0).load()[..., 0]
        assert values.tolist() == [[lane // 2 + 4 * i for i in range(4)] for lane in range(8)]
        with pytest.warns(UserWarning, match="submode_axis=0 has no effect"):
            t.distribute(Layout.row_major(4, 2), 0, legacy=True, axis=0, submode_axis=0)
        with pytest.raises(ValueError, match="must be None unless legacy=True"):
            t.distribute(Layout(4), 0, axis=0)

    def test_tile_is_clipped(self):
        t = TileTensor.from_numpy(numbered(5, 6))
        assert t.tile((2, 4), (2, 1), legacy=True).to_numpy().tolist() == [[28, 29]]
        with pytest.raises(ValueError, match="mode 0 has 3 tiles"):
            t.tile((2, 4), (3, 0), legacy=True)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_slices_are_numpys(shape, data):
    array = numbered(*shape)
    t = TileTensor.from_numpy(array)
    bound = st.none() | st.integers(-6, 6)
    parts = tuple(
        data.draw(st.integers(0, n - 1) | st.builds(slice, bound, bound))
        if mode
        else data.draw(st.builds(slice, bound))
        for mode, n in enumerate(shape)
    )
    assert t[parts].to_numpy().tolist() == array[parts].tolist()


class TestViews:
    def test_slice_takes_arrays_over_the_leading_axes(self):
        array = numbered(3, 4, 2)
        rows = TileTensor.from_numpy(array).slice(np.array([2, 0]), (1, 3), slice(None))
        assert (rows.to_numpy() == array[[2, 0], 1:3]).all()

    def test_items(self):
        array = numbered(3, 4)
        t = TileTensor.from_numpy(array)
        t[1, 2] = 70
        t[2, 1:3] = 9
        t[0:1, :] += 100
        assert array.tolist() == [[100, 101, 102, 103], [4, 5, 70, 7], [8, 9, 9, 11]]
        assert t.vectorize(1, 4)[1, 0].tolist() == [4, 5, 70, 7]
        with pytest.raises(ValueError, match="one index for each of the 2 leaves"):
            t[1] = 3

    @pytest.mark.parametrize(
        "extent, count, alignment, sizes", [(8, 3, 3, [3, 3, 2]), (8, 3, 4, [4, 4, 0]), (5, 2, 1, [3, 2])]
    )
    def test_split(self, extent, count, alignment, sizes):
        array = numbered(2, extent)
        parts = [TileTensor.from_numpy(array).split(count, 1, index=i, alignment=alignment) for i in range(count)]
        assert [part.shape[1] for part in parts] == sizes
        assert np.concatenate([part.to_numpy() for part in parts if part.shape[1]], axis=1).tolist() == array.tolist()

    def test_split_in_equal_parts(self):
        array = numbered(6, 2)
        parts = TileTensor.from_numpy(array).split(3)
        assert [part.to_numpy().tolist() for part in parts] == [array[i : i + 2].tolist() for i in (0, 2, 4)]
        with pytest.raises(ValueError, match="4 does not divide 6"):
            TileTensor.from_numpy(array).split(4)

    def test_tile_with_offset(self):
        tile, corner, offset = TileTensor.from_numpy(numbered(8, 8).T).tile_with_offset((4, 2), (1, 3))
        assert (corner, offset, tile.to_numpy().tolist()) == ((4, 6), 52, [[52, 60], [53, 61], [54, 62], [55, 63]])

    def test_reshapes(self):
        array = numbered(2, 3, 4)
        t = TileTensor.from_numpy(array)
        assert t.flatten_leading().to_numpy().tolist() == array.reshape(6, 4).tolist()
        assert t.coalesce().to_numpy().tolist() == t.as_span().to_numpy().tolist() == array.ravel().tolist()
        for refused in (t.transpose().coalesce, t.transpose().flatten_leading):
            with pytest.raises(ValueError, match="dense row-major"):
                refused()

    def test_bitcast(self):
        t = TileTensor.from_numpy(np.array([[1.0, 2.0]], np.float32))
        assert t.bitcast(np.uint32).to_numpy().tolist() == [[0x3F800000, 0x40000000]]
        with pytest.warns(UserWarning, match="strides now count 2 bytes"):
            halves = t.tile((1, 1), (0, 1)).bitcast(np.uint16)
        assert halves.load()[0, 0, 0] == 0  # low half of 2.0f
        half = TileTensor.from_numpy(np.zeros(4, np.uint16)).tile((1,), (1,))
        with (
            pytest.warns(UserWarning, match="4 bytes each"),
            pytest.raises(ValueError, match="starts inside a scalar of 4 bytes"),
        ):
            half.bitcast(np.float32)

    def test_immutable(self):
        t = TileTensor.from_numpy(numbered(4)).as_immut()
        for store in (lambda: t.tile((2,), (0,)).fill(1), lambda: t.raw_store(0, np.int32(1))):
            with pytest.raises(ValueError, match="immutable"):
                store()

    def test_raw_and_linear(self):
        array = numbered(4, 4)
        t = TileTensor.from_numpy(array).tile((2, 2), (1, 1))
        assert t.raw_load(2, 2).tolist() == [12, 13]
        t.raw_store(np.array([0, 4]), np.array([[50], [60]], np.int32))
        assert (array[2, 2], array[3, 2]) == (50, 60)
        assert t.load_linear(1, 0).tolist() == [60]
        assert t.ptr_at_offset(1, 1) == 15 * 4
        with pytest.raises(OutOfBounds):
            t.raw_load(6)

    def test_printing(self):
        assert str(TileTensor.from_numpy(numbered(2, 3))) == "[[0, 1, 2], [3, 4, 5]]"
        assert str(TileTensor.from_numpy(numbered(2, 2, 2) + 1)) == "[1, 5, 3, 7, 2, 6, 4, 8]"
        assert str(TileTensor.from_numpy(numbered(0, 3))) == ""


class TestCopies:
    def test_orders(self):
        source = TileTensor.from_numpy(numbered(2, 6))
        result = {order: np.zeros((3, 4), np.int32) for order in (None, "memory", "colex")}
        for order, array in result.items():
            TileTensor.from_numpy(array).copy_from(source, order=order)
        assert result[None].tolist() == result["memory"].tolist() == numbered(3, 4).tolist()
        assert result["colex"].T.ravel().tolist() == numbered(2, 6).T.ravel().tolist()
        with pytest.raises(ValueError, match="order is 'C'"):
            TileTensor.from_numpy(result[None]).copy_from(source, order="C")

    def test_padded_target(self):
        array = np.full(8, -1.0, np.float32)
        t = TileTensor(Memory.over(array), np.float32, Layout("(2,3):(4,1)"))
        t.copy_from(TileTensor.from_numpy(np.arange(1.0, 7.0).reshape(2, 3)))
        assert array.tolist() == [1, 2, 3, -1, 4, 5, 6, -1]

    @pytest.mark.parametrize("bits", [0, 2, 3])
    def test_async_swizzle_is_that_of_the_whole_tile(self, bits):
        """Fragments of all lanes together put element at d to swizzle(d) from the tile's first."""
        dram = TileTensor.from_numpy(numbered(16, 64, dtype=np.int16).view(np.float16))
        smem = TileTensor.stack_allocation(Layout.row_major(16, 64), np.float16)
        swizzle = Swizzle(bits, 3, 3, np.float16)
        threads, lanes = Layout.row_major(4, 8), np.arange(32)
        to = smem.vectorize(1, 8).distribute(threads, lanes)
        to.copy_from_async(dram.vectorize(1, 8).distribute(threads, lanes), swizzle=swizzle, base_offset=to.offset)
        image = smem.memory.image(np.int16)
        assert image[swizzle(np.arange(1024))].tolist() == list(range(1024))

    @pytest.mark.parametrize("fill, beyond", [(Fill.ZERO, 0.0), (Fill.NONE, 7.0), (Fill.NAN, np.nan)])
    def test_async_mask(self, fill, beyond):
        """Example of the package: 64 rows, 50 valid; and nothing out of bounds is read."""
        rows = np.arange(50 * 64).reshape(50, 64).astype(bfloat16)
        dram = TileTensor(Memory.over(rows), bfloat16, Layout.row_major(64, 64)).vectorize(1, 8)
        smem = TileTensor.stack_allocation(Layout.row_major(64, 64), bfloat16).fill(7)
        smem.vectorize(1, 8).copy_from_async(dram, is_masked=True, src_idx_bound=50 * 64, fill=fill)
        result = smem.to_numpy()
        assert (result[:50] == rows).all()
        assert np.array_equal(result[50:].astype(np.float32), np.full((14, 64), beyond, np.float32), equal_nan=True)

    def test_async_bound_of_each_lane(self):
        dram = TileTensor.from_numpy(numbered(8, 4)).vectorize(1, 4)
        smem = TileTensor.stack_allocation(Layout.row_major(8, 4), np.int32)
        lanes = dram.distribute(Layout.row_major(4, 1), np.arange(4))
        smem.vectorize(1, 4).distribute(Layout.row_major(4, 1), np.arange(4)).copy_from_async(
            lanes, is_masked=True, src_idx_bound=5 * 4 - lanes.offset, fill=Fill.ZERO
        )
        assert smem.to_numpy().tolist() == [*numbered(5, 4).tolist(), *[[0] * 4] * 3]

    @pytest.mark.parametrize(
        "change, says",
        [
            (lambda d, s: (d, s, {"swizzle": Swizzle(2, 0, 3, "fp32")}), "moves pieces of 4 bytes"),
            (lambda d, s: (s, d, {}), "to shared memory"),
            (lambda d, s: (d.bitcast("int32"), s, {}), "equal dtypes"),
            (lambda d, s: (d.tile((4, 1), (0, 0)), s, {}), "element counts"),
            (lambda d, s: (d, s.with_valid_rows(1), {}), "must be without valid_rows"),
            (lambda d, s: (d.bitcast("int32"), s.bitcast("int32"), {"fill": Fill.NAN}), "16-byte float elements"),
        ],
    )
    def test_async_refusals(self, change, says):
        dram = TileTensor.from_numpy(np.zeros((8, 4), np.float32)).vectorize(1, 4)
        smem = TileTensor.stack_allocation(Layout.row_major(8, 4), "fp32").vectorize(1, 4)
        to, source, keywords = change(smem, dram)
        with pytest.raises(ValueError, match=says):
            to.copy_from_async(source, **keywords)
        assert not smem.memory.written.any()

    def test_async_element_of_two_bytes_is_refused(self):
        dram = TileTensor.from_numpy(np.zeros((8, 4), np.float16))
        with pytest.raises(ValueError, match="must be elements of 4, 8 or 16 contiguous bytes, not 2"):
            TileTensor.stack_allocation(Layout.row_major(8, 4), "fp16").copy_from_async(dram)


class TestInPlace:
    def test_row_broadcast(self):
        array = np.array([[1.0, 2.0], [3.0, 4.0]])
        t = TileTensor.from_numpy(array)
        t += TileTensor.from_numpy(np.array([100.0, 200.0]))
        assert array.tolist() == [[101, 102], [203, 204]]

    @pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
    def test_operations_are_numpys_in_the_dtype(self, dtype):
        a, b = (np.linspace(0.5, 3, 12).reshape(3, 4) * k for k in (1, -1.5))
        a, b = a.astype(dtype), b.astype(dtype)
        t, other = TileTensor.from_numpy(a.copy()), TileTensor.from_numpy(b.copy())
        t += other
        t *= 3
        t -= other
        t /= other
        expected = ((a + b) * dtype(3) - b) / b if dtype is not bfloat16 else ((a + b) * np.asarray(3, dtype) - b) / b
        assert (t.to_numpy() == expected).all()
        t.max(other).min(1).abs().exp(0.5).recip()
        step = np.abs(np.minimum(np.maximum(expected, b), np.asarray(1, dtype)))
        last = np.asarray(1, dtype) / np.exp(step * np.asarray(0.5, dtype))
        assert (t.to_numpy() == last).all()

    def test_integers(self):
        t = TileTensor.from_numpy(numbered(2, 3))
        t //= 2
        assert t.to_numpy().tolist() == [[0, 0, 1], [1, 2, 2]]
        with pytest.raises(ValueError, match="must be floats"):
            t /= 2
        with pytest.raises(ValueError, match="same shape, or one value a row"):
            t += TileTensor.from_numpy(numbered(3))

    def test_fill_of_vectors(self):
        array = np.zeros((2, 4), np.float32)
        t = TileTensor.from_numpy(array).vectorize(1, 4)
        with pytest.warns(UserWarning, match="the first of the 4 scalars"):
            t.fill(3, original=True)
        assert array.tolist() == [[3, 0, 0, 0]] * 2
        t.fill(5)
        assert (array == 5).all()

    def test_original_stack_is_too_small_for_padding(self):
        layout = Layout("(2,3):(4,1)")
        assert TileTensor.stack_allocation(layout, "fp32").memory.nbytes == 28
        with pytest.warns(UserWarning, match="reaches 7 scalars, but only 6"):
            t = TileTensor.stack_allocation(layout, "fp32", AddressSpace.LOCAL, original=True)
        with pytest.raises(OutOfBounds):
            t.fill(0)
