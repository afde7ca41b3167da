"""The schedule of a step, made once and passed to all layers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvlab.attention.call.backends import function_at
from kvlab.attention.call.checks import check_integers
from kvlab.attention.features.intervals import UNLIMITED, host, window_interval
from kvlab.attention.hopper.choice import machine_lacks
from kvlab.attention.machines.gpu import Target, target_of
from kvlab.attention.mha_decode.config import DecodeProblem
from kvlab.attention.mha_decode.hopper_config import has_depths
from kvlab.attention.schedule.config import (
    MOST_COST,
    MOST_UNITS,
    ScheduleConfig,
    ScheduleProblem,
)
from kvlab.attention.schedule.schedule import Schedule
from kvlab.attention.tiles.pieces import MAX_DEPTH
from kvlab.common.arrays import on_gpu, same_place, to_numpy, to_torch
from kvlab.common.checks import flag, integers, is_integer, require, shown
from kvlab.common.dlpack import as_known
from kvlab.common.opaque import opaque
from kvlab.common.torch_here import is_torch
from kvlab.staging import ceildiv

from .config import AttendProblem, Walk, WalkConfig, choose_walks, schedule_problem
from .hopper_config import on_hopper, tiles_take

EXPANDED, LATENT = "kvlab.attention.attend_paged.expanded", "kvlab.attention.attend_paged.latent"
FOUR_BITS = 0.5
"""Bytes of a column of 4 bits."""

Array = np.ndarray[Any, Any]


@opaque
def plan(
    seq_lens: Any,
    new_tokens: Any = 1,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int | tuple[int, int] = 128,
    v_dim: int | None = None,
    itemsize: float = 2,
    programs: int | None = None,
    unit: int | None = None,
    causal: bool = True,
    window: Any = None,
    batch_invariant: bool = False,
    config: ScheduleConfig | None = None,
) -> Schedule:
    """The schedule of a step over sequences of any lengths, worked out from the lengths alone: made once, it is the
    ``plan`` of :func:`~kvlab.attention.attend_paged` and ``mha_decode_paged`` in all layers.

    seq_lens    integers ``[B]``: keys of each sequence, its new tokens among them; 0 to 10^9. Of a tensor on a GPU the
                list is made there and nothing waits for it; in a captured graph it is made anew by each replay. Or
                ``(seq_lens, max_keys)``: none has more keys, as a row of the page table has room for
    new_tokens  an integer, or integers ``[B]``: tokens whose queries attend, of which a sequence may have none; or
                ``(cu_seqlens_q, total)``: where those of each begin, ``[B + 1]``, and the tokens of all, the rows of q;
                with ``max_seqlen_q`` behind, the most of one, which a GPU does not tell and tiles are chosen by
    q_heads, kv_heads   query heads, a multiple of KV heads
    head_dim, itemsize  elements of a row of K or V, the longer one, and their bytes, 0.5 of 4 bits: rows of a tile, and
                how many keys the beginning of a unit takes as long as. ``(nope, rope)``, with the columns of K's rope
                part: a plan of ``mla_prefill_paged`` and its like, whose tiles are of one head, ``kv_heads`` equal to
                ``q_heads``, ``seq_lens`` the keys that k and v hold, ``itemsize`` theirs
    v_dim       the latent columns of ``head_dim``: a plan of ``mla_decode_paged``, ``kv_heads`` 1, ``new_tokens`` as
                many of each sequence
    programs    that run at once; by default what the GPU, or an H100, has room for. On sm_90 they are those of Hopper's
                kernel where it has the sizes: a layer whose features it lacks is slower with them by a fifth,
                in a mixed batch by more
    unit        key blocks of a unit, counted from the first that its rows see, so that the cuts of a sequence depend on
                its own length alone; by default units end where a program has its share. To look at: no call takes it
                but that of batch_invariant
    causal, window   what a query sees, as of ``mha_prefill``
    batch_invariant  for calls with ``batch_invariant=True``: units of 2048 keys, of more where an item has more than 32
                rows, and tiles of the same rows: a sequence has the same order of sums in every batch
    config      a :class:`ScheduleConfig` instead of the chosen one; ``programs`` and ``unit`` are then its own

    Raises ValueError on bad arguments, and for a schedule of 2^31 key blocks or more (not looked at on a GPU).

    >>> for lengths in ([4096] * 4, [15_000, 400, 0, 984]):
    ...     print(plan(lengths, q_heads=32, kv_heads=8))
    Schedule(4 sequences, 400 units on 392 programs, the busiest 1.04 of the mean, 400 partial results)
    Schedule(4 sequences, 392 units on 392 programs, the busiest 1.04 of the mean, 392 partial results)
    >>> plan([900, 4000], (np.array([0, 900, 1500]), 1500), q_heads=16, kv_heads=16, head_dim=(128, 64))
    Schedule(2 sequences, 320 units on 128 programs, the busiest 1.01 of the mean, 208 partial results)
    >>> plan([9000, 70, 4000], q_heads=16, kv_heads=1, head_dim=576, v_dim=512)
    Schedule(3 sequences, 72 units on 132 programs, the busiest 1.90 of the mean, 72 partial results)
    >>> a, b = (plan([n, 9000], q_heads=2, kv_heads=1, batch_invariant=True) for n in (70_000, 30))
    >>> a.units[a.units["sequence"] == 1]["first"], b.units[b.units["sequence"] == 1]["first"]
    (array([  0, 128, 256, 384, 512], dtype=int32), array([  0, 128, 256, 384, 512], dtype=int32))
    """
    max_keys = UNLIMITED
    if isinstance(seq_lens, tuple) and len(seq_lens) == 2 and np.ndim(seq_lens[0]) == 1:
        seq_lens, max_keys = seq_lens[0], _positive("max_keys of seq_lens", seq_lens[1])
    seq_lens = as_known({"seq_lens": seq_lens})["seq_lens"]
    if isinstance(new_tokens, tuple) and new_tokens:
        new_tokens = as_known({"new_tokens": new_tokens[0]})["new_tokens"], *new_tokens[1:]
    flag("causal", causal), flag("batch_invariant", batch_invariant)
    lengths, starts, total, longest = _step(seq_lens, new_tokens)
    if max_keys < UNLIMITED and not on_gpu(lengths):
        most = int(host(lengths).max())
        require(most <= max_keys, f"seq_lens has {most}", f"at most the max_keys beside it, {max_keys}")
    head_dim, rope_dim = head_dim if isinstance(head_dim, tuple) and len(head_dim) == 2 else (head_dim, None)
    q_heads, kv_heads = _positive("q_heads", q_heads), _positive("kv_heads", kv_heads)
    head_dim = _positive("head_dim", head_dim)
    require(head_dim <= MAX_DEPTH, f"head_dim is {head_dim}", f"1 to {MAX_DEPTH}")
    whole = is_integer(itemsize) and itemsize > 0
    require(whole or itemsize == FOUR_BITS, f"itemsize is {shown(itemsize)}", "an integer above 0, or 0.5 of 4 bits")
    require(q_heads % kv_heads == 0, f"q_heads is {q_heads}", f"a multiple of kv_heads {kv_heads}")
    if rope_dim is not None:
        rope_dim = _positive("rope of head_dim", rope_dim)
        require(q_heads == kv_heads, f"kv_heads is {kv_heads} with head_dim (nope, rope)", f"q_heads, {q_heads}")
        _refuse_fixed_units("head_dim (nope, rope)", unit, batch_invariant)
    if v_dim is not None:
        v_dim = _positive("v_dim", v_dim)
        require(kv_heads == 1, f"kv_heads is {kv_heads} with v_dim", "1: all heads have one row")
        fits = rope_dim is None and v_dim < head_dim
        require(fits, f"v_dim is {v_dim} of head_dim {shown(head_dim)}", "less than the columns of a row, of rope too")
        require(starts is None, "new_tokens of each sequence with v_dim", "a number, the same of all")
        _refuse_fixed_units("v_dim", unit, batch_invariant)
    rows = total * (q_heads // kv_heads)
    require(rows <= MOST_COST, f"new_tokens has {total}, {rows} rows of a KV head", f"at most {MOST_COST} rows")
    interval = window_interval(causal, window)
    sizes = head_dim, v_dim or head_dim, itemsize, 1, max_keys
    problem = AttendProblem(int(lengths.shape[0]), total, q_heads, kv_heads, *sizes, ragged=starts is not None)
    listed = schedule_problem(problem, interval.left, interval.right)
    if config is None:
        given: dict[str, Any] = {} if programs is None else {"programs": _positive("programs", programs)}
        given |= {} if unit is None else {"unit": _positive("unit", unit)}
        hopper = on_gpu(seq_lens) and machine_lacks(seq_lens) is None
        ring = hopper and (interval.left, interval.right) == (UNLIMITED, 0)
        chosen = _chosen(
            problem, longest, target_of(seq_lens, None), rope_dim, hopper=hopper, ring=ring,
            batch_invariant=batch_invariant,
        )
        configs = tuple(replace(one, **given) for one in chosen) if given else chosen
    else:
        taken = [name for name, value in (("programs", programs), ("unit", unit)) if value is not None]
        require(not taken, f"{' and '.join(taken)} beside config", "given in one of the two")
        require(isinstance(config, ScheduleConfig), f"config is {shown(config)}", "a ScheduleConfig")
        configs = (config,)
    return schedule_of(configs, listed, lengths, starts)


@functools.lru_cache(1024)
def _chosen(
    problem: AttendProblem, longest: int, target: Target, rope_dim: int | None, *, hopper: bool, ring: bool,
    batch_invariant: bool,
) -> tuple[ScheduleConfig, ...]:
    """How the lists of a step are cut: that of heads with a rope part, that of latent rows, or those of the walks of
    ``attend_paged``, by Hopper's ``ring`` or its tiles where it has them.
    """
    machine = target._asdict()
    if rope_dim is not None:
        make = function_at(f"{EXPANDED}.config:schedule_for")
        return (make(problem.q_heads, problem.head_dim, rope_dim, problem.itemsize, **machine),)
    if problem.v_dim != problem.head_dim:
        make = function_at(f"{LATENT}.config:schedule_for")
        return (make(problem, arch=target.arch, processors=target.processors, hopper=hopper),)
    tiles = hopper and not batch_invariant and tiles_take(problem)
    walks = choose_walks(
        problem, longest, **machine, batch_invariant=batch_invariant, tiles=tiles,
        beside=ring and tiles and has_depths(problem),
    )
    if ring:
        walks = on_hopper(walks, problem, longest, target.processors, tiles=tiles)
    return tuple(walk.schedule for walk in walks.walks)


def schedule_of(configs: Sequence[ScheduleConfig], problem: ScheduleProblem, lengths: Any, starts: Any) -> Schedule:
    """The schedule of lengths ``[B]`` and, or None, cu_seqlens ``[B + 1]``: a list for each configuration."""
    first, *others = configs
    rest = schedule_of(others, problem, lengths, starts) if others else None
    return Schedule(problem, first, _list_of(lengths, starts, problem, first), lengths, starts, rest)


def _step(seq_lens: Any, new_tokens: Any) -> tuple[Any, Any, int, int]:
    """(lengths ``[B]``, cu_seqlens ``[B + 1]`` or None, new tokens of a sequence or of all, the most that one may
    have): arrays as those that are given.
    """
    lengths = seq_lens if is_torch(seq_lens) else integers("seq_lens", seq_lens)
    shape = tuple(lengths.shape)
    require(len(shape) == 1 and min(shape), f"seq_lens has shape {shape}", "[B] with B of at least 1")
    if not on_gpu(lengths):
        _integers("seq_lens", lengths)
    if isinstance(new_tokens, tuple) and len(new_tokens) in (2, 3) and np.ndim(new_tokens[0]) == 1:
        starts, total, *most = new_tokens
        if isinstance(starts, list | tuple):
            offsets = integers("cu_seqlens_q", starts)
            starts = to_torch(offsets) if is_torch(lengths) else offsets
        _positive("total of new_tokens", total, 0)
        require(starts.shape[0] == lengths.shape[0] + 1, f"cu_seqlens_q has shape {tuple(starts.shape)}", "[B + 1]")
        same_place(seq_lens=lengths, cu_seqlens_q=starts)
        check_integers("cu_seqlens_q", starts)
        longest = _positive("max_seqlen_q of new_tokens", most[0], 0) if most else total
        if not on_gpu(starts):
            offsets = host(starts).astype(np.int64)
            new = np.diff(offsets)
            fits = offsets[0] == 0 and offsets[-1] == total and (new >= 0).all()
            require(fits, f"cu_seqlens_q is {offsets.tolist()}", f"from 0 to {total}, none less than the one before")
            found = int(new.max(initial=0))
            require(found <= longest, f"max_seqlen_q of new_tokens is {longest}", f"at least {found}, the most of one")
            longest = longest if most else found
        return lengths, starts, int(total), max(int(longest), 1)
    require(not on_gpu(new_tokens), "new_tokens is a tensor on a GPU", "(cu_seqlens_q, total) there")
    tokens = _integers("new_tokens", new_tokens)
    require(tokens.shape in ((), shape), f"new_tokens has shape {tokens.shape}", f"() or {shape}")
    if tokens.ndim == 0:
        return lengths, None, int(tokens), int(tokens)
    require(not on_gpu(lengths), "new_tokens of each sequence beside seq_lens on a GPU", "(cu_seqlens_q, total) there")
    offsets = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
    return lengths, to_torch(offsets) if is_torch(lengths) else offsets, int(tokens.sum()), int(tokens.max())


def _list_of(lengths: Any, starts: Any, problem: ScheduleProblem, config: ScheduleConfig) -> Any:
    """The work list where the lengths are."""
    if on_gpu(lengths):
        return function_at("kvlab.attention.schedule.kernel:launch")(lengths, starts, problem=problem, config=config)[0]
    keys, offsets = host(lengths), None if starts is None else host(starts)
    new = np.full(len(keys), problem.tokens) if offsets is None else np.diff(offsets)
    _check_cost(problem, config, keys.astype(np.int64), new)
    (made,) = function_at("kvlab.attention.schedule.emulator:launch")(keys, offsets, problem=problem, config=config)
    return to_torch(made) if is_torch(lengths) else made


def check_given(given: Any) -> None:
    """ValueError for a ``plan`` that is none."""
    if not isinstance(given, Schedule):  # a schedule's text would wait for the GPU
        raise ValueError(f"plan is {shown(given)}: must be what kvlab.attention.plan gives, or None")


def check_plan(given: Schedule, problem: DecodeProblem, left: int, right: int) -> None:
    """ValueError unless a plan is of a call of these sizes whose rows see so many keys before and behind their own."""
    asked = schedule_problem(problem, left, right)
    names = {
        "batch": "{} sequences", "cumulative": "ragged new tokens: {}", "tokens": "{} new tokens",
        "group": "{} query heads to a KV head", "kv_heads": "{} KV heads", "left": "{} keys seen before a query's own",
        "right": "{} keys seen behind a query's own",
    }
    for name, words in names.items():
        numbers = (getattr(one, name) for one in (given.problem, asked))
        theirs, ours = ("all" if number == UNLIMITED else number for number in numbers)
        require(theirs == ours, f"plan is of {words.format(theirs)}", f"of the call's, {ours}")
    configs = [one.config for one in given.walks]
    covered = [n for one in configs for n in (one.fewest, one.most)]
    whole = covered[0] <= 1 and covered[-1] >= UNLIMITED
    gaps = any(b != a + 1 for a, b in zip(covered[1:-1:2], covered[2::2], strict=True))
    require(whole and not gaps, f"plan has sequences of {covered} new tokens", "of any number")


def check_planned_lengths(given: Schedule, seq_lens: Any, cu_seqlens: Any) -> None:
    """ValueError unless a plan was made of the lengths of a call."""
    ours, theirs = host(seq_lens), host(given.seq_lens)
    if not np.array_equal(ours, theirs):
        b = int((ours != theirs).argmax())
        raise ValueError(f"plan was made of seq_lens[{b}] {theirs[b]}: must be the call's, {ours[b]}")
    if cu_seqlens is not None:
        ours, theirs = (host(x).astype(np.int64) for x in (cu_seqlens, given.cu_seqlens))
        same = np.array_equal(ours, theirs)
        require(same, f"plan was made of cu_seqlens_q {theirs.tolist()}", f"the call's, {ours.tolist()}")


def walks_of_plan(
    given: Schedule, problem: DecodeProblem, longest: int, *, batch_invariant: bool, **target: Any
) -> WalkConfig:
    """The walks of a call with a plan: the tiles that have as many rows; batch-invariant ones are those of the call.
    ``target``: as of ``choose_walks``.
    """
    if batch_invariant:
        own = choose_walks(problem, longest, batch_invariant=True, **target).walks
        cuts = [
            [(one.BM, one.together, one.block, one.unit, one.fewest, one.most) for one in walks]
            for walks in ([one.config for one in given.walks], [one.schedule for one in own])
        ]
        fixed = all(one.config.unit for one in given.walks)
        what = "tiles or units of another machine or other sizes" if fixed else "units that follow from all lengths"
        accepted = "one with batch_invariant=True"
        accepted += f" and the call's head_dim and itemsize, made for {target.get('arch', 'its GPU')}" if fixed else ""
        require(cuts[0] == cuts[1], f"plan has {what}", accepted)
        return WalkConfig(tuple(replace(a, schedule=b.config) for a, b in zip(own, given.walks, strict=True)))
    fixed = any(one.config.unit for one in given.walks)
    require(not fixed, "plan has units of a fixed size", "one without unit, batch_invariant")
    few = (max(1, rows // problem.group) for rows in (16, 32, 64, 128, 4096))
    known = {
        (walk.tiles.BM, walk.schedule.together): walk
        for tokens in few for walk in choose_walks(problem, tokens, **target).walks
    }
    of_rows = {BM: walk for (BM, _), walk in known.items()}
    schedules = [one.config for one in given.walks]
    for BM in (one.BM for one in schedules):
        accepted = f"of {' or '.join(map(str, sorted(of_rows)))} for this call"
        require(BM in of_rows, f"plan has tiles of {BM} rows", accepted)
    found = [known.get((cut.BM, cut.together), of_rows[cut.BM]).tiles for cut in schedules]
    tiles = [replace(one, row_tiles=cut.together) for one, cut in zip(found, schedules, strict=True)]
    return WalkConfig(tuple(map(Walk, tiles, schedules)))


def _integers(name: str, values: Any) -> Array:
    """Integers from 0 to 10^9, in CPU memory."""
    array = integers(name, to_numpy(values, name) if is_torch(values) else values)
    wrong = array[(array < 0) | (array > 10**9)]
    require(not wrong.size, f"{name} has {wrong[:1].tolist()[0] if wrong.size else 0}", "integers from 0 to 10^9")
    return array


def _refuse_fixed_units(beside: str, unit: Any, batch_invariant: bool) -> None:
    """ValueError for units of a fixed size, which a plan with the argument ``beside`` has not."""
    fixed = " and ".join(n for n, v in (("unit", unit), ("batch_invariant", batch_invariant)) if v)
    require(not fixed, f"{fixed} with {beside}", "left out: units follow from all lengths")


def _positive(name: str, number: Any, least: int = 1) -> int:
    accepted = "an integer above 0" if least else "an integer of at least 0"
    require(is_integer(number) and number >= least, f"{name} is {shown(number)}", accepted)
    return int(number)


def _check_cost(problem: ScheduleProblem, config: ScheduleConfig, lengths: Array, tokens: Array) -> None:
    """ValueError unless places of the list are numbers of 32 bits, by an upper bound of their sum."""
    items = ceildiv(tokens * problem.group, config.rows) * config.heads
    each = ceildiv(lengths, config.block) + config.overhead * MOST_UNITS
    bound = int((items * each).sum())
    require(bound <= MOST_COST, f"the cost of seq_lens is {bound} key blocks", f"at most {MOST_COST}; take larger ones")
