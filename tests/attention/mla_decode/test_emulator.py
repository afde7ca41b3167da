"""The emulated machines of MLA decode against the float64 reference, in the tolerance of yardsticks, and what they
move.

Every case poisons what must not be read: unused slots and pages are NaN, unused entries of the page table are no pages.
"""

from __future__ import annotations

import numpy as np
import pytest
from mla_cases import Case, EvenKeys
from yardsticks import assert_accurate, bits

from kvlab.attention import explain, mla_decode, mla_decode_paged
from kvlab.attention.machines import ARCHS
from kvlab.attention.masks import CausalPaddingMask, ChunkedMask
from kvlab.cache import from_dense
from kvlab.staging import Traffic

GRID = [
    Case((150, 0, 17, 1), H=6, columns=(512, 64)),
    Case((300,), H=16, columns=(256, 32), page=5, splits=3),
    Case((70, 129), H=9, page=64, S=2, dtype="fp16", storage="head"),
    Case((40, 13, 2, 0), H=5, page=1, S=13, storage="layers"),
    Case((130,), H=128, columns=(128, 32), page=128, storage="wide"),
    Case((20,), H=1, splits=9),
]
ON_NVIDIA = [
    Case((70, 0, 33), H=3, columns=(512, 64), dtype="fp32", page=48),
    Case((40,), H=17, columns=(96, 16), S=2, splits=2),
    Case((65, 2), H=4, columns=(32, 128), dtype="fp32", S=3),
]
FEATURES = [
    Case((150, 0, 3), H=3, S=2, softcap=4.0, sinks=True, slopes=True, splits=3),
    Case((300, 40), H=3, S=3, window=150, splits=2),
    Case((300, 40), H=2, S=2, mask=ChunkedMask(64), sinks=True, splits=2),
    Case((90, 40, 0), H=2, mask=EvenKeys(), sinks=True, splits=2),
    Case((90, 40), H=2, mask=CausalPaddingMask(np.array([50, 9]))),
]
OF_FP8 = [
    Case((150, 0, 3), H=3, S=2, row="rope-aware", k_scale="token", columns=(512, 64), splits=2),
    Case((70, 5), H=17, row="fp8", k_scale="token", softcap=3.0, page=5),
    Case((70,), H=3, row="rope-aware", k_scale="head", dtype="fp16"),
    Case((70, 9), H=3, S=2, row="fp8", k_scale="token", dtype="fp8", splits=2),
    Case((70,), H=3, row="fp8", columns=(96, 16), storage="head"),
    Case((150, 0, 33), H=20, S=2, row="scaled", columns=(512, 64), storage="head", page=5, splits=2),
]
GRID += FEATURES
ALL = [(case, arch) for case in GRID for arch in ARCHS] + [(c, a) for c in ON_NVIDIA for a in ARCHS[:2]]
ALL += [(case, "sm_90") for case in OF_FP8]
SIXTY_FOUR_ROWS = [
    Case((150, 0, 64), H=64, columns=(512, 64), page=64, sinks=True),
    Case((170, 3), H=40, columns=(96, 16), S=2, page=5, dtype="fp16", splits=3, storage="wide"),
    Case((90, 200), H=33, columns=(256, 32)),
]
"""On sm_90 these take wgmma: tiles of 64 and of 32 keys, rows past the last head."""
ALL += [(case, "sm_90") for case in SIXTY_FOUR_ROWS]


@pytest.mark.parametrize("case, arch", ALL, ids=lambda v: str(v))
def test_grid(case: Case, arch: str) -> None:
    x = case.build()
    out, lse = mla_decode_paged(*x.arrays, arch=arch, num_splits=case.splits, return_lse=True, **x.options)
    assert_accurate(x, out, lse)


@pytest.mark.parametrize("case", SIXTY_FOUR_ROWS, ids=str)
def test_many_heads_take_the_tile_of_the_kernel(case: Case) -> None:
    x = case.build()
    config = explain(mla_decode_paged, *x.arrays, arch="sm_90", **x.options).config
    assert (config.BM, config.BN, config.num_warps) == (64, 64 if case.page == 64 else 32, 8)


def test_bytes_of_a_tile_of_64_rows() -> None:
    """Rests on arithmetic: two sequences of 100 and 64 keys; K's rows come once, and V with them. A warpgroup's wgmma
    takes 64 rows of Q and half of the keys of K, twice, and half of V's columns: of 2 tiles, then of 1.
    """
    x = Case((100, 64), H=64, columns=(128, 64), page=64).build()
    traffic = Traffic()
    mla_decode_paged(*x.arrays, arch="sm_90", num_splits=1, traffic=traffic, **x.options)
    row, tiles = 192 * 2, 3
    assert traffic.moved["DRAM->SMEM"] == (164 + 2 * 64) * row
    assert traffic.moved["SMEM->tensor cores"] == tiles * 2 * (2 * (64 + 32) * row + 64 * 64 * 2)
    assert "SMEM->registers" not in traffic.moved


@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_is_written_beside_out_and_repeats_agree(arch: str) -> None:
    """Canaries around ``out``, a view; inputs stay; the same bits again, with other garbage in unused slots and other
    pages (a law: what is not read, and where a page lies, do not matter)."""
    case = Case((150, 0, 2), H=3, S=2, dtype="fp16", splits=2)
    x = case.build()
    before = [bits(a) for a in x.arrays]
    buffer = np.full((4, 3, 6, 256), 7, np.float16)
    out = buffer[1:, :2, 2:5, 16:144]
    out[...] = np.nan
    options = x.options | {"arch": arch, "num_splits": 2}
    assert mla_decode_paged(*x.arrays, out=out, **options) is out
    assert_accurate(x, out)
    first = bits(out)
    assert [bits(a) for a in x.arrays] == before
    x.kv[np.isnan(x.kv)] = 1e4
    assert bits(mla_decode_paged(*x.arrays, **options)) == first
    order = np.random.default_rng(1).permutation(len(x.kv))
    table = np.where((x.table >= 0) & (x.table < len(order)), np.argsort(order)[x.table % len(order)], x.table)
    assert bits(mla_decode_paged(x.q, x.kv[order], table, x.lens, **options)) == first
    out[...] = 7
    assert (buffer == 7).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_dram_is_read_once(arch: str) -> None:
    """Rests on conservation: every byte of a row leaves DRAM once for each tile of query rows, V with it: 20 are two
    of MAX's tiles, one of ours."""
    x, traffic = Case((150, 0, 17), H=20, columns=(512, 64)).build(), Traffic()
    mla_decode_paged(*x.arrays, arch=arch, traffic=traffic, num_splits=1, **x.options)
    from_cache, query = 167 * 576 * 2, 3 * 20 * 576 * 2
    moved = traffic.moved
    if arch == "gfx950":
        assert (moved["DRAM->SMEM"], moved["DRAM->registers"]) == (2 * from_cache, query)
    else:
        assert moved["DRAM->SMEM"] == from_cache + query
    assert moved["registers->DRAM"] == 3 * 20 * (512 * 2 + 4)


@pytest.mark.parametrize("arch", ARCHS[:2])
def test_ldmatrix_has_no_conflict_with_the_swizzle(arch: str) -> None:
    x, traffic = Case((70,), H=16, columns=(512, 64)).build(), Traffic()
    mla_decode_paged(*x.arrays, arch=arch, traffic=traffic, **x.options)
    reads = [role for role in traffic.wavefronts if role.endswith("read")]
    assert {"k read", "v read"} <= set(reads)
    assert all(traffic.wavefronts[role] == traffic.ideal[role] > 0 for role in reads)
    assert traffic.total("unswizzled") > traffic.total("wavefronts")


@pytest.mark.parametrize("arch", ARCHS)
def test_keys_outside_the_window_are_not_read(arch: str) -> None:
    """Known failure window-skips-poisoned-pages; the splits share what is left."""
    x = Case((600,), H=2, S=2, window=128, splits=2).build()
    options = {"arch": arch, "num_splits": 2, **x.options}
    expected = mla_decode_paged(*x.arrays, **options)
    assert_accurate(x, expected)
    before = np.arange(600 - 2 - 127)  # up to the key before the first that a token sees, in the midst of a page
    x.kv[x.table[0, before // 16], before % 16] = np.nan
    assert bits(mla_decode_paged(*x.arrays, **options)) == bits(expected)


def test_batch_invariance() -> None:
    """Rests on the definition: a sequence alone and in a batch gives the same bits; its table fixes the splits."""
    x = Case((600, 20, 4500), H=2, page=64).build()
    options = {"batch_invariant": True, **x.options}
    whole = mla_decode_paged(*x.arrays, **options)
    assert explain(mla_decode_paged, *x.arrays, **options).config.num_splits == 2
    for b in range(3):
        one = mla_decode_paged(x.q[b : b + 1], x.kv, x.table[b : b + 1], x.lens[b : b + 1], **options)
        assert bits(one[0]) == bits(whole[b])


def test_the_scale_of_another_cache_is_refused() -> None:
    """Known failure scale-ignored-for-bf16-cache."""
    x = Case((40, 3), H=2).build()
    with pytest.raises(ValueError, match=r"k_scale is 0\.06 with k of dtype bfloat16: must be left out, or 1"):
        mla_decode_paged(*x.arrays, k_scale=0.06, **x.options)


def test_hnd_and_base2() -> None:
    x = Case((40, 3), H=2, row="rope-aware", k_scale="token").build()
    out, lse = mla_decode_paged(*x.arrays, return_lse=True, **x.options)
    options = x.options | {"k_scale": x.options["k_scale"].swapaxes(1, 2)}
    hnd = mla_decode_paged(x.q, x.kv[:, None], x.table, x.lens, kv_layout="HND", base2=True, return_lse=True, **options)
    assert bits(hnd[0]) == bits(out)
    np.testing.assert_allclose(hnd[1], lse * np.log2(np.e), rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 3])
def test_collection(tokens: int) -> None:
    """A collection of several layers gives what its array form gives; the default scale is that of 128 + 64."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, 3, 70, 1, 576)).astype(np.float32)
    cache = from_dense(rows, None, [70, 5, 33], page_size=16, new_tokens=tokens, shuffle=0)
    q = rng.standard_normal((3, tokens, 4, 576)).astype(np.float32)
    q = q[:, 0] if tokens == 1 else q
    out = mla_decode(q, cache, 1)
    keys = cache.get_key_cache(1)
    arrays = keys.blocks, keys.lookup_table, np.array([70, 5, 33])
    assert bits(out) == bits(mla_decode_paged(q, *arrays, scale=192**-0.5))
    exact = mla_decode_paged(q, *arrays, backend="reference")
    np.testing.assert_allclose(out, exact, atol=1e-5)
    assert "mla_decode: emulator as on sm_90" in str(explain(mla_decode, q, cache, 1))
    none = mla_decode_paged(q[:0], keys.blocks, keys.lookup_table[:0], np.zeros(0, np.int32))
    assert none.shape == (0, *q.shape[1:-1], 512)
