"""Distances between tensors. Rests on laws: np.nextafter is one ULP; non-finite values match in place or not at all."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.mirror.comparison import Tolerance, apart, ulp_distance, ulp_of

DTYPES = [np.float32, np.float16, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_ulps_count_the_representable_values_between(dtype: Any) -> None:
    """Small positive floats of a format are its bit patterns in order."""
    bits = np.arange(64).astype(f"u{np.dtype(dtype).itemsize}")
    values = bits.view(dtype)
    assert np.array_equal(ulp_distance(values, np.zeros_like(values)), np.arange(64.0))
    assert np.array_equal(ulp_distance(-values, values), 2 * np.arange(64.0))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100))
def test_one_ulp_of_float32_is_nextafter(x: float) -> None:
    a = np.float32([x])
    assert ulp_distance(a, np.nextafter(a, np.float32(np.inf))) == [1]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_the_ulp_of_a_magnitude_is_the_distance_to_the_next_value(dtype: Any) -> None:
    """Law: the next bit pattern of a positive float is the next value. Every exponent, both ends of its binade."""
    facts, width = ml_dtypes.finfo(dtype), np.dtype(dtype).itemsize
    binades = np.arange(facts.minexp - 3, facts.maxexp - 1)
    x = np.concatenate([np.ldexp(m, binades) for m in (1.0, 1.75)]).astype(dtype)
    x = x[x > 0]
    step = (x.view(f"u{width}") + np.array(1, f"u{width}")).view(dtype).astype(np.float64) - x.astype(np.float64)
    assert np.array_equal(ulp_of(x.astype(np.float64), np.dtype(dtype)), step)
    assert ulp_of(np.zeros(1), np.dtype(dtype)) == float(facts.smallest_subnormal)


def check(a: Any, b: Any, dtype: Any = np.float32, tolerance: Tolerance | None = None) -> Any:
    left, right = np.asarray(a).astype(dtype)[None], np.asarray(b).astype(dtype)[None]
    return apart(left, right, tolerance or Tolerance.default(left.dtype))


def test_float32_is_measured_against_the_largest_magnitude() -> None:
    assert check([100.0, 0.0], [100.0, 9e-4]).ok[0]
    far = check([100.0, 0.0], [100.0, 2e-3])
    assert not far.ok[0]
    assert far.worst == [(1,)]
    assert far.absolute[0] == np.float32(2e-3)
    assert far.relative[0] == pytest.approx(2e-5, rel=1e-6)


def test_ulps_are_those_of_the_largest_magnitude() -> None:
    """A sum that cancels to nearly zero has millions of floats between its two values: no measure of the sum."""
    a, b = np.float32([3.5, 1e-9]), np.float32([3.5, 1e-9 + 2**-21])
    assert ulp_distance(a, b)[1] > 1e7
    assert check(a, b).ulps[0] == pytest.approx(2, rel=1e-3)
    masked = check([-(2.0**100), *a], [-(2.0**100), *b])
    assert masked.ulps[0] == check(a, b).ulps[0]
    assert check([0.0, 1.0], [0.0, 1.0]).ulps[0] == 0
    assert check([0.0, 1.0], [np.inf, 1.0]).ulps[0] == np.inf
    assert check([1.0], [1.0 + 2**-7], ml_dtypes.bfloat16).ulps[0] == 1


@pytest.mark.parametrize("mask", [-(2.0**100), -1e4])
def test_a_masks_constant_does_not_hide_an_error(mask: float) -> None:
    assert not check([mask, 1.0, 2.0], [mask, 1.0, 2.001]).ok[0]
    assert check([mask, 1.0, 2.0], [mask, 1.0, 2.00001]).ok[0]
    assert not check([mask, 1.0], [1.0, 1.0]).ok[0]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn])
def test_narrow_floats_may_differ_by_one_rounding(dtype: Any) -> None:
    step = float(ml_dtypes.finfo(dtype).eps)
    assert check([1.0], [1.0 + step], dtype).ok[0]
    assert not check([1.0], [1.0 + 2 * step], dtype).ok[0]


def test_infinities_and_nan_must_match_in_place() -> None:
    same = check([np.inf, -np.inf, np.nan, 1.0], [np.inf, -np.inf, np.nan, 1.0])
    assert same.ok[0]
    assert same.absolute[0] == 0
    for a, b in ((np.inf, -np.inf), (np.nan, 1.0), (np.inf, np.nan), (3e38, np.inf)):
        found = check([0.0, a], [0.0, b])
        assert not found.ok[0]
        assert found.absolute[0] == np.inf
        assert found.worst == [(1,)]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64, bool])
def test_integers_and_truth_values_are_exact(dtype: Any) -> None:
    top = np.iinfo(dtype).max if dtype is not bool else 1
    a = np.array([top, 0], dtype)
    b = np.array([top - dtype(1) if dtype is not bool else 0, 0], dtype)
    assert apart(a[None], a[None], Tolerance.default(a.dtype)).ok[0]
    found = apart(a[None], b[None], Tolerance.default(a.dtype))
    assert not found.ok[0]
    assert found.absolute[0] == 1


def test_programs_are_judged_one_by_one() -> None:
    a = np.zeros((3, 2, 2), np.float32) + np.float32([1e-6, 1, 1])[:, None, None]
    b = a.copy()
    b[0, 1, 0] *= np.float32(1.1)
    found = apart(a, b, Tolerance.default(a.dtype))
    assert found.ok.tolist() == [False, True, True]
    assert found.worst[0] == (1, 0)


@pytest.mark.parametrize("shape", [(2,), (2, 0), (2, 3, 0)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    a = np.ones(shape, np.float32)
    assert apart(a, a, Tolerance.default(a.dtype)).ok.all()
