"""The MLA prefill kernel compiled for GPUs that are not there: what the compiler made of it, and the emulator.

Rests on the compiler's own artefacts: TTGIR, SASS, register and spill counts.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace

import pytest
from caught import FIVE, SHARED, Caught, as_launched, as_tensors, fits_small_gpus, has_room
from mla_prefill_cases import Case

from kvlab.attention.machines.gpu import family
from kvlab.attention.masks import AndMask, ChunkedCausalMask, ChunkedMask, SlidingWindowCausalMask
from kvlab.attention.mla_prefill import kernel
from kvlab.attention.mla_prefill.config import MLAPrefillConfig, choose_config, shared_bytes
from kvlab.memory import as_dtype
from kvlab.staging import Timeline, Traffic
from kvlab.staging.nvidia.wgmma_plan import WgmmaShape
from kvlab.triton_support.compile import Compiled
from kvlab.triton_support.versions import installed

pytestmark = pytest.mark.compile


@functools.cache
def compiled(case: Case, target: str) -> tuple[Compiled, MLAPrefillConfig]:
    """The kernel as a call on ``target`` compiles it: the same types, constants and alignments."""
    x = case.build()
    arrays, problem = [as_tensors(a) for a in x.launch_form()], x.problem()
    features = as_tensors(x.features())
    config = choose_config(problem, arch=family(target), shared=SHARED[target])
    caught = Caught(kernel.attend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "attend", caught)
        kernel.launch(*arrays, scale=0.1, features=features, problem=problem, config=config)
    return as_launched(caught.fn, caught.arguments, target), config


LENS = ((150, 200), (3, 7))
PAGED = Case(LENS, page=64, latent=512)
HEAVY = Case(
    LENS, page=64, latent=512, sinks=True, slopes=True, softcap=20.0, window=100, mask=ChunkedMask(64), causal=True
)
MATRIX = [(PAGED, target) for target in FIVE]
MATRIX += [(Case(LENS, row="", dtype="fp16"), "sm_90"), (Case(LENS, page=64, dtype="fp32"), "sm_90")]
MATRIX += [(HEAVY, "sm_90"), (Case(LENS, page=64, row="fp8", k_scale="token"), "sm_90")]
MATRIX += [(Case(LENS, page=64, columns=(192, 64, 192)), "sm_90")]
E4M3 = Case(LENS, page=64, latent=512, kv="fp8", scales="head")
BY_TOKEN = replace(E4M3, row="fp8", scales="token", k_scale="token")
MATRIX += [(E4M3, target) for target in ("sm_90", "sm_100", "gfx942", "gfx950")]
MATRIX += [(BY_TOKEN, "sm_90"), (replace(BY_TOKEN, columns=(192, 64, 192)), "sm_90")]
MATRIX += [(replace(BY_TOKEN, dtype="fp8", scales="head"), "sm_90")]
WIDE = replace(BY_TOKEN, columns=(256, 128, 256))
MATRIX += [(WIDE, target) for target in ("sm_90", "gfx942", "gfx950")]
MATRIX += [(replace(E4M3, columns=WIDE.columns), "sm_90"), (replace(E4M3, columns=WIDE.columns, dtype="fp16"), "sm_89")]
MATRIX += [(replace(PAGED, columns=WIDE.columns), target) for target in ("sm_80", "sm_90", "sm_120")]
MATRIX += [(replace(PAGED, columns=WIDE.columns, dtype="fp32"), target) for target in ("sm_80", "sm_90")]
CHUNKS_AND_WINDOW = AndMask(ChunkedCausalMask(60), SlidingWindowCausalMask(40))  # a bias
BIASED = Case(LENS, row="", dtype="fp16", mask=CHUNKS_AND_WINDOW, softcap=20.0)
TIGHT = [
    *((replace(BIASED, columns=(128, R, 128)), "sm_90") for R in (48, 128)),
    *((replace(BIASED, columns=(D, 128, D)), "sm_86") for D in (128, 256)),
    (replace(BIASED, columns=(128, 128, 128), row="plain", page=64, latent=512), "sm_86"),
]
"""A bias beside tiles that fill the shared memory."""
MATRIX += TIGHT


@pytest.mark.parametrize("case, target", MATRIX, ids=[f"{case}-{target}" for case, target in MATRIX])
def test_attend(case: Case, target: str) -> None:
    made, config = compiled(case, target)
    assert has_room(made, shared_bytes(config, case.build().problem(), family(target)))
    spilled = {  # a register or two of MAX's tile; twelve of a tile of 256 + 128 columns that pages hold; two to four
        # of Triton 3.6 where e4m3 has scales of tokens: tiles seen in part and whole ones are one text
        ("3.9", "gfx950", PAGED): 2, ("3.9", "gfx942", PAGED): 1,
        ("3.6", "sm_80", replace(PAGED, columns=WIDE.columns)): 48,
        **{("3.6", "sm_90", replace(BY_TOKEN, columns=columns)): size
           for columns, size in ((BY_TOKEN.columns, 8), ((192, 64, 192), 16), (WIDE.columns, 16))},
    }
    assert made.spills <= spilled.get((str(installed())[:3], target, case), 0)
    assert made.shared <= SHARED[target]
    assert fits_small_gpus(made)
    count = made.instructions
    if target.startswith("gfx"):
        assert any(name.startswith("v_mfma") for name in count)
        return
    assert count["LDGSTS"] > 0 or case.dtype == "fp32", "cp.async"
    if case.dtype == "fp32":
        assert not {"HMMA", "HGMMA"} & set(count), "tf32 would round the inputs"
    else:
        assert count[{"sm_90": "HGMMA", "sm_100": "UTCHMMA"}.get(target, "HMMA")] > 0


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_widest_have_room_on_gfx942(dtype: str) -> None:
    """To the last byte: pieces of Q, or tiles of K, pass through all of the LDS."""
    case = replace(BIASED, columns=(256, 128, 256), dtype=dtype)
    made, config = compiled(case, "gfx942")
    assert made.shared == shared_bytes(config, case.build().problem(), "gfx942") == SHARED["gfx942"]


def test_the_emulator_works_as_the_compiled_loop() -> None:
    """wgmma of the same shape and number, 128-byte swizzle, one sum over nope and rope columns, P from registers."""
    made, config = compiled(PAGED, "sm_90")
    sizes, dtype = (config.BM, config.BN), as_dtype("bf16")
    shapes = [WgmmaShape(*sizes, D, D, dtype, config.num_warps) for D in (config.BD, config.BR, config.BV)]
    ttgir = made.asm["ttgir"]
    layouts = re.findall(r"nvidia_mma<\{versionMajor = 3.*?warpsPerCTA = \[(\d+), 1\], instrShape = \[16, (\d+)", ttgir)
    assert {(int(warps), int(n)) for warps, n in layouts} == {(config.num_warps, n) for n in (config.BN, config.BV)}
    widths = {str(shape.places["k0"].width) for shape in shapes}
    assert set(re.findall(r"nvmma_shared<\{swizzlingByteWidth = (\d+)", ttgir)) == widths
    steps = (config.BD + config.BR) // 16 + config.BN // 16  # of a tile, for 64 rows a warpgroup
    assert made.instructions["HGMMA"] == 2 * steps * (config.BM // (16 * config.num_warps))


def test_the_emulator_converts_as_the_compiled_loop_does() -> None:
    """K and V of e4m3: wgmma of 16 bits of the same shapes and number, panels of 128 bytes, P from registers."""
    made, config = compiled(E4M3, "sm_90")
    sizes, (dtype, stored) = (config.BM, config.BN), (as_dtype("bf16"), as_dtype("fp8"))
    shapes = [
        WgmmaShape(*sizes, D, D, dtype, config.num_warps, *v, of, dtype)
        for D, v, of in ((config.BD, (0, 0), stored), (config.BR, (0, 0), dtype), (0, (config.BV,) * 2, stored))
    ]
    assert [s.converted for s in shapes] == [{"k": True, "v": True}, {"k": False, "v": False}, {"k": True, "v": True}]
    ttgir = made.asm["ttgir"]
    assert re.findall(r"nvmma_shared<\{swizzlingByteWidth = (\d+)", ttgir).count("128") > 0
    assert set(re.findall(r"nvmma_shared<\{swizzlingByteWidth = (\d+)", ttgir)) == {"128"}
    steps = (config.BD + config.BR) // 16 + config.BN // 16
    assert made.instructions["HGMMA"] == 2 * steps * (config.BM // (16 * config.num_warps))


@pytest.mark.skipif(not str(installed()).startswith("3.7."), reason="the emulator has the order of Triton 3.7")
@pytest.mark.parametrize("case", [Case(LENS, row="", dtype="fp16"), PAGED, E4M3], ids=str)
def test_the_emulator_copies_waits_and_multiplies_in_the_order_of_the_compiled_loop(case: Case) -> None:
    """The first loop of the PTX, without the copies of page numbers and their waits, against the events of the
    emulator, in which it runs for two tiles. Two tiles are in flight where no page numbers are needed.
    """
    made, config = compiled(case, "sm_90")
    words = {
        r"cp\.async\.wait_group": "wait", r"bar\.sync": "barrier", r"fence\.proxy": "fence", r"wgmma\.mma_async":
        "product", r"wgmma\.wait_group": "wgmma.wait", r"cp\.async\.cg": "copy", r"cp\.async\.ca": "page",
        r"cp\.async\.commit": "commit", r"st\.shared": "write", r"ld\.shared": "read", "bra": "bra",
    }
    found = [next(told for word, told in words.items() if re.match(word, one))
             for one in re.findall("|".join(words), made.asm["ptx"])]
    last = found.index("product")
    first = last - found[last::-1].index("wait")
    loop = " ".join(word for word, _ in itertools.groupby(found[first : found.index("bra", first)]))
    loop = re.sub(r"barrier page commit|(?<=commit )wait barrier read (?=copy)", "", loop).split()
    stages = {int(n) for n in re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d)x\d+x\d+x", made.asm["ttgir"])}
    traffic, x = Traffic(timeline=Timeline()), case.build()
    ahead = 1 if case.page and case.row else config.num_stages - 1
    assert stages == ({ahead, ahead + 1} if case.kv else {ahead + 1})
    x.call(traffic=traffic, arch="sm_90")
    kinds = {"read in flight": "product"}
    events = ["wgmma.wait" if "wgmma.wait" in e.what else kinds.get(e.kind, e.kind)
              for e in traffic.trace() if e.kind != "landed"]
    told = [word for word, _ in itertools.groupby(events)]
    first = told.index("wait")
    assert told[first : first + 2 * len(loop)] == 2 * loop
