"""Hopper's MLA decode over a list, compiled and run without a GPU. Rests on the machine of compiled code, which reads
nothing that is not written and not ordered, and on the float64 reference in the tolerance of yardsticks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mla_cases import FULL, Case
from yardsticks import assert_accurate

pytest.importorskip("triton")

from whole_kernels import Row, launch_of, launched

from kvlab.attention import explain, mla_decode_paged, plan
from kvlab.common.arrays import to_numpy


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("H", [16, 40])
def test_a_cut_sequence(H: int) -> None:
    """Three programs and a plan: one sequence in two parts, which leave by TMA where rows are many, joined behind."""
    x, results = Case((330, 3), H=H, columns=FULL, page=64).build(), []
    told = explain(mla_decode_paged, *x.arrays, balanced=True, backend="hopper", **x.options)
    config = replace(told.config.schedule, programs=3)
    made = plan(x.lens, q_heads=H, kv_heads=1, head_dim=576, v_dim=512, config=config)
    assert (made.units["slot"] >= 0).sum() == 2

    def make(target: str) -> Any:
        call = mla_decode_paged.planned(*x.arrays, backend="hopper", plan=made, **x.options)
        return lambda: results.extend(launch_of(call)())

    done = launched(Row(make, "mla_decode.hopper.attend"), "sm_90")
    assert [one.kernel for one in done] == ["mla_decode.hopper.attend", "attend_paged.kernel.join"]
    assert_accurate(x, *(np.asarray(to_numpy(one)) for one in results))
