"""The pairwise cases of tests/attention/pairs on the GPU: the kernel that a call gets, and the portable one."""

from __future__ import annotations

from typing import Any

import pytest
from pairs.operations import CASES

pytestmark = pytest.mark.gpu
EVERY = [pytest.param(build, id=f"{op}-{row}") for op, cases in CASES.items() for row, build in cases]


@pytest.mark.parametrize("backend", ["cuda", "cuda triton"])
@pytest.mark.parametrize("build", EVERY)
def test_compiled(build: Any, backend: str) -> None:
    build().check(backend)
