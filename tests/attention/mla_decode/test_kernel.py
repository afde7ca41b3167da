"""The Triton kernel of MLA decode in the interpreter, against the float64 reference, in the tolerance of yardsticks.

Every case poisons what must not be read: unused slots and pages are NaN, unused entries of the page table are no pages.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import numpy as np
import pytest
import torch
from mla_cases import Case, EvenKeys, decode_far_apart
from yardsticks import assert_accurate, bits

from kvlab.attention import explain, mla_decode_paged
from kvlab.attention.masks import CausalPaddingMask, ChunkedMask, MaterializedMask
from kvlab.common.arrays import to_torch
from kvlab.triton_support import child

pytestmark = pytest.mark.interpreter

BIAS = np.where(np.random.default_rng(1).random((3, 1, 2, 60)) < 0.5, -np.inf, 0.25).astype(np.float32)
BIAS[0, 0, 1] = -np.inf

GRID = [
    Case((100, 0, 1), H=3, columns=(512, 64), page=48),
    Case((1, 0, 0, 1), H=3, columns=(512, 64), page=64, splits=2),
    Case((70, 2), H=5, S=3, dtype="fp16", page=64, storage="head"),
    Case((33, 3), H=2, columns=(256, 32), S=9, page=5, dtype="fp32", storage="layers"),
    Case((140,), H=8, page=1, splits=2),
    Case((65, 0), H=128, columns=(512, 64), page=128, splits=1),
    Case((70,), H=63, columns=(96, 16), dtype="fp16", storage="wide", splits=3),
    Case((70, 0, 3), H=3, S=2, row="rope-aware", k_scale="token", sinks=True, splits=3),
    Case((70, 5), H=17, row="fp8", k_scale="head", softcap=3.0, page=64),
    Case((70, 5), H=3, row="rope-aware", k_scale="number", dtype="fp16", page=1),
    Case((70, 5), H=3, row="rope-aware", k_scale="token", dtype="fp8"),
    Case((70, 5), H=3, row="scaled", columns=(384, 64), dtype="fp16", storage="wide", splits=2),
    Case((90, 40), H=3, S=3, window=20, slopes=True, splits=2),
    Case((90, 40), H=3, S=3, mask=ChunkedMask(32), sinks=True, splits=2),
    Case((90, 40, 0), H=2, S=2, mask=MaterializedMask(BIAS), sinks=True, splits=3),
    Case((90, 40), H=2, mask=EvenKeys()),
    Case((90, 40), H=2, mask=CausalPaddingMask(np.array([50, 9]))),
]


@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(case: Case) -> None:
    x = case.build()
    out, lse = mla_decode_paged(*x.torch(), num_splits=case.splits, return_lse=True, **x.options_on())
    assert isinstance(out, torch.Tensor)
    assert_accurate(x, out, lse)


@pytest.mark.parametrize("splits", [1, 3])
def test_nothing_is_written_beside_out_and_repeats_agree(splits: int) -> None:
    """``out`` is a view into a larger buffer: everything around it keeps its bytes, what lies in it is all written."""
    x = Case((100, 0, 2), H=3, S=2, dtype="fp16").build()
    before = [bits(a) for a in x.arrays]
    buffer = torch.full((4, 3, 6, 256), 7.0, dtype=torch.float16)
    out = buffer[1:, :2, 2:5, 16:144]
    out.fill_(float("nan"))
    returned = mla_decode_paged(*x.torch(), out=out, num_splits=splits, **x.options)
    assert returned is out
    assert_accurate(x, out)
    assert bits(mla_decode_paged(*x.torch(), num_splits=splits, **x.options)) == bits(out)
    assert [bits(a) for a in x.arrays] == before
    out.fill_(7)
    assert (buffer == 7).all()


def test_lengths_and_tables_of_every_integer_type_and_stride() -> None:
    """Rests on a law: how an integer is stored does not change the result."""
    x = Case((20, 3, 0), H=1).build()
    expected = bits(mla_decode_paged(*x.torch(), **x.options))
    lens, table = np.repeat(x.lens, 2).astype(np.int64), np.repeat(x.table, 2, 0).astype(np.int64)
    lens[1::2], table[1::2] = -7, -7
    strided = [to_torch(a) for a in (x.q, x.kv, table[::2], lens[::2])]
    assert bits(mla_decode_paged(*strided, **x.options)) == expected
    unsigned = [to_torch(a) for a in (x.q, x.kv, x.table.view(np.uint32), x.lens.astype(np.uint32))]
    assert bits(mla_decode_paged(*unsigned, **x.options)) == expected


def test_offsets_beyond_32_bits() -> None:
    """Rests on a law (known failure mla-decode-high-page-ids): where the elements lie does not matter."""
    case = Case((35,), H=3, columns=(32, 16), splits=2)
    far, near = child.run(f"mla_cases:{decode_far_apart.__name__}", case)
    assert np.isfinite(near.astype(np.float32)).all()
    assert bits(far) == bits(near)


def test_a_call_does_not_look_for_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed is asked once, not by every call: it takes milliseconds, a decode step less than one."""
    x = Case((20,), H=16, columns=(512, 64)).build()
    first = explain(mla_decode_paged, *x.torch(), **x.options)

    def search(*args: object) -> None:
        raise AssertionError(f"looked for {args}")

    monkeypatch.setattr(importlib.metadata, "version", search)
    monkeypatch.setattr(importlib.util, "find_spec", search)
    assert explain(mla_decode_paged, *x.torch(), **x.options) == first
