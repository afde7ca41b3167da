"""Infinities and NaN have one meaning in the reference, the emulator and the kernel: a computed scale comes from the
finite values of its block, which survive; NaN stays NaN, and an infinity becomes the end of the format.

Rests on that meaning, written out in float64 beside this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from special_values import LIMITS, SPECIAL, assert_special, scales_of, special_rows
from store_cases import CANARY, Inputs, Step, Store, assert_only_slots_changed, expected_slots
from yardsticks import bits

from kvlab.attention import kv_store, mla_store_paged
from kvlab.cache import PagedKVCacheCollection
from kvlab.memory import bfloat16, float8_e4m3fn

BACKENDS = [
    "reference", "emulator", pytest.param("triton", marks=pytest.mark.interpreter)
]


def built(case: Store) -> Inputs:
    x = case.build()
    x.k, x.v = x.k.copy(), x.v.copy()
    special_rows(x.k)
    special_rows(x.v[::-1])
    return x


def given_scale(case: Store, x: Inputs, side: str) -> np.ndarray[Any, Any]:
    scale = np.asarray(x.more.get(f"{side}_scale", 1.0), np.float32)
    return np.broadcast_to(scale, case.heads)[None, :, None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SPECIAL, ids=str)
def test_by_slots(case: Store, backend: str) -> None:
    before = built(case)
    x = before.fresh().run(backend=backend)
    token, page, slot = expected_slots(x)
    for side, source, cache in (("k", x.k, x.k_cache), ("v", x.v, x.v_cache)):
        rows, limit = source[token], LIMITS[case.cache]
        if case.scale != "own":
            scale = given_scale(case, x, side)
        else:
            scale = x.more[f"{side}_scale"][page, slot]
            want = scales_of(rows, scale.shape[-1], limit, case.scale_dtype)
            np.testing.assert_allclose(scale.astype(np.float64), want.astype(np.float64), rtol=2.0**-7, atol=0)
            if case.scale_dtype == "fp32":
                np.testing.assert_array_equal(scale, want)
        assert_special(rows, cache[page, slot], scale, limit)
    assert_only_slots_changed(before, x)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", SPECIAL, ids=str)
def test_the_kernel_writes_the_bytes_of_the_emulator(case: Store) -> None:
    x = built(case)
    assert x.fresh().run(backend="triton").bytes() == x.fresh().run(backend="emulator").bytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_past_a_block_have_no_part_in_its_scale(backend: str) -> None:
    """Values far below 1, in blocks of 12 columns, which threads hold as 16: the scale is that of the values."""
    case = Store(tokens=6, D=(24, 36), source="fp32", cache="fp8", scale="own", granularity=12, skip=False)
    x = case.build()
    x.k, x.v = x.k / 1000, x.v / 3000
    x.run(backend=backend)
    token, page, slot = expected_slots(x)
    for side, source in (("k", x.k), ("v", x.v)):
        scale = x.more[f"{side}_scale"][page, slot]
        want = scales_of(source[token], scale.shape[-1], 448.0, np.float32)
        np.testing.assert_array_equal(scale, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_latent_rows_with_scales(backend: str) -> None:
    """656 bytes: 512 latents, four computed scales, 64 rope values in bfloat16, which keep what they are."""
    rng = np.random.default_rng(5)
    latent, rope = (rng.standard_normal((12, n)).astype(np.float32) for n in (512, 64))
    special_rows(latent)
    special_rows(rope)
    cache = np.full((4, 4, 656), CANARY, np.uint8).view(float8_e4m3fn)
    mla_store_paged(latent, rope, cache, np.arange(12), backend=backend)
    rows = cache.reshape(16, 656)
    scale = rows[:12, 512:528].view(np.float32)
    np.testing.assert_array_equal(scale, scales_of(latent, 4, 448.0, "fp32"))
    assert_special(latent, rows[:12, :512], scale, 448.0)
    behind = rows[:12, 528:].view(bfloat16).astype(np.float32)
    np.testing.assert_array_equal(behind, rope.astype(bfloat16).astype(np.float32))
    assert (rows[12:].view(np.uint8) == CANARY).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised_collection(backend: str) -> None:
    step = Step((0,), (12,), dtype="fp8", scale_dtype="fp32", D=64, granularity=32, page=5)
    cache = step.paged()
    k, v = step.tokens()
    special_rows(k)
    special_rows(v)
    kv_store(k, v, cache, 1, **step.where(), backend=backend)
    for view, source in ((cache.get_key_cache(1), k), (cache.get_value_cache(1), v)):
        t, head = np.arange(12)[:, None], np.arange(2)
        scale = np.stack([view.load_scale(0, head, t, d)[..., 0] for d in (0, 32)], -1)
        np.testing.assert_array_equal(scale, scales_of(source, 2, 448.0, "fp32"))
        assert_special(source, view._stored(0, head, t, 0, 64).view(float8_e4m3fn), scale, 448.0)


def pool(step: Step) -> PagedKVCacheCollection:
    """Two sequences of two pages, full of canaries; before and behind each row of the table stands another page."""
    cache = step.paged()
    table = np.full((2, 4), cache.total_num_pages - 1, np.uint32)
    table[:, 1:3] = [[3, 0], [1, 4]]
    return cache._replace(lookup_table=table[:, 1:3], cache_lengths=np.array([0, 1]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("first", [-3, -4, -1, 6, 8, 5, 1 << 20, -(1 << 20)])
def test_tokens_without_a_column_are_left_out(first: int, padded: bool, backend: str) -> None:
    """Positions below 0 and past the columns of the table, which nobody looks at on a GPU: those tokens write nothing,
    the others go where they belong. Every byte around is a canary."""
    step = Step((4, 4), (4, 4), padded=padded)
    cache, right = pool(step), pool(step)
    k, v = step.tokens()
    call = kv_store.planned(k, v, cache, 1, **step.where(), backend=backend)
    cache.cache_lengths[0] = first  # after all that looks at it
    call.launch()
    position = cache.cache_lengths[:, None] + np.arange(4)
    stored = (position >= 0) & (position < 8)
    assert stored[1].all()
    assert not stored[0].all()
    sides = [x.reshape(2, 4, *x.shape[-2:]) for x in (k, v)]
    for b, i in np.argwhere(stored):
        page, slot = right.lookup_table[b, position[b, i] // 4], position[b, i] % 4
        for kv, side in enumerate(sides):
            right.blocks[page, kv, 1, slot] = side[b, i]
    assert bits(cache.blocks) == bits(right.blocks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slot_0_is_one_and_negative_slots_are_none(backend: str) -> None:
    for slots, stored in (([0, -1, -7], [0]), ([-1, 3, 0], [3, 0]), ([-(1 << 40), -1, -2], [])):
        x = Store(tokens=3, skip=False).build()
        x.slots = np.array(slots)
        before = x.fresh()
        x.run(backend=backend)
        assert_only_slots_changed(before, x)
        flat = x.k_cache.reshape(-1, *x.k_cache.shape[2:])
        assert bits(flat[stored]) == bits(x.k[np.array(slots) >= 0])
