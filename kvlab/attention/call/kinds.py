"""Cache of call plans: calls that differ only in pointers and values reuse the first call's checks, plan and launch.

Calls share a plan that differ in nothing but the addresses of their arrays, by multiples of 16 bytes, and the values in
them. Checks of values and of shared memory run for each call; all others, and the choice of a configuration, for the
first of a kind alone. A call has a kind if its arguments are plain torch tensors, numbers, names, tuples of these and
masks without arrays; others are checked each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import numpy as np

from kvlab.attention.features import masks
from kvlab.common.torch_here import torch_here

T = TypeVar("T")

ALIGNMENT = 16
"""Addresses are told apart by their remainder: what TMA, vectors and Triton's own choice of a kernel go by."""
MOST_KINDS = 4096
PLAIN = frozenset({bool, int, float, str})
PLAIN_MASKS = frozenset({
    masks.NullMask, masks.CausalMask, masks.SlidingWindowCausalMask, masks.SlidingWindowNonCausalMask,
    masks.ChunkedMask, masks.ChunkedCausalMask, masks.BandMask,
})


@dataclass(frozen=True, eq=False)
class Kind(Generic[T]):
    """``plan``: what ``prepare`` found; it holds no array. ``launches``: what the launchers keep of the first launch
    (see :mod:`kvlab.triton_support.launching`); None where calls have no kind.
    """

    plan: T
    launches: dict[Any, Any] | None = field(default_factory=dict)


_kinds: dict[Hashable, Kind[Any]] = {}


def kind_of(operation: Hashable, arguments: tuple[Any, ...], prepare: Callable[[], T]) -> Kind[T]:
    """The kind of a call of ``operation`` (a name, or names), by all the ``arguments`` that ``prepare``, and what is
    launched, depend on. ``prepare`` is called for the first of a kind; what it raises is raised each time.

    >>> import torch
    >>> def columns(x, how): return kind_of("columns", (x, how), lambda: [x.shape[1]])
    >>> x = torch.zeros(4, 8)
    >>> one = columns(x, 1)
    >>> one is columns(torch.ones(4, 8), 1), one is columns(x, 1.0), one is columns(x.T, 1), one.plan
    (True, False, False, [8])
    >>> columns(x.numpy(), 1).launches is None
    True
    """
    facts: list[Any] = [operation]
    try:
        known = _gather(arguments, facts)
    except RuntimeError:  # a nested tensor has no shape: the checks name it
        known = False
    if not known:
        return Kind(prepare(), None)
    key = tuple(facts)
    found = _kinds.get(key)
    if found is None:
        found = Kind(prepare())
        if len(_kinds) >= MOST_KINDS:
            _kinds.clear()
        _kinds[key] = found
    return cast("Kind[T]", found)


def _gather(arguments: tuple[Any, ...], facts: list[Any]) -> bool:
    """Add all of the arguments that checks ask, in a form that equals others' only if they give the same answers: the
    type of each, which tells how many facts follow. False if one has no such form.
    """
    torch = torch_here()
    tensors, hip = ((), None) if torch is None else ((torch.Tensor, torch.nn.Parameter), torch.version.hip)
    for x in arguments:
        kind = type(x)
        if x is None:
            facts.append(kind)
        elif kind in tensors:
            if x.layout is not torch.strided or x.is_neg() or x.is_conj():
                return False
            wants = x.requires_grad and torch.is_grad_enabled()
            facts += (kind, x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % ALIGNMENT, wants)
            if hip:  # where Triton compiles for memory of less than 2 GB
                facts.append(x.untyped_storage().nbytes() < 1 << 31)
        elif kind in PLAIN or kind in PLAIN_MASKS or isinstance(x, np.number):
            facts += (kind, x or repr(x))  # 0.0 and -0.0 are equal
        elif isinstance(x, tuple):
            facts += (kind, len(x))
            if not _gather(x, facts):
                return False
        else:
            return False
    return True
