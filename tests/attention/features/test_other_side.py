"""Bounds on the other side of the query: keys that begin behind it, or end before it.

Rests on softmax in float64 over the seen keys (``hidden_keys``), where each hidden key would outweigh all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hidden_keys import OPERATIONS, HiddenCall, assert_seen_alone

from kvlab import attention
from kvlab.attention.masks import BandMask, NullMask
from kvlab.common.arrays import to_torch

BOUNDS: dict[str, tuple[Any, Any]] = {"before": (20, -3), "all before": (None, -2), "behind": (-1, 1)}


class BandCall(HiddenCall):
    """``sight`` names one of ``BOUNDS``."""

    def visible(self, b: int) -> Any:
        n, (left, right) = self.lens[b], BOUNDS[self.sight]
        p, key = np.arange(self.S)[:, None, None] + n - self.S, np.arange(n)
        seen = (key <= p + right) & (True if left is None else key >= p - left)
        return np.broadcast_to(seen, (self.S, 4, n))

    def options(self) -> dict[str, Any]:
        full = {"mask": NullMask()} if self.decodes else {"causal": False}
        window = {"window": BOUNDS[self.sight]} | full
        return window if self.sight != "behind" else full | {"mask": BandMask(*BOUNDS[self.sight])}


@pytest.mark.parametrize("sight", BOUNDS)
@pytest.mark.parametrize("backend", ["reference", "emulator", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("op", OPERATIONS)
def test_seen_keys_alone_have_weight(op: str, backend: str, sight: str) -> None:
    call = BandCall(op, sight)
    assert_seen_alone(call, *call(backend=backend))


@pytest.mark.parametrize(
    "backend", ["emulator", pytest.param("triton", marks=[pytest.mark.interpreter, pytest.mark.slow])]
)
@pytest.mark.parametrize("sight", BOUNDS)
def test_balanced(sight: str, backend: str) -> None:
    call = BandCall("mha_decode_paged", sight)
    assert_seen_alone(call, *call(backend=backend, balanced=True))


def test_causal_ends_no_later() -> None:
    """Law: what both show is seen. Of -2 and None it is None that bounds nothing."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 40, 2, 64)).astype(np.float32)
    given: dict[str, Any] = {"q": q, "k": k, "v": v}
    for window, mask in (((9, -2), BandMask(9, -2)), ((None, -2), BandMask(None, -2)), ((9, 5), BandMask(9, 0))):
        expected = attention.mha_prefill(**given, mask=mask, causal=False)
        np.testing.assert_array_equal(attention.mha_prefill(**given, window=window), expected)


def test_hopper_goes_to_the_portable_kernel() -> None:
    q, k, v = (to_torch(np.zeros((1, 40, 2, 64), np.float16)) for _ in range(3))
    for window in ((None, -2), (-2, 9)):
        with pytest.raises(ValueError, match="a mask other than causal and windows around the query"):
            attention.mha_prefill(q, k, v, window=window, causal=False, backend="hopper")


@pytest.mark.parametrize("window, causal, message", [
    ((-1, 0), False, r"window is \(-1, 0\): must be without -1: no bound is None"),
    ((-1, -1), True, r"window is \(-1, -1\): must be without -1"),
    ((-4, 3), False, r"window is \(-4, 3\): must leave keys to see, left \+ right of at least 0"),
    ((2, -4), True, r"window is \(2, -4\), causal: must leave keys to see"),
    ((-4, None), True, r"window is \(-4, None\), causal: must leave keys to see"),
    ((2.0, -4), True, r"window is \(2.0, -4\): must be None, a number of keys, or a pair"),
])
def test_bad_windows(window: Any, causal: bool, message: str) -> None:
    q = np.zeros((1, 40, 2, 64), np.float32)
    with pytest.raises(ValueError, match=message):
        attention.mha_prefill(q, q, q, window=window, causal=causal)


@pytest.mark.parametrize("sides, message", [
    ((-1, 0), r"BandMask\(left=-1, right=0\): must leave keys to see"),
    ((1.5, None), "left is 1.5 of BandMask: must be a number of keys or None"),
])
def test_bad_bands(sides: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BandMask(*sides)
