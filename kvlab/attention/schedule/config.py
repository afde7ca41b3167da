"""Work lists: how units are cut, where things lie in a list, and the twins that make one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvlab.attention.features.intervals import UNLIMITED
from kvlab.mirror.twin import Twin

TWINS = (
    Twin(
        "work_list",
        kernel="kernel:work_list",
        emulator="emulator:work_list",
        synonyms={
            "seq_lens": "seq_lens_ptr",
            "cu_seqlens": "cu_seqlens_ptr",
            "cu_seqlens is not None": "CUMULATIVE",
            "config.block": "BLOCK",
            "config.overhead": "OVERHEAD",
            "config.unit": "UNIT",
            "config.heads": "HEADS",
            "config.fewest": "fewest",
            "config.most": "most",
            "config.sharing": "sharing",
            "fields": "list_ptr",
            "starts": "starts_ptr",
            "sequences": "sequences_ptr",
            "tiles": "tiles_ptr",
            "firsts": "firsts_ptr",
        },
    ),
)

HEAD = 4
"""Numbers before the arrays of a list: the share of a team, the cost of all items, their number, and 0."""
FEW_ROWS = 32
"""Rows of a tile that three programs of an SM have; sequences of more have tiles of their own."""
MOST_UNITS = 64
"""Units of an item at most, where they are cut by the item's own length."""
MOST_COST = 2**31 - 1
INVARIANT_KEYS = 2048
"""Keys of a unit that is the same in every batch."""
WIDE = 512
"""Sequences, items or teams that a list is made of at a time."""


@dataclass(frozen=True)
class ScheduleProblem:
    """Sizes of one call: B sequences with ``group`` query heads to each of ``kv_heads``.

    tokens : new tokens of every sequence; with ``cumulative``, of all sequences together. max_keys : keys that a row of
    the page table holds. left, right : keys that a query sees before and behind its own.

    >>> ScheduleProblem(batch=3, tokens=1, group=4, kv_heads=8, max_keys=4096).right
    0
    """

    batch: int
    tokens: int
    group: int
    kv_heads: int
    max_keys: int = UNLIMITED
    cumulative: bool = False
    left: int = UNLIMITED
    right: int = 0


class Sharing(NamedTuple):
    """Two lists that are walked at the same time, each by processors of its own, as many as its share of the work asks
    for: small items, whose programs wait for memory, beside large ones, whose programs multiply.

    processors  that both have
    few, many   new tokens up to which a sequence is in the first list, and from which on in the second
    rows        of an item of the second
    block, wide_block   keys of a key block of either
    overhead, wide_overhead   key blocks that the beginning of an item of either takes as long as
    ratio       key blocks of an item of the first that one of the second takes as long as, on as many processors
    lanes, wide_lanes   programs of a team of either
    room        programs of the first that a processor has room for; of the second one
    """

    processors: int
    few: int
    many: int
    rows: int
    block: int
    wide_block: int
    overhead: int
    wide_overhead: int
    ratio: int
    lanes: int
    wide_lanes: int
    room: int

    @property
    def most(self) -> int:
        """Teams of the second list, where one of the first has room beside them."""
        return (self.processors - -(-self.lanes // self.room)) // self.wide_lanes


@dataclass(frozen=True)
class ScheduleConfig:
    """Cut of the units, and the number of programs that share them.

    programs  that run at once
    BM        rows of a tile: new tokens times the query heads of a KV head
    together  tiles of one sequence that programs of a team walk side by side, as they read the same keys
    block     keys of a key block, the grain of every cut
    overhead  key blocks that the beginning of a unit takes as long as
    least     key blocks, overhead among them, that a team takes at least
    unit      key blocks of a unit, counted from the item's first; 0: units end where a team has its share
    fewest, most  new tokens of the sequences that are in the list
    sharing   None, or how the processors are shared with another list: some teams then have nothing to do
    heads     1, a team has a sequence's KV heads side by side; or in how many groups they are, each an item of its own

    >>> config = ScheduleConfig(programs=396)
    >>> config.lanes(8), config.teams(8), config.grid(8)
    (8, 49, (392,))
    """

    programs: int
    BM: int = 16
    together: int = 1
    block: int = 16
    overhead: int = 4
    least: int = 12
    unit: int = 0
    fewest: int = 1
    most: int = UNLIMITED
    sharing: Sharing | None = None
    heads: int = 1

    @property
    def reach(self) -> int:
        """Places of an item's beginning of which nothing is done: a team that has no more leaves the item alone."""
        return 0 if self.unit else self.overhead

    @property
    def rows(self) -> int:
        """Rows of an item."""
        return self.BM * self.together

    def lanes(self, kv_heads: int) -> int:
        """Programs of a team: one for each tile, of each KV head that is no item of its own."""
        return kv_heads // self.heads * self.together

    def teams(self, kv_heads: int) -> int:
        """Teams that have a place; at least one."""
        return max(1, self.programs // self.lanes(kv_heads))

    def grid(self, kv_heads: int) -> tuple[int]:
        """Programs. The lengths have no part in it: a CUDA graph may be replayed."""
        return (self.teams(kv_heads) * self.lanes(kv_heads),)

    def most_items(self, problem: ScheduleProblem) -> int:
        """Items that a list must have room for, whatever the lengths.

        >>> config = ScheduleConfig(programs=132, BM=128)
        >>> config.most_items(ScheduleProblem(batch=4, tokens=512, group=4, kv_heads=8))
        64
        >>> config.most_items(ScheduleProblem(batch=4, tokens=512, group=4, kv_heads=8, cumulative=True))
        20
        """
        rows = problem.tokens * problem.group
        if problem.cumulative:
            most = problem.batch * -(-min(self.most, problem.tokens) * problem.group // self.rows)
            return min(problem.tokens, problem.batch + rows // self.rows, most) * self.heads
        return problem.batch * -(-rows // self.rows) * self.heads

    def lists_items(self, problem: ScheduleProblem) -> bool:
        """Tells whether items are others than the sequences, one each in their order."""
        each = self.fewest <= problem.tokens <= self.most and problem.tokens * problem.group <= self.rows
        return problem.cumulative or self.heads > 1 or not each

    def wide(self, problem: ScheduleProblem) -> int:
        """Items or teams that are looked at together, where a list is made."""
        return wide(max(self.most_items(problem), self.teams(problem.kv_heads) + 1))

    def list_size(self, problem: ScheduleProblem) -> int:
        """Integers of a list: its head, the first unit of each item and the end of the last, each item's sequence and
        number among its items, and the first item of each team and of the one behind the last.
        """
        return HEAD + 3 * self.most_items(problem) + 2 + self.teams(problem.kv_heads)


def list_parts(most_items: int) -> tuple[int, int, int, int]:
    """Begins of the parts of a list: the items' starts, their sequences, their tiles, and the teams' first items.

    >>> list_parts(10)
    (4, 15, 25, 35)
    """
    starts = HEAD
    sequences = starts + most_items + 1
    return starts, sequences, sequences + most_items, sequences + 2 * most_items


def wide(count: int) -> int:
    """Of so many sequences, items or teams those that are looked at together: a power of two.

    >>> wide(5), wide(4096)
    (16, 512)
    """
    return min(WIDE, max(16, 1 << (count - 1).bit_length())) if count else 16
