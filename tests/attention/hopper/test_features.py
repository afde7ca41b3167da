"""Law: a feature that Hopper's kernels do not have is refused, never ignored: each keyword of the features, in each
form, gives the float64 reference's result or a ValueError.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab import attention
from kvlab.attention import masks
from kvlab.attention.features.options import FeatureOptions
from kvlab.memory import float8_e4m3fn

B, S, HQ, HKV, KEYS = 2, 2, 4, 2, (21, 9)
RNG = np.random.default_rng(7)
SCALES: tuple[Any, ...] = (2.5, np.array([0.5, 3], np.float32), np.array([[0.5, 3], [4, 2]], np.float32))


class OddKeys(masks.Mask):
    def visible(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return (k_pos + head) % 2 == 1


FORMS: dict[str, tuple[Any, ...]] = {
    "mask": (
        masks.NullMask(), masks.SlidingWindowCausalMask(3), masks.ChunkedCausalMask(4), masks.BandMask(9, -2),
        masks.CausalPaddingMask(np.array([4, 7])), OddKeys(),
    ),
    "window": (5, (3, 0), (None, -3)),
    "leftpad_k": (np.array([6, 2]),),
    "q_positions": (np.array([[3, 11], [1, 5]]),),
    "softcap": (0.75,),
    "sinks": (np.array([1, 2, 0.5, 3], np.float32),),
    "alibi_slopes": (np.array([0.5, 0.25, 1, 2], np.float32),),
    "temperature": (np.array([0.25, 2, 0.5, 3], np.float32),),
    "q_scale": SCALES,
    "k_scale": (*SCALES, RNG.uniform(0.25, 4, (6, 16, HKV)).astype(np.float32)),
    "v_scale": (*SCALES, RNG.uniform(0.25, 4, (6, 16, HKV)).astype(np.float32)),
}
"""Keyword -> values that change results."""
CALLS = "mha_decode_paged", "mha_prefill_paged", "mla_decode_paged"


def arrays_of(call: str, fp8: bool) -> tuple[Any, ...]:
    """The arrays of a call that Hopper's kernel takes; with ``fp8`` those that may have scales."""
    rng = np.random.default_rng(8)

    def drawn(*shape: int, fp8: bool = False) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(np.float32).astype(float8_e4m3fn if fp8 else np.float16)

    pages = np.array([[4, 1], [0, 3]]), np.array(KEYS)
    if call == "mla_decode_paged":
        return drawn(B, S, HQ, 576), drawn(6, 16, 576), *pages
    q, *kv = drawn(B, S, HQ, 128, fp8=fp8 and "prefill" in call), drawn(6, 16, HKV, 128, fp8=fp8), drawn(
        6, 16, HKV, 128, fp8=fp8)
    return (q, *kv, *pages) if "decode" in call else (q.reshape(B * S, HQ, 128), *kv, *pages, np.array([0, S, B * S]))


@pytest.mark.parametrize("name", FeatureOptions.__annotations__)
def test_a_feature_is_taken_or_refused(name: str) -> None:
    told = set()
    for call in CALLS:
        fp8 = name.endswith("_scale") and call != "mla_decode_paged"
        if name.endswith("_scale") and not fp8:
            continue  # no kernel of e4m3
        arrays, run = arrays_of(call, fp8), getattr(attention, call)
        plain = run(*arrays, backend="reference").astype(np.float64)
        for value in FORMS[name]:
            if name == "q_positions" and "prefill" in call:
                value = value.reshape(-1)
            exact = run(*arrays, **{name: value}, backend="reference").astype(np.float64)
            bound = 0.004 * max(np.abs(exact).max(), 1)
            if fp8:  # half an ulp of each weight: e4m3 with q of e4m3, else float16, which two roundings meet
                q, k, v, *rest = arrays
                sizes = np.abs(v.astype(np.float32)).astype(v.dtype)
                weighed = run(q, k, sizes, *rest, **{name: value}, backend="reference").astype(np.float64)
                bound = weighed * (2**-4 if "prefill" in call else 2**-9)
            if (np.abs(exact - plain) <= 2 * bound).all():
                assert (name, call) == ("q_scale", "mha_decode_paged")  # of a q of 16 bits
                continue
            told.add(call)
            try:
                found = run(*arrays, **{name: value}, backend="hopper").astype(np.float64)
            except ValueError:
                with pytest.raises(ValueError, match=r"^backend is 'hopper' with "):
                    run(*arrays, **{name: value}, backend="hopper")
                continue
            assert (np.abs(found - exact) <= bound).all(), (call, value)
    assert told
