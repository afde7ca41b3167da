"""The schedule of a step: which program attends to which keys of which sequence, and what is merged afterwards."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from kvlab.attention.features.intervals import host, key_count
from kvlab.common.arrays import numbered
from kvlab.common.checks import require, shown
from kvlab.common.drawn import Drawn

from .config import MOST_UNITS, ScheduleConfig, ScheduleProblem, list_parts
from .emulator import item_blocks, unit_size, units_of

Array = np.ndarray[Any, Any]

UNIT = np.dtype([(name, np.int32) for name in ("program", "sequence", "kv_head", "tile", "first", "last", "slot")])
"""A unit: its program; sequence, KV head and tile of rows; the key blocks ``first ... last``; where its partial result
goes, -1 for one that is a tile's whole result."""


class Schedule(Drawn):
    """Work of the programs of a persistent attention kernel in a step.

    A *tile* is BM rows (new tokens x query heads of one KV head) of a sequence; an *item* the tiles of a sequence that
    a *team* of programs walks side by side. A *unit* is a range of key blocks of a tile: what one program does before
    it goes on. Items are laid end to end, each as long as its key blocks and ``config.overhead`` (1 without a key);
    team j has units from place ``j * share`` to ``(j + 1) * share``. A tile that is cut has partial results, merged in
    the order of the keys.
    The lengths fix it all: the same lengths give the same order of sums.

    problem, config  :class:`ScheduleProblem` and :class:`ScheduleConfig`
    list         the work list, int32, where the lengths are: of a GPU it is made there, and all that is told of units
                 is looked up when it is first asked for, which waits for the GPU
    seq_lens     keys ``[B]`` of each sequence
    cu_seqlens   None, or ``[B + 1]``: where the new tokens of each begin
    rest         None, or the schedule of the sequences that have more new tokens than fit the tiles of this one

    >>> from kvlab.attention import plan
    >>> one_long = plan([100_000] + 63 * [500], q_heads=32, kv_heads=8)
    >>> one_long
    Schedule(64 sequences, 880 units on 392 programs, the busiest 1.00 of the mean, 464 partial results)
    >>> one_long.order_of(0)[:4].tolist(), one_long.order_of(5).tolist()
    ([1, 2, 4, 6], [])
    """

    def __init__(
        self, problem: ScheduleProblem, config: ScheduleConfig, list: Any, seq_lens: Any, cu_seqlens: Any = None,
        rest: Schedule | None = None,
    ) -> None:
        self.problem, self.config, self.list, self.rest = problem, config, list, rest
        self.seq_lens, self.cu_seqlens = seq_lens, cu_seqlens

    @cached_property
    def _list(self) -> Array:
        return host(self.list)

    @property
    def share(self) -> int:
        """Key blocks, and those that beginnings take as long as, of a team."""
        return int(self._list[0])

    @property
    def total(self) -> int:
        """The same of all items."""
        return int(self._list[1])

    @cached_property
    def num_keys(self) -> Array:
        """Keys ``[B]``."""
        return key_count(host(self.seq_lens), self.problem.max_keys)

    @cached_property
    def tokens(self) -> Array:
        """New tokens ``[B]``, 0 of sequences that are not in this list."""
        new = np.full(self.problem.batch, self.problem.tokens)
        if self.cu_seqlens is not None:
            new = np.maximum(np.diff(host(self.cu_seqlens).astype(np.int64)), 0)
        wanted = (new >= self.config.fewest) & (new <= self.config.most)
        return np.where(wanted, new, 0).astype(np.int32)

    @property
    def starts(self) -> Array:
        """Place of each item's beginning, and the end of the last."""
        return self._part(0, 1)

    @property
    def sequences(self) -> Array:
        """Sequence of each item."""
        return self._part(1)

    @property
    def item(self) -> Array:
        """Number of each item among its sequence's, of one group of KV heads where these are items of their own."""
        return self._part(2) // self.config.heads

    @property
    def item_heads(self) -> Array:
        """First KV head of each item."""
        return self._part(2) % self.config.heads * (self.problem.kv_heads // self.config.heads)

    def _part(self, which: int, more: int = 0) -> Array:
        at = list_parts(self.config.most_items(self.problem))[which]
        return self._list[at:][: int(self._list[2]) + more]

    @cached_property
    def facts(self) -> tuple[Any, ...]:
        """Numbers that two schedules share which a call cannot tell apart before it runs."""
        own = (*vars(self.problem).values(), *vars(self.config).values())
        return own if self.rest is None else (*own, self.rest.facts)

    @property
    def walks(self) -> tuple[Schedule, ...]:
        """Schedules: this one, and the rest."""
        return (self,) if self.rest is None else (self, *self.rest.walks)

    def __repr__(self) -> str:
        partial, count = int((self.units["slot"] >= 0).sum()), int((self.tokens > 0).sum())
        return (
            f"Schedule({count} sequence{'s' * (count != 1)}, {len(self.units)} units on {self.programs} programs, "
            f"the busiest {self.busiest:.2f} of the mean, {partial} partial results)"
            + (f", then {self.rest!r}" if self.rest is not None else "")
        )

    @property
    def teams(self) -> int:
        """Teams of programs that walk together."""
        return self.config.teams(self.problem.kv_heads)

    @property
    def programs(self) -> int:
        """Programs of the grid; program p is lane ``p % lanes`` of team ``p // lanes``."""
        return self.config.grid(self.problem.kv_heads)[0]

    @property
    def slots(self) -> int:
        """Places for partial results of an item, those of all its tiles side by side."""
        return 2 * self.teams if not self.config.unit else MOST_UNITS * len(self.item)

    @cached_property
    def pieces(self) -> tuple[Array, Array, Array, Array, Array]:
        """(team, item, first, last, slot) of the ranges of key blocks that teams take, in the order of the keys."""
        config = self.config
        begin, end = self._blocks(self.item, config.rows, self.sequences)
        blocks = end - begin
        count = units_of(blocks, config.unit)
        if config.unit:
            size = unit_size(blocks, config.unit)
            item, n = numbered(count)
            team = (self.starts[item] + n * (size + config.overhead)[item]) // self.share
            first = begin[item] + n * size[item]
            last, slot = np.minimum(first + size[item], end[item]), n * len(self.item) + item
        else:
            start = self.starts[:-1] + config.overhead
            earliest = start // self.share
            count = np.where(count, (self.starts[1:] - 1) // self.share - earliest + 1, 0)
            item, n = numbered(count)
            team = earliest[item] + n
            low = np.maximum(team * self.share, start[item])
            high = np.minimum((team + 1) * self.share, self.starts[1:][item])
            first, last = (begin[item] + place - start[item] for place in (low, high))
            slot = 2 * team + (start[item] > team * self.share)
        return team, item, first, last, np.where(count[item] > 1, slot, -1)

    @cached_property
    def units(self) -> Array:
        """All units as a structured array, program after program, each in the order in which it is done.

        >>> from kvlab.attention import plan
        >>> for unit in plan([900, 40], q_heads=1, kv_heads=1, programs=3).units:
        ...     print(dict(zip(UNIT.names, unit.tolist())))
        {'program': 0, 'sequence': 0, 'kv_head': 0, 'tile': 0, 'first': 0, 'last': 19, 'slot': 1}
        {'program': 1, 'sequence': 0, 'kv_head': 0, 'tile': 0, 'first': 19, 'last': 42, 'slot': 2}
        {'program': 2, 'sequence': 0, 'kv_head': 0, 'tile': 0, 'first': 42, 'last': 57, 'slot': 4}
        {'program': 2, 'sequence': 1, 'kv_head': 0, 'tile': 0, 'first': 0, 'last': 3, 'slot': -1}
        """
        team, item, first, last, slot = self.pieces
        lanes = self.config.lanes(self.problem.kv_heads)
        lane = np.arange(lanes)
        tile = self.item[item][:, None] * self.config.together + lane % self.config.together  # [pieces, lanes]
        sequence = np.broadcast_to(self.sequences[item][:, None], tile.shape)
        begin, end = self._blocks(tile, self.config.BM, sequence)
        first, last = np.maximum(first[:, None], begin), np.minimum(last[:, None], end)
        exists = (tile * self.config.BM < self.tokens[sequence] * self.problem.group) & (first < last)
        found = np.zeros(int(exists.sum()), UNIT)
        head = self.item_heads[item][:, None] + lane // self.config.together
        fields = {
            "program": team[:, None] * lanes + lane, "sequence": sequence, "kv_head": head,
            "tile": tile, "first": first, "last": last, "slot": slot[:, None],
        }
        for name, values in fields.items():
            found[name] = np.broadcast_to(values, tile.shape)[exists]
        return found[np.argsort(found["program"], kind="stable")]

    @cached_property
    def costs(self) -> Array:
        """Work of each program ``[programs]``, in key blocks: those of its units, and the beginning of each."""
        units = self.units
        cost = units["last"] - units["first"] + self.config.overhead
        return np.bincount(units["program"], cost, minlength=self.programs).astype(np.int64)

    @property
    def busiest(self) -> float:
        """Work of the busiest program, over the mean of all, beside another list of all that have a share; 1 where
        there is nothing to do.
        """
        teams = self.teams if self.config.sharing is None else -(-self.total // self.share)
        mean = self.costs[: max(teams, 1) * self.config.lanes(self.problem.kv_heads)].mean()
        return float(self.costs.max() / mean) if mean else 1.0

    def order_of(self, sequence: int, tile: int = 0) -> Array:
        """The slots of the partial results of a tile in the order in which they are merged; none of a whole one.

        >>> from kvlab.attention import plan
        >>> plan([4096], q_heads=2, kv_heads=1, programs=3).order_of(0)
        array([1, 2, 4])
        """
        require(0 <= sequence < self.problem.batch, f"sequence is {shown(sequence)}", f"0 to {self.problem.batch - 1}")
        units = self.units
        chosen = (units["sequence"] == sequence) & (units["tile"] == tile) & (units["kv_head"] == 0)
        found = units[chosen & (units["slot"] >= 0)]
        return found["slot"][np.argsort(found["first"])].astype(np.int64)

    def _blocks(self, item: Array, rows: int, sequence: Array) -> tuple[Array, Array]:
        """(first, last): the key blocks that ``rows`` rows of sequences see."""
        group, left, right, block = self.problem.group, self.problem.left, self.problem.right, self.config.block
        return item_blocks(self.num_keys[sequence], self.tokens[sequence], item, group, left, right, rows, block)
