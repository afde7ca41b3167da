"""KV store by slots: reference, emulator and interpreted kernel.

Rests on NumPy's own indexing (copies), on the float64 reference, and on laws: nothing but the slots named changes
(every byte around them is a canary), and the interpreted kernel writes the same bytes as the emulator.
"""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from store_cases import (
    CASTS,
    COPIES,
    ROPED,
    SCALED,
    Inputs,
    Step,
    Store,
    assert_only_slots_changed,
    expected_slots,
    filled,
)
from yardsticks import bits, sparse

from kvlab.attention import Rope, kv_store, kv_store_paged, mla_store_paged
from kvlab.cache import PagedKVCacheCollection
from kvlab.common.arrays import to_torch
from kvlab.memory import bfloat16, float8_e4m3fn
from kvlab.staging import Traffic

ALL = [*COPIES, *CASTS, *SCALED, *ROPED]
OTHERS = [{"backend": "reference"}, {"arch": "gfx950"}]


@pytest.mark.parametrize("backend", [{}, *OTHERS], ids=["emulator", "reference", "gfx950"])
@pytest.mark.parametrize("case", COPIES, ids=str)
def test_copy(case: Store, backend: dict[str, str]) -> None:
    """Bit for bit NumPy's own assignment."""
    x = case.build()
    token, page, slot = expected_slots(x)
    done = x.fresh().run(**backend)
    for cache, source in ((done.k_cache, x.k), (done.v_cache, x.v)):
        assert bits(cache[page, slot]) == bits(source[token])
    assert_only_slots_changed(x, done)


@pytest.mark.parametrize("case", [*CASTS, *SCALED, *ROPED], ids=str)
def test_near_the_reference(case: Store) -> None:
    """Within one rounding of the stored format of what float64 gives."""
    x = case.build()
    done, exact = x.fresh().run(), x.fresh().run(backend="reference")
    assert_only_slots_changed(x, done)
    assert_only_slots_changed(x, exact)
    for array, other in zip(done.written, exact.written, strict=True):
        assert steps_apart(array, other) <= 1
    assert bits(done.k_cache) != bits(x.k_cache)


def steps_apart(one: Any, other: Any) -> int:
    """Most representable numbers between the elements of two arrays; float32 counts steps of 2^-22 of the largest."""
    if one.dtype == np.float32:
        return int(np.abs(one - other).max() > 2.0**-22 * np.abs(other).max())
    order = [np.ascontiguousarray(a).view(f"i{a.itemsize}").astype(np.int64) for a in (one, other)]
    sign = 1 << (8 * one.itemsize - 1)
    a, b = (np.where(i < 0, -sign - i, i) for i in order)
    return int(np.abs(a - b).max())


@pytest.mark.interpreter
@pytest.mark.parametrize("case", ALL, ids=str)
def test_kernel_writes_the_bytes_of_the_emulator(case: Store) -> None:
    """Copies, float32 rope and quantised values alike: every rounding is the same one."""
    x = case.build()
    assert x.fresh().run_torch().bytes() == x.fresh().run().bytes()


@pytest.mark.interpreter
def test_numpy_arrays_may_ask_for_the_kernel() -> None:
    x = COPIES[0].build()
    assert x.fresh().run(backend="triton").bytes() == x.fresh().run().bytes()


def test_k_alone() -> None:
    x = COPIES[3].build()
    both, alone = x.fresh().run(), x.fresh()
    kv_store_paged(alone.k, None, alone.k_cache, None, alone.slots)
    token, page, slot = expected_slots(x)
    assert bits(alone.k_cache[page, slot]) == bits(both.k_cache[page, slot])
    assert bits(alone.v_cache) == bits(x.v_cache)
    assert token.size


@pytest.mark.interpreter
def test_k_alone_in_the_kernel() -> None:
    x = COPIES[3].build()
    one, other = x.fresh(), x.fresh()
    kv_store_paged(one.k, None, one.k_cache, None, one.slots)
    kv_store_paged(*(to_torch(a) if a is not None else None for a in (other.k, None, other.k_cache, None, other.slots)))
    assert one.bytes() == other.bytes()


@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_to_store(tokens: int) -> None:
    """No token; only tokens that are skipped (known failure negative-page-ids)."""
    x = Store(tokens=tokens).build()
    x.slots[...] = [-1, -(2**31), -7][:tokens]
    before = x.bytes()
    for backend in ("emulator", "reference"):
        assert x.run(backend=backend).bytes() == before


@pytest.mark.parametrize("case", [Store(D=(D, D)) for D in (40, 72, 80, 96, 112, 120, 160, 192, 256)], ids=str)
def test_padded_lanes_are_not_stored(case: Store) -> None:
    """Known failure padded-head-lanes-not-stored: nothing outside [.., :D]."""
    x = Store(D=case.D, storage="wide").build()
    assert_only_slots_changed(x, x.fresh().run())


class TestScales:
    """The scale that is written, and the value under it."""

    case = Store(tokens=12, heads=3, D=(128, 64), cache="fp8", scale="own", granularity=64, skip=False, source="fp32")

    def test_scale_is_the_largest_magnitude_over_that_of_the_format(self) -> None:
        x = self.case.build().run()
        token, page, slot = expected_slots(x)
        top = np.abs(x.k[token].reshape(12, 3, 2, 64)).max(-1)
        np.testing.assert_array_equal(x.more["k_scale"][page, slot], top / np.float32(448))
        back = x.k_cache[page, slot].astype(np.float64) * np.repeat(x.more["k_scale"][page, slot], 64, -1)
        step = np.maximum(np.abs(x.k[token]) * 2.0**-4, np.repeat(top, 64, -1) / 448 * 2.0**-10)
        assert (np.abs(back - x.k[token]) <= step * 1.0001).all()

    def test_zeros_tiny_huge_and_infinite_blocks(self) -> None:
        x = self.case.build()
        k = x.k.astype(np.float32)
        k[0], k[1], k[2], k[3, 0, 0] = 0, 1e-38, 3e38, np.inf
        kv_store_paged(k, x.v, x.k_cache, x.v_cache, x.slots, **x.more)
        token, page, slot = expected_slots(x)
        stored, scale = x.k_cache[page, slot].astype(np.float64), x.more["k_scale"][page, slot]
        assert np.isfinite(scale).all()
        assert (scale > 0).all()
        assert (stored[token == 0] == 0).all()
        assert (stored[token == 2] == 448).all()
        assert stored[token == 3][0, 0, 0] == 448
        assert np.isfinite(stored).all()

    def test_nan_stays_nan_and_leaves_the_others_alone(self) -> None:
        x = self.case.build()
        y = x.fresh()
        k = x.k.copy()
        k[0, 0, 0] = np.nan
        y.k = k
        x.run(), y.run()
        _, page, slot = expected_slots(x)
        one, other = x.k_cache[page, slot].astype(np.float32), y.k_cache[page, slot].astype(np.float32)
        assert np.isnan(other).sum() == 1
        assert (one[1:] == other[1:]).all()

    @pytest.mark.parametrize("shape", ["number", "[1]", "[]", "[H]"])
    def test_given_scales_in_every_form(self, shape: str) -> None:
        x = Store(cache="fp8", heads=2).build()
        scale: Any = {"number": 0.25, "[1]": np.float32([0.25]), "[]": np.float32(0.25).reshape(())}.get(shape)
        scale = np.float32([0.25, 0.25]) if scale is None else scale
        done = x.fresh()
        kv_store_paged(x.k, x.v, done.k_cache, done.v_cache, x.slots, k_scale=scale, v_scale=scale)
        token, page, slot = expected_slots(x)
        want = np.clip(x.k[token].astype(np.float32) / 0.25, -448, 448).astype(float8_e4m3fn)
        assert bits(done.k_cache[page, slot]) == bits(want)


def test_saturates_instead_of_overflowing() -> None:
    x = Store(tokens=2, D=(16, 16), source="fp32", cache="fp8", skip=False).build()
    x.k[...] = np.linspace(400, 1e6, x.k.size).reshape(x.k.shape)
    x.run()
    assert x.k_cache[expected_slots(x)[1:]].astype(np.float32).max() == 448


def test_traffic_counts_what_moves() -> None:
    """16 tokens of 8 heads of 128 bf16, K and V: each byte once in, once out."""
    x, traffic = Store(tokens=16, heads=8, D=(128, 128), page=16, skip=False).build(), Traffic()
    x.run(traffic=traffic)
    assert dict(traffic.moved) == {"DRAM->registers": 2 * 16 * 8 * 256, "registers->DRAM": 2 * 16 * 8 * 256}
    assert traffic.instructions["k load"] == traffic.instructions["v_cache store"] == 16 * 8 * 256 // 512


def test_offsets_beyond_32_bits() -> None:
    """Known failure page-offset-int32-first-page: page 7768 of 276480 elements is past 2^31 - 1."""
    pages, page, D = 7769, 480, 576
    pool = sparse((pages, page, 1, D), (page * D, D, D, 1), bfloat16)
    k = np.random.default_rng(0).standard_normal((2, 1, D)).astype(bfloat16)
    slots = np.array([7768 * page + 479, 7767 * page])
    kv_store_paged(k, None, pool, None, slots)
    assert bits(pool[[7768, 7767], [479, 0]]) == bits(k)


@pytest.mark.interpreter
@pytest.mark.slow
def test_offsets_beyond_32_bits_in_the_kernel() -> None:
    """The kernel where it is interpreted: the pool is sparse, so it is made there."""
    from kvlab.triton_support import child

    assert child.run("store_cases:store_in_a_high_page")
    assert child.run("store_cases:store_in_a_far_head")


def test_a_dealt_pool_is_the_same_pool() -> None:
    """Pages permuted together with the slots: the same bytes in the same tokens."""
    x = Store(tokens=20, cache="fp8", scale="own", granularity=16, skip=False).build()
    y: Inputs = x.fresh()
    pages, page = x.k_cache.shape[:2]
    order = np.random.default_rng(5).permutation(pages)
    y.slots = order[x.slots // page] * page + x.slots % page
    x.run(), y.run()
    for a, b in zip(x.written, y.written, strict=True):
        assert bits(a) == bits(b[order])


@pytest.mark.parametrize(
    "scale", [0.06, np.float32([0.06]), np.ones((6, 4, 2, 1), np.float32)], ids=["0.06", "[1]", "own"]
)
def test_scales_of_a_cache_that_is_not_quantised_are_refused(scale: Any) -> None:
    """Known failure scale-ignored-for-bf16-cache."""
    x = Store().build()
    with pytest.raises(ValueError, match="k_scale with a cache of bfloat16: must be left out: it is not fp8"):
        kv_store_paged(x.k, x.v, x.k_cache, x.v_cache, x.slots, k_scale=scale)


BAD = [
    (lambda x: {"slots": x.slots[:-1]}, r"slot_mapping has shape \(8,\): must be \[9\]"),
    (lambda x: {"slots": x.slots.astype(np.int16)}, "slot_mapping has dtype int16|where has dtype int16"),
    (lambda x: {"slots": np.where(np.arange(9) == 4, 24, -1)}, r"slot_mapping\[4\] is 24: must be below 24"),
    (lambda x: {"slots": np.full(9, 2**64 - 1, np.uint64)}, "slot_mapping.0. is 18446744073709551615: must"),
    (lambda x: {"slots": np.where(np.arange(9) < 2, 7, -1)}, "tokens 0 and 1 have the same slot 7"),
    (lambda x: {"k": x.k[:, :1]}, "of as many tokens and heads as k"),
    (lambda x: {"k": x.k[..., :32]}, r"k_cache has shape .*: must be of the 2 heads of 32 that k has"),
    (lambda x: {"k": x.k[..., ::2], "k_cache": x.k_cache[..., :32]}, "k has strides .*contiguous in the last one"),
    (lambda x: {"v_cache": x.v_cache[1:]}, "v_cache has shape .*of as many pages as k_cache"),
    (lambda x: {"k_cache": x.k_cache.view(np.uint16)}, "k_cache has dtype uint16"),
    (lambda x: {"k": x.k.view(np.int16)}, "k has dtype int16"),
    (lambda x: {"k": x.k.tolist()}, "k is a list"),
    (lambda x: {"v_cache": np.broadcast_to(x.v_cache[:1], x.v_cache.shape)}, "without elements that share memory"),
    (lambda x: {"k_cache": windows(x.k_cache)}, "k_cache has strides .*without elements that share memory"),
    (lambda x: {"k_cache": None}, "k_cache is a NoneType: must be a NumPy array"),
    (lambda x: {"slots": None}, "slot_mapping is a NoneType: must be a NumPy array"),
    (lambda x: {"rope": (1, 2)}, r"rope is a tuple: must be a kvlab\.attention\.Rope"),
    (lambda x: {"positions": [0, 1]}, "positions is a list: must be a NumPy array"),
    (lambda x: {"k_granularity": 32}, "k_granularity 32: must be left out, unless k_scale is computed"),
]


def windows(cache: Any) -> Any:
    """Pages that begin in the middle of the page before them."""
    page, *others = cache.strides
    return np.lib.stride_tricks.as_strided(cache, cache.shape, (page // 2, *others))


@pytest.mark.parametrize("change, message", BAD, ids=[message[:24] for _, message in BAD])
def test_bad_arguments_write_nothing(change: Any, message: str) -> None:
    x = Store().build()
    before = x.bytes()
    arguments = {"k": x.k, "v": x.v, "k_cache": x.k_cache, "v_cache": x.v_cache, "slots": x.slots} | change(x)
    positional = [arguments.pop(name) for name in ("k", "v", "k_cache", "v_cache", "slots")]
    with pytest.raises(ValueError, match=message):
        kv_store_paged(*positional, **arguments)
    assert x.bytes() == before


@pytest.mark.parametrize("scale", [[0.0], [-1.0], [np.nan], [np.inf], [1.0, 0.0], [1e-40]])
def test_given_scales_are_positive(scale: list[float]) -> None:
    """What is stored is multiplied by 1 / scale: anything else would be stored as NaN, infinity or another sign."""
    x = Store(cache="fp8").build()
    before = x.bytes()
    with pytest.raises(ValueError, match=rf"v_scale\[{len(scale) - 1}\] is .*: must be positive and finite"):
        kv_store_paged(x.k, x.v, x.k_cache, x.v_cache, x.slots, v_scale=np.float32(scale))
    assert x.bytes() == before


@pytest.mark.parametrize("scale", [1e-40, 1e39])
def test_a_number_that_float32_cannot_divide_by(scale: float) -> None:
    """As above: 1 / scale would be infinity, or 0."""
    x = Store(cache="fp8").build()
    before = x.bytes()
    with pytest.raises(ValueError, match=rf"v_scale is {re.escape(str(scale))}: must be positive and finite, a normal"):
        kv_store_paged(x.k, x.v, x.k_cache, x.v_cache, x.slots, v_scale=scale)
    assert x.bytes() == before


def test_granularity_that_is_no_number_of_dims() -> None:
    x = Store(cache="fp8", scale="own", granularity=16).build()
    for wrong in (0, -16, 1.5, "16"):
        x.more["k_granularity"] = wrong
        with pytest.raises(ValueError, match=f"k_granularity is '?{wrong}'?: must be"):
            x.run()


def test_more_rows_than_are_counted_in_32_bits() -> None:
    """Views without memory of their own: nothing is looked at before the sizes."""
    k = np.broadcast_to(np.zeros((1, 1, 8), np.float32), (2**31, 1, 8))
    cache, slots = np.zeros((1, 4, 1, 8), np.float32), np.broadcast_to(np.int64(-1), (2**31,))
    with pytest.raises(ValueError, match="2147483648 rows: must be fewer than"):
        kv_store_paged(k, None, cache, None, slots)


def test_read_only_cache_and_gradients() -> None:
    import torch

    x = Store().build()
    x.k_cache.flags.writeable = False
    with pytest.raises(ValueError, match="k_cache is read-only"):
        x.run()
    k = torch.zeros(1, 1, 8, requires_grad=True)
    cache = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match="k requires grad"):
        kv_store_paged(k, None, cache, None, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="one library on one device"):
        kv_store_paged(k.detach(), None, cache, None, np.zeros(1, np.int64))


@pytest.mark.parametrize("poison", [0xFFFF, 0x7F80], ids=["nan", "inf"])
@pytest.mark.parametrize("paged", [True, False], ids=["dealt-anew", "continuous"])
def test_what_is_stored_is_what_decode_reads(paged: bool, poison: int) -> None:
    """Pages dealt otherwise, or no pages at all; every unused slot NaN or infinite, unused table entries huge: no bit
    changes."""
    from kvlab.attention import mha_decode

    outputs = []
    for seed, kind in ((0, "paged"), (7, "paged" if paged else "continuous")):
        steps = [Step((0, 0), (6, 0), D=64), Step((6, 0), (3, 5), D=64), Step((9, 5), (1, 1), D=64)]
        cache: Any = None
        for number, step in enumerate(steps):
            if cache is None:
                last = Step((0, 0), (10, 6), D=64, seed=seed)
                cache = getattr(last, kind)()
                cache.blocks.view(np.uint16)[...] = poison
                if kind == "paged":
                    cache.lookup_table[cache.lookup_table == cache.total_num_pages] = 2147480000
            cache = cache.with_lengths(np.array(step.before), max(step.new))
            step.run(cache, 1)
            assert number < 3
        q = np.random.default_rng(1).standard_normal((2, 4, 64)).astype(bfloat16)
        outputs.append(mha_decode(q, cache if kind == "paged" else cache.paged(), 1))
    assert np.isfinite(outputs[0].astype(np.float32)).all()
    assert bits(outputs[0]) == bits(outputs[1])


def test_traffic_that_counts_nothing() -> None:
    x = Store().build()
    before = x.bytes()
    with pytest.raises(ValueError, match=r"traffic is 3: must be a kvlab\.staging\.Traffic or None"):
        kv_store_paged(x.k, x.v, x.k_cache, x.v_cache, x.slots, traffic=3)  # type: ignore[arg-type]
    assert x.bytes() == before


def test_caches_that_share_memory() -> None:
    x = Store().build()
    with pytest.raises(ValueError, match="k_cache shares memory with v_cache"):
        kv_store_paged(x.k, x.v, x.k_cache, x.k_cache, x.slots)


@pytest.mark.parametrize("backend", ["reference", "emulator", pytest.param("triton", marks=pytest.mark.interpreter)])
def test_a_token_without_an_angle_is_not_rotated(backend: str) -> None:
    """Law: nothing before the first angle or past the last is read; unchecked, such a key is stored as it is."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, 1, 16)).astype(np.float32)
    cos, sin = rng.standard_normal((2, 4, 8)).astype(np.float32)
    k_cache, v_cache = np.zeros((2, 1, 4, 1, 16), np.float32)
    kv_store_paged(
        k, v, k_cache, v_cache, np.arange(3), rope=Rope(cos, sin), positions=np.array([1, -1, 4]), backend=backend,
        check=False,
    )
    assert [np.array_equal(k_cache[0, t], k[t]) for t in range(3)] == [False, True, True]


@pytest.mark.parametrize("backend", ["reference", "emulator", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("scale", [None, "heads", "own"])
def test_hnd_is_nhd_with_two_axes_swapped(scale: str | None, backend: str) -> None:
    """Law: the same bytes at the same places, whichever layout names the axes."""
    x = Store(source="fp32", cache="fp8" if scale else "fp32", scale=scale, heads=3, storage="wide", rope=64).build()
    one, other = x.fresh(), x.fresh()
    one.run(backend=backend)
    more = {n: a.swapaxes(1, 2) if np.ndim(a) == 4 else a for n, a in other.more.items()}
    caches = other.k_cache.swapaxes(1, 2), other.v_cache.swapaxes(1, 2)
    kv_store_paged(other.k, other.v, *caches, other.slots, **more, kv_layout="HND", backend=backend)
    assert one.bytes() == other.bytes()
    with pytest.raises(ValueError, match="kv_layout is 'HDN': must be 'NHD' or 'HND'"):
        kv_store_paged(other.k, other.v, *caches, other.slots, **more, kv_layout="HDN", backend=backend)


@pytest.mark.parametrize("axes", [3, 4])
def test_mla_rows_in_hnd(axes: int) -> None:
    latent, k_rope = np.ones((1, 128), np.float32), np.full((1, 32), 3.0, np.float32)
    one, other = np.zeros((2, 4, 1, 160), np.float32), np.zeros((2, 4, 1, 160), np.float32)
    mla_store_paged(latent, k_rope, one, np.array([6]))
    swapped = other.swapaxes(1, 2) if axes == 4 else other[:, :, 0]
    mla_store_paged(latent, k_rope, swapped, np.array([6]), kv_layout="HND")
    assert one.any()
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_part_of_a_head_is_turned_where_first_says(interleaved: bool) -> None:
    """flash-attention turns the first dims, MAX the last: neither is taken for granted. Rests on the formula."""
    rng = np.random.default_rng(0)
    k, angle = rng.standard_normal((3, 1, 16)).astype(np.float32), rng.uniform(0, 6, (4, 4))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    cache = np.zeros((1, 4, 1, 16), np.float32)
    at = {"positions": np.arange(3), "backend": "reference"}
    with pytest.raises(ValueError, match=r"rope of 8 of a head's 16 dims without first: must be .*first=0 .*first=8 "):
        kv_store_paged(k, None, cache, None, np.arange(3), rope=Rope(cos, sin, interleaved), **at)
    assert not cache.any()
    for first in (0, 8, 4):
        kv_store_paged(k, None, cache, None, np.arange(3), rope=Rope(cos, sin, interleaved, first), **at)
        pairs = k[:, 0, first : first + 8].astype(np.float64)
        x, y = (pairs[:, 0::2], pairs[:, 1::2]) if interleaved else (pairs[:, :4], pairs[:, 4:])
        got = cache[0, :3, 0, first : first + 8]
        u, v = (got[:, 0::2], got[:, 1::2]) if interleaved else (got[:, :4], got[:, 4:])
        np.testing.assert_allclose(u, x * cos[:3] - y * sin[:3], atol=1e-6)
        np.testing.assert_allclose(v, y * cos[:3] + x * sin[:3], atol=1e-6)
        others = np.delete(np.arange(16), np.arange(first, first + 8))
        np.testing.assert_array_equal(cache[0, :3, 0, others], k[:, 0, others].T)


def test_rope_is_made_of_tables() -> None:
    table = np.zeros((4, 8), np.float32)
    for cos, sin, message in (("x", table, "cos is a str"), (table, table[0], r"sin has shape \(8,\): must be \[pos")):
        with pytest.raises(ValueError, match=message):
            Rope(cos, sin)


TWINS = pytest.mark.parametrize("backend", ["emulator", pytest.param("triton", marks=pytest.mark.interpreter)])


@TWINS
@pytest.mark.parametrize("form", ["ragged", "padded"])
def test_tokens_without_a_place_go_nowhere_unchecked(form: str, backend: str) -> None:
    """Law: with ``check=False`` a token is dropped that lies before key 0, past the row of the table, on no page,
    before the first sequence or past the last one. The next row of the table, and what index -1 is, name real pages.
    Lengths become what they are when the call is checked, as those on a GPU may.
    """
    rng, H, D, page = np.random.default_rng(0), 2, 16, 4
    blocks = filled((6, 2, 1, page, H, D), "fp32")
    before = np.array([-7, 0, 1, 6, 0], np.int32)
    table = np.array([[0, 1], [-1, 4], [6, 5], [2, 3], [1, 0], [1, 0]], np.int32)[:5]  # a row behind, too
    new = (5, 5, 5, 5, 0)
    lengths = np.zeros(6, np.int32)[:5]
    cache = PagedKVCacheCollection(blocks, lengths, table, 5, 11, strict=False)
    #: the tokens that have a place: (sequence, number of it, page, slot)
    placed = [(1, 4, 4, 0), (2, 3, 5, 0), (2, 4, 5, 1), (3, 0, 3, 2), (3, 1, 3, 3)]
    if form == "padded":
        k, v = rng.standard_normal((2, 5, 5, H, D)).astype(np.float32)
        where: dict[str, Any] = {"valid_lengths": np.array(new, np.int32)}
        token = {(b, i): (b, i) for b in range(5) for i in range(5)}
    else:
        k, v = rng.standard_normal((2, 25, H, D)).astype(np.float32)
        where = {"cu_seqlens": np.cumsum([3, *new]).astype(np.int32)}
        before[0] = 3  # tokens before the first sequence would be its keys 0 to 2
        table[0] = [0, 6]
        token = {(b, i): 3 + 5 * b + i for b in range(4) for i in range(5)}
        placed.append((0, 0, 0, 3))
    expected = blocks.copy()
    for b, i, p, slot in placed:
        expected[p, 0, 0, slot], expected[p, 1, 0, slot] = k[token[b, i]], v[token[b, i]]
    call = kv_store.planned(k, v, cache, **where, backend=backend, arch="sm_90", check=False)
    lengths[...] = before
    call.launch()
    assert bits(blocks) == bits(expected)


@TWINS
def test_slots_past_the_pages_and_before_them_are_skipped_unchecked(backend: str) -> None:
    """Law: a slot that no page has is skipped; memory behind the cache and before it has canaries."""
    whole = filled((6, 4, 1, 16), "fp32")
    k = np.random.default_rng(0).standard_normal((5, 1, 16)).astype(np.float32)
    expected = whole.copy()
    expected[2 + 1, 1] = k[1]
    expected[2 + 0, 0] = k[3]
    kv_store_paged(k, None, whole[2:4], None, np.array([8, 5, -1, 0, -5]), backend=backend, check=False)
    assert bits(whole) == bits(expected)


@TWINS
def test_positions_without_an_angle_leave_a_row_as_it_is_unchecked(backend: str) -> None:
    """Law: with ``check=False`` such a token is stored as it is; angles around those of the positions are NaN."""
    x = Store(tokens=5, heads=1, source="fp32", cache="fp32", skip=False).build()
    angles = np.full((2, 6, 32), np.nan, np.float32)
    angles[0, 1:5], angles[1, 1:5] = 0.0, 1.0
    rope = Rope(angles[0, 1:5], angles[1, 1:5], first=0)
    positions = np.array([-1, 0, 3, 4, 99])
    turned: dict[str, Any] = {"rope": rope, "positions": positions, "backend": backend, "check": False}
    kv_store_paged(x.k, x.v, x.k_cache, x.v_cache, x.slots, **turned)
    token, page, slot = expected_slots(x)
    want = x.k.copy()
    want[1:3, :, :32], want[1:3, :, 32:] = -x.k[1:3, :, 32:], x.k[1:3, :, :32]
    assert bits(x.k_cache[page, slot]) == bits(want[token])


@TWINS
@pytest.mark.parametrize("cache", ["fp8", "float8_e5m2"])
def test_an_infinity_beside_a_computed_scale_saturates(cache: str, backend: str) -> None:
    """Law: the scale of a block is finite whatever is in it, an infinity becomes the largest number of the format."""
    x = Store(tokens=3, D=(32, 32), heads=1, source="fp32", cache=cache, scale="own", skip=False).build()
    x.k[0, 0, 5], x.v[2, 0, 7] = np.inf, -np.inf
    x.run(backend=backend)
    token, page, slot = expected_slots(x)
    most = float(ml_dtypes.finfo(x.k_cache.dtype).max)
    assert np.isfinite(x.more["k_scale"][page, slot]).all()
    assert np.isfinite(x.more["v_scale"][page, slot]).all()
    assert x.k_cache[page, slot].astype(np.float32)[token == 0, 0, 5] == most
    assert x.v_cache[page, slot].astype(np.float32)[token == 2, 0, 7] == -most
