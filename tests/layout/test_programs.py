"""Views of many CTAs at once, and tiles whose last rows do not exist. Rests on NumPy indexing the same data, on the
worked numbers of the buffer resource's own test, and on the rule of its linear bound."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.layout import Layout, Swizzle, TileTensor
from kvlab.memory import Memory, OutOfBounds, UnwrittenRead, bfloat16


def numbered(*shape, dtype=np.float32):
    return np.arange(np.prod(shape)).astype(dtype).reshape(shape)


def tensor(*shape, dtype=np.float32):
    return TileTensor.from_numpy(numbered(*shape, dtype=dtype))


class TestPrograms:
    """Each CTA has its own memory; offsets carry a leading axis of 1 or P."""

    P = 3

    def filled(self):
        smem = TileTensor.stack_allocation(Layout.row_major(4, 8), "fp32", programs=self.P)
        smem.store(np.arange(96, dtype=np.float32).reshape(3, 4, 8, 1))
        return smem

    def test_one_offset_for_all(self):
        smem = self.filled()
        assert smem.offset.shape == (1,)
        assert (smem.to_numpy() == np.arange(96).reshape(3, 4, 8)).all()
        assert (smem.tile((2, 8), (1, 0)).to_numpy() == np.arange(96).reshape(3, 4, 8)[:, 2:]).all()

    def test_own_offset_for_each(self):
        row = np.array([0, 3, 1])
        rows = self.filled().tile((1, 8), (row, 0)).to_numpy()
        assert (rows[:, 0] == np.arange(96).reshape(3, 4, 8)[np.arange(3), row]).all()

    def test_lanes(self):
        lanes = self.filled().vectorize(1, 4).distribute(Layout.row_major(4, 2), np.arange(8))
        assert lanes.offset.shape == (1, 8)
        assert (lanes.load() == np.arange(96).reshape(3, 8, 1, 1, 4)).all()
        assert (lanes.load_at(0, 0) == np.arange(96).reshape(3, 8, 4)).all()

    def test_coordinates_align_from_the_front(self):
        lanes = self.filled().distribute(Layout.row_major(1, 8), np.arange(8))
        row = np.array([2, 0, 1])
        picked = lanes.tile((1, 1), (row, 0))
        assert picked.offset.shape == (3, 8)
        assert (picked.to_numpy()[..., 0, 0] == np.arange(96).reshape(3, 4, 8)[np.arange(3), row]).all()

    def test_dram_needs_no_program_axis(self):
        """A tile of shared DRAM for each program: the coordinate array gives the leading axis."""
        dram = tensor(64, 8)
        start = np.array([5, 0, 7])
        tiles = dram.tile((8, 8), (start, 0)).vectorize(1, 4).distribute(Layout.row_major(4, 2), np.arange(8))
        assert tiles.offset.shape == (3, 8)
        expected = numbered(64, 8).reshape(8, 2, 4, 2, 4).transpose(0, 2, 3, 1, 4).reshape(8, 8, 2, 1, 4)[start]
        assert (tiles.load() == expected).all()

    def test_copy_into_shared_memory(self):
        """DRAM tiles of three programs to three shared memories, through swizzled vectors and back."""
        dram, start = tensor(24, 64, dtype=bfloat16), np.array([2, 0, 1])
        threads, lanes = Layout.row_major(8, 8), np.arange(64)
        swizzle = Swizzle(3, 0, 3, "vector")
        smem = TileTensor.stack_allocation(Layout.row_major(8, 64), "bf16", programs=3, alignment=1024).vectorize()
        source = dram.tile((8, 64), (start, 0)).vectorize().distribute(threads, lanes)
        smem.distribute(threads, lanes, swizzle).copy_from(source)
        back = smem.distribute(threads, lanes, swizzle).load()
        tiles = numbered(24, 64, dtype=bfloat16).reshape(3, 8, 64)[start]
        assert (back.reshape(3, 8, 64) == tiles).all()
        chunks = tiles.reshape(3, 8, 8, 8)[:, np.arange(8)[:, None], np.arange(8) ^ np.arange(8)[:, None]]
        assert (smem.memory.image(bfloat16).reshape(3, 8, 8, 8) == chunks).all()

    def test_wrong_leading_axis(self):
        with pytest.raises(ValueError, match=r"offset has shape \(2,\) .* leading axis of 1 or 3 programs"):
            TileTensor(Memory(64, programs=3), "fp32", Layout(4), np.zeros(2, np.int64))


class TestValidRows:
    """The linear bound of a buffer resource: worked numbers of its own test (27, 11, 0) and what must read as zero."""

    @pytest.mark.parametrize(
        "layout, rows, end", [("(3,5):(9,2)", 3, 27), ("(4,3):(8,1)", 2, 11), ("(4,3):(8,1)", 0, 0)]
    )
    def test_records(self, layout, rows, end):
        assert TileTensor(Memory(400), "fp32", Layout(layout), valid_rows=rows).end == end
        assert TileTensor(Memory(400), "fp32", Layout(layout), 40, valid_rows=rows).end == 40 + end

    def test_records_of_vectors(self):
        """Counted to the end of the last vector."""
        vectors = tensor(8, 16).vectorize(1, 4)
        assert vectors.with_valid_rows(5).end == tensor(8, 16).with_valid_rows(5).end == 80

    def test_rows_past_the_end_are_zero(self):
        tile = tensor(8, 16).with_valid_rows(5)
        expected = numbered(8, 16)
        expected[5:] = 0
        assert (tile.to_numpy() == expected).all()
        assert (tile.vectorize(1, 4).load().reshape(8, 16) == expected).all()

    def test_kept_by_every_view(self):
        expected = numbered(8, 16)
        expected[5:] = 0
        tile = tensor(8, 16).with_valid_rows(5)
        assert (tile.tile((4, 8), (1, 1)).to_numpy() == expected[4:, 8:]).all()
        assert (tile.slice((3, 7), 2).to_numpy() == expected[3:7, 2]).all()
        assert (tile.transpose().to_numpy() == expected.T).all()
        lanes = tile.vectorize(1, 4).distribute(Layout.row_major(4, 4), np.arange(16))
        assert (lanes.load() == expected.reshape(2, 4, 4, 1, 4).transpose(1, 2, 0, 3, 4).reshape(16, 2, 1, 4)).all()
        assert tile.tile((4, 8), (1, 1)).valid_rows == 1

    def test_linear_not_rectangular(self):
        """Columns past the tile's width on a row before the last are the next row's bytes; only the tail is cut."""
        window = TileTensor(Memory.over(numbered(4, 8)), np.float32, Layout("(4,6):(8,1)"), valid_rows=3)
        wide = window.tile((4, 10), (0, 0))
        expected = np.arange(4)[:, None] * 8 + np.arange(10)
        assert (wide.to_numpy() == np.where(expected < 2 * 8 + 6, expected, 0)).all()

    def test_bound_inside_a_vector_cuts_by_scalar(self):
        window = TileTensor(Memory.over(numbered(2, 8)), np.float32, Layout("(2,6):(8,1)"), valid_rows=2)
        assert window.tile((2, 8), (0, 0)).vectorize(1, 4).load()[1, 1].tolist() == [12, 13, 0, 0]

    def test_many_tiles_with_their_own_counts(self):
        dram = tensor(32, 4)
        tiles = dram.tile((8, 4), (np.array([3, 1, 0]), 0)).with_valid_rows(np.array([2, 0, 8]))
        expected = numbered(4, 8, 4)[[3, 1, 0]]
        expected[0, 2:], expected[1] = 0, 0
        assert (tiles.to_numpy() == expected).all()
        assert tiles.valid_rows.tolist() == [2, 0, 8]
        lanes = tiles.vectorize(1, 4).distribute(Layout.row_major(8, 1), np.arange(8))
        assert (lanes.load().reshape(3, 8, 4) == expected).all()

    def test_counts_give_a_leading_axis(self):
        tiles = TileTensor(Memory.over(numbered(8, 4)), np.float32, Layout.row_major(8, 4), valid_rows=np.array([1, 8]))
        assert tiles.offset.shape == (2,)
        assert tiles.to_numpy().astype(bool).sum(axis=(1, 2)).tolist() == [3, 31]

    def test_nothing_outside_is_read(self):
        """Past the bound there may be no memory, or memory that nobody wrote."""
        memory = Memory(64)
        memory.store(np.arange(0, 32, 4), np.ones((8, 1), np.float32))
        tile = TileTensor(memory, np.float32, Layout.row_major(8, 4), valid_rows=2)
        assert tile.to_numpy().sum() == 8
        with pytest.raises(UnwrittenRead):
            tile.with_valid_rows(3).load()
        with pytest.raises(OutOfBounds):
            tile.with_valid_rows(5).load()

    def test_no_rows_read_zeros_wherever_the_tile_lies(self):
        far = TileTensor(Memory(64), np.float32, Layout.row_major(8, 4), 10**12, valid_rows=0)
        assert not far.to_numpy().any()

    def test_stores_past_the_end_are_dropped(self):
        array = np.zeros((8, 4), np.float32)
        TileTensor.from_numpy(array).with_valid_rows(3).store(np.ones((8, 4, 1), np.float32))
        assert array.sum(axis=1).tolist() == [4, 4, 4, 0, 0, 0, 0, 0]

    def test_program_memory(self):
        smem = TileTensor.stack_allocation(Layout.row_major(4, 2), "fp32", programs=3)
        smem.with_valid_rows(np.array([1, 4, 0])).store(np.ones((3, 4, 2, 1), np.float32))
        written = smem.memory.written.reshape(3, 4, 8).all(axis=2).sum(axis=1)
        assert written.tolist() == [1, 4, 0]
        loaded = smem.with_valid_rows(np.array([1, 4, 0])).load()
        assert loaded.sum(axis=(1, 2, 3)).tolist() == [2, 8, 0]

    def test_removed(self):
        assert tensor(8, 4).with_valid_rows(3).with_valid_rows(None).valid_rows is None

    def test_count_must_be_an_integer(self):
        with pytest.raises(ValueError, match=r"valid_rows is 2\.5: must be an int"):
            tensor(8, 4).with_valid_rows(2.5)
