"""The decode kernels compiled for GPUs that are not there: what the compiler made of them, and the emulator beside it.

Rests on the compiler's own artefacts: TTGIR, PTX, SASS, register and spill counts.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from asked import ask, same_registers
from caught import FIVE, SHARED, fits_small_gpus
from decode_cases import Case
from feature_cases import FP8, FeatureCase
from launches import compiled, compiled_features, launches

from kvlab.attention import mha_decode_paged
from kvlab.attention.mha_decode.config import choose_config, problem_of
from kvlab.cache import PagedKVCache
from kvlab.hardware import get_arch
from kvlab.memory import Memory, as_dtype
from kvlab.staging import FragmentMap, KVCacheIterator, Timeline, Traffic
from kvlab.staging.nvidia.fma_cta import FmaCTA, FmaShape
from kvlab.staging.nvidia.mma_sync_cta import MmaSyncCTA, MmaSyncShape
from kvlab.triton_support.versions import installed

pytestmark = pytest.mark.compile

SIZES = [(64, "bf16"), (128, "bf16"), (128, "fp16"), (64, "fp32"), (128, "fp32")]
MATRIX = [(D, dtype, target) for D, dtype in SIZES for target in FIVE if dtype != "fp16" or target == "sm_90"]


@pytest.mark.parametrize("D, dtype, target", MATRIX, ids=lambda v: str(v))
def test_attend(D: int, dtype: str, target: str) -> None:
    made = compiled(Case((5,), D=D, dtype=dtype), "attend", target)
    assert made.spills == 0
    assert made.shared <= SHARED[target]
    assert fits_small_gpus(made)
    count = made.instructions
    if target.startswith("gfx"):
        assert any(name.startswith("v_mfma") for name in count)
    elif dtype == "fp32":
        assert not {"HMMA", "HGMMA"} & set(count), "tf32 would round the inputs"
        assert count["LDGSTS"] > 0
    else:
        assert count["HMMA"] > 0, "mma.sync"
        assert count["LDSM"] > 0, "ldmatrix"
        assert count["LDGSTS"] > 0, "cp.async"


@pytest.mark.parametrize("target", ["sm_90", "gfx950"])
def test_longest_first(target: str) -> None:
    """A batch that is put in order, with the registers of the others."""
    case = FeatureCase((1,) * 256, D=128)
    assert choose_config(problem_of(*case.build().arrays[:4]), num_splits=1).longest_first == 256
    assert compiled_features(replace(case, splits=1), target).spills == 0


HEAVY = {"softcap": 3.0, "sinks": True, "alibi": "head", "window": 40}
LIST = [
    (FeatureCase((5,), D=128, kv=FP8), FIVE[1:]),
    (FeatureCase((5,), D=128, kv=FP8, scales="token", S=4, **HEAVY), ("sm_90",)),
    (FeatureCase((5,), D=128, S=4, heads=(8, 1), **HEAVY), ("sm_90",)),
    (FeatureCase((5,), D=256, S=4, heads=(8, 1), mask="bias", **HEAVY), ("sm_90",)),
    (FeatureCase((5,), D=96), ("sm_90",)),
    (FeatureCase((5,), D=192, Dv=128, splits=2), ("sm_80", "sm_90")),
    (FeatureCase((5,), D=576), FIVE),
    (FeatureCase((5,), D=576, S=4, heads=(8, 1), kv=FP8, scales="head", **HEAVY), ("sm_90",)),
    (FeatureCase((5,), D=576, dtype="fp32"), ("sm_80", "sm_86", "sm_90")),
    (FeatureCase((5,), D=64, dtype="fp32", S=4, heads=(8, 1)), ("sm_90",)),
    (FeatureCase((5,), D=576, kv=FP8), ("sm_89", "sm_120")),
    (FeatureCase((5,), D=512, kv=FP8, S=4, heads=(8, 1)), ("sm_89",)),  # half the keys, where 99 KB are too few
    (FeatureCase((5,), D=528, Dv=512, dtype="fp32"), ("sm_86",)),  # one stage
    (FeatureCase((5,), D=512, Dv=528, dtype="fp32", mask="bias"), ("sm_86",)),
]
LISTED = [(case, target) for case, targets in LIST for target in targets]


@pytest.mark.parametrize("case, target", LISTED, ids=[f"{case}-{target}" for case, target in LISTED])
def test_features(case: FeatureCase, target: str) -> None:
    """The default configuration of the target: no spills, shared memory that it has, matrix instructions."""
    made = compiled_features(case, target)
    assert made.spills == 0
    assert made.shared <= SHARED[target]
    assert fits_small_gpus(made) or case.dtype == "fp32", "which has two stages where they have room"
    count = made.instructions
    if target.startswith("gfx"):
        assert any(name.startswith("v_mfma") for name in count)
    elif case.dtype != "fp32":
        assert count["HMMA"] > 0
    if case.kv and target == "sm_90":
        """Two values an instruction, from rows that ldmatrix has read."""
        assert "cvt.rn.f16x2.e4m3x2" in made.asm["ptx"]
        assert "cvt.rn.bf16" not in made.asm["ptx"].split("cvt.rn.f16x2.e4m3x2")[1]
        assert "LDS.U8" not in made.sass


def test_the_emulator_issues_the_instructions_of_the_compiled_loop_of_pairs() -> None:
    """ldmatrix, mma and conversions of one tile of fp8, counted in PTX and in the emulator's steps. Triton 3.6 stores
    the halves of Q column by column and reads them transposed; the emulator has them as 3.7 and 3.9 do.
    """
    case = FeatureCase((5,), D=128, kv=FP8)
    ptx = compiled_features(case, "sm_90").asm["ptx"]
    shape = MmaSyncShape(16, 64, 64, 64, np.dtype(np.float16), "sm_90", each=2)
    reads = {role: shape.read_addresses(role)[1].shape[0] for role in ("q", "q_odd", "k", "v", "p")}
    transposed = reads.pop("v")
    turned = reads["q"] + reads["q_odd"] if str(installed()).startswith("3.6.") else 0
    assert len(re.findall(r"ldmatrix\S*x4\.shared", ptx)) == sum(reads.values()) - turned
    assert len(re.findall(r"ldmatrix\S*x4\.trans\.shared", ptx)) == transposed + turned
    assert len(re.findall(r"mma\.sync", ptx)) == 2 * (64 // 16 * (64 // 32) + 64 // 16 * (64 // 32))
    held = sum(shape.fragment_map(role).row[0].size for role in ("k", "v"))  # pairs of a thread
    assert len(re.findall(r"cvt\.rn\.f16x2\.e4m3x2", ptx)) == held


STREAMING = [
    *((FeatureCase((5,), D=D, dtype=dtype, splits=2), target) for D, dtype in ((128, "bf16"), (512, "fp32"))
      for target in FIVE),
    *((FeatureCase((5,), D=512, kv=FP8, scales="token", splits=2), target) for target in FIVE[1:]),
]


@pytest.mark.parametrize("case, target", STREAMING, ids=[f"{case}-{target}" for case, target in STREAMING])
def test_streaming(case: FeatureCase, target: str) -> None:
    made = compiled_features(case, target, streaming=True)
    assert made.spills == 0
    assert made.shared <= SHARED[target]
    assert fits_small_gpus(made)


@pytest.mark.parametrize("target", FIVE)
def test_merge(target: str) -> None:
    made = compiled(Case((5,), D=128, splits=8), "merge", target)
    assert made.spills == 0
    assert made.shared <= SHARED[target]


OTHER_SIZES = [Case((5,), D=80, S=4), Case((5,), heads=(48, 1), D=64, splits=3)]
OTHER_SIZES += [Case((5,), D=D) for D in (72, 200, 264)]


@pytest.mark.parametrize("case", OTHER_SIZES, ids=str)
def test_attend_of_other_sizes_on_sm_90(case: Case) -> None:
    """Padded depth; two tiles of rows; partial outputs in float32; heads of which 16 bytes stand aligned, 32 do not;
    a last piece of 16 columns, fewer than eight warps share out.
    """
    made = compiled(case, "attend", "sm_90")
    assert made.spills == 0
    assert made.instructions["HMMA"] > 0
    assert made.instructions["LDGSTS"] > 0 or case.D > 256, "cp.async"


def emulated(case: Case, arch: str) -> tuple[MmaSyncShape, MmaSyncCTA]:
    _, _, arguments = launches(case)["attend"]
    C = arguments["C"]
    shape = MmaSyncShape(C.BM, C.BN, C.D, C.W0, as_dtype(case.dtype), arch)
    return shape, MmaSyncCTA(shape, 1, Traffic())


TILES = [Case((5,), D=64), Case((5,), D=128), Case((5,), heads=(48, 1), D=128), Case((5,), D=64, S=4, heads=(24, 1))]
tiles = pytest.mark.parametrize("case", TILES, ids=str)


@tiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_emulator_issues_the_instructions_of_the_compiled_loop(case: Case, arch: str) -> None:
    """ldmatrix, mma and P's stores of one tile, counted in PTX inside and outside the emulator's steps."""
    shape, _ = emulated(case, arch)
    ptx = compiled(case, "attend", arch).asm["ptx"]
    reads = {role: shape.read_addresses(role)[1].shape[0] for role in "qkvp"}  # instructions of a warp
    plain, transposed = reads["q"] + reads["k"] + reads["p"], reads["v"]
    assert len(re.findall(r"ldmatrix\S*x4\.shared", ptx)) == plain
    assert len(re.findall(r"ldmatrix\S*x4\.trans\.shared", ptx)) == transposed
    steps = shape.BD // 16 * (shape.BN // 32) + shape.BN // 16 * (shape.BD // 32)
    assert len(re.findall(r"mma\.sync", ptx)) == shape.BM // 16 * steps
    first, last = (m.start() for m in (re.search(r"mma\.sync", ptx), list(re.finditer(r"mma\.sync", ptx))[-1]))
    loop = ptx[first:last]
    pairs = shape.BM * shape.BN // 128 // 2
    if "stmatrix" in get_arch(arch).features:
        assert len(re.findall(r"stmatrix\S*x4", loop)) == pairs // 4
    else:
        assert "stmatrix" not in ptx
        written = loop[re.search(r"cvt\.rn\.bf16", loop).start() :]  # P rounded, stored, read back
        written = written[: written.index("ldmatrix")]
        assert len(re.findall(r"st\.shared\.(?:v2\.b16|b32)", written)) == pairs


@tiles
def test_shared_images_are_those_of_the_compiler(case: Case) -> None:
    """K, V, Q and P stand in ``SwizzledSharedLayout`` rows; ours equal its closed form in test_swizzled_tile."""
    shape, _ = emulated(case, "sm_90")
    ttgir = compiled(case, "attend", "sm_90").asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.swizzled_shared<.*>)$", ttgir, re.M))
    expected = {256: (8, 1, 8), 128: (8, 1, 8), 512: (8, 1, 8)}
    loads = re.findall(r"local_load .*memdesc<(\d+)x(\d+)xbf16, (#\w+),", ttgir)
    seen = set()
    for rows, columns, layout in loads:
        vec, per_phase, max_phase = map(int, re.findall(r"= (\d+)", layouts[layout])[:3])
        assert (vec, per_phase, max_phase) == expected[2 * int(columns)]
        seen.add((int(rows), int(columns)))
    places = [shape.place(role) for role in "qkvp"]
    assert seen == {(place.rows, place.row_bytes // 2) for place in places}


@tiles
def test_registers_are_those_of_the_compiler(case: Case) -> None:
    """Every register of K, V, Q, P, S and O, in Triton's order, from the linear layouts of the compiled kernel."""
    shape, cta = emulated(case, "sm_90")
    ttgir = compiled(case, "attend", "sm_90").asm["ttgir"]
    found = re.search(r"^#mma = .*warpsPerCTA = \[(\d+), (\d+)\], instrShape = \[(\d+), (\d+)\]", ttgir, re.M)
    assert found is not None
    mma = {"mma": [int(n) for n in found.groups()]}
    bases = ask(
        4,
        {
            "q": mma | {"shape": [shape.BM, shape.BD], "operand": 0},
            "p": mma | {"shape": [shape.BM, shape.BN], "operand": 0},
            "v": mma | {"shape": [shape.BN, shape.BD], "operand": 1},
            "k": mma | {"shape": [shape.BD, shape.BN], "operand": 1},  # the compiler multiplies by K^T
            "o": mma | {"shape": [shape.BM, shape.BD]},
            "s": mma | {"shape": [shape.BM, shape.BN]},
        },
    )
    maps = {role: shape.fragment_map(role) for role in "qpv"} | {"o": cta.zeros().map}
    for role, layout in maps.items():
        same_registers(layout.row, layout.col, bases[role], role)
    k = shape.fragment_map("k")
    same_registers(k.col, k.row, bases["k"], "k")
    s = scores_map(case, shape)
    same_registers(s.row, s.col, bases["s"], "s")


def scores_map(case: Case, shape: MmaSyncShape | FmaShape) -> FragmentMap:
    """Where the emulator holds S: asked of a tile of zeros."""
    kv = np.zeros((shape.BN, 1, 1, shape.D), as_dtype(case.dtype))
    cache = PagedKVCache(kv, [0], [range(shape.BN)], max_seq_length=1, max_cache_length=shape.BN)
    one, all_rows = np.zeros(1, np.int64), np.ones((1, shape.BM), bool)
    cta = FmaCTA(shape, 1, Traffic()) if isinstance(shape, FmaShape) else MmaSyncCTA(shape, 1, Traffic())
    tile = KVCacheIterator(cache, shape.BN, one, one, end=shape.BN).next_tile()
    q = cta.load_q(Memory.over(kv), np.zeros((1, shape.BM), np.int64), all_rows)
    return cta.scores(q, cta.load_k(tile, np.array([True])), np.array([True])).map


@pytest.mark.parametrize(
    "case",
    [Case((5,), D=D, heads=heads, dtype="fp32") for D in (16, 64, 128) for heads in [(8, 2), (48, 1)]],
    ids=str,
)
def test_accumulators_without_tensor_cores_are_those_of_the_compiler(case: Case) -> None:
    """S and O of float32: which thread holds which element, in Triton's order."""
    _, _, arguments = launches(case)["attend"]
    C = arguments["C"]
    shape = FmaShape(C.BM, C.BN, C.D, C.W0, "sm_90", arguments["num_warps"])
    ttgir = compiled(case, "attend", "sm_90").asm["ttgir"]
    blocked = {
        name: [json.loads(part) for part in re.findall(r"= (\[[\d, ]+\])", text)]
        for name, text in re.findall(r"^(#blocked\d*) = #ttg\.blocked<\{(.*)\}>$", ttgir, re.M)
    }
    results = re.findall(r"tt\.dot .*-> tensor<(\d+)x(\d+)xf32, (#blocked\d*)>", ttgir)
    (s_rows, s_columns, s_layout), (o_rows, o_columns, o_layout) = results
    bases = ask(
        shape.warps,
        {
            "s": {"shape": [int(s_rows), int(s_columns)], "blocked": blocked[s_layout]},
            "o": {"shape": [int(o_rows), int(o_columns)], "blocked": blocked[o_layout]},
        },
    )
    s, o = scores_map(case, shape), FmaCTA(shape, 1, Traffic()).zeros().map
    same_registers(s.row, s.col, bases["s"], "s")
    same_registers(o.row, o.col, bases["o"], "o")


PIPELINED = [
    FeatureCase((5,), D=96), FeatureCase((5,), D=80), FeatureCase((5,), D=96, S=4, heads=(24, 1)),
    FeatureCase((5,), D=128, kv=FP8), FeatureCase((5,), D=64, S=4, heads=(24, 1), kv=FP8),
]
"""Pieces of columns; warps along the rows, where the last product is as narrow as the rows are many; pairs of e4m3."""


@pytest.mark.parametrize("case", PIPELINED, ids=str)
def test_the_emulator_copies_waits_and_reads_in_the_order_of_the_compiled_loop(case: FeatureCase) -> None:
    """Where the warps stand, and the loop of the PTX, without the copies of page numbers, as Triton 3.7 orders it,
    against the events of the emulator."""
    made, x = compiled_features(case, "sm_90"), replace(case, lens=(256,)).build()
    traffic = Traffic(timeline=Timeline())
    mha_decode_paged(*x.arrays, num_splits=1, arch="sm_90", traffic=traffic, **x.options)
    along_rows = "p write" not in traffic.wavefronts
    warps = re.findall(r"warpsPerCTA = (\[\d, \d\]), instrShape", made.asm["ttgir"])
    assert warps == ["[4, 1]" if along_rows else "[1, 4]"]
    if not str(installed()).startswith("3.7."):
        return
    words = {
        r"cp\.async\.wait_group": "wait", r"bar\.sync": "barrier", r"ldmatrix\S+trans": "transpose",
        r"ldmatrix": "read", r"cp\.async\.cg": "copy", r"cp\.async\.ca": "page", r"cp\.async\.commit": "commit",
        "bra": "bra",
    }
    found = [next(told for word, told in words.items() if re.match(word, one))
             for one in re.findall("|".join(words), made.asm["ptx"])]
    pages = r"(barrier )?page (page )*commit " if case.kv else r"page (page )*commit "
    found = re.sub(pages, "", " ".join(found)).split()
    first = max(i for i, word in enumerate(found[: found.index("transpose")]) if word == "wait")
    loop = [word for word, _ in itertools.groupby(found[first : found.index("bra", first)])]
    reads = {"v read": "transpose", "k read": "read", "q read": "read", "q_odd read": "read", "p read": "read"}
    events = [reads.get(e.what, "") if e.kind == "read" else e.kind for e in traffic.trace()]
    told = [word for word, _ in itertools.groupby(word for word in events if word in words.values())]
    first = told.index("wait")
    assert told[first : first + 2 * len(loop)] == 2 * loop
