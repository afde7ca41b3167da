"""Calls over large pools made small: the pages that are kept, renumbered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .array_values import Entry, dtype_named, reach

TABLES, SLOTS = ("block_table", "table"), ("indices", "where")
"""Arguments that name pages, and those that name slots of pages."""

Values = dict[str, np.ndarray[Any, Any]]


def compacted(
    trees: Mapping[str, Any], entries: Mapping[str, Entry], storages: list[dict[str, int]], values: Values
) -> tuple[dict[str, Any], dict[str, Entry], list[dict[str, int]], Values]:
    """The same call over a pool of the kept pages alone, in their order, by new numbers: trees, entries, storages and
    values. Numbers of pages that are not kept stay: the call does not look at them. Without kept pages all is as it is.
    """
    paged = {name: values[f"{name}.pages"] for name in entries if f"{name}.pages" in values}
    paged = {name: rows for name, rows in paged.items() if entries[name]["strides"][0] > 0}
    rows = next(iter(paged.values()), None)
    if rows is None or any(not np.array_equal(rows, other) for other in paged.values()):
        return dict(trees), dict(entries), storages, values
    cache = next(entries[name] for name in ("k_cache", "kv_cache") if name in paged)
    in_heads = trees.get("kv_layout") == "HND" and len(cache["shape"]) == 4
    page_size, found, number = cache["shape"][2 if in_heads else 1], dict(values), dict(trees)
    small: dict[str, Entry] = {}
    ends = [0] * len(storages)
    for name, entry in entries.items():
        small[name] = entry
        if name in paged:
            small[name] = entry | {"shape": [len(rows), *entry["shape"][1:]]}
            found[f"{name}.pages"] = np.arange(len(rows))
        now = small[name]
        itemsize = dtype_named(now["dtype"], "dtype").itemsize
        high = reach(tuple(now["shape"]), tuple(now["strides"]), itemsize)[1]
        ends[now["storage"]] = max(ends[now["storage"]], now["offset"] + high)
    for name in TABLES:
        if name in found:
            found[name] = _renumbered(found[name], rows)
    slots = SLOTS if trees.get("form", "slots") == "slots" else SLOTS[:1]
    for name in slots:
        if name in found:
            old = found[name]
            page, slot = np.divmod(old.astype(np.int64), page_size)
            found[name] = (_renumbered(page, rows) * page_size + slot).astype(old.dtype)
    if type(trees.get("pages")) is int:
        number["pages"] = len(rows)
    sizes = [storage | {"bytes": end} for storage, end in zip(storages, ends, strict=True)]
    return number, small, sizes, found


def _renumbered(pages: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The place of each page among those that are kept, others as they are.

    >>> _renumbered(np.array([7, -1, 3, 99]), np.array([3, 7])).tolist()
    [1, -1, 0, 99]
    """
    if not len(rows):
        return pages
    place = np.minimum(np.searchsorted(rows, pages), len(rows) - 1)
    return np.where(rows[place] == pages, place, pages).astype(pages.dtype)
