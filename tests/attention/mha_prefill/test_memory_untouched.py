"""What prefill reads and writes: the keys in use and the output. Rests on laws: other bytes change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from prefill_cases import Case
from yardsticks import HUGE, assert_accurate, bits

from kvlab.attention.machines import ARCHS
from kvlab.attention.masks import CausalPaddingMask, ChunkedCausalMask, ChunkedMask, SlidingWindowCausalMask
from kvlab.attention.mha_prefill import mha_prefill
from kvlab.memory import bfloat16
from kvlab.staging import Traffic

BACKENDS = [{"arch": arch} for arch in ARCHS] + [{"backend": "reference"}]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: next(iter(b.values())))
CASE = Case(((130, 150), (0, 9), (5, 3), (20, 200)), form="paged", heads=(3, 1))


@every_backend
def test_repeats_agree_bit_for_bit_and_inputs_stay(backend: dict[str, Any]) -> None:
    x = CASE.build()
    arrays = x.q, x.k, x.v, x.cu_q, x.table, x.seq_lens
    before = [bits(a) for a in arrays]
    runs = [x.call(return_lse=True, **backend) for _ in range(2)]
    assert [bits(a) for a in arrays] == before
    assert bits(runs[0][0]) == bits(runs[1][0])
    assert bits(runs[0][1]) == bits(runs[1][1])


@every_backend
def test_garbage_in_unused_slots_changes_no_bit(backend: dict[str, Any]) -> None:
    x = CASE.build()
    expected = bits(x.call(**backend))
    rng = np.random.default_rng(1)
    for cache in (x.k, x.v):
        unused = np.isnan(cache.astype(np.float32))
        assert unused.any()
        cache[unused] = (1e30 * rng.standard_normal(unused.sum())).astype(cache.dtype)
    x.table[(x.table < 0) | (x.table == HUGE)] = -123456789
    assert bits(x.call(**backend)) == expected


@every_backend
def test_pages_dealt_differently_give_the_same_bits(backend: dict[str, Any]) -> None:
    x = CASE.build()
    order = np.random.default_rng(2).permutation(len(x.k))
    table = x.table.copy()
    used = (table >= 0) & (table < len(x.k))
    table[used] = np.argsort(order)[table[used]]
    moved = x.with_(k=x.k[order], v=x.v[order], table=table)
    assert bits(moved.call(**backend)) == bits(x.call(**backend))


@every_backend
def test_strides_give_the_same_bits(backend: dict[str, Any]) -> None:
    """Known failure kv-halves-of-one-buffer: the same as contiguous copies."""
    for form in ("dense", "paged"):
        x = Case(((140, 150),), form=form, strided=True).build()
        packed = x.with_(q=x.q.copy(), k=x.k.copy(), v=x.v.copy())
        assert not x.k.flags.c_contiguous
        assert bits(x.call(**backend)) == bits(packed.call(**backend))


@every_backend
def test_nothing_is_written_beside_out(backend: dict[str, Any]) -> None:
    x = CASE.build()
    buffer = np.full((len(x.q) + 2, 5, 128), 7, bfloat16)
    out = buffer[1:-1, 1:4, 32:96]
    out[...] = np.nan
    assert x.call(out=out, **backend) is out
    assert_accurate(x, out)
    out[...] = 7
    assert (buffer == 7).all()


@pytest.mark.interpreter
def test_the_kernel_writes_nothing_beside_out_and_repeats() -> None:
    import torch

    x = Case(((20, 30), (0, 9), (5, 3)), form="paged", heads=(3, 1), D=80).build()
    buffer = torch.full((len(x.q) + 2, 5, 128), 7, dtype=torch.bfloat16)
    out = buffer[1:-1, 1:4, 16:96]
    assert x.call(device="cpu", out=out) is out
    assert_accurate(x, out)
    assert bits(out) == bits(x.call(device="cpu"))
    out[...] = 7
    assert bool((buffer == 7).all())


every_arch = pytest.mark.parametrize("arch", ARCHS)


@every_arch
def test_keys_outside_the_window_are_not_read(arch: str) -> None:
    """Known failure window-skips-poisoned-pages: they hold NaN."""
    x = Case(((4, 1024),), form="paged", heads=(2, 1), window=128).build()
    expected = x.call(arch=arch)
    assert_accurate(x, expected)
    x.poison_before_window()
    assert bits(x.call(arch=arch)) == bits(expected)


@pytest.mark.interpreter
def test_keys_outside_the_window_are_not_read_by_the_kernel() -> None:
    x = Case(((4, 300),), form="paged", heads=(2, 1), window=128).build()
    expected = bits(x.call(device="cpu"))
    x.poison_before_window()
    assert bits(x.call(device="cpu")) == expected


@every_arch
@pytest.mark.parametrize(
    "mask, seen",
    [
        (ChunkedMask(50), slice(100, 150)),
        (ChunkedCausalMask(50), slice(100, 120)),
        (CausalPaddingMask(np.array([110])), slice(0, 110)),
        (SlidingWindowCausalMask(10), slice(101, 120)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_keys_that_a_mask_hides_from_all_rows_are_not_read(mask: Any, seen: slice, arch: str) -> None:
    """Queries 110 ... 119 of 150 or 120 keys."""
    n = 150 if seen.stop == 150 else 120
    x = Case(((n - 110, n),), heads=(2, 1)).build()
    x = x.with_(q=x.q[:, :10] if n == 120 else x.q)
    expected = x.call(arch=arch, mask=mask, causal=None, return_lse=True)
    for a in (x.k, x.v):
        a[:, : seen.start], a[:, seen.stop :] = np.nan, np.nan
    again = x.call(arch=arch, mask=mask, causal=None, return_lse=True)
    assert [bits(a) for a in again] == [bits(a) for a in expected]
    assert np.isfinite(np.asarray(again[0], np.float32)).all()


@every_arch
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(arch: str) -> None:
    """Rests on the promise of batch_invariant; its neighbours are long enough that heads are packed without it."""
    x = Case(((20, 90), (130, 200), (1, 40)), heads=(3, 1), form="paged").build()
    together, lse = x.call(arch=arch, batch_invariant=True, return_lse=True)
    for b in range(3):
        rows = slice(int(x.cu_q[b]), int(x.cu_q[b + 1]))
        one = x.with_(
            q=x.q[rows], cu_q=x.cu_q[b : b + 2] - x.cu_q[b], table=x.table[b : b + 1], seq_lens=x.seq_lens[b : b + 1]
        )
        alone, its = one.call(arch=arch, batch_invariant=True, return_lse=True)
        assert bits(alone) == bits(together[rows])
        assert bits(its) == bits(lse[rows])
        assert one.explain(arch=arch, batch_invariant=True).config.pack == 1


@every_arch
def test_tiles_after_the_diagonal_are_not_read(arch: str) -> None:
    """Rests on the definition of causal: with as many queries as keys, the first tile of rows needs the first keys."""
    x = Case(((256, 256),), heads=(1, 1)).build()
    expected = x.call(arch=arch)
    x.k[:, 128:], x.v[:, 128:] = np.nan, np.nan
    with np.errstate(all="ignore"):
        out = x.call(arch=arch)
    assert bits(out[:, :128]) == bits(expected[:, :128])


@every_arch
def test_bytes_of_causal_tiles(arch: str) -> None:
    """Rests on arithmetic: rows 0..127 meet 128 keys, rows 128..255 meet 256; K and V, 64 columns of 2 bytes."""
    q, kv = np.zeros((1, 256, 1, 64), bfloat16), np.zeros((1, 256, 1, 64), bfloat16)
    traffic = Traffic()
    mha_prefill(q, kv, kv, arch=arch, traffic=traffic)
    moved = 2 * (128 + 256) * 64 * 2
    assert traffic.moved["DRAM->SMEM"] == moved + (q.nbytes if arch.startswith("sm_") else 0)
    assert traffic.moved["registers->DRAM"] == q.nbytes + 256 * 4


def test_scales_of_tokens_count_once_and_unused_ones_are_not_read() -> None:
    """Rests on a law: stored values times a power of two, scales divided by it, give the same scores."""
    x = Case(((30, 90), (9, 20)), form="paged", kv="fp8", scales="token").build()
    expected = x.call(return_lse=True)
    assert np.isnan(x.k_scale).any()
    half = x.with_(k=(x.k.astype(np.float32) / 2).astype(x.k.dtype), k_scale=2 * x.k_scale)
    _, lse = half.call(return_lse=True)
    np.testing.assert_allclose(lse, expected[1], rtol=2e-2, atol=2e-2)
    with_tail = x.with_(k_scale=np.where(np.isnan(x.k_scale), 1e30, x.k_scale).astype(np.float32))
    assert bits(with_tail.call()) == bits(expected[0])
