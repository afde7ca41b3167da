"""KV store into collections: ragged and padded, paged and continuous, quantised, MLA.

Rests on NumPy's own indexing, on float64, and on laws: continuous equals paged bit for bit, and nothing but the new
tokens of one layer changes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from store_cases import CANARY, Step
from yardsticks import bits

from kvlab.attention import Rope, explain, kv_store, kv_store_paged, mla_store_paged
from kvlab.cache import ContinuousBatchingKVCacheCollection, KVCacheStaticParams, PagedKVCacheCollection
from kvlab.common.arrays import to_torch
from kvlab.memory import bfloat16, float8_e4m3fn, float32

STEPS = [
    Step((5, 0, 3), (3, 1, 4)),
    Step((5, 2, 0), (3, 1, 4), padded=True),  # MAX's own test: valid 3, 1, 4 and cache 5, 2, 0
    Step((100, 0, 7), (0, 0, 0), padded=True),
    Step((100, 0, 7), (0, 0, 0)),
    Step((0, 17, 4, 31), (1, 1, 1, 1), page=16, dtype="fp16"),
    Step((3, 0), (0, 9), page=1, heads=3, D=24, dtype="fp32"),
    Step((0,), (40,), page=7, dtype="fp32", padded=True),
    Step((2,) * 40, (1, 0) * 20, page=2, heads=1, D=8),
]
BACKENDS = [{}, {"backend": "reference"}, pytest.param({"backend": "triton"}, marks=pytest.mark.interpreter)]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=["emulator", "reference", "triton"])


def packed(step: Step) -> list[np.ndarray[Any, Any]]:
    """The new tokens as NumPy finds them in the arguments."""
    pair = step.tokens()
    if not step.padded:
        return list(pair)
    mask = np.arange(max(step.new)) < np.array(step.new)[:, None]
    return [x[mask] for x in pair]


def others_kept(cache: Any, step: Step, layer: int) -> bool:
    """Whether every byte outside the new tokens of that layer is a canary."""
    blocks = cache.blocks.copy()
    b = np.repeat(np.arange(len(step.new)), step.new)
    i = np.concatenate([n + np.arange(m) for n, m in zip(step.before, step.new, strict=True)]).astype(int)
    page, slot = cache.get_key_cache(layer).page_table.find(b, i)
    blocks.view(f"u{blocks.itemsize}")[page, :, layer, slot] = np.frombuffer(
        bytes([CANARY]) * 8, f"u{blocks.itemsize}"
    )[0]
    return bool((blocks.view(np.uint8) == CANARY).all())


@every_backend
@pytest.mark.parametrize("kind", ["paged", "continuous"])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_tokens_go_to_their_positions(step: Step, kind: str, backend: dict[str, str]) -> None:
    cache = getattr(step, kind)()
    step.run(cache, 1, **backend)
    for stored, source in zip(step.stored(cache, 1), packed(step), strict=True):
        assert bits(stored) == bits(source)
    assert others_kept(cache, step, 1)
    assert cache.cache_lengths.tolist() == list(step.before)


def test_one_token_each_needs_no_offsets() -> None:
    step = Step((5, 0, 3), (1, 1, 1))
    one, other = step.paged(), step.paged()
    k, v = step.tokens()
    kv_store(k, v, one)
    step.run(other, 0)
    assert bits(one.blocks) == bits(other.blocks)


def test_slots_of_a_collection() -> None:
    step = Step((5, 0, 3), (3, 1, 4))
    one, other = step.paged(), step.paged()
    k, v = step.tokens()
    b = np.repeat(np.arange(3), step.new)
    page, slot = one.get_key_cache(1).page_table.find(b, np.array([5, 6, 7, 0, 3, 4, 5, 6]))
    kv_store(k, v, one, 1, slot_mapping=page * 4 + slot)
    step.run(other, 1)
    assert bits(one.blocks) == bits(other.blocks)


@every_backend
def test_tokens_behind_the_last_offset_are_left_out(backend: dict[str, str]) -> None:
    """A packed buffer longer than its sequences, as a captured graph has it."""
    step = Step((5, 0), (2, 1))
    one, other = step.paged(), step.paged()
    k, v = (np.concatenate([x, np.full((4, *x.shape[1:]), np.nan, x.dtype)]) for x in step.tokens())
    kv_store(k, v, one, cu_seqlens=np.array([0, 2, 3]), **backend)
    step.run(other, 0)
    assert bits(one.blocks) == bits(other.blocks)


@every_backend
@pytest.mark.parametrize("padded", [False, True])
def test_pages_that_are_none(padded: bool, backend: dict[str, str]) -> None:
    """Sentinels: strict raises before anything is written, documented mode drops these tokens alone."""
    step = Step((3, 2), (3, 3), padded=padded)
    cache = step.paged()
    cache.lookup_table[1, 1] = cache.total_num_pages  # tokens 4 of sequence 1; the null page exists in memory
    before = cache.blocks.copy()
    with pytest.raises(ValueError, match=r"lookup_table\[1, 1\] is 6, which is none of the pages \[0, 6\): token 4 of"):
        step.run(cache, 0, **backend)
    assert bits(cache.blocks) == bits(before)
    dropping = cache._replace(strict=False)
    step.run(dropping, 0, **backend)
    assert bits(cache.blocks[-1]) == bits(before[-1])
    view = dropping.get_key_cache(0)
    assert bits(view.load(1, np.arange(2), np.array([[2], [3]]), 0, width=16)) == bits(packed(step)[0][3:5])


@every_backend
def test_rope_uses_the_position_in_the_cache(backend: dict[str, str]) -> None:
    step = Step((5, 0, 3), (3, 1, 4), dtype="fp32", heads=1, D=8)
    rope = Rope.of_base(20, 8)
    cache = step.paged()
    step.run(cache, 0, rope=rope, **backend)
    position = np.array([5, 6, 7, 0, 3, 4, 5, 6])
    c, s = rope.cos[position][:, None].astype(np.float64), rope.sin[position][:, None].astype(np.float64)
    a, b = np.split(packed(step)[0].astype(np.float64), 2, -1)
    k, v = step.stored(cache, 0)
    np.testing.assert_allclose(k, np.concatenate([a * c - b * s, b * c + a * s], -1), atol=1e-6)
    assert bits(v) == bits(packed(step)[1])
    moved = step.paged()
    step.run(moved, 0, rope=rope, positions=position[::-1].copy(), **backend)
    assert bits(moved.blocks) != bits(cache.blocks)


@every_backend
def test_quantised_collection_gets_its_scales(backend: dict[str, str]) -> None:
    step = Step((5, 0, 3), (3, 1, 4), dtype="fp8", scale_dtype="fp32", D=32, granularity=16)
    cache = step.paged()
    scales = cache.scales
    scales.view(np.uint8)[...] = CANARY
    step.run(cache, 1, **backend)
    b = np.repeat(np.arange(3), step.new)[:, None]
    t = np.array([5, 6, 7, 0, 3, 4, 5, 6])[:, None]
    view = cache.get_key_cache(1)
    source = packed(step)[0].astype(np.float64)
    for d in (0, 16):
        back = view.load(b, np.arange(2), t, d, width=16, output_dtype="fp32")
        block = source[..., d : d + 16]
        top = np.abs(block).max(-1, keepdims=True)
        np.testing.assert_allclose(view.load_scale(b, np.arange(2), t, d), top / 448, rtol=1e-6)
        assert (np.abs(back - block) <= np.maximum(np.abs(block) / 16, top / 448 / 512) * 1.001).all()
    assert others_kept(cache, step, 1)
    page, slot = view.page_table.find(b[:, 0], t[:, 0])
    scales[page, :, 1, slot] = np.frombuffer(bytes([CANARY]) * 4, np.float32)[0]
    assert (scales.view(np.uint8) == CANARY).all()


HALVES, PAIRS = Rope.of_base(16, 12, first=0), Rope.of_base(16, 16, interleaved=True, first=16)
VARIANTS = {
    "halves": ("fp32", "fp32", None, {"rope": HALVES}),
    "pairs": ("bf16", "bf16", None, {"rope": PAIRS}),
    "one-scale": ("bf16", "fp8", None, {"k_scale": 0.5, "v_scale": np.float32([0.25])}),
    "head-scales-halves": ("fp16", "fp8", None, {"k_scale": np.float32([0.5, 2]), "rope": HALVES}),
    "token-scales": ("fp32", "fp8", 32, {}),
    "block-scales-pairs": ("bf16", "fp8", 8, {"rope": PAIRS}),
}


@every_backend
@pytest.mark.parametrize(
    "form, name",
    [
        (f"{form}-{kind}", name)
        for form in ("ragged", "padded")
        for kind in ("paged", "continuous")
        for name, (_, _, granularity, _) in VARIANTS.items()
        if kind == "paged" or granularity is None  # a continuous cache has no scales of its own
    ],
)
def test_every_form_gives_the_bytes_of_the_slots(form: str, name: str, backend: dict[str, str]) -> None:
    """Law: whatever is fused into the store, a token's row does not depend on what names its place."""
    source, dtype, granularity, more = VARIANTS[name]
    kind = form.partition("-")[2]
    step = Step(
        (5, 0, 3), (3, 1, 4), D=32, dtype=dtype, padded=form.startswith("padded"), granularity=granularity or 16,
        scale_dtype="fp32" if granularity else None, source=source,
    )
    one, other = (getattr(step, kind)() for _ in range(2))
    step.run(one, 1, **more, **backend)
    b, t = np.repeat(np.arange(3), step.new), np.array([5, 6, 7, 0, 3, 4, 5, 6])
    pages = other if kind == "paged" else other.paged()
    k, v = pages.get_key_cache(1), pages.get_value_cache(1)
    page, slot = k.page_table.find(b, t)
    scales = {"k_scale": k.scales, "v_scale": v.scales, "k_granularity": granularity, "v_granularity": granularity}
    kv_store_paged(
        *packed(step), k.blocks, v.blocks, page * k.page_size_ + slot, **(scales if granularity else {}), **more,
        positions=t, **backend,
    )
    assert bits(one.blocks) == bits(other.blocks)
    assert others_kept(one, step, 1)
    if granularity:
        assert bits(one.scales) == bits(other.scales)


def test_continuous_equals_paged() -> None:
    step = Step((5, 0, 3), (3, 1, 4), D=32)
    one, other = step.paged(), step.continuous()
    for cache in (one, other):
        step.run(cache, 0, rope=Rope.of_base(16, 16, interleaved=True, first=16))
    for a, b in zip(step.stored(one, 0), step.stored(other, 0), strict=True):
        assert bits(a) == bits(b)


def latent_rows() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Latent and rope part of three tokens, in bfloat16."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((3, 512)).astype(bfloat16), rng.standard_normal((3, 64)).astype(bfloat16)


class TestMla:
    """Latent and rope part in one row of one head."""

    @every_backend
    @pytest.mark.parametrize("kind", ["paged", "continuous"])
    def test_whole_row_and_parts_agree(self, kind: str, backend: dict[str, str]) -> None:
        step = Step((5, 0, 3), (3, 1, 4), heads=1, D=80, mla=True, dtype="fp32")
        one, other = getattr(step, kind)(), getattr(step, kind)()
        rope = Rope.of_base(16, 16)
        row, _ = step.tokens()
        kv_store(row, None, one, **step.where(), rope=rope, **backend)
        kv_store(row[..., :64], row[..., 64:], other, **step.where(), rope=rope, **backend)
        assert bits(one.blocks) == bits(other.blocks)
        (stored,) = step.stored(one, 0)
        assert bits(stored[..., :64]) == bits(row[..., :64])
        assert (stored[..., 64:] != row[..., 64:]).any()
        assert others_kept(one, step, 0)

    @every_backend
    def test_rope_aware_row(self, backend: dict[str, str]) -> None:
        """512 bytes of fp8 content, 64 bfloat16 behind them; read back through the cache's own rope tile."""
        latent, rope_part = latent_rows()
        cache = np.full((2, 4, 640), CANARY, np.uint8).view(float8_e4m3fn)
        mla_store_paged(latent, rope_part, cache, np.array([6, -1, 0]), scale=0.5, **backend)
        rows = cache.reshape(8, 640)
        assert bits(rows[[6, 0], 512:].view(bfloat16)) == bits(rope_part[[0, 2]])
        want = (latent[[0, 2]].astype(np.float32) / 0.5).astype(float8_e4m3fn)
        assert bits(rows[[6, 0], :512]) == bits(want)
        assert (rows[[1, 2, 3, 4, 5, 7]].view(np.uint8) == CANARY).all()

    @every_backend
    def test_row_with_scales(self, backend: dict[str, str]) -> None:
        """656 bytes: 512 e4m3, four float32 scales, 64 bfloat16."""
        latent, rope_part = latent_rows()
        cache = np.full((2, 4, 1, 656), CANARY, np.uint8).view(float8_e4m3fn)
        mla_store_paged(latent, rope_part, cache, np.array([6, -1, 0]), **backend)
        of_bytes = np.full(cache.shape, CANARY, np.uint8)
        mla_store_paged(latent, rope_part, of_bytes, np.array([6, -1, 0]), **backend)
        assert bits(of_bytes) == bits(cache)
        rows = cache.reshape(8, 656)[[6, 0]]
        top = np.abs(latent[[0, 2]].astype(np.float32)).reshape(2, 4, 128).max(-1)
        np.testing.assert_allclose(rows[:, 512:528].view(float32), top / 448, rtol=1e-6)
        assert bits(rows[:, 528:].view(bfloat16)) == bits(rope_part[[0, 2]])
        back = rows[:, :512].astype(np.float32) * np.repeat(top / 448, 128, 1)
        np.testing.assert_allclose(back, latent[[0, 2]].astype(np.float32), rtol=1 / 15, atol=0.01)
        assert (cache.reshape(8, 656)[[1, 2, 3, 4, 5, 7]].view(np.uint8) == CANARY).all()


@pytest.mark.interpreter
def test_torch_collection() -> None:
    step = Step((5, 0, 3), (3, 1, 4))
    one, other = step.paged(), step.paged()
    k, v = map(to_torch, step.tokens())
    offsets = to_torch(step.where()["cu_seqlens"].astype(np.int32))
    kv_store(k, v, one.torch(), 1, cu_seqlens=offsets)
    step.run(other, 1)
    assert bits(one.blocks) == bits(other.blocks)


def test_max_store_ragged() -> None:
    """MAX's test_kv_cache_store_ragged: page 128, 2 KV heads of 64, 2 layers, prompts of 100, 200, 300."""
    step = Step((0, 0, 0), (100, 200, 300), heads=2, D=64, page=128)
    cache = step.paged()
    step.run(cache, 1)
    assert [bits(s) for s in step.stored(cache, 1)] == [bits(x) for x in step.tokens()]


def test_explained() -> None:
    step = Step((5, 0, 3), (3, 1, 4))
    k, v = step.tokens()
    text = str(explain(kv_store, k, v, step.paged(), **step.where()))
    assert text.startswith("kv_store: emulator as on sm_90 (NumPy arrays); StoreConfig(form='ragged'")


class TestErrors:
    step = Step((5, 0, 3), (3, 1, 4))

    @pytest.mark.parametrize(
        "change, message",
        [
            ({"cu_seqlens": np.array([0, 3, 4])}, r"cu_seqlens has shape \(3,\): must be \[4\]"),
            ({"cu_seqlens": np.array([0, 3, 2, 8])}, "cu_seqlens .*never fall"),
            ({"cu_seqlens": np.array([0, 3, 4, 9])}, "cu_seqlens .*at most 8, the tokens of k"),
            ({"cu_seqlens": np.array([0.0, 3, 4, 8])}, "cu_seqlens has dtype float64"),
            ({"slot_mapping": np.arange(8)}, "one of them at most"),
            ({"layer": 2}, "layer is 2: must be in"),
            ({"k_scale": [1.0]}, r"k_scale is \[1.0\]: must be positive and finite"),
            ({"k_scale": -1.0}, "k_scale is -1.0: must be positive"),
            ({"rope": Rope.of_base(8, 32)}, "rope of 32 dims from 0 on: must be inside the head of 16"),
            ({"rope": Rope.of_base(3, 16)}, "position 5: must be 0 to 2"),
            ({"backend": "cuda"}, "backend is 'cuda'"),
            ({"arch": "sm_1"}, "sm_1"),
        ],
    )
    def test_nothing_is_written(self, change: dict[str, Any], message: str) -> None:
        cache = self.step.paged()
        before = bits(cache.blocks)
        k, v = self.step.tokens()
        arguments = {"layer": 0, **self.step.where(), **change}
        with pytest.raises((ValueError, IndexError), match=message):
            kv_store(k, v, cache, **arguments)
        assert bits(cache.blocks) == before

    def test_sequences_past_their_table(self) -> None:
        cache = self.step.paged()
        columns = cache.lookup_table.shape[1]
        long = cache.with_lengths(np.array([5, 4 * columns - 0, 3]), 4)
        k, v = self.step.tokens()
        with pytest.raises(ValueError, match=f"token {4 * columns} of sequence 1: its page table holds"):
            kv_store(k, v, long, **self.step.where())

    def test_full_continuous_cache(self) -> None:
        cache = self.step.continuous()
        k, v = self.step.tokens()
        with pytest.raises(ValueError, match="token 8 of sequence 0: its page table holds 8 tokens"):
            kv_store(k, v, cache.with_lengths(np.array([6, 0, 3]), 4), **self.step.where())

    def test_v_is_needed(self) -> None:
        with pytest.raises(ValueError, match="v is None"):
            kv_store(self.step.tokens()[0], None, self.step.paged(), **self.step.where())

    def test_padding_longer_than_the_tokens(self) -> None:
        step = replace(self.step, padded=True)
        k, v = step.tokens()
        with pytest.raises(ValueError, match=r"valid_lengths\[2\] is 5: must be 0 to 4"):
            kv_store(k, v, step.paged(), valid_lengths=np.array([3, 1, 5]))

    def test_not_a_collection(self) -> None:
        k, v = self.step.tokens()
        with pytest.raises(ValueError, match="cache is a ndarray"):
            kv_store(k, v, np.zeros(3))  # type: ignore[arg-type]

    def test_mla_rows_of_another_width(self) -> None:
        with pytest.raises(ValueError, match="rows of 576, or of an fp8 format or uint8 and 640 or 656 bytes"):
            mla_store_paged(np.zeros((1, 512), np.float32), np.zeros((1, 64), np.float32), np.zeros((1, 4, 600)), [0])


def test_collections_of_both_kinds_are_accepted() -> None:
    blocks = np.zeros((2, 2, 1, 4, 1, 8), np.float32)
    for pool in (
        PagedKVCacheCollection(blocks, [0], [[1]], 1, 1, KVCacheStaticParams(1, 8)),
        ContinuousBatchingKVCacheCollection(blocks, [0], [1], 1, 1),
    ):
        kv_store(np.ones((1, 1, 8), np.float32), np.ones((1, 1, 8), np.float32), pool)
        assert blocks[1, :, 0, 0].all()
