"""Stores with canaries around every slot: nothing but the bytes that a store names may change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from yardsticks import bits, sparse

from kvlab.attention import Rope, kv_store, kv_store_paged
from kvlab.cache import ContinuousBatchingKVCacheCollection, KVCacheStaticParams, PagedKVCacheCollection
from kvlab.common.arrays import to_torch
from kvlab.memory import as_dtype

Array = np.ndarray[Any, Any]
CANARY = 0xA5
"""Every byte of a cache before the store: no NaN, so that a byte that is read would be believed."""


@dataclass(frozen=True)
class Store:
    """One store; ``build`` makes its arrays. D and dtype: (of K, of V); scale: None, "number", "tensor", "heads", "own"
    (computed for ``granularity`` dims)."""

    tokens: int = 9
    heads: int = 2
    D: tuple[int, int] = (64, 64)
    page: int = 4
    source: str = "bf16"
    cache: str = "bf16"
    storage: str = "apart"
    scale: str | None = None
    granularity: int | None = None
    rope: int = 0
    interleaved: bool = False
    skip: bool = True
    scale_dtype: str = "fp32"
    index: str = "int64"
    seed: int = 0

    def __str__(self) -> str:
        D = str(self.D[0]) if self.D[0] == self.D[1] else f"{self.D[0]}+{self.D[1]}"
        name = f"T{self.tokens}-H{self.heads}-D{D}-page{self.page}-{self.source}-{self.cache}-{self.storage}"
        name += f"-{self.scale}{self.granularity or ''}{'' if self.scale_dtype == 'fp32' else self.scale_dtype}"
        return name + (f"-rope{self.rope}{'i' if self.interleaved else 's'}" if self.rope else "")

    def build(self) -> Inputs:
        rng = np.random.default_rng(self.seed)
        pages = max(3, 2 * -(-self.tokens // self.page))
        source, stored = as_dtype(self.source), as_dtype(self.cache)
        k, v = (
            wide(3 * rng.standard_normal((self.tokens, self.heads, D)), source, self.storage == "wide") for D in self.D
        )
        k_cache, v_cache = caches(self.storage, (pages, self.page, self.heads), self.D, stored)
        slots = rng.permutation(pages * self.page)[: self.tokens].astype(self.index)
        if self.skip:
            slots[rng.random(self.tokens) < 0.3] = -1
        more: dict[str, Any] = {}
        if self.scale == "number":
            more |= {"k_scale": 0.06, "v_scale": 2.0}
        elif self.scale == "tensor":
            more |= {"k_scale": np.array([0.06], np.float32), "v_scale": np.array([0.3], np.float32)}
        elif self.scale == "heads":
            more |= {f"{x}_scale": rng.uniform(0.05, 0.2, self.heads).astype(np.float32) for x in "kv"}
        elif self.scale == "own":
            for x, D in zip("kv", self.D, strict=True):
                n = -(-D // (self.granularity or D))
                shape = (pages, self.page, self.heads, n)
                more[f"{x}_scale"] = filled((pages, self.page + 1, self.heads, n + 1), self.scale_dtype)[:, 1:, :, 1:]
                assert more[f"{x}_scale"].shape == shape
                if self.granularity:
                    more[f"{x}_granularity"] = self.granularity
        if self.rope:
            first = self.D[0] - self.rope if self.interleaved else 0
            more["rope"] = Rope.of_base(50, self.rope, interleaved=self.interleaved, first=first)
            more["positions"] = rng.integers(0, 50, self.tokens)
        return Inputs(k, v, k_cache, v_cache, slots, more)


@dataclass
class Inputs:
    """The arguments of ``kv_store_paged``."""

    k: Array
    v: Array
    k_cache: Array
    v_cache: Array
    slots: Array
    more: dict[str, Any]

    @property
    def written(self) -> list[Array]:
        """The arrays that a store writes."""
        scales = [s for s in (self.more.get("k_scale"), self.more.get("v_scale")) if np.ndim(s) == 4]
        return [self.k_cache, self.v_cache, *scales]

    def fresh(self) -> Inputs:
        """The same call with caches of its own, strides kept."""
        memo: dict[int, Array] = {}
        own = {name: own_copy(a, memo) if np.ndim(a) == 4 else a for name, a in self.more.items()}
        return replace(
            self, k_cache=own_copy(self.k_cache, memo), v_cache=own_copy(self.v_cache, memo), more=own
        )

    def run(self, **options: Any) -> Inputs:
        kv_store_paged(self.k, self.v, self.k_cache, self.v_cache, self.slots, **self.more, **options)
        return self

    def run_torch(self, device: str = "cpu", **options: Any) -> Inputs:
        """The Triton kernel, on torch views of the same memory (copied to and from another device)."""
        memo: dict[int, Any] = {}
        arrays = [on(a, device, memo) for a in (self.k, self.v, self.k_cache, self.v_cache, self.slots)]
        more = {n: on(a, device, memo) if isinstance(a, np.ndarray) else a for n, a in self.more.items()}
        if "rope" in more:
            rope = more["rope"]
            more["rope"] = Rope(on(rope.cos, device, memo), on(rope.sin, device, memo), rope.interleaved, rope.first)
        kv_store_paged(*arrays, **more, **options)
        for base, tensor in memo.values():
            if device != "cpu":
                base.view(np.uint8)[...] = tensor.cpu().view(torch.uint8).numpy()
        return self

    def bytes(self) -> list[bytes]:
        """All bytes of the memory behind what is written, gaps included."""
        return [base_of(a).tobytes() for a in self.written]


def wide(values: Array, dtype: Any, padded: bool) -> Array:
    """The values in memory of their own, or in the middle of wider rows."""
    if not padded:
        return values.astype(dtype)
    T, H, D = values.shape
    base = np.full((T, H + 2, D + 32), np.nan, dtype)
    base[:, 1:-1, 16:-16] = values.astype(dtype)
    return base[:, 1:-1, 16:-16]


def filled(shape: tuple[int, ...], dtype: Any) -> Array:
    """Canaries: bytes 0xA5."""
    dtype = as_dtype(dtype)
    return np.full(int(np.prod(shape)) * dtype.itemsize, CANARY, np.uint8).view(dtype).reshape(shape)


def caches(kind: str, shape: tuple[int, int, int], D: tuple[int, int], dtype: Any) -> tuple[Array, Array]:
    """K and V ``[pages, page, heads, D]`` with canaries before, between and behind their pages."""
    pages, page, heads = shape
    if kind == "apart":
        return tuple(filled((pages + 2, page, heads, d), dtype)[1:-1] for d in D)  # type: ignore[return-value]
    if kind == "wide":
        pair = (filled((pages + 1, page + 1, heads + 1, d + 32), dtype)[1:, 1:, 1:, 16:-16] for d in D)
        return tuple(pair)  # type: ignore[return-value]
    if kind == "rows":  # two windows of one row, as MLA has them
        rows = filled((pages, page, heads, sum(D) + 16), dtype)
        return rows[..., : D[0]], rows[..., D[0] : sum(D)]
    if kind == "halves":
        pair6 = filled((pages, 2, page, heads, D[0]), dtype).swapaxes(0, 1)
    elif kind == "hnd":
        pair6 = filled((2, pages, heads, page, D[0]), dtype).swapaxes(2, 3)
    elif kind == "layers":
        pair6 = filled((pages, 2, 3, page, heads, D[0]), dtype)[:, :, 1].swapaxes(0, 1)
    else:
        raise ValueError(kind)
    return pair6[0], pair6[1]


def base_of(array: Array) -> Array:
    """The whole memory that a view belongs to, as one row of bytes."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.reshape(-1).view(np.uint8)


def own_copy(array: Array, memo: dict[int, Array]) -> Array:
    """The view in a copy of its whole memory; views of one memory stay together."""
    base = base_of(array)
    new = memo.setdefault(base.ctypes.data, base.copy())
    return np.ndarray(array.shape, array.dtype, new, array.ctypes.data - base.ctypes.data, array.strides)


def on(array: Array, device: str, memo: dict[int, Any]) -> torch.Tensor:
    """A torch view; on another device the view of a copy of its whole memory."""
    if device == "cpu":
        return to_torch(array)
    if array.size == 0:
        return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device=device)
    base = base_of(array)
    _, tensor = memo.setdefault(base.ctypes.data, (base, torch.from_numpy(base.copy()).to(device)))
    typed = tensor.view(getattr(torch, array.dtype.name))
    strides = tuple(s // array.itemsize for s in array.strides)
    return typed.as_strided(array.shape, strides, (array.ctypes.data - base.ctypes.data) // array.itemsize)


def expected_slots(x: Inputs) -> tuple[Array, Array, Array]:
    """Token, page and slot of everything that is stored."""
    token = np.nonzero(x.slots >= 0)[0]
    return token, *np.divmod(x.slots[token].astype(np.int64), x.k_cache.shape[1])  # type: ignore[return-value]


def assert_only_slots_changed(before: Inputs, after: Inputs) -> None:
    """Every byte outside the slots named is what it was, gaps between elements included."""
    _, page, slot = expected_slots(before)
    mine = before.fresh()
    theirs = after.fresh()
    for x in (mine, theirs):
        for array in x.written:
            array.view(f"u{array.itemsize}")[page, slot] = 0
    assert mine.bytes() == theirs.bytes()


COPIES = [
    Store(),
    Store(tokens=1, heads=1, page=1, skip=False),
    Store(tokens=33, heads=3, D=(80, 80), page=5, source="fp16", cache="fp16", storage="halves"),
    Store(tokens=20, heads=8, D=(128, 128), page=16, storage="layers", index="int32"),
    Store(tokens=17, heads=5, D=(24, 24), source="fp32", cache="fp32", storage="hnd"),
    Store(tokens=11, heads=3, D=(72, 40), page=7, storage="wide"),
    Store(tokens=7, heads=1, D=(512, 64), page=64, storage="rows"),
    Store(tokens=7, heads=1, D=(5, 3), page=3, source="fp32", cache="fp32"),
    Store(tokens=40, heads=4, D=(16, 192), page=2, source="fp16", cache="fp16"),
]
CASTS = [
    Store(source="fp32", cache="bf16"),
    Store(source="bf16", cache="fp32", storage="halves"),
    Store(source="fp32", cache="fp16", D=(80, 80)),
    Store(source="bf16", cache="fp8"),
]
SCALED = [
    Store(cache="fp8", scale="number", storage="halves"),
    Store(cache="fp8", scale="tensor", source="fp32", D=(96, 96)),
    Store(cache="fp8", scale="heads", heads=3, source="fp16"),
    Store(cache="float8_e5m2", scale="tensor"),
    Store(cache="fp8", scale="own"),
    Store(cache="fp8", scale="own", granularity=64, D=(128, 128), heads=8, page=16, storage="hnd"),
    Store(cache="fp8", scale="own", granularity=32, D=(80, 64), source="fp32", storage="wide"),
    Store(cache="fp8", scale="own", granularity=48, D=(96, 96), source="fp16", scale_dtype="bf16"),
    Store(cache="float8_e5m2", scale="own", granularity=16, D=(64, 64), source="fp32"),
]
ROPED = [
    Store(source="fp32", cache="fp32", rope=64),
    Store(source="fp32", cache="fp32", rope=64, interleaved=True),
    Store(source="fp32", cache="fp32", rope=24, D=(80, 80), heads=3, storage="wide"),
    Store(source="fp32", cache="fp32", rope=24, D=(80, 80), heads=3, interleaved=True),
    Store(source="bf16", cache="bf16", rope=64, storage="halves"),
    Store(source="fp16", cache="fp16", rope=16, interleaved=True),
    Store(source="bf16", cache="fp8", rope=64, scale="own", granularity=32),
    Store(source="bf16", cache="fp8", rope=32, scale="own", granularity=32, interleaved=True, D=(96, 96)),
]


@dataclass(frozen=True)
class Step:
    """One step of a batch: lengths before it, new tokens of each sequence."""

    before: tuple[int, ...]
    new: tuple[int, ...]
    heads: int = 2
    D: int = 16
    page: int = 4
    dtype: str = "bf16"
    layers: int = 2
    padded: bool = False
    scale_dtype: str | None = None
    granularity: int = 16
    mla: bool = False
    seed: int = 0
    source: str | None = None

    def __str__(self) -> str:
        return f"before{self.before}-new{self.new}-{'padded' if self.padded else 'ragged'}-{self.dtype}-page{self.page}"

    def tokens(self) -> tuple[Array, Array]:
        """K and V, packed or padded; what is padding is NaN."""
        rng = np.random.default_rng(self.seed)
        B, S, T = len(self.new), max(self.new, default=0), sum(self.new)
        dtype = as_dtype(self.source or ("bf16" if as_dtype(self.dtype).itemsize == 1 else self.dtype))
        pair = rng.standard_normal((2, T, self.heads, self.D)).astype(dtype)
        if not self.padded:
            return pair[0], pair[1]
        out = np.full((2, B, S, self.heads, self.D), np.nan, dtype)
        b, i = np.nonzero(np.arange(S) < np.array(self.new)[:, None])
        out[:, b, i] = pair
        return out[0], out[1]

    def where(self) -> dict[str, Array]:
        if self.padded:
            return {"valid_lengths": np.array(self.new, np.uint32)}
        return {"cu_seqlens": np.cumsum([0, *self.new]).astype(np.uint32)}

    def paged(self) -> PagedKVCacheCollection:
        """A pool whose pages are dealt at random, full of canaries."""
        rng = np.random.default_rng(self.seed + 1)
        lengths = np.array(self.before) + np.array(self.new)
        each = -(-lengths // self.page)
        pool = PagedKVCacheCollection.allocate(
            KVCacheStaticParams(self.heads, self.D, is_mla=self.mla), num_pages=int(each.sum()) + 2,
            page_size=self.page, num_layers=self.layers, batch_size=len(each), max_length=int(lengths.max(initial=1)),
            dtype=self.dtype, scale_dtype=self.scale_dtype, quantization_granularity=self.granularity,
        )
        pool.blocks.view(np.uint8)[...] = CANARY
        used = np.arange(pool.lookup_table.shape[1]) < each[:, None]
        pool.lookup_table[used] = rng.permutation(int(each.sum()) + 2)[: used.sum()]
        return pool.with_lengths(np.array(self.before, np.uint32), max(self.new, default=0))

    def continuous(self) -> ContinuousBatchingKVCacheCollection:
        """The same sequences, a block each."""
        lengths = np.array(self.before) + np.array(self.new)
        B = len(lengths)
        blocks = filled((B + 2, 2 - self.mla, self.layers, int(lengths.max()), self.heads, self.D), self.dtype)
        table = np.random.default_rng(self.seed + 2).permutation(B + 2)[:B].astype(np.uint32)
        return ContinuousBatchingKVCacheCollection(
            blocks, np.array(self.before, np.uint32), table, max(self.new), int(lengths.max())
        )

    def stored(self, cache: Any, layer: int) -> list[Array]:
        """The new tokens as they lie in the cache, packed: of K, of V, as bits."""
        b = np.repeat(np.arange(len(self.new)), self.new)
        i = np.concatenate([before + np.arange(n) for before, n in zip(self.before, self.new, strict=True)])
        views = [cache.get_key_cache(layer)] + ([] if self.mla else [cache.get_value_cache(layer)])
        head = np.arange(self.heads)
        return [v._stored(b[:, None], head, i[:, None], 0, self.D) for v in views]

    def run(self, cache: Any, layer: int, **options: Any) -> None:
        k, v = self.tokens()
        kv_store(k, None if self.mla else v, cache, layer, **self.where(), **options)


def store_in_a_high_page() -> bool:
    """An interpreted store past 2^31 elements; runs where Triton is interpreted, in memory that is mostly not there."""
    pages, page, D = 7769, 480, 576
    pool = sparse((pages, page, 1, D), (page * D, D, D, 1), "bf16")
    k = np.random.default_rng(0).standard_normal((2, 1, D)).astype(as_dtype("bf16"))
    slots = np.array([7768 * page + 479, 7767 * page])
    kv_store_paged(k, None, pool, None, slots, backend="triton")
    return bits(pool[[7768, 7767], [479, 0]]) == bits(k)


def store_in_a_far_head() -> bool:
    """The same for heads that lie 2^31 bytes apart, which the stride of a vector of 16 of them does not show; and for
    the 17th, whose offset in vectors is past 2^31, too.
    """
    shape, strides = (4, 4, 18, 16), (64, 16, 1 << 31, 1)
    pools = [sparse(shape, strides, "fp8") for _ in "kv"]
    k, v = np.random.default_rng(0).standard_normal((2, 3, 18, 16)).astype(as_dtype("fp8"))
    kv_store_paged(k, v, *pools, np.array([5, 2, 9]), backend="triton")
    return all(bits(pool[[1, 0, 2], [1, 2, 1]]) == bits(x) for pool, x in zip(pools, (k, v), strict=True))
