"""The byte budget. Rests on recorded kernels of an H100 (none is faster than told, decode nearly as fast), and laws."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlab.viz import ByteBudget, RooflinePoint, draw_byte_budget

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "attention_peers_h100.json"
BUDGET = ByteBudget(32, 8, 128, bandwidth=3e12, compute=8e14, shared=2.9e13)


def test_recorded_decode_is_as_near_as_told() -> None:
    run = json.loads(RECORD.read_text(encoding="utf-8"))
    ceilings = run["ceilings"]["start"]
    budget = ByteBudget(
        32, 8, 128, bandwidth=ceilings["read_gbs"] * 1e9, compute=ceilings["gemm_tflops"] * 1e12, shared=2.9e13
    )
    held = 0
    for task, found in run["tasks"].items():
        sizes = re.fullmatch(r"decode_b(\d+)_ctx(\d+)k_p(\d+)", task)
        if sizes is None:
            continue
        batch, thousands, page = map(int, sizes.groups())
        spent = budget.at(batch=batch, context=1024 * thousands, page_size=page)
        measured = found["implementations"]["kvlab"]["ms"] / 1e3
        assert spent.bound == "DRAM"
        assert 0.85 < spent.seconds / measured <= 1.01, task
        held += 1
    assert held >= 6


def test_what_costs_more() -> None:
    one = BUDGET.at(batch=3, context=1000, page_size=64)
    assert one.held == 3 * 16 * 64 * 2 * 8 * 128 * 2 > one.nbytes
    assert one.nbytes == 3 * 1000 * 4096 + 4 * 3 * 16 + 2 * 3 * 32 * 128 * 2
    assert BUDGET.at(batch=3, context=1000, dtype="fp8").passes * 2 == one.passes == 3 * 1000 * 32
    plain = BUDGET.at(batch=3, context=1000, swizzled=False)
    assert plain.passes == 8 * one.passes
    slow = ByteBudget(32, 8, 128, bandwidth=3e12, compute=8e14, shared=2e13)
    assert slow.at(batch=3, context=1000, swizzled=False).bound == "shared memory"
    assert [ByteBudget(4, 4, depth, bandwidth=1, compute=1).conflict("bf16") for depth in (16, 32, 64)] == [2, 4, 8]


def test_the_picture_and_its_errors(sound: Callable[[Any], Any]) -> None:
    budget = ByteBudget(32, 8, 128, bandwidth=3e12, compute=8e14, points=(RooflinePoint("b", 4e9, 1e9, 4e-4),))
    picture = draw_byte_budget(budget, batch=1, context=1 << 17)
    sound(picture)
    assert picture.title.startswith("1 sequence of 131,072 keys: 0.537 GB take 0.179 ms at the least; DRAM bounds it")
    with pytest.raises(ValueError, match="context is 0: must be at least 1"):
        budget.at(batch=1, context=0)
    with pytest.raises(ValueError, match="bandwidth is -1: must be a positive number"):
        ByteBudget(32, 8, 128, bandwidth=-1, compute=1)
    with pytest.raises(ValueError, match="query_heads is 30"):
        ByteBudget(30, 8, 128, bandwidth=1, compute=1)
