"""What prefill reads and writes: the keys in use and the output. Rests on laws: other bytes change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from prefill_cases import Case
from yardsticks import HUGE, assert_accurate, bits

from kvlab.attention.mha_prefill import mha_prefill
from kvlab.attention.mha_prefill.machine import PREFILL_ARCHS
from kvlab.memory import bfloat16
from kvlab.staging import Traffic

BACKENDS = [{"arch": arch} for arch in PREFILL_ARCHS] + [{"backend": "reference"}]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: next(iter(b.values())))
CASE = Case(((130, 150), (0, 9), (5, 3), (20, 200)), form="paged", heads=(3, 1))


@every_backend
def test_repeats_agree_bit_for_bit_and_inputs_stay(backend: dict[str, Any]) -> None:
    x = CASE.build()
    arrays = [a for a in x.launch_form() if a is not None]
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


every_arch = pytest.mark.parametrize("arch", PREFILL_ARCHS)


@every_arch
def test_keys_outside_the_window_are_not_read(arch: str) -> None:
    """Known failure window-skips-poisoned-pages: they hold NaN."""
    x = Case(((4, 1024),), form="paged", heads=(2, 1), window=128).build()
    expected = x.call(arch=arch)
    assert_accurate(x, expected)
    first = (1024 - 4 - 127) // 64 * 64  # of the tile of the first key that the first query sees
    for cache in (x.k, x.v):
        cache[x.table[0, : first // 16]] = np.nan
    assert bits(x.call(arch=arch)) == bits(expected)


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
    assert traffic.moved["DRAM->SMEM"] == moved + (q.nbytes if arch == "sm_90" else 0)
    assert traffic.moved["registers->DRAM"] == q.nbytes + 256 * 4
