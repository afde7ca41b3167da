"""Stores into caches of 4 bits: e2m1 with e4m3 scales of 16 dims and a number (NVFP4), integers with scales of tokens.

Rests on the bytes that ``kvlab.formats`` encodes, on ml_dtypes' e2m1 and e4m3, on float64 with a bound from the format,
and on laws: nothing but the slots named changes, and the interpreted and the compiled kernel write the same bytes.
"""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from caught import Caught, as_launched
from four_bit_stores import NUMBERS, FourBitStore, check_bytes
from store_cases import CANARY, filled

from kvlab.attention import (
    Rope,
    kv_store,
    kv_store_paged,
    mha_decode,
    mha_decode_paged,
    mha_prefill_cache,
    mla_store_paged,
)
from kvlab.attention.features.scales import by_slot
from kvlab.attention.tiles.four_bits.emulator import code_of_float, number_of_e4m3
from kvlab.cache import KVCacheStaticParams, PagedKVCacheCollection, PagePool, copy_pages
from kvlab.common.arrays import to_torch
from kvlab.memory import bfloat16, float8_e4m3fn
from kvlab.mirror import lockstep

Array = np.ndarray[Any, Any]
BACKENDS = ["reference", "emulator", pytest.param("triton", marks=pytest.mark.interpreter)]


CASES = [
    FourBitStore("e2m1"), FourBitStore("e2m1", (48, 16), heads=1, tokens=70, source="bf16", page=16),
    FourBitStore("int4"), FourBitStore("int4", (80, 6), heads=5, source="fp16", page=3),
    FourBitStore("words", (96, 64), page=8), FourBitStore("uint4"),
    FourBitStore("halves", (48, 6), heads=2, source="bf16", tokens=11, page=5),
]


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bytes_are_those_of_the_format(case: FourBitStore, backend: str) -> None:
    """A token of no slot of the cache is refused, and dropped where nobody looks."""
    arrays, options = case.build()
    arrays[4][6] = 1 << 40
    with pytest.raises(ValueError, match=r"slot_mapping\[6\] is 1099511627776: must be below"):
        kv_store_paged(*arrays, **options, backend=backend)
    kv_store_paged(*arrays, **options, backend=backend, check=False)
    check_bytes(case, arrays, options)


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [FourBitStore("e2m1"), FourBitStore("int4"), FourBitStore("uint4")], ids=str)
def test_a_store_of_no_token_writes_nothing(case: FourBitStore, backend: str, tokens: int) -> None:
    """Rests on a law: there is none, or each is to be skipped, and all bytes stay."""
    (k, v, *caches, slots), options = case.build()
    before = [cache.copy() for cache in caches]
    kv_store_paged(k[:tokens], v[:tokens], *caches, np.full_like(slots[:tokens], -1), **options, backend=backend)
    assert all((cache == old).all() for cache, old in zip(caches, before, strict=True))


def launched(arrays: list[Array], options: dict[str, Any]) -> Caught:
    """The kernel's launch, caught, over the same memory."""
    from kvlab.attention.kv_store import kernel

    named = {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    call, caught = kv_store_paged.planned(*map(to_torch, arrays), **named), Caught(kernel.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "append", caught)
        kernel.launch(*call.arrays, **call.named())
    return caught


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", [FourBitStore("e2m1"), FourBitStore("int4", (128, 64))], ids=str)
def test_compiled(case: FourBitStore, target: str) -> None:
    """No spills; four stores of 8 bytes for a thread's 32 dims, or fewer; and in the PTX machine the format's bytes."""
    from kvlab.simt import run

    arrays, options = case.build()
    caught = launched(arrays, options)
    ((grid, named),) = caught.calls
    run(caught.fn, grid, target=target, **named)
    check_bytes(case, arrays, options)
    T, pages = 4096, filled((256, 2, 16, 8, 64), "uint8")
    k = np.zeros((T, 8, 128), bfloat16)
    if case.kind == "e2m1":
        by: dict[str, Any] = {f"{name}_block_scale": np.zeros((256, 16, 8, 8), float8_e4m3fn) for name in "kv"}
    else:
        by = {f"{name}_scale": np.zeros((256, 16, 8), np.float32) for name in "kv"}
    caught = launched([k, k.copy(), pages[:, 0], pages[:, 1], np.arange(T)], by)
    made = as_launched(caught.fn, caught.arguments, target)
    assert made.spills == 0
    stores = re.findall(r"\bSTG[.\w]*", made.sass)
    assert sum(".64" in op for op in stores) == 2, stores
    assert sum(".U8" in op for op in stores) == (2 if case.kind == "e2m1" else 0), stores


@pytest.mark.parametrize("name, mantissa, bias", [("e4m3", 3, 7), ("e2m1", 1, 1)])
def test_codes_of_floats(name: str, mantissa: int, bias: int) -> None:
    """Rests on ml_dtypes: all ties and their neighbours, and float32 from 0 to the format's largest."""
    dtype, largest = {"e4m3": (float8_e4m3fn, 448.0), "e2m1": (np.dtype(ml_dtypes.float4_e2m1fn), 6.0)}[name]
    numbers = np.arange(127 if name == "e4m3" else 8, dtype=np.uint8).view(dtype).astype(np.float32)
    ties = (numbers[1:] + numbers[:-1]) / 2
    bits = np.arange(0, np.float32(largest).view(np.int32), 99_991, dtype=np.int32)
    x = np.concatenate([bits.view(np.float32), numbers, ties, *(np.nextafter(ties, np.float32(n)) for n in (0, 500))])
    assert (code_of_float(x, mantissa, bias) == x.astype(dtype).view(np.uint8)).all()
    if name == "e4m3":
        assert (number_of_e4m3(np.arange(127, dtype=np.int32)) == numbers).all()


def half_steps(kind: str, x: Array, scale: Array, number: float) -> Array:
    """What rounding changes at most: half the way between the numbers of the format around each of ``x``."""
    unit = np.repeat(scale.astype(np.float64), 16, -1) * number if kind == "e2m1" else scale[..., None]
    if kind != "e2m1":
        return np.broadcast_to(0.5 * unit, x.shape) * (1 + 1e-6)
    return np.where(np.abs(x) <= 2 * unit, 0.25, np.where(np.abs(x) <= 4 * unit, 0.5, 1.0)) * unit * (1 + 1e-6)


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("kind", ["e2m1", "int4", "uint4"])
def test_stored_then_read_by_decode(kind: str, backend: str) -> None:
    """Attention of the new tokens in float64 against decode over what is stored: no further apart than the formats'
    half steps can move scores and values.
    """
    rng = np.random.default_rng(5)
    T, H, D, page = 37, 2, 64, 8
    k, v = (rng.standard_normal((T, H, D)) * np.exp2(rng.uniform(-2, 1, (T, H, 1))) for _ in "kv")
    k, v = k.astype(bfloat16), v.astype(bfloat16)
    table = np.array([[3, 0, 4, 1, 5]], np.int32)
    slots = table[0, np.arange(T) // page] * page + np.arange(T) % page
    caches = np.full((2, 6, H, page, D // 2), CANARY, np.uint8)
    if kind == "e2m1":
        scales = np.full((2, 6, H, page, D // 16), np.nan, float8_e4m3fn)
        options = {"k_block_scale": scales[0], "v_block_scale": scales[1], "k_scale": 0.01, "v_scale": 0.02}
    else:
        scales = np.full((2, 6, H, page), np.nan, np.float32)
        options = {"k_scale": scales[0], "v_scale": scales[1]}
        if kind == "uint4":
            minima = scales.copy()
            options |= {"k_min": minima[0], "v_min": minima[1]}
    kv_store_paged(k, v, *caches, slots, kv_layout="HND", backend=backend, **options)
    q = (0.5 * rng.standard_normal((1, 2 * H, D))).astype(bfloat16)
    out = mha_decode_paged(q, *caches, table, np.array([T]), kv_layout="HND", num_splits=1, **options)
    at = slots // page, slice(None), slots % page
    wrong = [half_steps(kind, x.astype(np.float64), scale[at], number)
             for x, scale, number in zip((k, v), scales, (0.01, 0.02), strict=True)]
    for h in range(2 * H):
        K, V, eK, eV = (x[:, h // 2].astype(np.float64) for x in (k, v, *wrong))
        row = q[0, h].astype(np.float64) / 8
        p = np.exp(K @ row - (K @ row).max())
        p /= p.sum()
        most = np.exp(2 * (eK @ np.abs(row)).max())
        bound = (most - 1) * (p @ np.abs(V)) + most * (p @ eV)
        exact = p @ V
        rounded = 2.0**-8 * np.abs(exact) + 2.0**-9 * np.abs(V).max()
        assert (np.abs(out[0, h].astype(np.float64) - exact) <= bound + rounded).all()
        assert np.abs(out[0, h].astype(np.float64) - exact).max() < 0.25 * np.abs(exact).max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["e2m1", "int4", "uint4"])
def test_infinities_and_nan(kind: str, backend: str) -> None:
    """An infinity has no part in a scale and becomes the largest number; a NaN is refused before anything is written,
    and where nobody looks its scale is NaN, that of no other.
    """
    case = FourBitStore(kind, (32, 32))
    arrays, options = case.build()
    k, _, cache, _, slots = arrays
    slots[...] = [3, 7, 0, 11, -1, 9, -1, -1, -1]
    k[0] = np.linspace(-1, 1, 32)
    k[0, :, 3], k[0, :, 20], k[4] = np.inf, -np.inf, np.nan  # the token without a slot may be anything
    k[5] = 0
    k[5, :, 2] = np.inf
    kv_store_paged(*arrays, **options, backend=backend)
    scale = options["k_block_scale" if kind == "e2m1" else "k_scale"]
    codes = np.stack([cache[0, 3] & 15, cache[0, 3] >> 4], -1).reshape(3, 32)
    assert (codes[:, [3, 20]] == {"e2m1": [7, 15], "int4": [7, 9], "uint4": [15, 0]}[kind]).all()
    top = np.full((3, 2), 1 / 6 / NUMBERS["k"]) if kind == "e2m1" else np.full(3, 1 / 7 if kind == "int4" else 2 / 15)
    np.testing.assert_allclose(scale[0, 3].astype(np.float64), top, rtol=2.0**-4 if kind == "e2m1" else 1e-6)
    assert not cache[2, 1].any()  # of no finite value but 0
    assert not scale[2, 1].any()
    before = cache.copy(), scale.copy()
    k[3, 1, 17] = np.nan
    with pytest.raises(ValueError, match="k of token 3 has a NaN: must be numbers, since 4 bits hold no NaN"):
        kv_store_paged(*arrays, **options, backend=backend)
    assert (cache == before[0]).all()
    assert scale.tobytes() == before[1].tobytes()
    kv_store_paged(*arrays, **options, backend=backend, check=False)
    lost = np.isnan(scale[2, 3].astype(np.float32))
    if kind == "uint4":
        assert (options["k_min"][0, 3] == -1).all()
        assert np.isnan(options["k_min"][2, 3]).tolist() == lost.tolist()
    assert lost.tolist() == ([[False] * 2, [False, True], [False] * 2] if kind == "e2m1" else [False, True, False])
    assert (cache[2, 3, [0, 2]] == before[0][2, 3, [0, 2]]).all()
    assert np.isfinite(scale[[0, 1, 0, 2], [3, 3, 0, 1]].astype(np.float32)).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(case: FourBitStore) -> None:
    """Float64: within half a step of what was stored, as the emulator is."""
    for backend in BACKENDS[:2]:
        arrays, options = case.build()
        kv_store_paged(*arrays, **options, backend=backend)
        token = np.nonzero(arrays[4] >= 0)[0]
        at = np.divmod(arrays[4][token], case.page)
        for name, x, cache in zip("kv", arrays[:2], arrays[2:4], strict=True):
            small = case.kind in ("e2m1", "words")
            scale = by_slot(options[f"{name}_block_scale" if small else f"{name}_scale"])[at]
            halves = np.stack([cache[at] & 15, cache[at] >> 4], -1).reshape(x[token].shape)
            number = NUMBERS[name] if small else 1.0
            over = f"{name}_min" in options
            kind = ml_dtypes.float4_e2m1fn if small else np.uint8 if over else ml_dtypes.int4
            true = (halves.view(kind) if small else halves.view(np.int8).astype(kind)).astype(np.float64)
            rows, unit = x[token].astype(np.float64), scale.astype(np.float64)
            rows = np.clip(rows, -6 * 448 * number, 6 * 448 * number) if small else rows
            unit = np.repeat(unit, 16, -1) * number if small else unit[..., None]
            beyond = 6 * number * 2.0**-10 if small else 0  # scales below the smallest e4m3 are none, or another
            least = options[f"{name}_min"][at].astype(np.float64)[..., None] if over else 0.0
            bound = half_steps("e2m1" if small else "int4", rows, scale, number) + beyond
            if case.kind == "halves":  # minimum, scale and codes are rounded each for itself
                bound = bound + 2.0**-11 * (np.abs(least) + 15 * unit) + 16 * 2.0**-25
            assert (np.abs(true * unit + least - rows) <= bound).all(), (backend, name)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind, D", [("words", (64, 48)), ("int4", (80, 64)), ("halves", (48, 64))])
def test_lockstep(kind: str, D: tuple[int, int]) -> None:
    """Every output of every step, K turned on its way."""
    arrays, options = FourBitStore(kind, D).build()
    rope = Rope.of_base(50, 32, interleaved=kind == "words", first=16)
    call = kv_store_paged.planned(*arrays, **options, rope=rope, positions=np.arange(9))
    names = dict(zip(("k", "v", "k_cache", "v_cache", "tables"), call.arrays, strict=True))
    result = lockstep("kv_store", {**names, **call.named()})
    assert result.ok, str(result)


@pytest.mark.parametrize("kind", ["e2m1", "int4"])
def test_k_alone_and_torch(kind: str) -> None:
    """K alone writes K's bytes; torch tensors in CPU memory by the emulator the same."""
    arrays, options = FourBitStore(kind).build()
    k, _, cache, _, slots = arrays
    mine = {name: x for name, x in options.items() if name[0] == "k"}
    kv_store_paged(k, None, cache, None, slots, **mine, backend="emulator")
    alone = cache.copy()
    others, by = FourBitStore(kind).build()
    tensors = {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in by.items()}
    kv_store_paged(*map(to_torch, others), **tensors, backend="emulator")
    assert (others[2] == alone).all()


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("kind", ["e2m1", "int4"])
def test_a_collection_of_four_bits(kind: str, backend: str) -> None:
    """Ragged tokens into a pool of pages, a fork whose page is copied, and decode and prefill over it: what the calls
    over arrays give; slots that nobody wrote have NaN for scales.
    """
    rng, (H, D, page) = np.random.default_rng(8), (2, 64, 4)
    small = kind == "e2m1"
    cache = PagedKVCacheCollection.allocate(
        KVCacheStaticParams(H, D // 2), num_pages=8, page_size=page, num_layers=2, batch_size=2, max_length=16,
        dtype="uint8", scale_dtype="fp8" if small else "fp32", quantization_granularity=8 if small else D // 2,
    )
    pool = PagePool(8, page)
    parent, _ = pool.allocate(7)
    numbers = {"k_scale": 0.25, "v_scale": 0.5} if small else {}
    k, v = rng.standard_normal((2, 7, H, D)).astype(bfloat16)
    first = cache._replace(lookup_table=pool.lookup_table([parent]), cache_lengths=np.zeros(1, np.uint32))
    kv_store(k, v, first.with_lengths(np.array([0]), 7), 1, cu_seqlens=np.array([0, 7]), backend=backend, **numbers)
    child = pool.fork(parent)
    copy_pages(cache, pool.append(child, 1))
    table, lens = pool.lookup_table([parent, child]), np.array([7, 8])
    step = cache._replace(lookup_table=table).with_lengths(np.array([7, 7]), 1)
    new_k, new_v = rng.standard_normal((2, 1, H, D)).astype(bfloat16)
    starts = np.array([0, 0, 1])
    kv_store(new_k, new_v, step, 1, cu_seqlens=starts, backend=backend, **numbers)
    assert cache.scales is not None
    assert np.isnan(cache.scales[table[0, 1], :, 1, 3].astype(np.float32)).all()  # the parent's free slot
    assert np.isnan(cache.scales[:, :, 0].astype(np.float32)).all()  # the other layer
    q = rng.standard_normal((2, 1, 2 * H, D)).astype(bfloat16)
    scales = cache.scales[:, :, 1] if small else cache.scales[:, :, 1, ..., 0]
    what = "block_scale" if small else "scale"
    by = numbers | {f"{x}_{what}": scales[:, i] for i, x in enumerate("kv")}
    halves = cache.blocks[:, 0, 1], cache.blocks[:, 1, 1]
    expected = mha_decode_paged(q, *halves, table, lens, backend=backend, **by)
    at = cache._replace(lookup_table=table).with_lengths(np.array([6, 7]), 1)  # seven keys and eight
    assert (mha_decode(q, at, 1, backend=backend, **numbers) == expected).all()
    whole = np.concatenate([k, new_k]).astype(np.float32)
    found = mha_decode_paged(q, *halves, table, lens, backend="reference", **by).astype(np.float32)[1]
    values = np.concatenate([v, new_v]).astype(np.float32)
    one = np.zeros((1, 1), np.int32), np.array([8])
    exact = mha_decode_paged(q[1:].astype(np.float32), whole[None], values[None], *one, backend="reference")
    assert np.abs(found - exact[0]).max() < 0.3 * np.abs(exact).max()
    prefilled = mha_prefill_cache(q[:, 0], at, 1, cu_seqlens_q=np.array([0, 1, 2]), backend=backend, **numbers)
    assert np.abs(prefilled.astype(np.float32) - expected[:, 0].astype(np.float32)).max() < 0.02
    with pytest.raises(ValueError, match="two elements a byte: load_quantized gives the bytes"):
        at.get_key_cache(1).load(0, 0, 0, 0, output_dtype="fp32")


def test_a_collection_that_is_none_of_four_bits() -> None:
    """Without scales, with scales of other blocks: refused before anything is written."""
    params, k = KVCacheStaticParams(2, 32), np.zeros((1, 2, 64), bfloat16)
    sizes = {"num_pages": 2, "page_size": 4, "num_layers": 1, "batch_size": 1, "max_length": 4, "dtype": "uint8"}
    for words, more in {
        "cache of uint8 has no scales: must be one with scales": {},
        "a cache of 4 bits with 8 e4m3 scales a head and token: must be 4, of 16 dims each": {
            "scale_dtype": "fp8", "quantization_granularity": 4},
        "a cache with 2 scales a head and token": {"scale_dtype": "fp32", "quantization_granularity": 16},
    }.items():
        cache = PagedKVCacheCollection.allocate(params, **sizes, **more)
        cache.lookup_table[:, 0] = 0
        with pytest.raises(ValueError, match=words):
            kv_store(k, k, cache.with_lengths(np.array([0]), 1), cu_seqlens=np.array([0, 1]))
        assert (cache.blocks == 0xFF).all()


def strided(array: Array) -> Array:
    """The same values, elements of a row two apart."""
    return np.repeat(array, 2, -1)[..., ::2]


ODD = np.zeros((9, 3, 31), np.float32)
BAD = {
    r"k_block_scale has shape \(5, 4, 3, 3\): must be \(5, 4, 3, 4\), one of each 16 dims":
        lambda x: {"k_block_scale": x["k_block_scale"][..., :3]},
    "k_block_scale has dtype float32: must be float8_e4m3fn":
        lambda x: {"k_block_scale": x["k_block_scale"].astype(np.float32)},
    "v_block_scale has strides .*: must be contiguous": lambda x: {"v_block_scale": strided(x["v_block_scale"])},
    r"k_scale is of float32: must be a number, float32 \[1\] or None, beside k_block_scale":
        lambda x: {"k_scale": np.ones(3, np.float32)},
    r"k_scale\[0\] is 0.0: must be positive": lambda x: {"k_scale": np.zeros(1, np.float32)},
    r"v_block_scale has shape .*: must be \(5, 1, 3, 6, 4\), one of each 16 dims, of four slots side by side":
        lambda x: {"v_block_scale": np.zeros((5, 4, 3, 6, 4), float8_e4m3fn)},
    "k_min with k_block_scale: must be one of them": lambda x: {"k_min": np.ones((5, 4, 3), np.float32)},
    r"k_scale is a number, 0.65: must be float32 or float16 \(5, 4, 3\), computed .*, as k_min":
        lambda x: {"k_min": np.ones((5, 4, 3), np.float32), "k_block_scale": None},
    "k_min has dtype float16: must be that of k_scale, float32": lambda x: {
        "k_min": np.ones((5, 4, 3), np.float16), "k_scale": np.ones((5, 4, 3), np.float32), "k_block_scale": None},
    r"k_min has shape \(5, 4, 2\): must be \(5, 4, 3\), computed as k_scale is": lambda x: {
        "k_min": np.ones((5, 4, 2), np.float32), "k_scale": np.ones((5, 4, 3), np.float32), "k_block_scale": None},
    "k_min with a cache of bfloat16: must be left out": lambda x: {
        "k_min": np.ones((5, 4, 3), np.float32), "k_block_scale": None,
        "k_cache": np.zeros((5, 4, 3, 64), bfloat16)},
    "k_scale is 0.0: must be positive": lambda x: {"k_scale": 0.0},
    "k_granularity 16: must be left out": lambda x: {"k_granularity": 16},
    r"k_cache of uint8 has shape .*: must be of the 3 heads of 32 bytes, two dims each, that k has; bytes that hold":
        lambda x: {"k_cache": x["k_cache"][..., :16]},
    "k has heads of 31, k_cache dtype uint8: must be even": lambda x: {"k": ODD},
    "k_block_scale with heads of 24: must be of a multiple of 16 dims":
        lambda x: {"k": x["k"][..., :24], "k_cache": x["k_cache"][..., :12]},
    "k_block_scale with a cache of bfloat16: must be left out":
        lambda x: {"k_cache": np.zeros((5, 4, 3, 64), bfloat16)},
    r"k_scale is None: must be float32 \(5, 4, 3\), computed .*, or beside k_block_scale":
        lambda x: {"k_block_scale": None, "k_scale": None},
    "k_scale is a number, 0.65: must be float32": lambda x: {"k_block_scale": None},
    r"k_scale is of float32 and shape \(5, 4, 2, 1\): must be":
        lambda x: {"k_block_scale": None, "k_scale": np.ones((5, 4, 2), np.float32)},
    "k_scale is of bfloat16 and shape": lambda x: {"k_block_scale": None, "k_scale": np.ones((5, 4, 3), bfloat16)},
    "k_block_scale is read-only": lambda x: {"k_block_scale": frozen(x["k_block_scale"])},
    "k_scale shares memory with k_min": lambda x: {
        "k_block_scale": None, "v": None, "v_cache": None, "v_block_scale": None,
        **dict.fromkeys(("k_scale", "k_min"), np.full((5, 4, 3), np.nan, np.float32))},
    "k_block_scale shares memory with v_block_scale":
        lambda x: {"v": x["v"][..., :64], "v_cache": x["v_cache"][..., :32], "v_block_scale": x["k_block_scale"]},
    "k_block_scale is a list": lambda x: {"k_block_scale": [1]},
    "k has dtype float8_e4m3fn": lambda x: {"k": x["k"].astype(float8_e4m3fn)},
}


def frozen(array: Array) -> Array:
    """A copy that is not written."""
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("message", BAD)
def test_bad_input_writes_nothing(message: str) -> None:
    arrays, options = FourBitStore("e2m1").build()
    names = dict(zip(("k", "v", "k_cache", "v_cache", "slot_mapping"), arrays, strict=True)) | options
    with pytest.raises(ValueError, match=message):
        kv_store_paged(**names | BAD[message](names))
    for array in (*arrays[2:4], options["k_block_scale"], options["v_block_scale"]):
        assert (array.view(np.uint8) == CANARY).all()


def test_bytes_of_other_stores_are_not_4_bits() -> None:
    """Rows of MLA in uint8 hold fp8 or are refused."""
    cache = np.zeros((2, 4, 1, 576), np.uint8)
    with pytest.raises(ValueError, match=r"cache has dtype uint8: must be bfloat16, .* passed as \.view"):
        mla_store_paged(np.zeros((1, 512), np.float32), np.zeros((1, 64), np.float32), cache, np.array([0]))
