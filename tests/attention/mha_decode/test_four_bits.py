"""K and V of 4 bits: e2m1 with e4m3 scales of 16 columns and a number (NVFP4), and integers with scales of tokens.

Rests on ml_dtypes' e2m1 and int4, the float64 reference over the numbers that they give, Triton's interpreter step by
step, and the PTX machine for what is compiled.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from caught import SHARED, Caught, as_launched, ptx_of
from four_bit_cases import FourBits, exact

from kvlab.attention import attend_paged, explain, mha_decode_paged, mha_decode_streaming_paged, mha_prefill_paged, plan
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import resolve_scales
from kvlab.attention.mha_decode import kernel
from kvlab.attention.mha_decode.config import DecodeConfig, DecodeProblem, choose_config, problem_of, shared_bytes
from kvlab.common.arrays import to_torch
from kvlab.formats import known_format
from kvlab.memory import bfloat16, float8_e4m3fn
from kvlab.mirror import lockstep
from kvlab.replay.pages import pages_named
from kvlab.staging.nvidia.mma_sync_plan import Q_ROLES, MmaSyncShape
from kvlab.staging.tile.pairs import quarters
from kvlab.triton_support.compile import Compiled
from kvlab.triton_support.versions import installed

GRID = [
    (FourBits("e2m1", S=2), "sm_90"),
    (FourBits("e2m1", (40, 0, 1), heads=(4, 4), D=160, page=5, dtype=np.dtype(np.float16)), "sm_80"),
    (FourBits("int4", (129,), heads=(8, 1), D=64, S=4), "sm_80"),
    (FourBits("int4", D=32, Dv=160, page=64), "sm_90"),
    (FourBits("e2m1", (70, 33), heads=(8, 2), S=4), "sm_90"),
    (FourBits("words", (40, 0, 1), heads=(4, 2), D=64, page=8), "sm_90"),
    (FourBits("uint4", (70, 33), D=64, Dv=160, page=5, S=2), "sm_90"),
    (FourBits("halves", (129, 7), heads=(4, 4), D=96, dtype=np.dtype(np.float16)), "sm_80"),
]


@pytest.mark.parametrize("case, arch", GRID, ids=str)
def test_emulated(case: FourBits, arch: str) -> None:
    """Whatever the splits, the walk and the order of the axes: outputs are rounded, and weights to float16."""
    arrays, options = case.build()
    expected = exact(arrays, options)
    most = np.abs(expected).max()
    reference = mha_decode_paged(*arrays, **options, backend="reference").astype(np.float32)
    bound = 2.0**-8 * np.abs(expected) + 2.0**-9 * most
    assert (np.abs(reference - expected) <= bound).all()
    for more in ({"num_splits": 1}, {"num_splits": 2}, {"balanced": True}):
        out = mha_decode_paged(*arrays, **options, arch=arch, **more).astype(np.float32)
        assert (np.abs(out - expected) <= bound).all(), more
    turned = [x.swapaxes(1, 2) for x in arrays[1:3]]
    hnd = {n: x.swapaxes(1, 2) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    out = mha_decode_paged(arrays[0], *turned, *arrays[3:], **hnd, arch=arch, kv_layout="HND", num_splits=1)
    one = mha_decode_paged(*arrays, **options, arch=arch, num_splits=1)
    assert (out == one).all()


def test_chunks() -> None:
    """A step with chunks of a prompt, whose plan may be made before."""
    arrays, options = FourBits("e2m1", (37, 40), S=4).build()
    q, *rest = arrays
    starts = np.array([0, 4, 8])
    out = attend_paged(q.reshape(8, *q.shape[2:]), *rest, starts, **options)
    step = plan(rest[3], (starts, 8), q_heads=6, kv_heads=2, itemsize=0.5)
    assert (attend_paged(q.reshape(8, *q.shape[2:]), *rest, starts, plan=step, **options) == out).all()
    tensors = options | {n: np.float32([options[n]]) for n in ("k_scale", "v_scale")}  # the global scales in memory
    for more in ({}, {"plan": step}, {"plan": step, **tensors}):
        assert (mha_prefill_paged(q.reshape(8, *q.shape[2:]), *rest, starts, **options | more) == out).all()
    assert np.abs(out.astype(np.float32).reshape(q.shape) - exact(arrays, options)).max() < 0.05


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "kind, D, S",
    [("e2m1", 160, 1), ("e2m1", 96, 2), ("int4", 64, 1), ("int4", 64, 4), ("words", 64, 1), ("halves", 160, 1)],
)
def test_kernel_and_emulator_step_by_step(kind: str, D: int, S: int) -> None:
    """Each output of each step, of 8, 16 and more rows; the kernel without inline PTX."""
    (q, *rest), options = FourBits(kind, (19,), heads=(4, 1), D=D, page=8, S=S).build()
    names = dict(zip(("k_cache", "v_cache", "block_table", "seq_lens"), rest, strict=True))
    features = Features(scales=resolve_scales(q, *rest[:2], 1, **options))
    config = explain(mha_decode_paged, q, *rest, **options).config
    run = lockstep("mha_decode", {"q": q, **names, "scale": 0.1, "config": config, "features": features}, twin="attend")
    assert run.ok, str(run)


def compiled(case: FourBits, target: str) -> tuple[Compiled, DecodeConfig, DecodeProblem]:
    """The kernel of a call, and what was chosen for it."""
    (q, *rest), options = case.build()
    arrays = [to_torch(x) for x in (q, *rest)]
    by = {n: to_torch(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    features = Features(scales=resolve_scales(arrays[0], *arrays[1:3], len(q), **by))
    problem = problem_of(q, *rest[:3])
    config, caught = choose_config(problem, num_splits=1, arch=target, heavy=features.heavy), Caught(kernel.attend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "attend", caught)
        kernel.launch(*arrays, scale=0.1, config=config, features=features)
    arguments = caught.arguments
    arguments["C"] = arguments["C"]._replace(PTX=ptx_of(target))
    return as_launched(caught.fn, arguments, target), config, problem


@pytest.mark.compile
@pytest.mark.parametrize(
    "kind, S, target",
    [("e2m1", 1, "sm_80"), ("e2m1", 1, "sm_90"), ("e2m1", 4, "sm_90"), ("int4", 1, "sm_90"), ("int4", 4, "sm_90"),
     ("words", 1, "sm_90"), ("uint4", 1, "sm_80")],
)
def test_compiled(kind: str, S: int, target: str) -> None:
    """No spills, cp.async for K, V and the scales of blocks; in the law of shared memory."""
    made, config, problem = compiled(FourBits(kind, heads=(8, 2), S=S), target)
    assert (made.spills, config.BM, config.BN, config.num_warps) == (0, 8 if S == 1 else 16, 32, 1)
    assert made.shared <= min(SHARED[target], shared_bytes(config, problem, target))
    copied = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], 0x(\w+)", made.asm["ptx"])
    assert {"10", "8"} <= set(copied) if kind in ("e2m1", "words") else "10" in copied, copied
    assert not re.search(r"ld\.global[.\w]*\.b8", made.asm["ptx"]), "scales of blocks that are not copied"


@pytest.mark.compile
@pytest.mark.parametrize("kind, D, target", [("int4", 128, "sm_90"), ("e2m1", 128, "sm_80"), ("e2m1", 64, "sm_90")])
def test_the_emulator_issues_the_instructions_of_the_compiled_loop(kind: str, D: int, target: str) -> None:
    """The reads and products of a tile of 8 rows, and which lane holds which of its scores. Triton 3.6 keeps Q
    transposed.
    """
    made, config, _ = compiled(FourBits(kind, heads=(8, 2), D=D), target)
    ptx, width = made.asm["ptx"], D // 4
    shape = MmaSyncShape(8, 32, width, width, np.dtype(np.float16), target, each=4, warps=1, stages=2)
    assert config.columns == (width, 0)
    first, last = ptx.index("mma.sync"), ptx.rindex("mma.sync")
    loop = ptx[ptx.rindex("cp.async.wait_group", 0, first) : last]
    expected: Counter[str] = Counter()
    for role in ("k", "v", *Q_ROLES):
        name, address = shape.read_addresses(role)
        turned = role in Q_ROLES and str(installed()).startswith("3.6.")
        expected[name + ".trans" * turned] += len(address)
    found = re.findall(r"ldmatrix\.sync\.aligned\.m8n8(\.x\d(?:\.trans)?)", loop)
    assert Counter("ldmatrix" + name for name in found) == expected
    assert ptx.count("mma.sync") == 2 * 4 * (32 // 16) * (width // 16), "half of those of 16 rows"
    assert not re.search(r"stmatrix", loop), "P goes by shuffles"
    ttgir = made.asm["ttgir"]
    (name,) = set(re.findall(r"tt\.trans .*tensor<32x8xf32, #mma\w*> -> tensor<8x32xf32, (#linear\w*)>", ttgir))
    text = re.search(rf"^{name} = #ttg\.linear<(.*)>$", ttgir, re.M)[1]
    register, lane = (
        np.array(json.loads(re.search(rf"{part} = (\[\[.*?\]\])", text)[1])) for part in ("register", "lane")
    )
    layout = shape.output_map(32)
    for at, axis in ((layout.row, 0), (layout.col, 1)):
        bits = [(np.arange(1 << len(x))[:, None] >> np.arange(len(x)) & 1) @ x[:, axis] for x in (lane, register)]
        assert (at.reshape(32, -1) == bits[0][:, None] + bits[1]).all()


@pytest.mark.compile
@pytest.mark.parametrize("kind, page, target", [("e2m1", 8, "sm_90"), ("words", 8, "sm_80"), ("halves", 5, "sm_80")])
def test_compiled_for_a_machine_of_warps(kind: str, page: int, target: str) -> None:
    """The compiled kernel, run from its PTX, gives what the emulator gives: offsets, words, bytes and minima, too."""
    from kvlab.simt import run

    arrays, options = FourBits(kind, (19,), heads=(2, 2), D=64, page=page).build()
    expected = mha_decode_paged(*arrays, **options, num_splits=1, arch=target).astype(np.float32)
    tensors = [to_torch(x) for x in arrays]
    by = {n: to_torch(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    call, caught = mha_decode_paged.planned(*tensors, **by, num_splits=1, backend="triton"), Caught(kernel.attend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "attend", caught)
        out, _ = kernel.launch(*call.arrays, **call.named())
    ((grid, named),) = caught.calls
    named["C"] = named["C"]._replace(PTX=ptx_of(target))
    run(caught.fn, grid, target=target, **named)
    assert np.abs(out.float().numpy() - expected).max() < 2.0**-7 * np.abs(expected).max()


@pytest.mark.compile
@pytest.mark.parametrize(
    "kind, target, words",
    [("e2m1", "sm_80", False), ("e2m1", "sm_80", True), ("e2m1", "sm_90", False), ("e2m1", "sm_90", True),
     ("int4", "sm_80", False), ("uint4", "sm_80", False)],
)
def test_all_codes_in_the_compiled_instructions(kind: str, target: str, words: bool) -> None:
    """Every element of 16 bits, beside every scale of e4m3 that is not negative, that of NaN among them, in the PTX
    machine; scales in bytes, and in words of two.
    """
    from four_bit_kernels import convert_e2m1, convert_int4

    from kvlab.simt import run

    quads = np.arange(1 << 16, dtype=np.uint16).view(np.int16).reshape(64, 1024)
    scale = (np.arange(64 * 256) % 128).astype(np.uint8).reshape(64, 256)
    out = np.zeros((4, *quads.shape), np.float16)
    if kind == "e2m1":
        given = scale.view(np.int16) if words else scale
        run(
            convert_e2m1, (64,), quads, given, out, out[0].size, WIDTH=1024, PTX=ptx_of(target), num_warps=4,
            target=target,
        )
        expected = quarters(quads, np.repeat(scale.view(float8_e4m3fn).astype(np.float32), 4, -1))
    else:
        over = kind == "uint4"
        run(convert_int4, (64,), quads, out, out[0].size, WIDTH=1024, UNSIGNED=over, num_warps=4, target="sm_80")
        expected = quarters(quads, unsigned=over)
    for found, one in zip(out, expected, strict=True):
        assert ((found.view(np.uint16) == one.view(np.uint16)) | (np.isnan(found) & np.isnan(one))).all()


@pytest.mark.parametrize("name", ["kvlab.nvfp4", "kvlab.int4"])
def test_bytes_of_a_format(name: str) -> None:
    """What a format encodes is decoded to the same numbers by the format and by the call: two codecs agree."""
    rng, sizes = np.random.default_rng(3), (4, 16, 2, 64)
    k, v = rng.standard_normal((2, 1, *sizes)).astype(np.float32)
    known = known_format(name, pages=4, page_size=16, heads=2, dim=64)
    raw = known.encode(k, v, tensor_scale=0.01 if "nv" in name else 1.0)
    cache = raw[: k.size].reshape(2, *sizes[:-1], 32)
    if "nv" in name:
        blocks = raw[k.size :].view(float8_e4m3fn).reshape(2, *sizes[:-1], 4)
        options = {"k_block_scale": blocks[0], "v_block_scale": blocks[1], "k_scale": 0.01, "v_scale": 0.01}
    else:
        options = dict(zip(("k_scale", "v_scale"), raw[k.size :].view(np.float32).reshape(2, *sizes[:-1]), strict=True))
    rows = known.decode(raw, tensor_scale=0.01 if "nv" in name else 1.0)
    q, table, lens = rng.standard_normal((1, 8, 64)).astype(bfloat16), np.array([[2, 0, 3, 1]]), np.array([50])
    out = mha_decode_paged(q, *cache, table, lens, **options, backend="reference")
    expected = mha_decode_paged(q.astype(np.float32), *(x[0] for x in rows), table, lens, backend="reference")
    assert (out == expected.astype(bfloat16)).all()


@pytest.mark.parametrize("name", ["flashinfer.nvfp4", "lmdeploy.int4", "kvlab.uint4"])
def test_formats_of_engines_where_they_lie(name: str) -> None:
    """Strided views of an encoded cache: the call reads what the format decodes."""
    rng, (P, N, H, D) = np.random.default_rng(3), (4, 16, 2, 64)
    known = known_format(name, pages=P, page_size=N, heads=H, dim=D)
    k, v = rng.standard_normal((2, *known.fields[0].shape)).astype(np.float32)
    raw = known.encode(k, v, tensor_scale=0.01 if "nv" in name else 1.0)
    if name == "flashinfer.nvfp4":
        cache = raw[: k.size].reshape(P, 2, H, N, D // 2)
        of_k, of_v = np.split(raw[k.size :].view(float8_e4m3fn).reshape(P, -1), 2, axis=1)
        options = {"k_block_scale": of_k.reshape(P, H, N, 4), "v_block_scale": of_v.reshape(P, H, N // 4, 4, 4)}
        options |= {"k_scale": np.float32([0.01]), "v_scale": 0.01}
    elif name == "lmdeploy.int4":
        rows = raw.reshape(P, -1)
        cache = rows[:, : H * N * D].reshape(P, H, 2, N, D // 2).swapaxes(1, 2)
        pairs = rows[:, H * N * D :].view(np.float16).reshape(P, H, 2, N, 2)
    else:
        cache = raw[: k.size].reshape(2, P, N, H, D // 2).transpose(1, 0, 3, 2, 4)
        pairs = raw[k.size :].view(np.float32).reshape(2, P, N, H, 2).transpose(1, 3, 0, 2, 4)
    if name != "flashinfer.nvfp4":
        both = [(i, x, j, what) for i, x in enumerate("kv") for j, what in enumerate(("scale", "min"))]
        options = {f"{x}_{what}": pairs[:, :, i, :, j] for i, x, j, what in both}
    decoded = known.decode(raw, tensor_scale=0.01 if "nv" in name else 1.0)
    order = [known.fields[0].axes.index(axis) for axis in ("page", "head", "slot", "dim")]
    layer = known.fields[0].axes.index("layer")
    K, V = (np.transpose(x, [layer, *order])[0] for x in decoded)
    q, table, lens = rng.standard_normal((1, 8, D)).astype(bfloat16), np.array([[2, 0, 3, 1]]), np.array([50])
    rest = {"kv_layout": "HND"}
    expected = mha_decode_paged(q.astype(np.float32), K, V, table, lens, backend="reference", **rest)
    for backend in ("reference", "emulator"):
        out = mha_decode_paged(q, cache[:, 0], cache[:, 1], table, lens, backend=backend, **rest, **options)
        assert np.abs(out.astype(np.float32) - expected).max() < 2.0**-7 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["words", "halves"])
def test_recorded_pages(kind: str) -> None:
    """What a record keeps of the arrays of a call: the pages that its table names, of scales and minima, too."""
    arrays, options = FourBits(kind, (19, 7), page=8).build()
    names = "q", "k_cache", "v_cache", "block_table", "seq_lens"
    named = pages_named(dict(zip(names, arrays, strict=True)) | options)
    paged = {name for name, x in options.items() if isinstance(x, np.ndarray)} | {"k_cache", "v_cache"}
    assert set(named) == paged
    assert all((pages == np.unique(arrays[3][arrays[3] >= 0])).all() for pages in named.values())


def test_quarters_are_exact() -> None:
    """An e2m1 times an e4m3 scale over 2^14 is a float16, whatever they are."""
    codes, scale = np.arange(16, dtype=np.uint8), np.arange(127, dtype=np.uint8).view(float8_e4m3fn).astype(np.float64)
    quads = (codes.astype(np.uint16) * 0x1111).view(np.int16)
    for quarter in quarters(np.repeat(quads[:, None], 127, 1), np.repeat(scale[None].astype(np.float32), 16, 0)):
        whole = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)[:, None] * scale
        assert (quarter.astype(np.float64) * 2**14 == whole).all()


def changed(arrays: list[np.ndarray], options: dict[str, Any], **more: Any) -> Any:
    """A call with other arguments."""
    names = dict(zip(("q", "k_cache", "v_cache", "block_table", "seq_lens"), arrays, strict=True))
    return mha_decode_paged(**names | options | more)


def test_bad_input() -> None:
    arrays, options = FourBits("e2m1").build()
    q, k, v, *_ = arrays
    scale, some = options["k_block_scale"], np.ones((11, 16, 2), np.float32)
    columns = r"\(11, 16, 2, 8\), one of each 16 columns of k"
    for words, more in {
        r"k_block_scale has shape \(11, 16, 2, 4\): must be " + columns: {"k_block_scale": scale[..., :4]},
        "k_block_scale has dtype float32: must be float8_e4m3fn": {"k_block_scale": scale.astype(np.float32)},
        "v_block_scale is None: must be given with k_block_scale": {"v_block_scale": None},
        r"v_block_scale has shape .*: must be \(11, 4, 2, 8, 4\), one of each 16 columns of v, of four slots side by": {
            "v_block_scale": np.zeros((11, 4, 2, 4, 4), float8_e4m3fn)
        },
        "v_block_scale has strides .*: must be words of four bytes": {
            "v_block_scale": np.zeros((11, 4, 2, 8, 8), float8_e4m3fn)[..., :4]
        },
        "k_min with k_block_scale: must be one of them": dict.fromkeys(("k_min", "v_min", "k_scale", "v_scale"), some),
        r"v_block_scale has strides .*: must be contiguous": {"v_block_scale": np.repeat(scale, 2, -1)[..., ::2]},
        "head dimension of v_cache 120: must be a multiple of 32 from 32": {
            "v_cache": v[..., :60], "v_block_scale": scale[..., :7]
        },
        "k_cache has head dimension 126: must be that of q, 128": {"k_cache": k[..., :63]},
        "k_cache has dtype uint8: must be that of q, float32": {"q": q.astype(np.float32)},
        "k_block_scale with k of dtype bfloat16: must be left out": {
            "k_cache": np.zeros((*k.shape[:-1], 128), bfloat16), "v_cache": np.zeros((*v.shape[:-1], 128), bfloat16)
        },
        "K and V of 4 bits|uint8": {"backend": "hopper"},
        r"k_block_scale has shape \(11, 16, 2, 8\): must be \(11, 2, 16\), ..., as kv_layout 'HND' has k_cache": {
            "k_cache": k.swapaxes(1, 2), "v_cache": v.swapaxes(1, 2), "kv_layout": "HND"
        },
        "k_cache of uint8 has strides .*: must be rows at even bytes": {
            "k_cache": np.zeros((11, 16, 2, 65), np.uint8)[..., :64]
        },
    }.items():
        with pytest.raises(ValueError, match=words):
            changed(arrays, options, **more)
    int4, by = FourBits("int4").build()
    for words, more in {
        "v_min is None: must be given with k_min": {"k_min": some},
        r"k_scale is 0.5: must be of shape \(11, 16, 2\), as k_min is": {"k_min": some, "v_min": some, "k_scale": 0.5},
        r"k_min has shape \(11, 16\): must be \(11, 16, 2\), one of each token and head of k": {
            "k_min": some[..., 0], "v_min": some
        },
        "k_min has dtype float64: must be float32 or float16": {"k_min": some.astype(np.float64), "v_min": some},
        "v_scale has dtype float32: must be that of v_min, float16": {"k_min": some, "v_min": some.astype(np.float16)},
        "k_scale has dtype float16: must be float32": {"k_scale": some.astype(np.float16)},
    }.items():
        with pytest.raises(ValueError, match=words):
            changed(int4, by, **more)
    plain = [np.ones((*cache.shape[:-1], 128), bfloat16).swapaxes(1, 2) for cache in (k, v)]
    with pytest.raises(ValueError, match="k_scale is an array with k of dtype bfloat16: must be left out"):
        mha_decode_paged(q, *plain, *arrays[3:], kv_layout="HND", k_scale=np.ones((11, 16, 2), np.float32))
    with pytest.raises(ValueError, match="k_cache has dtype uint8"):
        mha_decode_streaming_paged(*arrays)
    with pytest.raises(ValueError, match=r"k_block_scale: torch \(meta\), k: torch \(cpu\)"):
        changed([to_torch(x) for x in arrays], {}, k_block_scale=torch.zeros(1, device="meta"), v_block_scale=scale)
