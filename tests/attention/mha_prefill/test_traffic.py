"""What an emulated prefill writes. Rests on conservation: each row's output and lse leave the registers once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.attention import mha_prefill
from kvlab.memory import bfloat16
from kvlab.staging import Traffic


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx950"])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_the_output_is_written_once(arch: str, dtype: Any) -> None:
    q, k, v = (np.ones((2, n, heads, D), dtype) for n, heads, D in ((7, 4, 64), (70, 2, 64), (70, 2, 48)))
    traffic = Traffic()
    mha_prefill(q, k, v, causal=True, arch=arch, traffic=traffic)
    assert traffic.moved["registers->DRAM"] == 2 * 7 * 4 * (48 * q.itemsize + 4)  # float32 lse
