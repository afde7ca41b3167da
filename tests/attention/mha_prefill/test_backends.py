"""Prefill in every backend against the float64 reference, in the tolerance of yardsticks.

Every case poisons what must not be read: unused slots and pages and what lies between strided rows are NaN, unused
entries of the page table are no pages.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_cases import ENDS, FEATURES, ODD_DEPTHS, Case
from yardsticks import assert_accurate, bits

from kvlab.attention.machines import ARCHS

GRID = [
    Case(((150, 200), (150, 200)), heads=(4, 2)),
    Case(((300, 300),), heads=(3, 1), D=128, dtype="fp16"),
    Case(((70, 33),), heads=(5, 1), dtype="fp32"),
    Case(((33, 90),), heads=(2, 2), causal=False, strided=True),
    Case(((1, 129),), heads=(7, 1), D=128),
    Case(((130, 150), (0, 5), (3, 0), (1, 70), (65, 20)), form="ragged", heads=(3, 3)),
    Case(((20, 20), (40, 40)), form="ragged", heads=(8, 1), dtype="fp32", strided=True),
    Case(((100, 100), (7, 300), (0, 40), (2, 2)), form="paged", heads=(2, 1), page=16),
    Case(((64, 200), (129, 129)), form="paged", D=128, page=64, dtype="fp16", strided=True),
    Case(((9, 30), (8, 4)), form="paged", heads=(3, 1), page=1, dtype="fp32"),
    Case(((140, 300),), form="paged", page=48, window=70),
    Case(((150, 170),), window=(40, 7), causal=False, sinks=True),
    Case(((50, 60),), window=(None, 3), causal=False, dtype="fp32", softcap=3.0),
    Case(((60, 20),), sinks=True, softcap=15.0, D=128),
    Case(((130, 300), (10, 0)), form="ragged", sinks=True, window=1),
    Case(((140, 150),), heads=(1, 1), D=256),
    Case((), form="ragged"),
]
every = pytest.mark.parametrize("case", GRID, ids=str)
RUNS = [(case, arch) for case in [*GRID, *FEATURES, *ENDS] for arch in ARCHS if case.fits(arch)]
PIECES = [(case, arch) for case in ODD_DEPTHS for arch in ARCHS if case.fits(arch)]
PIECES += [(Case(((40, 70),), D=40, heads=(2, 2), strided=True), arch) for arch in ("sm_80", "gfx950")]
"""NaN stands between the rows."""
PIECES += [(Case(((70, 90),), D=D, DV=DV, heads=(2, 1)), "sm_80") for D, DV in ((192, 192), (64, 256), (256, 80))]
"""The last product has fewer columns than the tile has rows, and more: the warps of sm_80 stand otherwise."""


@pytest.mark.parametrize("case, arch", RUNS + PIECES, ids=[f"{case}-{arch}" for case, arch in RUNS + PIECES])
def test_emulator(case: Case, arch: str) -> None:
    x = case.build()
    assert_accurate(x, *x.call(arch=arch, return_lse=True))


@pytest.mark.interpreter
@pytest.mark.parametrize("case", [*GRID, *FEATURES, *ENDS, *ODD_DEPTHS], ids=str)
def test_interpreted_kernel(case: Case) -> None:
    x = case.build()
    out, lse = x.call(device="cpu", return_lse=True)
    assert isinstance(out, torch.Tensor)
    assert_accurate(x, out, lse)


@every
def test_reference(case: Case) -> None:
    """Rests on itself in another order: the public call rounds the float64 result once."""
    x = case.build()
    out, lse = x.call(backend="reference", return_lse=True)
    exact, exact_lse = x.exact()
    assert bits(out) == bits(exact.astype(x.q.dtype))
    assert bits(lse) == bits(exact_lse.astype(np.float32))


def test_reference_agrees_with_torch() -> None:
    """Rests on torch's scaled_dot_product_attention in float64."""
    x = Case(((30, 30),), heads=(4, 4), dtype="fp32").build()
    q, k, v = (torch.from_numpy(a).double().transpose(1, 2) for a in (x.q, x.k, x.v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).numpy()
    np.testing.assert_allclose(x.exact()[0], theirs, rtol=0, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 140), st.integers(0, 140)), min_size=1, max_size=3),
    st.sampled_from(["ragged", "paged"]), st.sampled_from([(2, 1), (3, 3), (5, 1)]), st.sampled_from([3, 16, 64]),
    st.sampled_from([None, 1, 50]), st.booleans(), st.sampled_from(ARCHS), st.integers(0, 9),
)
def test_drawn_cases(
    lens: list[tuple[int, int]], form: str, heads: tuple[int, int], page: int, window: int | None, sinks: bool,
    arch: str, seed: int,
) -> None:
    x = Case(tuple(lens), form=form, heads=heads, page=page, window=window, sinks=sinks, seed=seed).build()
    out, lse = x.call(arch=arch, return_lse=True)
    exact, exact_lse = x.exact()
    assert np.abs(out.astype(float) - exact).max(initial=0) <= 0.03
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)
