"""Temperatures of query heads in the emulators of Hopper's kernels, and what the compiler makes of them."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from caught import Caught, as_launched, as_tensors
from hopper_launches import TEMPERATURES, Heated
from yardsticks import assert_accurate, bits

from kvlab.triton_support.versions import gluon_lacks

CASES = [(op, case) for op, cases in TEMPERATURES.items() for case in cases]
every = pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op}-{case}" for op, case in CASES])


def emulator_of(op: str) -> Any:
    return importlib.import_module(f"kvlab.attention.{op}.hopper_emulator").launch


@every
def test_the_emulator_is_accurate(op: str, case: Any) -> None:
    """Rests on the float64 reference."""
    x = Heated.of(op, case)
    out, lse = x.run(emulator_of(op))
    assert_accurate(x, out)
    seen = np.isfinite(x.exact()[1])
    assert (np.isfinite(lse) == seen).all()
    cap = x.named["features"].softcap  # whose tanh may be a polynomial
    assert np.abs(lse[seen] - x.exact()[1][seen]).max() <= max(cap * 2.0**-15, 2e-5)


@pytest.mark.parametrize("op", TEMPERATURES)
def test_a_temperature_of_one_changes_nothing(op: str) -> None:
    """Law: the bits are those without."""
    x = Heated.of(op, TEMPERATURES[op][0])
    one = x.named["features"].__class__(temperature=np.ones(x.q.shape[-2], np.float32))
    none = one.__class__()
    assert [bits(a) for a in x.run(emulator_of(op), features=one)] == [
        bits(a) for a in x.run(emulator_of(op), features=none)
    ]


@pytest.mark.compile
@pytest.mark.skipif(gluon_lacks() is not None, reason="a release of Triton for which it is not chosen")
@every
def test_compiled(op: str, case: Any) -> None:
    """No more registers are spilled than without: what a tile needs once may wait in local memory."""
    if lacks := gluon_lacks(wide=getattr(case, "D", 0) > 192):
        pytest.skip(f"not chosen: {lacks}")
    hopper = importlib.import_module(f"kvlab.attention.{op}.hopper")
    x = Heated.of(op, case)
    named = x.named | {"features": as_tensors(x.named["features"])}
    caught = Caught(hopper.attend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "attend", caught)
        if op == "mha_prefill":
            patch.setattr(hopper, "machine", lambda device: ("sm_90", 132))
        else:
            patch.setattr(hopper, "merge", lambda *_, **__: None)
        if op == "mha_decode":
            patch.setattr(hopper, "arrivals", lambda count, device: as_tensors(np.zeros(count, np.int32)))
        plain = (np.ascontiguousarray(a) if isinstance(a, np.ndarray) else a for a in x.arrays)
        hopper.launch(*map(as_tensors, plain), **named)
    made = as_launched(caught.fn, caught.arguments, "sm_90")
    assert made.spills <= (32 if op == "mha_prefill" else 0)
