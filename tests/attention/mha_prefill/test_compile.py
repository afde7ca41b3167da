"""The prefill kernel compiled for GPUs that are not there: what the compiler made of it, and the emulator beside it.

Rests on the compiler's own artefacts: TTGIR, SASS, register and spill counts.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import triton
from asked import ask, same_registers
from caught import FIVE, SHARED, Caught, as_launched, fits_small_gpus, has_room
from prefill_cases import Case

from kvlab.attention.features.resolve import Features
from kvlab.attention.machines.gpu import family
from kvlab.attention.masks import MaskPlan
from kvlab.attention.mha_prefill import emulator, kernel
from kvlab.attention.mha_prefill.config import PrefillConfig, PrefillProblem, choose_config, shared_bytes
from kvlab.memory import as_dtype
from kvlab.staging import Timeline, Traffic
from kvlab.staging.nvidia.mma_sync_cta import MmaSyncCTA, MmaSyncShape
from kvlab.staging.nvidia.wgmma_plan import K_BYTES, WgmmaShape
from kvlab.triton_support.compile import Compiled

pytestmark = pytest.mark.compile


@functools.cache
def compiled(case: Case, target: str, **other: int) -> tuple[Compiled, PrefillConfig]:
    """The kernel as a call on ``target`` compiles it: the same types, constants and alignments."""
    call = case.build().plan(device="cpu")
    config = replace(choose_config(call.plan.problem, arch=family(target), shared=SHARED[target]), **other)
    caught = Caught(kernel.attend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "attend", caught)
        options = {"scale": call.plan.scale, "problem": call.plan.problem, "features": call.features}
        kernel.launch(*call.arrays, config=config, **options)
    return as_launched(caught.fn, caught.arguments, target), config


LENS = ((150, 200), (3, 7))


def paged(D: int, **more: Any) -> Case:
    return Case(LENS, heads=(8, 2), D=D, form="paged", page=64, **more)


MATRIX = [(paged(128), target) for target in FIVE]
MATRIX += [(paged(128, kv="fp8", scales="head"), target) for target in ("sm_90", "sm_100", "gfx950")]
MATRIX += [(paged(128, dtype="fp8", scales="head"), target) for target in ("sm_90", "gfx950")]
MATRIX += [(paged(128, dtype="fp32"), target) for target in ("sm_90", "gfx950")]
MATRIX += [
    (case, "sm_90")
    for case in (
        Case(LENS, heads=(8, 2), D=128, form="ragged", dtype="fp16"),
        Case(LENS[:1] * 2, heads=(8, 2), D=256),
        Case(((40, 70),), heads=(2, 1), D=128),
        Case(((40, 70),), heads=(2, 1), D=256),
        paged(80, window=100, sinks=True, softcap=20.0, alibi="head"),
        paged(128, mask="striped", softcap=9.0),
        paged(192, DV=128),
        paged(576, DV=512),
        paged(576, window=100, sinks=True, softcap=20.0, alibi="head"),
        paged(576, mask="striped", softcap=9.0),
        paged(576, kv="fp8", scales="token"),
        *(paged(576, DV=DV, dtype="fp8", scales=by) for DV in (512, 576) for by in ("head", "token")),
        paged(576, dtype="fp32"),
        paged(256, kv="fp8", scales="token"),
        paged(96, kv="fp8", scales="token"),
        Case(((40, 70),), heads=(2, 1), D=80, kv="fp8"),
        *(Case(((38, 38), (2, 2)), heads=(4, 2), D=D, DV=DV, form="ragged", dtype="fp8", scales="token", mask="sliding",
               sinks=True) for D, DV in ((80, None), (96, None), (16, 80))),
        paged(256, dtype="fp32"),
    )
]


MATRIX += [(paged(D, DV=DV), target) for D, DV, target in (
    (192, 192, "sm_80"), (576, 512, "sm_80"), (576, 576, "sm_80"), (272, 272, "sm_80"), (576, 576, "sm_86"),
    (576, 512, "sm_120"), (256, 256, "sm_80"), (576, 576, "sm_100"), (576, 576, "gfx942"), (576, 576, "gfx950"),
)]
MATRIX += [(paged(576, mask="striped", softcap=9.0), "sm_80")]
MATRIX += [(paged(136), "sm_80"), (paged(264), "sm_80"), (paged(200), "sm_90")]  # 16 bytes stand aligned, 32 do not
MATRIX += [(paged(256, dtype="fp16", kv="fp8", scales="token"), "sm_89")]
WIDE_FP32 = [(paged(576, dtype="fp32"), target) for target in ("gfx942", "gfx950")]
MATRIX += WIDE_FP32
SPILLS = {
    (paged(576, DV=576, dtype="fp8", scales="token"), "sm_90"): {"3.6": 80, "3.7": 8}.get(triton.__version__[:3], 0),
    (paged(576, DV=576, dtype="fp8", scales="head"), "sm_90"): 24 if triton.__version__.startswith("3.9") else 0,
    WIDE_FP32[1]: 5 if triton.__version__.startswith("3.9") else 0,
}
"""What is spilled all the same, in bytes, registers of gfx950. Products of e4m3 take 64 rows at least, whose values of
576 columns are 144 accumulators of a thread; those of 512 columns, 128, leave enough.
"""
BRIM = [paged(512, DV=528), paged(512, DV=528, mask="striped")]
"""The first fills the shared memory of sm_86 to the last byte with two stages; a bias leaves room for one."""
MATRIX += [(case, "sm_86") for case in BRIM]
TWO_STAGES = [paged(576, DV=DV) for DV in (512, 576)]
"""Of which sm_80 holds two, and GPUs with less shared memory one."""


@pytest.mark.parametrize("case, target", MATRIX, ids=[f"{case}-{target}" for case, target in MATRIX])
def test_attend(case: Case, target: str) -> None:
    made, config = compiled(case, target)
    assert made.spills <= SPILLS.get((case, target), 0)
    assert made.shared <= SHARED[target]
    assert has_room(made, shared_bytes(config, case.build().plan(device="cpu").plan.problem, family(target)))
    assert fits_small_gpus(made) or case in TWO_STAGES
    count = made.instructions
    if target.startswith("gfx"):
        assert any(name.startswith("v_mfma") for name in count)
        return
    assert count["LDGSTS"] > 0 or case.dtype == "fp32" or config.num_stages == 1, "cp.async"
    if case.dtype == "fp32":
        assert not {"HMMA", "HGMMA"} & set(count), "tf32 would round the inputs"
    elif case.dtype == "fp8":
        assert count["QGMMA"] > 0
    else:
        unit = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}.get(target, "HMMA")
        assert count[unit if config.BM >= 64 else "HMMA"] > 0


@pytest.mark.skipif(triton.__version__.startswith("3.9"), reason="the ptxas of 3.9 has not this fault")
@pytest.mark.parametrize("kind", [{"kv": "fp8"}, {"dtype": "fp8", "scales": "token"}], ids=["K and V", "V"])
def test_narrow_pieces_of_converted_keys_lose_a_descriptor(kind: dict[str, str]) -> None:
    """Rests on hardware and the SASS: with 64 + 32 columns of K or V that are converted an H100 gave wrong values, or
    went beyond its memory; their descriptors begin with a uniform register that nothing has written. The configuration
    takes no such pieces.
    """
    case = Case(((40, 70),), heads=(2, 1), D=80, **kind)
    with pytest.raises(AssertionError, match="ptxas left out a write"):
        compiled(case, "sm_90", D0=64, D1=32, V0=64, V1=32)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_converted_pieces_have_one_swizzle(arch: str) -> None:
    """A law, of every width: of what is stored as e4m3 and multiplied in 16 bits, all pieces have rows of 128 bytes and
    more; with scales of tokens that is V of e4m3 beside a q of e4m3, too.
    """
    for D, DV in itertools.product(range(16, 577, 16), repeat=2):
        for itemsize, p_fp8 in ((2, False), (1, False), (1, True)):
            problem = PrefillProblem(2, 40, 4, 2, D, DV, itemsize, 1, p_fp8=p_fp8)
            config = choose_config(problem, arch=arch)
            of_k, of_v = ((config.D0, config.D1), (config.V0, config.V1))
            converted = [*(of_k if itemsize == 2 else ()), *(() if p_fp8 else of_v)]
            assert all(n == 0 or n >= 64 for n in converted), (problem, config)
            assert sum(of_k) >= D
            assert sum(of_v) >= DV


def test_unused_features_cost_nothing() -> None:
    """The plain loop: as many products, copies and special functions as the sizes say, and every register in use."""
    made, config = compiled(Case(LENS[:1] * 2, heads=(8, 2), D=128), "sm_90")
    assert (config.BM, config.BN, made.spills) == (128, 128, 0)
    exponentials = made.instructions["MUFU"]
    rows, columns = config.BM * config.BN // (32 * config.num_warps), 2
    assert exponentials < 2 * rows + 64 * columns


@pytest.mark.parametrize("D", [64, 128])
def test_the_emulator_works_as_the_compiled_loop(D: int) -> None:
    """wgmma of the same shape and number, warps along the rows, 128-byte swizzle, P from registers."""
    made, config = compiled(Case(LENS[:1] * 2, heads=(8, 2), D=D), "sm_90")
    shape = WgmmaShape(config.BM, config.BN, D, config.D0, as_dtype("bf16"), config.num_warps)
    ttgir = made.asm["ttgir"]
    layouts = re.findall(r"nvidia_mma<\{versionMajor = 3.*?warpsPerCTA = \[(\d+), 1\], instrShape = \[16, (\d+)", ttgir)
    assert {(int(warps), int(n)) for warps, n in layouts} == {(shape.warps, n) for n in (shape.BN, shape.BD)}
    assert re.findall(r"nvmma_shared<\{swizzlingByteWidth = (\d+)", ttgir) == [str(shape.panel("k0").width)] * 2
    products = re.findall(r"warp_group_dot .*? : (\S+)<.*\* !ttg.memdesc", ttgir)
    assert products == ["!ttg.memdesc", "tensor"] * 2, "S from shared memory, O += P V with P in registers; two loops"
    steps = shape.BD // 16 + shape.BN // 16  # of a tile, for 64 rows a warpgroup
    assert made.instructions["HGMMA"] == 2 * steps * (config.BM // (16 * shape.warps))


ON_SM_80 = {
    "rows": Case(LENS[:1] * 2, heads=(8, 2), D=64),
    "half of the warps again": paged(192, DV=64),
    "the wide piece last": paged(192),
    "32 rows": paged(320),
    "pieces": paged(80),
    "columns": Case(LENS[:1] * 2, heads=(8, 2), D=256),
    "columns of two pieces": paged(192, DV=128),
}


def shapes_on_sm_80(config: PrefillConfig) -> list[MmaSyncShape]:
    """Of the first pieces of K and V, and of the others."""
    widths = [((config.D0,) * 2, (config.V0,) * 2), ((config.D1,) * 2, (config.V1,) * 2)]
    rows = config.BM >= (config.V1 or config.V0)
    return [
        MmaSyncShape(
            config.BM, config.BN, *k, as_dtype("bf16"), "sm_80", v_columns=v, warps=config.num_warps, along_rows=rows
        )
        for k, v in widths
        if k[0] or v[0]
    ]


@pytest.mark.parametrize("name", ON_SM_80)
def test_the_emulator_issues_the_instructions_of_the_compiled_loops_on_sm_80(name: str) -> None:
    """The warps' place, the swizzles, and ldmatrix, mma and P's stores of a tile in each of the two loops."""
    made, config = compiled(ON_SM_80[name], "sm_80")
    shapes = shapes_on_sm_80(config)
    warps = re.findall(r"warpsPerCTA = (\[\d, \d\]), instrShape", made.asm["ttgir"])
    assert warps == [str([shapes[0].warps_m, shapes[0].warps_n])]
    swizzles = re.findall(r"swizzled_shared<\{vec = 8, perPhase = (\d), maxPhase = (\d)", made.asm["ttgir"])
    rows = {shape.place(role).row_bytes for shape in shapes for role in "qkvp" if in_shared(shape, role)}
    assert set(swizzles) == {(str(max(128 // n, 1)), str(min(n // 16, 8))) for n in rows}
    ptx = made.asm["ptx"]
    loops = ptx[ptx.index("cp.async.wait_group") : ptx.rindex("mma.sync")]
    reads = {role: sum(len(s.read_addresses(role)[1]) for s in shapes if in_shared(s, role)) for role in "qkvp"}
    reads["p"] = len(shapes[0].read_addresses("p")[1]) if in_shared(shapes[0], "p") else 0
    transposed = reads.pop("v")
    assert len(re.findall(r"ldmatrix\S*x[24]\.shared", loops)) == 2 * sum(reads.values())
    assert len(re.findall(r"ldmatrix\S*x4\.trans\.shared", loops)) == 2 * transposed
    maps = [s.fragment_map("k") for s in shapes if s.BD] + [s.fragment_map("v") for s in shapes if s.columns("v")[1]]
    operands = sum(m.row.shape[1] for m in maps)  # of a warp, each met by every 16 rows of it
    assert len(re.findall(r"mma\.sync", ptx)) == 2 * operands * max(config.BM // (16 * shapes[0].warps_m), 1)
    if in_shared(shapes[0], "p"):
        written = loops[loops.index("cvt.rn.bf16") :]  # P rounded, stored, read back
        written = written[: written.index("ldmatrix")]
        stores = re.findall(r"st\.shared\.(?:v2\.b16|b32)", written)
        assert len(stores) == len(shapes[0].access("p write").address)


def in_shared(shape: MmaSyncShape, role: str) -> bool:
    """Whether the piece has this tile, and in shared memory."""
    if role == "p":
        return not shape.along_rows
    return shape.columns("v" if role == "v" else "k")[1] > 0


@pytest.mark.parametrize("name", ON_SM_80)
def test_registers_on_sm_80_are_those_of_the_compiler(name: str) -> None:
    """Every register of K, V, Q, P, S and O, in Triton's order, from the linear layouts of the compiled kernel."""
    config = choose_config(ON_SM_80[name].build().plan(device="cpu").plan.problem, arch="sm_80")
    shape = shapes_on_sm_80(config)[0]
    mma = {"mma": [shape.warps_m, shape.warps_n, 16, 8]}
    BM, BN, BV = shape.BM, shape.BN, shape.columns("v")[1]
    bases = ask(
        shape.warps,
        {
            "q": mma | {"shape": [BM, shape.BD], "operand": 0},
            "p": mma | {"shape": [BM, BN], "operand": 0},
            "v": mma | {"shape": [BN, BV], "operand": 1},
            "k": mma | {"shape": [shape.BD, BN], "operand": 1},  # the compiler multiplies by K^T
            "o": mma | {"shape": [BM, BV]},
            "s": mma | {"shape": [BM, BN]},
        },
    )
    maps = {role: shape.fragment_map(role) for role in "qpv"}
    maps |= {"o": MmaSyncCTA(shape, 1, Traffic()).zeros().map, "s": shape.output_map(BN)}
    for role, layout in maps.items():
        same_registers(layout.row, layout.col, bases[role], role)
    k = shape.fragment_map("k")
    same_registers(k.col, k.row, bases["k"], "k")


E4M3 = [Case(LENS[:1] * 2, heads=(8, 2), D=D, **kind) for D in (64, 128) for kind in ({"kv": "fp8"}, {"dtype": "fp8"})]


@pytest.mark.parametrize("case", E4M3, ids=str)
def test_the_emulator_brings_e4m3_as_the_compiled_loop(case: Case) -> None:
    """Rests on the TTGIR, the PTX and the SASS. Beside a q of 16 bits: plain rows, one stage, converted in registers
    and stored again in panels. Beside a q of e4m3: K in panels of two stages; V from DRAM to registers and byte by byte
    into panels of its columns. P stays in registers.
    """
    made, config = compiled(case, "sm_90")
    ttgir, fp8, D = made.asm["ttgir"], case.dtype == "fp8", case.D
    dtypes = as_dtype(case.dtype), config.num_warps, D, config.V0, as_dtype("fp8"), as_dtype(case.dtype)
    shape = WgmmaShape(config.BM, config.BN, D, config.D0, *dtypes)
    layouts = re.findall(r"nvidia_mma<\{.*?warpsPerCTA = \[(\d+), 1\], instrShape = \[16, (\d+), (\d+)\]", ttgir)
    atoms = {shape.atom(n, t).shape[1:] for n, t in ((shape.BN, shape.dtype), (shape.v_width, shape.p_dtype))}
    assert {(int(warps), int(n), int(k)) for warps, n, k in layouts} == {(shape.warps, *atom) for atom in atoms}
    panels = {str(shape.panel(at).width) for at in ("q", "k0", "v0")}
    assert set(re.findall(r"nvmma_shared<\{swizzlingByteWidth = (\d+)", ttgir)) == panels
    products = re.findall(r"warp_group_dot .*? : (\S+)<.*\* !ttg.memdesc", ttgir)
    assert products == ["!ttg.memdesc", "tensor"] * 2, "S from shared memory, O += P V with P in registers"
    stages = re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x\d+x\d+xf8E4M3FN, #(\w+),", ttgir)
    homes = dict(re.findall(r"^#(shared\d*) = #ttg\.(\w+)<", ttgir, re.M))
    assert {int(n) for n, _ in stages} == {shape.stages("k")}
    if fp8:
        assert [homes[name] for _, name in stages] == 2 * ["nvmma_shared"], "K of the two loops, and V in no such tile"
        bytes_of_v = shape.BN * shape.v_width // (32 * shape.warps)  # a thread, in each loop
        assert len(re.findall(r"st\.shared\.b8\s", made.asm["ptx"])) == 2 * bytes_of_v
    else:
        assert [homes[name] for _, name in stages] == 4 * ["swizzled_shared"], "K and V of the two loops"
        assert "swizzled_shared<{vec = 1, perPhase = 1, maxPhase = 1" in ttgir, "plain rows"
        converted = re.findall(r"fp_to_fp .*xf8E4M3FN, (#\w+)> -> tensor<\d+x\d+xbf16, (#\w+)>", ttgir)
        assert [source == result for source, result in converted] == 4 * [True]
    steps = (shape.BD * shape.dtype.itemsize + shape.BN * shape.p_dtype.itemsize) // K_BYTES
    count = made.instructions["QGMMA" if fp8 else "HGMMA"]
    assert count == 2 * steps * (config.BM // (16 * shape.warps))


@pytest.mark.skipif(not triton.__version__.startswith("3.7"), reason="the emulator has the order of Triton 3.7")
@pytest.mark.parametrize("name", ["rows", "columns", "pieces", "columns of two pieces"])
def test_the_emulator_copies_waits_and_reads_in_the_order_of_the_compiled_loop_on_sm_80(name: str) -> None:
    """The first loop of the PTX against the events of the emulator, in which it runs for two tiles: warps along the
    rows, and along the keys; two pieces of columns.
    """
    case = ON_SM_80[name]
    made, config = compiled(case, "sm_80")
    words = r"cp\.async\.wait_group|bar\.sync|ldmatrix(?:\S+trans)?|cp\.async\.commit|cp\.async\.c[ag]|bra"
    found = [
        "trans" if "trans" in word else "copy" if word[-3:] in (".cg", ".ca") else word
        for word in re.findall(words, made.asm["ptx"])
    ]
    first = found.index("cp.async.wait_group")
    loop = [word for word, _ in itertools.groupby(found[first : found.index("bra", first)])]
    traffic, n, (D, DV) = Traffic(timeline=Timeline()), 3 * max(config.BM, config.BN), (case.D, case.DV or case.D)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 1, d)).astype(as_dtype("bf16")) for d in (D, D, DV))
    problem, every = PrefillProblem(1, n, 1, 1, D, DV, 2, 2), Features(MaskPlan())
    config = replace(config, pack=1, row_tiles=-(-n // config.BM))
    emulator.launch(q, k, v, scale=0.125, problem=problem, config=config, features=every, arch="sm_80", traffic=traffic)
    kinds = {"wait": "cp.async.wait_group", "barrier": "bar.sync", "commit": "cp.async.commit", "copy": "copy"}
    reads = {"v read": "trans", "k read": "ldmatrix", "q read": "ldmatrix", "p read": "ldmatrix"}
    events = [kinds.get(e.kind) or reads.get(e.what) for e in traffic.trace()]
    told = [word for word, _ in itertools.groupby(word for word in events if word is not None)]
    first = told.index("cp.async.wait_group")
    assert told[first : first + 2 * len(loop)] == 2 * loop


IN_ORDER = [Case(LENS[:1] * 2, heads=(8, 2), D=64), *E4M3, paged(192, DV=128)]
"""One piece of columns of K and V; two of K."""


@pytest.mark.skipif(not triton.__version__.startswith("3.7"), reason="the emulator has the order of Triton 3.7")
@pytest.mark.parametrize("case", IN_ORDER, ids=str)
def test_the_emulator_copies_waits_and_multiplies_in_the_order_of_the_compiled_loop(case: Case) -> None:
    """The first loop of the PTX against the events of the emulator, in which it runs for two tiles."""
    made, config = compiled(case, "sm_90")
    words = {
        r"cp\.async\.wait_group": "wait", r"bar\.sync": "barrier", r"fence\.proxy": "fence", r"wgmma\.mma_async":
        "read in flight", r"wgmma\.wait_group": "wgmma.wait", r"cp\.async\.c[ag]": "copy", r"cp\.async\.commit":
        "commit", r"st\.shared": "write", r"ld\.shared": "read", "bra": "bra",
    }
    found = [next(told for word, told in words.items() if re.match(word, one))
             for one in re.findall("|".join(words), made.asm["ptx"])]
    first = found.index("wait")
    loop = [word for word, _ in itertools.groupby(found[first : found.index("bra", first)])]
    traffic, n, (D, DV) = Traffic(timeline=Timeline()), 2 * config.BN + config.BM, (case.D, case.DV or case.D)
    rng, dtype, stored = np.random.default_rng(0), as_dtype(case.dtype), as_dtype(case.kv or case.dtype)
    q, k, v = (rng.standard_normal((1, n, 1, d)).astype(t) for d, t in ((D, dtype), (D, stored), (DV, stored)))
    problem = PrefillProblem(1, n, 1, 1, D, DV, dtype.itemsize, stored.itemsize, p_fp8=dtype.itemsize == 1)
    config = replace(config, pack=1, row_tiles=-(-n // config.BM))
    every = Features(MaskPlan())
    emulator.launch(q, k, v, scale=0.125, problem=problem, config=config, features=every, traffic=traffic)
    events = ["wgmma.wait" if "wgmma.wait" in e.what else e.kind for e in traffic.trace() if e.kind != "landed"]
    told = [word for word, _ in itertools.groupby(events)]
    first = told.index("wait")
    assert told[first : first + 2 * len(loop)] == 2 * loop
