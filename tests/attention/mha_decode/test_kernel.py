"""The Triton kernel of decode in the interpreter, against the float64 reference, in the tolerance of yardsticks.

Every case poisons what must not be read: unused slots and pages are NaN, unused entries of the page table are no pages.
Interpreted programs are slow, so the cases are small.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from decode_cases import Case
from yardsticks import assert_accurate, bits

from kvlab.attention import explain, mha_decode_paged
from kvlab.common.arrays import to_torch
from kvlab.triton_support import child

pytestmark = pytest.mark.interpreter

GRID = [
    Case((200, 0, 1), heads=(3, 1), page=48),
    Case((129, 2), heads=(5, 1), D=128, page=64, S=3, dtype="fp16", storage="halves"),
    Case((33, 3), heads=(4, 2), D=80, page=5, S=4, dtype="fp32", storage="hnd"),
    Case((300,), heads=(8, 1), D=64, page=1, splits=2),
    Case((130, 0), heads=(4, 1), D=96, page=128, splits=5, dtype="fp32", storage="wide"),
    Case((17,), heads=(48, 1), D=16, page=480, dtype="fp16"),
    Case((70,), heads=(2, 1), D=256, splits=3, storage="head-major"),
    Case((70, 3), heads=(4, 2), D=72, page=16, splits=2),
    Case((40, 3), heads=(2, 2), D=40, page=5, S=2, dtype="fp16", storage="hnd"),
]


@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(case: Case) -> None:
    x = case.build()
    out, lse = mha_decode_paged(*x.torch(), num_splits=case.splits, return_lse=True)
    assert isinstance(out, torch.Tensor)
    assert_accurate(x, out, lse)


def test_numpy_arrays_may_ask_for_the_kernel() -> None:
    x = Case((20,), heads=(2, 1)).build()
    out, lse = mha_decode_paged(*x.arrays, backend="triton", return_lse=True)
    assert isinstance(out, np.ndarray)
    assert out.dtype == x.q.dtype
    assert_accurate(x, out, lse)


def test_lengths_and_tables_of_every_integer_type_and_stride() -> None:
    """Rests on a law: how an integer is stored does not change the result."""
    x = Case((20, 3, 0), heads=(1, 1), D=16).build()
    expected = bits(mha_decode_paged(*x.torch()))
    lens, table = np.repeat(x.lens, 2).astype(np.int64), np.repeat(x.table, 2, 0).astype(np.int64)
    lens[1::2], table[1::2] = -7, -7
    strided = [to_torch(a) for a in (x.q, x.k, x.v, table[::2], lens[::2])]
    assert bits(mha_decode_paged(*strided)) == expected
    unsigned = [to_torch(a) for a in (x.q, x.k, x.v, x.table.view(np.uint32), x.lens.astype(np.uint32))]
    assert bits(mha_decode_paged(*unsigned)) == expected


def test_tensors_are_left_as_they_were_and_repeats_agree_bit_for_bit() -> None:
    x = Case((150, 0), heads=(4, 2), S=2, splits=2, storage="halves").build()
    before = [bits(a) for a in x.arrays]
    runs = [mha_decode_paged(*x.torch(), num_splits=2, return_lse=True) for _ in range(2)]
    assert [bits(a) for a in x.arrays] == before
    assert bits(runs[0][0]) == bits(runs[1][0])
    assert bits(runs[0][1]) == bits(runs[1][1])


@pytest.mark.parametrize("splits", [1, 3])
def test_nothing_is_written_beside_out(splits: int) -> None:
    """``out`` is a view into a larger buffer: everything around it keeps its bytes, what lies in it is all written."""
    x = Case((150, 0, 2), heads=(3, 1), D=80, S=2, dtype="fp16").build()
    buffer = torch.full((4, 3, 6, 128), 7.0, dtype=torch.float16)
    out = buffer[1:, :2, 2:5, 16:96]
    out.fill_(float("nan"))
    returned = mha_decode_paged(*x.torch(), out=out, num_splits=splits)
    assert returned is out
    assert_accurate(x, out)
    out.fill_(7)
    assert (buffer == 7).all()


@pytest.mark.parametrize("axis", ["page", "slot", "head"])
def test_offsets_beyond_32_bits(axis: str) -> None:
    """Rests on a law: where the elements lie does not change the result. K, V, q and out span 2^31 elements."""
    case = Case((35, 33), heads=(3, 3), D=16, page=16, S=2, splits=2)
    far, near = child.run("decode_cases:decode_far_apart", case, axis)
    assert np.isfinite(near.astype(np.float32)).all()
    assert bits(far) == bits(near)


@pytest.mark.parametrize("rows", [16, 48])
def test_tiles_of_rows_do_not_cross_kv_heads(rows: int) -> None:
    """Rests on a law (known failure gqa-tiles-cross-groups): a query head sees its own KV head only."""
    x = Case((20,), heads=(2 * rows, 2), D=16, dtype="fp32").build()
    both = mha_decode_paged(*x.torch()).numpy()
    for head in range(2):
        mine = slice(head * rows, head * rows + rows)
        alone = x.with_(q=x.q[:, :, mine], k=x.k[:, :, head : head + 1], v=x.v[:, :, head : head + 1])
        assert bits(mha_decode_paged(*alone.torch())) == bits(both[:, :, mine])


def test_the_order_of_programs_changes_nothing() -> None:
    """Law: in whatever order the sequences are taken, each gives the same bits."""
    x = Case((70, 3, 130, 0, 64, 128), heads=(2, 1), D=64).build()
    config = explain(mha_decode_paged, *x.arrays, num_splits=1).config
    launch, arrays = "kvlab.attention.mha_decode.kernel:launch", x.torch()
    plain, ordered = (
        child.run(launch, *arrays, scale=x.scale, config=replace(config, longest_first=n)) for n in (0, 8)
    )
    assert [bits(a) for a in ordered] == [bits(a) for a in plain]
