"""A paged pool out of dense K and V: pages shuffled, everything nobody should read poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvlab.cache.collection import PagedKVCacheCollection
from kvlab.cache.static_params import KVCacheStaticParams
from kvlab.common.arrays import numbered, to_numpy
from kvlab.common.checks import count, flag, integers


def from_dense(
    k: Sequence[Any], v: Sequence[Any] | None, lengths: Any, page_size: int, *, new_tokens: int = 0,
    shuffle: int | None = None, spare_pages: int = 0, poison: bool = True,
) -> PagedKVCacheCollection:
    """A :class:`PagedKVCacheCollection` of NumPy memory that holds the first ``lengths[b]`` tokens of every sequence.

    Parameters
    ----------
    k, v : for each layer ``[batch, tokens, heads, head_size]``, all of one shape and dtype, NumPy or torch on the CPU;
        ``v=None`` for MLA.
    lengths : integers ``[batch]``, stored tokens of each sequence, the new ones included.
    page_size : tokens of a page.
    new_tokens : how many of the stored tokens of each sequence are the new ones of this step:
        ``cache_lengths = lengths - new_tokens``. A sequence with fewer tokens counts as empty before the step.
    shuffle : seed of the permutation that deals the pages, or None to deal them in order.
    spare_pages : pages of the pool that no sequence uses.
    poison : leave NaN (bytes 0xFF) in unused slots, spare pages and the null page; zeros if False.

    >>> k = np.arange(2 * 5, dtype=np.float32).reshape(1, 2, 5, 1, 1)
    >>> pool = from_dense(k, -k, lengths=[5, 2], page_size=4, shuffle=0)
    >>> pool.lookup_table[:, :3]  # 3 pages: the sentinel is 3
    array([[2, 0, 3],
           [1, 3, 3]], dtype=uint32)
    >>> pool.blocks[:, 0, 0, :, 0, 0]  # K, by pages
    array([[ 4., nan, nan, nan],
           [ 5.,  6., nan, nan],
           [ 0.,  1.,  2.,  3.],
           [nan, nan, nan, nan]], dtype=float32)
    """
    keys, values = _layers("k", k), None if v is None else _layers("v", v)
    batch, tokens, heads, head_size = _check(keys, values)
    lengths = integers("lengths", lengths)
    if lengths.shape != (batch,) or (lengths < 0).any() or (lengths > tokens).any():
        raise ValueError(f"lengths is {lengths.tolist()}: must be {batch} numbers in [0, {tokens}], as k has")
    count("page_size", page_size, least=1)
    count("new_tokens", new_tokens)
    count("spare_pages", spare_pages)
    flag("poison", poison)

    pages_each = -(-lengths // page_size)
    used = int(pages_each.sum())
    pool = PagedKVCacheCollection.allocate(
        KVCacheStaticParams(heads, head_size, is_mla=values is None), num_pages=used + spare_pages, page_size=page_size,
        num_layers=len(keys), batch_size=batch, max_length=tokens, dtype=keys[0].dtype,
    )
    if not poison:
        pool.blocks[...] = 0
    dealt = np.arange(used + spare_pages)
    if shuffle is not None:
        dealt = np.random.default_rng(shuffle).permutation(dealt)
    sequence, column = numbered(pages_each)
    pool.lookup_table[sequence, column] = dealt[:used]

    sequence, token = numbered(lengths)
    page, slot = pool.lookup_table[sequence, token // page_size], token % page_size
    for half, layers in enumerate((keys, values or [])):
        for layer, dense in enumerate(layers):
            pool.blocks[page, half, layer, slot] = dense[sequence, token]
    return pool.with_lengths(np.maximum(lengths - new_tokens, 0).astype(np.uint32), new_tokens)._replace(
        max_cache_length=int(lengths.max(initial=0))
    )


def _layers(name: str, arrays: Any) -> list[np.ndarray[Any, Any]]:
    """The array of each layer. ValueError, naming the argument, for what has no layers."""
    try:
        layers = list(arrays)
    except TypeError:
        what = type(arrays).__name__ + (" without axes" if np.ndim(arrays) == 0 and hasattr(arrays, "shape") else "")
        raise ValueError(f"{name} is a {what}: must be [batch, tokens, heads, head_size] for each layer") from None
    return [to_numpy(layer, name) for layer in layers]


def _check(keys: list[Any], values: list[Any] | None) -> tuple[int, ...]:
    if not keys or keys[0].ndim != 4:
        raise ValueError(
            f"k has {len(keys)} layers{f' of shape {keys[0].shape}' if keys else ''}: must be at least one of "
            "[batch, tokens, heads, head_size]"
        )
    if values is not None and len(values) != len(keys):
        raise ValueError(f"v has {len(values)} layers, k {len(keys)}: must be as many")
    for name, layers in (("k", keys), ("v", values or [])):
        for number, layer in enumerate(layers):
            if (layer.shape, layer.dtype) != (keys[0].shape, keys[0].dtype):
                raise ValueError(
                    f"{name}[{number}] is {layer.shape} {layer.dtype}, k[0] is {keys[0].shape} {keys[0].dtype}: "
                    "all layers of k and v must be alike"
                )
    return tuple(keys[0].shape)
