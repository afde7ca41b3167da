"""Kernels as tutorials write them, compiled and run, and X-rayed: one launch each.

Rests on the NumPy functions that lockstep holds beside the same kernels, and on the counts of the compiled code."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import tutorial_kernels
import tutorial_twins
from shared_passes import agree, copies, counted, predicted
from tutorial_calls import CALLS, SCALED

from kvlab.simt import run
from kvlab.xray import xray

TARGETS = {"matmul_fp8": "sm_89", "scaled_matmul": "sm_89", "matmul_descriptors": "sm_90"}
LAUNCHES = {**CALLS, **SCALED}
PART = {"matmul_fp8": 1e-3, "scaled_matmul": 1e-3, "flash_attention": 2.0**-7}
"""Of the largest magnitude: sums of e4m3 have 14 digits on sm_89; bfloat16."""


def expected(twin: Any, arguments: dict[str, Any], grid: tuple[int, ...]) -> dict[str, Any]:
    """The arrays after the twin has run for each program."""
    case = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in arguments.items()}
    given = {key: value for key, value in case.items() if key in inspect.signature(twin).parameters}
    for program in np.ndindex(*grid):
        twin(**given, pid=program if len(grid) > 1 else program[0])
    return case


@pytest.mark.compile
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_compiled_tutorial_gives_its_twin_s_results_and_the_predicted_passes(name: str) -> None:
    arguments, grid = LAUNCHES[name]
    plain, target = name.removesuffix("_fp8"), TARGETS.get(name, "sm_80")
    kernel, twin = getattr(tutorial_kernels, plain), getattr(tutorial_twins, plain)
    case = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in arguments.items()}
    with copies() as made:
        ran = run(kernel, grid, target=target, num_stages=3, **case)
    for key, value in expected(twin, arguments, grid).items():
        if isinstance(value, np.ndarray):
            exact, ours = value.astype(np.float64), case[key].astype(np.float64)
            assert np.abs(ours - exact).max() <= PART.get(name, 1e-6) * np.abs(exact).max(), key
    found = xray(kernel, arguments, target, num_stages=3)
    assert found.unknown == []
    assert predicted(found) == counted(ran)
    agree(found, made, ran)
