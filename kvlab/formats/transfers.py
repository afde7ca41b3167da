"""Transfer of a sequence between ranks that keep it in other formats, pages and shares of the heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from kvlab.common.arrays import to_numpy
from kvlab.common.checks import Int64, count, integers, require, shown
from kvlab.common.drawn import Drawn

from .codec import Bytes, numbers
from .conversion import check_flat, check_same
from .copies import Copies, copies_of
from .field import REPLICA, Field
from .format import Format, check_formats

Heads = tuple[tuple[int, ...], ...]


def heads_of_ranks(heads: int, degree: int) -> Heads:
    """The KV heads of each of ``degree`` ranks: those of its query heads, which are shared out evenly.

    Fewer heads than ranks are replicated; so is a head whose query heads two ranks share.

    >>> heads_of_ranks(4, 2), heads_of_ranks(2, 4), heads_of_ranks(3, 2)
    (((0, 1), (2, 3)), ((0,), (0,), (1,), (1,)), ((0, 1), (1, 2)))
    """
    heads, degree = count("heads", heads, 1, 20), count("degree", degree, 1, 12)
    return tuple(tuple(range(rank * heads // degree, -(-(rank + 1) * heads // degree))) for rank in range(degree))


@lru_cache(64)
def _local(made: Format, heads: int) -> Format:
    return made.resized(head=heads)


@dataclass(frozen=True)
class Ranks:
    """End of a transfer: the format of all heads, the heads of each rank, the pages of the sequence in its order.

    >>> side = Ranks(Format.parse("page:4 slot:16 head:4 dim:64 k.bf16"), heads_of_ranks(4, 2), np.array([2, 0]))
    >>> side.degree, side.local(1)
    (2, Format(page:4 slot:16 head:2 dim:64 k.bf16))
    """

    format: Format
    heads: Heads
    pages: Int64

    @property
    def degree(self) -> int:
        """Ranks."""
        return len(self.heads)

    def local(self, rank: int) -> Format:
        """The format of a rank: that of all heads with as many heads as the rank has."""
        return _local(self.format, len(self.heads[rank]))

    def tokens(self, field: Field, tokens: int) -> tuple[Int64, int]:
        """The part of the address that tokens give, and how many of them share an element; 0 shares it by all."""
        slots = self.format.sizes.get("slot", 1)
        if "slot" not in field.axes and "page" not in field.axes:
            return np.zeros(1, np.int64), int(slots * self.format.sizes.get("page", 1) == 1)
        group = field.group("slot") or slots
        at = np.arange(0, tokens, group)
        return field.table("page")[self.pages[at // slots] if "page" in field.axes else 0 * at] + (
            field.table("slot")[at % slots] if "slot" in field.axes else 0
        ), group


@dataclass(frozen=True)
class Transfer(Drawn):
    """Byte copies of every pair of ranks: what :func:`transfer` gives.

    pairs    (source rank, target rank) -> :class:`Copies` between their own buffers

    >>> nhd = Format.parse("page:4 kv:2 slot:16 head:4 dim:64 kv.bf16")
    >>> hnd = Format.parse("page:2 kv:2 head:4 slot:32 dim:64 kv.bf16")
    >>> plan = transfer(nhd, hnd, degrees=(1, 2), tokens=50)
    >>> plan
    Transfer(1 -> 2 ranks: 400 copies, 51200 bytes)
    >>> plan.proof()
    Proof(expected=51200, arrived=51200, twice=0)
    """

    source: Ranks
    target: Ranks
    tokens: int
    pairs: Mapping[tuple[int, int], Copies]

    def __repr__(self) -> str:
        ranks = f"{self.source.degree} -> {self.target.degree} ranks"
        return f"Transfer({ranks}: {self.descriptors} copies, {self.nbytes} bytes)"

    @property
    def descriptors(self) -> int:
        """Copies of all pairs."""
        return sum(map(len, self.pairs.values()))

    @property
    def nbytes(self) -> int | float:
        """Bytes of all pairs."""
        return sum(copies.nbytes for copies in self.pairs.values())

    def proof(self) -> Proof:
        """The count of what arrives at the target ranks against what they have to hold."""
        expected = arrived = twice = 0
        for rank in range(self.target.degree):
            mine = [copies for (_, to), copies in self.pairs.items() if to == rank]
            start = np.concatenate([copies.target for copies in mine] or [np.zeros(0, np.int64)])
            length = np.concatenate([copies.length for copies in mine] or [np.zeros(0, np.int64)])
            order = np.argsort(start, kind="stable")
            start, end = start[order], (start + length)[order]
            reach = np.maximum.accumulate(end)
            double = int(np.maximum(np.minimum(reach[:-1], end[1:]) - start[1:], 0).sum())
            twice, arrived = twice + double, arrived + int(length.sum()) - double
            expected += self._held(rank)
        return Proof(*(bits // 8 if bits % 8 == 0 else bits / 8 for bits in (expected, arrived, twice)))

    def _held(self, rank: int) -> int:
        """Bits that a target rank holds of the sequence."""
        local = self.target.local(rank)
        total = 0
        for field in local.fields:
            tokens, _ = self.target.tokens(field, self.tokens)
            rest = [len(field.table(a)[:: field.group(a)]) for a in field.axes if a not in ("page", "slot")]
            total += field.type.bits * field.copies * tokens.size * int(np.prod(rest, dtype=np.int64))
        return total

    def message(self, pair: tuple[int, int], source: Any) -> Bytes:
        """The bytes that a source rank sends to a target rank, one copy after the other, uint8; for whole bytes."""
        copies, flat = self._whole(pair), self.source.local(pair[0]).bytes_of(source, "source")
        end = np.cumsum(copies.length)
        out = np.zeros(int(copies.length.sum()) // 8, np.uint8)
        Copies(copies.source, end - copies.length, copies.length).apply(flat, out)
        return out

    def receive(self, pair: tuple[int, int], message: Any, target: Bytes) -> None:
        """Put a message where it belongs in a target rank's buffer, uint8."""
        copies, end = self._whole(pair), np.cumsum(self.pairs[pair].length)
        size = int(copies.length.sum()) // 8
        flat = numbers(message, "message").reshape(-1)
        said = f"message has shape {flat.shape} and dtype {flat.dtype}"
        require(flat.dtype == np.uint8 and flat.size == size, said, f"uint8 [{size}]")
        check_flat(target, "target", self.target.local(pair[1]).nbytes)
        Copies(end - copies.length, copies.target, copies.length).apply(flat, to_numpy(target, "target"))

    def _whole(self, pair: tuple[int, int]) -> Copies:
        known = isinstance(pair, tuple) and pair in self.pairs
        require(known, f"pair is {shown(pair)}", f"one of {', '.join(map(str, self.pairs))}")
        require(self.pairs[pair].whole, f"pair {pair} copies half bytes", "transferred by apply")
        return self.pairs[pair]

    def apply(self, sources: Sequence[Any], targets: Sequence[Bytes] | None = None) -> list[Bytes]:
        """Execute all copies: the buffers of the target ranks, new ones of zeros unless ``targets`` are given.

        sources    a buffer for each source rank
        """
        mine = _one_a_rank("sources", sources, self.source.degree)
        flat = [self.source.local(rank).bytes_of(one, f"sources[{rank}]") for rank, one in enumerate(mine)]
        sizes = [self.target.local(rank).nbytes for rank in range(self.target.degree)]
        made = [np.zeros(size, np.uint8) for size in sizes] if targets is None else targets
        out = _one_a_rank("targets", made, self.target.degree)
        for rank, (one, size) in enumerate(zip(out, sizes, strict=True)):
            check_flat(one, f"targets[{rank}]", size)
        for (source, target), copies in self.pairs.items():
            copies.apply(flat[source], to_numpy(out[target], "targets"))
        return out


def _one_a_rank(name: str, given: Any, degree: int) -> list[Any]:
    """A buffer of each rank; ValueError for something else."""
    several = isinstance(given, list | tuple) or getattr(given, "ndim", 0) > 0
    require(several, f"{name} is {shown(given)}", f"a list of {degree} buffers, one a rank")
    require(len(given) == degree, f"{name} are {len(given)}", f"{degree}, one a rank")
    return list(given)


@dataclass(frozen=True)
class Proof:
    """Count of bytes at the target ranks: true where each that they have to hold arrives exactly once.

    >>> bool(Proof(64, 64, 0)), bool(Proof(64, 64, 8))
    (True, False)
    """

    expected: int | float
    arrived: int | float
    twice: int | float

    def __bool__(self) -> bool:
        return self.expected == self.arrived and not self.twice


def transfer(
    source: Format, target: Format, *, degrees: tuple[int, int] = (1, 1), tokens: int | None = None,
    source_pages: Any = None, target_pages: Any = None, source_heads: Sequence[Sequence[int]] | None = None,
    target_heads: Sequence[Sequence[int]] | None = None,
) -> Transfer:
    """The byte copies that bring a sequence from ranks with ``source`` to ranks with ``target``.

    source, target    formats of all heads, with the pages of each side's pool; a page is their ``slot``
    degrees           tensor-parallel ranks of both sides; heads go to them as :func:`heads_of_ranks` says
    tokens            of the sequence; by default as many as both sides' pages hold
    source_pages, target_pages    the sequence's pages in its order, by default 0, 1, 2, ...
    source_heads, target_heads    the heads of each rank, where an engine shares them out in another way

    Caches without heads (MLA) and replicated heads come from one of the ranks that have them, in turns. ValueError for
    a head that no source rank has, for formats that hold other codes, and for pages that are too few.

    >>> row = Format.parse("page:4 slot:16 (dim:512 latent.e4m3, dim/128:4 latent_scale.f32, dim:64 rope.bf16)")
    >>> plan = transfer(row, row.resized(page=2, slot=32), degrees=(2, 4), source_pages=[3, 1, 0, 2])
    >>> {pair: len(copies) for pair, copies in plan.pairs.items()}, plan.pairs[0, 0].nbytes == 64 * 656
    ({(0, 0): 4, (0, 1): 4, (1, 2): 4, (1, 3): 4}, True)
    """
    check_formats(source=source, target=target)
    require(isinstance(degrees, tuple) and len(degrees) == 2, f"degrees is {shown(degrees)}", "a pair: source, target")
    total = source.sizes.get("head", 1)
    require(target.sizes.get("head", 1) == total, f"target has {target.sizes.get('head', 1)} heads", f"{total}")
    ends = []
    given = ((source, source_heads, source_pages, "source"), (target, target_heads, target_pages, "target"))
    for number, (made, heads, pages, name) in enumerate(given):
        shared = heads_of_ranks(total, degrees[number]) if heads is None else _given(heads, total, name)
        what = f"degrees is {degrees}, {name}_heads are of {len(shared)} ranks"
        require(heads is None or degrees[number] in (1, len(shared)), what, "of as many, or left out")
        for mine in shared:
            try:
                _local(made, len(mine))
            except ValueError as reason:
                raise ValueError(f"a rank of {name} has {len(mine)} heads: {reason}") from None
        ends.append(Ranks(made, shared, _pages(made, pages, name)))
    left, right = ends
    fits = [side.pages.size * side.format.sizes.get("slot", 1) for side in ends]
    tokens = min(fits) if tokens is None else count("tokens", tokens, 1)
    for name, held in zip(("source_pages", "target_pages"), fits, strict=True):
        require(held >= tokens, f"{name} hold {held} tokens", f"pages for the {tokens} tokens")
    ours, theirs = ({one.name: one for one in made.fields} for made in (source, target))
    for name in sorted({*ours, *theirs}):
        require(name in ours and name in theirs, f"{name} is a field of one side", "fields of both")
        check_same(
            ours[name], theirs[name], ours[ours[name].part], theirs[theirs[name].part], without=("page", "slot")
        )
    parts: dict[tuple[int, int], list[Copies]] = {}
    lanes = {with_heads: _senders(left.heads, right.heads, total, with_heads) for with_heads in (True, False)}
    for name in ours:
        for pair, moved in lanes["head" in ours[name].axes].items():
            here, there = (side.local(rank).field(name) for side, rank in zip(ends, pair, strict=True))
            where = [np.searchsorted(side.heads[rank], moved) for side, rank in zip(ends, pair, strict=True)]
            tables = _tables((here, there), where, ends, tokens)
            for again in there.table(REPLICA).tolist():
                parts.setdefault(pair, []).append(copies_of((here.base, there.base + again), tables, here.type.bits))
    pairs = {pair: Copies.joined(parts[pair]) for pair in sorted(parts)}
    return Transfer(left, right, tokens, pairs)


def _given(heads: Sequence[Sequence[int]], total: int, name: str) -> Heads:
    """Heads of ranks as given; ValueError for a head that is none, is out of order, or belongs to nobody."""
    ranks = isinstance(heads, Sequence) and all(isinstance(mine, Sequence | np.ndarray) for mine in heads)
    require(ranks, f"{name}_heads is {shown(heads)}", "the heads of each rank: [[0, 1], [2, 3]]")
    out = tuple(tuple(integers(f"{name}_heads", list(mine)).tolist()) for mine in heads)
    for mine in out:
        good = mine and list(mine) == sorted(set(mine)) and 0 <= mine[0] and mine[-1] < total
        require(good, f"{name}_heads has {mine}", f"rising numbers below {total}, at least one")
    nobody = set(range(total)) - {head for mine in out for head in mine}
    require(not nobody, f"{name}_heads gives head {min(nobody, default=0)} to no rank", "heads that all have a rank")
    return out


def _pages(made: Format, pages: Any, name: str) -> Int64:
    """Pages of a sequence, by default all of the pool in order."""
    pool = made.sizes.get("page", 1)
    if pages is None:
        return np.arange(pool)
    array = integers(f"{name}_pages", pages)
    apart = array.ndim == 1 and np.unique(array).size == array.size > 0
    good = apart and array.min() >= 0 and array.max() < pool
    require(good, f"{name}_pages is {shown(array.tolist())}", f"different pages in [0, {pool})")
    return array


def _senders(source: Heads, target: Heads, total: int, with_heads: bool) -> dict[tuple[int, int], list[int]]:
    """Who sends which heads to whom: of the ranks that have a head, each serves as many targets as the others."""
    if not with_heads:
        pairs = [(rank * len(source) // len(target), rank) for rank in range(len(target))]
        return {pair: [0] for pair in pairs}
    out: dict[tuple[int, int], list[int]] = {}
    for head in range(total):
        have, want = ([rank for rank, mine in enumerate(side) if head in mine] for side in (source, target))
        for turn, rank in enumerate(want):
            out.setdefault((have[turn * len(have) // len(want)], rank), []).append(head)
    return out


def _tables(
    fields: tuple[Field, Field], heads: Sequence[Int64], ends: Sequence[Ranks], tokens: int
) -> list[tuple[Int64, Int64]]:
    """The tables of addresses of a field at both ends: layers, tokens, heads, dims."""
    here, there = fields
    out = [(here.table(axis), there.table(axis)) for axis in ("layer",) if axis in here.axes]
    (at, shared), (to, other) = (side.tokens(one, tokens) for side, one in zip(ends, fields, strict=True))
    require(
        shared == other, f"{here.name} is one for {other} tokens in target",
        f"one for {shared}, as in source: values are not rescaled",
    )
    out.append((at, to))
    if "head" in here.axes:
        out.append((here.table("head")[heads[0]], there.table("head")[heads[1]]))
    if "dim" in here.axes:
        step = here.group("dim")
        out.append((here.table("dim")[::step], there.table("dim")[::step]))
    return out
