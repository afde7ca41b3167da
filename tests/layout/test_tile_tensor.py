"""TileTensor on one thread and on many. Rests on the worked numbers of the Mojo layout package's own tests, on NumPy's
indexing of the same data, and on a law: a lane array gives what the single lanes give, one after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.layout import Layout, Swizzle, TileTensor
from kvlab.memory import AddressSpace, Memory, OutOfBounds, UnwrittenRead, bfloat16


def numbered(*shape, dtype=np.float32):
    return np.arange(np.prod(shape)).astype(dtype).reshape(shape)


def tensor(*shape, dtype=np.float32):
    return TileTensor.from_numpy(numbered(*shape, dtype=dtype))


class TestWorkedNumbers:
    def test_tile(self):
        tile = tensor(8, 16).tile((4, 8), (1, 1))
        assert (tile.offset, tile.layout) == (72, Layout("(4,8):(16,1)"))
        assert (tile.to_numpy() == numbered(8, 16)[4:8, 8:16]).all()

    def test_vectorize(self):
        vectors = tensor(8, 16).vectorize(1, 4)
        assert vectors.layout == Layout("(8,4):(16,4)")
        assert vectors.load_at(3, 2).tolist() == [56, 57, 58, 59]

    def test_vectorize_16_bytes_by_default(self):
        assert tensor(8, 16).vectorize().element_size == 4
        assert tensor(8, 16, dtype=bfloat16).vectorize().layout == Layout("(8,2):(16,8)")

    @pytest.mark.filterwarnings("ignore:vectorize")
    def test_vectorize_4_by_4(self):
        vectors = tensor(16, 16).vectorize(4, 4)
        assert (vectors.layout, vectors.element_size) == (Layout("(4,4):(64,4)"), 16)
        assert vectors.layout(3, 3) == 204

    def test_distribute(self):
        fragment = tensor(8, 16).vectorize(1, 4).distribute(Layout.row_major(4, 4), 5)
        assert (fragment.offset, fragment.layout) == (20, Layout("(2,1):(64,16)"))

    def test_distribute_swizzled(self):
        vectors = tensor(8, 16).vectorize(1, 4)
        lanes = vectors.distribute(Layout.row_major(8, 4), np.arange(16), Swizzle(2, 0, 2, "vector"))
        assert lanes.offset.tolist() == [0, 4, 8, 12, 20, 16, 28, 24, 40, 44, 32, 36, 60, 56, 52, 48]

    def test_distribute_swizzled_scalars(self):
        lanes = tensor(4, 4).distribute(Layout.row_major(2, 2), np.arange(4), Swizzle(1, 0, 2, np.float32))
        assert lanes.offset.tolist() == [0, 1, 5, 4]

    def test_each_thread_writes_a_running_counter(self):
        out = TileTensor.from_numpy(np.zeros((4, 4), np.int32))
        lanes = out.distribute(Layout.row_major(2, 2), np.arange(4))
        lanes.store(np.arange(16, dtype=np.int32).reshape(4, 2, 2, 1))
        assert out.to_numpy().reshape(-1).tolist() == [0, 4, 1, 5, 8, 12, 9, 13, 2, 6, 3, 7, 10, 14, 11, 15]

    def test_each_tile_writes_a_running_counter(self):
        out = TileTensor.from_numpy(np.zeros((4, 4), np.int32))
        tiles = out.tile((2, 2), (np.arange(4) // 2, np.arange(4) % 2))
        tiles.store(np.arange(16, dtype=np.int32).reshape(4, 2, 2, 1))
        assert out.to_numpy().reshape(-1).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]

    def test_slice(self):
        part = tensor(2, 3, 4, 2).slice(1, slice(None), 2, slice(None))
        assert (part.offset, part.layout) == (28, Layout("(3,2):(8,1)"))
        assert (part.to_numpy() == numbered(2, 3, 4, 2)[1, :, 2]).all()

    def test_copy_keeps_what_lies_between(self):
        padded = np.full(8, -1, np.float32)
        target = TileTensor(Memory.over(padded), np.float32, Layout("(2,3):(4,1)"))
        target.copy_from(TileTensor.from_numpy(1 + numbered(2, 3)))
        assert padded.tolist() == [1, 2, 3, -1, 4, 5, 6, -1]

    def test_blocked_shared_memory(self):
        """Blocks of BN x BK in a row, seen as one matrix of strides (BK, BN)."""
        BN, BK, blocks = 64, 32, 4
        image = TileTensor(Memory(BN * BK * blocks * 2), "bf16", Layout((BN, BK * blocks), (BK, BN)))
        tile = image.tile((32, BK), (1, 3), stride_layout=(BK, 1))
        assert (tile.offset, tile.layout) == (32 * BK + 3 * BN * BK, Layout.row_major(32, BK))


class TestCopyOrder:
    def test_colexicographic(self):
        source, target = tensor(2, 5), TileTensor.from_numpy(np.zeros((5, 2), np.float32))
        target.copy_from(source)
        assert target.to_numpy().T.reshape(-1).tolist() == numbered(2, 5).T.reshape(-1).tolist()

    def test_memory_order_between_dense_row_major_tensors_that_vectors_divide(self):
        target = TileTensor.from_numpy(np.zeros((3, 4), np.float32)).copy_from(tensor(2, 6))
        assert target.to_numpy().reshape(-1).tolist() == list(range(12))

    def test_vectors(self):
        target = TileTensor.from_numpy(np.zeros((4, 8), np.float32)).vectorize(1, 4)
        target.copy_from(tensor(2, 16).vectorize(1, 4))
        source = numbered(2, 16).reshape(2, 4, 4).transpose(1, 0, 2).reshape(8, 4)
        assert (target.to_numpy().transpose(1, 0, 2).reshape(8, 4) == source).all()

    def test_cast_and_lanes(self):
        source = tensor(8, 8)
        target = TileTensor.stack_allocation(Layout.row_major(8, 8), "bf16")
        threads = Layout.row_major(4, 2)
        lanes = np.arange(8)
        target.distribute(threads, lanes).copy_from(source.distribute(threads, lanes))
        assert (target.to_numpy().astype(np.float32) == numbered(8, 8)).all()

    def test_sizes_must_agree(self):
        with pytest.raises(ValueError, match="equal element sizes and element counts"):
            tensor(2, 6).copy_from(tensor(2, 5))
        with pytest.raises(ValueError, match="equal element sizes and element counts"):
            tensor(2, 8).vectorize(1, 4).copy_from(tensor(2, 2))


@st.composite
def distributions(draw):
    """A row-major tile of vectors, a thread grid of any order that divides it, and perhaps a swizzle."""
    grid = draw(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8])))
    repeat = draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
    vector = draw(st.sampled_from([1, 2, 4]))
    shape = (grid[0] * repeat[0], grid[1] * repeat[1] * vector)
    threads = draw(st.sampled_from([Layout.row_major(*grid), Layout.col_major(*grid)]))
    return shape, vector, threads


@given(distributions())
def test_lanes_together_are_the_lanes_one_by_one_and_cover_the_tile_once(case):
    shape, vector, threads = case
    tile = tensor(*shape).vectorize(1, vector)
    together = tile.distribute(threads, np.arange(threads.size))
    loaded = together.load()
    for lane in range(threads.size):
        alone = tile.distribute(threads, lane)
        assert alone.offset == together.offset[lane]
        assert (alone.load() == loaded[lane]).all()
    assert sorted(loaded.reshape(-1).tolist()) == list(range(np.prod(shape)))


def test_threads_past_the_end_wrap():
    tile = tensor(8, 16)
    threads = Layout.row_major(4, 4)
    assert (
        tile.distribute(threads, np.arange(48)).offset.reshape(3, 16) == np.arange(16) // 4 * 16 + np.arange(16) % 4
    ).all()
    assert tile.distribute(threads, 21).offset == tile.distribute(threads, 5).offset


@pytest.mark.parametrize("shape, stride", [((2, 3), (1, 4)), ((3, 2), (1, 2)), ((2, 2), (0, 1))])
def test_each_mode_wraps_by_itself(shape, stride):
    """By the definition: coordinate (lane // stride) % extent of each mode, 0 where the stride is 0."""
    lanes = np.arange(40)
    row, col = ((lanes // d % s if d else 0 * lanes) for s, d in zip(shape, stride, strict=True))
    assert (tensor(*shape).distribute(Layout(shape, stride), lanes).offset == row * shape[1] + col).all()


def test_swizzle_units_agree():
    tile = tensor(8, 64, dtype=bfloat16).vectorize()
    threads, lanes = Layout.row_major(4, 8), np.arange(32)
    swizzle = Swizzle(3, 0, 3, "vector")
    expected = tile.distribute(threads, lanes, swizzle).offset
    for unit in ("byte", "bf16", "float32"):
        assert (tile.distribute(threads, lanes, swizzle.to(unit)).offset == expected).all()
    with pytest.raises(ValueError, match="moves pieces of 2 bytes"):
        tile.distribute(threads, lanes, Swizzle(3, 0, 3, "bf16"))


def test_warps_by_lanes():
    """A lane array of several axes: [warps, lanes]."""
    tile = tensor(16, 32).vectorize(1, 4)
    thread = np.arange(64).reshape(2, 32)
    fragment = tile.distribute(Layout.row_major(8, 8), thread)
    assert fragment.load().shape == (2, 32, 2, 1, 4)
    assert (fragment.load()[1, 3] == tile.distribute(Layout.row_major(8, 8), 35).load()).all()


class TestAccess:
    def test_load_at_arrays(self):
        t = tensor(8, 16)
        rows, cols = np.array([1, 2, 3]), np.array([4, 5, 6])
        assert t.load_at(rows, cols)[:, 0].tolist() == numbered(8, 16)[rows, cols].tolist()
        assert t.load_at(9).tolist() == [17]
        lanes = t.distribute(Layout.row_major(4, 4), np.arange(16))
        assert lanes.load_at(np.arange(2), 1).shape == (16, 2, 1)

    def test_store_at(self):
        t = tensor(4, 4)
        t.store_at(np.arange(4), np.arange(4), value=np.full((4, 1), -1, np.float32))
        assert np.diag(t.to_numpy()).tolist() == [-1] * 4
        t.store_at(2, 1, value=9)
        assert t.load_at(2, 1).tolist() == [9]

    def test_fill_writes_whole_vectors(self):
        t = TileTensor.stack_allocation(Layout.row_major(4, 8), "bf16")
        assert t.vectorize(1, 8).fill(1.5).load().shape == (4, 1, 8)
        assert (t.to_numpy() == 1.5).all()

    def test_addresses_are_absolute_bytes(self):
        smem = TileTensor.stack_allocation(Layout.row_major(4, 8), "bf16", base=2048, alignment=1024)
        assert (smem.addresses() == 2048 + 2 * np.arange(32).reshape(4, 8)).all()
        lanes = smem.vectorize(1, 8).distribute(Layout.row_major(4, 1), np.arange(4))
        assert lanes.addresses().reshape(-1).tolist() == [2048, 2064, 2080, 2096]
        smem.fill(1)
        assert (smem.to_numpy() == 1).all()

    def test_views_share_memory(self):
        array = numbered(4, 4)
        TileTensor.from_numpy(array).tile((2, 2), (1, 1)).fill(0)
        assert array[2:, 2:].sum() == 0
        assert array[1, 3] == 7

    def test_strided_array(self):
        both = numbered(6, 2, 4)
        half = TileTensor.from_numpy(both[:, 1])
        assert half.layout == Layout("(6,4):(8,1)")
        assert (half.vectorize(1, 4).load()[:, 0] == both[:, 1]).all()

    def test_reshape(self):
        assert (tensor(4, 8).reshape(2, 16).to_numpy() == numbered(2, 16)).all()
        assert tensor(4, 8).reshape(Layout("(2,2):(16,1)")).to_numpy().tolist() == [[0, 1], [16, 17]]

    def test_empty(self):
        empty = tensor(0, 4)
        assert empty.load().shape == (0, 4, 1)
        empty.store(np.zeros((0, 4, 1), np.float32))
        none = tensor(8, 4).tile((2, 4), (np.zeros(0, np.int64), 0))
        assert none.load().shape == (0, 2, 4, 1)
        assert none.with_valid_rows(np.zeros(0, np.int64)).load().shape == (0, 2, 4, 1)
        no_cta = TileTensor.stack_allocation(Layout.row_major(4, 8), "bf16", programs=0)
        assert no_cta.fill(0).load().shape == (0, 4, 8, 1)

    def test_all_modes_sliced_away(self):
        assert tensor(4, 8).slice(1, 2).load().tolist() == [10]

    def test_draws_itself(self):
        assert tensor(4, 8)._repr_svg_().startswith("<svg")


class TestRefusals:
    @pytest.mark.parametrize(
        "make, says",
        [
            (
                lambda t: t.tile((4, 8), (2, 0)),
                r"tile\(4, 8\) number \(2, 0\) of \(8,16\):\(16,1\): mode 0 has 2 tiles",
            ),
            (lambda t: t.tile((4, 8), (np.array([0, 2]), 0)), "mode 0 has 2 tiles"),
            (lambda t: t.tile((3, 8), (0, 0)), "3 does not divide 8, the extent of mode 0"),
            (lambda t: t.tile((4,), (0, 0)), "1 sizes: must be one for each of the 2 modes"),
            (lambda t: t.tile((4, 8), (0,)), "one coordinate for each mode"),
            (lambda t: t.tile((0, 8), (0, 0)), "sizes of 1 and more"),
            (lambda t: t.tile((4, 8), (-1, 0)), "tile coordinate -1 is negative"),
            (lambda t: t.tile((4, 8), (0.5, 0)), "tile coordinate is 0.5: must be an int"),
            (lambda t: t.tile((4, 8), (0, 0), stride_layout=(8,)), "needs 2 strides"),
            (lambda t: t.vectorize(1, 3), "3 does not divide 16"),
            (lambda t: t.vectorize(4), "1 sizes: must be one for each of the 2 modes"),
            (lambda t: t.vectorize(1, 4).vectorize(1, 2), "a tensor of scalars"),
            (lambda t: t.distribute(Layout.row_major(3, 4), 0), "3 threads do not divide 8"),
            (lambda t: t.distribute(Layout(4), 0), "1 sizes: must be one for each of the 2 modes"),
            (lambda t: t.distribute(Layout.row_major(4, 4), -1), "lane -1 is negative"),
            (lambda t: t.reshape(Layout("((2,4),16)")).distribute(Layout.row_major(4, 4), 0), "nested modes"),
            (lambda t: t.slice(slice(0, 9), 0), "0:9 must be in 0:8"),
            (lambda t: t.slice(8, 0), "8:9 must be in 0:8"),
            (lambda t: t.slice(slice(0, 8, 2), 0), "a step of 1"),
            (lambda t: t.slice(0), "one part for each mode"),
            (lambda t: t.reshape(4, 31), "124 dense row-major scalars"),
            (lambda t: t.transpose().reshape(128), "dense row-major"),
            (lambda t: t.store(np.zeros((8, 16, 1))), "a value of float64 .* cast it to float32 first"),
            (
                lambda t: t.store(np.zeros((8, 16), np.float32)),
                r"a value of shape \(8, 16\) .* must be \(8, 16, 1\)",
            ),
            (lambda t: t.store(np.zeros((7, 16, 1), np.float32)), r"a value of shape \(7, 16, 1\)"),
        ],
    )
    def test_value_errors(self, make, says):
        array = numbered(8, 16)
        with pytest.raises(ValueError, match=says):
            make(TileTensor.from_numpy(array))
        assert (array == numbered(8, 16)).all()

    def test_misaligned_vector(self):
        t = TileTensor(Memory.over(numbered(64)), np.float32, Layout.row_major(2, 16), 1)
        with pytest.raises(ValueError, match="address 4 of 16 bytes is not a multiple of 16"):
            t.vectorize(1, 4).load()

    def test_swizzle_inside_vectors(self):
        with pytest.warns(UserWarning, match="vectorize"):
            columns = tensor(8, 16).vectorize(4, 1)
        with pytest.raises(ValueError, match="starts inside a vector of 4 scalars"):
            columns.distribute(Layout.row_major(2, 16), 0, Swizzle(1, 0, 3, "vector"))

    def test_strided_vector_warns_and_reads_contiguous_scalars(self):
        with pytest.warns(UserWarning, match="contiguous scalars, not the strided vector"):
            columns = tensor(8, 16).vectorize(4, 1)
        assert columns.load_at(0, 0).tolist() == [0, 1, 2, 3]

    def test_outside_the_allocation(self):
        t = TileTensor.stack_allocation(Layout.row_major(4, 8), "fp32")
        with pytest.raises(OutOfBounds, match=r"access of 4 bytes at address 128 is outside \[0, 128\)"):
            t.store_at(4, 0, value=1)
        with pytest.raises(UnwrittenRead):
            t.load()

    def test_from_numpy(self):
        with pytest.raises(ValueError, match="must not be negative"):
            TileTensor.from_numpy(numbered(4)[::-1])
        with pytest.raises(ValueError, match="not multiples of the element's 4 bytes"):
            TileTensor.from_numpy(np.zeros(4, [("x", "u1"), ("y", "f4")])["y"])

    def test_stack_holds_the_padding(self):
        padded = TileTensor.stack_allocation(Layout("(4,8):(9,1)"), "fp32")
        assert padded.memory.nbytes == 4 * (3 * 9 + 8)
        assert (padded.fill(1).to_numpy() == 1).all()
        assert TileTensor.stack_allocation(Layout("(4,8):(0,1)"), "fp32").memory.nbytes == 4 * 32

    def test_stack_alignment(self):
        with pytest.raises(ValueError, match="base 1040 with alignment 1024"):
            TileTensor.stack_allocation(Layout(8), "fp32", base=1040, alignment=1024)


class TestUnsafe:
    """What an unchecked kernel would do."""

    def unsafe(self):
        return TileTensor.from_numpy(numbered(8, 16), unsafe=True)

    def test_pieces_that_do_not_divide(self):
        assert self.unsafe().distribute(Layout.row_major(3, 4), 0).layout == Layout("(2,4):(48,4)")
        assert self.unsafe().vectorize(1, 3).layout == Layout("(8,6):(16,3)")
        assert self.unsafe().tile((3, 16), (2, 0)).offset == 96

    def test_outside_reads_poison_and_drops_stores(self):
        tile = self.unsafe().tile((3, 16), (2, 0))
        loaded = tile.to_numpy()
        assert (loaded[:2] == numbered(8, 16)[6:]).all()
        assert np.isnan(loaded[2]).all()
        tile.fill(0)
        assert (tile.to_numpy()[:2] == 0).all()

    def test_misaligned(self):
        t = TileTensor(Memory.over(numbered(64), unsafe=True), np.float32, Layout.row_major(2, 16), 1)
        assert t.vectorize(1, 4).load()[0, 0].tolist() == [1, 2, 3, 4]


def test_repr_names_what_matters():
    assert repr(tensor(8, 16).with_valid_rows(3)) == "TileTensor(float32, (8,16):(16,1), offset 0, global, bounded)"
    smem = TileTensor.stack_allocation(Layout.row_major(4, 8), "bf16", AddressSpace.LOCAL, programs=2).vectorize()
    assert repr(smem) == "TileTensor(bfloat16 x8, (4,1):(8,8), offset [1], local, 2 programs)"
