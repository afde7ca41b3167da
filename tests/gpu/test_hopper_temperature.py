"""Temperatures of query heads in Hopper's kernels on their GPU, against the float64 reference and the emulators."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from caught import as_tensors
from hopper_chip import ON_HOPPER, assert_alike
from hopper_launches import TEMPERATURES, Heated
from yardsticks import assert_accurate, on

pytestmark = ON_HOPPER
CASES = [(op, case) for op, cases in TEMPERATURES.items() for case in cases]


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op}-{case}" for op, case in CASES])
def test_the_chip_gives_what_the_reference_and_the_emulator_give(op: str, case: Any) -> None:
    """Both round P and the output to 16 bits; a tie may fall on either side. Softcap's tanh has 2^-11 on the chip, and
    wgmma sums scores of e4m3 in 14 digits.
    """
    x = Heated.of(op, case)
    kernel = importlib.import_module(f"kvlab.attention.{op}.hopper")
    emulate = importlib.import_module(f"kvlab.attention.{op}.hopper_emulator").launch

    def launch(*arrays: Any, features: Any, **named: Any) -> tuple[Any, ...]:
        tensors = [as_tensors(a, "cuda") if isinstance(a, tuple) else on(as_tensors(a), "cuda") for a in arrays]
        results = kernel.launch(*tensors, features=as_tensors(features, "cuda"), **named)
        return tuple(t.float().cpu().numpy() for t in results)

    ours, (out, lse) = x.run(emulate), x.run(launch)
    assert_accurate(x, out)
    loose = x.named["features"].softcap > 0 or (op == "mha_prefill" and x.q.itemsize == 1)
    assert_alike(ours, (out, lse), **{"error": 2.0**-5, "lse_error": 0.02} if loose else {})
    exact = x.exact()[1]
    seen = np.isfinite(exact)
    assert (np.isfinite(lse) == seen).all()
    assert np.abs(lse[seen] - exact[seen]).max() <= (0.02 if loose else 1e-5 * max(1, np.abs(exact[seen]).max()))
