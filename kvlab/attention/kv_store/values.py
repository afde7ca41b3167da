"""Checks of the values of KV store's arguments: slots, lengths, tables, positions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from kvlab.attention.features.intervals import host
from kvlab.attention.features.scales import is_four_bits
from kvlab.common.arrays import numbered, overlaps
from kvlab.common.checks import require

from .inputs import NORMAL, SMALLEST_SCALE, StoreInputs

_WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale", "k_block_scale", "v_block_scale", "k_min", "v_min")
_VALUES = ("where", "lens", "table", "positions")
_SCALES = ("k_scale", "v_scale")


def check_values(x: StoreInputs) -> None:
    """ValueError unless every token that is stored has a slot of its own, and a known angle.

    K's and V's memory are apart, too: else the order in which they are written would count.
    """
    written = {name: a for name, a in x.arrays().items() if name in _WRITTEN and a.ndim > 3}
    if x.no_v:
        del written["v_cache"]
    read = {} if x.cos is None else {x.rope: x.k if x.rope == "k" else x.v}
    for (name, one), (other, two) in itertools.combinations({**written, **read}.items(), 2):
        label, beside = getattr(x.names, name), getattr(x.names, other)
        require(not overlaps(one, two), f"{label} shares memory with {beside}", "memory of its own")
    for name in _SCALES:
        scale = x.arrays().get(name)
        if getattr(scale, "ndim", 0) == 1:
            values = host(scale).astype(np.float32)
            bad, label = ~((values >= SMALLEST_SCALE) & np.isfinite(values)), getattr(x.names, name)
            require(not bad.any(), f"{label}[{int(bad.argmax())}] is {values[bad.argmax()]}", NORMAL)
    arrays = {name: host(a) for name, a in x.arrays().items() if name in _VALUES}
    where, lens, table, positions = (_signed(arrays[name]) if name in arrays else None for name in _VALUES)
    assert where is not None
    B, S, page_size = x.k.shape[0], x.k.shape[1], x.k_cache.shape[1]
    if x.form == "slots":
        bad = where >= x.pages * page_size
        if bad.any():
            t = int(bad.argmax())
            raise ValueError(
                f"{x.names.where}[{t}] is {int(arrays['where'][t])}: must be below {x.pages * page_size}, the slots of "
                f"{x.pages} pages of {page_size}, or negative to skip the token"
            )
        token, slot = np.nonzero(where >= 0)[0], where[where >= 0]
        position = slot
    else:
        assert lens is not None
        assert table is not None
        token, slot, position = _through_table(x, where, lens, table, B, S, page_size)
    order = np.argsort(slot, kind="stable")
    twice = np.nonzero(np.diff(slot[order]) == 0)[0]
    if twice.size:
        one, two = token[order[twice[0]]], token[order[twice[0] + 1]]
        raise ValueError(f"tokens {one} and {two} have the same slot {slot[order[twice[0]]]}: each needs its own")
    for name, cache in (("k", x.k_cache), ("v", x.v_cache))[: 2 - x.no_v]:
        if is_four_bits(cache):
            rows = host(getattr(x, name))
            lost = token[np.isnan(rows.reshape(B * S, *rows.shape[2:])[token]).any(axis=(1, 2))]
            if lost.size:
                label = getattr(x.names, name)
                raise ValueError(f"{label} of token {lost[0]} has a NaN: must be numbers, since 4 bits hold no NaN")
    if x.cos is not None:
        at = position if positions is None else positions.reshape(-1)[token]
        bad = (at < 0) | (at >= x.cos.shape[0])
        if bad.any():
            what = "position" if positions is None else "positions has a position"
            raise ValueError(f"{what} {at[bad][0]}: must be 0 to {x.cos.shape[0] - 1}, the rows of cos and sin")


def _signed(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """As int64; what it does not hold is its largest, as far outside as before."""
    largest = numbers.dtype.type(np.iinfo(np.int64).max) if numbers.dtype == np.uint64 else None
    return (numbers if largest is None else np.minimum(numbers, largest)).astype(np.int64)


def _through_table(
    x: StoreInputs, where: Any, lens: Any, table: Any, B: int, S: int, page_size: int
) -> tuple[Any, Any, Any]:
    """Token, slot and position of all tokens whose page exists. ValueError for the others, unless not strict."""
    if x.form == "ragged":
        if where[0] < 0 or (np.diff(where) < 0).any() or where[-1] > S:
            raise ValueError(
                f"{x.names.where} {where.tolist()}: must rise from 0 to at most {S}, the tokens of k, and never fall"
            )
        first, count = where[:-1], np.diff(where)
    else:
        bad = (where < 0) | (where > S)
        if bad.any():
            raise ValueError(f"{x.names.where}[{int(bad.argmax())}] is {where[bad][0]}: must be 0 to {S}")
        first, count = np.arange(B) * S, where
    sequence, new = numbered(count)
    position = lens[sequence] + new
    outside = (position < 0) | (position >= table.shape[1] * page_size)
    if outside.any():
        b = sequence[outside][0]
        raise ValueError(
            f"token {position[outside][0]} of sequence {b}: its page table holds {table.shape[1] * page_size} "
            f"tokens, {table.shape[1]} pages of {page_size}"
        )
    page = table[sequence, position // page_size]
    known = (page >= 0) & (page < x.pages)
    if x.strict and not known.all():
        b, t = sequence[~known][0], position[~known][0]
        raise ValueError(
            f"lookup_table[{b}, {t // page_size}] is {page[~known][0]}, which is none of the pages [0, {x.pages}): "
            f"token {t} of sequence {b} has no page"
        )
    slot = page * page_size + position % page_size
    return (first[sequence] + new)[known], slot[known], position[known]
