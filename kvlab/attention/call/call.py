"""One call of an operation, from its arguments to its results: check, arrange, plan, launch, results.

An operation derives its :class:`Call` and states what is its own: the ``operands`` it takes, what else is asked of them
(``check_arguments``, ``check_values``), the form in which its siblings take them (``arrange``), and which configuration
it gets (``choose``). The order of the stages, the cache of plans and the launch are here, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np

from kvlab.attention.call.backends import check_arithmetic, function_at, rounded, run_kernel, run_on_numpy
from kvlab.attention.call.checks import (
    check_apart,
    check_layout_of_scale,
    check_traffic,
    finite_number,
    given,
    looks_at_values,
)
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.kinds import Kind, kind_of
from kvlab.attention.call.operands import Operand, Sizes, check_declared, check_laid_out, check_result, result_dtype
from kvlab.attention.call.options import Arch, Arithmetic
from kvlab.attention.features.intervals import host, window_interval
from kvlab.attention.features.leftpad import check_of_sequences, check_padding
from kvlab.attention.features.masks import resolve_mask
from kvlab.attention.features.options import NAMES
from kvlab.attention.features.positions import check_far, check_positions, positions_of_rows, positions_of_sequences
from kvlab.attention.features.resolve import Features, in_base, kv_view, resolve_features
from kvlab.attention.features.scales import columns_of, is_scaled
from kvlab.common.arrays import drop_axis
from kvlab.common.torch_here import is_torch
from kvlab.hardware import chip
from kvlab.staging import Traffic

R = TypeVar("R")

FEATURES = frozenset(NAMES)
RECORDERS: list[Any] = []
"""What keeps calls, the last first: see :func:`kvlab.replay.recording`."""
SIBLINGS = {"triton": "kernel:launch", "reference": "reference:reference"}
"""Backend -> module and function in an operation's folder, where it is not the launch function of a module so called.
"""
@dataclass(frozen=True, eq=False)
class Plan:
    """Plan that calls share which differ in nothing but the addresses and values of their arrays; it holds no array.

    problem: the sizes that the operation's configuration was chosen for. sibling: where the function is that runs,
    ``"module:function"``. features: all of them, or, unless ``complete``, mask and softcap alone.
    """

    explanation: Explanation
    problem: Any
    scale: float
    sibling: str
    features: Features
    complete: bool


class Call(Generic[R]):
    """One call. Its arguments are attributes, those that are left out by their defaults here, and never change.

    arrays : the positional arguments of the siblings' launch functions, and ``into`` their ``out``: set by ``arrange``,
    as is what the operation needs besides.
    """

    operation: ClassVar[str]
    returns: ClassVar[str] = "Any"
    operands: ClassVar[tuple[Operand, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()
    """The arguments besides ``out`` that a call writes, and what it writes of a collection."""
    paged_scales: ClassVar[tuple[str, ...]] = ()
    """The scales that may lie as the pages of a cache do."""

    scale: float | None = None
    return_lse: bool = False
    base2: bool = False
    out: Any = None
    batch_invariant: bool = False
    kv_layout: str = "NHD"
    backend: str = "auto"
    arch: Arch = "sm_90"
    arithmetic: Arithmetic = "float32"
    check: bool | None = None
    causal: bool | None = None
    max_seqlen_q: int | None = None
    traffic: Traffic | None = None

    plan: Plan
    launches: dict[Any, Any] | None
    arrays: tuple[Any, ...]
    into: Any = None
    features: Features = Features()
    dropped: int | None = None
    """The axis of results which siblings have and the caller does not."""
    base2_by_siblings: ClassVar[bool] = False
    """True where siblings take ``base2``."""
    out_may_be: ClassVar[str] = ""
    """The operand that ``out`` may be, element for element."""

    def __init__(self, **arguments: Any) -> None:
        vars(self).update(arguments)
        self.arguments = arguments

    def run(self) -> R:
        """The results. Raises, before anything is written, for arguments that are not right."""
        if RECORDERS:
            for recorder in RECORDERS[-1:]:  # another thread may have removed it
                kept: R = recorder.keep(self)
                return kept
        self.planned()
        return self.results(*self.launch())

    def planned(self) -> Self:
        """The call itself, checked, arranged and with its plan."""
        decisive = self.decisive()
        if decisive is None:
            kind: Kind[Plan] = Kind(self.prepare(), None)
        else:
            kind = kind_of((type(self), *self.arguments), decisive, self.prepare)
        self.launches = kind.launches
        if vars(self).get("plan") is not kind.plan:  # another call was the first of the kind
            self.plan = kind.plan
            self.arrange()
        if self.out is not None:
            self.check_memory()
        self.look(self.arrays[0])
        return self

    def explained(self) -> Explanation:
        """The explanation of a planned call."""
        return self.plan.explanation

    def prepare(self) -> Plan:
        """Checks and plan, which depend on no address and no value."""
        vars(self).pop("plan", None)
        operands = self.given_operands()
        sizes = check_declared(self.operands, operands)
        self.check_arguments(sizes)
        if self.out is not None:
            self.check_out()
        check_laid_out(self.operands, operands)
        scale = self.checked_scale()
        self.arrange()
        explanation, problem, backend = self.choose(scale)
        check_arithmetic(explanation, self.arithmetic)
        complete = not self.features.arrays
        kept = self.features if complete else self.features.without_arrays()
        sibling = SIBLINGS.get(backend, f"{backend}:launch")
        sibling = sibling if sibling.startswith("kvlab.") else f"kvlab.attention.{self.operation}.{sibling}"
        self.plan = Plan(explanation, problem, scale, sibling, kept, complete)
        return self.plan

    # What is an operation's own

    def decisive(self) -> tuple[Any, ...] | None:
        """The arguments that checks and plan depend on; None where values of arrays decide, too."""
        return tuple(self.arguments.values())

    def check_arguments(self, sizes: Sizes) -> None:
        """Check operands together. ``sizes``: those named in their ``axes``."""

    def check_out(self) -> None:
        """Check ``out``, which is given."""
        check_result(self.out, self.result_shape(), self.arguments["q"])

    def result_shape(self) -> tuple[int, ...]:
        """The shape of ``out``: that of q, with the columns of V."""
        v = self.arguments["v_cache" if "v_cache" in self.arguments else "v"]
        return *self.arguments["q"].shape[:-1], columns_of(v)

    def default_scale(self) -> float:
        """The scale of scores where none is given."""
        second = self.arguments.get("qv")
        return 1 / math.sqrt(self.arguments["q"].shape[-1] + (0 if second is None else second.shape[-1]))

    def arrange(self) -> None:
        """Set ``arrays``, ``into``, ``features`` and ``dropped``."""
        raise NotImplementedError

    def is_causal(self, mask: Any, window: Any) -> bool:
        """True where a query sees no key behind its own."""
        return mask is None if self.causal is None else bool(self.causal)

    def choose(self, scale: float) -> tuple[Explanation, Any, str]:
        """Choose: an explanation, the problem's sizes, and the backend that runs, "hopper_emulator" among them, or the
        module of another operation.
        """
        raise NotImplementedError

    def check_values(self) -> None:
        """Check the values of the operands."""

    def named(self) -> dict[str, Any]:
        """The named arguments of the siblings' launch functions."""
        config = self.plan.explanation.config
        return {"scale": self.plan.scale, "config": config, "features": self.features, "out": self.into}

    # What is the same for all

    def given_operands(self) -> dict[str, Any]:
        """Operands that are given, pages as "NHD"."""
        found = {}
        for operand in self.operands:
            array = self.arguments.get(operand.name)
            if array is not None or not operand.optional:
                found[operand.name] = kv_view(array, self.kv_layout) if operand.paged else array
        return found

    def checked_scale(self) -> float:
        """The scale as a float32 holds it; and what no operation uses but counts or accepts."""
        check_traffic(self.traffic)
        if "mask_value" in self.arguments:
            value = self.arguments["mask_value"]
            finite_number(value, "mask_value", "less than infinity, in float32", lowest=-math.inf)
        return finite_number(self.default_scale() if self.scale is None else self.scale, "scale", "finite in float32")

    def resolve(self, q: Any, k: Any, v: Any, *, batch: int, lengths: Callable[[], tuple[Any, Any]]) -> Features:
        """The features that are asked for. ``lengths()``: new tokens and keys of each sequence, in CPU memory."""
        plan: Plan | None = vars(self).get("plan")
        if plan is not None and plan.complete:
            return plan.features
        asked = {name: value for name, value in self.arguments.items() if name in FEATURES}
        for name in self.paged_scales if self.kv_layout == "HND" else ():
            if is_scaled(k):
                check_layout_of_scale(name, asked.get(name), self.arguments.get(f"{name[0]}_cache"))
            asked |= {name: kv_view(asked[name], "HND")} if name in asked else {}
        return self.resolved(q, k, v, asked, batch=batch, lengths=lengths)

    def resolved(self, q: Any, k: Any, v: Any, asked: dict[str, Any], *, batch: int, lengths: Any) -> Features:
        """The features of the keywords ``asked``."""
        mask, window = asked.pop("mask", None), asked.pop("window", None)
        plan: Plan | None = vars(self).get("plan")
        if plan is not None:
            return plan.features.with_arrays(q, k, v, asked)
        leftpad, positions = asked.pop("leftpad_k", None), asked.pop("q_positions", None)
        check_of_sequences("leftpad_k", leftpad, q, batch)
        check_positions(positions, q)
        positions = positions_of_rows(positions, q)
        interval = window_interval(self.is_causal(mask, window), window)

        def places() -> tuple[Any, ...]:
            new, keys = lengths()
            keys = keys if leftpad is None else np.maximum(keys - np.maximum(host(leftpad), 0), 0)
            return (new, keys) if positions is None else (new, keys, positions_of_sequences(positions, new))

        sight = resolve_mask(mask, interval, heads=int(q.shape[-2]), lengths=places, like=q)
        sight = replace(sight, leftpad=leftpad, positions=positions)
        return resolve_features(q, k, v, mask=sight, batch=batch, **asked)

    def look(self, array: Any) -> None:
        """Check values, unless the caller says no or ``array`` is on a GPU, which would wait for it."""
        if looks_at_values(self.check, array):
            check_padding(self.arguments.get("leftpad_k"))
            check_far(self.arguments.get("q_positions"))
            self.check_values()

    def check_memory(self) -> None:
        """ValueError for an ``out`` over another argument."""
        arrays = {n: a for n, a in self.arguments.items() if n != "out" and (isinstance(a, np.ndarray) or is_torch(a))}
        check_apart(self.out, arrays, unless=self.out_may_be)

    def launch(self) -> tuple[Any, ...]:
        """Call the sibling that the plan names: results of its own, or ``into`` and an lse."""
        plan, named = self.plan, self.named()
        explanation = plan.explanation
        if explanation.backend in ("triton", "hopper"):
            return run_kernel(plan.sibling, *self.arrays, again=self.launches, **named)
        if explanation.backend == "reference":
            return run_on_numpy(self.refer, *self.arrays, **named)
        with chip.arithmetic(self.arithmetic):
            more = given(arch=explanation.arch, traffic=self.traffic)
            return run_on_numpy(function_at(plan.sibling), *self.arrays, **named, **more)

    def refer(self, *arrays: Any, out: Any, **named: Any) -> tuple[Any, ...]:
        """The reference, rounded to the dtypes of the operation."""
        reference = function_at(self.plan.sibling)
        known = {name: named[name] for name in ("scale", "features", "row_scales") if name in named}
        exact, lse = reference(*arrays, **known)
        base2 = self.base2 and self.base2_by_siblings
        return rounded(exact, lse / math.log(2) if base2 else lse, result_dtype(arrays[0]), out)

    def results(self, *found: Any) -> R:
        """The caller's results, of those that a sibling ``found``."""
        (result, lse), axis = found, self.dropped
        answer: Any = self.out if self.out is not None else result if axis is None else drop_axis(result, axis)
        if self.return_lse:
            lse = lse if axis is None else drop_axis(lse, axis)
            answer = answer, in_base(lse, self.base2 and not self.base2_by_siblings)
        return answer
