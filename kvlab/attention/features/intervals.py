"""The run of keys that a query sees, as four numbers: what kernels get of most masks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.attention.tiles.masked import load
from kvlab.common.arrays import to_numpy
from kvlab.common.checks import is_integer, shown
from kvlab.common.torch_here import is_torch
from kvlab.staging import ceildiv

if TYPE_CHECKING:
    import triton.language as tl

Array = np.ndarray[Any, Any]

UNLIMITED = 1 << 30
"""A side of an interval without a bound."""
FAR = 1 << 29
"""The farthest position of a query, in either direction."""


@dataclass(frozen=True)
class Interval:
    """The run of keys that a query at position p sees: ``p - left`` to ``p + right``, in p's chunk, below valid. A
    negative side is on p's other side: left of -2 begins at p + 2, right of -2 ends at p - 2.

    chunk : keys of a chunk, 0 for no chunks. valid : None, or integers ``[B]``, keys of each sequence that may be seen.

    >>> Interval(left=2, right=0).bounds(np.arange(5), 5)
    (array([0, 0, 0, 1, 2]), array([1, 2, 3, 4, 5]))
    >>> Interval(chunk=3).bounds(np.arange(-1, 5), 5)
    (array([0, 0, 0, 0, 3, 3]), array([0, 3, 3, 3, 5, 5]))
    """

    left: int = UNLIMITED
    right: int = UNLIMITED
    chunk: int = 0
    valid: Any = None

    def bounds(self, q_pos: Any, num_keys: Any, batch: Any = None) -> tuple[Array, Array]:
        """(first, limit): a query at ``q_pos`` of a sequence of ``num_keys`` keys sees ``first <= key < limit``."""
        p = np.asarray(q_pos)
        end = num_keys if self.valid is None else np.minimum(num_keys, host(self.valid)[batch])
        first, limit = np.maximum(p - self.left, 0), np.minimum(p + self.right + 1, end)
        if self.chunk:
            start = p // self.chunk * self.chunk
            first, limit = np.maximum(first, start), np.minimum(limit, np.maximum(start + self.chunk, 0))
        return first, limit

    def __and__(self, other: Interval) -> Interval | None:
        """The keys in both; None if that has no such form (different chunks)."""
        if self.chunk and other.chunk and self.chunk != other.chunk:
            return None
        valid = other.valid if self.valid is None else self.valid
        if self.valid is not None and other.valid is not None and self.valid is not other.valid:
            valid = self.valid * (self.valid < other.valid) + other.valid * (self.valid >= other.valid)
        chunk = self.chunk or other.chunk
        return Interval(min(self.left, other.left), min(self.right, other.right), chunk, valid)

    def __or__(self, other: Interval) -> Interval | None:
        """The keys in either; None if that has no such form."""
        for one in (self, other):
            if one == Interval():
                return one
        if self.chunk != other.chunk or self.valid is not other.valid:
            return None
        return replace(self, left=max(self.left, other.left), right=max(self.right, other.right))


def window_interval(causal: bool, window: Any) -> Interval:
    """The interval of the arguments ``causal`` and ``window``.

    >>> window_interval(True, 128), window_interval(False, (128, 16)) == Interval(128, 16)
    (Interval(left=127, right=0, chunk=0, valid=None), True)
    >>> window_interval(True, (100, -4)), window_interval(False, (-4, None)) == Interval(left=-4)
    (Interval(left=100, right=-4, chunk=0, valid=None), True)
    """
    left = right = UNLIMITED
    if is_integer(window):
        if window < 1:
            raise ValueError(f"window is {window}: must be at least 1, the keys that a query sees, itself among them")
        if not causal:
            raise ValueError(f"window {window} with causal=False: must be a pair (left, right)")
        left = min(int(window) - 1, UNLIMITED)
    elif window is not None:
        pair = isinstance(window, tuple | list) and len(window) == 2
        sides: list[Any] = [UNLIMITED if side is None else side for side in window] if pair else [None]
        if not all(map(is_integer, sides)):
            raise ValueError(
                f"window is {shown(window)}: must be None, a number of keys, or a pair (left, right) of numbers or None"
            )
        if -1 in sides:
            raise ValueError(
                f"window is {shown(window)}: must be without -1: no bound is None, one key on the query's other side "
                "masks.BandMask"
            )
        left, right = map(side_of, sides)
    interval = Interval(left, min(right, 0) if causal else right)
    if interval.left + interval.right < 0:
        with_causal = ", causal" if causal and right else ""
        raise ValueError(f"window is {shown(window)}{with_causal}: must leave keys to see, left + right of at least 0")
    return interval


def side_of(bound: Any) -> int:
    """A side of an interval from an integer; None, or further than any key, bounds nothing."""
    return UNLIMITED if bound is None else max(-UNLIMITED, min(int(bound), UNLIMITED))


def most_keys(columns: int, page_size: int) -> int:
    """Keys that a row of the page table can hold, and that 32 bits can count.

    >>> most_keys(4, 16), most_keys(1 << 28, 16) == UNLIMITED
    (64, True)
    """
    return min(columns * page_size, UNLIMITED)


def key_count(length: Array, most: int) -> Array:
    """Keys of sequences of these lengths, any integers: none below 0, and none beyond ``most``; int32.

    >>> key_count(np.array([65, 1, -3]), 64)
    array([64,  1,  0], dtype=int32)
    """
    return np.maximum(np.minimum(length.astype(np.int64), most), 0).astype(np.int32)


def keys_in_table(seq_lens: Any, block_table: Any, page_size: int) -> Array:
    """Keys of each sequence, no more than its row of the table holds; int64 in CPU memory.

    >>> keys_in_table(np.array([65, 1]), np.zeros((2, 4)), 16)
    array([64,  1])
    """
    return key_count(host(seq_lens), most_keys(int(block_table.shape[1]), page_size)).astype(np.int64)


def host(array: Any) -> Array:
    """In CPU memory, as NumPy."""
    return to_numpy(array.cpu() if is_torch(array) else np.asarray(array))


def key_range(position: Array, end: Array, left: int, right: int, chunk: int) -> tuple[Array, Array]:
    """(first, limit): the rows at ``position`` see ``first <= key < limit``; ``end`` keys may be seen at most."""
    first = np.maximum(position - np.int32(left), 0)
    limit = np.minimum(position + np.int32(right) + 1, end)
    if chunk > 0:
        start = np.maximum(position, 0) // np.int32(chunk) * np.int32(chunk)
        first = np.maximum(first, start)
        limit = np.minimum(limit, np.where(position < 0, 0, start + np.int32(chunk)))
    return first, limit


def visible_end(num_keys: Array, valid_array: Array | None, batch: Array) -> Array:
    """Keys of sequences that may be seen: all, or the first of them that ``valid_array`` counts, any integers."""
    end = num_keys
    if valid_array is not None:
        end = np.maximum(np.minimum(valid_array[batch].astype(np.int64), num_keys), 0).astype(np.int32)
    return end


def padding(num_keys: Array, leftpad_array: Array | None, batch: Array) -> Array:
    """Keys of sequences before their first valid one: none, or those that ``leftpad_array`` counts, any integers."""
    pad = num_keys * 0
    if leftpad_array is not None:
        pad = np.maximum(np.minimum(leftpad_array[batch].astype(np.int64), num_keys), 0).astype(np.int32)
    return pad


def given_positions(
    positions_array: Array | None, batch: Array, row: Array, exists: Array, position: Array, lowest: Array,
    highest: Array,
) -> tuple[Array, Array, Array]:
    """(position, lowest, highest): of query rows ``row`` ``[P, BM]``, and of all of a program's that exist ``[P]``;
    those of the arguments, or what ``positions_array`` ``[B or 1, rows]`` tells, any integers.
    """
    if positions_array is not None:
        batch = batch[:, None] if len(positions_array) > 1 else np.zeros((1, 1), np.int64)  #- address
        given = load(positions_array, (batch, row), mask=exists, other=0).astype(np.int64)
        position = np.maximum(np.minimum(given, FAR), -FAR).astype(np.int32)
        lowest = np.min(np.where(exists, position, np.int32(FAR)), 1)
        highest = np.max(np.where(exists, position, np.int32(-FAR)), 1)
    return position, lowest, highest


def split_keys(
    seq_lens_array: Array | None, features: Any, batch: Array, token: Array, split: Array, problem: Any, config: Any
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """(position, lo, hi, first, limit, pad): positions of new tokens ``token`` ``[P, BM]`` of sequences ``batch``
    ``[P]``; the keys ``lo ... hi`` of a split ``[P]``, whole tiles of those that some new token sees; of these a row
    ``[P, BM]`` sees the keys from ``first`` to below ``limit``. All count from the first valid key, before which there
    are ``pad``.

    seq_lens_array : keys of each sequence; None: ``max_keys`` each.
    features : Features.
    problem : has ``tokens`` and ``max_keys``.
    config : has ``num_splits`` and ``BN``.
    """
    mask = features.mask  #- launch
    num_keys = np.full(batch.shape, problem.max_keys, np.int32)
    if seq_lens_array is not None:
        num_keys = key_count(seq_lens_array[batch], problem.max_keys)
    pad = padding(num_keys, mask.leftpad, batch)
    num_keys = num_keys - pad
    position, lowest, highest = given_positions(
        mask.positions, batch, token, token < problem.tokens, num_keys[:, None] - problem.tokens + token,
        num_keys - problem.tokens, num_keys - 1,
    )
    end = visible_end(num_keys, mask.valid, batch)
    begin = np.zeros_like(num_keys)
    if mask.windowed:
        begin, _ = key_range(lowest, end, mask.left, mask.right, mask.chunk)
    _, stop = key_range(highest, end, mask.left, mask.right, mask.chunk)
    stop = np.maximum(stop, begin)
    size = ceildiv(ceildiv(stop - begin, config.num_splits), config.BN) * config.BN
    lo = np.minimum(begin + split * size, stop)
    hi = np.minimum(lo + size, stop)
    first, limit = key_range(position, end[:, None], mask.left, mask.right, mask.chunk)
    return position, lo, hi, np.maximum(first, lo[:, None]), np.minimum(limit, hi[:, None]), pad


def key_range_kernel(position, end, left, right, chunk):
    """(first, limit) as of ``key_range``; ``chunk`` None: no chunks."""
    first = tl.maximum(position - left, 0)
    limit = tl.minimum(position + right + 1, end)
    if chunk is not None:
        start = tl.maximum(position, 0) // chunk * chunk
        first = tl.maximum(first, start)
        limit = tl.minimum(limit, tl.where(position < 0, 0, start + chunk))
    return first, limit


def key_count_kernel(length, most):
    """Keys of a sequence of this length, as of ``key_count``."""
    return tl.maximum(tl.minimum(length.to(tl.int64), most), 0).to(tl.int32)


def visible_end_kernel(num_keys, valid_ptr, batch):
    """Keys of a sequence that may be seen, as of ``visible_end``."""
    end = num_keys
    if valid_ptr is not None:
        end = tl.maximum(tl.minimum(tl.load(valid_ptr + batch).to(tl.int64), num_keys), 0).to(tl.int32)
    return end


def padding_kernel(num_keys, leftpad_ptr, batch):
    """Keys of a sequence before its first valid one, as of ``padding``."""
    pad = num_keys * 0
    if leftpad_ptr is not None:
        pad = tl.maximum(tl.minimum(tl.load(leftpad_ptr + batch).to(tl.int64), num_keys), 0).to(tl.int32)
    return pad


def given_positions_kernel(positions_ptr, positions_batch, batch, row, exists, position, lowest, highest):
    """(position, lowest, highest) of rows ``[BM]``, as of ``given_positions``."""
    if positions_ptr is not None:
        given = tl.load(positions_ptr + batch * positions_batch + row, mask=exists, other=0).to(tl.int64)
        position = tl.maximum(tl.minimum(given, FAR), -FAR).to(tl.int32)
        lowest = tl.min(tl.where(exists, position, FAR), 0)
        highest = tl.max(tl.where(exists, position, -FAR), 0)
    return position, lowest, highest


def split_keys_kernel(seq_lens_ptr, features, mask, batch, token, split, problem, BN, BOUNDED):
    """(position, lo, hi, first, limit, pad) as of ``split_keys``. ``mask``: FeatureNumbers. ``problem``: DecodeSizes.
    """
    num_keys = tl.full([], problem.max_keys, tl.int32)
    if seq_lens_ptr is not None:
        num_keys = key_count_kernel(tl.load(seq_lens_ptr + batch * problem.seq_lens_batch), problem.max_keys)
    pad = padding_kernel(num_keys, features.leftpad, batch)
    num_keys = num_keys - pad
    position, lowest, highest = given_positions_kernel(
        features.positions, mask.positions_batch, batch, token, token < problem.tokens,
        num_keys - problem.tokens + token, num_keys - problem.tokens, num_keys - 1,
    )
    end = visible_end_kernel(num_keys, features.valid, batch)
    begin = 0
    if BOUNDED:
        begin, _ = key_range_kernel(lowest, end, mask.left, mask.right, mask.chunk)
    _, stop = key_range_kernel(highest, end, mask.left, mask.right, mask.chunk)
    stop = tl.maximum(stop, begin)
    size = tl.cdiv(tl.cdiv(stop - begin, problem.num_splits), BN) * BN
    lo = tl.minimum(begin + split * size, stop)
    hi = tl.minimum(lo + size, stop)
    first, limit = key_range_kernel(position, end, mask.left, mask.right, mask.chunk)
    return position, lo, hi, tl.maximum(first, lo), tl.minimum(limit, hi), pad
