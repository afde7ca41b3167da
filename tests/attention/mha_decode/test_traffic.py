"""What an emulated decode moves. Rests on conservation: each byte of a key leaves DRAM once for K and once for V."""

from __future__ import annotations

import numpy as np
import pytest
from decode_cases import Case

from kvlab.attention import explain, mha_decode_paged
from kvlab.attention.machines import ARCHS
from kvlab.staging import Traffic

CASES = [
    Case((150, 0, 17, 1), heads=(6, 2), D=64),
    Case((300,), heads=(8, 1), D=128, page=5, S=3, splits=3),
    Case((40, 3), heads=(40, 2), D=64, dtype="fp16", splits=2),
    Case((70, 5), heads=(4, 2), D=64, dtype="fp32", page=48),
]


def count(case: Case, arch: str, **options: int) -> tuple[Traffic, int]:
    """The traffic of a call, and the bytes of all its valid keys (K or V), once for each tile of query rows."""
    x, traffic = case.build(), Traffic()
    mha_decode_paged(*x.arrays, arch=arch, num_splits=case.splits, traffic=traffic, **options)
    row_tiles = explain(mha_decode_paged, *x.arrays, arch=arch, num_splits=case.splits).config.row_tiles
    return traffic, int(x.lens.sum()) * case.heads[1] * case.D * x.k.itemsize * row_tiles


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dram_is_read_once(case: Case, arch: str) -> None:
    """Q goes to shared memory on NVIDIA, once for each split, and to registers on gfx950."""
    traffic, cache = count(case, arch)
    splits = case.splits or 1
    query = len(case.lens) * case.S * case.heads[0] * case.D * np.dtype("f4" if case.dtype == "fp32" else "f2").itemsize
    from_dram = {edge: n for edge, n in traffic.moved.items() if edge.startswith("DRAM->")}
    if arch == "gfx950":
        assert from_dram["DRAM->SMEM"] == 2 * cache
        assert from_dram["DRAM->registers"] >= splits * query
    else:
        assert from_dram["DRAM->SMEM"] == 2 * cache + splits * query


@pytest.mark.parametrize("arch", ARCHS)
def test_the_output_is_written_once(arch: str) -> None:
    case = Case((150, 0, 17, 1), heads=(6, 2), D=64)
    traffic, _ = count(case, arch)
    rows = len(case.lens) * case.heads[0]
    assert traffic.moved["registers->DRAM"] == rows * (case.D * 2 + 4)  # bf16 output, float32 lse


@pytest.mark.parametrize("splits", [2, 7])
def test_partial_outputs_of_empty_splits_do_not_move(splits: int) -> None:
    """Keys fill one tile: one split writes partial output and lse, the others lse only; the reduction reads both."""
    case = Case((20,), heads=(2, 1), D=64, splits=splits)
    traffic, _ = count(case, "sm_90")
    rows, partial, final = 2, 64 * 4, 64 * 2
    assert traffic.moved["registers->DRAM"] == rows * (partial + splits * 4 + final + 4)
    assert traffic.moved["DRAM->registers"] == rows * (partial + splits * 4)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", [c for c in CASES if c.dtype != "fp32"], ids=str)
def test_ldmatrix_has_no_conflict_with_the_swizzle(case: Case, arch: str) -> None:
    traffic, _ = count(case, arch)
    assert traffic.total("wavefronts") == traffic.total("ideal") > 0
    assert traffic.total("unswizzled") > traffic.total("ideal")


def test_counters_add_up_over_calls() -> None:
    x, traffic = CASES[0].build(), Traffic()
    for _ in range(2):
        mha_decode_paged(*x.arrays, traffic=traffic)
    once, _ = count(CASES[0], "sm_90")
    assert traffic.moved == {edge: 2 * n for edge, n in once.moved.items()}
    assert traffic.total("wavefronts") == 2 * once.total("wavefronts")


@pytest.mark.parametrize("arch", ARCHS)
def test_traffic_of_a_call_does_not_depend_on_garbage(arch: str) -> None:
    x = CASES[0].build()
    counts = []
    for fill in (np.nan, 1):
        x.k[np.isnan(x.k.astype(np.float32))] = fill
        traffic = Traffic()
        mha_decode_paged(*x.arrays, arch=arch, traffic=traffic)
        counts.append(traffic)
    assert counts[0] == counts[1]
