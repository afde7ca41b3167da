"""The MLA decode kernel compiled for GPUs that are not there: what the compiler made of it, and the emulator beside it.

Rests on the compiler's own artefacts: PTX, SASS, register, spill and shared-memory counts.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from asked import ask, same_registers
from caught import FIVE, SHARED, Caught, as_launched, as_tensors, fits_small_gpus, has_room
from mla_cases import Case

from kvlab.attention import explain, mla_decode_paged
from kvlab.attention.masks import ChunkedMask, MaterializedMask
from kvlab.attention.mla_decode import kernel
from kvlab.attention.mla_decode.config import MLADecodeConfig, MLADecodeProblem, choose_config, shared_bytes
from kvlab.common.arrays import to_torch
from kvlab.memory import as_dtype
from kvlab.staging import Timeline, Traffic
from kvlab.staging.nvidia.mma_sync_plan import MmaSyncShape
from kvlab.staging.nvidia.wgmma_plan import WgmmaShape
from kvlab.triton_support.compile import Compiled
from kvlab.triton_support.versions import holds_wgmma_rows, installed

pytestmark = pytest.mark.compile


@functools.cache
def compiled(
    H: int, dtype: str, target: str, features: tuple[tuple[str, Any], ...] = (),
    columns: tuple[int, int] = (512, 64), page: int = 64, other: tuple[tuple[str, int], ...] = (),
) -> tuple[Compiled, MLADecodeConfig]:
    """The kernel as a call of one sequence, 512 + 64 columns and pages of 64 unless given, compiles it."""
    x = Case((5,), H=H, columns=columns, page=page, dtype=dtype, **dict(features)).build()
    tensors = [to_torch(a) for a in (x.q, *x.windows, x.table, x.lens)]
    made = as_tensors(x.features)
    row_scales = None if x.row_scales is None else to_torch(x.row_scales)
    problem = replace(MLADecodeProblem.of(*tensors, row_scales), max_keys=4096)
    config = choose_config(
        problem, arch=target, num_splits=1, heavy=made.heavy or problem.fp8, wgmma=holds_wgmma_rows()
    )
    config, caught = replace(config, **dict(other)), Caught(kernel.attend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "attend", caught)
        kernel.launch(*tensors, config=config, features=made, scale=x.scale, row_scales=row_scales)
    found = as_launched(caught.fn, caught.arguments, target)
    assert has_room(found, shared_bytes(config, problem, target, biased=made.mask.bias is not None))
    return found, config


MATRIX = [(H, dtype, target) for H, dtype in [(16, "bf16"), (128, "bf16"), (16, "fp32")] for target in FIVE]
SLOW = [("fp32", "sm_100"), ("fp32", "gfx942")]  # as sm_90 and gfx950
MATRIX = [case for case in MATRIX if case[1:] not in SLOW]


@pytest.mark.parametrize("H, dtype, target", [*MATRIX, (128, "fp16", "sm_90")], ids=lambda v: str(v))
def test_attend(H: int, dtype: str, target: str) -> None:
    made, config = compiled(H, dtype, target)
    assert made.shared <= SHARED[target]
    assert fits_small_gpus(made)
    assert made.spills == 0
    count = made.instructions
    if target.startswith("gfx"):
        assert any(name.startswith("v_mfma") for name in count)
    elif dtype == "fp32":
        assert not {"HMMA", "HGMMA"} & set(count), "tf32 would round the inputs"
    elif config.BM == 64:
        assert count["HGMMA"] > 0, "wgmma"
    else:
        assert count["HMMA"] > 0, "mma.sync"
        assert count["LDSM"] > 0, "ldmatrix"
        assert count["LDGSTS"] > 0, "cp.async"


FEATURES: dict[str, dict[str, Any]] = {
    "rope-aware, token scales": {"row": "rope-aware", "k_scale": "token", "sinks": True},
    "fp8, one scale": {"row": "fp8", "k_scale": "number"},
    "everything on scores": {"softcap": 20.0, "sinks": True, "slopes": True, "window": 100, "mask": ChunkedMask(64)},
    "a bias": {"mask": MaterializedMask(np.zeros((1, 1, 1, 5), np.float32))},
}


@pytest.mark.parametrize("rope", [64, 128])
def test_rows_of_wgmma_fit(rope: int) -> None:
    """With 128 rope columns two tiles of 64 keys have no room beside 64 rows of Q: 32 keys."""
    made, config = compiled(128, "bf16", "sm_90", columns=(512, rope))
    assert config.BM == (64 if holds_wgmma_rows() else 32)
    assert config.BN == (32 if holds_wgmma_rows() and rope > 64 else 64)
    assert made.shared <= SHARED["sm_90"]
    assert made.spills == 0


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942", "gfx950"])
@pytest.mark.parametrize("row", ["fp8", "scaled"])
def test_e4m3_in_q_and_cache(target: str, row: str) -> None:
    if row == "scaled":
        made, config = compiled(128, "bf16", target, features=(("row", row),))
        assert config.BM == (64 if target == "sm_90" and holds_wgmma_rows() else 16)
        if config.BM == 64:  # registers are put aside, few of them in the loop, which is a third as long for a key
            loop = made.sass[made.sass.index("HGMMA") : made.sass.rindex("HGMMA")]
            assert 30 * len(re.findall(r"\b(?:LDL|STL)\b", loop)) < loop.count("\n") < 1700
            assert (made.spills <= 1040, made.instructions["HGMMA"]) == (True, 76)
            return
    else:
        made, _ = compiled(16, "fp8", target, features=(("row", row), ("k_scale", "head")))
    spilled = {("3.6", "gfx942", "scaled"): 2}  # two registers of Triton 3.6 where rows bring their scales
    assert made.spills <= spilled.get((str(installed())[:3], target, row), 0)
    assert made.shared <= SHARED[target]


def test_the_tile_of_max_would_spill_on_gfx950() -> None:
    """Why the compiled kernel has another tile there than the emulator, which has MAX's."""
    made, _ = compiled(16, "bf16", "gfx950", other=(("BM", 16), ("BN", 128)))
    assert made.spills > 100


@pytest.mark.parametrize("H", [16, 128])
@pytest.mark.parametrize("features", FEATURES)
def test_features_spill_nothing(features: str, H: int) -> None:
    made, _ = compiled(H, "bf16", "sm_90", features=tuple(FEATURES[features].items()))
    spilled = {("3.9", "fp8, one scale", 16): 8}  # bytes: two registers of Triton 3.9
    assert made.spills <= spilled.get((str(installed())[:3], features, H), 0)
    assert made.shared <= SHARED["sm_90"]


MMA_SYNC = [(H, page, arch) for arch in ("sm_80", "sm_90") for H in (16, 32) for page in (64, 16)]
MMA_SYNC = [case for case in MMA_SYNC if case[1:] != (16, "sm_80")]  # as pages of 64


@pytest.mark.parametrize("H, page, arch", MMA_SYNC, ids=str)
def test_the_emulator_works_as_the_compiled_loop_of_mma_sync(H: int, page: int, arch: str) -> None:
    """The tile; ldmatrix, mma and P's stores of one tile, counted in PTX and in the emulator's plans of K's two tiles;
    their buffers; and, as Triton 3.7 orders them, the waits, barriers, reads and copies of two tiles.
    """
    made, config = compiled(H, "bf16", arch, page=page)
    x = Case((4 * config.BN,), H=H, columns=(512, 64), page=page, dtype="bf16").build()
    assert explain(mla_decode_paged, *x.arrays, arch=arch, num_splits=1, **x.options).config == config
    ptx, ttgir, dtype = made.asm["ptx"], made.asm["ttgir"], as_dtype("bf16")
    stages = max((config.num_stages - 1) // 2, 1)
    sizes, more = (config.BM, config.BN), {"warps": config.num_warps, "stages": stages}
    latent = MmaSyncShape(*sizes, config.BV, config.BV, dtype, arch, v_in_k=True, **more)
    rope = MmaSyncShape(*sizes, config.BR, config.BR, dtype, arch, v_columns=(0, 0), **more)
    buffers = [f"{stages}x{config.BN}x{columns}xbf16" for columns in (config.BV, config.BR)]
    assert re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d+x\d+x\d+xbf16)", ttgir) == buffers
    assert re.findall(r"warpsPerCTA = (\[\d, \d\]), instrShape", ttgir) == [str([1, config.num_warps])]
    reads = {(part, role): len(shape.read_addresses(role)[1])
             for part, shape in (("latent", latent), ("rope", rope)) for role in "qkp"}
    plain = sum(reads[part, role] for part in ("latent", "rope") for role in "qk") + reads["latent", "p"]
    assert len(re.findall(r"ldmatrix\S*x4\.shared", ptx)) == plain
    last = ptx.rindex("mma.sync")  # what follows reorders the output for its store
    assert len(re.findall(r"ldmatrix\S*x4\.trans\.shared", ptx[:last])) == len(latent.read_addresses("v")[1])
    operands = [latent.fragment_map("k"), latent.fragment_map("v"), rope.fragment_map("k")]
    assert len(re.findall(r"mma\.sync", ptx)) == config.BM // 16 * sum(m.row.shape[1] for m in operands)
    write = latent.access("p write")
    if arch == "sm_90":
        stores = re.findall(rf"stmatrix\S*{write.name[-2:]}", ptx[:last])
        assert len(stores) == len(write.address)
    if str(installed()).startswith("3.7"):
        words = r"cp\.async\.wait_group|bar\.sync|ldmatrix(?:\S+trans)?|cp\.async\.commit|bra"
        found = ["trans" if "trans" in word else word for word in re.findall(words, ptx)]
        before = [i for i, word in enumerate(found) if word == "bra"]
        first = max(i for i in before if i < found.index("trans")) + 1
        loop = [word for word, _ in itertools.groupby(found[first : found.index("bra", first)])]
        traffic = Traffic(timeline=Timeline())
        mla_decode_paged(*x.arrays, arch=arch, num_splits=1, traffic=traffic, **x.options)
        kinds = {"wait": "cp.async.wait_group", "barrier": "bar.sync", "commit": "cp.async.commit"}
        reading = {"v read": "trans", "k read": "ldmatrix", "q read": "ldmatrix", "p read": "ldmatrix"}
        events = [kinds.get(e.kind) or reading.get(e.what) for e in traffic.trace()]
        told = [word for word, _ in itertools.groupby(word for word in events if word is not None)]
        at = told.index("cp.async.wait_group")
        assert told[at : at + 2 * len(loop)] == 2 * loop


@pytest.mark.parametrize("H, page", [(16, 64), (32, 16)])
def test_registers_of_mma_sync_are_those_of_the_compiler(H: int, page: int) -> None:
    """Every register of K, V, Q, P, S and O with eight warps, in Triton's order, from the compiler's linear layouts."""
    _, config = compiled(H, "bf16", "sm_90", page=page)
    BM, BN, BV, warps = config.BM, config.BN, config.BV, config.num_warps
    shape = MmaSyncShape(BM, BN, BV, BV, as_dtype("bf16"), v_in_k=True, warps=warps)
    mma = {"mma": [1, warps, 16, 8]}
    asked = {
        "q": {"shape": [BM, BV], "operand": 0}, "p": {"shape": [BM, BN], "operand": 0},
        "v": {"shape": [BN, BV], "operand": 1}, "k": {"shape": [BV, BN], "operand": 1},  # it multiplies by K^T
        "o": {"shape": [BM, BV]}, "s": {"shape": [BM, BN]},
    }
    bases = ask(warps, {role: mma | one for role, one in asked.items()})
    maps = {role: shape.fragment_map(role) for role in "qpv"} | {"o": shape.output_map(BV), "s": shape.output_map(BN)}
    for role, layout in maps.items():
        same_registers(layout.row, layout.col, bases[role], role)
    k = shape.fragment_map("k")
    same_registers(k.col, k.row, bases["k"], "k")


SIXTY_FOUR = [((512, 64), 64), ((512, 64), 16), ((96, 16), 64)]


@pytest.mark.skipif(not holds_wgmma_rows(), reason="this Triton does not take 64 rows")
@pytest.mark.parametrize("columns, page", SIXTY_FOUR, ids=str)
def test_the_emulator_works_as_the_compiled_loop_of_64_rows(columns: tuple[int, int], page: int) -> None:
    """Warps, instructions of both products and their number, swizzles, no way of P through shared memory; and, as
    Triton 3.7 orders them, waits, barriers, fences and products of the loop.
    """
    others = {} if (columns, page) == SIXTY_FOUR[0] else {"columns": columns, "page": page}
    made, config = compiled(128, "bf16", "sm_90", **others)
    sizes = (64, config.BN), as_dtype("bf16")
    shape = WgmmaShape(*sizes[0], columns[0], config.BV, sizes[1], v_in_k=True)
    rope = WgmmaShape(*sizes[0], columns[1], config.BR, sizes[1], DV=0, BDV=0)
    ttgir, ptx = made.asm["ttgir"], made.asm["ptx"]
    layouts = re.findall(r"versionMajor = 3.*?warpsPerCTA = \[(\d, \d)\], instrShape = \[16, (\d+)", ttgir)
    assert layouts == [("8, 1", str(shape.BN // 2)), ("4, 2", str(config.BV // 2))]
    widths = {str(place.width) for part in (shape, rope) for place in part.places.values()}
    assert set(re.findall(r"nvmma_shared<\{swizzlingByteWidth = (\d+)", ttgir)) == widths
    words = r"wgmma\.wait_group|cp\.async\.wait_group|bar\.sync|fence\.proxy|(?:wgmma\.mma_async\S*m64n\d+)|" \
            r"cp\.async\.cg|st\.shared|stmatrix|bra"
    found = [re.sub(r"wgmma\.mma_async\S*(m64n\d+)", r"\1", word) for word in re.findall(words, ptx)]
    last = len(found) - 1 - found[::-1].index(names_of(shape)[1])
    first = len(found[:last]) - 1 - found[:last][::-1].index("cp.async.wait_group")
    loop = found[first : found.index("bra", last)]
    assert not {"st.shared", "stmatrix"} & set(loop)
    traffic = Traffic(timeline=Timeline())
    x = Case((4 * config.BN,), H=64, columns=columns, page=page, dtype="bf16").build()
    mla_decode_paged(*x.arrays, arch="sm_90", num_splits=1, traffic=traffic, **x.options)
    steps = [(config.BV + config.BR) // 16 * 2, config.BN // 16]
    assert [sum(word == n for word in loop) for n in names_of(shape)] == steps
    issued = traffic.instructions["qk wgmma"], traffic.instructions["pv wgmma"]
    assert issued == tuple(8 * 4 * n for n in steps)
    if not str(installed()).startswith("3.7"):
        return
    kinds = {"barrier": "bar.sync", "fence": "fence.proxy", "copy": "cp.async.cg"}
    events = [
        kinds.get(e.kind) or ("wgmma.wait_group" if "wgmma.wait" in e.what else "cp.async.wait_group"
                              if e.kind == "wait" else names_of(shape)[("P V" in e.what)]
                              if e.kind == "read in flight" else None)
        for e in traffic.trace()
    ]
    told = [word for word, _ in itertools.groupby(word for word in events if word is not None)]
    once = [word for word, _ in itertools.groupby(loop)]
    at = told.index("cp.async.wait_group")
    assert told[at : at + 2 * len(once)] == 2 * once


def names_of(shape: WgmmaShape) -> tuple[str, str]:
    """The instructions of Q K^T and P V as PTX writes their sizes."""
    scores, output = (shape.atom(n).name.split(".")[1].split("k")[0] for n in (shape.BN, shape.v_width))
    return scores, output


def test_v_has_no_memory_of_its_own() -> None:
    """Two buffers of the K tile, Q and the pages' numbers: no room for a V tile beside them."""
    made, config = compiled(16, "bf16", "sm_90")
    tile = config.BN * 576 * 2
    query = config.BM * 576 * 2
    assert made.shared < query + 2 * tile + 4096
    assert torch.finfo(torch.bfloat16).bits == 16
