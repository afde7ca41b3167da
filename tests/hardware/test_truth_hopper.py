"""The Hopper kernels: what their emulators say they move, and an H100's counters (tests/data/hardware/kernels.json).

Rests on hardware: see test_truth_kernels. TMA's copies and the products of tensor cores are stated by the emulator;
named is what the compiler adds: numbers that partitions tell each other, and the words by which it starts them.
"""

from __future__ import annotations

import pytest
from kernel_counts import SECTOR, Counts, TmaTrace, counted, emulated, of, stmatrix

from benchmarks.truth.whole import KERNELS
from kvlab.attention.hopper import cta
from kvlab.hardware import get_atom, shared_mma_wavefronts
from kvlab.staging import Traffic
from kvlab.staging.nvidia.wgmma_plan import PanelTile

PREFILL, MLA = KERNELS["prefill hopper"].problem, KERNELS["mla decode hopper"].problem
TILES = PREFILL["tokens"] // 128 * PREFILL["q_heads"]  # a program each: 132 SMs would take more
# A program's words by which Triton starts its partitions and ends them: 8 warps read theirs twice, 4 warps write them.
PARTITIONS = 8 * 2 + 2 * 4, 8 * 2 + 2 * 4 * 2
ITEMS, BLOCKS = MLA["batch"] * MLA["q_heads"] // 64, MLA["keys"] // 64


@pytest.fixture(scope="module")
def prefill() -> tuple[Traffic, TmaTrace]:
    trace = TmaTrace()
    return emulated("prefill hopper", cta, "tma", trace), trace


@pytest.fixture(scope="module")
def mla() -> tuple[Traffic, TmaTrace]:
    trace = TmaTrace()
    return emulated("mla decode hopper", cta, "tma", trace), trace


def prefill_role(op: str, offset: int, sass: str) -> str:
    """The compiler's shared memory: O at 0x30000, at 0x38000 scratch, mbarriers, the numbers, its own words."""
    if op.startswith("HGMMA"):
        return "products"
    if op.startswith(("UTMALDG", "UTMASTG")):
        return "boxes loaded" if op.startswith("UTMALDG") else "boxes stored"
    if op.startswith("STSM"):
        return "o write"
    if op == "LDS.U8" or op == "STS.64":
        return "partitions"
    what = "numbers" if offset >= 0x38100 else "next tile"
    return f"{what} {'write' if op.startswith('STS') else 'read'}"


def test_prefill_every_instruction(prefill: tuple[Traffic, TmaTrace]) -> None:
    traffic, trace = prefill
    atom, steps = get_atom("wgmma.m64n128k16.bf16"), 128 // 16
    block = steps * (shared_mma_wavefronts(atom) + shared_mma_wavefronts(atom, a_in_registers=True))
    blocks, left = divmod(traffic.moved["SMEM->tensor cores"] // 128, block)  # of both consumers
    assert left == 0
    written, passes = stmatrix(PanelTile(rows=64, cols=128, base=0x30000))
    predicted: Counts = {
        "products": (blocks * 2 * steps * 4, blocks * block),  # an instruction of a warpgroup counts for 4 warps
        "boxes loaded": (trace.loaded, 0), "boxes stored": (4 * trace.stored, 0),  # one thread of 4 warps
        "o write": (2 * TILES * written, 2 * TILES * passes),
    }
    named = {  # all lanes have the same address. Batch, head and row of a tile; -1 at the end, for 2 x 4 warps
        "numbers write": (4 * TILES, 4 * TILES), "numbers read": (8 * 4 * TILES, 8 * 4 * TILES),
        "next tile write": (TILES, TILES), "next tile read": (TILES, TILES),  # of an atomic, to the whole warp
        "partitions": (PARTITIONS[0] * TILES, PARTITIONS[1] * TILES),
    }
    assert {**predicted, **named} == counted(of("prefill hopper"), prefill_role)


def test_prefill_dram_and_sectors(prefill: tuple[Traffic, TmaTrace]) -> None:
    traffic, _ = prefill
    record = of("prefill hopper")
    found = record["counters"]
    q, k, v = KERNELS["prefill hopper"].inputs()
    once = q.nbytes + k.nbytes + v.nbytes
    assert 0 <= found["dram_read_bytes"] - once - record["code_bytes"] < 5000
    assert found["tma_read_sectors"] == traffic.moved["DRAM->SMEM"] // SECTOR
    assert found["l1_read_sectors"] - found["tma_read_sectors"] == TILES  # what an atomic of each tile gives back
    assert found["tma_written_sectors"] == traffic.moved["registers->DRAM"] // SECTOR
    lse = 4 * PREFILL["tokens"] * PREFILL["q_heads"] // SECTOR
    assert found["store_sectors"] == lse
    assert found["l2_written_sectors"] == found["tma_written_sectors"] + lse
    assert once // SECTOR <= found["l2_read_sectors"] <= found["l1_read_sectors"]  # neighbours' reads come together
    words = (traffic.moved["DRAM->SMEM"] + traffic.moved["registers->DRAM"]) // 4  # of the banks
    assert found["bank_writes"] == pytest.approx(words, rel=0.005)


def mla_role(op: str, offset: int, sass: str) -> str:
    """The compiler's shared memory: Q at 0, latent rows, then O, at 0x12000, P at 0x36000, rows' factors at 0x38000."""
    if op.startswith("HGMMA.64x64"):
        return "q k products"
    if op.startswith("HGMMA"):
        return "p v products, p in shared memory" if "gdesc" in sass.split(",")[1] else "p v products, p in registers"
    if op.startswith("UTMALDG"):
        return "boxes of q" if op.endswith("4D") else "boxes of keys"
    if op.startswith("UTMASTG"):
        return "boxes of o"
    if op.startswith("STSM"):
        return "p write" if offset == 0x36000 else "o write"
    if op in ("LDS.128", "STS.128"):
        return "clean"
    if op == "LDS.U8" or op == "STS.64":
        return "partitions"
    return "factors write" if op == "STS" else "factors read"


def test_mla_every_instruction(mla: tuple[Traffic, TmaTrace]) -> None:
    traffic, trace = mla
    qk, pv = (get_atom(f"wgmma.m64n{n}k16.bf16") for n in (64, 256))
    passes = {
        "q k products": 36 * shared_mma_wavefronts(qk),
        "p v products, p in registers": 4 * shared_mma_wavefronts(pv, a_in_registers=True),
        "p v products, p in shared memory": 4 * shared_mma_wavefronts(pv),
    }
    assert traffic.moved["SMEM->tensor cores"] == 128 * ITEMS * BLOCKS * sum(passes.values())
    instructions = {role: 36 if role.startswith("q") else 4 for role in passes}
    predicted: Counts = {
        role: (ITEMS * BLOCKS * 4 * instructions[role], ITEMS * BLOCKS * n) for role, n in passes.items()
    }
    q_boxes = ITEMS * 9
    predicted |= {"boxes of q": (q_boxes, 0), "boxes of keys": (trace.loaded - q_boxes, 0)}
    predicted["boxes of o"] = 4 * trace.stored, 0  # one thread of 4 warps
    written, taken = stmatrix(PanelTile(rows=64, cols=64, base=0x36000))
    predicted["p write"] = ITEMS * BLOCKS * written, ITEMS * BLOCKS * taken
    panels = MLA["latent"] // 64  # of O, each as P
    predicted["o write"] = ITEMS * panels * written, ITEMS * panels * taken
    factors = ITEMS * 4 * 2 * (BLOCKS + 1)  # alpha of 8 + 8 rows a warp, 1 / l with the last
    named = {
        "factors write": (factors, factors), "factors read": (factors, factors), "clean": (0, 0),
        "partitions": (PARTITIONS[0] * ITEMS, PARTITIONS[1] * ITEMS),
    }
    assert {**predicted, **named} == counted(of("mla decode hopper"), mla_role)


def test_mla_dram_and_sectors(mla: tuple[Traffic, TmaTrace]) -> None:
    traffic, _ = mla
    record = of("mla decode hopper")
    found = record["counters"]
    q, rows, table, lens = KERNELS["mla decode hopper"].inputs()
    once = q.nbytes + rows.nbytes + table.nbytes + lens.nbytes
    assert 0 <= found["dram_read_bytes"] - once - record["code_bytes"] < 5000
    assert found["tma_read_sectors"] == traffic.moved["DRAM->SMEM"] // SECTOR
    assert found["l1_read_sectors"] - found["tma_read_sectors"] == 3 * ITEMS  # 2 of the table, 1 of the lengths
    assert found["tma_written_sectors"] == traffic.moved["registers->DRAM"] // SECTOR
    # The two tiles of a sequence run on neighbouring SMs: where their reads come together, L2 is asked once for both.
    assert once // SECTOR <= found["l2_read_sectors"] <= found["l1_read_sectors"]
    out = MLA["batch"] * MLA["q_heads"] * 2 * MLA["latent"]
    lse = MLA["batch"] * MLA["q_heads"] * 4
    assert found["store_sectors"] == lse // SECTOR
    p = ITEMS * BLOCKS * 64 * 64 * 2
    assert found["bank_writes"] == pytest.approx((traffic.moved["DRAM->SMEM"] + p + out) / 4, rel=0.005)


def decode_role(op: str, offset: int, sass: str) -> str:
    """Reads of K and V, copies; the rest is the end, where the warps' results are put together, and the beginning."""
    if op.startswith("LDSM"):
        return "v read" if "MT88" in op else "k read"
    return "boxes" if op.startswith("UTMALDG") else "beginning and end"


def test_decode_every_read_and_copy() -> None:
    trace, record = TmaTrace(), of("decode hopper")
    traffic = emulated("decode hopper", cta, "tma", trace)
    reads = traffic.moved["SMEM->registers"] // 512  # ldmatrix.x4 of a warp
    found = counted(record, decode_role)
    assert {role: found[role] for role in ("k read", "v read")} == dict.fromkeys(
        ("k read", "v read"), (reads // 2, 4 * reads // 2)
    )
    assert found["boxes"] == (trace.loaded, 0)
    assert found["beginning and end"][1] < 0.06 * record["counters"]["wavefronts"]
    q, k, v, table, lens = KERNELS["decode hopper"].inputs()
    once = sum(x.nbytes for x in (q, k, v, table, lens))
    counters = record["counters"]
    assert 0 <= counters["dram_read_bytes"] - once - record["code_bytes"] < 5000
    assert counters["tma_read_sectors"] == traffic.moved["DRAM->SMEM"] // SECTOR == (k.nbytes + v.nbytes) // SECTOR
