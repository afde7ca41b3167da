"""Prefill of rows that have no key anywhere: K and V without a row. Rests on the definition: out 0, lse -inf."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab import attention

BACKENDS = [
    pytest.param({"backend": "reference"}, id="reference"),
    *(pytest.param({"arch": arch}, id=arch) for arch in ("sm_90", "sm_80", "gfx950")),
    pytest.param({"backend": "triton"}, id="triton", marks=pytest.mark.interpreter),
]


@pytest.mark.parametrize("options", BACKENDS)
@pytest.mark.parametrize("op", ["mha_prefill", "mla_prefill_ragged"])
def test_rows_without_any_key_are_zero(op: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    starts = np.array([0, 2, 5], np.int32), np.zeros(3, np.int32)
    q = rng.standard_normal((5, 2, 96)).astype(np.float32)
    k, v = np.empty((0, 2, 64), np.float32), np.empty((0, 2, 48), np.float32)
    if op == "mha_prefill":
        q, arrays = q[..., :64], (q[..., :64], k, v)
        starts_of = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
        args: tuple[Any, ...] = arrays
    else:
        args, starts_of = (q, k, v, np.empty((0, 32), np.float32), *starts), {}
    out = np.full((5, 2, 48), 7, np.float32)
    given, lse = getattr(attention, op)(*args, **starts_of, causal=True, return_lse=True, out=out, **options)
    assert given is out
    assert not out.any()
    assert lse.shape == (5, 2)
    assert np.isneginf(lse).all()
