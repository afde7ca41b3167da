"""The tile copiers. Rests on their rule, written out as plain loops over threads and elements (the kernels' own order),
and on the examples of the layout documents: masked rows, swizzles in scalars and in elements."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.layout import (
    GenericToLocalTileCopier,
    GenericToSharedAsyncTileCopier,
    GenericToSharedTileCopier,
    Layout,
    LocalToGenericTileCopier,
    LocalToSharedTileCopier,
    SharedToGenericTileCopier,
    SharedToLocalTileCopier,
    Swizzle,
    ThreadScope,
    TileTensor,
    copy_dram_to_local,
    copy_dram_to_sram,
    copy_dram_to_sram_async,
    copy_local_to_dram,
    copy_local_to_shared,
    copy_sram_to_dram,
    copy_sram_to_local,
)
from kvlab.memory import AddressSpace, Memory, UnwrittenRead

ROWS, COLUMNS = 8, 16


@st.composite
def problems(draw):
    """A tile of ROWS x COLUMNS, its vectors, its threads and a swizzle of its scalars that tears no vector."""
    vector = draw(st.sampled_from([1, 2, 4]))
    rows, cols = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4]))
    threads = draw(st.sampled_from([Layout.row_major(rows, cols), Layout.col_major(rows, cols)]))
    bits = draw(st.integers(0, 2))
    base = draw(st.integers(vector.bit_length() - 1, 3))
    swizzle = draw(st.sampled_from([None, Swizzle(bits, base, max(bits, 3), "int32")]))
    source_pitch, target_pitch = draw(st.tuples(*[st.sampled_from([COLUMNS, COLUMNS + 4])] * 2))
    return vector, threads, swizzle, source_pitch, target_pitch


def tensor(space, pitch, fill=None):
    """A tile with rows ``pitch`` apart; numbered by its scalars, or filled."""
    if space is AddressSpace.GLOBAL:
        flat = np.arange(ROWS * pitch, dtype=np.int32) if fill is None else np.full(ROWS * pitch, fill, np.int32)
        return TileTensor.from_numpy(flat).reshape(Layout((ROWS, COLUMNS), (pitch, 1))), flat
    memory = Memory(4 * 1024, space=space)  # room for what a wide swizzle moves out of the tile
    memory.store(
        np.arange(1024) * 4, (np.arange(1024) if fill is None else np.full(1024, fill)).astype(np.int32)[:, None]
    )
    return TileTensor(memory, "int32", Layout((ROWS, COLUMNS), (pitch, 1))), memory.image(np.int32)


def dealt(threads, vector, pitch, thread):
    """Scalar offset of each vector of a thread in its tile, the first mode fastest, and of the first of them."""
    (r, c), (dr, dc) = threads.shape, threads.stride
    row, col = thread // dr % r, thread // dc % c
    offsets = [
        (row + r * i) * pitch + (col + c * j) * vector for j in range(COLUMNS // vector // c) for i in range(ROWS // r)
    ]
    return offsets, row * pitch + col * vector


def swizzled(swizzle, offset):
    return offset if swizzle is None else swizzle(offset)


@given(problems())
def test_generic_to_shared(problem):
    """Every vector's place is permuted; refused where the original, which moves the first vector of a thread and lets
    the others follow, puts one of them elsewhere."""
    vector, threads, swizzle, a, b = problem
    (src, numbers), (dst, image) = tensor(AddressSpace.GLOBAL, a), tensor(AddressSpace.SHARED, b, -1)
    expected, follows = np.full_like(image, -1), True
    for thread in range(threads.size):
        (from_, _), (to, first) = dealt(threads, vector, a, thread), dealt(threads, vector, b, thread)
        for f, t in zip(from_, to, strict=True):
            at = swizzled(swizzle, t)
            follows &= at == swizzled(swizzle, first) + t - first
            expected[at : at + vector] = numbers[f : f + vector]
    views = dst.vectorize(1, vector), src.vectorize(1, vector)
    if follows:
        copy_dram_to_sram(*views, threads, swizzle=swizzle)
        np.testing.assert_array_equal(image, expected)
    else:
        with pytest.raises(ValueError, match=r"must be multiples of its period, \d+ scalars"):
            copy_dram_to_sram(*views, threads, swizzle=swizzle)
        assert (image == -1).all()


@pytest.mark.parametrize("cols, swizzle", [(16, (1, 2, 3)), (16, (0, 0, 6)), (8, (1, 2, 2)), (4, (0, 5, 5))])
def test_generic_to_shared_takes_what_follows(cols, swizzle):
    """Whole periods, and what is right without them."""
    (src, numbers), (dst, image) = tensor(AddressSpace.GLOBAL, COLUMNS), tensor(AddressSpace.SHARED, COLUMNS, -1)
    swizzle = Swizzle(*swizzle, "int32")
    copy_dram_to_sram(dst, src, Layout.row_major(4, cols), swizzle=swizzle)
    np.testing.assert_array_equal(image[swizzle(np.arange(numbers.size))], numbers)


def test_generic_to_shared_in_unsafe_memory_does_as_the_original():
    memory = Memory(4096, space=AddressSpace.SHARED, unsafe=True)
    smem = TileTensor(memory, "int32", Layout.row_major(ROWS, COLUMNS))
    dram, _ = tensor(AddressSpace.GLOBAL, COLUMNS)
    copy_dram_to_sram(smem, dram, Layout.row_major(1, 16), swizzle=Swizzle(1, 0, 4, "int32"))
    assert memory.image(np.int32)[: ROWS * COLUMNS].tolist() == list(range(ROWS * COLUMNS))


@given(problems(), st.booleans(), st.integers(0, ROWS))
def test_generic_to_shared_async(problem, masked, valid):
    """Every vector's place is permuted, in scalars; vectors that start past the valid rows are zeros."""
    vector, threads, swizzle, a, b = problem
    (src, numbers), (dst, image) = tensor(AddressSpace.GLOBAL, a), tensor(AddressSpace.SHARED, b, -1)
    rows = {"src_num_valid_rows": valid} if masked else {}
    views = dst.vectorize(1, vector), src.vectorize(1, vector)
    copy_dram_to_sram_async(*views, threads, swizzle=swizzle, masked=masked, **rows)
    expected = np.full_like(image, -1)
    for thread in range(threads.size):
        for f, t in zip(*(dealt(threads, vector, pitch, thread)[0] for pitch in (a, b)), strict=True):
            at = swizzled(swizzle, t)
            expected[at : at + vector] = 0 if masked and f >= valid * a else numbers[f : f + vector]
    np.testing.assert_array_equal(image, expected)


@given(problems())
@pytest.mark.filterwarnings("ignore:SharedToGeneric")
def test_shared_to_generic(problem):
    """Reads where the asynchronous copy wrote: every vector, also those that the original leaves out."""
    vector, threads, swizzle, a, b = problem
    (src, image), (dst, numbers) = tensor(AddressSpace.SHARED, b), tensor(AddressSpace.GLOBAL, a, -1)
    copy_sram_to_dram(dst.vectorize(1, vector), src.vectorize(1, vector), threads, swizzle=swizzle)
    expected = np.full_like(numbers, -1)
    for thread in range(threads.size):
        for t, f in zip(*(dealt(threads, vector, pitch, thread)[0] for pitch in (a, b)), strict=True):
            at = swizzled(swizzle, f)
            expected[t : t + vector] = image[at : at + vector]
    np.testing.assert_array_equal(numbers, expected)


def registers(threads, vector, fill=None, axis=False):
    """Each thread's fragment, dense; with ``axis`` all in one memory, side by side."""
    r, c = threads.shape
    shape = (ROWS // r, COLUMNS // vector // c)
    dense = Layout(shape, (shape[1] * vector, vector))
    scalars = dense.size * vector
    if axis:
        whole = TileTensor.stack_allocation(Layout(threads.size * scalars), "int32", AddressSpace.LOCAL)
        t = TileTensor(whole.memory, "int32", dense, np.arange(threads.size) * scalars, vector)
        image = whole.memory.image(np.int32).reshape(threads.size, scalars)
    else:
        t = TileTensor.stack_allocation(Layout(scalars), "int32", AddressSpace.LOCAL, programs=threads.size)
        image = t.memory.image(np.int32)
        t = TileTensor(t.memory, "int32", dense, 0, vector)
    if fill is not None:
        image[...] = fill
        t.memory.written[...] = True
    return t, image


@given(problems(), st.booleans())
@pytest.mark.filterwarnings("ignore:LocalToShared")
def test_through_registers(problem, axis):
    """DRAM -> registers -> shared memory -> registers -> DRAM: each step by the rule, the whole is the identity."""
    vector, threads, swizzle, a, b = problem
    src, numbers = tensor(AddressSpace.GLOBAL, a)
    first, image = registers(threads, vector, axis=axis)
    copy_dram_to_local(first, src.vectorize(1, vector), threads)
    colex = first.layout(np.arange(first.layout.size))
    for thread in range(threads.size):
        from_, _ = dealt(threads, vector, a, thread)
        expected = np.empty(image.shape[-1], np.int32)
        for f, t in zip(from_, colex, strict=True):
            expected[t : t + vector] = numbers[f : f + vector]
        np.testing.assert_array_equal(image[thread], expected)
    smem, held = tensor(AddressSpace.SHARED, b, -1)
    copy_local_to_shared(smem.vectorize(1, vector), first, threads, swizzle=swizzle)
    for thread in range(threads.size):
        for f, t in zip(colex, dealt(threads, vector, b, thread)[0], strict=True):
            at = swizzled(swizzle, t)
            np.testing.assert_array_equal(held[at : at + vector], image[thread, f : f + vector])
    if swizzle is None:
        second, back = registers(threads, vector, fill=-3, axis=axis)
        copy_sram_to_local(second, smem.vectorize(1, vector), threads)
        np.testing.assert_array_equal(back, image)
        dst, out = tensor(AddressSpace.GLOBAL, a, -1)
        copy_local_to_dram(dst.vectorize(1, vector), second, threads)
        np.testing.assert_array_equal(out.reshape(ROWS, a)[:, :COLUMNS], numbers.reshape(ROWS, a)[:, :COLUMNS])
        assert (out.reshape(ROWS, a)[:, COLUMNS:] == -1).all()


def test_rows_past_the_valid_ones_are_zeros():
    """The documents' example: 64 x 64 bf16 in vectors of 8, 50 valid rows."""
    dram = TileTensor.from_numpy(np.ones((64, 64), np.float32).astype("bfloat16"))
    smem = TileTensor.stack_allocation(Layout.row_major(64, 64), "bf16")
    copier = GenericToSharedAsyncTileCopier(Layout.row_major(16, 8), num_threads=128, masked=True)
    copier.copy(smem.vectorize(1, 8), dram.vectorize(1, 8), src_num_valid_rows=50)
    got = smem.to_numpy().astype(np.float32)
    assert (got[:50] == 1).all()
    assert (got[50:] == 0).all()


def test_the_two_swizzles_agree_under_their_conditions():
    """Scalar swizzle (b, m + log2 es, s) = element swizzle (b, m, s) where fragment strides are multiples of the
    period: 8 rows of 64 bf16, one row of vectors a thread column."""
    numbers = np.arange(16 * 64).astype(np.float32).reshape(16, 64).astype("bfloat16")
    dram, threads = TileTensor.from_numpy(numbers).vectorize(1, 8), Layout.row_major(8, 8)
    images = []
    for copier in (GenericToSharedTileCopier, GenericToSharedAsyncTileCopier):
        smem = TileTensor.stack_allocation(Layout.row_major(16, 64), "bf16")
        copier(threads, swizzle=Swizzle(3, 3, 3, "bf16")).copy(smem.vectorize(1, 8), dram)
        images.append(smem.memory.image(np.uint16).copy())
    np.testing.assert_array_equal(*images)
    assert (images[0].reshape(16, 64)[:, 0] != numbers.view(np.uint16)[:, 0]).any()


def test_threads_past_the_layout():
    """More threads than the layout has: the rest does nothing. Exactly as many: a number past them wraps around. From
    shared memory to registers there is no guard."""
    dram = TileTensor.from_numpy(np.arange(4, dtype=np.int32))
    got = TileTensor.stack_allocation(Layout(1), "int32", AddressSpace.LOCAL, programs=6)
    GenericToLocalTileCopier(Layout(4), num_threads=6).copy(got, dram)
    assert got.memory.written[:, 0].tolist() == [True] * 4 + [False] * 2
    assert got.memory.image(np.int32)[:4, 0].tolist() == [0, 1, 2, 3]
    with pytest.raises(UnwrittenRead):
        got.load()
    out = TileTensor.from_numpy(np.full(4, -1, np.int32))
    LocalToGenericTileCopier(Layout(4), num_threads=6).copy(out, got)  # which reads no idle thread's registers
    assert out.to_numpy().tolist() == [0, 1, 2, 3]
    smem = TileTensor.stack_allocation(Layout(4), "int32")
    copy_dram_to_sram(smem, dram, Layout(4), num_threads=32)
    SharedToLocalTileCopier(Layout(4), num_threads=6).copy(got, smem)
    assert got.to_numpy().ravel().tolist() == [0, 1, 2, 3, 0, 1]


def test_one_warp_of_several_and_programs():
    """A warp's lanes move its own tile; CTAs have their own shared memory; part of the threads move their part."""
    numbers = np.arange(4 * 8, dtype=np.int32).reshape(4, 8)
    dram = TileTensor.from_numpy(numbers)
    smem = TileTensor.stack_allocation(Layout.row_major(2, 8), "int32", programs=2)
    tiles = dram.tile((2, 8), (np.arange(2), 0))
    GenericToSharedTileCopier(Layout.row_major(1, 8), thread_scope=ThreadScope.WARP).copy(smem, tiles)
    np.testing.assert_array_equal(smem.to_numpy().reshape(4, 8), numbers)
    async_ = TileTensor.stack_allocation(Layout.row_major(2, 8), "int32", programs=2)
    GenericToSharedAsyncTileCopier(Layout.row_major(2, 4)).copy(async_, dram.tile((2, 8), (1, 0)))
    np.testing.assert_array_equal(async_.to_numpy(), np.stack([numbers[2:]] * 2))
    part = TileTensor.stack_allocation(Layout.row_major(4, 8), "int32")
    GenericToSharedTileCopier(Layout.row_major(4, 8)).copy(part, dram, worker=np.arange(8, 16))
    assert part.memory.written.reshape(4, 32).any(1).tolist() == [False, True, False, False]
    with pytest.raises(ValueError, match="the threads and tiles"):
        SharedToGenericTileCopier(Layout.row_major(1, 8)).copy(dram.tile((2, 8), (0, 0)), smem)


COPIERS = (GenericToLocalTileCopier, GenericToSharedAsyncTileCopier, GenericToSharedTileCopier,
           LocalToGenericTileCopier, LocalToSharedTileCopier, SharedToGenericTileCopier,
           SharedToLocalTileCopier)


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("threads", ["(4,4):(5,1)", "(4,4):(0,1)", "(4,4):(1,1)", "(2,3):(1,3)", "4:2"])
def test_threads_that_leave_elements_to_nobody(copier, threads):
    """Numbers with gaps, or two places for one number."""
    with pytest.raises(ValueError, match="a place of its own: some elements would belong to nobody"):
        copier(Layout(threads))


def test_rows_of_a_masked_copy_follow_one_another():
    """Valid rows are told by the distance from the tile's first scalar: not those of a column-major source."""
    columns = TileTensor.from_numpy(np.zeros((8, 8), np.int32).T)
    smem = TileTensor.stack_allocation(Layout.row_major(8, 8), "int32")
    with pytest.raises(ValueError, match="must be masked, rows that follow one another"):
        copy_dram_to_sram_async(smem, columns, THREADS, masked=True, src_num_valid_rows=8)
    assert not smem.memory.written.any()
    copy_dram_to_sram_async(smem, columns, THREADS)


@pytest.mark.parametrize("rows, valid", [(0, 0), (9, 8), (1 << 40, 8)])
def test_no_valid_rows_and_more_than_the_tile_has(rows, valid):
    smem = TileTensor.stack_allocation(Layout.row_major(8, 8), "int32")
    ones = TileTensor.from_numpy(np.ones((8, 8), np.int32))
    copy_dram_to_sram_async(smem, ones, THREADS, masked=True, src_num_valid_rows=rows)
    assert smem.to_numpy().sum(1).tolist() == [8] * valid + [0] * (8 - valid)


SMEM = TileTensor.stack_allocation(Layout.row_major(8, 8), "int32")
DRAM = TileTensor.from_numpy(np.zeros((8, 8), np.int32))
LOCAL = TileTensor.stack_allocation(Layout.row_major(2, 2), "int32", AddressSpace.LOCAL, programs=16)
THREADS = Layout.row_major(4, 4)


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (lambda: copy_dram_to_sram(DRAM, SMEM, THREADS), "a source in generic or global memory"),
        (lambda: copy_dram_to_sram(LOCAL, DRAM, THREADS), "a destination in shared memory"),
        (lambda: copy_local_to_dram(DRAM, SMEM, THREADS), "a source in local memory"),
        (lambda: copy_dram_to_sram(SMEM.bitcast("float32"), DRAM, THREADS), "equal dtypes and element sizes"),
        (lambda: copy_dram_to_sram(SMEM, DRAM.vectorize(1, 4), THREADS), "equal dtypes and element sizes"),
        (lambda: copy_dram_to_sram(SMEM.as_immut(), DRAM, THREADS), "immutable"),
        (lambda: copy_dram_to_sram(SMEM, DRAM, Layout.row_major(3, 4)), "do not divide 8"),
        (lambda: copy_dram_to_sram(SMEM, DRAM, Layout(16)), "one for each of the 2 modes"),
        (lambda: copy_dram_to_sram(SMEM, DRAM, Layout("((2,2),4)")), "must be a flat Layout"),
        (lambda: copy_dram_to_sram(SMEM, DRAM, THREADS, num_threads=8), "8 threads are fewer than the 16"),
        (lambda: copy_dram_to_sram(SMEM.tile((4, 8), (0, 0)), DRAM, THREADS), "fragments of 4 and 2 elements"),
        (lambda: copy_dram_to_local(LOCAL, DRAM, Layout.row_major(2, 4)), "registers of 16 threads"),
        (lambda: copy_dram_to_local(LOCAL, DRAM, THREADS, worker=[0, 1]), "those of the 2 that copy"),
        (lambda: GenericToSharedTileCopier(THREADS).copy(SMEM, DRAM, 16), "must be an array of 0 to 15"),
        (
            lambda: GenericToSharedTileCopier(Layout.row_major(32, 4), thread_scope=ThreadScope.WARP),
            "a warp has no 128 lanes",
        ),
        (lambda: SharedToGenericTileCopier(THREADS, thread_scope=ThreadScope.WARP), "the threads of a block"),
        (lambda: copy_dram_to_sram_async(SMEM, DRAM, THREADS, src_num_valid_rows=3), "must be None if not masked"),
        (lambda: copy_dram_to_sram_async(SMEM, DRAM.make_dynamic(), THREADS), "a static stride of mode 0"),
        (
            lambda: copy_dram_to_sram_async(
                SMEM.vectorize(1, 4), DRAM.vectorize(1, 4), Layout.row_major(4, 2), swizzle=Swizzle(1, 0, 3, "int32")
            ),
            "it moves pieces of 4 bytes",
        ),
    ],
)
def test_errors(copy, message):
    with pytest.raises(ValueError, match=message):
        copy()
    assert not SMEM.memory.written.any()


def test_the_original_moves_fewer_vectors_and_that_is_said():
    smem = TileTensor.stack_allocation(Layout.row_major(8, 8), "int32").fill(1)
    copier = SharedToGenericTileCopier(Layout.row_major(4, 2), swizzle=Swizzle(1, 2, 3, "int32"))
    with pytest.warns(UserWarning, match="moves every vector; the original moves one of 4"):
        copier.copy(DRAM.vectorize(1, 4), smem.vectorize(1, 4))
    target = TileTensor.from_numpy(np.zeros((8, 16), np.int32))
    wide = TileTensor.stack_allocation(Layout.row_major(8, 16), "int32").fill(1)
    copier = SharedToGenericTileCopier(Layout.row_major(2, 1), swizzle=Swizzle(1, 2, 3, "int32"), original=True)
    with pytest.warns(UserWarning, match="moves one of 4 vectors"):
        copier.copy(target.vectorize(1, 4), wide.vectorize(1, 4))
    moved = target.to_numpy().reshape(8, 4, 4)[..., 0]  # of the 4 x 4 vectors of a thread (rows fastest) every fourth
    assert moved.tolist() == [[1] * 4] * 2 + [[0] * 4] * 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LocalToSharedTileCopier(THREADS, swizzle=Swizzle(1, 2, 3, "int32")).copy(
            smem, TileTensor.stack_allocation(Layout.row_major(2, 2), "int32", AddressSpace.LOCAL, programs=16).fill(2)
        )
    assert (smem.to_numpy() == 2).all()
