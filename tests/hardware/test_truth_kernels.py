"""Whole kernels: what the emulator says they move, and an H100's counters (tests/data/hardware/kernels.json).

Rests on hardware: Nsight Compute on the compiled decode and prefill, cold caches. What is not emulated is named.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.truth import records
from benchmarks.truth.whole import DECODE, PREFILL, decode_inputs, prefill_inputs
from kvlab.attention import mha_decode_paged, mha_prefill
from kvlab.staging import Traffic

RECORD = records.read("kernels")
SECTOR, PASS = 32, 128


@pytest.fixture(scope="module")
def decode() -> Traffic:
    traffic = Traffic()
    mha_decode_paged(*decode_inputs(), num_splits=1, backend="emulator", traffic=traffic)
    return traffic


@pytest.fixture(scope="module")
def prefill() -> Traffic:
    traffic = Traffic()
    mha_prefill(*prefill_inputs(), causal=True, backend="emulator", traffic=traffic)
    return traffic


def counters(name: str, problem: dict[str, int]) -> dict[str, Any]:
    assert RECORD[name]["problem"] == problem
    return RECORD[name]["counters"]


def test_decode_reads_dram_once(decode: Traffic) -> None:
    found = counters("decode", DECODE)
    assert found["dram_read_bytes"] == pytest.approx(decode.moved["DRAM->SMEM"], rel=0.02)
    assert found["l2_read_sectors"] == pytest.approx(decode.moved["DRAM->SMEM"] / SECTOR, rel=0.02)


def test_decode_sectors(decode: Traffic) -> None:
    """cp.async brings K and V, and the page numbers: a sector for each of a tile's 8 rows of a warp."""
    found = counters("decode", DECODE)
    q_bytes = 2 * DECODE["batch"] * DECODE["q_heads"] * DECODE["head_dim"]
    tiles = DECODE["batch"] * DECODE["kv_heads"] * DECODE["keys"] // 64
    page_numbers = tiles * 4 * 8
    assert found["cp_async_sectors"] == (decode.moved["DRAM->SMEM"] - q_bytes) // SECTOR + page_numbers
    programs = DECODE["batch"] * DECODE["kv_heads"]
    lse = programs * (1 - 4 * (DECODE["q_heads"] // DECODE["kv_heads"]) / SECTOR)  # 16 bytes are stored, 32 move
    assert found["store_sectors"] == decode.moved["registers->DRAM"] / SECTOR + lse


def test_decode_wavefronts(decode: Traffic) -> None:
    """ldmatrix and stmatrix of Q, K, V, P as emulated; the rest is named and adds up to the counter."""
    programs, warps, tiles = DECODE["batch"] * DECODE["kv_heads"], 4, DECODE["keys"] // 64
    copies = 4 * (decode.instructions["k copy"] + decode.instructions["v copy"])  # 512 bytes each, no conflict
    rows = programs * tiles * 2 * (2 * warps + 2 + 2 + 2 * warps)  # maximum and sum: written, combined, read
    page_numbers = programs * warps * 8 * (tiles + 1) * 3  # copied in two passes, read in one
    ends = programs * warps * (2 * 4 + 2 * 4 + 2 * 4)  # Q written; the output through shared memory
    named = copies + rows + page_numbers + ends
    found = counters("decode", DECODE)["wavefronts"]
    assert decode.total("wavefronts") == decode.total("ideal")
    assert decode.total("wavefronts") + named == found


def test_prefill_reads_dram_once_and_l2_for_every_tile(prefill: Traffic) -> None:
    found = counters("prefill", PREFILL)
    once = 3 * 2 * PREFILL["batch"] * PREFILL["tokens"] * PREFILL["q_heads"] * PREFILL["head_dim"]
    assert found["dram_read_bytes"] == pytest.approx(once, rel=0.02)
    q_sectors = once // 3 // SECTOR
    assert found["load_sectors"] == q_sectors
    assert found["cp_async_sectors"] == pytest.approx(prefill.moved["DRAM->SMEM"] / SECTOR - q_sectors, rel=0.02)
    assert found["store_sectors"] == prefill.moved["registers->DRAM"] / SECTOR


def test_prefill_wavefronts(prefill: Traffic) -> None:
    """A pass for every 128 bytes of wgmma's operands, as emulated, and of what is copied; the rest adds up as well."""
    programs, warps = PREFILL["tokens"] // 128 * PREFILL["q_heads"], 8
    tile = 2 * 128 * 128
    operands = prefill.moved["SMEM->tensor cores"] // PASS
    copied = prefill.moved["DRAM->SMEM"] // PASS
    past_the_end = programs * 2 * 2 * tile // PASS  # K and V: each of the two loops fetches a tile of zeros ahead
    output = programs * 2 * tile // PASS  # written by st.shared, read by ldmatrix
    lse = programs * (2 * warps + 4)  # st.shared.b64 of 8 warps, ld.shared.b32 of 4
    assert operands + copied + past_the_end + output + lse == counters("prefill", PREFILL)["wavefronts"]


def test_the_record_says_where_it_comes_from() -> None:
    assert "H100" in RECORD["card"]
    assert {"command", "driver", "date", "versions"} <= set(RECORD)
