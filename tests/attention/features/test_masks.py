"""Masks: the formulas of MAX's documentation, written out here, and what kernels get of a mask against them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.attention.features.exact import attention
from kvlab.attention.features.resolve import Features
from kvlab.attention.masks import (
    AndMask,
    BandMask,
    CausalMask,
    CausalPaddingMask,
    ChunkedCausalMask,
    ChunkedMask,
    Interval,
    Mask,
    MaskPlan,
    MaterializedMask,
    NullMask,
    OrMask,
    SlidingWindowCausalMask,
    SlidingWindowNonCausalMask,
    TileStatus,
    resolve_mask,
)

VALID, OTHER = np.array([5, 30]), np.array([20, 8])
RNG = np.random.default_rng(0)


class Checkers(Mask):
    def visible(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return (q_pos + k_pos + head) % 2 == 0


FORMULAS: list[tuple[Mask, Any]] = [
    (NullMask(), lambda b, q, k: k >= 0),
    (CausalMask(), lambda b, q, k: k <= q),
    (SlidingWindowCausalMask(7), lambda b, q, k: (k <= q) & (q - k < 7)),
    (SlidingWindowNonCausalMask(7), lambda b, q, k: k + 7 > q),
    (BandMask(5, -2), lambda b, q, k: (k >= q - 5) & (k <= q - 2)),
    (BandMask(-3), lambda b, q, k: k >= q + 3),
    (ChunkedMask(8), lambda b, q, k: q // 8 == k // 8),
    (ChunkedCausalMask(8), lambda b, q, k: (q // 8 == k // 8) & (k <= q)),
    (CausalPaddingMask(VALID), lambda b, q, k: (k <= q) & (k < VALID[b])),
    (AndMask(CausalMask(), SlidingWindowNonCausalMask(3)), lambda b, q, k: (k <= q) | (k + 3 > q)),
    (OrMask(ChunkedMask(8), SlidingWindowCausalMask(3)), lambda b, q, k: (q // 8 == k // 8) & (k <= q) & (q - k < 3)),
    (AndMask(ChunkedMask(8), SlidingWindowCausalMask(3)), lambda b, q, k: (q // 8 == k // 8) | (k <= q) & (q - k < 3)),
    (OrMask(SlidingWindowCausalMask(3), ChunkedMask(8)), lambda b, q, k: (q // 8 == k // 8) & (k <= q) & (q - k < 3)),
    (
        OrMask(CausalPaddingMask(VALID), CausalPaddingMask(OTHER)),
        lambda b, q, k: (k <= q) & (k < np.minimum(VALID, OTHER)[b]),
    ),
    (
        AndMask(CausalPaddingMask(VALID), CausalPaddingMask(OTHER)),
        lambda b, q, k: (k <= q) & (k < np.maximum(VALID, OTHER)[b]),
    ),
    (AndMask(CausalMask(), Checkers()), lambda b, q, k: (k <= q) | ((q + k) % 2 == 0)),
    (OrMask(CausalMask(), Checkers()), lambda b, q, k: (k <= q) & ((q + k) % 2 == 0)),
    (OrMask(ChunkedMask(8), ChunkedMask(12)), lambda b, q, k: (q // 8 == k // 8) & (q // 12 == k // 12)),
]
every = pytest.mark.parametrize("mask, formula", FORMULAS, ids=[str(m).partition(" object")[0] for m, _ in FORMULAS])
B, Q, K = np.arange(2)[:, None, None, None], np.arange(40)[:, None], np.arange(40)


@every
def test_visible_is_the_formula(mask: Mask, formula: Any) -> None:
    want = np.broadcast_to(formula(B, Q, K), (2, 1, 40, 40))
    np.testing.assert_array_equal(np.broadcast_to(mask.visible(B, 0, Q, K), want.shape), want)
    np.testing.assert_array_equal(np.broadcast_to(mask.value(B, 0, Q, K), want.shape) == 0, want)


@every
@pytest.mark.parametrize("new, keys", [([40, 40], [40, 40]), ([3, 9], [20, 40]), ([30, 5], [7, 0])])
def test_a_plan_sees_what_the_mask_shows(mask: Mask, formula: Any, new: list[int], keys: list[int]) -> None:
    """By weights: keys that count give a value, others none. Queries stand at the end."""
    plan = resolve_mask(mask, Interval(), heads=1, lengths=lambda: (np.array(new), np.array(keys)), like=K)
    for b, (S, n) in enumerate(zip(new, keys, strict=True)):
        q, k, v = np.zeros((S, 1, 16)), np.zeros((n, 1, 16)), np.eye(n)[:, None]
        out, lse = attention(q, k, v, scale=1.0, features=Features(mask=plan), sequence=b)
        want = np.broadcast_to(formula(b, Q[:S] + n - S, K[:n]), (S, n))
        np.testing.assert_array_equal(out[:, 0] > 0, want)
        np.testing.assert_array_equal(np.isneginf(lse[:, 0]), ~want.any(axis=1))


@every
def test_status_of_tiles(mask: Mask, formula: Any) -> None:
    """Rests on the definition: FULL hides every key of every query (tiles are skipped), NO_MASK none."""
    for q0 in range(0, 33, 3):
        for k0 in range(0, 33, 3):
            status, seen = mask.status(q0, k0, 6, 4), formula(B, Q[q0 : q0 + 6], K[k0 : k0 + 4])
            if status is TileStatus.FULL_MASK:
                assert not seen.any()
            elif status is TileStatus.NO_MASK:
                assert seen.all()
            elif mask.interval() is not None and not isinstance(mask, AndMask | OrMask):
                assert seen.any()
                assert not seen.all()


@pytest.mark.parametrize("q0, k0, status", [(0, 128, 3), (0, 0, 1), (128, 0, 0), (126, 0, 1), (127, 0, 0)])
def test_status_of_causal_tiles(q0: int, k0: int, status: int) -> None:
    """Rests on the documented rule: FULL iff q0 + BM <= k0, NO_MASK iff q0 + 1 >= k0 + BN."""
    assert CausalMask().status(q0, k0, 128, 128) == status


def test_a_mask_of_ones_own_is_added() -> None:
    lengths = np.array([3, 5]), np.array([6, 5])
    plan = resolve_mask(Checkers(), Interval(right=0), heads=4, lengths=lambda: lengths, like=K)
    assert plan.right == 0
    assert plan.bias.shape == (2, 4, 5, 6)
    for b, (S, n) in enumerate(zip(*lengths, strict=True)):
        want = (np.arange(4)[:, None, None] + np.arange(S)[:, None] + n - S + np.arange(n)) % 2 == 0
        np.testing.assert_array_equal(plan.bias[b, :, :S, :n] == 0, want)


def test_a_materialized_mask_is_taken_as_it_is() -> None:
    array = RNG.standard_normal((3, 5)).astype(np.float32)
    plan = resolve_mask(MaterializedMask(array), Interval(), heads=1, lengths=lambda: None, like=K)  # type: ignore[arg-type,return-value]
    assert np.shares_memory(plan.bias, array)
    q, k = RNG.standard_normal((2, 5, 1, 16))
    _, lse = attention(q[:4], k, k, scale=1.0, features=Features(mask=plan))
    s = q[:3, 0] @ k[:, 0].T + array
    np.testing.assert_allclose(lse[:3, 0], np.log(np.exp(s).sum(1)), rtol=1e-12)
    assert np.isneginf(lse[3, 0]), "row 3 lies outside the array"
    values = MaterializedMask(array).value(0, 0, np.arange(2, 5)[:, None], np.arange(5))
    np.testing.assert_array_equal(values, array)


def test_bool_and_the_lowest_values_mask() -> None:
    array = np.array([[True, False], [False, False]])
    lowest = np.array([[0, np.finfo(np.float32).min], [-np.inf, -(2.0**100)]], np.float32)
    for given in (array, lowest):
        plan = resolve_mask(MaterializedMask(given), Interval(), heads=1, lengths=lambda: None, like=K)  # type: ignore[arg-type,return-value]
        q, k, v = np.zeros((2, 1, 16)), np.zeros((2, 1, 16)), np.eye(2)[:, None]
        out, lse = attention(q, k, v, scale=1.0, features=Features(mask=plan))
        assert out[:, 0].tolist() == [[1, 0], [0, 0]]
        assert lse.tolist() == [[0], [-np.inf]]
    assert not Odd(-(2.0**100)).visible(0, 0, 0, 0)


class Odd(Mask):
    """Gives what it was given."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def value(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return self.found


class Mute(Mask):
    """Forgets to return what it has found."""

    def visible(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        k_pos <= q_pos  # noqa: B015


def lengths() -> tuple[Any, Any]:
    return np.array([2]), np.array([5])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ChunkedMask(0), "chunk is 0 of ChunkedMask: must be a number of keys, at least 1"),
        (lambda: SlidingWindowCausalMask(2.5), "window is 2.5 of SlidingWindowCausalMask"),  # type: ignore[arg-type]
        (lambda: resolve_mask("causal", Interval(), heads=1, lengths=lambda: None, like=K), "mask is 'causal'"),  # type: ignore[arg-type,return-value]
        (lambda: Mask().value(0, 0, 0, 0), "has neither visible nor value"),
        (lambda: MaterializedMask(np.zeros(3)).bias(), r"MaterializedMask of shape \(3,\)"),
        (lambda: MaterializedMask([[1]]).bias(), r"MaterializedMask of \[\[1\]\]: must be a NumPy array"),
        (lambda: OrMask("a", NullMask()), "OrMask of 'a': must be two masks"),  # type: ignore[arg-type]
        (lambda: AndMask(NullMask(), None), "AndMask of None: must be two masks"),  # type: ignore[arg-type]
        (lambda: resolve_mask(Odd("x"), Interval(), heads=1, lengths=lengths, like=K), "gives 'x': must be numbers"),
        (lambda: resolve_mask(Odd(None), Interval(), heads=1, lengths=lengths, like=K), "gives None: must be num"),
        (lambda: resolve_mask(Mute(), Interval(), heads=1, lengths=lengths, like=K), "visible of .* gives None"),
        (
            lambda: resolve_mask(Odd(np.ones((3, 1, 1, 1, 1))), Interval(), heads=1, lengths=lengths, like=K),
            r"gives shape \(3, 1, 1, 1, 1\): must be numbers",
        ),
    ],
)
def test_bad_masks(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_plans_bound_tiles() -> None:
    assert not MaskPlan(right=0).bounded
    assert MaskPlan(left=3).bounded
    assert MaskPlan(chunk=8).bounded
