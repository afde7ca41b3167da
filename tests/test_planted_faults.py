"""Faults that are planted, found and named: wrong values in lockstep, forgotten waits and fences in the machine that
runs compiled code, slow accesses by the X-ray (``tests/xray``). Rests on what was planted, and on the same kernels
without it, which have nothing to be found."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import tutorial_kernels
import tutorial_twins
from planted_faults import IN_CODE, IN_SOURCE, LAUNCHES
from slow_kernels import PLANTED
from tutorial_calls import CALLS, SCALED

from kvlab.memory import UnwrittenRead
from kvlab.mirror import lockstep_kernel
from kvlab.simt import Deadlock, Race, Unfenced, Unwaited, run_ptx


def test_forty_faults_are_planted() -> None:
    kinds = {**IN_SOURCE, **IN_CODE, **PLANTED}
    assert len(kinds) == len(IN_SOURCE) + len(IN_CODE) + len(PLANTED) >= 40
    texts = [(one.kernel, one.old, one.new) for one in IN_SOURCE.values()]
    lines = [one[:3] for one in IN_CODE.values()]
    assert len(set(texts)) + len(set(lines)) == len(texts) + len(lines)


def launch(kernel: str, changes: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    arguments, grid = (CALLS | SCALED)[kernel]
    return {**arguments, **changes}, grid


@pytest.mark.interpreter
@pytest.mark.parametrize("name", IN_SOURCE)
def test_a_wrong_kernel_is_named(name: str, tmp_path: Path) -> None:
    """The finding of lockstep with the right twin; without the fault there is none."""
    fault = IN_SOURCE[name]
    path = tmp_path / f"{name.replace(' ', '_')}.py"
    path.write_text(fault.text())
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    wrong = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrong)
    arguments, grid = launch(fault.kernel, fault.changes)
    twin = getattr(tutorial_twins, fault.kernel)
    options = {"unwritten": fault.unwritten}
    found = lockstep_kernel(getattr(wrong, fault.kernel), twin, arguments, fault.grid or grid, **options)
    assert not found.ok
    assert [words for words in fault.named() if not re.search(words, found.finding)] == [], found.finding
    assert "no known pattern" not in found.finding or found.memory.faults
    page = found.to_html()
    assert 'class="finding bad"' in page
    assert ("line alarm" in page) == bool(found.memory.faults)


@pytest.mark.interpreter
@pytest.mark.parametrize("kernel", sorted({fault.kernel for fault in IN_SOURCE.values()}))
def test_without_the_fault_nothing_is_named(kernel: str) -> None:
    pair = getattr(tutorial_kernels, kernel), getattr(tutorial_twins, kernel)
    for changes, grid, unwritten in {
        str(fault.changes): (fault.changes, fault.grid, fault.unwritten) for fault in IN_SOURCE.values()
        if fault.kernel == kernel
    }.values():
        arguments, usual = launch(kernel, changes)
        found = lockstep_kernel(*pair, arguments, grid or usual, unwritten=unwritten)
        assert found.ok, found.finding


@functools.cache
def compiled(name: str) -> Any:
    from kvlab.triton_support.compile import compile_kernel, signature_of

    kernel, target, arguments = LAUNCHES[name]
    function: Any = getattr(tutorial_kernels, kernel)
    return compile_kernel(function, target=target, num_stages=3, **signature_of(function, **arguments))


def execute(name: str, ptx: str) -> dict[str, Any]:
    """The arrays of a launch after its PTX, or another, has run."""
    kernel, _, arguments = LAUNCHES[name]
    case = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in arguments.items()}
    constants = {p.name for p in getattr(tutorial_kernels, kernel).params if p.is_constexpr}
    given = [(key, value) for key, value in case.items() if key not in constants]
    names = list(getattr(tutorial_kernels, kernel).arg_names)
    given.sort(key=lambda pair: names.index(pair[0]))
    run_ptx(ptx, (1,), given, shared=compiled(name).shared, arithmetic="float32", addresses=False,
            races=True)
    return case


@pytest.mark.compile
@pytest.mark.parametrize("name", IN_CODE)
def test_a_line_of_ptx_that_is_missing_is_named(name: str) -> None:
    fault = IN_CODE[name]
    errors = {one.__name__: one for one in (Deadlock, Race, Unfenced, UnwrittenRead, Unwaited)}
    with pytest.raises(errors[fault.error]) as raised:
        execute(fault.launch, fault.text(compiled(fault.launch).asm["ptx"]))
    assert fault.words in str(raised.value)
    assert re.search(r"PTX line \d+, \w+\.py:\d+: `", str(raised.value))


@pytest.mark.compile
@pytest.mark.parametrize("name", LAUNCHES)
def test_the_whole_ptx_runs(name: str) -> None:
    """Nothing raises, and the results are float64's."""
    case = execute(name, compiled(name).asm["ptx"])
    if "a_ptr" in case:
        exact = case["a_ptr"].astype(np.float64) @ case["b_ptr"].astype(np.float64)
        assert np.abs(case["c_ptr"].astype(np.float64) - exact).max() <= 2.0**-10 * np.abs(exact).max()
    elif name == "transpose":
        assert np.array_equal(case["out_ptr"], case["x_ptr"].T)
    else:
        e = np.exp(case["x_ptr"].astype(np.float64))
        assert np.abs(case["out_ptr"] - e / e.sum()).max() < 1e-6
