"""Cases that went wrong elsewhere, on the emulator and the interpreted kernel.

The parameters are those of the cases; each test names its case.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
from prefill_cases import Case
from yardsticks import assert_accurate

from kvlab.attention.mha_prefill.machine import PREFILL_ARCHS

kernel = pytest.param({"device": "cpu"}, id="triton", marks=pytest.mark.interpreter)
every_backend = pytest.mark.parametrize("backend", [*(pytest.param({"arch": a}, id=a) for a in PREFILL_ARCHS), kernel])


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
        np.testing.assert_allclose(lse[0, 0], np.log(seen), rtol=1e-6)


@pytest.mark.parametrize("arch", PREFILL_ARCHS)
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
    assert np.isneginf(np.asarray(lse)[:, :4]).all()
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
    np.testing.assert_allclose(np.asarray(lse)[0, 0, 4], 50 + np.log(5), rtol=1e-6)


@every_backend
def test_sinks_without_keys(backend: dict[str, Any]) -> None:
    """sink-counted-once-with-splits, also context 0: zeros and the sink's logit."""
    x = Case(((3, 0), (2, 5)), heads=(2, 1), form="paged", sinks=True).build()
    out, lse = x.call(return_lse=True, **backend)
    np.testing.assert_array_equal(np.asarray(lse)[:, :3], np.repeat(x.sinks[:, None], 3, 1))
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


@pytest.mark.parametrize("arch", PREFILL_ARCHS)
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
