"""Calls over a schedule: the ``plan`` that a caller has made once a step, or that the call makes itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvlab.attention.call.backends import function_at
from kvlab.attention.call.call import Call
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.operands import Sizes
from kvlab.attention.machines.gpu import target_of
from kvlab.common.arrays import on_gpu, same_place

HOME = "kvlab.attention.attend_paged"
"""The operation that walks schedules."""


def lengths_must_differ(cache: Any, table: Any, most_full: float) -> bool:
    """Tells whether a pool has less pages than ``most_full`` for each that the table could name: unless sequences share
    their pages, they cannot all be nearly as long as the table is wide. What the lengths are nobody asks, as that would
    wait for the GPU.

    >>> import numpy as np
    >>> equal, one_long = (np.empty((pages, 16, 8, 128), np.float16) for pages in (64 * 10, 9 + 63 * 2))
    >>> [lengths_must_differ(pool, np.empty((64, 10)), 0.4) for pool in (equal, one_long)]
    [False, True]
    """
    pages: tuple[int, ...] = getattr(cache, "shape", ())
    named: tuple[int, ...] = getattr(table, "shape", ())
    return len(pages) > 2 and len(named) == 2 and named[0] > 1 and pages[0] < most_full * named[0] * named[1]


class PlannedCall(Call[Any]):
    """A call that may be given a plan, a :class:`~kvlab.attention.Schedule`: its ``schedule``, as a call has a plan of
    its own. listed : the lengths ``[B]`` and ``cu_seqlens_q`` or None, of which the plan is made.
    """

    schedule: Any = None
    over_schedule: bool = False
    """Tells whether the call takes walks over a schedule."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.schedule = vars(self).pop("plan", None)

    def decisive(self) -> tuple[Any, ...] | None:
        """A plan decides by its numbers and by where its lists are."""
        found = super().decisive()
        if found is None or self.schedule is None:
            return found
        facts = getattr(self.schedule, "facts", None)
        if facts is None:
            return None
        return (*(x for x in found if x is not self.schedule), facts, *self.lists())

    def lists(self) -> tuple[Any, ...]:
        """The work lists of the plan that is given."""
        return tuple(one.list for one in self.schedule.walks)

    def listed(self) -> tuple[Any, Any]:
        """The lengths ``[B]``, and ``cu_seqlens_q`` or None."""
        raise NotImplementedError

    def check_arguments(self, sizes: Sizes) -> None:
        """See :class:`Call`: a plan is one that ``plan`` gave, and where q is."""
        if self.schedule is not None:
            function_at(f"{HOME}.step:check_given")(self.schedule)
            same_place(**{f"plan[{i}]": one for i, one in enumerate(self.lists())}, q=self.arguments["q"])

    def lacks_ring(self) -> str | None:
        """Feature of a schedule that Hopper's kernel lacks, None if it walks it."""
        if self.batch_invariant:
            return "batch_invariant=True over a schedule"
        if self.schedule is None or function_at(f"{HOME}.hopper_config:ring_walks")(self.schedule.config):
            return None
        return "a plan of other tiles"

    def walks(self, problem: Any, longest: int, emulated: str | None, *, hopper: bool, tiles: bool = False) -> Any:
        """The configuration of the walks over sequences of up to so many new tokens; ``hopper``: by its kernel where
        it walks them; ``tiles``: its prefill tiles walk those of many. ValueError for a plan of another call.
        """
        features, target, hoppers = self.features, target_of(self.arrays[0], emulated), f"{HOME}.hopper_config"
        machine = {"processors": target.processors, "arch": target.arch, "shared": target.shared}
        machine |= {"heavy": features.heavy, "biased": features.mask.bias is not None}
        machine |= {"batch_invariant": self.batch_invariant, "qv": features.qv is not None}
        if self.schedule is not None:
            function_at(f"{HOME}.step:check_plan")(self.schedule, problem, *features.mask.by_length)
            found = function_at(f"{HOME}.step:walks_of_plan")(self.schedule, problem, longest, **machine)
            return function_at(f"{hoppers}:with_rings")(found, problem, longest, None) if hopper else found
        found = function_at(f"{HOME}.config:choose_walks")(
            problem, longest, **machine, tiles=tiles, beside=hopper and tiles
        )
        rings = {"longest": longest, "processors": target.processors, "tiles": tiles}
        return function_at(f"{hoppers}:on_hopper")(found, problem, **rings) if hopper else found

    def check_values(self) -> None:
        """See :class:`Call`: a plan was made of the lengths of the call."""
        if self.schedule is not None:
            function_at(f"{HOME}.step:check_planned_lengths")(self.schedule, *self.listed())

    def named(self) -> dict[str, Any]:
        """See :class:`Call`; and the lists of a plan."""
        return super().named() | ({"works": self.lists()} if self.schedule is not None else {})

    def explained(self) -> Explanation:
        """See :class:`Call`; and the schedule, of the plan or where the lengths are in CPU memory."""
        told = self.plan.explanation
        mask, made = self.features.mask, self.schedule
        if not self.over_schedule or (made is None and on_gpu(self.arrays[0])):
            return told
        if made is None:
            sizes, configs = self.scheduled(told)
            items = function_at(f"{HOME}.config:schedule_problem")(sizes, *mask.by_length)
            made = function_at(f"{HOME}.step:schedule_of")(configs, items, *self.listed())
        return replace(told, schedule=made)

    def scheduled(self, told: Explanation) -> tuple[Any, list[Any]]:
        """The sizes of a planned call, and how its units are cut, list by list."""
        return self.plan.problem, [walk.schedule for walk in told.config.walks]
