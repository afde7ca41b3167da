"""Strides of axes of extent 1 address nothing: whatever they are, each operation and sibling gives the same.

Rests on the law that a stride is multiplied by an index, which such an axis has as 0 alone: each call equals, in every
bit, the one over contiguous arrays of the same values. One sequence, KV head, page and column of the table, for decodes
one token: all operands have such axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from kvlab import attention
from kvlab.attention import explain, masks
from kvlab.cache import PagedKVCacheCollection
from kvlab.cache.storage import BlockStorage
from kvlab.common.arrays import element_strides, to_numpy, to_torch, with_addressing_strides
from kvlab.common.torch_here import is_torch
from kvlab.hardware import TmaDescriptor, create_kv_tile
from kvlab.hardware.copies.tma_tile import fold_kv_descriptor
from kvlab.layout import TileTensor
from kvlab.memory import Memory, as_dtype, bfloat16, float8_e4m3fn

Array = np.ndarray[Any, Any]
HEADS, KEYS, PAGE, D, NEW = 4, 41, 64, 128, 3
STRIDES = {"odd": 3, "negative": -5, "none": 0, "huge": (1 << 61) + 1}
"""In bytes for NumPy arrays; of torch tensors in elements, from 0."""
BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"backend": "reference"}, "emulator": {"backend": "emulator"},
    "gfx950": {"backend": "emulator", "arch": "gfx950"}, "triton": {"backend": "triton"},
    "hopper": {"backend": "hopper"},
}


def with_stride(stride: int) -> Callable[[Array], Array]:
    """The same elements; each axis of extent 1 has that stride."""

    def strided(array: Array) -> Array:
        strides = [stride if n == 1 else s for n, s in zip(array.shape, array.strides, strict=True)]
        return as_strided(array, array.shape, strides)

    return strided


def tensor_with_stride(stride: int) -> Callable[[Array], Any]:
    """The same as torch tensors."""

    def strided(array: Array) -> Any:
        tensor = to_torch(array)
        strides = [stride if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
        return tensor.as_strided(tensor.shape, strides)

    return strided


class Call:
    """``function(*args, **named)`` of an operation that has its form behind its name."""

    def __init__(self, op: str, backend: str) -> None:
        self.rng, self.hopper, self.fp8 = np.random.default_rng(11), backend == "hopper", op.endswith("fp8")
        self.dtype = bfloat16 if self.hopper or self.fp8 else np.dtype(np.float32)
        name, self.named = op.partition(" ")[0], dict(BACKENDS[backend])
        self.function = getattr(attention, name)
        self.collected = name in ("mha_decode", "mha_prefill_cache", "kv_store")
        self.args: list[Any] = getattr(self, f"_{name.removesuffix('_paged').removesuffix('_cache')}")(op)
        if "store" not in op:
            self.named |= {"return_lse": True, "out": np.zeros(self.out, self.dtype)}

    def __call__(self, like: Callable[[Array], Any] = lambda array: array) -> list[Array]:
        """What it writes, of arrays ``like`` those here."""
        args, named = [like(x) for x in self.args], {n: _like(x, like) for n, x in self.named.items()}
        stored = "store" in self.function.__name__
        written = [x for x in (*args, *named.values()) if x.__class__.__module__ != "builtins" and to_numpy(x).ndim > 3]
        if self.collected:
            args = self._in_collection(args)
        asked = {n: x for n, x in named.items() if n != "return_lse"}
        of = self.named["backend"]
        assert explain(self.function, *args, **asked).backend == ("emulator" if of == "hopper" else of)
        results = self.function(*args, **named)
        assert stored or results[0] is named["out"]
        return [np.array(to_numpy(x)) for x in (written if stored else results)]

    def _in_collection(self, args: list[Any]) -> list[Any]:
        """K and V of an only layer, ``[1, 2, 1, PAGE, 1, D]``, in place of the cache, the table and the lengths."""
        *before, blocks, table, lens = args
        return [*before, PagedKVCacheCollection(blocks, lens, table, NEW, KEYS + NEW)]

    def _rows(self, *shape: int, dtype: Any = None) -> Array:
        return self.rng.standard_normal(shape).astype(np.float32).astype(self.dtype if dtype is None else dtype)

    def _scales(self, *shape: int) -> Array:
        return (0.5 + self.rng.random(shape)).astype(np.float32)

    def _cache(self, op: str, new: int) -> list[Array]:
        """K and V, the table and the lengths; features."""
        if not self.hopper:
            features = {"sinks": self._scales(HEADS), "alibi_slopes": self._scales(1, HEADS)}
            self.named |= features | {"mask": masks.MaterializedMask(self._scales(1, 1, new, KEYS))}
        table, kind = np.zeros((1, 1), np.int64), float8_e4m3fn if self.fp8 else self.dtype
        if self.fp8:
            of = (1,) if self.hopper else (1, PAGE, 1)
            self.named |= {"k_scale": self._scales(*of), "v_scale": self._scales(*of)}
        if self.collected:
            return [self._rows(1, 2, 1, PAGE, 1, D), table, np.array([KEYS - new])]
        return [self._rows(1, PAGE, 1, D, dtype=kind), self._rows(1, PAGE, 1, D, dtype=kind), table, np.array([KEYS])]

    def _mha_decode(self, op: str) -> list[Array]:
        self.out = (1, 1, HEADS, D)
        return [self._rows(*self.out), *self._cache(op, 1)]

    _mha_decode_streaming = _mha_decode

    def _mha_prefill(self, op: str) -> list[Array]:
        self.out = (NEW, HEADS, D)
        starts = np.array([0, NEW])
        if "paged" in op or self.collected:
            cache = self._cache(op, NEW)
            if self.collected:
                self.named["cu_seqlens_q"] = starts
                return [self._rows(*self.out), *cache]
            return [self._rows(*self.out), *cache, starts]
        self.named |= {"k_scale": self._scales(1), "v_scale": self._scales(1)} if self.fp8 else {}
        kind = float8_e4m3fn if self.fp8 else self.dtype
        if "ragged" in op:
            self.named |= {"cu_seqlens_q": starts, "cu_seqlens_k": np.array([0, KEYS])}
            return [self._rows(*self.out, dtype=kind), *(self._rows(KEYS, 1, D, dtype=kind) for _ in "kv")]
        self.out = (1, 1, 1, D)
        return [self._rows(*self.out, dtype=kind), *(self._rows(1, KEYS, 1, D, dtype=kind) for _ in "kv")]

    def _mla_decode(self, op: str) -> list[Array]:
        latent, rope = (512, 64) if self.hopper or self.fp8 else (128, 32)
        self.out = (1, 1, HEADS, latent)
        self.named |= {"v_dim": latent, "scale": 0.1}
        width, kind = (latent + 2 * rope, float8_e4m3fn) if self.fp8 else (latent + rope, self.dtype)
        rows = self._rows(1, PAGE, 1, width, dtype=kind)
        rows[..., latent:] = 0.5
        return [self._rows(1, 1, HEADS, latent + rope), rows, np.zeros((1, 1), np.int64), np.array([KEYS])]

    def _mla_prefill(self, op: str) -> list[Array]:
        latent, rope, own = 128, 32, NEW
        self.out, self.named["latent_dim"] = (NEW, 1, D), latent
        starts = np.array([0, NEW]), np.array([0, own])
        cache = self._rows(1, PAGE, 1, latent + rope), np.zeros((1, 1), np.int64), np.array([NEW])
        return [self._rows(NEW, 1, D + rope), self._rows(own, 1, D), self._rows(own, 1, D), *cache, *starts]

    def _mla_prefill_ragged(self, op: str) -> list[Array]:
        self.out = (1, 1, D)
        rows = self._rows(KEYS, 1, D), self._rows(KEYS, 1, D), self._rows(KEYS, 32)
        return [self._rows(1, 1, D + 32), *rows, np.array([0, 1]), np.array([0, KEYS])]

    def _kv_store(self, op: str) -> list[Array]:
        if self.collected:
            blocks = np.zeros((1, 2, 1, PAGE, 1, D), self.dtype)
            return [self._rows(1, 1, D), self._rows(1, 1, D), blocks, np.zeros((1, 1), np.int64), np.array([KEYS])]
        kind = float8_e4m3fn if self.fp8 else self.dtype
        if self.fp8:
            self.named |= {f"{n}_scale": np.zeros((1, PAGE, 1, 1), np.float32) for n in "kv"}
        caches = [np.zeros((1, PAGE, 1, D), kind) for _ in "kv"]
        return [self._rows(1, 1, D), self._rows(1, 1, D), *caches, np.array([KEYS])]

    def _mla_store(self, op: str) -> list[Array]:
        cache = np.zeros((1, PAGE, 1, 640), float8_e4m3fn) if self.fp8 else np.zeros((1, PAGE, 1, 160), self.dtype)
        widths = (512, 64) if self.fp8 else (128, 32)
        return [*(self._rows(1, n) for n in widths), cache, np.array([KEYS])]

    def _merge_states(self, op: str) -> list[Array]:
        self.out = (1, 1, D)
        return [self._rows(2, *self.out), self._rows(2, *self.out[:-1], dtype=np.float32)]


def _like(value: Any, like: Callable[[Array], Any]) -> Any:
    if isinstance(value, masks.MaterializedMask):
        return masks.MaterializedMask(like(value.array))
    return like(value) if isinstance(value, np.ndarray) else value


PAIRS = {
    "mha_decode_paged": "reference emulator gfx950 triton hopper",
    "mha_decode_paged fp8": "reference emulator triton hopper",
    "mha_decode": "reference emulator triton", "mha_decode_streaming_paged": "reference gfx950 triton",
    "mha_prefill dense": "reference emulator gfx950 triton hopper", "mha_prefill dense fp8": "emulator triton hopper",
    "mha_prefill ragged": "emulator triton hopper", "mha_prefill_paged": "reference emulator gfx950 triton hopper",
    "mha_prefill_cache": "reference emulator triton", "mla_decode_paged": "reference emulator triton hopper",
    "mla_decode_paged fp8": "emulator triton", "mla_prefill_paged": "reference emulator triton",
    "mla_prefill_ragged": "reference emulator triton", "kv_store_paged": "reference emulator triton",
    "kv_store_paged fp8": "reference emulator triton", "kv_store": "emulator triton",
    "mla_store_paged": "reference emulator triton", "mla_store_paged fp8": "emulator triton",
    "merge_states": "reference emulator triton",
}
CASES = [
    pytest.param(op, backend, marks=[pytest.mark.interpreter] if backend == "triton" else [], id=f"{op}-{backend}")
    for op, backends in PAIRS.items() for backend in backends.split()
]


@pytest.mark.parametrize(("op", "backend"), CASES)
def test_every_sibling_gives_the_same(op: str, backend: str) -> None:
    expected = Call(op, backend)()
    assert all(x.any() for x in expected)
    for name, stride in STRIDES.items():
        for like in (with_stride(stride), *([tensor_with_stride(stride)] if stride >= 0 else [])):
            got = Call(op, backend)(like)
            assert [x.tobytes() for x in got] == [x.tobytes() for x in expected], name


@pytest.mark.parametrize("stride", STRIDES.values(), ids=list(STRIDES))
def test_descriptors_and_views_of_arrays_take_them(stride: int) -> None:
    array = np.arange(2 * 64, dtype=np.float16).reshape(1, 2, 1, 64)
    strided, smem = with_stride(stride)(array), Memory(256)
    assert TmaDescriptor.of(strided, (1, 2, 1, 64), "128B").strides == (8, 64, 8, 1)
    assert Memory.over(strided).load(0, np.float16, 128).tobytes() == array.tobytes()
    assert TileTensor.from_numpy(strided).to_numpy().tobytes() == array.tobytes()
    assert BlockStorage(strided, "blocks").strides == element_strides(array)
    assert BlockStorage(strided, "blocks").num_rows == 2
    create_kv_tile(strided[0], 2, 64, "128B").async_copy(smem, 0, (0, 0, 0))
    assert smem.load(0, np.float16, 64).tobytes() == array[0, 0].tobytes()
    one_row = with_stride(stride)(np.zeros((1, 1, 128), np.float16))
    assert fold_kv_descriptor(one_row, 1, 128).strides == (8, 64, 8, 1)


def test_a_stride_that_addresses_is_still_refused() -> None:
    rows = np.zeros((4, 1, 64), np.float16)
    with pytest.raises(ValueError, match="must not be negative"):
        Memory.over(rows[::-1])
    with pytest.raises(ValueError, match="is not a multiple of 16 bytes"):
        TmaDescriptor.of(np.zeros((4, 1, 65), np.float16)[..., :64], (4, 1, 64))


@pytest.mark.parametrize("stride", [0, 3, (1 << 40) + 1])
def test_caches_of_serving_stacks_take_them(stride: int) -> None:
    torch = pytest.importorskip("torch")
    from kvlab.integrations import from_torch

    blocks = np.arange(2 * 64 * 8, dtype=np.float32).reshape(1, 2, 64, 1, 8)
    plain, strided = to_torch(blocks), tensor_with_stride(stride)(blocks)
    lens, table = torch.tensor([20]), torch.tensor([[0]])
    for cache in (strided, (strided[:, 0], plain[:, 1])):
        pool = from_torch(cache, lens, table)
        assert pool.get_value_cache(0).load(0, 0, 5, 0, width=8).tolist() == blocks[0, 1, 5, 0].tolist()
        assert is_torch(pool.blocks)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "int64"])
def test_every_dtype_may_lie_so(dtype: str) -> None:
    """Rests on the law, and on the bytes: NumPy itself makes no view with other strides of some dtypes of ml-dtypes."""
    array = np.arange(24).reshape(6, 4).astype(as_dtype(dtype))[::-5][:1]
    found = with_addressing_strides(array)
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()
    assert np.shares_memory(found, array)
    assert found.strides == (4 * array.itemsize, array.itemsize)
