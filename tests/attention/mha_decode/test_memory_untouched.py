"""What decode reads and writes: the keys in use and the output. Rests on laws: other bytes change nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from decode_cases import Case, spread_out
from yardsticks import HUGE, assert_accurate, bits, sparse

from kvlab.attention import mha_decode, mha_decode_paged
from kvlab.attention.machines import ARCHS
from kvlab.cache import from_dense
from kvlab.memory import bfloat16

BACKENDS = [{"arch": arch} for arch in ARCHS] + [{"backend": "reference"}]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: next(iter(b.values())))
CASE = Case((150, 0, 17, 2), heads=(6, 2), D=64, S=2, splits=2)


@every_backend
def test_repeats_agree_bit_for_bit_and_inputs_stay(backend: dict[str, str]) -> None:
    x = CASE.build()
    before = [bits(a) for a in x.arrays]
    runs = [mha_decode_paged(*x.arrays, num_splits=2, return_lse=True, **backend) for _ in range(2)]
    assert [bits(a) for a in x.arrays] == before
    assert bits(runs[0][0]) == bits(runs[1][0])
    assert bits(runs[0][1]) == bits(runs[1][1])


@every_backend
def test_garbage_in_unused_slots_changes_no_bit(backend: dict[str, str]) -> None:
    x = CASE.build()
    expected = mha_decode_paged(*x.arrays, num_splits=2, **backend)
    rng = np.random.default_rng(1)
    for cache in (x.k, x.v):
        unused = np.isnan(cache.astype(np.float32))
        assert unused.any()
        cache[unused] = (1e30 * rng.standard_normal(unused.sum())).astype(cache.dtype)
    x.table[(x.table < 0) | (x.table == HUGE)] = rng.integers(-(2**31), 2**31, 1)
    assert bits(mha_decode_paged(*x.arrays, num_splits=2, **backend)) == bits(expected)


@every_backend
def test_pages_dealt_differently_give_the_same_bits(backend: dict[str, str]) -> None:
    x = CASE.build()
    expected = mha_decode_paged(*x.arrays, num_splits=2, **backend)
    order = np.random.default_rng(2).permutation(len(x.k))
    table = x.table.copy()
    used = (table >= 0) & (table < len(x.k))
    table[used] = np.argsort(order)[table[used]]
    moved = x.with_(k=x.k[order], v=x.v[order], table=table)
    assert bits(mha_decode_paged(*moved.arrays, num_splits=2, **backend)) == bits(expected)


@every_backend
@pytest.mark.parametrize("storage", ["halves", "hnd", "wide", "head-major"])
def test_strides_give_the_same_bits(backend: dict[str, str], storage: str) -> None:
    """Known failure kv-halves-of-one-buffer: the same as contiguous copies."""
    x = Case(CASE.lens, CASE.heads, CASE.D, S=2, storage=storage).build()
    wide = np.full((*x.q.shape[:2], 8, 128), np.nan, x.q.dtype)
    wide[:, :, 1:7, 32:96] = x.q
    strided = x.with_(q=wide[:, :, 1:7, 32:96])
    packed = x.with_(k=x.k.copy(), v=x.v.copy())
    assert not x.k.flags.c_contiguous
    assert bits(mha_decode_paged(*strided.arrays, **backend)) == bits(mha_decode_paged(*packed.arrays, **backend))


@every_backend
@pytest.mark.parametrize("splits", [1, 3])
def test_nothing_is_written_beside_out(backend: dict[str, str], splits: int) -> None:
    x = CASE.build()
    buffer = np.full((5, 4, 8, 128), 7, bfloat16)
    out = buffer[1:, 1:3, 1:7, 32:96]
    out[...] = np.nan
    assert mha_decode_paged(*x.arrays, out=out, num_splits=splits, **backend) is out
    assert_accurate(x, out)
    out[...] = 7
    assert (buffer == 7).all()


@every_backend
def test_out_may_be_q(backend: dict[str, str]) -> None:
    x = CASE.build()
    expected = bits(mha_decode_paged(*x.arrays, num_splits=2, **backend))
    assert bits(mha_decode_paged(*x.arrays, out=x.q, num_splits=2, **backend)) == expected


@every_backend
def test_without_the_token_axis(backend: dict[str, str]) -> None:
    x = Case((33, 0), heads=(4, 2)).build()
    out, lse = mha_decode_paged(*x.arrays, return_lse=True, **backend)
    short, short_lse = mha_decode_paged(x.q[:, 0], *x.arrays[1:], return_lse=True, **backend)
    assert (out.shape, lse.shape, short.shape, short_lse.shape) == ((2, 1, 4, 64), (2, 1, 4), (2, 4, 64), (2, 4))
    assert bits(out) + bits(lse) == bits(short) + bits(short_lse)
    own = np.empty((2, 4, 64), x.q.dtype)
    assert mha_decode_paged(x.q[:, 0], *x.arrays[1:], out=own, **backend) is own
    assert bits(own) == bits(out)


@every_backend
def test_read_only_inputs(backend: dict[str, str]) -> None:
    x = CASE.build()
    for array in x.arrays:
        array.flags.writeable = False
    assert_accurate(x, mha_decode_paged(*x.arrays, num_splits=2, **backend))


@pytest.mark.interpreter
def test_cache_in_a_file_that_may_not_be_written(tmp_path: Path) -> None:
    """A memory map for reading only: a write, even of the same bytes, would end the process."""
    x = Case((20,), heads=(2, 1), D=16, dtype="fp32").build()
    for name in ("k", "v"):
        np.save(tmp_path / f"{name}.npy", getattr(x, name))
    mapped = x.with_(**{name: np.load(tmp_path / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in ("k", "v")})
    for backend in ("emulator", "triton"):
        assert_accurate(x, mha_decode_paged(*mapped.arrays, backend=backend))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=["no sequence", "no column"])
@every_backend
def test_nothing_to_do(backend: dict[str, str], shape: tuple[int, int]) -> None:
    """An empty batch; sequences without a page."""
    batch, columns = shape
    kv = np.full((1, 16, 2, 64), np.nan, np.float32)
    q, table, lens = (
        np.ones((batch, 4, 64), np.float32),
        np.zeros((batch, columns), np.int32),
        np.zeros(batch, np.int32),
    )
    out, lse = mha_decode_paged(q, kv, kv, table, lens, return_lse=True, num_splits=2, **backend)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert np.isneginf(lse).all()
    assert lse.shape == (batch, 4)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("axis", ["page", "slot", "head"])
def test_offsets_beyond_32_bits(axis: str, arch: str) -> None:
    """K, V, q and out each span more than 2^31 elements of memory, almost none of it real."""
    x = Case((35, 33), heads=(3, 3), D=64, page=16, S=2).build()
    far, out = spread_out(x, axis)
    mha_decode_paged(*far.arrays, out=out, arch=arch, num_splits=2)
    assert bits(out) == bits(mha_decode_paged(*x.arrays, arch=arch, num_splits=2))


def test_page_offset_of_the_first_page_past_32_bits() -> None:
    """Rests on arithmetic (known failure page-offset-int32-first-page): 7768 * 276480 > 2^31 - 1."""
    page, depth, stride = 480, 256, 276480
    pool = sparse((7769, page, 1, 576), (stride, 576, 576, 1), bfloat16)[..., :depth]
    rng = np.random.default_rng(0)
    pool[7767:] = rng.standard_normal((2, page, 1, depth)).astype(bfloat16)
    q = rng.standard_normal((1, 4, depth)).astype(bfloat16)
    far = mha_decode_paged(q, pool, pool, np.array([[7768, 7767]]), np.array([900]))
    near = mha_decode_paged(q, pool[7767:], pool[7767:], np.array([[1, 0]]), np.array([900]))
    assert bits(far) == bits(near)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_collection(library: str) -> None:
    """The form over a collection equals the form over arrays: layer, table and lengths are the collection's."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, 2, 70, 2, 64)).astype(bfloat16)  # [K and V, layers, B, tokens, heads, D]
    cache = from_dense(k, v, [70, 2], page_size=16, new_tokens=2, shuffle=0, spare_pages=1)
    q = rng.standard_normal((2, 2, 4, 64)).astype(bfloat16)
    layer, keys, values = 2, cache.get_key_cache(2), cache.get_value_cache(2)
    expected = mha_decode_paged(q, keys.blocks, values.blocks, cache.lookup_table, np.array([70, 2]))
    if library == "numpy":
        assert bits(mha_decode(q, cache, layer)) == bits(expected)
    else:
        from kvlab.common.arrays import to_torch

        assert bits(mha_decode(to_torch(q), cache.torch(), layer, backend="emulator")) == bits(expected)


def test_infinite_mask_value_is_like_the_default() -> None:
    """No infinity is subtracted from an infinity in a row that sees a key."""
    x = Case((150, 0, 2, 1), heads=(4, 2), S=4, dtype="fp32").build()
    with np.errstate(invalid="ignore"):
        out = mha_decode_paged(*x.arrays, mask_value=-np.inf, num_splits=3)
    assert bits(out) == bits(mha_decode_paged(*x.arrays, num_splits=3))
