"""Weights are a softmax over the seen keys alone: a hidden key has weight 0 and no part in the maximum.

Rests on softmax in float64 over the seen keys, written in ``hidden_keys``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hidden_keys import FAR, HEADS, OPERATIONS, SIGHTS, HiddenCall, assert_seen_alone

BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"backend": "reference"}, "sm_90": {}, "sm_80": {"arch": "sm_80"}, "gfx950": {"arch": "gfx950"},
    "triton": {"backend": "triton"}, "hopper": {"backend": "hopper"},
}
MASK_VALUES = (0.0, -5e4, 3e38, -np.inf)


def has(op: str, backend: str, sight: str) -> bool:
    if "streaming" in op:
        return backend in ("reference", "gfx950", "triton")
    if backend == "hopper":
        return not op.startswith("mla_prefill") and (sight == "causal" or (sight == "window" and "mha_prefill" in op))
    return backend != "gfx950" or not op.startswith("mla_decode")  # of 16 bits only


CALLS = [
    pytest.param(
        op, backend, sight, marks=[pytest.mark.interpreter] if backend == "triton" else [],
        id=f"{op}-{backend}-{sight}",
    )
    for op in OPERATIONS for backend in BACKENDS for sight in SIGHTS if has(op, backend, sight)
]
DECODES = [call for call in CALLS if "decode" in str(call.id)]


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize(("op", "backend", "sight"), CALLS)
def test_seen_keys_alone_have_weight(op: str, backend: str, sight: str, far: str) -> None:
    call = HiddenCall(op, sight, far, wide=backend == "hopper")
    assert_seen_alone(call, *call(**BACKENDS[backend]))


@pytest.mark.parametrize(("op", "backend", "sight"), DECODES)
def test_whatever_mask_value(op: str, backend: str, sight: str) -> None:
    """Bit for bit: no result depends on it. No sibling is given it, so that interpreted kernels need one value."""
    call = HiddenCall(op, sight, wide=backend == "hopper")
    options = BACKENDS[backend] | {"num_splits": 2}
    out, lse = call(**options)
    assert_seen_alone(call, out, lse)
    for mask_value in MASK_VALUES if backend != "triton" else (3e38,):
        for ours, theirs in zip((out, lse), call(mask_value=mask_value, **options), strict=True):
            np.testing.assert_array_equal(ours, theirs, f"mask_value {mask_value}")


@pytest.mark.parametrize(("op", "backend", "sight"), CALLS)
def test_nan_in_a_hidden_key_stays_there_and_in_a_seen_one_shows(op: str, backend: str, sight: str) -> None:
    """Law: rows that see a K of NaN are NaN, output and lse; where no row sees it, nothing changes."""
    call = HiddenCall(op, sight, wide=backend == "hopper")
    shared = call.mla and call.decodes  # where V is K, NaN of a key that another row sees is NaN in the products
    before = call(**BACKENDS[backend])
    n = call.lens[1]
    hidden = ~call.visible(1).any((0, 1))
    call.k[1][hidden, :, call.width - 1 if shared else 0] = np.nan if not shared else 0
    for ours, theirs in zip(before, call(**BACKENDS[backend]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    last = int(np.nonzero(call.visible(1)[-1].all(0))[0][-1])
    assert last == n - 1 or sight == "bias"
    call.k[1][last, :, 1] = np.nan
    sees = call.visible(1)[:, :, last]  # [S, heads]
    assert sees[-1].all()
    for array in call(**BACKENDS[backend]):
        rows = np.asarray(array, np.float64)
        mine = rows[1] if call.decodes or call.form == "dense" else rows[call.S : 2 * call.S]
        assert np.isnan(mine[sees]).all()


@pytest.mark.parametrize(("op", "backend", "sight"), CALLS)
def test_scores_of_minus_infinity_weigh_nothing(op: str, backend: str, sight: str) -> None:
    """Law: exp(-inf) is 0. A row all of whose seen keys score so is as one without a key: 0 and -inf."""
    call = HiddenCall(op, sight, wide=backend == "hopper")
    for k in call.k:
        k[..., 0] = 0
    call.q[..., 0], call.q[..., 1] = 0, 2
    call.q[1, :, :, 1] = 2
    for k, keys in zip(call.k, (slice(None), slice(40), slice(5, None)), strict=True):
        k[keys, :, 1] = -np.inf
    if call.mla and call.decodes:
        pytest.skip("V is K: its infinities times weights of 0 are NaN")
    out, lse = call(**BACKENDS[backend])
    with np.errstate(invalid="ignore"):
        exact, exact_lse = call.exact()
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=0, atol=2**-6)
    np.testing.assert_allclose(np.asarray(lse, np.float64), exact_lse, rtol=0, atol=2e-5)
    assert HEADS == out.shape[-2]
