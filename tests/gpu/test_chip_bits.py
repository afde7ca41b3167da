"""Compiled kernels on a Hopper GPU beside emulators with ``arithmetic="chip"``: every bit of out and lse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
from hopper_chip import ON_HOPPER

from benchmarks.chip_bits import CALLS

AS_RECORDED = pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="another order of sums as compiled")
pytestmark = [*ON_HOPPER, AS_RECORDED]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_bits(call: Any) -> None:
    for ours, theirs in zip(call.emulated(), call.on_the_gpu(), strict=True):
        assert (ours.view(f"u{ours.itemsize}") == theirs.view(f"u{theirs.itemsize}")).all()
        assert ours.dtype == theirs.dtype
        assert np.isfinite(theirs.astype(np.float32)).all()
