"""The emulated decode against the float64 reference, in the tolerance of yardsticks, on all its architectures.

Every case poisons what must not be read: unused slots and pages are NaN, unused entries of the page table are no pages.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from decode_cases import Case
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from yardsticks import assert_accurate, bits

from kvlab.attention import explain, mha_decode_paged
from kvlab.attention.machines import ARCHS
from kvlab.attention.mha_decode import emulator

GRID = [
    Case((1,)),
    Case((1000, 16, 0, 1), heads=(32, 8), D=128),
    Case((300, 299), heads=(9, 3), page=48),
    Case((257, 64, 63, 65), heads=(5, 1), page=64, dtype="fp16"),
    Case((200, 3), heads=(8, 8), page=1, dtype="fp32"),
    Case((150, 5, 4, 6), heads=(3, 3), page=5, D=128, dtype="fp32"),
    Case((520, 128), heads=(16, 2), page=128, D=256),
    Case((481, 480, 479), heads=(10, 2), page=480, D=64),
    Case((100,), heads=(48, 1), D=64),
    Case((70, 40), heads=(48, 1), D=64, S=2, dtype="fp16"),
    Case((129, 3, 2, 1, 0), heads=(6, 2), D=64, S=4),
    Case((129, 3, 2, 1, 0), heads=(6, 2), D=128, S=3, dtype="fp32", splits=3),
    Case((40,), heads=(40, 2), D=128, S=2, dtype="fp32"),
    Case((600, 0, 128, 129), heads=(8, 2), D=64, splits=2),
    Case((600, 0, 1, 127), heads=(8, 2), D=64, splits=5, dtype="fp32"),
    Case((20, 9, 5, 1, 0), heads=(4, 2), D=64, splits=64),
    Case((33,), heads=(4, 2), D=256, dtype="fp32", splits=3),
    Case((200, 17), heads=(28, 4), D=128, storage="halves"),
    Case((200, 17), heads=(4, 2), D=128, storage="hnd", dtype="fp16"),
    Case((200, 17), heads=(4, 2), D=64, storage="wide", dtype="fp32"),
    Case((200, 17), heads=(8, 4), D=64, storage="head-major"),
]
ODD_DEPTHS = [
    Case((200, 17), heads=(4, 2), D=16),
    Case((200, 17), heads=(4, 2), D=40, dtype="fp16"),
    Case((200, 17), heads=(4, 2), D=72, dtype="fp32"),
    Case((200, 17), heads=(4, 2), D=80, S=3),
    Case((200, 17), heads=(4, 2), D=96, splits=2),
    Case((200, 17), heads=(6, 2), D=112, dtype="fp32", splits=2),
    Case((200, 17), heads=(4, 2), D=120),
    Case((100, 17), heads=(4, 2), D=160, dtype="fp16"),
    Case((100, 17), heads=(4, 2), D=192),
    Case((100, 17), heads=(4, 2), D=24, dtype="fp32"),
]


@pytest.mark.parametrize(
    "case, arch", [*itertools.product(GRID, ARCHS), *itertools.product(ODD_DEPTHS, ("sm_80", "sm_90"))], ids=str
)
def test_grid(case: Case, arch: str) -> None:
    x = case.build()
    out, lse = mha_decode_paged(*x.arrays, arch=arch, num_splits=case.splits, return_lse=True)
    assert_accurate(x, out, lse)


LENGTHS = [0, 1, 2, 3, 4, 5, 16, 17, 47, 64, 127, 128, 129, 255, 300]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    group, kv_heads = draw(st.sampled_from([(1, 2), (3, 2), (5, 1), (8, 1), (17, 1), (48, 1)]))
    return Case(
        lens=tuple(draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4))),
        heads=(group * kv_heads, kv_heads),
        D=draw(st.sampled_from([16, 64, 80, 96, 128])),
        page=draw(st.sampled_from([1, 5, 16, 48, 64, 128])),
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        S=draw(st.integers(1, 4)),
        splits=draw(st.one_of(st.none(), st.integers(1, 9))),
        storage=draw(st.sampled_from(["apart", "halves", "hnd", "wide"])),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), arch=st.sampled_from(ARCHS))
@example(case=Case((0, 0), S=4, splits=3), arch="sm_90")
@example(case=Case((2,), S=4, splits=2), arch="gfx950")
def test_drawn(case: Case, arch: str) -> None:
    if arch == "gfx950" and case.D not in (64, 128, 256):
        arch = "sm_90"
    x = case.build()
    out, lse = mha_decode_paged(*x.arrays, arch=arch, num_splits=case.splits, return_lse=True)
    assert_accurate(x, out, lse)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_splits_agree_with_one_split(arch: str, dtype: str) -> None:
    """Rests on a law: the split of the keys changes nothing but rounding, empty splits nothing at all."""
    x = Case((300, 17, 1, 0), heads=(4, 2), D=64, dtype=dtype).build()
    whole, whole_lse = mha_decode_paged(*x.arrays, arch=arch, num_splits=1, return_lse=True)
    step = {"bf16": 2.0**-8, "fp32": 2e-6}[dtype]
    for splits in (2, 8, 64):
        out, lse = mha_decode_paged(*x.arrays, arch=arch, num_splits=splits, return_lse=True)
        np.testing.assert_allclose(out.astype(float), whole.astype(float), rtol=2 * step, atol=2 * step)
        np.testing.assert_allclose(lse, whole_lse, rtol=1e-6, atol=1e-6)


def test_archs_of_one_vendor_agree_bit_for_bit() -> None:
    """sm_80 and sm_90 run the same instructions on the same registers: the same rounding everywhere."""
    x = Case((300, 17), heads=(8, 2), D=128, splits=2).build()
    one, other = (mha_decode_paged(*x.arrays, arch=arch, num_splits=2) for arch in ("sm_80", "sm_90"))
    assert bits(one) == bits(other)


@pytest.mark.parametrize("arch", ARCHS)
def test_large_scores_do_not_overflow(arch: str) -> None:
    """Rests on the float64 reference: scores of thousands, where exp2 without the row maximum would be infinite."""
    x = Case((300,), heads=(4, 2), D=64, dtype="fp32", splits=2).build()
    x.q *= 60
    x.k *= 60
    out, lse = mha_decode_paged(*x.arrays, arch=arch, num_splits=2, return_lse=True)
    exact, exact_lse = x.exact()
    np.testing.assert_allclose(out, exact, rtol=0, atol=5e-3)  # one float32 step of a score of 1e4 is 1e-3
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


def test_the_order_of_programs_changes_nothing() -> None:
    """Law: in whatever order the sequences are taken, each gives the same bits."""
    x = Case((70, 3, 130, 0, 64, 128), heads=(2, 1), D=64).build()
    config = explain(mha_decode_paged, *x.arrays, num_splits=1).config
    plain, ordered = (
        emulator.launch(*x.arrays, scale=x.scale, config=replace(config, longest_first=n)) for n in (0, 8)
    )
    assert [bits(a) for a in ordered] == [bits(a) for a in plain]
