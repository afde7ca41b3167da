"""A good call of every public operation, as keywords, and what each of its arguments is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvlab import attention
from kvlab.attention import Rope
from kvlab.attention.call.operation import PublicOperation
from kvlab.cache import KVCacheStaticParams, PagedKVCacheCollection
from kvlab.memory import bfloat16, float8_e4m3fn

D, PAGE, PAGES = 64, 16, 6
LATENT, ROPE = 128, 32
NARROW = ("q", "k", "v", "k_rope", "k_cache", "v_cache", "kv_cache")
TABLE, LENS = np.array([[3, 0, 1], [2, 4, 0]]), np.array([33, 20])
CU_Q, CU_K = np.array([0, 2, 5]), np.array([0, 33, 53])


def floats(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def narrow(name: str, array: Any) -> Any:
    """An operand as calls with e4m3 take it."""
    dtype = bfloat16 if name == "out" else float8_e4m3fn if name in NARROW else None
    return array if dtype is None else array.astype(dtype)


def collection(make: Callable[[Any], Any], blocks: Callable[[Any], Any], *, mla: bool = False, new: int = 1) -> Any:
    rows = (PAGES, 1, 1, PAGE, 1, LATENT + ROPE) if mla else (PAGES, 2, 1, PAGE, 2, D)
    return PagedKVCacheCollection(blocks(floats(*rows)), make(LENS - new), make(TABLE), new, 33)


def empty_collection(make: Callable[[Any], Any], blocks: Callable[[Any], Any]) -> Any:
    """Room for two sequences."""
    pool = PagedKVCacheCollection.allocate(
        KVCacheStaticParams(2, D), num_pages=PAGES, page_size=PAGE, num_layers=1, batch_size=2, max_length=48,
        dtype="fp32",
    )
    return PagedKVCacheCollection(blocks(pool.blocks), make(LENS - 4), make(TABLE), 4, 33)


def call_of(name: str, make: Callable[[Any], Any] = lambda array: array, *, fp8: bool = False) -> dict[str, Any]:
    """The keywords of an operation, all of its arrays among them; ``make`` gives an array in the library wanted. fp8:
    what it attends to, and with, is of e4m3; a store's caches are.
    """
    stored = (lambda array: make(array.astype(float8_e4m3fn))) if fp8 else make
    narrowed = NARROW if "store" not in name else ("k_cache", "v_cache")

    def on(**arrays: Any) -> dict[str, Any]:
        found = {n: narrow(n, array) if fp8 and n in (*narrowed, "out") else array for n, array in arrays.items()}
        return {n: make(array) if isinstance(array, np.ndarray) else array for n, array in found.items()}

    features = {"sinks": floats(4), "alibi_slopes": floats(4)}
    paged = {"k_cache": floats(PAGES, PAGE, 2, D), "v_cache": floats(PAGES, PAGE, 2, D)}
    table = {"block_table": TABLE, "seq_lens": LENS}
    starts = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    decode = {**features, "out": floats(2, 4, D)}
    ragged = {**features, "out": floats(5, 4, D)}
    projected = {"q": floats(5, 4, D + ROPE), "k": floats(53, 4, D), "v": floats(53, 4, D)}
    rows = {"q": floats(2, 4, LATENT + ROPE), **features, "out": floats(2, 4, LATENT), "v_dim": LATENT, "scale": 0.1}
    rope = {"rope": Rope(make(np.cos(floats(48, D // 2))), make(np.sin(floats(48, D // 2)))),
            "positions": np.arange(5)}
    latent_rope = {"rope": Rope(make(np.cos(floats(48, ROPE // 2))), make(np.sin(floats(48, ROPE // 2)))),
                   "positions": np.arange(5)}
    kv, slots = {"k": floats(5, 2, D), "v": floats(5, 2, D)}, np.array([3, 90, -1, 17, 4])
    rows_of_cache = floats(PAGES, PAGE, LATENT + ROPE).astype(float8_e4m3fn if fp8 else np.float32)
    good: dict[str, Callable[[], dict[str, Any]]] = {
        "mha_decode_paged": lambda: on(q=floats(2, 4, D), **paged, **table, **decode),
        "mha_decode": lambda: on(q=floats(2, 4, D), cache=collection(make, stored), **decode),
        "mha_decode_streaming_paged": lambda: on(q=floats(2, 4, D), **paged, **table, **decode),
        "mha_decode_streaming": lambda: on(q=floats(2, 4, D), cache=collection(make, stored), **decode),
        "mla_decode_paged": lambda: on(kv_cache=floats(PAGES, PAGE, LATENT + ROPE), **table, **rows),
        "mla_decode": lambda: on(cache=collection(make, stored, mla=True), **rows),
        "mha_prefill": lambda: on(q=floats(5, 4, D), k=floats(53, 2, D), v=floats(53, 2, D), **starts, **ragged),
        "attend_paged": lambda: on(q=floats(5, 4, D), **paged, **table, cu_seqlens_q=CU_Q, **ragged),
        "mha_prefill_paged": lambda: on(q=floats(5, 4, D), **paged, **table, cu_seqlens_q=CU_Q, **ragged),
        "mha_prefill_cache": lambda: on(
            q=floats(5, 4, D), cache=collection(make, stored, new=3), cu_seqlens_q=CU_Q, **ragged,
        ),
        "mla_prefill_paged": lambda: on(
            **projected, kv_cache=floats(PAGES, PAGE, LATENT + ROPE), **table, **starts, k_starts=LENS * 0, **ragged,
            latent_dim=LATENT,
        ),
        "mla_prefill": lambda: on(
            **projected, cache=collection(make, stored, mla=True, new=0), **starts, **ragged, latent_dim=LATENT,
        ),
        "mla_prefill_ragged": lambda: on(**projected, k_rope=floats(53, ROPE), **starts, **ragged),
        "kv_store_paged": lambda: on(**kv, **paged, slot_mapping=slots, **rope),
        "kv_store": lambda: on(**kv, cache=empty_collection(make, stored), cu_seqlens=CU_Q, **rope),
        "mla_store_paged": lambda: on(
            latent=floats(5, LATENT), k_rope=floats(5, ROPE), cache=rows_of_cache,
            slot_mapping=slots, **latent_rope,
        ),
        "merge_states": lambda: on(outs=floats(3, 5, 4, D), lses=floats(3, 5, 4), out=floats(5, 4, D)),
    }
    return good[name]()


OPERATIONS = tuple(name for name in attention.__all__ if isinstance(getattr(attention, name), PublicOperation))
