"""The schedule of a step: which program attends to which keys of which sequence, and what is merged afterwards."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from kvlab.attention.features.intervals import window_interval
from kvlab.common.arrays import numbered
from kvlab.common.checks import is_integer, require, shown
from kvlab.common.drawn import Drawn
from kvlab.staging import ceildiv

from .config import INVARIANT_KEYS, MOST_COST, MOST_UNITS, ScheduleConfig, ScheduleProblem, choose_config, list_parts
from .emulator import item_blocks, units_of
from .emulator import launch as make_list

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

    problem, config   :class:`ScheduleProblem` and :class:`ScheduleConfig`
    list              the work list, int32, as the kernel makes it
    num_keys, tokens  keys ``[B]`` and new tokens ``[B]`` of each sequence

    >>> one_long = plan([100_000] + 63 * [500], q_heads=32, kv_heads=8)
    >>> one_long
    Schedule(64 sequences, 880 units on 392 programs, the busiest 1.00 of the mean, 464 partial results)
    >>> one_long.order_of(0)[:4].tolist(), one_long.order_of(5).tolist()
    ([1, 2, 4, 6], [])
    """

    def __init__(
        self, problem: ScheduleProblem, config: ScheduleConfig, list: Array, num_keys: Array, tokens: Array
    ) -> None:
        self.problem, self.config, self.list = problem, config, list
        self.num_keys, self.tokens = num_keys, tokens
        self.share, self.total, items = (int(number) for number in list[:3])
        starts, sequences, tiles, _ = list_parts(config.most_items(problem))
        self.starts, self.sequences = list[starts:][: items + 1], list[sequences:][:items]
        self.item = list[tiles:][:items]

    def __repr__(self) -> str:
        partial = int((self.units["slot"] >= 0).sum())
        return (
            f"Schedule({self.problem.batch} sequences, {len(self.units)} units on {self.programs} programs, "
            f"the busiest {self.busiest:.2f} of the mean, {partial} partial results)"
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
            size = np.maximum(ceildiv(blocks, MOST_UNITS), config.unit)
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
        fields = {
            "program": team[:, None] * lanes + lane, "sequence": sequence, "kv_head": lane // self.config.together,
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
        """Work of the busiest program, over the mean of all; 1 where there is nothing to do."""
        mean = self.costs.mean()
        return float(self.costs.max() / mean) if mean else 1.0

    def order_of(self, sequence: int, tile: int = 0) -> Array:
        """The slots of the partial results of a tile in the order in which they are merged; none of a whole one.

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


def plan(
    seq_lens: Any,
    new_tokens: Any = 1,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int = 128,
    itemsize: int = 2,
    programs: int | None = None,
    unit: int | None = None,
    causal: bool = True,
    window: Any = None,
    batch_invariant: bool = False,
    config: ScheduleConfig | None = None,
) -> Schedule:
    """The schedule of a step over sequences of any lengths, worked out from the lengths alone.

    seq_lens    integers ``[B]``: keys of each sequence, its new tokens among them; 0 to 10^9
    new_tokens  an integer, or integers ``[B]``: tokens whose queries attend, of which a sequence may have none
    q_heads, kv_heads   query heads, a multiple of KV heads
    head_dim, itemsize  elements of a row of K, and their bytes: how many keys the beginning of a unit takes as long as
    programs    that run at once; by default what an H100 has room for
    unit        key blocks of a unit, counted from the first that its rows see, so that the cuts of a sequence depend on
                its own length alone; by default units end where a program has its share
    causal, window   what a query sees, as of ``mha_prefill``
    batch_invariant  units of 2048 keys: a sequence has the same order of sums in every batch and on every device
    config      a :class:`ScheduleConfig` instead of the chosen one; ``programs`` and ``unit`` are then its own

    Raises ValueError on bad arguments, and for a schedule of 2^31 key blocks or more.

    >>> for lengths in ([4096] * 4, [15_000, 400, 0, 984]):
    ...     print(plan(lengths, q_heads=32, kv_heads=8))
    Schedule(4 sequences, 400 units on 392 programs, the busiest 1.04 of the mean, 400 partial results)
    Schedule(4 sequences, 392 units on 392 programs, the busiest 1.04 of the mean, 392 partial results)
    >>> a, b = (plan([n, 9000], q_heads=2, kv_heads=1, batch_invariant=True) for n in (70_000, 30))
    >>> a.units[a.units["sequence"] == 1]["first"], b.units[b.units["sequence"] == 1]["first"]
    (array([  0, 128, 256, 384, 512], dtype=int32), array([  0, 128, 256, 384, 512], dtype=int32))
    """
    lengths, tokens = _integers("seq_lens", seq_lens), _integers("new_tokens", new_tokens)
    require(lengths.ndim == 1 and lengths.size, f"seq_lens has shape {lengths.shape}", "[B] with B of at least 1")
    require(tokens.shape in ((), lengths.shape), f"new_tokens has shape {tokens.shape}", f"() or {lengths.shape}")
    for name, number in (("q_heads", q_heads), ("kv_heads", kv_heads), ("head_dim", head_dim), ("itemsize", itemsize)):
        _positive(name, number)
    require(q_heads % kv_heads == 0, f"q_heads is {q_heads}", f"a multiple of kv_heads {kv_heads}")
    interval = window_interval(causal, window)
    cumulative = tokens.ndim == 1
    cu_seqlens = np.concatenate([[0], np.cumsum(tokens)]) if cumulative else None
    most_keys, most_tokens = int(lengths.max()), int(tokens.max())
    problem = ScheduleProblem(
        len(lengths), int(tokens.sum()), q_heads // kv_heads, kv_heads, most_keys, cumulative, interval.left,
        interval.right,
    )
    if config is None:
        given = {} if programs is None else {"programs": _positive("programs", programs)}
        block_unit = -(-INVARIANT_KEYS // 16) if batch_invariant else 0
        given["unit"] = block_unit if unit is None else _positive("unit", unit)
        config = choose_config(most_tokens, problem, head_dim * itemsize, **given)
    else:
        taken = [name for name, value in (("programs", programs), ("unit", unit)) if value is not None]
        require(not taken, f"{' and '.join(taken)} beside config", "given in one of the two")
    _check_cost(problem, config, lengths, tokens)
    num_keys = lengths.astype(np.int32)
    (made,) = make_list(num_keys, cu_seqlens, problem=problem, config=config)
    new = np.broadcast_to(tokens, lengths.shape)
    wanted = (new >= config.fewest) & (new <= config.most)
    return Schedule(problem, config, made, num_keys, np.where(wanted, new, 0).astype(np.int32))


def _integers(name: str, values: Any) -> Array:
    """Integers from 0 to 10^9."""
    array = np.asarray(values)
    require(array.size == 0 or array.dtype.kind in "iu", f"{name} is {shown(values)}", "integers")
    array = array.astype(np.int64)
    wrong = array[(array < 0) | (array > 10**9)]
    require(not wrong.size, f"{name} has {wrong[:1].tolist()[0] if wrong.size else 0}", "integers from 0 to 10^9")
    return array


def _positive(name: str, number: Any) -> int:
    require(is_integer(number) and number > 0, f"{name} is {shown(number)}", "an integer above 0")
    return int(number)


def _check_cost(problem: ScheduleProblem, config: ScheduleConfig, lengths: Array, tokens: Array) -> None:
    """ValueError unless places of the list are numbers of 32 bits, by an upper bound of their sum."""
    items = ceildiv(tokens * problem.group, config.rows)
    each = ceildiv(lengths, config.block) + config.overhead * MOST_UNITS
    bound = int((items * each).sum())
    require(bound <= MOST_COST, f"the cost of seq_lens is {bound} key blocks", f"at most {MOST_COST}; take larger ones")
