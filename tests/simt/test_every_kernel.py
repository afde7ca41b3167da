"""Every kernel that kvlab launches: the passes that an X-ray predicts of each access to shared memory, and those that
the compiled code took when it ran. Rests on the machine of compiled code, which a chip's counters hold
(test_kernels.py).
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from shared_passes import agree, counted, idle, predicted
from whole_kernels import ROWS, every_kernel, launched

CASES = [
    pytest.param(name, target, marks=[pytest.mark.slow] * row.slow)
    for name, row in ROWS.items() for target in row.targets
]


def test_every_kernel_has_a_row() -> None:
    """A kernel that is new is X-rayed, too."""
    assert {kernel for row in ROWS.values() for kernel in row.kernels.split()} == every_kernel()


@pytest.mark.compile
@pytest.mark.parametrize("name, target", CASES)
def test_each_access_has_the_passes_that_an_x_ray_predicts(
    name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads, stores, ldmatrix, stmatrix, cp.async, operands of wgmma and boxes of TMA: all of them run. Work lists are
    made of 16 items or teams at a time, so that there is more than one part of them.
    """
    monkeypatch.setattr("kvlab.attention.schedule.config.WIDE", 16)
    done = launched(ROWS[name], target)
    assert {one.kernel for one in done} == set(ROWS[name].kernels.split())
    for one in done:
        assert one.found.unknown == one.found.notes == [], one.kernel
        assert idle(one.ran) == [], one.kernel
        assert predicted(one.found) == counted(one.ran), one.kernel
        agree(one.found, one.copies, one.ran)
