"""Other orders in which the partitions of Hopper's kernels may get their turns."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kvlab.attention.hopper.turns import Role, Wait, run_roles


def backwards(roles: list[Role]) -> None:
    """Each as far as it can go, the last partition first."""
    run_roles(roles[::-1])


def at_random(seed: int) -> Callable[[list[Role]], None]:
    """From one wait to the next, whichever partition can go on."""

    def run(roles: list[Role]) -> None:
        rng = random.Random(seed)
        waiting: list[tuple[Role, Wait | None]] = [(role, None) for role in roles]
        while waiting:
            ready = [i for i, (_, wait) in enumerate(waiting) if wait is None or wait[0].try_wait(wait[1])]
            i = rng.choice(ready)
            (warps, steps), wait = waiting[i]
            if wait is not None:
                wait[0].wait(wait[1], warps)
            try:
                waiting[i] = (warps, steps), next(steps)
            except StopIteration:
                del waiting[i]

    return run


ORDERS: dict[str, Any] = {"forwards": run_roles, "backwards": backwards, "at random": at_random(1)}
