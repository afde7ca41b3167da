"""Whole kernels: what the emulator says they move, and an H100's counters (tests/data/hardware/kernels.json).

Rests on hardware: Nsight Compute on the compiled decode and prefill, cold caches, every SASS instruction that touches
shared memory by itself. An instruction belongs to a *role* (the copy of K, the reads of P, ...). The emulator's trace
predicts how often warps execute a role's instructions and the passes they take; what it does not state is *named*, with
its reason. Emulated and named roles together are the whole listing, without a difference.
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_counts import LANE, RECORD, SECTOR, CopyTrace, Counts, counted, emulated, of, vectors

from benchmarks.truth.whole import DECODE, PREFILL
from kvlab.hardware import copy_wavefronts, count_wavefronts, get_atom, shared_mma_wavefronts
from kvlab.memory import bfloat16
from kvlab.staging import Traffic
from kvlab.staging.nvidia.mma_sync_plan import MmaSyncShape
from kvlab.staging.nvidia.wgmma_plan import PanelTile
from kvlab.staging.tile import tile_copies
from kvlab.staging.tile.copy_plan import copy_plan

D_PROGRAMS, D_WARPS, D_TILES = DECODE["batch"] * DECODE["kv_heads"], 4, DECODE["keys"] // 64
D_SHAPE = MmaSyncShape(BM=16, BN=64, D=128, BD=128, dtype=bfloat16)
P_PROGRAMS, P_WARPS = PREFILL["tokens"] // 128 * PREFILL["q_heads"], 8


@pytest.fixture(scope="module")
def decode() -> tuple[Traffic, CopyTrace]:
    trace = CopyTrace()
    return emulated("decode", tile_copies, "cp_async", trace), trace


@pytest.fixture(scope="module")
def prefill() -> tuple[Traffic, CopyTrace]:
    trace = CopyTrace()
    return emulated("prefill", tile_copies, "cp_async", trace), trace


def decode_role(op: str, offset: int, _: str) -> str:
    """The compiler's shared memory: K at 0, V at 0x4000, Q at 0x8000, P and scratch at 0x9000, page numbers after."""
    at_p = 0x9000 <= offset < 0x9800
    if op.startswith("LDGSTS"):
        return "page numbers copy" if "128" not in op else "k copy" if offset < 0x4000 else "v copy"
    if op.startswith("LDSM"):
        return "v read" if "MT88" in op else "p read" if at_p else "q read" if offset >= 0x8000 else "k read"
    if op.startswith("STSM"):
        return "p write" if at_p else "output write"
    if op in ("STS.128", "LDS.128"):
        return "q write" if op == "STS.128" else "output read"
    return "rows over warps" if at_p else "page numbers read"


def named_of_decode() -> Counts:
    """What the emulator of decode does not state, and why it takes what it takes."""
    warps = D_PROGRAMS * D_WARPS
    # The table's entries: of the 16 lanes of a row one copies its page's number, two rows a warp's instruction. Pages
    # of 64: both rows want the same word, and copies share nothing. A tile ahead of the loop, the last has no next.
    row = (np.arange(8)[:, None] * 8 + 2 * np.arange(4))[..., None] + LANE // 16  # [instructions, warps, lanes]
    entry, one_of_a_row = row // DECODE["page"], LANE % 16 == 0
    copy, _ = copy_wavefronts("cp.async.ca.4", 0x9800 + 4 * row, 4 * entry, np.broadcast_to(one_of_a_row, row.shape))
    read, _, _ = count_wavefronts("ld.shared.b32", 0x9800 + 4 * row)
    # Maximum and sum of 16 rows over 4 warps, twice a tile: 8 rows a store from every warp; 64 values read, 16 written
    # by two warps; 8 rows a load in every warp. Words that differ lie in different banks.
    rows_executed, rows_passes = 2 * 6 * D_WARPS, 2 * (2 * 4 + 2 + 2 + 2 * 4)
    # O of 16 x 128 in two halves: stmatrix.x4 and 16 bytes a lane, without conflicts.
    out = 2 * warps
    return {
        "page numbers copy": (8 * warps * (2 + D_TILES), int(copy.sum()) * D_PROGRAMS * (2 + D_TILES - 1)),
        "page numbers read": (8 * warps * (1 + D_TILES), int(read.sum()) * D_PROGRAMS * (1 + D_TILES)),
        "rows over warps": (rows_executed * D_PROGRAMS * D_TILES, rows_passes * D_PROGRAMS * D_TILES),
        "output write": (out, 4 * out), "output read": (out, 4 * out),
    }


def test_decode_every_instruction(decode: tuple[Traffic, CopyTrace]) -> None:
    traffic, trace = decode
    place = {role: D_SHAPE.place(role) for role in "kvqp"}
    assert {role: tile.base for role, tile in place.items()} == {"k": 0, "v": 0x4000, "q": 0x8000, "p": 0x9000}
    plan = copy_plan(16, 256, 256, D_WARPS)
    q_passes, _, _ = count_wavefronts("st.shared.b128", vectors(place["q"].address(plan.row, plan.byte // 16)))
    stated = {"q write": (D_PROGRAMS * q_passes.size, D_PROGRAMS * int(q_passes.sum()))}
    for role in ("k read", "q read", "v read", "p read", "p write"):
        stated[role] = traffic.instructions[role], traffic.wavefronts[role]
    # The tile after the last is zeros: no bytes come, but the copies take their 4 passes, 512 bytes each.
    ahead = trace.empty // 2
    assert trace.empty == D_PROGRAMS * D_WARPS * 2 * 8
    for role, low in (("k copy", 0), ("v copy", 0x4000)):
        made, passes = trace.of(low, low + 0x4000)
        assert made + ahead == traffic.instructions[role]
        stated[role] = made + ahead, passes + 4 * ahead
    assert {**stated, **named_of_decode()} == counted(of("decode"), decode_role)


def test_decode_dram_and_sectors(decode: tuple[Traffic, CopyTrace]) -> None:
    """K, V and Q come once; the rest of the bytes is the code, the table, and less than 3 KB of the launch."""
    traffic, trace = decode
    record = of("decode")
    found, moved = record["counters"], traffic.moved["DRAM->SMEM"]
    assert found["dram_read_bytes"] == SECTOR * found["dram_read_sectors"]
    assert found["dram_read_bytes"] == pytest.approx(moved, rel=0.02)
    table = 4 * (DECODE["batch"] * DECODE["keys"] // DECODE["page"] + DECODE["batch"])
    assert 0 <= found["dram_read_bytes"] - moved - record["code_bytes"] - table < 3000
    assert found["l2_read_sectors"] == pytest.approx(moved / SECTOR, rel=1e-4)
    entries = 4 * DECODE["keys"] // DECODE["page"] // SECTOR  # sectors of a row of the table; one more of the lengths
    assert found["l1_read_sectors"] == moved // SECTOR + D_PROGRAMS * (entries + 1)
    page_numbers = D_PROGRAMS * D_TILES * D_WARPS * 8  # a sector for each copy of a warp
    assert found["cp_async_sectors"] == trace.sectors + page_numbers
    lse = D_PROGRAMS * (1 - 4 * (DECODE["q_heads"] // DECODE["kv_heads"]) / SECTOR)  # 16 bytes are stored, 32 move
    assert found["store_sectors"] == traffic.moved["registers->DRAM"] / SECTOR + lse


def prefill_role(op: str, offset: int, _: str) -> str:
    """The compiler's shared memory: two stages of K at 0, of V at 0x10000, Q at 0x20000."""
    if op.startswith("LDGSTS"):
        return "k copy" if offset < 0x10000 else "v copy"
    if op.startswith("HGMMA"):
        return "products"
    if op == "STS.128":
        return "q write" if offset >= 0x20000 else "output write"
    return {"LDSM.16.M88.4": "output read", "STS.64": "lse write", "LDS": "lse read"}[op]


def test_prefill_every_instruction(prefill: tuple[Traffic, CopyTrace]) -> None:
    traffic, trace = prefill
    q, plan = PanelTile(rows=128, cols=128, base=0x20000), copy_plan(128, 256, 256, P_WARPS)
    q_passes, _, _ = count_wavefronts("st.shared.b128", vectors(q.address(plan.row, plan.byte // 16)))
    atom, steps = get_atom("wgmma.m64n128k16.bf16"), 128 // 16
    tile = steps * (shared_mma_wavefronts(atom) + shared_mma_wavefronts(atom, a_in_registers=True))  # of a warpgroup
    products, left = divmod(traffic.moved["SMEM->tensor cores"] // 128, tile)
    assert left == 0
    stated = {
        "q write": (P_PROGRAMS * q_passes.size, P_PROGRAMS * int(q_passes.sum())),
        "products": (products * 2 * steps * 4, products * tile),  # an instruction of a warpgroup counts for 4 warps
    }
    # Each of the two loops fetches a tile of zeros ahead. Emulated are the copies that bring something, half of them K.
    ahead = P_PROGRAMS * 2 * 8 * P_WARPS
    made = sum(len(passes) for passes in trace.passes) // 2
    passes = sum(int(passes.sum()) for passes in trace.passes) // 2
    for role in ("k copy", "v copy"):
        stated[role] = made + ahead, passes + 4 * ahead
    warps = P_PROGRAMS * P_WARPS
    named = {  # O of 128 x 128 through shared memory, 16 bytes a lane; lse as float64 pairs of 16 rows a warp
        "output write": (8 * warps, 4 * 8 * warps), "output read": (8 * warps, 4 * 8 * warps),
        "lse write": (warps, 2 * warps), "lse read": (warps // 2, warps // 2),
    }
    assert {**stated, **named} == counted(of("prefill"), prefill_role)


def test_prefill_dram_and_sectors(prefill: tuple[Traffic, CopyTrace]) -> None:
    """Q, K and V come once from DRAM, and from L2 for every tile; the rest is the code and less than 3 KB."""
    traffic, trace = prefill
    record = of("prefill")
    found = record["counters"]
    once = 3 * 2 * PREFILL["batch"] * PREFILL["tokens"] * PREFILL["q_heads"] * PREFILL["head_dim"]
    assert found["dram_read_bytes"] == pytest.approx(once, rel=0.02)
    assert 0 <= found["dram_read_bytes"] - once - record["code_bytes"] < 3000
    q_sectors = once // 3 // SECTOR
    assert found["load_sectors"] == q_sectors
    assert traffic.moved["DRAM->SMEM"] // SECTOR == trace.sectors + q_sectors
    # The chip's counter is right to the sector. Of ncu's, which it makes out of addresses, some copies of zeros are
    # part, other ones in each run: 16 sectors a copy.
    assert found["l1_read_sectors"] == trace.sectors + q_sectors
    extra = found["cp_async_sectors"] - trace.sectors
    assert extra % 16 == 0
    assert 0 <= extra < 0.002 * trace.sectors
    assert found["store_sectors"] == traffic.moved["registers->DRAM"] / SECTOR


def test_the_record_says_where_it_comes_from() -> None:
    assert "H100" in RECORD["card"]
    assert {"command", "driver", "date", "versions"} <= set(RECORD)
