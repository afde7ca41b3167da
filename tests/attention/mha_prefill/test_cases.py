"""Cases that went wrong elsewhere, on the emulator and the interpreted kernel.

The parameters are those of the cases; each test names its case.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
from prefill_cases import Case, Inputs
from yardsticks import assert_accurate

from kvlab.attention import merge_states, mha_prefill
from kvlab.attention.features.exact import attention
from kvlab.attention.features.resolve import Features
from kvlab.attention.machines import ARCHS
from kvlab.attention.masks import MaskPlan
from kvlab.memory import bfloat16, float8_e4m3fn

kernel = pytest.param({"device": "cpu"}, id="triton", marks=pytest.mark.interpreter)
emulators = [pytest.param({"arch": a}, id=a) for a in ARCHS]
every_backend = pytest.mark.parametrize("backend", [*emulators, kernel])
with_e4m3 = pytest.mark.parametrize("backend", [*emulators[1:], kernel])


@every_backend
@pytest.mark.parametrize("queries, keys", [(4, 6), (5, 2)])
def test_causal_mask_alignment(queries: int, keys: int, backend: dict[str, Any]) -> None:
    """causal-mask-alignment: what a query sees, read out by values that are one-hot in the key."""
    x = Case(((queries, keys),), heads=(1, 1), dtype="fp32").build()
    x.k[...], x.v[0, :, 0] = 0, np.eye(keys, 64)
    out, lse = (np.asarray(a) for a in x.call(return_lse=True, **backend))
    visible = np.tri(queries, keys, keys - queries)
    seen = visible.sum(1)
    expected = visible / np.maximum(seen, 1)[:, None]
    np.testing.assert_allclose(out[0, :, 0, :keys], expected, rtol=1e-6)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0, :, 0], np.log(seen), rtol=1e-6)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("queries, keys", [(5, 2), (799, 3), (239, 1), (1024, 1023)])
def test_causal_more_queries_than_keys(queries: int, keys: int, arch: str) -> None:
    """causal-more-queries-than-keys: the top rows are zero."""
    x = Case(((queries, keys),), heads=(1, 1)).build()
    out, lse = x.call(arch=arch, return_lse=True)
    assert (out[:, : queries - keys] == 0).all()
    assert_accurate(x, out, lse)


@every_backend
def test_paged_causal_lse_of_masked_rows(backend: dict[str, Any]) -> None:
    """paged-causal-lse-of-masked-rows."""
    x = Case(((8, 4),), form="paged").build()
    out, lse = x.call(return_lse=True, **backend)
    assert np.isneginf(np.asarray(lse)[:4]).all()
    assert_accurate(x, out, lse)


@every_backend
@pytest.mark.parametrize("heads", [(28, 4), (20, 4), (48, 4)])
def test_group_not_a_power_of_two(heads: tuple[int, int], backend: dict[str, Any]) -> None:
    """gqa-group-not-power-of-two; few queries, so the heads of a KV head share tiles."""
    x = Case(((3, 20),), heads=heads, D=128).build()
    assert_accurate(x, *x.call(return_lse=True, **backend))


@every_backend
def test_softcap_saturates(backend: dict[str, Any]) -> None:
    """softcap-saturates: scores of 1000 to 10000 and -10000 with a cap of 50."""
    x = Case(((6, 6),), heads=(1, 1), dtype="fp32", softcap=50.0).build()
    x.q[...], x.k[...] = 0, 0
    x.q[..., 0], x.k[0, :, 0, 0] = 8, [1000, 3000, 4400, 5000, 10000, -10000]
    out, lse = x.call(return_lse=True, **backend)
    assert_accurate(x, out, lse)
    np.testing.assert_allclose(np.asarray(lse)[0, 4, 0], 50 + np.log(5), rtol=1e-6)


@every_backend
def test_sinks_without_keys(backend: dict[str, Any]) -> None:
    """sink-counted-once-with-splits, also context 0: zeros and the sink's logit."""
    x = Case(((3, 0), (2, 5)), heads=(2, 1), form="paged", sinks=True).build()
    out, lse = x.call(return_lse=True, **backend)
    np.testing.assert_array_equal(np.asarray(lse)[:3], np.repeat(x.sinks[None], 3, 0))
    assert_accurate(x, out, lse)


@pytest.mark.parametrize("D", [40, 72, 80, 96, 112, 120, 160, 192, 256])
def test_padded_head_lanes_are_not_stored(D: int) -> None:
    """padded-head-lanes-not-stored: neighbours of the output hold a sentinel."""
    x = Case(((5, 9),), heads=(4, 2), D=D).build()
    buffer = np.full((1, 5, 4, 512), 7, x.q.dtype)
    out = buffer[..., 8 : 8 + D]
    x.call(out=out)
    assert_accurate(x, out)
    out[...] = 7
    assert (buffer == 7).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_pages_whose_offsets_need_64_bits(arch: str) -> None:
    """page-offset-int32-first-page, with strides: a cache whose second page starts past 2^31 elements."""
    x = Case(((3, 40),), heads=(1, 1), form="paged", page=32, dtype="bf16").build()
    expected = x.call(arch=arch)
    far = []
    for cache in (x.k, x.v):
        pitch = -(-(2**31 + 2**20) // (len(cache) - 1)) // 16 * 16 + 16
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
        flat = np.frombuffer(mmap.mmap(-1, 2 * (pitch * len(cache)), flags=flags), cache.dtype)
        strides = (2 * pitch, *cache.strides[1:])
        wide = np.lib.stride_tricks.as_strided(flat, cache.shape, strides)
        wide[...] = cache
        far.append(wide)
    np.testing.assert_array_equal(np.asarray(x.with_(k=far[0], v=far[1]).call(arch=arch)), np.asarray(expected))


def scaled(k: float, v: float, **more: Any) -> Inputs:
    x = Case(((6, 20),), heads=(2, 1), D=64, form="paged", **more).build()
    return x.with_(k_scale=k, v_scale=v)


@with_e4m3
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_fp8_scales_are_applied_once(dtype: str, backend: dict[str, Any]) -> None:
    """fp8-kv-scales-applied-once, fp8-query-keeps-kv-scales: scores times q_scale and k_scale, the output times
    v_scale; both scales count, for a query of either kind."""
    x = scaled(0.06, 2.0, dtype=dtype, kv="fp8").with_(q_scale=0.5)
    assert_accurate(x, *x.call(return_lse=True, **backend))
    assert_accurate(scaled(0.05, 0.1, dtype=dtype, kv="fp8"), scaled(0.05, 0.1, dtype=dtype, kv="fp8").call(**backend))


@every_backend
def test_scales_of_a_bf16_cache_are_refused(backend: dict[str, Any]) -> None:
    """scale-ignored-for-bf16-cache."""
    with pytest.raises(ValueError, match=r"k_scale is 0\.06 with k of dtype bfloat16: must be left out, or 1"):
        scaled(0.06, 2.0).call(**backend)


@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
def test_an_fp8_prefix_is_extended_by_bf16_tokens(arch: str) -> None:
    """extend-mixed-fp8-prefix: the scales belong to the prefix; the parts are merged by their lse."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 2, 64)).astype(bfloat16) for n in (9, 39, 39))
    stored = [(x[:, :30].astype(np.float32) / 0.02).astype(float8_e4m3fn) for x in (k, v)]
    prefix = mha_prefill(q, *stored, causal=False, k_scale=0.02, v_scale=0.02, return_lse=True, arch=arch)
    own = mha_prefill(q, k[:, 30:], v[:, 30:], return_lse=True, arch=arch)
    parts = [np.stack([np.asarray(p[i], np.float32) for p in (prefix, own)]) for i in (0, 1)]
    out, _ = merge_states(*parts)
    rounded = [
        np.concatenate([a.astype(np.float32) * 0.02, b[:, 30:]], axis=1) for a, b in zip(stored, (k, v), strict=True)
    ]
    exact, _ = attention(q[0], rounded[0][0], rounded[1][0], scale=0.125, features=Features(mask=MaskPlan(right=0)))
    assert np.abs(out[0] - exact).max() < 0.02


@every_backend
def test_qk_and_v_head_dims_differ(backend: dict[str, Any]) -> None:
    """qk-and-v-head-dims-differ, head-dim-not-power-of-two: 192 in two pieces, values of 128."""
    x = Case(((5, 40),), heads=(4, 2), D=192, DV=128).build()
    assert_accurate(x, *x.call(return_lse=True, **backend))


@every_backend
def test_window_skips_poisoned_pages(backend: dict[str, Any]) -> None:
    """window-skips-poisoned-pages: window_left 127, context 1024, pages of 16."""
    x = Case(((2, 1024),), heads=(2, 1), form="paged", window=(127, 0)).build()
    for cache in (x.k, x.v):
        cache[x.table[0, : (1024 - 2 - 127) // 16]] = np.nan
    clean = x.with_(**{n: np.where(np.isnan(a), 0, a).astype(a.dtype) for n, a in (("k", x.k), ("v", x.v))})
    assert_accurate(clean, x.call(**backend))
    np.testing.assert_array_equal(x.exact()[0], clean.exact()[0])
