"""Tiles whose elements are evenly spaced move at once: ``np.asarray``, registers of threads, arrays as many tiles.

Rests on a law: what is loaded and stored at once is what accesses element by element load and store, the same bytes,
the same record of what was written, the same errors."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.layout import Layout, TileTensor
from kvlab.memory import AddressSpace, Memory, OutOfBounds, UnwrittenRead

TILES = [  # layout, offset, programs, element_size
    ("(3,4):(5,1)", 2, None, 1),
    ("(3,4):(1,7)", 0, None, 1),
    ("(3,2):(16,4)", 4, None, 4),
    ("(3,4):(5,1)", np.array([0, 20, 40]), None, 1),
    ("(3,4):(4,1)", np.arange(6).reshape(1, 6) * 12, 2, 1),
    ("(2,4):(4,1)", np.array([[0, 16], [40, 56]]), 2, 1),  # other offsets in each program
    ("(2,4):(4,1)", np.array([0, 8, 24]), None, 1),  # not evenly spaced
    ("(2,(2,2)):(8,(1,4))", 0, None, 1),  # nested
]


@pytest.mark.parametrize("layout,offset,programs,element_size", TILES)
def test_whole_tiles_move_as_their_elements_do(layout, offset, programs, element_size) -> None:
    memories = [Memory(96 * 2, programs=programs, base=32) for _ in range(2)]
    whole, single = (TileTensor(m, "int16", Layout(layout), offset, element_size) for m in memories)
    shape = (*whole._full(np.shape(whole.offset)), *whole.shape, element_size)
    value = np.random.default_rng(1).integers(1, 999, shape).astype(np.int16)
    whole.store(value)
    for coord in np.ndindex(single.shape):
        lead = (slice(None),) * (len(shape) - 1 - len(coord))
        single.store_at(*coord, value=value[(*lead, *coord)])
    np.testing.assert_array_equal(memories[0].bytes, memories[1].bytes)
    np.testing.assert_array_equal(memories[0].written, memories[1].written)
    np.testing.assert_array_equal(whole.load(), value)
    np.testing.assert_array_equal(np.asarray(whole), whole.to_numpy())
    assert np.asarray(whole, np.float32).dtype == np.float32


def test_an_array_of_a_register_tile_shows_it_and_is_read_only() -> None:
    registers = TileTensor.stack_allocation(Layout.row_major(4, 2), "int16", AddressSpace.LOCAL, programs=3, threads=5)
    assert registers.memory.nbytes == 5 * 8 * 2
    registers.store(np.int16(7))
    seen = np.asarray(registers.tile((2, 2), (1, 0)))
    registers.store(np.arange(3 * 5 * 8, dtype=np.int16).reshape(3, 5, 4, 2, 1))
    assert seen.tolist() == np.arange(120).reshape(3, 5, 4, 2)[:, :, 2:].tolist()
    with pytest.raises(ValueError, match="read-only"):
        seen[...] = 0
    assert np.array(registers, copy=True).flags.writeable


def test_what_was_not_written_or_lies_outside_is_refused_as_ever() -> None:
    registers = TileTensor.stack_allocation(Layout.row_major(4, 2), "int16", AddressSpace.LOCAL, programs=3, threads=5)
    half = registers.tile((2, 2), (0, 0))
    half.store(np.int16(7))
    assert (np.asarray(half) == 7).all()
    for tile in (registers, registers.tile((2, 2), (1, 0))):
        for read in (np.asarray, TileTensor.load):
            with pytest.raises(UnwrittenRead):
                read(tile)
    with pytest.raises(OutOfBounds):
        TileTensor(Memory.over(np.zeros(8)), "fp64", Layout.row_major(2, 4), 1).load()
    with pytest.raises(ValueError, match="multiple of 4"):
        TileTensor(Memory(64, base=2), "fp32", Layout(2)).store(np.float32(1))
    for tile in (TileTensor(Memory(64), "fp32", Layout("2:3"), 0, 2), TileTensor(Memory(64), "fp32", Layout(2), 1, 2)):
        with pytest.raises(ValueError, match="multiple of 8"):
            tile.store(np.float32(1))
    registers.memory.poison()
    with pytest.raises(UnwrittenRead):
        half.load()


def test_elements_that_overlap_are_stored_one_after_the_other() -> None:
    """The later one stands, as in every store."""
    tile = TileTensor(Memory(64), "int16", Layout("(3,4):(2,1)"))
    tile.store(np.arange(12, dtype=np.int16).reshape(3, 4, 1))
    assert tile.memory.image(np.int16)[:8].tolist() == [0, 1, 4, 5, 8, 9, 10, 11]
    tile = TileTensor(Memory(64), "int16", Layout("(3,4):(1,2)"))  # whose smaller stride is not the inner loop's
    tile.store(np.arange(12, dtype=np.int16).reshape(3, 4, 1))
    assert tile.memory.image(np.int16)[:9].tolist() == [0, 4, 8, 5, 9, 6, 10, 7, 11]


def test_arrays_are_many_tiles() -> None:
    a = np.arange(2 * 3 * 4 * 8, dtype=np.int16).reshape(2, 3, 4, 8)[:, :, :, ::2]
    tile = TileTensor.from_numpy(a, space=AddressSpace.LOCAL, batch=2)
    assert (tile.shape, np.shape(tile.offset), tile.memory.space) == ((4, 4), (2, 3), AddressSpace.LOCAL)
    np.testing.assert_array_equal(np.asarray(tile.tile((2, 4), (1, 0))), a[:, :, 2:])
    tile.store(np.int16(5))
    assert (a == 5).all()
    for batch in (-1, 4, 1.5):
        with pytest.raises(ValueError, match="batch"):
            TileTensor.from_numpy(a, batch=batch)
