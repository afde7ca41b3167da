"""Sequences of any lengths one after the other: the checks of ``cu_seqlens``, what it tells, and calls over them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.call.call import Call
from kvlab.attention.call.checks import check_array, check_integers, check_strides, countable
from kvlab.attention.features.intervals import host
from kvlab.common.arrays import on_gpu, same_place
from kvlab.common.checks import is_integer, require
from kvlab.common.torch_here import is_torch


def keys_with_new(cache: Any, starts: Any) -> Any:
    """Keys of each sequence of a cache, the new tokens that lie between ``starts`` among them. ValueError unless
    ``cu_seqlens_q`` is of as many sequences, and can be added to the lengths.
    """
    check_array("cu_seqlens_q", starts)
    same_place(cu_seqlens_q=starts, cache=cache.cache_lengths)
    require(starts.ndim == 1 and starts.shape[0] >= 1, f"cu_seqlens_q has shape {tuple(starts.shape)}", "[B + 1]")
    check_integers("cu_seqlens_q", starts)
    check_strides("cu_seqlens_q", starts)
    batch, given = int(cache.cache_lengths.shape[0]), int(starts.shape[0]) - 1
    require(batch == given, f"cu_seqlens_q of {given} sequences", f"those of the cache, {batch}")
    starts = countable(starts)
    return countable(cache.cache_lengths) + (starts.diff() if is_torch(starts) else np.diff(starts))


def check_offsets(name: str, starts: Any, rows: Any, most: int | None) -> None:
    """ValueError unless the starts cut ``rows`` into sequences, none of them longer than ``most``."""
    o = host(starts).astype(np.int64)
    total, lengths = int(rows.shape[0]), np.diff(o)
    good = o[0] == 0 and (lengths >= 0).all() and o[-1] == total
    require(good, f"{name} is {o.tolist()}", f"numbers from 0 to {total}, the rows, none less than the one before")
    if most is not None and lengths.size:
        found = int(lengths.max())
        require(found <= most, f"max_seqlen_q is {most}", f"at least {found}, the longest sequence of {name}")


def sequence_lengths(starts: Any) -> np.ndarray[Any, Any]:
    """Rows of each sequence, int64 in CPU memory."""
    return np.diff(host(starts).astype(np.int64))


def check_grid(grid: tuple[int, ...], batch: int, max_q: int) -> None:
    """ValueError for more programs than the first axis of a GPU's grid has places for."""
    what = f"a grid of {grid[0]} programs for {batch} sequences of up to {max_q} new tokens"
    require(grid[0] < 1 << 31, what, "of less than 2^31; max_seqlen_q tells the longest of ragged ones")


def longest(max_seqlen: int | None, q: Any, starts: Any) -> int:
    """The longest sequence of q ``[total, ..]`` that a grid has to hold: the one that is given, or that of ``starts``,
    or all rows where looking would mean to wait for a GPU.
    """
    if max_seqlen is None:
        rows = int(q.shape[0])
        return rows if on_gpu(q) else min(int(sequence_lengths(starts).max(initial=0)), rows)
    require(is_integer(max_seqlen) and max_seqlen >= 0, f"max_seqlen_q is {max_seqlen!r}", "a number of tokens")
    return min(int(max_seqlen), int(q.shape[0]))


class PrefillCall(Call[Any]):
    """A call over queries ``[total, H, D]`` of ``batch`` sequences, none longer than ``longest``. Subclasses tell
    ``keys``.
    """

    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    q: Any
    batch: int
    longest: int

    def decisive(self) -> tuple[Any, ...] | None:
        """None where the values of ``cu_seqlens_q`` decide the longest sequence: a plan holds for them alone."""
        told = self.cu_seqlens_q is None or self.max_seqlen_q is not None or on_gpu(self.q)
        return super().decisive() if told else None

    def count_sequences(self) -> None:
        """Set ``batch`` and ``longest``."""
        self.batch = int(self.cu_seqlens_q.shape[0]) - 1
        self.longest = longest(self.max_seqlen_q, self.q, self.cu_seqlens_q)

    def lengths(self) -> tuple[Any, Any]:
        """New tokens and keys of each sequence."""
        self.look(self.q)
        return sequence_lengths(self.cu_seqlens_q), self.keys()

    def keys(self) -> Any:
        """Keys of each sequence, in CPU memory."""
        return sequence_lengths(self.cu_seqlens_k)

    def check_values(self) -> None:
        check_offsets("cu_seqlens_q", self.cu_seqlens_q, self.q, self.longest)

    def named(self) -> dict[str, Any]:
        return super().named() | {"problem": self.plan.problem}
