"""What MLA prefill gives: against float64, against the absorbed decode of the same weights, and in pieces.

Rests on the float64 reference, the algebra of MLA, and laws: other bytes change nothing, chunks merge to the whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mla_prefill_cases import Case
from yardsticks import assert_accurate, bits, far_stride, sparse

from kvlab.attention import merge_states, mla_decode_paged, mla_prefill, mla_prefill_paged
from kvlab.attention.machines import ARCHS
from kvlab.attention.masks import CausalPaddingMask, ChunkedMask, Mask, MaterializedMask
from kvlab.cache import PagedKVCacheCollection
from kvlab.memory import bfloat16, float8_e4m3fn

Array = np.ndarray[Any, Any]
every_arch = pytest.mark.parametrize("arch", ARCHS)

CASES = [
    Case(((150, 200), (0, 9), (5, 3), (4, 0))),
    Case(((130, 130), (3, 70)), row="", dtype="fp16", H=3),
    Case(((20, 200), (3, 70)), page=7, row="rope-aware", strided=True),
    Case(((30, 40),), page=1, dtype="fp32", columns=(64, 64, 128)),
    Case(((60, 200), (9, 30)), starts=(100, 0), held=(60, 30), H=1),
    Case(((60, 200),), held=(60,), sinks=True, softcap=5.0, slopes=True, H=3),
    Case(((90, 200), (9, 30)), window=40, mask=ChunkedMask(64), causal=True),
    Case(((90, 200), (9, 30)), mask=ChunkedMask(64)),
    Case(((70, 80),), causal=False, window=(20, 7), columns=(128, 64, 64)),
    Case(((60, 200), (9, 30)), starts=(100, 3), held=(60, 20), window=70, H=1),
    Case(((60, 70), (9, 30)), mask=CausalPaddingMask(np.array([40, 25])), H=1),
    Case(((30, 90), (3, 20)), row="fp8", k_scale="token", H=1),
    Case(((30, 90),), row="fp8", k_scale="head", H=1, page=5),
    Case(((20, 150), (9, 30)), starts=(20, 0), held=(130, 30), row="fp8", k_scale="token", H=1),
    Case(((30, 90),), row="rope-aware", dtype="fp16", H=1),
    Case(((30, 90),), columns=(80, 32, 96), H=2, strided=True),
    Case(((1, 70), (0, 0), (0, 9), (1, 1)), H=2),
    Case((), H=1),
    Case(((70, 130), (0, 9), (5, 3), (4, 0)), kv="fp8", scales="head"),
    Case(((20, 100), (3, 20)), kv="fp8", scales="token", row="rope-aware", page=7, strided=True),
    Case(((40, 90),), kv="fp8", scales="token", row="fp8", k_scale="token", dtype="fp16", columns=(80, 32, 96)),
    Case(((40, 90),), kv="fp8", scales="number", row="", columns=(112, 48, 48), sinks=True),
    Case(((40, 90), (3, 20)), kv="fp8", row="", k_scale="token"),
    Case(((60, 150), (9, 30)), starts=(70, 0), held=(60, 30), kv="fp8", scales="token", window=50),
    Case(((40, 90),), kv="fp8", row="fp8", k_scale="head", dtype="fp8"),
    Case(((40, 90),), kv="fp8", scales="head", row="rope-aware", dtype="fp8", slopes=True),
    Case(((40, 90), (0, 0)), kv="fp8", scales="token", row="", dtype="fp8", columns=(192, 64, 144)),
]
BIAS = np.where(np.random.default_rng(3).random((1, 1, 40, 90)) < 0.3, -np.inf, 0.5).astype(np.float32)
BIAS[0, 0, 5] = -np.inf
MASKED = Case(((40, 90),), mask=MaterializedMask(BIAS), sinks=True)


class EverySecond(Mask):
    """A mask of one's own, another for each sequence: every second key up to the query."""

    def visible(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return (k_pos <= q_pos) & ((k_pos + batch) % 2 == 0)


RUNS = [(case, arch) for case in [*CASES, MASKED] for arch in ARCHS if case.fits(arch)]


@pytest.mark.parametrize("case, arch", RUNS, ids=[f"{case}-{arch}" for case, arch in RUNS])
def test_the_emulator(case: Case, arch: str) -> None:
    x = case.build()
    assert_accurate(x, *x.call(return_lse=True, arch=arch))


@pytest.mark.interpreter
@pytest.mark.parametrize("case", [
    Case(((40, 50), (0, 9), (5, 3), (4, 0)), strided=True, page=5),
    Case(((20, 90),), row="fp8", k_scale="token", H=1),
    Case(((20, 90),), row="fp8", k_scale="number", dtype="fp16", columns=(80, 16, 48), H=1),
    MASKED,
    Case(((20, 60), (9, 30)), starts=(30, 3), held=(20, 20), window=25, H=1),
    Case(((20, 60), (9, 30)), mask=CausalPaddingMask(np.array([50, 25])), H=1),
    Case(((20, 60), (9, 30)), mask=EverySecond(), H=1),
    Case(((9, 40), (3, 3)), row="", dtype="fp32", columns=(64, 32, 64), slopes=True, softcap=3.0),
    Case(((20, 60), (9, 30)), starts=(30, 3), held=(20, 20), kv="fp8", scales="token", strided=True),
    Case(((20, 60), (9, 0)), kv="fp8", scales="head", row="fp8", k_scale="token", dtype="fp16", columns=(80, 16, 48)),
    Case(((20, 60),), kv="fp8", scales="number", row="", dtype="fp8"),
    Case(((20, 60),), kv="fp8", scales="head", row="", dtype="fp8"),
    Case(((20, 60), (9, 30)), kv="fp8", row="", k_scale="token", columns=(64, 32, 64)),
], ids=str)
def test_the_kernel(case: Case) -> None:
    x = case.build()
    assert_accurate(x, *x.call(return_lse=True, device="cpu"))


@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
def test_scales_of_powers_of_two_change_no_bit(arch: str) -> None:
    """Law: K and V divided by 2^n, with scales of 2^n, give the same bits, whether of heads or of tokens and heads."""
    x = Case(((20, 60), (3, 20)), kv="fp8", held=(60, 20), H=3).build()
    k, v = (np.round(np.clip(a.astype(np.float32), -3, 3) * 4) / 4 for a in (x.k, x.v))
    one = x.with_(k=k.astype(x.k.dtype), v=v.astype(x.v.dtype))
    by_head = np.array([0.5, 1, 4], np.float32)
    by_token = np.exp2(np.random.default_rng(4).integers(-2, 3, (80, 3))).astype(np.float32)
    for by in (by_head, by_token):
        scaled = {n: (a / by[..., None]).astype(x.k.dtype) for n, a in (("k", k), ("v", v))}
        expected = one.with_(kv_scales=(np.ones_like(by),) * 2).call(arch=arch)  # the same tiles
        assert bits(x.with_(**scaled, kv_scales=(by, by)).call(arch=arch)) == bits(expected)


@pytest.mark.parametrize("width", [640, 656])
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_rope_aware_rows_of_uint8_are_those_of_e4m3(width: int, backend: Any) -> None:
    """Law: the same bytes, as ``mla_store_paged`` and ``mla_decode_paged`` take them, give the same bits."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 2, D)).astype(bfloat16) for n, D in ((3, 128), (20, 64), (20, 64)))
    cache = np.full((4, 16, width), 0x38, np.uint8)
    cache[..., -128:] = rng.standard_normal((4, 16, 64)).astype(bfloat16).view(np.uint8)
    table, lens, starts, starts_k = np.array([[3, 1]]), np.array([20]), np.array([0, 3]), np.array([0, 20])
    one, other = (
        mla_prefill_paged(q, k, v, cache.view(dtype), table, lens, starts, starts_k, backend=backend)
        for dtype in (np.uint8, float8_e4m3fn)
    )
    assert bits(one) == bits(other)


def absorbed(x: Any, w_k: Array, w_v: Array, latents: Array) -> tuple[Array, Array]:
    """The absorbed decode of x's queries: the projections go to the query and the output."""
    nope, rope, _ = x.case.columns
    q = np.einsum("thd,lhd->thl", x.q[..., :nope].astype(np.float64), w_k)
    q = np.concatenate([q, x.q[..., nope:]], -1)[None]
    pages = np.concatenate([latents, x.rope[x.table[0, : len(latents)], 0]], -1)[:, None]
    table, lens = np.arange(len(latents))[None], np.array([len(latents)])
    options: dict[str, Any] = {"v_dim": latents.shape[1], "scale": (nope + rope) ** -0.5, "backend": "reference"}
    out, lse = mla_decode_paged(q.astype(np.float32), pages.astype(np.float32), table, lens, return_lse=True, **options)
    return np.einsum("thl,lhv->thv", out[0].astype(np.float64), w_v), lse[0]


def test_absorbed_decode_of_the_same_weights_agrees() -> None:
    """``q (W_k c) = (q W_k) c`` and ``sum p (W_v c) = (sum p c) W_v``; float32 storage, 4 new of 50 tokens."""
    x = Case(((4, 50),), page=1, dtype="fp32", H=3).build()
    nope, _, value = x.case.columns
    rng = np.random.default_rng(5)
    latents = rng.standard_normal((50, 64)).astype(np.float32)
    w_k, w_v = rng.standard_normal((64, 3, nope)) / 8, rng.standard_normal((64, 3, value)) / 8
    k, v = (np.einsum("nl,lhd->nhd", latents, w).astype(np.float32) for w in (w_k, w_v))
    x = x.with_(k=k, v=v)
    exact, exact_lse = absorbed(x, w_k, w_v, latents)
    for backend in ({"backend": "reference"}, *({"arch": arch} for arch in ARCHS)):
        out, lse = x.call(return_lse=True, **backend)
        np.testing.assert_allclose(out, exact, rtol=0, atol=1e-5)
        np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)


def test_chunks_of_a_prefix_merge_to_the_whole() -> None:
    """Keys [0, 70), [70, 150) and the rest, each with its ``k_starts``, merged by their lse."""
    x = Case(((30, 200),), dtype="fp32", columns=(64, 32, 64)).build()
    whole, lse = x.call(return_lse=True)
    parts = []
    for lo, hi in ((0, 70), (70, 150), (150, 200)):
        chunk = x.with_(k=x.k[lo:hi], v=x.v[lo:hi], cu_k=np.array([0, hi - lo]), starts=np.array([lo]))
        parts.append(chunk.call(return_lse=True))
    merged, merged_lse = merge_states(np.stack([o for o, _ in parts]), np.stack([s for _, s in parts]))
    np.testing.assert_allclose(merged, whole, rtol=0, atol=1e-6)
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-6, atol=1e-6)


@every_arch
def test_other_bytes_change_no_bit(arch: str) -> None:
    """Garbage in unused slots, in latents and behind the diagonal; pages dealt differently; out in a wider buffer."""
    x = Case(((130, 150), (0, 9), (20, 200)), strided=True).build()
    expected = bits(x.call(arch=arch))
    unused = np.isnan(x.cache.astype(np.float32))
    assert unused.any()
    moved = np.random.default_rng(2).permutation(len(x.cache))
    table, used = x.table.copy(), (x.table >= 0) & (x.table < len(x.cache))
    table[used], table[~used] = np.argsort(moved)[table[used]], -123456789
    cache = np.where(unused, np.float32(1e30), x.cache).astype(x.cache.dtype)[moved]
    buffer = np.full((len(x.q) + 2, 4, 256), 7, x.q.dtype)
    out = buffer[1:-1, 1:3, 64:192]
    assert x.with_(cache=cache, table=table).call(arch=arch, out=out) is out
    assert bits(out) == expected
    out[...] = 7
    assert (buffer == 7).all()


@every_arch
def test_keys_outside_the_window_are_not_read(arch: str) -> None:
    x = Case(((4, 600),), H=1, window=128).build()
    expected = x.call(arch=arch)
    first = 600 - 4 - 127  # key that the first query sees, in the midst of a page and of a tile
    x.k[:first], x.v[:first] = np.nan, np.nan
    before = np.arange(first)
    x.cache[x.table[0, before // 16], before % 16] = np.nan
    assert bits(x.call(arch=arch)) == bits(expected)


@every_arch
def test_nan_in_a_key_that_is_seen(arch: str) -> None:
    """Law: NaN in a key is NaN in the rows that see it; they are no rows without keys."""
    x = Case(((3, 40),), H=1).build()
    x.k[38] = np.nan
    out, lse = x.call(arch=arch, return_lse=True)
    assert np.isnan(out.astype(np.float32)).all((1, 2)).tolist() == [False, True, True]
    assert np.isnan(lse[:, 0]).tolist() == [False, True, True]


def test_high_page_ids() -> None:
    """Known failure mla-decode-high-page-ids, for prefill: pages that lie 2^31 elements apart give the same bits."""
    x = Case(((20, 90),), H=1, page=48).build()
    pages, _, D = x.cache.shape
    far = sparse(x.cache.shape, (far_stride(pages), D, 1), x.cache.dtype)
    far[...] = x.cache
    assert bits(x.with_(cache=far).call()) == bits(x.call())


def test_collection_form_and_base2() -> None:
    x = Case(((20, 50), (3, 17)), latent=64).build()
    collection = PagedKVCacheCollection(x.cache[:, None, None, :, None], x.seq_lens - np.diff(x.cu_q), x.table, 20, 50)
    options: dict[str, Any] = {"cu_seqlens_q": x.cu_q, "cu_seqlens_k": x.cu_k, "latent_dim": 64}
    out, lse = mla_prefill(x.q, x.k, x.v, collection, **options, return_lse=True, base2=True)
    expected, natural = x.call(return_lse=True)
    assert bits(out) == bits(expected)
    np.testing.assert_allclose(lse, natural * np.log2(np.e), rtol=1e-6)
    hnd = mla_prefill_paged(
        x.q, x.k, x.v, x.cache[:, None], x.table, x.seq_lens, x.cu_q, x.cu_k, latent_dim=64, kv_layout="HND"
    )
    assert bits(hnd) == bits(expected)
