"""Decode of fp8, streaming decode and MLA decode: what their emulators say they move, and an H100's counters.

Rests on hardware: see test_truth_kernels.
"""

from __future__ import annotations

import pytest
from kernel_counts import SECTOR, CopyTrace, Counts, counted, emulated, of, vectors

from benchmarks.truth.whole import KERNELS, opcode
from kvlab.hardware import count_wavefronts, shared_mma_wavefronts
from kvlab.memory import bfloat16
from kvlab.staging import Traffic
from kvlab.staging.nvidia.wgmma_plan import WgmmaShape
from kvlab.staging.tile import tile_copies
from kvlab.staging.tile.copy_plan import copy_plan

Counted = tuple[Traffic, CopyTrace]


def run(name: str) -> Counted:
    trace = CopyTrace()
    return emulated(name, tile_copies, "cp_async", trace), trace


@pytest.fixture(scope="module")
def mla() -> Counted:
    return run("mla decode")


@pytest.fixture(scope="module")
def mla_16() -> Counted:
    return run("mla decode, 16 heads")


@pytest.fixture(scope="module")
def fp8() -> Counted:
    return run("decode fp8")


def output(op: str) -> str:
    """O through shared memory, and lse of 64 rows behind it."""
    if op in ("STS.64", "LDS"):
        return "lse write" if op == "STS.64" else "lse read"
    return "output write" if op.startswith("ST") else "output read"


MLA = KERNELS["mla decode"].problem
M_PROGRAMS, M_TILES, M_WARPS = MLA["batch"] * MLA["q_heads"] // 64, MLA["keys"] // 64, 8


def mla_role(op: str, offset: int, _: str) -> str:
    """The compiler's shared memory: latents at 0, Q at 0x20000, rope parts at 0x30000, Q's at 0x34000."""
    if op.startswith("LDGSTS"):
        return "rope copy" if offset >= 0x30000 else "k copy"
    if op.startswith("HGMMA"):
        return "q k products" if "64x32" in op else "p v products"
    return {"STS.128": "q write"}[op]


def test_mla_every_instruction(mla: Counted) -> None:
    traffic, trace = mla
    shape = WgmmaShape(64, 64, 512, 512, bfloat16, v_in_k=True)
    rope = WgmmaShape(64, 64, 64, 64, bfloat16, DV=0, BDV=0)
    q = [(part.places["q"], copy_plan(64, 2 * part.BD, 2 * part.BD, M_WARPS)) for part in (shape, rope)]
    stores = [count_wavefronts("st.shared.b128", vectors(at.address(p.row, p.byte // 16)))[0] for at, p in q]
    predicted: Counts = {"q write": (M_PROGRAMS * sum(x.size for x in stores), M_PROGRAMS * sum(map(sum, stores)))}
    scores, values = shape.atom(shape.BN), shape.atom(shape.v_width)
    qk, pv = shared_mma_wavefronts(scores), shared_mma_wavefronts(values, a_in_registers=True)
    for role, counter, each in (("q k products", "qk wgmma", qk), ("p v products", "pv wgmma", pv)):
        made = traffic.instructions[counter]
        predicted[role] = made, made // 4 * each  # an instruction of a warpgroup counts for 4 warps
    assert 128 * sum(passes for _, passes in list(predicted.values())[1:]) == traffic.moved["SMEM->tensor cores"]
    # The tile after the last is zeros: no bytes come, but the copies take their 4 passes, 512 bytes each.
    for role, part, ahead in (("k copy", shape, 16), ("rope copy", rope, 2)):
        made, passes = trace.into(sum(place.nbytes for place in part.places.values()))
        ahead *= M_PROGRAMS * M_WARPS
        assert made + ahead == traffic.instructions[role]
        predicted[role] = made + ahead, passes + 4 * ahead
    warps = M_PROGRAMS * M_WARPS
    named = {
        "output write": (16 * warps, 4 * 16 * warps), "output read": (16 * warps, 4 * 16 * warps),
        "lse write": (warps, 2 * warps), "lse read": (2 * M_PROGRAMS, 2 * M_PROGRAMS),  # by two warps
    }
    assert {**predicted, **named} == counted(of("mla decode"), mla_role, output)


def mla_16_role(op: str, offset: int, _: str) -> str:
    """The compiler's shared memory: latents at 0, Q at 0x8000, rope parts at 0xc000, Q's at 0xd000, P at 0xd800."""
    if op.startswith("LDGSTS"):
        return "k copy"
    if op.startswith("LDSM"):
        at = ((0xD800, "p read"), (0xD000, "q read"), (0xC000, "k read"), (0x8000, "q read"), (0, "k read"))
        return "v read" if "MT88" in op else next(role for low, role in at if offset >= low)
    if op.startswith("STSM"):
        return "p write"
    return "q write" if op == "STS.128" else "rows over warps"


N_PROGRAMS, N_TILES, N_WARPS = MLA["batch"], MLA["keys"] // 32, 4


def test_mla_16_every_instruction(mla_16: Counted) -> None:
    traffic, trace = mla_16
    predicted: Counts = {
        role: (traffic.instructions[role], traffic.wavefronts[role])
        for role in ("k read", "q read", "v read", "p read", "p write")
    }
    made, passes = sum(map(len, trace.passes)), sum(int(x.sum()) for x in trace.passes)
    ahead = N_PROGRAMS * N_WARPS * 18  # a tile of zeros behind the last
    assert made + ahead == traffic.instructions["k copy"]
    predicted["k copy"] = made + ahead, passes + 4 * ahead
    rows = N_PROGRAMS * N_TILES
    named = {
        "q write": (9 * N_PROGRAMS * N_WARPS, 4 * 9 * N_PROGRAMS * N_WARPS),
        "rows over warps": (2 * 6 * N_WARPS * rows, 2 * (2 * 4 + 2 + 2 + 2 * 4) * rows),
        "output write": (8 * N_PROGRAMS * N_WARPS, 4 * 8 * N_PROGRAMS * N_WARPS),
        "output read": (8 * N_PROGRAMS * N_WARPS, 4 * 8 * N_PROGRAMS * N_WARPS),
    }
    assert {**predicted, **named} == counted(of("mla decode, 16 heads"), mla_16_role, output)


FP8 = KERNELS["decode fp8"].problem
F_PROGRAMS, F_TILES, F_WARPS = FP8["batch"] * FP8["kv_heads"], FP8["keys"] // 64, 4


def fp8_role(op: str, offset: int, _: str) -> str:
    """The compiler's shared memory: K at 0, V at 0x2000, Q at 0x4000, P and scratch at 0x5000, page numbers."""
    if op.startswith("LDGSTS"):
        return "page numbers copy" if "128" not in op else "k copy" if offset < 0x2000 else "v copy"
    if op.startswith("LDSM"):
        at = ((0x5000, "p read"), (0x4000, "q read"), (0x2000, "v read"), (0, "k read"))
        return next(role for low, role in at if offset >= low)
    if op.startswith("STSM"):
        return "p write"
    if op == "STS.U16":
        return "q write"
    return "page numbers read" if offset >= 0x5800 else "rows over warps" if offset >= 0x5000 else "before the loop"


def test_fp8_every_instruction(fp8: Counted) -> None:
    traffic, trace = fp8
    predicted: Counts = {
        role: (traffic.instructions[role], traffic.wavefronts[role])
        for role in ("k read", "v read", "p read", "p write")
    }
    both = "q read", "q_odd read"  # even and odd columns
    predicted["q read"] = sum(traffic.instructions[x] for x in both), sum(traffic.wavefronts[x] for x in both)
    ahead = F_PROGRAMS * F_WARPS * 4  # a tile of zeros behind the last
    assert sum(map(len, trace.passes)) + 2 * ahead == 2 * traffic.instructions["k copy"]
    passes = sum(int(x.sum()) for x in trace.passes) // 2 + 4 * ahead
    for role in ("k copy", "v copy"):
        predicted[role] = traffic.instructions[role], passes
    warps = F_PROGRAMS * F_WARPS
    # The table's entries: one lane of the 8 of a row copies its page's number, four rows an instruction. All want the
    # same word of the source, and copies share nothing. A tile ahead of the loop; that of zeros takes two passes.
    pages = 4 * warps
    named = {
        "q write": (16 * warps, 16 * warps),  # 16 rows of two columns are 64 bytes in a row
        "page numbers copy": (pages * (2 + F_TILES), 4 * pages * F_TILES + 2 * pages),
        "page numbers read": (pages * (1 + F_TILES), pages * (1 + F_TILES)),
        "rows over warps": (2 * 6 * warps * F_TILES, 2 * (2 * 4 + 2 + 2 + 2 * 4) * F_PROGRAMS * F_TILES),
        # The largest of the even and of the odd columns, likewise; 16 rows at once, of 16 bytes each: two passes.
        "before the loop": (2 * 4 * warps, 2 * (2 * 4 + 2 + 2 + 2 * 4) * F_PROGRAMS),
        "output write": (2 * warps, 4 * 2 * warps), "output read": (2 * warps, 4 * 2 * warps),
    }
    assert {**predicted, **named} == counted(of("decode fp8"), fp8_role, output)


# Table and lengths, read from DRAM beside the operands, a program: whole sectors, and one of the lengths.
TABLES = {"mla decode": M_PROGRAMS * 3, "mla decode, 16 heads": N_PROGRAMS * 9, "decode fp8": F_PROGRAMS * 5}


@pytest.mark.parametrize("name", TABLES)
def test_bytes_from_dram_and_sectors(name: str, request: pytest.FixtureRequest) -> None:
    """From DRAM came operands, code, less than 5 KB of the launch; into L1 each byte that is copied."""
    traffic, _ = request.getfixturevalue({"mla decode": "mla", "decode fp8": "fp8"}.get(name, "mla_16"))
    record, once = of(name), sum(x.nbytes for x in KERNELS[name].inputs())
    found = record["counters"]
    assert 0 <= found["dram_read_bytes"] - once - record["code_bytes"] < 5000
    into_l1 = traffic.moved["DRAM->SMEM"] // SECTOR
    assert 0 <= found["l1_read_sectors"] - into_l1 - TABLES[name] <= M_PROGRAMS
    lse = 0 if name.startswith("mla") else F_PROGRAMS / 2  # 16 bytes are stored, a sector moves
    assert found["l1_written_sectors"] == found["store_sectors"] == traffic.moved["registers->DRAM"] / SECTOR + lse
    assert once / SECTOR <= found["l2_read_sectors"] + 5000 / SECTOR
    assert found["l2_read_sectors"] <= 1.001 * found["l1_read_sectors"]  # counted in two passes


def test_streaming_bytes_from_dram_and_sectors() -> None:
    """Its machine is gfx950's: of an H100 only what comes and goes is stated, K, V and Q once."""
    record, once = of("decode streaming"), sum(x.nbytes for x in KERNELS["decode streaming"].inputs())
    found, traffic = record["counters"], Traffic()
    KERNELS["decode streaming"].emulate(traffic)
    assert 0 <= found["dram_read_bytes"] - once - record["code_bytes"] < 3000
    comes = traffic.moved["DRAM->SMEM"] + traffic.moved["DRAM->registers"]
    assert found["l1_read_sectors"] == pytest.approx(comes / SECTOR, rel=0.002)  # page numbers, again and again
    assert found["l1_written_sectors"] == traffic.moved["registers->DRAM"] / SECTOR + F_PROGRAMS / 2


@pytest.mark.parametrize("name", KERNELS)
def test_what_l2_is_asked_for(name: str) -> None:
    """What arrives in L1, without the reads of neighbouring SMs that are put together on the way. How many depends on
    the moment; the two are counted in runs of their own.
    """
    found = of(name)["counters"]
    assert found["l2_read_sectors"] + found["coalesced_sectors"] == pytest.approx(found["l1_read_sectors"], rel=0.02)


# Copies of zeros, behind the last tile: they are no copies but stores, 4 passes each.
ZEROS = {
    "decode": 512, "prefill": 64 * 2 * 2 * 64, "decode fp8": 256, "decode streaming": 0,
    "mla decode": 576, "mla decode, 16 heads": 144, "prefill hopper": 0, "mla decode hopper": 0, "decode hopper": 0,
}


@pytest.mark.parametrize("name", ZEROS)
def test_what_the_unit_took(name: str) -> None:
    """The passes above are those that ncu makes out of addresses. The chip's own counters: loads and wgmma's reads take
    exactly as many; stores too, unless copies come between; all in all, without ``.cg`` copies of bytes, as many within
    2 or 3 %.
    """
    record = of(name)
    found, passes = record["counters"], dict.fromkeys(("LDS", "STS", "HGMMA", "LDGSTS.E", "LDGSTS.E.BYPASS.128"), 0)
    for sass, _, taken in record["listing"]:
        if taken:
            kind = (opcode(sass) or "").replace("LDSM", "LDS").replace("STSM", "STS")
            passes[kind if kind.startswith("LDGSTS") else kind.split(".")[0]] += taken
    assert found["gmma_wavefronts"] == passes["HGMMA"]
    if "hopper" not in name:
        assert found["shared_wavefronts_loads"] == passes["LDS"]
        assert passes["STS"] <= found["shared_wavefronts_stores"] <= 1.2 * passes["STS"]
    ours = passes["LDS"] + passes["STS"] + passes["HGMMA"] + passes["LDGSTS.E"] + 4 * ZEROS[name]
    near = 0.03 if "hopper" in name else 0.02  # mbarriers, on which warps spin, are not quite apart
    assert found["shared_wavefronts"] - found["shared_wavefronts_misc"] == pytest.approx(ours, rel=near)
