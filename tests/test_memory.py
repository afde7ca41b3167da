"""Byte memories. Rests on laws (what was stored is loaded, NumPy's own view of the same bytes) and on the rules that a
memory states: poison, bounds, alignment, masks, the program axis."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.memory import (
    AddressSpace,
    Memory,
    OutOfBounds,
    UnwrittenRead,
    as_dtype,
    bfloat16,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
)

DTYPES = [bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, np.dtype(np.int64), np.dtype(np.uint8)]


def bits(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@given(st.sampled_from(DTYPES), st.integers(1, 12), st.integers(1, 100), st.integers(0, 3), st.randoms())
def test_stored_bits_are_loaded_at_any_width_and_base(dtype, width, length, programs, random):
    """Bit for bit, NaNs included, on memories whose size divides nothing."""
    size = dtype.itemsize
    memory = Memory(length * size, programs=programs or None, base=size * 3)
    starts = range(max(length - width, 0) + 1)
    if length < width:
        return
    start = np.array([random.choice(starts) for _ in range(programs)] if programs else random.choice(starts))
    address = start * size + memory.base
    value = bits((programs or 1) * width * size).view(dtype).reshape(*address.shape, width)
    memory.store(address, value)
    assert memory.load(address, dtype, width).tobytes() == value.tobytes()
    assert memory.written.sum() == value.nbytes
    for program in range(programs or 1):
        row = memory.bytes.reshape(-1, length * size)[program]
        at = int(start.reshape(-1)[program]) * size
        assert row[at : at + width * size].tobytes() == value.reshape(-1, width)[program].tobytes()
        assert (np.delete(row, np.s_[at : at + width * size]) == 0xFF).all()


@pytest.mark.parametrize("dtype", DTYPES[:5], ids=str)
def test_poison_is_nan_in_every_float_format(dtype):
    assert np.isnan(
        Memory(64, unsafe=True).load(np.arange(0, 64, 16), dtype, 16 // dtype.itemsize).astype(np.float32)
    ).all()


class TestPoison:
    def test_reading_what_nobody_wrote(self):
        memory = Memory(64, name="smem", base=256)
        memory.store(np.array([256]), np.ones((1, 4), np.float32))
        with pytest.raises(UnwrittenRead, match="smem: read of 16 bytes at address 264, which nothing has written"):
            memory.load(np.array([256, 264]), np.float32, 4)

    def test_the_program_is_named(self):
        memory = Memory(64, name="smem", programs=3)
        memory.store(np.array([[0], [0], [16]]), np.ones((3, 1, 4), np.float32))
        with pytest.raises(UnwrittenRead, match="read of 16 bytes at program 2, address 0"):
            memory.load(np.array([[0]]), np.float32, 4)

    def test_poison_again(self):
        memory = Memory(16)
        memory.store(0, np.ones(4, np.float32))
        memory.poison()
        with pytest.raises(UnwrittenRead):
            memory.load(0, np.float32, 4)
        array = np.ones(4, np.float32)
        over = Memory.over(array)
        over.poison()
        assert np.isnan(array).all()
        with pytest.raises(UnwrittenRead):
            over.load(0, np.float32)

    def test_unsafe_returns_it(self):
        assert np.isnan(Memory(16, unsafe=True).load(0, bfloat16, 8).astype(np.float32)).all()


class TestBounds:
    @pytest.mark.parametrize("address, width", [(-4, 1), (64, 1), (52, 4), (10**15, 1)])
    def test_outside(self, address, width):
        memory = Memory(64, unsafe=False)
        memory.store(0, np.zeros(16, np.float32))
        with pytest.raises(
            OutOfBounds, match=rf"access of {4 * width} bytes at address {address} is outside \[0, 64\)"
        ):
            memory.load(np.array([0, address]), np.float32, width)
        before = memory.bytes.copy()
        with pytest.raises(OutOfBounds):
            memory.store(np.array([0, address]), np.ones((2, width), np.float32))
        assert (memory.bytes == before).all()

    def test_base(self):
        memory = Memory(64, base=128)
        with pytest.raises(OutOfBounds, match=r"address 124 is outside \[128, 192\)"):
            memory.store(124, np.zeros(1, np.float32))

    def test_programs_do_not_reach_each_other(self):
        memory = Memory(20, programs=2)
        with pytest.raises(OutOfBounds):
            memory.store(np.array([[20]]), np.zeros((2, 1, 1), np.float32))

    def test_the_last_bytes_of_an_unsafe_memory_are_inside(self):
        """Law: an access inside the allocation is the same with and without ``unsafe``."""
        memory = Memory(16, unsafe=True)
        memory.store(12, np.ones(1, np.float32))
        assert memory.load(12, np.float32).tolist() == [1]

    def test_unsafe(self):
        memory = Memory(16, programs=2, unsafe=True)
        memory.store(np.array([[8, 16, -4]]), np.arange(6, dtype=np.float32).reshape(2, 3, 1))
        assert memory.written.sum() == 8
        loaded = memory.load(np.array([[8, 16, -4]]), np.float32)[..., 0]
        assert loaded[:, 0].tolist() == [0, 3]
        assert np.isnan(loaded[:, 1:]).all()


class TestAlignment:
    def test_of_the_element(self):
        with pytest.raises(ValueError, match="address 6 of 4 bytes is not a multiple of 4"):
            Memory(64).store(np.array([4, 6]), np.zeros((2, 1), np.float32))

    def test_of_the_vector_on_request(self):
        memory = Memory(64, base=8)
        memory.store(np.array([8]), np.zeros((1, 4), np.float32))
        with pytest.raises(ValueError, match="address 8 of 16 bytes is not a multiple of 16"):
            memory.load(8, np.float32, 4, alignment=16)
        assert memory.load(16, np.float32, 2, alignment=16).shape == (2,)


class TestMask:
    def test_masked_lanes_read_zero_and_are_not_checked(self):
        memory = Memory(16)
        memory.store(0, np.ones(2, np.float32))
        loaded = memory.load(np.array([0, 4, 8, 64, -3]), np.float32, mask=np.array([1, 1, 0, 0, 0], bool))
        assert loaded[:, 0].tolist() == [1, 1, 0, 0, 0]
        assert loaded.dtype == np.float32
        with pytest.raises(UnwrittenRead):
            memory.load(np.array([0, 8]), np.float32, mask=np.array([False, True]))
        with pytest.raises(OutOfBounds):
            memory.load(np.array([0, 64]), np.float32, mask=np.array([False, True]))

    def test_masked_lanes_store_nothing(self):
        memory = Memory(16)
        memory.store(np.array([0, 4, 99]), np.array([[1], [2], [3]], np.float32), mask=np.array([True, False, False]))
        assert memory.written.tolist() == [True] * 4 + [False] * 12

    def test_programs(self):
        """Addresses with a leading 1, a mask for each program."""
        memory = Memory(16, programs=3)
        mask = np.array([[1, 0], [0, 0], [1, 1]], bool)
        memory.store(np.array([[0, 8]]), np.arange(12, dtype=np.float32).reshape(3, 2, 2), mask=mask)
        assert memory.written.sum(axis=1).tolist() == [8, 0, 16]
        loaded = memory.load(np.array([[0, 8]]), np.float32, 2, mask=mask)
        assert loaded.tolist() == [[[0, 1], [0, 0]], [[0, 0], [0, 0]], [[8, 9], [10, 11]]]

    def test_lanes_that_are_off_touch_no_program(self):
        """Not even what the first active lane reads, in a program that did not write it."""
        memory = Memory(16, programs=2)
        memory.store(np.array([[0]]), np.ones((2, 1, 4), np.float32), mask=np.array([[True], [False]]))
        loaded = memory.load(np.array([[0, 4]]), np.float32, mask=np.array([[True, False], [False, False]]))
        assert loaded[..., 0].tolist() == [[1, 0], [0, 0]]

    def test_mask_gives_the_shape(self):
        memory = Memory(16)
        memory.store(0, np.ones(4, np.float32))
        assert memory.load(4, np.float32, mask=np.ones(3, bool)).shape == (3, 1)

    def test_none_at_all(self):
        assert Memory(0).load(np.zeros((2, 3), int), np.float32, 4, mask=False).shape == (2, 3, 4)


class TestPrograms:
    def test_own_addresses(self):
        memory = Memory(64, programs=2)
        memory.store(np.array([[0], [32]]), np.array([[[1, 2]], [[3, 4]]], np.float32))
        assert memory.load(np.array([[4], [36]]), np.float32)[..., 0].tolist() == [[2], [4]]

    def test_shared_addresses(self):
        memory = Memory(20, programs=2)
        memory.store(np.array([[0, 4, 8]]), np.arange(6, dtype=np.int32).reshape(2, 3, 1))
        assert memory.load(np.array([[8, 0]]), np.int32)[..., 0].tolist() == [[2, 0], [5, 3]]
        assert memory.image(np.int32).shape == (2, 5)

    def test_one_value_for_all(self):
        memory = Memory(16, programs=3)
        memory.store(np.array([[0]]), np.ones((1, 1, 4), np.float32))
        assert (memory.image(np.float32) == 1).all()

    @pytest.mark.parametrize("address", [np.zeros(2, int), np.zeros((2, 4), int), 0])
    def test_leading_axis_is_needed(self, address):
        with pytest.raises(ValueError, match="need a leading axis of 1 or 3 programs"):
            Memory(16, programs=3).load(address, np.float32)


class TestOver:
    def test_shared_both_ways(self):
        array = np.zeros((2, 4), np.float32)
        memory = Memory.over(array)
        memory.store(16, np.arange(4, dtype=np.float32))
        assert array[1].tolist() == [0, 1, 2, 3]
        array[0, 0] = 7
        assert memory.load(0, np.float32).tolist() == [7]
        assert memory.space is AddressSpace.GLOBAL

    def test_halves_of_one_buffer(self):
        """K and V interleaved in pages: [pages, 2, rows, depth]."""
        both = np.arange(3 * 2 * 4 * 8, dtype=np.float32).reshape(3, 2, 4, 8).astype(bfloat16)
        key, value = Memory.over(both[:, 0]), Memory.over(both[:, 1])
        assert key.nbytes == value.nbytes == (2 * 64 + 32) * 2
        page, row = np.arange(3)[:, None], np.arange(4)
        address = (page * 64 + row * 8) * 2
        assert (key.load(address, bfloat16, 8) == both[:, 0]).all()
        assert (value.load(address, bfloat16, 8) == both[:, 1]).all()
        value.store(address[1:2], np.zeros((1, 4, 8), bfloat16))
        assert not both[1, 1].astype(np.float32).any()
        assert both[1, 0].astype(np.float32).all()

    def test_odd_span_is_read_to_its_last_byte(self):
        array = np.arange(21, dtype=np.uint8)[::4]
        memory = Memory.over(array)
        assert memory.nbytes == 21
        assert memory.load(np.array([16, 20]), np.uint8)[:, 0].tolist() == [16, 20]

    @pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 2)])
    def test_empty(self, shape):
        memory = Memory.over(np.zeros(shape, np.float32))
        assert memory.nbytes == 0
        assert memory.load(np.zeros((0, 2), int), np.float32, 4).shape == (0, 2, 4)
        with pytest.raises(OutOfBounds):
            memory.load(0, np.float32)

    def test_zero_dimensional(self):
        array = np.array(3.0)
        Memory.over(array).store(0, np.array([4.0]))
        assert array == 4

    def test_read_only(self):
        array = np.zeros(4, np.float32)
        array.setflags(write=False)
        with pytest.raises(ValueError, match="read-only"):
            Memory.over(array).store(0, np.ones(1, np.float32))

    def test_strided_is_not_poisoned(self):
        """The other half lies between its elements."""
        both = np.zeros((3, 2, 4), np.float32)
        with pytest.raises(ValueError, match="a strided array is not poisoned"):
            Memory.over(both[:, 0]).poison()
        assert not both.any()

    def test_negative_strides(self):
        with pytest.raises(ValueError, match=r"strides \(-4,\) must not be negative"):
            Memory.over(np.zeros(4, np.float32)[::-1])


def test_later_lane_wins():
    memory = Memory(16)
    memory.store(np.zeros(3, int), np.array([[1], [2], [3]], np.float32))
    assert memory.load(0, np.float32).tolist() == [3]


def test_addresses_are_integers():
    with pytest.raises(ValueError, match="addresses of float64: must be integers"):
        Memory(16).store(np.array([0.0]), np.ones((1, 1), np.float32))


def test_accesses_need_a_width():
    with pytest.raises(ValueError, match="an access of 0 bytes"):
        Memory(16).load(0, np.float32, 0)
    with pytest.raises(ValueError, match="a value without axes"):
        Memory(16).store(0, np.float32(1))


def test_widths_and_alignments_that_are_none():
    memory = Memory(64)
    with pytest.raises(ValueError, match="an access of -4 bytes"):
        memory.load(np.array([0]), np.float32, width=-1)
    for alignment in (-4, 3):
        with pytest.raises(ValueError, match=f"alignment {alignment}: must be a power of two"):
            memory.store(np.array([0]), np.ones((1, 1), np.float32), alignment=alignment)
    assert not memory.written.any()


@pytest.mark.parametrize("arguments", [{"nbytes": 2.5}, {"nbytes": "64"}, {"nbytes": 8, "base": 1.5}], ids=str)
def test_sizes_are_integers(arguments):
    with pytest.raises(ValueError, match=r"memory: nbytes .* must be integers from 0"):
        Memory(**arguments)


def test_sizes_must_not_be_negative():
    with pytest.raises(ValueError, match="nbytes -1"):
        Memory(-1)
    with pytest.raises(ValueError, match="programs -2"):
        Memory(16, programs=-2)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("bf16", bfloat16),
        ("torch.bfloat16", bfloat16),
        (np.float16, float16),
        (bfloat16, bfloat16),
        ("fp8", float8_e4m3fn),
    ],
)
def test_as_dtype(name, dtype):
    assert as_dtype(name) == dtype


def test_as_dtype_refuses():
    with pytest.raises(ValueError, match="'int7': must be one of bf16, "):
        as_dtype("int7")
