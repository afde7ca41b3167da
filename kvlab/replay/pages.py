"""Pages that a call names: all that is kept of a cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.features.intervals import host

PAGED = (
    "k_cache", "v_cache", "kv_cache", "k_scale", "v_scale", "k_block_scale", "v_block_scale", "k_min", "v_min",
)
"""Arguments whose first axis may be pages."""


def pages_named(arguments: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The pages that a call with these arguments may read or write, for each of its arrays of pages; empty where it has
    none, or names all of them. A table's entries past the end of a sequence do not count.

    >>> cache, table = np.zeros((6, 16, 1, 64)), np.array([[5, 1, 7], [2, 0, 3]])
    >>> named = pages_named({"k_cache": cache, "v_cache": cache, "block_table": table, "seq_lens": np.array([17, 3])})
    >>> {name: pages.tolist() for name, pages in named.items()}
    {'k_cache': [1, 2, 5], 'v_cache': [1, 2, 5]}
    """
    cache: Any = next((arguments[name] for name in ("k_cache", "kv_cache") if arguments.get(name) is not None), None)
    if getattr(cache, "ndim", 0) < 3:
        return {}
    total, in_heads = int(cache.shape[0]), arguments.get("kv_layout") == "HND" and cache.ndim == 4
    page_size = int(cache.shape[2 if in_heads else 1])
    if not page_size or not total:
        return {}
    try:
        named = _named(arguments, page_size)
    except (ValueError, TypeError, IndexError, AttributeError, RuntimeError):  # what the call itself will refuse
        return {}
    if named is None:
        return {}
    pages = np.unique(named[(named >= 0) & (named < total)])
    if len(pages) == total:
        return {}
    paged = [n for n in PAGED if getattr(arguments.get(n), "ndim", 0) >= 3 and arguments[n].shape[0] == total]
    return dict.fromkeys(paged, pages)


def _named(arguments: dict[str, Any], page_size: int) -> np.ndarray[Any, Any] | None:
    table, lens = arguments.get("block_table"), arguments.get("seq_lens")
    if arguments.get("indices") is not None:
        return host(arguments["indices"]).astype(np.int64) // page_size
    if table is not None and lens is not None:
        entries, keys = host(table).astype(np.int64), host(lens).astype(np.int64)
        seen = np.arange(entries.shape[1]) * page_size < keys[:, None]
        return entries[seen]
    if arguments.get("table") is not None:
        return host(arguments["table"]).astype(np.int64).ravel()
    if arguments.get("where") is not None:
        return host(arguments["where"]).astype(np.int64) // page_size
    return None
